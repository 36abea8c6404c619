"""Searches for certificates: of the smallest epsilon of a run, or the least noise for a target.

The search uses *tuning samples* with separate random numbers, which prove nothing: epsilons and
noise multipliers from tuning samples alone are estimates. Only the kernel proves an epsilon
(``certificate.check_certificate``).

Certificates are cached in a directory, so that no plan or statement searches twice. The name of an
entry is a digest of all inputs of its certificate and of the version of the accounting. Entries are
written atomically, and a damaged entry is computed again. Other programs may write into the
directory, so the kernel tests a cached certificate again before it is returned, once in each
process. This test takes most of the time of search and proof.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import TypeAlias

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

# Cached certificates of another version are computed again. Raise this number whenever a result of
# the accounting changes; a test compares golden values of its modules.
ACCOUNTING_VERSION = 5

# The folder, in the user's cache directory, where certificates are cached by default.
FOLDER = "certificates"

# For smaller noise multipliers no amplified epsilon is searched for: the noise does not hide
# whether a client was drawn.
_LEAST_AMPLIFIED = 0.1
# The most samples of one test.
_MOST_SAMPLES = 2**21
_MOST_NUMBERS = 6_000_000_000
# The first and the largest number of tuning samples. If the largest term is above the tested mean,
# there are at least _FOR_LARGEST times their quotient, up to the largest number.
_FIRST_TUNING, _MOST_TUNING = 2**13, 2**17
_FOR_LARGEST = 20.0
# The same for rough estimates. If the logarithms of estimate and target differ by more than _CLEAR,
# the first samples decide.
_FIRST_ROUGH, _FOR_LARGEST_ROUGH, _CLEAR = 2**12, 4.0, 1.0
# The relative tolerances of searches for noise multipliers.
_TOLERANCE, _ROUGH_TOLERANCE = 1e-3, 1e-2
# The share of delta that the divergence of tuning samples may have; a larger share needs more
# samples in the test.
_SHARE = 0.9
# If the logarithm of wealth has the mean x, its standard deviation is about sqrt(2 x). A test has
# enough samples to pass if the logarithm is this many deviations below its mean.
_DEVIATIONS = 2.5
# A higher order needs a larger table, so it is used only if it lowers the largest term to this
# share.
_WORTHWHILE = 0.7
_RELATIVE_STEPS = (0.0, 0.005, 0.02, 0.06)
# The most steps of a bisection. Of a search upwards: its first step, how many of that size, and how
# many in all. Losses are not known to less than the least epsilon.
_MOST_HALVINGS = 60
_UPWARD_STEP, _SMALL_STEPS, _MOST_STEPS = 0.02, 40, 80
_LEAST_EPSILON = 1e-8
# Slightly more than an upward step, relative to its end.
_STEP_DOWN = 1.01 * _UPWARD_STEP / (1.0 + 1.01 * _UPWARD_STEP)
# If the certified epsilon is too large, the noise multiplier is first raised by this share.
_RELATIVE_STEP = 2e-3
# A search that may test fewer mechanisms than this begins with more noise.
_TESTS_OF_SMALL_STEPS = 5
# The relative distance of a bet from the largest bet with positive wealth.
_MARGIN = 1e-6
# The logarithm to base 2 of the numbers that are drawn of Q for tuning where outputs have few.
_POWER_OF_NUMBERS = 27


@dataclasses.dataclass(frozen=True)
class Certification:
    """How epsilons are certified: seed, number of samples, cache, and number of tests.

    Attributes:
      seed: The seed of all random numbers. Choose it before you know any result of it.
      max_samples: The most samples of a test; by default, as many as take minutes.
      directory: The directory where certificates are cached; None for no cache.
      show_progress: Whether to show progress bars on standard error.
      most_tests: The most mechanisms that a search for one noise multiplier tests. The tests of at
        most 16 mechanisms share delta: if you choose among several results, divide these 16 among
        their searches.

    Raises:
      ValueError: If the seed is not an integer of at least 0, ``max_samples`` not one of at least
        1, ``most_tests`` not one from 1 to 16, or another attribute has another type.
    """

    seed: int = 0
    max_samples: int | None = None
    directory: pathlib.Path | None = None
    show_progress: bool = False
    # The guarantee of the result is one more test.
    most_tests: int = MECHANISMS // 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", numbers.integer_at_least(self.seed, 0, "seed"))
        numbers.set_positive_integers(self, "max_samples", "most_tests")
        if self.most_tests > MECHANISMS:
            raise ValueError(
                f"most_tests must be at most {MECHANISMS}, the number of tests that delta covers, "
                f"found {self.most_tests}: compare fewer mechanisms."
            )
        if not isinstance(self.directory, pathlib.Path | None):
            raise ValueError(f"directory must be a path or None, found {self.directory!r}.")
        if type(self.show_progress) is not bool:
            raise ValueError(f"show_progress must be a bool, found {self.show_progress!r}.")

    @classmethod
    def default(cls, *, show_progress: bool = False) -> "Certification":
        """Returns the default: seed 0, and certificates in the user's cache.

        Args:
          show_progress: Whether to show progress bars on standard error.
        """
        return cls(directory=atomic_files.find_cache(FOLDER), show_progress=show_progress)

    def amplified(self, run: SampledRun, delta: float) -> "Amplified":
        """Returns a run's epsilon, with its certificate, if clients draw for themselves.

        It tests one mechanism.

        Args:
          run: The run.
          delta: The delta of the guarantee.

        Raises:
          TailError: If there is too little noise to account for.
          ValueError: If delta is out of its range, or the columns do not fit the scheme.
        """
        return _amplified(run, delta, self, math.inf)

    def calibrated(self, run: SampledRun, target: float, delta: float) -> float:
        """Returns a noise multiplier with a certified epsilon of at most a target.

        It tests at most ``most_tests`` noise multipliers. If no test succeeds, it returns the noise
        multiplier that suffices without amplification.

        Args:
          run: The run; its noise multiplier is ignored.
          target: The target epsilon.
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
            # An attempt counts as a test even if it ends before its test.
            with contextlib.suppress(TailError, _AboveTargetError):
                tried = dataclasses.replace(run, sigma=found)
                if _amplified(tried, delta, self, target).epsilon <= target:
                    return found
            found, step = found * (1.0 + step), 2.0 * step
        return enough

    def estimated(
        self, run: SampledRun, target: float, delta: float, *, is_rough: bool = False
    ) -> float:
        """Returns an estimate of the result of :meth:`calibrated`, from tuning samples alone.

        Args:
          run: As in :meth:`calibrated`.
          target: As there.
          delta: As there.
          is_rough: Whether an error of a few per cent is allowed, which takes a fraction of the
            time.

        Returns:
          The estimate, at most the noise multiplier that suffices without amplification.
        """
        enough = _enough(run, target, delta)
        known = dataclasses.replace(run, sigma=enough)
        # Raises an error if the columns do not fit the scheme.
        dominating_pair(known)
        try:
            left = delta_left(delta, known.amplified_part, DEFAULT_NUM_COORDINATES)
        except TailError:
            return enough
        tolerance = _ROUGH_TOLERANCE if is_rough else _TOLERANCE

        def excess(sigma: float) -> float:
            pair = dominating_pair(dataclasses.replace(run, sigma=sigma))
            limit = self.max_samples or _most_samples(pair.num_outputs)
            # Far from the target, a small table and few samples are enough.
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
      epsilon: The epsilon of the run, for the integers that are drawn as noise.
      certificate: The certificate of epsilon; None without amplification.
    """

    epsilon: float
    certificate: Certificate | None


# A function that tests a candidate, with a callback for progress, and returns whether it is proved.
_Test: TypeAlias = Callable[[Certificate, Callable[[int], object]], bool]


class _AboveTargetError(Exception):
    """The smallest epsilon that is worth a test is above a target: nothing was tested."""


def _most_samples(num_rounds: int) -> int:
    """Returns the most samples of a test for a number of rounds, which take minutes."""
    return max(min(_MOST_SAMPLES, _MOST_NUMBERS // num_rounds), _FIRST_TUNING)


def _amplified(
    run: SampledRun, delta: float, certification: Certification, target: float
) -> "Amplified":
    """The epsilon and its certificate; _AboveTargetError without a test if above the target."""
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
    """A proved certificate with a small epsilon, from a search or from the cache.

    An ``atomic_files.CacheWarning`` says that the cached entry is damaged or not proved, so that it
    was computed again, or that it could not be cached. Arguments and result are those of
    :func:`_proved`.
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
    # The description is compared with one from JSON, so it is converted to JSON's types.
    description = json.loads(json.dumps(description))  # noqa: TID251

    def kept(contents: object) -> Certificate | None:
        """The certificate of a cached entry, after a new proof; None if it is for other inputs."""
        if contents is None:
            return None
        if not isinstance(contents, dict):
            raise TypeError("its certificate is no object")
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
      pair: The pair of distributions that dominates the run.
      delta: The delta of the certificate, above 0 and below 1.
      certification: How to certify; the cache is not used here.
      below: An epsilon that is known to hold; only smaller ones are tried.
      test: The kernel's test of a candidate; ``certificate.is_proved`` of the pair by default.
      target: No epsilon above the target is tested.

    Returns:
      The certificate; None if no epsilon below ``below`` could be proved.

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
    """Returns the bet with which the test martingale grows fastest on the given samples.

    Args:
      terms: Samples of T, between 0 and ``largest``.
      mean: m, the number that the test shows the mean to be below; less than ``largest``.
      largest: M.

    Returns:
      The bet w, and the average growth of the logarithm of wealth for each sample; zeros if the
      mean of the given samples is not below m.
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
        """The candidate certificate of an epsilon; None if its tests need too many samples."""
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
        self._losses = np.concatenate(list(self._sampler.batches(key, count, np.asarray)))

    def is_clear(self, epsilon: float) -> bool:
        """Whether the samples decide clearly: mean far below (with largest terms), or far above."""
        if self.excess(epsilon) < -_CLEAR:
            return True
        values = self._sampler.terms(self._losses, epsilon)
        least = float(np.mean(values)) - 3.0 * float(np.std(values)) / math.sqrt(len(values))
        return least > math.exp(_CLEAR) * self._mean

    def grow_for(self, epsilon: float, for_largest: float = _FOR_LARGEST) -> None:
        """Draws more samples if few of them contribute to the divergence at an epsilon."""
        largest = self.largest(epsilon)
        needed = for_largest * largest / self._mean if largest > self._mean else 0.0
        count = min(2 ** math.ceil(math.log2(max(needed, 1.0))), _MOST_TUNING, self._limit)
        if count > len(self._losses):
            self._grow(count)

    def largest(self, epsilon: float) -> float:
        """The largest term."""
        return self._sampler.largest_term(epsilon)

    def _with_largest(self, epsilon: float) -> FloatArray:
        """The terms with added largest terms, which raise the mean by about a standard error."""
        largest, values = self.largest(epsilon), self._sampler.terms(self._losses, epsilon)
        error = float(np.std(values)) * math.sqrt(len(values))
        return np.append(values, np.full(1 + int(error / largest), largest))

    def needed(self, epsilon: float) -> tuple[float, float]:
        """The bet, and the number of samples of its test; infinity if it would probably fail."""
        largest = self.largest(epsilon)
        if largest <= self._mean:
            return 0.0, 0.0
        bet, growth = _best_bet(self._with_largest(epsilon), self._mean, largest)
        if growth <= 0.0:
            return bet, math.inf
        spread = math.sqrt(0.5) * _DEVIATIONS
        return bet, (spread + math.sqrt(spread**2 - self._log_failure)) ** 2 / growth

    def is_enough(self, epsilon: float) -> bool:
        """Whether a test of epsilon would probably succeed; then also of all larger epsilons."""
        return self.excess(epsilon) <= 0.0

    def excess(self, epsilon: float) -> float:
        """Positive if a test would probably fail; continuous and decreasing in epsilon."""
        largest = self.largest(epsilon)
        if largest <= self._mean:
            # At a huge epsilon, the largest term underflows to zero.
            return math.log(max(largest / self._mean, 1e-300)) - 1.0
        too_large = math.log(float(np.mean(self._with_largest(epsilon))) / (_SHARE * self._mean))
        if too_large > 0.0:
            return too_large + 1e-3
        # With other tuning samples, the number of samples may be larger.
        needed = 1.5 * self.needed(epsilon)[1]
        return max(too_large, math.log(min(needed, 1e300) / self._limit))


def _smallest_epsilon(
    pair: DominatingPair, delta: float, below: float, seed: int, limit: int
) -> tuple[float, "_TuningSamples", "_SamplesOfQ"] | None:
    """The smallest epsilon below ``below`` that a test would probably prove; its samples."""
    high = below
    orders = _all_samplers(pair)
    if not orders:
        return None
    mean, _ = certificates.shares_of(delta)
    for sampler in orders:
        if sampler.order > 1:
            # At this epsilon, Renyi DP of this order is enough.
            a = sampler.order
            constant = (a - 1) * math.log(a - 1) - a * math.log(a)
            renyi = (sampler.log_mgf + constant - math.log(mean)) / (a - 1)
            high = min(high, renyi + 1e-5)
    if math.isinf(high):
        return None
    high = max(high, 1e-6)
    for _ in range(2):
        # The order with the smallest largest term near the epsilon that is searched for.
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
    # All steps upwards use the same losses.
    samples = _SamplesOfQ(pair, delta, seed)
    tested = _first_upwards(lambda each: samples.thresholds(each) is not None, high, below)
    return None if tested is None else (tested, tuning, samples)


def _first_upwards(is_enough: Callable[[float], bool], start: float, below: float) -> float | None:
    """Returns about the smallest epsilon, from a start, for which a test holds; None if none.

    Args:
      is_enough: The test of an epsilon; if it holds, it holds for all larger epsilons.
      start: The first epsilon that is tried, at least 0.
      below: Only smaller epsilons are tried; may be infinite.
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
            # The step is now larger than the errors of tuning samples.
            step *= 2.0
        tried, candidate = candidate, max(candidate * (1.0 + step), _LEAST_EPSILON)
    return None


def _bisected(
    is_enough: Callable[[float], bool], low: float, high: float, tolerance: float
) -> float:
    """Bisects, to a tolerance, between ``low``, which fails a test, and ``high``, which passes."""
    for _ in range(_MOST_HALVINGS):
        if high - low <= tolerance * high or high <= _LEAST_EPSILON:
            break
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _all_samplers(pair: DominatingPair) -> list[ImportanceSampler]:
    """The samplers of all orders with small tables, up to the first infinite moment."""
    found = []
    for order in pair.orders:
        sampler = ImportanceSampler(pair, order)
        if not math.isfinite(sampler.log_mgf):
            break
        found.append(sampler)
    return found


def _best_sampler(pair: DominatingPair, epsilon: float, delta: float) -> ImportanceSampler:
    """The importance sampler to use: a higher order only if it lowers the largest term by 30 %."""
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
    """Losses of samples of Q, by which the test of the divergence of Q from P is tuned."""

    def __init__(self, pair: DominatingPair, delta: float, seed: int) -> None:
        self._pair, self._seed = pair, seed
        self._mean, self._failure = certificates.shares_of(delta)

    @functools.cached_property
    def _losses(self) -> FloatArray:
        key = _tuning_key(self._seed, 0, self._pair.num_outputs)
        sampler, count = ImportanceSampler(self._pair, 0), _num_tuning_outputs_of_q(self._pair)
        drawn = sampler.batches(key, count, np.asarray)
        return np.sort(np.concatenate(list(drawn)))

    def thresholds(self, epsilon: float) -> tuple[tuple[float, float], int] | None:
        """Thresholds and number of samples with which a test would probably pass; None if none."""
        if epsilon == 0.0:
            # Both divergences are equal, so that the test of P from Q is enough.
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
                    # The counts among tuning samples may be small by chance, so larger ones are
                    # assumed.
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
    """The number of samples of Q that tune the test of Q from P; more if they are cheap."""
    if pair.has_timers:
        return 2**14
    powers = _POWER_OF_NUMBERS - (pair.rounds.separation - 1).bit_length()
    return int(2 ** min(max(powers, 14), 20))


def _sample_sizes_of_q(pair: DominatingPair) -> list[int]:
    """The possible numbers of samples of Q in a test, in increasing order."""
    tuning = _num_tuning_outputs_of_q(pair)
    return sorted({2**16, 2**18} if pair.has_timers else {2**16, 2**18, tuning, 4 * tuning})


def _tuning_key(seed: int, order: int, num_rounds: int) -> int:
    # This text determines the random numbers, so it must never change.
    digest = hashlib.sha256(f"pilot {seed} {order} {num_rounds}".encode()).digest()
    return int.from_bytes(digest, "big")
