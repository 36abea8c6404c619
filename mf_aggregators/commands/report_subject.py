"""What mf-report is about: a checkpoint, for a workload and under a participation schema.

And what a run would be that goes on after the last round of its matrix.
"""

import dataclasses
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import catalogue, checkpoints, factorizations, workloads
from mf_aggregators import participation as participations
from mf_aggregators.catalogue import Request
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.factorizations import Errors, Factorization
from mf_aggregators.mechanism import Mechanism

INDEPENDENT_NOISE = "independent noise"


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A factorization for a workload, under a participation schema.

    Attributes:
      factorization: What the checkpoint holds.
      schema: The schema of the flags, or the one that the checkpoint was made for.
      workload: That of the flags, or the one that the checkpoint was made for.
      errors: The sensitivity and the errors under the schema.
    """

    factorization: Factorization
    schema: participations.Participation
    workload: workloads.Workload
    errors: Errors

    def variances(self) -> dict[str, np.ndarray]:
        """Returns the (num_rounds,) variances by round at noise multiplier 1, by what makes noise.

        Those of independent noise are beside them.
        """
        independent = factorizations.identity(self.factorization.num_rounds)
        return {
            self.factorization.mechanism: self.errors.per_round_variance,
            INDEPENDENT_NOISE: independent.per_round_variance(self.workload, self.schema),
        }


def read(values: flags.FlagValues) -> Subject:
    """Reads the checkpoint that the flags name.

    Args:
      values: The parsed flags of mf-report.

    Raises:
      ValueError: If the checkpoint cannot be read, or the flags do not fit it.
    """
    factorization, description = checkpoints.load_with_description(values.checkpoint)
    made_for = description["errors"]
    schema = mechanism_flags.participation(values) or participations.from_dict(
        made_for["participation"]
    )
    workload = workloads.describe(
        mechanism_flags.workload_description(values) or made_for["workload"],
        factorization.num_rounds,
    )
    return Subject(factorization, schema, workload, factorization.errors(workload, schema))


def extension_fields(
    factorization: Factorization,
    participation: participations.Participation,
    workload: workloads.Workload,
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


def _longer(workload: workloads.Workload, num_rounds: int) -> workloads.Workload:
    description = workload.to_dict()
    if isinstance(description.get("learning_rates"), list):
        raise ValueError(
            "the workload has a learning rate for each of its rounds, and none for more: name the "
            "workload of the whole in Python (Factorization.extended)."
        )
    return workloads.describe(description, num_rounds)


def _planned_rmse(
    factorization: Factorization,
    participation: participations.Participation,
    workload: workloads.Workload,
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
