"""Which parts of a file this process has mapped with the advice to use large pages (proc(5), smaps)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage").exists()
_HEAD: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(.*)")


def large_page_ranges(path: Path) -> list[tuple[int, int]]:
    """[start, stop) of each in bytes of the file, in its order."""
    found: list[tuple[int, int]] = []
    inside: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = _HEAD.fullmatch(line)
        if head is not None:
            first, last, offset = (int(number, 16) for number in head.groups()[:3])
            inside = (offset, offset + last - first) if head[4] == str(path) else None
        elif inside is not None and line.startswith("VmFlags:") and "hg" in line.split():
            found.append(inside)
    return sorted(found)
