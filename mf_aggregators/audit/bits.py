"""An attack on the bits of releases: it asks which sums can lead to the released numbers.

If floating-point noise is added to a floating-point sum, only some numbers can result, and which
ones depends on the sum. An attacker who knows the updates of all other clients asks, for each
released number, whether some float of noise leads to it from the sum without a client, and from the
sum with it. A sum from which no float leads to the number is refuted, at any epsilon.

Several clients are attacked at once, each in its own block of coordinates. In each round, a fair
coin for each client decides whether it takes part, and the attacker guesses the sum that is refuted
at fewer numbers of the block. Under mu-Gaussian differential privacy, no guess is right with a
probability above Phi(mu / 2), given all earlier rounds and the other coins. So the number of right
guesses is stochastically at most binomial, and too many right guesses refute the claim.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import scipy.stats

from mf_aggregators.audit import Claim, process_of, statistics
from mf_aggregators.kernel.numbers import BoolArray, FloatArray
from mf_aggregators.progress_bars import ProgressBar

# The float types that models have and that TensorFlow adds in.
_DTYPES = ("float32", "float64")
# The number of attacked clients, and the number of coordinates in a client's block.
_BLOCKS, _BLOCK = 4, 256
_NORM = 0.9
# The number of guesses is chosen so that this share of right guesses refutes the claim.
_SHARE_RIGHT = 0.99
_FEWEST_TRIALS, _MOST_TRIALS = 40, 600
# The other clients' sum in each coordinate, in standard deviations of the noise. It is so large
# that sums often cross powers of two, where the spacing of floats changes.
_SUM_OVER_NOISE = 0.15
_MOST_CLIENTS = 200
# How many neighbours of the best-fitting float of noise are tried on each side.
_NEIGHBOURS = 3


@dataclasses.dataclass(frozen=True)
class BitsResult:
    """The result of an attack on bits.

    Attributes:
      claim: The claim that was attacked.
      trials: The number of guesses for each float type.
      right: The number of right guesses, for the float type with more of them; about half of the
        guesses are right for an intact mechanism.
      largest_right: An intact mechanism has more right guesses than this only in false alarms.
      mu_lower_bound: The largest mu that was refuted.
      false_alarm_rate: The largest probability with which ``exceeded`` is true of an intact
        mechanism.
    """

    claim: Claim
    trials: int
    right: int
    largest_right: int
    mu_lower_bound: float
    false_alarm_rate: float

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.right > self.largest_right


def audit_bits(
    build_aggregator: Callable[[], object],
    claim: Claim,
    *,
    false_alarm_rate: float = 1e-4,
    seed: int | None = None,
    show_progress: bool = False,
) -> BitsResult:
    """Attacks the bits of an aggregator's releases, in float32 and in float64.

    A mechanism that adds floating-point noise to floating-point sums is refuted almost certainly,
    at noise multipliers from 0.2 to 30. If there is so little noise that no number of guesses
    refutes the claim, ``largest_right`` is the number of trials.

    Args:
      build_aggregator: As for :func:`~mf_aggregators.audit.audit`.
      claim: The claim about the aggregator.
      false_alarm_rate: The largest probability of ``exceeded`` for an intact mechanism.
      seed: The seed of clients and coins; None for a new one.
      show_progress: Whether to show a bar on standard error.

    Returns:
      How many guesses were right.

    Raises:
      ValueError: If a number is out of its range.
    """
    rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    most_right = float(scipy.stats.norm.cdf(claim.mu / 2.0))
    rate_of_each = rate / len(_DTYPES)
    runs = math.ceil(_trials(most_right, rate_of_each) / (_BLOCKS * claim.num_rounds))
    generator = np.random.default_rng(seed)
    factory, right = build_aggregator(), 0
    rounds = runs * claim.num_rounds
    trials = rounds * _BLOCKS
    with ProgressBar(
        total=rounds * len(_DTYPES), desc="audit of bits", unit="round", disable=not show_progress
    ) as progress:
        for dtype in _DTYPES:
            attack = _Attack(factory, claim, np.dtype(dtype))
            found = [attack.right_guesses(generator, progress.update) for _ in range(runs)]
            right = max(right, sum(found))
    wrong = statistics.upper_bound_of_rate(trials - right, trials, rate_of_each)
    return BitsResult(
        claim,
        trials,
        right,
        int(scipy.stats.binom.isf(rate_of_each, trials, most_right)),
        2.0 * float(scipy.stats.norm.isf(wrong)) if wrong < 0.5 else 0.0,
        rate,
    )


def _trials(most_right: float, rate: float) -> int:
    """Returns the number of guesses, so that a share of _SHARE_RIGHT refutes the claim."""
    for trials in range(_FEWEST_TRIALS, _MOST_TRIALS):
        if scipy.stats.binom.sf(math.floor(_SHARE_RIGHT * trials), trials, most_right) <= rate:
            return trials
    return _MOST_TRIALS


class _Attack:
    """Runs with clients of one float type, and the attacker's guesses."""

    def __init__(
        self, factory: object, claim: Claim, dtype: np.dtype[np.float32] | np.dtype[np.float64]
    ) -> None:
        self._initialize, self._next = process_of(factory, dtype.type, _BLOCKS * _BLOCK)
        self._claim, self._dtype = claim, dtype
        # The other clients have entries in all blocks.
        largest = _NORM * claim.clip_norm / math.sqrt(_BLOCKS * _BLOCK)
        noise = claim.mechanism.noise_multiplier * claim.clip_norm
        others = math.ceil(_SUM_OVER_NOISE * noise / largest)
        self._num_others = min(max(others, 1), _MOST_CLIENTS)
        # Updates have so few bits that floating-point sums of all clients are exact in any order.
        bits = np.finfo(dtype).nmant - 1 - math.ceil(math.log2(self._num_others + 1))
        self._unit = 2.0 ** (math.floor(math.log2(largest)) - bits)
        self._largest = math.floor(largest / self._unit)

    def right_guesses(
        self, generator: np.random.Generator, report_rounds: Callable[[int], object]
    ) -> int:
        """Returns the number of right guesses in a run."""
        state, right = self._initialize(), 0
        owners = np.repeat(np.arange(_BLOCKS), _BLOCK)
        for _ in range(self._claim.num_rounds):
            other, update = self._update(generator), self._update(generator)
            are_there = generator.integers(2, size=_BLOCKS).astype(bool)
            attacked = [
                np.where(owners == block, update, self._dtype.type(0))
                for block in np.flatnonzero(are_there)
            ]
            clients = [other] * self._num_others + attacked
            state, mean, _ = self._next(state, clients)
            without = other * self._dtype.type(self._num_others)
            refuted_without, refuted_with = (
                self._refuted(mean, sums).reshape(_BLOCKS, _BLOCK).sum(axis=1)
                for sums in (without, without + update)
            )
            coins = generator.integers(2, size=_BLOCKS).astype(bool)
            guesses = np.where(
                refuted_with == refuted_without, coins, refuted_with < refuted_without
            )
            right += int(np.sum(guesses == are_there))
            report_rounds(1)
        return right

    def _update(self, generator: np.random.Generator) -> FloatArray:
        integers = generator.integers(self._largest // 2, self._largest, _BLOCKS * _BLOCK)
        signs = generator.choice([-1, 1], _BLOCKS * _BLOCK)
        return np.asarray((signs * integers * self._unit).astype(self._dtype))

    def _refuted(self, released: FloatArray, sums: FloatArray) -> BoolArray:
        """Returns the numbers at which no float of noise leads from the sum to the release."""
        clients = self._dtype.type(self._claim.clients_per_round)
        noise = released * clients - sums
        above = below = noise
        is_possible = (sums + noise) / clients == released
        for _ in range(_NEIGHBOURS):
            above, below = (
                np.nextafter(above, self._dtype.type(np.inf)),
                np.nextafter(below, self._dtype.type(-np.inf)),
            )
            for each in (above, below):
                is_possible |= (sums + each) / clients == released
        return np.asarray(~is_possible)
