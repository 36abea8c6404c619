r"""simulate-participation: how often devices take part, and which guarantee follows from it.

Runs the rounds of a population of devices without any training, and reports what participation
came of it. Needs no TensorFlow.

Examples:
  simulate-participation --population=1000000 --clients_per_round=1000 --num_rounds=2000 \
    --separation=300 --availability=diurnal --over_selection=1.3 --dropout_probability=0.1
  simulate-participation --population=1000000 --clients_per_round=1000 --num_rounds=2000 \
    --timer=wall_clock --timer_hours=72 --availability=diurnal --checkpoint=blt_4 --delta=1e-8
"""

import dataclasses
import datetime
import math
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import flags

from mf_aggregators import Mechanism, atomic_files, checkpoints, inputs
from mf_aggregators.commands import command_line, mechanism_flags
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel.claim import ONLY_IF
from mf_aggregators.kernel.ledger import ObservedParticipation, TimedRounds
from mf_aggregators.kernel.numbers import counted, stated_pair
from mf_aggregators.participation import MinSeparation, Participation
from mf_aggregators.privacy import guarantees
from mf_aggregators.progress_bars import ProgressBar
from simulations import flag_fields
from simulations.devices import device_behaviour
from simulations.devices.device_populations import (
    DevicePopulation,
    DeviceRound,
    TooFewEligibleClientsError,
)
from simulations.flag_fields import flag
from simulations.runs.run_directory import ParticipationLedger

_HOUR, _DAY = 3600.0, 24 * 3600.0
_NUM_ROUNDS = 2000
# The most devices for which a ledger is written, because it names every client.
_MOST_IN_LEDGER = 1_000_000
# The date of the first round in --write_round_times: at midnight UTC, as in the models of
# availability.
_FIRST_ROUND = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
# A caveat for the statement if timers count time and not rounds.
_ON_WALL_CLOCKS = (
    "Timers by the wall clock do not enforce a separation: with other devices, or slower rounds, "
    "it may be smaller."
)
# A low estimate of the memory for each participation, in the cohorts and in their summary.
_BYTES_PER_PARTICIPATION = 40


def summarise(
    cohorts: list[np.ndarray], schema: Participation | None = None
) -> tuple[ObservedParticipation, dict[str, object]]:
    """Summarises how often and how far apart devices took part in rounds.

    Time and memory grow with the participations, not with the population.

    Args:
      cohorts: For each round the (clients,) int64 devices that took part, each once.
      schema: The planned schema; None without a plan.

    Returns:
      The separations and the number of participations; and fields of the result: with them, the
      first percentile and the median of the rounds between two adjacent participations of one
      device, None if no device took part twice; the mean number of participations over the devices
      that took part; and whether the schema was kept, and how many devices took part in rounds that
      it forbids, None without one.
    """
    clients = np.concatenate([np.empty(0, np.int64), *cohorts])
    rounds = np.repeat(np.arange(len(cohorts)), [len(cohort) for cohort in cohorts])
    # A stable sort by device keeps each device's rounds increasing.
    order = np.argsort(clients, kind="stable")
    clients, rounds = clients[order], rounds[order]
    same = clients[1:] == clients[:-1]
    separations = (rounds[1:] - rounds[:-1])[same]
    first = np.flatnonzero(np.concatenate([[True], ~same])) if len(clients) else clients
    counts = np.diff(np.append(first, len(clients)))
    twice = len(separations) > 0
    observed = ObservedParticipation(
        num_rounds=len(cohorts),
        num_clients=len(first),
        separation=int(np.min(separations)) if twice else None,
        max_participations=int(np.max(counts, initial=0)),
        largest_separation=int(np.max(separations)) if twice else None,
    )
    keeps_plan, num_outside = None, None
    if schema is not None:
        keeps_plan = guarantees.keeps_plan(schema, observed)
        returned = counts[counts > 1]
        num_outside = guarantees.num_outside_schema(schema.as_schema(), returned, separations)
    return observed, {
        "num_clients": observed.num_clients,
        "realised_separation": observed.separation,
        "separation_percentile_1": float(np.percentile(separations, 1)) if twice else None,
        "separation_median": float(np.median(separations)) if twice else None,
        "most_participations": observed.max_participations,
        "participations_mean": len(clients) / max(1, len(first)),
        "keeps_plan": keeps_plan,
        "clients_beyond_plan": num_outside,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """Flags of simulate-participation, except those on devices' behaviour and on noise.

    Attributes:
      population: The number of devices. Required.
      clients_per_round: The number of uploads that a round needs, by which its sum is divided.
        Required.
      num_rounds: The number of rounds. Default: those of --checkpoint, or 2000.
      separation: The separation b: two participations i, j of one device satisfy |i - j| >= b.
        Timers by rounds enforce it, and the noise is planned for it. Default: that of --checkpoint.
      max_participations: The most participations of a device. Default: as many as fit into the
        rounds.
      seed: The seed of the simulation.
      seeds: Without a planned separation: the number of simulations from which one is suggested,
        with --seed and the seeds after it.
      margin: The share by which a suggested separation is below the smallest separation of all
        seeds, and the suggested participations are above the most.
      checkpoint: A checkpoint directory, which adds the guarantee that follows. A Mechanism, as
        mf-plan and mf-factorize save it, also has the noise; flags that contradict it are refused.
      output: A .npz file to write, the ledger of all participations, for at most 1,000,000 devices.
      write_round_times: A text file to write, with the start and the end of each round, which
        mf-report --round_times reads. The first round starts at 2026-01-01T00:00:00+00:00.

    Raises:
      ValueError: If a number is out of its range.
    """

    population: int = flag("Participation", is_positive=True)
    clients_per_round: int = flag("Participation", is_positive=True)
    num_rounds: int | None = flag("Participation", None, is_positive=True)
    separation: int | None = flag("Participation", None)
    max_participations: int | None = flag("Participation", None)
    seed: int = flag("Participation", 0, least=0)
    seeds: int = flag("Participation", 5, is_positive=True, most=100)
    margin: float = flag("Participation", 0.1, least=0.0, below=1.0)
    checkpoint: str | None = flag("Mechanism", None, is_path=True)
    output: str | None = flag("Output", None, is_path=True)
    write_round_times: str | None = flag("Output", None, is_path=True)

    def __post_init__(self) -> None:
        flag_fields.check(self)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of simulate-participation."""
    flag_fields.define(values, Simulation, ["Participation"])
    device_behaviour.define_flags(values)
    flag_fields.define(values, Simulation, ["Mechanism"])
    mechanism_flags.define(values, "privacy")
    flag_fields.define(values, Simulation, ["Output"])
    group = FlagGroup(values, "Output")
    group.overwrite("--output and --write_round_times")
    for name in ("population", "clients_per_round"):
        group.require(name)


@inputs.limited_memory()
def main(values: flags.FlagValues) -> int | None:
    """Simulates the rounds, prints the report and returns the exit status."""
    start = time.monotonic()
    _check_flags(values)
    factorization, schema, multiplier = _planned(values)
    command_line.check_choice(
        multiplier is None or values.delta < 1.0 / values.population,
        f"--delta={values.delta:g} is not below 1 / {values.population}: a mechanism that "
        "publishes all data of one device would satisfy it. Use a smaller one.",
    )
    for name in ("noise_multiplier", "target_epsilon", "target_rho"):
        command_line.check_choice(
            schema is not None or values[name].value is None,
            f"--{name} needs a plan: give --separation or a --checkpoint as well.",
        )
    for name in ("seeds", "margin"):
        command_line.check_choice(
            schema is None or not values[name].present,
            f"--{name} is for suggestions, and there is a plan already: leave out one of them.",
        )
    command_line.check_choice(
        factorization is None or multiplier is not None,
        "--checkpoint has no noise: give --noise_multiplier, --target_epsilon or --target_rho.",
    )
    num_rounds = _num_rounds(values, factorization)
    population = _population(values, schema, values.seed)
    device_rounds, stopped = _run(population, num_rounds)
    cohorts = [device_round.cohort for device_round in device_rounds]
    observed, statistics = summarise(cohorts, schema)
    fields = {
        "population": values.population,
        "clients_per_round": values.clients_per_round,
        "rounds": len(device_rounds),
        "stopped": stopped,
        "participation": None if schema is None else str(schema),
        **statistics,
        **_device_fields(device_rounds, population.seconds),
        "broken_timers": len(population.broken),
        **_privacy_fields(factorization, schema, observed, multiplier, values.delta),
    }
    if schema is None:
        fields |= _suggestion(values, num_rounds, device_rounds)
    if values.output is not None:
        names = tuple(map(str, range(values.population)))
        ParticipationLedger(names, tuple(cohorts)).save(values.output)
        fields["output"] = values.output
    if values.write_round_times is not None:
        _write_round_times(device_rounds, 60.0 * values.round_minutes, values.write_round_times)
        fields["write_round_times"] = values.write_round_times
    fields["seconds"] = time.monotonic() - start
    # The rule is left out of the table, because it is a sentence of the statement below it.
    shown = {name for name, value in fields.items() if not isinstance(value, list)} - {"rule"}
    table = command_line.table([each for each in fields.items() if each[0] in shown])
    statement = _statement(fields, values.timer == "wall_clock")
    command_line.print_result(values, fields, f"{table}\n\n{statement}")
    if stopped is not None:
        print(f"simulate-participation: stopped: {stopped}", file=sys.stderr)
        return command_line.BAD_INPUT
    return None


def _check_flags(values: flags.FlagValues) -> None:
    Simulation(**{name: values[name].value for name in flag_fields.fields_of(Simulation)})
    command_line.check_choice(
        values.output is None or values.population <= _MOST_IN_LEDGER,
        f"with --output, --population must be at most {_MOST_IN_LEDGER}, because a ledger names "
        "all clients.",
    )
    names = ("output", "write_round_times")
    written = {name: path for name in names if (path := values[name].value) is not None}
    for name, path in written.items():
        command_line.check_output(path, name, values.overwrite)
    trace = [] if values.trace is None else [values.trace]
    command_line.check_distinct({name: [path] for name, path in written.items()}, {"trace": trace})


def _write_round_times(device_rounds: list[DeviceRound], round_seconds: float, path: str) -> None:
    """Writes the start and the end of each round's last attempt, which succeeded, to a file."""
    lines = ["round,start,end"]
    try:
        for each in device_rounds:
            start = _FIRST_ROUND + datetime.timedelta(seconds=each.start_seconds)
            end = start + datetime.timedelta(seconds=round_seconds)
            lines.append(f"{each.round_index},{start.isoformat()},{end.isoformat()}")
    except OverflowError:
        raise command_line.CommandError(
            "--write_round_times: the rounds end after the last possible date: use fewer "
            "--round_minutes."
        ) from None
    with command_line.naming("write_round_times"):
        atomic_files.write(path, "\n".join([*lines, ""]))


def _num_rounds(values: flags.FlagValues, factorization: Factorization | None) -> int:
    """Returns the number of rounds, after a check that noise and memory suffice for it."""
    most = _NUM_ROUNDS if factorization is None else factorization.num_rounds
    num_rounds = most if values.num_rounds is None else values.num_rounds
    command_line.check_choice(
        factorization is None or num_rounds <= most,
        f"--num_rounds={num_rounds} is more than the checkpoint has noise for: use at most {most}.",
    )
    inputs.check_memory(
        _BYTES_PER_PARTICIPATION * num_rounds * values.clients_per_round,
        f"the simulation of {values.clients_per_round} devices in each of {num_rounds} rounds",
        "use fewer rounds or fewer clients per round",
    )
    return num_rounds


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      argv: The command line with the program's name first; that of the process by default.
    """
    return command_line.run(__doc__ or "", define_flags, main, argv)


def _population(
    values: flags.FlagValues, schema: Participation | None, seed: int
) -> DevicePopulation:
    return DevicePopulation(
        values.population,
        # If no schema is planned, devices may take part again in the next round.
        MinSeparation(1) if schema is None else schema,
        values.clients_per_round,
        device_behaviour.of_flags(values),
        seed,
    )


def _suggestion(
    values: flags.FlagValues, num_rounds: int, first: list[DeviceRound]
) -> dict[str, object]:
    """Suggests a participation schema for a plan, from simulations with several seeds."""
    simulated = [first]
    for seed in range(values.seed + 1, values.seed + values.seeds):
        try:
            device_rounds, _ = _run(_population(values, None, seed), num_rounds, f"seed {seed}")
        except TooFewEligibleClientsError:
            # This seed's first round found too few devices: the simulation says nothing about
            # separations.
            continue
        simulated.append(device_rounds)
    found = [summarise([each.cohort for each in rounds])[0] for rounds in simulated]
    # If no device took part twice, the separation is taken as the number of rounds.
    separations = [each.separation or each.num_rounds for each in found]
    # Simulations that ended early are left out: their numbers of participations are too small.
    counts = [each.max_participations for each in found if each.num_rounds == num_rounds]
    shown = min(_separation_of_times(values, rounds) for rounds in simulated)
    separation, most = suggested_schema(separations, counts, num_rounds, values.margin, shown)
    spread, share = np.ptp(separations), inputs.in_full(values.margin, 100)
    return {
        "rounds_of_seeds": [each.num_rounds for each in found],
        "separations_of_seeds": [each.separation for each in found],
        "participations_of_seeds": [each.max_participations for each in found],
        "suggested_separation": separation,
        "suggested_max_participations": most,
        "rule": (
            f"--separation={separation} is the smallest separation, {min(separations)}, less the "
            f"larger of {share} % and the {spread} by which simulations differ, limited to 1 to "
            f"{shown}, the separation that times of rounds show; --max_participations={most} is "
            f"the most participations in simulations of all rounds and {share} % more, rounded up, "
            "and at most as many as fit."
        ),
    }


def _separation_of_times(values: flags.FlagValues, rounds: list[DeviceRound]) -> int:
    """Returns the separation that round times and timers prove for any device."""
    starts = np.array([each.start_seconds for each in rounds])
    try:
        times = TimedRounds(starts, starts + 60.0 * values.round_minutes, values.timer_hours)
    except ValueError:
        # The timer may be shorter than a round: a device may be in one round twice.
        return 1
    return times.participation().separation or len(rounds)


def suggested_schema(
    separations: Sequence[int], counts: Sequence[int], num_rounds: int, margin: float, shown: int
) -> tuple[int, int]:
    """Returns the separation and the most participations that a plan may rely on.

    Args:
      separations: The smallest separation of each simulation, in rounds, at least 1.
      counts: The most participations of a device in each simulation of all rounds.
      num_rounds: The rounds of the plan.
      margin: At least 0 and below 1.
      shown: The separation that times of rounds show, which is never exceeded.

    Returns:
      The smallest separation, less the larger of two margins: that share of it, and by how much the
      simulations differ; and the most participations, more by that share and no more than fit, or
      as many as fit where no simulation had all rounds. Both are at least 1.
    """
    least = min(separations)
    spread = max(separations) - least
    # Rounding may make (1 - 0.3) * 90 less than 63: a separation that is one round smaller is safe.
    separation = max(1, min(math.floor((1.0 - margin) * least), least - spread, shown))
    fitting = MinSeparation(separation).most_participations(num_rounds)
    if not counts:
        return separation, fitting
    return separation, min(max(1, math.ceil((1.0 + margin) * max(counts))), fitting)


def _planned(
    values: flags.FlagValues,
) -> tuple[Factorization | None, Participation | None, float | None]:
    """Returns factorization, noise schema and noise multiplier of the plan, None if not given."""
    factorization, schema = None, None
    multiplier = mechanism_flags.noise_multiplier(values)
    saved = mechanism_flags.saved_mechanism(values.checkpoint)
    if saved is not None:
        command_line.check_choice(
            saved.sampling is None and not saved.noise_reference.is_evenly_spaced,
            f"--checkpoint={values.checkpoint} is for {saved.participation}, not for timers.",
        )
        factorization, schema = saved.factorization, saved.noise_reference
        multiplier = saved.noise_multiplier if multiplier is None else multiplier
    elif values.checkpoint is not None:
        factorization, description = checkpoints.load_with_description(values.checkpoint)
        schema = Participation.from_dict(inputs.part(description, dict, "errors", "participation"))
    by_rounds = values.timer == "rounds"
    if values.separation is not None:
        schema = MinSeparation(values.separation, values.max_participations)
    elif schema is not None:
        command_line.check_choice(
            values.max_participations is None and not schema.is_evenly_spaced,
            f"the checkpoint is for {schema}: name the schema of the devices by --separation "
            "and --max_participations.",
        )
    else:
        command_line.check_choice(
            not by_rounds, "--timer=rounds needs --separation, or the one of a --checkpoint."
        )
        if values.max_participations is not None:
            schema = MinSeparation(1, values.max_participations)
    if saved is not None:
        assert schema is not None
        assert multiplier is not None
        mechanism_flags.check_is_saved(saved, values.checkpoint, schema, multiplier)
    return factorization, schema, multiplier


def _run(
    population: DevicePopulation, num_rounds: int, name: str = "participation"
) -> tuple[list[DeviceRound], str | None]:
    """Simulates rounds; returns those that took place, and why the run ended early or None."""
    device_rounds: list[DeviceRound] = []
    with ProgressBar(
        total=num_rounds, desc=name, unit="round", file=sys.stderr, mininterval=0.5
    ) as bar:
        while len(device_rounds) < num_rounds:
            try:
                device_rounds.append(population.next_round())
            except TooFewEligibleClientsError as error:
                if not device_rounds:
                    raise
                return device_rounds, str(error)
            bar.update()
    return device_rounds, None


def _device_fields(device_rounds: list[DeviceRound], seconds: float) -> dict[str, object]:
    def of(name: str) -> np.ndarray:
        return np.array([getattr(device_round, name) for device_round in device_rounds])

    hours = (of("start_seconds") % _DAY // _HOUR).astype(np.int64)
    eligible, available, attempts = map(of, ("num_eligible", "num_available", "attempts"))
    by_hour = [available[hours == hour] for hour in range(24)]
    sums = ("selected", "dropped_out", "uploads_lost", "uploads_late", "discarded")
    return {
        "eligible_min": int(np.min(eligible)),
        "eligible_mean": float(np.mean(eligible)),
        "available_min": int(np.min(available)),
        "available_mean": float(np.mean(available)),
        "available_is_exact": bool(np.all(of("available_is_exact"))),
        "available_by_hour": [float(np.mean(each)) if len(each) else None for each in by_hour],
        "attempts": int(np.sum(attempts)),
        "most_attempts": int(np.max(attempts)),
        **{name: int(np.sum(of(f"num_{name}"))) for name in sums},
        "abandoned_attempts": int(np.sum(of("num_abandoned"))),
        "summed_min": min(len(each.cohort) for each in device_rounds),
        "days": seconds / _DAY,
    }


def _privacy_fields(
    factorization: Factorization | None,
    schema: Participation | None,
    observed: ObservedParticipation,
    multiplier: float | None,
    delta: float,
) -> dict[str, object]:
    # There is no guarantee without a schema: the noise multiplier is relative to the sensitivity
    # under a schema.
    if multiplier is None or schema is None:
        return {}
    fields: dict[str, object] = {
        "noise_multiplier": multiplier,
        "delta": delta,
        "planned_epsilon": guarantees.of_noise(multiplier, delta).epsilon,
    }
    if factorization is None:
        return fields
    plan = Mechanism.of_one_schema(factorization, schema, multiplier).guarantee(delta)
    guarantee, worst_case = observed.guarantee(plan), None
    if not guarantees.keeps_plan(schema, observed):
        worst_case = observed.worst_case(plan)
    return {
        **fields,
        "planned_sensitivity": plan.sensitivity,
        "realised_sensitivity": guarantee.sensitivity,
        "realised_sensitivity_is_exact": guarantee.sensitivity.is_exact,
        "realised_noise_multiplier": guarantee.noise_multiplier,
        "realised_epsilon": guarantee.epsilon,
        "widened_epsilon": None if worst_case is None else worst_case.epsilon,
        **guarantees.INDEPENDENCE,
    }


def _statement(fields: dict[str, object], by_wall_clock: bool) -> str:
    """Returns sentences on the consequences of the simulated participation for the guarantee."""

    def pair(name: str) -> str:
        return stated_pair(inputs.part(fields, float, name), inputs.part(fields, float, "delta"))

    if fields["keeps_plan"] is None:
        return (
            f"There is no plan to keep or to break.\nFor a plan: {fields['rule']} {_ON_WALL_CLOCKS}"
        )
    most = inputs.part(fields, int, "most_participations")
    found = "No device took part twice."
    if isinstance(separation := fields["realised_separation"], int):
        found = (
            f"The closest participations of one device were {counted(separation, 'round')} apart, "
            f"and none took part more than {counted(most, 'time')}."
        )
    if by_wall_clock:
        found += f" {_ON_WALL_CLOCKS}"
    if not fields["keeps_plan"]:
        found = (
            f"WARNING: the schema of the plan ({fields['participation']}) is broken, and its "
            f"guarantee need not hold for the {fields['clients_beyond_plan']} of "
            f"{fields['num_clients']} devices that broke it. {found}"
        )
    if "noise_multiplier" not in fields:
        return found
    if not math.isfinite(inputs.part(fields, float, "planned_epsilon")):
        return f"{found}\nWithout noise nothing is guaranteed."
    planned = f"{pair('planned_epsilon')} for each device"
    if fields["keeps_plan"]:
        found += f"\nThe plan was kept: {planned}."
    else:
        found += f"\nThe plan was {planned}; devices that kept the schema still have it."
    if "realised_epsilon" not in fields:
        return found
    found += (
        f" The observed participations give {pair('realised_epsilon')}, by "
        f"the smallest separation and the largest number of participations, {ONLY_IF}."
    )
    if not fields["keeps_plan"]:
        found += (
            " At worst, with the smaller separation and the larger number of participations of "
            f"plan and observation: {pair('widened_epsilon')}, "
            f"{ONLY_IF}."
        )
    return found


if __name__ == "__main__":
    sys.exit(run())
