"""What one message has of numbers: its queue, flag and born time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mqproc.errors import BadMessageError, BadRequestError, NoSuchQueueError

_SHOWN_CHARACTERS: Final = 64
_WHOLE: Final = (int, np.integer)
_NOT_WHOLE: Final = (bool, np.timedelta64)


def is_whole(value: object) -> bool:
    """Python's and numpy's integers; truths and spans of time count as these there, and are none."""
    return type(value) is int or (isinstance(value, _WHOLE) and not isinstance(value, _NOT_WHOLE))


def check_queue_id(queue_id: Any, of_each: Any = None) -> None:
    """Raise NoSuchQueueError when no topic can have this queue, BadRequestError when messages have one of their own."""
    if of_each is not None:
        raise BadRequestError("a batch has one queue id for all messages, or one for each, not both")
    if not is_whole(queue_id):
        raise BadRequestError(_no_whole_number("queue_id", queue_id))
    if not 0 <= queue_id < 1 << 31:
        raise NoSuchQueueError(f"queue id {queue_id:,} is below 0 or too large")


def check_flag(flag: Any) -> None:
    """Raise BadMessageError when a flag does not fit its field."""
    if not is_whole(flag):
        raise BadMessageError(_no_whole_number("flag", flag))
    if not -(1 << 31) <= flag < 1 << 31:
        raise BadMessageError(f"flag {flag:,} does not fit 32 bits")


def check_born(born_timestamp_ms: Any) -> None:
    """Raise BadMessageError when a born time does not fit its field."""
    if born_timestamp_ms is None:
        return
    if not is_whole(born_timestamp_ms):
        raise BadMessageError(_no_whole_number("born_timestamp_ms", born_timestamp_ms))
    if not -(1 << 63) <= born_timestamp_ms < 1 << 63:
        raise BadMessageError(f"born_timestamp_ms {born_timestamp_ms:,} does not fit 64 bits")


def _no_whole_number(name: str, value: object) -> str:
    return f"{name} = {repr(value)[:_SHOWN_CHARACTERS]} is no whole number"
