"""What mf-report is about: a checkpoint, for a workload and under a participation schema."""

import dataclasses

import numpy as np
from absl import flags

from mf_aggregators import checkpoints, factorizations, workloads
from mf_aggregators import participation as participations
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.factorizations import Errors, Factorization

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
