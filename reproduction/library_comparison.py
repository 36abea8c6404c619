"""Beyond the papers: every mechanism of the library in BandMF's setting."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from mf_aggregators import factorizations, lower_bounds, noise_recursions, noise_storage, workloads
from mf_aggregators import participation as participations
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import FixedEpochOrder, MinSeparation
from reproduction import figures, matrices
from reproduction.experiment import Experiment, Outcome, Row, Workspace, prefix_sum

# The papers' language model.
_NUM_PARAMETERS = 4_050_748
_BYTES_OF_FLOAT = 4
_QUANTITIES = (
    "RMSE",
    "max error",
    "RMSE over the floor",
    "noise kept between rounds, GB",
    "noise: seconds per round",
)


def table(
    name: str, num_rounds: int, separation: int, num_parameters: int, workspace: Workspace
) -> Outcome:
    """Compares every mechanism for clients that come back after at least b rounds.

    Args:
      name: The experiment's name.
      num_rounds: n.
      separation: b.
      num_parameters: d, for memory and seconds.
      workspace: Where factorizations are kept.

    Returns:
      Five numbers for each mechanism.
    """
    schema = MinSeparation(separation)
    floor = lower_bounds.compute(prefix_sum(num_rounds), schema)
    assert floor is not None
    workload = prefix_sum(num_rounds)
    found = {}
    for label, factorization in _mechanisms(num_rounds, schema, workspace):
        recursion = factorization.noise_recursion()
        kept = noise_recursions.floats_per_parameter(recursion)
        rmse = factorization.rmse(workload, schema)
        found[label] = (
            rmse,
            factorization.max_error(workload, schema),
            rmse / floor.rmse,
            kept * num_parameters * _BYTES_OF_FLOAT / 1e9,
            noise_storage.choose(recursion, num_parameters).seconds_per_round,
        )
    by_error = sorted(found, key=lambda label: found[label][0])
    rows = tuple(
        Row(name, label, quantity, None, number)
        for label in by_error
        for quantity, number in zip(_QUANTITIES, found[label], strict=True)
    )
    figure, ((axes,),) = figures.panels(1, 1, (9.0, 0.32 * len(by_error) + 1.2))
    places = np.arange(len(by_error))[::-1]
    for offset, column, label in ((0.2, 0, "RMSE"), (-0.2, 1, "max error")):
        axes.barh(places + offset, [found[each][column] for each in by_error], 0.38, label=label)
    for place, each in zip(places, by_error, strict=True):
        text = f" {found[each][3]:.3g} GB, {found[each][4]:.2f} s"
        axes.text(max(found[each][:2]), place, text, va="center", fontsize="small")
    axes.axvline(floor.rmse, color="black", linewidth=0.8, linestyle="--", label="floor")
    axes.set_yticks(places, by_error)
    axes.set(
        title=(
            f"n = {num_rounds}, at least {separation} rounds apart; noise kept and seconds a "
            f"round, {num_parameters:,} parameters"
        ),
        xlabel="error of prefix sums",
        xscale="log",
    )
    axes.title.set_fontsize("medium")
    axes.margins(x=0.2)
    axes.legend(loc="lower right")
    notes = (
        f"The floor is {floor.rmse:.4f}: no factorization's RMSE, nor max error, is below it under "
        f"{schema}. Seconds are those of the library's cost model for {num_parameters:,} "
        "parameters on two cores (benchmarks/noise.py measures them), with the storage that it "
        "chooses.",
    )
    return Outcome(rows, figure, notes)


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
            "participation": participations.to_dict(schema),
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
    yield (
        "structured 6 + 5",
        workspace.factorization(
            {
                "mechanism": "structured",
                "num_rounds": num_rounds,
                "num_diagonals": 6,
                "rank": 5,
                "of": single.parameters,
            },
            lambda: factorizations.structured(single, 6, 5),
        ),
    )


def experiments() -> tuple[Experiment, ...]:
    """Returns the experiment."""
    name = "library-2052"
    return (
        Experiment(
            name,
            "Beyond the papers",
            "Every mechanism at n = 2052, at most six participations at least 342 rounds apart",
            functools.partial(table, name, 2052, 342, _NUM_PARAMETERS),
        ),
    )
