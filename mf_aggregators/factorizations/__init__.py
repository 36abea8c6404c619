"""Factorizations A = BC of a workload, each stating its sensitivity, error and gap."""

from mf_aggregators.factorizations.banded import BandedFactorization, banded
from mf_aggregators.factorizations.convergence import NotConvergedWarning
from mf_aggregators.factorizations.dense import DenseFactorization
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.identity import IdentityFactorization, identity
from mf_aggregators.factorizations.optimal import optimal

__all__ = [
    "BandedFactorization",
    "DenseFactorization",
    "Factorization",
    "IdentityFactorization",
    "NotConvergedWarning",
    "banded",
    "identity",
    "optimal",
]
