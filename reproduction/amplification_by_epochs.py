"""BandMF (Choquette-Choo et al.), Figs. 4 and 9: errors of amplified and other noise."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence

import numpy as np

from mf_aggregators import accounting, factorizations, workloads
from mf_aggregators.participation import FixedEpochOrder, SingleParticipation, sampling_scheme
from mf_aggregators.progress_bars import ProgressBar
from reproduction import band_choice, best_bands, matrices
from reproduction.banded_errors import PAPER
from reproduction.experiment import (
    Drawing,
    Experiment,
    Outcome,
    Row,
    Workspace,
    for_drawing,
    prefix_sum,
)

# A ratio that is almost one.
_ALMOST = 1.1
# The largest relative gap of an optimum that counts as certified; gaps are of squared errors.
_CERTIFIED = 1e-2
# Evaluations of a search for the optimum of returning clients: a minute or two at n = 1024.
_MOST_EVALUATIONS = 200
# CIFAR-10 as App. H has it: 20 epochs over 50,000 examples in batches of 500.
_IMAGE_ROUNDS, _IMAGE_EPOCHS, _NUM_IMAGES, _IMAGE_BATCH = 2000, 20, 50_000, 500
_IMAGE_DELTA = 1e-5
_IMAGE_BANDS = (1, 2, 4, 8, 16, 32, 64, 100)
_IMAGE_EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


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
        """The note below the table."""
        listed = ", ".join(map(str, self.uncertified))
        return (
            "Multi-epoch MF is the best matrix that was found under (k, n / k)-participation. "
            f"Errors that may be more than 0.5 % above the optimum's: k = {listed}."
            if self.uncertified
            else "All errors of multi-epoch MF are certified to be within 0.5 % of the optimum's."
        )


def multi_epoch_errors(
    workspace: Workspace, epochs: Sequence[int], num_rounds: int
) -> MultiEpochErrors:
    """Computes the errors of multi-epoch MF for each number of epochs.

    Args:
      workspace: Where factorizations are cached.
      epochs: Divisors of n.
      num_rounds: n.

    Returns:
      The errors.
    """
    workload = workloads.prefix_sum(num_rounds)
    errors, uncertified = {}, []
    for k in ProgressBar(epochs, desc="multi-epoch", disable=not workspace.show_progress):
        if k == 1:
            best = matrices.optimum(workspace, workload)
            errors[k] = best.rmse(workload, SingleParticipation())
            continue
        schema = FixedEpochOrder(k, num_rounds // k)
        with warnings.catch_warnings():
            # The note lists the optima that did not converge.
            warnings.simplefilter("ignore", factorizations.NotConvergedWarning)
            best = matrices.optimum(workspace, workload, schema, max_evaluations=_MOST_EVALUATIONS)
        errors[k] = best.rmse(workload, schema)
        if best.optimality_gap is None or best.optimality_gap > _CERTIFIED:
            uncertified.append(k)
    return MultiEpochErrors(errors, tuple(uncertified))


def ratios(workspace: Workspace, against: str) -> Outcome:
    """Computes Fig. 4 (a) or (b): RMSE of DP-SGD over that of another mechanism.

    Args:
      workspace: Where factorizations and noise multipliers are cached.
      against: ``multi-epoch MF``, without amplification, or ``BandMF``, with it.

    Returns:
      The range of the ratios, and the figure.
    """
    found = best_bands.cells(
        workspace, best_bands.EPSILONS, best_bands.EPOCHS, best_bands.NUM_ROUNDS
    )
    notes: tuple[str, ...]
    if against == "BandMF":
        others = [cell.best.effective_rmse * best_bands.CLIENTS_PER_ROUND for cell in found]
    else:
        errors = multi_epoch_errors(workspace, best_bands.EPOCHS, best_bands.NUM_ROUNDS)
        notes = (errors.note,)
        others = [
            errors.by_epochs[cell.epochs]
            * accounting.noise_multiplier(cell.epsilon, best_bands.DELTA)
            for cell in found
        ]
    grid = np.array(
        [cell.independent_noise / other for cell, other in zip(found, others, strict=True)]
    ).reshape(len(best_bands.EPSILONS), -1)
    where = f"n = {best_bands.NUM_ROUNDS}, all epsilons and epochs"
    smallest, largest = float(np.min(grid)), float(np.max(grid))
    if against == "BandMF":
        # One of the numbers of bands is one, so that the ratio cannot be below one.
        rows = [
            Row(where, "smallest ratio", None, smallest, "DP-SGD is among the choices"),
            Row(where, "largest ratio", None, largest),
        ]
        notes = (
            "Bands are powers of two up to n / k, as in Table 3. The caption of Fig. 9 lets one "
            "think that Fig. 4 (b) has more; the cells with more bands would be those in which "
            "multi-epoch MF is better.",
        )
    else:
        rows = [
            Row(
                where,
                "smallest ratio of the RMSE of DP-SGD over that of multi-epoch MF",
                None,
                smallest,
                claim="DP-SGD is better for some epsilons and epochs",
                holds=smallest < 1.0,
            ),
            Row(
                where,
                "largest ratio of the RMSE of DP-SGD over that of multi-epoch MF",
                None,
                largest,
                claim="multi-epoch MF is better for others",
                holds=largest > 1.0,
            ),
            Row(
                f"n = {best_bands.NUM_ROUNDS}, as many epochs as rounds, all epsilons",
                "largest ratio of the RMSE of DP-SGD over that of multi-epoch MF",
                None,
                float(np.max(grid[:, -1])),
                claim="both are almost the same, and MF is very slightly better",
                holds=bool(np.all((grid[:, -1] >= 1.0) & (grid[:, -1] <= _ALMOST))),
            ),
        ]
    data = {
        **best_bands.axes_of_grids(),
        "against": against,
        "ratios": [for_drawing(of_epsilon) for of_epsilon in grid],
    }
    return Outcome(tuple(rows), Drawing("ratios of RMSE", data), notes)


def by_epochs(workspace: Workspace) -> Outcome:
    """Computes Fig. 4 (c): RMSE by epochs at epsilon 1.

    Args:
      workspace: Where factorizations and noise multipliers are cached.

    Returns:
      Whether all errors fall with epochs, and the figure.
    """
    found = best_bands.cells(workspace, (1.0,), best_bands.EPOCHS, best_bands.NUM_ROUNDS)
    multiplier = accounting.noise_multiplier(1.0, best_bands.DELTA)
    errors = multi_epoch_errors(workspace, best_bands.EPOCHS, best_bands.NUM_ROUNDS)
    # For k epochs at a fixed number of rounds n, a batch is k / n of the data.
    shares = np.array(best_bands.EPOCHS) / best_bands.NUM_ROUNDS
    curves = {
        "DP-SGD, amplified": np.array([cell.independent_noise for cell in found]) / shares,
        "multi-epoch MF": np.array([errors.by_epochs[k] * multiplier for k in best_bands.EPOCHS])
        / shares,
        "BandMF, amplified": np.array(
            [cell.best.effective_rmse * best_bands.CLIENTS_PER_ROUND for cell in found]
        )
        / shares,
    }
    rows = []
    for mechanism, values in curves.items():
        step = float(np.max(values[1:] / values[:-1]))
        rows.append(
            Row(
                mechanism,
                "largest ratio of RMSE of the mean from one number of epochs to the next",
                None,
                step,
                claim="RMSE gets better with epochs for every mechanism",
                holds=step <= 1.0,
            )
        )
    data = {
        "num_rounds": best_bands.NUM_ROUNDS,
        "epochs": list(best_bands.EPOCHS),
        "rmse": {mechanism: for_drawing(values) for mechanism, values in curves.items()},
    }
    note = (
        "The paper does not say what its RMSE is relative to. Here it is that of means over a "
        "batch, k / n of the data: n is fixed, and batches grow with the epochs. The RMSE of sums "
        "grows."
    )
    return Outcome(tuple(rows), Drawing("rmse by epochs", data), (note, errors.note))


def ratios_for_images(workspace: Workspace) -> Outcome:
    """Computes Fig. 9: RMSE of BandMF over DP-SGD's and multi-epoch MF's by epsilon.

    Args:
      workspace: Where factorizations and noise multipliers are cached.

    Returns:
      Where BandMF is better, and the figure.
    """
    schema = FixedEpochOrder(_IMAGE_EPOCHS, _IMAGE_ROUNDS // _IMAGE_EPOCHS)
    workload = workloads.prefix_sum(_IMAGE_ROUNDS)
    multi_epoch = matrices.optimum(workspace, workload, schema).rmse(workload, schema)
    over_sgd, over_multi_epoch, bands = [], [], []
    targets = [
        (
            sampling_scheme(
                "poisson",
                num_rounds=_IMAGE_ROUNDS,
                num_bands=num_bands,
                population=_NUM_IMAGES,
                clients_per_round=_IMAGE_BATCH,
            ),
            epsilon,
            _IMAGE_DELTA,
        )
        for epsilon in _IMAGE_EPSILONS
        for num_bands in _IMAGE_BANDS
    ]
    # The multipliers by epsilon and by bands.
    multipliers = np.reshape(
        best_bands.noise_multipliers(workspace, targets), (len(_IMAGE_EPSILONS), -1)
    )
    errors = np.array(
        [
            band_choice.banded_matrix(_IMAGE_ROUNDS, num_bands, workspace.cache_directory).rmse(
                prefix_sum(_IMAGE_ROUNDS), SingleParticipation()
            )
            for num_bands in ProgressBar(
                _IMAGE_BANDS, desc="matrices", disable=not workspace.show_progress
            )
        ]
    )
    for epsilon, of_bands in zip(_IMAGE_EPSILONS, multipliers * errors, strict=True):
        best = float(np.min(of_bands))
        bands.append(_IMAGE_BANDS[int(np.argmin(of_bands))])
        over_sgd.append(best / float(of_bands[0]))
        without = multi_epoch * accounting.noise_multiplier(epsilon, _IMAGE_DELTA)
        over_multi_epoch.append(best / without)
    # BandMF is not worse at any target before this one.
    first_worse = next(
        (place for place, ratio in enumerate(over_multi_epoch) if ratio > 1.0),
        len(over_multi_epoch),
    )
    crossing = _IMAGE_EPSILONS[first_worse - 1] if first_worse else 0.0
    rows = [
        Row(
            "DP-SGD, all epsilons",
            "smallest ratio of RMSE, BandMF over DP-SGD",
            None,
            min(over_sgd),
            "DP-SGD is among the choices",
        ),
        Row(
            f"multi-epoch MF, of the epsilons {', '.join(map('{:g}'.format, _IMAGE_EPSILONS))}",
            "largest epsilon up to which BandMF is not worse",
            None,
            crossing,
            claim="BandMF is better up to an epsilon of about 5",
            holds=4.0 <= crossing <= 6.0,
        ),
    ]
    rows += [
        Row(
            f"epsilon {epsilon:g}",
            "best number of bands",
            None,
            float(num_bands),
        )
        for epsilon, num_bands in zip(_IMAGE_EPSILONS, bands, strict=True)
    ]
    data = {
        "num_rounds": _IMAGE_ROUNDS,
        "epsilons": list(_IMAGE_EPSILONS),
        "ratios": {
            "over DP-SGD, amplified": for_drawing(over_sgd),
            "over multi-epoch MF": for_drawing(over_multi_epoch),
        },
    }
    note = (
        "Neither delta nor bands are printed: 1e-5 and powers of two up to 64, and 100, here. "
        "Ratios are of RMSE; the paper's may be of squared errors, on the same side of one."
    )
    return Outcome(tuple(rows), Drawing("ratios by epsilon", data), (note,))


EXPERIMENTS = (
    Experiment(
        "bandmf-figure-4a",
        f"{PAPER}, Fig. 4 (a)",
        "RMSE of DP-SGD over multi-epoch MF, n = 1024",
        functools.partial(ratios, against="multi-epoch MF"),
    ),
    Experiment(
        "bandmf-figure-4b",
        f"{PAPER}, Fig. 4 (b)",
        "RMSE of DP-SGD over amplified BandMF, n = 1024",
        functools.partial(ratios, against="BandMF"),
    ),
    Experiment(
        "bandmf-figure-4c",
        f"{PAPER}, Fig. 4 (c)",
        "RMSE by epochs at epsilon 1, n = 1024",
        by_epochs,
    ),
    Experiment(
        "bandmf-figure-9",
        f"{PAPER}, Fig. 9",
        "Error of BandMF on CIFAR-10's rounds over those of others, by epsilon",
        ratios_for_images,
    ),
)
