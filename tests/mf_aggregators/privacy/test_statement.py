"""The statement says what holds, and warns of what does not."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest

from mf_aggregators import accounting, workloads
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.factorizations import Factorization, banded, identity
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    PoissonSampling,
    sampling_scheme,
    sampling_schemes,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import INDEPENDENCE, ObservedParticipation
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.provenance import OtherRuns
from mf_aggregators.privacy.round_times import RoundTimes
from mf_aggregators.privacy.statement import (
    TIMERS_BY_ROUNDS,
    AdaptiveClipping,
    PrivacyStatement,
    Represented,
    RunFacts,
)
from mf_aggregators.privacy.stopping_rules import StoppingRule
from mf_aggregators.privacy.worst_client import WorstClient
from tests import statement_schemas
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
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
    plan: Guarantee,
    factorization: Factorization,
    observed: ObservedParticipation,
) -> PrivacyStatement:
    keeps_plan = guarantees.keeps_plan(
        guarantees.scheme_of(plan) or guarantees.participation_of(plan), observed
    )
    return PrivacyStatement(
        facts,
        plan,
        observed,
        guarantees.observed(plan, observed),
        worst_case=None if keeps_plan else guarantees.worst_case(plan, observed),
    )


def test_a_statement_names_the_files_of_runs_that_have_them_alone() -> None:
    statement = _statement([0, 3, 6])
    files = {"`participation.npz`", "`config.json`", "`metrics.csv`", "`checkpoints/`", "`noise/`"}
    without = statement.to_markdown()
    assert not any(file in without for file in files)
    assert "The noise seed is secret, and so are rows of noise" in without
    assert "wherever\n     they are kept\n" in without
    assert (
        "`mf-report --checkpoint= --noise_multiplier= --delta= --ledger=\n   --round_counts=`"
        in without
    )
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


def test_nothing_is_said_of_noise_that_is_not_there() -> None:
    text = " ".join(_statement([0], multiplier=0.0).to_markdown().split())
    assert "a round's sum gets no noise." in text
    assert "*Type of accounting.* None: without noise there is nothing to account for. - *" in text
    for said in ("Gaussian", "zCDP", "as computers hold them"):
        assert said in " ".join(_statement([0]).to_markdown().split())
        assert said not in text


def test_one_round_is_one_round() -> None:
    assert str(MinSeparation(1)) == "participations at least 1 round apart"
    assert str(FixedEpochOrder(2, 1)).endswith("adjacent ones exactly 1 round apart")
    assert str(FixedEpochOrder(2, 3)).endswith("adjacent ones exactly 3 rounds apart")


def test_delta_is_compared_with_the_population() -> None:
    text = " ".join(_statement(None).to_markdown().split())
    assert (
        "Delta times the 7 clients of the population is 0.0007: delta alone would allow the data "
        "of that many clients, on average, to be published."
    ) in text


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


def test_who_kept_a_broken_plan_has_what_was_planned() -> None:
    """Also where no epsilon is accounted for of who broke it."""
    statement = _statement([*range(10)], multiplier=0.3)
    assert statement.stated.epsilon == math.inf
    assert math.isfinite(statement.plan.epsilon)
    text = " ".join(statement.to_markdown().split())
    assert "This run has no differential privacy guarantee" not in text
    planned = f"({rounded_up(statement.plan.epsilon)}, 0.0001)-DP"
    assert f"A client that kept the schema has {planned}" in text
    assert statement.kept_guarantee == statement.plan
    assert "it guarantees nothing." not in text
    assert "this statement guarantees nothing to one that took part beyond" in text
    # A fixed seed voids that as well, and without noise there is nothing to void.
    facts = dataclasses.replace(statement.facts, noise_seed_is_fixed=True)
    void = dataclasses.replace(statement, facts=facts)
    assert "it guarantees nothing." in void.to_markdown()
    silent = _statement([*range(10)], multiplier=0.0)
    assert silent.kept_guarantee is None
    assert "it guarantees nothing." in silent.to_markdown()
    for other in (_statement([0, 3, 6]), _statement([0, 1, 2]), _sampled(False)):
        assert other.kept_guarantee is None


def test_draws_that_nobody_checked_are_not_denied_a_guarantee() -> None:
    """Too little noise without amplification, and enough with it."""
    scheme = PoissonSampling(12, 3, 300, 10)
    factorization = banded(workloads.prefix_sum(12), 3)
    plan = small_mechanisms.sampled(factorization, scheme, 0.25, 1e-4)
    observed = ObservedParticipation(12, 87, 3, 4)
    statement = _ended(_statement(None).facts, plan, factorization, observed)
    assert math.isinf(statement.stated.epsilon)
    assert math.isfinite(plan.epsilon)
    text = " ".join(statement.to_markdown().split())
    assert "**No guarantee can be stated**: nothing shows that clients were drawn" in text
    assert "This run has no differential privacy guarantee" not in text


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
        # The numbers of the headline stand below it, rho among them.
        text = " ".join(statement.to_markdown().split())
        is_worst_case = statement.stated is worst_case
        assert ("Formal statement, worst case." in text) == is_worst_case
        assert f"rho = {rounded_up(statement.stated.rho, '.6g')}" in text
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
    plan = small_mechanisms.sampled(factorization, scheme, 1.2, 1e-4)
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


@pytest.mark.short_cases(3)
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
    certificate = statement.plan.claim.certificate
    assert (certificate is None) == (name not in ("min_separation", "balls_in_bins"))
    if certificate is not None:
        assert f"seed {certificate.seed} and" in text
        assert contents["planned"]["certificate"] == certificate.to_dict()


def test_a_sampled_run_that_was_not_sampled_is_not_amplified() -> None:
    statement = _sampled(False)
    assert statement.keeps_plan is False
    assert not statement.stated.is_amplified
    assert statement.stated.epsilon > statement.plan.epsilon
    text = statement.to_markdown()
    assert text.index("nothing is amplified") < text.index("DP setting")
    assert f"({rounded_up(statement.stated.epsilon)}, " in text


def test_draws_that_nobody_checked_have_the_worst_case() -> None:
    """A ledger without its seed: nothing is said to be kept, nor to be broken."""
    scheme = PoissonSampling(num_rounds=40, num_bands=2, population=100, clients_per_round=10)
    mechanism = Mechanism(banded(workloads.prefix_sum(40), 2), scheme, 1.0)
    sampler = scheme.sampler(5)
    drawn = [set(sampler.draw(index).tolist()) for index in range(30)]
    rounds = tuple(
        np.array([index for index, each in enumerate(drawn) if client in each], np.int64)
        for client in range(100)
    )
    ledger = Ledger(tuple(map(str, range(100))), rounds, 30, scheme)
    facts = _statement(None).facts
    unchecked = mechanism.observed(ledger).statement(facts, 1e-4)
    checked = mechanism.observed(ledger, sampling_seed=5).statement(facts, 1e-4)
    assert (unchecked.keeps_plan, checked.keeps_plan) == (None, True)
    assert checked.worst_case is None
    assert unchecked.worst_case == mechanism.observed(ledger).worst_case(1e-4)
    assert not unchecked.stated.is_amplified
    statement_schemas.check(unchecked.to_dict())
    text = " ".join(unchecked.to_markdown().split())
    assert "Without the sampler's seed, nothing shows that" in text
    assert "were not drawn" not in text
    assert "sampler's seed" not in " ".join(checked.warnings)
    with refuses("whose draws nobody checked", "worst_case"):
        dataclasses.replace(unchecked, worst_case=None)


@pytest.mark.short_cases(9)
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
    anonymous = {"num_rounds": 3, "sensitivity": 1.75, "epsilon": 4.25, **INDEPENDENCE}
    assert statement.to_dict()["worst_client"] == anonymous
    assert statement.to_dict(name_clients=True)["worst_client"] == {
        "client_id": "ada",
        "rounds": [0, 3, 6],
        **anonymous,
    }
    text = statement.to_markdown()
    alone = "took part in 3 rounds; for its rounds alone the sensitivity is 1.75 and epsilon 4.25"
    assert f"{alone}, {ONLY_IF}." in text
    # The same number is not said again.
    worst = WorstClient("ada", (0, 3, 6), 1.75, statement.stated.epsilon)
    alike = dataclasses.replace(statement, worst_client=worst).to_markdown()
    assert "took part in 3 rounds, and has just that guarantee." in alike
    assert "for its rounds alone" not in alike
    assert "ada" not in text


def _under_a_rule(
    rounds_of_client: list[int], num_rounds: int, stopped_by_rule: bool, share: float = 0.8
) -> PrivacyStatement:
    """Independent noise for three participations, under a limit that is a share of the plan's."""
    statement = _statement(rounds_of_client, num_rounds)
    limit = share * statement.plan.epsilon
    rule = StoppingRule(statement.plan, limit)
    return dataclasses.replace(statement, stopping_rule=rule, stopped_by_rule=stopped_by_rule)


def test_a_run_that_its_rule_ended_has_the_guarantee_of_its_limit() -> None:
    """The limit was fixed before the first round, and what was observed was not."""
    statement = _under_a_rule([0], 3, stopped_by_rule=True)
    assert statement.observed_guarantee is not None
    assert statement.stopping_rule is not None
    assert statement.stated == statement.stopping_rule.guarantee
    assert statement.observed_guarantee.epsilon < statement.stated.epsilon < statement.plan.epsilon
    contents = json.loads(json.dumps(statement.to_dict(), allow_nan=False))
    assert contents["status"] == "stopped_at_epsilon"
    assert contents["earned"] == contents["stopping_rule"]["guarantee"]
    assert INDEPENDENCE.keys() <= contents["realised"].keys()
    assert INDEPENDENCE.keys().isdisjoint(contents["earned"])
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
    assert statement.stated == statement.stopping_rule.guarantee
    assert statement.stated.epsilon <= 1.1 * statement.plan.epsilon
    ended = dataclasses.replace(statement, stopped_by_rule=True)
    assert ended.stated == statement.stated


def test_no_rule_says_nothing_and_ends_nothing() -> None:
    statement = _statement([0], num_rounds=4)
    assert statement.to_dict()["stopping_rule"] is None
    assert "Stopping rule" not in statement.to_markdown()
    with refuses("rule"):
        dataclasses.replace(statement, stopped_by_rule=True)


def test_a_rule_for_drawn_batches_promises_nothing_for_others() -> None:
    kept, left = _sampled(True), _sampled(False)
    rule = StoppingRule(kept.plan, 0.9 * kept.plan.epsilon)
    exceeding = dataclasses.replace(kept, stopping_rule=rule)
    assert exceeding.stated == kept.stated
    assert any("it was not followed" in warning for warning in exceeding.warnings)
    few = ObservedParticipation(2, 19, None, 1, keeps_sampling=True)
    assert rule.allows(few)
    interrupted = dataclasses.replace(
        exceeding,
        observed_participation=few,
        observed_guarantee=guarantees.observed(kept.plan, few),
    )
    assert interrupted.stated.epsilon <= rule.epsilon
    assert "follows from the plan alone" in " ".join(interrupted.to_markdown().split())
    broken = dataclasses.replace(left, stopping_rule=rule)
    assert broken.stated == left.stated
    assert "no release of this run exceeds it" in interrupted.to_markdown()
    assert "no release of this run exceeds it" not in broken.to_markdown()


# A client's rounds, from 0, and what a printed schema says of them: the participations at most,
# the rounds between them at least, or exactly.
_MOST = re.compile(r"at most (one|[0-9]+) participation")
_AT_LEAST = re.compile(r"at least ([0-9]+) rounds? apart")
_EXACTLY = re.compile(r"exactly ([0-9]+) rounds? apart")


def _is_true_of(words: str, rounds: list[int]) -> bool:
    gaps = [after - before for before, after in itertools.pairwise(rounds)]
    most, least, exact = (each.search(words) for each in (_MOST, _AT_LEAST, _EXACTLY))
    assert most or least or exact, words
    return (
        (most is None or len(rounds) <= int(most[1].replace("one", "1")))
        and (least is None or all(gap >= int(least[1]) for gap in gaps))
        and (exact is None or all(gap == int(exact[1]) for gap in gaps))
    )


def test_every_condition_that_a_statement_prints_is_true_of_its_ledger() -> None:
    """Random ledgers that keep or break the plan, with rules and without, ended by them or not.

    A client whose rows of independent noise are k has the noise of one over the root of k.
    """
    generator = np.random.default_rng(4)
    plan = guarantees.planned(identity(10), MinSeparation(3, 3), 1.0, 1e-4)
    facts, counts = _statement(None).facts, dict.fromkeys(("planned", "ledger", "rule"), 0)
    number = examples(400, one_in=3)
    for _ in range(number):
        num_rounds = int(generator.integers(1, 11))
        share = generator.uniform(0.05, 0.5)
        of_clients = [
            np.flatnonzero(generator.random(num_rounds) < share).tolist() for _ in range(3)
        ]
        observed = guarantees.observed_participation(of_clients, num_rounds)
        statement = _ended(facts, plan, identity(10), observed)
        rule = None
        if generator.random() < 0.7:
            rule = StoppingRule(plan, plan.epsilon * generator.uniform(0.7, 1.3))
            statement = dataclasses.replace(
                statement,
                stopping_rule=rule,
                stopped_by_rule=bool(rule.allows(observed) and generator.random() < 0.3),
            )
        stated = statement.stated.epsilon
        for rounds in of_clients:
            if rounds:
                alone = accounting.epsilon(math.sqrt(3.0 / len(rounds)), 1e-4)
                assert alone <= stated * (1 + 1e-9)
        text = " ".join(statement.to_markdown().split())
        condition = text.partition("privacy** for every client, ")[2].partition(". Epsilon and")[0]
        earned = statement.to_dict()["earned"]
        if "by which the stopping rule below ends the run" in condition:
            counts["rule"] += 1
            assert rule is not None
            assert rule.allows(observed)
            assert earned["participation"] == {"schema": "stopping_rule"}
            assert "apart" not in str(statement.stated)
        else:
            counts["ledger" if "so that every client had" in condition else "planned"] += 1
            assert all(_is_true_of(condition, rounds) for rounds in of_clients), condition
            assert earned["participation"]["schema"] != "stopping_rule"
        # A rule that was not followed promises nothing.
        is_followed = rule is None or rule.allows(observed)
        assert is_followed or "it was not followed" in text
        assert ("no release of this run exceeds it" in text) == (rule is not None and is_followed)
        statement_schemas.check(statement.to_dict())
    assert min(counts.values()) > number / 14, counts


def test_a_run_under_way_is_within_its_rule_whether_it_keeps_its_plan_or_not() -> None:
    statement = _statement(None)
    rule = StoppingRule(statement.plan, 0.8 * statement.plan.epsilon)
    under_rule = dataclasses.replace(statement, stopping_rule=rule)
    text = " ".join(under_rule.to_markdown().split())
    assert "if it keeps its plan" not in text
    assert "what it releases satisfies" in text
    assert "the ledger of who took part is right, by which the stopping rule" in text
    loose = StoppingRule(statement.plan, 1.2 * statement.plan.epsilon)
    kept = dataclasses.replace(statement, stopping_rule=loose)
    assert "if it keeps its plan" in kept.to_markdown()


def test_every_kind_of_statement_is_what_the_published_schema_says() -> None:
    """And the check that says so knows all of its keywords, and finds what is wrong."""
    assert statement_schemas.unknown_keywords(statement_schemas.schema()) == set()
    finished, running = _statement([0, 3, 6]), _statement(None)
    clip = AdaptiveClipping(AdaptiveClip(smallest_norm=0.01, largest_norm=10.0), 1.1, 4.0)
    facts = dataclasses.replace(
        finished.facts,
        adaptive_clip=clip,
    ).with_provenance(secure_aggregation=True, files=(("a", "0" * 64),))
    kinds = [
        *(finished, running, _statement([0], num_rounds=4), _statement([0, 1, 2])),
        *(_statement([], num_rounds=2), _statement([0], multiplier=0.0), _by_times()),
        *(_under_a_rule([0], 3, stopped_by_rule=True), _sampled(True), _sampled(False)),
        *(_sampled(True, "min_separation"), _sampled(None, "fixed_size")),
        dataclasses.replace(finished, facts=facts),
        dataclasses.replace(finished, worst_client=WorstClient("ada", (0, 3, 6), 1.75, 4.25)),
        dataclasses.replace(finished, represented=Represented(8, 40, finished.plan)),
        dataclasses.replace(finished, other_runs=OtherRuns(("a",), math.inf, 1e-4)),
        dataclasses.replace(
            running,
            earlier_plans=(guarantees.planned(identity(4), MinSeparation(3, 2), 1.0, 1e-4),),
        ),
    ]
    for statement in kinds:
        for name_clients in (False, True):
            statement_schemas.check(statement.to_dict(name_clients=name_clients))
    contents = finished.to_dict()
    for name in contents:
        with pytest.raises(AssertionError):
            statement_schemas.check({key: contents[key] for key in contents if key != name})
    for name, value in {
        "unknown": 1,
        "num_clients": 2.5,
        "clip_norm": 0,
        "status": "ended",
        "is_private": 1,
        "keeps_plan": "yes",
        "planned": {**contents["planned"], "delta": 1.0},
        "provenance": {**contents["provenance"], "files": {"a": "0" * 63}},
        "other_runs": {"names": [], "epsilon": 1.0, "delta": 1e-4},
        "warnings": [1],
    }.items():
        with pytest.raises(AssertionError):
            statement_schemas.check({**contents, name: value})


def test_facts_are_read_from_a_statement_as_they_were_written() -> None:
    for statement in (_statement([0, 3, 6]), _sampled(True)):
        read = RunFacts.from_dict(json.loads(json.dumps(statement.to_dict())))
        # The data have texts without their line ends.
        enforcement = " ".join(statement.facts.enforcement.split())
        assert read == dataclasses.replace(statement.facts, enforcement=enforcement)


def test_a_statement_says_what_holds_with_other_runs_or_that_nobody_said() -> None:
    statement = _statement([0, 3, 6])
    assert "*With other runs.* Not stated." in statement.to_markdown()
    together = statement.with_other_runs({"a": accounting.event(1.0), "b": accounting.event(0.5)})
    assert together.other_runs is not None
    # Squares of 1 / sigma add up.
    expected = accounting.epsilon(6.0**-0.5, 1e-4)
    assert together.other_runs.epsilon == pytest.approx(expected, rel=1e-3)
    assert together.stated == statement.stated
    text = " ".join(together.to_markdown().split())
    pair = f"({rounded_up(together.other_runs.epsilon)}, 0.0001)-DP"
    assert f"in this run and in `a`, `b`, what they released together satisfies {pair}" in text
    assert f"{pair}, if each of them keeps what its own statement assumes." in text
    with refuses("at least one run"):
        statement.with_other_runs({})


def test_a_run_without_a_guarantee_has_none_together_with_others() -> None:
    others = {"a": accounting.event(1.0)}
    for statement in (_statement([0], multiplier=0.0), _statement([0], fixed_seed=True)):
        together = statement.with_other_runs(others)
        assert together.to_dict()["other_runs"]["epsilon"] is None
        assert "guarantee for all of them together" in together.to_markdown()
    found = _statement([0]).with_other_runs({"a": accounting.event(0.0)}).other_runs
    assert found is not None
    assert found.epsilon == math.inf


def test_a_run_that_broke_its_plan_counts_as_its_worst_case_with_others() -> None:
    statement = _statement([0, 1, 2, 3])
    assert statement.worst_case is not None
    assert statement.worst_case.noise_multiplier < 0.99 * statement.plan.noise_multiplier
    found = statement.with_other_runs({"a": accounting.event(1.0)}).other_runs
    assert found is not None
    sigma = (statement.worst_case.noise_multiplier**-2 + 1.0) ** -0.5
    assert found.epsilon == pytest.approx(accounting.epsilon(sigma, 1e-4), rel=1e-3)


def test_what_was_composed_of_a_plan_is_not_stated_of_a_run_that_ended() -> None:
    mechanism = Mechanism(identity(10), MinSeparation(3, 3), 1.0)
    running = mechanism.statement(_statement(None).facts, 1e-4)
    running = dataclasses.replace(running, other_runs=OtherRuns(("a",), 4.0, 1e-4))
    ended = mechanism.observed(Ledger(("ada",), (np.array([0, 1, 2]),), 10)).completed(running)
    assert ended.keeps_plan is False
    assert ended.other_runs is None


def _by_times() -> PrivacyStatement:
    """The statement of a run of which nobody knows who took part."""
    statement = _statement(None)
    starts = np.array([0.0, 9.0])
    times = RoundTimes(starts, starts + 9.0, timer_hours=0.004, clock_margin_minutes=0.0)
    return _ended(statement.facts, statement.plan, identity(10), times.participation())


def test_a_headline_names_the_condition_that_its_guarantee_rests_on() -> None:
    assumption = "explains: every client has at most 3 participations at least 3 rounds apart"
    assert assumption in _statement(None).to_markdown()
    ledger = "the ledger of who took part is right, so that every client had at most 3"
    for rounds in ([0, 1, 2], [0, 3, 6]):
        text = _statement(rounds).to_markdown()
        assert (assumption in text) != (ledger in text)
    by_times = _by_times().to_markdown()
    assert "timers and uploads were as the observed statement below says, so that" in by_times
    assert "By the times of 2 released rounds: no client took part more than" in by_times
    assert "--noise_multiplier= --delta= --round_times=" in by_times


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_times_that_allow_more_than_the_plan_accuse_no_client(multiplier: float) -> None:
    """Twelve rounds an hour apart, with timers of two hours under a plan of four rounds."""
    starts = 3600.0 * np.arange(12)
    times = RoundTimes(starts, starts + 1800.0, timer_hours=2.0)
    mechanism = Mechanism(identity(12), MinSeparation(4), multiplier)
    statement = mechanism.observed(times).statement(_statement(None).facts, 1e-4)
    assert statement.keeps_plan is False
    text = " ".join(statement.to_markdown().split())
    assert re.search(r"clients? (that )?broke|break the planned schema", text) is None
    assert "The times of the rounds allow more than the planned schema." in text
    is_stated = math.isfinite(statement.stated.epsilon)
    assert is_stated == (multiplier == 1.0)
    kept = f"A client that kept the schema has ({rounded_up(statement.plan.epsilon)}, 0.0001)-DP"
    assert (kept in text) == (not is_stated)
    # A ledger shows what clients did.
    everywhere = Ledger(("a",), (np.arange(12),), 12)
    of_ledger = mechanism.observed(everywhere).statement(_statement(None).facts, 1e-4)
    assert "The observed participations break the planned schema." in of_ledger.to_markdown()
    assert "times of the rounds" not in of_ledger.to_markdown()


def test_what_was_observed_is_not_said_twice() -> None:
    text = _statement([0, 3, 6]).to_markdown()
    assert text.count("The sensitivity of C is exactly") == 1
    assert "exactly 3 rounds apart. That is as planned." in text
    for other in ([0], [0, 1, 2]):
        assert _statement(other).to_markdown().count("The sensitivity of C is exactly") == 2
    assert "none more than once. The" in _statement([0]).to_markdown()


def test_released_bits_are_vouched_for_where_this_library_released_them() -> None:
    statement = _statement([0, 3, 6])
    assert "if sums and\n     noise are the integers" in statement.to_markdown()
    facts = dataclasses.replace(statement.facts, has_run_directory=True)
    text = dataclasses.replace(statement, facts=facts).to_markdown()
    assert "It holds for released numbers as computers hold them: sums" in text


def test_a_statement_says_what_protects_a_part_of_a_client() -> None:
    statement = _statement([0, 3, 6])
    part = guarantees.part_of_client(statement.stated)
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
