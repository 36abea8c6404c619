"""The matrix of a run is for the workload that its flags say, and stays that."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import catalogue, checkpoints, factorizations, workloads
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.commands import command_line, stated_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    SingleParticipation,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.workloads import Workload
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import Independent
from simulations.devices.device_populations import DevicePopulation
from simulations.examples.digits import COMMAND
from simulations.runs import run_command, run_config, run_directory, run_plan, run_reports
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from simulations.runs.run_plan import Run
from tests import console_commands
from tests.mf_aggregators import small_mechanisms
from tests.refusals import refuses
from tests.simulations.parsed_flags import config_of, values_of
from tests.simulations.runs.untrained_runs import (
    BANDED,
    BY_THE_CLOCK,
    CLIENTS,
    DRAWN,
    TIMERS,
    begin_run,
    leave_run,
    verify,
)

_ROUNDS, _MORE, _SCHEMA = 12, 30, MinSeparation(4)
_CLIENTS = ("--separation=4", "--clients_per_round=5")
_RECIPE = ("--server_momentum=0.9", "--server_warmup=0.25", "--server_cooldown=0.25")
_TRAINING = "--workload=training"


def _values(*arguments: str, clients: Sequence[str]) -> flags.FlagValues:
    return values_of(COMMAND, f"--num_rounds={_ROUNDS}", *clients, *_RECIPE, *arguments)


def _plan(
    *arguments: str, path: pathlib.Path | None = None, clients: Sequence[str] = _CLIENTS
) -> Run:
    """The run of a command; with a path, one that began there, or goes on."""
    values = _values(*arguments, clients=clients)
    config, behaviour = run_config.of_flags(values, COMMAND), device_behaviour.of_flags(values)
    directory = RunDirectory(pathlib.Path("not written") if path is None else path)
    begun = directory.read_config()
    if path is None:
        data = COMMAND.open_data(config)
        return run_plan.plan(config, data, directory, behaviour=behaviour)
    if begun is None:
        return run_command.begin(config, COMMAND, directory, behaviour)
    return run_command.resume(begun, config, COMMAND, directory, behaviour)


def test_a_matrix_has_as_many_bands_as_timers_and_its_task_allow() -> None:
    config = run_config.of_flags(_values(clients=_CLIENTS), COMMAND)
    data, directory = COMMAND.open_data(config), RunDirectory(pathlib.Path("not written"))
    for most, expected in ((64, 4), (3, 3)):
        run = run_plan.plan(dataclasses.replace(config, max_bands=most), data, directory)
        assert run.mechanism.factorization.strategy_bands() == expected


def _trained(num_rounds: int, momentum: float = 0.9) -> Workload:
    """The workload of the recipe, from the formulas of the documents."""
    rounds = np.arange(num_rounds)
    rising, falling = np.ceil(num_rounds / 4), np.ceil(num_rounds / 4)
    rates = np.minimum(0.05 + 0.95 * rounds / rising, 0.05 + 0.95 * rounds[::-1] / falling)
    return Workload("momentum_sgd", num_rounds, momentum, tuple(2.0 * np.minimum(rates, 1.0)))


def _made(mechanism: str, workload: Workload) -> Factorization:
    """What the library makes, called directly."""
    if mechanism == "banded":
        return factorizations.banded(workload, 4, participation=_SCHEMA)
    if mechanism == "optimal":
        return factorizations.optimal(workload)
    if mechanism == "toeplitz":
        return factorizations.toeplitz(workload, 4, participation=_SCHEMA)
    if mechanism == "blt":
        return factorizations.blt(workload, 2, participation=_SCHEMA)
    return factorizations.banded_inverse(workload, 4, participation=_SCHEMA)


_OF_TRAINING = ("banded", "optimal", "toeplitz", "blt", "banded_inverse")


def _flags_of(mechanism: str) -> tuple[str, ...]:
    has_bands = mechanism in ("banded", "toeplitz", "banded_inverse")
    options = ["--num_bands=4"] if has_bands else ["--num_buffers=2"] * (mechanism == "blt")
    return (f"--mechanism={mechanism}", *options)


def _same(one: Factorization, other: Factorization) -> bool:
    return one.strategy_matrix().tobytes() == other.strategy_matrix().tobytes()


def test_public_data_are_stated_as_they_were_given() -> None:
    facts = run_reports.planned(_plan("--mechanism=identity")).facts
    assert facts.public_data.startswith("not stated")
    tuned = _plan("--mechanism=identity", "--public_data=rates were tuned on letters.")
    assert run_reports.planned(tuned).facts.public_data == "rates were tuned on letters"
    # Runs of 2.0.0 could begin with a file of weights.
    config = {**run_reports._config(tuned), "initial_weights_sha256": "0a1b"}
    said = stated_runs.planned(config, tuned.mechanism, population=5, told={}).facts.public_data
    assert said.startswith("rates were tuned on letters. Training began with the weights of a file")
    assert "0a1b" in said


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("mechanism", _OF_TRAINING)
def test_the_matrix_is_for_the_training_if_asked_and_for_sums_if_not(mechanism: str) -> None:
    own = _flags_of(mechanism)
    inside, after = _plan(*own, _TRAINING), _plan(*own)
    training = catalogue.entry(mechanism).nearest_workload(inside.training)
    assert training is not None
    assert inside.workload == training
    assert _same(inside.mechanism.factorization, _made(mechanism, training))
    assert after.workload == Workload("prefix_sum", _ROUNDS)
    assert _same(after.mechanism.factorization, _made(mechanism, after.workload))
    assert not _same(inside.mechanism.factorization, after.mechanism.factorization)
    errors = [
        each.mechanism.factorization.rmse(_trained(_ROUNDS), each.mechanism.noise_reference)
        for each in (inside, after)
    ]
    assert errors[0] < 0.99 * errors[1]


@pytest.mark.parametrize("sampling", ["poisson", "balls_in_bins"])
def test_a_target_of_rho_is_that_of_who_knows_who_was_drawn(sampling: str) -> None:
    """Sampling amplifies epsilon, and no rho."""
    run = _plan(
        *("--mechanism=banded", "--num_bands=3", f"--sampling={sampling}", "--target_rho=2"),
        clients=("--examples_per_client=1", "--clients_per_round=50"),
    )
    guarantee = run.mechanism.guarantee(1e-2)
    assert guarantee.rho == pytest.approx(2.0, rel=1e-10)
    assert guarantee.rho <= 2.0
    assert guarantee.is_amplified


@pytest.mark.parametrize(
    "flags_of_noise",
    [
        ["--clip_norm=adaptive"],
        # A number that the noise multiplier does not scale.
        ["--clip_norm=adaptive", "--clip_count_stddev=3"],
        ["--private_metrics"],
    ],
    ids=" ".join,
)
def test_an_extended_run_keeps_the_noise_of_its_parts(flags_of_noise: list[str]) -> None:
    """Noise is stated over the sensitivity, which more rounds change from sqrt(3) to 2."""
    values = _values("--noise_multiplier=1", *flags_of_noise, clients=_CLIENTS)
    config = run_config.of_flags(values, COMMAND)
    before = mfa.Mechanism(factorizations.identity(12), MinSeparation(4), 1.0)
    splits = [
        stated_runs.RunFlags(config).noise_split(mechanism)
        for mechanism in (before, before.extended(16))
    ]
    first, whole = splits
    assert first is not None
    assert whole is not None
    for name in ("update_noise_multiplier", "clipped_count_stddev", "metric_stddev"):
        stddevs = getattr(first, name) * math.sqrt(3.0), getattr(whole, name) * 2.0
        assert stddevs[0] == pytest.approx(stddevs[1], rel=1e-12)


def test_an_extension_is_charged_for_all_numbers_of_a_row() -> None:
    """Those beside the model: the indicator of a clip norm that adapts, and private metrics."""
    adaptive = "--clip_norm=adaptive"
    for arguments in ([], [adaptive], ["--private_metrics"], [adaptive, "--private_metrics"]):
        run = _plan("--mechanism=identity", *arguments)
        query = mfa.mf_dp_aggregator(
            run.mechanism,
            clip_norm=run.config.clip,
            clients_per_round=run.config.cohort,
            metrics=run.private_metrics,
        ).query(tf.TensorSpec([5], tf.float32))
        steps = query.initial_sample_state().steps
        size = sum(int(tf.size(each)) for each in tf.nest.flatten(steps))
        assert 5 + run_plan._num_beside_updates(run.config) == size


# Runs that go on.


def _described(path: pathlib.Path) -> Workload:
    description: dict[str, Any] = checkpoints.load_with_description(path / "factorization")[1]
    return workloads.Workload.described(
        description["errors"]["workload"], description["num_rounds"]
    )


@pytest.mark.parametrize("mechanism", ["banded", "toeplitz"])
def test_runs_that_go_on_keep_the_workload(mechanism: str, tmp_path: pathlib.Path) -> None:
    arguments = [*_flags_of(mechanism), _TRAINING, "--noise_multiplier=2"]
    first = _plan(*arguments, path=tmp_path)
    assert _described(tmp_path) == first.workload
    assert first.workload.momentum == 0.9
    again = _plan(*arguments, path=tmp_path)
    assert again.workload == first.workload
    assert _same(again.mechanism.factorization, first.mechanism.factorization)
    _train(tmp_path)
    longer = _plan(*arguments, f"--num_rounds={_MORE}", path=tmp_path)
    assert _described(tmp_path) == longer.workload
    expected = catalogue.entry(mechanism).nearest_workload(longer.training)
    assert longer.workload == expected
    before = first.mechanism.factorization
    of_sums, of_training = (
        before.extended(_MORE, participation=_SCHEMA, workload=workload)
        for workload in (Workload("prefix_sum", _MORE), expected)
    )
    assert _same(longer.mechanism.factorization, of_training)
    assert _same(of_training, of_sums) == (mechanism == "toeplitz")
    once_more = _plan(*arguments, f"--num_rounds={_MORE}", path=tmp_path)
    assert _same(once_more.mechanism.factorization, of_training)
    assert once_more.workload == expected


def _train(path: pathlib.Path, released: int = _ROUNDS - 2) -> None:
    """Writes down what a run knows once its model was loaded and some rounds took place."""
    directory = RunDirectory(path)
    begun = directory.read_config()
    assert begun is not None
    directory.write_json(run_directory.CONFIG_FILE, {**begun, "num_parameters": 650})
    ledger = ParticipationLedger(tuple(f"client {number}" for number in range(5)))
    for number in range(released):
        ledger = ledger.with_round(np.array([number % 5]))
    ledger.save(directory.ledger)


@pytest.mark.parametrize(
    ("made_for", "goes_on_as"),
    [
        (Workload("prefix_sum", _ROUNDS), Workload("prefix_sum", _MORE)),
        # Nobody knows further rates of a schedule that is another one.
        (_trained(_ROUNDS, 0.5), Workload("prefix_sum", _MORE)),
    ],
)
def test_a_checkpoint_for_another_workload_goes_on_as_far_as_that_is_known(
    made_for: Workload, goes_on_as: Workload, tmp_path: pathlib.Path
) -> None:
    made = factorizations.banded(made_for, 4, participation=_SCHEMA)
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "run"
    checkpoints.save(made, checkpoint, workload=made_for.to_dict(), participation=_SCHEMA)
    arguments = (f"--checkpoint={checkpoint}", "--noise_multiplier=2")
    _plan(*arguments, path=path)
    assert _described(path) == made_for
    _train(path)
    longer = _plan(*arguments, f"--num_rounds={_MORE}", path=path)
    assert longer.workload == goes_on_as
    expected = made.extended(_MORE, participation=_SCHEMA, workload=goes_on_as)
    assert _same(longer.mechanism.factorization, expected)


def test_a_checkpoint_and_its_own_workload_exclude_each_other(tmp_path: pathlib.Path) -> None:
    with refuses("--workload", "--checkpoint", "mf-factorize"):
        _plan(f"--checkpoint={tmp_path}", _TRAINING)


# Runs of min-separation sampling and of balls in bins, from flags to statements.


_DRAWN_ROUNDS = 12
_DRAWN_CLIENTS = 143


def _sampled_values(*arguments: str) -> flags.FlagValues:
    return values_of(COMMAND, f"--num_rounds={_DRAWN_ROUNDS}", *arguments)


def _sampled_plan(*arguments: str, path: pathlib.Path = pathlib.Path("not written")) -> Run:
    config = run_config.of_flags(_sampled_values(*arguments), COMMAND)
    return run_plan.plan(config, COMMAND.open_data(config), RunDirectory(path))


_MIN_SEPARATION = (
    "--sampling=min_separation",
    "--num_bands=3",
    "--clients_per_round=5",
    "--separation=5",
)
_BINS = ("--sampling=balls_in_bins", "--num_bands=3", "--clients_per_round=5")
# Participations of a client share rows of C x.
_BINS_OF_BLT = ("--sampling=balls_in_bins", "--mechanism=blt", "--clients_per_round=47")
_BINS_OF_TREE = ("--sampling=balls_in_bins", "--mechanism=tree", "--clients_per_round=20")


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("arguments", "scheme"),
    [
        (_MIN_SEPARATION, MinSeparationSampling(_DRAWN_ROUNDS, 3, _DRAWN_CLIENTS, 5, 5)),
        (_MIN_SEPARATION[:3], MinSeparationSampling(_DRAWN_ROUNDS, 3, _DRAWN_CLIENTS, 5, 3)),
        (_BINS, BallsInBins(_DRAWN_ROUNDS, 3, _DRAWN_CLIENTS, 5, 28)),
        (_BINS_OF_BLT, BallsInBins(_DRAWN_ROUNDS, _DRAWN_ROUNDS, _DRAWN_CLIENTS, 47, 3)),
        (_BINS_OF_TREE, BallsInBins(_DRAWN_ROUNDS, _DRAWN_ROUNDS, _DRAWN_CLIENTS, 20, 7)),
    ],
)
def test_the_flags_of_a_run_are_its_scheme_and_its_noise(
    arguments: tuple[str, ...], scheme: MinSeparationSampling | BallsInBins
) -> None:
    plan = _sampled_plan(*arguments, "--target_epsilon=6")
    mechanism = plan.mechanism
    assert mechanism.sampling == scheme
    assert mechanism.noise_reference == SingleParticipation()
    statement = run_reports.planned(plan)
    assert guarantees.scheme_of(statement.plan) == scheme
    assert 5.0 < statement.plan.epsilon <= 6.0
    found = small_mechanisms.sampled(
        mechanism.factorization, scheme, mechanism.noise_multiplier, plan.config.delta
    )
    assert statement.plan.epsilon == found.epsilon
    text = statement.to_markdown()
    assert f"{scheme.clients_per_round} expected" in text
    assert "divided by the same number" in text


@pytest.mark.parametrize("flag", ["--dropout_probability=0.1", "--over_selection=1.3"])
def test_devices_that_do_more_than_be_absent_are_refused(flag: str) -> None:
    values = _sampled_values(
        *_MIN_SEPARATION, "--availability=independent", "--available_probability=0.9"
    )
    options = run_config.of_flags(values, COMMAND)
    run_command._check_behaviour(options, device_behaviour.of_flags(values))
    values = _sampled_values(*_MIN_SEPARATION, flag)
    with refuses("--availability", "--round_minutes", error=CommandError):
        run_command._check_behaviour(options, device_behaviour.of_flags(values))
    values = _sampled_values("--sampling=poisson", "--num_bands=2", "--availability=diurnal")
    options = run_config.of_flags(values, COMMAND)
    with refuses("clients are in groups", error=CommandError):
        run_command._check_behaviour(options, device_behaviour.of_flags(values))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("available", [None, 0.5])
@pytest.mark.parametrize("arguments", [_MIN_SEPARATION, _BINS, _BINS_OF_BLT])
def test_statements_amplify_what_the_seed_drew_and_nothing_else(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], available: float | None
) -> None:
    """Of runs that are stopped and finished, of all devices or of those that are available."""
    plan = _sampled_plan(*arguments, "--noise_multiplier=0.8", path=tmp_path)
    scheme = plan.mechanism.sampling
    assert scheme is not None
    sampler = scheme.sampler(5)
    if available is not None:
        sampler = device_behaviour.AvailableClients(sampler, Independent(available), 2, 300.0)
    names = tuple(f"zebra-{index}." for index in range(_DRAWN_CLIENTS))
    drawn = ParticipationLedger(names, tuple(map(sampler.draw, range(_DRAWN_ROUNDS))), scheme)
    directory = plan.directory
    statements = run_reports.RunStatements(dataclasses.replace(plan, sampler=sampler))

    def stated(ledger: ParticipationLedger) -> dict[str, Any]:
        statements.before(ledger)
        text = (directory.path / "PRIVACY.md").read_text()
        assert "zebra" not in text
        contents: dict[str, Any] = json.loads((directory.path / "privacy.json").read_text())
        assert "zebra" not in json.dumps(contents)
        return contents

    planned = stated(drawn.first_rounds(0))["planned"]
    assert planned["certificate"]["seed"] == 0
    for rounds in (5, _DRAWN_ROUNDS):
        contents = stated(drawn.first_rounds(rounds))
        assert contents["keeps_plan"] is True
        assert contents["headline"]["epsilon"] == planned["epsilon"]
        assert contents["observed"]["num_rounds"] == rounds
        for name in (contents["headline"]["guarantee"], "observed"):
            assert contents[name]["true_positive_percent"] == planned["true_positive_percent"]
    # One participation more, less, or of another client: nobody's draws.
    index = next(i for i in range(_DRAWN_ROUNDS) if len(drawn.cohorts[i]))
    cohort = drawn.cohorts[index]
    other = np.setdiff1d(np.arange(_DRAWN_CLIENTS), cohort)[:1]
    for changed in (cohort[1:], np.union1d(cohort, other), np.union1d(cohort[1:], other)):
        cohorts = [*drawn.cohorts[:index], changed, *drawn.cohorts[index + 1 :]]
        contents = stated(dataclasses.replace(drawn, cohorts=tuple(cohorts)))
        assert contents["keeps_plan"] is False
        stated_one = contents[contents["headline"]["guarantee"]]
        assert stated_one["sampling"] is None
        assert float(stated_one["epsilon"]) > float(planned["epsilon"])


# Runs of a saved Mechanism, and the Mechanism that a run's directory is.


def _reported(*words: str) -> dict[str, Any]:
    fields = console_commands.call("mf-report", "--delta=1e-4", "--format=json", *words).fields()
    del fields["seconds"]
    return fields


@pytest.mark.parametrize(
    ("arguments", "participation", "noise_multiplier"),
    [
        (TIMERS, MinSeparation(4), mfa.accounting.noise_multiplier(4.0, 1e-4)),
        # A quarter of the cohort has a quarter of the noise.
        (
            (*BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
            MinSeparation(7),
            1.0,
        ),
        ((*DRAWN, "--noise_multiplier=0.7"), PoissonSampling(12, 3, CLIENTS, 9), 0.7),
    ],
)
def test_the_mechanism_of_a_run_is_loaded_and_reported_from_its_directory(
    tmp_path: pathlib.Path,
    arguments: tuple[str, ...],
    participation: Participation,
    noise_multiplier: float,
) -> None:
    path = tmp_path / "run"
    leave_run(path, *arguments)
    matrix = mfa.checkpoints.load(path / "factorization")
    mechanism = mfa.Mechanism(matrix, participation, noise_multiplier)
    found = mfa.load(path)
    assert found == dataclasses.replace(mechanism, noise_multiplier=found.noise_multiplier)
    assert found.noise_multiplier == pytest.approx(noise_multiplier, rel=1e-12)
    # A report of it needs no flags that could be of another run.
    ledger = [f"--ledger={path / 'participation.npz'}"]
    if mechanism.sampling is not None:
        ledger.append(f"--sampling_seed={path / 'checkpoints' / 'sampling_seed.json'}")
    fields = _reported(f"--checkpoint={path}", *ledger)
    assert fields["ledger_gap"] is None
    found.save(tmp_path / "saved")
    if mechanism.sampling is None:
        # The directory of a run has the numbers of its clients itself.
        counts = tmp_path / "counts.txt"
        cohorts = mfa.privacy.ledgers.load(path / "participation.npz", 12).cohorts()
        counts.write_text("\n".join(str(len(cohort)) for cohort in cohorts))
        ledger.append(f"--round_counts={counts}")
    assert fields == _reported(f"--checkpoint={tmp_path / 'saved'}", *ledger)
    assert fields["keeps_plan"] is True
    stated = json.loads((path / "privacy.json").read_text())["planned"]
    name = "epsilon" if mechanism.sampling is None else "amplified_epsilon"
    assert rounded_up(fields[name], ".6g") == stated["epsilon"]
    # A stated epsilon is proved.
    file = path / "privacy.json"
    contents = json.loads(file.read_text())
    contents["planned"]["epsilon"] = str(0.999 * fields[name])
    file.write_text(json.dumps(contents))
    with refuses("claimed", "proved", error=CheckpointError):
        mfa.load(path)


def test_a_run_that_was_extended_is_loaded_with_all_horizons(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    noise = ("--mechanism=banded", "--num_bands=3", "--separation=4", "--noise_multiplier=1.5")
    leave_run(path, *noise, "--clients_per_round=5")
    before = mfa.load(path)
    leave_run(path, *noise, "--clients_per_round=5", "--num_rounds=16", rounds=16)
    extended = mfa.load(path)
    assert [each.num_rounds for each in extended.horizons] == [12, 16]
    assert extended.extends == before
    # Three participations of norm one before, and four of the whole.
    stddev = 1.5 * before.factorization.sensitivity(before.noise_reference).value
    whole = extended.factorization.sensitivity(extended.noise_reference).value
    assert extended.noise_multiplier == pytest.approx(stddev / whole, rel=1e-6)
    assert extended.noise_multiplier < 1.5


def test_directories_that_are_not_of_one_run_are_refused(tmp_path: pathlib.Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    leave_run(path, *TIMERS)
    whole = json.loads((path / "privacy.json").read_text())
    file = path / "privacy.json"

    def refused(*named: str, **changed: Any) -> None:
        file.write_text(json.dumps({**whole, **changed}))
        with refuses(*named, error=CheckpointError):
            mfa.load(path)

    seed = {"value": True, "origin": "read from config.json"}
    refused("fixed seed", facts={**whole["facts"], "seed_is_fixed": seed})
    refused("privacy.json", planned=None)
    refused("privacy.json", planned={**whole["planned"], "num_rounds": 11})
    refused("privacy.json", noise={**whole["noise"], "noise_multipliers": ["-1.0"]})
    for sensitivity in (str(0.9 * float(whole["planned"]["sensitivity"])), "nan"):
        planned = {**whole["planned"], "sensitivity": sensitivity}
        refused("privacy.json", planned=planned)
    # The matrix of another run, whose sensitivity is another one.
    mfa.checkpoints.save(mfa.factorizations.tree_aggregation(12), other)
    shutil.rmtree(path / "factorization")
    shutil.copytree(other, path / "factorization")
    refused("states a sensitivity of")
    file.unlink()
    with refuses("privacy.json", "after its first round", error=CheckpointError):
        mfa.load(path)


def _forge(path: pathlib.Path, **changed: Any) -> None:
    """Changes what the statement of a run plans, and nothing else of its files."""
    file = path / "privacy.json"
    contents = json.loads(file.read_text())
    multiplier = changed.pop("noise_multiplier", None)
    if multiplier is not None:
        contents["noise"]["noise_multipliers"][-1] = str(multiplier)
    file.write_text(json.dumps({**contents, "planned": {**contents["planned"], **changed}}))


@pytest.mark.parametrize(
    ("arguments", "forged", "named"),
    [
        (TIMERS, {"noise_multiplier": 50.0}, "noise_multiplier 50.0"),
        # Of the larger cohort that few clients stand for.
        (
            (*BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
            {"noise_multiplier": 4.0},
            "noise_multiplier 4.0, and the run's other files have 1.0",
        ),
        # In which three participations have the same sensitivity.
        (
            TIMERS,
            {"schema": MinSeparation(4, 3).to_dict()},
            '"max_participations": null',
        ),
        ((*DRAWN, "--noise_multiplier=0.7"), {"noise_multiplier": 0.71}, "0.71"),
        (
            (*DRAWN, "--noise_multiplier=0.7"),
            {"sampling": PoissonSampling(12, 3, 10 * CLIENTS, 9).to_dict()},
            str(10 * CLIENTS),
        ),
    ],
)
def test_a_plan_that_the_configuration_contradicts_is_refused(
    arguments: tuple[str, ...], forged: dict[str, Any], named: str, tmp_path: pathlib.Path
) -> None:
    """By whatever makes a Mechanism of the directory, and so by a report of several runs."""
    path = tmp_path / "run"
    leave_run(path, *arguments)
    honest = mfa.load(path)
    whole = (path / "privacy.json").read_text()
    _forge(path, **forged)
    with refuses("privacy.json", named, error=CheckpointError) as refused:
        mfa.load(path)
    assert "\n" not in str(refused.value)
    with refuses(named, error=command_line.CommandError):
        stated_runs.Others.events_of([path], 1e-4)
    (path / "privacy.json").write_text(whole)
    assert mfa.load(path) == honest
    # What a run was asked for may be gone, and is then not compared; a broken file is no such.
    config = (path / "config.json").read_text()
    for text in ("{", "[]", '{"flags": {}}', config.replace('"seed":', '"other":')):
        (path / "config.json").write_text(text)
        with refuses("config.json", error=CheckpointError):
            mfa.load(path)
    (path / "config.json").unlink()
    assert mfa.load(path) == honest


def test_a_horizon_that_the_configuration_contradicts_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    noise = ("--mechanism=banded", "--num_bands=3", "--separation=4", "--noise_multiplier=1.5")
    leave_run(path, *noise, "--clients_per_round=5")
    leave_run(path, *noise, "--clients_per_round=5", "--num_rounds=16", rounds=16)
    contents = json.loads((path / "privacy.json").read_text())
    earlier = [{**contents["earlier_plans"][0], "schema": MinSeparation(5).to_dict()}]
    multipliers = ["1.6", contents["noise"]["noise_multipliers"][-1]]
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("noise_multiplier", {"noise": {**contents["noise"], "noise_multipliers": multipliers}}),
        ("earlier_plans", {"earlier_plans": earlier}),
    )
    for name, forged in changes:
        (path / "privacy.json").write_text(json.dumps({**contents, **forged}))
        with refuses("privacy.json", name, error=CheckpointError):
            mfa.load(path)


_COHORT = "--clients_per_round=5"
_BANDS = mfa.factorizations.banded(12, num_bands=3)
_NOISE = mfa.accounting.noise_multiplier(4.0, 1e-3)


def _saved(folder: pathlib.Path, mechanism: mfa.Mechanism) -> str:
    mechanism.save(folder / "saved")
    return f"--checkpoint={folder / 'saved'}"


@pytest.mark.parametrize(
    ("participation", "of_both", "of_matrix"),
    [
        (MinSeparation(4), (_COHORT,), ("--separation=4",)),
        (
            MinSeparation(4, 2),
            (*BY_THE_CLOCK[-2:], "--clients_per_round=10", "--simulated_clients=5"),
            ("--separation=4", "--max_participations=2"),
        ),
        (SingleParticipation(), (_COHORT,), ("--max_participations=1",)),
    ],
)
def test_a_saved_mechanism_states_what_long_flags_state(
    participation: Participation,
    of_both: tuple[str, ...],
    of_matrix: tuple[str, ...],
    tmp_path: pathlib.Path,
) -> None:
    mechanism = mfa.Mechanism(_BANDS, participation, _NOISE)
    mfa.checkpoints.save(_BANDS, tmp_path / "matrix")
    long = (f"--checkpoint={tmp_path / 'matrix'}", "--num_rounds=12", "--target_epsilon=4")
    stated = []
    for name, arguments in (
        ("short", [_saved(tmp_path, mechanism)]),
        ("long", [*long, *of_matrix]),
    ):
        leave_run(tmp_path / name, *arguments, *of_both, "--delta=1e-3")
        contents = json.loads((tmp_path / name / "privacy.json").read_text())
        # The flags are other ones: config.json has them.
        files = contents["files"]
        assert files.pop("config.json") is not None
        assert len(files) > 3
        stated.append(contents)
        assert verify(tmp_path / name) == []
    assert stated[0] == stated[1]
    schema = mfa.participation.Participation.from_dict(stated[0]["planned"]["schema"])
    assert schema.allows(participation, 12)
    assert participation.allows(schema, 12)


@pytest.mark.parametrize(
    "flag",
    [
        "--separation=3",
        "--noise_multiplier=1.2",
        "--sampling=poisson",
    ],
)
def test_flags_that_contradict_a_saved_mechanism_are_refused(
    flag: str, tmp_path: pathlib.Path
) -> None:
    checkpoint = _saved(tmp_path, mfa.Mechanism(_BANDS, MinSeparation(4), _NOISE))
    given = (checkpoint, _COHORT, "--delta=1e-3", flag, f"--output_dir={tmp_path / 'run'}")
    line = console_commands.call("run-digits", *given).refused("--checkpoint=")
    assert line.startswith("run-digits:")
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_saved_mechanism_goes_on_and_is_extended(tmp_path: pathlib.Path) -> None:
    saved = mfa.Mechanism(_BANDS, MinSeparation(4, 2), _NOISE)
    command = (_saved(tmp_path, saved), _COHORT)
    path = tmp_path / "run"
    leave_run(path, *command)
    assert begin_run(path, *command).mechanism == saved
    # The last digit of a noise multiplier may differ, and no noise.
    assert mfa.load(path).sigma == saved.sigma
    # Another Mechanism there is another run.
    dataclasses.replace(saved, noise_multiplier=2.0).save(tmp_path / "saved")
    with refuses("other flags", "--noise_multiplier"):
        begin_run(path, *command)
    saved.save(tmp_path / "saved")
    # What is new of the whole is no contradiction.
    of_whole = ("--num_rounds=16", "--max_participations=3")
    longer = begin_run(path, *command, *of_whole).mechanism
    assert longer.extends == saved
    assert (longer.num_rounds, longer.participation) == (16, MinSeparation(4, 3))
    # The run has what it needs.
    shutil.rmtree(tmp_path / "saved")
    with refuses("other flags", "--separation=4", f"--noise_multiplier={_NOISE}"):
        begin_run(path, *command, *of_whole)
    again = ("--separation=4", f"--noise_multiplier={_NOISE!r}", *of_whole)
    assert begin_run(path, *command, *again).mechanism == longer


_FLEET = ("--clients_per_round=5", "--dropout_probability=0.1", "--cohort_seed=3")


def test_the_separation_of_a_run_is_one_that_its_devices_survive(tmp_path: pathlib.Path) -> None:
    """143 devices would fill 28 rounds of 5 without dropouts, and a resumed run keeps its own."""
    flags_of_fleet = ("--over_selection=1.6", "--num_rounds=60")
    run = _plan(*flags_of_fleet, path=tmp_path, clients=_FLEET)
    schema = run.mechanism.noise_reference
    assert 10 < schema.separation_in(60) < 28
    population = DevicePopulation(143, run.mechanism.participation, 5, run.behaviour, run.seed)
    assert population.starves(60)[0] is None

    resumed = _plan(*flags_of_fleet, "--over_selection=2", path=tmp_path, clients=_FLEET)
    assert resumed.mechanism.noise_reference == schema
    assert resumed.behaviour.over_selection == 2.0
    # A flag that was given is not filled in.
    given, other = "--separation=9", tmp_path / "other"
    _plan(*flags_of_fleet, given, path=other, clients=_FLEET)
    with refuses("other flags", given):
        _plan(*flags_of_fleet, path=other, clients=_FLEET)


def test_a_run_that_would_starve_is_refused_with_flags_that_do(tmp_path: pathlib.Path) -> None:
    rounds = "--num_rounds=60"
    with refuses("round", "--separation", "--over_selection") as refusal:
        _plan(rounds, "--separation=28", path=tmp_path, clients=_FLEET)
    assert not [*tmp_path.iterdir()]
    advised = re.findall(r"--[a-z_]+=[\d.]*\d", str(refusal.value))
    run = _plan(rounds, *advised, path=tmp_path, clients=_FLEET)
    separation = run.mechanism.noise_reference.separation_in(60)
    assert advised[0] == f"--separation={separation}"
    # Flags that do are not advised again, and a saved mechanism keeps its separation.
    with refuses(f"With {advised[1]} it would not"):
        _plan(rounds, f"--separation={separation - 1}", path=tmp_path / "selection", clients=_FLEET)
    matrix, schema = factorizations.identity(60), MinSeparation(28)
    mfa.calibrate(matrix, schema, epsilon=8.0, delta=1e-3).save(tmp_path / "saved")
    with refuses(f"With a checkpoint for {advised[0]} and"):
        saved = (f"--checkpoint={tmp_path / 'saved'}", "--delta=1e-3")
        _plan(rounds, *saved, path=tmp_path / "starving", clients=_FLEET)

    with refuses("fewer rounds"):
        _plan(rounds, "--clients_per_round=143", path=tmp_path / "other", clients=_FLEET)

    # Devices that never fail can be used up: 143, 90 in each of three rounds, at most twice.
    alone, limit = (
        ("--clients_per_round=90", "--cohort_seed=3"),
        ("--num_rounds=3", "--max_participations=2"),
    )
    with refuses("fewer rounds"):
        _plan(*limit, path=tmp_path / "used", clients=alone)
    # A rule that ends the run before they starve is no reason to refuse it.
    for epsilon, is_refused in ((1e3, True), (1.4, False)):
        asked = (rounds, "--separation=28", f"--stop_at_epsilon={epsilon}", "--noise_multiplier=1")
        expected: Any = refuses("round", "--separation") if is_refused else contextlib.nullcontext()
        with expected:
            _plan(*asked, path=tmp_path / str(epsilon), clients=_FLEET)


_BANDMF_ROUNDS = 2052
_DENISOV_ROUNDS = 2048


def _rates(name: str, num_rounds: int) -> np.ndarray:
    return run_plan.SCHEDULES[name].rates(num_rounds, 1.0)


def test_warm_up_reaches_the_full_rate_in_round_309_of_bandmf() -> None:
    rates = _rates("warmup_cooldown", _BANDMF_ROUNDS)
    assert rates[0] == pytest.approx(0.05, rel=1e-12)
    np.testing.assert_allclose(rates[:309], np.linspace(0.05, 1.0, 309), rtol=1e-12)
    assert rates[307] < 1.0
    assert rates[308] == 1.0


@pytest.mark.parametrize(
    ("name", "num_rounds", "reduced"),
    [("warmup_cooldown", _BANDMF_ROUNDS, 513), ("cooldown", _DENISOV_ROUNDS, 512)],
)
def test_the_cool_down_is_linear_over_the_papers_last_rounds(
    name: str, num_rounds: int, reduced: int
) -> None:
    rates = _rates(name, num_rounds)
    assert rates[-reduced - 1] == 1.0
    assert rates[-reduced] < 1.0
    assert rates[-1] == pytest.approx(0.05, rel=1e-12)
    np.testing.assert_allclose(
        rates[-reduced - 1 :], np.linspace(1.0, 0.05, reduced + 1), rtol=1e-12
    )
    if name == "cooldown":
        assert np.all(rates[:-reduced] == 1.0)
    else:
        assert np.all(rates[308:-reduced] == 1.0)


def test_decay_drops_to_15_percent_for_the_last_512_of_2048_rounds() -> None:
    rates = _rates("decay", _DENISOV_ROUNDS)
    np.testing.assert_array_equal(rates[:-512], np.ones(1536))
    np.testing.assert_array_equal(rates[-512:], np.full(512, 0.15))


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_share": -0.1},
        {"cooldown_share": 1.5},
        {"warmup_share": 0.6, "cooldown_share": 0.5},
        {"cooldown": "cosine"},
        {"warmup_factor": 0.0},
        {"cooldown_factor": 2.0},
    ],
)
def test_bad_schedules_are_refused(fields: dict[str, Any]) -> None:
    with refuses(*fields):
        run_plan.Schedule(**fields)


@pytest.mark.parametrize(("cooldown", "last"), [("linear", 0.05), ("drop", 0.15)])
def test_the_flags_of_a_run_are_the_schedules_of_the_papers(cooldown: str, last: float) -> None:
    """Denisov et al. Sec. 5: linearly to 0.05, or at once to 0.15, over 512 of 2048 rounds."""
    falls = ("--server_warmup=0", "--server_cooldown=0.25", f"--cooldown={cooldown}")
    options = config_of(COMMAND, "--num_rounds=2048", *falls)
    rates = run_plan.server_rates(options, [])
    assert np.all(rates[:1536] == 2.0)
    assert np.all(rates[1536:] < 2.0)
    assert rates[-1] == pytest.approx(2.0 * last)
    if cooldown == "drop":
        assert np.all(rates[1536:] == rates[-1])
