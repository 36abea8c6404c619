"""The matrix of a run is for the workload that its flags say, and stays that."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import catalogue, checkpoints, factorizations, workloads
from mf_aggregators.commands import facts_of_runs
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import MinSeparation
from mf_aggregators.workloads import Workload
from simulations.devices import device_behaviour
from simulations.examples.digits import COMMAND
from simulations.runs import federated_runs, planned_runs, run_config, run_directory, run_statements
from simulations.runs.planned_runs import Run
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from tests.refusals import refuses
from tests.simulations.parsed_flags import values_of

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
        return planned_runs.plan(config, data, directory, behaviour=behaviour)
    if begun is None:
        return federated_runs.begin(config, COMMAND, directory, behaviour)
    return federated_runs.resume(begun, config, COMMAND, directory, behaviour)


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
    facts = run_statements.planned(_plan("--mechanism=identity")).facts
    assert facts.public_data.startswith("not stated")
    tuned = _plan("--mechanism=identity", "--public_data=rates were tuned on letters.")
    assert run_statements.planned(tuned).facts.public_data == "rates were tuned on letters"
    # Runs of 2.0.0 could begin with a file of weights.
    config = {**run_statements._config(tuned), facts_of_runs.INITIAL_WEIGHTS: "0a1b"}
    said = facts_of_runs.of_configuration(config, tuned.mechanism)["public_data"]
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
        each.mechanism.factorization.rmse(_trained(_ROUNDS), each.mechanism.schema)
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
        facts_of_runs.noise_split(config, mechanism) for mechanism in (before, before.extended(16))
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
        assert 5 + planned_runs._num_beside_updates(run.config) == size


# Runs that go on.


def _described(path: pathlib.Path) -> Workload:
    description = checkpoints.load_with_description(path / "factorization")[1]
    return workloads.describe(description["errors"]["workload"], description["num_rounds"])


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
