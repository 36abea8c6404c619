"""Finds the epsilon that can be certified of a run, and the noise that a target needs.

What is tried here are *tuning samples*, which have random numbers of their own and prove nothing.
Epsilons and noise multipliers that come out of them alone are estimates. Only the kernel proves
(``certificate.check_certificate``).

Certificates that were found are kept in a directory, so that no plan or statement searches twice.
An entry has a name made of everything that its certificate follows from, the version of the
accounting included. It is written whole or not at all, and a damaged one is computed again. Whoever
can write into the directory can make any entry, so that the kernel tests a certificate before it is
returned, once in each process: the same test, which takes most of the time of search and proof.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import scipy.optimize

from mf_aggregators import accounting, atomic_files
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.certificate import (
    MECHANISMS,
    Certificate,
    DominatingPair,
    ImportanceSampler,
    dominating_pair,
)
from mf_aggregators.kernel.losses import SampledRun
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES, TailError, delta_left
from mf_aggregators.progress_bars import ProgressBar

# Cached certificates of another version are computed again. Raise it whenever a number of the
# accounting changes: a test holds golden values of all its modules against it.
ACCOUNTING_VERSION = 5

# The folder of the user's cache directory that certificates are kept in by default.
FOLDER = "certificates"

# With less noise no epsilon is searched for: a client that is drawn shows itself.
_LEAST_AMPLIFIED = 0.1
# The most samples of one test, and the most samples times rounds.
_MOST_SAMPLES = 2**21
_MOST_NUMBERS = 6_000_000_000
# Tuning samples: how many at first, and at most. Where the largest term is above the tested mean,
# there are at least _FOR_LARGEST times the quotient of the two, if the most allows it.
_FIRST_TUNING, _MOST_TUNING = 2**13, 2**17
_FOR_LARGEST = 20.0
# For rough estimates. Farther from the target than this, in the logarithm, the first ones decide.
_FIRST_ROUGH, _FOR_LARGEST_ROUGH, _CLEAR = 2**12, 4.0, 1.0
# To which estimates of noise multipliers are searched for; tuning samples are less exact.
_TOLERANCE, _ROUGH_TOLERANCE = 1e-3, 1e-2
# How much of delta the divergence of tuning samples may be; nearer to 1 costs more samples.
_SHARE = 0.9
# The logarithm of wealth has about the standard deviation sqrt(2 x) if its mean is x. There are
# enough samples for a logarithm that is this number of deviations below its mean.
_DEVIATIONS = 2.5
# A higher order has a larger table: it has to lower the largest term to this share.
_WORTHWHILE = 0.7
_RELATIVE_STEPS = (0.0, 0.005, 0.02, 0.06)
# The most steps of a bisection. Of a search upwards: its first step, how many of that size, and how
# many in all. Losses are not known to less than the least epsilon.
_MOST_HALVINGS = 60
_UPWARD_STEP, _SMALL_STEPS, _MOST_STEPS = 0.02, 40, 80
_LEAST_EPSILON = 1e-8
# A little more than a step, as a share of where it ends.
_STEP_DOWN = 1.01 * _UPWARD_STEP / (1.0 + 1.01 * _UPWARD_STEP)
# The first relative step to a larger noise multiplier if the certified epsilon is too large.
_RELATIVE_STEP = 2e-3
# A search for a noise multiplier that may test fewer mechanisms begins with more noise.
_TESTS_OF_SMALL_STEPS = 5
# Relative distance of bets to the largest bet that keeps wealth positive.
_MARGIN = 1e-6
# The logarithm to base 2 of the numbers that are drawn of Q for tuning where outputs have few.
_POWER_OF_NUMBERS = 27


@dataclasses.dataclass(frozen=True)
class Certification:
    """How epsilons are certified.

    Attributes:
      seed: What all random numbers follow from. Choose it before anything is known of its
        result.
      max_samples: The most samples of a test; as many as take minutes by default.
      directory: Where certificates are kept, to be proved again; None for nowhere.
      show_progress: Whether to show progress bars on standard error.
      most_tests: The most mechanisms that a search for one noise multiplier tests. Delta pays for
        16: if one of several results is chosen, share them out among their searches.

    Raises:
      ValueError: If the seed is no integer of at least 0, ``max_samples`` none of at least 1,
        ``most_tests`` none from 1 to 16, or another attribute is of another type.
    """

    seed: int = 0
    max_samples: int | None = None
    directory: pathlib.Path | None = None
    show_progress: bool = False
    # The guarantee of a result is another one.
    most_tests: int = MECHANISMS // 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", numbers.integer_at_least(self.seed, 0, "seed"))
        numbers.set_positive_integers(self, "max_samples", "most_tests")
        if self.most_tests > MECHANISMS:
            raise ValueError(
                f"delta pays for tests of {MECHANISMS} mechanisms, found most_tests of "
                f"{self.most_tests}: compare fewer of them."
            )
        if not isinstance(self.directory, pathlib.Path | None):
            raise ValueError(f"directory must be a path or None, found {self.directory!r}.")
        if type(self.show_progress) is not bool:
            raise ValueError(f"show_progress must be a bool, found {self.show_progress!r}.")

    @classmethod
    def default(cls, *, show_progress: bool = False) -> "Certification":
        """Returns how epsilons are certified by default: seed 0, kept in the user's cache.

        Args:
          show_progress: Whether to show progress bars on standard error.
        """
        return cls(directory=atomic_files.find_cache(FOLDER), show_progress=show_progress)

    def amplified(self, run: SampledRun, delta: float) -> "Amplified":
        """Returns the epsilon of a run of clients who draw for themselves, and its certificate.

        One mechanism is tested.

        Args:
          run: The run.
          delta: The delta of the guarantee.

        Raises:
          TailError: If so little noise cannot be accounted for.
          ValueError: If delta is out of its range, or the columns do not fit the scheme.
        """
        return _amplified(run, delta, self, math.inf)

    def calibrated(self, run: SampledRun, target: float, delta: float) -> float:
        """Returns a noise multiplier with a certified epsilon of at most a target.

        At most ``most_tests`` are tested. If none of them is proved, it is the one that suffices
        without amplification.

        Args:
          run: The run; its own noise does not matter.
          target: The epsilon that is to hold.
          delta: As in :meth:`amplified`.
        """
        delta = numbers.delta(delta)
        enough = _enough(run, target, delta)
        found, step = self.estimated(run, target, delta), _RELATIVE_STEP
        for _ in range(_TESTS_OF_SMALL_STEPS - self.most_tests):
            found, step = found * (1.0 + step), 2.0 * step
        for _ in range(self.most_tests):
            if found >= enough:
                break
            # Less noise than can be amplified counts as a test, and so does one without a test.
            with contextlib.suppress(TailError, _AboveTargetError):
                tried = dataclasses.replace(run, sigma=found)
                if _amplified(tried, delta, self, target).epsilon <= target:
                    return found
            found, step = found * (1.0 + step), 2.0 * step
        return enough

    def estimated(
        self, run: SampledRun, target: float, delta: float, *, is_rough: bool = False
    ) -> float:
        """Returns about the noise multiplier of :meth:`calibrated`, by tuning samples alone.

        Args:
          run: As in :meth:`calibrated`.
          target: As there.
          delta: As there.
          is_rough: Whether an error of a few per cent is allowed, for a fraction of the time.

        Returns:
          The estimate, at most the noise multiplier that suffices without amplification.
        """
        enough = _enough(run, target, delta)
        known = dataclasses.replace(run, sigma=enough)
        # Refuses columns that do not fit the scheme.
        dominating_pair(known)
        try:
            left = delta_left(delta, known.amplified_part, DEFAULT_NUM_COORDINATES)
        except TailError:
            return enough
        tolerance = _ROUGH_TOLERANCE if is_rough else _TOLERANCE

        def excess(sigma: float) -> float:
            pair = dominating_pair(dataclasses.replace(run, sigma=sigma))
            limit = self.max_samples or _most_samples(pair.num_outputs)
            # A small table and few samples decide where much noise is missing, or too much.
            small = ImportanceSampler(pair, 2 if 2 in pair.orders else 1)
            tuning = _TuningSamples(pair, small, left, self.seed, limit, _FIRST_ROUGH)
            if not tuning.is_clear(target):
                first = _FIRST_ROUGH if is_rough else _FIRST_TUNING
                sampler = _best_sampler(pair, target, left)
                tuning = _TuningSamples(pair, sampler, left, self.seed, limit, first)
                tuning.grow_for(target, _FOR_LARGEST_ROUGH if is_rough else _FOR_LARGEST)
            return tuning.excess(target)

        found = accounting.least_noise(
            excess, enough, _LEAST_AMPLIFIED, largest_step=1.5, tolerance=tolerance
        )
        return found if is_rough else min(found * (1.0 + tolerance), enough)


@dataclasses.dataclass(frozen=True)
class Amplified:
    """An amplified epsilon with its certificate.

    Attributes:
      epsilon: Of the run, for noise as it is drawn.
      certificate: Its certificate; None where there is none, or nothing is amplified.
    """

    epsilon: float
    certificate: Certificate | None


# Takes a candidate and a callback for progress, and says whether the candidate is proved.
_Test: TypeAlias = Callable[[Certificate, Callable[[int], object]], bool]


class _AboveTargetError(Exception):
    """The smallest epsilon that is worth a test is above a target: nothing was tested."""


def _most_samples(num_rounds: int) -> int:
    """Returns the most samples of a test for a number of rounds: minutes on two cores."""
    return max(min(_MOST_SAMPLES, _MOST_NUMBERS // num_rounds), _FIRST_TUNING)


def _amplified(
    run: SampledRun, delta: float, certification: Certification, target: float
) -> "Amplified":
    """The epsilon and its certificate; _AboveTargetError, and no test, above a target."""
    delta = numbers.delta(delta)
    unamplified, refused = math.inf, None
    try:
        unamplified = run.epsilon(delta)
    except TailError as error:
        refused = error
    amplifying = dataclasses.replace(run, sigma=max(run.sigma, _LEAST_AMPLIFIED))
    pair = dominating_pair(amplifying)

    def is_proved(candidate: Certificate, advance: Callable[[int], object]) -> bool:
        return certificates.check_certificate(candidate, run, delta, advance=advance)

    found = None
    if unamplified > 0.0 and run.sigma >= _LEAST_AMPLIFIED:
        try:
            left = delta_left(delta, run.amplified_part, DEFAULT_NUM_COORDINATES)
            found = _certificate_of(pair, left, unamplified, certification, is_proved, target)
        except TailError as error:
            refused = error
    if found is not None:
        return Amplified(found.epsilon, found)
    if refused is not None and math.isinf(unamplified):
        raise refused
    return Amplified(unamplified, None)


def _enough(run: SampledRun, target: float, delta: float) -> float:
    """The noise multiplier that suffices against an adversary who knows all draws."""
    disjoint = run.disjoint_participations
    alone = accounting.noise_multiplier(target, delta, disjoint_participations=disjoint)
    return alone * run.norm_of_all


def _certificate_of(
    pair: DominatingPair,
    delta: float,
    below: float,
    certification: Certification,
    test: _Test,
    target: float,
) -> Certificate | None:
    """A proved certificate with a small epsilon, found anew or kept and proved again.

    With an ``atomic_files.CacheWarning``, it was computed because its entry is damaged or is not
    proved, or it could not be cached. Other arguments and the result are those of :func:`_proved`.
    """
    seed, most = certification.seed, certification.max_samples

    def compute() -> Certificate | None:
        return _proved(pair, delta, certification, below=below, test=test, target=target)

    if certification.directory is None:
        return compute()
    columns = np.ascontiguousarray(pair.columns, dtype="<f8")
    description = {
        "columns": hashlib.sha256(columns.tobytes()).hexdigest(),
        **pair.description(),
        "delta": delta,
        "below": None if math.isinf(below) else below,
        "seed": seed,
        "max_samples": most,
        "accounting": ACCOUNTING_VERSION,
        "numpy": np.__version__,
    }
    # Entries of the cache are read from JSON, so that descriptions are compared in its types.
    description = json.loads(json.dumps(description))  # noqa: TID251

    def kept(contents: Mapping[str, Any] | None) -> Certificate | None:
        """The certificate of an entry, if it is one that was asked for, and proved again."""
        if contents is None:
            return None
        values = {field.name: contents[field.name] for field in dataclasses.fields(Certificate)}
        found = Certificate(**{**values, "thresholds": tuple(values["thresholds"])})
        is_asked_for = (
            found.delta == delta
            and found.seed == seed
            and found.epsilon < below
            and found.attempt < certificates.ATTEMPTS
            and found.order in pair.orders
            and found.num_samples <= (most or _most_samples(pair.num_outputs))
            and (found.num_untilted in _sample_sizes_of_q(pair) or found.epsilon == 0.0)
        )
        if not (is_asked_for and _passes(test, found, certification.show_progress)):
            raise ValueError("its certificate is not proved")
        return found

    return atomic_files.fetch(
        certification.directory / f"{atomic_files.digest(description)[:32]}.json",
        description,
        compute,
        field="claim",
        to_json=lambda certificate: None if certificate is None else certificate.to_dict(),
        from_json=kept,
    )


def _proved(
    pair: DominatingPair,
    delta: float,
    certification: Certification,
    *,
    below: float = math.inf,
    test: _Test | None = None,
    target: float = math.inf,
) -> Certificate | None:
    """Returns a proved certificate with a small epsilon.

    Args:
      pair: What dominates the run.
      delta: Of the certificate, above 0 and below 1.
      certification: How it is certified. Nothing is kept.
      below: An epsilon that is known to hold: none of a larger one is tried.
      test: The kernel's test of a candidate; ``certificate.is_proved`` of the pair by default.
      target: No larger epsilon is tested, even if it is below ``below``.

    Returns:
      The certificate; None if none with an epsilon below ``below`` could be proved.

    Raises:
      _AboveTargetError: If only an epsilon above the target is worth a test.
    """
    limit = certification.max_samples or _most_samples(pair.num_outputs)
    test = test or functools.partial(certificates.is_proved, pair)
    found = _smallest_epsilon(pair, delta, below, certification.seed, limit)
    if found is None:
        return None
    estimate, tuning, of_q = found
    for attempt, step in enumerate(_RELATIVE_STEPS):
        epsilon = estimate * (1.0 + step)
        if not epsilon < below:
            return None
        if epsilon > target:
            raise _AboveTargetError
        candidate = tuning.candidate(of_q, epsilon, attempt)
        if candidate is not None and _passes(test, candidate, certification.show_progress):
            return candidate
    return None


def _passes(test: _Test, candidate: Certificate, show_progress: bool) -> bool:
    """Runs the test of a candidate, with a progress bar if asked for."""
    if not show_progress:
        return test(candidate, lambda drawn: None)
    total = candidate.num_samples + candidate.num_untilted
    with ProgressBar(total=total, desc="certificate") as bar:
        return test(candidate, bar.update)


def _best_bet(terms: FloatArray, mean: float, largest: float) -> tuple[float, float]:
    """Returns the bet of the test martingale that grows fastest for samples like the given ones.

    Args:
      terms: Samples of T, between 0 and ``largest``.
      mean: m, that the mean is to be shown to be below; less than ``largest``.
      largest: M.

    Returns:
      The bet w, and how much the logarithm of wealth grows with a sample; zeros if the mean of
      the given samples is not below m.
    """
    if float(np.mean(terms)) >= mean:
        return 0.0, 0.0
    most = (1.0 - _MARGIN) / (largest - mean)
    gains = mean - terms

    def loss(share: float) -> float:
        return -float(np.mean(np.log1p(share * most * gains)))

    found = scipy.optimize.minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded")
    return float(found.x) * most, max(-float(found.fun), 0.0)


class _TuningSamples:
    """Tuning samples of losses, which estimate the epsilon that can be certified."""

    def __init__(
        self,
        pair: DominatingPair,
        sampler: ImportanceSampler,
        delta: float,
        seed: int,
        limit: int,
        samples: int = _FIRST_TUNING,
    ) -> None:
        self._sampler = sampler
        self._num_outputs = pair.num_outputs
        self._mean, failure = certificates.shares_of(delta)
        self._log_failure = math.log(failure)
        self._delta, self._seed, self._limit = delta, seed, limit
        self._losses = np.zeros(0)
        self._grow(min(samples, limit))

    def candidate(self, of_q: "_SamplesOfQ", epsilon: float, attempt: int) -> Certificate | None:
        """The candidate of an epsilon; None if its tests take too many samples."""
        bet, needed = self.needed(epsilon)
        found = of_q.thresholds(epsilon) if needed <= self._limit else None
        if found is None:
            return None
        thresholds, num_untilted = found
        return Certificate(
            epsilon=epsilon,
            delta=self._delta,
            attempt=attempt,
            order=self._sampler.order,
            num_samples=math.ceil(needed),
            bet=bet,
            num_untilted=num_untilted,
            thresholds=thresholds,
            seed=self._seed,
        )

    def _grow(self, count: int) -> None:
        key = _tuning_key(self._seed, self._sampler.order, self._num_outputs)
        self._losses = np.concatenate(list(self._sampler.batches(key, count)))

    def is_clear(self, epsilon: float) -> bool:
        """Whether the mean is far below the tested one with largest terms, or far above without."""
        if self.excess(epsilon) < -_CLEAR:
            return True
        values = self._sampler.terms(self._losses, epsilon)
        least = float(np.mean(values)) - 3.0 * float(np.std(values)) / math.sqrt(len(values))
        return least > math.exp(_CLEAR) * self._mean

    def grow_for(self, epsilon: float, for_largest: float = _FOR_LARGEST) -> None:
        """Draws more samples if few of them count for an epsilon."""
        largest = self.largest(epsilon)
        needed = for_largest * largest / self._mean if largest > self._mean else 0.0
        count = min(2 ** math.ceil(math.log2(max(needed, 1.0))), _MOST_TUNING, self._limit)
        if count > len(self._losses):
            self._grow(count)

    def largest(self, epsilon: float) -> float:
        """The largest term."""
        return self._sampler.largest_term(epsilon)

    def _with_largest(self, epsilon: float) -> FloatArray:
        """The terms, and as many largest ones as raise the mean by a standard error, plus one."""
        largest, values = self.largest(epsilon), self._sampler.terms(self._losses, epsilon)
        error = float(np.std(values)) * math.sqrt(len(values))
        return np.append(values, np.full(1 + int(error / largest), largest))

    def needed(self, epsilon: float) -> tuple[float, float]:
        """The bet, and the samples that its test takes; infinity where it is likely to fail."""
        largest = self.largest(epsilon)
        if largest <= self._mean:
            return 0.0, 0.0
        bet, growth = _best_bet(self._with_largest(epsilon), self._mean, largest)
        if growth <= 0.0:
            return bet, math.inf
        spread = math.sqrt(0.5) * _DEVIATIONS
        return bet, (spread + math.sqrt(spread**2 - self._log_failure)) ** 2 / growth

    def is_enough(self, epsilon: float) -> bool:
        """Whether a test is worth trying; also of all larger epsilons."""
        return self.excess(epsilon) <= 0.0

    def excess(self, epsilon: float) -> float:
        """Positive if a test is not worth trying; continuous and decreasing in epsilon."""
        largest = self.largest(epsilon)
        if largest <= self._mean:
            # At a huge epsilon, the largest term underflows to zero.
            return math.log(max(largest / self._mean, 1e-300)) - 1.0
        too_large = math.log(float(np.mean(self._with_largest(epsilon))) / (_SHARE * self._mean))
        if too_large > 0.0:
            return too_large + 1e-3
        # Other tuning samples may ask for more.
        needed = 1.5 * self.needed(epsilon)[1]
        return max(too_large, math.log(min(needed, 1e300) / self._limit))


def _smallest_epsilon(
    pair: DominatingPair, delta: float, below: float, seed: int, limit: int
) -> tuple[float, "_TuningSamples", "_SamplesOfQ"] | None:
    """The smallest epsilon that is worth a test, below ``below``, if any, and its samples."""
    high = below
    orders = _all_samplers(pair)
    if not orders:
        return None
    mean, _ = certificates.shares_of(delta)
    for sampler in orders:
        if sampler.order > 1:
            # Here Renyi DP of this order suffices.
            a = sampler.order
            constant = (a - 1) * math.log(a - 1) - a * math.log(a)
            renyi = (sampler.log_mgf + constant - math.log(mean)) / (a - 1)
            high = min(high, renyi + 1e-5)
    if math.isinf(high):
        return None
    high = max(high, 1e-6)
    for _ in range(2):
        # The best order for about where epsilon is.
        best = min(orders, key=lambda each: each.largest_term(high))
        tuning = _TuningSamples(pair, best, delta, seed, limit)
        tuning.grow_for(0.8 * high)
        if not tuning.is_enough(high):
            break
        if tuning.is_enough(0.0):
            high = 0.0
        else:
            high = _bisected(tuning.is_enough, 0.0, high, 2e-4)
    if high >= below:
        return None
    # Each step upwards asks the same losses.
    samples = _SamplesOfQ(pair, delta, seed)
    tested = _first_upwards(lambda each: samples.thresholds(each) is not None, high, below)
    return None if tested is None else (tested, tuning, samples)


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
            return (
                candidate if tried is None else _bisected(is_enough, tried, candidate, _STEP_DOWN)
            )
        if number >= _SMALL_STEPS:
            # Farther than tuning samples are wrong by.
            step *= 2.0
        tried, candidate = candidate, max(candidate * (1.0 + step), _LEAST_EPSILON)
    return None


def _bisected(
    is_enough: Callable[[float], bool], low: float, high: float, tolerance: float
) -> float:
    """Bisects between ``low``, which is not enough, and ``high``, which is, to a tolerance."""
    for _ in range(_MOST_HALVINGS):
        if high - low <= tolerance * high or high <= _LEAST_EPSILON:
            break
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _all_samplers(pair: DominatingPair) -> list[ImportanceSampler]:
    """Samplers of all orders with tables that are small enough, up to the first infinite moment."""
    found = []
    for order in pair.orders:
        sampler = ImportanceSampler(pair, order)
        if not math.isfinite(sampler.log_mgf):
            break
        found.append(sampler)
    return found


def _best_sampler(pair: DominatingPair, epsilon: float, delta: float) -> ImportanceSampler:
    """An importance sampler of a small bound on terms: a larger table has to lower it by 30 %."""
    best = ImportanceSampler(pair, 1)
    mean, _ = certificates.shares_of(delta)
    for order in pair.orders[1:]:
        least = best.largest_term(epsilon)
        if least <= mean:
            break
        sampler = ImportanceSampler(pair, order)
        if not math.isfinite(sampler.log_mgf):
            break
        largest = sampler.largest_term(epsilon)
        if largest < _WORTHWHILE * least:
            best = sampler
        elif order > 2:
            break
    return best


class _SamplesOfQ:
    """Losses of outputs of Q, drawn to choose how the divergence of Q from P is tested."""

    def __init__(self, pair: DominatingPair, delta: float, seed: int) -> None:
        self._pair, self._seed = pair, seed
        self._mean, self._failure = certificates.shares_of(delta)

    @functools.cached_property
    def _losses(self) -> FloatArray:
        key = _tuning_key(self._seed, 0, self._pair.num_outputs)
        sampler, count = ImportanceSampler(self._pair, 0), _num_tuning_outputs_of_q(self._pair)
        drawn = sampler.batches(key, count)
        return np.sort(np.concatenate(list(drawn)))

    def thresholds(self, epsilon: float) -> tuple[tuple[float, float], int] | None:
        """Thresholds and samples with which a test is likely to pass; None if no test is."""
        if epsilon == 0.0:
            # The test of P from Q is of the same number.
            return (0.0, 0.0), 0
        losses, tuning = self._losses, _num_tuning_outputs_of_q(self._pair)
        for samples in _sample_sizes_of_q(self._pair):
            best = (math.inf, (0.0, 0.0))
            for low_count in (8, 16, 32, 64, 128, 256, 1024, 4096):
                for high_count in (tuning // 2, tuning // 8):
                    thresholds = (float(losses[low_count]), float(losses[high_count]))
                    if low_count >= high_count or not thresholds[0] < thresholds[1]:
                        continue
                    scale = samples / tuning
                    # The count among tuning samples may have been small by chance.
                    expected = np.array([low_count, high_count])
                    counts = scale * (expected + [2.0, -2.0] * np.sqrt(expected))
                    found = certificates.divergence_of_counts(
                        counts.astype(int), samples, thresholds, epsilon, self._failure
                    )
                    best = min(best, (found, thresholds))
            if best[0] < 0.9 * self._mean:
                return best[1], samples
        return None


def _num_tuning_outputs_of_q(pair: DominatingPair) -> int:
    """How many outputs of Q are drawn to tune the test of Q from P: more if they cost little."""
    if pair.has_timers:
        return 2**14
    powers = _POWER_OF_NUMBERS - (pair.rounds.separation - 1).bit_length()
    return int(2 ** min(max(powers, 14), 20))


def _sample_sizes_of_q(pair: DominatingPair) -> list[int]:
    """How many outputs of Q a test may draw, the fewest first."""
    tuning = _num_tuning_outputs_of_q(pair)
    return sorted({2**16, 2**18} if pair.has_timers else {2**16, 2**18, tuning, 4 * tuning})


def _tuning_key(seed: int, order: int, num_rounds: int) -> int:
    # Random numbers follow from this text: it never changes.
    digest = hashlib.sha256(f"pilot {seed} {order} {num_rounds}".encode()).digest()
    return int.from_bytes(digest, "big")
