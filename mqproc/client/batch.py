"""Batches to send: columns of messages, without a Python step per message."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.columns import Texts, as_list, check_form, is_array, is_arrow, list_hint, no_bodies, numbers
from mqproc.client.message_fields import check_property_rows
from mqproc.errors import BadMessageError, BadRequestError, BadTimeError
from mqproc.util.arguments import refuse_seconds, time_ms


class Batch(msgspec.Struct, frozen=True, eq=False):
    """Messages for one topic, column by column.

    bodies: list of bytes, 2-D uint8 array, 'S' array, or Arrow binary or string array.
    keys: None, one key for all, a list with one key or a list of keys for each, or an Arrow string array.
    tags: None, one tag for all, a list, or an Arrow string array.
    queue_id: one queue for all; queue_ids: one for each; neither: the topic's queues in turn.
    sharding_keys: None, one for all, a list, or an Arrow string array; a key's hash selects the queue of its messages,
    those without a key take the queues in turn. Excludes queue ids; delayed messages need one key for all.
    properties: pairs for all messages, or a list with a mapping for each.
    batch: RocketMQ's all-or-nothing batch; its bodies together are limited to the size of one body.
    wait: False has a SYNC_FLUSH store answer before it syncs.
    unique: own unique ids: their prefix of 28 characters, and the first counter of at most 65,536.
    delay_level, deliver_at_ms: the delay of all messages, which then have one queue. Only `send_batch` accepts an array
    with one for each.
    """

    topic: str
    bodies: Any
    keys: Texts = None
    tags: Texts = None
    queue_id: int | None = None
    queue_ids: Any = None
    born_timestamps_ms: Any = None
    properties: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    flags: Any = None
    batch: bool = False
    wait: bool = True
    unique: tuple[str, int] | None = None
    delay_level: Any = 0
    deliver_at_ms: Any = 0
    sharding_keys: Texts = None

    def __len__(self) -> int:
        try:
            return len(self.bodies)
        except TypeError:
            raise no_bodies(self.bodies) from None


_ROW_COLUMNS: Final = "bodies keys tags queue_ids born_timestamps_ms properties flags sharding_keys".split()


def aligned(batch: Batch) -> Batch:
    """A copy that can be cut: each column is one value for all messages, or has one for each.

    Checks the lengths before the cut, so that no part is sent before an error. Raises BadRequestError as the encoding
    of the whole batch does.
    """
    count = len(batch)
    check_form(batch.bodies)
    for texts, name in ((batch.keys, "keys"), (batch.tags, "tags"), (batch.sharding_keys, "sharding keys")):
        _check_texts(texts, count, name)
    if batch.properties is not None and not isinstance(batch.properties, Mapping):
        check_property_rows(batch.properties, count)
    return msgspec.structs.replace(
        batch,
        queue_ids=_numbers(batch.queue_ids, "i4", count, "queue ids"),
        born_timestamps_ms=_numbers(batch.born_timestamps_ms, "i8", count, "born times"),
        flags=_numbers(batch.flags, "i4", count, "flags"),
    )


def unique_of(batch: Batch) -> tuple[str, int] | None:
    """A batch's own unique ids. Raises BadRequestError unless they are a prefix and a counter."""
    if batch.unique is None:
        return None
    match batch.unique:
        case (str() as prefix, int() | np.integer() as counter):
            return prefix, int(counter)
    raise BadRequestError(f"unique = {repr(batch.unique)[:64]}: give None, or a prefix and the first counter")


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Messages [start, stop) of an aligned batch."""
    unique = None if batch.unique is None else (batch.unique[0], batch.unique[1] + start)
    return _map_columns(batch, lambda column: column[start:stop], unique=unique)


def _map_columns(batch: Batch, change: Callable[[Any], Any], **others: Any) -> Batch:
    """A copy with changed columns; a value for all messages stays."""
    columns = {name: getattr(batch, name) for name in _ROW_COLUMNS}
    changed = {
        name: change(column)
        for name, column in columns.items()
        if not (column is None or isinstance(column, str | Mapping))
    }
    return msgspec.structs.replace(batch, **changed, **others)


def _at(column: Any, places: NDArray[np.int64]) -> Any:
    if isinstance(column, np.ndarray) or is_arrow(column):
        return column.take(places) if is_arrow(column) else column[places]
    return list(map(column.__getitem__, places.tolist()))


def _check_texts(texts: Texts, count: int, name: str) -> None:
    if texts is None or isinstance(texts, str):
        return
    if not (is_arrow(texts) or is_array(texts)):
        as_list(texts, name)
    if len(texts) != count:
        raise BadMessageError(f"{len(texts):,} {name} for {count:,} bodies")


def _numbers(values: Any, dtype: str, count: int, name: str) -> NDArray[Any] | None:
    return None if values is None else numbers(values, dtype, count, name)


# Delays
#
# A frame has one delivery time, so a batch with a time for each message is sent as one frame per time, at least.

# Limit of delays; NaN fails the comparison.
_DELAY_MS_MAX: Final = 1 << 61
Times = Any
"""One Time for all messages, or a list or an array (numpy, Arrow) with a Unix time in ms or a datetime for each."""
Delay = float | datetime.timedelta
"""Delay of a message: seconds, or a timedelta."""
Delays = Any
"""One Delay for all messages, or a list or an array (numpy, Arrow) with seconds or a timedelta for each."""


def deliver_at_ms(deliver_at: Times, delay: Delays) -> Any:
    """`Batch.deliver_at_ms` for a time, or a delay from now on: one, or one per message."""
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
    """A delay or a column of delays as seconds, NaN for NaT.

    Raises TypeError and ValueError for other values.
    """
    found: NDArray[Any] = np.asarray(delay)
    if found.dtype.kind == "O":
        return _seconds_of_objects(found)
    if found.dtype.kind == "M":  # numpy would count from 1970 in the array's unit.
        raise TypeError("datetimes are moments, for deliver_at")
    if found.dtype.kind in "bc":  # numpy would take 0 and 1, and the real part.
        raise TypeError(f"{'booleans' if found.dtype.kind == 'b' else 'complex numbers'} are no seconds")
    if found.dtype.kind == "m":
        # Use floats: in a finer unit large values would overflow silently.
        one_s = np.ones((), found.dtype) / np.timedelta64(1, "s")
        return np.where(np.isnat(found), np.nan, found.astype(np.int64) * one_s)
    return found.astype(np.float64)


def _seconds_of_objects(found: NDArray[Any]) -> NDArray[np.float64]:
    if any(is_numpys := [isinstance(one, np.timedelta64) for one in found.flat]):
        if not all(is_numpys):  # numpy would take each for a bare number in its own unit.
            raise TypeError("timedelta64 values are mixed with others")
        if len({one.dtype for one in found.flat}) > 1:  # In a common unit the largest may not fit.
            return np.array([_seconds(one) for one in found.flat]).reshape(found.shape)
        return _seconds(np.array(found.tolist()))
    # Checks each: numpy would take a number among timedeltas for microseconds.
    if all(isinstance(one, datetime.timedelta) for one in found.flat):
        return np.array([one.total_seconds() for one in found.flat]).reshape(found.shape)
    return found.astype(np.float64)


def is_column(value: Any) -> bool:
    """Whether a value is a column with one item per message."""
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
    """Split a batch into batches of one delivery time each, the earliest first.

    Returns them with the places of their messages in the batch, or with None when it is not split. Raises
    BadRequestError.
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
    whole = aligned(batch)
    waiting = zip(places, times.tolist(), strict=True) if len(batch) else ()
    parts = [_map_columns(whole, functools.partial(_at, places=at), **{name: moment}) for at, moment in waiting]
    return parts, order
