"""What a filter may be. Clients ask before they send, servers before they believe."""

from __future__ import annotations

import re
from typing import Final

from mqproc.errors import FilterSyntaxError

FILTER_BYTES_MAX: Final = 4096

_SEPARATOR = re.compile("[\x01\x02]")


def parse_tags(expression: str) -> list[str]:
    """The tags of a filter `a || b`; none for the empty one and for `*`, which mean all.

    Raises FilterSyntaxError with the place of what no tag can have.
    """
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)
    if separator := _SEPARATOR.search(expression):
        place = separator.start()
        raise FilterSyntaxError(f"filter has byte 0x{ord(separator[0]):02X} at {place}", position=place)
    if expression.strip() in ("", "*"):
        return []
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterSyntaxError(f"filter {expression[:64]!r} names no tag", position=0)
    return [] if "*" in tags else tags
