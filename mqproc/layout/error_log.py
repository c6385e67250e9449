"""`mqproc/errors`: distinct errors with their count, first and last time.

The file is kept across restarts.

    header   64 bytes    magic, version
    entries  for each owner in OWNERS order: ENTRIES × 512 bytes

    entry:  0  count, 0 = free          8  first time, Unix ms      16  last time, Unix ms
           24  bytes of the text       32  text, UTF-8

Words are native-endian. Only the owner stores to its entries. The count is stored last when an entry is written, and
set to 0 before an entry is reused, so an entry is consistent if its count is the same before and after reading it.
"""

from __future__ import annotations

from mqproc.layout import word
from mqproc.layout.control import ROLES, SUPERVISOR, WORD_SIZE

MAGIC = 0x3130525245514D  # "MQERR01", little-endian
VERSION = 1
HEADER_SIZE = 64
HEADER_MAGIC, HEADER_VERSION = 0, 1

OWNERS = (SUPERVISOR, *ROLES)
ENTRIES = 32
ENTRY_SIZE = 512

# Word indices inside an entry.
COUNT, FIRST_MS, LAST_MS, TEXT_SIZE = range(4)
TEXT_AT = 4 * WORD_SIZE
TEXT_BYTES_MAX = ENTRY_SIZE - TEXT_AT

FILE_SIZE = HEADER_SIZE + len(OWNERS) * ENTRIES * ENTRY_SIZE

HEADER_FIELDS = (word("magic", HEADER_MAGIC), word("version", HEADER_VERSION))
ENTRY_FIELDS = (
    word("count", COUNT, "occurrences; 0 = free"),
    word("first_ms", FIRST_MS, "time of the first"),
    word("last_ms", LAST_MS, "time of the last"),
    word("text_size", TEXT_SIZE, "bytes of the text"),
)


def entry_offset(owner: str, number: int) -> int:
    """Byte offset of an owner's entry."""
    return HEADER_SIZE + (OWNERS.index(owner) * ENTRIES + number) * ENTRY_SIZE
