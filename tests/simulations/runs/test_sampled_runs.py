"""Runs of min-separation sampling and of balls in bins, from flags to statements."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from absl import flags

from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    SingleParticipation,
)
from mf_aggregators.privacy import guarantees
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import Independent
from simulations.examples.digits import COMMAND
from simulations.runs import (
    federated_runs,
    planned_runs,
    run_config,
    run_statements,
)
from simulations.runs.planned_runs import Run
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from tests.mf_aggregators import small_mechanisms
from tests.refusals import refuses
from tests.simulations.parsed_flags import values_of

_ROUNDS = 12
_CLIENTS = 143


def _values(*arguments: str) -> flags.FlagValues:
    return values_of(COMMAND, f"--num_rounds={_ROUNDS}", *arguments)


def _plan(*arguments: str, path: pathlib.Path = pathlib.Path("not written")) -> Run:
    config = run_config.of_flags(_values(*arguments), COMMAND)
    return planned_runs.plan(config, COMMAND.open_data(config), RunDirectory(path))


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
        (_MIN_SEPARATION, MinSeparationSampling(_ROUNDS, 3, _CLIENTS, 5, 5)),
        (_MIN_SEPARATION[:3], MinSeparationSampling(_ROUNDS, 3, _CLIENTS, 5, 3)),
        (_BINS, BallsInBins(_ROUNDS, 3, _CLIENTS, 5, 28)),
        (_BINS_OF_BLT, BallsInBins(_ROUNDS, _ROUNDS, _CLIENTS, 47, 3)),
        (_BINS_OF_TREE, BallsInBins(_ROUNDS, _ROUNDS, _CLIENTS, 20, 7)),
    ],
)
def test_the_flags_of_a_run_are_its_scheme_and_its_noise(
    arguments: tuple[str, ...], scheme: MinSeparationSampling | BallsInBins
) -> None:
    plan = _plan(*arguments, "--target_epsilon=6")
    mechanism = plan.mechanism
    assert mechanism.sampling == scheme
    assert mechanism.schema == SingleParticipation()
    statement = run_statements.planned(plan)
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
    values = _values(*_MIN_SEPARATION, "--availability=independent", "--available_probability=0.9")
    options = run_config.of_flags(values, COMMAND)
    federated_runs._check_behaviour(options, device_behaviour.of_flags(values))
    values = _values(*_MIN_SEPARATION, flag)
    with refuses("--availability", "--round_minutes", error=CommandError):
        federated_runs._check_behaviour(options, device_behaviour.of_flags(values))
    values = _values("--sampling=poisson", "--num_bands=2", "--availability=diurnal")
    options = run_config.of_flags(values, COMMAND)
    with refuses("data centre", error=CommandError):
        federated_runs._check_behaviour(options, device_behaviour.of_flags(values))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("available", [None, 0.5])
@pytest.mark.parametrize("arguments", [_MIN_SEPARATION, _BINS, _BINS_OF_BLT])
def test_statements_amplify_what_the_seed_drew_and_nothing_else(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], available: float | None
) -> None:
    """Of runs that are stopped and finished, of all devices or of those that are available."""
    plan = _plan(*arguments, "--noise_multiplier=0.8", path=tmp_path)
    scheme = plan.mechanism.sampling
    assert scheme is not None
    sampler = scheme.sampler(5)
    if available is not None:
        sampler = device_behaviour.AvailableClients(sampler, Independent(available), 2, 300.0)
    names = tuple(f"zebra-{index}." for index in range(_CLIENTS))
    drawn = ParticipationLedger(names, tuple(map(sampler.draw, range(_ROUNDS))), scheme)
    directory = plan.directory
    statements = run_statements.RunStatements(dataclasses.replace(plan, sampler=sampler))

    def stated(ledger: ParticipationLedger) -> dict[str, Any]:
        statements.before(ledger)
        text = (directory.path / "PRIVACY.md").read_text()
        assert "zebra" not in text
        contents: dict[str, Any] = json.loads((directory.path / "privacy.json").read_text())
        assert "zebra" not in json.dumps(contents)
        return contents

    planned = stated(drawn.first_rounds(0))["planned"]
    assert planned["certificate"]["seed"] == 0
    for rounds in (5, _ROUNDS):
        contents = stated(drawn.first_rounds(rounds))
        assert contents["keeps_plan"] is True
        assert contents["headline"]["epsilon"] == planned["epsilon"]
        assert contents["observed"]["num_rounds"] == rounds
        for name in (contents["headline"]["guarantee"], "observed"):
            assert contents[name]["true_positive_percent"] == planned["true_positive_percent"]
    # One participation more, less, or of another client: nobody's draws.
    index = next(i for i in range(_ROUNDS) if len(drawn.cohorts[i]))
    cohort = drawn.cohorts[index]
    other = np.setdiff1d(np.arange(_CLIENTS), cohort)[:1]
    for changed in (cohort[1:], np.union1d(cohort, other), np.union1d(cohort[1:], other)):
        cohorts = [*drawn.cohorts[:index], changed, *drawn.cohorts[index + 1 :]]
        contents = stated(dataclasses.replace(drawn, cohorts=tuple(cohorts)))
        assert contents["keeps_plan"] is False
        stated_one = contents[contents["headline"]["guarantee"]]
        assert stated_one["sampling"] is None
        assert float(stated_one["epsilon"]) > float(planned["epsilon"])
