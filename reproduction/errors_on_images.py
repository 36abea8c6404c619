"""BandMF (Choquette-Choo et al.), Fig. 9: errors of mechanisms over CIFAR-10's rounds."""

import functools

import numpy as np

from mf_aggregators import accounting, workloads
from mf_aggregators.participation import FixedEpochOrder, SingleParticipation, sampling_scheme
from mf_aggregators.planning import band_choice
from mf_aggregators.progress_bars import ProgressBar
from reproduction import best_bands, matrices
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

# CIFAR-10 as App. H has it: 20 epochs over 50,000 examples in batches of 500.
_NUM_ROUNDS, _EPOCHS, _NUM_EXAMPLES, _BATCH = 2000, 20, 50_000, 500
_DELTA = 1e-5
_BANDS = (1, 2, 4, 8, 16, 32, 64, 100)
_EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


def ratios_for_images(name: str, workspace: Workspace) -> Outcome:
    """Computes Fig. 9: RMSE of BandMF over DP-SGD's and multi-epoch MF's by epsilon.

    Args:
      name: The experiment's name.
      workspace: Where factorizations and noise multipliers are kept.

    Returns:
      Where BandMF is better, and the figure.
    """
    schema = FixedEpochOrder(_EPOCHS, _NUM_ROUNDS // _EPOCHS)
    workload = workloads.prefix_sum(_NUM_ROUNDS)
    multi_epoch = matrices.optimum(workspace, workload, schema).rmse(workload, schema)
    over_sgd, over_multi_epoch, bands = [], [], []
    targets = [
        (
            sampling_scheme(
                "poisson",
                num_rounds=_NUM_ROUNDS,
                num_bands=num_bands,
                population=_NUM_EXAMPLES,
                clients_per_round=_BATCH,
            ),
            epsilon,
            _DELTA,
        )
        for epsilon in _EPSILONS
        for num_bands in _BANDS
    ]
    # The multipliers by epsilon and by bands.
    multipliers = np.reshape(best_bands.noise_multipliers(workspace, targets), (len(_EPSILONS), -1))
    errors = np.array(
        [
            band_choice.banded_matrix(_NUM_ROUNDS, num_bands, workspace.cache_directory).rmse(
                prefix_sum(_NUM_ROUNDS), SingleParticipation()
            )
            for num_bands in ProgressBar(
                _BANDS, desc="matrices", disable=not workspace.show_progress
            )
        ]
    )
    for epsilon, of_bands in zip(_EPSILONS, multipliers * errors, strict=True):
        best = float(np.min(of_bands))
        bands.append(_BANDS[int(np.argmin(of_bands))])
        over_sgd.append(best / float(of_bands[0]))
        without = multi_epoch * accounting.noise_multiplier(epsilon, _DELTA)
        over_multi_epoch.append(best / without)
    # BandMF is not worse at any target before this one.
    first_worse = next(
        (place for place, ratio in enumerate(over_multi_epoch) if ratio > 1.0),
        len(over_multi_epoch),
    )
    crossing = _EPSILONS[first_worse - 1] if first_worse else 0.0
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
            f"multi-epoch MF, of the epsilons {', '.join(map('{:g}'.format, _EPSILONS))}",
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
        for epsilon, num_bands in zip(_EPSILONS, bands, strict=True)
    ]
    data = {
        "num_rounds": _NUM_ROUNDS,
        "epsilons": list(_EPSILONS),
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


def experiments() -> tuple[Experiment, ...]:
    """Returns the experiments of this module."""
    return (
        Experiment(
            "bandmf-figure-9",
            f"{PAPER}, Fig. 9",
            "Error of BandMF on CIFAR-10's rounds over those of others, by epsilon",
            functools.partial(ratios_for_images, "bandmf-figure-9"),
        ),
    )
