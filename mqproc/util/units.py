"""Units as text: sizes, counts, delay levels."""

from __future__ import annotations

import functools
import re
from typing import Final

from mqproc.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
PAGE_BYTES = 4096
# The page cache has no larger pages.
LARGE_PAGE_BYTES = 2 * MIB

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
        raise ValueError(f"{text!r} is not a size; write 1000000, 64KiB, 10MB or 1g")
    number, unit, tail = match[1], match[2].lower(), match[3].lower()
    base = 1000 if unit and tail == "b" else 1024
    return int(number) * int(base ** _PREFIXES.index(unit))


DELAY_LEVELS: Final = 18
"""Queues of SCHEDULE_TOPIC_XXXX; a store may use fewer levels."""
DELAY_MS_MAX: Final = 40 * 86_400_000
DELAY_STEP_MS: Final = 1_000
"""All delays are multiples of this."""
_UNITS_MS: Final = {"s": DELAY_STEP_MS, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@functools.lru_cache(16)
def delays_ms_of(text: str) -> tuple[int, ...]:
    """Parse delay levels, as in `1s 5s 10m 2h 1d`, to ms. Raises ConfigurationError."""
    parts = [re.fullmatch(r"([0-9]{1,9})([smhd])", part) for part in text.split()]
    delays = tuple(int(part[1]) * _UNITS_MS[part[2]] for part in parts if part is not None)
    if not 1 <= len(parts) == len(delays) <= DELAY_LEVELS or max(delays) > DELAY_MS_MAX:
        limit = f"from 1 to {DELAY_LEVELS} delays of at most {DELAY_MS_MAX // _UNITS_MS['d']} d, as in '1s 5s 10m 2h'"
        raise ConfigurationError(f"message_delay_level = {text!r} is out of range: {limit}")
    return delays


DELAYS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DELAYS_MS: Final = delays_ms_of(DELAYS)
"""RocketMQ's default."""
