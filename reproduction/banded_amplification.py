"""BandMF (Choquette-Choo et al.): errors with amplification, Table 3 and Figs. 4 and 9."""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pathlib
import warnings
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.colors
import numpy as np
import tqdm

from mf_aggregators import (
    accounting,
    band_choice,
    factorizations,
    sampling_schemes,
    workloads,
)
from mf_aggregators.band_choice import BandChoice
from mf_aggregators.participation import FixedEpochOrder, SingleParticipation
from mf_aggregators.sampling_schemes import SamplingScheme
from reproduction import figures, matrices
from reproduction.banded_errors import PAPER
from reproduction.experiment import Experiment, Outcome, Row, Workspace, prefix_sum

_DELTA = 1e-6
_EPSILONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)
_EPOCHS = tuple(2**i for i in range(11))
# A batch; only its share of the population counts, which follows from the epochs.
_CLIENTS_PER_ROUND = 64
_NUM_ROUNDS = 1024
# So many searches for a noise multiplier take longer than starting processes for them.
_WORTH_PROCESSES = 20
# A ratio that is almost one.
_ALMOST = 1.1
# Of a search for the optimum of returning clients: a minute at n = 1024.
_MOST_EVALUATIONS = 60
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
      epsilon: At delta 1e-6.
      epochs: k.
      choices: What powers of two of bands cost, amplified; of one band: DP-SGD.
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
        return one.effective_rmse * _CLIENTS_PER_ROUND


def cells(
    workspace: Workspace, epsilons: Sequence[float], epochs: Sequence[int], num_rounds: int
) -> list[Cell]:
    """Computes what numbers of bands cost, for all pairs of targets and epochs.

    Args:
      workspace: Where factorizations and noise multipliers are kept.
      epsilons: Privacy targets at delta 1e-6.
      epochs: Numbers of epochs k, divisors of n.
      num_rounds: n.

    Returns:
      A cell for each pair, by target and then by epochs.
    """
    most = num_rounds // min(epochs)
    errors = {}
    for num_bands in tqdm.tqdm(
        band_choice.powers_of_two(most), desc="matrices", disable=not workspace.show_progress
    ):
        matrix = band_choice.banded_matrix(num_rounds, num_bands, workspace.cache_directory)
        errors[num_bands] = matrix.rmse(prefix_sum(num_rounds), SingleParticipation())
    found = []
    targets = [
        (epsilon, k, num_bands)
        for epsilon in epsilons
        for k in epochs
        for num_bands in band_choice.powers_of_two(num_rounds // k)
    ]
    multipliers = noise_multipliers(
        workspace,
        [
            (_scheme(num_rounds, num_bands, num_rounds * _CLIENTS_PER_ROUND // k), epsilon, _DELTA)
            for epsilon, k, num_bands in targets
        ],
    )
    for epsilon, k in itertools.product(epsilons, epochs):
        choices = tuple(
            BandChoice(
                target[2],
                multiplier,
                errors[target[2]],
                multiplier * errors[target[2]] / _CLIENTS_PER_ROUND,
            )
            for target, multiplier in zip(targets, multipliers, strict=True)
            if target[:2] == (epsilon, k)
        )
        found.append(Cell(epsilon, k, choices))
    return found


def _scheme(num_rounds: int, num_bands: int, population: int) -> SamplingScheme:
    return sampling_schemes.create(
        "poisson",
        num_rounds=num_rounds,
        num_bands=num_bands,
        population=population,
        clients_per_round=_CLIENTS_PER_ROUND,
    )


def noise_multipliers(
    workspace: Workspace, targets: Sequence[tuple[SamplingScheme, float, float]]
) -> list[float]:
    """Returns noise multipliers, computed on all processors.

    Args:
      workspace: Where they are kept.
      targets: Schemes with epsilon and delta.

    Returns:
      One for each.
    """
    compute = functools.partial(_noise_multiplier, workspace.cache_directory)
    progress = functools.partial(
        tqdm.tqdm,
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
    return band_choice.noise_multiplier(*target, cache_directory)


def table(name: str, workspace: Workspace) -> Outcome:
    """Computes Table 3, the best number of bands.

    Args:
      name: The experiment's name.
      workspace: Where factorizations and noise multipliers are kept.

    Returns:
      A row for each of its 110 cells.
    """
    found = cells(workspace, _EPSILONS, _EPOCHS, _NUM_ROUNDS)
    rows = []
    for cell in found:
        printed = _BANDS[cell.epsilon][_EPOCHS.index(cell.epochs)]
        rows.append(
            Row(
                name,
                f"epsilon {cell.epsilon:g}, {cell.epochs} epochs",
                "best number of bands",
                str(printed),
                float(cell.best.num_bands),
                _how_close(cell, printed),
            )
        )
    figure, ((axes,),) = figures.panels(1, 1, (6.4, 4.6))
    grid = np.array([cell.best.num_bands for cell in found]).reshape(len(_EPSILONS), -1)
    image = axes.imshow(
        grid, norm=matplotlib.colors.LogNorm(1, _NUM_ROUNDS), cmap="viridis", aspect="auto"
    )
    _label(axes, _EPSILONS, _EPOCHS)
    for (row, column), bands in np.ndenumerate(grid):
        axes.text(column, row, str(bands), ha="center", va="center", color="white", fontsize=7)
    axes.set_title(f"Best number of bands, n = {_NUM_ROUNDS}, delta 1e-6")
    figure.colorbar(image, ax=axes)
    return Outcome(tuple(rows), figure)


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


def _label(axes: matplotlib.axes.Axes, epsilons: Sequence[float], epochs: Sequence[int]) -> None:
    axes.set_xticks(range(len(epochs)), [str(k) for k in epochs], fontsize="small")
    axes.set_yticks(range(len(epsilons)), [f"{epsilon:g}" for epsilon in epsilons])
    axes.set(xlabel="epochs", ylabel="epsilon")


@dataclasses.dataclass(frozen=True)
class MultiEpochErrors:
    """RMSE of multi-epoch MF at noise multiplier 1, by epochs.

    Attributes:
      by_epochs: The errors.
      uncertified: The epochs whose error may be above the optimum's by more than 0.5 %.
    """

    by_epochs: dict[int, float]
    uncertified: tuple[int, ...]

    @property
    def note(self) -> str:
        """What a reader has to know of them."""
        listed = ", ".join(map(str, self.uncertified))
        return (
            "Multi-epoch MF is the optimum under (k, n / k)-participation. For many epochs the "
            "search for it does not come near in the time that it has here, and the best matrix "
            "of n / k bands with free column norms, one of the same class, stands for it where it "
            f"is better. Errors that may be more than 0.5 % above the optimum's: k = {listed}."
            if self.uncertified
            else "All errors of multi-epoch MF are certified to be within 0.5 % of the optimum's."
        )


def multi_epoch_errors(
    workspace: Workspace, epochs: Sequence[int], num_rounds: int
) -> MultiEpochErrors:
    """Computes the errors of multi-epoch MF for each number of epochs.

    Args:
      workspace: Where factorizations are kept.
      epochs: Divisors of n.
      num_rounds: n.

    Returns:
      The errors.
    """
    workload = workloads.prefix_sum(num_rounds)
    errors, uncertified = {}, []
    for k in tqdm.tqdm(epochs, desc="multi-epoch", disable=not workspace.show_progress):
        if k == 1:
            best = matrices.optimum(workspace, workload)
            errors[k] = best.rmse(workload, SingleParticipation())
            continue
        schema = FixedEpochOrder(k, num_rounds // k)
        with warnings.catch_warnings():
            # What is not reached is said in the note.
            warnings.simplefilter("ignore", factorizations.NotConvergedWarning)
            best = matrices.optimum(workspace, workload, schema, max_evaluations=_MOST_EVALUATIONS)
        banded = matrices.banded(workspace, num_rounds, num_rounds // k, schema, False)
        errors[k] = min(best.rmse(workload, schema), banded.rmse(workload, schema))
        # Squared errors: the least possible one is at least this.
        least = best.rmse(workload, schema) ** 2 / (1.0 + (best.optimality_gap or 0.0))
        if errors[k] ** 2 > 1.01 * least and num_rounds // k > 1:
            uncertified.append(k)
    return MultiEpochErrors(errors, tuple(uncertified))


def ratios(name: str, against: str, workspace: Workspace) -> Outcome:
    """Computes Fig. 4 (a) or (b): RMSE of DP-SGD over that of another mechanism.

    Args:
      name: The experiment's name.
      against: ``multi-epoch MF``, without amplification, or ``BandMF``, with it.
      workspace: Where factorizations and noise multipliers are kept.

    Returns:
      The range of the ratios, and the figure.
    """
    found = cells(workspace, _EPSILONS, _EPOCHS, _NUM_ROUNDS)
    notes: tuple[str, ...]
    if against == "BandMF":
        others = [cell.best.effective_rmse * _CLIENTS_PER_ROUND for cell in found]
    else:
        errors = multi_epoch_errors(workspace, _EPOCHS, _NUM_ROUNDS)
        notes = (errors.note,)
        others = [
            errors.by_epochs[cell.epochs] * accounting.noise_multiplier(cell.epsilon, _DELTA)
            for cell in found
        ]
    grid = np.array(
        [cell.independent_noise / other for cell, other in zip(found, others, strict=True)]
    ).reshape(len(_EPSILONS), -1)
    where = f"n = {_NUM_ROUNDS}, all epsilons and epochs"
    smallest, largest = float(np.min(grid)), float(np.max(grid))
    if against == "BandMF":
        # One of the numbers of bands is one, so that the ratio cannot be below one.
        rows = [
            Row(name, where, "smallest ratio", None, smallest, "DP-SGD is among the choices"),
            Row(name, where, "largest ratio", None, largest),
        ]
        notes = (
            "Bands are powers of two up to n / k, as in Table 3. The caption of Fig. 9 lets one "
            "think that Fig. 4 (b) has more; the cells with more bands would be those in which "
            "multi-epoch MF is better.",
        )
    else:
        rows = [
            Row(
                name,
                where,
                "smallest ratio of the RMSE of DP-SGD over that of multi-epoch MF",
                None,
                smallest,
                claim="DP-SGD is better for some epsilons and epochs",
                holds=smallest < 1.0,
            ),
            Row(
                name,
                where,
                "largest ratio of the RMSE of DP-SGD over that of multi-epoch MF",
                None,
                largest,
                claim="multi-epoch MF is better for others",
                holds=largest > 1.0,
            ),
            Row(
                name,
                f"n = {_NUM_ROUNDS}, as many epochs as rounds, all epsilons",
                "largest ratio of the RMSE of DP-SGD over that of multi-epoch MF",
                None,
                float(np.max(grid[:, -1])),
                claim="both are almost the same, and MF is very slightly better",
                holds=bool(np.all((grid[:, -1] >= 1.0) & (grid[:, -1] <= _ALMOST))),
            ),
        ]
    figure, ((axes,),) = figures.panels(1, 1, (6.4, 4.6))
    reach = max(abs(np.log2(grid).min()), abs(np.log2(grid).max()))
    image = axes.imshow(np.log2(grid), cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
    for (row, column), ratio in np.ndenumerate(grid):
        axes.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=7)
    _label(axes, _EPSILONS, _EPOCHS)
    axes.set_title(f"RMSE of DP-SGD over {against}, n = {_NUM_ROUNDS}")
    figure.colorbar(image, ax=axes, label="log2 of the ratio")
    return Outcome(tuple(rows), figure, notes)


def by_epochs(name: str, workspace: Workspace) -> Outcome:
    """Computes Fig. 4 (c): RMSE by epochs at epsilon 1.

    Args:
      name: The experiment's name.
      workspace: Where factorizations and noise multipliers are kept.

    Returns:
      Whether all errors fall with epochs, and the figure.
    """
    found = cells(workspace, (1.0,), _EPOCHS, _NUM_ROUNDS)
    multiplier = accounting.noise_multiplier(1.0, _DELTA)
    errors = multi_epoch_errors(workspace, _EPOCHS, _NUM_ROUNDS)
    # By epochs at a fixed number of rounds, a batch is k / n of the data.
    shares = np.array(_EPOCHS) / _NUM_ROUNDS
    curves = {
        "DP-SGD, amplified": np.array([cell.independent_noise for cell in found]) / shares,
        "multi-epoch MF": np.array([errors.by_epochs[k] * multiplier for k in _EPOCHS]) / shares,
        "BandMF, amplified": np.array(
            [cell.best.effective_rmse * _CLIENTS_PER_ROUND for cell in found]
        )
        / shares,
    }
    rows = []
    for mechanism, values in curves.items():
        step = float(np.max(values[1:] / values[:-1]))
        rows.append(
            Row(
                name,
                mechanism,
                "largest ratio of RMSE of the mean from one number of epochs to the next",
                None,
                step,
                claim="RMSE gets better with epochs for every mechanism",
                holds=step <= 1.0,
            )
        )
    figure, ((axes,),) = figures.panels(1, 1)
    figures.lines(
        axes,
        {mechanism: (_EPOCHS, values) for mechanism, values in curves.items()},
        title=f"RMSE of the mean at epsilon 1, n = {_NUM_ROUNDS}",
        x="epochs",
        y="RMSE, relative to one example of all",
        marker="o",
        logarithmic="xy",
    )
    note = (
        "The paper does not say what its RMSE is relative to. Here it is that of means over a "
        "batch, k / n of the data: n is fixed, and batches grow with the epochs. The RMSE of sums "
        "grows."
    )
    return Outcome(tuple(rows), figure, (note, errors.note))


# CIFAR-10 as App. H has it: 20 epochs over 50,000 examples in batches of 500.
_CIFAR_ROUNDS, _CIFAR_EPOCHS, _CIFAR_EXAMPLES, _CIFAR_BATCH = 2000, 20, 50_000, 500
_CIFAR_DELTA = 1e-5
_CIFAR_BANDS = (1, 2, 4, 8, 16, 32, 64, 100)
_CIFAR_EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


def ratios_for_images(name: str, workspace: Workspace) -> Outcome:
    """Computes Fig. 9: RMSE of BandMF over DP-SGD's and multi-epoch MF's by epsilon.

    Args:
      name: The experiment's name.
      workspace: Where factorizations and noise multipliers are kept.

    Returns:
      Where BandMF is better, and the figure.
    """
    schema = FixedEpochOrder(_CIFAR_EPOCHS, _CIFAR_ROUNDS // _CIFAR_EPOCHS)
    workload = workloads.prefix_sum(_CIFAR_ROUNDS)
    multi_epoch = matrices.optimum(workspace, workload, schema).rmse(workload, schema)
    over_sgd, over_multi_epoch, bands = [], [], []
    targets = [
        (
            sampling_schemes.create(
                "poisson",
                num_rounds=_CIFAR_ROUNDS,
                num_bands=num_bands,
                population=_CIFAR_EXAMPLES,
                clients_per_round=_CIFAR_BATCH,
            ),
            epsilon,
            _CIFAR_DELTA,
        )
        for epsilon in _CIFAR_EPSILONS
        for num_bands in _CIFAR_BANDS
    ]
    # By epsilon and by bands.
    multipliers = np.reshape(noise_multipliers(workspace, targets), (len(_CIFAR_EPSILONS), -1))
    errors = np.array(
        [
            band_choice.banded_matrix(_CIFAR_ROUNDS, num_bands, workspace.cache_directory).rmse(
                prefix_sum(_CIFAR_ROUNDS), SingleParticipation()
            )
            for num_bands in tqdm.tqdm(
                _CIFAR_BANDS, desc="matrices", disable=not workspace.show_progress
            )
        ]
    )
    for epsilon, of_bands in zip(_CIFAR_EPSILONS, multipliers * errors, strict=True):
        best = float(np.min(of_bands))
        bands.append(_CIFAR_BANDS[int(np.argmin(of_bands))])
        over_sgd.append(best / float(of_bands[0]))
        without = multi_epoch * accounting.noise_multiplier(epsilon, _CIFAR_DELTA)
        over_multi_epoch.append(best / without)
    # Up to the first target at which it is worse.
    first_worse = next(
        (place for place, ratio in enumerate(over_multi_epoch) if ratio > 1.0),
        len(over_multi_epoch),
    )
    crossing = _CIFAR_EPSILONS[first_worse - 1] if first_worse else 0.0
    rows = [
        Row(
            name,
            "DP-SGD, all epsilons",
            "smallest ratio of RMSE, BandMF over DP-SGD",
            None,
            min(over_sgd),
            "DP-SGD is among the choices",
        ),
        Row(
            name,
            f"multi-epoch MF, of the epsilons {', '.join(map('{:g}'.format, _CIFAR_EPSILONS))}",
            "largest epsilon up to which BandMF is not worse",
            None,
            crossing,
            claim="BandMF is better up to an epsilon of about 5",
            holds=4.0 <= crossing <= 6.0,
        ),
    ]
    rows += [
        Row(
            name,
            f"epsilon {epsilon:g}",
            "best number of bands",
            None,
            float(num_bands),
        )
        for epsilon, num_bands in zip(_CIFAR_EPSILONS, bands, strict=True)
    ]
    figure, ((axes,),) = figures.panels(1, 1)
    figures.lines(
        axes,
        {
            "over DP-SGD, amplified": (_CIFAR_EPSILONS, over_sgd),
            "over multi-epoch MF": (_CIFAR_EPSILONS, over_multi_epoch),
        },
        title="RMSE of the best BandMF over another's, n = 2000",
        x="epsilon",
        y="ratio",
        marker="o",
        logarithmic="x",
    )
    axes.axhline(1.0, color="black", linewidth=0.8)
    note = (
        "Neither delta nor bands are printed: 1e-5 and powers of two up to 64, and 100, here. "
        "Ratios are of RMSE; the paper's may be of squared errors, on the same side of one."
    )
    return Outcome(tuple(rows), figure, (note,))


def experiments() -> tuple[Experiment, ...]:
    """Returns the experiments of this module."""
    return (
        Experiment(
            "bandmf-table-3",
            f"{PAPER}, Table 3",
            "Best number of bands by epsilon and epochs, n = 1024",
            functools.partial(table, "bandmf-table-3"),
        ),
        Experiment(
            "bandmf-figure-4a",
            f"{PAPER}, Fig. 4 (a)",
            "RMSE of DP-SGD over multi-epoch MF, n = 1024",
            functools.partial(ratios, "bandmf-figure-4a", "multi-epoch MF"),
        ),
        Experiment(
            "bandmf-figure-4b",
            f"{PAPER}, Fig. 4 (b)",
            "RMSE of DP-SGD over amplified BandMF, n = 1024",
            functools.partial(ratios, "bandmf-figure-4b", "BandMF"),
        ),
        Experiment(
            "bandmf-figure-4c",
            f"{PAPER}, Fig. 4 (c)",
            "RMSE by epochs at epsilon 1, n = 1024",
            functools.partial(by_epochs, "bandmf-figure-4c"),
        ),
        Experiment(
            "bandmf-figure-9",
            f"{PAPER}, Fig. 9",
            "Error of BandMF on CIFAR-10's rounds over those of others, by epsilon",
            functools.partial(ratios_for_images, "bandmf-figure-9"),
        ),
    )
