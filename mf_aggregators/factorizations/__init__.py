"""Factorizations A = BC of a workload, with their sensitivity, errors and optimality gap."""

from mf_aggregators.factorizations import clip_drift, noise_rows
from mf_aggregators.factorizations.banded import banded, from_bands
from mf_aggregators.factorizations.banded_inverse import BandedInverseFactorization, banded_inverse
from mf_aggregators.factorizations.blt import BltFactorization, blt
from mf_aggregators.factorizations.factorization import (
    BandedFactorization,
    Errors,
    ExtensionError,
    Factorization,
)
from mf_aggregators.factorizations.optimal import DenseFactorization, from_matrix, optimal
from mf_aggregators.factorizations.searches import NotConvergedWarning
from mf_aggregators.factorizations.structured import StructuredFactorization, structured
from mf_aggregators.factorizations.toeplitz import (
    IdentityFactorization,
    ToeplitzFactorization,
    from_coefficients,
    identity,
    toeplitz,
)
from mf_aggregators.factorizations.tree_aggregation import (
    TreeAggregationFactorization,
    tree_aggregation,
)
from mf_aggregators.lower_bounds import compute as lower_bound

__all__ = [
    "BandedFactorization",
    "BandedInverseFactorization",
    "BltFactorization",
    "DenseFactorization",
    "Errors",
    "ExtensionError",
    "Factorization",
    "IdentityFactorization",
    "NotConvergedWarning",
    "StructuredFactorization",
    "ToeplitzFactorization",
    "TreeAggregationFactorization",
    "banded",
    "banded_inverse",
    "blt",
    "clip_drift",
    "from_bands",
    "from_coefficients",
    "from_matrix",
    "identity",
    "lower_bound",
    "noise_rows",
    "optimal",
    "structured",
    "toeplitz",
    "tree_aggregation",
]
