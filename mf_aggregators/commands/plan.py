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
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from mf_aggregators import caches, checkpoints, memory, planning
from mf_aggregators.catalogue import MEANING_OF_ERROR
from mf_aggregators.commands import (
    command_line,
    mechanism_flags,
    output_paths,
    plan_text,
)
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import counted
from mf_aggregators.participation import MinSeparation, sampling_help, sampling_schemes
from mf_aggregators.planning import (
    Candidate,
    Infeasible,
    Plan,
    Setting,
    Skipped,
    plans,
    proposals,
    robustness,
)
from mf_aggregators.privacy import attackers, guarantees

# Default of --time_limit for devices with timers, so that the command ends within a minute.
_TIME_LIMIT = 50.0
# The least time limit of a plan, if earlier plans have used up the time.
_LEAST_SECONDS = 1.0
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
    group.words(
        "separations",
        "Further separations, with commas between them: plans for these as well, and compares the "
        "error of every matrix under each of them with the best matrix that is made for it. For "
        "devices with timers. The plans share the time limit.",
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
    output_paths.define_report(
        values,
        "the comparison as pictures and as a table, what the guarantee depends on, and the "
        "commands to copy.",
    )
    output_paths.define_overwrite(values, "--output and --report")
    group.path(
        "cache_dir",
        "Where factorizations are cached between calls. Default: in the user's cache directory.",
    )
    for name in _REQUIRED:
        command_line.require(values, name)
    command_line.require(values, "target_epsilon", "target_rho", "noise_multiplier")


@memory.limited()
def main(values: flags.FlagValues) -> int:
    """Plans and reports."""
    setting = _setting(values)
    settings = [setting, *_other_separations(values, setting)]
    recipe = plan_text.recipe_of(values.dataset, setting.population)
    if values.output is not None:
        output_paths.check_file(values.output, "output", is_directory=True)
        checkpoints.check_destination(values.output, values.overwrite)
    output_paths.check_report(values, values.output)
    progress = _Progress()
    cache = output_paths.cache_directory(
        values.cache_dir, caches.find(proposals.FOLDER), progress.say
    )
    mechanisms, time_limit, own = _mechanisms(values), _time_limit(values), _own(values)
    deadline = None if time_limit is None else time.monotonic() + time_limit
    assumes_size = not values["model_size"].present
    evaluated: list[Candidate | Infeasible] = []
    made: list[Plan] = []
    try:
        for number, each in enumerate(settings):
            limit = time_limit
            if len(settings) > 1:
                limit = _share_of(deadline, len(settings) - number)
            if made:
                progress.say(f"planning for {each.participation}")
            try:
                with progress.warning():
                    found = planning.make(
                        each,
                        cache_directory=cache,
                        progress=progress.begin,
                        processes=_processes(),
                        mechanisms=mechanisms,
                        own=own,
                        time_limit=limit,
                        evaluated=evaluated.append if not made else lambda found: None,
                    )
            except ValueError as error:
                if not made:
                    raise
                progress.say(f"{each.participation} is left out: {error}")
                continue
            for skipped in found.skipped:
                progress.say(f"skipped {skipped.mechanism}: it {skipped.reason}")
            progress.finish(len(found.candidates), cache)
            made.append(found)
    except KeyboardInterrupt:
        progress.interrupt(len(evaluated), cache)
        _print_finished(values, setting, evaluated)
        return command_line.INTERRUPTED
    plan, comparison = made[0], robustness.compare(made) if len(settings) > 1 else None
    chosen = plan.recommended
    if values.output is not None:
        chosen.mechanism.save(values.output, overwrite=values.overwrite)
    directory = values.output or f"plan_{chosen.name.replace(' ', '_')}"
    steps = plan_text.steps_of(plan, recipe, directory, values.output is None)
    fields: dict[str, Any] = {
        "recommended": chosen.kind,
        "recommended_num_bands": chosen.num_bands,
        "reason": plan.reason,
        "target_epsilon": setting.epsilon,
        "target_rho": setting.rho,
        "noise_multiplier": setting.noise_multiplier,
        "epsilon_in_every_round": _epsilon_in_every_round(plan),
        "delta": setting.delta,
        "model_size": setting.model_size,
        "participation": None if setting.participation is None else str(setting.participation),
        "sampling": setting.sampling,
        "noise_disk_gb": values.noise_disk_gb,
        "error": setting.error if isinstance(setting.error, str) else values.error,
        "candidates": [
            _fields_of(candidate, setting, candidate is chosen) for candidate in plan.candidates
        ],
        "infeasible": _fields_with_reasons(plan.infeasible),
        "skipped": _fields_with_reasons(plan.skipped),
        "separations": None if comparison is None else comparison.to_dict(),
        "time_limit": time_limit,
        "dataset": None if recipe is None else recipe.dataset,
        "commands": plan_text.commands_of(steps),
        "steps": [step.to_dict() for step in steps],
        "output": values.output,
    }
    show_rates = recipe is not None and recipe.follows_rate_rule
    if values.report is not None:
        # Matplotlib takes a second to import, and this flag alone needs it.
        from mf_aggregators.commands import plan_page

        progress.say(f"drawing {values.report}")
        with progress.warning():
            guarantee = chosen.mechanism.guarantee(
                setting.delta, certification=proposals.certification_in(cache)
            )
            fields |= {"report": values.report, **attackers.rates(guarantee)}
            plan_page.write(plan, guarantee, steps, show_rates, values, cache, comparison)
    text = plan_text.text(
        setting,
        plan.candidates,
        plan.infeasible,
        assumes_size,
        plan=plan,
        steps=steps,
        show_rates=show_rates,
        comparison=comparison,
    )
    command_line.print_result(values, fields, text)
    return command_line.DONE


def _print_finished(
    values: flags.FlagValues, setting: Setting, evaluated: Sequence[Candidate | Infeasible]
) -> None:
    """Prints the candidates that were evaluated before an interrupt."""
    candidates = sorted(
        (each for each in evaluated if isinstance(each, Candidate)),
        key=lambda each: each.effective_error,
    )
    infeasible = [each for each in evaluated if isinstance(each, Infeasible)]
    fields = {
        "recommended": None,
        "interrupted": True,
        "candidates": [_fields_of(each, setting, False) for each in candidates],
        "infeasible": _fields_with_reasons(infeasible),
    }
    assumes_size = not values["model_size"].present
    text = plan_text.text(setting, candidates, infeasible, assumes_size)
    command_line.print_result(values, fields, text)


def _share_of(deadline: float | None, plans: int) -> float | None:
    """The time limit of the next plan, if this many plans share the rest of the time."""
    if deadline is None:
        return None
    return max(_LEAST_SECONDS, (deadline - time.monotonic()) / plans)


def _fields_with_reasons(found: Sequence[Infeasible | Skipped]) -> list[dict[str, str]]:
    return [{"mechanism": each.mechanism, "reason": each.reason} for each in found]


def _epsilon_in_every_round(plan: Plan) -> float | None:
    """Epsilon of a client in every round, for a noise multiplier; None for a target or infinity."""
    if plan.setting.noise_multiplier is None:
        return None
    epsilon = plan_text.epsilon_in_every_round(plan.setting, plan.recommended.mechanism)
    return epsilon if math.isfinite(epsilon) else None


def _mechanisms(values: flags.FlagValues) -> tuple[str, ...] | None:
    if values.mechanisms is None:
        return None
    command_line.check_choice(bool(values.mechanisms), "--mechanisms names no mechanism.")
    return tuple(values.mechanisms)


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


def _other_separations(values: flags.FlagValues, setting: Setting) -> list[Setting]:
    """The setting with each of --separations that is another one, in increasing order."""
    if values.separations is None:
        return []
    own = setting.participation
    command_line.check_choice(
        isinstance(own, MinSeparation),
        "--separations is for devices with timers: leave out --sampling.",
    )
    assert isinstance(own, MinSeparation)
    try:
        separations = {int(text) for text in values.separations}
    except ValueError:
        raise command_line.CommandError(
            "--separations takes whole numbers with commas between them, found "
            f"{','.join(values.separations)!r}."
        ) from None
    command_line.check_choice(bool(separations), "--separations names no separation.")
    found = []
    for separation in sorted(separations - {own.separation}):
        command_line.check_choice(
            separation <= setting.num_rounds,
            f"--separations={separation} is more than --num_rounds={setting.num_rounds}.",
        )
        with command_line.naming(f"separations={separation}"):
            schema, most = MinSeparation(separation), own.max_participations
            if most is not None and most < schema.most_participations(setting.num_rounds):
                schema = MinSeparation(separation, most)
            found.append(dataclasses.replace(setting, participation=schema))
    return found


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


def _fields_of(candidate: Candidate, setting: Setting, is_recommended: bool) -> dict[str, Any]:
    mechanism = candidate.mechanism
    scheme = mechanism.sampling
    return {
        "mechanism": candidate.kind,
        "num_bands": candidate.num_bands,
        "options": plan_text.flags_of(candidate.variant, setting),
        "participation": str(mechanism.schema),
        "amplified": scheme is not None,
        "sampling": None if scheme is None else scheme.to_dict(),
        "condition": plan_text.condition_of(mechanism),
        "is_estimate": candidate.is_estimate,
        "rmse": candidate.errors.rmse,
        "max_error": candidate.errors.max_error,
        "noise_multiplier": mechanism.noise_multiplier,
        "effective_rmse": candidate.effective_rmse,
        "max_effective_error": candidate.max_effective_error,
        "effective_error": candidate.effective_error,
        "rmse_over_lower_bound": (
            None
            if candidate.lower_bound is None
            else candidate.errors.rmse / candidate.lower_bound.rmse
        ),
        "error_over_lower_bound": candidate.over_lower_bound,
        "memory_gb": candidate.kept_bytes / 1e9,
        "disk_gb": candidate.cost.disk_bytes / 1e9,
        "working_memory_gb": candidate.cost.memory_bytes / 1e9,
        "noise_storage": candidate.cost.storage.value,
        "seconds_per_round": candidate.cost.seconds_per_round,
        "server_learning_rate": candidate.server_learning_rate,
        "recommended": is_recommended,
    }


class _Progress:
    """Reports progress on standard error, in a line for each mechanism."""

    def __init__(self) -> None:
        self._name = ""
        self._start = time.monotonic()

    def begin(self, name: str, note: str) -> None:
        """Says that a mechanism is next."""
        self._name = name
        self.say(f"{name}: {note}, {self._elapsed()} s so far")

    def interrupt(self, done: int, cache: pathlib.Path | None) -> None:
        """Says that the plan was interrupted, and how to go on."""
        cached = (
            "There is no cache for what was computed"
            if cache is None
            else f"What was computed is cached in {cache}: the same command goes on there"
        )
        where = self._name or "its beginning"
        self.say(f"interrupted in {where}: {counted(done, 'mechanism')} compared. {cached}.")

    def finish(self, compared: int, cache: pathlib.Path | None) -> None:
        """Says that the plan is done, and where its results are cached."""
        cached = (
            ""
            if cache is None or not os.access(cache, os.W_OK)
            else f"; matrices and noise multipliers are cached in {cache}: the next plan of as "
            "many rounds takes seconds"
        )
        self.say(f"compared {counted(compared, 'mechanism')} in {self._elapsed()} s{cached}.")

    @contextlib.contextmanager
    def warning(self) -> Iterator[None]:
        """Prints the warnings of a block, each in one line."""
        with warnings.catch_warnings():
            # With next to no noise, privacy losses overflow: a user need not know.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="dp_accounting")
            warnings.showwarning = self.warn
            yield

    def warn(self, message: Warning | str, *unused: Any, **also_unused: Any) -> None:
        """Prints a warning in one line; replaces ``warnings.showwarning``."""
        self.say(f"{self._name}: warning: {' '.join(str(message).split())}")

    def _elapsed(self) -> int:
        return round(time.monotonic() - self._start)

    @staticmethod
    def say(text: str) -> None:
        """Prints a line."""
        print(f"mf-plan: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
