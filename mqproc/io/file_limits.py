"""Largest size of each kind of small file in a store: a longer one is not read.

Files of a fixed format have a few pages at most. Files of entries have a greatest number of these, and a generous size
for each. Mapped files have the sizes of the options, which recovery compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mqproc.util.units import MIB, PAGE_BYTES

FILE_BYTES_MAX: Final = 256 * MIB
"""Limit of any other file."""
SPARSE_FILE_BYTES_MAX: Final = 2048 * MIB
"""Limit of a segment and of a ConsumeQueue file, the same as of their options."""
_FIXED: Final = 16 * PAGE_BYTES
_ENTRY: Final = 1024

_LIMITS: Final[dict[str, int]] = {
    # Fixed formats, of at most two pages.
    **dict.fromkeys(("checkpoint", "timercheck", "commitlog", "consumequeue", "index"), _FIXED),
    # A process id; a line of text; a few numbers.
    **dict.fromkeys(("abort", "read_only", "opened.json", "retention.json", "delayOffset.json"), _FIXED),
    # A few hundred options.
    "settings.json": MIB,
    # 65,536 damaged ranges, groups or changed topics.
    **dict.fromkeys(("damage.json", "unconsumed.json", "subscriptionGroup.json", "topics.journal"), 65_536 * _ENTRY),
    # Up to 2^20 topics (the maximum of queues); a number for each queue of each group.
    **dict.fromkeys(("topics.json", "deletedTopics.json", "consumerOffset.json"), FILE_BYTES_MAX),
}


def size_limit(path: Path) -> int:
    """Largest size of a file of this name, or of its `.bak`."""
    return _LIMITS.get(path.name.removesuffix(".bak"), FILE_BYTES_MAX)


def oversized(size: int, limit: int) -> str:
    """Reason to refuse a file of `size` bytes."""
    return f"{size:,} bytes, at most {limit:,} are expected"
