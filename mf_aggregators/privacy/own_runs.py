"""Statements of runs in one's own loop: the aggregator says what it knows, a person the rest."""

import dataclasses
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mf_aggregators import version
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import NO_COUNTS, gap
from mf_aggregators.kernel.numbers import rounded_down
from mf_aggregators.noise import noise_directory
from mf_aggregators.noise.noise_directory import RecordError, ReleasedSums
from mf_aggregators.privacy import ledgers, statements
from mf_aggregators.privacy.ledgers import GivenLedger, Ledger
from mf_aggregators.privacy.round_times import RoundTimes
from mf_aggregators.privacy.statements import Evidence, RunFacts, Statement
from mf_aggregators.private_metrics import PrivateMetrics

if TYPE_CHECKING:
    from mf_aggregators.mechanism import Mechanism

# The default delta is the population to this power (McMahan et al. 2018, Sec. 4.1).
_EXPONENT_OF_DELTA = -1.1
_BY_AGGREGATOR = "read from the aggregator"
# A name without any of these is an abbreviation.
_VOWELS = frozenset("aeiouy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownFacts:
    """Facts of a run that its aggregator knows.

    Attributes:
      program: The class or function that draws the noise.
      clip: The clip norm, or how it adapts.
      clients_per_round: The number that sums are divided by.
      seed_is_fixed: Whether the seed of the noise was given.
      split: How the noise of the first horizon is split; None where updates have all of it.
      metrics: The metrics that are released with noise; None for none.
      secure_sums: Whether sums are secure; None where the aggregator does not make them.
      origin_of_sums: Where that is known from.
      noise_directory: The directory with the record of sums; None for a run without one.
      stream: The name of the run's stream of noise; None where no state was given.
      num_rounds: The rounds that were released or spent, by the state; None where none was given.
      counts: The source of the numbers of clients that were summed.
    """

    program: str
    clip: float | AdaptiveClip
    clients_per_round: float
    seed_is_fixed: bool
    split: NoiseSplit | None = None
    metrics: PrivateMetrics | None = None
    secure_sums: bool | None = None
    origin_of_sums: str = _BY_AGGREGATOR
    noise_directory: str | os.PathLike[str] | None = None
    stream: str | None = None
    num_rounds: int | None = None
    counts: str = "the server's counts"


def statement(
    mechanism: "Mechanism",
    known: KnownFacts,
    ledger: GivenLedger | RoundTimes,
    *,
    population: int,
    public_data: str,
    enforcement: str,
    delta: float | None = None,
    round_counts: Iterable[int] | str | os.PathLike[str] | None = None,
    sampling_seed: int | None = None,
    secure_sums: bool | None = None,
    is_finished: bool | None = None,
    simulation: str | Iterable[str] = (),
    date: str | None = None,
    **words: Any,
) -> Statement:
    """Returns the privacy statement of a run in one's own loop.

    The ``statement`` methods of aggregators take all that follows ``known``.

    Args:
      mechanism: The mechanism of the aggregator.
      known: What the aggregator knows.
      ledger: Who took part in which round, as ``Mechanism.observed`` takes it. A mapping and a text
        file are for the rounds of the state or of the record of sums; without both, for all.
      population: The number of clients that cohorts were drawn from.
      public_data: What was used besides the clients' data, in a few words, such as ``none``.
      enforcement: What makes clients keep to the planned participation, as a sentence.
      delta: Above 0 and below 1; None for population^-1.1, rounded down to two digits.
      round_counts: How many clients each round summed, as ``Mechanism.observed`` takes it.
      sampling_seed: As there.
      secure_sums: Whether the server saw sums alone; None leaves it to the aggregator.
      is_finished: Whether the run has ended for good. None takes it for finished if noise was used
        for every round; otherwise nobody said.
      simulation: What was simulated, as a sentence or several; none for a real run.
      date: The day of the statement, as 2026-11-26; None for today, in UTC.
      **words: Further facts that nobody can measure, each empty by default: ``responsible``,
        ``signer``, ``model``, ``period`` and ``custody`` (``statements.RunFacts``).

    Returns:
      The statement: ``to_markdown`` has the text, and ``to_dict`` the JSON document.

    Raises:
      LedgerError: If the ledger cannot be read.
      RecordError: If the record of sums cannot be read, or its noise is of another mechanism.
      TypeError: If ``words`` has another fact.
      ValueError: If the ledger is not that of this aggregator: it has fewer rounds than were
        released, other cohorts, or more clients than the population; or an argument is out of its
        range.
    """
    population = numbers.positive_integer(population, "population")
    scheme = mechanism.sampling
    if scheme is not None and scheme.population != population:
        raise ValueError(
            f"population is {population}, and {scheme.name} draws from {scheme.population} clients."
        )
    record = _record(mechanism, known)
    released = known.num_rounds
    if record is not None:
        released = max(released or 0, record.num_rounds)
    if not isinstance(ledger, RoundTimes):
        ledger = ledgers.of(ledger, mechanism.num_rounds if released is None else released)
        _check_cohorts(ledger, known, has_counts=round_counts is not None)
    if ledger.num_rounds < (released or 0):
        raise ValueError(
            f"the ledger has {ledger.num_rounds} rounds, and noise was used for {released}: give "
            "the ledger of all of them, or their times."
        )
    names = ("clients_per_round", "clip_norm", "seed_is_fixed", "aggregator")
    origins = dict.fromkeys(names, _BY_AGGREGATOR)
    if secure_sums is None:
        secure_sums, origins["secure_sums"] = known.secure_sums, known.origin_of_sums
    elif secure_sums and known.secure_sums is False:
        raise ValueError(f"secure_sums is True, and sums are not secure: {known.origin_of_sums}.")
    if is_finished is None and released == mechanism.num_rounds:
        is_finished, origins["is_finished"] = True, "noise was used for every round"
    found = mechanism.observed(ledger, round_counts=round_counts, sampling_seed=sampling_seed)
    split, first = known.split, mechanism.horizons[0].noise_multiplier
    if split is not None and mechanism.extends is not None:
        split = split.of_horizon(mechanism.noise_multiplier / first)
    facts = RunFacts(
        mechanism=name_of(mechanism),
        population=population,
        clients_per_round=known.clients_per_round,
        clip=known.clip,
        public_data=public_data,
        enforcement=enforcement,
        split=split,
        metrics=known.metrics,
        seed_is_fixed=known.seed_is_fixed,
        aggregator=f"{known.program} of mf_aggregators {version.__version__}",
        secure_sums=secure_sums,
        is_finished=is_finished,
        simulation=(simulation,) if isinstance(simulation, str) else tuple(simulation),
        num_alike_names=found.num_alike_names,
        has_run_directory=False,
        origins=origins,
        **words,
    )
    if delta is None:
        delta = float(rounded_down(population**_EXPONENT_OF_DELTA, ".2g"))
    return dataclasses.replace(
        found.statement(facts, delta),
        evidence=Evidence(
            counts=known.counts,
            num_sums=None if record is None else record.num_sums,
            record_sha256=None if record is None else record.sha256,
        ),
        date=statements.today() if date is None else date,
    )


def name_of(mechanism: "Mechanism") -> str:
    """Returns the name of a mechanism in statements.

    Args:
      mechanism: The mechanism.
    """
    if mechanism.noise_multiplier == 0.0:
        return "None: clipping without noise"
    return in_words(mechanism.factorization.mechanism, mechanism.num_rounds)


def in_words(mechanism: str, num_rounds: int) -> str:
    """Returns the name of a mechanism with noise in statements, with its rounds.

    Args:
      mechanism: Its name in the catalogue.
      num_rounds: How many rounds.
    """
    words = mechanism.replace("_", " ")
    name = f"{words[0].upper()}{words[1:]}" if _VOWELS.intersection(words) else words.upper()
    return f"{name} matrix factorization for {num_rounds} rounds"


def _record(mechanism: "Mechanism", known: KnownFacts) -> ReleasedSums | None:
    """The record of the run's sums, which have the mechanism's noise; None without a record."""
    if known.noise_directory is None or mechanism.noise_multiplier == 0.0:
        return None
    names = noise_directory.streams(known.noise_directory)
    if known.stream is None and len(names) > 1:
        raise ValueError(
            f"{known.noise_directory} has the sums of {len(names)} runs: pass state=, the newest "
            "state of the run, and count the other runs."
        )
    stream = names[0] if known.stream is None and names else known.stream
    if stream not in names:
        return None
    found = noise_directory.read_record(known.noise_directory, stream)
    check_noise(mechanism, found)
    return found


def check_noise(mechanism: "Mechanism", record: ReleasedSums) -> None:
    """Checks that a record is of sums with the noise of a mechanism, each of its horizon.

    Args:
      mechanism: The mechanism.
      record: The record.

    Raises:
      RecordError: If it is not.
    """
    ends = [each.num_rounds for each in mechanism.horizons]
    digests = [each.noise_digest.hex() for each in mechanism.proved_horizons]
    for i, digest in record.of_rounds.items():
        own = [each for end, each in zip(ends, digests, strict=True) if i < end][:1]
        if digest and [digest] != own:
            raise RecordError(
                f"the record of sums has noise of another mechanism in round {i + 1}: use the "
                "mechanism of the run."
            )


def _check_cohorts(ledger: Ledger, known: KnownFacts, *, has_counts: bool) -> None:
    """Raises ValueError if a ledger has other cohorts than the aggregator's run."""
    found = gap(ledger.rounds_of_clients, ledger.num_rounds, None, known.clients_per_round)
    mean = sum(map(len, ledger.rounds_of_clients)) / max(1, ledger.num_rounds)
    # With the server's counts, a smaller mean shows that devices dropped out.
    if found != NO_COUNTS and not (has_counts and mean < known.clients_per_round):
        raise ValueError(
            f"the ledger has {mean:.6g} clients a round, and the aggregator is for "
            f"{known.clients_per_round:g}: give the ledger of its run."
        )
