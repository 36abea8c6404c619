"""A private search for the server's learning rate in short runs, at a stated part of the budget.

Each candidate rate trains a short run of its own from the first model, with all clients. Before a
client trains, it also says which share of its examples the model gets right. Update and share are
one vector, so that each short run releases both by one matrix mechanism. The score of a candidate
is the mean of the noisy shares over the second half of its rounds. The result is the candidate with
the largest value of a parabola that is fitted to scores over logarithms of rates: neighbours are
alike, and the noise of one score decides little.

*Budget.* The run and J short runs are Gaussian mechanisms with noise multipliers z_r and z_c, and
compose to one of z with z^-2 = z_r^-2 + J z_c^-2 (``clip_search``). With a share s of z^-2, z_c is
z (J / s)^(1/2) and z_r is z / (1 - s)^(1/2): 10 % cost the run 5.4 % more noise.

In the mean of a round, short runs of J rates and T rounds have the noise of the run if s is about
J T over the run's rounds. With a smaller share they have more noise, which suits smaller rates, and
fewer rounds suit larger ones.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mf_aggregators import adaptive_clip, clip_search, factorizations
from mf_aggregators.aggregator import Aggregator, in_structure, named_leaves
from mf_aggregators.kernel import numbers
from mf_aggregators.mechanism import Mechanism

# The rounds of each candidate, and the share of the budget of all of them, by default.
ROUNDS, SHARE = 40, 0.1
# The norm of a share of examples, at most, in clip norms of updates: these get 5 % more noise.
_WEIGHT = 1.0 / 3.0


class _Found(NamedTuple):
    """The result of a search: functions of released numbers.

    Attributes:
      rate: The candidate to train with.
      scores: The mean of the noisy shares of examples that were right, for each candidate.
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
    """Returns the mechanism of each candidate's short run: as many as the share pays for.

    Args:
      run: That of the run, of clients that keep to a schema, with the noise of
        ``clip_search.noise_of_run`` for this share, or for the sum of it and of other shares.
      noise_multiplier: That of the guarantee of everything together; above 0.
      num_candidates: How many rates are tried.
      share: The part of all candidates together of z^-2; above 0 and below 1.
      num_rounds: The rounds of each candidate, at least 10.

    Returns:
      Equal mechanisms, with Toeplitz noise. A client that keeps to the schema of the run in each
      short run has the guarantee of ``noise_multiplier``.

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
    updates_of: Callable[[int, int, Any], Iterable[tuple[Any, float]]],
    step: Callable[[Any, Any, float], Any],
    first: Any,
    *,
    clip_norm: float,
    clients_per_round: float,
) -> _Found:
    """Trains a short run with each rate, and finds the one to go on with.

    A search that is cut off is spent: what follows it is another one, to be accounted for besides.

    Args:
      search: The mechanisms of :func:`of_run`, whose participation clients have to keep to in each
        short run.
      rates: The candidates, increasing: one for each mechanism.
      updates_of: Called with the number of a candidate, the round, both from 0, and the server's
        state; returns for each client of the round's cohort its update, a structure of float32 or
        float64 arrays, and the share of its examples, from 0 to 1, that the model got right before.
      step: Called with the server's state, the noisy mean of the updates and a rate; returns the
        next state.
      first: The server's state before the first round: the model, and what its optimizer keeps.
      clip_norm: The L2 norm to which updates are clipped.
      clients_per_round: The divisor of sums, fixed in advance: the cohort size.

    Returns:
      The rate, and the scores that it was found by.

    Raises:
      TypeError: If updates are of another type.
      ValueError: If there are more or fewer rates than mechanisms, one is not above 0 or the one
        before, or a number is out of its range.
    """
    tried = [numbers.positive_number(rate, "rate") for rate in rates]
    if not tried or any(a >= b for a, b in itertools.pairwise(tried)):
        raise ValueError("a search needs a rate, and each further rate must be larger.")
    if len(tried) != len(search):
        # Each short run costs its part of the budget.
        raise ValueError(
            f"a search needs a rate for each of {len(search)} short runs, found {len(tried)}."
        )
    numbers.positive_number(clip_norm, "clip_norm")
    each_run = search[0]
    late, norm = each_run.num_rounds // 2, math.hypot(1.0, _WEIGHT)

    def vector(update: Any, share: float) -> list[Any]:
        """The clipped update over the clip norm, and the share from its middle."""
        clipped, _ = adaptive_clip.clip_with_indicator(
            [leaf for _, leaf in named_leaves(update)], clip_norm
        )
        centred = 2.0 * min(max(share, 0.0), 1.0) - 1.0
        return [in_structure(update, clipped), np.array(_WEIGHT * centred)]

    scores = []
    for candidate, rate in enumerate(tried):
        aggregator = Aggregator(each_run, norm, clients_per_round)
        state, server, shares = aggregator.initialize(), first, list[float]()
        for number in range(each_run.num_rounds):
            cohort = updates_of(candidate, number, server)
            state, (mean, share) = aggregator.next(state, (vector(*each) for each in cohort))
            shares.append(0.5 + float(share) / (2.0 * _WEIGHT))
            leaves = [clip_norm * leaf for _, leaf in named_leaves(mean)]
            server = step(server, in_structure(mean, leaves), rate)
        scores.append(float(np.mean(shares[late:])))
    of_z = np.mean(each_run.factorization.noising_matrix()[late:], axis=0)
    of_sums = each_run.sigma * norm * float(np.linalg.norm(of_z))
    noise = of_sums / (2.0 * _WEIGHT * clients_per_round)
    logarithms = np.log(tried)
    curve = np.polyfit(logarithms, scores, min(2, len(tried) - 1))
    return _Found(tried[int(np.argmax(np.polyval(curve, logarithms)))], tuple(scores), noise)
