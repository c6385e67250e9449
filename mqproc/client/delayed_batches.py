"""Columns of messages that wait: cut into batches of one time each, with no Python step for each message.

A frame's messages wait for one time. So a batch with a time for each message goes as one frame a time, at least.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.batch import Batch
from mqproc.client.columns import is_arrow, list_hint, numbers
from mqproc.client.moments import refuse_seconds, time_ms
from mqproc.errors import BadMessageError, BadRequestError, BadTimeError

# Times are no later than this is from now; what is no number compares as more.
_DELAY_MS_MAX: Final = 1 << 61
Times = Any
"""One Time for all messages, or a list or an array (numpy, Arrow) of Unix times in ms or of datetimes with one for
each."""
Delay = float | datetime.timedelta
"""How long a message waits: seconds, or a timedelta."""
Delays = Any
"""One Delay for all messages, or a list or an array (numpy, Arrow) of seconds or of timedeltas with one for each."""


def deliver_at_ms(deliver_at: Times, delay: Delays) -> Any:
    """What `Batch.deliver_at_ms` is of a time, or of a delay from now on: one, or one for each message."""
    if delay is None and deliver_at is None:
        return 0
    if delay is None:
        if not is_column(deliver_at) and (hint := list_hint(deliver_at)):
            raise BadTimeError(f"deliver_at is one time, or a list or an array, not {type(deliver_at).__name__}{hint}")
        return _times_ms(deliver_at) if is_column(deliver_at) else time_ms(deliver_at, 0)
    if deliver_at is not None:
        raise BadRequestError("give a delay or a time to deliver at, not both")
    now_ms = time.time_ns() // 1_000_000
    if isinstance(delay, str | bytes):
        raise _no_delay(f"{delay!r} is text")
    try:
        after_ms = np.rint(_seconds(delay) * 1000)
    except (TypeError, ValueError, OverflowError) as error:
        raise _no_delay(str(error)) from None
    if not (np.abs(after_ms) < _DELAY_MS_MAX).all():
        raise BadTimeError("a delay is no number of seconds, or too many")
    if (after_ms < 0).any():
        raise BadTimeError("a delay is below 0; deliver_at takes a moment that has passed, too")
    if np.ndim(after_ms) and not is_column(delay):
        raise _no_delay(f"a {type(delay).__name__} is no list or array{list_hint(delay)}")
    return now_ms + after_ms.astype(np.int64) if is_column(delay) else now_ms + int(after_ms)


def _no_delay(reason: str) -> BadTimeError:
    return BadTimeError(f"a delay is a number of seconds or a timedelta, or one for each message: {reason}")


def _seconds(delay: Delays) -> NDArray[np.float64]:
    """A delay or a column of delays as seconds, NaN for no time. Raises TypeError and ValueError for anything else."""
    found: NDArray[Any] = np.asarray(delay)
    if found.dtype.kind == "O" and any(is_numpys := [isinstance(one, np.timedelta64) for one in found.flat]):
        if not all(is_numpys):  # As below, each would be a bare number, in a unit of its own.
            raise TypeError("timedelta64s stand among others")
        if len({one.dtype for one in found.flat}) > 1:  # In one unit for all of them the largest may not fit.
            return np.array([_seconds(one) for one in found.flat]).reshape(found.shape)
        found = np.array(found.tolist())
    if found.dtype.kind == "M":  # numpy would count from 1970 in the array's own unit.
        raise TypeError("datetimes are moments, for deliver_at")
    if found.dtype.kind in "bc":  # numpy would take 0 and 1, and the real part.
        raise TypeError(f"{'booleans' if found.dtype.kind == 'b' else 'complex numbers'} are no seconds")
    if found.dtype.kind == "m":
        # As floats: in a finer unit large ones would become small without a word.
        one_s = np.ones((), found.dtype) / np.timedelta64(1, "s")
        return np.where(np.isnat(found), np.nan, found.astype(np.int64) * one_s)
    # Each is looked at: numpy would take a number among timedeltas for microseconds.
    if found.dtype.kind == "O" and all(isinstance(one, datetime.timedelta) for one in found.flat):
        return np.array([one.total_seconds() for one in found.flat]).reshape(found.shape)
    return found.astype(np.float64)


def is_column(value: Any) -> bool:
    """Whether this has one value for each message."""
    return (isinstance(value, np.ndarray | Sequence) and not isinstance(value, str)) or is_arrow(value)


def _times_ms(times: Any) -> NDArray[np.int64]:
    try:
        found: NDArray[Any] = np.asarray(times)
    except ValueError as error:
        raise BadTimeError(f"deliver_at is one time, or a list or an array of times: {error}") from None
    if found.dtype.kind == "M":
        return found.astype("datetime64[ms]").astype(np.int64)
    if found.dtype.kind in "iuf" and found.size:
        refuse_seconds(found.max().item())
    if found.ndim == 1 and found.dtype.kind in "OU":
        return np.fromiter((time_ms(one, 0) for one in found.tolist()), np.int64, len(found))
    return found


def by_time(batch: Batch) -> tuple[list[Batch], NDArray[np.int64] | None]:
    """Batches whose messages wait for one time, the earliest first, and the places of their messages in the given one.

    None for a batch that goes as it is. Raises BadRequestError.
    """
    names = [name for name in ("delay_level", "deliver_at_ms") if is_column(getattr(batch, name))]
    if not names:
        return [batch], None
    if batch.batch or batch.unique is not None or len(names) > 1:
        raise BadMessageError("an all-or-nothing batch, and one with ids of its own, waits for one time")
    (name,) = names
    times, of_each = np.unique(numbers(getattr(batch, name), "i8", len(batch), name), return_inverse=True)
    if times.any() and not isinstance(batch.sharding_keys, str | None):
        raise BadMessageError("messages that wait for their time have one sharding key for all")
    order = np.argsort(of_each, kind="stable")
    places = np.split(order, np.flatnonzero(np.diff(of_each[order])) + 1)
    aligned = batch.aligned()
    parts = [aligned.taken(of_time) for of_time in places] if len(batch) else []
    waiting = zip(parts, times.tolist(), strict=True)
    return [msgspec.structs.replace(part, **{name: moment}) for part, moment in waiting], order
