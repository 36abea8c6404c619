"""What min-separation sampling and balls in bins share: clients draw for themselves.

No client has to know what another one does, and there are no groups. The rounds of each client are
``separation`` or more apart.

The guarantee depends on C itself, and not on its column norms alone: a client's rounds are hidden
among neighbouring ones, and the nearer the columns of these are to one another, the less of it is
hidden. An epsilon has a certificate (``certificate_search``), or is the one without amplification
where that is smaller.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from mf_aggregators.accounting import trade_offs
from mf_aggregators.kernel import dominating_pairs, draws_of_clients, gaussian, numbers
from mf_aggregators.kernel.certificate import MECHANISMS, Certificate, check_certificate
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    ImportanceSampler,
    possible_orders,
)
from mf_aggregators.kernel.draws_of_clients import (
    LEAST_NOISE_MULTIPLIER,
    AllParticipations,
    SampledRun,
    SecretRounds,
    StrategyColumns,
    is_accounted,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.participation import certificate_search
from mf_aggregators.participation.certificate_search import (
    Amplified,
    Certification,
    MechanismBudget,
)
from mf_aggregators.participation.schemes import SamplingScheme, nth_round, too_large

# For the rates of an attacker: at which epsilons the divergence is bounded, by how many samples.
_EPSILONS = tuple(0.25 * step for step in range(41))
_SAMPLES_OF_DIVERGENCES, _FAILURE_OF_DIVERGENCES = 2**15, 1e-9
# The first step from a noise multiplier whose epsilon is above its target.
_RELATIVE_STEP = 2e-3
# A search for one noise multiplier may test half of the mechanisms that share the failure
# probability: the guarantee of its result is another result. With fewer tries left than the second
# number, it begins with more noise.
_MOST_TRIES, _TRIES_OF_SMALL_STEPS = MECHANISMS // 2, 5

_TOGETHER = """\
All rounds together are one mechanism, whose noise is that of a Gaussian one and whose
     mean depends on the secret rounds of each client, also with updates that depend on earlier
     rounds."""

SECRET_OF_CLIENTS = (
    "Neither the data nor what was released has a part in that, and nobody who sees what was "
    "released learns who took part. A client that cannot be asked in such a round contributes "
    "nothing to it; for its later rounds that makes no difference, and none of them has a part in "
    "whether it can be asked. Rounds of too many or too few clients are released as all others, "
    "and their sums are divided by the same number."
)


@dataclasses.dataclass(frozen=True)
class SeparatedScheme(SamplingScheme):
    """Schemes without groups, in which each client's rounds are some number of rounds apart.

    Attributes:
      separation: Two participations i and j of one client satisfy |i - j| >= separation.
    """

    separation: int

    largest_move: ClassVar[float] = 1.0
    depends_on_matrix: ClassVar[bool] = True
    covers_absences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers.set_positive_integers(self, "separation")
        self.as_draws()

    @classmethod
    def _default(
        cls, num_rounds: int, num_bands: int, population: int, clients_per_round: int
    ) -> int:
        del num_rounds, population, clients_per_round
        return num_bands

    # Accounting.

    @abc.abstractmethod
    def as_draws(self) -> SecretRounds:
        """Returns the scheme as the integers that the kernel accounts for."""

    def dominating_pair(
        self,
        sigma: float,
        columns: StrategyColumns | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> DominatingPair:
        """Returns what dominates a run, with what the rounding of rows adds to C.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: C, of the scheme's rounds and at most its bands; None for a diagonal C of equal
            entries, if the scheme is for one band.
          num_coordinates: Parameters times rounds.

        Raises:
          ValueError: If columns are missing or do not fit the scheme.
        """
        return dominating_pairs.dominating_pair(
            self._fitting(columns), self.as_draws(), sigma, num_coordinates
        )

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of a client may change the same row of C x."""
        return self.separation < self.num_bands

    def _fitting(self, columns: StrategyColumns | None) -> StrategyColumns:
        """The columns of C, or those of a diagonal C for one band."""
        if columns is not None:
            return columns
        if self.num_bands > 1:
            raise ValueError(
                f"{self.name} needs the strategy matrix: its guarantee depends on all entries "
                f"of the {self.num_bands} bands. Give strategy_matrix=."
            )
        return StrategyColumns(np.ones((self.num_rounds, 1)))

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> Amplified:
        """Returns the epsilon of a run, and its certificate; it takes one mechanism of a budget."""
        delta = numbers.delta(delta)
        together = self.all_participations(columns)
        unamplified, refused = draws_of_clients.unamplified(together, sigma, delta, num_coordinates)
        pair = self.dominating_pair(max(sigma, LEAST_NOISE_MULTIPLIER), columns, num_coordinates)
        fitting, draws = self._fitting(columns), self.as_draws()

        def is_proved(candidate: Certificate, advance: Callable[[int], object]) -> bool:
            return check_certificate(
                candidate, fitting, draws, float(sigma), delta, num_coordinates, advance=advance
            )

        found = None
        if unamplified > 0.0 and sigma >= LEAST_NOISE_MULTIPLIER:
            try:
                part = draws_of_clients.largest_part(fitting, draws)
                left = gaussian.delta_left(delta, sigma / part, num_coordinates)
                how = certification or Certification()
                found = certificate_search.certificate_of(pair, left, unamplified, how, is_proved)
            except TailError as error:
                refused = error
        if found is not None:
            return Amplified(found.epsilon, found)
        if refused is not None and math.isinf(unamplified):
            raise refused
        return Amplified(unamplified, None)

    def calibrated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns a noise multiplier whose certified epsilon is at most a target.

        At most 8 are tested, or as many as are left of the budget. If none of them is proved, it is
        the one that suffices without amplification.
        """
        delta = numbers.delta(delta)
        certification = certification or Certification()
        budget = certification.budget
        if budget is None:
            budget = MechanismBudget(_MOST_TRIES)
            certification = dataclasses.replace(certification, budget=budget)
        enough = self._enough(target, delta, columns, num_coordinates)
        found = self._estimated(target, delta, columns, certification, num_coordinates)
        step = _RELATIVE_STEP
        for _ in range(_TRIES_OF_SMALL_STEPS - budget.left):
            found, step = found * (1.0 + step), 2.0 * step
        while budget.left > 0 and found < enough:
            left = budget.left
            try:
                epsilon = self.amplified(
                    found, delta, columns, certification, num_coordinates
                ).epsilon
            except TailError:
                epsilon = math.inf
            if epsilon <= target:
                return found
            if budget.left == left:
                # So little noise is not amplified, and nothing was tested: the try counts.
                budget.take()
            found = min(found * (1.0 + step), enough)
            step *= 2.0
        return enough

    def estimated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
    ) -> float:
        """Returns about the noise multiplier of a target, fast and without a proof."""
        return self._estimated(
            target, delta, columns, certification, DEFAULT_NUM_COORDINATES, is_rough=True
        )

    def _estimated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int,
        *,
        is_rough: bool = False,
    ) -> float:
        """Where :meth:`calibrated` begins; ``is_rough`` for an error of a few per cent."""
        certification = certification or Certification()
        enough = self._enough(target, delta, columns, num_coordinates)
        self.dominating_pair(enough, columns)
        try:
            part = self.all_participations(columns).largest_part
            left = gaussian.delta_left(delta, enough / part, num_coordinates)
        except TailError:
            return enough
        if enough <= LEAST_NOISE_MULTIPLIER:
            return enough
        return certificate_search.estimated_noise_multiplier(
            lambda sigma: self.dominating_pair(sigma, columns, num_coordinates),
            target,
            left,
            enough,
            LEAST_NOISE_MULTIPLIER,
            seed=certification.seed,
            max_samples=certification.max_samples,
            is_rough=is_rough,
        )

    def log_moments(
        self, sigma: float, columns: StrategyColumns | None, num_coordinates: int
    ) -> tuple[tuple[int, float], ...]:
        """Returns Renyi orders a >= 2 and log E_Q (P/Q)^a of the dominating pair, exactly.

        There are none for less noise than is amplified, or for so much that nothing can be told
        from it anyway.
        """
        if not is_accounted(sigma):
            return ()
        pair = self.dominating_pair(sigma, columns, num_coordinates)
        return tuple(
            (order, ImportanceSampler(pair, order).log_mgf)
            for order in possible_orders(pair)
            if order >= 2
        )

    def divergences(
        self, sigma: float, columns: StrategyColumns | None, seed: int, num_coordinates: int
    ) -> tuple[tuple[float, float], ...]:
        """Returns epsilons and bounds on the hockey-stick divergence of P from Q.

        The bounds hold but for a probability of 1e-9, which is added to each. There are none
        where :meth:`log_moments` has none.
        """
        if not is_accounted(sigma):
            return ()
        return _divergences(self, sigma, columns, seed, num_coordinates)

    def all_participations(self, columns: StrategyColumns | None) -> AllParticipations:
        """Returns what all participations of a client are together."""
        if self.shares_rows:
            return super().all_participations(columns)
        return self.as_draws().together

    def run(self, sigma: float, columns: StrategyColumns | None) -> SampledRun:
        """Returns a run as data of the kernel."""
        return SampledRun(self.as_draws(), sigma, self._fitting(columns))

    @property
    def _most_rounds(self) -> int:
        return math.ceil(self.num_rounds / self.separation)

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of commands that train, by name."""
        return {**super().run_flags(), "separation": self.separation}

    def together_words(self) -> str:
        """Returns what all rounds together are, as a mechanism."""
        return _TOGETHER

    def deviation_of_bins(self, cohorts: Sequence[IntArray]) -> str | None:
        """Returns why clients cannot each have a bin of rounds, independent and as likely.

        Args:
          cohorts: For each round the increasing indices of its clients.
        """
        bins = np.full(self.population, -1)
        for index, cohort in enumerate(cohorts):
            number = index % self.separation
            if np.any((bins[cohort] != -1) & (bins[cohort] != number)):
                return f"a client of {nth_round(index)} also took part in a round of another bin"
            bins[cohort] = number
        if not cohorts:
            return None
        sizes = np.bincount(bins[bins >= 0], minlength=self.separation)
        clients = np.full(self.separation, self.population)
        return too_large(sizes, clients, 1.0 / self.separation, self.clients_per_round)


# Statements ask for the same bounds again and again.
@functools.lru_cache(maxsize=8)
def _divergences(
    scheme: SeparatedScheme,
    sigma: float,
    columns: StrategyColumns | None,
    seed: int,
    num_coordinates: int,
) -> tuple[tuple[float, float], ...]:
    return trade_offs.sampled_divergences(
        scheme.dominating_pair(sigma, columns, num_coordinates),
        _EPSILONS,
        num_samples=_SAMPLES_OF_DIVERGENCES,
        failure=_FAILURE_OF_DIVERGENCES,
        seed=seed,
    )
