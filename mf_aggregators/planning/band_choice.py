"""How many bands: the trade between amplification and correlated noise (BandMF Sec. 5).

Fewer bands leave more clients for each batch to be drawn from, and so need less noise for
one guarantee; more bands make noise that cancels better. The squared error of b bands is
sigma(b)^2 L(b), with the noise multiplier that the sampling scheme of b parts needs, and the
error L(b) of the best matrix of b bands with equal column norms.
"""

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

from mf_aggregators import factorizations as mechanisms
from mf_aggregators import validation, workloads
from mf_aggregators.accounting.noise_failure import DEFAULT_NUM_COORDINATES
from mf_aggregators.catalogue.built_in import RELATIVE_GAP_OF_PLANS
from mf_aggregators.checkpoints import factorization_cache
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    SamplingScheme,
    SingleParticipation,
    sampling_scheme,
)
from mf_aggregators.participation.monte_carlo import store
from mf_aggregators.participation.monte_carlo.certificates import (
    MECHANISMS,
    Certification,
    MechanismBudget,
)
from mf_aggregators.privacy import amplification_conditions
from mf_aggregators.progress_bars import ProgressBar

# The certified gap of squared errors that are compared: 0.05 % of an error. Solvers stop at
# much less on average, and reach their own default in twice the time.
RELATIVE_GAP = RELATIVE_GAP_OF_PLANS


@dataclasses.dataclass(frozen=True)
class BandChoice:
    """One number of bands, and what it costs.

    Attributes:
      num_bands: b.
      noise_multiplier: sigma(b), relative to the column norm of C.
      rmse: The root mean square error over rounds at noise multiplier and column norm 1.
      effective_rmse: rmse times sigma(b) over the clients per round (BandMF Eq. 11).
    """

    num_bands: int
    noise_multiplier: float
    rmse: float
    effective_rmse: float


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... up to ``largest``, and ``largest`` itself.

    Args:
      largest: At least 1.
    """
    return sorted({2**i for i in range(largest.bit_length())} | {largest})


def most_bands(num_rounds: int, population: int, clients_per_round: int) -> int:
    """Returns the most bands that sampling allows: n, or m / B, where nothing is amplified.

    Args:
      num_rounds: n.
      population: m.
      clients_per_round: B.

    Returns:
      The number of bands.

    Raises:
      ValueError: If the population is smaller than one batch.
    """
    sampling_scheme(
        "poisson",
        num_rounds=num_rounds,
        num_bands=1,
        population=population,
        clients_per_round=clients_per_round,
    )
    return min(num_rounds, population // clients_per_round)


def compare(
    epsilon: float,
    delta: float,
    *,
    num_rounds: int,
    population: int,
    clients_per_round: int,
    sampling: str = "poisson",
    candidates: Sequence[int] | None = None,
    cache_directory: pathlib.Path | None = None,
    show_progress: bool = False,
) -> tuple[BandChoice, ...]:
    """Computes what each number of bands costs at a privacy target, for the prefix sum.

    Args:
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      num_rounds: The rounds n.
      population: The clients (or examples) m.
      clients_per_round: The batch size B, at most m.
      sampling: The name of a sampling scheme; those without parts have their default
        separation.
      candidates: The numbers of bands; powers of two and the largest possible one by
        default, ``range(1, most_bands(...) + 1)`` for all.
      cache_directory: Where factorizations are kept between calls; None for nowhere.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A choice for each candidate, in their order.

    Raises:
      ValueError: If an argument is out of its range, a candidate is not possible, or there are
        more than 15 for a scheme without parts: what is chosen of them is one result, and delta
        pays for Monte Carlo tests of 16 mechanisms, of which its guarantee is one.
    """
    largest = most_bands(num_rounds, population, clients_per_round)
    chosen = powers_of_two(largest) if candidates is None else list(candidates)
    schemes = [
        sampling_scheme(
            sampling,
            num_rounds=num_rounds,
            num_bands=num_bands,
            population=population,
            clients_per_round=clients_per_round,
        )
        for num_bands in chosen
    ]
    budgets = _budgets(schemes)
    choices = []
    for scheme in ProgressBar(schemes, desc="bands", disable=not show_progress):
        matrix = banded_matrix(num_rounds, scheme.num_bands, cache_directory)
        multiplier = noise_multiplier(
            scheme, epsilon, delta, cache_directory, matrix, budget=budgets.popleft()
        )
        workload = workloads.describe({"name": "prefix_sum"}, num_rounds)
        rmse = matrix.rmse(workload, SingleParticipation())
        choices.append(
            BandChoice(scheme.num_bands, multiplier, rmse, multiplier * rmse / clients_per_round)
        )
    return tuple(choices)


def _budgets(
    schemes: Sequence[SamplingScheme],
) -> collections.deque[MechanismBudget | None]:
    """What of one budget each scheme may test."""
    if not any(scheme.depends_on_matrix for scheme in schemes):
        return collections.deque([None] * len(schemes))
    # One is left for the guarantee of what is chosen.
    budget = MechanismBudget(MECHANISMS - 1)
    each = min(budget.left // len(schemes), MECHANISMS // 2)
    if each < 1:
        raise ValueError(
            f"candidates must be at most {budget.left} for sampling by {schemes[0].name}, where "
            f"each takes Monte Carlo tests that delta pays for, found {len(schemes)}: compare "
            "fewer at a time."
        )
    return collections.deque(budget.take(each) for _ in schemes)


def best(choices: Sequence[BandChoice]) -> BandChoice:
    """Returns the choice of least error, with the fewest bands among equals.

    Args:
      choices: At least one.

    Returns:
      The choice.

    Raises:
      ValueError: If there is none.
    """
    if not choices:
        raise ValueError("there is no number of bands to choose from.")
    return min(choices, key=lambda choice: (choice.effective_rmse, choice.num_bands))


def noise_multiplier(
    scheme: SamplingScheme,
    epsilon: float,
    delta: float,
    cache_directory: pathlib.Path | None,
    matrix: Factorization | None = None,
    *,
    is_estimate: bool = False,
    budget: MechanismBudget | None = None,
) -> float:
    """Returns the least noise multiplier that gives a run (epsilon, delta)-DP.

    Args:
      scheme: How clients take part.
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      cache_directory: Where it is kept between calls; None for nowhere.
      matrix: What makes the noise. Only schemes without parts depend on it.
      is_estimate: For schemes without parts, whether to return a rough estimate, of which no
        guarantee may be stated, in the place of a certified number.
      budget: Of schemes without parts, the mechanisms that may be tested: a part of what the
        result has that this is used for, and all of it counts as tested; None where this is the
        result.

    Returns:
      The noise multiplier, relative to the largest column norm of C.

    Raises:
      ValueError: If an argument is out of its range.
    """
    description: dict[str, Any] = {
        "mechanism": "noise-multiplier",
        **scheme.to_dict(),
        "epsilon": epsilon,
        "delta": delta,
        "accounting": store.ACCOUNTING_VERSION,
    }
    columns, certification = None, Certification()
    if scheme.depends_on_matrix:
        if matrix is not None:
            columns = amplification_conditions.columns_of(matrix, scheme)
        if columns is not None:
            description["columns"] = hashlib.sha256(columns.tobytes()).hexdigest()
        description["is_estimate"] = is_estimate
        certification = dataclasses.replace(certification_in(cache_directory), budget=budget)
        if budget is not None:
            description["mechanisms"] = budget.left

    def compute() -> float:
        if scheme.depends_on_matrix and is_estimate:
            return scheme.estimated(epsilon, delta, columns, certification)
        target = validation.positive_number(epsilon, "epsilon")
        return scheme.calibrated(target, delta, columns, certification, DEFAULT_NUM_COORDINATES)

    return factorization_cache.fetch_number(cache_directory, description, compute)


def certification_in(cache_directory: pathlib.Path | None) -> Certification:
    """Returns how the noise multipliers of plans are proved.

    Args:
      cache_directory: Where certificates are kept between calls; None for nowhere.
    """
    if cache_directory == factorization_cache.default_directory():
        # Where guarantees look for the certificate as well.
        return Certification(directory=store.default_directory())
    return Certification(directory=cache_directory)


def banded_matrix(
    num_rounds: int, num_bands: int, cache_directory: pathlib.Path | None
) -> Factorization:
    """Returns the banded factorization of least error for the prefix sum, of equal column norms.

    It is the same for all schemas of at least as large a separation. Its squared error is
    certified to be within ``RELATIVE_GAP`` of the smallest.

    Args:
      num_rounds: n.
      num_bands: b, 1 to n.
      cache_directory: Where it is kept between calls; None for nowhere.

    Returns:
      The factorization.
    """
    if num_bands == 1:
        return mechanisms.identity(num_rounds)
    return factorization_cache.fetch(
        cache_directory,
        _description(num_rounds, num_bands),
        lambda: mechanisms.banded(
            workloads.prefix_sum(num_rounds), num_bands, relative_gap=RELATIVE_GAP
        ),
    )


def is_kept(num_rounds: int, num_bands: int, cache_directory: pathlib.Path | None) -> bool:
    """Returns whether :func:`banded_matrix` finds its matrix in the cache.

    Args:
      num_rounds: The number of rounds n.
      num_bands: The number of bands b.
      cache_directory: Where factorizations are kept; None for nowhere.
    """
    return factorization_cache.holds(cache_directory, _description(num_rounds, num_bands))


def _description(num_rounds: int, num_bands: int) -> dict[str, Any]:
    return {
        "mechanism": "banded",
        "num_rounds": num_rounds,
        "num_bands": num_bands,
        "relative_gap": RELATIVE_GAP,
    }
