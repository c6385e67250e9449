"""Numbers with what they count, as people write and read them."""

from __future__ import annotations

import re
from typing import Final

_PREFIXES: Final = ("", "k", "m", "g", "t")


def counted(count: int, noun: str) -> str:
    """`1 finding`, `1,200 findings`, `2 entries`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{count:,} {noun}s"


def parse_size(text: str) -> int:
    """Bytes: a number, or one with unit: `64KiB`, `10MB`, `1g`. Raises ValueError."""
    match = re.fullmatch(r"(\d[\d_]*)\s*([kmgt]?)(i?b?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write 1000000, 64KiB, 10MB or 1g")
    number, unit, tail = match[1], match[2].lower(), match[3].lower()
    base = 1000 if unit and tail == "b" else 1024
    return int(number) * int(base ** _PREFIXES.index(unit))
