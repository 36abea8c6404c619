"""Factorizations that several experiments need, and matrices as results store them."""

import base64
import zlib

import numpy as np

from mf_aggregators import factorizations, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation, SingleParticipation
from reproduction.experiment import Data, Workspace

# Certified gaps of squared errors, far below the digits that papers print: four and more of
# single participation, three where clients return.
_RELATIVE_GAP = 1e-6
_RELATIVE_GAP_OF_RETURNS = 5e-4
# A result stores each entry as one of 255 levels, in few bytes of text.
_MOST_LEVEL = 127


def optimum(
    workspace: Workspace,
    workload: np.ndarray,
    participation: Participation | None = None,
    equal_column_norms: bool = False,
    max_evaluations: int = 300,
) -> Factorization:
    """Returns the dense optimum for a workload and schema.

    Args:
      workspace: Where it is cached.
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
      workspace: Where it is cached.
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


def structured(
    workspace: Workspace, optimal: Factorization, num_diagonals: int, rank: int
) -> Factorization:
    """Returns the structured approximation of an optimal factorization.

    Args:
      workspace: Where it is cached.
      optimal: The factorization.
      num_diagonals: h, the diagonals of its decoder that stay.
      rank: r, of what approximates the rest.
    """
    return workspace.factorization(
        {
            "mechanism": "structured",
            "num_rounds": optimal.num_rounds,
            "num_diagonals": num_diagonals,
            "rank": rank,
            "of": optimal.parameters,
        },
        lambda: factorizations.structured(
            optimal, num_diagonals, rank, show_progress=workspace.show_progress
        ),
    )


def encode_levels(matrix: np.ndarray) -> Data:
    """Returns a matrix by levels of its largest magnitude.

    Args:
      matrix: (rows, columns) finite floats.

    Returns:
      What :func:`decode_levels` takes, JSON-able; entries are off by at most 1/254 of the largest.
    """
    largest = float(np.max(np.abs(matrix))) or 1.0
    levels = np.round(matrix / largest * _MOST_LEVEL).astype(np.int8)
    text = base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode("ascii")
    return {"shape": list(matrix.shape), "largest": largest, "levels": text}


def decode_levels(encoded: Data) -> np.ndarray:
    """Returns the matrix that :func:`encode_levels` encoded.

    Args:
      encoded: The shape, the largest magnitude, and levels of one byte, deflated, in base64.

    Returns:
      (rows, columns) float64.
    """
    levels = np.frombuffer(zlib.decompress(base64.b64decode(encoded["levels"])), np.int8)
    matrix: np.ndarray = levels.reshape(encoded["shape"]) * (encoded["largest"] / _MOST_LEVEL)
    return matrix
