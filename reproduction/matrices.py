"""The factorizations that several experiments need, from the cache or computed."""

import numpy as np

from mf_aggregators import factorizations, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation, SingleParticipation
from reproduction.experiment import Workspace

# Certified gaps of squared errors, far below the digits that papers print: four and more of
# single participation, three where clients return.
_RELATIVE_GAP = 1e-6
_RELATIVE_GAP_OF_RETURNS = 5e-4


def optimum(
    workspace: Workspace,
    workload: np.ndarray,
    participation: Participation | None = None,
    equal_column_norms: bool = False,
    max_evaluations: int = 300,
) -> Factorization:
    """Returns the dense optimum for a workload and schema.

    Args:
      workspace: Where it is kept.
      workload: A, an (n, n) lower-triangular array.
      participation: SingleParticipation, the default, or FixedEpochOrder.
      equal_column_norms: Whether the columns of C have to have equal norms.
      max_evaluations: After how many evaluations the search gives up; the factorization says
        how far it came.

    Returns:
      The factorization, its squared error within 1e-6 of the least (Denisov et al. Thm 3.2),
      and within 5e-4 for clients that return (BandMF Problem 1).
    """
    schema = SingleParticipation() if participation is None else participation
    returns = schema.most_participations(len(workload)) > 1
    gap = _RELATIVE_GAP_OF_RETURNS if returns else _RELATIVE_GAP
    return workspace.factorization(
        {
            "mechanism": "optimal",
            "num_rounds": len(workload),
            "participation": str(schema),
            "relative_gap": gap,
            "equal_column_norms": equal_column_norms or not returns,
            "max_evaluations": max_evaluations,
            "workload": workloads.fingerprint(workload),
        },
        lambda: factorizations.optimal(
            workload,
            schema,
            equal_column_norms=equal_column_norms,
            relative_gap=gap,
            max_evaluations=max_evaluations,
            show_progress=workspace.show_progress,
        ),
    )


def banded(
    workspace: Workspace,
    num_rounds: int,
    num_bands: int,
    participation: Participation,
    equal_column_norms: bool = True,
) -> Factorization:
    """Returns the banded optimum for the prefix sum.

    Args:
      workspace: Where it is kept.
      num_rounds: n.
      num_bands: The number of bands.
      participation: The schema.
      equal_column_norms: Whether the columns of C have to have equal norms.

    Returns:
      The factorization, its squared error within 5e-4 of the least of that many bands.
    """
    return workspace.factorization(
        {
            "mechanism": "banded",
            "num_rounds": num_rounds,
            "num_bands": num_bands,
            "participation": str(participation),
            "relative_gap": _RELATIVE_GAP_OF_RETURNS,
            "equal_column_norms": equal_column_norms,
        },
        lambda: factorizations.banded(
            workloads.prefix_sum(num_rounds),
            num_bands,
            equal_column_norms,
            participation,
            relative_gap=_RELATIVE_GAP_OF_RETURNS,
            show_progress=workspace.show_progress,
        ),
    )
