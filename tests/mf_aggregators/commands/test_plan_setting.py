"""What mf-plan says of what it was asked: on what an epsilon rests, and what it assumed."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

import mf_aggregators as mfa
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.kernel.numbers import rounded_up
from tests import console_commands

_SETTING = (
    "--num_rounds=12",
    "--population=40",
    "--clients_per_round=10",
    "--delta=1.5e-6",
    "--mechanisms=banded,identity",
)


def _text(*arguments: str) -> str:
    ended = console_commands.call("mf-plan", *_SETTING, *arguments)
    assert ended.status == 0, ended.errors
    return ended.printed


def _fields(*arguments: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(_text(*arguments, "--format=json"))
    return fields


def test_the_epsilon_of_a_noise_names_the_timers_and_what_is_left_without(
    cache: str, tmp_path: pathlib.Path
) -> None:
    noise = (cache, "--noise_multiplier=4", "--separation=4")
    path = tmp_path / "mine"
    fields = _fields(*noise, f"--output={path}")
    # Under timers, C changes by its largest sum of columns 0, 4 and 8, 1, 5 and 9 and so on;
    # without any, by the sum of all.
    c = np.linalg.inv(noise_rows.dense(mfa.load(path).factorization.noise_recursion()))
    by_timers = max(np.linalg.norm(c[:, first::4].sum(axis=1)) for first in range(4))
    moved = np.linalg.norm(c.sum(axis=1)) / by_timers
    epsilon = fields["epsilon_in_every_round"]
    delta = GaussianPrivacyLoss(4.0, sensitivity=moved).get_delta_for_epsilon(epsilon)
    assert 0.999999 * 1.5e-6 < delta <= 1.5e-6
    assert epsilon > fields["target_epsilon"]

    out = _text(*noise)
    _, guarantee, timers, without, *_ = out.splitlines()
    assert f"{rounded_up(fields['target_epsilon'], '.6g')}, 1.5e-06)-DP" in guarantee
    assert timers == (
        "this epsilon holds only if timers enforce participations at least 4 rounds apart on every "
        "device"
    )
    name = f"banded {fields['recommended_num_bands']}"
    assert without == (
        f"without timers, a client in every round has epsilon {rounded_up(epsilon, '.6g')} ({name})"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--separation=1", "holds even for a client in every round: no timer is needed"),
        ("--noise_multiplier=0.4", "a client in every round has no finite epsilon, because"),
    ],
)
def test_other_conditions_of_the_epsilon_of_a_noise(cache: str, flags: str, said: str) -> None:
    given = (cache, "--noise_multiplier=4", *flags.split())
    assert said in _text(*given)
    fields = _fields(*given)
    assert (fields["epsilon_in_every_round"] is None) == ("0.4" in flags)
    if "separation=1" in flags:
        assert fields["epsilon_in_every_round"] == fields["target_epsilon"]


def test_the_size_of_a_model_is_assumed_for_its_noise_alone(cache: str) -> None:
    target = (cache, "--target_epsilon=2")
    assumed, given = _text(*target), _text(*target, "--model_size=1000000")
    note = "GB and s/round are for a model of 1000000 parameters (--model_size)"
    assert note in assumed.splitlines()
    assert "model of" not in assumed.replace(note, "")
    assert "(zero-out); model of 1000000 parameters\n" in given
    assert note not in given
    assert assumed.splitlines()[4:] == given.splitlines()[3:]

    of_assumed, of_other = _fields(*target), _fields(*target, "--model_size=1000")
    assert (of_assumed["model_size"], of_other["model_size"]) == (1_000_000, 1000)
    assert of_assumed["epsilon_in_every_round"] is None
    for ours, theirs in zip(of_assumed["candidates"], of_other["candidates"], strict=True):
        for name in ("rmse", "max_error", "noise_multiplier"):
            assert ours[name] == theirs[name]
        assert ours["disk_gb"] >= theirs["disk_gb"]
