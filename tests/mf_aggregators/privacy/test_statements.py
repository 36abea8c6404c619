"""A statement says what holds, on what that rests, and warns of what does not hold."""

import dataclasses
import itertools
import json
import math
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event

from mf_aggregators import accounting, workloads
from mf_aggregators.factorizations import banded, identity
from mf_aggregators.kernel.claim import ONLY_IF
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import SCHEMES, MinSeparation, sampling_scheme
from mf_aggregators.privacy import guarantees, statement_file, statements
from mf_aggregators.privacy.guarantees import LeastProtected, StoppingRule
from mf_aggregators.privacy.ledgers import Ledger, RoundTimes
from mf_aggregators.privacy.statement_file import StatementError
from mf_aggregators.privacy.statements import Evidence, RunFacts, Statement
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.small_mechanisms import plan_of
from tests.refusals import refuses

_FACTS = RunFacts(
    mechanism="Identity matrix factorization for 10 rounds",
    population=7,
    clients_per_round=2,
    clip=0.5,
    public_data="none",
    enforcement="A timer on each phone.",
    responsible="Jane Doe",
)


def _statement(
    rounds_of_client: list[int] | None,
    num_rounds: int = 10,
    multiplier: float = 1.0,
    **facts: Any,
) -> Statement:
    plan = plan_of(identity(10), MinSeparation(3, 3), multiplier, 1e-4)
    about = dataclasses.replace(_FACTS, **facts)
    if rounds_of_client is None:
        return Statement(about, plan)
    observed = ObservedParticipation.of([rounds_of_client], num_rounds)
    return Statement(about, plan, observed)


def _sampled(
    keeps_sampling: bool | None, name: str = "poisson", multiplier: float = 1.2
) -> Statement:
    factorization = banded(workloads.prefix_sum(12), 3)
    scheme = sampling_scheme(name, num_rounds=12, num_bands=3, population=300, clients_per_round=10)
    plan = small_mechanisms.sampled(factorization, scheme, multiplier, 1e-4)
    facts = dataclasses.replace(_FACTS, population=300, clients_per_round=10)
    observed = ObservedParticipation(12, 87, 3, 4, keeps_sampling=keeps_sampling)
    return Statement(facts, plan, observed)


def _by_times(multiplier: float = 1.0) -> Statement:
    """Of twelve rounds an hour apart, with timers of two hours under a plan of four rounds."""
    starts = 3600.0 * np.arange(12)
    times = RoundTimes(starts, starts + 1800.0, timer_hours=2.0)
    mechanism = Mechanism(identity(12), MinSeparation(4), multiplier)
    return mechanism.observed(times).statement(_FACTS, 1e-4)


def _text(statement: Statement) -> str:
    document = statement.to_dict()
    assert not list(statement_file.problems(json.loads(statement_file.canonical(document))))
    return statement_file.render(document)


def _headline(statement: Statement) -> str:
    return _text(statement).partition("1. **DP setting.**")[0]


def _golden(statement: Statement) -> str:
    program = {"mf_aggregators": "3.0.0", "python": "3.11"}
    return statement_file.render({**statement.to_dict(), "program": program})


def test_the_text_of_a_planned_run_is_the_golden_one() -> None:
    file = pathlib.Path(__file__).with_name("statement_of_a_plan.md")
    assert _golden(_statement(None)) == file.read_text(encoding="utf-8")


def test_the_text_of_a_run_with_a_ledger_is_the_golden_one() -> None:
    file = pathlib.Path(__file__).with_name("statement_of_a_ledger.md")
    ledger = Ledger(("ada", "bo"), (np.array([0, 5]), np.array([1, 4, 7])), 10)
    mechanism = Mechanism(identity(10), MinSeparation(3, 3), 1.0)
    observed = mechanism.observed(ledger, round_counts=[1, 1, 0, 0, 1, 1, 0, 1, 0, 0])
    facts = dataclasses.replace(_FACTS, clients_per_round=1, is_finished=True, secure_sums=True)
    statement = observed.statement(facts, 1e-4).with_other_runs({"a": accounting.event(1.0)})
    assert _golden(statement) == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("attribute", "value", "named"),
    [
        ("clip", -1.0, "clip"),
        ("clip", math.nan, "clip"),
        ("public_data", "", "public_data"),
        ("enforcement", " ", "enforcement"),
        ("custody", "two\nlines", "custody"),
        ("model", "\u202eabc", "model"),
        # A file of a run may hold it.
        ("aggregator", "2.0.0\n\n**(0.1, 1e-9)-DP**", "aggregator"),
        ("population", 0, "population"),
        ("population", 1, "population"),
        ("clients_per_round", 0, "clients_per_round"),
        ("secure_sums", "yes", "secure_sums"),
        ("simulation", ("a\n\n**b**",), "simulation"),
        ("simulation", ("",), "simulation"),
    ],
)
def test_facts_that_cannot_be_are_refused(attribute: str, value: Any, named: str) -> None:
    with refuses(named):
        dataclasses.replace(_FACTS, **{attribute: value})
    with pytest.raises(TypeError, match="public_data"):
        RunFacts(  # type: ignore[call-arg]
            mechanism="a", population=2, clients_per_round=1, clip=1.0, enforcement="b"
        )


def test_more_clients_than_there_are_is_refused() -> None:
    ledger = Ledger(tuple(map(str, range(8))), tuple(np.array([i]) for i in range(8)), 10)
    mechanism = Mechanism(identity(10), MinSeparation(3, 3), 1.0)
    with refuses("8 clients took part", "7"):
        mechanism.observed(ledger).statement(_FACTS, 1e-4)


def test_a_date_is_a_day() -> None:
    assert dataclasses.replace(_statement(None), date="2026-11-26").to_dict()["date"]
    for date in ("2026-11-26\n\n**Checked.**", "today", "2026-11-26 "):
        with refuses("date"):
            dataclasses.replace(_statement(None), date=date)


def test_a_record_has_no_more_sums_than_there_were_rounds() -> None:
    for rounds, statement in ((10, _statement(None)), (4, _statement([0, 3], num_rounds=4))):
        for number in (-1, rounds + 1):
            with refuses("record", str(number), str(rounds)):
                dataclasses.replace(statement, evidence=Evidence(num_sums=number))
        recorded = dataclasses.replace(statement, evidence=Evidence(num_sums=rounds))
        assert f"the record has {rounds} sums with this noise" in _text(recorded)
        # Without any, nothing is checked.
        none = dataclasses.replace(statement, evidence=Evidence(num_sums=0))
        assert "in part checked" not in _text(none)
    other = dataclasses.replace(_statement(None), evidence=Evidence(record_sha256="0" * 63))
    with refuses("record_sha256"):
        other.write("a.md", "a.json")
    with refuses("name of a file"):
        Evidence({"a\n\n**(0.1, 1e-9)-DP**": "b"})


def test_a_run_is_finished_if_its_owner_says_so() -> None:
    """And not for the number of rounds in its ledger."""
    statuses = {
        (None, 10): ("open", "It is not stated whether the run is finished."),
        (True, 10): ("finished", "The run is finished (told by Jane Doe)."),
        (True, 4): ("stopped", "was stopped before its last round (told by Jane Doe)."),
        (False, 10): ("running", "The run is not finished (told by Jane Doe)."),
    }
    for (is_finished, rounds), (status, words) in statuses.items():
        statement = _statement([0, 3], num_rounds=rounds, is_finished=is_finished)
        assert statement.status == status
        assert words in _headline(statement)
    assert "The run is under way. If it keeps to its plan" in _headline(_statement(None))


@pytest.mark.parametrize("rounds", [[0, 1], [0, 2], [0, 1, 3]])
@pytest.mark.parametrize("num_rounds", [4, 10])
def test_a_broken_plan_is_said_before_any_number_and_earns_nothing(
    rounds: list[int], num_rounds: int
) -> None:
    """The weaker of the plan and what happened, and no bold number."""
    statement = _statement(rounds, num_rounds=num_rounds, is_finished=True)
    assert statement.keeps_plan is False
    headline = _headline(statement)
    first = next(line for line in headline.splitlines()[1:] if line)
    assert first.startswith("**Warning. The plan was not kept.**")
    assert re.search("[0-9]", first) is None
    assert f"({rounded_up(statement.stated.epsilon, '.6g')}, 0.0001)-differential" in headline
    assert "**(" not in headline
    assert ONLY_IF in headline
    assert statement.observed_guarantee is not None
    for guarantee in (statement.plan, statement.observed_guarantee):
        assert statement.stated.epsilon >= guarantee.epsilon * (1 - 1e-9)
    # Three participations were planned: the square root of three for independent noise.
    assert statement.worst_case is not None
    assert statement.worst_case.sensitivity == pytest.approx(3**0.5)
    is_worst_case = dict[str, Any](statement.to_dict())["headline"]["guarantee"] == "worst_case"
    assert ("Formal statement, worst case." in _text(statement)) == is_worst_case


def test_who_kept_a_broken_plan_has_what_was_planned() -> None:
    """Also where no epsilon is accounted for of who broke it."""
    statement = _statement([*range(10)], multiplier=0.3)
    assert statement.stated.epsilon == math.inf
    planned = f"({rounded_up(statement.plan.epsilon, '.6g')}, 0.0001)-DP"
    text = _text(statement)
    assert f"A client that kept to the plan has {planned}" in text
    assert "this statement guarantees nothing to a client that did not keep to the plan" in text
    assert statement.to_dict()["is_private"] is False
    # A fixed seed voids that as well, and without noise there is nothing to void.
    silent = _statement([*range(10)], multiplier=0.0)
    void = dataclasses.replace(_FACTS, seed_is_fixed=True)
    for nothing in (silent, dataclasses.replace(statement, facts=void)):
        assert "Nothing: this statement guarantees nothing." in _text(nothing)
    for other in (silent, _statement([0, 3, 6]), _statement([0, 1, 2]), _sampled(False)):
        assert "A client that kept to the plan has" not in _text(other)


def test_no_noise_and_fixed_seeds_are_not_private() -> None:
    silent = _statement([0], multiplier=0.0)
    assert silent.to_dict()["is_private"] is False
    assert "**This run has no differential privacy guarantee.**" in _headline(silent)
    assert "No noise is added." in _text(silent)
    assert "Gaussian" not in _text(silent)
    fixed = _statement([0], seed_is_fixed=True)
    assert fixed.to_dict()["is_private"] is False
    assert "The seed of the noise was given" in _headline(fixed)
    assert "**(" not in _headline(fixed)
    randomness = dict[str, Any](fixed.to_dict())["assumptions"][-1]
    assert randomness["basis"] == "false: the seed was given"


def test_a_simulation_says_so_in_its_first_line() -> None:
    statement = _statement([0, 3, 6], simulation=("Parts of a data set stand for phones.",))
    assert _text(statement).splitlines()[2] == (
        "**This is a statement of a simulation.** Parts of a data set stand for phones."
    )
    assert "simulation" not in _text(_statement([0, 3, 6]))


@pytest.mark.parametrize(
    ("statement", "bases"),
    [
        (_statement(None), ("stated by Jane Doe: A timer on each phone.", "not checked")),
        (
            _statement([0, 3, 6]),
            ("checked by the ledger, if each name in it is one client", "not checked"),
        ),
        (_statement([0, 1, 2]), ("checked by the server's counts", "not checked", "not checked")),
        (_statement(None, simulation=("x",)), ("simulated: A timer on each phone.",)),
        (
            _statement(None, aggregator="mf 3"),
            ("stated by", "stated: the noise came from mf 3; not checked"),
        ),
    ],
)
def test_each_assumption_says_who_checked_it(statement: Statement, bases: tuple[str, ...]) -> None:
    found = [each["basis"] for each in dict[str, Any](statement.to_dict())["assumptions"]]
    for basis, expected in zip(found, bases, strict=False):
        assert basis.startswith(expected)
    text = _headline(statement)
    assert all(each.sentence in text for each in statement.stated.assumptions)


def test_a_delta_that_one_client_in_all_may_satisfy_is_warned_of() -> None:
    for delta, is_warned_of in ((0.049, False), (0.05, True), (0.5, True)):
        plan = plan_of(identity(10), MinSeparation(3, 3), 1.0, delta)
        facts = dataclasses.replace(_FACTS, population=20)
        found = statement_file.warnings(_text(Statement(facts, plan)))
        assert [("is not below 1 / 20 clients" in each) for each in found] == [True] * is_warned_of


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_sampled_run_is_amplified_and_tells_nothing_of_its_batches(name: str) -> None:
    statement = _sampled(True, name)
    document, text = dict[str, Any](statement.to_dict()), _text(statement)
    assert document["keeps_plan"] is True
    assert document["planned"]["sampling"]["name"] == name
    assert statement.stated == statement.plan
    observed = document["participation"]["observed"]
    shown = {key: value for key, value in observed.items() if value is not None}
    assert shown == {"num_rounds": 12, "keeps_sampling": True}
    assert "**Warning" not in text
    own_proofs = ("random_allocation", "min_separation", "balls_in_bins")
    assert ("BandMF Thm 4" in text) == (name not in own_proofs)
    assert "the noise and who was drawn" in text
    assert re.search(r"\b87\b", text) is None
    certificate = statement.plan.claim.certificate
    assert (certificate is None) == (name not in ("min_separation", "balls_in_bins"))
    if certificate is not None:
        assert f"A random test with seed {certificate.seed} and" in text
        assert document["planned"]["certificate"]["seed"] == certificate.seed
    assert "who was drawn" not in _headline(_statement([0, 3, 6]))


def test_a_sampled_run_that_was_not_sampled_is_not_amplified() -> None:
    statement = _sampled(False)
    assert statement.keeps_plan is False
    assert not statement.stated.is_amplified
    assert statement.stated.epsilon > statement.plan.epsilon
    assert "were not drawn as planned. Nothing is amplified." in _headline(statement)


@pytest.mark.parametrize("multiplier", [1.2, 0.25])
def test_draws_that_nobody_checked_have_the_worst_case(multiplier: float) -> None:
    """Nothing is said to be kept, nor broken, nor denied a guarantee."""
    statement = _sampled(None, multiplier=multiplier)
    assert statement.keeps_plan is None
    assert statement.stated == statement.worst_case
    headline = _headline(statement)
    assert "Nobody has compared the clients of the rounds with the sampler's seed" in headline
    is_too_little = math.isinf(statement.stated.epsilon)
    assert is_too_little == (multiplier == 0.25)
    assert ("**No guarantee can be stated.** Nothing shows that" in headline) == is_too_little
    assert "This run has no differential privacy guarantee" not in headline


def test_no_client_of_a_sampled_run_is_named() -> None:
    with refuses("draws are secret"):
        statement = _sampled(True)
        dataclasses.replace(statement, worst_client=LeastProtected("a", (0,), statement.plan))


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_times_that_allow_more_than_the_plan_accuse_no_client(multiplier: float) -> None:
    statement = _by_times(multiplier)
    assert statement.keeps_plan is False
    text = _text(statement)
    assert "The plan is not shown to be kept.** The times of the rounds allow more" in text
    assert "Clients took part in rounds that the plan forbids" not in text
    is_stated = math.isfinite(statement.stated.epsilon)
    assert is_stated == (multiplier == 1.0)
    kept = rounded_up(statement.plan.epsilon, ".6g")
    assert (f"A client that kept to the plan has ({kept}, 0.0001)-DP" in text) != is_stated
    assert "By the times of 12 released rounds, a client could take part at most" in text


def test_a_ledger_that_may_lack_lines_states_the_plan() -> None:
    mechanism = Mechanism(identity(10), MinSeparation(3, 3), 1.0)
    facts = dataclasses.replace(_FACTS, clients_per_round=1)
    ledger = Ledger(("ada",), (np.array([0]),), 10)
    statement = mechanism.observed(ledger, round_counts=[1, 1] + [0] * 8).statement(facts, 1e-4)
    assert statement.stated == statement.observed_guarantee == statement.plan
    assert "**Warning.** The ledger is not shown to be complete:" in _headline(statement)
    # Without counts, the point of what was observed says it.
    without = mechanism.observed(ledger).statement(facts, 1e-4)
    assert "not shown to be complete" in _text(without)


def _is_true_of(words: str, rounds: list[int]) -> bool:
    """Whether a schema in words is true of a client's rounds."""
    gaps = [after - before for before, after in itertools.pairwise(rounds)]
    most = re.search(r"at most (one|[0-9]+) participation", words, re.I)
    least = re.search(r"at least ([0-9]+) rounds? apart", words)
    exact = re.search(r"exactly ([0-9]+) rounds? apart", words)
    assert most or least or exact, words
    return (
        (most is None or len(rounds) <= int(most[1].lower().replace("one", "1")))
        and (least is None or all(gap >= int(least[1]) for gap in gaps))
        and (exact is None or all(gap == int(exact[1]) for gap in gaps))
    )


def test_every_headline_is_true_of_its_ledger() -> None:
    """Random ledgers that keep or break the plan, with rules and without, ended by them or not.

    A client whose rows of independent noise are k has the noise of one over the root of k.
    """
    generator = np.random.default_rng(4)
    plan = plan_of(identity(10), MinSeparation(3, 3), 1.0, 1e-4)
    counts = dict.fromkeys(("planned", "observed", "worst_case", "by_rule"), 0)
    number = examples(400, one_in=6)
    for _ in range(number):
        num_rounds = int(generator.integers(1, 11))
        share = generator.uniform(0.05, 0.5)
        of_clients = [
            np.flatnonzero(generator.random(num_rounds) < share).tolist() for _ in range(3)
        ]
        observed = ObservedParticipation.of(of_clients, num_rounds)
        facts = dataclasses.replace(_FACTS, is_finished=bool(generator.random() < 0.8))
        statement = Statement(facts, plan, observed)
        rule = None
        if generator.random() < 0.6:
            rule = StoppingRule(plan, plan.epsilon * generator.uniform(0.7, 1.3))
            is_followed = rule.allows(observed)
            ended = bool(is_followed and generator.random() < 0.3)
            statement = dataclasses.replace(statement, stopping_rule=rule, ended_by_rule=ended)
            assert statement.keeps_rule == is_followed
        document, text = dict[str, Any](statement.to_dict()), _text(statement)
        name = document["headline"]["guarantee"]
        counts[name] += 1
        for rounds in of_clients:
            if rounds:
                alone = accounting.epsilon(math.sqrt(3.0 / len(rounds)), 1e-4)
                assert alone <= float(document["headline"]["epsilon"])
        if name == "by_rule":
            assert rule is not None
            assert rule.allows(observed)
            assert document["by_rule"]["schema"] is None
        else:
            words = document[name]["taking_part"]
            assert all(_is_true_of(words, rounds) for rounds in of_clients), words
        # A rule that was not followed promises nothing.
        is_within = rule is not None and rule.allows(observed)
        assert ("what this run released does not exceed it" in text) == is_within
        assert ("The rule was not followed" in text) == (rule is not None and not is_within)
    assert min(counts.values()) > number / 40, counts


def test_a_run_under_way_is_within_its_rule_whether_it_keeps_its_plan_or_not() -> None:
    statement = _statement(None)
    tight, loose = (
        StoppingRule(statement.plan, each * statement.plan.epsilon) for each in (0.8, 1.2)
    )
    under_rule = dataclasses.replace(statement, stopping_rule=tight)
    assert "under way. What it releases satisfies" in _headline(under_rule)
    kept = dataclasses.replace(statement, stopping_rule=loose)
    assert "under way. If it keeps to its plan" in _headline(kept)
    with refuses("stopping rule"):
        dataclasses.replace(statement, ended_by_rule=True)


def test_a_statement_says_what_holds_with_other_runs_or_that_nobody_said() -> None:
    statement = _statement([0, 3, 6])
    assert "It is not stated whether there were other runs" in _headline(statement)
    together = statement.with_other_runs({"a": accounting.event(1.0), "b": accounting.event(0.5)})
    assert together.other_runs is not None
    # Squares of 1 / sigma add up.
    expected = accounting.epsilon(6.0**-0.5, 1e-4)
    shown = str(together.other_runs["epsilon"])
    assert float(shown) == pytest.approx(expected, rel=1e-3)
    assert together.stated == statement.stated
    assert f"**({shown}, 0.0001)-differential privacy** of all together" in _headline(together)
    assert "in this run and in a, b, what all of them released" in _text(together)
    for names in ([], ["a\n\n**(0.1, 1e-9)-DP**"]):
        with refuses("names of other runs"):
            statement.with_other_runs(dict.fromkeys(names, accounting.event(1.0)))
    # What was composed of a plan is not stated of a run that ended.
    mechanism = Mechanism(identity(10), MinSeparation(3, 3), 1.0)
    running = dataclasses.replace(
        mechanism.statement(_FACTS, 1e-4), other_runs={"names": ["a"], "epsilon": "4"}
    )
    ledger = Ledger(("ada",), (np.array([0, 1, 2]),), 10)
    assert mechanism.observed(ledger).completed(running).other_runs is None


def test_a_composition_has_the_deltas_of_all_pairs() -> None:
    pair = EpsilonDeltaDpEvent(3.0, 1e-5)
    found = _statement(None).with_other_runs({"a": pair, "b": pair}).other_runs
    assert found is not None
    assert found["delta"] == "0.00012"
    assert 6.0 < float(str(found["epsilon"])) < 6.0 + _statement(None).plan.epsilon
    # Inside of another event, a pair has no epsilon at a smaller delta.
    inside = dp_event.ComposedDpEvent([EpsilonDeltaDpEvent(3.0, 1e-3)])
    found = _statement(None).with_other_runs({"a": inside}).other_runs
    assert found is not None
    assert found["epsilon"] is None


def test_without_a_guarantee_of_one_there_is_none_of_all() -> None:
    others = {"a": accounting.event(1.0)}
    for statement in (
        _statement([0], multiplier=0.0).with_other_runs(others),
        _statement([0], seed_is_fixed=True).with_other_runs(others),
        _statement([0]).with_other_runs({"a": accounting.event(0.0)}),
    ):
        assert dict[str, Any](statement.to_dict())["other_runs"]["epsilon"] is None
        assert "there is no guarantee of all together" in _text(statement)
    assert "**no guarantee** of all together" in _headline(statement)


def test_a_run_that_broke_its_plan_counts_as_its_worst_case_with_others() -> None:
    statement = _statement([0, 1, 2, 3])
    assert statement.worst_case is not None
    assert statement.worst_case.noise_multiplier < 0.99 * statement.plan.noise_multiplier
    found = statement.with_other_runs({"a": accounting.event(1.0)}).other_runs
    assert found is not None
    sigma = (statement.worst_case.noise_multiplier**-2 + 1.0) ** -0.5
    assert float(str(found["epsilon"])) == pytest.approx(accounting.epsilon(sigma, 1e-4), rel=1e-3)
    # No number of a broken plan is in the bold of one that holds.
    headline = _headline(statement.with_other_runs({"a": accounting.event(1.0)}))
    assert f" ({found['epsilon']}, 0.0001)-differential privacy of all together" in headline


def test_a_run_that_was_extended_has_all_its_plans() -> None:
    statement = _statement(None)
    earlier = [
        plan_of(identity(rounds), MinSeparation(separation, most), 1.0, 1e-4)
        for rounds, separation, most in ((4, 3, 2), (7, 3, 3))
    ]
    extended = dataclasses.replace(statement, earlier_plans=tuple(earlier))
    text = _text(extended)
    assert "extended.* At most 2 participations at least 3 rounds apart, over 4 rounds:" in text


def test_a_statement_says_what_protects_a_part_of_a_client() -> None:
    statement = _statement([0, 3, 6])
    part: dict[str, Any] = {**guarantees.part_of_client(statement.stated)}
    pair = f"({rounded_up(part['epsilon'], '.6g')}, 0.0001)-DP, with noise multiplier 0.5"
    assert f"may be two clip norms apart: that part has {pair}" in _text(statement)


_PLANNED = statements.described(_statement(None).plan)
_KINDS = {
    "planned": _statement(None),
    "kept": dataclasses.replace(
        _statement([0, 3, 6]), worst_client=LeastProtected("ada", (0, 3, 6), _statement(None).plan)
    ),
    "broken": _statement([0, 1, 2]),
    "nobody": _statement([], num_rounds=2),
    "silent": _statement([0], multiplier=0.0),
    "times": _by_times(),
    "drawn": _sampled(True),
    "represents": dataclasses.replace(
        _statement([0, 3, 6]),
        represented={"clients_per_round": 8, "population": 40, "planned": _PLANNED},
    ),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_every_kind_of_document_is_read_as_it_was_written(
    kind: str, tmp_path: pathlib.Path
) -> None:
    document = _KINDS[kind].to_dict()
    _KINDS[kind].write(tmp_path / "a.md", tmp_path / "a.json")
    assert statement_file.read(tmp_path / "a.json") == document
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == statement_file.render(document)
    again = _KINDS[kind].to_dict()
    assert statement_file.compare(document, again, _KINDS[kind].proved) == ([], [])


_DOCUMENT = statement_file.canonical(_KINDS["kept"].to_dict())


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"headline": {', '"headline": {\n  "epsilon": "2",', "occurs twice"),
        ('"status": "open"', '"status": "ended"', "status is 'ended'"),
        ('"is_private": true', '"is_private": 1', "is_private is not of type boolean"),
        ('"num_rounds": 10', '"num_rounds": true', "num_rounds is not of type integer"),
        ('"num_rounds": 10', '"num_rounds": 10.0', "num_rounds is not of type integer"),
        ('"format": 3,', '"format": 3,\n "note": "none",', "unknown ones: note"),
        ('"date": "",', '"date": "",\n "date": "",', "occurs twice"),
        (' "date": "",\n', "", "lacks keys, or has unknown ones: date"),
        ('"format": 3,', '"format": 4,', "its format is 4, and this version reads 3"),
        ('"unit": "client"', '"unit":  "client"', "not in the form of a statement"),
        ('"client"', '"cl\\u0069ent"', "not in the form of a statement"),
        (
            ' "unit": "client",\n "adjacency": "zero-out",\n',
            ' "adjacency": "zero-out",\n "unit": "client",\n',
            "has its keys in another order",
        ),
        (_DOCUMENT, "[]", "it is not a JSON object"),
        ('"date": ""', '"date": "2026-11-26. NIST agrees"', "the statement.date is"),
        ('"date": ""', '"date": "2026-11-26\\n"', "the statement.date is"),
        ('"numpy": "', '"numpy": "1 and NIST agrees ', "the statement.program.numpy is"),
        ('"python": "', '"python": "NIST', "the statement.program.python is"),
        ('"record_sha256": null', '"record_sha256": "aa). NIST ("', "noise.record_sha256 is"),
        (_DOCUMENT, '{"library_version": "2.0.0"}', "verify it with mf_aggregators 2.0.0, which"),
        (_DOCUMENT, '{"format": 1, "flags": {}}', "verify it with the version that wrote it"),
    ],
)
def test_a_document_is_read_strictly(
    old: str, new: str, named: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "a.json"
    assert old in _DOCUMENT
    file.write_text(_DOCUMENT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(StatementError) as error:
        statement_file.read(file)
    assert named in str(error.value)


def _changed(place: str, value: Any) -> dict[str, Any]:
    document: Any = json.loads(_DOCUMENT)
    inner = document
    *outer, last = place.split(".")
    for each in outer:
        inner = inner[each]
    inner[last] = value
    return document


def _differences(place: str, value: Any) -> tuple[list[str], list[str]]:
    again = json.loads(_DOCUMENT)
    return statement_file.compare(_changed(place, value), again, _KINDS["kept"].proved)


def test_every_stated_epsilon_is_proved_as_a_claim() -> None:
    """Versions that compute another last digit are no fault, and a better number is one."""
    names = ["headline", "planned", "observed", "part_of_client", "worst_client"]
    assert sorted(_KINDS["kept"].proved) == sorted(f"{name}.epsilon" for name in names)
    for name in names:
        epsilon = json.loads(_DOCUMENT)[name]["epsilon"]
        for share, is_proved in ((4e-6, True), (-4e-6, False), (1.1e-5, False)):
            value = rounded_up(float(epsilon) * (1.0 + share), ".6g")
            differing, notes = _differences(f"{name}.epsilon", value)
            assert len(notes) == 1 if is_proved else "is claimed, and" in differing[0]
            assert (differing == []) == is_proved
        wrong = ("nan", "-1", "inf", f"{epsilon}0", epsilon[:-1], f" {epsilon}", f"{epsilon}_0")
        assert all(_differences(f"{name}.epsilon", value)[0] for value in (*wrong, None, 1))


def test_numbers_may_claim_one_digit_less_and_everything_else_is_the_same() -> None:
    again = json.loads(_DOCUMENT)
    rho, noise = again["planned"]["rho"], again["observed"]["noise_multiplier"]
    for steps, is_accepted in ((1, True), (-1, False), (2, False)):
        value = rounded_up(float(rho) + steps * 1e-6, ".6g")
        assert (_differences("planned.rho", value)[0] == []) == is_accepted
    assert noise == "1"
    for value, is_accepted in (("0.999999", True), ("1.00001", False)):
        assert (_differences("observed.noise_multiplier", value)[0] == []) == is_accepted
    # Another program is said first.
    differing, notes = _differences("program.dp-accounting", "0.6.0")
    assert differing == []
    other = "The statement was made by another program: program.dp-accounting is '0.6.0' in the"
    assert notes[0].startswith(other)
    assert notes[0].endswith(" here.")
