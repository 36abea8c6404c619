"""Epsilon and noise of runs whose clients draw for themselves when to take part.

For secret coins under timers and for balls in bins the guarantee depends on C itself, and not on
its column norms alone: a client's rounds are hidden among neighbouring ones, and the nearer the
columns of these are to one another, the less of it is hidden. An epsilon is a proved claim
(``certificates``), or the one without amplification where that is smaller.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from mf_aggregators.accounting import (
    certificate_store,
    certificates,
    claim_search,
    column_bands,
    gaussian,
    noise_failure,
    tilted_outputs,
)
from mf_aggregators.accounting.certificates import Claim, MechanismBudget
from mf_aggregators.accounting.noise_failure import DEFAULT_NUM_COORDINATES, TailError
from mf_aggregators.accounting.tilted_outputs import Mechanism, TiltedOutputs
from mf_aggregators.noise.rows_of_z import STEP

if TYPE_CHECKING:
    from mf_aggregators.participation.separated import SeparatedScheme

# With less noise nothing is claimed to be amplified.
LEAST_NOISE_MULTIPLIER = 0.1
# With more, an attacker guesses, whatever the sampling.
_LARGEST_NOISE_MULTIPLIER = 1e8
# Steps of Z by which the rounding of a row may move one of its numbers: 1 and twice what floats
# err by, which ``privacy.amplification_conditions`` checks. The theorem of ``participation_laws``
# has shifts of sum |C_ij| in row i. Rounding adds to those of rows within b of a participation
# alone, a vector of at most sqrt(d) times so many steps: as if all entries of the bands were
# larger by that.
LARGEST_ROUNDING = 4.0
# For the rates of an attacker: at which epsilons the divergence is bounded, by how many samples.
_EPSILONS = tuple(0.25 * step for step in range(41))
_SAMPLES_OF_DIVERGENCES, _FAILURE_OF_DIVERGENCES = 2**15, 1e-9
# The first step from a noise multiplier whose epsilon is above its target.
_RELATIVE_STEP = 2e-3
# Of one that is searched for alone, half of the mechanisms that the failure probability is shared
# by: its guarantee is another. With fewer than this the search begins with more noise.
_MOST_TRIES, _TRIES_OF_SMALL_STEPS = certificates.MECHANISMS // 2, 5


@dataclasses.dataclass(frozen=True)
class Certification:
    """How claims are proved.

    Attributes:
      seed: What all random numbers follow from. Choose it before anything is known of its
        result.
      max_samples: The most samples of a claim; as many as take minutes by default.
      directory: Where claims are kept, to be proved again; None for nowhere.
      show_progress: Whether to show progress bars on standard error.
      budget: The mechanisms that may be tested. Give one and the same to all calls whose results
        one is chosen from; None has each call make a result of its own.
    """

    seed: int = 0
    max_samples: int | None = None
    directory: pathlib.Path | None = None
    show_progress: bool = False
    budget: MechanismBudget | None = None


@dataclasses.dataclass(frozen=True)
class Amplified:
    """An epsilon, and what proves it.

    Attributes:
      epsilon: Of the run, for noise as it is drawn.
      claim: The proved claim; None where nothing is amplified.
    """

    epsilon: float
    claim: Claim | None


def mechanism_of(
    scheme: "SeparatedScheme",
    columns: np.ndarray | None,
    sigma: float,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> Mechanism:
    """Returns the mechanism that claims are about, with what the rounding of rows adds to C.

    Args:
      scheme: How clients take part.
      columns: (n, b), as ``column_bands`` has them, of the scheme's rounds and at most its bands;
        None for a diagonal C of equal entries, if the scheme is for one band.
      sigma: The noise multiplier, relative to the largest column norm of C.
      num_coordinates: As in ``gaussian.epsilon``.

    Raises:
      ValueError: If columns are missing or do not fit the scheme.
    """
    if columns is None:
        if scheme.num_bands > 1:
            raise ValueError(
                f"{scheme.name} needs the strategy matrix: its guarantee depends on all entries "
                f"of the {scheme.num_bands} bands. Give strategy_matrix=."
            )
        columns = np.ones((scheme.num_rounds, 1))
    if columns.shape[0] != scheme.num_rounds or columns.shape[1] > scheme.num_bands:
        raise ValueError(
            f"the strategy matrix has {columns.shape[0]} rounds and {columns.shape[1]} bands, and "
            f"the scheme is for {scheme.num_rounds} and {scheme.num_bands}."
        )
    rounding = sigma * LARGEST_ROUNDING * STEP
    rounding *= math.sqrt(num_coordinates / scheme.num_rounds)
    rows = np.arange(columns.shape[0])[:, None] + np.arange(columns.shape[1])
    normalised = column_bands.normalised(columns)
    rounded = np.where(rows < columns.shape[0], normalised + rounding, 0.0)
    return Mechanism(rounded, sigma, scheme.law())


def log_moments(
    scheme: "SeparatedScheme",
    sigma: float,
    columns: np.ndarray | None,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> tuple[tuple[int, float], ...]:
    """Returns log E_Q (P/Q)^a of the dominating pair, exactly, for some orders a.

    Args:
      scheme: How clients take part.
      sigma: The noise multiplier, relative to the largest column norm of C.
      columns: As :func:`mechanism_of` takes them.
      num_coordinates: As in ``gaussian.epsilon``.

    Returns:
      Pairs of an order, at least 2, and its log-moment; none for less noise than is amplified, or
      for so much that nothing can be told from it anyway.

    Raises:
      ValueError: As :func:`mechanism_of` does.
    """
    if not LEAST_NOISE_MULTIPLIER <= sigma <= _LARGEST_NOISE_MULTIPLIER:
        return ()
    mechanism = mechanism_of(scheme, columns, sigma, num_coordinates)
    return tuple(
        (order, TiltedOutputs(mechanism, order).log_moment)
        for order in tilted_outputs.possible_orders(mechanism)
        if order >= 2
    )


def divergences(
    scheme: "SeparatedScheme",
    sigma: float,
    columns: np.ndarray | None,
    seed: int = 0,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> tuple[tuple[float, float], ...]:
    """Returns upper bounds on the hockey-stick divergence of P from Q at small epsilons.

    ``certificates.divergences`` has the method; the bounds hold but for a probability of 1e-9,
    which is added to each.

    Args:
      scheme: How clients take part.
      sigma: The noise multiplier, relative to the largest column norm of C.
      columns: As :func:`mechanism_of` takes them.
      seed: What all random numbers follow from.
      num_coordinates: As in ``gaussian.epsilon``.

    Returns:
      Pairs of an epsilon and a bound; none where :func:`log_moments` has none.

    Raises:
      ValueError: As :func:`mechanism_of` does.
    """
    if not LEAST_NOISE_MULTIPLIER <= sigma <= _LARGEST_NOISE_MULTIPLIER:
        return ()
    shape = None if columns is None else columns.shape
    values = b"" if columns is None else np.ascontiguousarray(columns, np.float64).tobytes()
    return _divergences(scheme, sigma, values, shape, seed, num_coordinates)


# Statements ask for the same bounds again and again.
@functools.lru_cache(maxsize=8)
def _divergences(
    scheme: "SeparatedScheme",
    sigma: float,
    values: bytes,
    shape: tuple[int, ...] | None,
    seed: int,
    num_coordinates: int,
) -> tuple[tuple[float, float], ...]:
    columns = None if shape is None else np.frombuffer(values).reshape(shape)
    return certificates.divergences(
        mechanism_of(scheme, columns, sigma, num_coordinates),
        _EPSILONS,
        num_samples=_SAMPLES_OF_DIVERGENCES,
        failure=_FAILURE_OF_DIVERGENCES,
        seed=seed,
    )


def amplified(
    scheme: "SeparatedScheme",
    sigma: float,
    delta: float,
    columns: np.ndarray | None,
    certification: Certification,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> Amplified:
    """Returns the epsilon of a run, and its proof.

    Args:
      scheme: How clients take part.
      sigma: The noise multiplier, relative to the largest column norm of C.
      delta: Above 0 and below 1.
      columns: As :func:`mechanism_of` takes them.
      certification: How claims are proved; it takes one mechanism of a budget.
      num_coordinates: As in ``gaussian.epsilon``.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If an argument is out of its range, or columns do not fit the scheme.
    """
    unamplified, refused = math.inf, None
    try:
        unamplified = gaussian.epsilon(
            sigma / math.sqrt(scheme.most_participations()),
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=scheme.most_participations(),
        )
    except TailError as error:
        refused = error
    mechanism = mechanism_of(scheme, columns, max(sigma, LEAST_NOISE_MULTIPLIER), num_coordinates)
    claim = None
    if unamplified > 0.0 and sigma >= LEAST_NOISE_MULTIPLIER:
        try:
            left = noise_failure.delta_left(delta, sigma, num_coordinates)
            claim = _claim(mechanism, left, unamplified, certification)
        except TailError as error:
            refused = error
    if claim is not None:
        return Amplified(claim.epsilon, claim)
    if refused is not None and math.isinf(unamplified):
        raise refused
    return Amplified(unamplified, None)


def noise_multiplier(
    scheme: "SeparatedScheme",
    target: float,
    delta: float,
    columns: np.ndarray | None,
    certification: Certification,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float:
    """Returns a noise multiplier whose certified epsilon is at most a target.

    Args:
      scheme: How clients take part.
      target: The epsilon, above 0.
      delta: Above 0 and below 1.
      columns: As :func:`mechanism_of` takes them.
      certification: How claims are proved.
      num_coordinates: As in ``gaussian.epsilon``.

    Returns:
      The noise multiplier; what suffices without amplification where none below it was proved by
      as many mechanisms as may be tested: 8, or what is left of the budget.

    Raises:
      ValueError: As :func:`amplified` does, and if no noise multiplier gives the target.
    """
    budget = certification.budget
    if budget is None:
        budget = MechanismBudget(_MOST_TRIES)
        certification = dataclasses.replace(certification, budget=budget)
    enough = _enough(scheme, target, delta, num_coordinates)
    found = estimated_noise_multiplier(
        scheme, target, delta, columns, certification, num_coordinates
    )
    step = _RELATIVE_STEP
    for _ in range(_TRIES_OF_SMALL_STEPS - budget.left):
        found, step = found * (1.0 + step), 2.0 * step
    while budget.left > 0 and found < enough:
        left = budget.left
        try:
            epsilon = amplified(
                scheme, found, delta, columns, certification, num_coordinates
            ).epsilon
        except TailError:
            epsilon = math.inf
        if epsilon <= target:
            return found
        if budget.left == left:
            # Nothing was tested of it, and nothing will be.
            budget.take()
        found = min(found * (1.0 + step), enough)
        step *= 2.0
    return enough


def estimated_noise_multiplier(
    scheme: "SeparatedScheme",
    target: float,
    delta: float,
    columns: np.ndarray | None,
    certification: Certification,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    *,
    is_rough: bool = False,
) -> float:
    """Returns about what :func:`noise_multiplier` does, in less time and without a proof.

    No guarantee may be stated of it. Arguments are those of :func:`noise_multiplier`, and
    ``is_rough`` for an error of a few per cent in even less time.
    """
    enough = _enough(scheme, target, delta, num_coordinates)
    mechanism_of(scheme, columns, enough)
    try:
        left = noise_failure.delta_left(delta, enough, num_coordinates)
    except TailError:
        return enough
    if enough <= LEAST_NOISE_MULTIPLIER:
        return enough
    return claim_search.estimated_noise_multiplier(
        lambda sigma: mechanism_of(scheme, columns, sigma, num_coordinates),
        target,
        left,
        enough,
        LEAST_NOISE_MULTIPLIER,
        seed=certification.seed,
        max_samples=certification.max_samples,
        relative_tolerance=3e-3 if is_rough else 1e-3,
        pilot_samples=2**12 if is_rough else 2**13,
    )


def _enough(scheme: "SeparatedScheme", target: float, delta: float, num_coordinates: int) -> float:
    """What suffices without amplification."""
    alone = gaussian.noise_multiplier(
        target,
        delta,
        num_coordinates=num_coordinates,
        disjoint_participations=scheme.most_participations(),
    )
    return alone * math.sqrt(scheme.most_participations())


def _claim(
    mechanism: Mechanism, delta: float, below: float, certification: Certification
) -> Claim | None:
    if certification.budget is not None:
        certification.budget.take()
    columns = np.ascontiguousarray(mechanism.columns, dtype="<f8")
    description = {
        "columns": hashlib.sha256(columns.tobytes()).hexdigest(),
        "shape": list(columns.shape),
        "sigma": mechanism.sigma,
        "law": [type(mechanism.law).__name__, dataclasses.asdict(mechanism.law)],
        "delta": delta,
        "below": None if math.isinf(below) else below,
        "seed": certification.seed,
        "max_samples": certification.max_samples,
    }
    # What the store holds was read from JSON.
    description = json.loads(json.dumps(description))  # noqa: TID251
    return certificate_store.fetch(
        certification.directory,
        description,
        lambda: claim_search.proved_claim(
            mechanism,
            delta,
            below=below,
            seed=certification.seed,
            max_samples=certification.max_samples,
            show_progress=certification.show_progress,
        ),
        lambda claim: (
            claim_search.could_be_found(
                mechanism,
                claim,
                delta,
                below=below,
                seed=certification.seed,
                max_samples=certification.max_samples,
            )
            and certificates.is_proved(mechanism, claim, show_progress=certification.show_progress)
        ),
    )
