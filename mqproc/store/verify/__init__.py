"""Verifying a store from outside: everything that its files say twice must agree. See README.md."""

from __future__ import annotations

from mqproc.store.verify.findings import KINDS, Finding, Kind, Severity
from mqproc.store.verify.verifier import Verified, verify_store

__all__ = ["KINDS", "Finding", "Kind", "Severity", "Verified", "verify_store"]
