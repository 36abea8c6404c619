"""Audits of aggregators: runs that try to refute the guarantee that is claimed of them."""

from mf_aggregators.audit.adaptive_clipping import ClippingResult, audit_clipping
from mf_aggregators.audit.auditing import (
    LARGE_DELTA,
    AnyMechanismBound,
    AuditResult,
    Claim,
    audit,
)
from mf_aggregators.audit.bits import BitsResult, audit_bits
from mf_aggregators.audit.drawn_clients import DrawnResult, audit_drawn, check_scheme

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
