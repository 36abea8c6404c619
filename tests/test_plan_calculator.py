"""The plan calculator of the site: its table, and what a browser computes."""

import html
import json
import pathlib
import random
import re
import shutil
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from docs.extensions import plan_grid
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import fleets
from tests import console_commands, headless_browser

_STATIC = plan_grid.FILE.parent
_PAGE = console_commands.ROOT / "docs" / "plan-calculator.md"
_SCRIPTS = ("plan-grid", "plan-numbers", "plan-fleets", "plan-calculator")
# Searches end at a certified gap of 5e-4: where in it depends on the machine's linear algebra.
_GAP = 1e-3


def test_ratios_are_those_of_plans() -> None:
    table = plan_grid.read()

    rounds = plan_grid.ROUNDS[0]
    assert table.rounds == list(plan_grid.ROUNDS)
    assert table.separations == [plan_grid.separations(each) for each in plan_grid.ROUNDS]
    for place in (2, -1):
        ratios = plan_grid.ratios(rounds, table.separations[0][place])
        found = {kind: values[0][place] for kind, values in table.ratios.items()}
        assert found == pytest.approx(ratios, rel=_GAP)
    # Of matrices with so many bands none is worse than the square root's.
    assert max(map(max, table.ratios["banded"])) <= 1.0 + 2 * _GAP
    assert set(table.ratios) == set(plan_grid.MECHANISMS)


def _opened(tmp_path: pathlib.Path, script: str, link: str = "") -> str:
    """What a browser makes of the page after a script."""
    (part,) = re.findall(r'^<div id="plan-calculator">.*?^<script', _PAGE.read_text(), re.M | re.S)
    shutil.copytree(_STATIC, tmp_path / "_static", dirs_exist_ok=True)
    scripts = "".join(f'<script src="_static/{name}.js"></script>' for name in _SCRIPTS)
    page = f"<!doctype html><body>{part.removesuffix('<script')}{scripts}<script>{script}</script>"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    return headless_browser.dom(tmp_path / "page.html", tmp_path / "user", link)


def _computed(tmp_path: pathlib.Path, expression: str, inputs: list[Any]) -> list[Any]:
    """The values of a JavaScript expression in ``each``, for each input, in a browser."""
    dom = _opened(
        tmp_path,
        "(async () => { const found = [];"
        f"for (const each of {json.dumps(inputs)}) found.push(await ({expression}));"
        "const place = document.body.appendChild(document.createElement('pre'));"
        "place.id = 'found'; place.textContent = JSON.stringify(found); })();",
    )
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    values: list[Any] = json.loads(html.unescape(found))
    assert len(values) == len(inputs)
    return values


@pytest.mark.long
def test_a_browser_computes_what_the_library_does(tmp_path: pathlib.Path) -> None:
    source = random.Random(2)
    inputs: list[Any] = [
        [
            10 ** source.uniform(-1.5, 1.8),
            10 ** source.uniform(-11.0, -1.5),
            source.randrange(1, 1500),
            source.randrange(1, 300),
            source.choice([None, 1, 2, 5, 20]),
        ]
        for _ in range(500)
    ]

    found = _computed(
        tmp_path,
        "[planNumbers.noiseMultiplierOf(each[0], each[1]),"
        "planNumbers.truePositiveRateOf(planNumbers.noiseMultiplierOf(each[0], each[1])),"
        "planNumbers.bandedNoise(each[2], {separation: each[3], most: each[4]})]",
        inputs,
    )

    for (epsilon, delta, rounds, separation, most), (multiplier, rate, noise) in zip(
        inputs, found, strict=True
    ):
        exact = mfa.accounting.noise_multiplier(epsilon, delta)
        # The library takes roundings off delta, of at most 1e-16 for each coordinate.
        assert exact * (1.0 - 1e-4) <= multiplier <= exact * (1.0 + 1e-9)
        assert rate == pytest.approx(
            mfa.accounting.true_positive_rate(multiplier, 0.01), rel=1e-9, abs=1e-12
        )
        schema = MinSeparation(separation, most)
        assert noise == pytest.approx(fleets.noise_of(rounds, schema), rel=1e-9)


@pytest.mark.long
def test_fleets_in_a_browser_survive_what_those_of_mf_plan_do(tmp_path: pathlib.Path) -> None:
    source = random.Random(3)
    inputs: list[list[Any]] = []
    for _ in range(8):
        clients = source.choice([50, 200, 1000])
        inputs.append(
            [
                source.randrange(50, 400),
                int(clients * 10 ** source.uniform(1.0, 2.5)),
                clients,
                source.uniform(0.0, 0.3),
                source.uniform(0.5, 1.0),
                *source.choice(((None, None), (24.0, 20.0))),
                source.choice([0.0, 20.0]),
            ]
        )

    found = _computed(
        tmp_path,
        "planFleets.choose({population: each[1], clients: each[2], dropout: each[3],"
        "returning: each[4], timerHours: each[5], roundMinutes: each[6], absentRounds: each[7]},"
        "each[0])"
        ".then((pairs) => pairs.length ? planNumbers.bandedNoise(each[0], pairs[0]) : null)",
        inputs,
    )

    names = ("dropout", "returning", "timer_hours", "round_minutes", "absent_rounds")
    for (rounds, population, clients, *others), noise in zip(inputs, found, strict=True):
        fleet = fleets.Fleet(population, clients, **dict(zip(names, others, strict=True)))
        try:
            expected = fleet.choose(rounds)[0].noise
        except ValueError:
            assert noise is None
            continue
        # Both draw 100 fleets.
        assert noise == pytest.approx(expected, rel=0.12)


@pytest.mark.long
def test_interpolated_errors_are_those_of_mf_plan(tmp_path: pathlib.Path) -> None:
    source = random.Random(4)
    rounds = [round(30 * 10 ** source.uniform(0.0, 1.0)) for _ in range(6)]
    inputs = [[each, max(2, round(each ** source.uniform(0.3, 1.0)))] for each in rounds]
    inputs += [[each, each] for each in rounds[:2]]

    found = _computed(
        tmp_path, "planCalculator.errorsOf(each[0], {separation: each[1], most: null})", inputs
    )

    for (num_rounds, separation), errors in zip(inputs, found, strict=True):
        noise = fleets.noise_of(num_rounds, MinSeparation(separation))
        exact = plan_grid.ratios(num_rounds, separation)
        shown = {each["kind"]: each["rmse"] / noise for each in errors}
        independent = np.sqrt(-(-num_rounds // separation) * (num_rounds + 1) / 2)
        assert shown.pop("identity") * noise == pytest.approx(independent)
        assert set(shown) == ({"banded"} if separation < num_rounds else set(exact))
        for kind, value in shown.items():
            assert value == pytest.approx(exact[kind], rel=0.02)


@pytest.mark.long
def test_a_link_opens_a_plan_with_its_python(tmp_path: pathlib.Path) -> None:
    link = "rounds=100&population=100000&clients=1000&epsilon=0.5&dropout=0&goal=0.02"

    dom = _opened(tmp_path, "", f"#{link}")

    assert 'data-state="done"' in dom
    assert f'href="#{html.escape(link)}"' in dom
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", dom)))
    multiplier = mfa.accounting.noise_multiplier(0.5, 1e-6)
    (shown,) = re.findall(r"Noise multiplier ([\d.]+) makes \(0.5, 1e-06\)-differential", text)
    assert multiplier <= float(shown) <= 1.001 * multiplier
    assert "--num_rounds=100 --population=100000" in text
    assert re.search("For an effective RMSE of at most 0.02 you need about|No number of", text)
    (code,) = re.findall(r'id="plan-python">(.*?)</code>', dom, re.DOTALL)
    namespace: dict[str, Any] = {}
    lines = html.unescape(code).splitlines()
    exec("\n".join(line for line in lines if "mf_dp_aggregator" not in line), namespace)
    guarantee = namespace["mechanism"].guarantee(1e-6)
    assert guarantee.epsilon <= 0.5
    assert len(re.findall("<polyline", dom)) == 2 + 1


@pytest.mark.long
def test_no_plan_is_better_than_can_be(tmp_path: pathlib.Path) -> None:
    """One round has the error of independent noise; less devices do not do with one timer."""
    asked = {"rounds": 60, "population": 20000, "clients": 100, "epsilon": 8, "delta": 1e-6}
    asked |= {"dropout": 5, "returning": 100, "hours": 2, "minutes": 20}
    expression = (
        "planCalculator.planOf(each).then((plan) => [plan.candidates.map((one) => one.rmse),"
        "planCalculator.devicesFor(each, plan, 2 * plan.candidates[0].effectiveRmse)])"
    )

    found = _computed(tmp_path, expression, [{**asked, "rounds": 1}, asked])

    assert found[0][0] == [1.0] * 5
    assert found[1][1] >= asked["population"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("link", "refusal"),
    [
        ("rounds=100&population=50&clients=100&epsilon=1", "fewer devices than clients"),
        ("rounds=1.5&population=500&clients=100&epsilon=1", "whole numbers"),
        ("rounds=100&population=500&clients=10&epsilon=1&hours=24", "go together"),
        ("rounds=300&population=105&clients=100&epsilon=1&dropout=10", "No separation keeps"),
        ("rounds=9&population=90000&clients=10&epsilon=1&dropout=99.999", "dropouts included"),
        ("rounds=9&population=89&clients=10&epsilon=1&hours=1e9&minutes=1e-9", "No separation"),
    ],
)
def test_bad_numbers_are_refused(link: str, refusal: str, tmp_path: pathlib.Path) -> None:
    dom = _opened(tmp_path, "", f"#{link}")

    (said,) = re.findall(r'<p id="plan-outside"[^>]*>(.*?)</p>', dom)
    assert refusal in said
    assert re.search(r'<div id="plan-inside" hidden', dom)
