"""What a filter may be. Clients ask before they send, servers before they believe."""

from __future__ import annotations

import re

from mqproc.errors import FilterSyntaxError
from mqproc.topic_names import FILTER_BYTES_MAX

_SEPARATOR = re.compile("[\x01\x02]")


def parse_tags(expression: str) -> list[str]:
    """The tags of a filter `a || b`; none for the empty one and for `*`, which mean all.

    Raises FilterSyntaxError with the place of what no tag can have.
    """
    _check_size(expression)
    if separator := _SEPARATOR.search(expression):
        place = separator.start()
        told = f"filter, character {place + 1} (the first is 1): no tag has byte 0x{ord(separator[0]):02X}"
        raise FilterSyntaxError(told, position=place)
    if expression.strip() in ("", "*"):
        return []
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterSyntaxError(f"filter {expression[:64]!r} names no tag", position=0)
    return [] if "*" in tags else tags


def check_sql(expression: str) -> str:
    """The SQL92 filter as it is sent. Raises FilterSyntaxError when it is empty or too long; the server parses it."""
    _check_size(expression)
    if not expression.strip():
        raise FilterSyntaxError("the SQL92 filter is empty")
    return expression


def _check_size(expression: str) -> None:
    if not isinstance(expression, str):
        raise FilterSyntaxError(f"filter {repr(expression)[:64]} is no text")
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)
