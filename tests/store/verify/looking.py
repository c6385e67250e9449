"""Verifying stores in tests: findings as short rows, and ways to change a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.verify import Finding, VerifyResult, verify_store


class Row(NamedTuple):
    """What a finding names."""

    kind: str
    file: str
    offset: int | None
    physical_offset: int | None


def looked_at(store: Path, *, jobs: int = 1, shares: int = 1, **options: Any) -> VerifyResult:
    """Verify a store; with one job in this process."""
    return verify_store(StoreIO(), StorePaths(store), Options(**options), jobs=jobs, shares=shares, share_bytes=100)


def row_of(finding: Finding) -> Row:
    return Row(str(finding.kind), finding.file, finding.offset, finding.physical_offset)


def damage_of(found: VerifyResult) -> list[Row]:
    """The findings that make a store damaged, causes first."""
    return [row_of(finding) for finding in found.findings.in_order() if finding.severity == "damage"]


def notes_of(found: VerifyResult) -> list[Row]:
    """The other findings."""
    return [row_of(finding) for finding in found.findings.in_order() if finding.severity == "note"]


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Put bytes into a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
