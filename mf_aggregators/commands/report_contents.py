"""Contents of mf-report: a checkpoint, a run's ledger, their text and their figure."""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags

from mf_aggregators import checkpoints, factorizations, lower_bounds, random_streams, workloads
from mf_aggregators.commands import mechanism_flags, stated_runs
from mf_aggregators.commands.command_line import CommandError, check_choice, naming
from mf_aggregators.factorizations import Errors, Factorization
from mf_aggregators.inputs import part
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.ledger import NO_COUNTS
from mf_aggregators.kernel.numbers import FloatArray, counted, stated_pair
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.observed import Observed
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy import guarantees, ledgers, statement_file
from mf_aggregators.privacy.guarantees import INDEPENDENCE, LeastProtected
from mf_aggregators.privacy.ledgers import Ledger, RoundTimes
from mf_aggregators.workloads import Workload

# Describes, in messages, a checkpoint that has the noise of a run.
HAS_NOISE = "a --checkpoint with noise (the directory of a run or of a Mechanism)"
# Width and height of a panel of the figure, in inches.
_INCHES = (5.4, 4.2)
# Matrices for more rounds are not drawn.
_MOST_ROUNDS_DRAWN = 4096
# False positive rates of the trade-off curves, on a logarithmic axis.
_LEAST_RATE_DRAWN, _RATES_DRAWN = 1e-4, 121
_TEMPLATE = pathlib.Path(__file__).with_name("templates") / "report.txt"


@dataclasses.dataclass(frozen=True, eq=False)
class _Subject:
    """The checkpoint, schema, workload and noise that a report is about.

    Attributes:
      factorization: The factorization of the checkpoint.
      schema: The schema of the flags; without flags, that of the checkpoint's mechanism, or else
        the one for which the matrix was made.
      workload: The workload of the flags, or the one for which the checkpoint was made.
      mechanism: The factorization with schema and noise; None if the noise is not known.
      drawn: The mechanism of the checkpoint if a sampling scheme draws its clients; otherwise None.
      is_saved: Whether the mechanism is that of the checkpoint, unchanged by flags.
    """

    factorization: Factorization
    schema: Participation
    workload: Workload
    mechanism: Mechanism | None
    drawn: Mechanism | None = None
    is_saved: bool = False

    @classmethod
    def read(cls, values: flags.FlagValues) -> "_Subject":
        """Reads the checkpoint that the flags name."""
        factorization, description = checkpoints.load_with_description(values.checkpoint)
        made_for = part(description, dict, "errors")
        given = mechanism_flags.workload_description(values) or made_for["workload"]
        workload = workloads.Workload.described(given, factorization.num_rounds)
        schema = mechanism_flags.participation(values)
        noise = mechanism_flags.noise_multiplier(values)
        saved = mechanism_flags.saved_mechanism(values.checkpoint)
        own = None if saved is None else saved.noise_reference
        own = own or Participation.from_dict(made_for["participation"])
        is_saved = saved is not None and schema is None and noise is None
        if (values.ledger or values.round_times) is not None:
            check_choice(
                saved is None or is_saved,
                f"--checkpoint={values.checkpoint} is a Mechanism, which has the run's "
                "participation and noise: leave out the flags for these.",
            )
            _check_declared(factorization, own, schema or own)
        if saved is not None and schema is not None and noise is None:
            noise = mechanism_flags.noise_under(saved, schema)
        mechanism = saved if is_saved else None
        drawn = mechanism if mechanism is not None and mechanism.sampling is not None else None
        noise = noise if drawn is None else drawn.noise_multiplier
        if noise is not None:
            mechanism = Mechanism.of_one_schema(factorization, schema or own, noise)
        return cls(factorization, schema or own, workload, mechanism, drawn, is_saved)

    @functools.cached_property
    def errors(self) -> Errors:
        """The sensitivity and the errors under the schema."""
        return self.factorization.errors(self.workload, self.schema)

    def _error_fields(self) -> dict[str, object]:
        """The fields for errors at noise multiplier 1, their lower bounds, and noise costs."""
        factorization, errors = self.factorization, self.errors
        bound = lower_bounds.compute(self.workload, self.schema)
        recursion = factorization.noise_recursion()
        kept = recursion.num_earlier_rows + recursion.num_state_vectors
        return {
            "mechanism": factorization.mechanism,
            "num_rounds": factorization.num_rounds,
            "workload": self.workload.name,
            "participation": str(self.schema if self.drawn is None else self.drawn.participation),
            "sensitivity": errors.sensitivity.value,
            "sensitivity_is_exact": errors.sensitivity.is_exact,
            "sensitivity_theorem": errors.sensitivity.theorem,
            **errors.to_dict(),
            "rmse_lower_bound": None if bound is None else bound.rmse,
            "max_error_lower_bound": None if bound is None else bound.max_error,
            "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
            **mechanism_flags.gap_fields(factorization, self.workload, self.schema),
            "noise_state_floats_per_parameter": kept,
            "rows_of_z_per_round": recursion.rows_of_z_per_round,
        }

    @property
    def is_of_another_workload(self) -> bool:
        """Whether the matrix was made for another workload than that of the reported errors."""
        made_for = self.factorization.parameters.get("workload")
        return made_for is not None and not self.workload.has_fingerprint(str(made_for))

    def fields(self, delta: float) -> dict[str, object]:
        """Returns the fields for errors and guarantee (None if the noise is not known).

        Args:
          delta: Above 0 and below 1.
        """
        mechanism = self.mechanism
        # If a scheme draws the clients, they do not keep to a single participation.
        stated = None if mechanism is None or self.drawn else mechanism.guarantee(delta)
        return self._error_fields() | {
            "noise_multiplier": None if mechanism is None else mechanism.noise_multiplier,
            **_guarantee_fields(stated),
            "delta": None if mechanism is None else delta,
        }

    def units(
        self, values: flags.FlagValues, found: "_LedgerReport | None"
    ) -> dict[str, Guarantee | None]:
        """Returns the guarantees of units other than one client, by their names in a report.

        Args:
          values: The parsed flags of mf-report.
          found: The findings of the ledger or of round times; None without either.

        Returns:
          The guarantees of a client in one ``window``, of a ``device`` in all windows, and of a
          person (``person_planned`` and ``person_realised``). A planned guarantee is None if the
          plan was broken. A realised one is None if it is not known, or would reveal which clients
          were drawn.

        Raises:
          CommandError: If there is no noise, or the ledger does not fit the flags.
        """
        window, people, delta = values.id_window, values.people, values.delta
        mechanism = self.drawn or self.mechanism
        if window is None and people is None:
            return {}
        if mechanism is None:
            raise CommandError("--id_window and --people need the noise of the run.")
        units: dict[str, Guarantee | None] = {}
        if window is not None:
            ledger = None if found is None else found.observed.ledger
            of_clients = () if ledger is None else ledger.rounds_of_clients
            in_two = sum(len(r) > 0 and r[0] // window != r[-1] // window for r in of_clients)
            moved = f"{in_two} clients of the ledger took part in two windows"
            check_choice(
                not in_two, f"--id_window={window}: {moved}: ids did not change as stated."
            )
            units["window"] = mechanism.unit_guarantee(delta, window=window, num_windows=1)
            units["device"] = mechanism.unit_guarantee(delta, window=window)
        if people is not None and found is not None:
            with naming("people"):
                named = ledgers.people_of(people)
                person = found.observed.least_protected_person(named, delta)
            most = guarantees.most_clients(named)
            units["person_planned"] = mechanism.unit_guarantee(delta, num_clients=most)
            is_known = person is not None and not found.has_drawn_clients
            units["person_realised"] = person.guarantee if person and is_known else None
        if found is not None and found.is_broken:
            units |= {name: None for name, each in units.items() if each and not each.is_observed}
        return units


def _guarantee_fields(guarantee: Guarantee | None, prefix: str = "") -> dict[str, object]:
    """The numbers of a guarantee as fields of a report; None if no guarantee is stated."""
    names = {"zcdp_rho": "rho", "zcdp_delta": "zcdp_delta", "epsilon": "epsilon"}
    values = {f"{prefix}{x}": getattr(guarantee, name, None) for x, name in names.items()}
    return {**values, **guarantees.rates(guarantee, prefix)}


def _check_declared(factorization: Factorization, own: Participation, given: Participation) -> None:
    """Refuses a schema for which the noise multiplier would mean more noise than the run had."""
    # The matrix may be made for one participation although clients of the run took part more often.
    if own == SingleParticipation() or given == own:
        return
    planned, declared = (factorization.sensitivity(schema).value for schema in (own, given))
    check_choice(
        declared <= planned * (1.0 + 1e-9),
        f"--separation: the checkpoint is for {own}, and the flags name {given}. Noise multipliers "
        "are relative to the planned schema: leave these flags out, or name the run's Mechanism.",
    )


def _sampling_fields(plan: Guarantee, *, is_broken: bool = False) -> dict[str, object]:
    """The fields of the planned guarantee if clients are drawn; None if the plan was broken."""
    scheme = guarantees.scheme_of(plan)
    if scheme is None:
        return {}
    certificate = None if is_broken else plan.claim.certificate
    return {
        "sampling": scheme.to_dict(),
        "amplified_noise_multiplier": plan.noise_multiplier,
        "amplified_epsilon": None if is_broken else plan.epsilon,
        "amplified_certificate": None if certificate is None else certificate.to_dict(),
        **guarantees.rates(None if is_broken else plan, "amplified_"),
    }


@dataclasses.dataclass(frozen=True)
class _LedgerReport:
    """The results of comparing a ledger, or times of rounds, with the plan.

    Attributes:
      plan: The planned guarantee, amplified if a data sampler drew the clients.
      observed: The comparison of ledger or times with the mechanism.
    """

    plan: Guarantee
    observed: Observed

    @property
    def is_broken(self) -> bool:
        """Whether the ledger shows that the plan was broken (``Observed.keeps_participation``)."""
        return self.observed.keeps_participation is False

    @functools.cached_property
    def observed_guarantee(self) -> Guarantee:
        """The observed guarantee, without amplification (``Observed.unamplified_guarantee``)."""
        return self.observed.unamplified_guarantee(self.plan.delta)

    @functools.cached_property
    def worst_case(self) -> Guarantee | None:
        """The worst-case guarantee if the plan was broken; otherwise None."""
        return self.observed.worst_case(self.plan.delta) if self.is_broken else None

    @functools.cached_property
    def worst_client(self) -> LeastProtected | None:
        """The least protected client; None if clients were drawn, because draws are secret."""
        return None if self.has_drawn_clients else self.observed.worst_client(self.plan.delta)

    @property
    def has_drawn_clients(self) -> bool:
        """Whether a sampling scheme drew the clients, so that the draws are secret."""
        of_run, ledger = self.observed.mechanism, self.observed.ledger
        return of_run.sampling is not None or (ledger is not None and ledger.sampling is not None)

    def fields(self) -> dict[str, object]:
        """Returns the fields of the report, which name no client."""
        observed, seen, worst = self.observed, self.observed_guarantee, self.worst_client
        names = ("num_rounds", "num_clients", "separation", "largest_separation")
        realised = (*names, "max_participations")
        own = None if worst is None else worst.guarantee
        return {
            "keeps_plan": observed.keeps_participation,
            "ledger_gap": observed.gap,
            "clients_beyond_plan": observed.num_outside_schema(),
            "alike_client_names": observed.num_alike_names,
            # Leaves out numbers that the ledger refutes.
            **_sampling_fields(self.plan, is_broken=self.worst_case is not None),
            "sampling_deviation": observed.deviation,
            "absent_participations": observed.num_absent,
            "conditions": observed.participation.conditions,
            **{f"realised_{name}": getattr(observed.participation, name) for name in realised},
            "realised_sensitivity": seen.sensitivity.value,
            "realised_sensitivity_is_exact": seen.sensitivity.is_exact,
            "realised_noise_multiplier": seen.noise_multiplier,
            **_guarantee_fields(seen, "realised_"),
            **_guarantee_fields(self.worst_case, "widened_"),
            "worst_client_num_rounds": None if worst is None else len(worst.rounds),
            "worst_client_sensitivity": None if own is None else own.sensitivity.value,
            "worst_client_epsilon": None if own is None else own.epsilon,
            **INDEPENDENCE,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The contents of a report: its subject, guarantees and findings.

    Attributes:
      subject: The checkpoint, schema, workload and noise.
      delta: The delta of the guarantees.
      found: The findings of a ledger or of round times; None without either.
      certified: Without either, the guarantee of a checkpoint whose clients are drawn; otherwise
        None.
      units: The guarantees of other units than one client, from ``_Subject.units``.
    """

    subject: _Subject
    delta: float
    found: _LedgerReport | None
    certified: Guarantee | None
    units: Mapping[str, Guarantee | None]

    @classmethod
    def read(cls, values: flags.FlagValues) -> "Report":
        """Reads the checkpoint, and the ledger or the times of rounds, that flags name.

        Args:
          values: The parsed flags of mf-report.

        Raises:
          ValueError: If a file cannot be read, or the flags do not fit it.
        """
        subject = _Subject.read(values)
        found, certified = _found(values, subject), None
        if found is None and subject.drawn is not None:
            certified = _certified(subject.drawn, values.delta)
        return cls(subject, values.delta, found, certified, subject.units(values, found))

    @property
    def is_broken(self) -> bool:
        """Whether a ledger shows that the plan was not kept."""
        return self.found is not None and self.found.is_broken

    def fields(self) -> dict[str, object]:
        """Returns the fields of the JSON object."""
        fields = self.subject.fields(self.delta)
        if self.found is not None:
            fields |= self.found.fields()
        elif self.certified is not None:
            fields |= _sampling_fields(self.certified)
        units = self.units.items()
        fields |= {f"{name}_sensitivity": each and each.sensitivity.value for name, each in units}
        return fields | {f"{name}_epsilon": each and each.epsilon for name, each in units}

    def paragraphs(self) -> list[str]:
        """Returns the paragraphs of the printed text, with warnings first."""
        text = statement_file.template(_TEMPLATE).render(
            vars(self),
            infinite=math.inf,
            no_counts=NO_COUNTS,
            counted=counted,
            pair=lambda guarantee: stated_pair(guarantee.epsilon, guarantee.delta),
            guarantees=guarantees,
        )
        found_in = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
        return [each for each in found_in if each]

    @property
    def _stated(self) -> dict[str, Guarantee]:
        """The guarantees in the figure of trade-off curves, by name."""
        mechanism, found = self.subject.mechanism, self.found
        if found is not None:
            name = "planned" if found.worst_case is None else "worst case"
            stated = {name: found.worst_case or found.plan, "observed": found.observed_guarantee}
            return {f"{x}, {ONLY_IF}" if y.is_observed else x: y for x, y in stated.items()}
        if self.certified is not None:
            return {"amplified": self.certified}
        return {} if mechanism is None else {"planned": mechanism.guarantee(self.delta)}

    def draw(self, path: str) -> None:
        """Draws the report as a PNG file.

        Args:
          path: The file.

        Raises:
          CommandError: If it cannot be written.
        """
        # Importing matplotlib takes a second.
        from mf_aggregators import figures

        subject, stated = self.subject, self._stated
        factorization = subject.factorization
        has_matrix = factorization.num_rounds <= _MOST_ROUNDS_DRAWN
        figure, (axes,) = figures.panels(1, 1 + has_matrix + bool(stated), _INCHES)
        independent = factorizations.identity(factorization.num_rounds)
        variances = {
            factorization.mechanism: subject.errors.per_round_variance,
            "independent noise": independent.per_round_variance(subject.workload, subject.schema),
        }
        rounds = np.arange(1, factorization.num_rounds + 1)
        figures.lines(
            axes[0],
            {name: (rounds, np.sqrt(of_rounds)) for name, of_rounds in variances.items()},
            title="Output at noise multiplier 1",
            x="round",
            y="standard deviation",
        )
        if has_matrix:
            magnitudes = np.sqrt(np.abs(factorization.strategy_matrix()))
            figures.heat_map(figure, axes[1], magnitudes, title="Roots of magnitudes of C")
        if stated:
            figures.lines(
                axes[-1],
                _trade_offs(stated),
                title="Rates that an attacker can reach",
                x="false positive rate",
                y="highest true positive rate",
                logarithmic="xy",
            )
        schema = f"NOT kept: {subject.schema}" if self.is_broken else str(subject.schema)
        name = f"{factorization.mechanism}, n = {factorization.num_rounds}"
        figures.heading(figure, f"{name}: {schema}")
        with naming("figure"):
            figures.save(figure, path)


def _certified(mechanism: Mechanism, delta: float) -> Guarantee:
    return mechanism.guarantee(delta, certification=Certification.default(show_progress=True))


def _found(values: flags.FlagValues, subject: _Subject) -> _LedgerReport | None:
    """The findings of the ledger or times of rounds that flags name; None without either."""
    mechanism = subject.drawn or subject.mechanism
    given = [name for name in ("ledger", "round_times") if values[name].value is not None]
    check_choice(
        mechanism is not None or not given,
        f"--{''.join(given)} needs the noise of the run: --noise_multiplier or {HAS_NOISE}.",
    )
    if mechanism is None or not given:
        return None
    if values.ledger is not None:
        seen = _observed(values, subject, mechanism)
    else:
        with naming("round_times"):
            names = ("clock_drift", "clock_margin_minutes")
            options = {name: values[name].value for name in names if values[name].present}
            options["max_participations"] = values.timer_max_participations
            times = RoundTimes.load(values.round_times, values.timer_hours, **options)
            seen = mechanism.observed(times)
    return _LedgerReport(_certified(mechanism, values.delta), seen)


def _observed(values: flags.FlagValues, subject: _Subject, mechanism: Mechanism) -> Observed:
    ledger = ledgers.load(values.ledger, values.released_rounds or mechanism.num_rounds)
    _check_ledger(values, subject, ledger)
    seed = _sampling_seed(values, subject, ledger)
    with naming("round_counts"):
        counts: Sequence[int] | None = ledgers.round_counts(values.round_counts)
    if counts is None and checkpoints.is_run(values.checkpoint):
        counts = stated_runs.round_counts(pathlib.Path(values.checkpoint), ledger)
    with naming("ledger" if values.released_rounds is None else "released_rounds"):
        return mechanism.observed(
            ledger,
            round_counts=counts,
            clients_per_round=values.clients_per_round,
            sampling_seed=seed,
        )


def _check_ledger(values: flags.FlagValues, subject: _Subject, ledger: Ledger) -> None:
    """Checks that a ledger fits the flags, the checkpoint, and the run's directory, if any."""
    check_choice(
        values.population is None or len(ledger.client_ids) <= values.population,
        f"--population={values.population} is less than the {len(ledger.client_ids)} clients in "
        f"{values.ledger}.",
    )
    check_choice(
        ledger.sampling is None or subject.is_saved,
        f"the clients of {values.ledger} were sampled, and the checkpoint has no sampling scheme: "
        "give that of the run or of its Mechanism.",
    )
    path = pathlib.Path(values.checkpoint) / ledgers.FILE_OF_RUN
    if checkpoints.is_run(values.checkpoint) and path.exists():
        check_choice(
            ledger.by_name() == ledgers.load(path, ledger.num_rounds).by_name(),
            f"--ledger={values.ledger} is not the ledger of the run, {path}: give that one, or the "
            "checkpoint of another run.",
        )


def _sampling_seed(values: flags.FlagValues, subject: _Subject, ledger: Ledger) -> int | None:
    is_given, is_drawn = values.sampling_seed is not None, ledger.sampling is not None
    check_choice(
        is_given or values.statement is None or not (is_drawn or subject.drawn),
        "--statement needs --sampling_seed for batches of a sampler: only it shows the draws.",
    )
    check_choice(
        is_drawn or not is_given,
        "--sampling_seed needs a ledger that names its sampling scheme, such as that of a run.",
    )
    return random_streams.load_seed(values.sampling_seed) if is_given else None


def _trade_offs(stated: Mapping[str, Guarantee]) -> dict[str, tuple[FloatArray, FloatArray]]:
    """The curves of an attacker's highest true positive rates, by guarantee."""
    rates = np.geomspace(_LEAST_RATE_DRAWN, 1.0, _RATES_DRAWN)
    curves = {
        name: (rates, np.asarray(guarantees.true_positive_rate(each, rates)))
        for name, each in stated.items()
    }
    return {**curves, "guessing": (rates, rates)}
