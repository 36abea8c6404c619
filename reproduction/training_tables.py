"""The configurations of the papers' training comparisons, from the papers' tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from reproduction import configurations as kinds
from reproduction.configurations import Configuration

# Privacy targets of scaled-down comparisons: noise matters there, and training still works.
_SMALL_TARGETS = (2.0, 8.0)
_SMALL_TARGETS_OF_SINGLE_PASS = (3.7, 18.9)

# BandMF Table 4: the server's rates and the test accuracies in percent, by epsilon 1, 2, 4, 8, 16.
_TARGETS = (1.0, 2.0, 4.0, 8.0, 16.0)
_FIGURE_5A: Mapping[tuple[str, str], tuple[tuple[Any, ...], ...]] = {
    ("DP-SGD", kinds.IDENTITY): (
        (0.0244, 0.0414, 0.0704, 0.1197, 0.346),
        ("16.69", "18.42", "19.81", "21.08", "22.26"),
    ),
    ("Single-epoch MF", kinds.SINGLE_EPOCH): (
        (0.1197, 0.2035, 0.346, 0.5882, 1.0),
        ("20.44", "21.70", "22.90", "23.88", "24.62"),
    ),
    ("Optimal TreeAgg", kinds.TREE_FULL): (
        (0.2035, 0.346, 0.5882, 1.0, 1.7),
        ("21.25", "22.59", "23.62", "24.45", "25.14"),
    ),
    ("Multi-epoch MF", kinds.MULTI_EPOCH): (
        (0.2035, 0.346, 0.5882, 1.0, 1.7),
        ("21.92", "23.04", "24.02", None, "25.33"),
    ),
    ("BandMF", kinds.BANDED): (
        (0.2035, 0.5882, 1.0, 1.0, 1.7),
        ("22.05", "23.19", "24.16", "24.88", "25.41"),
    ),
}
# BandMF Table 5, likewise, and the bands of BandMF: at epsilon 16 all of them, without
# amplification, which is multi-epoch MF.
_FIGURE_1B: Mapping[tuple[str, str], tuple[tuple[Any, ...], ...]] = {
    ("DP-SGD, amplified", kinds.AMPLIFIED_IDENTITY): (
        (0.346, 0.346, 0.346, 0.5882, 0.5882),
        ("22.22", "22.62", "22.94", "23.30", "23.61"),
    ),
    ("Multi-epoch MF, fixed order", kinds.MULTI_EPOCH_FIXED_ORDER): (
        (0.2035, 0.346, 0.5882, 1.0, 1.7),
        ("22.10", "23.24", "24.16", "24.88", "25.43"),
    ),
    ("BandMF, amplified", kinds.AMPLIFIED_BANDED): (
        (0.346, 0.5882, 1.0, 1.7),
        ("22.83", "23.71", "24.42", "24.99"),
    ),
}
_BANDS_OF_1B = (9, 18, 32, 64)
# Denisov et al. Table 4: the server's rates, the clients' and momenta, by epsilon.
_EPSILONS_OF_DENISOV = (18.9, 8.2, 3.7, 1.7, 0.8)
_NOISE_MULTIPLIERS = (0.341, 0.682, 1.364, 2.728, 5.456)
_DENISOV_2: Mapping[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("Honaker Full", kinds.TREE_FULL): (
        (0.5, 0.25, 0.25, 0.25, 0.25),
        (1.0, 1.0, 1.0, 0.5, 0.5),
        (0.95, 0.95, 0.9, 0.9, 0.0),
    ),
    ("Honaker Online", kinds.TREE_ONLINE): (
        (0.25, 0.25, 0.25, 0.25, 0.25),
        (1.0, 1.0, 0.5, 1.0, 0.5),
        (0.95, 0.9, 0.9, 0.0, 0.0),
    ),
    ("Opt Prefix Sum", kinds.SINGLE_EPOCH): (
        (0.5, 0.25, 0.25, 0.25, 0.5),
        (1.0, 0.5, 1.0, 0.5, 0.5),
        (0.95, 0.95, 0.9, 0.9, 0.0),
    ),
    ("Optimal M = BC", kinds.TRAINING_OPTIMUM): (
        (1.0, 0.25, 0.25, 0.25, 0.5),
        (1.0, 1.0, 0.5, 0.5, 0.5),
        (0.9, 0.95, 0.9, 0.9, 0.0),
    ),
}
# BandMF App. H: momentum for all but DP-SGD. Here a higher rate makes up for that.
_CIFAR10_TARGETS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0)
_CIFAR10_OF_KIND: Mapping[str, Mapping[str, Any]] = {
    kinds.AMPLIFIED_IDENTITY: {
        "flags": ("--server_momentum=0",),
        "rate_factor": 1.0 / (1.0 - kinds.CENTRALISED[kinds.CIFAR10].momentum),
    }
}
# BandMF's grid of rates has this base; one step down and up from each configuration's rate.
_RATE_BASE = 1.7


def figure_5a(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Fig. 5 (a): returning clients, no amplification.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    return tuple(
        Configuration(label, kind, epsilon, *(row[_TARGETS.index(epsilon)] for row in rows))
        for epsilon in _targets(dataset)
        for (label, kind), rows in _FIGURE_5A.items()
    )


def figure_1b(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Fig. 1 (b): batches that are sampled.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    configurations = []
    for epsilon in _targets(dataset):
        place = _TARGETS.index(epsilon)
        for (label, kind), (rates, accuracies) in _FIGURE_1B.items():
            if place < len(rates):
                bands = _BANDS_OF_1B[place] if kind == kinds.AMPLIFIED_BANDED else None
                printed = rates[place], accuracies[place]
                configurations.append(
                    Configuration(label, kind, epsilon, *printed, paper_bands=bands)
                )
    return tuple(configurations)


def _targets(dataset: str) -> tuple[float, ...]:
    return _TARGETS if dataset == kinds.STACKOVERFLOW else _SMALL_TARGETS


def figure_1a(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Figs. 1 (a) and 10: single examples, sampled.

    Args:
      dataset: ``docstrings``, for which scikit-learn's digits stand, or ``cifar10``.
    """
    is_cifar10 = dataset == kinds.CIFAR10
    more = _CIFAR10_OF_KIND if is_cifar10 else {}
    return tuple(
        Configuration(label, kind, epsilon, 1.0, **more.get(kind, {}))
        for epsilon in (_CIFAR10_TARGETS if is_cifar10 else _SMALL_TARGETS)
        for label, kind in _FIGURE_1B
    )


def figure_11(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Fig. 11: some of Fig. 5 (a), at several rates each.

    At the papers' size these are the paper's and their neighbours on its grid. The scaled-down
    rates follow from a power law that was fitted elsewhere and may be too small, so that one larger
    rate is tried as well.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    steps = (-1, 0, 1) if dataset == kinds.STACKOVERFLOW else (-1, 0, 1, 2)
    return tuple(
        dataclasses.replace(configuration, printed=None, rate_factor=_RATE_BASE**step)
        for configuration in figure_5a(dataset)
        if configuration.kind in (kinds.IDENTITY, kinds.TREE_FULL, kinds.BANDED)
        for step in steps
    )


def denisov_figure_2(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of Denisov et al. Fig. 2: a single pass, constant learning rates.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    is_paper_size = dataset == kinds.STACKOVERFLOW
    targets = _EPSILONS_OF_DENISOV if is_paper_size else _SMALL_TARGETS_OF_SINGLE_PASS
    found = []
    for epsilon in targets:
        place = _EPSILONS_OF_DENISOV.index(epsilon)
        for (label, kind), rows in _DENISOV_2.items():
            server, client, momentum = (row[place] for row in rows)
            found.append(
                Configuration(
                    label,
                    kind,
                    epsilon,
                    server,
                    paper_flags=(
                        f"--client_learning_rate={client:g}",
                        f"--server_momentum={momentum:g}",
                    ),
                    paper_noise_multiplier=_NOISE_MULTIPLIERS[place],
                )
            )
    return tuple(found)


def denisov_figure_3(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of Denisov et al. Figs. 3 and 6: schedules at epsilon 18.9.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    shared = ("--client_learning_rate=1", "--server_momentum=0.95")
    schedules = {
        "decay": ("--server_cooldown=0.25", "--cooldown=drop"),
        "cool-down": ("--server_cooldown=0.25", "--cooldown=linear"),
    }
    # Constant rates are those of Fig. 2, and the same runs.
    found = [
        configuration
        for configuration in denisov_figure_2(dataset)
        if configuration.epsilon == _EPSILONS_OF_DENISOV[0]
    ]

    def add(label: str, kind: str, schedule: str, more: tuple[str, ...] = ()) -> None:
        found.append(
            Configuration(
                label,
                kind,
                _EPSILONS_OF_DENISOV[0],
                0.5,
                flags=schedules[schedule],
                paper_flags=(*shared, *more),
                paper_noise_multiplier=_NOISE_MULTIPLIERS[0],
            )
        )

    for schedule in schedules:
        for label, kind in _DENISOV_2:
            add(f"{label}, {schedule}", kind, schedule)
    if dataset == kinds.STACKOVERFLOW:
        # There are 167 clients a round for one pass; the paper does not say for which mechanisms.
        for label, kind in list(_DENISOV_2)[2:]:
            more = ("--clients_per_round=167",)
            add(f"{label}, cool-down, 167 clients", kind, "cool-down", more)
    return tuple(found)
