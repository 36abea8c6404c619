"""Finds the epsilon that can be proved of a mechanism, and the noise that a target needs.

What is tried here (*pilots*) has random numbers of its own and proves nothing. Epsilons and noise
multipliers that come out of it alone are estimates. Only ``certificates.is_proved`` proves.
"""

import functools
import hashlib
import math
from collections.abc import Callable

import numpy as np
import scipy.optimize

from mf_aggregators.accounting import certificates, confidence_bounds
from mf_aggregators.accounting.certificates import Claim
from mf_aggregators.accounting.tilted_outputs import (
    Mechanism,
    TiltedOutputs,
    Untilted,
    possible_orders,
)

# The most samples of one claim, and the most samples times rounds.
_MOST_SAMPLES = 2**21
_MOST_NUMBERS = 6_000_000_000
# Samples of pilots: few to begin with, more where few of them count.
_FIRST_PILOT, _LARGEST_PILOT = 2**13, 2**17
_PILOT_WITHOUT = 2**14
_SAMPLES_WITHOUT = (2**16, 2**18)
# How much of delta the divergence of a pilot may be; nearer to 1 costs more samples.
_SHARE = 0.9
# The logarithm of wealth has about the standard deviation sqrt(2 x) where its mean is x. Samples
# are so many that it is large enough even if it is so many deviations below its mean.
_DEVIATIONS = 2.5
# An order is worth its larger table if it lowers the largest term so much.
_WORTHWHILE = 0.7
_RELATIVE_STEPS = (0.0, 0.005, 0.02, 0.06)
# A search for an epsilon by bisection takes no more steps, and one upwards no more of its smallest
# step and no more in all. Losses are not known to less than the least epsilon.
_MOST_HALVINGS = 60
_UPWARD_STEP, _SMALL_STEPS, _MOST_STEPS = 0.02, 40, 80
_LEAST_EPSILON = 1e-8


class SampleBudgetError(ValueError):
    """A claim takes more samples than may be drawn.

    Attributes:
      num_samples: How many it would take, by a pilot; infinity where it is likely to be false.
    """

    def __init__(self, message: str, num_samples: float) -> None:
        super().__init__(message)
        self.num_samples = num_samples


def most_samples(num_rounds: int) -> int:
    """Returns how many samples a claim about so many rounds may take: minutes on two cores."""
    return max(min(_MOST_SAMPLES, _MOST_NUMBERS // num_rounds), _FIRST_PILOT)


def proved_claim(
    mechanism: Mechanism,
    delta: float,
    *,
    below: float = math.inf,
    seed: int = 0,
    max_samples: int | None = None,
    show_progress: bool = False,
) -> Claim | None:
    """Returns a proved claim with a small epsilon.

    Args:
      mechanism: What the claim is about.
      delta: Of the claim, above 0 and below 1.
      below: An epsilon that is known to hold: no claim of a larger one is made.
      seed: What all random numbers follow from, chosen before anything is known of its result.
      max_samples: The most samples of a claim; :func:`most_samples` by default.
      show_progress: Whether to show progress bars on standard error.

    Returns:
      The claim; None if none with an epsilon below ``below`` could be proved.
    """
    limit = most_samples(mechanism.columns.shape[0]) if max_samples is None else max_samples
    found = _smallest_epsilon(mechanism, delta, below, seed, limit)
    if found is None:
        return None
    estimate, pilot = found
    for attempt, step in enumerate(_RELATIVE_STEPS):
        epsilon = estimate * (1.0 + step)
        if not epsilon < below:
            return None
        try:
            claim = _claim_by(pilot, mechanism, epsilon, delta, attempt, seed, limit)
        except SampleBudgetError:
            continue
        if certificates.is_proved(mechanism, claim, show_progress=show_progress):
            return claim
    return None


def claim_of(
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    attempt: int = 0,
    *,
    seed: int = 0,
    max_samples: int | None = None,
) -> Claim:
    """Returns a claim that is likely to be proved, with what its test needs.

    Args:
      mechanism: What the claim is about.
      epsilon: Of the claim.
      delta: Of the claim.
      attempt: Which of the claims for this delta it is, from 0 to ``ATTEMPTS`` - 1.
      seed: As in :func:`proved_claim`.
      max_samples: As there.

    Raises:
      SampleBudgetError: If it takes more samples than that.
    """
    limit = most_samples(mechanism.columns.shape[0]) if max_samples is None else max_samples
    outputs = _best_outputs(mechanism, epsilon, delta)
    pilot = _Pilot(mechanism, outputs, delta, seed, limit)
    pilot.grow_for(epsilon)
    return _claim_by(pilot, mechanism, epsilon, delta, attempt, seed, limit)


def _claim_by(
    pilot: "_Pilot",
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    attempt: int,
    seed: int,
    limit: int,
) -> Claim:
    """The claim of an epsilon that a pilot says how to test."""
    bet, needed = pilot.needed(epsilon)
    if needed > limit:
        found = f"about {needed:.2g} samples" if math.isfinite(needed) else "a larger epsilon"
        raise SampleBudgetError(
            f"epsilon {epsilon:.6g} at delta {delta:.3g} cannot be certified with {limit} samples: "
            f"it would take {found}. Use a larger delta or epsilon, or more samples.",
            needed,
        )
    without = _Without(mechanism, delta, seed).thresholds(epsilon)
    if without is None:
        raise SampleBudgetError(
            f"epsilon {epsilon:.6g} at delta {delta:.3g} cannot be certified for outputs without "
            f"the client with {_SAMPLES_WITHOUT[-1]} samples: use a larger delta or epsilon.",
            math.inf,
        )
    thresholds, num_untilted = without
    return Claim(
        epsilon=epsilon,
        delta=delta,
        attempt=attempt,
        order=pilot.order,
        num_samples=math.ceil(needed),
        bet=bet,
        num_untilted=num_untilted,
        thresholds=thresholds,
        seed=seed,
    )


def estimated_noise_multiplier(
    mechanism_of: Callable[[float], Mechanism],
    epsilon: float,
    delta: float,
    enough: float,
    least: float,
    *,
    seed: int = 0,
    max_samples: int | None = None,
    relative_tolerance: float = 1e-3,
    pilot_samples: int = _FIRST_PILOT,
) -> float:
    """Returns a noise multiplier for which a claim is likely to be proved: an estimate.

    Args:
      mechanism_of: Takes a noise multiplier and returns the mechanism.
      epsilon: The target.
      delta: Of the target.
      enough: A noise multiplier that suffices.
      least: The smallest that is tried.
      seed: As in :func:`proved_claim`.
      max_samples: As there.
      relative_tolerance: To which the estimate is searched for; pilots are less exact.
      pilot_samples: The samples of each pilot, or more where few of them count.

    Returns:
      The estimate, at most ``enough``.
    """

    def excess(log_sigma: float) -> float:
        mechanism = mechanism_of(math.exp(log_sigma))
        limit = most_samples(mechanism.columns.shape[0]) if max_samples is None else max_samples
        outputs = _best_outputs(mechanism, epsilon, delta)
        pilot = _Pilot(mechanism, outputs, delta, seed, limit, pilot_samples)
        pilot.grow_for(epsilon)
        return pilot.excess(epsilon)

    high, low = math.log(enough), math.log(least)
    step = math.log(1.5)
    below = high
    while below > low:
        below = max(low, below - step)
        if excess(below) > 0.0:
            break
        high = below
    else:
        return math.exp(high)
    if high == math.log(enough) and excess(high) > 0.0:
        return enough
    root = scipy.optimize.brentq(excess, below, high, xtol=relative_tolerance, rtol=1e-9)
    return min(math.exp(root + relative_tolerance), enough)


class _Pilot:
    """Losses of tilted outputs, drawn to find out what can be claimed."""

    def __init__(
        self,
        mechanism: Mechanism,
        outputs: TiltedOutputs,
        delta: float,
        seed: int,
        limit: int,
        samples: int = _FIRST_PILOT,
    ) -> None:
        self._outputs = outputs
        self._rounds = mechanism.columns.shape[0]
        self._mean = certificates.tested_delta(delta)
        self._log_failure = math.log(certificates.failure_probability(delta))
        self._seed, self._limit = seed, limit
        self._losses = np.zeros(0)
        self._grow(min(samples, limit))

    @property
    def order(self) -> int:
        """The order of its outputs."""
        return self._outputs.order

    def _grow(self, count: int) -> None:
        key = _pilot_key(self._seed, self._outputs.order, self._rounds)
        self._losses = np.concatenate(
            certificates.in_batches(self._outputs, key, count, lambda losses: losses)
        )

    def grow_for(self, epsilon: float) -> None:
        """Draws more samples if few of them count for an epsilon."""
        largest = self.largest(epsilon)
        needed = 20.0 * largest / self._mean if largest > self._mean else 0.0
        count = min(2 ** math.ceil(math.log2(max(needed, 1.0))), _LARGEST_PILOT, self._limit)
        if count > len(self._losses):
            self._grow(count)

    def largest(self, epsilon: float) -> float:
        """The largest term."""
        outputs = self._outputs
        return certificates.largest_term(outputs.log_moment, outputs.order, epsilon)

    def _with_largest(self, epsilon: float) -> np.ndarray:
        """Terms, and largest ones that add a standard error to their mean, at least one."""
        outputs, largest = self._outputs, self.largest(epsilon)
        values = certificates.terms(self._losses, outputs.log_moment, outputs.order, epsilon)
        error = float(np.std(values)) * math.sqrt(len(values))
        return np.append(values, np.full(1 + int(error / largest), largest))

    def needed(self, epsilon: float) -> tuple[float, float]:
        """The bet, and the samples that its test takes; infinity where it is likely to fail."""
        largest = self.largest(epsilon)
        if largest <= self._mean:
            return 0.0, 0.0
        bet, growth = confidence_bounds.best_bet(self._with_largest(epsilon), self._mean, largest)
        if growth <= 0.0:
            return bet, math.inf
        spread = math.sqrt(0.5) * _DEVIATIONS
        return bet, (spread + math.sqrt(spread**2 - self._log_failure)) ** 2 / growth

    def excess(self, epsilon: float) -> float:
        """Positive if a claim is not worth trying; continuous and decreasing in epsilon."""
        largest = self.largest(epsilon)
        if largest <= self._mean:
            # Of a huge epsilon, no float is as small as the term.
            return math.log(max(largest / self._mean, 1e-300)) - 1.0
        too_large = math.log(float(np.mean(self._with_largest(epsilon))) / (_SHARE * self._mean))
        if too_large > 0.0:
            return too_large + 1e-3
        # Another pilot may ask for more.
        needed = 1.5 * self.needed(epsilon)[1]
        return max(too_large, math.log(min(needed, 1e300) / self._limit))


def _smallest_epsilon(
    mechanism: Mechanism, delta: float, below: float, seed: int, limit: int
) -> tuple[float, "_Pilot"] | None:
    """The smallest epsilon that is worth a claim, below ``below``, if any, and its pilot."""
    high = below
    orders = _all_outputs(mechanism)
    if not orders:
        return None
    mean = certificates.tested_delta(delta)
    for outputs in orders:
        if outputs.order > 1:
            # Here Renyi DP of this order suffices.
            a = outputs.order
            constant = (a - 1) * math.log(a - 1) - a * math.log(a)
            renyi = (outputs.log_moment + constant - math.log(mean)) / (a - 1)
            high = min(high, renyi + 1e-5)
    if math.isinf(high):
        return None
    high = max(high, 1e-6)
    for _ in range(2):
        # The best order for about where epsilon is.
        best = min(
            orders, key=lambda each: certificates.largest_term(each.log_moment, each.order, high)
        )
        pilot = _Pilot(mechanism, best, delta, seed, limit)
        pilot.grow_for(0.8 * high)
        found = _root(pilot.excess, high)
        if found is None:
            break
        high = found
    if high >= below:
        return None
    # Each step upwards asks the same losses.
    without = _Without(mechanism, delta, seed)
    tested = _first_upwards(lambda each: without.thresholds(each) is not None, high, below)
    return None if tested is None else (tested, pilot)


def _first_upwards(is_enough: Callable[[float], bool], start: float, below: float) -> float | None:
    """About the smallest epsilon from a start on, below ``below``, that is enough; None if none.

    Args:
      is_enough: Of an epsilon; true of all larger ones, too.
      start: The first that is tried, at least 0.
      below: None of this size is tried; may be infinite.
    """
    tried: float | None = None
    candidate, step = start, _UPWARD_STEP
    for number in range(_MOST_STEPS):
        if not candidate < below:
            break
        if is_enough(candidate):
            return candidate if tried is None else _between(is_enough, tried, candidate)
        if number >= _SMALL_STEPS:
            # Farther than pilots are wrong by.
            step *= 2.0
        tried, candidate = candidate, max(candidate * (1.0 + step), _LEAST_EPSILON)
    return None


def _between(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    """An epsilon that is enough, of two of which the larger one is: no step above the least."""
    for _ in range(_MOST_HALVINGS):
        if high <= (1.0 + 1.01 * _UPWARD_STEP) * low or high <= _LEAST_EPSILON:
            break
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _root(excess: Callable[[float], float], high: float) -> float | None:
    """The smallest epsilon up to ``high`` without excess; None if ``high`` has one."""
    if excess(high) > 0.0:
        return None
    if excess(0.0) <= 0.0:
        return 0.0
    low = 0.0
    for _ in range(_MOST_HALVINGS):
        if high - low <= 2e-4 * high or high <= _LEAST_EPSILON:
            break
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return high


def _all_outputs(mechanism: Mechanism) -> list[TiltedOutputs]:
    """Outputs of all orders whose tables are small enough, as long as their moments are finite."""
    found = []
    for order in possible_orders(mechanism):
        outputs = TiltedOutputs(mechanism, order)
        if not math.isfinite(outputs.log_moment):
            break
        found.append(outputs)
    return found


def _best_outputs(mechanism: Mechanism, epsilon: float, delta: float) -> TiltedOutputs:
    """The outputs whose largest term at an epsilon is least, but for larger tables."""
    best = TiltedOutputs(mechanism, 1)
    mean = certificates.tested_delta(delta)
    for order in possible_orders(mechanism)[1:]:
        least = certificates.largest_term(best.log_moment, best.order, epsilon)
        if least <= mean:
            break
        outputs = TiltedOutputs(mechanism, order)
        if not math.isfinite(outputs.log_moment):
            break
        largest = certificates.largest_term(outputs.log_moment, order, epsilon)
        if largest < _WORTHWHILE * least:
            best = outputs
        elif order > 2:
            break
    return best


class _Without:
    """Losses of outputs without the client, drawn to find out how what Q is from P is tested."""

    def __init__(self, mechanism: Mechanism, delta: float, seed: int) -> None:
        self._mechanism, self._seed = mechanism, seed
        self._mean = certificates.tested_delta(delta)
        self._failure = certificates.failure_probability(delta)

    @functools.cached_property
    def _losses(self) -> np.ndarray:
        key = _pilot_key(self._seed, 0, self._mechanism.columns.shape[0])
        outputs = Untilted(self._mechanism)
        drawn = certificates.in_batches(outputs, key, _PILOT_WITHOUT, lambda losses: losses)
        return np.sort(np.concatenate(drawn))

    def thresholds(self, epsilon: float) -> tuple[tuple[float, float], int] | None:
        """Thresholds and numbers of samples that are likely to bound what Q is from P."""
        if epsilon == 0.0:
            # The test of P from Q is of the same number.
            return (0.0, 0.0), 0
        losses = self._losses
        for samples in _SAMPLES_WITHOUT:
            best = (math.inf, (0.0, 0.0))
            for low_count in (8, 16, 32, 64, 128, 256, 1024, 4096):
                for high_count in (_PILOT_WITHOUT // 2, _PILOT_WITHOUT // 8):
                    thresholds = (float(losses[low_count]), float(losses[high_count]))
                    if low_count >= high_count or not thresholds[0] < thresholds[1]:
                        continue
                    scale = samples / _PILOT_WITHOUT
                    # The count in the pilot may have been small by chance.
                    counts = (
                        int(scale * (low_count + 2.0 * math.sqrt(low_count))),
                        int(scale * (high_count - 2.0 * math.sqrt(high_count))),
                    )
                    tail = confidence_bounds.lower_tail(*counts, samples, thresholds, self._failure)
                    best = min(best, (tail.divergence(epsilon), thresholds))
            if best[0] < 0.9 * self._mean:
                return best[1], samples
        return None


def _pilot_key(seed: int, order: int, num_rounds: int) -> int:
    digest = hashlib.sha256(f"pilot {seed} {order} {num_rounds}".encode()).digest()
    return int.from_bytes(digest, "big")
