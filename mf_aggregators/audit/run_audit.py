"""The audit of one training run, by canary clients and coordinates without canaries.

A fair coin decides for each canary whether it is in the whole run. Its update has the clip norm as
its norm, in a block of coordinates that no other canary uses. An auditor who knows the blocks and
rounds of all canaries, and all releases, guesses every coin, and measures the noise in the other
coordinates. Proofs are in docs/privacy-proofs.md.

* **Right guesses, where the noise of different coordinates is independent**, as it is drawn here:
  on a mechanism of mu-Gaussian DP, their number is at most binomial with the probability
  Phi(mu / 2).
* **Right guesses on any mechanism** whose trade-off curve is at least that of mu-Gaussian DP obey
  a recursion (Mahloujifar, Melis and Chaudhuri, Auditing f-differential privacy in one run, 2024).
* **Fresh noise**: whether each round has new noise, and as much as is claimed.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable

import numpy as np
import scipy.special
import scipy.stats

from mf_aggregators import atomic_files, inputs, random_streams
from mf_aggregators.audit import statistics
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import BoolArray, FloatArray, IntArray
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Participation, secret_seed
from mf_aggregators.random_streams import Stream

# The number of directions without a canary for each round, from which the attack estimates the
# noise. The errors of this covariance reduce the squared power by a twentieth.
_CONTROLS_PER_ROUND = 20
_FEWEST_CONTROLS = 2000
# With fewer directions for each round, the attack would be too weak.
_FEWEST_CONTROLS_PER_ROUND = 5
# The indices of the random streams for coins and blocks.
_COINS, _BLOCKS = 0, 1
# With more canaries, memory grows, but bounds improve little.
MOST_CANARIES = 100_000
# The largest probability with which a bound is above the truth.
MISS_PROBABILITY = 0.05
# The largest probability that a run that keeps its claim is refuted.
FALSE_ALARM_RATE = 1e-4
_BISECTIONS = 40
_LARGEST_MU = 40.0
# The shares of canaries that may be guessed for the bound of any mechanism. The best share for the
# claim is chosen before any score is known.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_BYTES_PER_COORDINATE, _BYTES_PER_NUMBER = 24, 8
# Canaries send updates this many clip norms long, so that missing or wrong clipping shows.
_EXCESS = 10.0
# The fields of a statement that are known only at the end of a run.
_FOUND = (
    *("included", "right", "epsilon_lower_bound", "epsilon_lower_bound_any_mechanism"),
    *("weakest_round", "weakest_percent", "is_refuted"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """The canaries of a run: whether each is in the run, and which coordinates it moves.

    Attributes:
      is_included: (m,) bool: the fair coins.
      coordinates: (D, q) int64: the coordinates of each direction, which are disjoint; the first m
        directions are those of the canaries.
      signs: (D, q) float32: plus and minus one.
    """

    is_included: BoolArray
    coordinates: IntArray
    signs: FloatArray

    @classmethod
    def drawn(cls, seed: int, canaries: int, num_parameters: int, num_rounds: int) -> "Canaries":
        """Draws coins and directions, which are a function of the arguments.

        Args:
          seed: The seed of the run. Updates may depend on it only through cohorts and data.
          canaries: The number m.
          num_parameters: The model's d.
          num_rounds: The rounds n.

        Returns:
          The canaries, with directions of equally many coordinates.

        Raises:
          ValueError: If there is no canary, the model has too few coordinates, or there is too
            little memory.
        """
        canaries = numbers.positive_integer(canaries, "canaries")
        room = num_parameters - canaries
        if room < _FEWEST_CONTROLS_PER_ROUND * num_rounds:
            raise ValueError(
                f"{canaries} canaries over {num_rounds} rounds need a model of "
                f"{canaries + _FEWEST_CONTROLS_PER_ROUND * num_rounds} parameters, found "
                f"{num_parameters}: use fewer canaries or rounds, or a larger model."
            )
        inputs.check_memory(
            _BYTES_PER_COORDINATE * num_parameters, f"{canaries} canaries", "use a smaller model"
        )
        controls = min(room, max(_FEWEST_CONTROLS, _CONTROLS_PER_ROUND * num_rounds))
        directions = canaries + controls
        size = num_parameters // directions
        blocks = random_streams.generator_of(seed, Stream.CANARIES, _BLOCKS)
        order = blocks.permutation(num_parameters)[: directions * size]
        signs = 1.0 - 2.0 * blocks.integers(0, 2, size=(directions, size))
        coins = random_streams.generator_of(seed, Stream.CANARIES, _COINS)
        return cls(
            coins.integers(0, 2, size=canaries).astype(bool),
            order.reshape(directions, size),
            signs.astype(np.float32),
        )

    @property
    def number(self) -> int:
        """The number m of all canaries, in the run or not."""
        return len(self.is_included)

    @staticmethod
    def takes_part(participation: Participation, num_rounds: int, canaries: int) -> BoolArray:
        """Returns (n, m) bool: the rounds in which each canary takes part, if it is in the run.

        Canaries begin in different rounds, one after another, and return as soon as the schema
        allows. So each takes part as often as possible, and some take part in every round.

        Args:
          participation: The schema that timers enforce.
          num_rounds: The rounds n.
          canaries: The number m.
        """
        separation = participation.separation_in(num_rounds)
        most = participation.most_participations(num_rounds)
        latest = max(num_rounds - (most - 1) * separation, min(separation, num_rounds))
        since = np.arange(num_rounds)[:, np.newaxis] - np.arange(canaries) % latest
        return np.asarray((since >= 0) & (since % separation == 0) & (since < most * separation))

    def update(self, canary: int, norm: float) -> tuple[IntArray, FloatArray]:
        """Returns the update of a canary: its coordinates, and its entries there.

        Args:
          canary: The index of the canary, from 0.
          norm: The L2 norm of the update.

        Returns:
          (q,) int64 coordinates and (q,) float32 entries, in the same order. The other entries of
          the update are 0.

        Raises:
          IndexError: If there is no such direction.
        """
        signs = self.signs[canary]
        return self.coordinates[canary], (signs * (norm / math.sqrt(signs.size))).astype(np.float32)

    def project(self, released: FloatArray) -> FloatArray:
        """Returns the released numbers along each direction.

        Args:
          released: (d,) floats: a round's release, in the order of the model's parameters.

        Returns:
          (D,) float64: the inner product with the unit vector of each direction, first those of
          the canaries.

        Raises:
          IndexError: If there are fewer numbers than the model has parameters.
        """
        along = np.sum(np.asarray(released, np.float64)[self.coordinates] * self.signs, axis=1)
        return np.asarray(along / math.sqrt(self.signs.shape[1]))

    def record(self, directory: pathlib.Path, index: int, released: FloatArray) -> None:
        """Writes the projections of a released round on all directions, for :meth:`audit`.

        Args:
          directory: The directory of these files, which is created if it is missing.
          index: The round, from 0. A file of that round is replaced.
          released: As for :meth:`project`.

        Raises:
          OSError: If it cannot be written.
        """
        directory.mkdir(exist_ok=True)
        with atomic_files.writing(_file_of_round(directory, index)) as file:
            np.save(file, self.project(released))

    def audit(
        self,
        directory: pathlib.Path,
        mechanism: Mechanism,
        *,
        num_rounds: int,
        contribution: float,
        delta: float,
        epsilon: float,
    ) -> "RunAudit":
        """Audits the first rounds of a run from the files that :meth:`record` wrote.

        Args:
          directory: The directory of the files.
          mechanism: The claimed mechanism.
          num_rounds: The rounds that were released.
          contribution: The clip norm divided by the clients of a round.
          delta: The delta of epsilons.
          epsilon: The claimed epsilon.

        Returns:
          The result of the audit.

        Raises:
          ValueError: If a round's file is missing, or a release is not finite.
        """
        files = (_file_of_round(directory, index) for index in range(num_rounds))
        return _audit_of_rows(
            (_projected(file, len(self.coordinates)) for file in files),
            self,
            mechanism,
            num_rounds,
            contribution,
            delta=delta,
            epsilon=epsilon,
        )


def _scores(
    projected: FloatArray, takes_part: BoolArray, contribution: float
) -> tuple[FloatArray, FloatArray]:
    """Returns the test statistic of each canary, and its power.

    The covariance of the released numbers between rounds is estimated from directions without a
    canary; it contains the noise and other clients' updates in a random direction, and does not use
    the claimed matrix. The statistic of a canary is about N(0, 1) if the canary is out, and about
    N(power, 1) if it is in.

    Args:
      projected: (n, D) floats: :meth:`Canaries.project` of each round's release.
      takes_part: (n, m) bool: the rounds in which each canary takes part if it is in.
      contribution: The amount that a canary in the run adds to a release along its direction.

    Returns:
      (m,) statistics and (m,) powers. A canary without a round has zeros.

    Raises:
      ValueError: If a number is not finite.
    """
    canaries = takes_part.shape[1]
    model = statistics.NoiseModel.fitted([projected[:, canaries:]], contribution)
    added = contribution * takes_part
    weights = model.precision @ added
    powers = np.sqrt(np.einsum("nm,nm->m", weights, added))
    along = np.einsum("nm,nm->m", weights, model.centred(projected)[:, :canaries])
    return np.divide(along, powers, out=np.zeros(canaries), where=powers > 0.0), powers


def mu_of_right_guesses(right: int, guesses: int, miss_probability: float) -> float:
    """Returns a lower confidence bound on mu if the noise of coordinates is independent.

    Args:
      right: The right guesses, at most binomial with the probability Phi(mu / 2).
      guesses: The number of guessed canaries: all canaries of a group that was fixed before.
      miss_probability: The largest probability with which the bound is above mu.

    Returns:
      The bound; 0 if the guesses are no better than those of a coin.
    """
    wrong = statistics.upper_bound_of_rate(guesses - right, guesses, miss_probability)
    return max(0.0, -2.0 * float(scipy.special.ndtri(wrong)))


def _mu_of_any_mechanism(
    right: float, guesses: int, canaries: int, miss_probability: float
) -> float:
    """Returns a lower confidence bound on mu for any dependence between canaries' noise.

    Args:
      right: The right guesses.
      guesses: The number of guessed canaries, which was fixed before; which canaries are guessed
        may depend on releases.
      canaries: All canaries.
      miss_probability: The largest probability with which the bound is above mu.

    Returns:
      The bound; 0 if nothing is refuted.
    """
    low, high = 0.0, _LARGEST_MU
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if _refutes(math.floor(right), guesses, canaries, middle, miss_probability):
            low = middle
        else:
            high = middle
    return low


def _refutes(right: int, guesses: int, canaries: int, mu: float, probability: float) -> bool:
    """Whether, under mu-Gaussian DP, this many right guesses have less than a probability.

    ``tail`` is the smallest P[at least i right] of a mechanism that reaches ``right`` with the
    given probability, and ``above`` is the sum of these numbers for larger i.
    """
    tail, above = probability, 0.0
    for i in range(right, 0, -1):
        one_is_right = min((i * tail + above) / canaries, 1.0)
        one_is_wrong = float(scipy.special.ndtr(scipy.special.ndtri(one_is_right) - mu))
        above += tail
        tail = max(tail, (canaries * one_is_wrong + above) / (guesses - i + 1))
        if tail > 1.0:
            return True
    return False


def _choose_guesses(canaries: int, mu: float, miss_probability: float) -> int:
    """Returns how many canaries to guess for the best expected bound for any mechanism.

    The number is the best one if statistics are N(0, 1) without a canary and N(mu, 1) with one, and
    depends on no score. With another number, the bound would be worse, but still valid.

    Args:
      canaries: The number of canaries, at least 1.
      mu: The claimed mu.
      miss_probability: The largest probability with which the bound is above the true mu.

    Returns:
      The number, from 1 to ``canaries``.
    """
    # Quantiles of |log likelihood ratio| replace a sample in which half of the canaries are in.
    quantiles = scipy.special.ndtri((np.arange(canaries) + 0.5) / canaries)
    certainty = np.sort(np.abs(mu * (quantiles + 0.5 * mu)))[::-1]
    expected = np.cumsum(scipy.special.expit(certainty))
    best, largest = canaries, -1.0
    for share in _SHARES:
        guesses = max(1, round(share * canaries))
        bound = _mu_of_any_mechanism(expected[guesses - 1], guesses, canaries, miss_probability)
        if bound > largest:
            best, largest = guesses, bound
    return best


@dataclasses.dataclass(frozen=True)
class _FreshNoise:
    """The round with the weakest new noise, and how weak it is.

    Attributes:
      weakest_round: The round, from 1, whose noise is least probable.
      share: The standard deviation of its new noise, divided by the claimed one; normally at least
        about 1, because other clients' updates add to it.
      p_value: An upper bound on the probability that a run that keeps its claim has a round this
        weak.
    """

    weakest_round: int
    share: float
    p_value: float


def _fresh_noise(controls: FloatArray, claimed: FloatArray) -> _FreshNoise:
    """Tests whether each round has new noise, and as much as is claimed.

    In each round, C times the releases is a fresh row of Z plus a vector that follows from earlier
    rounds and from the clients. So its part that is orthogonal to earlier rounds has a squared
    length that is stochastically at least chi-square with K - t degrees of freedom, for all updates
    of clients (docs/privacy-proofs.md).

    Args:
      controls: (n, K) floats: the releases along K directions without a canary.
      claimed: (n, n): the matrix C over the standard deviation of Z in the released mean.

    Returns:
      The weakest round.

    Raises:
      ValueError: If there are not more directions than rounds.
    """
    num_rounds, directions = controls.shape
    if directions <= num_rounds:
        raise ValueError(f"{directions} directions are too few for {num_rounds} rounds.")
    triangle = np.linalg.qr((claimed @ controls).T, mode="r")
    squares = np.diagonal(triangle) ** 2
    freedom = directions - np.arange(num_rounds)
    p_values = scipy.stats.chi2.cdf(squares, freedom)
    # If several are zero, the round with the least noise is taken.
    weakest = int(np.lexsort((squares / freedom, p_values))[0])
    return _FreshNoise(
        weakest + 1,
        math.sqrt(squares[weakest] / freedom[weakest]),
        min(1.0, num_rounds * float(p_values[weakest])),
    )


@dataclasses.dataclass(frozen=True)
class RunAudit:
    """The result of the audit of one run.

    Use it when you read the result of ``one_run``.

    Attributes:
      canaries: The number of canaries, in the run or not.
      included: The number of canaries in the run.
      right: The number of coins that were guessed right.
      mu: The claimed mu, one over the noise multiplier.
      delta: The delta at which epsilons are stated.
      epsilon: The claimed epsilon.
      mu_lower_bound: A lower bound on mu if the noise of coordinates is independent; it is above
        the true mu with a probability of at most MISS_PROBABILITY.
      mu_lower_bound_any_mechanism: Such a bound for any mechanism.
      noise: The round with the weakest new noise.
      is_refuted: Whether the claim is refuted. A run that keeps its claim is refuted with a
        probability of at most the audit's false alarm rate.

    Example:
      >>> import numpy as np
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(1), once, noise_multiplier=0.5)
      >>> def loop(canaries_of):
      ...     aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=10)
      ...     yield aggregator.next(aggregator.initialize(), canaries_of(0))[1]
      >>> sizes = {"num_parameters": 1000, "clip_norm": 1.0, "clients_per_round": 10}
      >>> found = mfa.audit.one_run(loop, mechanism, **sizes, canaries=500)
      >>> found.canaries, round(found.epsilon, 2), found.is_refuted
      (500, 11.0, False)
    """

    canaries: int
    included: int
    right: int
    mu: float
    delta: float
    epsilon: float
    mu_lower_bound: float
    mu_lower_bound_any_mechanism: float
    noise: _FreshNoise
    is_refuted: bool

    @classmethod
    def of(
        cls,
        projected: FloatArray,
        joins: BoolArray,
        is_included: BoolArray,
        claimed: FloatArray,
        *,
        contribution: float,
        noise_multiplier: float,
        delta: float,
        epsilon: float,
        false_alarm_rate: float = FALSE_ALARM_RATE,
    ) -> "RunAudit":
        """Guesses the coins of all canaries, and tests the claim by right guesses and new noise.

        Args:
          projected: (n, D) floats: ``Canaries.project`` of each round's release.
          joins: (n, m) bool: the rounds in which each canary takes part if it is in.
          is_included: (m,) bool: the coins.
          claimed: (n, n): the matrix C over the standard deviation of Z in the released mean.
          contribution: The amount that a canary in the run adds to a release along its direction.
          noise_multiplier: The claimed noise multiplier.
          delta: The delta of epsilons.
          epsilon: The claimed epsilon.
          false_alarm_rate: The largest probability with which a run that keeps its claim is
            refuted.

        Returns:
          The audit.

        Raises:
          ValueError: If a released number is not finite, or there are no more directions without a
            canary than rounds.
        """
        noise = _fresh_noise(projected[:, is_included.size :], claimed)
        statistic, powers = _scores(projected, joins, contribution)
        certainty = powers * (statistic - 0.5 * powers)
        is_right = (certainty > 0.0) == is_included
        mu, canaries, right = 1.0 / noise_multiplier, is_included.size, int(np.sum(is_right))
        guesses = _choose_guesses(canaries, mu, MISS_PROBABILITY)
        surest = np.argsort(-np.abs(certainty), kind="stable")[:guesses]
        # Each of the two tests gets half of the false alarm rate.
        half = 0.5 * false_alarm_rate
        return cls(
            canaries=canaries,
            included=int(np.sum(is_included)),
            right=right,
            mu=mu,
            delta=delta,
            epsilon=epsilon,
            mu_lower_bound=mu_of_right_guesses(right, canaries, MISS_PROBABILITY),
            mu_lower_bound_any_mechanism=_mu_of_any_mechanism(
                int(np.sum(is_right[surest])), guesses, canaries, MISS_PROBABILITY
            ),
            noise=noise,
            is_refuted=mu_of_right_guesses(right, canaries, half) > mu or noise.p_value < half,
        )

    @property
    def epsilon_lower_bound(self) -> float:
        """The epsilon at ``delta`` of ``mu_lower_bound``."""
        return statistics.epsilon_of_mu(self.mu_lower_bound, self.delta)

    def __str__(self) -> str:
        """Returns the result as text, with its bound rounded down."""
        bound = numbers.rounded_down(self.epsilon_lower_bound)
        confidence = f"{100.0 * (1.0 - MISS_PROBABILITY):g} % confidence"
        verdict = "REFUTED" if self.is_refuted else "not refuted"
        return f"epsilon is at least {bound} with {confidence}; the claim is {verdict}"

    @staticmethod
    def of_statement(canaries: int, audit: "RunAudit | None") -> dict[str, object]:
        """Returns the fields of canaries in a privacy statement, JSON-able.

        Args:
          canaries: The number of canaries.
          audit: The result of the audit; None before the end of the run.
        """
        found: dict[str, object] = {
            "canaries": canaries,
            "confidence_percent": f"{100.0 * (1.0 - MISS_PROBABILITY):g}",
            "false_alarm_rate": f"{FALSE_ALARM_RATE:g}",
        }
        if audit is None:
            return found | dict.fromkeys(_FOUND)
        epsilons = (
            numbers.rounded_down(statistics.epsilon_of_mu(mu, audit.delta))
            for mu in (audit.mu_lower_bound, audit.mu_lower_bound_any_mechanism)
        )
        share = numbers.rounded_down(100.0 * audit.noise.share, ".3g")
        noise = (audit.noise.weakest_round, share)
        values = (audit.included, audit.right, *epsilons, *noise, audit.is_refuted)
        return found | dict(zip(_FOUND, values, strict=True))


def one_run(
    loop: Callable[[Callable[[int], list[FloatArray]]], Iterable[FloatArray]],
    mechanism: Mechanism,
    *,
    num_parameters: int,
    clip_norm: float,
    clients_per_round: float,
    canaries: int = 1000,
    delta: float = 1e-6,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    seed: int | None = None,
) -> RunAudit:
    """Audits one training run of any loop with any aggregator, by canaries in the run.

    Use it when you test a whole training loop in one of its normal runs.

    The loop treats the updates of canaries like those of its clients: it clips, sums and divides
    them. About half of the canaries are in the run, by secret coins, and keep to the participation
    of the mechanism. ``docs/privacy-proofs.md`` has the theorems.

    Args:
      loop: Your training loop. Its argument is a function from a round (from 0) to the updates of
        the round's canaries: a list of (num_parameters,) float32 arrays of ten clip norms, possibly
        none, which the loop reshapes and casts as its updates are and adds to those of its cohort.
        It returns or yields, round by round, the (num_parameters,) mean that was released. It may
        end before its last round.
      mechanism: The claim: matrix, participation without sampling, and noise multiplier.
      num_parameters: The size d of the model; at least the canaries and five for each round.
      clip_norm: The L2 norm to which updates are clipped, the same in each round.
      clients_per_round: The number by which sums are divided, with or without canaries.
      canaries: The number of canaries, in the run or not.
      delta: The delta at which epsilon is stated.
      false_alarm_rate: The largest probability of ``is_refuted`` for a run that keeps its claim.
      seed: The seed of coins and coordinates; None for a secret seed. The loop must not depend on
        it.

    Returns:
      The audit; its bounds are above the truth with a probability of at most 5 % each.

    Raises:
      TypeError: If ``mechanism`` is not a Mechanism.
      ValueError: If a number is out of its range, a sampling scheme draws the clients, the claim is
        too weak for so many canaries, the model is too small, or the loop releases vectors of
        another size, numbers that are not finite, too many rounds, or a round without asking for
        its canaries.

    Example:
      >>> import numpy as np
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> matrix = mfa.factorizations.banded(8, num_bands=4, participation=timers)
      >>> mechanism = mfa.Mechanism(matrix, timers, noise_multiplier=0.5)
      >>> def loop(canaries_of):
      ...     aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=10)
      ...     state = aggregator.initialize()
      ...     for i in range(8):
      ...         clients = [np.full(3000, 0.01, np.float32)] * 10
      ...         state, mean = aggregator.next(state, clients + canaries_of(i))
      ...         yield mean
      >>> sizes = {"num_parameters": 3000, "clip_norm": 1.0, "clients_per_round": 10}
      >>> mfa.audit.one_run(loop, mechanism, **sizes, canaries=500).is_refuted
      False
    """
    if type(mechanism) is not Mechanism:
        raise TypeError(f"mechanism must be a Mechanism, found {numbers.shown(mechanism)}.")
    if mechanism.sampling is not None:
        raise ValueError(
            "this audit needs a participation schema, and the mechanism has a sampling scheme: use "
            "audit.audit_drawn, or a mechanism with the schema that its clients keep."
        )
    norm = numbers.positive_number(clip_norm, "clip_norm")
    contribution = norm / numbers.positive_number(clients_per_round, "clients_per_round")
    numbers.positive_number(mechanism.noise_multiplier, "noise_multiplier")
    num_parameters = numbers.positive_integer(num_parameters, "num_parameters")
    rate = statistics.checked_false_alarm_rate(false_alarm_rate)
    epsilon, num_rounds = mechanism.guarantee(delta).epsilon, mechanism.num_rounds
    seed = secret_seed() if seed is None else seed
    drawn = Canaries.drawn(seed, canaries, num_parameters, num_rounds)
    # The test of right guesses gets half of the false alarm rate.
    provable = mu_of_right_guesses(drawn.number, drawn.number, 0.5 * rate)
    if provable * mechanism.noise_multiplier <= 1.0:
        raise ValueError(
            f"{drawn.number} canaries cannot refute a noise multiplier of "
            f"{mechanism.noise_multiplier:g}: use more canaries or a larger noise multiplier."
        )
    joins = (
        Canaries.takes_part(mechanism.noise_reference, num_rounds, drawn.number) & drawn.is_included
    )
    asked: set[int] = set()

    def canaries_of(index: int) -> list[FloatArray]:
        if not 0 <= index < num_rounds:
            raise ValueError(f"rounds are 0 to {num_rounds - 1}, found {index!r}.")
        asked.add(index)
        updates = np.zeros((int(np.sum(joins[index])), num_parameters), np.float32)
        for update, canary in zip(updates, np.flatnonzero(joins[index]), strict=True):
            coordinates, entries = drawn.update(int(canary), _EXCESS * norm)
            update[coordinates] = entries
        return list(updates)

    rows = []
    for index, released in enumerate(loop(canaries_of)):
        if index not in asked:
            raise ValueError(
                f"the loop released round {index} without asking for its canaries: call the loop's "
                f"argument with {index}, and add the vectors that it returns to the updates of "
                "that round."
            )
        if np.shape(released) != (num_parameters,):
            raise ValueError(
                f"round {index} released an array of shape {np.shape(released)}, and the audit "
                f"needs ({num_parameters},), in the order of the canaries' updates."
            )
        rows.append(drawn.project(released))
    if not rows:
        raise ValueError("the loop released no round: return or yield the mean of each round.")
    claim = {"delta": delta, "epsilon": epsilon, "false_alarm_rate": rate}
    return _audit_of_rows(rows, drawn, mechanism, len(rows), contribution, **claim)


def _audit_of_rows(
    rows: Iterable[FloatArray],
    canaries: Canaries,
    mechanism: Mechanism,
    num_rounds: int,
    contribution: float,
    **claim: float,
) -> RunAudit:
    """Audits releases along the directions of canaries, a row for each round."""
    inputs.check_memory(
        4 * _BYTES_PER_NUMBER * num_rounds * len(canaries.coordinates),
        f"the audit of {num_rounds} rounds",
        "use fewer canaries",
    )
    projected = np.stack(list(rows))
    joins = Canaries.takes_part(mechanism.noise_reference, mechanism.num_rounds, canaries.number)[
        :num_rounds
    ]
    # The standard deviation of an entry of Z in the released mean.
    stddev = mechanism.sigma * contribution
    strategy = mechanism.factorization.strategy_matrix()[:num_rounds, :num_rounds]
    return RunAudit.of(
        projected,
        joins,
        canaries.is_included,
        strategy / stddev,
        contribution=contribution,
        noise_multiplier=mechanism.noise_multiplier,
        **claim,
    )


def _file_of_round(directory: pathlib.Path, index: int) -> pathlib.Path:
    return directory / f"round_{index + 1}.npy"


def _projected(file: pathlib.Path, directions: int) -> FloatArray:
    try:
        found = np.load(file, allow_pickle=False)
    except Exception as error:
        # NumPy's reader raises many types for a damaged file.
        raise ValueError(
            f"{file} cannot be read, and the audit needs the release of each round: restore the "
            "file."
        ) from error
    if found.shape != (directions,):
        raise ValueError(f"{file} belongs to another run: restore the file of this run.")
    return np.asarray(found)
