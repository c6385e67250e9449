"""Checks of filter expressions, made by clients before sending and by servers on receipt."""

from __future__ import annotations

import re

from mqproc.errors import FilterSyntaxError
from mqproc.topic_names import FILTER_BYTES_MAX

_SEPARATOR = re.compile("[\x01\x02]")


def parse_tags(expression: str) -> list[str]:
    """Parse a filter `a || b` into tags; empty and `*` give none, which means all.

    Raises FilterSyntaxError with the position of an invalid character.
    """
    _check_size(expression)
    if separator := _SEPARATOR.search(expression):
        place = separator.start()
        text = f"filter, character {place + 1} (the first is 1): a tag cannot contain byte 0x{ord(separator[0]):02X}"
        raise FilterSyntaxError(text, position=place)
    if expression.strip() in ("", "*"):
        return []
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterSyntaxError(f"filter {expression[:64]!r} names no tag", position=0)
    return [] if "*" in tags else tags


def check_sql(expression: str) -> str:
    """Check a SQL92 filter. Raises FilterSyntaxError if empty or too long; servers parse it."""
    _check_size(expression)
    if not expression.strip():
        raise FilterSyntaxError("the SQL92 filter is empty")
    return expression


def _check_size(expression: str) -> None:
    if not isinstance(expression, str):
        raise FilterSyntaxError(f"filter {repr(expression)[:64]} is not text")
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)
