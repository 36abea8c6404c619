"""Ways to take part in a run: schemas, and sampling schemes.

Timers and fixed orders name sets of rounds in which one client may take part, however they come
about. One convention holds throughout (BandMF, Def. 1): a separation of b means that any two
participations i, j of one client satisfy ``|i - j| >= b``, so that b = 1 allows every round.
Earlier DP-FTRL texts count the rounds strictly between two participations, which is b - 1.

A sampling scheme is a random rule by which clients take part. Towards everybody who does not know
the draws, it amplifies the guarantee. Devices that decide themselves when to take part, without a
coin of known probability, follow no scheme, and nothing amplifies their guarantee.

A scheme is three things: draws, integers of the kernel (``kernel.losses``) with a sampler; an
accountant, in the kernel as well (``kernel.losses``, ``kernel.certificate``); and words
(``_WORDS``). An amplified guarantee is worth nothing if the batches came about in another way:
:meth:`SamplingScheme.deviation` compares cohorts with the scheme, and :meth:`Sampler.deviation`
with the very batches of a secret seed.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

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

# The default largest batch is exceeded with at most this probability, at next to no cost.
_PROBABILITY_OF_CUT = 1e-6
# Upper bound, in steps of Z: 1 and twice the error of floats in a row.
_MOST_OF_A_STEP = 1.5


@dataclasses.dataclass(frozen=True)
class Participation(abc.ABC):
    """A participation schema: in which sets of rounds one client may take part.

    Use it when a function of yours takes any schema: all of them are its subclasses.

    Sampling schemes are schemas as well, of the sets of rounds that they may draw.

    Attributes:
      name: The kind's name in JSON and in flags.
      is_sampled: Whether clients take part by a random rule, so that the guarantee is amplified.
      is_evenly_spaced: Whether adjacent participations are exactly ``separation`` rounds apart.

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
        """Returns the participation that ``as_schema`` has turned into numbers.

        Args:
          schema: The numbers; of (k, b)-participation they name the most participations.
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
        """The most participations that the schema names; None for as many as fit."""
        return self.as_schema().most

    def separation_in(self, num_rounds: int) -> int:
        """Returns the least distance b of two participations; n where no client returns.

        Args:
          num_rounds: The number of rounds n.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        schema = self.as_schema()
        return num_rounds if schema == Schema(1, 1) else schema.separation

    def most_participations(self, num_rounds: int) -> int:
        """Returns the most rounds of ``num_rounds`` that one client can take part in.

        Args:
          num_rounds: The number of rounds n.
        """
        return self.as_schema().most_in(num_rounds)

    def allows(self, narrower: "Participation", num_rounds: int) -> bool:
        """Returns whether clients who keep to another schema keep to this one, too.

        Args:
          narrower: The schema that clients keep to.
          num_rounds: n; only participations in these rounds count.

        Raises:
          TypeError: If ``narrower`` is no schema.
          ValueError: If ``num_rounds`` is not a positive integer.
        """
        other = check(narrower).as_schema()
        most = other.most_in(num_rounds)
        # If only the first and the last round fit, a least separation is an exact one.
        largest = other.separation if other.is_even else num_rounds - 1
        own = self.as_schema()
        return most == 1 or own.allows_separations(most, other.separation, largest)

    def smallest_population(self, num_rounds: int, clients_per_round: int) -> int:
        """Returns the fewest clients that :meth:`check_population` accepts.

        Args:
          num_rounds: n.
          clients_per_round: The cohort size B.
        """
        most = self.most_participations(num_rounds)
        within_timers = min(self.separation_in(num_rounds), num_rounds) * clients_per_round
        return max(within_timers, -(-num_rounds * clients_per_round // most))

    def check_population(self, num_rounds: int, population: int, clients_per_round: int) -> None:
        """Checks that a population can fill the rounds under timers that enforce the schema.

        A client that took part in one of the last ``separation - 1`` rounds, or as often as it
        may, cannot join. In the worst case all places of those rounds went to different clients,
        so a round is certain to be filled if the clients outnumber ``separation`` cohorts; and n
        cohorts need as many places as clients have participations. With as many participations as
        fit this is sufficient; with fewer, a late round may still find too few clients.

        Args:
          num_rounds: n.
          population: The number of clients m.
          clients_per_round: The cohort size B.

        Raises:
          ValueError: If some round cannot be filled whoever is drawn.
        """
        needed = self.smallest_population(num_rounds, clients_per_round)
        if population < needed:
            raise ValueError(
                f"{population} clients cannot fill {num_rounds} rounds of {clients_per_round} with "
                f"{self}: {needed} would be needed. Use fewer clients per round or rounds, a "
                "smaller separation, or more participations per client."
            )

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        schema = self.as_schema()
        # Noise of clients who are drawn is scaled to one participation.
        if self.is_sampled or schema == Schema(1, 1):
            return "--participation=single"
        most = "" if schema.most is None else f" --max_participations={schema.most}"
        return f"--participation={self.name} --separation={schema.separation}{most}"

    def run_flags(self) -> Mapping[str, int | str | None] | None:
        """Returns flags of commands that train, by name; None where these cannot enforce it."""
        return None

    def condition(self, sampler: str | None = None) -> str:
        """Returns the condition of the guarantee, after "only if".

        Args:
          sampler: For a sampling scheme, the Python expression of the sampler.
        """
        del sampler
        return (
            f"timers enforce {self} on every device: that is yours to do (docs/devices.md says "
            "how)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that ``participation.from_dict`` takes back."""
        return {"schema": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class SingleParticipation(Participation):
    """Each client takes part in at most one round.

    Use it when no client comes back.

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
        """Returns the flags of timers that let each client take part once, by name."""
        return {"max_participations": 1}


@dataclasses.dataclass(frozen=True)
class FixedEpochOrder(Participation):
    """(k, b)-participation: at most k participations, adjacent ones exactly b rounds apart.

    Use it when a data centre goes through its data in one order, epoch by epoch.

    The schema of a data centre that goes through its data in one fixed order, once
    an epoch (Choquette-Choo et al., Multi-epoch MF; BandMF Sec. 2).

    Attributes:
      epochs: The most participations k, at least 1.
      separation: The rounds b between adjacent participations, at least 1.

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
        """Returns the condition of the guarantee, after "only if"."""
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

    Use it when devices come and go, and each of them keeps a timer.

    The schema that a timer on each device enforces.

    Attributes:
      separation: The least distance b of two participations: rounds i and j of one client
        satisfy |i - j| >= b. 1 allows every round.
      max_participations: The most participations k of one client; None for as many
        as fit into the rounds.

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


def check(participation: Any, num_rounds: int | None = None) -> Participation:
    """Returns a copy of a schema without sampling, made anew from its fields.

    What optimises for a schema asks whether its participations fit: a matrix for participations
    that cannot take place is for another number of rounds than its user has in mind.

    Args:
      participation: What was given for a schema.
      num_rounds: n, into which all participations that it names have to fit; None for any.

    Raises:
      TypeError: If it is of another class than these three.
      ValueError: If it names more participations than fit.
    """
    if type(participation) not in _KINDS:
        raise TypeError(
            "participation must be a SingleParticipation, FixedEpochOrder or MinSeparation "
            f"of mf_aggregators.participation, found {numbers.shown(participation)}."
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


def from_dict(description: Mapping[str, Any]) -> Participation:
    """Returns the schema that ``Participation.to_dict`` described.

    Args:
      description: A mapping with ``schema`` (``single``, ``fixed_epoch`` or
        ``min_sep``) and that schema's attributes.

    Returns:
      The schema.

    Raises:
      ValueError: If the description names no schema, or its attributes are not
        those of the schema.
    """
    attributes = dict(description)
    name = attributes.pop("schema", None)
    if name not in _SCHEMAS:
        raise ValueError(
            f"a participation schema must be one of {', '.join(_SCHEMAS)}, found {name!r}."
        )
    try:
        return _SCHEMAS[name](**attributes)
    except TypeError as error:
        raise ValueError(f"participation schema {name}: {error}.") from None


@dataclasses.dataclass(frozen=True)
class _Words:
    """Sentences about a scheme for plans and statements.

    In the table, ``{d.name}`` stands for an integer of the draws, and other names in braces for the
    values of :func:`_words_of`.

    Attributes:
      label: How clients take part, in a few words, for tables of mechanisms.
      accounting: How the amplified guarantee is computed, in whole sentences.
      assumption: What the guarantee assumes of how clients take part, in whole sentences.
      together: What all rounds together are, as a mechanism.
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
    """Words about a scheme with groups.

    Args:
      drawn: The clients that a round draws, as the end of a sentence.
      accounting: How the guarantee is computed.
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
    """Returns the words about draws.

    Args:
      draws: How clients are drawn.
    """
    values: dict[str, Any] = {
        "d": draws,
        "groups": counted(draws.num_bands, "group"),
        "bins": counted(draws.distance, "bin"),
        "waits": counted(draws.distance - 1, "round"),
        "last_wait": draws.distance - 1,
    }
    if isinstance(draws, InGroups):
        values["probability"] = rounded_up(draws.sampling_probability, ".6g")
    elif isinstance(draws, losses.MinSeparation):
        p = draws.joining_probability
        values["probability"] = rounded_up(p, ".6g")
        values["free_at_first"] = rounded_up(1.0 / (1.0 + values["last_wait"] * p), ".6g")
    template = dataclasses.asdict(_WORDS[draws.name])
    template["together"] = _EACH_PARTICIPATION if isinstance(draws, InGroups) else _ALL_ROUNDS
    return _Words(**{name: text.format(**values) for name, text in template.items()})


def _deviation(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Returns why the cohorts of the first rounds cannot come from a scheme, or None.

    The cohorts alone are compared with the scheme, as anybody can who may read them. That they are
    the very batches of a secret seed, and not chosen to look like such, only the holder of the seed
    can tell (:meth:`Sampler.deviation`).

    The number of rounds is checked, that each cohort has every client once and as many as the
    scheme draws, and the rounds of each client. What a scheme draws with next to no probability is
    no deviation.

    Args:
      draws: How clients are drawn.
      cohorts: For each round that was released the increasing indices of its clients, from 0;
        fewer rounds than those of the scheme for a run that is not finished.

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
    """Returns a round as messages about a ledger name it.

    Args:
      index: The round, from 0, as in the ledger.
    """
    return f"round {index + 1} (counted from 1)"


def _batch_size(draws: Draws) -> int | None:
    """The clients of every batch; None where it varies."""
    is_whole_group = isinstance(draws, InGroups) and draws.sampling_probability >= 1.0
    is_fixed = is_whole_group or isinstance(draws, losses.FixedSize | losses.Shuffling)
    return draws.clients_per_round if is_fixed else None


def _of_classes(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Says if a client took part in rounds of two groups or bins, or too often in one cycle."""
    # With a coin that always comes up heads, the round of the first participation is a bin.
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
    """Why clients cannot have joined only when their timers allowed it."""
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
    """Returns columns and an upper bound of their roundings if rows may follow from rows of Z.

    Args:
      entries: (n, b), none of the diagonal zero.
    """
    shares = np.abs(entries / entries[:, :1])
    sums = np.zeros(len(shares))
    for lag in range(shares.shape[1]):
        sums[lag:] += shares[: len(shares) - lag, lag]
    return StrategyColumns(
        entries, max(losses.LARGEST_ROUNDING, _MOST_OF_A_STEP * float(np.max(sums)))
    )


def _columns_of_matrix(strategy_matrix: Any, num_bands: int) -> FloatArray:
    """Returns the compact columns of a strategy matrix.

    Args:
      strategy_matrix: (n, n), C, lower triangular.
      num_bands: b, at least the bands of C, at most n.

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
            f"strategy_matrix must have at most {num_bands} bands, found an entry of column "
            f"{below[0]} below them."
        )
    rounds = np.arange(len(matrix))[:, None]
    padded = np.pad(matrix, ((0, num_bands), (0, 0)))
    return np.asarray(padded[rounds + np.arange(num_bands), rounds])


@dataclasses.dataclass(frozen=True)
class SamplingScheme(Participation):
    """A random rule by which clients take part, and its sizes, checked against one another.

    Use it when a function of yours takes any scheme: all of them are its subclasses.

    Attributes:
      num_rounds: The rounds n of the run.
      num_bands: The bands of C.
      population: The number of clients (or examples) m.
      clients_per_round: The batch size B, expected or exact.
      has_groups: Whether the server draws from one group of the clients after the other, as many
        as C has bands. Otherwise clients draw for themselves, and no client has to know what
        another one does: the guarantee depends on all entries of C, as a client's rounds are hidden
        among neighbouring ones, the less so the nearer the columns of these are to one another. It
        holds as well where clients that were drawn are absent. An epsilon has a certificate
        (``certificate_search``), or is the one without amplification where that is smaller.
      has_random_sizes: Whether batches vary in size around ``clients_per_round``. Where they do
        not, a client takes the place of another one, which costs noise: plans for any way to take
        part leave such schemes out.
      takes_any_matrix: Whether C may have more bands than a client's rounds are apart.

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
    # The class of the kernel with the same integers.
    _kind: ClassVar[type[Draws]]

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

    def as_draws(self) -> Any:
        """Returns the scheme as the integers that the kernel accounts for, one of ``Draws``."""
        return self._kind(*dataclasses.astuple(self))

    @property
    def largest_cohort(self) -> int:
        """The most clients that one round can have."""
        return self.population

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of a client may change the same row of C x."""
        return bool(self.as_draws().distance < self.num_bands)

    # Rounds.

    def support(self) -> Participation:
        """Returns the schema that every draw keeps: the guarantee against who knows all draws."""
        return Participation.of_schema(self.as_schema())

    def as_schema(self) -> Schema:
        """Returns the schema that every draw keeps, as numbers for the kernel."""
        schema: Schema = self.as_draws().schema
        return schema

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns the most rounds of the first ``num_rounds``, or of all, that a client is in."""
        first = min(num_rounds or self.num_rounds, self.num_rounds)
        draws: Draws = dataclasses.replace(self.as_draws(), num_rounds=first)
        return draws.most_participations

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that :meth:`from_dict` takes back."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(description: Any) -> "SamplingScheme":
        """Returns the scheme that :meth:`to_dict` described.

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
            shown = numbers.shown(description)
            raise ValueError(f"{shown} describes no sampling scheme.") from error

    @staticmethod
    def accounted(scheme: Any) -> "SamplingScheme":
        """Returns a copy of one of the library's sampling schemes, made anew from its fields.

        Args:
          scheme: The scheme.

        Raises:
          TypeError: If it is of another class than those of ``SCHEMES``.
          ValueError: If its sizes do not fit one another.
        """
        if type(scheme) not in _SAMPLING:
            raise TypeError(
                "a sampling scheme must be one of mf_aggregators.participation, and of no "
                f"subclass, found {numbers.shown(scheme)}. For draws of your own, give a schema "
                "that they keep, such as MinSeparation."
            )
        found: SamplingScheme = dataclasses.replace(scheme)
        return found

    @staticmethod
    def of_draws(draws: Draws) -> "SamplingScheme":
        """Returns the scheme that :meth:`as_draws` has turned into integers.

        Args:
          draws: The integers.
        """
        return SCHEMES[draws.name](*dataclasses.astuple(draws))

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

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: StrategyColumns | None,
        certification: Certification | None,
    ) -> Amplified:
        """Returns the epsilon of a run, and its proof.

        Args:
          sigma: The noise multiplier, at least 0.
          delta: The delta of the guarantee.
          columns: As in :meth:`run`.
          certification: How epsilons are certified, where clients draw for themselves; None for
            defaults.

        Raises:
          TailError: If so little noise cannot be accounted for: a ValueError.
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
        """Returns the least noise multiplier for an epsilon; arguments as of :meth:`amplified`.

        The epsilon that is stated of it is never above the target.

        Args:
          target: The epsilon that is to hold.
          delta: The delta of the guarantee.
          columns: As in :meth:`run`.
          certification: As in :meth:`amplified`.

        Raises:
          ValueError: If no noise multiplier gives the target.
        """
        if self.has_groups:
            return accounting.noise_multiplier(target, delta, draws=self.as_draws())
        run = self.run(1.0, columns)
        return (certification or Certification()).calibrated(run, target, delta)

    def epsilon(
        self, noise_multiplier: float, delta: float, strategy_matrix: Any = None, *, seed: int = 0
    ) -> float:
        """Returns the epsilon of a mechanism with clients that take part by the scheme.

        Args:
          noise_multiplier: Standard deviation of Z over (clip norm times the largest column
            norm of C); zero means no noise.
          delta: Below 1. For cyclic groups it is at least 1e-12 and 4e-15 times the compositions.
          strategy_matrix: (n, n), C, where clients draw for themselves; None for a diagonal one of
            equal entries, if ``num_bands`` is 1.
          seed: The seed of the Monte Carlo test that proves such an epsilon, chosen before
            anything is known of its result.

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
        ).epsilon

    def noise_multiplier(
        self, epsilon: float, delta: float, strategy_matrix: Any = None, *, seed: int = 0
    ) -> float:
        """Returns the least noise multiplier with an epsilon that is proved to be within a target.

        It is the inverse of :meth:`epsilon`. Where only samples bound epsilon, it may be that of no
        amplification: for targets far below 1, they prove none.

        Args:
          epsilon: Above 0.
          delta: As in :meth:`epsilon`, and so all others.
          strategy_matrix: As there.
          seed: As there.

        Raises:
          ValueError: As there, and if no noise multiplier gives the target.
        """
        return self.calibrated(
            numbers.positive_number(epsilon, "epsilon"),
            delta,
            self._columns(strategy_matrix),
            Certification(seed=seed),
        )

    def event(self, noise_multiplier: float, strategy_matrix: Any = None) -> dp_event.DpEvent:
        """Returns a run as an event of dp-accounting, as ``accounting.event`` does.

        Args:
          noise_multiplier: As in :meth:`epsilon`.
          strategy_matrix: As there.

        Raises:
          ValueError: If the noise multiplier is negative or not finite.
        """
        sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
        return accounting.event(self.run(sigma, self._columns(strategy_matrix)))

    def _columns(self, strategy_matrix: Any) -> StrategyColumns | None:
        if strategy_matrix is None:
            return None
        entries = _columns_of_matrix(strategy_matrix, self.num_bands)
        # A matrix alone does not say how rows are made: with all bands, perhaps from rows of Z.
        if self.shares_rows or entries.shape[1] == self.num_rounds:
            return _of_any_noise(entries)
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
          cohorts: For each released round the increasing indices of its clients, from 0.

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
        """Sentences about the scheme."""
        return _words_of(self.as_draws())

    def condition(self, sampler: str | None = None) -> str:
        """Returns the condition of the guarantee: sentences, after "only if"."""
        draws, coin = self.as_draws(), ""
        if isinstance(draws, losses.MinSeparation):
            coin = f" The probability of the coin is exactly {draws.joining_probability!r}."
        return (
            f"this holds. {self.words.assumption}{coin} In a data centre or a simulation, "
            f"{sampler} draws so: its seed and who was drawn stay secret for ever."
        )

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of commands that train, by name."""
        own = self.own_size()
        return {
            "sampling": self.name,
            "clients_per_round": self.clients_per_round,
            **({} if own is None else {own: getattr(self, own)}),
        }


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingScheme):
    """Each client of a round's group joins independently with probability B b / m (Cor. F.1).

    Use it when a server that holds the data draws each batch, and batches may vary in size.

    The groups have floor(m / b) or ceil(m / b) clients; batches vary in size around B.

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
    """Exactly B clients of a round's group, a uniformly random subset each time (Algorithm 2).

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
    """A round's group is shuffled and cut into batches of B, afresh whenever it is used up.

    Use it when a data loader shuffles the data afresh for each epoch.

    As in Cor. F.2 each pass over a group shows every client of it once. The groups have a
    multiple of B clients, floor(m / (b B)) B; fewer than b B clients never take part.

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
    """Each client of a group is in one secret round of every cycle of its group's rounds.

    Use it when each example is to be used once an epoch, and batches may vary in size.

    A cycle has t = floor(m / (b B)) rounds, and a group t B clients, so that B clients are in a
    round on average; fewer than b B clients never take part.

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
    """Poisson sampling with a largest size of batches: of more, a random subset stays.

    Use it when batches are drawn by Poisson sampling, and memory limits their size.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation before batches are cut.
      largest_batch: The most clients L of a round, at least B. By default, the least that a round
        exceeds with a probability of at most 1e-6.

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
        """The most clients that one round can have."""
        return self.largest_batch


@dataclasses.dataclass(frozen=True)
class MinSeparationSampling(SamplingScheme):
    """Each client joins with a secret coin if its timer allows it (b-min-sep, arXiv 2602.09338).

    Use it when devices keep a timer and toss secret coins.

    A client that joined is not free to join again for separation - 1 rounds. In every round in
    which it is free, it joins with probability p, whatever happened before. Before round 0
    timers are in their stationary state: a client is free in round 0 with probability
    1 / (1 + (separation - 1) p), and first free in each of the rounds 1 to separation - 1 with p
    times that. So clients_per_round clients join in every round on average.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: Participations of a client are so many rounds apart; at least num_bands, and
        num_bands by default.

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
    """Each client is put once into one of ``separation`` bins at random (arXiv 2410.06266).

    Use it when each client is to have one secret place in every cycle.

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
    """The clients that a scheme draws from a seed, in all rounds; ``scheme.sampler(seed)``.

    Use it when a scheme is to draw who takes part in a round.

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
          may_be_absent: Whether clients that were drawn may be missing, as those that could not be
            asked are: only where clients draw for themselves.

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
        """Returns how many participations that are drawn the first rounds of a run lack.

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
      separation: For ``min_separation``, the least distance of two participations of a
        client, at least b and b by default. For ``balls_in_bins``, the number of bins,
        floor(m / B) by default. None for the others.
      largest_batch: For ``truncated_poisson``, the most clients of a round, by default what a
        round exceeds with a probability of at most 1e-6. None for the others.

    Returns:
      The scheme.

    Raises:
      ValueError: If the name is unknown, or the sizes do not fit one another.

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
    kind: Callable[..., SamplingScheme] = SCHEMES[name]
    own = SCHEMES[name].own_size()
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
        size = _usual_largest_batch(PoissonSampling(*sizes).as_draws())
    elif size is None and kind is BallsInBins:
        PoissonSampling(num_rounds, 1, population, clients_per_round)
        size = population // clients_per_round
    return kind(*sizes, num_bands if size is None else size)


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
