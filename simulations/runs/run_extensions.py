"""Runs that go on after the last round that they were planned for: what they began with.

A run is extended by the same command with more ``--num_rounds``. ``config.json`` then has the flags
of the whole, and below ``extends`` the plans before, each with the rounds that were released when
the run was extended. It is replaced in one step, which is when the larger plan begins to count:
whoever is killed before it has extended nothing, and after it nothing but the larger plan goes on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import participation as participations
from mf_aggregators.participation import Participation
from simulations.runs import run_directory
from simulations.runs.run_directory import RunDirectory, RunDirectoryError

_EXTENDS = "extends"
# What may change when a run is extended: nothing that was drawn, clipped or noised before does.
_MAY_CHANGE = ("num_rounds", "max_participations", "target_epsilon")


@dataclasses.dataclass(frozen=True)
class EarlierPlan:
    """A plan that was extended.

    Attributes:
      num_rounds: The rounds of the plan.
      released_rounds: Those of them that were released when it was extended.
      participation: The schema of the plan.
    """

    num_rounds: int
    released_rounds: int
    participation: Participation

    def to_dict(self) -> dict[str, Any]:
        """Returns what ``config.json`` says of the plan."""
        return {
            "num_rounds": self.num_rounds,
            "released_rounds": self.released_rounds,
            "participation": self.participation.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Begun:
    """What a run that is, or was, extended has fixed.

    Attributes:
      plans: The plans that were extended, the first one first.
      num_parameters: The parameters of the model.
      noise_storage: Where the noise is kept.
    """

    plans: tuple[EarlierPlan, ...]
    num_parameters: int
    noise_storage: str

    @property
    def horizons(self) -> dict[int, Participation]:
        """The schema of each plan that was extended, by its number of rounds."""
        return {plan.num_rounds: plan.participation for plan in self.plans}


def plans_of(config: Mapping[str, Any], directory: RunDirectory) -> tuple[EarlierPlan, ...]:
    """Returns the plans that were extended, of a run's configuration.

    Args:
      config: Its ``config.json``.
      directory: Its directory, for the message.

    Raises:
      RunDirectoryError: If they are broken.
    """
    try:
        return tuple(
            EarlierPlan(
                int(plan["num_rounds"]),
                int(plan["released_rounds"]),
                participations.from_dict(plan["participation"]),
            )
            for plan in config.get(_EXTENDS, ())
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory.path / run_directory.CONFIG_FILE} is broken: what it says of the plans "
            f"that were extended cannot be read ({error}). Restore it."
        ) from error


def begun(config: Mapping[str, Any], plans: Sequence[EarlierPlan], asked_storage: str) -> Begun:
    """Returns what a run has fixed.

    Args:
      config: Its ``config.json``.
      plans: The plans that were extended, and the one that is.
      asked_storage: The storage that the flags ask for.

    Raises:
      RunDirectoryError: If the run has not begun.
    """
    size = config.get("num_parameters")
    if not isinstance(size, int):
        raise RunDirectoryError(
            "the run has not begun, and cannot be extended: start a new one with that many "
            "--num_rounds."
        )
    return Begun(tuple(plans), size, config.get("noise_storage", asked_storage))


def is_asked_for(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Returns whether a run is to go on for more rounds than it was planned for.

    Args:
      old: The flags that it was started with.
      new: Those that it is to go on with.
    """
    return isinstance(old.get("num_rounds"), int) and new["num_rounds"] > old["num_rounds"]


def comparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the old flags as an extension may change them.

    Args:
      old: The flags that a run was started with.
      new: Those that it is to go on with.
    """
    changed = dict(old)
    for name in _MAY_CHANGE:
        if _may_become(name, old.get(name), new.get(name)):
            changed[name] = new.get(name)
    return changed


def _may_become(name: str, old: Any, new: Any) -> bool:
    if name == "target_epsilon":
        # A noise multiplier that was given is no target.
        return old is not None and new is not None
    if name == "max_participations":
        return old is not None and (new is None or new >= old)
    return True


def with_extension(
    config: Mapping[str, Any],
    flags: Mapping[str, Any],
    plans: Sequence[EarlierPlan],
    matrix: str,
) -> dict[str, Any]:
    """Returns the configuration of a run that is extended.

    Args:
      config: Its configuration so far.
      flags: The flags of the whole.
      plans: The plans that were extended, the last of which is that of ``config``.
      matrix: The fingerprint of the matrix of the whole.
    """
    return {
        **config,
        "flags": dict(flags),
        _EXTENDS: [plan.to_dict() for plan in plans],
        "factorization_sha256": matrix,
    }


def joined_rates(rates: Sequence[np.ndarray], plans: Sequence[EarlierPlan]) -> np.ndarray:
    """Returns the learning rate of every round of a run.

    Rounds that were released keep the rate that they had: run again from an older state, they must
    lead to the same model, whose updates got the noise of the rounds after them. So does the round
    after them, whose rate the saved state holds already; after the last round of a plan, that is
    the rate of the last one.

    Args:
      rates: The rates of each plan and of the whole, one array for each.
      plans: The plans that were extended.

    Returns:
      (n,) float64.
    """
    joined = rates[0]
    for plan, following in zip(plans, rates[1:], strict=True):
        known = plan.released_rounds + 1
        joined = np.concatenate([np.append(joined, joined[-1])[:known], following[known:]])
    return joined
