"""Audits of aggregators: runs that try to refute the guarantee that is claimed of them."""

from mf_aggregators.audit.auditing import (
    LARGE_DELTA,
    MOST_ROUNDS,
    AnyMechanismBound,
    AuditResult,
    Claim,
    audit,
)

__all__ = [
    "LARGE_DELTA",
    "MOST_ROUNDS",
    "AnyMechanismBound",
    "AuditResult",
    "Claim",
    "audit",
]
