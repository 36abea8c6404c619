"""Sampling schemes: random rules by which clients take part, and whom they draw.

Towards everybody who does not know the draws, a scheme amplifies the guarantee. Devices that decide
themselves when to take part, without a coin of known probability, follow no scheme, and nothing
amplifies their guarantee.

A scheme is three things: draws, integers of the kernel (``kernel.draws_of_clients``) with a
sampler; an accountant, in the kernel as well (``kernel.losses``, ``kernel.certificate``); and words
(``scheme_words``). An amplified guarantee is worth nothing if the batches came about in another
way: ``ledger_checks`` compares cohorts with the scheme, and :meth:`Sampler.deviation` with the very
batches of a secret seed.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from dp_accounting import dp_event

from mf_aggregators.accounting import calibration, composition
from mf_aggregators.kernel import draws_of_clients, losses, numbers
from mf_aggregators.kernel.draws_of_clients import (
    AllParticipations,
    Cohorts,
    Draws,
    Groups,
    InGroups,
    SampledRun,
    SecretRounds,
    StrategyColumns,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.losses import binomial_tail
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.participation import certificate_search, ledger_checks, scheme_words
from mf_aggregators.participation.certificate_search import Amplified, Certification
from mf_aggregators.participation.kinds import Participation, of_schema
from mf_aggregators.participation.scheme_words import Words

# The default largest batch is exceeded with at most this probability, at next to no cost.
_PROBABILITY_OF_CUT = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingScheme(Participation):
    """A random rule by which clients take part, and its sizes, checked against one another.

    Attributes:
      num_rounds: The rounds n of the run.
      num_bands: The bands of C.
      population: The number of clients (or examples) m.
      clients_per_round: The batch size B, expected or exact.
      has_groups: Whether the server draws from one group of the clients after the other, as many
        as C has bands. Otherwise clients draw for themselves: the guarantee depends on all entries
        of C, and holds as well where clients that were drawn are absent.
      has_random_sizes: Whether batches vary in size around ``clients_per_round``. Where they do
        not, a client takes the place of another one, which costs noise: plans for any way to take
        part leave such schemes out.
      takes_any_matrix: Whether C may have more bands than a client's rounds are apart.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    is_sampled: ClassVar[bool] = True
    has_groups: ClassVar[bool] = True
    has_random_sizes: ClassVar[bool] = True
    takes_any_matrix: ClassVar[bool] = False

    def __post_init__(self) -> None:
        sizes = (each.name for each in dataclasses.fields(self))
        numbers.set_positive_integers(self, *sizes)
        if self.num_bands > self.num_rounds:
            raise ValueError(
                f"num_bands must be at most num_rounds, found {self.num_bands} bands for "
                f"{self.num_rounds} rounds."
            )
        # Refuses sizes that do not fit one another.
        self.as_draws()

    @classmethod
    def own_size(cls) -> str | None:
        """Returns the name of the fifth size: separation, largest_batch or None."""
        names = [each.name for each in dataclasses.fields(cls)]
        return names[4] if len(names) > 4 else None

    @staticmethod
    def _default(num_rounds: int, num_bands: int, population: int, clients_per_round: int) -> int:
        """The default of the fifth size: a separation of b."""
        del num_rounds, population, clients_per_round
        return num_bands

    @abc.abstractmethod
    def as_draws(self) -> Draws:
        """Returns the scheme as the integers that the kernel accounts for."""

    @property
    def largest_cohort(self) -> int:
        """The most clients that one round can have."""
        return self.population

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of a client may change the same row of C x."""
        return self.as_draws().distance < self.num_bands

    # Rounds.

    def schema(self) -> Participation:
        """Returns the schema that every draw keeps: the guarantee against who knows all draws."""
        return of_schema(self.as_schema())

    def as_schema(self) -> Schema:
        """Returns the schema that every draw keeps, as numbers for the kernel."""
        return self.as_draws().schema

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns the most rounds of the first ``num_rounds``, or of all, that a client is in."""
        first = min(num_rounds or self.num_rounds, self.num_rounds)
        return dataclasses.replace(self.as_draws(), num_rounds=first).most_participations

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that ``participation.sampling_from_dict`` takes back."""
        return {"name": self.name, **dataclasses.asdict(self)}

    # Accounting. Noise multipliers are relative to the largest column norm of C.

    def run(self, sigma: float, columns: StrategyColumns | None) -> SampledRun:
        """Returns a run as data of the kernel.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: C, where clients draw for themselves; None for groups, and for a diagonal C of
            equal entries.

        Raises:
          ValueError: If the guarantee depends on columns that are missing.
        """
        if columns is None and not self.has_groups:
            if self.num_bands > 1:
                raise ValueError(
                    f"{self.name} needs the strategy matrix: its guarantee depends on all entries "
                    f"of the {self.num_bands} bands. Give strategy_matrix=."
                )
            columns = StrategyColumns(np.ones((self.num_rounds, 1)))
        return SampledRun(self.as_draws(), sigma, columns)

    def all_participations(self, columns: StrategyColumns | None) -> AllParticipations:
        """Returns all participations of a client together.

        Args:
          columns: As in :meth:`run`; needed if participations share rows of C x.
        """
        return self.run(1.0, columns).together if self.shares_rows else self.as_draws().together

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> Amplified:
        """Returns the epsilon of a run, and its proof.

        Args:
          sigma: The noise multiplier, at least 0.
          delta: The delta of the guarantee.
          columns: As in :meth:`run`.
          certification: How epsilons are certified, where clients draw for themselves: it takes
            one mechanism of a budget; None for defaults.
          num_coordinates: Parameters times rounds.

        Raises:
          TailError: If so little noise cannot be accounted for: a ValueError.
          ValueError: If an argument is out of its range or does not fit the scheme.
        """
        draws = self.as_draws()
        if isinstance(draws, InGroups):
            found = losses.epsilon(draws, sigma, delta, num_coordinates=num_coordinates)
            return Amplified(found, None)
        run = self.run(sigma, columns)
        return certificate_search.amplified(run, delta, certification, num_coordinates)

    def calibrated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns the least noise multiplier for an epsilon; arguments as of :meth:`amplified`.

        The epsilon that is stated of it is never above the target.

        Args:
          target: The epsilon that is to hold.
          delta: The delta of the guarantee.
          columns: As in :meth:`run`.
          certification: As in :meth:`amplified`.
          num_coordinates: Parameters times rounds.

        Raises:
          ValueError: If no noise multiplier gives the target.
        """
        draws = self.as_draws()
        if isinstance(draws, InGroups):
            return calibration.noise_multiplier_of_groups(draws, target, delta, num_coordinates)
        run = self.run(1.0, columns)
        return certificate_search.calibrated(run, target, delta, certification, num_coordinates)

    def epsilon(
        self,
        noise_multiplier: float,
        delta: float,
        strategy_matrix: Any = None,
        *,
        seed: int = 0,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns the epsilon of a mechanism whose clients take part by the scheme.

        Args:
          noise_multiplier: Standard deviation of Z over (clip norm times the largest column
            norm of C); zero means no noise.
          delta: Below 1. For cyclic groups it is at least 1e-12 and 4e-15 times the compositions.
          strategy_matrix: (n, n), C, where clients draw for themselves; None for a diagonal one of
            equal entries, if ``num_bands`` is 1.
          seed: The seed of the Monte Carlo test that proves such an epsilon, chosen before
            anything is known of its result.
          num_coordinates: Parameters times rounds, as in ``accounting.epsilon``.

        Returns:
          An epsilon >= 0 for which the run is (epsilon, delta)-DP; infinity without noise.

        Raises:
          TailError: As in ``accounting.epsilon``.
          ValueError: If an argument is out of its range, or C is missing or does not fit.
        """
        return self.amplified(
            numbers.non_negative_number(noise_multiplier, "noise_multiplier"),
            delta,
            self._columns(strategy_matrix),
            Certification(seed=seed),
            num_coordinates,
        ).epsilon

    def noise_multiplier(
        self,
        epsilon: float,
        delta: float,
        strategy_matrix: Any = None,
        *,
        seed: int = 0,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns the least noise multiplier whose epsilon is proved to be within a target.

        It is the inverse of :meth:`epsilon`. Where only samples bound epsilon, it may be that of no
        amplification: for targets far below 1, they prove none.

        Args:
          epsilon: Above 0.
          delta: As in :meth:`epsilon`, and so all others.
          strategy_matrix: As there.
          seed: As there.
          num_coordinates: As there.

        Raises:
          ValueError: As there, and if no noise multiplier gives the target.
        """
        return self.calibrated(
            numbers.positive_number(epsilon, "epsilon"),
            delta,
            self._columns(strategy_matrix),
            Certification(seed=seed),
            num_coordinates,
        )

    def event(self, noise_multiplier: float, strategy_matrix: Any = None) -> dp_event.DpEvent:
        """Returns a run as an event of dp-accounting, to be composed with others.

        Args:
          noise_multiplier: As in :meth:`epsilon`.
          strategy_matrix: As there.

        Returns:
          What ``accounting.composed_epsilon`` amplifies, with every scheme. Accountants of
          dp-accounting take it, for Poisson sampling, for the composed sampled Gaussian of BandMF
          App. F.3, where a client is added or removed (``ADD_OR_REMOVE_ONE``); for fixed-size
          subsets for sampling without replacement with half the noise multiplier, where one is
          replaced (``REPLACE_ONE``); for the other schemes, which they have no event for, for the
          Gaussian mechanism without amplification, where a client is added or removed.

        Raises:
          ValueError: If the noise multiplier is negative or not finite.
        """
        sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
        return composition.event(self.run(sigma, self._columns(strategy_matrix)))

    def _columns(self, strategy_matrix: Any) -> StrategyColumns | None:
        if strategy_matrix is None:
            return None
        entries = certificate_search.columns_of_matrix(strategy_matrix, self.num_bands)
        # A matrix alone does not say how rows are made: with all bands, perhaps from rows of Z.
        if self.shares_rows or entries.shape[1] == self.num_rounds:
            return certificate_search.of_any_noise(entries)
        return StrategyColumns(entries)

    # Draws.

    def sampler(self, seed: int) -> "Sampler":
        """Creates the sampler of a run, and draws the parts that its rounds share.

        It takes 8 bytes for each client, and with min-separation sampling for each participation.

        Args:
          seed: Any non-negative integer, the same for all rounds of one run and for no other
            run; ``participation.secret_seed`` makes one.

        Returns:
          The sampler.

        Raises:
          ValueError: If the seed is negative.
        """
        return Sampler(self, seed)

    def deviation(self, num_clients: int, cohorts: Sequence[IntArray]) -> str | None:
        """Returns why the cohorts of the first rounds cannot come from the scheme, or None.

        Args:
          num_clients: The clients of the population, drawn or not.
          cohorts: As in ``ledger_checks.deviation``.

        Returns:
          The first deviation, as the end of a sentence that names no client.
        """
        if num_clients != self.population:
            return f"the ledger has {num_clients} clients, not {self.population}"
        return ledger_checks.deviation(self.as_draws(), cohorts)

    # Words.

    def __str__(self) -> str:
        return str(self.as_draws())

    @property
    def words(self) -> Words:
        """Sentences about the scheme."""
        return scheme_words.of_draws(self.as_draws())

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to do what for the guarantee to hold: sentences, after "only if"."""
        return scheme_words.of_draws(self.as_draws(), sampler).condition

    def factorize_flags(self) -> str:
        """Returns the flags of the schema that noise is scaled to: one participation."""
        return "--participation=single"

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of commands that train, by name."""
        own = self.own_size()
        return {
            "sampling": self.name,
            "clients_per_round": self.clients_per_round,
            **({} if own is None else {own: getattr(self, own)}),
        }


@dataclasses.dataclass(frozen=True)
class CyclicGroups(SamplingScheme):
    """Schemes of a data centre that draws from one group of the clients after the other.

    The clients are split into as many groups as C has bands, and round i draws from group i modulo
    that number alone (BandMF Alg. 2 and 6).
    """

    _kind: ClassVar[Callable[..., Groups]]

    def as_draws(self) -> Groups:
        """Returns the scheme as the integers that the kernel accounts for."""
        return self._kind(*dataclasses.astuple(self))

    @property
    def sampling_probability(self) -> float:
        """The probability that a client of a round's group is in the round."""
        return self.as_draws().sampling_probability


@dataclasses.dataclass(frozen=True)
class PoissonSampling(CyclicGroups):
    """Each client of a round's group joins independently with probability B b / m (Cor. F.1).

    The groups have floor(m / b) or ceil(m / b) clients; batches vary in size around B.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
    """

    name: ClassVar[str] = "poisson"
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.Poisson


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(CyclicGroups):
    """Exactly B clients of a round's group, a uniformly random subset each time (Algorithm 2).

    All groups have floor(m / b) clients; up to b - 1 clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "fixed_size"
    has_random_sizes: ClassVar[bool] = False
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.FixedSize


@dataclasses.dataclass(frozen=True)
class Shuffling(CyclicGroups):
    """A round's group is shuffled and cut into batches of B, afresh whenever it is used up.

    As in Cor. F.2 each pass over a group shows every client of it once. The groups have a
    multiple of B clients, floor(m / (b B)) B; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "shuffling"
    has_random_sizes: ClassVar[bool] = False
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.Shuffling


@dataclasses.dataclass(frozen=True)
class RandomAllocation(CyclicGroups):
    """Each client of a group is in one secret round of every cycle of its group's rounds.

    A cycle has t = floor(m / (b B)) rounds, and a group t B clients, so that B clients are in a
    round on average; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
    """

    name: ClassVar[str] = "random_allocation"
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.RandomAllocation


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSampling(CyclicGroups):
    """Poisson sampling whose batches have a largest size: of more, a random subset stays.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation before batches are cut.
      largest_batch: The most clients L of a round, at least B. By default, the least that a round
        exceeds with a probability of at most 1e-6.
    """

    largest_batch: int

    name: ClassVar[str] = "truncated_poisson"
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.TruncatedPoisson

    @staticmethod
    def _default(num_rounds: int, num_bands: int, population: int, clients_per_round: int) -> int:
        # Poisson sampling checks the other sizes.
        poisson = PoissonSampling(num_rounds, num_bands, population, clients_per_round)
        low, high = clients_per_round, max(-(-population // num_bands), clients_per_round)
        q = poisson.sampling_probability
        while low < high:
            middle = (low + high) // 2
            more = float(binomial_tail(middle + 1, -(-population // num_bands), q))
            low, high = (low, middle) if more <= _PROBABILITY_OF_CUT else (middle + 1, high)
        return low

    @property
    def largest_cohort(self) -> int:
        """The most clients that one round can have."""
        return self.largest_batch


@dataclasses.dataclass(frozen=True)
class SeparatedScheme(SamplingScheme):
    """Schemes without groups: clients draw rounds for themselves, a separation or more apart.

    No client has to know what another one does. The guarantee depends on C itself, and not on its
    column norms alone: a client's rounds are hidden among neighbouring ones, and the nearer the
    columns of these are to one another, the less of it is hidden. An epsilon has a certificate
    (``certificate_search``), or is the one without amplification where that is smaller.

    Attributes:
      separation: Two participations i and j of one client satisfy |i - j| >= separation.
    """

    separation: int

    has_groups: ClassVar[bool] = False
    _kind: ClassVar[Callable[..., SecretRounds]]

    def as_draws(self) -> SecretRounds:
        """Returns the scheme as the integers that the kernel accounts for."""
        return self._kind(*dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class MinSeparationSampling(SeparatedScheme):
    """Each client whose timer allows it joins with a secret coin (b-min-sep, arXiv 2602.09338).

    A client that joined is not free to join again for separation - 1 rounds. In every round in
    which it is free, it joins with probability p, whatever happened before. Before round 0
    timers are in their stationary state: a client is free in round 0 with
    ``probability_free_at_first``, and for each of i = 1, ..., separation - 1 it is first free in
    round i with ``probability_of_first_wait``. So clients_per_round clients join in every round
    on average.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: Participations of a client are so many rounds apart; at least num_bands, and
        num_bands by default.
    """

    name: ClassVar[str] = "min_separation"
    _kind: ClassVar[Callable[..., draws_of_clients.MinSeparation]] = draws_of_clients.MinSeparation

    def as_draws(self) -> draws_of_clients.MinSeparation:
        """Returns the scheme as the integers that the kernel accounts for."""
        return self._kind(*dataclasses.astuple(self))

    @property
    def joining_probability(self) -> float:
        """The probability p = B / (m - B (separation - 1)) of the coin of a free client."""
        return self.as_draws().joining_probability

    @property
    def probability_free_at_first(self) -> float:
        """The probability 1 / (1 + (separation - 1) p) that a client is free in round 0."""
        return 1.0 / (1.0 + (self.separation - 1) * self.joining_probability)

    @property
    def probability_of_first_wait(self) -> float:
        """The probability p / (1 + (separation - 1) p) of being free first in one given round.

        It is the same for each of the rounds 1 to separation - 1.
        """
        return self.joining_probability * self.probability_free_at_first


@dataclasses.dataclass(frozen=True)
class BallsInBins(SeparatedScheme):
    """Each client is put once into one of ``separation`` bins at random (arXiv 2410.06266).

    It takes part in every round i with i modulo separation equal to its bin. Every client takes
    part, and m / separation of them in every round on average. So that this is B but for the
    remainder of a division, either separation is floor(m / B) or B is floor(m / separation).

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: The number of bins, by default floor(m / B). It may be below num_bands: then
        participations of a client share rows of C x.
    """

    name: ClassVar[str] = "balls_in_bins"
    takes_any_matrix: ClassVar[bool] = True
    _kind: ClassVar[Callable[..., SecretRounds]] = draws_of_clients.BallsInBins

    def __post_init__(self) -> None:
        super().__post_init__()
        most_bins = self.population // self.clients_per_round
        clients_of_bin = self.population // self.separation
        if most_bins != self.separation and clients_of_bin != self.clients_per_round:
            raise ValueError(
                f"a population of {self.population} in {self.separation} bins has "
                f"{self.population / self.separation:.6g} clients in a round, not "
                f"{self.clients_per_round}. Use a separation of {most_bins}, or "
                f"{clients_of_bin} clients per round."
            )

    @staticmethod
    def _default(num_rounds: int, num_bands: int, population: int, clients_per_round: int) -> int:
        del num_rounds, num_bands
        positive = numbers.positive_integer(clients_per_round, "clients_per_round")
        return max(numbers.positive_integer(population, "population") // positive, 1)


class Sampler(Cohorts):
    """The clients that a scheme draws from a seed, in all rounds; ``scheme.sampler(seed)``.

    Privacy amplification holds only towards those who do not know who was drawn, and the seed
    tells it all. It must come from ``participation.secret_seed``, serve one run, and stay as
    secret as the seed of the noise; so must whatever lists the batches, a run's ledger above all.
    No population whose devices decide themselves when to take part may be described as sampled,
    unless they decide by the secret coins of a scheme.

    Attributes:
      scheme: How clients are drawn.
      seed: What they are drawn from.

    Raises:
      ValueError: If the seed is no integer of at least 0, or the scheme is of another type.
    """

    __slots__ = ("scheme",)

    scheme: SamplingScheme

    def __init__(self, scheme: SamplingScheme, seed: int) -> None:
        if not isinstance(scheme, SamplingScheme):
            raise ValueError(f"scheme must be a SamplingScheme, found {numbers.shown(scheme)}.")
        super().__init__(scheme.as_draws(), seed)
        object.__setattr__(self, "scheme", scheme)

    def deviation(
        self, num_clients: int, cohorts: Sequence[IntArray], *, may_be_absent: bool = False
    ) -> str | None:
        """Returns the first difference between the rounds of a run and the draws, or None.

        Args:
          num_clients: As in :meth:`SamplingScheme.deviation`.
          cohorts: As there.
          may_be_absent: Whether clients that were drawn may be missing, as those that could not be
            asked are: only where clients draw for themselves.

        Returns:
          The first difference, as the end of a sentence that names no client.
        """
        found = self.scheme.deviation(num_clients, cohorts)
        if found is not None:
            return found
        for index, cohort in enumerate(cohorts):
            drawn, nth = self.draw(index), ledger_checks.nth_round(index)
            if may_be_absent:
                if not np.all(np.isin(cohort, drawn)):
                    return f"a client of {nth} is not one of those that the sampler draws"
            elif not np.array_equal(cohort, drawn):
                return f"the clients of {nth} are not those that the sampler draws"
        return None

    def num_absent(self, cohorts: Sequence[IntArray]) -> int:
        """Returns how many participations that are drawn the first rounds of a run lack.

        Args:
          cohorts: As in :meth:`SamplingScheme.deviation`.
        """
        return sum(
            len(np.setdiff1d(self.draw(index), cohort)) for index, cohort in enumerate(cohorts)
        )


_KINDS: tuple[type[SamplingScheme], ...] = (
    PoissonSampling,
    FixedSizeSampling,
    Shuffling,
    MinSeparationSampling,
    BallsInBins,
    TruncatedPoissonSampling,
    RandomAllocation,
)
_SCHEMES = MappingProxyType({each.name: each for each in _KINDS})


def sampling_schemes() -> Mapping[str, type[SamplingScheme]]:
    """Returns all sampling schemes by name."""
    return _SCHEMES


def accounted(scheme: Any) -> SamplingScheme:
    """Returns a copy of one of the library's sampling schemes, made anew from its fields.

    Args:
      scheme: The scheme.

    Raises:
      TypeError: If it is of another class than :func:`sampling_schemes` has.
      ValueError: If its sizes do not fit one another.
    """
    if type(scheme) not in _KINDS:
        raise TypeError(
            f"a sampling scheme must be one of mf_aggregators.participation, and of no subclass, "
            f"found {numbers.shown(scheme)}. For draws of your own, give a schema that they "
            "keep, such as MinSeparation."
        )
    found: SamplingScheme = dataclasses.replace(scheme)
    return found


def sampling_scheme(
    name: str,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    separation: int | None = None,
    largest_batch: int | None = None,
) -> SamplingScheme:
    """Returns a sampling scheme by its name.

    Args:
      name: The name of a scheme.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients m, at least B b; for ``balls_in_bins`` at least B times the bins.
      clients_per_round: The batch size B, expected or exact.
      separation: For ``min_separation``, the least distance of two participations of a
        client, at least b and b by default. For ``balls_in_bins``, the number of bins,
        floor(m / B) by default. None for the others.
      largest_batch: For ``truncated_poisson``, the most clients of a round, by default what a
        round exceeds with a probability of at most 1e-6. None for the others.

    Returns:
      The scheme.

    Raises:
      ValueError: If the name is unknown, or the sizes do not fit one another.
    """
    if name not in _SCHEMES:
        raise ValueError(
            f"the sampling scheme {numbers.shown(name)} is not one of {', '.join(_SCHEMES)}."
        )
    kind, own = _SCHEMES[name], _SCHEMES[name].own_size()
    sizes = (num_rounds, num_bands, population, clients_per_round)
    given = {"separation": separation, "largest_batch": largest_batch}
    for other, value in given.items():
        if other != own and value is not None:
            words = other.replace("_", " ")
            raise ValueError(f"the sampling scheme {name!r} takes no {words}, found {value}.")
    own_sizes = []
    if own is not None:
        own_sizes = [kind._default(*sizes) if given[own] is None else given[own]]
    return kind(*sizes, *own_sizes)


def sampling_from_dict(description: Any) -> SamplingScheme:
    """Returns the scheme that ``SamplingScheme.to_dict`` described.

    Args:
      description: The mapping.

    Returns:
      The scheme.

    Raises:
      ValueError: If it describes none.
    """
    try:
        return sampling_scheme(**description)
    except TypeError as error:
        raise ValueError(f"{numbers.shown(description)} describes no sampling scheme.") from error


def of_draws(draws: Draws) -> SamplingScheme:
    """Returns the scheme that ``SamplingScheme.as_draws`` has turned into integers.

    Args:
      draws: The integers.
    """
    return _SCHEMES[draws.name](*dataclasses.astuple(draws))
