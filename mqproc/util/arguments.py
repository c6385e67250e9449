"""Checks of arguments: numbers, truth values and times, also those of numpy.

Each raises BadRequestError.
"""

from __future__ import annotations

import datetime
import math
import operator
import time
from collections.abc import Iterable, Iterator
from typing import Final, SupportsFloat, SupportsIndex, TypeVar

from mqproc.errors import BadRequestError

BOOLEAN_TYPE_NAMES: Final = ("bool", "bool_")
"""Type names of Python's and numpy's booleans; not every client imports numpy."""

T = TypeVar("T")
Time = int | float | str | datetime.datetime | None
"""A time: Unix ms, a datetime (local time when naive), ISO 8601 text, or None for no bound."""


def at_least_one(name: str, value: SupportsIndex) -> int:
    """Raise BadRequestError unless the value is an integer of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise BadRequestError(f"{name} = {value!r} is out of range: 1 at least")
    return number


def whole_number(name: str, value: SupportsIndex) -> int:
    """Raise BadRequestError unless the value is an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise BadRequestError(f"{name} = {repr(value)[:64]} is no whole number") from None


def true_or_false(name: str, value: object) -> bool:
    """Raise BadRequestError unless the value is a bool; a text such as "no" is refused."""
    if type(value).__name__ not in BOOLEAN_TYPE_NAMES:
        raise BadRequestError(f"{name} = {repr(value)[:64]} is neither True nor False")
    return bool(value)


def each_of(name: str, values: Iterable[T]) -> Iterator[T]:
    """Raise BadRequestError unless the value is iterable."""
    try:
        return iter(values)
    except TypeError:
        raise BadRequestError(f"{name} = {repr(values)[:64]}: give a list or another iterable") from None


def above_zero(name: str, value: SupportsFloat | SupportsIndex) -> float:
    """Raise BadRequestError unless the value is a finite number above 0."""
    number = _finite(value)
    if number is None or number <= 0:
        raise BadRequestError(f"{name} = {value!r} is out of range: above 0, and finite")
    return number


def not_below_zero(name: str, value: SupportsFloat | SupportsIndex) -> float:
    """Raise BadRequestError unless the value is a finite number of at least 0."""
    number = _finite(value)
    if number is None or number < 0:
        raise BadRequestError(f"{name} = {value!r} is out of range: 0 at least, and finite")
    return number


def moment_after(name: str, seconds: SupportsFloat | SupportsIndex) -> float:
    """Monotonic time so many seconds from now.

    Raises BadRequestError unless the value is a number.
    """
    try:
        if not math.isnan(seconds):  # NaN never comes. math.isnan refuses texts, which float() would accept.
            return time.monotonic() + float(seconds)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadRequestError(f"{name} = {repr(seconds)[:64]} is no number of seconds")


def milliseconds(name: str, seconds: SupportsFloat | SupportsIndex) -> int:
    """Seconds as whole ms. Raises BadRequestError unless the value is a finite number."""
    number = _finite(seconds)
    if number is None:
        raise BadRequestError(f"{name} = {seconds!r} is no number of seconds")
    return round(number * 1000)


def _finite(value: SupportsFloat | SupportsIndex) -> float | None:
    """A finite number as a float; None for other values, also for texts."""
    try:
        return float(value) if math.isfinite(value) else None
    except (TypeError, ValueError, OverflowError):  # ValueError: Decimal's signaling NaN.
        return None


# Timestamps

# Unix times in seconds from 1973 to 5138; as ms they would all be before April 1973.
_SECONDS: Final = (100_000_000, 100_000_000_000)


def time_ms(moment: Time, default: int) -> int:
    """A time as Unix ms, cut off like store times; `default` for None.

    Raises BadRequestError for other values, and as `refuse_seconds`.
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
        if (
            type(moment).__name__ in BOOLEAN_TYPE_NAMES
        ):  # A bool is an int, but certainly an argument in the wrong place.
            raise TypeError
        refuse_seconds(moment)
        return int(moment)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError):
        shown = f"a {type(moment).__name__}, {repr(moment)[:64]}"
        raise BadRequestError(f"no time is {shown}: give Unix ms, a datetime, or ISO 8601 text") from None


def _datetime_ms(moment: datetime.datetime) -> int:
    try:
        # Use datetime's own method: pandas' method takes a naive time for UTC. Cut off exact microseconds.
        return round(datetime.datetime.timestamp(moment) * 1_000_000) // 1000
    except (ValueError, OverflowError):  # pandas' NaT, and years outside the range of timestamps.
        raise BadRequestError(f"{moment!r} has no Unix time") from None


def refuse_seconds(moment: float) -> None:
    """Raise BadRequestError for a Unix time that is certainly in seconds.

    As ms it would be in 1970: a delayed message would be delivered at once, and a range would include all messages.
    """
    if _SECONDS[0] <= moment < _SECONDS[1]:
        raise BadRequestError(f"{moment} looks like seconds: Unix times are in ms, {moment * 1000:.0f}, or datetimes")
