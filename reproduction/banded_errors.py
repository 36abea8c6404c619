"""BandMF (Choquette-Choo et al.): Table 2, and the matrices of Figs. 6 and 7."""

import functools

import numpy as np

from mf_aggregators import factorizations, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import FixedEpochOrder, MinSeparation, SingleParticipation
from reproduction import matrices
from reproduction.experiment import (
    Drawing,
    Experiment,
    Outcome,
    Row,
    Workspace,
    for_drawing,
    prefix_sum,
)

PAPER = "Choquette-Choo et al.: (Amplified) Banded Matrix Factorization"

_SINGLE = SingleParticipation()
_NUM_ROUNDS = 2052
_EPOCHS = FixedEpochOrder(6, 342)
_APART = MinSeparation(342, 6)
# Each row has two sensitivities, for one participation and for participations at least 342 rounds
# apart, both divided by the sensitivity for (6, 342), and then the errors (A) and (B), both divided
# by the least.
_TABLE = {
    "tree, full": ("0.32", "1.00", "1.53", "1.53"),
    "identity (DP-SGD)": ("0.41", "1.00", "9.63", "9.63"),
    "banded 128": ("0.52", "1.04", "1.23", "1.29"),
    "banded 128, equal norms": ("0.41", "1.00", "1.27", "1.27"),
    "banded 342": ("0.52", "1.04", "1.04", "1.08"),
    "banded 342, equal norms": ("0.41", "1.00", "1.05", "1.05"),
    # Its (A) is the least, 1.00 by definition.
    "multi-epoch": ("0.50", "<=1.15", None, "1.15"),
    "multi-epoch, equal norms": ("0.41", "<=1.13", "1.01", "1.14"),
}
_QUANTITIES = (
    "sensitivity, one participation",
    "sensitivity, at least 342 apart",
    "(A) RMSE under (6, 342) over the least",
    "(B) RMSE at least 342 apart over the least of (A)",
)


def multi_epoch(workspace: Workspace, equal_column_norms: bool) -> Factorization:
    """Returns multi-epoch MF of Table 2: the optimum for six participations 342 rounds apart.

    Args:
      workspace: Where it is cached.
      equal_column_norms: Whether the columns of C have to have equal norms.

    Returns:
      The factorization.
    """
    workload = workloads.prefix_sum(_NUM_ROUNDS)
    return matrices.optimum(workspace, workload, _EPOCHS, equal_column_norms)


def table(workspace: Workspace) -> Outcome:
    """Computes Table 2.

    Args:
      workspace: Where factorizations are cached.

    Returns:
      Four numbers for each of its rows, but for what is 1 by definition.
    """
    found: dict[str, Factorization] = {
        "tree, full": factorizations.tree_aggregation(_NUM_ROUNDS, "full"),
        "identity (DP-SGD)": factorizations.identity(_NUM_ROUNDS),
    }
    for num_bands in (128, 342):
        for equal, label in ((False, ""), (True, ", equal norms")):
            found[f"banded {num_bands}{label}"] = matrices.banded(
                workspace, _NUM_ROUNDS, num_bands, _EPOCHS, equal
            )
    found["multi-epoch"] = multi_epoch(workspace, False)
    found["multi-epoch, equal norms"] = multi_epoch(workspace, True)
    workload = prefix_sum(_NUM_ROUNDS)
    least = found["multi-epoch"].rmse(workload, _EPOCHS)
    rows = []
    errors = []
    for label, factorization in found.items():
        by_epochs = factorization.sensitivity(_EPOCHS).value
        ours = (
            factorization.sensitivity(_SINGLE).value / by_epochs,
            factorization.sensitivity(_APART).value / by_epochs,
            factorization.rmse(workload, _EPOCHS) / least,
            factorization.rmse(workload, _APART) / least,
        )
        errors.append(ours[2:])
        rows += [
            Row(label, quantity, printed, number)
            for quantity, printed, number in zip(_QUANTITIES, _TABLE[label], ours, strict=True)
            if printed is not None
        ]
    in_epochs, apart = zip(*errors, strict=True)
    data = {
        "num_rounds": _NUM_ROUNDS,
        "mechanisms": list(found),
        "errors": {
            "(A) under (6, 342)": for_drawing(in_epochs),
            "(B) at least 342 apart": for_drawing(apart),
        },
    }
    return Outcome(
        tuple(rows),
        Drawing("errors over the least", data),
        (f"The least RMSE of (A) is {least:.4f}. Sensitivities are over those for (6, 342).",),
    )


def matrices_of_64_rounds(workspace: Workspace) -> Outcome:
    """Shows C and its inverse for eight factorizations of 64 rounds (Fig. 6).

    Args:
      workspace: Where factorizations are cached.

    Returns:
      The lag of the most negative diagonal of C for multi-epoch MF, and the figure.
    """
    n = 64
    workload = workloads.prefix_sum(n)
    four, eight = FixedEpochOrder(4, 16), FixedEpochOrder(8, 8)
    found: dict[str, Factorization] = {
        "single-epoch": matrices.optimum(workspace, workload),
        "SGD": factorizations.identity(n),
        "(k = 8) multi-epoch": matrices.optimum(workspace, workload, eight),
        "(k = 4) multi-epoch": matrices.optimum(workspace, workload, four),
    }
    for num_bands in (8, 16):
        for equal, label in ((True, "EN-"), (False, "")):
            found[f"{label}banded {num_bands}, k = 4"] = matrices.banded(
                workspace, n, num_bands, four, equal
            )
    rows = []
    for label, separation in (("(k = 8) multi-epoch", 8), ("(k = 4) multi-epoch", 16)):
        strategy = found[label].strategy_matrix()
        means = [float(np.mean(np.diagonal(strategy, -lag))) for lag in range(1, n // 2)]
        lag = int(np.argmin(means)) + 1
        rows.append(
            Row(
                label,
                "lag of the most negative of the first 31 diagonals of C",
                None,
                float(lag),
                claim=f"negative diagonals of C lie b = {separation} rounds apart",
                holds=lag == separation and means[lag - 1] < 0.0,
            )
        )
    drawn = {
        label: {
            "C": matrices.encode_levels(factorization.strategy_matrix()),
            "its inverse": matrices.encode_levels(factorization.noising_matrix()),
        }
        for label, factorization in found.items()
    }
    return Outcome(tuple(rows), Drawing("strategies", {"num_rounds": n, "matrices": drawn}))


def tree(workspace: Workspace, num_rounds: int) -> Outcome:
    """Shows the tree's strategy matrix and its pseudo-inverse (Fig. 7).

    Args:
      workspace: Not needed.
      num_rounds: n.

    Returns:
      How far the full decoder is from NumPy's pseudo-inverse, and the figure.
    """
    del workspace
    factorization = factorizations.tree_aggregation(num_rounds, "full")
    strategy = factorization.strategy_matrix()
    workload = workloads.prefix_sum(num_rounds)
    by_numpy = workload @ np.linalg.pinv(strategy)
    # The recursion's noise has the distribution of the pseudo-inverse's, in n columns instead of
    # 2 n - 1.
    covariance = factorization.noising_matrix() @ factorization.noising_matrix().T
    difference = np.max(np.abs(workload @ covariance @ workload.T - by_numpy @ by_numpy.T))
    row = Row(
        f"n = {num_rounds}",
        "largest difference of a covariance of prefix sums from that of NumPy's pseudo-inverse",
        None,
        float(difference),
    )
    drawn = {
        "C transposed": matrices.encode_levels(strategy.T),
        "pseudo-inverse of C": matrices.encode_levels(np.linalg.pinv(strategy)),
    }
    return Outcome((row,), Drawing("tree", {"num_rounds": num_rounds, "matrices": drawn}))


EXPERIMENTS = (
    Experiment(
        "bandmf-table-2",
        f"{PAPER}, Table 2",
        "Sensitivities and errors, n = 2052, (6, 342)",
        table,
    ),
    Experiment(
        "bandmf-figure-6",
        f"{PAPER}, Fig. 6",
        "Strategy matrices and their inverses, n = 64",
        matrices_of_64_rounds,
    ),
    Experiment(
        "bandmf-figure-7",
        f"{PAPER}, Fig. 7",
        "The tree's strategy matrix and its pseudo-inverse",
        functools.partial(tree, num_rounds=32),
    ),
)
