"""Moments as callers give them, as Unix ms."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Final

from mqproc.errors import BadRequestError
from mqproc.wire.options import BOOLS

if TYPE_CHECKING:
    from mqproc.client.core import Time

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
