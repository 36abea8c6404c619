"""Statements of runs say what the flags made of the guarantee; what is on the axes of figures."""

import csv
import dataclasses
import functools
import io
import json
import math
import pathlib
import shutil
import types
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import random_streams
from mf_aggregators.commands import command_line, stated_runs
from mf_aggregators.factorizations import DenseFactorization, Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.sensitivity import Sensitivity, of_rows
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    sampling_scheme,
)
from mf_aggregators.privacy import guarantees, statement_file
from mf_aggregators.privacy.statements import described
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.examples.digits import COMMAND
from simulations.runs import run_config, run_plan, run_reports
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from simulations.runs.run_plan import Run
from simulations.runs.run_reports import (
    MetricsLog,
    MetricsNotWrittenError,
    PrivacyBudget,
    RunStatements,
)
from simulations.runs.trainer import RoundMetrics
from tests.examples import covering, examples
from tests.mf_aggregators import brute_force, small_mechanisms
from tests.mf_aggregators.small_mechanisms import factorizations
from tests.refusals import refuses
from tests.simulations.parsed_flags import values_of
from tests.simulations.runs.untrained_runs import (
    BROKEN_PLAN,
    BY_THE_CLOCK,
    DRAWN,
    TIMERS,
    begin_run,
    leave_run,
    verify,
)
from tests.simulations.small_disks import files_of_at_most


def _values(*arguments: str) -> flags.FlagValues:
    return values_of(COMMAND, "--num_rounds=12", "--mechanism=identity", *arguments)


def _plan(values: flags.FlagValues, path: pathlib.Path = pathlib.Path("not written")) -> Run:
    config = run_config.of_flags(values, COMMAND)
    data, behaviour = COMMAND.open_data(config), device_behaviour.of_flags(values)
    return run_plan.plan(config, data, RunDirectory(path), behaviour=behaviour)


def _document(*arguments: str) -> tuple[dict[str, Any], str]:
    """What is stated of a run that is under way: the data, and the text."""
    document = run_reports.planned(_plan(_values(*arguments))).to_dict()
    assert not list(statement_file.problems(document))
    return document, statement_file.render(document)


def test_few_clients_that_stand_for_many_earn_the_weaker_guarantee() -> None:
    arguments = ("--clients_per_round=20", "--simulated_clients=5", "--target_epsilon=4")
    plan = _plan(_values(*arguments))
    assert plan.config.cohort == 5
    statement = run_reports.planned(plan)
    # A quarter of the clients, a quarter of the noise in their sum.
    multiplier = mfa.accounting.noise_multiplier(4.0, plan.config.delta)
    expected = mfa.accounting.epsilon(multiplier / 4, plan.config.delta)
    assert statement.stated.epsilon == pytest.approx(expected, rel=1e-9)
    document, text = _document(*arguments)
    assert document["facts"]["clients_per_round"]["value"] == "5"
    assert document["represents"]["clients_per_round"] == 20
    assert document["represents"]["planned"]["epsilon"] == "4"
    (warning,) = statement_file.warnings(text)
    assert "5 clients a round stood for 20" in warning
    # One cohort of 20 a round, and twelve different ones for the separation that fits.
    assert isinstance(plan.mechanism.participation, mfa.participation.MinSeparation)
    needed = min(12, plan.mechanism.participation.separation) * 20
    assert f"needs a population of at least {needed} clients" in warning
    assert document["represents"]["population"] == needed


def test_a_clip_norm_that_adapts_has_its_noise_and_its_indicators_in_the_statement() -> None:
    document, text = _document(
        "--clip_norm=adaptive",
        "--clip_initial_norm=0.3",
        "--clip_quantile=0.8",
        "--clip_count_stddev=4",
        "--clients_per_round=20",
        "--simulated_clients=10",
        "--noise_multiplier=2",
    )
    # Of half as many clients, half the noise in the sum and in the count.
    assert document["planned"]["epsilon"] == numbers.rounded_up(
        mfa.accounting.epsilon(1.0, 1e-4), ".6g"
    )
    assert document["facts"]["clip_norm"]["value"] == "0.3"
    clip, split = (document["clipping"][name] for name in ("adaptive", "split"))
    assert (clip["target_unclipped_quantile"], clip["largest_norm"]) == ("0.8", "300")
    assert split["clipped_count_stddev"] == "2"
    updates = Decimal(split["update_noise_multiplier"])
    assert 0 < Decimal((1.0 - 1.0 / 16.0) ** -0.5) - updates < Decimal("1e-5")
    assert "0.3 in the first round, then between 0.0003 and 300, towards the norm that" in text
    assert (
        f"the noise of updates is {updates} clip norms, that of the count of indicators 2" in text
    )
    assert "whose updates and indicators are replaced by zero" in text
    assert "average update, its clip norm and the noisy fraction of clients within" in text


@pytest.mark.parametrize("adapts", [False, True])
def test_metrics_with_noise_are_in_the_statement_and_may_be_published(adapts: bool) -> None:
    clip = ["--clip_norm=adaptive", "--clip_count_stddev=4"] if adapts else ["--clip_norm=0.7"]
    document, text = _document(
        "--private_metrics", "--largest_loss=5", "--noise_multiplier=2", *clip
    )
    # The same guarantee as without metrics.
    assert document["planned"]["epsilon"] == numbers.rounded_up(
        mfa.accounting.epsilon(2.0, 1e-4), ".6g"
    )
    metrics = [(each["name"], each["largest"]) for each in document["clipping"]["metrics"]]
    assert metrics == [("loss", "5"), ("accuracy", "1"), ("examples", "1000")]
    before = (2.0**-2 - 8.0**-2) ** -0.5 if adapts else 2.0
    number = 3 if adapts else 4
    stddev = (4.0 / number * (before**-2 - (1.01 * before) ** -2)) ** -0.5
    split = document["clipping"]["split"]
    assert float(split["update_noise_multiplier"]) == pytest.approx(1.01 * before, rel=1e-5)
    assert float(split["metric_stddev"]) == pytest.approx(stddev, rel=1e-5)
    assert "loss (0 to 5), accuracy (0 to 1), examples (0 to 1000)" in text
    assert ("whether its update was clipped" in text) != adapts
    assert "and metrics are replaced by zero" in text
    assert "The released output, this statement and the metrics of training." in text
    assert "evaluations of held-out and of test data" in text


def test_a_sampled_run_with_private_metrics_releases_its_number_of_clients() -> None:
    flags_of_run = ("--sampling=poisson", "--num_bands=1", "--mechanism=banded")
    document, text = _document(*flags_of_run, "--noise_multiplier=1", "--private_metrics")
    # Exact numbers of clients would be a secret here.
    assert document["clipping"]["metrics"][-1] == {
        "name": "count",
        "smallest": "-1",
        "largest": "1",
    }
    assert "The exact number of clients in a round is a secret." in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--clip_norm=much"],
        ["--clip_quantile=0.5"],
        ["--clip_norm=adaptive", "--clip_count_stddev=0.1"],
    ],
)
def test_bad_clip_norms_are_one_clear_line(arguments: list[str]) -> None:
    with refuses(arguments[-1].partition("=")[0]):
        _plan(_values(*arguments))


def test_a_statement_of_a_simulation_says_so_first_and_asserts_no_timer() -> None:
    cases: dict[tuple[str, ...], str] = {
        ("--separation=4",): "A timer of each client counts rounds",
        ("--separation=4", "--timer=wall_clock", "--timer_hours=36"): "is assumed, not enforced",
        ("--secure_aggregation",): "The secure sum is simulated as well",
    }
    for arguments, said in cases.items():
        document, text = _document("--clients_per_round=5", *arguments)
        assert text.splitlines()[2].startswith("**This is a statement of a simulation.**")
        assert said in text
        facts = document["facts"]
        assert facts["enforcement"]["origin"] == facts["secure_sums"]["origin"] == "simulated"
        assert document["assumptions"][0]["basis"].startswith("simulated: ")


@pytest.mark.parametrize(
    "behaviour",
    [
        DeviceBehaviour(timer_hours=1.0),
        DeviceBehaviour(history_loss_probability=0.5, after_history_loss="rejoin"),
        DeviceBehaviour(broken_timers=0.1),
    ],
    ids=["wall clock", "rejoin", "broken timers"],
)
def test_a_run_that_is_killed_leaves_no_plan_on_disk_that_it_broke(
    tmp_path: pathlib.Path, behaviour: DeviceBehaviour
) -> None:
    """Whatever devices may do: the statement follows after the round that breaks the plan."""
    values = _values("--clients_per_round=1", "--separation=4", "--target_epsilon=4")
    plan = dataclasses.replace(_plan(values, tmp_path), behaviour=behaviour)
    statements = RunStatements(plan)
    clients = tuple(map(str, range(plan.data.num_clients)))
    statements.before(ParticipationLedger(clients, ()))
    planned = json.loads((tmp_path / "privacy.json").read_text())
    assert planned["keeps_plan"] is None
    kept = ParticipationLedger(clients, ([0], [1]))  # type: ignore[arg-type]
    assert statements.after_round(kept) is None
    assert json.loads((tmp_path / "privacy.json").read_text()) == planned
    broken = ParticipationLedger(clients, ([0], [1], [0]))  # type: ignore[arg-type]
    assert statements.after_round(broken) is not None
    found = json.loads((tmp_path / "privacy.json").read_text())
    assert found["keeps_plan"] is False


def test_a_ledger_that_breaks_the_plan_is_not_stated_as_planned() -> None:
    values = _values("--clients_per_round=1", "--separation=4", "--target_epsilon=4")
    plan = _plan(values)
    statement = run_reports.planned(plan)
    clients = tuple(map(str, range(plan.data.num_clients)))
    cohorts: list[Any] = [[index] for index in range(12)]
    ledger = ParticipationLedger(clients, tuple(cohorts))
    kept = run_reports.observed(plan, ledger).completed(statement)
    assert kept.keeps_plan is True
    assert kept.stated.epsilon <= statement.plan.epsilon
    # The first client again, sooner than its timer allows.
    cohorts[1:5] = [[0]] * 4
    ledger = ParticipationLedger(clients, tuple(cohorts))
    broken = run_reports.observed(plan, ledger).completed(statement)
    assert broken.keeps_plan is False
    assert broken.stated.epsilon > statement.plan.epsilon


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffling"])
def test_no_statement_of_a_sampled_run_names_a_client_or_its_rounds(
    tmp_path: pathlib.Path, sampling: str
) -> None:
    """Runs under way, stopped and finished; and one whose batches were not drawn so."""
    values = _values(f"--sampling={sampling}", "--clients_per_round=9", "--noise_multiplier=0.7")
    plan = _plan(values, tmp_path)
    scheme = plan.mechanism.sampling
    assert scheme is not None
    sampler = scheme.sampler(3)
    names = tuple(f"zebra-{index}." for index in range(plan.data.num_clients))
    drawn = ParticipationLedger(names, tuple(map(sampler.draw, range(12))), scheme)
    first_cohort = drawn.cohorts[0]
    # The first clients in all rounds, as no draw gives them; and those of timers.
    again = dataclasses.replace(drawn, cohorts=(first_cohort,) * 12)
    by_timers = dataclasses.replace(drawn, sampling=None)
    run = plan.directory
    statements = RunStatements(dataclasses.replace(plan, sampler=sampler))
    ledgers = [drawn.first_rounds(0), drawn.first_rounds(5), drawn, again, by_timers]
    for ledger, keeps_plan in zip(ledgers, [None, True, True, False, False], strict=True):
        statements.before(ledger)
        contents = _stated(run)
        assert contents["keeps_plan"] is keeps_plan
        # What a command prints of a statement is its contents and its warnings.
        texts = [(run.path / name).read_text() for name in ("privacy.json", "PRIVACY.md")]
        assert not any("zebra" in text for text in texts)
        assert contents["worst_client"] is None
        assert "protected least" not in texts[1]
        assert not _lists_of_numbers(contents)


def _lists_of_numbers(value: Any) -> list[list[int]]:
    """All lists of numbers in the contents of a JSON file, as rounds of a client are."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return []
    is_own = parts is value and parts and all(isinstance(each, int) for each in parts)
    return [
        *([parts] if is_own else []),
        *(found for each in parts for found in _lists_of_numbers(each)),
    ]


def test_no_list_of_rounds_is_in_the_statement_of_a_run_under_timers(
    tmp_path: pathlib.Path,
) -> None:
    """There is none: not even the client that was protected least is named."""
    statements, run = _statements(tmp_path)
    statements.before(_ledger(0, 1))
    stated = _stated(run)
    assert _lists_of_numbers(stated) == []
    assert stated["worst_client"]["num_rounds"] == 1
    assert _lists_of_numbers({**stated, "rounds": [0]}) == [[0]]


def _statements(directory: pathlib.Path, *arguments: str) -> tuple[RunStatements, RunDirectory]:
    values = _values("--clients_per_round=1", "--separation=4", "--target_epsilon=4", *arguments)
    directory.mkdir(exist_ok=True)
    return RunStatements(_plan(values, directory)), RunDirectory(directory)


def _stated(run: RunDirectory) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((run.path / "privacy.json").read_text())
    return contents


def _ledger(*clients: int) -> ParticipationLedger:
    names = tuple(map(str, range(143)))
    return ParticipationLedger(names, tuple(np.array([client]) for client in clients))


_BREAKS = [
    "--mechanism=banded",
    "--num_bands=3",
    "--history_loss_probability=0.2",
    "--after_history_loss=rejoin",
]


def test_a_run_that_goes_on_does_not_take_back_that_its_plan_was_broken(
    tmp_path: pathlib.Path,
) -> None:
    statements, run = _statements(tmp_path, *_BREAKS)
    statements.before(_ledger())
    assert _stated(run)["status"] == "running"
    assert _stated(run)["headline"]["epsilon"] == "4"
    assert statements.after_round(_ledger(0, 1)) is None
    broken = statements.after_round(_ledger(0, 1, 0))
    assert broken is not None
    assert broken.stated.epsilon > 4.1
    assert _stated(run)["worst_case"] == described(broken.stated)
    assert _stated(run)["keeps_plan"] is False
    # A further round that breaks nothing more changes nothing.
    assert statements.after_round(_ledger(0, 1, 0, 2)) is broken
    worse = statements.after_round(_ledger(0, 1, 0, 2, 2))
    assert worse is not None
    assert worse.stated.epsilon > 1.02 * broken.stated.epsilon
    # So does its row of metrics.csv.
    metrics = object.__new__(RoundMetrics)
    metrics._statements = statements
    last: Any = types.SimpleNamespace(ledger=_ledger(0, 1, 0, 2, 2))
    assert metrics._epsilon_spent(last) == worse.stated.epsilon
    # Killed here, and started again.
    again, _ = _statements(tmp_path, *_BREAKS)
    assert _stated(run)["worst_case"] == described(worse.stated)
    again.before(_ledger(0, 1, 0, 2, 2))
    assert _stated(run)["worst_case"] == described(worse.stated)


def test_a_run_that_fails_states_what_it_released(tmp_path: pathlib.Path) -> None:
    statements, run = _statements(tmp_path)
    # Refused before it began: whatever is stated stays.
    _ledger(0, 0).save(run.ledger)
    run.write_json("privacy.json", {"status": "of before"})
    statements.after_failure()
    assert _stated(run) == {"status": "of before"}
    statements.before(_ledger(0))
    statements.after_failure()
    assert _stated(run)["status"] == "open"
    assert _stated(run)["keeps_plan"] is False
    # An error of its own would hide the one that ended the run.
    run.ledger.write_bytes(b"broken")
    statements.after_failure()
    assert _stated(run)["keeps_plan"] is False


# Epsilon after the first rounds of a run, against enumerated sensitivities.


_NUM_ROUNDS = 6
_SCHEMAS: list[Participation] = [
    SingleParticipation(),
    MinSeparation(2),
    MinSeparation(3, 2),
    FixedEpochOrder(2, 3),
    FixedEpochOrder(3, 2),
]
_DELTA = 1e-5


@functools.cache
def _factorizations() -> tuple[Factorization, ...]:
    return factorizations(_NUM_ROUNDS)


def _sensitivity_of_first(
    factorization: Factorization, rounds: int, schema: Participation
) -> Sensitivity:
    return of_rows(factorization.noise_recursion(), rounds, schema.as_schema())


def _curve(budget: PrivacyBudget, rounds: Iterable[int]) -> list[float]:
    return [budget.spent(each) for each in rounds]


def _leading(factorization: Factorization, rounds: int) -> np.ndarray:
    """What the first rounds release, up to an invertible map.

    With N the leading rows of the noise and N N^T = L L^T, the releases G + N Z say as much as
    L^-1 G plus independent noise.
    """
    rows = factorization.noising_matrix()[:rounds]
    return np.linalg.inv(np.linalg.cholesky(rows @ rows.T))


@pytest.mark.parametrize(("index", "schema"), covering(range(17), _SCHEMAS), ids=str)
def test_spent_is_the_epsilon_of_the_enumerated_sensitivity(
    index: int, schema: Participation
) -> None:
    factorization = _factorizations()[index]
    budget = PrivacyBudget(Mechanism(factorization, schema, 0.8), _DELTA, every=1)
    whole = factorization.sensitivity(schema).value
    found = _curve(budget, range(_NUM_ROUNDS + 1))
    for rounds in range(1, _NUM_ROUNDS + 1):
        released = _leading(factorization, rounds)
        enumerated = brute_force.scalar_sensitivity(released, schema)
        exact = mfa.accounting.epsilon(0.8 * whole / enumerated, _DELTA)
        assert found[rounds] >= exact * (1 - 1e-9)
        if _sensitivity_of_first(factorization, rounds, schema).is_exact:
            assert found[rounds] == pytest.approx(exact, rel=1e-6)
    assert found[0] == 0.0
    assert found == sorted(found)
    assert found[-1] == budget.planned.epsilon
    assert found[-1] == pytest.approx(mfa.accounting.epsilon(0.8, _DELTA), rel=1e-11)


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(1, 10),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=examples(60))
def test_it_never_falls_and_ends_at_the_plan(
    num_rounds: int, every: int, separation: int, most: int | None, seed: int
) -> None:
    # Matrices of random signs, whose sensitivity is only bounded and whose bounds may fall.
    generator = np.random.default_rng(seed)
    # Larger entries may make the matrix nearly singular, which is refused.
    matrix = np.tril(generator.normal(scale=num_rounds**-0.5, size=(num_rounds, num_rounds)))
    matrix += 0.5 * np.sign(np.diag(np.diag(matrix)))
    factorization = DenseFactorization(matrix)
    budget = PrivacyBudget(
        Mechanism(factorization, MinSeparation(separation, most), 1.5), 1e-6, every
    )
    found = _curve(budget, range(num_rounds + 1))
    assert found == sorted(found)
    assert found[-1] == budget.planned.epsilon
    for rounds in (1, num_rounds // 2, num_rounds - 1):
        if rounds >= 1:
            bound = _sensitivity_of_first(factorization, rounds, MinSeparation(separation, 1)).value
            single = 1.5 * budget.planned.sensitivity / bound
            assert found[rounds] >= mfa.accounting.epsilon(single, 1e-6) * (1 - 1e-9)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffling"])
def test_sampled_runs_spend_up_to_their_amplified_plan(name: str) -> None:
    scheme = sampling_scheme(
        name, num_rounds=20, num_bands=4, population=4000, clients_per_round=10
    )
    factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(20), 4)
    budget = PrivacyBudget(Mechanism(factorization, scheme, 1.0), 1e-6, every=10)
    found = _curve(budget, range(21))
    assert found == sorted(found)
    assert found[-1] == small_mechanisms.sampled(factorization, scheme, 1.0, 1e-6).epsilon
    assert 0.0 < found[1] <= found[-1]
    # One pass of a shuffled part costs the same however far it goes.
    assert (found[1] < found[-1] * (1.0 - 1e-9)) == (name != "shuffling")
    # Ten rounds of the same draws, as a run of their own: C's leading block.
    shorter = dataclasses.replace(scheme, num_rounds=10)
    column = _sensitivity_of_first(factorization, 10, SingleParticipation()).value
    largest = factorization.sensitivity(SingleParticipation()).value
    alone = sampling_scheme(
        name, num_rounds=shorter.num_rounds, num_bands=4, population=4000, clients_per_round=10
    ).epsilon(largest / column, 1e-6)
    assert found[10] == pytest.approx(alone, rel=1e-9)


# What a run states of itself and other runs together.


def _together(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "privacy.json").read_text())["other_runs"]
    return found


def test_a_run_states_what_holds_of_it_and_others_together(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for name in ("first", "second"):
        shutil.copytree(finished, tmp_path / name)
    matrix = mfa.factorizations.identity(5)
    mechanism = mfa.Mechanism(matrix, mfa.participation.SingleParticipation(), 2.0)
    mechanism.save(tmp_path / "saved")
    others = ",".join(str(tmp_path / name) for name in ("first", "second", "saved"))
    run = tmp_path / "run"
    statement = leave_run(run, *TIMERS, f"--other_runs={others}")
    found = _together(run)
    assert found["names"] == ["../first", "../second", "../saved"]
    # Gaussian mechanisms compose to one: squares of 1 / sigma add up.
    plan = statement.plan
    sigma = (3 * plan.noise_multiplier**-2 + 2.0**-2) ** -0.5
    epsilon = float(found["epsilon"])
    assert epsilon == pytest.approx(mfa.accounting.epsilon(sigma, plan.delta), rel=1e-3)
    assert epsilon > 1.5 * plan.epsilon
    text = (run / "PRIVACY.md").read_text()
    together = f"point 3 names: **({found['epsilon']}, 0.0001)-differential privacy** of all"
    assert together in text.partition("1. **DP setting.**")[0]
    assert "in this run and in ../first, ../second, ../saved, what all of them released" in text
    assert "This covers no run that is not named here." in text
    assert verify(run) == []
    files: Any = statement_file.read(run / "privacy.json")["files"]
    named = {"saved/mechanism.json", "first/privacy.json", "first/participation.npz"}
    assert {f"../{each}" for each in named} <= set(files)
    (tmp_path / "second" / "privacy.json").write_text("{}")
    assert any("../second/privacy.json" in each for each in verify(run))


def test_another_run_needs_its_ledger(tmp_path: pathlib.Path) -> None:
    """Nothing else shows whether it kept its plan, or drew its clients."""
    broken = leave_run(tmp_path / "broken", *BY_THE_CLOCK, cohorts=BROKEN_PLAN)
    drawn = leave_run(tmp_path / "drawn", *DRAWN, "--noise_multiplier=0.7")
    assert broken.worst_case is not None
    assert broken.worst_case.noise_multiplier < 0.9 * broken.plan.noise_multiplier
    for name, expected in (("broken", broken.worst_case), ("drawn", drawn.plan)):
        assert stated_runs.Others.events_of([tmp_path / name], 1e-4) == [guarantees.event(expected)]
        (tmp_path / name / "participation.npz").unlink()
        with refuses(name, "restore the ledger", error=command_line.CommandError):
            stated_runs.Others.events_of([tmp_path / name], 1e-4)


def test_runs_with_one_seed_of_their_samplers_are_not_composed(tmp_path: pathlib.Path) -> None:
    drawn = (*DRAWN, "--noise_multiplier=0.7")
    leave_run(tmp_path / "first", *drawn)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    first, copy = tmp_path / "first", tmp_path / "copy"
    seed = copy / "checkpoints" / "sampling_seed.json"
    # Its own digits, in other letters.
    seed.write_text(f" {seed.read_text()}".replace("0x", "0X"))
    runs = [
        {"name": name, "source": "a", "statement": f"{name}/privacy.json"}
        for name in ("first", "copy")
    ]
    head = {"format": stated_runs.FORMAT, "unit": "client", "adjacency": "zero-out"}
    for name, chosen in (("both", runs), ("last", runs[1:])):
        (tmp_path / f"{name}.json").write_text(json.dumps({**head, "runs": chosen}))
    refusals: tuple[Callable[[], object], ...] = (
        lambda: stated_runs.Others.named(str(tmp_path / "both.json"), tmp_path, 1e-4),
        lambda: stated_runs.Others.named(
            str(tmp_path / "last.json"),
            tmp_path,
            1e-4,
            first / "checkpoints" / "sampling_seed.json",
        ),
        lambda: begin_run(tmp_path / "run", *TIMERS, f"--other_runs={first},{copy}"),
        lambda: stated_runs.Others.named(
            str(copy), tmp_path, 1e-4, first / "checkpoints" / "sampling_seed.json"
        ),
    )
    for refused in refusals:
        with refuses("the same seed", "copy", error=command_line.CommandError):
            refused()
    random_streams.save_seed(7, seed)
    # Draws that are not of this seed count as a worst case.
    assert len(stated_runs.Others.events_of([first, copy], 1e-4)) == 2
    both = stated_runs.Others.named(str(tmp_path / "both.json"), tmp_path, 1e-4)
    assert both is not None
    assert len(both.events) == 2


@pytest.mark.long
def test_a_drawn_run_is_composed_amplified_while_its_seed_is_there(tmp_path: pathlib.Path) -> None:
    drawn = leave_run(tmp_path / "drawn", *DRAWN, "--noise_multiplier=0.7")
    other = f"--other_runs={tmp_path / 'drawn'}"
    plan = leave_run(tmp_path / "run", *TIMERS, other).plan
    amplified = float(_together(tmp_path / "run")["epsilon"])
    expected = mfa.accounting.composed_epsilon(
        [guarantees.event(plan), guarantees.event(drawn.plan)], plan.delta
    )
    assert amplified == pytest.approx(expected, rel=1e-5)
    (tmp_path / "drawn" / "checkpoints" / "sampling_seed.json").unlink()
    leave_run(tmp_path / "later", *TIMERS, other)
    assert float(_together(tmp_path / "later")["epsilon"]) > 1.2 * amplified


def _rows(num_rounds: int = 12) -> list[dict[str, str]]:
    """Rows as csv.DictReader gives them, with evaluations in every third round."""
    text = io.StringIO()
    names = [
        "round",
        "train_loss",
        "train_accuracy",
        "heldout_loss",
        "heldout_accuracy",
        "eligible_clients",
        "available_clients",
        "seconds",
        "update_norm",
        "max_update_norm",
        "clipped_fraction",
        "zeroed_fraction",
        "noise_norm",
        "released_norm",
        "epsilon_spent",
    ]
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    for number in range(1, num_rounds + 1):
        row: dict[str, Any] = dict.fromkeys(names, number + 0.5)
        row.update(round=number, train_accuracy=number / 100, clipped_fraction=number / 20)
        row.update(zeroed_fraction=0.0, epsilon_spent=number / 2)
        if number % 3:
            del row["heldout_loss"], row["heldout_accuracy"]
        else:
            row["heldout_accuracy"] = number / 50
        writer.writerow(row)
    text.seek(0)
    return list(csv.DictReader(text))


def _axes(figure: matplotlib.figure.Figure) -> dict[str, Any]:
    return {axes.get_ylabel(): axes for axes in figure.axes if axes.axison}


def _lines(axes: Any) -> dict[str, Any]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_a_run_has_all_panels_with_its_numbers() -> None:
    figure = run_reports.draw(
        _rows(),
        "banded",
        {
            "L2 norm of updates": ("clip norm", 1.5),
            "epsilon": ("planned", 8.0),
            "clients": ("clients per round", 3.0),
        },
        delta=1e-4,
    )
    axes = _axes(figure)
    assert list(axes) == [
        "accuracy, %",
        "loss",
        "L2 norm of updates",
        "of the updates, %",
        "L2 norm of a round",
        "clients",
        "epsilon at delta 0.0001",
    ]
    rounds = list(range(1, 13))
    accuracy = _lines(axes["accuracy, %"])
    assert accuracy["training"] == (rounds, pytest.approx(rounds))
    # A line goes straight across rounds without an evaluation.
    assert accuracy["held out"] == ([3, 6, 9, 12], pytest.approx([6, 12, 18, 24]))
    assert set(_lines(axes["loss"])) == {"training", "held out"}
    norms = _lines(axes["L2 norm of updates"])
    assert norms["mean = largest"][1] == pytest.approx([number + 0.5 for number in rounds])
    assert norms["clip norm"][1] == [1.5, 1.5]
    shares = _lines(axes["of the updates, %"])
    assert shares["clipped"] == (rounds, pytest.approx([5 * number for number in rounds]))
    assert shares["zeroed"][1] == pytest.approx([0.0] * 12)
    assert set(_lines(axes["L2 norm of a round"])) == {"noise in it = released mean"}
    assert set(_lines(axes["clients"])) == {
        "free by the timer = available of these",
        "clients per round",
    }
    epsilon = _lines(axes["epsilon at delta 0.0001"])
    assert epsilon["spent"] == (rounds, pytest.approx([number / 2 for number in rounds]))
    assert epsilon["planned"][1] == [8.0, 8.0]
    assert figure.get_suptitle() == "banded"


def test_a_clip_norm_that_adapts_is_a_curve_and_said_to_be_a_private_release() -> None:
    rows = [
        {**row, "clip_norm": str(0.1 * i), "unclipped_fraction": str(0.2 * i)}
        for i, row in enumerate(_rows(3), start=1)
    ]
    axes = _axes(run_reports.draw(rows, "banded", {"within the clip norm, %": ("target", 50.0)}))
    norm = _lines(axes["L2 norm of updates"])["clip norm (a private release)"]
    assert norm == ([1, 2, 3], pytest.approx([0.1, 0.2, 0.3]))
    within = _lines(axes["within the clip norm, %"])
    assert within["a private release"][1] == pytest.approx([20.0, 40.0, 60.0])
    assert within["target"][1] == [50.0, 50.0]


def test_released_metrics_are_means_of_a_window_and_said_to_be_a_private_release() -> None:
    axes = _axes(run_reports.draw(_rows(5), "banded", released_window=3))
    accuracy = _lines(axes["accuracy, %"])
    # Of 1 to 5 %: fewer of them at the beginning.
    assert accuracy["training (a private release, mean of 3)"] == (
        [1, 2, 3, 4, 5],
        pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0]),
    )
    assert accuracy["held out"][1] == pytest.approx([6.0])
    axes = _axes(run_reports.draw(_rows(2), "banded", released_window=1))
    shares = _lines(axes["of the updates, %"])
    assert shares["clipped (a private release)"][1] == pytest.approx([5.0, 10.0])


def test_panels_without_data_are_left_out() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 1, "train_loss": 2.0},
        {"round": 2, "train_loss": "", "update_norm": None},
    ]
    figure = run_reports.draw(
        rows, "", {"L2 norm of updates": ("clip norm", 1.0), "epsilon": ("planned", math.inf)}
    )
    assert list(_axes(figure)) == ["loss"]
    spent = [{"round": 1, "epsilon_spent": 1.0}]
    figure = run_reports.draw(spent, "", {"epsilon": ("planned", math.inf)})
    assert set(_lines(_axes(figure)["epsilon"])) == {"spent"}


@pytest.mark.parametrize("rows", [[], [{"round": "1"}], [{"round": "1", "train_loss": "nan"}]])
def test_a_run_without_metrics_says_so(rows: list[dict[str, str]]) -> None:
    figure = run_reports.draw(rows, "")
    assert [text.get_text() for text in figure.axes[0].texts] == ["no metrics"]


def _written(path: pathlib.Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_have_one_row_a_round_also_after_a_resume(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path)
    log = MetricsLog(directory, ["loss", "accuracy"], 0)
    log.append(1, {"loss": 2.5})
    log.append(2, {"loss": float("nan"), "accuracy": 0.5})
    log.append(3, {"loss": 1.5})
    # The state of round 3 was not saved, so its row is no longer true.
    log = MetricsLog(directory, ["loss", "accuracy"], 2)
    log.append(3, {"loss": 1.25})
    assert _written(tmp_path) == [
        {"round": "1", "loss": "2.5", "accuracy": ""},
        {"round": "2", "loss": "", "accuracy": "0.5"},
        {"round": "3", "loss": "1.25", "accuracy": ""},
    ]


@pytest.mark.parametrize(
    "damage",
    [
        b"2,9.0\r\n",
        b"2,9\0.0,0.5\r\n",
        b"\xff\xfe\r\n",
        b"2,9,0.5",
    ],
)
def test_damaged_rows_are_dropped(tmp_path: pathlib.Path, damage: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"round,loss,accuracy\r\n1,2.5,0.5\r\n" + damage)
    MetricsLog(RunDirectory(tmp_path), ["loss", "accuracy"], 2)
    assert _written(tmp_path) == [
        {"round": "1", "loss": "2.5", "accuracy": "0.5"},
        {"round": "2", "loss": "", "accuracy": ""},
    ]


def test_a_row_for_which_there_is_no_room_leaves_no_part(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path)
    log = MetricsLog(directory, ["loss"], 0)
    log.append(1, {"loss": 2.5})
    path = tmp_path / "metrics.csv"
    before = path.read_bytes()
    row = b"2,0.123456\r\n"
    for room in range(len(row)):
        with (
            files_of_at_most(len(before) + room),
            pytest.raises(MetricsNotWrittenError) as raised,
        ):
            log.append(2, {"loss": 0.123456})
        assert path.read_bytes() == before
    message = str(raised.value)
    assert "\n" not in message
    assert f"could not be written to {path}: File too large" in message
    with files_of_at_most(len(before) + len(row)):
        log.append(2, {"loss": 0.123456})
    assert path.read_bytes() == before + row
