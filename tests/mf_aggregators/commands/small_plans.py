"""Calls of mf-plan for a small setting, and what its printed commands say."""

import ast
import functools
import pathlib
from typing import Any

import mf_aggregators as mfa
from mf_aggregators.commands import plan
from simulations.runs.run_config import RunConfig
from stackoverflow_nwp import run_stackoverflow
from tests import console_commands
from tests.simulations.parsed_flags import config_of

SETTING = (
    "--num_rounds=12",
    "--population=40",
    "--clients_per_round=10",
    "--target_epsilon=7.123456789",
    "--delta=1.5e-6",
    "--model_size=1000",
)

# As many groups as batches, for which there is a closed form and no search.
DRAWN_BY_POISSON = ("--sampling=poisson", "--num_rounds=4")


call_plan = functools.partial(console_commands.call, "mf-plan")


def fields_of_plan(*arguments: str) -> dict[str, Any]:
    """What mf-plan says in JSON of the setting, with further flags."""
    return call_plan(*SETTING, *arguments, "--format=json").fields()


def run_factorize(words: list[str]) -> None:
    """Runs mf-factorize by the words of a printed command."""
    console_commands.call(*words).done()


def options_of_run(words: list[str]) -> RunConfig:
    """What a run would do, with every default filled in, for a file in a template's place."""
    words = [word.replace(plan._PLACEHOLDER, "mine.sqlite") for word in words]
    return config_of(run_stackoverflow.command(), *words[1:])


def arguments_of(lines: str) -> tuple[str, dict[str, Any]]:
    """The directory of mfa.load(...), and the arguments of mfa.mf_dp_aggregator(mechanism, ...)."""
    load, make = ast.parse(lines).body
    assert isinstance(load, ast.Assign)
    assert isinstance(load.value, ast.Call)
    assert ast.unparse(load.value.func) == "mfa.load"
    (directory,) = map(ast.literal_eval, load.value.args)
    assert isinstance(make, ast.Assign)
    call = make.value
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "mfa.mf_dp_aggregator"
    assert [ast.unparse(each) for each in (*load.targets, *call.args)] == ["mechanism"] * 2
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    # What a guarantee is about is in the mechanism alone.
    assert named.keys() <= {"clip_norm", "clients_per_round", "noise_storage"}
    return directory, named


def run_lines(lines: str) -> dict[str, Any]:
    """What a user's program has after the printed lines."""
    found: dict[str, Any] = {"mfa": mfa}
    exec(lines, found)
    return found


def file_of_weights(tmp_path: pathlib.Path, num_rounds: int) -> str:
    """A file with a weight for each round, whose name has a space."""
    path = tmp_path / "their weights.txt"
    path.write_text("".join(f"{2.0 ** (i / 8)}\n" for i in range(num_rounds)))
    return str(path)
