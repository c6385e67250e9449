"""Segments that have other names than their records tell, and what need not be told beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mqproc.io import StoreIO
from mqproc.paths import segment_start, shown
from mqproc.store.misnamed import find_misnamed
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.inventory import Inventory

_CONSEQUENCES = frozenset({Kind.STRAY_FILE, Kind.MISPLACED_FILE, Kind.RECORD_OFFSET})


def misnamed_segments(io: StoreIO, inventory: Inventory) -> list[Finding]:
    """One finding for each such segment; a second copy of one that is there, under a name of its own, is a stray."""
    folder = inventory.paths.commit_log
    findings = []
    for each in find_misnamed(io, folder, inventory.sizes.segment):
        if each.taken and segment_start(each.name) is None:
            continue
        file = shown((folder / each.name).relative_to(inventory.root))
        text = f"its records belong to commitlog/{each.right_name}" + (", which is there" if each.taken else "")
        findings.append(Finding(Kind.SEGMENT_MISNAMED, file, 0, each.start, text=text))
    return findings


def without_consequences(misnamed: Iterable[Finding], findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings but those that only say again that a misnamed segment is where it does not belong."""
    files = {finding.file for finding in misnamed}
    return (finding for finding in findings if finding.file not in files or finding.kind not in _CONSEQUENCES)
