r"""Certified privacy of random participation: claims, and the Monte Carlo tests that prove them.

A claim says that a mechanism, whose dominating pair (P, Q) ``participation_laws`` has, is
(epsilon, delta)-DP. Everything that its test needs is fixed in the claim before the test draws
anything: the numbers of samples, the bets, and the seed. The test draws and answers yes or no.
If the claim is false, one of two hockey-stick divergences is too large, and the test of that one
answers yes with at most the claim's failure probability beta. What all attempts may fail with, and
those for the other noise multipliers of a search, is taken from delta before: both divergences are
tested to be below what is left. So delta covers
that the test fails, over the random numbers that it draws. Anybody can repeat the test.

**P from Q.** With an output from the law R = (P/Q)^a Q / Z, Z = E_Q (P/Q)^a (``tilted_outputs``),
and its loss L = log P/Q, the term T = Z max(0, 1 - e^(epsilon - L)) e^(-(a - 1) L) has the mean
E_P max(0, 1 - e^(epsilon - L)), the divergence. It is at most
M = Z e^(-(a - 1) epsilon) (a - 1)^(a - 1) / a^a, which is what Renyi DP of order a alone would give
for delta. So a few times log(1 / beta) M / delta samples suffice. That the mean is below delta is
shown by betting (``confidence_bounds``).

**Q from P.** Under Q, L is a convex function of independent normal numbers, because it is the
logarithm of a sum of exponentials of linear functions. Its lower tail is bounded by extrapolation
from two counts (``confidence_bounds``). At epsilon 0 both divergences are one number, the total
variation distance, and the first test is enough.

**What an attacker can do** depends on the divergence of P from Q at small epsilons, where it is not
small, and averages over outputs from P itself (a = 1), which are between 0 and 1, bound it closely.

What is tried before a claim is made (``claim_search``) has random numbers of its own. The random
numbers of a test follow from the seed and from all that is claimed, so that none are used twice.
A seed that was chosen by its result proves nothing.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import validation
from mf_aggregators.accounting import confidence_bounds
from mf_aggregators.accounting.tilted_outputs import Mechanism, TiltedOutputs, Untilted
from mf_aggregators.progress_bars import ProgressBar

_BATCH = 1024
# What rounding may do to a loss, many times over.
_ROUNDING = 1e-9
# The failure probability of all attempts together, as a share of delta.
FAILURE_SHARE = 0.01
ATTEMPTS = 4
# So many mechanisms share it as well, where a search for a noise multiplier takes the first that
# is proved to reach its target, or the best of several is chosen.
MECHANISMS = 16


class MechanismBudgetError(ValueError):
    """One result takes tests of more mechanisms than share its failure probability."""


@dataclasses.dataclass(eq=False)
class MechanismBudget:
    """How many mechanisms may still be tested for one result: for what is chosen by all tests.

    Attributes:
      left: How many. It falls with each that is tested, or that a part is made for.
    """

    left: int = MECHANISMS

    def __post_init__(self) -> None:
        if not 0 <= self.left <= MECHANISMS:
            raise MechanismBudgetError(
                f"delta pays for tests of 0 to {MECHANISMS} mechanisms, found {self.left}."
            )

    def take(self, mechanisms: int = 1) -> "MechanismBudget":
        """Returns a part of it, and takes it away.

        Args:
          mechanisms: Of how many; all of them count, whether they are tested or not.

        Raises:
          MechanismBudgetError: If fewer are left.
        """
        if mechanisms > self.left:
            raise MechanismBudgetError(
                f"one result takes Monte Carlo tests of more mechanisms than the {MECHANISMS} that "
                "its delta pays for: compare fewer of them."
            )
        part = MechanismBudget(mechanisms)
        self.left -= mechanisms
        return part


@dataclasses.dataclass(frozen=True)
class Claim:
    """That a mechanism is (epsilon, delta)-DP, and how that is tested.

    Attributes:
      epsilon: Of the claim.
      delta: Of the claim, for noise of real normal numbers.
      attempt: Which of ``ATTEMPTS`` claims of one delta this is, from 0.
      order: a, the order of the tilted outputs.
      num_samples: The samples N for P from Q; 0 where Renyi DP of order a suffices.
      bet: The bet w on them.
      num_untilted: The samples for Q from P.
      thresholds: t_0 and t_1 for the extrapolation.
      seed: What random numbers follow from, with all of the above.
    """

    epsilon: float
    delta: float
    attempt: int
    order: int
    num_samples: int
    bet: float
    num_untilted: int
    thresholds: tuple[float, float]
    seed: int

    @property
    def failure_probability(self) -> float:
        """The probability beta that the test proves the claim if it is false."""
        return failure_probability(self.delta)

    @property
    def largest_divergence(self) -> float:
        """What both divergences are tested to be below: delta less beta of all attempts."""
        return tested_delta(self.delta)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that :func:`from_dict` takes back."""
        described = dataclasses.asdict(self)
        return {
            **described,
            "thresholds": list(self.thresholds),
            "failure_probability": self.failure_probability,
        }


def from_dict(description: Mapping[str, Any]) -> Claim:
    """Returns the claim that ``to_dict`` described.

    Raises:
      ValueError: If it describes none: a number is missing, is none, or is not finite.
    """
    try:
        values = {field.name: description[field.name] for field in dataclasses.fields(Claim)}
        low, high = values.pop("thresholds")
        for name in ("epsilon", "delta", "bet"):
            values[name] = _finite(values[name])
        for name, value in values.items():
            if type(value) is not (float if name in ("epsilon", "delta", "bet") else int):
                raise TypeError(name)
        return Claim(**values, thresholds=(_finite(low), _finite(high)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{validation.shown(description)} describes no certificate.") from error


def _finite(value: Any) -> float:
    """A number of JSON as a float."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def is_proved(mechanism: Mechanism, claim: Claim, *, show_progress: bool = False) -> bool:
    """Tests a claim.

    Args:
      mechanism: What the claim is about.
      claim: The claim.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      Whether it is proved. A false claim is with probability at most beta, of random seeds.
    """
    total = claim.num_samples + claim.num_untilted
    with ProgressBar(total=total, desc="certificate", disable=not show_progress) as bar:
        return _from_without_is_small(mechanism, claim, bar) and _without_is_small(
            mechanism, claim, bar
        )


def divergences(
    mechanism: Mechanism, epsilons: Sequence[float], *, num_samples: int, failure: float, seed: int
) -> tuple[tuple[float, float], ...]:
    """Returns upper bounds on the hockey-stick divergence of P from Q, for noise of real numbers.

    Args:
      mechanism: What clients do, and the columns of C.
      epsilons: Where the divergence is asked for.
      num_samples: How many outputs are drawn from P.
      failure: The probability that any of the bounds does not hold, over what is drawn. It is
        added to each of them.
      seed: What random numbers follow from. Choose it before anything is known of the result.

    Returns:
      Pairs of an epsilon and the bound, at most 1.
    """
    outputs = TiltedOutputs(mechanism, 1)

    def sums(losses: np.ndarray) -> list[float]:
        return [float(np.sum(terms(losses, 0.0, 1, epsilon))) for epsilon in epsilons]

    key = _key(mechanism, None, f"divergences of P from Q, seed {seed}")
    means = np.sum(in_batches(outputs, key, num_samples, sums), axis=0) / num_samples
    each = failure / len(epsilons)
    return tuple(
        (epsilon, min(confidence_bounds.upper_mean(float(mean), num_samples, each) + failure, 1.0))
        for epsilon, mean in zip(epsilons, means, strict=True)
    )


def failure_probability(delta: float) -> float:
    """Returns the probability beta with which the test of a claim of a delta proves a false one."""
    return FAILURE_SHARE * delta / (ATTEMPTS * MECHANISMS)


def tested_delta(delta: float) -> float:
    """Returns what divergences are tested to be below, for a claim of a delta."""
    return delta * (1.0 - FAILURE_SHARE)


def _from_without_is_small(mechanism: Mechanism, claim: Claim, bar: Any) -> bool:
    """Whether P is near enough to Q: the loss of taking part."""
    outputs = TiltedOutputs(mechanism, claim.order)
    largest = largest_term(outputs.log_moment, claim.order, claim.epsilon)
    if largest <= claim.largest_divergence:
        return True
    if not 0.0 < claim.bet < 1.0 / (largest - claim.largest_divergence):
        return False

    def wealth(losses: np.ndarray) -> float:
        values = terms(losses, outputs.log_moment, claim.order, claim.epsilon)
        return confidence_bounds.log_wealth(values, claim.largest_divergence, claim.bet)

    key = _key(mechanism, claim, "P from Q")
    grown = sum(in_batches(outputs, key, claim.num_samples, wealth, bar))
    return grown >= -math.log(claim.failure_probability)


def _without_is_small(mechanism: Mechanism, claim: Claim, bar: Any) -> bool:
    """Whether Q is near enough to P: the loss of not taking part."""
    if claim.epsilon == 0.0:
        # Both divergences are the total variation distance, which was tested before.
        return True
    low, high = claim.thresholds
    if not low < high:
        return False

    def counts(losses: np.ndarray) -> np.ndarray:
        # Losses near a threshold are counted against the claim, and so is NaN.
        return np.array([np.sum(~(losses > low + _ROUNDING)), np.sum(losses <= high - _ROUNDING)])

    key = _key(mechanism, claim, "Q from P")
    found = in_batches(Untilted(mechanism), key, claim.num_untilted, counts, bar)
    low_count, high_count = np.sum(found, axis=0)
    tail = confidence_bounds.lower_tail(
        int(low_count),
        int(high_count),
        claim.num_untilted,
        claim.thresholds,
        claim.failure_probability,
    )
    return tail.divergence(claim.epsilon - _ROUNDING) <= claim.largest_divergence


def largest_term(log_moment: float, order: int, epsilon: float) -> float:
    """Returns M: what Renyi DP of an order gives for delta, which may be more than 1.

    Args:
      log_moment: log E_Q (P/Q)^a.
      order: a.
      epsilon: Where delta is asked for.
    """
    if order == 1:
        return 1.0 + _ROUNDING
    exponent = log_moment - (order - 1) * epsilon
    exponent += (order - 1) * math.log(order - 1) - order * math.log(order)
    return math.exp(min(exponent, 700.0)) * (1.0 + 1e-6)


def terms(losses: np.ndarray, log_moment: float, order: int, epsilon: float) -> np.ndarray:
    """Returns T of losses, rounded up.

    Args:
      losses: (m,) log P/Q of outputs tilted by an order a.
      log_moment: log E_Q (P/Q)^a.
      order: a.
      epsilon: Where the divergence is asked for.
    """
    above = losses - (epsilon - _ROUNDING)
    shares = -np.expm1(-np.maximum(above, 0.0))
    return np.asarray(
        shares * np.exp(np.minimum(log_moment - (order - 1) * (losses - _ROUNDING), 700.0))
    )


def _key(mechanism: Mechanism, claim: Claim | None, purpose: str) -> int:
    """A number that tells mechanisms, claims and purposes apart."""
    digest = hashlib.sha256(purpose.encode())
    digest.update(np.ascontiguousarray(mechanism.columns, dtype="<f8").tobytes())
    described = {
        "shape": mechanism.columns.shape,
        "sigma": mechanism.sigma,
        "law": [type(mechanism.law).__name__, dataclasses.asdict(mechanism.law)],
        "claim": None if claim is None else claim.to_dict(),
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    return int.from_bytes(digest.digest(), "big")


def in_batches(
    outputs: TiltedOutputs | Untilted,
    key: int,
    count: int,
    summary: Callable[[np.ndarray], Any],
    bar: Any = None,
) -> list[Any]:
    """Draws losses and returns what a function makes of each batch, in their order.

    Every batch has a generator of its own, so that results do not depend on how many are drawn at
    a time.
    """

    def one(batch: int) -> Any:
        size = min(_BATCH, count - batch * _BATCH)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((key, batch))))
        return size, summary(outputs.log_ratios(rng, size))

    found = []
    workers = os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(workers, 8)) as pool:
        for size, value in pool.map(one, range(-(-count // _BATCH))):
            found.append(value)
            if bar is not None:
                bar.update(size)
    return found
