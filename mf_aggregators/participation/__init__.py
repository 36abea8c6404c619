"""Participation of clients in a run: schemas (allowed rounds) and sampling schemes (draws).

A schema says in which sets of rounds one client may take part; timers or a fixed order enforce it.
One convention holds throughout (BandMF, Def. 1): a separation of b means that any two
participations i, j of one client satisfy ``|i - j| >= b``, so that b = 1 allows every round.
Earlier DP-FTRL texts count the rounds strictly between two participations, which is b - 1.

A sampling scheme is a random rule by which clients take part. It amplifies the guarantee against
adversaries who do not know the draws. Devices that decide themselves when to take part, without a
coin of known probability, follow no scheme, so their guarantee is not amplified.

A scheme has three parts: its draws (integers in ``kernel.losses``, and a sampler); its accountant,
in the kernel as well (``kernel.losses``, ``kernel.certificate``); and texts that describe it
(``_WORDS``). An amplified guarantee is void if the batches were chosen in another way. So
:meth:`SamplingScheme.deviation` compares cohorts with the scheme, and :meth:`Sampler.deviation`
compares them with the batches of a secret seed.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, TypeAlias

import numpy as np
from dp_accounting import dp_event
from scipy import special

from mf_aggregators import accounting, inputs
from mf_aggregators.kernel import losses, numbers
from mf_aggregators.kernel.cohorts import Cohorts
from mf_aggregators.kernel.losses import Draws, InGroups, Poisson, SampledRun, StrategyColumns
from mf_aggregators.kernel.numbers import FloatArray, IntArray, counted, rounded_up
from mf_aggregators.kernel.sensitivity import Schema
from mf_aggregators.participation.certificate_search import Amplified as Amplified
from mf_aggregators.participation.certificate_search import Certification as Certification
from mf_aggregators.random_streams import secret_seed as secret_seed

# A strategy matrix; None if the guarantee does not depend on it.
_C: TypeAlias = FloatArray | None
# A round exceeds the default largest batch with at most this probability.
_PROBABILITY_OF_CUT = 1e-6
# Upper bound on the rounding of a row, in steps of Z: 1 plus twice its floating-point error.
_MOST_OF_A_STEP = 1.5


@dataclasses.dataclass(frozen=True)
class Participation(abc.ABC):
    """A participation schema: in which sets of rounds one client may take part.

    Use it when a function takes any schema: all schemas are subclasses.

    Sampling schemes are subclasses as well; as schemas, they allow all sets of rounds that they may
    draw.

    Attributes:
      name: The name of the kind of schema in JSON and in flags.
      is_sampled: Whether clients take part by a random rule, so that the guarantee is amplified.
      is_evenly_spaced: Whether consecutive participations are exactly ``separation`` rounds apart.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=10, max_participations=3)
      >>> isinstance(timers, mfa.participation.Participation)
      True
      >>> timers.separation_in(100), timers.most_participations(100)
      (10, 3)
    """

    name: ClassVar[str]
    is_sampled: ClassVar[bool] = False
    is_evenly_spaced: ClassVar[bool] = False

    @abc.abstractmethod
    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""

    @staticmethod
    def of_schema(schema: Schema) -> "Participation":
        """Returns the participation for a schema of the kernel, the inverse of ``as_schema``.

        Args:
          schema: The kernel's schema; for (k, b)-participation it has to have ``most``.
        """
        if schema == Schema(1, 1):
            return SingleParticipation()
        if schema.is_even:
            assert schema.most is not None
            return FixedEpochOrder(schema.most, schema.separation)
        return MinSeparation(schema.separation, schema.most)

    def __str__(self) -> str:
        return str(self.as_schema())

    @property
    def limit(self) -> int | None:
        """The largest number of participations that the schema sets; None for as many as fit."""
        return self.as_schema().most

    def separation_in(self, num_rounds: int) -> int:
        """Returns the smallest distance b of two participations; n if no client returns.

        Args:
          num_rounds: The number of rounds n.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        schema = self.as_schema()
        return num_rounds if schema == Schema(1, 1) else schema.separation

    def most_participations(self, num_rounds: int) -> int:
        """Returns in how many of ``num_rounds`` rounds one client can take part at most.

        Args:
          num_rounds: The number of rounds n.
        """
        return self.as_schema().most_in(num_rounds)

    def allows(self, narrower: "Participation", num_rounds: int) -> bool:
        """Returns whether every client that keeps to another schema also keeps to this one.

        Args:
          narrower: The other schema.
          num_rounds: n; only participations in these rounds count.

        Raises:
          TypeError: If ``narrower`` is not a schema.
          ValueError: If ``num_rounds`` is not a positive integer.

        Example:
          >>> import mf_aggregators as mfa
          >>> timers = mfa.participation.MinSeparation(separation=10)
          >>> timers.allows(mfa.participation.MinSeparation(separation=12), num_rounds=100)
          True
        """
        other = check(narrower).as_schema()
        most = other.most_in(num_rounds)
        # If at most two participations fit, those at least n - 1 rounds apart are exactly so.
        largest = other.separation if other.is_even else num_rounds - 1
        own = self.as_schema()
        return most == 1 or own.allows_separations(most, other.separation, largest)

    def smallest_population(self, num_rounds: int, clients_per_round: int) -> int:
        """Returns the smallest population that :meth:`check_population` accepts.

        Args:
          num_rounds: n.
          clients_per_round: The cohort size B.

        Example:
          >>> import mf_aggregators as mfa
          >>> timers = mfa.participation.MinSeparation(separation=10)
          >>> timers.smallest_population(num_rounds=100, clients_per_round=50)
          500
        """
        most = self.most_participations(num_rounds)
        within_timers = min(self.separation_in(num_rounds), num_rounds) * clients_per_round
        return max(within_timers, -(-num_rounds * clients_per_round // most))

    def check_population(self, num_rounds: int, population: int, clients_per_round: int) -> None:
        """Checks that a population is large enough for all rounds, if timers enforce the schema.

        A client that took part in one of the last ``separation - 1`` rounds, or as often as it may,
        cannot take part. These rounds may all have had different clients, so a round certainly has
        enough clients if there are at least as many as in ``separation`` cohorts. Also, the
        clients' participations have to be enough for n cohorts. Without a limit on participations
        this is sufficient; with a limit, a late round may still have too few clients.

        Args:
          num_rounds: n.
          population: The number of clients m.
          clients_per_round: The cohort size B.

        Raises:
          ValueError: If some round has too few clients for every choice of cohorts.
        """
        needed = self.smallest_population(num_rounds, clients_per_round)
        if population < needed:
            raise ValueError(
                f"{population} clients cannot fill {num_rounds} rounds of {clients_per_round} with "
                f"{self}: {needed} are needed. Use fewer clients per round or rounds, a smaller "
                "separation, or more participations per client."
            )

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        schema = self.as_schema()
        # If clients are drawn, the noise is scaled to one participation.
        if self.is_sampled or schema == Schema(1, 1):
            return "--participation=single"
        most = "" if schema.most is None else f" --max_participations={schema.most}"
        return f"--participation={self.name} --separation={schema.separation}{most}"

    def run_flags(self) -> Mapping[str, int | str | None] | None:
        """Returns the flags of training commands that enforce the schema; None if none can."""
        return None

    def condition(self, sampler: str | None = None) -> str:
        """Returns the condition of the guarantee, as text that follows "only if".

        Args:
          sampler: For a sampling scheme, the Python expression of the sampler.
        """
        del sampler
        return (
            f"timers enforce {self} on every device: that is yours to do (docs/devices.md says "
            "how)."
        )

    def to_dict(self) -> dict[str, object]:
        """Returns a JSON-able mapping, which :meth:`from_dict` reads.

        Example:
          >>> import mf_aggregators as mfa
          >>> described = mfa.participation.MinSeparation(separation=10).to_dict()
          >>> described
          {'schema': 'min_sep', 'separation': 10, 'max_participations': None}
          >>> print(mfa.participation.Participation.from_dict(described))
          participations at least 10 rounds apart
        """
        return {"schema": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(description: Mapping[str, object]) -> "Participation":
        """Returns the schema of a mapping that :meth:`to_dict` made.

        Args:
          description: A mapping with ``schema`` (``single``, ``fixed_epoch`` or
            ``min_sep``) and that schema's attributes.

        Raises:
          ValueError: If the mapping names no schema, or has other attributes than the schema.
        """
        attributes = dict(description)
        name = attributes.pop("schema", None)
        if not isinstance(name, str) or name not in _SCHEMAS:
            raise ValueError(
                f"a participation schema must be one of {', '.join(_SCHEMAS)}, found {name!r}."
            )
        try:
            return _SCHEMAS[name](**attributes)
        except TypeError as error:
            raise ValueError(f"participation schema {name}: {error}.") from None


@dataclasses.dataclass(frozen=True)
class SingleParticipation(Participation):
    """The schema in which each client takes part in at most one round.

    Use it when no client takes part twice.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> print(once)
      at most one participation
      >>> mfa.factorizations.identity(100).sensitivity(once).value
      1.0
    """

    name: ClassVar[str] = "single"

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(1, 1)

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags, by name, of timers that let each client take part once."""
        return {"max_participations": 1}


@dataclasses.dataclass(frozen=True)
class FixedEpochOrder(Participation):
    """(k, b)-participation: at most k participations, consecutive ones exactly b rounds apart.

    Use it when a data centre goes through its data in the same order in each epoch.

    Sources: Choquette-Choo et al., Multi-epoch MF; BandMF Sec. 2.

    Attributes:
      epochs: The largest number k of participations, at least 1.
      separation: The distance b of consecutive participations in rounds, at least 1.

    Raises:
      ValueError: If an attribute is not a positive integer.

    Example:
      >>> import mf_aggregators as mfa
      >>> epochs = mfa.participation.FixedEpochOrder(epochs=4, separation=25)
      >>> print(epochs)
      at most 4 participations, adjacent ones exactly 25 rounds apart
      >>> mfa.factorizations.identity(100).sensitivity(epochs).value
      2.0
    """

    epochs: int
    separation: int

    name: ClassVar[str] = "fixed_epoch"
    is_evenly_spaced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "epochs", "separation")

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(self.epochs, self.separation, is_even=True)

    def condition(self, sampler: str | None = None) -> str:
        """Returns the condition of the guarantee, as text that follows "only if"."""
        del sampler
        times = "once" if self.epochs == 1 else f"{self.epochs} times at most"
        return (
            "a data centre goes through all clients in one fixed order of "
            f"{self.separation} batches, each client in one of them, {times}: batch i + "
            f"{self.separation} has the clients of batch i. No draw has to be secret. A random "
            "order, or devices that decide themselves when they take part, have a weaker guarantee."
        )


@dataclasses.dataclass(frozen=True)
class MinSeparation(Participation):
    """b-min-sep-participation: any two participations at least b rounds apart (BandMF, Def. 1).

    Use it when devices choose when they are available, and each device keeps a timer.

    A timer on each device enforces this schema.

    Attributes:
      separation: The smallest distance b of two participations: rounds i and j of one client
        satisfy |i - j| >= b. 1 allows every round.
      max_participations: The largest number k of participations of one client; None for as many as
        fit into the rounds.

    Raises:
      ValueError: If an attribute is not a positive integer.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=10, max_participations=4)
      >>> print(timers)
      at most 4 participations at least 10 rounds apart
      >>> timers.smallest_population(num_rounds=100, clients_per_round=50)
      1250
    """

    separation: int
    max_participations: int | None = None

    name: ClassVar[str] = "min_sep"

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "separation", "max_participations")

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(self.max_participations, self.separation)

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of the timers, by name."""
        return {"separation": self.separation, "max_participations": self.max_participations}


_KINDS: tuple[type[Participation], ...] = (SingleParticipation, FixedEpochOrder, MinSeparation)
_SCHEMAS = MappingProxyType({each.name: each for each in _KINDS})


def check(participation: object, num_rounds: int | None = None) -> Participation:
    """Returns a copy of a schema, made from its fields, after a check of its class.

    Code that optimises a matrix for a schema also checks that the participations fit into the
    rounds: if they do not, the user probably means another number of rounds.

    Args:
      participation: The value that was given as a schema.
      num_rounds: The number n of rounds into which the schema's participations have to fit; None
        for no check.

    Raises:
      TypeError: If the value is not of one of the three classes of schemas.
      ValueError: If the schema's largest number of participations does not fit.
    """
    if not isinstance(participation, Participation) or type(participation) not in _KINDS:
        raise TypeError(
            "participation must be a SingleParticipation, a FixedEpochOrder or a MinSeparation, "
            f"found {numbers.shown(participation)}."
        )
    schema: Participation = dataclasses.replace(participation)
    if num_rounds is None:
        return schema
    separation = schema.separation_in(num_rounds)
    fitting, limit = math.ceil(num_rounds / separation), schema.limit
    if limit is not None and limit > fitting:
        raise ValueError(
            f"{limit} participations {separation} rounds apart need "
            f"{(limit - 1) * separation + 1} rounds, and there are {num_rounds}: "
            f"at most {fitting} fit."
        )
    return schema


@dataclasses.dataclass(frozen=True)
class _Words:
    """Texts that describe a sampling scheme in plans and statements.

    In ``_WORDS``, ``{d.name}`` stands for an integer of the draws, and other names in braces for
    values of :func:`_words_of`.

    Attributes:
      label: A short name for the way of taking part, for tables of mechanisms.
      accounting: A sentence on how the amplified guarantee is computed.
      assumption: Sentences on what the guarantee assumes about how clients take part.
      together: A sentence on which mechanism all rounds together are.
    """

    label: str
    accounting: str
    assumption: str
    together: str = ""


_SECRET_OF_CLIENTS = (
    "Neither the data nor what was released has a part in that, and nobody who sees what was "
    "released learns who took part. A client that cannot be asked in such a round contributes "
    "nothing to it; for its later rounds that makes no difference, and none of them has a part in "
    "whether it can be asked. Rounds of too many or too few clients are released as all others, "
    "and their sums are divided by the same number."
)
_EACH_PARTICIPATION = """\
Each participation of a client is one Gaussian mechanism on the rounds that it changes,
     which are those of no other participation of that client."""
_ALL_ROUNDS = """\
All rounds together are one mechanism, whose noise is that of a Gaussian one and whose
     mean depends on the secret rounds of each client, also with updates that depend on earlier
     rounds."""
_CERTIFIED = (
    ": an upper bound on delta that is certified by Monte Carlo, whose failure probability is part "
    "of delta."
)


def _drawn_by_a_data_centre(drawn: str, accounting: str, *, label: str = "amplified") -> _Words:
    """Returns the texts for a scheme that draws from groups.

    Args:
      drawn: Which clients a round draws, as the end of a sentence.
      accounting: A sentence on how the guarantee is computed.
      label: For tables of mechanisms.
    """
    assumption = (
        "Sampling: the population is split into {groups}, as many as C has bands, and round i "
        f"draws from group i modulo {{d.num_bands}} alone, {drawn} The server draws every batch "
        "itself, keeps who was drawn secret, and every client that was drawn takes part."
    )
    return _Words(label, accounting, assumption)


_WORDS: Mapping[str, _Words] = MappingProxyType(
    {
        "poisson": _drawn_by_a_data_centre(
            "each client with probability {probability}.",
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): the privacy "
            "loss distribution of composed Poisson-sampled Gaussian mechanisms, by dp-accounting.",
        ),
        "fixed_size": _drawn_by_a_data_centre(
            "a uniformly random subset of {d.clients_per_round} of its {d.group_size}.",
            "Amplification by sampling for banded matrices (BandMF Thm 4): the privacy loss "
            "distribution of composed Gaussian mechanisms on batches sampled without replacement, "
            "by dp-accounting.",
        ),
        "shuffling": _drawn_by_a_data_centre(
            "the next batch of {d.clients_per_round} of a shuffled list of all its {d.group_size}, "
            "shuffled afresh for each pass.",
            "Amplification by shuffling for banded matrices (BandMF Thm 4, Cor. F.2), by Feldman, "
            "McMillan and Talwar (2021), Thm 3.8, or no amplification where that is better.",
        ),
        "min_separation": _Words(
            "b-min-sep {d.separation}",
            "Amplification by min-separation sampling (b-min-sep, secret coins under timers, arXiv "
            f"2602.09338){_CERTIFIED}",
            "Min-separation sampling: a client that took part is not free for the next {waits}. In "
            "every round in which it is free, it takes part with probability {probability}, by a "
            "secret coin of its own. In round 0 it is free with probability {free_at_first}, or "
            "else first in one of the rounds 1 to {last_wait}, each of which is as likely. "
            f"{_SECRET_OF_CLIENTS}",
        ),
        "balls_in_bins": _Words(
            "{d.separation} bins",
            "Amplification by balls in bins (one secret round of each cycle, arXiv 2410.06266)"
            f"{_CERTIFIED}",
            "Balls in bins: every client is put into one of {bins}, each as likely as the others, "
            "independently of all others, and takes part in all rounds i with i modulo "
            f"{{d.separation}} equal to its bin. {_SECRET_OF_CLIENTS}",
        ),
        "truncated_poisson": _drawn_by_a_data_centre(
            "each client with probability {probability}; of more than {d.largest_batch} that come "
            "so, a uniformly random subset of {d.largest_batch} stays.",
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): composed "
            "privacy loss distributions of Gaussian mechanisms on truncated Poisson samples (arXiv "
            "2508.15089, here for zeros in the place of a client).",
            label="amplified, at most {d.largest_batch}",
        ),
        "random_allocation": _drawn_by_a_data_centre(
            "whose clients are each in one of the {d.rounds_of_cycle} rounds of a cycle of the "
            "group, uniformly at random, independently of all others and of other cycles.",
            "Amplification by random allocation (one of t rounds, arXiv 2602.17284) for banded "
            "matrices: the distribution of the privacy loss of a cycle, on a grid whose rounding "
            "is on the side of privacy, composed by dp-accounting.",
            label="1 of {d.rounds_of_cycle} rounds",
        ),
    }
)


def _words_of(draws: Draws) -> _Words:
    """Returns the texts for draws, with numbers filled in.

    Args:
      draws: How clients are drawn.
    """
    waits = draws.distance - 1
    values: dict[str, object] = {
        "d": draws,
        "groups": counted(draws.num_bands, "group"),
        "bins": counted(draws.distance, "bin"),
        "waits": counted(waits, "round"),
        "last_wait": waits,
    }
    if isinstance(draws, InGroups):
        values["probability"] = rounded_up(draws.sampling_probability, ".6g")
    elif isinstance(draws, losses.MinSeparation):
        p = draws.joining_probability
        values["probability"] = rounded_up(p, ".6g")
        values["free_at_first"] = rounded_up(1.0 / (1.0 + waits * p), ".6g")
    template = dataclasses.asdict(_WORDS[draws.name])
    template["together"] = _EACH_PARTICIPATION if isinstance(draws, InGroups) else _ALL_ROUNDS
    return _Words(**{name: text.format(**values) for name, text in template.items()})


def _deviation(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Returns why the cohorts of the released rounds cannot come from a scheme, or None.

    This check needs only the cohorts. Only with the secret seed can one check that they are the
    seed's batches, and were not chosen to look like them (:meth:`Sampler.deviation`).

    It checks the number of rounds, the size of each cohort, that no client is in a cohort twice,
    and the rounds of each client. Cohorts that a scheme draws with a tiny probability are no
    deviation.

    Args:
      draws: How clients are drawn.
      cohorts: For each released round, the increasing indices of its clients, from 0. A run that
        has not finished has fewer rounds than the scheme.

    Returns:
      The first deviation, as the end of a sentence that names no client.
    """
    if len(cohorts) > draws.num_rounds:
        return f"the ledger has {len(cohorts)} rounds, more than {draws.num_rounds}"
    size = _batch_size(draws)
    for index, cohort in enumerate(cohorts):
        if np.any((cohort < 0) | (cohort >= draws.population)) or np.any(np.diff(cohort) <= 0):
            return f"the clients of {_nth_round(index)} are not different ones of the population"
        if size is not None and len(cohort) != size:
            return f"{_nth_round(index)} had {len(cohort)} clients, not {size}"
        if isinstance(draws, losses.TruncatedPoisson) and len(cohort) > draws.largest_batch:
            return (
                f"{_nth_round(index)} had {len(cohort)} clients, more than the largest batch of "
                f"{draws.largest_batch}"
            )
    if not cohorts:
        return None
    if isinstance(draws, losses.MinSeparation) and draws.joining_probability < 1.0:
        return _of_timers(draws, cohorts)
    return _of_classes(draws, cohorts)


def _nth_round(index: int) -> str:
    """Returns the name of a round for messages about a ledger.

    Args:
      index: The round, from 0, as in the ledger.
    """
    return f"round {index + 1} (counted from 1)"


def _batch_size(draws: Draws) -> int | None:
    """The size of every batch; None if it varies."""
    is_whole_group = isinstance(draws, InGroups) and draws.sampling_probability >= 1.0
    is_fixed = is_whole_group or isinstance(draws, losses.FixedSize | losses.Shuffling)
    return draws.clients_per_round if is_fixed else None


def _of_classes(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Why rounds of a client cannot belong to one group or bin, or to cycles; None if they can."""
    # If the probability of the coin is 1, a client's first round determines all others, like a bin.
    classes = draws.distance
    cycle = getattr(draws, "rounds_of_cycle", None)
    class_of, last = np.full(draws.population, -1), np.full(draws.population, -1)
    for index, cohort in enumerate(cohorts):
        number = index % classes
        if np.any((class_of[cohort] != -1) & (class_of[cohort] != number)):
            other = "group of the population" if isinstance(draws, InGroups) else "bin"
            return f"a client of {_nth_round(index)} also took part in a round of another {other}"
        before = last[cohort][last[cohort] >= 0] // classes
        if cycle is not None and np.any(before // cycle == index // classes // cycle):
            return f"a client of {_nth_round(index)} took part twice in one cycle of its group"
        class_of[cohort], last[cohort] = number, index
    if not isinstance(draws, InGroups):
        return None
    found = np.bincount(class_of[class_of >= 0], minlength=classes)
    for group in range(classes):
        places = draws.group_slice(group)
        if found[group] > places.stop - places.start:
            return f"more clients took part in the rounds of group {group + 1} than it can have"
        if isinstance(draws, losses.RandomAllocation):
            sizes = [len(cohort) for cohort in cohorts[group::classes]]
            whole = len(sizes) // draws.rounds_of_cycle * draws.rounds_of_cycle
            of_cycles = np.reshape(sizes[:whole], (-1, draws.rounds_of_cycle))
            if np.any(of_cycles.sum(axis=1) != draws.group_size):
                return "a client is in no round of a whole cycle of its group"
    return None


def _of_timers(draws: losses.MinSeparation, cohorts: Sequence[IntArray]) -> str | None:
    """Why some client took part although its timer did not allow it; None if no client did."""
    last = np.full(draws.population, -draws.separation)
    for index, cohort in enumerate(cohorts):
        if np.any(index - last[cohort] < draws.separation):
            return (
                f"a client of {_nth_round(index)} took part less than {draws.separation} rounds "
                "before"
            )
        last[cohort] = index
    return None


def _of_any_noise(entries: FloatArray) -> StrategyColumns:
    """Returns columns with an upper bound on roundings that holds for all kinds of noise rows.

    Args:
      entries: (n, b); the diagonal has no zero.
    """
    shares = np.abs(entries / entries[:, :1])
    sums = np.zeros(len(shares))
    for lag in range(shares.shape[1]):
        sums[lag:] += shares[: len(shares) - lag, lag]
    return StrategyColumns(
        entries, max(losses.LARGEST_ROUNDING, _MOST_OF_A_STEP * float(np.max(sums)))
    )


def _columns_of_matrix(strategy_matrix: FloatArray, num_bands: int) -> FloatArray:
    """Returns the columns of a strategy matrix as an (n, b) array.

    Args:
      strategy_matrix: (n, n), C, lower triangular.
      num_bands: b, at least the number of bands of C, and at most n.

    Returns:
      (n, b) float64.

    Raises:
      ValueError: If C is not a square, finite, lower-triangular matrix of at most b bands.
    """
    matrix = inputs.lower_triangular(strategy_matrix, "strategy_matrix")
    num_bands = min(numbers.positive_integer(num_bands, "num_bands"), len(matrix))
    below = np.flatnonzero(np.any(np.tril(matrix, -num_bands), axis=0))
    if len(below):
        raise ValueError(
            f"strategy_matrix must have at most {num_bands} bands, found another entry in column "
            f"{below[0]}."
        )
    rounds = np.arange(len(matrix))[:, None]
    padded = np.pad(matrix, ((0, num_bands), (0, 0)))
    return np.asarray(padded[rounds + np.arange(num_bands), rounds])


@dataclasses.dataclass(frozen=True)
class SamplingScheme(Participation):
    """A random rule by which clients take part, with its sizes.

    Use it when a function takes any sampling scheme: all schemes are subclasses.

    Attributes:
      num_rounds: The rounds n of the run.
      num_bands: The bands of C.
      population: The number of clients (or examples) m.
      clients_per_round: The batch size B, expected or exact.
      has_groups: Whether the server splits the clients into as many groups as C has bands, and
        draws from one group after the other. Otherwise clients draw for themselves, independently
        of one another. The guarantee then depends on all entries of C, and it also holds if drawn
        clients are absent. Its epsilon has a certificate (``certificate_search``), or is the
        unamplified epsilon if that is smaller.
      has_random_sizes: Whether batches vary in size around ``clients_per_round``. In batches of a
        fixed size a client replaces another one, which needs more noise, so plans that compare all
        ways to take part leave such schemes out.
      takes_any_matrix: Whether C may have more bands than the distance of a client's rounds.

    Example:
      >>> import mf_aggregators as mfa
      >>> scheme = mfa.participation.PoissonSampling(100, 4, population=4000, clients_per_round=50)
      >>> isinstance(scheme, mfa.participation.SamplingScheme)
      True
      >>> print(scheme.support())
      at most 25 participations, adjacent ones exactly 4 rounds apart
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    is_sampled: ClassVar[bool] = True
    has_groups: ClassVar[bool] = True
    has_random_sizes: ClassVar[bool] = True
    takes_any_matrix: ClassVar[bool] = False
    # The kernel's class of draws with the same integers.
    _kind: ClassVar[type[Draws]]

    def __post_init__(self) -> None:
        sizes = (each.name for each in dataclasses.fields(self))
        numbers.set_positive_integers(self, *sizes)
        if self.num_bands > self.num_rounds:
            raise ValueError(
                f"num_bands must be at most num_rounds, found {self.num_bands} bands for "
                f"{self.num_rounds} rounds."
            )
        # Raises an error if the sizes do not fit together.
        self.as_draws()

    @classmethod
    def own_size(cls) -> str | None:
        """Returns the name of the scheme's additional size: separation, largest_batch or None."""
        names = [each.name for each in dataclasses.fields(cls)]
        return names[4] if len(names) > 4 else None

    def as_draws(self) -> Draws:
        """Returns the scheme as the kernel's integers (one of ``Draws``), for accounting."""
        return self._kind(*dataclasses.astuple(self))

    @property
    def largest_cohort(self) -> int:
        """The largest number of clients that a round can have."""
        return self.population

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of a client may change the same row of C x."""
        return bool(self.as_draws().distance < self.num_bands)

    # Rounds.

    def support(self) -> Participation:
        """Returns the schema that every draw keeps, for the guarantee without amplification."""
        return Participation.of_schema(self.as_schema())

    def as_schema(self) -> Schema:
        """Returns the schema that every draw keeps, as numbers for the kernel."""
        return self.as_draws().schema

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns in how many of the first ``num_rounds`` (or all) rounds a client can be."""
        first = min(num_rounds or self.num_rounds, self.num_rounds)
        draws: Draws = dataclasses.replace(self.as_draws(), num_rounds=first)
        return draws.most_participations

    def to_dict(self) -> dict[str, object]:
        """Returns a JSON-able mapping, which :meth:`from_dict` reads."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(description: object) -> "SamplingScheme":
        """Returns the scheme of a mapping that :meth:`to_dict` made.

        Args:
          description: The mapping.

        Returns:
          The scheme.

        Raises:
          ValueError: If the mapping does not describe a scheme.
        """
        try:
            if not isinstance(description, Mapping):
                raise TypeError
            return sampling_scheme(**description)
        except TypeError as error:
            shown = numbers.shown(description)
            raise ValueError(f"{shown} does not describe a sampling scheme.") from error

    @staticmethod
    def accounted(scheme: object) -> "SamplingScheme":
        """Returns a copy of a scheme, made from its fields, after a check of its class.

        Args:
          scheme: The scheme.

        Raises:
          TypeError: If its class is not one of ``SCHEMES``.
          ValueError: If its sizes do not fit together.
        """
        if not isinstance(scheme, SamplingScheme) or type(scheme) not in _SAMPLING:
            raise TypeError(
                "a sampling scheme must be of a class of mf_aggregators.participation, not of a "
                f"subclass, found {numbers.shown(scheme)}. For draws of your own, give a schema "
                "that they keep, such as MinSeparation."
            )
        return dataclasses.replace(scheme)

    @staticmethod
    def of_draws(draws: Draws) -> "SamplingScheme":
        """Returns the scheme for integers of the kernel, the inverse of :meth:`as_draws`.

        Args:
          draws: The integers.
        """
        return SCHEMES[draws.name](*dataclasses.astuple(draws))

    # Accounting. Noise multipliers are relative to the largest column norm of C.

    def run(self, sigma: float, columns: StrategyColumns | None) -> SampledRun:
        """Returns a run of the scheme as data for the kernel.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          columns: The columns of C if clients draw for themselves; None for groups, and for a
            diagonal C with equal entries.

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

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
    ) -> Amplified:
        """Returns the amplified epsilon of a run, with its certificate.

        Args:
          sigma: The noise multiplier, at least 0.
          delta: The delta of the guarantee.
          columns: As in :meth:`run`.
          certification: How epsilons are certified if clients draw for themselves; None for the
            default.

        Raises:
          TailError: If there is too little noise to account for (a ValueError).
          ValueError: If an argument is out of its range or does not fit the scheme.
        """
        run = self.run(sigma, columns)
        if self.has_groups:
            return Amplified(run.epsilon(delta), None)
        return (certification or Certification()).amplified(run, delta)

    def calibrated(
        self,
        target: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
    ) -> float:
        """Returns the smallest noise multiplier for a target epsilon.

        The epsilon that the kernel proves for it is never above the target.

        Args:
          target: The target epsilon.
          delta: The delta of the guarantee.
          columns: As in :meth:`run`.
          certification: As in :meth:`amplified`.

        Raises:
          ValueError: If no noise multiplier gives the target.
        """
        draws = self.as_draws()
        if isinstance(draws, InGroups):
            return accounting.noise_multiplier(target, delta, draws=draws)
        run = self.run(1.0, columns)
        return (certification or Certification()).calibrated(run, target, delta)

    def epsilon(
        self, noise_multiplier: float, delta: float, strategy_matrix: _C = None, *, seed: int = 0
    ) -> float:
        """Returns the epsilon of a mechanism if clients take part by this scheme.

        Args:
          noise_multiplier: The standard deviation of Z divided by (clip norm times the largest
            column norm of C); zero means no noise.
          delta: Below 1. For cyclic groups it is at least 1e-12 and 4e-15 times the compositions.
          strategy_matrix: (n, n), C, if clients draw for themselves; None for a diagonal C with
            equal entries, if ``num_bands`` is 1.
          seed: The seed of the Monte Carlo test that proves the epsilon if clients draw for
            themselves. Choose it before you know any result.

        Returns:
          An epsilon >= 0 for which the run is (epsilon, delta)-DP; infinity without noise.

        Raises:
          TailError: As in ``accounting.epsilon``.
          ValueError: If an argument is out of its range, or C is missing or does not fit.

        Example:
          >>> import mf_aggregators as mfa
          >>> sizes = {"population": 4000, "clients_per_round": 50}
          >>> scheme = mfa.participation.PoissonSampling(100, 4, **sizes)
          >>> round(scheme.epsilon(noise_multiplier=1.0, delta=1e-6), 2)
          2.61
        """
        return self.amplified(
            numbers.non_negative_number(noise_multiplier, "noise_multiplier"),
            delta,
            self._columns(strategy_matrix),
            Certification(seed=seed),
        ).epsilon

    def noise_multiplier(
        self, epsilon: float, delta: float, strategy_matrix: _C = None, *, seed: int = 0
    ) -> float:
        """Returns the smallest noise multiplier with a proved epsilon of at most a target.

        It is the inverse of :meth:`epsilon`. If epsilon needs a Monte Carlo test, the result may be
        the noise multiplier without amplification, because tests prove nothing for targets far
        below 1.

        Args:
          epsilon: Above 0.
          delta: As in :meth:`epsilon`.
          strategy_matrix: As in :meth:`epsilon`.
          seed: As in :meth:`epsilon`.

        Raises:
          ValueError: As for :meth:`epsilon`, and if no noise multiplier reaches the target.

        Example:
          >>> import mf_aggregators as mfa
          >>> sizes = {"population": 4000, "clients_per_round": 50}
          >>> scheme = mfa.participation.PoissonSampling(100, 4, **sizes)
          >>> round(scheme.noise_multiplier(epsilon=2.0, delta=1e-6), 2)
          1.12
        """
        return self.calibrated(
            numbers.positive_number(epsilon, "epsilon"),
            delta,
            self._columns(strategy_matrix),
            Certification(seed=seed),
        )

    def event(self, noise_multiplier: float, strategy_matrix: _C = None) -> dp_event.DpEvent:
        """Returns a run as an event of dp-accounting, as ``accounting.event`` does.

        Args:
          noise_multiplier: As in :meth:`epsilon`.
          strategy_matrix: As there.

        Raises:
          ValueError: If the noise multiplier is negative or not finite.

        Example:
          >>> import mf_aggregators as mfa
          >>> sizes = {"population": 4000, "clients_per_round": 50}
          >>> scheme = mfa.participation.PoissonSampling(100, 4, **sizes)
          >>> round(mfa.accounting.composed_epsilon([scheme.event(1.0)] * 2, delta=1e-6), 2)
          3.2
        """
        sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
        return accounting.event(self.run(sigma, self._columns(strategy_matrix)))

    def _columns(self, strategy_matrix: _C) -> StrategyColumns | None:
        if strategy_matrix is None:
            return None
        entries = _columns_of_matrix(strategy_matrix, self.num_bands)
        # The matrix does not say how rows of noise are made: with all bands, they may follow from
        # rows of Z.
        if self.shares_rows or entries.shape[1] == self.num_rounds:
            return _of_any_noise(entries)
        return StrategyColumns(entries)

    # Draws.

    def sampler(self, seed: int) -> "Sampler":
        """Creates the sampler of a run, and makes the draws that concern all rounds.

        It needs 8 bytes of memory for each client; with min-separation sampling, for each
        participation.

        Args:
          seed: Any non-negative integer, the same for all rounds of one run and for no other
            run; ``participation.secret_seed`` makes one.

        Returns:
          The sampler.

        Raises:
          ValueError: If the seed is negative.

        Example:
          >>> import mf_aggregators as mfa
          >>> sizes = {"population": 400, "clients_per_round": 5}
          >>> scheme = mfa.participation.PoissonSampling(100, 4, **sizes)
          >>> sampler = scheme.sampler(seed=7)  # a known seed, for a test
          >>> set(sampler.draw(0)) & set(sampler.draw(1))  # rounds of different groups
          set()
        """
        return Sampler(self, seed)

    def deviation(self, num_clients: int, cohorts: Sequence[IntArray]) -> str | None:
        """Returns why the cohorts of the first rounds cannot come from the scheme, or None.

        Args:
          num_clients: The number of clients in the population.
          cohorts: For each released round, the increasing indices of its clients, from 0.

        Returns:
          The first deviation, as the end of a sentence that names no client.
        """
        if num_clients != self.population:
            return f"the ledger has {num_clients} clients, not {self.population}"
        return _deviation(self.as_draws(), cohorts)

    # Words.

    def __str__(self) -> str:
        return str(self.as_draws())

    @property
    def words(self) -> _Words:
        """The texts that describe the scheme."""
        return _words_of(self.as_draws())

    def condition(self, sampler: str | None = None) -> str:
        """Returns the condition of the guarantee, as sentences that follow "only if"."""
        draws, coin = self.as_draws(), ""
        if isinstance(draws, losses.MinSeparation):
            coin = f" The probability of the coin is exactly {draws.joining_probability!r}."
        return (
            f"this holds. {self.words.assumption}{coin} In a data centre or a simulation, "
            f"{sampler} draws so: its seed and who was drawn stay secret for ever."
        )

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of training commands for this scheme, by name."""
        own = self.own_size()
        return {
            "sampling": self.name,
            "clients_per_round": self.clients_per_round,
            **({} if own is None else {own: getattr(self, own)}),
        }


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingScheme):
    """Poisson sampling: each client of a round's group joins with probability B b / m (Cor. F.1).

    Use it when a server that holds the data draws each batch, and batches may vary in size.

    Clients join independently. The groups have floor(m / b) or ceil(m / b) clients; batches vary in
    size around B.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.PoissonSampling(**sizes)
      >>> print(scheme)
      poisson sampling of 50 of 4000 clients
      >>> round(scheme.epsilon(noise_multiplier=1.0, delta=1e-6), 2)
      1.17
    """

    name: ClassVar[str] = "poisson"
    _kind: ClassVar[type[Draws]] = losses.Poisson


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(SamplingScheme):
    """Fixed-size sampling: a random subset of B clients of a round's group (Algorithm 2).

    Use it when a server that holds the data draws batches that are all of one size.

    All groups have floor(m / b) clients; up to b - 1 clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.FixedSizeSampling(**sizes)
      >>> print(scheme)
      fixed_size sampling of 50 of 4000 clients
      >>> round(scheme.epsilon(noise_multiplier=1.0, delta=1e-6), 2)
      6.84
    """

    name: ClassVar[str] = "fixed_size"
    has_random_sizes: ClassVar[bool] = False
    _kind: ClassVar[type[Draws]] = losses.FixedSize


@dataclasses.dataclass(frozen=True)
class Shuffling(SamplingScheme):
    """Shuffling: each group is shuffled and cut into batches of B, again after each pass.

    Use it when a data loader shuffles the data again for each epoch.

    As in Cor. F.2, each pass over a group contains every client of the group once. The groups have
    a multiple of B clients, floor(m / (b B)) B; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.Shuffling(**sizes)
      >>> print(scheme)
      shuffling sampling of 50 of 4000 clients
      >>> round(scheme.epsilon(noise_multiplier=1.0, delta=1e-6), 2)
      7.29
    """

    name: ClassVar[str] = "shuffling"
    has_random_sizes: ClassVar[bool] = False
    _kind: ClassVar[type[Draws]] = losses.Shuffling


@dataclasses.dataclass(frozen=True)
class RandomAllocation(SamplingScheme):
    """Random allocation: each client is in one random round of every cycle of its group.

    Use it when each example should be used once in each epoch, and batches may vary in size.

    A cycle has t = floor(m / (b B)) rounds of the group, and a group has t B clients, so a round
    has B clients on average; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.RandomAllocation(**sizes)
      >>> print(scheme)
      random_allocation sampling of 50 of 4000 clients
      >>> round(scheme.epsilon(noise_multiplier=1.0, delta=1e-6), 2)
      1.06
    """

    name: ClassVar[str] = "random_allocation"
    _kind: ClassVar[type[Draws]] = losses.RandomAllocation


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSampling(SamplingScheme):
    """Poisson sampling with a largest batch: if more clients join, a random subset stays.

    Use it when batches are drawn by Poisson sampling, and memory limits their size.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation before batches are cut.
      largest_batch: The largest number L of clients in a round, at least B. By default, the
        smallest number that a round exceeds with a probability of at most 1e-6.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.TruncatedPoissonSampling(**sizes, largest_batch=90)
      >>> print(scheme)
      truncated_poisson sampling of 50 of 4000 clients
      >>> round(scheme.epsilon(noise_multiplier=1.0, delta=1e-6), 2)
      1.17
    """

    largest_batch: int

    name: ClassVar[str] = "truncated_poisson"
    _kind: ClassVar[type[Draws]] = losses.TruncatedPoisson

    @property
    def largest_cohort(self) -> int:
        """The largest number of clients that a round can have."""
        return self.largest_batch


@dataclasses.dataclass(frozen=True)
class MinSeparationSampling(SamplingScheme):
    """Min-separation sampling: secret coins under timers (b-min-sep, arXiv 2602.09338).

    Use it when devices keep a timer and toss secret coins.

    A client that joined a round is not free for the next separation - 1 rounds. In every round in
    which it is free, it joins with probability p, independently of everything before. Before round
    0, timers are in their stationary distribution: a client is free in round 0 with probability 1 /
    (1 + (separation - 1) p), and first free in each of the rounds 1 to separation - 1 with p times
    that. So clients_per_round clients join in every round on average.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: The smallest distance of a client's participations, in rounds; at least num_bands,
        and num_bands by default.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.MinSeparationSampling(**sizes, separation=10)
      >>> print(scheme)
      min_separation sampling of 50 of 4000 clients
      >>> sampler = scheme.sampler(mfa.participation.secret_seed())
      >>> set(sampler.draw(0)) & set(sampler.draw(9))
      set()
    """

    separation: int

    name: ClassVar[str] = "min_separation"
    has_groups: ClassVar[bool] = False
    _kind: ClassVar[type[Draws]] = losses.MinSeparation


@dataclasses.dataclass(frozen=True)
class BallsInBins(SamplingScheme):
    """Balls in bins: each client draws one of ``separation`` bins once (arXiv 2410.06266).

    Use it when each client should take part in one secret round of every cycle.

    A client takes part in every round i with i modulo separation equal to its bin. Each round has m
    / separation clients on average. This has to be B up to the remainder of a division: either
    separation is floor(m / B), or B is floor(m / separation).

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: The number of bins, by default floor(m / B). It may be smaller than num_bands; a
        client's participations then change some of the same rows of C x.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 1, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.BallsInBins(**sizes, separation=80)
      >>> print(scheme)
      balls_in_bins sampling of 50 of 4000 clients
      >>> sampler = scheme.sampler(mfa.participation.secret_seed())
      >>> set(sampler.draw(0)) == set(sampler.draw(80))
      True
    """

    separation: int

    name: ClassVar[str] = "balls_in_bins"
    has_groups: ClassVar[bool] = False
    takes_any_matrix: ClassVar[bool] = True
    _kind: ClassVar[type[Draws]] = losses.BallsInBins

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


class Sampler(Cohorts):
    """Draws the clients of all rounds by a scheme, from a seed (``scheme.sampler(seed)``).

    Use it when a sampling scheme draws the clients of a round.

    Amplification holds only against adversaries who do not know who was drawn, and the seed
    determines all draws. So the seed must come from ``participation.secret_seed``, be used for one
    run only, and stay as secret as the seed of the noise. The same holds for everything that lists
    the batches, such as the run's ledger. Do not use it for devices that decide themselves when to
    take part, unless they decide by the secret coins of a scheme.

    Attributes:
      scheme: The sampling scheme.
      seed: The secret seed of the draws.

    Raises:
      ValueError: If the seed is not an integer of at least 0, or the scheme has another type.

    Example:
      >>> import mf_aggregators as mfa
      >>> scheme = mfa.participation.FixedSizeSampling(100, 4, population=400, clients_per_round=5)
      >>> sampler = scheme.sampler(mfa.participation.secret_seed())
      >>> cohort = sampler.draw(0)  # the clients of the first round
      >>> len(cohort), 0 <= min(cohort) <= max(cohort) < 400
      (5, True)
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
          may_be_absent: Whether drawn clients may be missing (because they could not be asked, for
            example); possible only if clients draw for themselves.

        Returns:
          The first difference, as the end of a sentence that names no client.
        """
        found = self.scheme.deviation(num_clients, cohorts)
        if found is not None:
            return found
        for index, cohort in enumerate(cohorts):
            drawn, nth = self.draw(index), _nth_round(index)
            if may_be_absent:
                if not np.all(np.isin(cohort, drawn)):
                    return f"a client of {nth} is not one of those that the sampler draws"
            elif not np.array_equal(cohort, drawn):
                return f"the clients of {nth} are not those that the sampler draws"
        return None

    def num_absent(self, cohorts: Sequence[IntArray]) -> int:
        """Returns the number of drawn participations that are missing in the released rounds.

        Args:
          cohorts: As in :meth:`SamplingScheme.deviation`.
        """
        return sum(
            len(np.setdiff1d(self.draw(index), cohort)) for index, cohort in enumerate(cohorts)
        )


_SAMPLING: tuple[type[SamplingScheme], ...] = (
    *(PoissonSampling, FixedSizeSampling, Shuffling, MinSeparationSampling),
    *(BallsInBins, TruncatedPoissonSampling, RandomAllocation),
)
# All sampling schemes by name.
SCHEMES: Mapping[str, type[SamplingScheme]] = MappingProxyType(
    {each.name: each for each in _SAMPLING}
)


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

    Use it when the name of a scheme comes from a flag or a file.

    Args:
      name: The name of a scheme.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients m, at least B b; for ``balls_in_bins`` at least B times the bins.
      clients_per_round: The batch size B, expected or exact.
      separation: For ``min_separation``, the smallest distance of two participations of a client,
        at least b and b by default. For ``balls_in_bins``, the number of bins, floor(m / B) by
        default. None for other schemes.
      largest_batch: For ``truncated_poisson``, the largest number of clients in a round; by default
        the smallest number that a round exceeds with a probability of at most 1e-6. None for other
        schemes.

    Returns:
      The scheme.

    Raises:
      ValueError: If the name is unknown, or the sizes do not fit together.

    Example:
      >>> import mf_aggregators as mfa
      >>> sizes = {"num_rounds": 100, "num_bands": 4, "population": 4000, "clients_per_round": 50}
      >>> scheme = mfa.participation.sampling_scheme("truncated_poisson", **sizes)
      >>> type(scheme).__name__, scheme.largest_batch
      ('TruncatedPoissonSampling', 86)
    """
    if name not in SCHEMES:
        raise ValueError(
            f"the sampling scheme {numbers.shown(name)} is not one of {', '.join(SCHEMES)}."
        )
    kind = SCHEMES[name]
    own = kind.own_size()
    sizes = (num_rounds, num_bands, population, clients_per_round)
    given = {"separation": separation, "largest_batch": largest_batch}
    for other, value in given.items():
        if other != own and value is not None:
            words = other.replace("_", " ")
            raise ValueError(f"the sampling scheme {name!r} takes no {words}, found {value}.")
    if own is None:
        return kind(*sizes)
    size = given[own]
    if size is None and own == "largest_batch":
        size = _usual_largest_batch(Poisson(*dataclasses.astuple(PoissonSampling(*sizes))))
    elif size is None and kind is BallsInBins:
        PoissonSampling(num_rounds, 1, population, clients_per_round)
        size = population // clients_per_round
    whole: tuple[int, ...] = (*sizes, num_bands if size is None else size)
    return kind(*whole)


def _usual_largest_batch(draws: Poisson) -> int:
    """The least size that a batch exceeds with at most ``_PROBABILITY_OF_CUT``."""
    group_size, q = -(-draws.population // draws.num_bands), draws.sampling_probability
    low, high = draws.clients_per_round, max(group_size, draws.clients_per_round)
    # Populations are too large for an array of all sizes.
    while low < high:
        middle = (low + high) // 2
        more = float(special.betainc(middle + 1, group_size - middle, q))
        low, high = (low, middle) if more <= _PROBABILITY_OF_CUT else (middle + 1, high)
    return low
