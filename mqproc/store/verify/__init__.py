"""Consistency check of a whole store, read-only: `mqproc store verify`. See README.md."""

from __future__ import annotations

from mqproc.store.verify.findings import Finding, FindingKind, Severity
from mqproc.store.verify.verifier import VerifyResult, verify_store

__all__ = ["Finding", "FindingKind", "Severity", "VerifyResult", "verify_store"]
