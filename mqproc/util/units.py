"""Units as text: counts, sizes, points in time, durations, delay levels.

Times are ISO 8601, epoch milliseconds, or relative to now (`15m`, `2h`, `1h30m`).
"""

from __future__ import annotations

import datetime
import functools
import re
import time
from typing import Final

from mqproc.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
PAGE_BYTES = 4096
# The page cache has no larger pages.
LARGE_PAGE_BYTES = 2 * MIB

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PREFIXES: Final = ("", "k", "m", "g", "t")
MS_PER_UNIT: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}


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


def format_bytes(size: float) -> str:
    """`0 B`, `4.0 KiB`, `1.2 GiB`."""
    value = float(size)
    for unit in _BYTE_UNITS:
        if abs(value) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def exact_bytes(size: int) -> str:
    """A size in the largest unit that divides it, as `parse_size` reads: `64KiB`, `5000000`."""
    for power, unit in reversed(list(enumerate(_BYTE_UNITS[1:5], 1))):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)


DELAY_LEVELS: Final = 18
"""Queues of SCHEDULE_TOPIC_XXXX; a store may use fewer levels."""
DELAY_MS_MAX: Final = 40 * 86_400_000
DELAY_STEP_MS: Final = 1_000
"""All delays are multiples of this."""


@functools.lru_cache(16)
def delays_ms_of(text: str) -> tuple[int, ...]:
    """Parse delay levels, as in `1s 5s 10m 2h 1d`, to ms. Raises ConfigurationError."""
    parts = [re.fullmatch(r"([0-9]{1,9})([smhd])", part) for part in text.split()]
    delays = tuple(int(part[1]) * MS_PER_UNIT[part[2]] for part in parts if part is not None)
    if not 1 <= len(parts) == len(delays) <= DELAY_LEVELS or max(delays) > DELAY_MS_MAX:
        limit = f"from 1 to {DELAY_LEVELS} delays of at most {DELAY_MS_MAX // MS_PER_UNIT['d']} d, as in '1s 5s 10m 2h'"
        raise ConfigurationError(f"message_delay_level = {text!r} is out of range: {limit}")
    return delays


DELAYS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DELAYS_MS: Final = delays_ms_of(DELAYS)
"""RocketMQ's default."""


# Times and durations

# A plain number is epoch milliseconds. Below this limit, a time before 1973, it is more likely a count or an offset.
EPOCH_MS_MIN = 100_000_000_000
# The end of the year 9999, the last time that datetime can print.
EPOCH_MS_MAX = 253_402_300_799_999
# 1990 to 2100: the range in which an error suggests another unit.
_LIKELY_MS_MIN, _LIKELY_MS_MAX = 631_152_000_000, 4_102_444_800_000

# About 146 million years: now minus a duration must fit into 64 bits.
_DURATION_MS_MAX = 1 << 62

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+")


def now_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def parse_duration_ms(text: str) -> int:
    """`90s`, `15m`, `1h30m`, `500ms` as milliseconds.

    Raises ValueError, also for one beyond 64 bits.
    """
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; write 500ms, 90s, 15m, 2h, 1d or 1h30m")
    found = sum(float(count) * MS_PER_UNIT[unit] for count, unit in _PART.findall(text))
    check_duration_ms(found, text)
    return round(found)


def check_duration_ms(duration_ms: float, text: str) -> None:
    """Raise ValueError if a duration is too long to be subtracted from now; `text` is its text."""
    if duration_ms > _DURATION_MS_MAX:
        raise ValueError(f"{text[:64]!r} is longer than {_DURATION_MS_MAX // MS_PER_UNIT['d']:,}d")


def is_duration(text: str) -> bool:
    """Whether a text is a time relative to now."""
    return _DURATION.fullmatch(text.strip()) is not None


def parse_time_ms(text: str, now: int | None = None) -> int:
    """Parse ISO 8601 (local time without a zone), epoch ms, `now` or an age to Unix ms.

    Raises ValueError with examples.
    """
    text = text.strip()
    now = now_ms() if now is None else now
    if text == "now":
        return now
    if _DURATION.fullmatch(text):
        return now - parse_duration_ms(text)
    if re.fullmatch(r"\d+", text):
        return _epoch_ms(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-21T10:00, 2026-11-21T10:00:00Z, epoch milliseconds, 15m or 2h"
        ) from None
    return datetime_ms(moment)


def _epoch_ms(text: str) -> int:
    if EPOCH_MS_MIN <= int(text) <= EPOCH_MS_MAX:
        return int(text)
    for unit, in_ms in (
        ("seconds", int(text) * 1000),
        ("microseconds", int(text) // 1000),
        ("nanoseconds", int(text) // 1_000_000),
    ):
        if _LIKELY_MS_MIN <= in_ms <= _LIKELY_MS_MAX:
            raise ValueError(f"{text!r} is not a time in epoch milliseconds; {unit} would be {in_ms}")
    raise ValueError(f"{text!r} is not a time in epoch milliseconds")


def datetime_ms(moment: datetime.datetime) -> int:
    """Unix milliseconds of a datetime; without a zone it is local time."""
    if moment.tzinfo is None:
        moment = moment.astimezone()
    return (moment - _EPOCH) // _MILLISECOND


_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)


def format_time(time_ms: int) -> str:
    """Format as ISO 8601 in local time with zone and milliseconds.

    `-` for 0, the number itself if out of range.
    """
    if time_ms == 0:
        return "-"
    if not 0 < time_ms <= EPOCH_MS_MAX:
        return str(time_ms)
    moment = datetime.datetime.fromtimestamp(time_ms // 1000, datetime.UTC).astimezone()
    return moment.replace(microsecond=time_ms % 1000 * 1000).isoformat(timespec="milliseconds")


def format_duration(seconds: float) -> str:
    """Format a duration with about three digits: `3.2 ms`, `1.50 s`, `4 m 05 s`, `2 h 10 m`.

    A negative one, after the clock was set back, is 0.
    """
    seconds = max(0.0, seconds)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m"
