"""What mf-plan was asked, in words: the setting, and on what the epsilon of a noise rests."""

import math
import shlex

from mf_aggregators import planning
from mf_aggregators.kernel.numbers import counted, pair, rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.planning import Candidate, Setting
from mf_aggregators.planning.proposals import error_name
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation


def setting_lines(
    setting: Setting, assumes_size: bool, chosen: Candidate | None = None
) -> list[str]:
    """Returns the setting of a plan: rounds and clients, the target, and limits of noise.

    Args:
      setting: The setting.
      assumes_size: Whether nobody said the size of the model.
      chosen: What is recommended, if anything is yet.
    """
    if setting.participation is not None:
        who = f"{setting.population} clients with timers: {setting.participation}"
    elif setting.sampling == planning.ANY_SAMPLING:
        who = f"{setting.population} clients that take part in any way"
    else:
        who = f"{setting.sampling} sampling from {setting.population} clients"
    model = f"model of {setting.model_size} parameters"
    compared = {
        "mean": [],
        "max": ["made for and compared by the error of the worst round (--error=max)"],
        "weights": [
            "made for and compared by the mean error with weights on rounds "
            f"(--error={error_flag(setting)})"
        ],
    }
    return [
        f"{counted(setting.num_rounds, 'round')} of "
        f"{counted(setting.clients_per_round, 'client')}, {who}",
        f"{_asked(setting)}{pair(setting.epsilon, setting.delta, '.6g')}-DP for every "
        f"client (zero-out){'' if assumes_size else f'; {model}'}",
        *_conditions_of_epsilon(setting, chosen),
        _budget(setting),
        *([f"GB and s/round are for a {model} (--model_size)"] if assumes_size else []),
        *compared[error_name(setting.error)],
    ]


def _asked(setting: Setting) -> str:
    """What a guarantee is said to be: the target, or what follows from the noise."""
    if setting.noise_multiplier is not None:
        return f"noise multiplier {setting.noise_multiplier!r} of every mechanism, which is "
    if setting.rho is not None:
        rho = rounded_up(setting.rho, ".6g")
        return f"target rho = {rho} (approximate zCDP), which is "
    return "target "


def _conditions_of_epsilon(setting: Setting, chosen: Candidate | None) -> list[str]:
    """On what the epsilon of a noise multiplier rests; nothing where there is a target."""
    timers = setting.participation
    if setting.noise_multiplier is None or timers is None:
        return []
    most = timers.most_participations(setting.num_rounds)
    if most == setting.num_rounds:
        return ["this epsilon is that of a client in every round: no timer is needed"]
    separation = timers.separation_in(setting.num_rounds)
    is_largest = separation == setting.population // setting.clients_per_round
    largest = f" (the largest that {setting.population} clients can fill)" if is_largest else ""
    often = (
        f", and so at most {counted(most, 'participation')}"
        if timers.limit is None
        else f" and --max_participations={timers.limit}"
    )
    lines = [
        "this epsilon holds only if a timer on every device enforces "
        f"--separation={separation}{largest}{often}"
    ]
    if chosen is not None:
        epsilon = epsilon_in_every_round(setting, chosen.mechanism)
        stated = (
            f"epsilon {rounded_up(epsilon, '.6g')}"
            if math.isfinite(epsilon)
            else "so little noise that no finite epsilon is accounted for"
        )
        lines.append(f"without timers, a client in every round has {stated} ({chosen.name})")
    return lines


def epsilon_in_every_round(setting: Setting, mechanism: Mechanism) -> float:
    """Returns the epsilon of a client that no timer keeps out of any round.

    Args:
      setting: Of a plan for timers.
      mechanism: Of one of its candidates.

    Returns:
      The epsilon at the plan's delta, or an upper bound; infinity for so little noise that none is
      stated.
    """
    rounds = setting.num_rounds
    in_all = ObservedParticipation(rounds, None, 1, rounds)
    plan = mechanism.guarantee(setting.delta)
    return guarantees.worst_case(plan, in_all).epsilon


def _budget(setting: Setting) -> str:
    memory, disk = setting.noise_memory, setting.noise_disk
    assert disk is not None
    kept = "any amount of noise" if memory is None else f"at most {memory / 1e9:g} GB of noise"
    return f"{kept} between rounds, and at most {disk / 1e9:g} GB of files (--noise_disk_gb)"


def error_flag(setting: Setting) -> str:
    """Returns the value of ``--error`` for a setting."""
    error = setting.error
    return error if isinstance(error, str) else shlex.quote(setting.weights_file)
