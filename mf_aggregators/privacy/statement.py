"""The privacy statement of a run, in words and as data.

Its points are those of BandMF App. K.1, after Ponomareva et al. (2023), Sec. 5.3:
setting, data accesses covered, released output, unit of privacy, adjacency, type of
accounting and its assumptions, and the formal statement.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from dp_accounting import dp_event

from mf_aggregators import accounting, inputs, version
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.ledger import NO_COUNTS
from mf_aggregators.kernel.numbers import counted, rounded_up
from mf_aggregators.participation import check_extended
from mf_aggregators.privacy import client_names, guarantees, provenance, statement_texts
from mf_aggregators.privacy.guarantees import ObservedParticipation, keeps_plan
from mf_aggregators.privacy.provenance import OtherRuns, Provenance
from mf_aggregators.privacy.stopping_rules import StoppingRule
from mf_aggregators.privacy.worst_client import WorstClient
from mf_aggregators.private_metrics import ReleasedMetrics

# Says that timers enforce the schema.
TIMERS_BY_ROUNDS = (
    "A timer on each client enforces it; a client that ignores its\n"
    "     timer weakens its own guarantee and nobody else's."
)


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping:
    """How a run's clip norm adapted, and its noise.

    Attributes:
      clip: How.
      update_noise_multiplier: z_delta of ``adaptive_clip``, of the updates.
      clipped_count_stddev: sigma_b, of the sum of clipped-count indicators.

    Raises:
      ValueError: If an attribute is of another type, or out of its range.
    """

    clip: AdaptiveClip
    update_noise_multiplier: float
    clipped_count_stddev: float

    def __post_init__(self) -> None:
        inputs.check_types(self, "clip")
        for name in ("update_noise_multiplier", "clipped_count_stddev"):
            numbers.non_negative_number(getattr(self, name), name)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping, which keeps the shorter names of ``privacy.json``."""
        clip = dataclasses.asdict(self.clip)
        clip["target_quantile"] = clip.pop("target_unclipped_quantile")
        clip["count_stddev"] = clip.pop("clipped_count_stddev")
        return {
            "clip": clip,
            "update_noise_multiplier": self.update_noise_multiplier,
            "count_stddev": self.clipped_count_stddev,
        }

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> "AdaptiveClipping":
        """Returns what :meth:`to_dict` described.

        Args:
          contents: The mapping.
        """
        clip = dict(contents["clip"])
        clip["target_unclipped_quantile"] = clip.pop("target_quantile")
        clip["clipped_count_stddev"] = clip.pop("count_stddev")
        return cls(
            AdaptiveClip(**clip), contents["update_noise_multiplier"], contents["count_stddev"]
        )


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What a statement says of a run besides its guarantee.

    Attributes:
      mechanism: The factorization's name and size, for a reader.
      num_clients: The population.
      clients_per_round: The cohort size.
      clip_norm: The L2 norm that each update was clipped to; that of the first round if it
        adapts.
      noise_seed_is_fixed: Whether the noise came from a seed that was given.
      public_data: What was used besides the clients' data, in a few words: public data for
        pre-training or a vocabulary, for example.
      enforcement: What makes the clients keep the participation schema, as a sentence.
      adaptive_clip: How the clip norm adapts; None for a constant one.
      has_run_directory: Whether the run wrote the files of a run directory, as the commands that
        train do: the statement then names them.
      num_alike_names: How many clients have a name that looks like another client's
        (``client_names.num_alike``).
      provenance: Who stands behind the statement, and what it was made from.
      private_metrics: The metrics of training that are released with noise; None where metrics have
        none.

    Raises:
      ValueError: If a number is out of its range, or another attribute is of another type.
    """

    mechanism: str
    num_clients: int
    clients_per_round: int
    clip_norm: float
    noise_seed_is_fixed: bool
    # What nobody said is not asserted: these two have no defaults.
    public_data: str
    enforcement: str
    adaptive_clip: AdaptiveClipping | None = None
    has_run_directory: bool = False
    num_alike_names: int = 0
    provenance: Provenance = dataclasses.field(default_factory=Provenance)
    private_metrics: ReleasedMetrics | None = None

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "num_clients", "clients_per_round")
        alike = numbers.integer_at_least(self.num_alike_names, 0, "num_alike_names")
        object.__setattr__(self, "num_alike_names", alike)
        norm = numbers.positive_number(self.clip_norm, "clip_norm")
        object.__setattr__(self, "clip_norm", norm)
        inputs.check_types(self)

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> "RunFacts":
        """Returns the facts in what :meth:`PrivacyStatement.to_dict` returned.

        Args:
          contents: The mapping, with all else that a statement has.

        Raises:
          KeyError: If a fact is missing.
          TypeError: If it is none of a run.
          ValueError: If a number is out of its range.
        """
        given = {field.name: contents[field.name] for field in dataclasses.fields(cls)}
        if given["adaptive_clip"] is not None:
            given["adaptive_clip"] = AdaptiveClipping.from_dict(given["adaptive_clip"])
        given["provenance"] = Provenance.from_dict(given["provenance"])
        if given["private_metrics"] is not None:
            given["private_metrics"] = ReleasedMetrics.from_dict(given["private_metrics"])
        return cls(**given)

    def with_provenance(self, **given: Any) -> "RunFacts":
        """Returns the facts with who stands behind a statement, and what it was made from.

        Args:
          **given: Attributes of ``provenance.Provenance``: ``responsible``, ``model``, ``period``,
            ``custody``, ``secure_aggregation``, ``files``, ``date``. Others stay as they are.

        Raises:
          TypeError: For any other attribute.
        """
        return dataclasses.replace(self, provenance=dataclasses.replace(self.provenance, **given))


@dataclasses.dataclass(frozen=True)
class Represented:
    """A larger cohort that a run's few clients stand for (BandMF App. I).

    Attributes:
      clients_per_round: The clients in a round of the larger cohort.
      num_clients: The smallest population that such cohorts can be drawn from, under the
        schema of the guarantee.
      guarantee: The guarantee that a run with so many clients, and with the noise that this
        run scaled down, would have been planned for.

    Raises:
      ValueError: If an attribute is of another type, or out of its range.
    """

    clients_per_round: int
    num_clients: int
    guarantee: Guarantee

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "clients_per_round", "num_clients")
        inputs.check_types(self)


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """The guarantee of a run, planned and, once it ended, observed.

    Attributes:
      facts: About the run.
      plan: The planned guarantee.
      observed_participation: The participations in the ledger; None while the run is under way.
      observed_guarantee: The guarantee that follows; None while the run is under way. It holds
        only if participation did not depend on released models or on data.
      worst_client: The client whose own participations changed the output most. None if that is
        not known, and for a run whose batches a sampler draws: who was drawn is a secret that no
        statement tells. Its epsilon is at most that of ``observed_guarantee``, which is for every
        pattern of the observed separations and number of participations.
      worst_case: What ``guarantees.worst_case`` returned, for a run that broke its plan, or whose
        draws nobody checked; None for others.
      represented: The larger cohort that the run's clients stand for; None if for none. All
        other attributes are of the run itself, with the noise that it really added.
      stopping_rule: The rule that ends the run before an epsilon is exceeded, fixed before its
        first round; None for none.
      stopped_by_rule: Whether that rule has ended the run.
      earlier_plans: The planned guarantees of the plans that were extended to this run, the first
        one first; empty for a run that was not extended.
      other_runs: What holds of this run and others together (:meth:`with_other_runs`); None where
        nobody said which there are.

    Raises:
      ValueError: If an attribute is of another type, a run that ended and is not known to have kept
        its plan, has no worst-case guarantee, a plan of a run that was extended forbids what the
        one before it allowed, a client is named for a run whose batches were to be drawn, or a rule
        that is not there ended the run.
    """

    facts: RunFacts
    plan: Guarantee
    observed_participation: ObservedParticipation | None = None
    observed_guarantee: Guarantee | None = None
    worst_client: WorstClient | None = None
    worst_case: Guarantee | None = None
    represented: Represented | None = None
    stopping_rule: StoppingRule | None = None
    stopped_by_rule: bool = False
    earlier_plans: tuple[Guarantee, ...] = ()
    other_runs: OtherRuns | None = None

    def __post_init__(self) -> None:
        inputs.check_types(self)
        if self.stopped_by_rule and (self.stopping_rule is None or self.observed_guarantee is None):
            raise ValueError("only a run that has a stopping rule, and ended, is ended by it.")
        if (
            self.observed_participation is not None
            and self.keeps_plan is not True
            and self.worst_case is None
        ):
            raise ValueError(
                "a run that broke its plan, or whose draws nobody checked, needs its worst-case "
                "guarantee, because the planned one need not hold: "
                "worst_case=guarantees.worst_case(plan, observed)."
            )
        horizons = [plan.num_rounds for plan in (*self.earlier_plans, self.plan)]
        if horizons != sorted(set(horizons)):
            raise ValueError(
                f"the plans of an extended run are for more and more rounds, found {horizons}."
            )
        check_extended(
            {plan.num_rounds: guarantees.participation_of(plan) for plan in self.earlier_plans},
            guarantees.participation_of(self.plan),
        )
        if self.plan.is_amplified and self.worst_client is not None:
            raise ValueError(
                "the statement of a sampled run must not name a client or its rounds: who was "
                "drawn is a secret, which the amplified guarantee rests on."
            )

    @property
    def status(self) -> str:
        """``running``, ``interrupted``, ``stopped_at_epsilon`` or ``finished``."""
        if self.observed_participation is None:
            return "running"
        if self.stopped_by_rule:
            return "stopped_at_epsilon"
        is_complete = self.observed_participation.num_rounds == self.plan.num_rounds
        return "finished" if is_complete else "interrupted"

    @property
    def keeps_plan(self) -> bool | None:
        """Whether the observed participations are within the plan.

        None while the run is under way, and where nobody checked the draws of a sampler.
        """
        observed, sampling = self.observed_participation, guarantees.scheme_of(self.plan)
        if observed is None or (sampling is not None and observed.keeps_sampling is None):
            return None
        return keeps_plan(sampling or guarantees.participation_of(self.plan), observed)

    @property
    def stated(self) -> Guarantee:
        """The guarantee that is the headline.

        A run that kept its plan satisfies the planned guarantee, finished or not, because fewer
        rounds are a part of all. The observed one may be better, and is not the headline: it holds
        only if participation did not depend on released models or on data. A finished run that
        broke its plan has the observed guarantee; one that was stopped, or whose observed guarantee
        is the better one, has the worst case, which is no better than either.

        The limit of a stopping rule was fixed before the first round, as the plan was, and holds
        however the run ended (``stopping_rules``), unless what was observed shows that the rule
        was not followed. So it is the headline of a run that broke its plan, and of one that kept
        a plan with a larger epsilon.
        """
        rule, plan = self.stopping_rule, self.plan
        is_kept = self.observed_guarantee is None or self.keeps_plan
        if rule is not None and self._keeps_rule:
            is_smaller = rule.guarantee.epsilon <= plan.epsilon
            return rule.guarantee if is_smaller or not is_kept else plan
        if is_kept:
            return plan
        assert self.observed_guarantee is not None
        assert self.worst_case is not None
        is_weaker = self.observed_guarantee.epsilon >= plan.epsilon
        return (
            self.observed_guarantee if self.status == "finished" and is_weaker else self.worst_case
        )

    @property
    def named_guarantees(self) -> dict[str, Guarantee]:
        """The guarantees of this run, by their names in ``privacy.json``."""
        named = {
            "planned": self.plan,
            "earned": self.stated,
            "widened": self.worst_case,
            "realised": self.observed_guarantee,
        }
        return {name: each for name, each in named.items() if each is not None}

    @property
    def kept_guarantee(self) -> Guarantee | None:
        """What clients that kept the planned schema have, where no other client has any guarantee.

        None where there is one for every client, and where there is none for anybody.
        """
        has_none = math.isinf(self.stated.epsilon) and self._is_schema_broken
        return self.plan if has_none and math.isfinite(self.plan.epsilon) else None

    @property
    def _keeps_rule(self) -> bool:
        """Whether the stopping rule, if there is one, allows what was observed."""
        rule, observed = self.stopping_rule, self.observed_participation
        if rule is None or observed is None or self.observed_guarantee is None:
            return True
        # A sampler that left its scheme has nothing amplified, and the rule promised that.
        if self.plan.is_amplified:
            return rule.allows(observed)
        # As the rule does, without the sensitivity of the observed rounds once more.
        return self.observed_guarantee.noise_multiplier >= rule.guarantee.noise_multiplier

    def with_other_runs(self, events: Mapping[str, dp_event.DpEvent]) -> "PrivacyStatement":
        """Returns the statement with what holds of this run and others together.

        It is for clients that were in all of them: of any others, fewer runs are composed. This run
        counts as it was planned, or as its worst case where it is not known to have kept its plan.

        Args:
          events: What ``Mechanism.event`` returned of each other run, by a name for readers.

        Raises:
          ValueError: If no other run is named, or they cannot be composed at this delta
            (``accounting.composed_epsilon``). With too little noise, there is no guarantee.
        """
        if not events:
            raise ValueError("with_other_runs needs at least one run: without any, leave it out.")
        own = self.plan if self.worst_case is None else self.worst_case
        epsilon = math.inf
        if math.isfinite(own.epsilon) and not self.facts.noise_seed_is_fixed:
            with contextlib.suppress(accounting.TailError):
                epsilon = _composed_epsilon(
                    (guarantees.event(own), *events.values()), self.plan.delta
                )
        runs = OtherRuns(tuple(events), epsilon, self.plan.delta)
        return dataclasses.replace(self, other_runs=runs)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know first."""
        found = []
        if self.plan.noise_multiplier == 0.0:
            found.append("No noise was added: this run has no differential privacy guarantee.")
        elif self.facts.noise_seed_is_fixed:
            found.append(
                "The noise came from a fixed seed. Whoever knows the seed can remove the noise, so "
                "the guarantee below is void outside tests."
            )
        if self.facts.num_alike_names:
            found.append(client_names.warning(self.facts.num_alike_names))
        if self.plan.delta * self.facts.num_clients >= 1.0:
            found.append(
                f"Delta, {rounded_up(self.plan.delta, '.6g')}, is not below 1 / "
                f"{self.facts.num_clients} clients: a mechanism that publishes all data of one "
                "client in so many may satisfy that. "
                "Choose a smaller delta."
            )
        if self.represented is not None:
            cohort = self.represented.clients_per_round
            found.append(
                f"{self.facts.clients_per_round} clients a round stood for {cohort}, with noise "
                "scaled down in proportion, to estimate the accuracy of a run with that many. What "
                "this run released has only the weaker guarantee that is stated here; the run that "
                "it stands for would be planned for "
                f"{statement_texts.pair(self.represented.guarantee)}, and "
                f"needs a population of at least {self.represented.num_clients} clients."
            )
        if self._is_schema_broken and self._is_by_times:
            found.append(
                "The times of the rounds allow more than the planned schema. For a client that "
                "took part beyond the schema the planned guarantee need not hold; for a client "
                "that kept it, it does."
            )
        elif self._is_schema_broken:
            found.append(
                "The observed participations break the planned schema. For clients that broke it "
                "the planned guarantee need not hold; for a client that kept it, it does."
            )
        elif self.keeps_plan is False:
            found.append(
                "The observed batches were not drawn by the planned sampling scheme: nothing is "
                "amplified."
            )
        elif self.keeps_plan is None and self.observed_participation is not None:
            found.append(
                "Without the sampler's seed, nothing shows that the observed batches were drawn by "
                "the planned sampling scheme: nothing is amplified."
            )
        gap = None if self.observed_participation is None else self.observed_participation.gap
        if gap is not None and (gap != NO_COUNTS or self.stopping_rule is not None):
            found.append(statement_texts.incomplete(gap))
        elif not self._keeps_rule and (not self.plan.is_amplified or self.keeps_plan):
            found.append(
                "By what was observed, the stopping rule had to end the run sooner: it was not "
                "followed, and what it promised is not stated."
            )
        if self.status == "interrupted" and self.plan.noise_multiplier > 0.0:
            found.append(
                "The run was stopped early. Its observed guarantee is for fewer rounds than "
                "planned; it holds only if neither the data nor what was released had a part in "
                "the decision to stop."
            )
        if self.observed_guarantee is not None and not self.observed_guarantee.sensitivity.is_exact:
            found.append(
                "The observed sensitivity is an upper bound (BandMF Thm 3), so the guarantee may "
                "be better than stated, and is not worse."
            )
        return tuple(found)

    @property
    def _is_schema_broken(self) -> bool:
        """Whether clients broke the planned schema, or may have: others have the plan's pair."""
        return self.keeps_plan is False and not self.plan.is_amplified

    @property
    def _is_by_times(self) -> bool:
        """Whether the times of rounds show what clients could do, and nobody saw what they did."""
        observed = self.observed_participation
        return observed is not None and observed.conditions is not None

    def to_dict(self, *, name_clients: bool = False) -> dict[str, Any]:
        """Returns the contents of ``privacy.json``, JSON-able.

        Args:
          name_clients: Whether the client that was protected least is named, with its rounds,
            which tell it from all others as well.
        """
        observed, guarantee = self.observed_participation, self.observed_guarantee
        worst, adaptive = self.worst_client, self.facts.adaptive_clip
        scheme = guarantees.scheme_of(self.plan)
        return {
            "library_version": version.__version__,
            "status": self.status,
            "is_private": math.isfinite(self.plan.epsilon) and not self.facts.noise_seed_is_fixed,
            "unit": "client",
            "part_of_client": {
                **guarantees.part_of_client(self.stated).to_dict(),
                **guarantees.independence(self.stated),
            },
            "adjacency": "zero-out",
            "amplification": None if scheme is None else scheme.to_dict(),
            **dataclasses.asdict(self.facts),
            "adaptive_clip": None if adaptive is None else adaptive.to_dict(),
            "public_data": " ".join(self.facts.public_data.split()),
            "enforcement": " ".join(self.facts.enforcement.split()),
            "provenance": self.facts.provenance.to_dict(),
            "other_runs": None if self.other_runs is None else self.other_runs.to_dict(),
            "represents": (
                None
                if self.represented is None
                else {
                    "clients_per_round": self.represented.clients_per_round,
                    "num_clients": self.represented.num_clients,
                    "planned": guarantees.to_dict(self.represented.guarantee),
                }
            ),
            "planned": guarantees.to_dict(self.plan),
            "earlier_plans": [guarantees.to_dict(plan) for plan in self.earlier_plans],
            "earned": guarantees.to_dict(self.stated),
            "widened": None if self.worst_case is None else guarantees.to_dict(self.worst_case),
            "realised": None if guarantee is None else guarantees.to_dict(guarantee),
            "realised_participation": None if observed is None else observed.to_dict(),
            "worst_client": None if worst is None else worst.to_dict(is_named=name_clients),
            "keeps_plan": self.keeps_plan,
            "stopping_rule": (
                None
                if self.stopping_rule is None
                else {
                    "stop_at_epsilon": self.stopping_rule.epsilon,
                    "ended_the_run": self.stopped_by_rule,
                    "guarantee": guarantees.to_dict(self.stopping_rule.guarantee),
                }
            ),
            "warnings": list(self.warnings),
        }

    def to_markdown(self) -> str:
        """Returns the contents of ``PRIVACY.md``."""
        facts, sampling, texts = self.facts, guarantees.scheme_of(self.plan), statement_texts
        adaptive, has_files = facts.adaptive_clip, facts.has_run_directory
        metrics, are_released = facts.private_metrics, facts.private_metrics is not None
        by_files, by_rounds = (
            (texts.VERIFIED_BY_FILES, texts.VERIFIED_BY_ROUNDS)
            if sampling is None
            else (
                texts.SAMPLING_VERIFIED_BY_FILES.format(
                    sizes="" if are_released else texts.SIZES_IN_FRACTIONS
                ),
                texts.SAMPLING_VERIFIED_BY_ROUNDS,
            )
        )
        if self._is_by_times:
            by_rounds = texts.VERIFIED_BY_TIMES
        has_random_sizes = sampling is not None and sampling.has_random_sizes
        unit = texts.UNIT_OF_TIMERS if sampling is None else texts.UNIT_OF_SAMPLING
        return texts.MARKDOWN.format(
            warnings="".join(f"**Warning.** {text}\n\n" for text in self.warnings),
            summary=self._summary(),
            rounds=self.plan.num_rounds,
            clients=facts.num_clients,
            cohort=f"{facts.clients_per_round}{' expected' if has_random_sizes else ''}",
            clipping=(
                (
                    texts.clipping(facts.clip_norm, self.plan)
                    if adaptive is None
                    else texts.adaptive_clipping(
                        adaptive.clip,
                        adaptive.update_noise_multiplier,
                        adaptive.clipped_count_stddev,
                    )
                )
                + ("" if metrics is None else texts.with_metrics(metrics, adaptive is not None))
            ),
            released=(
                (texts.RELEASED if adaptive is None else texts.RELEASED_WITH_NORMS)
                + (f"\n     {texts.RELEASED_METRICS}" if are_released else "")
            ),
            publishable=(
                texts.publishable(
                    are_released=are_released,
                    has_files=has_files,
                    is_sampled=sampling is not None,
                )
                if math.isfinite(self.stated.epsilon) and not facts.noise_seed_is_fixed
                else texts.NOTHING_PUBLISHABLE
                if self.kept_guarantee is None or facts.noise_seed_is_fixed
                else texts.NOTHING_PUBLISHABLE_OF_ALL
            ),
            left_out=texts.left_out(is_adaptive=adaptive is not None, has_metrics=are_released),
            mechanism=facts.mechanism,
            public_data=facts.public_data.rstrip("."),
            metrics=texts.not_covered_metrics(
                "in\n     `metrics.csv`, in TensorBoard and in what the command prints"
                if has_files
                else "wherever\n     they are kept",
                adaptive is not None,
                are_released=are_released,
            ),
            secrets=texts.SECRET_FILES if has_files else texts.SECRET_STATE,
            together=texts.together(self.plan),
            unit=f"{unit}\n     {texts.part_of_client(self.stated)}",
            accounting=texts.accounting(self.plan, has_run_directory=has_files),
            assumption=texts.assumption(self.plan, facts.enforcement, has_run_directory=has_files),
            verification=(by_files if has_files else by_rounds)
            + (texts.VERIFIED_AGAIN if facts.provenance.files else ""),
            planned=texts.formal(self.plan),
            extended=self._extended_text(),
            observed=self._observed_text(),
            widened=self._widened_text(),
            rule=self._rule_text(),
            version=version.__version__,
            other_runs=provenance.in_words(self.other_runs),
            provenance=facts.provenance.to_markdown(),
        )

    def _summary(self) -> str:
        guarantee = self.stated
        if not math.isfinite(guarantee.epsilon):
            if self.kept_guarantee is None:
                if self.keeps_plan is None and math.isfinite(self.plan.epsilon):
                    return (
                        "**No guarantee can be stated**: nothing shows that clients were drawn as "
                        "planned, and without amplification no epsilon is accounted for."
                    )
                return "This run has no differential privacy guarantee."
            why = (
                "the times of the rounds allow more than the planned schema, and of a client that "
                "took part as often and as closely as they allow"
                if self._is_by_times
                else "clients broke the planned schema, and of the one that is protected least"
            )
            return (
                f"**No guarantee can be stated for every client**: {why} no epsilon is accounted "
                f"for. A client that kept the schema has "
                f"{statement_texts.pair(self.kept_guarantee)}."
            )
        running = "if it keeps its plan, it will satisfy"
        if guarantee.is_by_rule:
            running = "what it releases satisfies"
        state = {
            "running": f"The run is under way; {running}",
            "interrupted": "The run was stopped before its last round; what it released satisfies",
            "stopped_at_epsilon": "The run was ended by its own rule; what it released satisfies",
            "finished": "The run is finished; what it released satisfies",
        }[self.status]
        return (
            f"{state} **{numbers.pair(guarantee.epsilon, guarantee.delta)}-differential "
            f"privacy** for every client, {self._condition()}.\n\n"
            f"{statement_texts.meaning(guarantee, self.facts.num_clients)}\n\n"
            f"{statement_texts.attacker(guarantee)}"
        )

    def _condition(self) -> str:
        return statement_texts.condition(self.stated, self.plan, by_times=self._is_by_times)

    def _observed_text(self) -> str:
        observed, guarantee = self.observed_participation, self.observed_guarantee
        if observed is None or guarantee is None:
            return "Not known yet: the run is under way."
        if observed.keeps_sampling:
            return (
                "By the ledger and the sampler's seed: the batches of all "
                f"{counted(observed.num_rounds, 'released round')} are those "
                f"that the sampling scheme draws. {self._formal_text(guarantee)}"
            )
        if observed.separation is None:
            apart = ""
        elif observed.separation == observed.largest_separation:
            apart = (
                ", and adjacent participations of one client were exactly "
                f"{counted(observed.separation, 'round')} apart"
            )
        else:
            apart = (
                ", and two participations of one client were at least "
                f"{counted(observed.separation, 'round')} apart"
            )
        most = observed.max_participations
        often = "once" if most == 1 else f"{most} times"
        if observed.conditions is not None:
            return (
                f"By the times of {counted(observed.num_rounds, 'released round')}: "
                f"no client took part more than {often}{apart}. "
                f"{observed.conditions} {self._formal_text(guarantee)}"
            )
        follows = (
            f"{self._formal_text(guarantee)}{self._worst_text()}"
            if observed.gap is None
            else statement_texts.incomplete(observed.gap)
        )
        return (
            f"By the ledger, where each id is one client: in "
            f"{counted(observed.num_rounds, 'released round')}, {observed.num_clients} of "
            f"{self.facts.num_clients} clients took part, none more than {often}{apart}. {follows}"
        )

    def _formal_text(self, guarantee: Guarantee) -> str:
        """The numbers of what was observed, if they are not those of the plan."""
        found = statement_texts.formal(guarantee)
        # Noise relative to an equal sensitivity may have another last digit.
        multipliers = guarantee.noise_multiplier, self.plan.noise_multiplier
        is_planned = self.keeps_plan and math.isclose(*multipliers, rel_tol=1e-12)
        return "That is as planned." if is_planned else found

    def _widened_text(self) -> str:
        """The numbers of what is stated of a plan that was broken, if it is the worst case."""
        if self.worst_case is None or self.stated is not self.worst_case:
            return ""
        return (
            "\n   - *Formal statement, worst case.* It is the one that is stated: for all planned\n"
            "     rounds, with the smaller separation and the larger number of participations of\n"
            f"     plan and observation. {statement_texts.formal(self.worst_case)}"
        )

    def _extended_text(self) -> str:
        if not self.earlier_plans:
            return ""
        plans = "; ".join(
            f"{counted(plan.num_rounds, 'round')}, {plan.claim.taking_part}, with noise "
            f"multiplier {plan.noise_multiplier!r}, for {statement_texts.pair(plan)}"
            for plan in self.earlier_plans
        )
        return (
            "\n   - *Extended.* The run was planned for fewer rounds before:\n"
            f"     {plans}.\n"
            "     The standard deviation of the noise stayed what it was, and the first rounds\n"
            "     are those of the matrix of the extended horizon, which allows all\n"
            "     participations that these plans allowed. All that is stated here holds for the\n"
            "     extended horizon, also if what was released had a part in the decision to go on."
        )

    def _rule_text(self) -> str:
        rule = self.stopping_rule
        if rule is None:
            return ""
        pair = numbers.pair(rule.epsilon, self.plan.delta, ".6g")
        looks_at = (
            "from who takes part, and from nothing else"
            if not self.plan.is_amplified
            else "from the plan alone"
        )
        bounds = (
            "so that no release of this run exceeds it, whatever ended the run."
            if self._keeps_rule
            else "but this run is not within it: a warning above says why."
        )
        return (
            f"\n   - *Stopping rule.* Fixed before the first round: the run ends before a round\n"
            f"     with which all rounds together would exceed {pair}. That follows {looks_at},\n"
            f"     {bounds}"
        )

    def _worst_text(self) -> str:
        worst, guarantee = self.worst_client, self.observed_guarantee
        if worst is None or guarantee is None or not math.isfinite(worst.epsilon):
            return ""
        took_part = (
            " The client that was protected least took part in "
            f"{counted(len(worst.rounds), 'round')}"
        )
        if math.isclose(worst.epsilon, guarantee.epsilon, rel_tol=1e-9):
            return f"{took_part}, and has just that guarantee."
        return (
            f"{took_part}; for its rounds alone the sensitivity is "
            f"{rounded_up(worst.sensitivity, '.6g')} and epsilon "
            f"{rounded_up(worst.epsilon, '.6g')}, {ONLY_IF}."
        )


# A run asks as it begins and as it ends.
@functools.lru_cache(maxsize=16)
def _composed_epsilon(events: tuple[dp_event.DpEvent, ...], delta: float) -> float:
    return accounting.composed_epsilon(events, delta)
