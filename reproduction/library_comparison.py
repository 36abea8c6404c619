"""Beyond the papers: every mechanism of the library in BandMF's setting."""

import functools
from collections.abc import Callable, Iterator

from mf_aggregators import factorizations, lower_bounds, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.noise import costs
from mf_aggregators.participation import FixedEpochOrder, MinSeparation
from reproduction import matrices
from reproduction.experiment import Drawing, Experiment, Outcome, Row, Workspace, prefix_sum

# The papers' language model.
_NUM_PARAMETERS = 4_050_748
_QUANTITIES = (
    "RMSE",
    "max error",
    "RMSE over the floor",
    "noise kept between rounds, GB",
    "noise: seconds per round",
    "noise: memory of a round, GB",
    "noise: disk, GB",
)


def table(workspace: Workspace, num_rounds: int, separation: int, num_parameters: int) -> Outcome:
    """Compares every mechanism for clients that come back after at least b rounds.

    Args:
      workspace: Where factorizations are cached.
      num_rounds: n.
      separation: b.
      num_parameters: d, for memory and seconds.

    Returns:
      Seven numbers for each mechanism.
    """
    schema = MinSeparation(separation)
    floor = lower_bounds.compute(prefix_sum(num_rounds), schema)
    assert floor is not None
    workload = prefix_sum(num_rounds)
    found = {}
    for label, factorization in _mechanisms(num_rounds, schema, workspace):
        recursion = factorization.noise_recursion()
        kept = costs.bytes_per_parameter(recursion)
        errors = factorization.errors(workload, schema)
        cost = costs.choose(recursion, num_parameters)
        found[label] = (
            errors.rmse,
            errors.max_error,
            errors.rmse / floor.rmse,
            kept * num_parameters / 1e9,
            cost.seconds_per_round,
            cost.memory_bytes / 1e9,
            cost.disk_bytes / 1e9,
        )
    by_error = sorted(found, key=lambda label: found[label][0])
    rows = tuple(
        Row(label, quantity, None, number)
        for label in by_error
        for quantity, number in zip(_QUANTITIES, found[label], strict=True)
    )
    data = {
        "num_rounds": num_rounds,
        "separation": separation,
        "num_parameters": num_parameters,
        "floor": floor.rmse,
        "mechanisms": {
            label: dict(zip(_QUANTITIES, found[label], strict=True)) for label in by_error
        },
    }
    notes = (
        f"The floor is {floor.rmse:.4f}: no factorization's RMSE, nor max error, is below it under "
        f"{schema}. Seconds, memory and disk are those of the library's cost model for "
        f"{num_parameters:,} parameters on two cores (benchmarks/noise.py measures them), with the "
        "storage that it chooses; memory is what a round's noise takes beside the model and TFF.",
    )
    return Outcome(rows, Drawing("mechanisms", data), notes)


def _mechanisms(
    num_rounds: int, schema: MinSeparation, workspace: Workspace
) -> Iterator[tuple[str, Factorization]]:
    separation = schema.separation
    most = schema.most_participations(num_rounds)
    epochs = FixedEpochOrder(most, separation)
    workload = workloads.prefix_sum(num_rounds)

    def fetch(
        mechanism: str, number: str, value: int, compute: Callable[[], Factorization]
    ) -> tuple[str, Factorization]:
        description = {
            "mechanism": mechanism,
            "num_rounds": num_rounds,
            "participation": schema.to_dict(),
            number: value,
        }
        label = f"{mechanism} {value}"
        return label, workspace.factorization(description, compute)

    yield "identity", factorizations.identity(num_rounds)
    for decoder in ("online", "full"):
        yield f"tree, {decoder}", factorizations.tree_aggregation(num_rounds, decoder)
    for equal, label in ((False, "optimal for (k, b)"), (True, "optimal for (k, b), equal norms")):
        yield label, matrices.optimum(workspace, workload, epochs, equal)
    for num_bands in sorted({max(1, separation // 8), separation}):
        for equal, label in ((True, ""), (False, ", free norms")):
            yield (
                f"banded {num_bands}{label}",
                matrices.banded(workspace, num_rounds, num_bands, epochs, equal),
            )
    yield fetch(
        "toeplitz",
        "num_bands",
        separation,
        lambda: factorizations.toeplitz(num_rounds, separation, schema),
    )
    for num_buffers in (2, 4, 8):
        yield fetch(
            "blt",
            "num_buffers",
            num_buffers,
            lambda buffers=num_buffers: factorizations.blt(  # type: ignore[misc]
                num_rounds, buffers, schema
            ),
        )
    for num_bands in sorted({min(bands, num_rounds) for bands in (16, 64)}):
        yield fetch(
            "banded_inverse",
            "num_bands",
            num_bands,
            lambda bands=num_bands: factorizations.banded_inverse(  # type: ignore[misc]
                num_rounds, bands, schema
            ),
        )
    single = matrices.optimum(workspace, workload)
    yield "structured 6 + 5", matrices.structured(workspace, single, 6, 5)


EXPERIMENTS = (
    Experiment(
        "library-2052",
        "Beyond the papers",
        "Every mechanism at n = 2052, at most six participations at least 342 rounds apart",
        functools.partial(table, num_rounds=2052, separation=342, num_parameters=_NUM_PARAMETERS),
    ),
)
