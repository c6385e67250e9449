"""Numbers and truths that callers give, numpy's too: refused in words where they are given."""

from __future__ import annotations

import datetime
import math
import operator
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, SupportsFloat, SupportsIndex, TypeVar

from mqproc.errors import BadRequestError
from mqproc.wire.codec import BOOLS

if TYPE_CHECKING:
    from mqproc.client.requests import Time

T = TypeVar("T")


def at_least_one(name: str, value: SupportsIndex) -> int:
    """Raise BadRequestError for a number of messages or of workers that gets nothing done."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise BadRequestError(f"{name} = {value!r} is out of range: 1 at least")
    return number


def whole_number(name: str, value: SupportsIndex) -> int:
    """Raise BadRequestError for what is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise BadRequestError(f"{name} = {repr(value)[:64]} is no whole number") from None


def true_or_false(name: str, value: object) -> bool:
    """Raise BadRequestError for what is neither, as a text that says so."""
    if type(value).__name__ not in BOOLS:
        raise BadRequestError(f"{name} = {repr(value)[:64]} is neither True nor False")
    return bool(value)


def each_of(name: str, values: Iterable[T]) -> Iterator[T]:
    """Raise BadRequestError for what has no items."""
    try:
        return iter(values)
    except TypeError:
        raise BadRequestError(f"{name} = {repr(values)[:64]}: give a list, or what has items") from None


def above_zero(name: str, value: SupportsFloat | SupportsIndex) -> float:
    """Raise BadRequestError for what is no finite number above 0."""
    number = _finite(value)
    if number is None or number <= 0:
        raise BadRequestError(f"{name} = {value!r} is out of range: above 0, and finite")
    return number


def not_below_zero(name: str, value: SupportsFloat | SupportsIndex) -> float:
    """Raise BadRequestError for what is no finite number from 0 on."""
    number = _finite(value)
    if number is None or number < 0:
        raise BadRequestError(f"{name} = {value!r} is out of range: 0 at least, and finite")
    return number


def moment_after(name: str, seconds: SupportsFloat | SupportsIndex) -> float:
    """So many seconds from now, by the monotonic clock. Raises BadRequestError for what is no number."""
    try:
        if not math.isnan(seconds):  # It would never come. A text is refused, which float() would read.
            return time.monotonic() + float(seconds)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadRequestError(f"{name} = {repr(seconds)[:64]} is no number of seconds")


def milliseconds(name: str, seconds: SupportsFloat | SupportsIndex) -> int:
    """Seconds as whole ms. Raises BadRequestError for what is no number of seconds."""
    number = _finite(seconds)
    if number is None:
        raise BadRequestError(f"{name} = {seconds!r} is no number of seconds")
    return round(number * 1000)


def _finite(value: SupportsFloat | SupportsIndex) -> float | None:
    """A number as a float; None for a text too, which float() would read."""
    try:
        return float(value) if math.isfinite(value) else None
    except (TypeError, ValueError, OverflowError):  # A signaling NaN of Decimal's is a ValueError.
        return None


# --- moments ---
# Moments as callers give them, as Unix ms.


# Unix times in seconds from 1973 to 5138; as ms all these are before April 1973.
_SECONDS: Final = (100_000_000, 100_000_000_000)


def time_ms(moment: Time, default: int) -> int:
    """A moment as Unix ms: a number is that already, text is ISO 8601, local time where it names no zone.

    What is finer is cut off, as from store times: what is sent after now is not before it.
    Raises BadRequestError for what is none, and as `refuse_seconds`.
    """
    if moment is None:
        return default
    if isinstance(moment, str):
        try:
            moment = datetime.datetime.fromisoformat(moment)
        except ValueError:
            raise BadRequestError(f"{moment!r} is no ISO 8601 time") from None
    if isinstance(moment, datetime.datetime):
        return _datetime_ms(moment)
    try:
        if type(moment).__name__ in BOOLS:  # A number to Python, and what a caller meant for another argument.
            raise TypeError
        refuse_seconds(moment)
        return int(moment)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError):
        shown = f"a {type(moment).__name__}, {repr(moment)[:64]}"
        raise BadRequestError(f"no time is {shown}: give Unix ms, a datetime, or ISO 8601 text") from None


def _datetime_ms(moment: datetime.datetime) -> int:
    try:
        # Not by a method of its own: those of pandas take a naive moment for one in UTC. Cut from exact microseconds.
        return round(datetime.datetime.timestamp(moment) * 1_000_000) // 1000
    except (ValueError, OverflowError):  # pandas' NaT, and the ends of the years that datetimes have.
        raise BadRequestError(f"{moment!r} has no Unix time") from None


def refuse_seconds(moment: float) -> None:
    """Raise BadRequestError for a Unix time that is surely in seconds.

    Taken for ms it would say 1970: a message to be delivered later would come at once, and everything be in range.
    """
    if _SECONDS[0] <= moment < _SECONDS[1]:
        raise BadRequestError(f"{moment} looks like seconds: Unix times are in ms, {moment * 1000:.0f}, or datetimes")
