"""Privacy statements: a guarantee, its assumptions, and facts with their origins.

A :class:`Statement` is one JSON document (:meth:`Statement.to_dict`); its text is a function of
this document alone (``statement_file.render``). Its sections follow BandMF App. K.1, which follows
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
from typing import TYPE_CHECKING

from dp_accounting import dp_event

from mf_aggregators import accounting, atomic_files, inputs, version
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.certificate import shares_of
from mf_aggregators.kernel.claim import ONLY_IF, Assumption, Guarantee, Pattern
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent
from mf_aggregators.kernel.ledger import NO_COUNTS, ObservedParticipation, gap
from mf_aggregators.kernel.numbers import rounded_down, rounded_up
from mf_aggregators.kernel.sensitivity import Unit
from mf_aggregators.noise import places
from mf_aggregators.noise.places import RecordError, ReleasedSums, SumsEvidence
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.privacy import guarantees, statement_file
from mf_aggregators.privacy.guarantees import LeastProtected, StoppingRule
from mf_aggregators.privacy.ledgers import GivenLedger, Ledger, RoundTimes
from mf_aggregators.privacy.statement_file import FORMAT, NOT_STATED
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics

if TYPE_CHECKING:
    from mf_aggregators.aggregator import Options
    from mf_aggregators.mechanism import Mechanism

# The packages on which a statement's numbers depend.
_COMPUTES = ("numpy", "scipy", "dp-accounting")
# Facts that no file contains and a person may state.
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
# A mechanism's name without vowels is an abbreviation, and is printed in capitals.
_VOWELS = frozenset("aeiouy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that a statement has in addition to the guarantee.

    Use it when you make a statement for a run without an aggregator of this library.

    Attributes:
      mechanism: The name of the mechanism, as text.
      population: The number of clients from which cohorts were drawn.
      clients_per_round: The cohort size; the expected size if clients are drawn.
      clip: The clip norm (L2): a number, or an ``AdaptiveClip``.
      public_data: The other data that the training used, in a few words.
      enforcement: What makes clients keep to the planned participation, as a sentence.
      split: How noise is split between updates, clipped-count indicators and metrics; None if all
        noise is on updates.
      metrics: The private metrics of training, which are released with noise; None for none.
      seed_is_fixed: Whether the seed of the noise was given instead of drawn; None if not stated.
      aggregator: The program that drew the noise; empty if not stated.
      secure_sums: Whether the server saw only sums of updates; None if not stated.
      is_finished: Whether the run has ended and will not continue; None if not stated.
      simulation: Sentences that say what was simulated; empty for a real run.
      responsible: The person who is responsible for the run. This and the texts below are empty if
        not stated.
      signer: The name under which the statement is signed.
      model: The model and its version.
      period: The first and the last day of the run.
      custody: Who holds the noise seed, the state and the ledger, and when they are destroyed.
      has_run_directory: Whether a training command wrote the files of a run directory.
      num_alike_names: The number of clients with a name that looks like another client's.
      origins: The origins of facts by attribute, such as ``measured from FILE``, ``simulated`` or
        ``read from the aggregator``. The responsible person stated all facts without an origin.

    Raises:
      ValueError: If a number is out of its range, a text is empty or has invisible characters, or
        an attribute has another type.

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
        """The person who states the facts that cannot be measured."""
        return self.responsible or "whoever made this statement"

    def to_dict(self) -> dict[str, object]:
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
    """The files from which a statement was made.

    Attributes:
      files: The names of files, relative to the statement's folder, and their SHA-256 in
        hexadecimal.
      key_files: For each file with secret draws, the file whose contents are the key of its
        HMAC-SHA-256, both by name.
      flags: The flags of mf-report that make the statement again; None for a statement of a run
        directory, or one that was made in Python.
      ledger: The name of the ledger in the text.
      counts: The name of the source of the server's count of clients.
      num_sums: The number of sums in the record of a noise directory; None without a record.
      record_sha256: The SHA-256 of that record.

    Raises:
      ValueError: If an attribute has another type, or the name of a file is not one line of text.
    """

    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, object] | None = None
    ledger: str = "the ledger"
    counts: str = "the server's counts"
    num_sums: int | None = None
    record_sha256: str | None = None

    def __post_init__(self) -> None:
        inputs.check_types(self)
        for name in (*self.files, *self.key_files.values()):
            inputs.check_words(name, "the name of a file")

    @staticmethod
    def recorded(mechanism: "Mechanism", directory: str | os.PathLike[str]) -> SumsEvidence:
        """Returns the attributes for the record of a run's sums; empty without a record.

        Args:
          mechanism: The mechanism of the run.
          directory: The run's noise directory.

        Raises:
          RecordError: If the record cannot be read, or is of another mechanism's noise.
          ValueError: If the directory has the records of several runs.
        """
        return _evidence_of(_recorded_sums(mechanism, directory))


@dataclasses.dataclass(frozen=True)
class Statement:
    """The privacy statement of a run: planned guarantee, observed guarantee (at its end), facts.

    Use it when you publish the guarantee of a run: ``aggregator.statement`` makes one.

    Attributes:
      facts: The facts of the run.
      plan: The planned guarantee.
      observed_participation: The participations in the ledger; None until the run has ended.
      worst_client: The least protected client. None if it is not known, or if a sampler draws the
        clients, because draws are secret.
      represented: If the run simulates a larger cohort by few clients (BandMF App. I): the
        ``clients_per_round`` of this cohort, the smallest ``population`` from which such cohorts
        can be drawn, and ``planned``, the ``described`` guarantee of a run with this cohort and the
        full noise. Otherwise None.
      stopping_rule: The rule, fixed before the first round, that ends the run before epsilon
        exceeds a limit; None without a rule.
      ended_by_rule: Whether the stopping rule has ended the run.
      earlier_plans: The planned guarantees before each extension, the first one first; empty for a
        run that was not extended.
      other_runs: The names of other runs, the file that names them, and the printed epsilon and
        delta of all runs together, for clients that were in all of them; None if other runs are not
        stated.
      audit: The result of the canaries (``RunAudit.to_dict``), or only their number until the run
        has ended; None without canaries.
      units: The guarantees of units other than one client: of a client in a window, of a device or
        of a person (``Mechanism.unit_guarantee``), and of the least protected person.
      evidence: The files from which the statement was made.
      date: The day on which the statement was made, as 2026-11-26; empty if not stated.

    Raises:
      ValueError: If an attribute has another type, a client is named although clients are drawn,
        ``ended_by_rule`` is true without a rule, the date is not a day, more clients took part than
        the population has, or the record has more sums than rounds were released.

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
    represented: Mapping[str, object] | None = None
    stopping_rule: StoppingRule | None = None
    ended_by_rule: bool = False
    earlier_plans: tuple[Guarantee, ...] = ()
    other_runs: Mapping[str, object] | None = None
    audit: Mapping[str, object] | None = None
    units: tuple[Guarantee, ...] = ()
    evidence: Evidence = dataclasses.field(default_factory=Evidence)
    date: str = ""

    def __post_init__(self) -> None:
        inputs.check_types(self)
        observed = self.observed_participation
        if self.date and not _DAY.fullmatch(self.date):
            raise ValueError(f"date must be like 2026-11-26, found {numbers.shown(self.date)}.")
        if self.ended_by_rule and (self.stopping_rule is None or observed is None):
            raise ValueError("ended_by_rule needs a stopping rule and a run that has ended.")
        if observed is not None and (observed.num_clients or 0) > self.facts.population:
            number = f"{observed.num_clients} clients took part"
            raise ValueError(f"{number}, and the population is {self.facts.population}.")
        rounds = self.plan.num_rounds if observed is None else observed.num_rounds
        if not 0 <= (self.evidence.num_sums or 0) <= rounds:
            raise ValueError(
                f"the record has {self.evidence.num_sums} sums, and {rounds} rounds were released."
            )
        if self.plan.is_amplified and (self.worst_client or any(x.is_observed for x in self.units)):
            raise ValueError("a statement of drawn clients names none: draws are secret.")

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

        None until the run has ended, and if the draws of a sampler were not checked.
        """
        observed = self.observed_participation
        if observed is None or guarantees.scheme_of(self.plan) is not None:
            return None if observed is None else observed.keeps_sampling
        return observed.keeps(self.plan.schema)

    @functools.cached_property
    def observed_guarantee(self) -> Guarantee | None:
        """The guarantee of the observed participations; None until the run has ended.

        It holds only if participation did not depend on released models or on data. If the ledger
        may lack lines, it is the planned guarantee, or the worst case if the plan was broken.
        """
        observed = self.observed_participation
        if observed is None:
            return None
        if observed.keeps_sampling or observed.gap is None:
            return observed.guarantee(self.plan)
        return self.plan if self.keeps_plan else self.worst_case

    @functools.cached_property
    def worst_case(self) -> Guarantee | None:
        """The worst-case guarantee; None if the run kept its plan or has not ended."""
        observed = self.observed_participation
        return None if observed is None or self.keeps_plan else observed.worst_case(self.plan)

    @property
    def stated(self) -> Guarantee:
        """The guarantee that the statement gives first (its headline).

        A run that kept its plan has the planned guarantee, even if it has not finished, because
        fewer rounds reveal no more than all. The observed guarantee may be better, but is not the
        headline, because it holds only if participation did not depend on released models or on
        data. If a run broke its plan, the headline is the observed guarantee, provided that the run
        is finished and that this is weaker than the planned one. Otherwise it is the worst case,
        which is no better than either.

        The limit of a stopping rule was fixed before the first round, like the plan. It holds for
        any way in which the run ended (``guarantees.StoppingRule``), unless the observed
        participations show that the rule was not followed. So it is the headline if the run broke
        its plan, or if the planned epsilon is larger than the limit.
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
        """The guarantees of this run, by their names in the JSON document."""
        rule = self.stopping_rule
        return {
            "planned": self.plan,
            "observed": self.observed_guarantee,
            "worst_case": self.worst_case,
            "by_rule": None if rule is None else rule.guarantee,
        }

    @property
    def proved(self) -> dict[str, Guarantee]:
        """The guarantees of the JSON document, by the names of their epsilons in it."""
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
        # The rule's guarantee is amplified, which holds only if the sampler kept its scheme.
        if self.plan.is_amplified:
            return rule.allows(observed)
        # The same comparison as in the rule; the sensitivity is already known here.
        return self.observed_guarantee.noise_multiplier >= rule.guarantee.noise_multiplier

    def with_other_runs(
        self, events: Mapping[str, dp_event.DpEvent], file: str = ""
    ) -> "Statement":
        """Returns the statement with the guarantee of this run and others together.

        The composed guarantee is for clients that were in all of these runs; other clients have a
        better one. This run counts with its planned guarantee, or with its worst case if it is not
        known to have kept its plan.

        Args:
          events: The events of the other runs (``Mechanism.event``), by the runs' names.
          file: The file that names the runs, relative to the statement's folder; empty for none.

        Raises:
          ValueError: If there are no other runs, a name is not one line, or the runs cannot be
            composed (``accounting.composed_epsilon``).

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(2)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
          >>> told = {"public_data": "none", "enforcement": "Devices count.", "delta": 1e-6}
          >>> statement = aggregator.statement([["ada"], ["bo"]], population=2, **told)
          >>> statement = statement.with_other_runs({"the run of May": mechanism.event()})
          >>> "the run of May" in statement.to_markdown()
          True
        """
        inputs.check_words(", ".join(events), "the names of other runs")
        own = self.plan if self.worst_case is None else self.worst_case
        # The composed delta has to be larger than the sum of the deltas of (epsilon, delta) events.
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
        """Returns the assumptions of the stated guarantee, each with how it was checked.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(2)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
          >>> told = {"public_data": "none", "enforcement": "Devices count.", "delta": 1e-6}
          >>> statement = aggregator.statement([["ada"], ["bo"]], population=2, **told)
          >>> statement.assumptions()[0]["sentence"]
          'Every client keeps to the stated participation.'
        """
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

    def to_dict(self) -> dict[str, object]:
        """Returns the JSON-able document, with numbers as integers and decimals in quotes.

        It names no client. (The rounds of the least protected client could identify it, so they are
        left out as well.)

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(2)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
          >>> told = {"public_data": "none", "enforcement": "Devices count.", "delta": 1e-6}
          >>> statement = aggregator.statement([["ada"], ["bo"]], population=2, **told)
          >>> statement.to_dict()["status"]
          'open'
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
        """Returns the statement's Markdown text, which depends only on :meth:`to_dict`."""
        return statement_file.render(self.to_dict())

    def write(self, text: str | os.PathLike[str], data: str | os.PathLike[str]) -> None:
        """Writes the statement's text and JSON document.

        Args:
          text: The Markdown file.
          data: The JSON file.

        Raises:
          OSError: If a file cannot be written.
          ValueError: If the document does not follow the schema.

        Example:
          >>> import json, pathlib, tempfile
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(2)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
          >>> told = {"public_data": "none", "enforcement": "Devices count.", "delta": 1e-6}
          >>> statement = aggregator.statement([["ada"], ["bo"]], population=2, **told)
          >>> folder = pathlib.Path(tempfile.mkdtemp())
          >>> statement.write(folder / "PRIVACY.md", folder / "statement.json")
          >>> json.loads((folder / "statement.json").read_text()) == statement.to_dict()
          True
        """
        document = self.to_dict()
        for problem in statement_file.problems(document):
            raise ValueError(f"a statement would not be readable: {problem}.")
        atomic_files.write(data, statement_file.canonical(document))
        atomic_files.write(text, statement_file.render(document))

    def _headline(self) -> dict[str, object]:
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

    def _clipping(self) -> dict[str, object]:
        """The part of the document on adaptive clip norm, split of noise, and private metrics."""
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


def _in_full(parameters: AdaptiveClip | BoundedMetric) -> dict[str, object]:
    """Parameters with all their digits."""
    return {
        name: inputs.in_full(value) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(parameters).items()
    }


def _copied(entries: Mapping[str, object] | None) -> dict[str, object] | None:
    return None if entries is None else dict(entries)


def today() -> str:
    """Returns today's date in UTC, such as 2026-11-26."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _versions() -> dict[str, str]:
    """The versions of this library and of the packages on which its numbers depend."""
    own = {"mf_aggregators": version.__version__, "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in _COMPUTES}


def described(guarantee: Guarantee) -> dict[str, object]:
    """Returns a guarantee as an object of the JSON document.

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
        "failure_probability": _up(shares_of(certificate.delta)[1], ".2g"),
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
    """The schema of a guarantee; if clients are drawn, one that covers every draw."""
    if guarantee.claim.taking_part == Pattern(()):
        return SingleParticipation()
    return Participation.of_schema(guarantee.schema)


def _part_of_client(guarantee: Guarantee) -> dict[str, object]:
    part = guarantees.part_of_client(guarantee)
    printed = {name: _up(value) for name, value in part.items()}
    printed["noise_multiplier"] = _down(part["noise_multiplier"])
    return {**printed, "only_if": ONLY_IF if guarantee.is_observed else None}


def _observed(found: ObservedParticipation) -> dict[str, object]:
    values = dataclasses.asdict(found)
    # Participations of drawn clients are secret.
    shown = ("num_rounds", "keeps_sampling") if found.keeps_sampling else values
    return {name: value if name in shown else None for name, value in values.items()}


def _of_client(worst: LeastProtected) -> dict[str, object]:
    return {
        "num_rounds": len(worst.rounds),
        "sensitivity": _up(worst.guarantee.sensitivity.value),
        "epsilon": _up(worst.guarantee.epsilon),
        "only_if": ONLY_IF,
    }


def _of_unit(guarantee: Guarantee) -> dict[str, object]:
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
    """The facts of a run that its aggregator knows.

    Attributes:
      options: The mechanism and the options of the aggregator.
      program: The class or function that draws the noise.
      secure_sums: Whether sums are secure; None if the aggregator does not know how sums are made.
      origin_of_sums: The origin of this fact.
      stream: The name of the run's stream of noise; None if no state was given.
      num_rounds: The number of rounds released or spent, by the state; None if no state was given.
      counts: The name of the source of the server's count of clients.
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
        **words: object,
    ) -> Statement:
        """Returns the privacy statement of a run in one's own loop.

        The ``statement`` methods of aggregators take the same arguments.

        Args:
          ledger: Who took part in which round, as for ``Mechanism.observed``. A mapping or a text
            file counts as the ledger of the rounds of the state or of the record of sums; without
            either, of all rounds.
          population: The number of clients from which cohorts were drawn.
          delta: Above 0 and below 1; None for population^-1.1, rounded down to two digits.
          round_counts: The server's count of clients for each round, as for ``Mechanism.observed``.
          sampling_seed: As there.
          secure_sums: Whether the server saw only sums; None uses the aggregator's knowledge.
          is_finished: Whether the run has ended and will not continue. With None, it counts as
            finished if noise was used for every round; otherwise this is not stated.
          simulation: One or more sentences that say what was simulated; empty for a real run.
          date: The day of the statement, as 2026-11-26; None for today, in UTC.
          **words: Facts that cannot be measured (``RunFacts``): ``public_data`` and
            ``enforcement``, and, each empty by default, ``responsible``, ``signer``, ``model``,
            ``period`` and ``custody``.

        Returns:
          The statement: ``to_markdown`` has the text, and ``to_dict`` the JSON document.

        Raises:
          LedgerError: If the ledger cannot be read.
          RecordError: If the record of sums cannot be read, or is of another mechanism's noise.
          TypeError: If ``words`` has an unknown fact, or lacks a required one.
          ValueError: If the ledger does not fit the aggregator's run (it has fewer rounds than were
            released, other cohort sizes, or more clients than the population), or an argument is
            out of its range.
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
            # The class checks names and types of facts.
            **own | words,  # type: ignore[arg-type]
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
    """The record of a run's sums; None without a record or without noise.

    Raises:
      RecordError: If the record cannot be read, or is of another mechanism's noise.
      ValueError: If the directory has the records of several runs, and no stream is named.
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


def _evidence_of(sums: ReleasedSums | None) -> SumsEvidence:
    """The attributes of ``Evidence`` for a record of sums; empty without a record."""
    return {} if sums is None else {"num_sums": sums.num_sums, "record_sha256": sums.sha256}


def _check_cohorts(ledger: Ledger, known: KnownFacts, *, has_counts: bool) -> None:
    """Raises ValueError if a ledger's cohorts differ too much in size from the aggregator's."""
    cohort = known.options.clients_per_round
    found = gap(ledger.rounds_of_clients, ledger.num_rounds, None, cohort)
    mean = sum(map(len, ledger.rounds_of_clients)) / max(1, ledger.num_rounds)
    # If the server's counts confirm a smaller mean, devices dropped out, which is allowed.
    if found != NO_COUNTS and not (has_counts and mean < cohort):
        shown = f"{mean:.6g} clients a round, and the aggregator is for {cohort:g}"
        raise ValueError(f"the ledger has {shown}: give the ledger of its run.")
