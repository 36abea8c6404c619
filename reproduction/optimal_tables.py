"""Tables and figures on optimal factorizations for a single pass.

The tables and figures are from two papers: McMahan, Rush and Thakurta, Private Online Prefix Sums
via Optimal Matrix Factorizations; and Denisov et al., Improved DP for SGD via Optimal Private
Linear Operators on Adaptive Streams, which prints the former's Table 1 again.
"""

import functools
from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant

from mf_aggregators import accounting, factorizations, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.participation import SingleParticipation
from reproduction import papers_optimum
from reproduction.experiment import (
    DENISOV,
    MCMAHAN,
    Drawing,
    Experiment,
    Outcome,
    Row,
    Workspace,
    encode_levels,
    for_drawing,
)
from reproduction.papers_optimum import Iterates

_SINGLE = SingleParticipation()
# The printed table, by the number of rounds n: total errors of the online tree, of the optimum and
# of its structured approximation, and (diagonals, rank) of the approximation.
_TABLE = {
    256: ("74.4", "40.4", "40.4", (4, 4)),
    512: ("116.5", "62.0", "62.2", (5, 4)),
    1024: ("180.8", "94.6", "95.5", (5, 5)),
    2048: ("278.3", "143.6", "145.8", (6, 5)),
    4096: ("425.6", "217.3", "224.0", (6, 6)),
}

_LOWER = (
    "alternating least squares lowers the errors of B's entries; here the iteration whose total "
    "error is least is kept, and it is lower than the printed one"
)


def table(workspace: Workspace, sizes: Sequence[int]) -> Outcome:
    """Computes the table of total errors of tree, optimum and structured approximation.

    Args:
      workspace: Where factorizations are cached.
      sizes: The numbers of rounds, of those printed.

    Returns:
      Four rows for each size.
    """
    rows = []
    errors: dict[str, list[float]] = {"tree, online": [], "structured": [], "optimal": []}
    for n in sizes:
        tree, optimum, approximation, (diagonals, rank) = _TABLE[n]
        best = workspace.optimum(workloads.prefix_sum(n))
        found = {
            "tree, online": factorizations.tree_aggregation(n, "online"),
            "structured": workspace.structured(best, diagonals, rank),
            "optimal": best,
        }
        for mechanism, factorization in found.items():
            errors[mechanism].append(float(np.sqrt(np.sum(_variances(factorization, n)))))
        iterates = papers_optimum.iterate(n)
        rows += [
            Row(f"n = {n}", "tree, online: total error", tree, errors["tree, online"][-1]),
            Row(
                f"n = {n}",
                "optimal: total error",
                optimum,
                errors["optimal"][-1],
                _unfinished(optimum, errors["optimal"][-1], iterates),
            ),
            Row(
                f"n = {n}",
                "optimal, as phi's iterates end by the paper's rule: total error",
                None,
                float(iterates.total_errors[-1]),
                f"after {len(iterates.changes)} steps from a random vector; the factorization "
                "above is certified to be within 1e-6 of the least squared error",
            ),
            Row(
                f"n = {n}",
                f"structured, {diagonals} diagonals and rank {rank}: total error",
                approximation,
                errors["structured"][-1],
                _LOWER if errors["structured"][-1] <= float(approximation) else None,
            ),
        ]
    rmse = {
        label: for_drawing(np.array(values) / np.sqrt(sizes)) for label, values in errors.items()
    }
    return Outcome(tuple(rows), Drawing("rmse by rounds", {"rounds": list(sizes), "rmse": rmse}))


def _variances(factorization: Factorization, workload: object) -> FloatArray:
    """Returns each round's variance; trees' noise is scaled to the matrix of nodes, as printed.

    The library itself scales a tree's noise to the square matrix C of the rows that are drawn,
    which needs 7 % less noise.
    """
    if factorization.mechanism == "tree":
        return factorization.num_rounds.bit_length() * factorization.squared_decoder_rows(workload)
    return factorization.per_round_variance(workload, _SINGLE)


def _unfinished(printed: str, ours: float, iterates: Iterates) -> str | None:
    """Explains a printed error above the optimum by an iterate of a search with this error."""
    step = iterates.first_with(float(printed))
    if step is None or ours > float(printed):
        return None
    return (
        "the printed error is above the optimum, and above that of phi's iterates where the "
        f"paper's rule ends them ({iterates.total_errors[-1]:.2f}, at a relative change of 1e-5). "
        f"Iterates from a random vector come below it at step {step + 1} of "
        f"{len(iterates.changes)}, at a relative change of {iterates.changes[step]:.1g}: it is "
        "what an iteration that was ended early has"
    )


def variances(workspace: Workspace, num_rounds: int) -> Outcome:
    """Computes the variance of every prefix sum, for the tree and the optimum.

    Args:
      workspace: Where factorizations are cached.
      num_rounds: n.

    Returns:
      How much larger the error of the tree is, and how much variances of neighbours differ.
    """
    found = {
        "tree, online": factorizations.tree_aggregation(num_rounds, "online"),
        "optimal": workspace.optimum(workloads.prefix_sum(num_rounds)),
    }
    curves = {mechanism: _variances(each, num_rounds) for mechanism, each in found.items()}
    tree, best = curves["tree, online"], curves["optimal"]
    ratio = float(np.sqrt(np.sum(tree) / np.sum(best)))
    rows = [
        Row(
            f"n = {num_rounds}",
            "total error of the online tree over that of the optimum",
            None,
            ratio,
            claim="the tree's errors are almost twice as large, on average",
            holds=1.9 <= ratio <= 2.0,
        )
    ]
    for mechanism, values in curves.items():
        jumps = float(np.max(np.abs(np.diff(values)) / values[1:]))
        rows.append(
            Row(
                f"n = {num_rounds}",
                f"{mechanism}: largest relative change of the variance from one sum to the next",
                None,
                jumps,
            )
        )
    title = f"Prefix sums, n = {num_rounds}"
    panels = {title: {mechanism: for_drawing(values) for mechanism, values in curves.items()}}
    return Outcome(tuple(rows), Drawing("variances by round", {"panels": panels}))


# The title is used twice, because Denisov et al. print this table again.
_TITLE = "Total error of the tree, the optimum and its structured approximation"


# The momentum of Fig. 1, where it is not legible: we take the largest of the paper's grid (Table
# 3).
_MOMENTUM = 0.95
# Printed in Tables 3 and 4 of Denisov et al.: noise multipliers, and their epsilons at delta 1e-6.
_EPSILONS = {"0.341": "18.9", "0.682": "8.2", "1.364": "3.7", "2.728": "1.7", "5.456": "0.8"}
_DELTA = 1e-6
_FIXED_POINT = "fixed point"
# The most rows and columns of a matrix that a figure shows.
_MOST_DRAWN = 256
# Distances of a loss from the least loss, relative to the latter, until which methods are timed.
_DISTANCES = (1e-3, 3e-4, 1e-5)


def per_round_errors(workspace: Workspace, num_rounds: int) -> Outcome:
    """Computes the squared error of each round, for prefix sums and for momentum SGD.

    Args:
      workspace: Where factorizations are cached.
      num_rounds: n.

    Returns:
      The total errors, and the figure.
    """
    best = workspace.optimum(workloads.prefix_sum(num_rounds))
    of_momentum = workspace.optimum(workloads.momentum_sgd(num_rounds, _MOMENTUM))
    of_sums = {
        "Honaker, online": factorizations.tree_aggregation(num_rounds, "online"),
        "Honaker, full": factorizations.tree_aggregation(num_rounds, "full"),
        "optimal for prefix sums": best,
    }
    panels = {}
    rows = []
    for workload, found, title in (
        (workloads.prefix_sum(num_rounds), of_sums, "Prefix sums"),
        (
            workloads.momentum_sgd(num_rounds, _MOMENTUM),
            {**of_sums, "optimal for momentum SGD": of_momentum},
            f"Iterates of SGD with momentum {_MOMENTUM:g}",
        ),
    ):
        curves = {
            mechanism: _variances(factorization, workload)
            for mechanism, factorization in found.items()
        }
        least = min(float(np.sum(values)) for values in curves.values())
        rows += [
            Row(
                f"{title}, n = {num_rounds}: {mechanism}",
                "total squared error over the least in the panel",
                None,
                float(np.sum(values)) / least,
            )
            for mechanism, values in curves.items()
        ]
        panels[f"{title}, n = {num_rounds}"] = {
            mechanism: for_drawing(values) for mechanism, values in curves.items()
        }
    note = (
        f"The momentum of the right panel cannot be read in the paper's text; it is {_MOMENTUM:g} "
        "here, the largest of its grid."
    )
    return Outcome(tuple(rows), Drawing("variances by round", {"panels": panels}), (note,))


def losses_by_time(workspace: Workspace, num_rounds: int, most_seconds: float) -> Outcome:
    """Times three methods that search for the optimal factorization of the prefix sum.

    Args:
      workspace: Where the optimum is cached.
      num_rounds: n.
      most_seconds: How long each may take.

    Returns:
      How long each took to come near the least loss.
    """
    workload = workloads.prefix_sum(num_rounds)
    best = workspace.optimum(workload)
    assert best.optimality_gap is not None
    # A lower bound on the loss of any feasible matrix.
    least = best.total_error(workload, _SINGLE) ** 2 / (1.0 + best.optimality_gap)
    courses = {
        method: papers_optimum.run(workload, method, least * (1.0 + _DISTANCES[-1]), most_seconds)
        for method in papers_optimum.METHODS
    }
    rows = []
    for distance in _DISTANCES:
        times = {
            method: course.seconds_until(least * (1.0 + distance))
            for method, course in courses.items()
        }
        others = min(seconds for method, seconds in times.items() if method != _FIXED_POINT)
        for method, seconds in times.items():
            is_fixed_point = method == _FIXED_POINT
            rows.append(
                Row(
                    f"{method}, n = {num_rounds}",
                    f"seconds until the loss is within {distance:g} of the least",
                    None,
                    seconds,
                    f"inf: not within {most_seconds:g} s",
                    claim=(
                        "the fixed point is reached clearly faster than by both others"
                        if is_fixed_point
                        else None
                    ),
                    holds=seconds < others if is_fixed_point else None,
                )
            )
    data = {
        method: {
            "seconds": for_drawing(course.seconds),
            "above_least": for_drawing(course.losses / least - 1.0),
        }
        for method, course in courses.items()
    }
    drawing = Drawing("losses by time", {"num_rounds": num_rounds, "courses": data})
    notes = (
        "All three start from one matrix (Eq. 6 at v = 1, its diagonal scaled to one), which is "
        "near the optimum already, so that a loose tolerance says little. Newton directions are "
        "by five steps of conjugate gradients, not the program that the paper timed. Seconds are "
        "those of one run on a machine that may do other things.",
    )
    return Outcome(tuple(rows), drawing, notes)


def entries(workspace: Workspace, num_rounds: int) -> Outcome:
    """Shows the entries of B and C of the optimum for the prefix sum.

    Args:
      workspace: Where the optimum is cached.
      num_rounds: n.

    Returns:
      The largest entry, and the figure: entries, their ranks, and their histogram.
    """
    best = workspace.optimum(workloads.prefix_sum(num_rounds))
    strategy = best.strategy_matrix()
    decoder = best.decoder_matrix(workloads.prefix_sum(num_rounds))
    largest = float(max(np.max(strategy), np.max(decoder)))
    row = Row(
        f"n = {num_rounds}",
        "largest entry of B or C, at sensitivity 1",
        "2.36" if num_rounds == 512 else None,
        largest,
        "the paper divides by this number to bring all entries to at most one: ours, rounded up",
    )
    drawn = {}
    for label, matrix in (("B", decoder), ("C", strategy)):
        below = np.abs(matrix[np.tril_indices(num_rounds)])
        counts, edges = np.histogram(np.log10(below[below > 0.0]), bins=60)
        # Draw every k-th row and column, because a panel has fewer dots than the matrix has
        # entries.
        every = -(-num_rounds // _MOST_DRAWN)
        drawn[label] = {
            "entries": encode_levels(matrix[::every, ::every] / largest),
            "ranks": encode_levels(_ranks(matrix)[::every, ::every]),
            "every": every,
            "logarithms": for_drawing(edges),
            "counts": counts.tolist(),
        }
    data = {"num_rounds": num_rounds, "largest": largest, "matrices": drawn}
    return Outcome((row,), Drawing("entries", data))


def _ranks(matrix: np.ndarray) -> np.ndarray:
    """Returns ranks in (0, 1] of the magnitudes in a matrix's lower triangle; zero above it."""
    lower = np.tril_indices(len(matrix))
    order = np.argsort(np.argsort(np.abs(matrix[lower])))
    ranks = np.zeros_like(matrix)
    ranks[lower] = (order + 1.0) / len(order)
    return ranks


def epsilons(workspace: Workspace) -> Outcome:
    """Computes the epsilons of a grid of noise multipliers, with Renyi and exact accounting.

    Args:
      workspace: Not needed.

    Returns:
      The printed epsilons by Renyi accounting at integer orders, and the exact ones.
    """
    del workspace
    rows = []
    exact = []
    for multiplier, printed in _EPSILONS.items():
        event = accounting.event(float(multiplier))
        renyi = rdp_privacy_accountant.RdpAccountant(orders=range(2, 257)).compose(event)
        exact.append(accounting.epsilon(float(multiplier), _DELTA))
        where = f"noise multiplier {multiplier}"
        rows += [
            Row(
                where,
                "epsilon at delta 1e-6, Renyi accounting at integer orders",
                printed,
                float(renyi.get_epsilon(_DELTA)),
            ),
            Row(
                where,
                "epsilon at delta 1e-6, exact (privacy loss distribution)",
                None,
                exact[-1],
                f"the same noise, for which {printed} is printed",
            ),
        ]
    drawing = Drawing(
        "epsilons",
        {
            "noise_multipliers": [float(multiplier) for multiplier in _EPSILONS],
            "printed": [float(printed) for printed in _EPSILONS.values()],
            "exact": for_drawing(exact),
            "delta": _DELTA,
        },
    )
    note = (
        "The paper does not name its accountant; Renyi accounting at the orders 2 to 256 is what "
        "gives all five of its epsilons."
    )
    return Outcome(tuple(rows), drawing, (note,))


EXPERIMENTS = (
    Experiment(
        "prefix-sums-table-1",
        f"{MCMAHAN}, Table 1",
        _TITLE,
        functools.partial(table, sizes=tuple(_TABLE)),
    ),
    Experiment(
        "prefix-sums-figure-1",
        f"{MCMAHAN}, Fig. 1",
        "Variance of each prefix sum, n = 4096",
        functools.partial(variances, num_rounds=4096),
    ),
    Experiment(
        "denisov-table-2",
        "Denisov et al.: Improved DP for SGD on Adaptive Streams, Table 2 (Table 1 of McMahan, "
        "Rush and Thakurta, printed again)",
        _TITLE,
        functools.partial(table, sizes=tuple(_TABLE)),
    ),
    Experiment(
        "denisov-figure-1",
        f"{DENISOV}, Fig. 1",
        "Squared error of each round: prefix sums and momentum SGD, n = 512",
        functools.partial(per_round_errors, num_rounds=512),
    ),
    Experiment(
        "denisov-figure-4",
        f"{DENISOV}, Fig. 4",
        "Loss by time: gradient descent, Newton directions and the fixed point, n = 2048",
        functools.partial(losses_by_time, num_rounds=2048, most_seconds=75.0),
    ),
    Experiment(
        "denisov-figure-5",
        f"{DENISOV}, Fig. 5",
        "Entries of the optimal factorization, n = 512",
        functools.partial(entries, num_rounds=512),
    ),
    Experiment(
        "denisov-epsilons",
        f"{DENISOV}, Tables 3 and 4",
        "Epsilons of the noise multipliers",
        epsilons,
    ),
)
