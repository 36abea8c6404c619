r"""mf-plan: compares mechanisms for a population and a privacy target, and recommends one.

With --noise_multiplier instead of a target, it prints the epsilon of this noise.

Either timers on devices restrict participation, or a data centre draws every batch in secret, so
that sampling amplifies the guarantee.

Examples:
  # Participation timers on devices:
  mf-plan --num_rounds=2052 --population=342000 --clients_per_round=1000 --separation=342 \
    --target_epsilon=8 --delta=1e-6 --model_size=4050748
  # A data centre that draws every batch itself:
  mf-plan --num_rounds=2052 --population=342000 --clients_per_round=1000 --sampling=poisson \
    --target_epsilon=8 --delta=1e-6 --model_size=4050748
"""

import dataclasses
import math
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence

from absl import flags

from mf_aggregators import checkpoints, clip_search, inputs, planning, rate_search, workloads
from mf_aggregators.catalogue import Variant
from mf_aggregators.commands import command_line, mechanism_flags
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import counted, pair, rounded_up
from mf_aggregators.participation import SCHEMES, MinSeparation
from mf_aggregators.planning import Candidate, Fleet, Plan, Setting, fleets, planner
from mf_aggregators.privacy import guarantees

# The default of --time_limit for devices with timers: the command ends within a minute.
_TIME_LIMIT = 50.0
# Flags that are left out of the printed second call, which saves the mechanism.
_OF_THIS_CALL = re.compile(r"--(cache_dir|format|overwrite|time_limit)\b")
_REQUIRED = ("num_rounds", "population", "clients_per_round")
# The default number of parameters, on which memory and time of the noise depend, but not errors and
# epsilons.
_MODEL_SIZE = 1_000_000
# Stands for the data set in a printed command.
_PLACEHOLDER = "YOUR_DATASET"
# The clip norm in printed code, a first guess: a plan does not know the data.
_CLIP_NORM = 1.0
_NOTE_ON_CLIP_NORM = (
    f"clip_norm={_CLIP_NORM!r} is only an example: fill in the L2 norm that suits your updates. "
    "The guarantee does not depend on it."
)
_NOTE_ON_NORMS = (
    "norms_of(number, clip_norm) is yours to write: the L2 norms of the updates of a cohort, at "
    "the first model."
)
_NOTE_ON_RATES = (
    "updates_of, step and model are yours to write, as mfa.rate_search.find describes. Train with "
    "best.rate."
)
_NOTE_ON_SEARCHES = "The searches and the run together keep the target."
# The server learning rates that a search tries: a rate of 1 applies the mean of the updates.
_RATES = [0.1, 0.3, 1.0, 3.0, 10.0]
_LINE_LENGTH = 100
# Measured by benchmarks/speed.py: one core clips, rounds and adds one entry of an update.
_SECONDS_PER_CLIPPED_ENTRY = 5.5e-9
# The call that makes the sampler of a scheme.
_SAMPLER = "sampler(seed=mfa.participation.secret_seed())"
# The mark of an estimate, and the fields that may be estimates.
_ABOUT = "~"
_ESTIMATED = ("effective_error", "effective_rmse", "max_effective_error", "noise_multiplier")
# The flags that describe a fleet of devices.
_FLAGS_OF_FLEETS = (
    "dropout",
    "over_selection",
    "returning",
    "absent_rounds",
    "retry_rounds",
    "spread",
    "timer_hours",
    "round_minutes",
    "peak_hours",
)
# The largest number of printed pairs (separation, most participations) that a fleet survives.
_MOST_PAIRS = 8
# The characters of the longest bar of the chart of pairs.
_WIDTH_OF_NOISE = 30


def _define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-plan."""
    group = FlagGroup(values, "Training")
    group.integer("num_rounds", "The number n of rounds of the run. Required.")
    group.integer("population", "The number m of clients, or of examples. Required.")
    group.integer(
        "clients_per_round", "The number B of clients in a round (the batch size). Required."
    )
    group.integer(
        "may_extend_to",
        "The number of rounds of the whole run, if it may be extended later: mechanisms are "
        "compared by the geometric mean of their errors at both horizons, and those that cannot be "
        "extended are infeasible. Default: no extension.",
    )
    group.integer(
        "model_size",
        "The number d of parameters of the model, for memory, disk and time. No epsilon depends on "
        "it.",
        _MODEL_SIZE,
    )
    mechanism_flags.define(values, "workload", "privacy")
    group = FlagGroup(values, "Privacy")
    for name, searched, cost in (
        ("clip_norm_share", "the clip norm", f"{clip_search.SHARE} costs the run 1 %"),
        ("rate_share", "the server's learning rate", f"{rate_search.SHARE} costs the run 5.4 %"),
    ):
        group.number(
            name,
            f"With timers: the share of rho that a search for {searched} spends before the run. "
            f"{cost} more noise. Default: no search.",
        )
    group = FlagGroup(values, "Participation")
    group.integer(
        "separation",
        "The separation b, which timers enforce: two participations i, j of one device satisfy |i "
        "- j| >= b. Default: of those with which simulated fleets have enough devices until the "
        "end, the one with the least noise.",
    )
    group.integer(
        "max_participations",
        "The most participations k of one device. Default: as many as fit into the rounds.",
    )
    group.choice(
        "sampling",
        (*SCHEMES, planning.ANY_SAMPLING),
        f"The sampling scheme (docs/sampling.md); {planning.ANY_SAMPLING} compares participation "
        "without sampling and all schemes but fixed_size and shuffling. Default: devices with "
        "timers, without amplification.",
    )
    _define_fleet(values)
    group = FlagGroup(values, "Noise")
    group.number(
        "noise_memory_gb",
        "The most gigabytes of noise that a mechanism may keep between rounds, for all parameters, "
        "not counting blocks that are made in advance on disk. Default: no limit.",
    )
    group = FlagGroup(values, "Mechanism")
    group.words(
        "mechanisms",
        "The mechanisms to compare, separated by commas. Default: all.",
    )
    group.words(
        "checkpoint",
        "Checkpoint directories, separated by commas, whose matrices are compared with the others "
        "(for instance of factorizations.from_matrix(C)).",
    )
    group.path(
        "error",
        "The error by which mechanisms are compared, and for which they are optimised if possible: "
        "the mean squared error over rounds (mean), that of the worst round (max), or the mean "
        "with weights from a text file, one line for each round.",
        "mean",
    )
    group.number(
        "time_limit",
        "The seconds after which mechanisms that no earlier plan has cached are skipped; the plan "
        "names them, and recommends the best of the others. The proof of an amplified guarantee "
        f"takes more time. 0 for no limit. Default: {_TIME_LIMIT:g}, and with --sampling no limit.",
    )
    group = FlagGroup(values, "Output")
    group.path(
        "output",
        "A directory for the recommended Mechanism, which mfa.load reads: matrix, participation "
        "and noise.",
    )
    group.overwrite()
    group.path(
        "cache_dir",
        "The directory in which factorizations are cached. Default: in the user's cache directory.",
    )
    for name in _REQUIRED:
        group.require(name)
    group.require("target_epsilon", "target_rho", "noise_multiplier")


def _define_fleet(values: flags.FlagValues) -> None:
    """Defines the flags of a fleet."""
    group = FlagGroup(values, "Fleet")
    group.number(
        "dropout",
        "The probability that a selected device does not upload. The plan looks for a separation "
        "and a number of participations with which simulated fleets reach the last round. Default: "
        f"{fleets.DROPOUT:g}.",
    )
    group.number(
        "over_selection",
        "The number of devices selected for each upload that is needed, at least 1. Default: the "
        "one with which the fewest timers start for each round.",
    )
    group.number(
        "returning",
        "The probability that a device whose timer has run out is available in a round. Default: "
        "1.",
    )
    group.number(
        "absent_rounds",
        "The number of rounds after which half of the devices whose timers have run out are "
        "available. The plan survives fleets with this and fleets with --returning. Default: 0.",
    )
    group.number(
        "retry_rounds",
        "With --absent_rounds: the time that the server waits after it found too few devices, in "
        f"rounds. Default: {Fleet.retry_rounds:g}.",
    )
    group.number(
        "spread",
        "The standard deviation of the dropout probability between rounds, divided by its mean. "
        f"Default: {Fleet.spread:g}.",
    )
    group.number(
        "timer_hours", "The hours that timers count, with --round_minutes. Default: rounds."
    )
    group.number("round_minutes", "With --timer_hours: the minutes that a round takes.")
    group.number(
        "peak_hours",
        "With --timer_hours: the hours of each day in which rounds take place. Default: 24.",
    )


@inputs.limited_memory()
def _main(values: flags.FlagValues) -> None:
    """Makes the plan and prints the report."""
    _check_sizes(values)
    schema, devices, fields_of_fleet, lines_of_fleet = _fleet(values)
    setting = _setting(values, schema, devices)
    time_limit, own = _time_limit(values), _own(values)
    mechanisms = None if values.mechanisms is None else tuple(values.mechanisms)
    command_line.check_choice(mechanisms != (), "--mechanisms must name at least one mechanism.")
    if values.output is not None:
        command_line.check_file(values.output, "output", is_directory=True)
        checkpoints.check_destination(values.output, values.overwrite)
    start = time.monotonic()
    cache = command_line.cache_directory(values.cache_dir, planner.FOLDER, _say)
    plan = planning.make(
        setting,
        cache_directory=cache,
        progress=lambda name, note: _say(
            f"{name}: {note}, {time.monotonic() - start:.0f} s so far"
        ),
        processes=_processes(),
        mechanisms=mechanisms,
        own=own,
        time_limit=time_limit,
    )
    for name, reason in plan.skipped.items():
        _say(f"skipped {name}: it {reason}")
    cached = ""
    if cache is not None and os.access(cache, os.W_OK):
        cached = (
            f"; matrices and noise multipliers are cached in {cache}: another plan for this number "
            "of rounds takes seconds"
        )
    compared = counted(len(plan.candidates), "mechanism")
    _say(f"compared {compared} in {time.monotonic() - start:.0f} s{cached}.")
    chosen = plan.recommended
    if values.output is not None:
        described = setting.trained.to_dict()
        chosen.mechanism.save(values.output, workload=described, overwrite=values.overwrite)
    directory = values.output or f"plan_{chosen.name.replace(' ', '_')}"
    given = [values[name].serialize() for name in values if values[name].present]
    again = shlex.join(["mf-plan", *(each for each in given if not _OF_THIS_CALL.match(each))])
    searches = _searches(values, setting.clients_per_round)
    of_devices = _flags_of_devices(devices, fields_of_fleet)
    steps = _steps(plan, directory, None if values.output else again, searches, of_devices)
    in_every_round = None
    if setting.noise_multiplier is not None:
        in_every_round = _epsilon_in_every_round(setting, chosen)
    candidates = [_fields(each, setting, each is chosen) for each in plan.candidates]
    fields: dict[str, object] = {
        "recommended": chosen.kind,
        "recommended_num_bands": chosen.num_bands,
        "reason": plan.reason,
        "target_epsilon": setting.epsilon,
        "target_rho": setting.rho,
        "noise_multiplier": setting.noise_multiplier,
        "epsilon_in_every_round": in_every_round,
        "delta": setting.delta,
        "model_size": setting.model_size,
        "clients_seconds_per_round": _seconds_of_clients(setting),
        "participation": None if setting.participation is None else str(setting.participation),
        "sampling": setting.sampling,
        "fleet": fields_of_fleet,
        "error": setting.error if isinstance(setting.error, str) else values.error,
        "workload": _workload_flags(setting),
        "may_extend_to": setting.may_extend_to,
        "clip_norm_share": values.clip_norm_share,
        "rate_share": values.rate_share,
        "candidates": candidates,
        "infeasible": [{"mechanism": k, "reason": v} for k, v in plan.infeasible.items()],
        "skipped": [{"mechanism": k, "reason": v} for k, v in plan.skipped.items()],
        "time_limit": time_limit,
        "commands": [step.alone() for step in steps],
        "steps": [dataclasses.asdict(step) for step in steps],
        "output": values.output,
    }
    text = _text(plan, candidates, not values["model_size"].present, steps)
    if lines_of_fleet:
        text = "\n".join([text, "", "The fleet:", *(f"  {line}" for line in lines_of_fleet)])
    command_line.print_result(values, fields, text)


def _fleet(
    values: flags.FlagValues,
) -> tuple[MinSeparation | None, Fleet | None, dict[str, object] | None, list[str]]:
    """Returns the schema of a plan for devices with timers, and the fleet of devices.

    Without flags of a fleet, a tenth of the devices drops out. If simulated fleets survive no
    separation then, the schema is the one for which the population is just large enough without
    dropouts, and a line says so.

    Args:
      values: The parsed flags of a plan.

    Returns:
      The schema; the fleet, or None if it is too large to simulate; the fields of a JSON object,
      with margins and the compared pairs; and lines of text. If clients are drawn, the first three
      are None, and there are no lines.

    Raises:
      CommandError: If the fleet that flags describe survives no schema, or not the schema of flags.
    """
    given = {
        name: values[name].value for name in _FLAGS_OF_FLEETS if values[name].value is not None
    }
    if values.sampling is not None:
        command_line.check_choice(
            not given,
            f"--{next(iter(given), '')} is only for devices with timers: leave out --sampling.",
        )
        return None, None, None, []
    most = values.max_participations
    # There have to be enough devices for an extension as well.
    rounds = max(values.num_rounds, values.may_extend_to or 0)
    full = min(values.num_rounds, values.population // values.clients_per_round)
    typed = MinSeparation(full if values.separation is None else values.separation, most)
    devices, starves = None, ""
    pairs: tuple[fleets.Pair, ...] = ()
    try:
        devices = Fleet(values.population, values.clients_per_round, **given)
        if values.separation is None or not devices.survives(rounds, typed):
            pairs = devices.choose(
                values.num_rounds,
                max_participations=most,
                may_extend_to=values.may_extend_to,
            )
    except ValueError as error:
        starves = str(error)
    if devices is not None and pairs and values.separation is not None:
        best = pairs[0].participation
        starves = (
            f"with --separation={values.separation}, simulated fleets with "
            f"{100 * devices.dropout:g} % dropouts run out of devices; they survive {best}."
        )
    command_line.check_choice(not starves or not given, starves)
    chosen = pairs[0].participation if pairs and values.separation is None else typed
    fields: dict[str, object] = {
        "separation": chosen.separation,
        "max_participations": chosen.max_participations,
        "is_assumed": not given,
        "starves": starves or None,
        "pairs": [
            {
                "separation": each.participation.separation,
                "max_participations": each.participation.max_participations,
                "noise": each.noise / pairs[0].noise,
            }
            for each in pairs
        ],
    }
    if devices is None or starves:
        return chosen, devices, fields, [f"WARNING: {starves}"]
    margins = devices.margins(rounds, chosen)
    fields |= {
        "over_selection": devices.selected_per_upload,
        "dropout": devices.dropout,
        "margins": dataclasses.asdict(margins),
    }
    return chosen, devices, fields, _lines_of_fleet(devices, not given, margins, pairs)


def _lines_of_fleet(
    devices: Fleet, is_assumed: bool, margins: fleets.Margins, pairs: Sequence[fleets.Pair]
) -> list[str]:
    lines = [
        f"{100 * devices.dropout:g} % dropouts{' (--dropout)' if is_assumed else ''}, "
        f"{devices.selected} devices selected a round (--over_selection="
        f"{devices.selected_per_upload:g}); 95 % of simulated fleets reach the last round",
        f"in simulations it survives down to {margins.population} devices, or up to "
        f"{100 * margins.dropout:.3g} % dropouts",
    ]
    if margins.longest_minutes is not None:
        # Rounding to nearest could print a number that is too long.
        longest, pause = (
            math.floor(10.0 * (each or 0.0)) / 10.0
            for each in (margins.longest_minutes, margins.pause_hours)
        )
        lines.append(
            f"the separation is smaller if rounds take more than {longest:g} minutes, or pause for "
            f"more than {pause:g} hours; if they take less than {margins.shortest_minutes:.2g} "
            "minutes, half of the attempts find too few devices"
        )
    printed = [(each.participation, each.noise / pairs[0].noise) for each in pairs[:_MOST_PAIRS]]
    most_noise = max((noise for _, noise in printed), default=1.0)
    for schema, noise in printed:
        most = schema.max_participations
        limit = "no limit" if most is None else f"at most {counted(most, 'participation')}"
        bar = "#" * round(_WIDTH_OF_NOISE * noise / most_noise)
        lines.append(f"  {schema.separation:>6} apart, {limit}: {noise:.3f} of the noise {bar}")
    return lines


def _flags_of_devices(devices: Fleet | None, fields: dict[str, object] | None) -> list[str]:
    """The flags with which a run simulates the described fleet; none for an assumed fleet."""
    if devices is None or fields is None or fields["is_assumed"]:
        return []
    words = [f"--dropout_probability={devices.dropout!r}"]
    words.append(f"--over_selection={devices.selected_per_upload!r}")
    if devices.returning < 1.0:
        words.append(f"--availability=independent --available_probability={devices.returning!r}")
    return words


def _own(values: flags.FlagValues) -> dict[str, Factorization]:
    """The factorizations of --checkpoint by their directories."""
    found = {}
    with command_line.naming("checkpoint"):
        for directory in map(command_line.resolved_path, values.checkpoint or ()):
            found[directory] = checkpoints.load(directory)
            command_line.check_choice(
                found[directory].num_rounds == values.num_rounds,
                f"--checkpoint={directory} is for {found[directory].num_rounds} rounds, and "
                f"--num_rounds={values.num_rounds}.",
            )
    return found


def _time_limit(values: flags.FlagValues) -> float | None:
    """The time limit in seconds, or None for no limit."""
    if values.time_limit is None:
        return _TIME_LIMIT if values.sampling is None else None
    return numbers.non_negative_number(values.time_limit, "--time_limit") or None


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      argv: The command line with the program's name first; that of the process by default.
    """
    return command_line.run(__doc__ or "", _define_flags, _main, argv)


def _processes() -> int:
    """The number of worker processes: one for each core that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _check_sizes(values: flags.FlagValues) -> None:
    for name in ("num_rounds", "population", "clients_per_round", "model_size"):
        numbers.positive_integer(getattr(values, name), f"--{name}")
    command_line.check_choice(
        values.clients_per_round <= values.population,
        f"--clients_per_round={values.clients_per_round} is more than "
        f"--population={values.population}.",
    )


def _setting(
    values: flags.FlagValues, schema: MinSeparation | None, devices: Fleet | None
) -> Setting:
    epsilon, rho, noise = _epsilon(values), values.target_rho, values.noise_multiplier
    if shares := _shares(values):
        whole = mechanism_flags.noise_multiplier(values)
        assert whole is not None
        rho, noise = None, clip_search.noise_of_run(whole, sum(shares.values()))
        epsilon = guarantees.of_noise(noise, values.delta).epsilon
    command_line.check_choice(
        schema is not None or (values.separation is None and values.max_participations is None),
        "--separation and --max_participations are only for devices with timers: with --sampling, "
        "leave them out, and the plan chooses the separation.",
    )
    described = mechanism_flags.workload_description(values)
    workload = (
        None if described is None else workloads.Workload.described(described, values.num_rounds)
    )
    memory_limit = values.noise_memory_gb
    if memory_limit is not None:
        memory_limit = numbers.non_negative_number(1e9 * memory_limit, "--noise_memory_gb")
    return Setting(
        num_rounds=values.num_rounds,
        population=values.population,
        clients_per_round=values.clients_per_round,
        participation=schema,
        fleet=devices,
        sampling=values.sampling,
        epsilon=epsilon,
        rho=rho,
        noise_multiplier=noise,
        delta=values.delta,
        model_size=values.model_size,
        noise_memory=memory_limit,
        error=mechanism_flags.round_error(values.error),
        weights_file=values.error,
        workload=workload,
        rates_file=values.learning_rates or "",
        may_extend_to=values.may_extend_to,
    )


def _shares(values: flags.FlagValues) -> dict[str, float]:
    """The share of the privacy budget of each search before the run, by its flag."""
    names = ("clip_norm_share", "rate_share")
    found = {name: values[name].value for name in names if values[name].value is not None}
    for name, share in found.items():
        command_line.check_choice(
            values.sampling is None and share > 0.0 and sum(found.values()) < 1.0,
            f"--{name} must be between 0 and 1, is only for devices with timers, and both shares "
            "together must be below 1.",
        )
    return found


def _searches(values: flags.FlagValues, clients: int) -> dict[str, str]:
    """The lines of Python of each search before the run, with the note for them."""
    shares, whole = _shares(values), mechanism_flags.noise_multiplier(values)
    found = {}
    if (share := shares.get("clip_norm_share")) is not None:
        found[
            f"search = mfa.clip_search.of_run(mechanism, {whole!r}, {share!r})\n"
            f"found = mfa.clip_search.find(search, norms_of, clients_per_round={clients})\n"
        ] = _NOTE_ON_NORMS
    norm = "found.clip_norm" if found else repr(_CLIP_NORM)
    if (share := shares.get("rate_share")) is not None:
        found[
            f"short = mfa.rate_search.of_run(mechanism, {whole!r}, {len(_RATES)}, {share!r})\n"
            f"best = mfa.rate_search.find(short, {_RATES}, updates_of, step, model, "
            f"clip_norm={norm}, clients_per_round={clients})\n"
        ] = _NOTE_ON_RATES
    return found


def _epsilon(values: flags.FlagValues) -> float:
    """The target epsilon, or the epsilon of the target rho or of the noise multiplier."""
    if values.sampling is not None:
        command_line.check_choice(
            values.target_rho is None and values.noise_multiplier is None,
            "--sampling takes only --target_epsilon: it does not amplify rho, and with one noise "
            "multiplier every mechanism has an epsilon of its own, which mf-report prints.",
        )
        return numbers.positive_number(values.target_epsilon, "--target_epsilon")
    multiplier = mechanism_flags.noise_multiplier(values)
    if values.target_epsilon is not None:
        return float(values.target_epsilon)
    assert multiplier is not None
    epsilon = guarantees.of_noise(multiplier, values.delta).epsilon
    flag = "target_rho" if values.noise_multiplier is None else "noise_multiplier"
    command_line.check_choice(
        0.0 < epsilon < math.inf,
        f"--{flag}={values[flag].value:g} has an epsilon of {epsilon:g} at "
        f"--delta={values.delta:g}, which is not a useful plan: use "
        f"{'less' if multiplier else 'some'} noise.",
    )
    return epsilon


def _say(text: str) -> None:
    """Prints a line about progress on standard error."""
    print(f"mf-plan: {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A printed step: a shell command, or lines of Python.

    Attributes:
      command: The shell command or the lines of Python.
      language: ``shell`` or ``python``.
      is_template: Whether the user has to fill something in before it runs.
      notes: Sentences for its user: the values to fill in, and the conditions of the guarantee.
      sampler: The Python expression of the sampler that has to draw the batches; None if clients
        are not sampled.
    """

    command: str
    language: str = "shell"
    is_template: bool = False
    notes: tuple[str, ...] = ()
    sampler: str | None = None

    def lines(self) -> list[str]:
        """Returns the notes as comments, and then the command."""
        comments = textwrap.wrap(
            " ".join(self.notes), _LINE_LENGTH, initial_indent="# ", subsequent_indent="# "
        )
        return [*comments, *self.command.splitlines()]

    def alone(self) -> str:
        """Returns the command alone; Python code keeps its notes, with the conditions."""
        is_python = self.language == "python"
        return f"{self.command}  # {' '.join(self.notes)}" if is_python else self.command


def _steps(
    plan: Plan,
    directory: str,
    again: str | None,
    searches: Mapping[str, str],
    of_devices: Sequence[str] = (),
) -> list[_Step]:
    """The shell commands and the Python code that run the recommended candidate.

    Privacy parameters are printed with all digits, because rounded ones would give another
    guarantee.

    Args:
      plan: The plan.
      directory: The directory of the candidate's checkpoint.
      again: The command that makes this plan, without its output flag; None if the checkpoint
        exists already.
      searches: The notes of searches before the run, by their lines of Python.
      of_devices: Flags of a simulated run that describe its devices.
    """
    setting, chosen = plan.setting, plan.recommended
    mechanism, clients = chosen.mechanism, setting.clients_per_round
    scheme, sampler = mechanism.sampling, None
    if scheme is not None:
        # A later plan without a time limit may choose and save another scheme.
        drawn = "mechanism.sampling" if plan.skipped else f"mfa.participation.{scheme!r}"
        sampler = f"{drawn}.{_SAMPLER}"
    condition = (
        f"{pair(setting.epsilon, setting.delta, '.6g')}-DP only if "
        f"{mechanism.participation.condition(sampler)}"
    )
    made, steps = f"mfa.load({directory!r})", list[_Step]()
    if again is not None and chosen.variant.factorization is not None:
        own = chosen.variant.options["checkpoint"]
        made = (
            f"mfa.Mechanism(mfa.checkpoints.load({own!r}), "
            f"mfa.participation.{mechanism.participation!r}, {mechanism.noise_multiplier!r})"
        )
    else:
        steps += [] if again is None else _save(plan, directory, again)
        flags_of_run = mechanism.participation.run_flags()
        if flags_of_run is not None:
            # Flags that follow from the saved Mechanism are left out.
            words = (
                [] if "clients_per_round" in flags_of_run else [f"--clients_per_round={clients}"]
            )
            words += [f"--delta={setting.delta!r}", *of_devices]
            if setting.trained.name != "prefix_sum":
                words.append(f"--server_momentum={setting.trained.momentum!r}")
            steps.append(_train(directory, words, chosen.server_learning_rate))
    notes = (condition, *searches.values())
    notes += (_NOTE_ON_SEARCHES,) if searches else ()
    norm = "found.clip_norm"
    if _NOTE_ON_NORMS not in notes:
        norm, notes = repr(_CLIP_NORM), (*notes, _NOTE_ON_CLIP_NORM)
    lines = "".join([f"mechanism = {made}\n", *searches])
    arguments = f"mechanism, clip_norm={norm}, clients_per_round={clients}"
    lines += f"aggregator = mfa.mf_dp_aggregator({arguments})"
    return [*steps, _Step(lines, "python", notes=notes, sampler=sampler)]


def _save(plan: Plan, directory: str, again: str) -> list[_Step]:
    """The commands that save the recommended mechanism."""
    setting, chosen, quoted = plan.setting, plan.recommended, shlex.quote(directory)
    scheme, variant = chosen.mechanism.sampling, chosen.variant
    if scheme is not None:
        # The certificate is only for this matrix, not for another one with the same options.
        note = "Writes the matrix of the certificate; another matrix does not have its guarantee."
        if scheme.has_groups:
            note = "Writes the mechanism, with the scheme that draws its clients."
        if plan.skipped:
            note = (
                "Without a time limit it may choose another mechanism and scheme; those that it "
                "writes count. With --output= and --time_limit=, it saves those of this plan."
            )
        return [_Step(f"{again} --output={quoted}", notes=(note,))]
    target = f"--target_epsilon={setting.epsilon!r}"
    if setting.rho is not None:
        target = f"--target_rho={setting.rho!r}"
    if setting.noise_multiplier is not None:
        target = f"--noise_multiplier={setting.noise_multiplier!r}"
    target += f" --delta={setting.delta!r} --output={quoted}"
    schema = chosen.mechanism.noise_reference.factorize_flags()
    own = f"{_factorize(variant, setting)} {schema}"
    if variant.base is None:
        return [_Step(f"{own} {target}")]
    base = shlex.quote(f"{directory}_base")
    return [
        _Step(f"{_factorize(variant.base, setting)} {schema} --output={base}"),
        _Step(f"{own} --base_checkpoint={base} {target}"),
    ]


def _train(directory: str, words: Sequence[str], server_learning_rate: float) -> _Step:
    command = f"run-stackoverflow --dataset={_PLACEHOLDER} --checkpoint={shlex.quote(directory)}"
    notes = (
        "A template: put docstrings, stackoverflow or the path of a .sqlite file of your clients "
        f"(make-text-dataset makes one) in place of {_PLACEHOLDER}.",
        "Add --client_learning_rate, --server_learning_rate and --clip_norm once you have tuned "
        "them; for stackoverflow, BandMF App. I suggests "
        f"--server_learning_rate={server_learning_rate:.4g}.",
    )
    return _Step(" ".join([command, *words]), is_template=True, notes=notes)


def _flags_of(variant: Variant, setting: Setting) -> dict[str, object]:
    """The flags of ``mf-factorize`` for a candidate's options, and for the weights' file."""
    return {
        name: setting.weights_file if isinstance(value, tuple) else value
        for name, value in variant.options.items()
    }


def _workload_flags(setting: Setting) -> dict[str, object]:
    """The flags of mf-factorize and mf-plan for the workload."""
    workload = setting.trained
    if workload.name == "prefix_sum":
        return {"workload": workload.name}
    rates = {} if workload.learning_rates is None else {"learning_rates": setting.rates_file}
    return {"workload": workload.name, "momentum": workload.momentum, **rates}


def _factorize(variant: Variant, setting: Setting) -> str:
    named = _workload_flags(setting) if setting.trained.name != "prefix_sum" else {}
    given = (named | _flags_of(variant, setting)).items()
    words = (f" --{name}={shlex.quote(str(value))}" for name, value in given)
    rounds = f"--num_rounds={setting.num_rounds}"
    return f"mf-factorize --mechanism={variant.kind} {rounds}{''.join(words)}"


def _fields(candidate: Candidate, setting: Setting, is_recommended: bool) -> dict[str, object]:
    """The fields of a candidate in the JSON object."""
    mechanism, errors = candidate.mechanism, candidate.errors
    scheme, bound = mechanism.sampling, candidate.lower_bound
    name = candidate.name_with_sampling
    sampler = None if scheme is None else f"mfa.participation.{scheme!r}.{_SAMPLER}"
    return {
        "mechanism": candidate.kind,
        "name": f"{name}, fixed epochs" if mechanism.noise_reference.is_evenly_spaced else name,
        "num_bands": candidate.num_bands,
        "options": _flags_of(candidate.variant, setting),
        "participation": str(mechanism.noise_reference),
        "amplified": scheme is not None,
        "sampling": None if scheme is None else scheme.to_dict(),
        "condition": mechanism.participation.condition(sampler),
        "is_estimate": candidate.is_estimate,
        "rmse": errors.rmse,
        "max_error": errors.max_error,
        "planned_error": candidate.planned_error,
        "noise_multiplier": mechanism.noise_multiplier,
        "effective_rmse": candidate.effective_rmse,
        "max_effective_error": candidate.max_effective_error,
        "effective_error": candidate.effective_error,
        "rmse_over_lower_bound": None if bound is None else errors.rmse / bound.rmse,
        "error_over_lower_bound": candidate.over_lower_bound,
        "memory_gb": candidate.cost.kept_bytes / 1e9,
        "disk_gb": candidate.cost.disk_bytes / 1e9,
        "working_memory_gb": candidate.cost.memory_bytes / 1e9,
        "noise_storage": candidate.cost.storage.value,
        "seconds_per_round": candidate.cost.seconds_per_round,
        "server_learning_rate": candidate.server_learning_rate,
        "extension": _extension(candidate),
        "ranked_error": candidate.ranked_error,
        "recommended": is_recommended,
    }


def _extension(candidate: Candidate) -> dict[str, object] | None:
    """The JSON fields of a candidate after an extension; None if no extension is planned."""
    extended, errors = candidate.extended, candidate.extended_errors
    if extended is None or errors is None:
        return None
    return {
        "num_rounds": extended.num_rounds,
        "epsilon": candidate.extended_epsilon,
        "noise_multiplier": extended.noise_multiplier,
        "rmse": errors.rmse,
        "max_error": errors.max_error,
        "effective_error": candidate.effective_error_extended,
    }


def _seconds_of_clients(setting: Setting) -> float:
    """Processor seconds for clipping and adding a round's updates in ``mfa.Aggregator``."""
    return _SECONDS_PER_CLIPPED_ENTRY * setting.model_size * setting.clients_per_round


def _table(setting: Setting, candidates: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """The printed table: the names of its columns, and a row for each candidate."""
    words = setting.words
    errors = {words.column: "effective_error", "effective RMSE": "effective_rmse"}
    columns = {name: (field, ".4g") for name, field in errors.items()}
    columns |= {
        "worst round": ("max_effective_error", ".4g"),
        words.planned: ("planned_error", ".5g"),
        "noise mult.": ("noise_multiplier", ".5g"),
        "over bound": ("error_over_lower_bound", ".3f"),
        "noise GB": ("memory_gb", ".3g"),
        "disk GB": ("disk_gb", ".3g"),
        "s/round": ("seconds_per_round", ".2g"),
    }
    rounds = setting.may_extend_to
    extended = [] if rounds is None else [f"epsilon of {rounds}", f"{words.column} of {rounds}"]
    rows = [["mechanism", *(["both"] if extended else []), *extended, *columns]]
    for each in candidates:
        row, extension = [str(each["name"])], each["extension"]
        if isinstance(extension, dict):
            row += [f"{each['ranked_error']:.4g}", rounded_up(extension["epsilon"], ".4g")]
            row.append(f"{extension['effective_error']:.4g}")
        for field, form in columns.values():
            value = each[field]
            about = _ABOUT if each["is_estimate"] and field in _ESTIMATED else ""
            if value is None:
                row.append("-")
            elif isinstance(value, float) and field == "noise_multiplier":
                row.append(about + rounded_up(value, ".3g" if about else form))
            else:
                row.append(f"{about}{value:{form}}")
        rows.append(row)
    return rows


def _text(
    plan: Plan,
    candidates: Sequence[Mapping[str, object]],
    assumes_size: bool,
    steps: Sequence[_Step],
) -> str:
    """The text that is printed: the setting, a table of the candidates, and steps to run one."""
    rows = _table(plan.setting, candidates)
    marks = [" ", *("*" if each["recommended"] else " " for each in candidates)]
    marked = [[f"{mark} {row[0]}", *row[1:]] for mark, row in zip(marks, rows, strict=True)]
    estimates = [
        f"Rows with {_ABOUT} are rough estimates, for which no guarantee holds. The noise "
        "multiplier of the",
        "recommended row is certified.",
    ]
    sections = [
        _setting_lines(plan.setting, assumes_size, plan.recommended),
        _aligned(marked),
        [
            "s/round is the time for noise. mfa.Aggregator takes about "
            f"{_seconds_of_clients(plan.setting):.2g} s of one core for the updates of a round; "
            "cores share them."
        ],
        estimates if any(each["is_estimate"] for each in candidates) else [],
        [f"Recommended: {plan.reason}"],
    ]
    limit = "Skipped for lack of time (--time_limit=0 computes and caches them):"
    for title, found in (("Infeasible:", plan.infeasible), (limit, plan.skipped)):
        lines = [f"  {name} {reason}" for name, reason in found.items()]
        sections.append([title, *lines] if lines else [])
    sections.append(["To run it:"])
    sections += [[f"  {line}" for line in step.lines()] for step in steps]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The aligned lines of a table: names on the left, then columns of numbers."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *values in rows:
        cells = (f"{each:>{width}}" for each, width in zip(values, others, strict=True))
        lines.append("  ".join([f"{name:<{first}}", *cells]).rstrip())
    return lines


def _setting_lines(setting: Setting, assumes_size: bool, chosen: Candidate) -> list[str]:
    """The setting of a plan: rounds and clients, the target, and limits of noise."""
    population = setting.population
    who = f"{setting.sampling} sampling from {population} clients"
    if setting.participation is not None:
        who = f"{population} clients with timers: {setting.participation}"
    elif setting.sampling == planning.ANY_SAMPLING:
        who = f"{population} clients that take part in any way"
    asked = "target "
    if setting.noise_multiplier is not None:
        asked = f"noise multiplier {setting.noise_multiplier!r} of every mechanism, which is "
    elif setting.rho is not None:
        asked = f"target rho = {rounded_up(setting.rho, '.6g')} (approximate zCDP), which is "
    model = f"model of {setting.model_size} parameters"
    memory = setting.noise_memory
    kept = "any amount of noise" if memory is None else f"at most {memory / 1e9:g} GB of noise"
    lines = [
        f"{counted(setting.num_rounds, 'round')} of "
        f"{counted(setting.clients_per_round, 'client')}, {who}",
        f"{asked}{pair(setting.epsilon, setting.delta, '.6g')}-DP for every "
        f"client (zero-out){'' if assumes_size else f'; {model}'}",
        *_conditions_of_epsilon(setting, chosen),
        f"{kept} between rounds (--noise_memory_gb)",
    ]
    if assumes_size:
        lines.append(f"GB and s/round are for a {model} (--model_size)")
    if setting.error != "mean":
        file = setting.error if isinstance(setting.error, str) else setting.weights_file
        compared = setting.words.compared
        lines.append(f"made for and compared by {compared} (--error={shlex.quote(file)})")
    if setting.may_extend_to is not None:
        lines.append(
            f"may be extended to {setting.may_extend_to} rounds with the same noise: ranked by the "
            "geometric mean (both) of the errors at both horizons, each at the target"
        )
    named = _workload_flags(setting)
    if "momentum" in named:
        rates = f"the learning rates of {named['learning_rates']}" if len(named) > 2 else "rate 1"
        lines.append(f"errors are of SGD with momentum {named['momentum']:g} and {rates}")
    return lines


def _conditions_of_epsilon(setting: Setting, chosen: Candidate) -> list[str]:
    """The conditions of the printed epsilon of a noise multiplier; none if there is a target."""
    timers = setting.participation
    if setting.noise_multiplier is None or timers is None:
        return []
    if timers.most_participations(setting.num_rounds) == setting.num_rounds:
        return ["this epsilon holds even for a client in every round: no timer is needed"]
    stated = "no finite epsilon, because there is too little noise"
    epsilon = _epsilon_in_every_round(setting, chosen)
    if math.isfinite(epsilon):
        stated = f"epsilon {rounded_up(epsilon, '.6g')}"
    return [
        f"this epsilon holds only if timers enforce {timers} on every device",
        f"without timers, a client in every round has {stated} ({chosen.name})",
    ]


def _epsilon_in_every_round(setting: Setting, candidate: Candidate) -> float:
    """An upper bound on the epsilon of a client that takes part in every round.

    It is infinite if there is too little noise to state an epsilon.
    """
    rounds = setting.num_rounds
    in_all = ObservedParticipation(rounds, None, 1, rounds)
    return in_all.worst_case(candidate.mechanism.guarantee(setting.delta)).epsilon


if __name__ == "__main__":
    sys.exit(run())
