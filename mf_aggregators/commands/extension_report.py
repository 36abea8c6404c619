"""What a report says of a run that would go on after the last round of a checkpoint's matrix."""

from typing import Any

from mf_aggregators import catalogue
from mf_aggregators.catalogue import (
    Request,
)
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.factorizations import (
    Factorization,
)
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Participation
from mf_aggregators.workloads import Workload, describe


def fields(
    factorization: Factorization,
    participation: Participation,
    workload: Workload,
    num_rounds: int,
    noise_multiplier: float | None,
    delta: float,
    num_parameters: int | None = None,
) -> dict[str, Any]:
    """Returns what an extension costs, as fields of a report.

    Args:
      factorization: What the run began with, or goes on with already.
      participation: The schema of the plan and of the whole.
      workload: The workload of the plan; that of the whole is the one of the same name.
      num_rounds: The rounds of the whole.
      noise_multiplier: Of the plan, under the schema; None leaves the guarantee out.
      delta: The delta of the guarantee.
      num_parameters: The parameters of the model; None leaves out what roundings of more rounds
        take of the noise.

    Returns:
      ``extend_to``; the ``extended_`` sensitivity, rmse, noise_multiplier and epsilon of the whole;
      ``planned_rmse`` of the same mechanism made for all rounds (None where it cannot be, as with
      more bands than the separation), and the ratio ``extended_rmse_over_planned``. Errors are at
      noise multiplier 1, so that they compare matrices at one guarantee.

    Raises:
      CommandError: If there is no such extension; the message says why.
    """
    try:
        whole_workload = _longer(workload, num_rounds)
        whole = factorization.extended(
            num_rounds, participation=participation, workload=whole_workload
        )
    except ValueError as error:
        raise CommandError(f"--extend_to={num_rounds}: {error}") from error
    rmse = whole.rmse(whole_workload, participation)
    planned_rmse = _planned_rmse(factorization, participation, whole_workload)
    found: dict[str, Any] = {
        "extend_to": num_rounds,
        "extended_sensitivity": whole.sensitivity(participation).value,
        "extended_rmse": rmse,
        "planned_rmse": planned_rmse,
        "extended_rmse_over_planned": None if planned_rmse is None else rmse / planned_rmse,
        "extended_noise_multiplier": None,
        "extended_epsilon": None,
    }
    if noise_multiplier is None:
        return found
    mechanism = Mechanism.of_one_schema(factorization, participation, noise_multiplier).extended(
        num_rounds, workload=whole_workload, num_parameters=num_parameters
    )
    found["extended_noise_multiplier"] = mechanism.noise_multiplier
    found["extended_epsilon"] = mechanism.guarantee(delta).epsilon
    return found


def _longer(workload: Workload, num_rounds: int) -> Workload:
    description = workload.to_dict()
    if isinstance(description.get("learning_rates"), list):
        raise ValueError(
            "the workload has a learning rate for each of its rounds, and none for more: name the "
            "workload of the whole in Python (Factorization.extended)."
        )
    return describe(description, num_rounds)


def _planned_rmse(
    factorization: Factorization, participation: Participation, workload: Workload
) -> float | None:
    """The rmse of the same mechanism with the same options, made for all rounds."""
    mechanism = catalogue.entry(factorization.mechanism)
    names = {option.name for option in mechanism.options}
    given = {name: each for name, each in factorization.parameters.items() if name in names}
    if factorization.strategy_bands() == factorization.num_rounds:
        # All bands that there are: then of all rounds.
        given = {name: each for name, each in given.items() if name != "num_bands"}
    try:
        made = mechanism.build(Request(workload.num_rounds, workload, participation, given))
    except ValueError:
        return None
    assert isinstance(made, Factorization)
    return made.rmse(workload, participation)
