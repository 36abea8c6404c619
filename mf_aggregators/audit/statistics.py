"""Statistics of audits: lower bounds on epsilon from observed error rates of an attack.

An attacker decides from all releases of a run whether one client took part. A decision rule with
the false positive rate alpha and the false negative rate beta refutes every privacy claim whose
trade-off curve lies above (alpha, beta). Two kinds of claims are tested:

* (epsilon, delta)-DP of any mechanism: ``1 - beta <= exp(epsilon) alpha + delta``, and the
  same with alpha and beta exchanged (Kairouz et al., The composition theorem for differential
  privacy, Thm 2.1; as an audit: Nasr et al., Adversary instantiation, 2021);
* mu-Gaussian DP, the trade-off curve of N(0, 1) and N(mu, 1): ``beta >= Phi(Phi^-1(1 -
  alpha) - mu)`` (Dong, Roth and Su, Gaussian differential privacy, Def. 2.6). A noise multiplier of
  1 / mu claims this curve, and a single point below it refutes the claim. Through this curve, error
  rates that can be observed give an epsilon at a delta that is too small to be observed (Nasr et
  al., Tight auditing of differentially private machine learning, 2023).

The rates themselves are bounded by Clopper and Pearson's exact intervals. Nothing here
depends on TensorFlow.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import scipy.sparse.csgraph
import scipy.special
import scipy.stats

from mf_aggregators import accounting
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.sensitivity import Schema
from mf_aggregators.participation import FixedEpochOrder, Participation

# Smaller eigenvalues of a correlation matrix count as rounding errors of float32. So if the noise
# of a round repeats that of another round, the power is huge but not infinite.
_SMALLEST_EIGENVALUE = 1e-9
# Up to these numbers, all patterns and all signs of a pattern are tried; above, only a few
# promising ones.
_MOST_PATTERNS = 4096
_MOST_SIGNS_TRIED = 10
# Correlations below this many standard errors are set to zero.
_STANDARD_ERRORS = 4.0
_THRESHOLDS_TRIED = 1024


def checked_false_alarm_rate(value: object) -> float:
    """Checks the false alarm rate of an audit, which has to be above 0 and below 1.

    With any other rate, bounds would be useless or wrong.

    Args:
      value: The rate.

    Returns:
      The rate as a float.

    Raises:
      ValueError: If it is not above 0 and below 1.
    """
    rate = numbers.positive_number(value, "false_alarm_rate")
    if rate >= 1.0:
        raise ValueError(f"false_alarm_rate must be below 1, found {rate}.")
    return rate


def _finite(released: FloatArray) -> FloatArray:
    """Returns released numbers, after a check that they are finite.

    Args:
      released: The numbers.

    Raises:
      ValueError: If a number is not finite.
    """
    if not np.all(np.isfinite(released)):
        raise ValueError("the aggregator released numbers that are not finite.")
    return released


def upper_bound_of_rate(events: float, trials: int, miss_probability: float) -> float:
    """Returns an upper confidence bound on a probability (Clopper and Pearson, 1934).

    Args:
      events: The number of observed events, 0 to ``trials``; may be a fraction for expected
        numbers.
      trials: The number of independent trials.
      miss_probability: The largest probability with which the bound may be below the true
        probability.

    Returns:
      The bound; 1 if every trial was an event.
    """
    return float(_upper_bounds(np.array([float(events)]), trials, miss_probability)[0])


def _upper_bounds(events: FloatArray, trials: int, miss_probability: float) -> FloatArray:
    """The bounds for several numbers of events; SciPy takes about as long for all as for one."""
    others = trials - events
    bounds = scipy.stats.beta.isf(
        miss_probability, events + 1.0, np.where(others > 0.0, others, 1.0)
    )
    return np.where(others > 0.0, bounds, 1.0)


@dataclasses.dataclass(frozen=True)
class ErrorRates:
    """The error counts of an attack at one threshold, with upper bounds on its error rates.

    Attributes:
      threshold: The attacker guesses that the client is present if the score is above this.
      false_positives: The number of scores without the client that are above the threshold.
      absences: The number of observations without the client.
      false_negatives: The number of scores with the client that are not above the threshold.
      presences: The number of observations with the client.
      false_positive_bound: Upper bound on the false positive rate.
      false_negative_bound: Upper bound on the false negative rate.
    """

    threshold: float
    false_positives: float
    absences: int
    false_negatives: float
    presences: int
    false_positive_bound: float
    false_negative_bound: float

    @classmethod
    def of_counts(
        cls,
        threshold: float,
        false_positives: float,
        absences: int,
        false_negatives: float,
        presences: int,
        miss_probability: float,
    ) -> "ErrorRates":
        """Returns the bounds for given counts; each is wrong with at most ``miss_probability``.

        Args:
          threshold: Scores above it are taken for presence.
          false_positives: The number of scores without the client that are above the threshold.
          absences: The number of scores without the client.
          false_negatives: The number of scores with the client that are not above the threshold.
          presences: The number of scores with the client.
          miss_probability: The largest probability with which each of the two bounds may be wrong.
        """
        counts = ((false_positives, absences), (false_negatives, presences))
        bounds = (upper_bound_of_rate(*each, miss_probability) for each in counts)
        return cls(threshold, *counts[0], *counts[1], *bounds)

    @classmethod
    def of_scores(
        cls, absent: FloatArray, present: FloatArray, threshold: float, miss_probability: float
    ) -> "ErrorRates":
        """Counts errors of scores at a threshold that was fixed before the scores were known.

        Args:
          absent: Independent scores without the client.
          present: Independent scores with the client.
          threshold: Scores above it are taken for presence.
          miss_probability: The largest probability with which each of the two bounds may be wrong.

        Returns:
          The counts and bounds.
        """
        return cls.of_counts(
            threshold,
            int(np.count_nonzero(absent > threshold)),
            absent.size,
            int(np.count_nonzero(~(present > threshold))),
            present.size,
            miss_probability,
        )

    @classmethod
    def largest_mu(cls, absences: int, presences: int, miss_probability: float) -> float:
        """Returns the bound on mu of an attack without errors, the largest for this audit's size.

        Args:
          absences: Observations without the client.
          presences: Observations with the client.
          miss_probability: The largest probability with which each bound may be wrong.

        Returns:
          The largest value that :attr:`mu_lower_bound` can have.
        """
        return cls.of_counts(0.0, 0, absences, 0, presences, miss_probability).mu_lower_bound

    @property
    def mu_lower_bound(self) -> float:
        """The largest mu with a Gaussian trade-off curve that the rates refute; 0 if there is none.

        The curve of every smaller mu is refuted as well: beta < Phi(Phi^-1(1 - alpha) - mu).
        """
        return float(_refuted(self.false_positive_bound, self.false_negative_bound, None))

    def epsilon_lower_bound_any_mechanism(self, delta: float) -> float:
        """Returns the largest epsilon at a delta that the error rates refute for any mechanism.

        Args:
          delta: At least 0 and below 1.
        """
        return float(_refuted(self.false_positive_bound, self.false_negative_bound, delta))


def _refuted(
    alpha: float | FloatArray, beta: float | FloatArray, delta: float | None
) -> FloatArray:
    """The mu that error rates (arrays or floats) refute; with a delta, the refuted epsilon."""
    if delta is None:
        quantiles = scipy.special.ndtri(alpha) + scipy.special.ndtri(beta)
        return np.asarray(np.maximum(-quantiles, 0.0))
    ratios = np.maximum((1.0 - beta - delta) / alpha, (1.0 - alpha - delta) / beta)
    return np.asarray(np.log(np.maximum(ratios, 1.0)))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Returns the epsilon of mu-Gaussian DP at a delta; 0 at mu = 0.

    Args:
      mu: At least 0.
      delta: Above 0 and below 1.
    """
    return accounting.exact_epsilon(1.0 / mu, delta) if mu > 0.0 else 0.0


def choose_thresholds(
    power: float, absences: int, presences: int, miss_probability: float, deltas: Sequence[float]
) -> list[float]:
    """Chooses thresholds with the largest expected bounds, before any score is known.

    They are the best ones if scores are N(0, 1) without the client and N(power, 1) with it. With a
    wrong power, the bounds are worse, but still valid.

    Args:
      power: The expected mu of the scores.
      absences: The planned number of observations without the client.
      presences: The planned number of observations with the client.
      miss_probability: The largest probability with which each bound may be wrong.
      deltas: The deltas at which epsilon is bounded for any mechanism.

    Returns:
      A threshold for the bound on mu, followed by one for each delta.
    """
    candidates = np.linspace(-2.0, power + 2.0, _THRESHOLDS_TRIED)
    rates = scipy.special.ndtr(-candidates), scipy.special.ndtr(candidates - power)
    sizes = (absences, presences)
    return best_thresholds(candidates, rates, sizes, miss_probability, (None, *deltas))


def best_thresholds(
    candidates: FloatArray,
    rates: tuple[FloatArray, FloatArray],
    sizes: tuple[int, int],
    miss_probability: float,
    deltas: Sequence[float | None],
) -> list[float]:
    """Returns the thresholds with the largest bounds for known error rates.

    Args:
      candidates: (m,) thresholds.
      rates: (m,) false positive rates, and (m,) false negative rates.
      sizes: The numbers of observations without and with the client.
      miss_probability: The largest probability with which each bound may be wrong.
      deltas: The deltas at which epsilon is bounded; None for a bound on mu.

    Returns:
      For each delta, the median of the thresholds that are best up to rounding.
    """
    alpha, beta = (
        _upper_bounds(size * rate, size, miss_probability)
        for size, rate in zip(sizes, rates, strict=True)
    )
    found = []
    for delta in deltas:
        values = _refuted(alpha, beta, delta)
        best = np.flatnonzero(values >= np.max(values) - 1e-9)
        found.append(float(candidates[best[len(best) // 2]]))
    return found


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The rounds and signs of the audited client's updates, which have the clip norm.

    Attributes:
      rounds: The rounds in which the client takes part, ascending.
      signs: The sign in each round, relative to the first round of the same group.
      groups: The group of each round. The first signs of different groups can be chosen
        independently, so each may depend on earlier releases.
      power: ``sqrt(u^T Sigma^-1 u)``: the mean of the likelihood-ratio score with the client.
    """

    rounds: tuple[int, ...]
    signs: tuple[int, ...]
    groups: tuple[int, ...]
    power: float


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseModel:
    """The distribution of one coordinate's noise over all rounds, as the attacker estimated it.

    Attributes:
      mean: (n,) the mean of the noise in each round.
      precision: (n, n): the inverse of the covariance of the rounds' noise.
      samples: The number of coordinates from which it was estimated.
    """

    mean: FloatArray
    precision: FloatArray
    samples: int

    @classmethod
    def fitted(cls, blocks: Iterable[FloatArray], clip_norm: float) -> "NoiseModel":
        """Estimates the distribution of the noise from coordinates that contain only noise.

        Args:
          blocks: (n, m) floats each: m independent coordinates. One is in memory at a time.
          clip_norm: Noise far below this scale counts as none.

        Returns:
          The model. Directions almost without noise get a large but finite precision.

        Raises:
          ValueError: If an entry is not finite.
        """
        samples, origin, total, products = 0, np.zeros((0, 1)), np.zeros(0), np.zeros(0)
        for block in blocks:
            # Moments are computed about a point near the mean, so that no digits are lost.
            origin = origin if samples else np.mean(block, axis=1, keepdims=True)
            centred = _finite(block) - origin
            moments = np.sum(centred, axis=1), centred @ centred.T
            total, products = (total + moments[0], products + moments[1]) if samples else moments
            samples += block.shape[1]
        shift = total / samples
        covariance = products / samples - np.multiply.outer(shift, shift)
        deviations = np.sqrt(np.diagonal(covariance))
        deviations = np.maximum(
            deviations, _SMALLEST_EIGENVALUE * max(clip_norm, float(np.max(deviations)))
        )
        values, vectors = np.linalg.eigh(covariance / np.multiply.outer(deviations, deviations))
        values = np.maximum(values, _SMALLEST_EIGENVALUE)
        precision = (vectors / values) @ vectors.T / np.multiply.outer(deviations, deviations)
        return cls(origin[:, 0] + shift, 0.5 * (precision + precision.T), samples)

    def worst_contribution(self, participation: Participation, clip_norm: float) -> Contribution:
        """Returns the contribution that is easiest to detect in the noise.

        u^T Sigma^-1 u is convex in u, so that its maximum over contributions of at most the clip
        norm in the rounds of a pattern is at a corner: it suffices to try signs, and patterns to
        which no round can be added. All of these are tried if they are few, and otherwise evenly
        spaced patterns. With a worse choice, an audit is weaker, but still valid.

        Args:
          participation: The declared schema.
          clip_norm: The magnitude of each entry of u.

        Returns:
          The contribution.
        """
        gram = clip_norm**2 * self.precision
        num_rounds = gram.shape[0]
        patterns = list(
            itertools.islice(
                _maximal_patterns(participation.as_schema(), num_rounds), _MOST_PATTERNS + 1
            )
        )
        if len(patterns) > _MOST_PATTERNS:
            separation = participation.separation_in(num_rounds)
            most = participation.most_participations(num_rounds)
            evenly = FixedEpochOrder(most, separation).as_schema()
            patterns = list(_maximal_patterns(evenly, num_rounds))
        found = [(*_best_signs(gram[np.ix_(rounds, rounds)]), rounds) for rounds in patterns]
        squared, signs, rounds = max(found, key=lambda item: item[0])
        groups = _groups(gram[np.ix_(rounds, rounds)], self.samples)
        relative = tuple(
            int(signs[i] * signs[groups.index(group)]) for i, group in enumerate(groups)
        )
        return Contribution(rounds, relative, groups, math.sqrt(squared))

    def centred(self, residuals: FloatArray) -> FloatArray:
        """Returns released numbers minus the mean of the noise.

        Args:
          residuals: (n, m): what was released, less what the attacker knows.

        Raises:
          ValueError: If a number is not finite.
        """
        return np.asarray(_finite(residuals) - self.mean[:, np.newaxis])

    def scores(
        self, contribution: Contribution, signs: FloatArray, residuals: FloatArray
    ) -> FloatArray:
        """Returns the likelihood-ratio score of each coordinate over all rounds.

        ``u^T Sigma^-1 (r - mean) / sqrt(u^T Sigma^-1 u)`` grows with the likelihood ratio of
        r ~ N(mean + u, Sigma) and r ~ N(mean, Sigma). An entry of u may depend on earlier entries
        of r, as long as u^T Sigma^-1 u does not: the ratio of the densities is the same.

        Args:
          contribution: The rounds that the client takes part in.
          signs: (k, m): the sign of the client's contribution in each of its k rounds.
          residuals: (n, m): what was released, less what the attacker knows.

        Returns:
          (m,) scores.
        """
        rounds = list(contribution.rounds)
        whitened = self.precision[rounds] @ self.centred(residuals)
        gram = self.precision[np.ix_(rounds, rounds)]
        lengths = np.sqrt(np.einsum("im,ij,jm->m", signs, gram, signs, optimize=True))
        return np.asarray(np.einsum("im,im->m", signs, whitened) / lengths)


def _best_signs(gram: FloatArray) -> tuple[float, FloatArray]:
    """Returns the largest s^T gram s with its signs s; for many signs, the better of two."""
    size = gram.shape[0]
    if size <= _MOST_SIGNS_TRIED:
        numbers = np.arange(2 ** (size - 1))[:, np.newaxis]
        candidates = 1.0 - 2.0 * (numbers >> np.arange(size) & 1)
        values = np.einsum("si,ij,sj->s", candidates, gram, candidates, optimize=True)
        best = int(np.argmax(values))
        return float(values[best]), candidates[best]
    # Equal signs, and the signs of the leading eigenvector, which are best if some signs make all
    # products positive.
    leading = np.where(np.linalg.eigh(gram)[1][:, -1] < 0.0, -1.0, 1.0)
    found = [(float(signs @ gram @ signs), signs) for signs in (np.ones(size), leading)]
    return max(found, key=lambda item: item[0])


def _groups(gram: FloatArray, samples: int) -> tuple[int, ...]:
    """Returns the group of each round, so that products between groups are about zero.

    A correlation of ``samples`` draws has a standard error of 1 / sqrt(samples).
    """
    lengths = np.sqrt(np.diagonal(gram))
    correlations = np.abs(gram / np.multiply.outer(lengths, lengths))
    are_joined = correlations > _STANDARD_ERRORS / math.sqrt(samples)
    labels = scipy.sparse.csgraph.connected_components(are_joined, directed=False)[1]
    return tuple(np.unique(labels, return_index=True)[1][labels].tolist())


def _maximal_patterns(schema: Schema, num_rounds: int) -> Iterator[tuple[int, ...]]:
    """Yields the patterns to which no round can be added, in ascending order of rounds.

    Every pattern of the schema is a subset of one of them.

    Args:
      schema: The schema.
      num_rounds: n.

    Yields:
      Ascending rounds.
    """
    most, separation = schema.most_in(num_rounds), schema.separation_in(num_rounds)
    if schema.is_even:
        for start in schema.starts_in(num_rounds):
            yield tuple(range(start, num_rounds, separation))[:most]
    else:
        yield from _spread_patterns((), False, separation, most, num_rounds)


def _spread_patterns(
    rounds: tuple[int, ...], has_room: bool, separation: int, most: int, num_rounds: int
) -> Iterator[tuple[int, ...]]:
    """Yields the maximal patterns, for a smallest separation, that begin with ``rounds``.

    ``has_room`` says whether another round fits before the last of ``rounds``: then only patterns
    of k rounds are maximal.
    """
    earliest = rounds[-1] + separation if rounds else 0
    if len(rounds) == most or earliest >= num_rounds:
        if len(rounds) == most or not has_room:
            yield rounds
        return
    for i in range(earliest, num_rounds):
        with_room = has_room or i >= earliest + separation
        fitting = 1 + (num_rounds - 1 - i) // separation
        if with_room and len(rounds) + fitting < most:
            break
        yield from _spread_patterns((*rounds, i), with_room, separation, most, num_rounds)
