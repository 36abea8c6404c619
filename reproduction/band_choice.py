"""How many bands: the trade between amplification and correlated noise (BandMF Sec. 5).

Fewer bands leave more clients for each batch to be drawn from, and so need less noise for
one guarantee; more bands make noise that cancels better. The squared error of b bands is
sigma(b)^2 L(b), with the noise multiplier that Poisson sampling in b groups needs, and the
mean error L(b) of the best matrix of b bands with equal column norms.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from mf_aggregators import factorizations
from mf_aggregators.catalogue import RELATIVE_GAP_OF_PLANS, Variant
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import PoissonSampling, SingleParticipation
from mf_aggregators.planning import planner
from mf_aggregators.workloads import Workload


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
    candidates: Sequence[int],
    cache_directory: pathlib.Path | None = None,
) -> tuple[BandChoice, ...]:
    """Computes the error of each number of bands at a privacy target, for the prefix sum.

    Args:
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      num_rounds: The rounds n.
      population: The clients (or examples) m.
      clients_per_round: The batch size B, at most m.
      candidates: The numbers of bands.
      cache_directory: Where factorizations are cached between calls; None for nowhere.

    Returns:
      A choice for each candidate, in their order.

    Raises:
      ValueError: If an argument is out of its range, or a candidate is not possible.
    """
    choices = []
    for num_bands in candidates:
        scheme = PoissonSampling(num_rounds, num_bands, population, clients_per_round)
        matrix = banded_matrix(num_rounds, num_bands, cache_directory)
        mechanism = planner.calibrated(matrix, scheme, epsilon, delta, cache_directory)
        noise = mechanism.noise_multiplier
        rmse = matrix.rmse(Workload("prefix_sum", num_rounds), SingleParticipation())
        choices.append(BandChoice(num_bands, noise, rmse, noise * rmse / clients_per_round))
    return tuple(choices)


def best(choices: Sequence[BandChoice]) -> BandChoice:
    """Returns the choice of least error, with the fewest bands among equals.

    Args:
      choices: At least one.

    Raises:
      ValueError: If there is none.
    """
    return min(choices, key=lambda choice: (choice.effective_rmse, choice.num_bands))


def banded_matrix(
    num_rounds: int, num_bands: int, cache_directory: pathlib.Path | None
) -> Factorization:
    """Returns the banded factorization of least error for the prefix sum, of equal column norms.

    It is the same for all schemas of at least as large a separation. Its squared error is
    certified to be within ``catalogue.RELATIVE_GAP_OF_PLANS`` of the smallest: 0.05 % of an error.

    Args:
      num_rounds: n.
      num_bands: b, 1 to n.
      cache_directory: Where it is cached between calls; None for nowhere.
    """
    if num_bands == 1:
        return factorizations.identity(num_rounds)
    options = {"num_bands": num_bands, "relative_gap": RELATIVE_GAP_OF_PLANS}
    variant = Variant("banded", options, depends_on_schema=False)
    return planner.computed(variant, num_rounds, cache_directory)
