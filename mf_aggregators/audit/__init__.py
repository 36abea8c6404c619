"""Audits of aggregators: runs that try to refute the guarantee that is claimed of them."""

from mf_aggregators.audit.adaptive_clipping import ClippingResult, audit_clipping
from mf_aggregators.audit.auditing import (
    LARGE_DELTA,
    AnyMechanismBound,
    AuditResult,
    Claim,
    DrawnResult,
    audit,
    audit_drawn,
    check_scheme,
)
from mf_aggregators.audit.bits import BitsResult, audit_bits

__all__ = [
    "LARGE_DELTA",
    "AnyMechanismBound",
    "AuditResult",
    "BitsResult",
    "Claim",
    "ClippingResult",
    "DrawnResult",
    "audit",
    "audit_bits",
    "audit_clipping",
    "audit_drawn",
    "check_scheme",
    "one_run",
]
