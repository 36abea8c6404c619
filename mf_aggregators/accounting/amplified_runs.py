"""Privacy accounting of runs whose clients take part at random, and of several runs together.

The noise multiplier of ``amplified_*`` is relative to the largest column norm of a banded C, which
is the sensitivity under one participation (BandMF Cor. F.1). Devices that decide themselves when
to take part, without a secret coin, are never amplified.

With a ``strategy_matrix=``, the entries of C are taken to be larger by what integer rows are
rounded by, up to ``random_participation.LARGEST_ROUNDING`` steps. ``guarantees.sampled`` checks
that of a factorization, whose noise is known, and refuses one whose rows are rounded by more.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from dp_accounting import dp_event as dp_events
from dp_accounting.pld import pld_privacy_accountant

from mf_aggregators.accounting import (
    amplification,
    column_bands,
    noise_failure,
    random_participation,
    trade_offs,
)
from mf_aggregators.accounting.noise_failure import DEFAULT_NUM_COORDINATES
from mf_aggregators.accounting.random_participation import Certification
from mf_aggregators.participation import BallsInBins, MinSeparationSampling, sampling_scheme


def amplified_epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    sampling: str = "poisson",
    separation: int | None = None,
    strategy_matrix: Any = None,
    seed: int = 0,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float:
    """Returns the epsilon of a banded mechanism on sampled batches (BandMF Thm 4).

    Args:
      noise_multiplier: Standard deviation of Z over (clip norm times the largest column
        norm of C); zero means no noise.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients (or examples) m, at least B b.
      clients_per_round: The batch size B.
      sampling: ``poisson`` (Cor. F.1), ``fixed_size`` (Alg. 2), ``shuffling`` (Cor. F.2),
        ``min_separation`` (secret coins under timers) or ``balls_in_bins`` (one secret round
        of each cycle): how clients come into batches.
      separation: For the last two, the least distance of two participations of a client or
        the number of bins, as ``sampling_scheme`` has it.
      strategy_matrix: For the last two, (n, n), C; None for a diagonal one of equal entries,
        if ``num_bands`` is 1. The other schemes need no more than the number of bands.
      seed: For the last two, the seed of the Monte Carlo test that proves the epsilon, chosen
        before anything is known of its result.
      num_coordinates: Parameters times rounds, as in :func:`epsilon`.

    Returns:
      An epsilon >= 0 for which the run is (epsilon, delta)-DP; infinity without noise.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If an argument is out of its range, the bands do not fit the rounds, or
        the population is too small for the batches.
    """
    scheme = sampling_scheme(
        sampling,
        num_rounds=num_rounds,
        num_bands=num_bands,
        population=population,
        clients_per_round=clients_per_round,
        separation=separation,
    )
    return amplification.epsilon(
        scheme,
        noise_multiplier,
        delta,
        num_coordinates=num_coordinates,
        columns=_columns(strategy_matrix, num_bands),
        certification=Certification(seed=seed),
    )


def amplified_noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    sampling: str = "poisson",
    separation: int | None = None,
    strategy_matrix: Any = None,
    seed: int = 0,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float:
    """Returns the least noise multiplier for a target, the inverse of amplified_epsilon.

    Args:
      epsilon: Above 0.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients (or examples) m, at least B b.
      clients_per_round: The batch size B.
      sampling: As in :func:`amplified_epsilon`.
      separation: As there.
      strategy_matrix: As there.
      seed: As there.
      num_coordinates: As there.

    Returns:
      The noise multiplier, relative to the largest column norm of C.

    Raises:
      ValueError: As :func:`amplified_epsilon` does.
    """
    scheme = sampling_scheme(
        sampling,
        num_rounds=num_rounds,
        num_bands=num_bands,
        population=population,
        clients_per_round=clients_per_round,
        separation=separation,
    )
    return amplification.noise_multiplier(
        scheme,
        epsilon,
        delta,
        num_coordinates=num_coordinates,
        columns=_columns(strategy_matrix, num_bands),
        certification=Certification(seed=seed),
    )


def amplified_true_positive_rate(
    noise_multiplier: float,
    false_positive_rate: float | np.ndarray,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    sampling: str = "poisson",
    separation: int | None = None,
    strategy_matrix: Any = None,
    guarantees: Sequence[tuple[float, float]] = (),
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float | np.ndarray:
    """Returns the highest true positive rate of an attacker who does not know the batches.

    ``trade_offs`` says what the attacker knows and decides, and why no test does better.

    Args:
      noise_multiplier: Relative to the largest column norm of C; zero means no noise.
      false_positive_rate: At which false positive rate, from 0 to 1; or an array of them.
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The batch size B.
      sampling: As in :func:`amplified_epsilon`.
      separation: As there.
      strategy_matrix: As there.
      guarantees: Pairs (epsilon, delta) that are known to hold, as further bounds.
      num_coordinates: As in :func:`amplified_epsilon`.

    Returns:
      The rate, of the shape of the argument; never above that without amplification.

    Raises:
      TailError: If so little noise cannot be accounted for: a ValueError.
      ValueError: As :func:`amplified_epsilon` does.
    """
    scheme = sampling_scheme(
        sampling,
        num_rounds=num_rounds,
        num_bands=num_bands,
        population=population,
        clients_per_round=clients_per_round,
        separation=separation,
    )
    log_moments: Sequence[tuple[int, float]] = ()
    divergences: Sequence[tuple[float, float]] = ()
    if isinstance(scheme, MinSeparationSampling | BallsInBins):
        columns = _columns(strategy_matrix, num_bands)
        log_moments = random_participation.log_moments(
            scheme, noise_multiplier, columns, num_coordinates
        )
        divergences = random_participation.divergences(
            scheme, noise_multiplier, columns, num_coordinates=num_coordinates
        )
    return trade_offs.sampled_true_positive_rate(
        scheme,
        noise_multiplier,
        false_positive_rate,
        guarantees=guarantees,
        log_moments=log_moments,
        divergences=divergences,
        num_coordinates=num_coordinates,
    )


def amplified_event(
    noise_multiplier: float,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    sampling: str = "poisson",
    separation: int | None = None,
) -> dp_events.DpEvent:
    """Returns a run on sampled batches as an event of dp-accounting, to be composed with others.

    Args:
      noise_multiplier: Relative to the largest column norm of C.
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The batch size B.
      sampling: As in :func:`amplified_epsilon`.
      separation: As there.

    Returns:
      The event; ``mf_aggregators.accounting.amplification.event`` says for which neighbouring
      relation it is.

    Raises:
      ValueError: As :func:`amplified_epsilon` does.
    """
    scheme = sampling_scheme(
        sampling,
        num_rounds=num_rounds,
        num_bands=num_bands,
        population=population,
        clients_per_round=clients_per_round,
        separation=separation,
    )
    return amplification.event(scheme, noise_multiplier)


def _columns(strategy_matrix: Any, num_bands: int) -> np.ndarray | None:
    return None if strategy_matrix is None else column_bands.of_matrix(strategy_matrix, num_bands)


def composed_epsilon(
    events: Iterable[dp_events.DpEvent],
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float:
    """Returns the epsilon of several runs together, for clients who may be in all of them.

    Args:
      events: What :func:`event` and :func:`amplified_event` returned, or any other event
        that dp-accounting's privacy loss distributions know; all Gaussian ones are taken
        for ones whose noise is drawn here.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_coordinates: Parameters times rounds, of the largest run.

    Returns:
      The epsilon of the composition; infinity if one event has no noise.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If delta is out of its range, or an event cannot be composed so.
    """
    composed = dp_events.ComposedDpEvent(list(events))
    compositions = _compositions(composed)
    amplification.safe_delta(delta, compositions)
    if not pld_privacy_accountant.PLDAccountant().supports(composed):
        raise ValueError(
            f"{composed} cannot be composed by privacy loss distributions; compose such events "
            "with dp_accounting.rdp.RdpAccountant."
        )
    # Before losses are composed, which takes long for little noise.
    smallest = _smallest_noise_multiplier(composed)
    if smallest < math.inf:
        # Each part is compared with the whole of delta.
        delta = noise_failure.delta_left(delta, smallest, _runs(composed) * num_coordinates)
    delta -= amplification.composition_rounding(compositions)
    accountant = pld_privacy_accountant.PLDAccountant().compose(composed)
    return float(accountant.get_epsilon(delta))


def _smallest_noise_multiplier(event: dp_events.DpEvent) -> float:
    """Of the Gaussian events that have noise; infinity if there are none."""
    if isinstance(event, dp_events.ComposedDpEvent):
        return min(map(_smallest_noise_multiplier, event.events), default=math.inf)
    if isinstance(event, dp_events.SelfComposedDpEvent | dp_events.PoissonSampledDpEvent):
        return _smallest_noise_multiplier(event.event)
    if isinstance(event, dp_events.GaussianDpEvent) and event.noise_multiplier > 0.0:
        return float(event.noise_multiplier)
    return math.inf


def _runs(event: dp_events.DpEvent) -> int:
    """How many runs an event is of; the rounds of a sampled one are composed in a run."""
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum(map(_runs, event.events))
    if isinstance(event, dp_events.SelfComposedDpEvent):
        is_sampled = isinstance(event.event, dp_events.PoissonSampledDpEvent)
        return 1 if is_sampled else int(event.count) * _runs(event.event)
    return 1


def _compositions(event: dp_events.DpEvent) -> int:
    """How many mechanisms an event composes."""
    if isinstance(event, dp_events.SelfComposedDpEvent):
        return int(event.count) * _compositions(event.event)
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum(_compositions(each) for each in event.events)
    return 1
