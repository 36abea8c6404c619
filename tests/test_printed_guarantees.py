"""No number of a guarantee is printed better than it was computed: compared as decimals."""

import json
import math
import pathlib
import re
from collections.abc import Iterable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting, checkpoints, factorizations, workloads
from mf_aggregators import audit as audits
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.audit import AuditResult, Claim
from mf_aggregators.audit.bits import BitsResult
from mf_aggregators.audit.statistics import Contribution, ErrorRates
from mf_aggregators.commands import audit, command_line
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import MinSeparation, sampling_scheme
from mf_aggregators.privacy import guarantees, statement_file, statements
from mf_aggregators.privacy.guarantees import LeastProtected
from mf_aggregators.privacy.ledgers import RoundTimes
from mf_aggregators.privacy.statements import Statement
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from simulations.comparison import run_comparisons
from simulations.comparison.repeated_runs import FinishedRun
from simulations.runs import run_command
from tests import console_commands
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.small_mechanisms import plan_of

# Most have an epsilon that rounding to nearest would print too small.
_MULTIPLIERS = (0.3, 0.4137, 0.5, 0.61803, 0.777, 1.1, 1.937, 3.3, 7.31)


def _decimal(value: float) -> Decimal:
    """What a float stands for: the shortest decimal that is read as it."""
    return Decimal(repr(float(value)))


# A target that the noise is made for is printed as it was asked for.


@pytest.mark.long
@given(st.floats(1e-4, 60.0), st.floats(1e-11, 0.01))
@example(1e-4, 1.6e-8)  # where rounding makes epsilon grow with the noise
@example(31.0, 0.0078125)  # where nothing is stated of less noise
@settings(max_examples=examples(100, one_in=10))
def test_the_epsilon_of_calibrated_noise_is_not_above_its_target(
    target: float, delta: float
) -> None:
    multiplier = accounting.noise_multiplier(target, delta)
    found = accounting.epsilon(multiplier, delta)
    assert found <= target
    # Nor is there noise that the target does not need.
    try:
        of_less = accounting.epsilon(multiplier * (1.0 - 1e-4), delta)
    except accounting.TailError:
        # For less noise nothing is stated.
        return
    assert of_less > target or found == 0.0


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffling"])
@pytest.mark.parametrize(
    "target", [*(pytest.param(each, marks=pytest.mark.long) for each in (0.7, 2.0, 8.0)), 9.37]
)
def test_the_epsilon_of_calibrated_amplified_noise_is_not_above_its_target(
    sampling: str, target: float
) -> None:
    multiplier = sampling_scheme(
        sampling, num_rounds=24, num_bands=3, population=600, clients_per_round=20
    ).noise_multiplier(target, 1e-5)
    found = sampling_scheme(
        sampling, num_rounds=24, num_bands=3, population=600, clients_per_round=20
    ).epsilon(multiplier, 1e-5)
    assert target * (1.0 - 1e-3) < found <= target


# Each place that prints one.


def _pairs(text: str) -> list[tuple[Decimal, Decimal]]:
    return [
        (Decimal(epsilon), Decimal(delta))
        for epsilon, delta in re.findall(r"\(([\d.e+-]+), ([\d.e+-]+)\)-(?:DP|differential)", text)
    ]


def _check(text: str, epsilons: Iterable[float], delta: float) -> None:
    """The pairs of a text are of these epsilons, in their order, and none is better."""
    expected = list(epsilons)
    found = _pairs(text)
    assert len(found) == len(expected), text
    for (epsilon, its_delta), value in zip(found, expected, strict=True):
        assert _decimal(value) <= epsilon <= _decimal(value) * Decimal("1.01"), text
        assert _decimal(delta) <= its_delta <= _decimal(delta) * Decimal("1.0001"), text


@pytest.mark.parametrize("multiplier", _MULTIPLIERS)
def test_privacy_statements_of_timers(multiplier: float) -> None:
    delta = 1.23456749e-4
    factorization = factorizations.identity(10)
    schema = MinSeparation(3, 3)
    planned = plan_of(factorization, schema, multiplier, delta)
    larger = plan_of(factorization, schema, 2 * multiplier, delta)
    observed = ObservedParticipation.of([[0, 1, 4]], 10)
    statement = Statement(
        small_mechanisms.facts(is_finished=True),
        planned,
        observed,
        LeastProtected("a", (0, 1, 4), observed.guarantee(planned)),
        {"clients_per_round": 20, "population": 70, "planned": statements.described(larger)},
    )
    document: dict[str, Any] = statement.to_dict()
    part: dict[str, Any] = {**guarantees.part_of_client(statement.stated)}
    assert part["epsilon"] > statement.stated.epsilon
    follows = [planned, statement.observed_guarantee]
    _check(
        statement_file.render(document),
        [
            larger.epsilon,
            statement.stated.epsilon,
            *([part["epsilon"]] if math.isfinite(part["epsilon"]) else []),
            *(each.epsilon for each in follows if each is not None),
        ],
        delta,
    )
    for name, guarantee in statement.named_guarantees.items():
        if guarantee is None:
            continue
        stated = document[name]
        for key, value in (("epsilon", guarantee.epsilon), ("rho", guarantee.rho)):
            assert (
                0 <= Decimal(stated[key]) - _decimal(value) < Decimal("1e-5") * Decimal(stated[key])
            )
        assert Decimal(stated["zcdp_delta"]) >= _decimal(guarantee.zcdp_delta) > 0
        assert Decimal(stated["sensitivity"]) >= _decimal(guarantee.sensitivity.value)
        assert Decimal(stated["noise_multiplier"]) <= _decimal(guarantee.noise_multiplier)
    worst = document["worst_client"]
    assert worst["sensitivity"] == document["observed"]["sensitivity"]
    assert worst["epsilon"] == document["observed"]["epsilon"]
    # The noise is a hypothesis: exactly what was added, neither more nor less.
    assert document["noise"]["noise_multipliers"] == [repr(planned.noise_multiplier)]


@pytest.mark.parametrize("multiplier", [0.61803, 1.937])
def test_privacy_statements_of_sampling(multiplier: float) -> None:
    scheme = sampling_scheme(
        "poisson", num_rounds=10, num_bands=1, population=50, clients_per_round=5
    )
    planned = small_mechanisms.sampled(factorizations.identity(10), scheme, multiplier, 1e-5)
    document = Statement(small_mechanisms.facts(enforcement="The server draws."), planned).to_dict()
    part: dict[str, Any] = {**guarantees.part_of_client(planned)}
    stated: Any = document["part_of_client"]
    assert None not in (part["amplified_epsilon"], part["amplified_delta"])
    shown = [stated[name] for name in ("amplified_epsilon", "amplified_delta")]
    for text, value in zip(
        shown, (part["amplified_epsilon"], part["amplified_delta"]), strict=True
    ):
        assert 0 <= Decimal(text) - _decimal(value) < Decimal("1e-5") * _decimal(value)
    amplified = f"twice the client's guarantee is ({shown[0]}, {shown[1]})-DP"
    text = statement_file.render(document)
    assert amplified in text
    without = [part["epsilon"]] if math.isfinite(part["epsilon"]) else []
    _check(text.replace(amplified, ""), [planned.epsilon, *without, planned.epsilon], 1e-5)


_ASSUMED = re.compile(r"within (\S+) hours of .* by at most (\S+) % and (\S+) minutes")


@given(st.floats(1.0, 5000.0), st.floats(0.0, 0.01), st.floats(0.0, 30.0), st.floats(-1e-6, 1e-6))
@example(1234.5649, 0.0, 0.0, -2.3e-6)
@settings(max_examples=examples(100))
def test_a_condition_on_timers_as_printed_gives_what_is_stated(
    hours: float, drift: float, margin: float, apart: float
) -> None:
    """Rounds about as far apart as timers: a timer that is printed a little shorter allows more."""
    timer = 3600.0 * hours * (1.0 - drift) - 60.0 * margin
    starts = timer * (1.0 + apart) * np.arange(20)
    if timer < 10.0:
        return
    found = RoundTimes(starts, starts + 1.0, hours, drift, margin).participation()
    assert found.conditions is not None
    match = _ASSUMED.search(found.conditions)
    assert match is not None
    shown = float(match[1]), float(Decimal(match[2]) / 100), float(match[3])
    assert RoundTimes(starts, starts + 1.0, *shown).participation() == found
    fields = {"timer_hours": hours, "clock_drift": drift, "clock_margin_minutes": margin}
    for (name, value), again in zip(fields.items(), (hours, drift, margin), strict=True):
        assert float(command_line.table([(name, value)]).split()[1]) == again


@given(st.floats(0.3, 30.0), st.floats(0.3, 30.0), st.floats(1e-3, 1e3))
@settings(max_examples=examples(30))
def test_the_noise_of_a_statement_is_no_more_than_there_is(
    updates: float, others: float, norm: float
) -> None:
    """Of updates, indicators and metrics, and the norm and the ranges that it is relative to."""
    plan = plan_of(factorizations.identity(4), MinSeparation(2), 1.0, 1e-4)
    clip = AdaptiveClip(initial_norm=norm, smallest_norm=0.5 * norm, largest_norm=2.0 * norm)
    metrics = PrivateMetrics((BoundedMetric("loss", -norm, norm),))
    split = NoiseSplit(updates, others, 1.0, 1.0, others, 1.0)
    plain = Statement(small_mechanisms.facts(clip=norm), plan).to_markdown()
    adaptive = Statement(
        small_mechanisms.facts(clip=clip, split=split, metrics=metrics), plan
    ).to_markdown()
    for text, pattern, values in (
        (plain, r"L2 norm of (\S+)\. The", [norm]),
        (adaptive, r"adapts: (\S+) in the first round", [norm]),
        (adaptive, r"between (\S+) and (\S+), towards", [0.5 * norm, 2.0 * norm]),
        (adaptive, r"loss \((\S+) to (\S+)\)", [-norm, norm]),
    ):
        match = re.search(pattern, text)
        assert match is not None, (pattern, text)
        assert [Decimal(each) for each in match.groups()] == [_decimal(each) for each in values]
    noise = re.search(
        r"updates is (\S+) clip norms, that of the count of indicators (\S+), "
        r"that of a metric (\S+) ",
        adaptive,
    )
    assert noise is not None
    for shown, value in zip(noise.groups(), (updates, others, others), strict=True):
        assert 0 <= _decimal(value) - Decimal(shown) < Decimal("1e-5") * _decimal(value)


def test_a_delta_that_is_warned_of_is_not_printed_smaller() -> None:
    delta = 0.123456499
    plan = plan_of(factorizations.identity(4), MinSeparation(2), 1.0, delta)
    warning = re.search(
        r"Delta, (\S+), is", Statement(small_mechanisms.facts(), plan).to_markdown()
    )
    assert warning is not None
    assert Decimal(warning[1]) == _decimal(delta)


@given(st.floats(0.3, 1e4))
@settings(max_examples=examples(30))
def test_a_mechanism_is_not_printed_with_more_noise_than_it_has(multiplier: float) -> None:
    mechanism = Mechanism(factorizations.identity(4), MinSeparation(2), multiplier)
    shown = re.search(r"noise multiplier (\S+)", str(mechanism))
    assert shown is not None
    assert 0 <= _decimal(multiplier) - Decimal(shown[1]) < Decimal("1e-3") * _decimal(multiplier)


def test_mf_plan_names_no_smaller_rho_than_its_noise_has() -> None:
    setting = ("--num_rounds=30", "--population=100", "--clients_per_round=20")
    text = _run("mf-plan", *setting, "--target_rho=0.12345649", "--mechanisms=identity")
    shown = re.search(r"target rho = (\S+) \(", text)
    assert shown is not None
    assert Decimal("0.12345649") <= Decimal(shown[1]) < Decimal("0.123458")


@pytest.mark.parametrize("multiplier", _MULTIPLIERS)
def test_what_a_run_prints_at_its_end(multiplier: float) -> None:
    guarantee = plan_of(factorizations.identity(4), MinSeparation(2), multiplier, 1e-4)
    _check(run_command.stated_privacy(guarantee), [guarantee.epsilon], 1e-4)
    none = plan_of(factorizations.identity(4), MinSeparation(2), 0.1, 1e-4)
    assert run_command.stated_privacy(none) == "none that holds for every client"


def _run(command: str, *arguments: str, status: int = 0) -> str:
    ended = console_commands.call(command, *arguments)
    assert ended.status == status
    return ended.printed


@pytest.mark.parametrize("multiplier", ["0.4137", "1.937"])
@pytest.mark.parametrize("ledger", ["a,0\nb,1\na,3\n", "a,0\na,1\na,3\n"])
def test_mf_report(multiplier: str, ledger: str, tmp_path: pathlib.Path) -> None:
    checkpoints.save(
        factorizations.banded(workloads.prefix_sum(6), 2, participation=MinSeparation(3)),
        tmp_path / "c",
    )
    (tmp_path / "ledger.csv").write_text(ledger)
    (tmp_path / "counts.txt").write_text("1\n1\n0\n1\n0\n0\n")
    arguments = [
        f"--checkpoint={tmp_path / 'c'}",
        f"--ledger={tmp_path / 'ledger.csv'}",
        f"--round_counts={tmp_path / 'counts.txt'}",
        f"--noise_multiplier={multiplier}",
        "--separation=3",
        "--delta=1.23456749e-5",
    ]
    # A ledger that breaks its plan ends with status 1, and no planned epsilon is printed in words.
    status = 1 if "a,1" in ledger else 0
    fields = json.loads(_run("mf-report", *arguments, "--format=json", status=status))
    text = _run("mf-report", *arguments, status=status)
    if status:
        epsilons = [fields["realised_epsilon"], fields["widened_epsilon"]]
    else:
        epsilons = [fields["epsilon"], fields["realised_epsilon"]]
    _check(text, epsilons, fields["delta"])
    _check_table(text, fields)


def _check_table(text: str, fields: dict[str, object]) -> None:
    # What warns stands before the table.
    is_warned = text.startswith("WARNING")
    table = text.split("\n\n")[1 if is_warned else 0]
    shown = dict(re.findall(r"^([\w.-]+) +(\S.*)$", table, re.MULTILINE))
    checked = 0
    for name, value in fields.items():
        if not isinstance(value, float):
            continue
        if name.endswith("noise_multiplier"):
            assert float(shown[name]) == value
        elif "_lower_bound" in name and "over" not in name:
            assert Decimal(shown[name]) <= _decimal(value), name
        elif "epsilon" in name or name in ("delta", "zcdp_rho", "zcdp_delta", "mu"):
            assert Decimal(shown[name]) >= _decimal(value), name
        else:
            continue
        assert float(shown[name]) == pytest.approx(value, rel=1e-5)
        checked += 1
    assert checked >= 3


def test_mf_plan(tmp_path: pathlib.Path) -> None:
    arguments = [
        "--num_rounds=8",
        "--population=60",
        "--clients_per_round=6",
        "--target_epsilon=3.1234512",
        "--delta=1.2345612e-3",
        "--model_size=100",
        f"--cache_dir={tmp_path}",
    ]
    fields = json.loads(_run("mf-plan", *arguments, "--format=json"))
    text = _run("mf-plan", *arguments)
    assert "(3.12346, 0.00123457)-DP" in text
    # A requirement: what is printed suffices.
    needed = fields["candidates"][0]["noise_multiplier"]
    assert accounting.epsilon(needed, fields["delta"]) <= 3.1234512
    assert rounded_up(needed, ".5g") in text
    assert Decimal(rounded_up(needed, ".5g")) >= _decimal(needed)


@pytest.mark.parametrize("exceeded", [False, True])
def test_mf_audit(exceeded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = Mechanism(factorizations.identity(8), MinSeparation(3), 0.41371239)
    claim = Claim(mechanism, 1.0, 100)
    epsilon = mechanism.guarantee(1e-6).epsilon
    # Above the claim by less than printed digits tell.
    mu = claim.mu * (1.0 + 1e-9 if exceeded else 0.912345678)
    bound: Any = SimpleNamespace(delta=1e-6, epsilon=epsilon, epsilon_lower_bound=3.123456789)
    result = AuditResult(
        claim,
        1e-6,
        epsilon,
        epsilon * mu / claim.mu,
        mu,
        (bound,),
        Contribution((0, 3), (1, 1), (0, 0), 2.0),
        (ErrorRates.of_counts(0.5, 3, 1000, 5, 100, 1e-4),),
        1.2345674e-4,
    )
    bits = BitsResult(claim, 200, 107, 198, 0.1, 1e-4)
    monkeypatch.setattr(audits, "audit", lambda *unused, **also_unused: result)
    monkeypatch.setattr(audit, "audit_bits", lambda *unused, **also_unused: bits)
    arguments = ("mf-audit", "--mechanism=identity", "--noise_multiplier=0.41371239")
    status = command_line.REFUTED if exceeded else command_line.DONE
    fields = json.loads(_run(*arguments, "--format=json", status=status))
    text = _run(*arguments, "--format=text", status=status)
    _check_table(text, fields)
    ((shown, _),) = _pairs(text)
    if exceeded:
        # What is said to be exceeded is no more than what was.
        assert shown <= _decimal(epsilon) < _decimal(result.epsilon_lower_bound)
        assert "multiplier 0.41371239 allows" in text
    else:
        assert 0 <= shown - _decimal(epsilon) < Decimal("0.01")
    rate = re.findall(r"^false_alarm_rate +(\S+)$", text, re.MULTILINE)[0]
    assert rate == "0.000223457"


@pytest.mark.parametrize("multiplier", ["0.61803", "0.4137", "0.777", "1.1"])
def test_simulate_participation(multiplier: str, tmp_path: pathlib.Path) -> None:
    checkpoints.save(factorizations.identity(8), tmp_path / "c")
    arguments = [
        "--population=40",
        "--clients_per_round=5",
        "--separation=4",
        f"--checkpoint={tmp_path / 'c'}",
        f"--noise_multiplier={multiplier}",
    ]
    fields = json.loads(_run("simulate-participation", *arguments, "--format=json"))
    text = _run("simulate-participation", *arguments)
    _check(text, [fields["planned_epsilon"], fields["realised_epsilon"]], 1e-6)
    _check_table(text, fields)


@given(
    st.lists(st.floats(1.0, 9.0), min_size=2, max_size=2),
    st.lists(st.floats(1e-9, 0.1), min_size=2, max_size=2),
)
def test_tables_of_comparisons(epsilons: list[float], deltas: list[float]) -> None:
    runs = {
        name: [FinishedRun(0.5, 9, epsilon, delta, 1.0)]
        for name, epsilon, delta in zip(("blt", "tree"), epsilons, deltas, strict=True)
    }
    rows = run_comparisons.summarise(runs)
    for line, row in zip(run_comparisons.to_markdown(rows).splitlines()[2:], rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert row.epsilon is not None
        assert row.delta is not None
        assert 0 <= Decimal(cells[5]) - _decimal(row.epsilon) < Decimal("0.001")
        assert 0 <= Decimal(cells[6]) - _decimal(row.delta) < _decimal(row.delta) * Decimal("1e-5")
