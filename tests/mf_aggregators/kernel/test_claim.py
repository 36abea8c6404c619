"""Claims are proved exactly as far as an arithmetic of its own says that they are true."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import Mechanism, factorizations, participation
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel import claim, numbers, sensitivity
from mf_aggregators.kernel.claim import Assumption, Basis, Claim, Limit, Pattern
from mf_aggregators.kernel.draws import FAILURE_PER_NUMBER, LARGEST_SHIFT
from mf_aggregators.kernel.integers import IntegerRows
from mf_aggregators.kernel.losses import BallsInBins, Poisson, SampledRun, StrategyColumns
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import BandedNoise, full_tree_rows
from mf_aggregators.kernel.sensitivity import Schema, Unit
from mf_aggregators.participation.certificate_search import Certification
from tests.examples import examples
from tests.mf_aggregators.kernel import random_claims
from tests.mf_aggregators.kernel.random_claims import gaussian_epsilon, largest_change
from tests.mf_aggregators.random_recursions import banded_rows, toeplitz_rows
from tests.refusals import refuses

_DELTA = 1e-5


def _matrix(rng: np.random.Generator, num_rounds: int) -> np.ndarray:
    """A lower-triangular C whose entries have both signs."""
    matrix = np.tril(rng.uniform(-1.0, 1.0, (num_rounds, num_rounds)))
    np.fill_diagonal(matrix, rng.uniform(0.5, 2.0, num_rounds))
    return matrix


def _claim(matrix: np.ndarray, schema: Schema, sigma: float, **values: Any) -> Claim:
    return Claim(dense_rows(np.linalg.inv(matrix)), schema, sigma, _DELTA, **values)


@pytest.mark.timeout(1800)
def test_random_claims_are_proved_as_far_as_they_are_true() -> None:
    random_claims.check_many(examples(2000, one_in=40))


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rounds=st.integers(2, 5))
def test_signs_are_bounded_too(seed: int, num_rounds: int) -> None:
    matrix = _matrix(np.random.default_rng(seed), num_rounds)
    schema, sigma = Schema(None, 1), 3.0 * float(np.linalg.norm(matrix))
    truth = gaussian_epsilon(largest_change(matrix, schema) / sigma, _DELTA)
    assert claim.check(_claim(matrix, schema, sigma)).epsilon >= truth * (1.0 - 1e-12)


def test_first_rounds_are_those_of_the_leading_part() -> None:
    rows = toeplitz_rows(8, np.array([1.0, 0.5, 0.25]))
    whole, first = (
        claim.check(Claim(rows, Schema(None, 1), 4.0, _DELTA, num_rounds=rounds))
        for rounds in (None, 3)
    )
    assert (whole.num_rounds, first.num_rounds) == (8, 3)
    matrix = np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]])
    assert first.sensitivity.value == pytest.approx(np.linalg.norm(matrix.sum(axis=1)))
    assert first.epsilon < whole.epsilon


def test_of_nobody_nothing_is_released() -> None:
    found = claim.check(Claim(banded_rows(np.ones((3, 1))), Pattern(()), 1.0, _DELTA, num_rounds=0))
    assert (found.epsilon, found.rho, found.num_rounds) == (0.0, 0.0, 0)
    assert found.noise_multiplier == math.inf


@pytest.mark.parametrize(
    ("taking_part", "basis", "assumption"),
    [
        (Schema(1, 1), None, Assumption.PARTICIPATION),
        (Schema(1, 1), Basis.LEDGER, Assumption.INDEPENDENCE),
        (Pattern((0,)), None, Assumption.COMPLETE_LEDGER),
        (Limit(1.0), None, Assumption.STOPPING_RULE),
        (Poisson(3, 1, 10, 2), None, Assumption.SECRET_DRAWS),
        (Unit(Schema(1, 1), 1), None, Assumption.PARTICIPATION),
        (Unit(Schema(1, 1), 2), None, Assumption.PEOPLE),
        (Pattern((0, 0, 1)), Basis.PEOPLE, Assumption.PEOPLE),
    ],
)
def test_assumptions_follow_from_the_basis(
    taking_part: Any, basis: Basis | None, assumption: Assumption
) -> None:
    rows = banded_rows(np.ones((3, 1)))
    found = claim.check(Claim(rows, taking_part, 2.0, _DELTA, basis=basis))
    assert assumption in found.assumptions
    assert (Assumption.PEOPLE in found.assumptions) == (assumption is Assumption.PEOPLE)
    assert found.assumptions[-2:] == (Assumption.SERVER, Assumption.RANDOMNESS)
    assert all(each.sentence.endswith(".") for each in Assumption)


@pytest.mark.parametrize(
    ("taking_part", "basis"),
    [(Schema(1, 1), Basis.DRAWS), (Pattern((0,)), Basis.PLAN), (Poisson(3, 1, 9, 2), Basis.PLAN)],
)
def test_another_basis_is_refused(taking_part: Any, basis: Basis) -> None:
    with pytest.raises(TypeError, match="cannot rest on"):
        Claim(banded_rows(np.ones((3, 1))), taking_part, 1.0, _DELTA, basis=basis)


def _guarantee() -> claim.Guarantee:
    return claim.check(Claim(banded_rows(np.ones((3, 1))), Schema(1, 1), 1.0, _DELTA))


def test_guarantees_of_other_participation_are_not_equal() -> None:
    rows = banded_rows(np.ones((3, 1)))
    one, same, other = (
        claim.check(Claim(rows, schema, 1.0, _DELTA))
        for schema in (Schema(1, 1), Schema(1, 1), Schema(1, 2))
    )
    assert one == same
    assert hash(one) == hash(same)
    assert other.epsilon == one.epsilon
    assert one not in (other, claim.check(dataclasses.replace(one.claim, sigma=2.0)))
    assert "1e-05" in repr(one)


def test_a_guarantee_is_made_by_its_check_alone() -> None:
    guarantee = _guarantee()
    kind = type(guarantee)
    better = type("Better", (Claim,), {})(**vars(guarantee.claim))
    attempts: list[Callable[[], object]] = [
        lambda: kind(epsilon=1.0),
        lambda: dataclasses.replace(guarantee, epsilon=1.0),
        lambda: claim.check(better),
        lambda: claim.check(None),  # type: ignore[arg-type]
        lambda: kind.__new__(kind),
        lambda: type("Other", (kind,), {}),
        lambda: pickle.dumps(guarantee),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=r"Guarantee|a Claim is needed"):
            attempt()
    with pytest.raises(AttributeError, match=f"epsilon of a {kind.__name__} cannot be set"):
        setattr(guarantee, "epsilon", 0.1)  # noqa: B010
    with pytest.raises(AttributeError, match=f"epsilon of a {kind.__name__} cannot be deleted"):
        delattr(guarantee, "epsilon")
    assert copy.copy(guarantee) is copy.deepcopy(guarantee) is guarantee


def test_the_claim_of_a_guarantee_is_checked_again() -> None:
    found = _guarantee()
    schema = Schema(4, 2)
    object.__setattr__(schema, "most", 0)
    with refuses("most"):
        claim.check(dataclasses.replace(found.claim, taking_part=schema))
    object.__setattr__(found.claim, "sigma", math.nan)
    with refuses("sigma"):
        claim.claim_of(found)


_NO_ASSUMPTION = "participation did not depend on released models or on data"


@pytest.mark.parametrize(
    ("taking_part", "values", "said"),
    [
        (Schema(None, 2), {}, " over 3 rounds: participations at least 2 rounds apart"),
        (
            Schema(1, 1),
            {"basis": Basis.LEDGER, "num_rounds": 1},
            f" over 1 round: at most one participation, only if {_NO_ASSUMPTION}",
        ),
        (
            Pattern((0, 2)),
            {"sigma": 0.0},
            f" over 3 rounds: participation in rounds 0, 2, only if {_NO_ASSUMPTION}",
        ),
        (Pattern(()), {}, f" over 3 rounds: no participation, only if {_NO_ASSUMPTION}"),
        (Limit(1.0), {}, ", by a stopping rule"),
        (
            Poisson(3, 1, 10, 2),
            {},
            " over 3 rounds: poisson sampling of 2 of 10 clients, if nobody learns who was drawn",
        ),
        (
            BallsInBins(3, 1, 10, 5, 2),
            {},
            " over 3 rounds: balls_in_bins sampling of 5 of 10 clients, if nobody learns who was "
            "drawn",
        ),
    ],
)
def test_it_is_printed_with_its_assumptions(
    taking_part: Any, values: dict[str, Any], said: str
) -> None:
    rows = banded_rows(np.ones((3, 1)))
    made = {"rows": rows, "taking_part": taking_part, "sigma": 9.0, "delta": _DELTA, **values}
    found = claim.check(Claim(**made))
    first, second = str(found).splitlines()
    stated = (
        f"({numbers.rounded_up(found.epsilon)}, 1e-05)-DP"
        if made["sigma"]
        else "no finite epsilon at delta 1e-05"
    )
    assert first == f"{stated} for each client{said}"
    assert second == f"if: {' '.join(each.sentence for each in found.assumptions)}"


def test_what_a_guarantee_says_of_itself_follows_from_its_claim() -> None:
    rows = banded_rows(np.ones((4, 1)))
    claims: list[tuple[Any, Basis | None]] = [
        (Schema(None, 1), None),
        (Schema(None, 1), Basis.LEDGER),
        (Limit(2.0), None),
        (Poisson(4, 1, 100, 2), None),
    ]
    plan, ledger, rule, drawn = (
        claim.check(Claim(rows, taking_part, 2.0, _DELTA, basis=basis))
        for taking_part, basis in claims
    )
    for name, kind in (("is_observed", ledger), ("is_by_rule", rule), ("is_amplified", drawn)):
        for each in (plan, ledger, rule, drawn):
            assert getattr(each, name) == (each is kind)
    # Four participations of one client, each of which moves a row of its own.
    assert (plan.noise_multiplier, plan.run) == (1.0, None)
    assert drawn.run is not None
    assert (drawn.noise_multiplier, drawn.run.noise_multiplier) == (2.0, 1.0)
    assert plan.rho == drawn.rho == 0.5
    assert plan.zcdp_delta == sensitivity.zcdp_delta(1.0)
    assert drawn.zcdp_delta == sensitivity.zcdp_delta(1.0, disjoint_participations=4)
    many = claim.check(dataclasses.replace(drawn.claim, epsilon=None, num_coordinates=2**60))
    assert many.zcdp_delta == 2**60 * FAILURE_PER_NUMBER
    # The largest shift of one participation is more than drawn noise is proved for.
    for sigma in (0.0, 1.99 / LARGEST_SHIFT):
        little = claim.check(dataclasses.replace(plan.claim, sigma=sigma, epsilon=None))
        assert (little.rho, little.zcdp_delta) == (math.inf, 0.0)
    nobody = claim.check(Claim(rows, Pattern(()), 1.0, _DELTA))
    assert (nobody.rho, nobody.zcdp_delta) == (0.0, 0.0)
    assert nobody.sensitivity.is_exact > rule.sensitivity.is_exact
    assert (plan.schema, drawn.schema) == (Schema(None, 1), Poisson(4, 1, 100, 2).schema)
    with refuses("Limit"):
        _ = rule.schema


def test_another_delta_has_another_epsilon() -> None:
    found = _guarantee().at(1e-3)
    assert found.delta == 1e-3
    assert found.epsilon == pytest.approx(gaussian_epsilon(1.0, 1e-3), rel=1e-8)
    assert found.at(_DELTA) == _guarantee()


@pytest.mark.parametrize(
    "taking_part", [Schema(2, 3), Pattern((0, 4)), Poisson(8, 1, 20, 5)], ids=str
)
def test_another_sigma_has_the_guarantee_of_its_own_claim(taking_part: Any) -> None:
    rows = banded_rows(np.ones((8, 1)))
    claims = [Claim(rows, taking_part, sigma, _DELTA) for sigma in (0.7, 2.5, 0.0)]
    proved = claim.check(claims[0])

    for each in claims:
        assert proved.at(_DELTA, each.sigma) == claim.check(each)


@pytest.mark.parametrize(
    ("factor", "is_proved"),
    [(1.0 - 2e-9, False), (1.0 - 5e-10, True), (1.0, True), (1.000009, True), (1.000011, False)],
)
def test_a_stated_epsilon_is_proved_or_of_another_run(factor: float, is_proved: bool) -> None:
    guarantee = _guarantee()
    if is_proved:
        guarantee.prove(guarantee.epsilon * factor)
    else:
        with pytest.raises(NotProved, match="is claimed"):
            guarantee.prove(guarantee.epsilon * factor)


def test_no_epsilon_is_proved_where_there_is_none() -> None:
    without_noise = claim.check(dataclasses.replace(_guarantee().claim, sigma=0.0, epsilon=None))
    without_noise.prove(None)
    for guarantee, stated in ((without_noise, 8.0), (_guarantee(), None)):
        with pytest.raises(NotProved, match="is claimed"):
            guarantee.prove(stated)
    for broken in (math.nan, -1.0, "8"):
        with pytest.raises(ValueError, match="epsilon"):
            _guarantee().prove(broken)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"sigma": "1"},
        {"delta": 0.0},
        {"delta": 1.0},
        {"epsilon": -1.0},
        {"num_rounds": 0},
        {"num_rounds": 1.5},
        {"num_coordinates": 0},
    ],
)
def test_numbers_out_of_their_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Claim(
            **{
                "rows": banded_rows(np.ones((3, 1))),
                "taking_part": Schema(1, 1),
                "sigma": 1.0,
                "delta": _DELTA,
                **values,
            }
        )


@pytest.mark.parametrize("taking_part", [Schema(1, 1), Pattern((0,)), Pattern(()), Limit(1.0)])
def test_more_rounds_than_rows_and_other_rows_are_refused(taking_part: Any) -> None:
    rows = banded_rows(np.ones((3, 1)))
    with pytest.raises(NotProved, match="rounds"):
        claim.check(Claim(rows, taking_part, 1.0, _DELTA, num_rounds=4))

    class Quiet(BandedNoise):
        pass

    for others in (Quiet(3, np.ones((3, 1))), None):
        with pytest.raises(NotProved, match="own classes"):
            claim.check(Claim(others, taking_part, 1.0, _DELTA))  # type: ignore[arg-type]


def test_draws_of_fewer_bands_or_rounds_are_refused() -> None:
    bands = np.ones((6, 2))
    bands[0, 1] = 0.0
    rows = banded_rows(bands)
    amplified = claim.check(Claim(rows, Poisson(6, 2, 100, 2), 2.0, _DELTA))
    alone = claim.check(Claim(rows, Schema(3, 2), 2.0, _DELTA))
    assert amplified.epsilon < alone.epsilon
    assert amplified.noise_multiplier == pytest.approx(2.0 / math.sqrt(2.0))
    for draws in (Poisson(6, 1, 100, 2), Poisson(5, 2, 100, 2)):
        with pytest.raises(NotProved):
            claim.check(Claim(rows, draws, 2.0, _DELTA))
    # A run that ends before its largest column: those who draw for themselves do so for all rounds.
    bands[-1, 0] = 3.0
    schemes: list[Any] = [Poisson(6, 2, 9, 2), BallsInBins(6, 2, 9, 2, 2)]
    for scheme, largest in zip(schemes, (math.sqrt(2.0), 3.0), strict=True):
        early = claim.check(Claim(banded_rows(bands), scheme, 2.0, _DELTA, num_rounds=3))
        assert early.sensitivity.value == pytest.approx(largest)
    # A Toeplitz matrix of all bands whose inverse has two.
    inverse = np.linalg.inv(np.eye(6) + np.eye(6, k=-1))
    with pytest.raises(NotProved):
        claim.check(Claim(dense_rows(inverse), Poisson(6, 2, 100, 2), 2.0, _DELTA))


def test_draws_of_as_many_bands_as_rounds_need_no_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """C of a tree has n^2 numbers, and its largest column is known without them."""
    rows = full_tree_rows(64)
    monkeypatch.setattr(sensitivity, "strategy_of", None)
    found = claim.check(Claim(rows, Poisson(64, 64, 640, 2), 2.0, _DELTA))
    assert found.sensitivity.value == pytest.approx(math.sqrt(7.0), rel=1e-14)
    with pytest.raises(NotProved, match="reach over 64 rows, and these draws need at most 63"):
        claim.check(Claim(rows, Poisson(64, 63, 640, 2), 2.0, _DELTA))


def test_a_matrix_that_is_hardly_known_costs_noise_and_has_no_certificate() -> None:
    # C[i, j] = (-3)^(i - j), exactly.
    rounds = 16
    rows = dense_rows(np.eye(rounds) + 3.0 * np.eye(rounds, k=-1))
    bound = sensitivity.of_rows(rows, rounds, Schema(1, 1))
    assert 1e-8 < bound.error / bound.value < 1e-6
    exact = math.sqrt(sum(9**i for i in range(rounds)))
    assert bound.value - bound.error <= exact <= bound.value + bound.error
    found = claim.check(Claim(rows, Schema(1, 1), 2.0 * exact, _DELTA))
    charged = sensitivity.epsilon(2.0 * exact / (bound.value + bound.error), _DELTA)
    assert found.epsilon == charged > sensitivity.epsilon(2.0 * exact / bound.value, _DELTA)
    draws = BallsInBins(rounds, rounds, 160, 10, rounds)
    with pytest.raises(NotProved, match="nearly singular"):
        claim.check(Claim(rows, draws, 2.0 * exact, _DELTA))


def test_columns_are_those_of_the_rows_as_far_as_roundings_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bands = np.ones((6, 2))
    bands[0, 1] = 0.0
    rows, draws = banded_rows(bands), BallsInBins(6, 2, 30, 5, 2)
    entries = np.ones((6, 2))
    entries[-1, 1] = 0.0
    found = claim.check(Claim(rows, draws, 3.0, _DELTA))
    assert found.run == SampledRun(draws, 3.0 / math.sqrt(2.0), StrategyColumns(entries))
    # A certificate is for all rounds of the draws: a run that stopped early has that of the whole.
    early = Claim(rows, draws, 3.0, _DELTA, num_rounds=4)
    assert claim.check(early).epsilon == found.epsilon
    assert claim.check(early).num_rounds == 4
    # Roundings stay in all later rows where rows follow from rows of Z, whatever the bands of C.
    banded = np.eye(6) + np.eye(6, k=-1)
    of_z = dense_rows(np.linalg.inv(banded) / 2.0**20)
    far = claim.check(Claim(of_z, BallsInBins(6, 6, 60, 5, 6), 3.0, _DELTA)).run
    assert far is not None
    assert far.columns is not None
    wide = 2.0**20 * np.pad(entries, ((0, 0), (0, 4)))
    np.testing.assert_allclose(far.columns.entries, wide, atol=1e-6)
    with pytest.raises(NotProved, match="reach over 6 rows, and these draws need at most 5"):
        claim.check(Claim(dense_rows(banded), BallsInBins(6, 5, 60, 5, 6), 3.0, _DELTA))
    with pytest.raises(NotProved, match="reach over 2 rows, and these draws need at most 1"):
        claim.check(Claim(rows, BallsInBins(6, 1, 60, 5, 6), 3.0, _DELTA))
    monkeypatch.setattr(IntegerRows, "largest_rounding", lambda rows: math.nan)
    with pytest.raises(NotProved, match="roundings of the rows have no finite bound"):
        claim.check(Claim(rows, draws, 3.0, _DELTA))


def test_a_certificate_counts_if_its_test_is_passed_again() -> None:
    scheme = participation.MinSeparationSampling(16, 2, 100, 10, separation=4)
    mechanism = Mechanism(factorizations.banded(16, num_bands=2), scheme, 1.2)
    found = mechanism.guarantee(1e-4, certification=Certification())
    certificate = found.claim.certificate
    assert certificate is not None
    known = dataclasses.replace(found.claim, epsilon=None)
    assert claim.check(known).epsilon == found.epsilon
    without = claim.check(dataclasses.replace(known, certificate=None))
    assert without.epsilon > 1.1 * found.epsilon
    better = dataclasses.replace(certificate, epsilon=0.7 * certificate.epsilon)
    with pytest.raises(NotProved):
        claim.check(dataclasses.replace(known, certificate=better))
