r"""mf-plan: compares the mechanisms that fit a population and a privacy target.

In place of a target, --noise_multiplier asks which epsilon a noise has.

The participation of clients is enforced by timers on their devices, or decided by a data centre
that draws every batch itself, for which sampling amplifies.

Examples:
  # Participation timers on devices:
  mf-plan --num_rounds=2052 --population=342000 --clients_per_round=1000 --separation=342 \
    --target_epsilon=8 --delta=1e-6 --model_size=4050748
  # A data centre that draws every batch itself:
  mf-plan --num_rounds=2052 --population=342000 --clients_per_round=1000 --sampling=poisson \
    --target_epsilon=8 --delta=1e-6 --model_size=4050748
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from absl import flags

from mf_aggregators import caches, checkpoints, memory, planning
from mf_aggregators.catalogue import MEANING_OF_ERROR
from mf_aggregators.commands import (
    command_line,
    mechanism_flags,
    plan_text,
)
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import counted
from mf_aggregators.participation import MinSeparation, sampling_help, sampling_schemes
from mf_aggregators.planning import Setting, planner, plans
from mf_aggregators.privacy import attackers, guarantees

# Default of --time_limit for devices with timers, so that the command ends within a minute.
_TIME_LIMIT = 50.0
# Flags that a second call which saves the mechanism leaves out.
_OF_THIS_CALL = re.compile(r"--(cache_dir|format|overwrite|report|time_limit)\b")
# Flags that do not go with --sampling, and the flags to use instead.
_FOR_TIMERS = {
    "target_rho": "sampling does not amplify rho. Give --target_epsilon with --sampling.",
    "noise_multiplier": "with sampling, every mechanism has an epsilon of its own. Give "
    "--target_epsilon and --output, and ask mf-report --checkpoint --noise_multiplier.",
}
_REQUIRED = ("num_rounds", "population", "clients_per_round")
# The default number of parameters. Memory and time of the noise depend on it; errors and epsilons
# do not.
_MODEL_SIZE = 1_000_000


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-plan."""
    group = FlagGroup(values, "Training")
    group.integer("num_rounds", "The rounds n of the run. Required.")
    group.integer("population", "The number m of clients, or of examples. Required.")
    group.integer(
        "clients_per_round", "The number B of clients in a round, the batch size. Required."
    )
    group.integer(
        "model_size",
        "The number d of parameters of the model, for memory, disk and time. No epsilon depends on "
        "it.",
        _MODEL_SIZE,
    )
    mechanism_flags.define_privacy(values)
    group = FlagGroup(values, "Participation")
    group.integer(
        "separation",
        "The separation b, which timers enforce: two participations i, j of one device satisfy "
        "|i - j| >= b. Default: the largest that the population can fill, population // "
        "clients_per_round, but at most num_rounds.",
    )
    group.integer(
        "max_participations",
        "The most participations k of one device. Default: as many as fit.",
    )
    group.choice(
        "sampling",
        (*sampling_schemes(), planning.ANY_SAMPLING),
        f"How clients are drawn. {sampling_help()} {planning.ANY_SAMPLING} compares timers alone "
        "and all but fixed_size and shuffling. Without it, devices decide when they take part, and "
        "nothing is amplified.",
    )
    group = FlagGroup(values, "Noise")
    group.number(
        "noise_memory_gb",
        "Gigabytes of noise that a mechanism may have to keep between rounds, for all parameters; "
        "blocks that are made ahead on disk come on top of it. Default: no limit.",
    )
    group.number(
        "noise_disk_gb",
        "Gigabytes that the files of noise may take, on the machine of TFF's worker. Mechanisms "
        "that need more are infeasible.",
        100.0,
    )
    group = FlagGroup(values, "Mechanism")
    group.words(
        "mechanisms",
        "The mechanisms to compare, with commas between them. Default: all.",
    )
    group.words(
        "checkpoint",
        "Checkpoint directories, with commas between them, whose matrices are compared with the "
        "others: of factorizations.from_matrix(C) for instance.",
    )
    group.path(
        "error",
        f"{MEANING_OF_ERROR} Mechanisms are compared by it, and those that can be made for it are.",
        "mean",
    )
    group.number(
        "time_limit",
        "Seconds after which no mechanism is computed any more that an earlier plan has not "
        "cached: those that are not done are skipped and named, and what is recommended is the "
        "best of the others. The proof of a guarantee by sampling comes on top. 0 for no limit. "
        f"Default: {_TIME_LIMIT:g}, and with --sampling no limit.",
    )
    group = FlagGroup(values, "Output")
    group.path(
        "dataset",
        "What the printed commands train on, as run-stackoverflow --dataset has it: docstrings, "
        "stackoverflow or the path of a .sqlite file. Default: docstrings or stackoverflow if "
        "--population is theirs (2511 or 342477); otherwise a template is printed.",
    )
    group.path(
        "output",
        "A directory to write what is recommended to, as a Mechanism that mfa.load reads: matrix, "
        "participation and noise.",
    )
    command_line.define_report(
        values,
        "the comparison as pictures and as a table, what the guarantee depends on, and the "
        "commands to copy.",
    )
    command_line.define_overwrite(values, "--output and --report")
    group.path(
        "cache_dir",
        "Where factorizations are cached between calls. Default: in the user's cache directory.",
    )
    for name in _REQUIRED:
        command_line.require(values, name)
    command_line.require(values, "target_epsilon", "target_rho", "noise_multiplier")


@memory.limited()
def main(values: flags.FlagValues) -> None:
    """Plans and reports."""
    setting, time_limit, own = _setting(values), _time_limit(values), _own(values)
    mechanisms = None if values.mechanisms is None else tuple(values.mechanisms)
    command_line.check_choice(mechanisms != (), "--mechanisms names no mechanism.")
    recipe = plan_text.recipe_of(values.dataset, setting.population)
    if values.output is not None:
        command_line.check_file(values.output, "output", is_directory=True)
        checkpoints.check_destination(values.output, values.overwrite)
    command_line.check_report(values, values.output)
    progress = _Progress()
    cache = command_line.cache_directory(
        values.cache_dir, caches.find(planner.FOLDER), progress.say
    )
    with progress.warning():
        plan = planning.make(
            setting,
            cache_directory=cache,
            progress=progress.begin,
            processes=_processes(),
            mechanisms=mechanisms,
            own=own,
            time_limit=time_limit,
        )
    for name, reason in plan.skipped.items():
        progress.say(f"skipped {name}: it {reason}")
    progress.finish(len(plan.candidates), cache)
    chosen = plan.recommended
    if values.output is not None:
        chosen.mechanism.save(values.output, overwrite=values.overwrite)
    directory = values.output or f"plan_{chosen.name.replace(' ', '_')}"
    given = [values[name].serialize() for name in values if values[name].present]
    again = shlex.join(["mf-plan", *(each for each in given if not _OF_THIS_CALL.match(each))])
    steps = plan_text.steps_of(plan, recipe, directory, None if values.output else again)
    in_every_round = None
    if setting.noise_multiplier is not None:
        in_every_round = plan_text.epsilon_in_every_round(setting, chosen.mechanism)
    candidates = [
        plan_text.fields_of(each, setting, is_recommended=each is chosen)
        for each in plan.candidates
    ]
    fields: dict[str, Any] = {
        "recommended": chosen.kind,
        "recommended_num_bands": chosen.num_bands,
        "reason": plan.reason,
        "target_epsilon": setting.epsilon,
        "target_rho": setting.rho,
        "noise_multiplier": setting.noise_multiplier,
        "epsilon_in_every_round": in_every_round,
        "delta": setting.delta,
        "model_size": setting.model_size,
        "participation": None if setting.participation is None else str(setting.participation),
        "sampling": setting.sampling,
        "noise_disk_gb": values.noise_disk_gb,
        "error": setting.error if isinstance(setting.error, str) else values.error,
        "candidates": candidates,
        "infeasible": [{"mechanism": k, "reason": v} for k, v in plan.infeasible.items()],
        "skipped": [{"mechanism": k, "reason": v} for k, v in plan.skipped.items()],
        "time_limit": time_limit,
        "dataset": None if recipe is None else recipe.dataset,
        "commands": [step.alone() for step in steps],
        "steps": [dataclasses.asdict(step) for step in steps],
        "output": values.output,
    }
    assumes_size = not values["model_size"].present
    show_rates = recipe is not None and recipe.follows_rate_rule
    if values.report is not None:
        progress.say(f"drawing {values.report}")
        with progress.warning():
            guarantee = chosen.mechanism.guarantee(
                setting.delta, certification=planner.certification_in(cache)
            )
            fields |= {"report": values.report, **attackers.rates(guarantee)}
            plan_text.write_page(plan, candidates, guarantee, steps, show_rates, values)
    text = plan_text.text(plan, candidates, assumes_size, steps, show_rates)
    command_line.print_result(values, fields, text)


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
    """Seconds, or None for no limit."""
    if values.time_limit is None:
        return _TIME_LIMIT if values.sampling is None else None
    return numbers.non_negative_number(values.time_limit, "--time_limit") or None


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _processes() -> int:
    """The processes that compute: one for each core that this one may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _setting(values: flags.FlagValues) -> Setting:
    for name in ("num_rounds", "population", "clients_per_round", "model_size"):
        numbers.positive_integer(getattr(values, name), f"--{name}")
    command_line.check_choice(
        values.clients_per_round <= values.population,
        f"--clients_per_round={values.clients_per_round} is more than "
        f"--population={values.population}.",
    )
    epsilon = _epsilon(values)
    participation = None
    if values.sampling is None:
        separation = values.separation
        if separation is None:
            separation = min(values.num_rounds, values.population // values.clients_per_round)
        numbers.positive_integer(separation, "--separation")
        command_line.check_choice(
            separation <= values.num_rounds,
            f"--separation={separation} is more than --num_rounds={values.num_rounds}: with "
            f"--separation={values.num_rounds} each client takes part at most once already.",
        )
        participation = MinSeparation(separation, values.max_participations)
    else:
        command_line.check_choice(
            values.separation is None and values.max_participations is None,
            "--separation and --max_participations are for devices with timers alone; with "
            "--sampling the plan chooses how far apart participations are.",
        )
    given = mechanism_flags.round_error(values.error)
    with command_line.naming(f"error={values.error}"):
        error = plans.checked_error(given, values.num_rounds)
    return Setting(
        num_rounds=values.num_rounds,
        population=values.population,
        clients_per_round=values.clients_per_round,
        participation=participation,
        sampling=values.sampling,
        epsilon=epsilon,
        rho=values.target_rho,
        noise_multiplier=values.noise_multiplier,
        delta=values.delta,
        model_size=values.model_size,
        noise_memory=_bytes(values, "noise_memory_gb"),
        noise_disk=_bytes(values, "noise_disk_gb"),
        error=error,
        weights_file=values.error,
    )


def _epsilon(values: flags.FlagValues) -> float:
    """The target epsilon, or the epsilon of a target rho or of a noise multiplier."""
    if values.sampling is not None:
        for name, advice in _FOR_TIMERS.items():
            command_line.check_choice(
                values[name].value is None, f"--{name} is for devices with timers: {advice}"
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
        f"--{flag}={values[flag].value:g} has an epsilon of {epsilon:g} at --delta="
        f"{values.delta:g}, which is none to plan for: use {'less' if multiplier else 'some'} "
        "noise.",
    )
    return epsilon


def _bytes(values: flags.FlagValues, flag: str) -> float | None:
    """The bytes of a flag that takes gigabytes, if it has a value."""
    gigabytes = values[flag].value
    if gigabytes is None:
        return None
    return numbers.non_negative_number(1e9 * gigabytes, f"--{flag}")


class _Progress:
    """Reports progress on standard error, in a line for each mechanism."""

    def __init__(self) -> None:
        self._name = ""
        self._start = time.monotonic()

    def begin(self, name: str, note: str) -> None:
        """Says that a mechanism is next."""
        self._name = name
        self.say(f"{name}: {note}, {self._elapsed()} s so far")

    def finish(self, compared: int, cache: pathlib.Path | None) -> None:
        """Says that the plan is done, and where its results are cached."""
        cached = ""
        if cache is not None and os.access(cache, os.W_OK):
            cached = (
                f"; matrices and noise multipliers are cached in {cache}: the next plan of as many "
                "rounds takes seconds"
            )
        self.say(f"compared {counted(compared, 'mechanism')} in {self._elapsed()} s{cached}.")

    @contextlib.contextmanager
    def warning(self) -> Iterator[None]:
        """Prints the warnings of a block, each in one line."""
        with warnings.catch_warnings():
            # With next to no noise, privacy losses overflow: a user need not know.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="dp_accounting")
            warnings.showwarning = self._warn
            yield

    def _warn(self, message: Warning | str, *unused: Any, **also_unused: Any) -> None:
        self.say(f"{self._name}: warning: {' '.join(str(message).split())}")

    def _elapsed(self) -> int:
        return round(time.monotonic() - self._start)

    @staticmethod
    def say(text: str) -> None:
        """Prints a line."""
        print(f"mf-plan: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
