"""A private search for the server's learning rate, by short runs with a share of the budget.

Each candidate rate trains its own short run from the initial model, with all clients. Before a
client trains, it also tells the share of its examples that the model gets right. Update and share
are one vector, so each short run releases both by one matrix mechanism. The score of a candidate is
the mean of the noisy shares over the second half of its rounds. A parabola is fitted to scores over
logarithms of rates, and the result is the candidate with its largest value. So the noise of a
single score has little influence.

*Budget.* The run and J short runs are Gaussian mechanisms with noise multipliers z_r and z_c, and
compose to one of z with z^-2 = z_r^-2 + J z_c^-2 (``clip_search``). With a share s of z^-2, z_c is
z (J / s)^(1/2) and z_r is z / (1 - s)^(1/2): 10 % cost the run 5.4 % more noise.

Short runs of J rates and T rounds have about the noise of the run in each round's mean if s is
about J T divided by the run's rounds. With a smaller share they have more noise, which favours
smaller rates; fewer rounds favour larger rates.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from mf_aggregators import adaptive_clip, clip_search, factorizations
from mf_aggregators.aggregator import Aggregator, in_structure, named_leaves
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.mechanism import Mechanism

# The default number of rounds of each candidate, and the default share of the budget for all
# candidates.
ROUNDS, SHARE = 40, 0.1
# The largest norm of a client's share of right examples, in clip norms; updates get 5 % more noise
# for it.
_WEIGHT = 1.0 / 3.0
# The state of a server, and an update: a structure of arrays.
_State = TypeVar("_State")
_Update = TypeVar("_Update")


class _Found(NamedTuple):
    """The result of a search, which depends only on released numbers.

    Attributes:
      rate: The best candidate.
      scores: For each candidate, the mean of the noisy shares of examples that the model got right.
      stddev: The standard deviation of the noise in a score.
    """

    rate: float
    scores: tuple[float, ...]
    stddev: float


def of_run(
    run: Mechanism,
    noise_multiplier: float,
    num_candidates: int,
    share: float = SHARE,
    num_rounds: int = ROUNDS,
) -> tuple[Mechanism, ...]:
    """Returns the mechanisms of the short runs, one for each candidate.

    Args:
      run: The mechanism of the run, whose clients keep to a schema, with the noise multiplier of
        ``clip_search.noise_of_run`` for this share (plus the shares of other searches).
      noise_multiplier: The noise multiplier of the guarantee of run and searches together; above 0.
      num_candidates: The number of rates that are tried.
      share: The share of z^-2 for all candidates together; above 0 and below 1.
      num_rounds: The rounds of each candidate, at least 10.

    Returns:
      Equal mechanisms, with Toeplitz matrices. A client that keeps to the run's schema in the run
      and in each short run has the guarantee of ``noise_multiplier`` for all together.

    Raises:
      ValueError: If a number is out of its range, the run has too little noise, or its clients are
        sampled.
    """
    candidates = numbers.positive_integer(num_candidates, "num_candidates")
    clip_search.of_run(run, noise_multiplier, share, num_rounds)
    alone = clip_search.of_run(run, noise_multiplier, share / candidates, num_rounds)
    schema = alone.participation
    bands = schema.separation_in(alone.num_rounds)
    made = factorizations.toeplitz(alone.num_rounds, num_bands=bands, participation=schema)
    return (Mechanism(made, schema, alone.noise_multiplier),) * candidates


def find(
    search: Sequence[Mechanism],
    rates: Sequence[float],
    updates_of: Callable[[int, int, _State], Iterable[tuple[_Update, float]]],
    step: Callable[[_State, _Update, float], _State],
    first: _State,
    *,
    clip_norm: float,
    clients_per_round: float,
) -> _Found:
    """Trains a short run with each rate, and returns the best rate.

    If a search is interrupted, its budget is spent: a further search has to be accounted for as
    well.

    Args:
      search: The mechanisms of :func:`of_run`, whose participation clients have to keep to in each
        short run.
      rates: The candidate rates, increasing, one for each mechanism.
      updates_of: Called with the number of a candidate, the round, both from 0, and the server's
        state; returns for each client of the round's cohort its update, a structure of float32 or
        float64 arrays, and the share of its examples, from 0 to 1, that the model got right before.
      step: Called with the server's state, the noisy mean of the updates and a rate; returns the
        next state.
      first: The server's state before the first round: the initial model, and the optimizer's
        state.
      clip_norm: The L2 norm to which updates are clipped.
      clients_per_round: The divisor of sums, fixed in advance: the cohort size.

    Returns:
      The best rate, and the scores of all candidates.

    Raises:
      TypeError: If updates are of another type.
      ValueError: If the numbers of rates and mechanisms differ, if rates are not positive and
        increasing, or if a number is out of its range.
    """
    tried = [numbers.positive_number(rate, "rate") for rate in rates]
    if not tried or any(a >= b for a, b in itertools.pairwise(tried)):
        raise ValueError("a search needs at least one rate, in increasing order.")
    if len(tried) != len(search):
        # Each short run uses its part of the budget, so none may be left out.
        raise ValueError(
            f"a search needs a rate for each of {len(search)} short runs, found {len(tried)}."
        )
    numbers.positive_number(clip_norm, "clip_norm")
    each_run = search[0]
    late, norm = each_run.num_rounds // 2, math.hypot(1.0, _WEIGHT)

    def vector(update: _Update, share: float) -> tuple[_Update, FloatArray]:
        """The clipped update divided by the clip norm, and the share relative to one half."""
        clipped, _ = adaptive_clip.clip_with_indicator(
            [np.asarray(leaf) for _, leaf in named_leaves(update)], clip_norm
        )
        centred = 2.0 * min(max(share, 0.0), 1.0) - 1.0
        return in_structure(update, clipped), np.array(_WEIGHT * centred)

    scores = []
    for candidate, rate in enumerate(tried):
        aggregator = Aggregator(each_run, norm, clients_per_round)
        state, server, shares = aggregator.initialize(), first, list[float]()
        for number in range(each_run.num_rounds):
            cohort = updates_of(candidate, number, server)
            state, (mean, share) = aggregator.next(state, (vector(*each) for each in cohort))
            shares.append(0.5 + float(share) / (2.0 * _WEIGHT))
            leaves = [clip_norm * np.asarray(leaf) for _, leaf in named_leaves(mean)]
            server = step(server, in_structure(mean, leaves), rate)
        scores.append(float(np.mean(shares[late:])))
    of_z = np.mean(each_run.factorization.noising_matrix()[late:], axis=0)
    of_sums = each_run.sigma * norm * float(np.linalg.norm(of_z))
    noise = of_sums / (2.0 * _WEIGHT * clients_per_round)
    logarithms = np.log(tried)
    curve = np.polyfit(logarithms, scores, min(2, len(tried) - 1))
    return _Found(tried[int(np.argmax(np.polyval(curve, logarithms)))], tuple(scores), noise)
