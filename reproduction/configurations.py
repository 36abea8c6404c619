"""Configurations to train and compare, each a mechanism at a privacy target, as flags of a run.

Every configuration can be trained at the papers' size, and at one that fits a small machine.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypedDict

import numpy as np

from mf_aggregators import __version__, accounting, checkpoints, factorizations, planning, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from reproduction import best_bands
from reproduction.best_bands import BandChoice
from reproduction.experiment import TrainingPlace, Workspace
from simulations.comparison.repeated_runs import Variant

DOCSTRINGS = "docstrings"
STACKOVERFLOW = "stackoverflow"
CIFAR10 = "cifar10"
DATASETS = (DOCSTRINGS, STACKOVERFLOW, CIFAR10)

# Kinds of mechanisms in the papers, each named after the way in which its matrix is made.
IDENTITY = "identity"
TREE_ONLINE = "tree_online"
TREE_FULL = "tree_full"
SINGLE_EPOCH = "single_epoch"
TRAINING_OPTIMUM = "training_optimum"
MULTI_EPOCH = "multi_epoch"
# The matrix of MULTI_EPOCH, with the smaller noise that suffices if clients come in the same order
# in every epoch.
MULTI_EPOCH_FIXED_ORDER = "multi_epoch_fixed_order"
BANDED = "banded"
AMPLIFIED_IDENTITY = "amplified_identity"
AMPLIFIED_BANDED = "amplified_banded"

_AMPLIFIED = (AMPLIFIED_IDENTITY, AMPLIFIED_BANDED)
_SINGLE_PASS = (SINGLE_EPOCH, TRAINING_OPTIMUM)
# The slope of BandMF App. I: log(best learning rate) over log(effective RMSE).
_RATE_SLOPE = -0.95


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting of a comparison of runs: a task and its size.

    Attributes:
      name: The name of the directory of its runs, which comparisons share.
      dataset: The data set, as ``--dataset`` names it.
      num_rounds: n.
      population: Clients.
      clients_per_round: The clients of a round.
      separation: b of runs in which clients come back; n for a single pass.
      clients_of_single_pass: The clients of a round, for mechanisms for which no client comes back.
      delta: The delta of all guarantees.
      learning_rate: The server's for BandMF at epsilon 8: the paper's, or what is good here.
      momentum: The server's.
      flags: The flags that all runs share.
      simulated_clients: The number of clients that stand for the clients of a round; None if all
        take part, and for sampled batches.
      command: The command that trains.
      reference: The setting in which ``learning_rate`` is good; None for this one.
      reference_kind: The mechanism of ``learning_rate``: BandMF, amplified or not.
    """

    name: str
    dataset: str
    num_rounds: int
    population: int
    clients_per_round: int
    separation: int
    clients_of_single_pass: int
    delta: float
    learning_rate: float
    momentum: float
    flags: tuple[str, ...] = ()
    simulated_clients: int | None = None
    command: str = "run-stackoverflow"
    reference: "Setting | None" = None
    reference_kind: str = BANDED

    @property
    def has_paper_rates(self) -> bool:
        """Whether the papers print learning rates, noise and bands for this setting."""
        return self.dataset == STACKOVERFLOW

    @property
    def schema(self) -> MinSeparation:
        """The participation schema of clients who come back."""
        return MinSeparation(self.separation)


# The settings of BandMF: six epochs of StackOverflow, or, scaled down, four of the docstrings.
_OF_DOCSTRINGS = Setting(
    name="returning",
    dataset=DOCSTRINGS,
    num_rounds=100,
    population=2511,
    clients_per_round=100,
    separation=25,
    clients_of_single_pass=25,
    delta=1e-4,
    learning_rate=1.5,
    momentum=0.8,
    flags=("--sentences_per_client=32",),
)
_OF_STACKOVERFLOW = Setting(
    name="returning",
    dataset=STACKOVERFLOW,
    num_rounds=2052,
    population=342_477,
    clients_per_round=1000,
    separation=342,
    # With 167 clients a round, 2,052 rounds would need more clients than there are.
    clients_of_single_pass=166,
    delta=1e-6,
    learning_rate=1.0,
    momentum=0.95,
    simulated_clients=100,
)
RETURNING: Mapping[str, Setting] = {DOCSTRINGS: _OF_DOCSTRINGS, STACKOVERFLOW: _OF_STACKOVERFLOW}
# The settings of Denisov et al.: a single pass, at constant learning rates unless a configuration
# says otherwise.
SINGLE_PASS: Mapping[str, Setting] = {
    DOCSTRINGS: dataclasses.replace(
        _OF_DOCSTRINGS,
        name="single_pass",
        clients_per_round=25,
        separation=100,
        flags=("--server_cooldown=0",),
        reference=_OF_DOCSTRINGS,
    ),
    STACKOVERFLOW: dataclasses.replace(
        _OF_STACKOVERFLOW,
        name="single_pass",
        num_rounds=2048,
        clients_per_round=100,
        separation=2048,
        clients_of_single_pass=100,
        # Denisov et al. do not zero large updates: with this norm none is zeroed.
        flags=("--server_warmup=0", "--server_cooldown=0", "--zeroing_norm=1e9"),
        simulated_clients=None,
    ),
}
# BandMF Figs. 1 (a) and 10: every example is a client. Scikit-learn's digits stand for CIFAR-10.
_OF_DIGITS = Setting(
    name="centralised",
    dataset="digits",
    num_rounds=100,
    population=1415,
    clients_per_round=50,
    separation=25,
    clients_of_single_pass=12,
    delta=1e-4,
    learning_rate=5.0,
    momentum=0.0,
    flags=("--examples_per_client=1",),
    command="run-digits",
    reference_kind=AMPLIFIED_BANDED,
)
CENTRALISED: Mapping[str, Setting] = {
    DOCSTRINGS: _OF_DIGITS,
    # BandMF App. H: 20 epochs. The learning rate is run-cifar10's default, because the paper prints
    # none.
    CIFAR10: dataclasses.replace(
        _OF_DIGITS,
        dataset=CIFAR10,
        num_rounds=2000,
        population=50_000,
        clients_per_round=500,
        separation=100,
        clients_of_single_pass=25,
        delta=1e-5,
        learning_rate=0.1,
        momentum=0.95,
        flags=(),
        command="run-cifar10",
    ),
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One mechanism at one privacy target.

    Attributes:
      label: The paper's name of the configuration, in rows and legends.
      kind: The kind of its mechanism, one of this module's constants.
      epsilon: The target, at the setting's delta.
      paper_rate: The server learning rate that the paper found for the configuration.
      printed: The paper's test accuracy in percent; None where none is printed.
      flags: More flags, at any size.
      paper_flags: More flags at the papers' size.
      paper_noise_multiplier: The noise multiplier at the papers' size, if their epsilon is of a
        looser accountant; None if epsilon determines the noise.
      paper_bands: The bands that the paper chose, of an amplified configuration.
      rate_factor: A factor of the learning rate.
    """

    label: str
    kind: str
    epsilon: float
    paper_rate: float
    printed: str | None = None
    flags: tuple[str, ...] = ()
    paper_flags: tuple[str, ...] = ()
    paper_noise_multiplier: float | None = None
    paper_bands: int | None = None
    rate_factor: float = 1.0

    @property
    def name(self) -> str:
        """The name of the configuration's directories and files."""
        words = "".join(letter if letter.isalnum() else " " for letter in self.label.lower())
        factor = "" if self.rate_factor == 1.0 else f"_rate_{self.rate_factor:.3g}"
        return f"{'_'.join(words.split())}_epsilon_{self.epsilon:g}{factor}"


def num_bands(configuration: Configuration, setting: Setting, workspace: Workspace) -> BandChoice:
    """Returns the number of bands of an amplified configuration, and its error (BandMF Section 5).

    Args:
      configuration: The configuration.
      setting: The task and its size.
      workspace: Where matrices and noise multipliers are cached.

    Returns:
      For BandMF the paper's at the papers' size, else the number of bands of least error of
      powers of two up to the separation; one band for DP-SGD.
    """
    candidates = planning.powers_of_two(setting.separation)
    if configuration.kind == AMPLIFIED_IDENTITY:
        candidates = [1]
    elif setting.has_paper_rates and configuration.paper_bands is not None:
        candidates = [configuration.paper_bands]
    return best_bands.best(
        best_bands.compare(
            configuration.epsilon,
            setting.delta,
            num_rounds=setting.num_rounds,
            population=setting.population,
            clients_per_round=setting.clients_per_round,
            candidates=candidates,
            cache_directory=workspace.cache_directory,
        )
    )


def matrix_of(
    configuration: Configuration, setting: Setting, workspace: Workspace
) -> Factorization:
    """Returns the factorization that a configuration's mechanism uses.

    Args:
      configuration: The configuration.
      setting: The task and its size.
      workspace: Where matrices are cached.

    Returns:
      The factorization.
    """
    n = setting.num_rounds
    epochs = _fixed_order(setting)
    compute: dict[str, Callable[[], Factorization]] = {
        IDENTITY: lambda: factorizations.identity(n),
        TREE_ONLINE: lambda: factorizations.tree_aggregation(n, "online"),
        TREE_FULL: lambda: factorizations.tree_aggregation(n, "full"),
        SINGLE_EPOCH: lambda: workspace.optimum(workloads.prefix_sum(n)),
        # To choose a learning rate, the optimum for prefix sums is near enough; the run itself
        # computes the optimum for its training.
        TRAINING_OPTIMUM: lambda: workspace.optimum(workloads.prefix_sum(n)),
        MULTI_EPOCH: lambda: _multi_epoch(setting, workspace),
        MULTI_EPOCH_FIXED_ORDER: lambda: _multi_epoch(setting, workspace),
        BANDED: lambda: workspace.banded(n, setting.separation, epochs),
        AMPLIFIED_IDENTITY: lambda: factorizations.identity(n),
        AMPLIFIED_BANDED: lambda: best_bands.banded_matrix(
            n, num_bands(configuration, setting, workspace).num_bands, workspace.cache_directory
        ),
    }
    return compute[configuration.kind]()


def _fixed_order(setting: Setting) -> FixedEpochOrder:
    most = setting.schema.most_participations(setting.num_rounds)
    return FixedEpochOrder(most, setting.separation)


def _multi_epoch(setting: Setting, workspace: Workspace) -> Factorization:
    return workspace.optimum(
        workloads.prefix_sum(setting.num_rounds),
        _fixed_order(setting),
        equal_column_norms=True,
    )


def effective_rmse(
    configuration: Configuration,
    setting: Setting,
    workspace: Workspace,
    workload: np.ndarray | None = None,
) -> float:
    """Returns the effective RMSE (BandMF Equation 11), RMSE times noise over clients per round.

    Args:
      configuration: The configuration.
      setting: The task and its size.
      workspace: Where matrices are cached.
      workload: The workload of errors; the prefix sum by default, and always with sampling.
    """
    if configuration.kind in _AMPLIFIED:
        return num_bands(configuration, setting, workspace).effective_rmse
    schema: Participation = setting.schema
    clients = setting.clients_per_round
    if configuration.kind in _SINGLE_PASS:
        schema, clients = SingleParticipation(), setting.clients_of_single_pass
    elif configuration.kind == MULTI_EPOCH_FIXED_ORDER:
        schema = _fixed_order(setting)
    multiplier = accounting.noise_multiplier(configuration.epsilon, setting.delta)
    of = setting.num_rounds if workload is None else workload
    rmse = matrix_of(configuration, setting, workspace).rmse(of, schema)
    return rmse * multiplier / clients


def learning_rate(configuration: Configuration, setting: Setting, workspace: Workspace) -> float:
    """Returns the server learning rate of a configuration.

    At the papers' size, the rate is the paper's. At other sizes, it is the rate tuned for BandMF at
    epsilon 8, times the power of the ratio of effective RMSEs that BandMF App. I fits (on
    StackOverflow, and not rounded here), and at most the tuned rate.

    Args:
      configuration: The configuration.
      setting: The task and its size.
      workspace: Where matrices are cached.
    """
    if setting.has_paper_rates:
        return configuration.rate_factor * configuration.paper_rate
    reference = Configuration("BandMF", setting.reference_kind, 8.0, 1.0)
    of_reference = effective_rmse(reference, setting.reference or setting, workspace)
    ratio = (effective_rmse(configuration, setting, workspace) / of_reference) ** _RATE_SLOPE
    return configuration.rate_factor * setting.learning_rate * min(1.0, ratio)


def variant_of(
    configuration: Configuration, setting: Setting, place: TrainingPlace, workspace: Workspace
) -> Variant:
    """Saves a configuration's matrix as a checkpoint, and returns the variant to run.

    Args:
      configuration: The configuration.
      setting: The task and its size.
      place: Where runs go.
      workspace: Where matrices are cached.

    Returns:
      The flags of a run.

    Raises:
      OSError: If the checkpoint cannot be written.
    """
    is_single_pass = configuration.kind in _SINGLE_PASS
    clients = setting.clients_of_single_pass if is_single_pass else setting.clients_per_round
    flags = [
        *([f"--dataset={setting.dataset}"] if setting.command == "run-stackoverflow" else []),
        f"--num_rounds={setting.num_rounds}",
        f"--clients_per_round={clients}",
        _noise_flag(configuration, setting, workspace),
        f"--delta={setting.delta:g}",
        f"--server_momentum={setting.momentum:g}",
        f"--server_learning_rate={learning_rate(configuration, setting, workspace):.4g}",
    ]
    if configuration.kind in _AMPLIFIED:
        flags.append("--sampling=poisson")
    else:
        flags.append(f"--separation={setting.num_rounds if is_single_pass else setting.separation}")
        if setting.simulated_clients is not None:
            flags.append(f"--simulated_clients={setting.simulated_clients}")
    if configuration.kind == TRAINING_OPTIMUM:
        flags.append("--workload=training")
    else:
        flags.append(f"--checkpoint={_checkpoint(configuration, setting, place, workspace)}")
    flags += [*setting.flags, *configuration.flags]
    if setting.has_paper_rates:
        flags += configuration.paper_flags
    if place.workers:
        flags.append(f"--workers={place.workers}")
    mechanism = "optimal" if configuration.kind == TRAINING_OPTIMUM else "banded"
    return Variant(configuration.name, mechanism, tuple(flags))


def _noise_flag(configuration: Configuration, setting: Setting, workspace: Workspace) -> str:
    if setting.has_paper_rates and configuration.paper_noise_multiplier is not None:
        return f"--noise_multiplier={configuration.paper_noise_multiplier:g}"
    if configuration.kind != MULTI_EPOCH_FIXED_ORDER:
        return f"--target_epsilon={configuration.epsilon:g}"
    # The noise that suffices for a fixed order is converted: a run under timers takes a noise
    # multiplier relative to its own, larger sensitivity.
    matrix = matrix_of(configuration, setting, workspace)
    share = matrix.sensitivity(_fixed_order(setting)).value / matrix.sensitivity(setting.schema)
    multiplier = accounting.noise_multiplier(configuration.epsilon, setting.delta) * share
    return f"--noise_multiplier={multiplier:.8g}"


def _checkpoint(
    configuration: Configuration, setting: Setting, place: TrainingPlace, workspace: Workspace
) -> pathlib.Path:
    """Saves a configuration's matrix, unless it is there, and returns its absolute path."""
    bands = ""
    if configuration.kind in _AMPLIFIED:
        bands = f"_{num_bands(configuration, setting, workspace).num_bands}_bands"
    name = f"{configuration.kind}_{setting.num_rounds}_{setting.separation}{bands}_{__version__}"
    path = (place.directory / "matrices" / name).resolve()
    try:
        checkpoints.load(path)
    except checkpoints.CheckpointError:
        path.parent.mkdir(parents=True, exist_ok=True)
        matrix = matrix_of(configuration, setting, workspace)
        checkpoints.save(matrix, path, participation=matrix.participation)
    return path


# Epsilons of scaled-down comparisons: small enough for noise to matter, large enough to train.
_SMALL_TARGETS = (2.0, 8.0)
_SMALL_TARGETS_OF_SINGLE_PASS = (3.7, 18.9)

# Printed in BandMF Table 4 for epsilons 1, 2, 4, 8, 16: server learning rates, and test accuracies
# in percent.
_TARGETS = (1.0, 2.0, 4.0, 8.0, 16.0)
_Printed: TypeAlias = Mapping[tuple[str, str], tuple[tuple[float, ...], tuple[str | None, ...]]]
_FIGURE_5A: _Printed = {
    ("DP-SGD", IDENTITY): (
        (0.0244, 0.0414, 0.0704, 0.1197, 0.346),
        ("16.69", "18.42", "19.81", "21.08", "22.26"),
    ),
    ("Single-epoch MF", SINGLE_EPOCH): (
        (0.1197, 0.2035, 0.346, 0.5882, 1.0),
        ("20.44", "21.70", "22.90", "23.88", "24.62"),
    ),
    ("Optimal TreeAgg", TREE_FULL): (
        (0.2035, 0.346, 0.5882, 1.0, 1.7),
        ("21.25", "22.59", "23.62", "24.45", "25.14"),
    ),
    ("Multi-epoch MF", MULTI_EPOCH): (
        (0.2035, 0.346, 0.5882, 1.0, 1.7),
        ("21.92", "23.04", "24.02", None, "25.33"),
    ),
    ("BandMF", BANDED): (
        (0.2035, 0.5882, 1.0, 1.0, 1.7),
        ("22.05", "23.19", "24.16", "24.88", "25.41"),
    ),
}
# Printed in BandMF Table 5: the same, with amplification, and BandMF's numbers of bands. At epsilon
# 16 the paper takes all bands, without amplification: multi-epoch MF.
_FIGURE_1B: _Printed = {
    ("DP-SGD, amplified", AMPLIFIED_IDENTITY): (
        (0.346, 0.346, 0.346, 0.5882, 0.5882),
        ("22.22", "22.62", "22.94", "23.30", "23.61"),
    ),
    ("Multi-epoch MF, fixed order", MULTI_EPOCH_FIXED_ORDER): (
        (0.2035, 0.346, 0.5882, 1.0, 1.7),
        ("22.10", "23.24", "24.16", "24.88", "25.43"),
    ),
    ("BandMF, amplified", AMPLIFIED_BANDED): (
        (0.346, 0.5882, 1.0, 1.7),
        ("22.83", "23.71", "24.42", "24.99"),
    ),
}
_BANDS_OF_1B = (9, 18, 32, 64)
# Printed in Denisov et al. Table 4, by epsilon: the server's learning rates, the clients' learning
# rates, and momenta.
_EPSILONS_OF_DENISOV = (18.9, 8.2, 3.7, 1.7, 0.8)
_NOISE_MULTIPLIERS = (0.341, 0.682, 1.364, 2.728, 5.456)
_DENISOV_2: Mapping[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("Honaker Full", TREE_FULL): (
        (0.5, 0.25, 0.25, 0.25, 0.25),
        (1.0, 1.0, 1.0, 0.5, 0.5),
        (0.95, 0.95, 0.9, 0.9, 0.0),
    ),
    ("Honaker Online", TREE_ONLINE): (
        (0.25, 0.25, 0.25, 0.25, 0.25),
        (1.0, 1.0, 0.5, 1.0, 0.5),
        (0.95, 0.9, 0.9, 0.0, 0.0),
    ),
    ("Opt Prefix Sum", SINGLE_EPOCH): (
        (0.5, 0.25, 0.25, 0.25, 0.5),
        (1.0, 0.5, 1.0, 0.5, 0.5),
        (0.95, 0.95, 0.9, 0.9, 0.0),
    ),
    ("Optimal M = BC", TRAINING_OPTIMUM): (
        (1.0, 0.25, 0.25, 0.25, 0.5),
        (1.0, 1.0, 0.5, 0.5, 0.5),
        (0.9, 0.95, 0.9, 0.9, 0.0),
    ),
}
# In BandMF App. H all mechanisms but DP-SGD have momentum. Here DP-SGD has a higher learning rate
# instead.
_CIFAR10_TARGETS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0)


class _Changes(TypedDict, total=False):
    flags: tuple[str, ...]
    rate_factor: float


_CIFAR10_OF_KIND: Mapping[str, _Changes] = {
    AMPLIFIED_IDENTITY: {
        "flags": ("--server_momentum=0",),
        "rate_factor": 1.0 / (1.0 - CENTRALISED[CIFAR10].momentum),
    }
}
# The ratio of neighbouring learning rates on BandMF's grid; each configuration's rate is tried one
# step down and up.
_RATE_BASE = 1.7


def figure_5a(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Figure 5 (a): returning clients, no amplification.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    return tuple(
        Configuration(label, kind, epsilon, rates[place], accuracies[place])
        for epsilon in _targets(dataset)
        for place in (_TARGETS.index(epsilon),)
        for (label, kind), (rates, accuracies) in _FIGURE_5A.items()
    )


def figure_1b(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Figure 1 (b): batches that are sampled.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    configurations = []
    for epsilon in _targets(dataset):
        place = _TARGETS.index(epsilon)
        for (label, kind), (rates, accuracies) in _FIGURE_1B.items():
            if place < len(rates):
                bands = _BANDS_OF_1B[place] if kind == AMPLIFIED_BANDED else None
                printed = rates[place], accuracies[place]
                configurations.append(
                    Configuration(label, kind, epsilon, *printed, paper_bands=bands)
                )
    return tuple(configurations)


def _targets(dataset: str) -> tuple[float, ...]:
    return _TARGETS if dataset == STACKOVERFLOW else _SMALL_TARGETS


def figure_1a(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Figures 1 (a) and 10: single examples, sampled.

    Args:
      dataset: ``docstrings``, for which scikit-learn's digits stand, or ``cifar10``.
    """
    is_cifar10 = dataset == CIFAR10
    more = _CIFAR10_OF_KIND if is_cifar10 else {}
    return tuple(
        Configuration(label, kind, epsilon, 1.0, **more.get(kind, {}))
        for epsilon in (_CIFAR10_TARGETS if is_cifar10 else _SMALL_TARGETS)
        for label, kind in _FIGURE_1B
    )


def figure_11(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of BandMF Figure 11: some of Figure 5 (a), each at several rates.

    At the papers' size these are the paper's and their neighbours on its grid. The scaled-down
    rates follow from a power law that was fitted elsewhere and may be too small, so that one larger
    rate is tried as well.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    steps = (-1, 0, 1) if dataset == STACKOVERFLOW else (-1, 0, 1, 2)
    return tuple(
        dataclasses.replace(configuration, printed=None, rate_factor=_RATE_BASE**step)
        for configuration in figure_5a(dataset)
        if configuration.kind in (IDENTITY, TREE_FULL, BANDED)
        for step in steps
    )


def denisov_figure_2(dataset: str) -> tuple[Configuration, ...]:
    """Returns the configurations of Denisov's Figure 2: a single pass, constant learning rates.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    is_paper_size = dataset == STACKOVERFLOW
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
    """Returns the configurations of Denisov's Figures 3 and 6: schedules at epsilon 18.9.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    shared = ("--client_learning_rate=1", "--server_momentum=0.95")
    schedules = {
        "decay": ("--server_cooldown=0.25", "--cooldown=drop"),
        "cool-down": ("--server_cooldown=0.25", "--cooldown=linear"),
    }
    # The configurations with constant rates are those of Fig. 2: they share its runs.
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
    if dataset == STACKOVERFLOW:
        # The paper also has runs with 167 clients a round, in one pass, but does not say for which
        # mechanisms.
        for label, kind in list(_DENISOV_2)[2:]:
            more = ("--clients_per_round=167",)
            add(f"{label}, cool-down, 167 clients", kind, "cool-down", more)
    return tuple(found)
