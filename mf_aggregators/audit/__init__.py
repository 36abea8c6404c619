"""Audits of aggregators: runs that try to refute the guarantee that is claimed of them."""

from mf_aggregators.audit.adaptive_clipping import ClippingResult, audit_clipping
from mf_aggregators.audit.auditing import (
    LARGE_DELTA,
    MOST_ROUNDS,
    AnyMechanismBound,
    AuditResult,
    Claim,
    audit,
)
from mf_aggregators.audit.bits import BitsResult, audit_bits

__all__ = [
    "LARGE_DELTA",
    "MOST_ROUNDS",
    "AnyMechanismBound",
    "AuditResult",
    "BitsResult",
    "Claim",
    "ClippingResult",
    "audit",
    "audit_bits",
    "audit_clipping",
    "one_run",
]
