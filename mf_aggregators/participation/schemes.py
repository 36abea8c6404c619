"""What every sampling scheme answers: sizes, draws, the check of a ledger, and its words.

A scheme is a random rule by which clients take part. Towards whoever does not know the draws it
amplifies the guarantee. Devices that decide themselves when to take part, without a coin of known
probability, follow no scheme, and nothing amplifies their guarantee.

An amplified guarantee is worth nothing if the batches came about in another way. What the cohorts
alone can show, anyone can check who may read them (:meth:`SamplingScheme.deviation`). That they are
the very batches of a secret seed, and not chosen to look like such, only the holder of the seed can
tell (:meth:`Sampler.deviation`).
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from dp_accounting import dp_event

from mf_aggregators import accounting
from mf_aggregators.accounting import composition
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.draws_of_clients import (
    AllParticipations,
    Cohorts,
    Draws,
    SampledRun,
    StrategyColumns,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.groups import binomial_tail
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.participation import certificate_search
from mf_aggregators.participation.certificate_search import Amplified, Certification
from mf_aggregators.participation.kinds import Participation, of_schema

# What a scheme draws with a smaller probability counts as drawn in another way. A run by the scheme
# fails each of three checks with at most this probability.
LEAST_PROBABILITY = 1e-12
_TOGETHER = """\
Each participation of a client is one Gaussian mechanism on the rounds that it changes,
     which are those of no other participation of that client."""

_Scheme = TypeVar("_Scheme", bound="SamplingScheme")


@dataclasses.dataclass(frozen=True)
class SamplingScheme(Participation):
    """A random rule by which clients take part, and its sizes, checked against one another.

    Attributes:
      num_rounds: The rounds n of the run.
      num_bands: The bands of C.
      population: The number of clients (or examples) m.
      clients_per_round: The batch size B, expected or exact.
      has_groups: Whether the server draws from one group of the clients after the other, as many
        as C has bands.
      depends_on_matrix: Whether the guarantee depends on all entries of C, and is proved for
        one C; otherwise it depends on the number of bands alone.
      covers_absences: Whether the guarantee holds where clients that were drawn are absent.
      has_random_sizes: Whether batches vary in size around ``clients_per_round``.
      takes_any_matrix: Whether C may have more bands than a client's rounds are apart.
      takes_largest_batch: Whether it has a largest batch size, to which larger batches are cut.
      is_dominated: Whether another scheme of the same clients has a smaller epsilon at the same
        noise; plans for any way to take part leave it out.
      largest_move: How many clip norms a client may move the sum of a round by, where draws are
        secret: two where it takes the place of another one, and where nobody knows more.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    is_sampled: ClassVar[bool] = True
    has_groups: ClassVar[bool] = False
    depends_on_matrix: ClassVar[bool] = False
    covers_absences: ClassVar[bool] = False
    has_random_sizes: ClassVar[bool] = True
    largest_move: ClassVar[float] = 2.0
    takes_any_matrix: ClassVar[bool] = False
    takes_largest_batch: ClassVar[bool] = False
    is_dominated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        numbers.set_positive_integers(
            self, "num_rounds", "num_bands", "population", "clients_per_round"
        )
        if self.num_bands > self.num_rounds:
            raise ValueError(
                f"num_bands must be at most num_rounds, found {self.num_bands} bands for "
                f"{self.num_rounds} rounds."
            )

    @classmethod
    def of_sizes(
        cls: type[_Scheme],
        num_rounds: int,
        num_bands: int,
        population: int,
        clients_per_round: int,
        separation: int | None = None,
        largest_batch: int | None = None,
    ) -> _Scheme:
        """Returns the scheme of some sizes, with its default separation where that is None.

        Args:
          num_rounds: The rounds n.
          num_bands: The bands b of C.
          population: The clients m.
          clients_per_round: The clients B of a round, expected or exact.
          separation: The least distance of two participations of a client; None for the default.
          largest_batch: The most clients of a round; None for the default.

        Raises:
          ValueError: If the scheme takes no separation or no largest batch, as by default, and
            one is given.
        """
        sizes = (num_rounds, num_bands, population, clients_per_round)
        given = {"separation": separation, "largest_batch": largest_batch}
        own = [field.name for field in dataclasses.fields(cls)][len(sizes) :]
        for name, value in given.items():
            if name not in own and value is not None:
                words = name.replace("_", " ")
                raise ValueError(
                    f"the sampling scheme {cls.name!r} takes no {words}, found {value}."
                )
        others = [cls._default(*sizes) if given[name] is None else given[name] for name in own]
        return cls(*sizes, *others)

    @classmethod
    def _default(
        cls, num_rounds: int, num_bands: int, population: int, clients_per_round: int
    ) -> int:
        """The size that a scheme has besides the common ones, where nobody names it."""
        raise NotImplementedError

    @property
    def largest_cohort(self) -> int:
        """The most clients that one round can have: all, by default."""
        return self.population

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of a client may change the same row of C x."""
        return False

    # Rounds.

    def schema(self) -> Participation:
        """Returns the schema that every draw keeps: the guarantee of who knows all draws."""
        return of_schema(self.as_schema())

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns the most rounds of the first ``num_rounds``, or of all, that a client is in."""
        rounds = self.num_rounds if num_rounds is None else num_rounds
        return self.schema().most_participations(rounds)

    def as_schema(self) -> Schema:
        """Returns the schema that every draw keeps, as numbers for the kernel."""
        return self.as_draws().schema

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that ``participation.sampling_from_dict`` takes back."""
        return {"name": self.name, **dataclasses.asdict(self)}

    # Accounting. Noise multipliers are relative to the largest column norm of C.

    @abc.abstractmethod
    def as_draws(self) -> Draws:
        """Returns the scheme as the integers that the kernel accounts for."""

    @abc.abstractmethod
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
          columns: C, where the guarantee ``depends_on_matrix``; None for a diagonal C of equal
            entries.
          certification: How epsilons are proved, where they are for one C; None for defaults.
          num_coordinates: Parameters times rounds.

        Raises:
          TailError: If so little noise cannot be accounted for: a ValueError.
        """

    @abc.abstractmethod
    def calibrated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns the least noise multiplier for an epsilon; arguments as of :meth:`amplified`.

        Args:
          target: The epsilon that is to hold.
          delta: The delta of the guarantee.
          columns: C, where the guarantee depends on it; else None.
          certification: How an epsilon is proved, where only simulations bound it; None for
            defaults.
          num_coordinates: Parameters times rounds.

        Raises:
          ValueError: If no noise multiplier gives the target.
        """

    def estimated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
    ) -> float:
        """Returns about what :meth:`calibrated` does, fast; no guarantee is stated of it.

        Args:
          target: The epsilon that is to hold.
          delta: The delta of the guarantee.
          columns: C, where the guarantee depends on it; else None.
          certification: How an epsilon is proved, where only simulations bound it; None for
            defaults.
        """
        return self.calibrated(target, delta, columns, certification)

    def all_participations(self, columns: StrategyColumns | None) -> AllParticipations:
        """Returns what all participations of a client are together.

        Args:
          columns: C, where the guarantee ``depends_on_matrix``; else None.
        """
        return self.run(1.0, columns).together

    def _enough(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        num_coordinates: int,
    ) -> float:
        """A noise multiplier that suffices without amplification."""
        together = self.all_participations(columns)
        alone = accounting.noise_multiplier(
            target,
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=together.disjoint,
        )
        return alone * together.norm

    def run(self, sigma: float, columns: StrategyColumns | None) -> SampledRun:
        """Returns a run as data of the kernel.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: C, where the guarantee depends on it; else None.
        """
        return SampledRun(self.as_draws(), sigma, columns)

    def event_of(self, sigma: float, columns: StrategyColumns | None) -> dp_event.DpEvent:
        """Returns a run as an event of dp-accounting.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: C, where the guarantee depends on it; else None.
        """
        return composition.event(self.run(sigma, columns))

    def log_moments(
        self, sigma: float, columns: StrategyColumns | None, num_coordinates: int
    ) -> tuple[tuple[int, float], ...]:
        """Returns Renyi orders a and log E_Q (P/Q)^a of the dominating pair, if it is known.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: C, where the guarantee depends on it; else None.
          num_coordinates: Parameters times rounds.
        """
        del sigma, columns, num_coordinates
        return ()

    def divergences(
        self, sigma: float, columns: StrategyColumns | None, seed: int, num_coordinates: int
    ) -> tuple[tuple[float, float], ...]:
        """Returns epsilons and bounds on the hockey-stick divergence, if they are known.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: C, where the guarantee depends on it; else None.
          seed: The seed of the simulations.
          num_coordinates: Parameters times rounds.
        """
        del sigma, columns, seed, num_coordinates
        return ()

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
          strategy_matrix: (n, n), C, where the guarantee ``depends_on_matrix``; None for a
            diagonal one of equal entries, if ``num_bands`` is 1.
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
        scheme, columns = self, self._columns(strategy_matrix)
        return scheme.event_of(sigma, columns)

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
        """Creates the sampler of a run, and draws what all of its rounds have in common.

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

        Checked are the population, the number of rounds, that each cohort has every client once
        and as many as the scheme draws, and what the scheme itself says of its rounds. Random
        draws can give almost anything, some of it with next to no probability: a client, a round
        or a whole run with more participations than draws give, but for a probability of 1e-12,
        is a deviation as well. Draws by the scheme deviate with a probability of at most 3e-12.

        Args:
          num_clients: The clients of the population, drawn or not.
          cohorts: For each round that was released the increasing indices of its clients, from 0;
            fewer rounds than those of the scheme for a run that is not finished.

        Returns:
          The first deviation, as the end of a sentence that names no client.
        """
        if num_clients != self.population:
            return f"the ledger has {num_clients} clients, not {self.population}"
        if len(cohorts) > self.num_rounds:
            return f"the ledger has {len(cohorts)} rounds, more than {self.num_rounds}"
        size = self._batch_size()
        for index, cohort in enumerate(cohorts):
            if np.any((cohort < 0) | (cohort >= self.population)) or np.any(np.diff(cohort) <= 0):
                return f"the clients of {nth_round(index)} are not different ones of the population"
            if size is not None and len(cohort) != size:
                return f"{nth_round(index)} had {len(cohort)} clients, not {size}"
        return self._deviation_of_rounds(cohorts)

    def _batch_size(self) -> int | None:
        """The clients of every batch; None where it varies."""
        return None if self.has_random_sizes else self.clients_per_round

    @abc.abstractmethod
    def _deviation_of_rounds(self, cohorts: Sequence[IntArray]) -> str | None:
        """Why cohorts of different clients of the population cannot come from the scheme."""

    # Words.

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """How clients take part, in a few words, for tables of mechanisms."""

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to do what for the guarantee to hold: sentences, after "only if"."""
        return (
            f"a data centre draws every batch itself, round i by draw(i) of the sampler {sampler}, "
            "whose seed and draws stay secret for ever. Devices that decide themselves when they "
            "take part have a much weaker guarantee."
        )

    def factorize_flags(self) -> str:
        """Returns the flags of the schema that noise is scaled to: one participation."""
        return "--participation=single"

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of commands that train, by name."""
        return {"sampling": self.name, "clients_per_round": self.clients_per_round}

    @abc.abstractmethod
    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed, in whole sentences."""

    @abc.abstractmethod
    def assumption_words(self) -> str:
        """Returns what the guarantee assumes of how clients take part, in whole sentences."""

    def together_words(self) -> str:
        """Returns what all rounds together are, as a mechanism."""
        return _TOGETHER

    def __str__(self) -> str:
        return str(self.as_draws())


def nth_round(index: int) -> str:
    """Returns a round as messages about a ledger name it.

    Args:
      index: The round, from 0, as in the ledger.
    """
    return f"round {index + 1} (counted from 1)"


class Sampler(Cohorts):
    """A scheme and a seed, and whom they draw in all rounds; ``scheme.sampler(seed)``.

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
        """Returns how the first rounds of a run differ from what is drawn, or None.

        Args:
          num_clients: As in :meth:`SamplingScheme.deviation`.
          cohorts: As there.
          may_be_absent: Whether clients that were drawn may be missing, as those that could not be
            asked are: only where the scheme ``covers_absences``.

        Returns:
          The first difference, as the end of a sentence that names no client.
        """
        found = self.scheme.deviation(num_clients, cohorts)
        if found is not None:
            return found
        for index, cohort in enumerate(cohorts):
            drawn = self.draw(index)
            if may_be_absent:
                if not np.all(np.isin(cohort, drawn)):
                    return (
                        f"a client of {nth_round(index)} is not one of those that the sampler draws"
                    )
            elif not np.array_equal(cohort, drawn):
                return f"the clients of {nth_round(index)} are not those that the sampler draws"
        return None

    def num_absent(self, cohorts: Sequence[IntArray]) -> int:
        """Returns how many participations that are drawn the first rounds of a run lack.

        Args:
          cohorts: As in :meth:`SamplingScheme.deviation`.
        """
        return sum(
            len(np.setdiff1d(self.draw(index), cohort)) for index, cohort in enumerate(cohorts)
        )


def too_large(
    sizes: IntArray, drawn_from: IntArray, probability: float, expected: int
) -> str | None:
    """Returns which round has more clients than independent draws give, or None.

    Args:
      sizes: (rounds,) the clients of each round.
      drawn_from: (rounds,) how many could have been drawn.
      probability: That each of them is drawn.
      expected: The clients that are expected in a round.
    """
    too_many = binomial_tail(sizes, drawn_from, probability) * len(sizes)
    if not np.any(too_many < LEAST_PROBABILITY):
        return None
    worst = int(np.argmin(too_many))
    return (
        f"{nth_round(worst)} had {sizes[worst]} clients, more than chance gives where "
        f"{expected} are expected"
    )
