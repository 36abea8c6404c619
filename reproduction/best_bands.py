"""BandMF (Choquette-Choo et al.), Table 3: the best number of bands with amplification."""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from mf_aggregators import planning
from mf_aggregators.factorizations import identity
from mf_aggregators.participation import SamplingScheme, SingleParticipation, sampling_scheme
from mf_aggregators.progress_bars import ProgressBar
from reproduction import band_choice
from reproduction.band_choice import BandChoice
from reproduction.banded_errors import PAPER
from reproduction.experiment import Data, Drawing, Experiment, Outcome, Row, Workspace, prefix_sum

DELTA = 1e-6
EPSILONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)
EPOCHS = tuple(2**i for i in range(11))
# A batch; only its share of the population counts, which follows from the epochs.
CLIENTS_PER_ROUND = 64
NUM_ROUNDS = 1024
# From this number of searches on, starting processes for them saves time.
_WORTH_PROCESSES = 20
# Errors that differ by less are decided by the last digits of an accountant.
_NEAR_TIE = 5e-3
# Table 3: the best number of bands by epsilon (rows) and epochs 1, 2, 4, ..., 1024.
_BANDS = {
    1 / 32: (2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    1 / 16: (4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    1 / 8: (8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1),
    1 / 4: (8, 4, 4, 2, 1, 1, 1, 1, 1, 1, 1),
    1 / 2: (16, 8, 4, 4, 2, 1, 1, 1, 1, 1, 1),
    1.0: (32, 16, 8, 4, 2, 2, 1, 1, 1, 1, 1),
    2.0: (64, 32, 16, 8, 4, 2, 2, 1, 1, 1, 1),
    4.0: (128, 64, 32, 16, 8, 4, 2, 2, 1, 1, 1),
    8.0: (1024, 512, 256, 32, 16, 8, 4, 2, 2, 1, 1),
    16.0: (1024, 512, 256, 128, 64, 32, 8, 4, 4, 2, 1),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One privacy target and number of epochs.

    Attributes:
      epsilon: The privacy target, at delta 1e-6.
      epochs: k.
      choices: What each power of two of bands costs, amplified; one band is DP-SGD.
    """

    epsilon: float
    epochs: int
    choices: tuple[BandChoice, ...]

    @property
    def best(self) -> BandChoice:
        """The number of bands of least error."""
        return band_choice.best(self.choices)

    @property
    def independent_noise(self) -> float:
        """The error of DP-SGD, amplified, times the clients per round."""
        (one,) = (choice for choice in self.choices if choice.num_bands == 1)
        return one.effective_rmse * CLIENTS_PER_ROUND


def cells(
    workspace: Workspace, epsilons: Sequence[float], epochs: Sequence[int], num_rounds: int
) -> list[Cell]:
    """Computes the error of each number of bands, for all pairs of targets and epochs.

    Args:
      workspace: Where factorizations and noise multipliers are cached.
      epsilons: Privacy targets at delta 1e-6.
      epochs: Numbers of epochs k, divisors of n.
      num_rounds: n.

    Returns:
      A cell for each pair, by target and then by epochs.
    """
    most = num_rounds // min(epochs)
    errors = {}
    for num_bands in ProgressBar(
        planning.powers_of_two(most), desc="matrices", disable=not workspace.show_progress
    ):
        matrix = band_choice.banded_matrix(num_rounds, num_bands, workspace.cache_directory)
        errors[num_bands] = matrix.rmse(prefix_sum(num_rounds), SingleParticipation())
    found = []
    targets = [
        (epsilon, k, num_bands)
        for epsilon in epsilons
        for k in epochs
        for num_bands in planning.powers_of_two(num_rounds // k)
    ]
    multipliers = noise_multipliers(
        workspace,
        [
            (_scheme(num_rounds, num_bands, num_rounds * CLIENTS_PER_ROUND // k), epsilon, DELTA)
            for epsilon, k, num_bands in targets
        ],
    )
    for epsilon, k in itertools.product(epsilons, epochs):
        choices = tuple(
            BandChoice(
                target[2],
                multiplier,
                errors[target[2]],
                multiplier * errors[target[2]] / CLIENTS_PER_ROUND,
            )
            for target, multiplier in zip(targets, multipliers, strict=True)
            if target[:2] == (epsilon, k)
        )
        found.append(Cell(epsilon, k, choices))
    return found


def _scheme(num_rounds: int, num_bands: int, population: int) -> SamplingScheme:
    return sampling_scheme(
        "poisson",
        num_rounds=num_rounds,
        num_bands=num_bands,
        population=population,
        clients_per_round=CLIENTS_PER_ROUND,
    )


def noise_multipliers(
    workspace: Workspace, targets: Sequence[tuple[SamplingScheme, float, float]]
) -> list[float]:
    """Returns noise multipliers, computed on all processors.

    Args:
      workspace: Where they are cached.
      targets: Schemes with epsilon and delta.

    Returns:
      One for each.
    """
    compute = functools.partial(_noise_multiplier, workspace.cache_directory)
    progress = functools.partial(
        ProgressBar,
        total=len(targets),
        desc="noise multipliers",
        disable=not workspace.show_progress,
    )
    if len(targets) < _WORTH_PROCESSES:
        return list(progress(map(compute, targets)))
    # Threads of a linear-algebra library do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return list(progress(pool.map(compute, targets)))


def _noise_multiplier(
    cache_directory: pathlib.Path | None, target: tuple[SamplingScheme, float, float]
) -> float:
    # If clients are sampled from groups, the noise multiplier depends on no entry of the matrix.
    scheme, epsilon, delta = target
    matrix = identity(scheme.num_rounds)
    return planning.calibrated(matrix, scheme, epsilon, delta, cache_directory).noise_multiplier


def table(workspace: Workspace) -> Outcome:
    """Computes Table 3, the best number of bands.

    Args:
      workspace: Where factorizations and noise multipliers are cached.

    Returns:
      A row for each of its 110 cells.
    """
    found = cells(workspace, EPSILONS, EPOCHS, NUM_ROUNDS)
    rows = []
    for cell in found:
        printed = _BANDS[cell.epsilon][EPOCHS.index(cell.epochs)]
        rows.append(
            Row(
                f"epsilon {cell.epsilon:g}, {cell.epochs} epochs",
                "best number of bands",
                str(printed),
                float(cell.best.num_bands),
                _how_close(cell, printed),
            )
        )
    grid = np.array([cell.best.num_bands for cell in found]).reshape(len(EPSILONS), -1)
    return Outcome(tuple(rows), Drawing("best bands", {**axes_of_grids(), "bands": grid.tolist()}))


def axes_of_grids() -> Data:
    """Returns the data besides the cells for a figure of privacy targets by epochs."""
    return {
        "num_rounds": NUM_ROUNDS,
        "delta": DELTA,
        "epsilons": list(EPSILONS),
        "epochs": list(EPOCHS),
    }


def _how_close(cell: Cell, printed: int) -> str | None:
    for choice in cell.choices:
        if choice.num_bands == printed:
            more = choice.effective_rmse / cell.best.effective_rmse - 1.0
            kind = "a near tie" if more < _NEAR_TIE else "not explained"
            return (
                f"{kind}: the printed number has an error {100.0 * more:.3f} % larger by our "
                "accounting"
            )
    return None


EXPERIMENTS = (
    Experiment(
        "bandmf-table-3",
        f"{PAPER}, Table 3",
        "Best number of bands by epsilon and epochs, n = 1024",
        table,
    ),
)
