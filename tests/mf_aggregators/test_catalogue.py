"""The library's mechanisms by name, and checkpoints of names that are not among them."""

import inspect
import pathlib

import numpy as np
import pytest

from mf_aggregators import catalogue, checkpoints, factorizations, planning
from mf_aggregators.factorizations import BandedFactorization, Factorization, from_matrix
from mf_aggregators.participation import MinSeparation
from mf_aggregators.workloads import Workload
from tests.refusals import refuses

_ROOT = pathlib.Path(__file__).parents[2]


class _Named(BandedFactorization):
    """Stands for a matrix of a mechanism that another package registered with version 2."""

    mechanism = "discounted"


def _saved(
    monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path, **parameters: str
) -> BandedFactorization:
    """Saves a matrix as version 2 saved that of such a mechanism; returns the library's own."""
    matrix = np.eye(6) + 0.5 * np.eye(6, k=-1)
    made = from_matrix(matrix)
    assert isinstance(made, BandedFactorization)
    with monkeypatch.context() as earlier:
        earlier.setattr(Factorization, "check_own", lambda factorization: factorization)
        checkpoints.save(_Named(made.bands, parameters=parameters), directory)
    return made


def test_a_checkpoint_of_another_packages_mechanism_is_read_by_its_structure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    made = _saved(monkeypatch, tmp_path / "theirs", structure="banded", discount="0.5")
    loaded = checkpoints.load(tmp_path / "theirs")
    assert type(loaded) is BandedFactorization
    assert loaded.mechanism == "banded"
    assert loaded.has_same_matrix(made)
    assert loaded.sensitivity(MinSeparation(2)) == made.sensitivity(MinSeparation(2))


def test_a_checkpoint_of_no_known_structure_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    _saved(monkeypatch, tmp_path / "theirs")
    with refuses("the mechanism 'discounted'", "from_matrix", error=checkpoints.CheckpointError):
        checkpoints.load(tmp_path / "theirs")


def test_a_plan_says_which_mechanism_offers_nothing_for_its_clients() -> None:
    drawn = planning.Setting(
        num_rounds=6,
        population=60,
        clients_per_round=5,
        participation=None,
        sampling="poisson",
        epsilon=4.0,
        delta=1e-4,
        model_size=10,
    )
    plan = planning.make(drawn, mechanisms=("blt", "identity"))
    assert list(plan.infeasible) == ["blt"]
    with refuses("blt", "variant"):
        planning.make(drawn, mechanisms=("blt",))


def test_what_has_an_option_for_an_error_takes_weights() -> None:
    made_for = {name: each for name, each in catalogue.ENTRIES.items() if "error" in each.options}
    assert made_for.keys() >= {"banded", "optimal", "toeplitz", "blt"}
    sizes = {"num_bands": 2, "num_buffers": 1}
    for each in made_for.values():
        of_size = {name: size for name, size in sizes.items() if name in each.options}
        options = {**of_size, "error": np.arange(1.0, 7.0)}
        made = each.build(Workload("prefix_sum", 6), options=options)
        assert made.parameters["error"] == "weights"


def test_options_are_parameters_and_their_help_has_the_defaults() -> None:
    for mechanism in catalogue.ENTRIES.values():
        parameters = inspect.signature(mechanism.make).parameters
        made_by = (
            parameters
            | inspect.signature(getattr(factorizations, mechanism.name, mechanism.make)).parameters
        )
        for name, option in mechanism.options.items():
            default = made_by[name].default
            if default not in (None, inspect.Parameter.empty) and not isinstance(default, bool):
                assert option.meaning.endswith(f"Default: {default}."), option


def test_every_mechanism_says_what_it_is() -> None:
    """The documentation's table has each of them, in their own words."""
    table = (_ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    for name, mechanism in catalogue.ENTRIES.items():
        assert mechanism.summary
        assert mechanism.factorization.mechanism == name
        assert f"\n| [`{name}`](mechanisms/{name}.md) | {mechanism.summary} |" in table
        assert (_ROOT / "docs" / "mechanisms" / f"{name}.md").is_file()


@pytest.mark.parametrize("name", catalogue.ENTRIES)
def test_a_mechanism_is_optimised_for_the_nearest_workload(name: str) -> None:
    """It says neither more than it can, which training runs rely on, nor less."""
    rounds, schema = 12, MinSeparation(4)
    changing = Workload("momentum_sgd", rounds, 0.5, tuple(np.linspace(1.0, 0.1, rounds)))
    entry = catalogue.entry(name)

    def made(workload: Workload) -> Factorization:
        options = {"num_diagonals": 2, "rank": 2} if name == "structured" else {}
        participation = None if name in ("optimal", "structured") else schema
        return entry.build(workload, participation, entry.options_of_run(options, rounds, 4))

    sums = Workload("prefix_sum", rounds)
    assert entry.nearest_workload(sums) in (None, sums)
    nearest = entry.nearest_workload(changing)
    if nearest is None:
        assert made(changing).has_same_matrix(made(sums))
        return
    if nearest != changing:
        with refuses(name):
            made(changing)
    if nearest != sums:
        assert nearest.momentum == 0.5
        inside, after = (made(each).rmse(nearest, schema) for each in (nearest, sums))
        assert inside < 0.999 * after
