"""Mechanisms of other packages: offered by name, and believed in nothing."""

import ast
import dataclasses
import importlib.metadata
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import catalogue, checkpoints, planning, sensitivity
from mf_aggregators.catalogue import (
    Entry,
    Option,
    Request,
    Variant,
)
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
)
from mf_aggregators.noise.recursions import (
    BandedNoise,
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
)
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.workloads import Workload
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_ROOT = pathlib.Path(__file__).parents[2]


class Discounted(Entry):
    """C with a diagonal of ones and a constant below it."""

    name = "discounted"
    options = (Option("discount", "number", "The entry below the diagonal."),)

    def build(self, request: Request) -> np.ndarray:
        """Returns the matrix."""
        discount = request.options.get("discount", 0.5)
        return np.eye(request.num_rounds) + discount * np.eye(request.num_rounds, k=-1)


class InBands(Discounted):
    """The same, as a factorization of the library that is said to be optimal."""

    def build(self, request: Request) -> BandedFactorization:  # type: ignore[override]
        """Returns the factorization."""
        rounds = request.num_rounds
        bands = np.column_stack([np.ones(rounds), np.full(rounds, 0.5)])
        bands[0, 1] = 0.0
        return BandedFactorization(bands, optimality_gap=0.0, participation=SingleParticipation())


class Boastful(DenseFactorization):
    """Says that it is much better than it is."""

    mechanism = "discounted"
    recursion: NoiseRecursion | None = None

    def sensitivity(self, participation: Any) -> sensitivity.Sensitivity:
        """Returns far too little."""
        return sensitivity.Sensitivity(value=1e-3, is_exact=True, theorem="none")

    def squared_decoder_rows(self, workload: Any) -> np.ndarray:
        """Returns far too little."""
        return np.full(self.num_rounds, 1e-6)

    def strategy_bands(self) -> int:
        """Returns fewer than there are."""
        return 1

    def noise_recursion(self) -> Any:
        """Returns the true recursion, or the one that was set."""
        return self.recursion or super().noise_recursion()


class OwnClass(Discounted):
    """The same matrix in a class of its own."""

    factorization = Boastful
    made: type[Boastful] = Boastful

    def build(self, request: Request) -> Factorization:  # type: ignore[override]
        """Returns the factorization."""
        return self.made(super().build(request), optimality_gap=0.0)


class _EntryPoint:
    """What stands for an installed package."""

    def __init__(self, loaded: Any, name: str = "discounted") -> None:
        self.loaded, self.name, self.value = loaded, name, f"another.package:{name}"

    def load(self) -> Any:
        """Returns the class, or raises what importing it raises."""
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture(autouse=True)
def _fresh_catalogue() -> Iterator[None]:
    catalogue.entries.cache_clear()
    yield
    catalogue.entries.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, *entry_points: _EntryPoint) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(entry_points))
    catalogue.entries.cache_clear()


def _request(num_rounds: int, **options: Any) -> Request:
    return Request(num_rounds, Workload("prefix_sum", num_rounds), options=options)


@pytest.mark.parametrize("made", [Discounted, InBands, OwnClass])
@settings(deadline=None, max_examples=15)
@given(num_rounds=st.integers(2, 7), separation=st.integers(1, 7))
def test_sensitivity_and_errors_are_those_of_the_matrix(
    made: type[Entry], num_rounds: int, separation: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _install(monkeypatch, _EntryPoint(made))
        factorization = catalogue.entry("discounted").build(_request(num_rounds))
    assert isinstance(factorization, Factorization)
    assert factorization.mechanism == "discounted"
    matrix = np.eye(num_rounds) + 0.5 * np.eye(num_rounds, k=-1)
    np.testing.assert_array_equal(factorization.strategy_matrix(), matrix)
    schema = MinSeparation(min(separation, num_rounds))
    found = factorization.sensitivity(schema)
    truth = brute_force.scalar_sensitivity(matrix, schema)
    assert found.value >= truth * (1 - 1e-12)
    assert not found.is_exact or found.value == pytest.approx(truth)
    decoder = np.tri(num_rounds) @ np.linalg.inv(matrix)
    np.testing.assert_allclose(
        factorization.squared_decoder_rows(Workload("prefix_sum", num_rounds)),
        np.sum(decoder**2, axis=1),
    )
    assert factorization.strategy_bands() in (2, None)
    # Nobody has certified it.
    assert factorization.optimality_gap is None
    np.testing.assert_allclose(factorization.noising_matrix(), np.linalg.inv(matrix))


@pytest.mark.parametrize(
    "recursion",
    [
        IndependentNoise(6),
        IndependentNoise(5),
        DenseNoise(np.linalg.inv(np.eye(6) + 0.5 * np.eye(6, k=-1)) * (1 - 1e-7)),
        DenseNoise(np.full((6, 6), 1e308)),
        object(),
    ],
)
def test_rows_that_are_not_those_of_the_matrix_are_refused(
    monkeypatch: pytest.MonkeyPatch, recursion: Any
) -> None:
    """The third has 1e-7 less noise than it says."""
    monkeypatch.setattr(Boastful, "recursion", recursion)
    _install(monkeypatch, _EntryPoint(OwnClass))
    with pytest.raises(ValueError, match=r"noise rows of discounted|no recursion of the library"):
        catalogue.entry("discounted").build(_request(6))


_BANDS = np.column_stack([np.ones(6), np.full(6, 0.5)])


class Quieter(BandedNoise):
    """Shows one matrix, and makes rows with half of the noise."""

    def noising_matrix(self) -> np.ndarray:
        """Returns the inverse of what C is said to be."""
        return np.linalg.inv(np.eye(6) + 0.5 * np.eye(6, k=-1))

    def apply(self, z: np.ndarray) -> np.ndarray:
        """Returns the rows that C is said to have."""
        return self.noising_matrix() @ z

    @property
    def diagonal(self) -> np.ndarray:
        """Returns half of what it is."""
        return 0.5 * super().diagonal


def test_a_subclass_of_a_recursion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could show the check one matrix, and the run another."""
    monkeypatch.setattr(Boastful, "recursion", Quieter(_BANDS.copy()))
    _install(monkeypatch, _EntryPoint(OwnClass))
    with refuses("Quieter"):
        catalogue.entry("discounted").build(_request(6))


def test_what_is_drawn_follows_from_the_fields_that_were_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recursion may keep that of another matrix as its normalised one, and change its arrays."""
    recursion = BandedNoise(_BANDS.copy())
    vars(recursion)["normalised"] = BandedNoise(np.column_stack([np.ones(6), np.zeros(6)]))
    monkeypatch.setattr(Boastful, "recursion", recursion)
    _install(monkeypatch, _EntryPoint(OwnClass))
    made = catalogue.entry("discounted").build(_request(6))
    assert isinstance(made, Factorization)
    recursion.bands.setflags(write=True)
    recursion.bands[...] = np.column_stack([np.full(6, 10.0), np.zeros(6)])
    found = made.noise_recursion()
    assert found.normalised.earlier(1, np.ones((1, 1)))[0] == -0.5
    np.testing.assert_allclose(
        found.apply(np.eye(6)), np.linalg.inv(made.strategy_matrix()), atol=1e-12
    )


class _Changing(DenseFactorization):
    """Keeps the array of its matrix, to be changed by its owner."""

    mechanism = "discounted"

    def __init__(self, matrix: np.ndarray, **attributes: Any) -> None:
        super().__init__(matrix, **attributes)
        self.kept = matrix

    def strategy_matrix(self) -> np.ndarray:
        """Returns the array itself."""
        return self.kept

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the array itself."""
        return {"matrix": self.kept}


@pytest.mark.parametrize("is_own", [False, True])
def test_arrays_that_are_changed_after_the_check_change_nothing(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    bands = _BANDS.copy()
    bands[0, 1] = 0.0
    matrix = np.eye(6) + 0.5 * np.eye(6, k=-1)
    kept = BandedFactorization(bands) if is_own else _Changing(matrix)

    class Keeping(Discounted):
        def build(self, request: Request) -> Any:
            return kept

    _install(monkeypatch, _EntryPoint(Keeping))
    made = catalogue.entry("discounted").build(_request(6))
    assert isinstance(made, Factorization)
    for array in [matrix, *kept.arrays().values()]:
        array.setflags(write=True)
        array *= 1e-3
    np.testing.assert_array_equal(made.strategy_matrix(), np.eye(6) + 0.5 * np.eye(6, k=-1))
    inverse = np.linalg.inv(np.eye(6) + 0.5 * np.eye(6, k=-1))
    np.testing.assert_allclose(made.noise_rows(np.eye(6)), inverse, atol=1e-6)
    assert made.sensitivity(SingleParticipation()).value == pytest.approx(1.25**0.5)
    for array in made.arrays().values():
        assert np.max(np.abs(array)) >= 0.5


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (np.triu(np.ones((4, 4))), "lower triangular"),
        (np.diag([1.0, 0.0, 1.0, 1.0]), "singular|diagonal"),
        (np.full((4, 4), np.nan), "finite"),
        (np.eye(3), "3 rounds, and 4 were asked for"),
        ([[1.0]], "is no factorization"),
        (KeyError("discount"), "the mechanism discounted failed: KeyError"),
    ],
)
def test_what_is_no_factorization_is_refused(
    monkeypatch: pytest.MonkeyPatch, made: Any, message: str
) -> None:
    class Bad(Discounted):
        def build(self, request: Request) -> Any:
            if isinstance(made, Exception):
                raise made
            return made

    _install(monkeypatch, _EntryPoint(Bad))
    with pytest.raises(ValueError, match=message):
        catalogue.entry("discounted").build(_request(4))


def _named(name: str, *options: Option) -> type[Entry]:
    return type("Named", (Discounted,), {"name": name, "options": options})


@pytest.mark.parametrize(
    ("entry_point", "reason"),
    [
        (_EntryPoint(ImportError("no module named numba")), "no module named numba"),
        (_EntryPoint(object), "is no mf_aggregators.catalogue.Entry"),
        (_EntryPoint(Discounted, "other"), "which must be that of the entry point"),
        (_EntryPoint(_named("Dis-counted"), "Dis-counted"), "lower-case"),
        (_EntryPoint(_named("banded"), "banded"), "a mechanism banded already"),
        (
            _EntryPoint(_named("discounted", Option("num_bands", "number", "A number."))),
            "num_bands is another one for banded_inverse",
        ),
        (_EntryPoint(_named("discounted", Option("a b", "number", "A."))), "no name of a flag"),
    ],
)
def test_packages_that_are_broken_are_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, entry_point: _EntryPoint, reason: str
) -> None:
    own = list(catalogue.entries())
    _install(monkeypatch, entry_point)
    with pytest.warns(catalogue.MechanismWarning, match=reason):
        assert list(catalogue.entries()) == own


def test_of_two_packages_with_one_name_the_first_is_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, _EntryPoint(Discounted), _EntryPoint(InBands))
    with pytest.warns(catalogue.MechanismWarning):
        assert "discounted" in catalogue.entries()


def test_amplification_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Amplified(Discounted):
        has_known_bands = True

        def num_bands(self, options: Mapping[str, Any]) -> int:
            return 1

        def for_sampling(self, setting: Any) -> tuple[Variant, ...]:
            return (Variant(amplified_bands=1),)

    _install(monkeypatch, _EntryPoint(Amplified))
    mechanism = catalogue.entry("discounted")
    assert not mechanism.has_known_bands
    assert mechanism.num_bands({}) is None
    (variant,) = mechanism.for_sampling(
        mfa.catalogue.SamplingSetting(8, (1, 2), mfa.participation.FixedEpochOrder(2, 4))
    )
    assert variant.amplified_bands is None


@pytest.mark.parametrize("made", [Discounted, InBands, OwnClass])
def test_checkpoints_are_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, made: type[Entry]
) -> None:
    _install(monkeypatch, _EntryPoint(made))
    factorization = catalogue.entry("discounted").build(_request(6, discount=0.5))
    assert isinstance(factorization, Factorization)
    checkpoints.save(factorization, tmp_path / "checkpoint")
    for _ in range(2):
        loaded = checkpoints.load(tmp_path / "checkpoint")
        assert loaded.mechanism == "discounted"
        assert type(loaded) is type(factorization)
        np.testing.assert_array_equal(loaded.strategy_matrix(), factorization.strategy_matrix())
        assert loaded.sensitivity(MinSeparation(2)) == factorization.sensitivity(MinSeparation(2))
        if made is OwnClass:
            break
        # What is of the library's classes is read without the package.
        _install(monkeypatch)
    _install(monkeypatch)
    if made is OwnClass:
        with refuses("discounted", error=checkpoints.CheckpointError):
            checkpoints.load(tmp_path / "checkpoint")


def test_a_damaged_checkpoint_of_another_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The recursion is checked when it is read, too."""
    _install(monkeypatch, _EntryPoint(OwnClass))
    factorization = catalogue.entry("discounted").build(_request(6))
    assert isinstance(factorization, Factorization)
    checkpoints.save(factorization, tmp_path / "checkpoint")
    monkeypatch.setattr(Boastful, "recursion", IndependentNoise(6))
    with refuses("matrix", error=checkpoints.CheckpointError):
        checkpoints.load(tmp_path / "checkpoint")


def test_what_an_entry_says_of_weights_is_what_its_function_takes() -> None:
    with_errors = [
        each for each in catalogue.entries().values() if each.error_option("max") is not None
    ]
    assert {each.name for each in with_errors} >= {"banded", "optimal", "toeplitz", "blt"}
    sizes = {"num_bands": 2, "num_buffers": 1}
    for each in with_errors:
        known = {option.name for option in each.options}
        options = {name: size for name, size in sizes.items() if name in known}
        request = _request(6, **options, error=np.arange(1.0, 7.0))
        try:
            made = each.build(request)
        except ValueError:
            made = None
        assert (made is not None) == (each.error_option("weights") is not None)


@pytest.mark.parametrize("takes_weights", [False, True])
def test_a_plan_for_an_error_makes_a_mechanism_for_it_that_has_such_an_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, takes_weights: bool
) -> None:
    asked: list[Any] = []

    class WithError(Discounted):
        options = (
            Option(
                "error", "error", "Which.", choices=("mean", "max"), takes_weights=takes_weights
            ),
        )

        def build(self, request: Request) -> np.ndarray:
            asked.append(request.options.get("error"))
            return super().build(request)

    _install(monkeypatch, _EntryPoint(WithError))
    weights = tuple(float(weight) for weight in range(1, 7))
    setting = planning.Setting(
        num_rounds=6,
        population=60,
        clients_per_round=5,
        participation=MinSeparation(3),
        sampling=None,
        epsilon=4.0,
        delta=1e-4,
        model_size=10,
    )
    errors: tuple[Any, ...] = ("mean", "max", weights)
    for error in errors:
        plan = planning.make(
            dataclasses.replace(setting, error=error), mechanisms=("discounted", "identity")
        )
        assert {each.kind for each in plan.candidates} == {"discounted", "identity"}
    assert asked == [None, "max", weights if takes_weights else None]
    file = tmp_path / "weights.txt"
    np.savetxt(file, weights)
    flags_given = {"error": str(file)}
    if takes_weights:
        options = mechanism_flags.given_options(flags_given, "discounted")
        np.testing.assert_array_equal(options["error"], weights)
    else:
        with refuses("--error", "mean or max", error=CommandError):
            mechanism_flags.given_options(flags_given, "discounted")


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("place", ["build", "for_timers"])
@pytest.mark.parametrize("error", [KeyError("discount"), ValueError("needs --discount.")])
def test_a_plan_goes_on_without_what_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    class Bad(Discounted):
        def build(self, request: Request) -> Any:
            raise error

        def for_timers(self, setting: Any) -> Any:
            if place == "for_timers":
                raise error
            return super().for_timers(setting)

    _install(monkeypatch, _EntryPoint(Bad))
    setting = planning.Setting(
        num_rounds=6,
        population=60,
        clients_per_round=5,
        participation=MinSeparation(3),
        sampling=None,
        epsilon=4.0,
        delta=1e-4,
        model_size=10,
    )
    plan = planning.make(setting)
    (infeasible,) = (each for each in plan.infeasible if each.mechanism == "discounted")
    assert infeasible.reason.startswith(("cannot be made: ", "cannot be planned: "))
    assert "discount" in infeasible.reason
    assert plan.recommended.kind != "discounted"


def test_a_plan_says_which_mechanism_offers_nothing_that_it_can_evaluate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Misspelt(Discounted):
        def for_timers(self, setting: Any) -> Any:
            return [catalogue.Variant({"discuont": 0.5})]

    _install(monkeypatch, _EntryPoint(Misspelt))
    sizes: dict[str, Any] = {
        **{"num_rounds": 6, "population": 60, "clients_per_round": 5, "model_size": 10},
        **{"epsilon": 4.0, "delta": 1e-4},
    }
    timers = planning.Setting(participation=MinSeparation(3), sampling=None, **sizes)
    plan = planning.make(timers, mechanisms=("discounted", "identity"))
    assert [each.mechanism for each in plan.infeasible] == ["discounted"]
    assert "discuont" in plan.infeasible[0].reason
    # Another package offers nothing for batches that are drawn, by default.
    drawn = planning.Setting(participation=None, sampling="poisson", **sizes)
    plan = planning.make(drawn, mechanisms=("discounted", "identity"))
    assert [each.mechanism for each in plan.infeasible] == ["discounted"]
    with refuses("discounted", "nothing", "mf-factorize", "--checkpoint") as refused:
        planning.make(drawn, mechanisms=("discounted",))
    # More memory would be of no use.
    assert "memory" not in str(refused.value)
    with refuses("blt", "nothing") as refused:
        planning.make(drawn, mechanisms=("blt",))
    assert "--checkpoint" not in str(refused.value)


@pytest.mark.parametrize("has_bands", [False, True])
def test_a_matrix_without_an_inverse_in_floats_is_a_row_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, has_bands: bool
) -> None:
    class Tiny(Discounted):
        def build(self, request: Request) -> Any:
            matrix = 1e-300 * np.eye(request.num_rounds) + np.eye(request.num_rounds, k=-1)
            bands = np.stack([np.diag(matrix), np.append(0.0, np.diag(matrix, -1))], axis=1)
            return mfa.factorizations.BandedFactorization(bands) if has_bands else matrix

    _install(monkeypatch, _EntryPoint(Tiny))
    with refuses("discounted", "inverse", error=catalogue.MechanismError):
        catalogue.entry("discounted").build(_request(6))
    sizes: dict[str, Any] = {
        **{"num_rounds": 6, "population": 60, "clients_per_round": 5, "model_size": 10},
        **{"epsilon": 4.0, "delta": 1e-4},
    }
    setting = planning.Setting(participation=MinSeparation(3), sampling=None, **sizes)
    plan = planning.make(setting, mechanisms=("discounted", "identity"))
    assert [each.mechanism for each in plan.infeasible] == ["discounted"]
    assert plan.recommended.kind == "identity"


def test_a_checkpoint_of_a_package_that_is_gone_is_not_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    _install(monkeypatch, _EntryPoint(OwnClass))
    factorization = catalogue.entry("discounted").build(_request(4))
    assert isinstance(factorization, Factorization)
    checkpoints.save(factorization, tmp_path / "theirs")
    _install(monkeypatch)
    with refuses(
        *("the mechanism 'discounted'", "install", catalogue.GROUP),
        error=checkpoints.CheckpointError,
    ) as refused:
        checkpoints.load(tmp_path / "theirs")
    assert "broken" not in str(refused.value)


@pytest.mark.parametrize("for_runs", [False, True])
def test_an_option_with_the_name_of_another_flag_is_named(
    monkeypatch: pytest.MonkeyPatch, for_runs: bool
) -> None:
    made = _named("discounted", Option("delta", "number", "A number."))
    _install(monkeypatch, _EntryPoint(made))
    values = flags.FlagValues()
    flags.DEFINE_float("delta", 1e-6, "Another.", flag_values=values)
    with refuses("--delta", "discounted", error=CommandError):
        mechanism_flags.define_options(values, for_runs=for_runs)


def test_a_default_in_words_ends_as_help_ends_it() -> None:
    for text in ("the separation", "the separation."):
        option = Option("block", "integer", "Rounds.", default_text=text)
        assert option.described_default() == "the separation"


def test_every_mechanism_says_what_it_is() -> None:
    """Those of the library: the documentation's table has each of them, in their own words."""
    table = (_ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, mechanism in catalogue.entries().items():
            assert mechanism.summary
            assert mechanism.factorization is not None
            assert mechanism.factorization.mechanism == name
            row = f"\n| [`{name}`](mechanisms/{name}.md) | {mechanism.summary} |"
            assert row in table
            assert (_ROOT / "docs" / "mechanisms" / f"{name}.md").is_file()


@pytest.mark.parametrize("name", catalogue.entries())
def test_a_mechanism_is_optimised_for_the_nearest_workload(name: str) -> None:
    """It says neither more than it can, which training runs rely on, nor less."""
    rounds, schema = 12, MinSeparation(4)
    changing = Workload("momentum_sgd", rounds, 0.5, tuple(np.linspace(1.0, 0.1, rounds)))
    entry = catalogue.entry(name)

    def made(workload: Workload) -> Factorization:
        options = {"num_diagonals": 2, "rank": 2} if name == "structured" else {}
        participation = None if name in ("optimal", "structured") else schema
        found = entry.build(
            entry.for_audit(Request(rounds, workload, participation, options=options))
        )
        assert isinstance(found, Factorization)
        return found

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


def test_another_package_says_what_its_mechanism_is_optimised_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changing = Workload("momentum_sgd", 4, 0.5, (1.0, 2.0, 3.0, 4.0))

    class OfAnyWorkload(Discounted):
        has_any_workload = True

    class OfNone(Discounted):
        def nearest_workload(self, workload: Workload) -> None:
            return None

    expected = {Discounted: Workload("prefix_sum", 4), OfAnyWorkload: changing, OfNone: None}
    for made, nearest in expected.items():
        _install(monkeypatch, _EntryPoint(made))
        assert catalogue.entry("discounted").nearest_workload(changing) == nearest


def test_no_other_file_lists_mechanisms() -> None:
    """Names stand in the files of mechanisms, in colours of figures and in flags' defaults."""
    names = set(catalogue.entries())
    allowed = {
        "mf_aggregators/planning/band_choice.py",
        "simulations/compare_mechanisms.py",
        "simulations/runs/run_config.py",
        "stackoverflow_nwp/datasets.py",
        # Here ``toeplitz`` is a workload.
        "mf_aggregators/commands/mechanism_flags.py",
        "mf_aggregators/workloads.py",
    }
    found = set()
    for top in ("mf_aggregators", "simulations", "stackoverflow_nwp"):
        for file in (_ROOT / top).rglob("*.py"):
            where = file.relative_to(_ROOT)
            if {"catalogue", "factorizations"} & {*where.parts} or "figures" in where.as_posix():
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and node.value in names:
                    found.add(where.as_posix())
    assert found <= allowed
