"""An attack on adaptive clip norms, by a client's update together with its indicator.

The clipped-count indicators of all clients are one coordinate, so audited clients cannot share a
run as they do in ``audit``. Here each audited client has its own run, with a model of two
coordinates, one of which it owns. In each of its rounds, it moves this coordinate by the whole clip
norm, and the sum of indicators in the same direction: an update as long as the clip norm moves both
up, and a longer update of the opposite sign moves both down. The attacker knows the other client,
and all clip norms, because they follow from releases. It decides by the likelihood ratio of both
coordinates over the whole run.

The attack needs many small runs, so it uses the aggregator in NumPy, which releases the same bits
as the one in TensorFlow Federated.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from mf_aggregators.adaptive_clip import INDICATOR_WITHIN
from mf_aggregators.aggregator import Aggregator
from mf_aggregators.audit import ChosenSigns, Claim, statistics
from mf_aggregators.audit.statistics import Contribution, ErrorRates, NoiseModel
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.progress_bars import ProgressBar

# The least number of tuning runs without the client, from which the attacker estimates the noise,
# and their number for each dimension.
_FEWEST_TUNING_RUNS, _TUNING_RUNS_PER_DIMENSION = 600, 60
# All tuning runs are in memory, and their number grows with the number of rounds.
MOST_ROUNDS = 1024
# The norms of the audited client's updates in clip norms: just within the clip norm, and far above
# it.
_WITHIN, _ABOVE = 1.0 - 1e-6, 10.0
# The norm of the other client's update in clip norms.
_OTHER = 0.5


@dataclasses.dataclass(frozen=True)
class ClippingResult:
    """The result of an attack on an adaptive clip norm.

    Attributes:
      claim: The claim that was attacked.
      rates: The observed error rates.
      power: The mu that the attacker expected, from the estimated noise.
      false_alarm_rate: The largest probability with which ``exceeded`` is true of an intact
        mechanism.
    """

    claim: Claim
    rates: ErrorRates
    power: float
    false_alarm_rate: float

    @property
    def mu_lower_bound(self) -> float:
        """The largest mu that was refuted."""
        return self.rates.mu_lower_bound

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.mu_lower_bound > self.claim.mu


def audit_clipping(
    aggregator: Aggregator,
    claim: Claim,
    *,
    trials: int = 1000,
    false_alarm_rate: float = 1e-4,
    show_progress: bool = False,
) -> ClippingResult:
    """Attacks an aggregator with an adaptive clip norm.

    Args:
      aggregator: An aggregator with an ``AdaptiveClip`` and without a fixed seed. The smaller its
        ``clipped_count_stddev``, the more this attack depends on the indicator.
      claim: The claim about the aggregator; ``clip_norm`` is the initial norm.
      trials: The number of runs with the client, and also of runs without it.
      false_alarm_rate: The largest probability of ``exceeded`` for an intact mechanism.
      show_progress: Whether to show a bar on standard error.

    Returns:
      The result.

    Raises:
      ValueError: If a number is out of its range, or a release is not finite.
    """
    trials = numbers.positive_integer(trials, "trials")
    rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    if claim.num_rounds > MOST_ROUNDS:
        raise ValueError(
            f"num_rounds must be at most {MOST_ROUNDS} in an audit of adaptive clip norms, found "
            f"{claim.num_rounds}: audit a factorization of the same kind for fewer rounds."
        )
    tuning_runs = max(_FEWEST_TUNING_RUNS, 2 * _TUNING_RUNS_PER_DIMENSION * claim.num_rounds)
    with ProgressBar(
        total=3 * claim.num_rounds, desc="audit of norms", unit="round", disable=not show_progress
    ) as progress:
        runs = _Runs(aggregator, claim, lambda: progress.update())
        noise, _ = runs.run(tuning_runs, None, False)
        model = NoiseModel.fitted([noise], 1.0)
        of_update = NoiseModel.fitted([noise[: claim.num_rounds]], 1.0)
        contribution = of_update.worst_contribution(claim.mechanism.participation, 1.0)
        scored = [_scores(model, contribution, *runs.run(trials, contribution, False))]
        scored.append(_scores(model, contribution, *runs.run(trials, contribution, True)))
    power = _power(model, contribution)
    (threshold,) = statistics.choose_thresholds(power, trials, trials, rate / 2.0, ())
    rates = ErrorRates.of_scores(scored[0], scored[1], threshold, rate / 2.0)
    return ClippingResult(claim, rates, power, rate)


def _whole(
    contribution: Contribution, signs: FloatArray, num_rounds: int
) -> tuple[Contribution, FloatArray]:
    """The contribution to updates and counts together, with its (2 k, m) entries."""
    counts = (num_rounds + i for i in contribution.rounds)
    whole = dataclasses.replace(contribution, rounds=(*contribution.rounds, *counts))
    return whole, np.concatenate([signs, INDICATOR_WITHIN * signs])


def _scores(
    model: NoiseModel, contribution: Contribution, residuals: FloatArray, signs: FloatArray
) -> FloatArray:
    """Returns the (m,) likelihood-ratio scores of the runs."""
    whole, entries = _whole(contribution, signs, len(residuals) // 2)
    return model.scores(whole, entries, residuals)


def _power(model: NoiseModel, contribution: Contribution) -> float:
    signs = np.array(contribution.signs, np.float64)[:, np.newaxis]
    whole, entries = _whole(contribution, signs, len(model.mean) // 2)
    gram = model.precision[np.ix_(whole.rounds, whole.rounds)]
    return float(np.sqrt(entries.T @ gram @ entries)[0, 0])


class _Runs:
    """Runs one aggregator many times side by side, each time from a new first state."""

    def __init__(
        self, aggregator: Aggregator, claim: Claim, report_round: Callable[[], object]
    ) -> None:
        self._aggregator, self._claim, self._report_round = aggregator, claim, report_round

    def run(
        self, runs: int, contribution: Contribution | None, is_there: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Runs all rounds of many runs.

        Args:
          runs: The number m of runs.
          contribution: The rounds and signs of the client; None for none.
          is_there: Whether the client takes part in the runs, or only chooses its signs.

        Returns:
          (2 n, m): the released sums divided by the rounds' clip norms, minus the other client's
          part, and below them the released counts minus its part; and the (k, m) signs of the
          client.
        """
        claim, residuals = self._claim, np.zeros((2 * self._claim.num_rounds, runs))
        signs = ChosenSigns(contribution, runs)
        released, norms = np.zeros(runs), np.full(runs, claim.clip_norm)
        states = [self._aggregator.initialize() for _ in range(runs)]
        for i in range(claim.num_rounds):
            chosen, lengths = signs.choose(i, released), None
            if chosen is not None and is_there:
                lengths = norms * np.where(chosen > 0.0, _WITHIN, -_ABOVE)
            for run, state in enumerate(states):
                # The other client is within the norm.
                clients = [np.array([0.0, _OTHER * norms[run]])]
                clients += [] if lengths is None else [np.array([lengths[run], 0.0])]
                states[run], mean = self._aggregator.next(state, clients)
                total = float(mean[0]) * claim.clients_per_round
                metrics = self._aggregator.metrics(states[run])
                fraction = metrics["unclipped_fraction"] - INDICATOR_WITHIN
                residuals[i, run] = total / norms[run]
                residuals[claim.num_rounds + i, run] = (
                    claim.clients_per_round * fraction - INDICATOR_WITHIN
                )
                released[run] += total
                norms[run] = metrics["next_clip_norm"]
            self._report_round()
        return residuals, signs.values
