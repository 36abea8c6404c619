"""The plan calculator of the site: its grid, and what a browser makes of it."""

import html
import itertools
import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from docs.extensions import plan_grid
from tests import console_commands, headless_browser

_STATIC = plan_grid.FILE.parent
_PAGE = console_commands.ROOT / "docs" / "plan-calculator.md"
# Rounds, population, clients per round and epsilon.
_SETTINGS = ((100, 10_000, 1000, 8.0), (100, 100_000, 1000, 0.5))
_DIGITS = 1e-5


@pytest.fixture(scope="module")
def grid() -> dict[str, Any]:
    return plan_grid.read()


def _of_mf_plan(rounds: int, population: int, clients: int, epsilon: float) -> dict[str, Any]:
    """What the command finds with the flags that the page shows."""
    ended = console_commands.call(
        "mf-plan",
        f"--num_rounds={rounds}",
        f"--population={population}",
        f"--clients_per_round={clients}",
        f"--separation={min(rounds, population // clients)}",
        f"--target_epsilon={epsilon}",
        f"--delta={plan_grid.delta_of(population)}",
        f"--model_size={plan_grid.MODEL_SIZE}",
        f"--mechanisms={','.join(plan_grid.MECHANISMS)}",
        "--format=json",
    )
    assert ended.status == 0, ended.errors
    found: dict[str, Any] = json.loads(ended.printed)
    return found


def _shown(grid: dict[str, Any], setting: tuple[int, int, int, float]) -> dict[str, float]:
    """The effective RMSEs that the numbers of the grid make, as the page multiplies them."""
    rounds, population, clients, epsilon = setting
    separation = min(rounds, population // clients)
    delta = grid["deltas"][str(population)]
    multiplier = grid["guarantees"][f"{epsilon:g},{delta:g}"]["noise_multiplier"]
    found = grid["plans"][f"{rounds},{separation}"]["candidates"]
    return {each["name"]: each["rmse"] * multiplier / clients for each in found}


@pytest.mark.parametrize("setting", _SETTINGS)
def test_values_are_those_of_mf_plan(
    setting: tuple[int, int, int, float], grid: dict[str, Any]
) -> None:
    planned = _of_mf_plan(*setting)

    shown = _shown(grid, setting)
    expected = [each["effective_rmse"] for each in planned["candidates"]]
    assert list(shown.values()) == sorted(shown.values())
    # Searches end at a certified gap of 5e-4: where in it depends on the machine's linear algebra.
    np.testing.assert_allclose(list(shown.values()), expected, rtol=1e-3)
    rounds, population, clients, _ = setting
    plan = grid["plans"][f"{rounds},{min(rounds, population // clients)}"]
    assert plan["recommended"].split()[0] == planned["recommended"]
    memory = [each["bytes"] * plan_grid.MODEL_SIZE / 1e9 for each in plan["candidates"]]
    np.testing.assert_allclose(memory, [each["memory_gb"] for each in planned["candidates"]])


def test_independent_noise_is_as_large_as_its_closed_form(grid: dict[str, Any]) -> None:
    settings = itertools.product(
        plan_grid.ROUNDS, plan_grid.POPULATIONS, plan_grid.CLIENTS_PER_ROUND
    )
    keys = {(n, min(n, population // clients)) for n, population, clients in settings}
    assert set(grid["plans"]) == {f"{n},{b}" for n, b in keys}
    for n, separation in keys:
        found = grid["plans"][f"{n},{separation}"]["candidates"]
        (identity,) = (each for each in found if each["kind"] == "identity")
        participations = -(-n // separation)
        # The variance of round i is i + 1 times the squared sensitivity.
        assert identity["rmse"] == pytest.approx(np.sqrt(participations * (n + 1) / 2), rel=_DIGITS)
        places = np.array(grid["places"][str(n)])
        curve = np.sqrt(participations * (places + 1.0))
        # Rounded up, by a digit at most.
        assert np.all(np.array(identity["curve"]) >= curve * (1.0 - 1e-12))
        np.testing.assert_allclose(identity["curve"], curve, rtol=1.01 * _DIGITS)
        assert found == sorted(found, key=lambda each: float(each["rmse"]))
        assert {each["kind"] for each in found} == set(grid["mechanisms"])


def test_noise_multipliers_are_enough_and_not_more(grid: dict[str, Any]) -> None:
    assert len(grid["guarantees"]) == len(plan_grid.EPSILONS) * 3
    for key, found in grid["guarantees"].items():
        epsilon, delta = map(float, key.split(","))
        multiplier = found["noise_multiplier"]
        assert mfa.accounting.epsilon(multiplier, delta) <= epsilon
        assert mfa.accounting.epsilon(multiplier * (1.0 - 3 * _DIGITS), delta) > epsilon
        rate = mfa.accounting.true_positive_rate(multiplier, 0.01)
        assert found["true_positive_rate"] == pytest.approx(rate, rel=3 * _DIGITS)
    assert all(
        0.099 / int(population) < delta < 1.0 / int(population)
        for population, delta in grid["deltas"].items()
    )


def _opened(tmp_path: pathlib.Path, script: str) -> str:
    """What a browser makes of the page after a script."""
    (part,) = re.findall(r'^<div id="plan-calculator">.*?^<script', _PAGE.read_text(), re.M | re.S)
    shutil.copytree(_STATIC, tmp_path / "_static", dirs_exist_ok=True)
    scripts = "".join(
        f'<script src="_static/{name}.js"></script>' for name in ("plan-grid", "plan-calculator")
    )
    # What the site's button for copying does to blocks of code once the page is there.
    named = "document.querySelectorAll('pre').forEach((each, i) => { each.id = `codecell${i}`; });"
    script = f"<script>{named}{script}</script>"
    page = f"<!doctype html><body>{part.removesuffix('<script')}{scripts}{script}"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    return headless_browser.dom(tmp_path / "page.html", tmp_path / "user")


def _filled(name: str, value: float | str, kind: str = "select", event: str = "change") -> str:
    """A script by which a reader fills in a field."""
    return (
        f'{{const field = document.querySelector("{kind}[name={name}]"); field.value = "{value}";'
        f'field.dispatchEvent(new Event("{event}"));}}'
    )


def _text(dom: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", dom)))


@pytest.mark.long
def test_a_browser_shows_the_values_of_mf_plan(tmp_path: pathlib.Path) -> None:
    setting = _SETTINGS[0]
    # A reader chooses the setting, one field after another.
    names = ("rounds", "population", "clients", "epsilon")
    dom = _opened(
        tmp_path,
        "".join(_filled(name, f"{value:g}") for name, value in zip(names, setting, strict=True)),
    )

    planned = _of_mf_plan(*setting)
    (body,) = re.findall(r'<tbody id="plan-candidates">(.*?)</tbody>', dom, re.DOTALL)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
    assert len(rows) == len(planned["candidates"])
    for row, candidate in zip(rows, planned["candidates"], strict=True):
        assert row[0].split()[0] == candidate["mechanism"]
        assert float(row[1]) == pytest.approx(candidate["effective_rmse"], rel=1e-3)
        assert float(row[3]) == pytest.approx(candidate["memory_gb"], rel=1e-3)
    text = _text(dom)
    assert f"Use {rows[0][0]}. Each client takes part at most 10 times, at least 10 rounds" in text
    multiplier = planned["candidates"][0]["noise_multiplier"]
    assert f"Noise multiplier {multiplier:.4g} makes (8, 1e-05)-differential privacy" in text
    assert "--num_rounds=100 --population=10000" in text
    # Two panels, with a curve for each kind of mechanism.
    assert dom.count("<polyline") == 2 * len(plan_grid.MECHANISMS)
