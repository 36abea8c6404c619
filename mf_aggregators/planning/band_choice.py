"""How many bands: the trade between amplification and correlated noise (BandMF Sec. 5).

Fewer bands leave more clients for each batch to be drawn from, and so need less noise for
one guarantee; more bands make noise that cancels better. The squared error of b bands is
sigma(b)^2 L(b), with the noise multiplier that the sampling scheme of b groups needs, and the
mean error L(b) of the best matrix of b bands with equal column norms. A plan compares numbers of
bands by other errors, too.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

from mf_aggregators import factorizations as mechanisms
from mf_aggregators import workloads
from mf_aggregators.catalogue import RELATIVE_GAP_OF_PLANS, Variant
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel.certificate import MECHANISMS
from mf_aggregators.participation import (
    SamplingScheme,
    SingleParticipation,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import MechanismBudget
from mf_aggregators.planning import plans, proposals
from mf_aggregators.progress_bars import ProgressBar

# The certified gap of squared errors that are compared: 0.05 % of an error. Solvers stop at
# much less on average, and reach their own default in twice the time.
RELATIVE_GAP = RELATIVE_GAP_OF_PLANS


@dataclasses.dataclass(frozen=True)
class BandChoice:
    """A number of bands, with its noise and its error.

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
    """Computes the error of each number of bands at a privacy target, for the prefix sum.

    Args:
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      num_rounds: The rounds n.
      population: The clients (or examples) m.
      clients_per_round: The batch size B, at most m.
      sampling: The name of a sampling scheme; those without groups have their default
        separation.
      candidates: The numbers of bands; powers of two and the largest possible one by
        default, ``range(1, most_bands(...) + 1)`` for all.
      cache_directory: Where factorizations are cached between calls; None for nowhere.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A choice for each candidate, in their order.

    Raises:
      ValueError: If an argument is out of its range, a candidate is not possible, or there are
        more than 15 for a scheme without groups: what is chosen of them is one result, and delta
        pays for Monte Carlo tests of 16 mechanisms, of which its guarantee is one.
    """
    largest = plans.most_bands(num_rounds, population, clients_per_round)
    chosen = plans.powers_of_two(largest) if candidates is None else list(candidates)
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
        mechanism = proposals.calibrated(
            matrix, scheme, epsilon, delta, cache_directory, budget=budgets.popleft()
        )
        multiplier = mechanism.noise_multiplier
        workload = workloads.describe({"name": "prefix_sum"}, num_rounds)
        rmse = matrix.rmse(workload, SingleParticipation())
        choices.append(
            BandChoice(scheme.num_bands, multiplier, rmse, multiplier * rmse / clients_per_round)
        )
    return tuple(choices)


def _budgets(
    schemes: Sequence[SamplingScheme],
) -> collections.deque[MechanismBudget | None]:
    """The share of one budget of tests that each scheme may use."""
    if all(scheme.has_groups for scheme in schemes):
        return collections.deque([None] * len(schemes))
    # One test is left for the guarantee of the choice.
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


def banded_matrix(
    num_rounds: int, num_bands: int, cache_directory: pathlib.Path | None
) -> Factorization:
    """Returns the banded factorization of least error for the prefix sum, of equal column norms.

    It is the same for all schemas of at least as large a separation. Its squared error is
    certified to be within ``RELATIVE_GAP`` of the smallest.

    Args:
      num_rounds: n.
      num_bands: b, 1 to n.
      cache_directory: Where it is cached between calls; None for nowhere.

    Returns:
      The factorization.
    """
    if num_bands == 1:
        return mechanisms.identity(num_rounds)
    options = {"num_bands": num_bands, "relative_gap": RELATIVE_GAP}
    variant = Variant("banded", options, depends_on_schema=False)
    return proposals.computed(variant, num_rounds, cache_directory)
