"""Privacy statements: a guarantee with its assumptions, and facts that say where they come from.

A :class:`Statement` is one JSON document (:meth:`Statement.to_dict`), and its text is a function of
that document alone (``statement_file.render``). Its points are those of BandMF App. K.1, after
Ponomareva et al. (2023), Sec. 5.3.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dp_accounting import dp_event

from mf_aggregators import accounting, atomic_files, inputs, version
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import ONLY_IF, Assumption, Guarantee, Pattern
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent
from mf_aggregators.kernel.ledger import NO_COUNTS, ObservedParticipation, gap
from mf_aggregators.kernel.numbers import rounded_down, rounded_up
from mf_aggregators.kernel.sensitivity import Unit
from mf_aggregators.noise import places
from mf_aggregators.noise.places import RecordError, ReleasedSums
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.privacy import guarantees, statement_file
from mf_aggregators.privacy.guarantees import LeastProtected, StoppingRule
from mf_aggregators.privacy.ledgers import GivenLedger, Ledger, RoundTimes
from mf_aggregators.privacy.statement_file import FORMAT, NOT_STATED
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics

if TYPE_CHECKING:
    from mf_aggregators.aggregator import Options
    from mf_aggregators.mechanism import Mechanism

# A statement's numbers are computed by these packages.
_COMPUTES = ("numpy", "scipy", "dp-accounting")
# Facts that no file has, and that a person may tell.
TOLD = ("responsible", "signer", "model", "period", "custody")
# Facts that cannot be measured.
WORDS = (*TOLD, "public_data", "enforcement")
# All facts, in the order of the document.
_FACTS = (
    *("population", "clients_per_round", "clip_norm", "public_data", "enforcement"),
    *("seed_is_fixed", "secure_sums", "aggregator", "is_finished", *TOLD),
)
_DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
# The default delta is the population to this power (McMahan et al. 2018, Sec. 4.1).
_EXPONENT_OF_DELTA = -1.1
_BY_AGGREGATOR = "read from the aggregator"
# A name without any of these is an abbreviation.
_VOWELS = frozenset("aeiouy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run that a statement has besides the guarantee.

    Use it when a statement is made of a run that no aggregator of this library trained.

    Attributes:
      mechanism: The name of the factorization, for a reader.
      population: The number of clients that cohorts were drawn from.
      clients_per_round: The cohort size; expected, if clients are drawn.
      clip: The L2 norm of a client's update: a number, or how it adapts.
      public_data: What was used besides the clients' data, in a few words.
      enforcement: What makes clients keep to the planned participation, as a sentence.
      split: How updates, clipped-count indicators and metrics split the noise; None where updates
        have all of it.
      metrics: The metrics of training that are released with noise; None for none.
      seed_is_fixed: Whether the seed of the noise was given, and not drawn; None if nobody said.
      aggregator: The program that drew the noise; empty if nobody said.
      secure_sums: Whether the server saw sums alone; None if nobody said.
      is_finished: Whether the run has ended for good; None if nobody said.
      simulation: What was simulated, as sentences; empty for a real run.
      responsible: Who answers for the run. This and all below are empty where nobody said.
      signer: The name under which the statement is signed.
      model: The model and its version.
      period: The first and the last day of the run.
      custody: Who holds the noise seed, the state and the ledger, and when they are destroyed.
      has_run_directory: Whether a training command wrote the files of a run directory.
      num_alike_names: How many clients have a name that looks like another client's.
      origins: Where facts come from, by the name of the attribute: as ``measured from FILE``,
        ``simulated`` or ``read from the aggregator``. A fact that is not named is told by whoever
        is responsible.

    Raises:
      ValueError: If a number is out of its range, a text is empty or has characters that cannot be
        seen, or another attribute is of another type.

    Example:
      >>> from mf_aggregators.privacy import statements
      >>> facts = statements.RunFacts(
      ...     mechanism="banded",
      ...     population=1000,
      ...     clients_per_round=10,
      ...     clip=0.5,
      ...     public_data="none",
      ...     enforcement="A timer on each device.",
      ... )
      >>> facts.to_dict()["clip_norm"]
      {'value': '0.5', 'origin': 'told by whoever made this statement'}
    """

    mechanism: str
    population: int
    clients_per_round: float
    clip: float | AdaptiveClip
    public_data: str
    enforcement: str
    split: NoiseSplit | None = None
    metrics: PrivateMetrics | None = None
    seed_is_fixed: bool | None = None
    aggregator: str = ""
    secure_sums: bool | None = None
    is_finished: bool | None = None
    simulation: tuple[str, ...] = ()
    responsible: str = ""
    signer: str = ""
    model: str = ""
    period: str = ""
    custody: str = ""
    has_run_directory: bool = False
    num_alike_names: int = 0
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "population")
        numbers.positive_number(self.clients_per_round, "clients_per_round")
        if not isinstance(self.clip, AdaptiveClip):
            object.__setattr__(self, "clip", numbers.positive_number(self.clip, "clip"))
        numbers.integer_at_least(self.num_alike_names, 0, "num_alike_names")
        inputs.check_types(self)
        if self.clients_per_round > self.population:
            given = f"clients_per_round={self.clients_per_round:g}"
            raise ValueError(f"{given} is more than the population of {self.population}.")
        for name in (*WORDS, "aggregator", "mechanism"):
            is_needed = name in ("public_data", "enforcement")
            inputs.check_words(getattr(self, name) or ("" if is_needed else None), name)
        for text in self.simulation:
            inputs.check_words(text, "simulation")

    @property
    def person(self) -> str:
        """The person who tells the facts that cannot be measured."""
        return self.responsible or "whoever made this statement"

    def to_dict(self) -> dict[str, Any]:
        """Returns each fact with its origin, JSON-able."""
        norm = self.clip.initial_norm if isinstance(self.clip, AdaptiveClip) else self.clip
        sizes = {"clients_per_round": self.clients_per_round, "clip_norm": norm}
        printed = {name: inputs.in_full(each) for name, each in sizes.items()}
        values = {name: printed.get(name) or getattr(self, name) for name in _FACTS}
        return {
            name: {"value": None, "origin": NOT_STATED}
            if value in (None, "")
            else {"value": value, "origin": self.origins.get(name, f"told by {self.person}")}
            for name, value in values.items()
        }


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The files that a statement was made from.

    Attributes:
      files: Their names from the statement's folder, and their SHA-256 in hexadecimal.
      key_files: For each file that tells a secret that a guarantee rests on, the file whose
        contents are the key of its HMAC-SHA-256: both by their names.
      flags: The flags of mf-report that make the statement again; None for those of a run
        directory, and of a statement that was made in Python.
      ledger: What the ledger is called in the text.
      counts: What has the server's own count of clients.
      num_sums: How many noised sums the record of a noise directory has; None if there is none.
      record_sha256: The SHA-256 of that record.

    Raises:
      ValueError: If an attribute is of another type, or the name of a file is no line of text.
    """

    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, Any] | None = None
    ledger: str = "the ledger"
    counts: str = "the server's counts"
    num_sums: int | None = None
    record_sha256: str | None = None

    def __post_init__(self) -> None:
        inputs.check_types(self)
        for name in (*self.files, *self.key_files.values()):
            inputs.check_words(name, "the name of a file")

    @staticmethod
    def recorded(mechanism: "Mechanism", directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the attributes about the record of a run's sums; none without a record.

        Args:
          mechanism: That of the run.
          directory: Its directory of noise.

        Raises:
          RecordError: If it cannot be read, or its noise is of another mechanism.
          ValueError: If there are several streams.
        """
        return _evidence_of(_recorded_sums(mechanism, directory))


@dataclasses.dataclass(frozen=True)
class Statement:
    """The guarantee of a run, planned and, once it ended, observed.

    Use it when a run is to be reported on: ``aggregator.statement`` makes one.

    Attributes:
      facts: About the run.
      plan: The planned guarantee.
      observed_participation: The participations in the ledger; None while the run is under way.
      worst_client: The client whose own participations changed the output most. None if that is
        not known, and for a run whose batches a sampler draws: who was drawn is a secret.
      represented: The larger cohort that the run's few clients stand for (BandMF App. I): its
        ``clients_per_round``, the smallest ``population`` that such cohorts can be drawn from, and
        ``planned``, the ``described`` guarantee of a run with so many clients and with the
        noise that this run scaled down. None if they stand for none.
      stopping_rule: The rule that ends the run before an epsilon is exceeded, fixed before its
        first round; None for none.
      ended_by_rule: Whether that rule has ended the run.
      earlier_plans: The planned guarantees of the plans that were extended to this run, the first
        one first; empty for a run that was not extended.
      other_runs: The names of other runs, the file with these, and the printed epsilon and delta of
        all together, for clients that were in all of them; None where nobody said which.
      audit: What canaries found, as ``RunAudit.to_dict`` has it, or their number alone before the
        end of the run; None without canaries.
      units: The guarantees of other units than one client: of a client in a window, of a device or
        of a person (``Mechanism.unit_guarantee``), and of the person that is protected least.
      evidence: The files that it was made from.
      date: The day on which it was made, as 2026-11-26; empty if nobody said.

    Raises:
      ValueError: If an attribute is of another type, a client is named for a run whose batches were
        to be drawn, a rule that is not there ended the run, the date is no day, more clients took
        part than there are, or the record has more sums than there were rounds.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.calibrate(mfa.factorizations.identity(2), once, epsilon=8.0, delta=1e-6)
      >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
      >>> told = {"public_data": "none", "enforcement": "Devices count.", "delta": 1e-6}
      >>> statement = aggregator.statement([["ada"], ["bo"]], population=2, **told)
      >>> statement.status, statement.keeps_plan, round(statement.stated.epsilon, 4)
      ('open', True, 8.0)
    """

    facts: RunFacts
    plan: Guarantee
    observed_participation: ObservedParticipation | None = None
    worst_client: LeastProtected | None = None
    represented: Mapping[str, Any] | None = None
    stopping_rule: StoppingRule | None = None
    ended_by_rule: bool = False
    earlier_plans: tuple[Guarantee, ...] = ()
    other_runs: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None
    units: tuple[Guarantee, ...] = ()
    evidence: Evidence = dataclasses.field(default_factory=Evidence)
    date: str = ""

    def __post_init__(self) -> None:
        inputs.check_types(self)
        observed = self.observed_participation
        if self.date and not _DAY.fullmatch(self.date):
            raise ValueError(f"date takes a day as 2026-11-26, found {numbers.shown(self.date)}.")
        if self.ended_by_rule and (self.stopping_rule is None or observed is None):
            raise ValueError("only a run that has a stopping rule, and ended, is ended by it.")
        if observed is not None and (observed.num_clients or 0) > self.facts.population:
            number = f"{observed.num_clients} clients took part"
            raise ValueError(f"{number}, and the population is {self.facts.population}.")
        rounds = self.plan.num_rounds if observed is None else observed.num_rounds
        if not 0 <= (self.evidence.num_sums or 0) <= rounds:
            raise ValueError(
                f"the record has {self.evidence.num_sums} sums, and {rounds} rounds were released."
            )
        if self.plan.is_amplified and (self.worst_client or any(x.is_observed for x in self.units)):
            raise ValueError("a statement of drawn clients names none: who was drawn is a secret.")

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped``, ``ended_by_rule`` or ``open`` (not stated)."""
        observed, is_finished = self.observed_participation, self.facts.is_finished
        if self.ended_by_rule:
            return "ended_by_rule"
        if observed is None or is_finished is False:
            return "running"
        if is_finished is None:
            return "open"
        return "finished" if observed.num_rounds == self.plan.num_rounds else "stopped"

    @property
    def keeps_plan(self) -> bool | None:
        """Whether the observed participations are within the plan.

        None while the run is under way, and where nobody checked the draws of a sampler.
        """
        observed = self.observed_participation
        if observed is None or guarantees.scheme_of(self.plan) is not None:
            return None if observed is None else observed.keeps_sampling
        return observed.keeps(self.plan.schema)

    @functools.cached_property
    def observed_guarantee(self) -> Guarantee | None:
        """The guarantee of the observed participations; None while the run is under way.

        It holds only if participation did not depend on released models or on data. If the ledger
        may lack lines, it is that of the plan, or the worst case of a plan that was broken.
        """
        observed = self.observed_participation
        if observed is None:
            return None
        if observed.keeps_sampling or observed.gap is None:
            return observed.guarantee(self.plan)
        return self.plan if self.keeps_plan else self.worst_case

    @functools.cached_property
    def worst_case(self) -> Guarantee | None:
        """The worst case of a run that is not known to have kept its plan; None for others."""
        observed = self.observed_participation
        return None if observed is None or self.keeps_plan else observed.worst_case(self.plan)

    @property
    def stated(self) -> Guarantee:
        """The guarantee that is the headline.

        A run that kept its plan satisfies the planned guarantee, finished or not, because fewer
        rounds are a part of all. The observed one may be better, and is not the headline: it holds
        only if participation did not depend on released models or on data. A finished run that
        broke its plan has the observed guarantee; any other one that broke it, or whose observed
        guarantee is the better one, has the worst case, which is no better than either.

        The limit of a stopping rule was fixed before the first round, as the plan was, and holds
        however the run ended (``guarantees.StoppingRule``), unless what was observed shows that the
        rule was not followed. So it is the headline of a run that broke its plan, and of one that
        kept a plan with a larger epsilon.
        """
        rule, plan = self.stopping_rule, self.plan
        seen, worst = self.observed_guarantee, self.worst_case
        if rule is not None and self.keeps_rule:
            is_smaller = rule.guarantee.epsilon <= plan.epsilon
            return plan if worst is None and not is_smaller else rule.guarantee
        if seen is None or worst is None:
            return plan
        return seen if self.status == "finished" and seen.epsilon >= plan.epsilon else worst

    @property
    def named_guarantees(self) -> dict[str, Guarantee | None]:
        """The guarantees of this run, by their names in the document."""
        rule = self.stopping_rule
        return {
            "planned": self.plan,
            "observed": self.observed_guarantee,
            "worst_case": self.worst_case,
            "by_rule": None if rule is None else rule.guarantee,
        }

    @property
    def proved(self) -> dict[str, Guarantee]:
        """The guarantees of the document, by the names of their epsilons in it."""
        found = {"headline": self.stated, **self.named_guarantees}
        found["part_of_client"] = guarantees.of_part(self.stated)
        found["worst_client"] = None if self.worst_client is None else self.worst_client.guarantee
        found |= {f"earlier_plans.{i}": each for i, each in enumerate(self.earlier_plans)}
        found |= {f"units.{i}": each for i, each in enumerate(self.units)}
        return {f"{name}.epsilon": each for name, each in found.items() if each is not None}

    @property
    def keeps_rule(self) -> bool:
        """Whether the stopping rule, if there is one, allows the observed participations."""
        rule, observed = self.stopping_rule, self.observed_participation
        if rule is None or observed is None or self.observed_guarantee is None:
            return True
        # A sampler that left its scheme has nothing amplified, and the rule promised that.
        if self.plan.is_amplified:
            return rule.allows(observed)
        # This comparison is the rule's own; the sensitivity is known already.
        return self.observed_guarantee.noise_multiplier >= rule.guarantee.noise_multiplier

    def with_other_runs(
        self, events: Mapping[str, dp_event.DpEvent], file: str = ""
    ) -> "Statement":
        """Returns the statement with the guarantee of this run and others together.

        It is for clients that were in all of them: of any others, fewer runs are composed. This run
        counts as it was planned, or as its worst case where it is not known to have kept its plan.

        Args:
          events: The other runs as events (``Mechanism.event``), by a name for readers.
          file: The file that names them, from the statement's folder; empty for none.

        Raises:
          ValueError: If no other run is named, or not in one line, or they cannot be composed
            (``accounting.composed_epsilon``). With too little noise, there is no guarantee.
        """
        inputs.check_words(", ".join(events), "the names of other runs")
        own = self.plan if self.worst_case is None else self.worst_case
        # No epsilon holds at a smaller delta than those of pairs.
        pairs = [each.delta for each in events.values() if isinstance(each, EpsilonDeltaDpEvent)]
        delta = numbers.delta(math.fsum([own.delta, *pairs]))
        try:
            all_events = [guarantees.event(own), *events.values()]
            epsilon = accounting.composed_epsilon(all_events, delta)
        except accounting.TailError:
            epsilon = math.inf
        if math.isinf(own.epsilon) or self.facts.seed_is_fixed:
            epsilon = math.inf
        named = {"names": list(events), "file": file or None}
        together = {**named, "epsilon": _up(epsilon), "delta": _up(delta)}
        return dataclasses.replace(self, other_runs=together)

    def assumptions(self) -> list[dict[str, str]]:
        """Returns the assumptions of the stated guarantee, with the basis of each."""
        return [
            {"name": each.value, "sentence": each.sentence, "basis": self._basis(each)}
            for each in self.stated.assumptions
        ]

    def _basis(self, assumption: Assumption) -> str:
        """``checked by ...``, ``stated by ...``, ``simulated ...`` or ``not checked``."""
        observed, facts, evidence = self.observed_participation, self.facts, self.evidence
        is_complete = observed is not None and observed.gap is None and not observed.conditions
        if assumption is Assumption.PARTICIPATION:
            if is_complete and self.keeps_plan:
                simulated = "; the clients are simulated" if facts.simulation else ""
                return f"checked by {evidence.ledger}, if each name in it is one client{simulated}"
            told_by = facts.origins.get("enforcement", f"stated by {facts.person}")
            return f"{'simulated' if facts.simulation else told_by}: {facts.enforcement}"
        if assumption is Assumption.SECRET_DRAWS and self.keeps_plan:
            return "the draws: checked by the sampler's seed; that they stay secret: not checked"
        if assumption is Assumption.COMPLETE_LEDGER and is_complete:
            return f"checked by {evidence.counts}"
        if assumption is Assumption.STOPPING_RULE and is_complete and self.keeps_rule:
            return f"checked by {evidence.ledger}"
        if assumption is Assumption.SERVER and evidence.num_sums:
            return (
                f"in part checked: the record has {evidence.num_sums} sums with this noise, by "
                f"{facts.aggregator}; that the seed was kept secret: not checked"
            )
        if assumption is Assumption.SERVER and facts.aggregator:
            return f"stated: the noise came from {facts.aggregator}; not checked"
        if assumption is Assumption.RANDOMNESS and facts.seed_is_fixed:
            return "false: the seed was given"
        return "not checked"

    def to_dict(self) -> dict[str, Any]:
        """Returns the document, JSON-able: its numbers are integers and printed decimals.

        It names no client: the one that was protected least can be told by its rounds as well.
        """
        observed, worst, rule = self.observed_participation, self.worst_client, self.stopping_rule
        scheme = guarantees.scheme_of(self.plan)
        return {
            "format": FORMAT,
            "program": _versions(),
            "date": self.date,
            "simulation": list(self.facts.simulation),
            "status": self.status,
            "is_private": not (self.facts.seed_is_fixed or math.isinf(self.stated.epsilon)),
            "headline": self._headline(),
            "unit": "client",
            "adjacency": "zero-out",
            "assumptions": self.assumptions(),
            "keeps_plan": self.keeps_plan,
            "keeps_rule": self.keeps_rule,
            "planned": described(self.plan),
            "earlier_plans": [described(plan) for plan in self.earlier_plans],
            **{
                name: None if each is None else described(each)
                for name, each in self.named_guarantees.items()
                if name != "planned"
            },
            "stop_at_epsilon": None if rule is None else inputs.in_full(rule.epsilon),
            "part_of_client": _part_of_client(self.stated),
            "noise": {
                "mechanism": self.facts.mechanism,
                "digest": self.plan.noise_digest.hex(),
                "noise_multipliers": [
                    repr(plan.noise_multiplier) for plan in (*self.earlier_plans, self.plan)
                ],
                "recorded_sums": self.evidence.num_sums,
                "record_sha256": self.evidence.record_sha256,
            },
            "participation": {
                **{
                    name: None if scheme is None else getattr(scheme.words, name)
                    for name in ("accounting", "assumption", "together")
                },
                "has_random_sizes": scheme is not None and scheme.has_random_sizes,
                "num_alike_names": self.facts.num_alike_names,
                "observed": None if observed is None else _observed(observed),
            },
            "worst_client": None if worst is None else _of_client(worst),
            "units": [_of_unit(each) for each in self.units],
            "clipping": self._clipping(),
            "facts": self.facts.to_dict(),
            "has_run_directory": self.facts.has_run_directory,
            "represents": _copied(self.represented),
            "audit": _copied(self.audit),
            "other_runs": _copied(self.other_runs),
            "files": _copied(self.evidence.files),
            "key_files": _copied(self.evidence.key_files),
            "flags": _copied(self.evidence.flags),
        }

    def to_markdown(self) -> str:
        """Returns the text, which follows from :meth:`to_dict` alone."""
        return statement_file.render(self.to_dict())

    def write(self, text: str | os.PathLike[str], data: str | os.PathLike[str]) -> None:
        """Writes the text and the JSON document that it follows from.

        Args:
          text: The Markdown file.
          data: The JSON file.

        Raises:
          OSError: If one cannot be written.
          ValueError: If the document is not by the schema.
        """
        document = self.to_dict()
        for problem in statement_file.problems(document):
            raise ValueError(f"a statement would not be readable: {problem}.")
        atomic_files.write(data, statement_file.canonical(document))
        atomic_files.write(text, statement_file.render(document))

    def _headline(self) -> dict[str, Any]:
        stated, others = self.stated, self.other_runs
        names = [name for name, each in self.named_guarantees.items() if each == stated]
        factor = math.exp(stated.epsilon) if stated.epsilon < 700.0 else math.inf
        expected = float(inputs.in_full(stated.delta, self.facts.population))
        return {
            "guarantee": names[0],
            "epsilon": _up(stated.epsilon),
            "delta": repr(stated.delta),
            "factor": _up(math.nextafter(factor, math.inf), ".4g"),
            "delta_times_population": _up(expected, ".4g"),
            "epsilon_with_named_runs": None if others is None else others["epsilon"],
        }

    def _clipping(self) -> dict[str, Any]:
        """The adaptive clip norm, the split of the noise, and the private metrics."""
        clip, split, metrics = self.facts.clip, self.facts.split, self.facts.metrics
        ranges, adaptive = () if metrics is None else metrics.metrics, None
        if isinstance(clip, AdaptiveClip):
            smallest, largest = clip.bounds
            adaptive = _in_full(
                dataclasses.replace(clip, smallest_norm=smallest, largest_norm=largest)
            )
        return {
            "adaptive": adaptive,
            "split": None
            if split is None
            else {name: _down(value) for name, value in dataclasses.asdict(split).items()},
            "metrics": [_in_full(each) for each in ranges],
        }


def _up(value: float | None, form: str = ".6g") -> str | None:
    """A number, rounded up for printing; None for infinity."""
    return None if value is None or math.isinf(value) else rounded_up(value, form)


def _down(value: float | None) -> str | None:
    """A number, rounded down for printing; None for infinity."""
    return None if value is None or math.isinf(value) else rounded_down(value, ".6g")


def _in_full(parameters: AdaptiveClip | BoundedMetric) -> dict[str, Any]:
    """Parameters as they were given."""
    return {
        name: inputs.in_full(value) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(parameters).items()
    }


def _copied(entries: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if entries is None else dict(entries)


def today() -> str:
    """Returns the date of a statement that is made now: that of UTC, as 2026-11-26."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _versions() -> dict[str, str]:
    """The versions of this program and of the packages that its numbers come from."""
    own = {"mf_aggregators": version.__version__, "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in _COMPUTES}


def described(guarantee: Guarantee) -> dict[str, Any]:
    """Returns a guarantee as the document has it.

    Args:
      guarantee: The guarantee.
    """
    scheme, certificate = guarantees.scheme_of(guarantee), guarantee.claim.certificate
    taking_part, schema = "any participation that the stopping rule allows", None
    if not guarantee.is_by_rule:
        taking_part = str(scheme or guarantee.claim.taking_part)
        schema = _participation_of(guarantee).to_dict()
    certified = certificate and {
        "seed": certificate.seed,
        "num_samples": certificate.num_samples + certificate.num_untilted,
        "failure_probability": _up(certificate.to_dict()["failure_probability"], ".2g"),
    }
    return {
        "epsilon": _up(guarantee.epsilon),
        "delta": repr(guarantee.delta),
        "rho": _up(guarantee.rho),
        "zcdp_delta": _up(guarantee.zcdp_delta, ".2g") if math.isfinite(guarantee.rho) else None,
        "num_rounds": guarantee.num_rounds,
        "taking_part": taking_part,
        "schema": schema,
        "sampling": None if scheme is None else scheme.to_dict(),
        "sensitivity": _up(guarantee.sensitivity.value),
        "sensitivity_is_exact": guarantee.sensitivity.is_exact,
        "sensitivity_theorem": guarantee.sensitivity.theorem,
        "noise_multiplier": _down(guarantee.noise_multiplier),
        "only_if": ONLY_IF if guarantee.is_observed else None,
        "true_positive_percent": {
            f"{100.0 * float(name.rpartition('_')[2]):g}": _up(100.0 * (most or 0.0), ".4g")
            for name, most in guarantees.rates(guarantee).items()
        },
        "certificate": certified,
    }


def _participation_of(guarantee: Guarantee) -> Participation:
    """The participation that a guarantee is for; where clients are drawn, of every draw."""
    if guarantee.claim.taking_part == Pattern(()):
        return SingleParticipation()
    return Participation.of_schema(guarantee.schema)


def _part_of_client(guarantee: Guarantee) -> dict[str, Any]:
    part = guarantees.part_of_client(guarantee)
    printed = {name: _up(value) for name, value in part.items()}
    printed["noise_multiplier"] = _down(part["noise_multiplier"])
    return {**printed, "only_if": ONLY_IF if guarantee.is_observed else None}


def _observed(found: ObservedParticipation) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    # The ledger of clients who were drawn is a secret.
    shown = ("num_rounds", "keeps_sampling") if found.keeps_sampling else values
    return {name: value if name in shown else None for name, value in values.items()}


def _of_client(worst: LeastProtected) -> dict[str, Any]:
    return {
        "num_rounds": len(worst.rounds),
        "sensitivity": _up(worst.guarantee.sensitivity.value),
        "epsilon": _up(worst.guarantee.epsilon),
        "only_if": ONLY_IF,
    }


def _of_unit(guarantee: Guarantee) -> dict[str, Any]:
    unit = guarantee.claim.taking_part
    return {
        "who": unit.who if isinstance(unit, Unit) else "the person that the ledger protects least",
        "epsilon": _up(guarantee.epsilon),
        "delta": repr(guarantee.delta),
        "sensitivity": _up(guarantee.sensitivity.value),
        "noise_multiplier": _down(guarantee.noise_multiplier),
        "assumptions": [each.sentence for each in guarantee.assumptions],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownFacts:
    """Facts of a run that its aggregator knows.

    Attributes:
      options: The mechanism and the options of the aggregator.
      program: The class or function that draws the noise.
      secure_sums: Whether sums are secure; None where the aggregator does not make them.
      origin_of_sums: Where that is known from.
      stream: The name of the run's stream of noise; None where no state was given.
      num_rounds: The rounds that were released or spent, by the state; None where none was given.
      counts: The source of the numbers of clients that were summed.
      enforcement: How the aggregator makes clients keep to the participation; empty if it does not.
    """

    options: "Options"
    program: str
    secure_sums: bool | None = None
    origin_of_sums: str = _BY_AGGREGATOR
    stream: str | None = None
    num_rounds: int | None = None
    counts: str = "the server's counts"
    enforcement: str = ""

    def statement(
        self,
        ledger: GivenLedger | RoundTimes,
        *,
        population: int,
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

        The ``statement`` methods of aggregators take all of it.

        Args:
          ledger: Who took part in which round, as ``Mechanism.observed`` takes it. A mapping and a
            text file are for the rounds of the state or of the record of sums; without both, for
            all.
          population: The number of clients that cohorts were drawn from.
          delta: Above 0 and below 1; None for population^-1.1, rounded down to two digits.
          round_counts: How many clients each round summed, as ``Mechanism.observed`` takes it.
          sampling_seed: As there.
          secure_sums: Whether the server saw sums alone; None leaves it to the aggregator.
          is_finished: Whether the run has ended for good. None takes it for finished if noise was
            used for every round; otherwise nobody said.
          simulation: What was simulated, as a sentence or several; none for a real run.
          date: The day of the statement, as 2026-11-26; None for today, in UTC.
          **words: Facts that nobody can measure (``RunFacts``): ``public_data`` and
            ``enforcement``, and, each empty by default, ``responsible``, ``signer``, ``model``,
            ``period`` and ``custody``.

        Returns:
          The statement: ``to_markdown`` has the text, and ``to_dict`` the JSON document.

        Raises:
          LedgerError: If the ledger cannot be read.
          RecordError: If the record of sums cannot be read, or its noise is of another mechanism.
          TypeError: If ``words`` has another fact, or lacks one.
          ValueError: If the ledger is not that of this aggregator: it has fewer rounds than were
            released, other cohorts, or more clients than the population; or an argument is out of
            its range.
        """
        population = numbers.positive_integer(population, "population")
        options = self.options
        mechanism, scheme = options.mechanism, options.mechanism.sampling
        if scheme is not None and scheme.population != population:
            drawn = f"{scheme.name} draws from {scheme.population} clients"
            raise ValueError(f"population is {population}, and {drawn}.")
        record = _recorded_sums(mechanism, options.noise_directory, self.stream)
        released = self.num_rounds
        if record is not None:
            released = max(released or 0, record.num_rounds)
        if not isinstance(ledger, RoundTimes):
            ledger = Ledger.of(ledger, mechanism.num_rounds if released is None else released)
            _check_cohorts(ledger, self, has_counts=round_counts is not None)
        if ledger.num_rounds < (released or 0):
            seen = f"the ledger has {ledger.num_rounds} rounds, and noise was used for {released}"
            raise ValueError(f"{seen}: give the ledger of all of them, or their times.")
        names = {"clients_per_round", "clip_norm", "seed_is_fixed", "aggregator"}
        own = {"enforcement": self.enforcement} if self.enforcement else {}
        origins = dict.fromkeys(names | (own.keys() - words.keys()), _BY_AGGREGATOR)
        if secure_sums is None:
            secure_sums, origins["secure_sums"] = self.secure_sums, self.origin_of_sums
        elif secure_sums and self.secure_sums is False:
            why = self.origin_of_sums
            raise ValueError(f"secure_sums is True, and sums are not secure: {why}.")
        if is_finished is None and released == mechanism.num_rounds:
            is_finished, origins["is_finished"] = True, "noise was used for every round"
        found = mechanism.observed(ledger, round_counts=round_counts, sampling_seed=sampling_seed)
        split, first = options.split, mechanism.horizons[0].noise_multiplier
        if split is not None and mechanism.extends is not None:
            split = split.of_horizon(mechanism.noise_multiplier / first)
        facts = RunFacts(
            mechanism=name_of(mechanism),
            population=population,
            clients_per_round=options.clients_per_round,
            clip=options.clip_norm,
            split=split,
            metrics=options.metrics,
            seed_is_fixed=options.seed is not None,
            aggregator=f"{self.program} of mf_aggregators {version.__version__}",
            secure_sums=secure_sums,
            is_finished=is_finished,
            simulation=(simulation,) if isinstance(simulation, str) else tuple(simulation),
            num_alike_names=found.num_alike_names,
            origins=origins,
            **own | words,
        )
        default_delta = float(rounded_down(population**_EXPONENT_OF_DELTA, ".2g"))
        return dataclasses.replace(
            found.statement(facts, default_delta if delta is None else delta),
            evidence=Evidence(counts=self.counts, **_evidence_of(record)),
            date=today() if date is None else date,
        )


def name_of(mechanism: "Mechanism") -> str:
    """Returns the name of a mechanism in statements.

    Args:
      mechanism: The mechanism.
    """
    if mechanism.noise_multiplier == 0.0:
        return "None: clipping without noise"
    words = mechanism.factorization.mechanism.replace("_", " ")
    name = f"{words[0].upper()}{words[1:]}" if _VOWELS.intersection(words) else words.upper()
    return f"{name} matrix factorization for {mechanism.num_rounds} rounds"


def _recorded_sums(
    mechanism: "Mechanism", directory: str | os.PathLike[str] | None, stream: str | None = None
) -> ReleasedSums | None:
    """The record of a run's sums, by its stream or the only one; None without one or noise.

    Raises:
      RecordError: If it cannot be read, or its noise is of another mechanism.
      ValueError: If there are several streams, and none is named.
    """
    if directory is None or mechanism.noise_multiplier == 0.0:
        return None
    names = places.ReleasedSums.streams(directory)
    if stream is None and len(names) > 1:
        found = f"{directory} has the sums of {len(names)} runs"
        raise ValueError(f"{found}: pass state=, the run's newest state, and count the others.")
    stream = names[0] if stream is None and names else stream
    if stream not in names:
        return None
    record = places.ReleasedSums.read(directory, stream)
    ends = [each.num_rounds for each in mechanism.horizons]
    digests = [each.noise_digest.hex() for each in mechanism.proved_horizons]
    for i, digest in record.of_rounds.items():
        own = [each for end, each in zip(ends, digests, strict=True) if i < end][:1]
        if digest and [digest] != own:
            found = f"noise of another mechanism in round {i + 1}"
            raise RecordError(f"the record of sums has {found}: use the mechanism of the run.")
    return record


def _evidence_of(sums: ReleasedSums | None) -> dict[str, Any]:
    """The attributes of ``Evidence`` about a record of sums; none without a record."""
    return {} if sums is None else {"num_sums": sums.num_sums, "record_sha256": sums.sha256}


def _check_cohorts(ledger: Ledger, known: KnownFacts, *, has_counts: bool) -> None:
    """Raises ValueError if a ledger has other cohorts than the aggregator's run."""
    cohort = known.options.clients_per_round
    found = gap(ledger.rounds_of_clients, ledger.num_rounds, None, cohort)
    mean = sum(map(len, ledger.rounds_of_clients)) / max(1, ledger.num_rounds)
    # With the server's counts, a smaller mean shows that devices dropped out.
    if found != NO_COUNTS and not (has_counts and mean < cohort):
        shown = f"{mean:.6g} clients a round, and the aggregator is for {cohort:g}"
        raise ValueError(f"the ledger has {shown}: give the ledger of its run.")
