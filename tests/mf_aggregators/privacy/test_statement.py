"""The statement says what holds, and warns of what does not."""

import dataclasses
import json
import re

import pytest

from mf_aggregators import workloads
from mf_aggregators.factorizations import Factorization, banded, identity
from mf_aggregators.participation import MinSeparation, sampling_scheme, sampling_schemes
from mf_aggregators.printed_guarantees import rounded_up
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation, WorstClient
from mf_aggregators.privacy.statement import TIMERS_BY_ROUNDS, PrivacyStatement, RunFacts
from mf_aggregators.privacy.stopping_rules import StoppingRule
from tests.refusals import refuses


def _statement(
    rounds_of_client: list[int] | None,
    num_rounds: int = 10,
    multiplier: float = 1.0,
    fixed_seed: bool = False,
) -> PrivacyStatement:
    factorization = identity(10)
    plan = guarantees.planned(factorization, MinSeparation(3, 3), multiplier, 1e-4)
    facts = RunFacts(
        "Identity matrix factorization for 10 rounds",
        7,
        2,
        0.5,
        fixed_seed,
        "none",
        TIMERS_BY_ROUNDS,
    )
    if rounds_of_client is None:
        return PrivacyStatement(facts, plan)
    observed = guarantees.observed_participation([rounds_of_client], num_rounds)
    return _ended(facts, plan, factorization, observed)


def _ended(
    facts: RunFacts,
    plan: guarantees.Guarantee,
    factorization: Factorization,
    observed: ObservedParticipation,
) -> PrivacyStatement:
    keeps_plan = guarantees.keeps_plan(plan.sampling or plan.participation, observed)
    return PrivacyStatement(
        facts,
        plan,
        observed,
        guarantees.observed(plan, factorization, observed),
        worst_case=None if keeps_plan else guarantees.worst_case(plan, factorization, observed),
    )


def test_a_statement_names_the_files_of_runs_that_have_them_alone() -> None:
    statement = _statement([0, 3, 6])
    files = {"`participation.npz`", "`config.json`", "`metrics.csv`", "`checkpoints/`", "`noise/`"}
    without = statement.to_markdown()
    assert not any(file in without for file in files)
    assert "The state of the run holds the noise seed" in without
    assert "wherever\n     they are kept\n" in without
    assert "`mf-report --checkpoint= --ledger=`" in without
    facts = dataclasses.replace(statement.facts, has_run_directory=True)
    named = dataclasses.replace(statement, facts=facts).to_markdown()
    assert all(file in named for file in files)


def test_a_delta_that_one_client_in_all_may_satisfy_is_warned_of() -> None:
    facts = RunFacts("Identity", 20, 2, 0.5, False, "none", TIMERS_BY_ROUNDS)
    factorization = identity(10)
    for delta, is_warned_of in ((0.049, False), (0.05, True), (0.5, True)):
        plan = guarantees.planned(factorization, MinSeparation(3, 3), 1.0, delta)
        text = PrivacyStatement(facts, plan).to_markdown()
        assert ("is not below 1 / 20 clients" in text) == is_warned_of


def test_names_that_look_alike_are_warned_of() -> None:
    statement = _statement([0, 3, 6])
    facts = dataclasses.replace(statement.facts, num_alike_names=2)
    text = dataclasses.replace(statement, facts=facts).to_markdown()
    assert text.index("2 clients have names that look like") < text.index("1. **DP setting.**")
    assert "names that look like" not in statement.to_markdown()


def test_a_finished_run() -> None:
    statement = _statement([0, 3, 6])
    contents = json.loads(json.dumps(statement.to_dict(), allow_nan=False))
    assert contents["status"] == "finished"
    assert contents["keeps_plan"] is True
    assert contents["is_private"] is True
    assert contents["adjacency"] == "zero-out"
    assert contents["unit"] == "client"
    assert contents["realised"]["epsilon"] == statement.plan.epsilon
    assert contents["realised_participation"] == {
        "num_rounds": 10,
        "num_clients": 1,
        "separation": 3,
        "largest_separation": 3,
        "max_participations": 3,
        "keeps_sampling": None,
    }
    text = statement.to_markdown()
    assert f"({rounded_up(statement.plan.epsilon)}, 0.0001)-differential privacy" in text
    assert "Warning" not in text


def test_every_point_of_the_form_is_there() -> None:
    text = _statement([0]).to_markdown()
    for point in (
        "DP setting",
        "Data accesses covered",
        "Released output",
        "Unit of privacy",
        "Adjacency",
        "Type of accounting",
        "Assumption",
        "Formal statement, planned",
        "Formal statement, observed",
        "Public data",
        "well-behaved clients",
        "Verifiability",
    ):
        assert point in text


def test_a_run_under_way_promises_only_the_plan() -> None:
    statement = _statement(None)
    assert statement.to_dict()["status"] == "running"
    assert statement.to_dict()["realised"] is None
    assert "if it keeps its plan" in statement.to_markdown()


def test_an_interrupted_run() -> None:
    statement = _statement([0], num_rounds=4)
    assert statement.to_dict()["status"] == "interrupted"
    assert statement.observed_guarantee is not None
    assert statement.observed_guarantee.epsilon < statement.plan.epsilon
    assert statement.stated == statement.plan
    assert f"({rounded_up(statement.plan.epsilon)}, 0.0001)-differential" in statement.to_markdown()
    assert "decision to stop" in statement.to_markdown()
    assert "stopped before its last round" in statement.to_markdown()


def test_a_broken_plan_is_the_first_thing_said() -> None:
    statement = _statement([0, 1, 2])
    assert statement.keeps_plan is False
    text = statement.to_markdown()
    assert text.index("break the planned schema") < text.index("DP setting")
    assert statement.observed_guarantee is not None
    assert f"({rounded_up(statement.observed_guarantee.epsilon)}, " in text
    assert statement.stated == statement.observed_guarantee


@pytest.mark.parametrize("rounds", [[0, 1], [0, 2], [0, 1, 3]])
def test_a_broken_plan_earns_no_more_for_being_stopped(rounds: list[int]) -> None:
    """Nor for having few participations: the weaker of what was planned and what happened."""
    for num_rounds in (4, 10):
        statement = _statement(rounds, num_rounds=num_rounds)
        assert statement.keeps_plan is False
        guarantee = statement.observed_guarantee
        assert guarantee is not None
        worst_case = statement.worst_case
        assert worst_case is not None
        # Three participations were planned: the square root of three for independent noise.
        assert worst_case.sensitivity == pytest.approx(3**0.5)
        assert statement.stated.epsilon >= statement.plan.epsilon * (1 - 1e-9)
        assert statement.stated.epsilon >= guarantee.epsilon * (1 - 1e-9)
        if num_rounds == 4:
            assert any("decision to stop" in warning for warning in statement.warnings)
        with refuses("worst_case"):
            dataclasses.replace(statement, worst_case=None)


def test_no_noise_and_fixed_seeds_are_not_private() -> None:
    silent = _statement([0], multiplier=0.0)
    assert silent.to_dict()["is_private"] is False
    assert "no differential privacy guarantee" in silent.to_markdown()
    fixed = _statement([0], fixed_seed=True)
    assert fixed.to_dict()["is_private"] is False
    assert "fixed seed" in fixed.to_markdown()


def _sampled(keeps_sampling: bool | None, name: str = "poisson") -> PrivacyStatement:
    factorization = banded(workloads.prefix_sum(12), 3)
    scheme = sampling_scheme(name, num_rounds=12, num_bands=3, population=300, clients_per_round=10)
    plan = guarantees.sampled(factorization, scheme, 1.2, 1e-4)
    facts = RunFacts(
        *(
            "Banded matrix factorization for 12 rounds",
            300,
            10,
            0.5,
            False,
            "none",
            "The server draws.",
        ),
        has_run_directory=True,
    )
    observed = ObservedParticipation(12, 87, 3, 4, keeps_sampling=keeps_sampling)
    return _ended(facts, plan, factorization, observed)


@pytest.mark.parametrize("name", sampling_schemes())
def test_a_sampled_run_is_amplified_and_tells_nothing_of_its_batches(name: str) -> None:
    statement = _sampled(True, name)
    contents = json.loads(json.dumps(statement.to_dict(), allow_nan=False))
    assert contents["keeps_plan"] is True
    assert contents["amplification"]["name"] == name
    assert contents["earned"]["epsilon"] == pytest.approx(statement.plan.epsilon)
    assert contents["realised_participation"] == {"num_rounds": 12, "keeps_sampling": True}
    text = statement.to_markdown()
    assert "Warning" not in text
    own_proofs = ("random_allocation", "min_separation", "balls_in_bins")
    assert ("BandMF Thm 4" in text) == (name not in own_proofs)
    assert "secret" in text
    assert re.search(r"\b87\b", text) is None
    assert ("timer" in text) == (name == "min_separation")
    assert "--sampling_seed=checkpoints/sampling_seed.json" in text
    facts = dataclasses.replace(statement.facts, has_run_directory=False)
    elsewhere = dataclasses.replace(statement, facts=facts).to_markdown()
    assert "checkpoints/" not in elsewhere
    assert "can repeat every draw" in elsewhere
    certificate = statement.plan.certificate
    assert (certificate is None) == (name not in ("min_separation", "balls_in_bins"))
    if certificate is not None:
        assert f"seed {certificate.seed} and" in text
        assert contents["planned"]["certificate"] == certificate.to_dict()


def test_a_sampled_run_that_was_not_sampled_is_not_amplified() -> None:
    statement = _sampled(False)
    assert statement.keeps_plan is False
    assert statement.stated.sampling is None
    assert statement.stated.epsilon > statement.plan.epsilon
    text = statement.to_markdown()
    assert text.index("nothing is amplified") < text.index("DP setting")
    assert f"({rounded_up(statement.stated.epsilon)}, " in text


@pytest.mark.parametrize("keeps_sampling", [True, False, None])
@pytest.mark.parametrize("name", sampling_schemes())
def test_a_statement_of_a_sampled_run_cannot_name_a_client(
    name: str, keeps_sampling: bool | None
) -> None:
    """Nor of one whose batches were drawn in another way: the others of its clients were not."""
    statement = _sampled(keeps_sampling, name)
    assert statement.to_dict()["worst_client"] is None
    with refuses("client", "secret"):
        dataclasses.replace(statement, worst_client=WorstClient("ada", (0, 3, 6), 1.75, 4.25))


def test_the_worst_client_is_told_without_its_name() -> None:
    statement = dataclasses.replace(
        _statement([0, 3, 6]), worst_client=WorstClient("ada", (0, 3, 6), 1.75, 4.25)
    )
    anonymous = {"num_rounds": 3, "sensitivity": 1.75, "epsilon": 4.25}
    assert statement.to_dict()["worst_client"] == anonymous
    assert statement.to_dict(name_clients=True)["worst_client"] == {
        "client_id": "ada",
        "rounds": [0, 3, 6],
        **anonymous,
    }
    text = statement.to_markdown()
    assert "took part in 3 rounds; for its rounds alone the sensitivity is 1.75" in text
    assert "ada" not in text


def _under_a_rule(
    rounds_of_client: list[int], num_rounds: int, stopped_by_rule: bool, share: float = 0.8
) -> PrivacyStatement:
    """Independent noise for three participations, under a limit that is a share of the plan's."""
    statement = _statement(rounds_of_client, num_rounds)
    limit = share * statement.plan.epsilon
    rule = StoppingRule(statement.plan, identity(10), limit)
    return dataclasses.replace(statement, stopping_rule=rule, stopped_by_rule=stopped_by_rule)


def test_a_run_that_its_rule_ended_has_its_observed_guarantee() -> None:
    statement = _under_a_rule([0], 3, stopped_by_rule=True)
    assert statement.observed_guarantee is not None
    assert statement.stated == statement.observed_guarantee
    contents = json.loads(json.dumps(statement.to_dict(), allow_nan=False))
    assert contents["status"] == "stopped_at_epsilon"
    assert contents["earned"] == contents["realised"]
    assert contents["stopping_rule"]["ended_the_run"] is True
    assert contents["stopping_rule"]["stop_at_epsilon"] == statement.plan.epsilon * 0.8
    # The decision to stop was made before the first round.
    assert statement.warnings == ()
    text = statement.to_markdown()
    assert "ended by its own rule" in text
    assert "*Stopping rule.* Fixed before the first round" in text


def test_a_run_that_somebody_ended_has_what_its_rule_promised() -> None:
    statement = _under_a_rule([0], 3, stopped_by_rule=False)
    assert statement.status == "interrupted"
    assert statement.observed_guarantee is not None
    assert statement.stopping_rule is not None
    assert statement.stated == statement.stopping_rule.guarantee
    assert statement.observed_guarantee.epsilon < statement.stated.epsilon < statement.plan.epsilon
    assert any("decision to stop" in warning for warning in statement.warnings)
    # The plan's own guarantee, where the limit is above it.
    assert _under_a_rule([0], 3, False, share=1.2).stated == statement.plan


def test_a_rule_bounds_a_run_that_broke_its_plan() -> None:
    statement = _under_a_rule([0, 1, 2], 4, stopped_by_rule=False, share=1.1)
    assert statement.keeps_plan is False
    assert statement.worst_case is not None
    assert statement.stopping_rule is not None
    assert statement.stated.epsilon <= 1.1 * statement.plan.epsilon
    ended = dataclasses.replace(statement, stopped_by_rule=True)
    assert ended.observed_guarantee is not None
    assert ended.stated.epsilon == pytest.approx(ended.observed_guarantee.epsilon)


def test_no_rule_says_nothing_and_ends_nothing() -> None:
    statement = _statement([0], num_rounds=4)
    assert statement.to_dict()["stopping_rule"] is None
    assert "Stopping rule" not in statement.to_markdown()
    with refuses("rule"):
        dataclasses.replace(statement, stopped_by_rule=True)


def test_a_rule_for_drawn_batches_promises_nothing_for_others() -> None:
    kept, left = _sampled(True), _sampled(False)
    rule = StoppingRule(kept.plan, banded(workloads.prefix_sum(12), 3), 0.9 * kept.plan.epsilon)
    interrupted = dataclasses.replace(kept, stopping_rule=rule)
    assert interrupted.stated.epsilon <= rule.epsilon
    assert "follows from the plan alone" in " ".join(interrupted.to_markdown().split())
    assert dataclasses.replace(left, stopping_rule=rule).stated == left.stated


def test_a_statement_says_what_protects_a_part_of_a_client() -> None:
    statement = _statement([0, 3, 6])
    part = statement.stated.part_of_client()
    text = " ".join(statement.to_markdown().split())
    assert "stronger" not in text
    assert (
        "may be two clip norms apart: that is half the noise multiplier, "
        f"0.5, which is ({rounded_up(part.epsilon)}, 0.0001)-DP."
    ) in text
    assert statement.to_dict()["part_of_client"] == part.to_dict()


def test_an_attacker_of_drawn_batches_does_not_know_them() -> None:
    assert "secrets (its noise and who was drawn)" in _sampled(True).to_markdown()
    text = _statement([0, 3, 6]).to_markdown()
    assert "secrets (its noise)" in text
    assert "who was drawn)" not in text


def test_plans_of_an_extended_run_allow_what_was_allowed_before() -> None:
    statement = _statement(None)
    earlier = [
        guarantees.planned(identity(rounds), MinSeparation(separation, most), 1.0, 1e-4)
        for rounds, separation, most in ((4, 3, 2), (7, 3, 3))
    ]
    extended = dataclasses.replace(statement, earlier_plans=tuple(earlier))
    text = " ".join(extended.to_markdown().split())
    assert "4 rounds, at most 2 participations at least 3 rounds apart, with noise" in text
    assert [plan["num_rounds"] for plan in extended.to_dict()["earlier_plans"]] == [4, 7]
    between = guarantees.planned(identity(7), MinSeparation(1), 1.0, 1e-4)
    with refuses("7"):
        dataclasses.replace(statement, earlier_plans=(earlier[0], between))
