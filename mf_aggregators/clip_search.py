"""A private search for the clip norm, in a few rounds before a run, with a share of its budget.

In round t of the search, each client tells only whether the norm of its update is at most c_t, by
an indicator of 1/2 or -1/2. The noisy sum of a round moves the norm as ``AdaptiveClip`` does, by
e^(1/2) at most, and by half of that in the last six rounds: from ten times too small or too large,
the norm comes near the median of norms in five rounds or a few more. If most norms are nearly
equal, the norm then jumps above the median and back. So the result is the geometric mean of the
last six norms, which is computed from released numbers and costs no further privacy.

*Budget.* Search and run are Gaussian mechanisms with noise multipliers z_s and z_r. For a client of
both, they are together one Gaussian mechanism of noise multiplier z with z^-2 = z_s^-2 + z_r^-2. If
the search gets a share s of the budget z^-2, z_s is z / s^(1/2) and z_r is z / (1 - s)^(1/2), so
that a share of 2 % costs the run 1.0 % more noise. The search uses independent noise, because a
client takes part only once if participations are further apart than the search has rounds.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mf_aggregators import factorizations
from mf_aggregators.adaptive_clip import INDICATOR_WITHIN, AdaptiveClip
from mf_aggregators.aggregator import Aggregator
from mf_aggregators.kernel import numbers
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import MinSeparation

# The default number of rounds of a search, and its default share of the budget.
ROUNDS, SHARE = 15, 0.02
_FEWEST_ROUNDS = 10
# An even number, so that jumps over the median and back cancel.
_AVERAGED = 6
# Learning rates of the logarithm of the norm, before the rounds that are averaged and in them.
_RATES = (1.0, 0.5)
# Noise multipliers are enlarged by this factor, so that the composed epsilon of search and run,
# with its own rounding and a failure probability for each, is not above the target for deltas of at
# least 1e-10.
_SLACK = 1.0 + 1e-5


class _Found(NamedTuple):
    """The result of a search, which depends only on released numbers.

    Attributes:
      clip_norm: The estimated median of the norms of updates.
      norms: The clip norm of each round, and the one after the last round.
      fractions: The noisy fraction of each round's clients that were within its norm.
    """

    clip_norm: float
    norms: tuple[float, ...]
    fractions: tuple[float, ...]


def noise_of_run(noise_multiplier: float, share: float = SHARE) -> float:
    """Returns the noise multiplier of a run before which a search takes place.

    Use it when you make the mechanism of a run whose clip norm a search will find.

    Args:
      noise_multiplier: z, the noise multiplier of the guarantee of search and run together; above
        0.
      share: The share of z^-2 (and so of rho) for the search; above 0 and below 1.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.clip_search.noise_of_run(1.0, share=0.02), 4)
      1.0102
    """
    whole = _SLACK * numbers.positive_number(noise_multiplier, "noise_multiplier")
    return whole / math.sqrt(1.0 - _checked(share))


def of_run(
    run: Mechanism, noise_multiplier: float, share: float = SHARE, num_rounds: int = ROUNDS
) -> Mechanism:
    """Returns the mechanism of a search before a run.

    Use it when the mechanism of the run is made.

    Args:
      run: The mechanism of the run, whose clients keep to a schema, with the noise multiplier of
        :func:`noise_of_run`.
      noise_multiplier: As for :func:`noise_of_run`.
      share: As for :func:`noise_of_run`.
      num_rounds: The rounds of the search, at least 10.

    Returns:
      The search's mechanism. A client that keeps to the run's schema both in the search and in the
      run has the guarantee of ``noise_multiplier`` for both together.

    Raises:
      ValueError: If a number is out of its range, the run has less noise than :func:`noise_of_run`,
        or its clients are sampled.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=20)
      >>> noise = mfa.clip_search.noise_of_run(1.0)
      >>> run = mfa.Mechanism(mfa.factorizations.banded(100, 20), timers, noise)
      >>> print(mfa.clip_search.of_run(run, 1.0))
      identity factorization for 15 rounds, noise multiplier 7.071
      at most 1 participations at least 15 rounds apart
    """
    rounds = numbers.positive_integer(num_rounds, "num_rounds")
    if rounds < _FEWEST_ROUNDS:
        raise ValueError(f"a search needs at least {_FEWEST_ROUNDS} rounds, found {rounds}.")
    if run.sampling is not None:
        raise ValueError(
            f"a search needs clients that keep to a schema, found {run.sampling.name} sampling: "
            "for two sampled runs, use accounting.composed_epsilon."
        )
    needed = noise_of_run(noise_multiplier, share)
    if run.noise_multiplier < needed:
        raise ValueError(
            f"beside a search, the run needs a noise multiplier of at least {needed!r} "
            f"(noise_of_run), found {run.noise_multiplier!r}."
        )
    separation = min(run.noise_reference.separation_in(run.num_rounds), rounds)
    most = min(run.noise_reference.most_participations(run.num_rounds), -(-rounds // separation))
    noise = _SLACK * noise_multiplier / math.sqrt(share)
    return Mechanism(factorizations.identity(rounds), MinSeparation(separation, most), noise)


def _checked(share: float) -> float:
    if numbers.positive_number(share, "share") >= 1.0:
        raise ValueError(f"share must be below 1, found {share:g}.")
    return share


def find(
    search: Mechanism,
    norms_of: Callable[[int, float], Iterable[float]],
    *,
    clients_per_round: float,
    initial_norm: float = 1.0,
) -> _Found:
    """Searches for the median of the norms of clients' updates.

    Use it when the norms of updates are not known, before the first round of a run.

    If a search is interrupted, its budget is spent: a further search has to be accounted for as
    well.

    Args:
      search: The mechanism of :func:`of_run`, whose participation clients have to keep to.
      norms_of: Called in each round with its number, from 0, and its clip norm; returns the L2 norm
        of the update of each client of the round's cohort, at the first model. NaN and infinity
        count as beyond the norm.
      clients_per_round: The divisor of sums, fixed in advance: the cohort size.
      initial_norm: The clip norm of the first round. From up to ten times off either way, 15 rounds
        of 100 clients end within a fifth of the median.

    Returns:
      The clip norm for the run, and the numbers from which it follows.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=20)
      >>> noise = mfa.clip_search.noise_of_run(1.0)
      >>> run = mfa.Mechanism(mfa.factorizations.banded(100, 20), timers, noise)
      >>> search = mfa.clip_search.of_run(run, 1.0)
      >>> norms = [0.1 + 0.001 * client for client in range(500)]
      >>> found = mfa.clip_search.find(search, lambda number, norm: norms, clients_per_round=500)
      >>> 0.2 < found.clip_norm < 0.6
      True
    """
    wide, narrow = (
        AdaptiveClip(initial_norm, learning_rate=rate, update_period=1) for rate in _RATES
    )
    aggregator = Aggregator(
        search,
        clip_norm=INDICATOR_WITHIN,
        clients_per_round=clients_per_round,
        template=np.zeros(1),
    )
    state, clip = aggregator.initialize(), wide.first_state
    norms, fractions = [clip.norm], []
    for number in range(search.num_rounds):
        indicators = [
            np.array([INDICATOR_WITHIN if norm <= clip.norm else -INDICATOR_WITHIN])
            for norm in norms_of(number, clip.norm)
        ]
        state, mean = aggregator.next(state, indicators)
        fractions.append(INDICATOR_WITHIN + float(mean[0]))
        is_late = number >= search.num_rounds - _AVERAGED
        clip = (narrow if is_late else wide).following(clip, fractions[-1])
        norms.append(clip.norm)
    last = np.log(norms[-_AVERAGED:])
    return _Found(float(np.exp(np.mean(last))), tuple(norms), tuple(fractions))
