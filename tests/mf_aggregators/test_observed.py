"""What a ledger shows of a run holds under assumptions, and is never the headline for less."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import scipy.signal
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.factorizations import banded, identity
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import ONLY_IF
from mf_aggregators.kernel.ledger import NO_COUNTS, ObservedParticipation
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy.guarantees import StoppingRule
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms

_FACTS = small_mechanisms.facts(population=40, clip=1.0)
# Logarithms of likelihood ratios, with and without a client.
_STEP = 0.004
_RATIOS = np.arange(-25.0, 40.0, _STEP)


def _true_delta(
    matrix: np.ndarray,
    sigma: float,
    epsilon_of: Callable[[tuple[int, ...]], float],
    choices: Callable[[tuple[int, ...]], Iterable[int]],
) -> float:
    """The delta of a client that decides before each round, from all that was released.

    By backward recursion over the patterns of its participations and the likelihood ratio of what
    was released, it maximises the probability with its updates minus e^epsilon times that without,
    for the epsilon that is stated of the pattern in which it ends.

    Args:
      matrix: C without negative entries: the client always sends the same update of norm one.
      sigma: The standard deviation of Z.
      epsilon_of: What is stated of a pattern.
      choices: Whether the client may take part in the round after a pattern: 0, 1, both, or none
        where the run ends.
    """

    def value(pattern: tuple[int, ...]) -> np.ndarray:
        best = np.maximum(1.0 - np.exp(epsilon_of(pattern) - _RATIOS), 0.0)
        if len(pattern) == len(matrix):
            return best
        for choice in choices(pattern):
            longer = (*pattern, choice)
            shift = float(matrix[len(pattern), : len(longer)] @ longer) / sigma
            found = value(longer)
            if shift > 0.0:
                reach = np.arange(-int(9.0 * shift / _STEP), int(9.0 * shift / _STEP) + 1)
                weights = np.exp(-0.5 * (reach * _STEP / shift) ** 2)
                spread = scipy.signal.fftconvolve(found, weights / weights.sum(), mode="same")
                # Towards the end of large ratios, the value is that of the last one.
                spread[_RATIOS[-1] - 9.0 * shift < _RATIOS] = 1.0
                found = np.interp(_RATIOS + 0.5 * shift**2, _RATIOS, spread)
            best = np.maximum(best, found)
        return best

    return float(np.interp(0.0, _RATIOS, value(())))


@pytest.mark.parametrize(
    ("num_rounds", "delta", "times"), [(30, 1e-3, 5.53), (2, 1e-6, 1.89), (30, 1e-6, 9.99)]
)
def test_the_observed_epsilon_is_none_of_a_client_that_decides_from_releases(
    num_rounds: int, delta: float, times: float
) -> None:
    """It keeps the schema, and ends as soon as it is found out: the planned epsilon covers that."""
    mechanism = mfa.Mechanism(identity(num_rounds), MinSeparation(1), 3.0 / math.sqrt(num_rounds))
    plan = mechanism.guarantee(delta)
    statements = []
    facts = dataclasses.replace(_FACTS, has_run_directory=True)
    for number in range(num_rounds + 1):
        of_client = Ledger(("a",), (np.arange(number),), num_rounds)
        counts = [1] * number + [0] * (num_rounds - number)
        found = mechanism.observed(of_client, round_counts=counts)
        assert found.keeps_participation
        statements.append(found.statement(facts, delta))

    def delta_of(epsilons: list[float]) -> float:
        def of_pattern(pattern: tuple[int, ...]) -> float:
            return epsilons[len(pattern)]

        return _true_delta(np.eye(num_rounds), 3.0, of_pattern, lambda _: (1,))

    observed = [statement.observed_guarantee for statement in statements]
    exceeded = delta_of([each.epsilon for each in observed if each is not None])
    assert exceeded == pytest.approx(times * delta, rel=0.01)
    # The headline is the plan's, and the recursion finds that the client attains its delta.
    assert all(statement.stated == plan for statement in statements)
    assert delta_of([statement.stated.epsilon for statement in statements]) == pytest.approx(
        delta, rel=2e-3
    )
    # So does the limit of a rule, which is fixed as well.
    limit = accounting.epsilon(3.0 / math.sqrt(2.0), delta) * (1 + 1e-9)
    rule = StoppingRule(plan, limit)
    ended = dataclasses.replace(statements[2], stopping_rule=rule)
    assert ended.stated.epsilon <= limit
    within = [min(limit, plan.epsilon)] * 3 + [math.inf] * num_rounds
    assert delta_of(within) <= delta * (1 + 2e-3)


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_a_rule_holds_for_clients_that_decide_from_releases(share: float) -> None:
    """With correlated noise: the limit holds of all patterns that the rule lets happen.

    What was observed when it ended the run does not.
    """
    factorization, delta = banded(mfa.workloads.prefix_sum(7), 2), 1e-3
    mechanism = mfa.Mechanism(factorization, MinSeparation(1), 0.8)
    plan = mechanism.guarantee(delta)
    rule = StoppingRule(plan, share * plan.epsilon)
    sigma = plan.noise_multiplier * plan.sensitivity

    def participation(pattern: tuple[int, ...]) -> ObservedParticipation:
        return ObservedParticipation.of([np.flatnonzero(pattern)], len(pattern))

    def choices(pattern: tuple[int, ...]) -> list[int]:
        return [each for each in (0, 1) if rule.allows(participation((*pattern, each)))]

    matrix = factorization.strategy_matrix()
    limited = _true_delta(matrix, sigma, lambda _: rule.guarantee.epsilon, choices)
    assert 0.2 * delta < limited <= delta * (1 + 2e-3)

    def observed(pattern: tuple[int, ...]) -> float:
        return participation(pattern).guarantee(plan).epsilon

    assert _true_delta(matrix, sigma, observed, choices) > 1.2 * delta


def _ledger(cohorts: list[set[int]]) -> Ledger:
    rounds = tuple(
        np.array([i for i, cohort in enumerate(cohorts) if client in cohort], np.int64)
        for client in range(40)
    )
    return Ledger(tuple(f"phone {client}" for client in range(40)), rounds, len(cohorts))


# Each client takes part twice, at least ten rounds apart, under a plan of up to six times.
_COHORTS = [{(4 * index + each) % 40 for each in range(4)} for index in range(20)]
_COHORTS += [set() for _ in range(40)]
_COUNTS = [len(cohort) for cohort in _COHORTS]
_MECHANISM = mfa.Mechanism(banded(mfa.workloads.prefix_sum(60), 4), MinSeparation(10), 1.0)


def _sentences_with(text: str, epsilon: float) -> list[str]:
    """The sentences that print an epsilon, in any of the usual numbers of digits."""
    forms = {numbers.rounded_up(epsilon, form) for form in (".3f", ".4g", ".6g")}
    sentences = " ".join(text.split()).replace(": ", ". ").split(". ")
    return [each for each in sentences if any(form in each for form in forms)]


def test_a_complete_ledger_is_stated_under_its_assumption() -> None:
    """In the same sentence, and in the same object, wherever its epsilon stands."""
    plan = _MECHANISM.guarantee(1e-6)
    observed = _MECHANISM.observed(_ledger(_COHORTS), round_counts=_COUNTS)
    statement = observed.statement(_FACTS, 1e-6)
    found, worst = observed.guarantee(1e-6), observed.worst_client(1e-6)
    assert found.epsilon < plan.epsilon
    assert statement.stated == plan
    assert worst is not None
    assert ONLY_IF in str(found)
    text = statement.to_markdown()
    for epsilon in (found.epsilon, worst.guarantee.epsilon):
        said = _sentences_with(text, epsilon)
        assert said
        assert all(ONLY_IF in each for each in said)
    assert ONLY_IF not in text.partition("1. **DP setting.**")[0]
    contents: dict[str, Any] = statement.to_dict()
    for name in ("observed", "worst_client"):
        assert contents[name]["only_if"] == ONLY_IF
    for name in (contents["headline"]["guarantee"], "planned", "part_of_client"):
        assert contents[name]["only_if"] is None


@pytest.mark.parametrize("is_complete", [True, False])
def test_more_than_the_plan_is_the_headline_under_its_assumption(is_complete: bool) -> None:
    """A ledger refutes a plan whether it lacks lines or not."""
    # One client every fifth round, under a plan of every tenth.
    broken = _ledger([{0} if index % 5 == 0 else set() for index in range(60)])
    counts = [1, 0, 0, 0, 0] * 12 if is_complete else None
    observed = _MECHANISM.observed(broken, round_counts=counts)
    assert observed.keeps_participation is False
    facts = dataclasses.replace(_FACTS, has_run_directory=is_complete)
    statement = observed.statement(facts, 1e-6)
    stated = statement.stated
    assert stated.epsilon > statement.plan.epsilon
    found = observed.participation.guarantee(statement.plan)
    # A wider schema has the same sensitivity here, up to the last digits.
    assert stated.epsilon >= found.epsilon * (1.0 - 1e-12)
    contents, text = dict[str, Any](statement.to_dict()), statement.to_markdown()
    for name in (contents["headline"]["guarantee"], "observed", "worst_case", "part_of_client"):
        assert contents[name]["only_if"] == ONLY_IF
    said = _sentences_with(text, stated.epsilon)
    assert said
    assert all(ONLY_IF in each for each in said)


def _thinned() -> Ledger:
    keep = np.random.default_rng(0).random((60, 40)) > 0.3
    return _ledger([{c for c in cohort if keep[i, c]} for i, cohort in enumerate(_COHORTS)])


def _with_other_ids(window: int) -> Ledger:
    """Each client has another id in each window of so many rounds."""
    names: dict[str, list[int]] = {}
    for index, cohort in enumerate(_COHORTS):
        for client in cohort:
            names.setdefault(f"phone {client} of {index // window}", []).append(index)
    return Ledger(tuple(names), tuple(np.array(each) for each in names.values()), len(_COHORTS))


@pytest.mark.parametrize(
    ("ledger", "counts", "clients_per_round", "named"),
    [
        (_ledger(_COHORTS), None, None, "nobody gave"),
        (_thinned(), None, 1, "nobody gave"),
        (_thinned(), _COUNTS, None, "of its 60 rounds have other numbers"),
        (_ledger(_COHORTS), _COUNTS[:59], None, "it has 60 rounds, and the server counted 59"),
        (_ledger(_COHORTS), [*_COUNTS[:-1], 1], None, "with 0 rows for 1 client"),
        (_ledger(_COHORTS), None, 650, "1.33333 rows on average"),
        (_ledger(_COHORTS), _COUNTS, 650, "650 clients a round"),
        (_ledger(_COHORTS[:20]), None, 1, "4 rows on average, and the run is said to have had 1 "),
        (_with_other_ids(12), None, 4, "rows on average"),
    ],
)
def test_no_ledger_that_may_lack_lines_states_a_better_epsilon_than_the_plan(
    ledger: Ledger, counts: list[int] | None, clients_per_round: int | None, named: str
) -> None:
    observed = _MECHANISM.observed(ledger, round_counts=counts, clients_per_round=clients_per_round)
    assert named in str(observed.gap)
    plan = _MECHANISM.guarantee(1e-6)
    assert observed.guarantee(1e-6) == observed.unamplified_guarantee(1e-6) == plan
    assert observed.worst_client(1e-6) is None
    facts = dataclasses.replace(_FACTS, clients_per_round=clients_per_round or 2, population=10_000)
    statement = observed.statement(facts, 1e-6)
    assert statement.stated == statement.observed_guarantee == plan
    contents: dict[str, Any] = statement.to_dict()
    assert named in contents["participation"]["observed"]["gap"]
    assert contents["worst_client"] is None
    # What contradicts the ledger is said first.
    text = " ".join(statement.to_markdown().split())
    assert text.count("So nothing better than the plan is stated.") == (
        1 if named == "nobody gave" else 2
    )


def test_a_statement_compares_the_ledger_with_its_own_cohort_size() -> None:
    observed = _MECHANISM.observed(_ledger(_COHORTS[:20]), round_counts=_COUNTS[:20])
    assert observed.gap is None
    for claimed, is_gap in ((4, False), (7, False), (9, True), (1, True), (6500, True)):
        facts = dataclasses.replace(_FACTS, clients_per_round=claimed, population=10_000)
        found = observed.statement(facts, 1e-6).observed_participation
        assert found is not None
        assert (found.gap is not None) == is_gap
        # A training command knows whom it summed.
        own = dataclasses.replace(facts, has_run_directory=True)
        found = observed.statement(own, 1e-6).observed_participation
        assert found is not None
        assert found.gap is None


def test_ids_that_change_never_make_the_headline() -> None:
    """Counts cannot show them, so the statement says that an id counts as a client."""
    rotated = _MECHANISM.observed(_with_other_ids(12), round_counts=_COUNTS)
    assert rotated.gap is None
    statement = rotated.statement(dataclasses.replace(_FACTS, population=10_000), 1e-6)
    assert statement.observed_guarantee is not None
    assert statement.observed_guarantee.epsilon < statement.plan.epsilon == statement.stated.epsilon
    assert "By the ledger, in which each id is one client:" in statement.to_markdown()


@given(st.sets(st.integers(0, 79), min_size=1))
@settings(max_examples=examples(60), deadline=None)
def test_every_line_that_is_missing_is_found_by_counts(lost: set[int]) -> None:
    lines = [(index, client) for index, cohort in enumerate(_COHORTS) for client in sorted(cohort)]
    kept = {line for number, line in enumerate(lines) if number not in lost}
    cohorts = [{c for c in cohort if (i, c) in kept} for i, cohort in enumerate(_COHORTS)]
    observed = _MECHANISM.observed(_ledger(cohorts), round_counts=_COUNTS)
    assert observed.gap is not None
    assert observed.gap != NO_COUNTS
    assert observed.guarantee(1e-6) == _MECHANISM.guarantee(1e-6)


_DELTA = 1e-6
_FEW_COHORTS = [["ada", "bo"], ["cy"], [], ["ada"]]
_MAPPING = {"ada": [3, 0], "bo": (0,), "cy": {1}}
_ROWS = "ada,3\nada,0\nbo,0\ncy,1\n"


def test_all_forms_are_one_ledger(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "rounds.csv"
    file.write_text(_ROWS)
    forms: tuple[Any, ...] = (_FEW_COHORTS, _MAPPING, file, str(file))
    found = [Ledger.of(given, 4) for given in forms]
    assert all(each.by_name() == found[0].by_name() and each.num_rounds == 4 for each in found)
    assert Ledger.of(found[0], 9) is found[0]
    numbered = Ledger.of(dict[Any, Any]({7: [0], "x": np.array([1])}), 2)
    assert numbered.client_ids == ("7", "x")
    assert Ledger.of([], 4).num_rounds == 0


@pytest.mark.parametrize(
    "given",
    [
        7,
        ["ada", "bo"],
        {"ada": [4]},
        {"ada": [1, 1]},
        {"ada": [0.0]},
        {"ada": [True]},
        [["ada", "ada"]],
        {1: [0], "1": [1]},
    ],
)
def test_other_ledgers_are_refused(given: object) -> None:
    with pytest.raises(LedgerError):
        Ledger.of(given, 4)  # type: ignore[arg-type]


def test_what_is_spent_is_less_than_the_plan_by_the_counts_of_the_server_alone() -> None:
    """Four participations in rows of C x of their own are planned, and two in four rounds."""
    mechanism = mfa.Mechanism(banded(12, num_bands=3), MinSeparation(3), 2.0)
    matrix = mechanism.factorization.strategy_matrix()
    moved = np.linalg.norm(matrix[:4, [0, 3]]) / np.linalg.norm(matrix[:, ::3])
    found = mfa.spent(mechanism, _FEW_COHORTS, _DELTA, round_counts=[2, 1, 0, 1])
    assert found.planned.epsilon == pytest.approx(accounting.epsilon(2.0, _DELTA), rel=1e-8)
    expected = accounting.epsilon(float(2.0 / moved), _DELTA)
    assert found.so_far.epsilon == pytest.approx(expected, rel=1e-8)
    assert found.so_far.num_rounds == 4
    text = str(found)
    assert text.index("as planned") < text.index("so far, in 4 rounds, only if participation")
    without_counts = mfa.spent(mechanism, _FEW_COHORTS, _DELTA)
    assert without_counts.so_far.epsilon == found.planned.epsilon
    assert (without_counts.num_rounds, without_counts.so_far.num_rounds) == (4, 12)
    said = "for all 12 planned rounds, and no better one for the 4 so far, because nobody gave"
    assert said in str(without_counts)
    assert mfa.spent(mechanism, [], _DELTA, round_counts=[]).so_far.epsilon == 0.0


def test_who_knows_the_draws_knows_every_participation_of_a_client() -> None:
    """A client that was absent once leaves three participations, and not the planned one."""
    scheme = mfa.participation.BallsInBins(12, 4, 12, 2, 6)
    mechanism = mfa.Mechanism(banded(12, 4), scheme, 2.0)
    sampler = scheme.sampler(7)
    cohorts = [sampler.draw(index).tolist() for index in range(12)]
    absent = cohorts[-1].pop()
    rounds = tuple(
        np.array([index for index, cohort in enumerate(cohorts) if client in cohort], np.int64)
        for client in range(12)
    )
    ledger = Ledger(tuple(map(str, range(12))), rounds, 12, scheme)
    observed = mechanism.observed(ledger, sampling_seed=7)
    assert (observed.keeps_participation, observed.num_absent) == (True, 1)
    assert len(rounds[absent]) == 1
    found = observed.unamplified_guarantee(_DELTA)
    assert found.sensitivity.value == pytest.approx(np.sqrt(2.0))
    assert found.epsilon == mechanism.unit_guarantee(_DELTA).epsilon
