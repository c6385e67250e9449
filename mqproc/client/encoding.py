"""From messages to append frames: columns of lengths and bytes, with no Python step for each message of a batch.

Bodies, keys and tags may be lists, numpy arrays or Arrow arrays; an Arrow array's buffers are sent as they are. What
would be stored as something else than was meant is refused here: separator bytes, keys with a space, reserved names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.unique_id import COUNTERS, reserve, unique_id
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadTopicError,
    FrameTooLargeError,
    NoSuchQueueError,
    PropertiesTooLargeError,
)
from mqproc.layout.properties import (
    CRC32,
    KEY_SEPARATOR,
    KEYS,
    NAME_END,
    PAIR_END,
    RESERVED,
    TAGS,
    UNIQ_KEY,
    bucket,
)
from mqproc.layout.properties import encode as encode_properties
from mqproc.layout.record import PROPERTIES_SIZE_MAX
from mqproc.message import Message
from mqproc.wire.checks import check_topic
from mqproc.wire.operations import COLUMN_ABSENT, QUEUE_ANY, QUEUE_COLUMN, AppendRequest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A body of this size or more is sent from where it lies; smaller ones are joined.
_SCATTERED_BODY_BYTES: Final = 16 << 10
# A frame has one prefix of unique ids, which has so many counters.
FRAME_MESSAGES_MAX: Final = COUNTERS
# Room that a frame's header and options may take.
_OVERHEAD_BYTES: Final = 128 << 10
TRANSIENT_PREFIX: Final = "__RMQ.TRANSIENT."

_LENGTH = np.dtype("<u4")
_SHORT_LENGTH = np.dtype("<u2")
_SEPARATOR = re.compile(f"[{NAME_END}{PAIR_END}]")
_KEY_FORBIDDEN = re.compile(f"[{NAME_END}{PAIR_END}{KEY_SEPARATOR}]")
_encode_options = msgspec.msgpack.Encoder().encode

# RocketMQ's order of the names that the writer fills in itself, which the four gaps stand around.
_UNIQUE_BUCKET, _TAG_BUCKET, _KEYS_BUCKET = bucket(UNIQ_KEY), bucket(TAGS), bucket(KEYS)
assert _UNIQUE_BUCKET < _TAG_BUCKET < _KEYS_BUCKET

Texts = Any
"""Keys or tags: one text for all, a list of texts, or an Arrow string array; keys also a list of lists of texts."""


class Column(NamedTuple):
    """Values of all messages one after the other. `size` is the sum of `lengths`."""

    lengths: NDArray[Any]
    size: int
    data: list[ReadableBuffer]


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages for one topic, column by column.

    bodies: list of bytes, 2-D uint8 array, 'S' array, or Arrow binary or string array.
    keys: None, one key for all, a list with one key or a list of keys for each, or an Arrow string array.
    tags: None, one tag for all, a list, or an Arrow string array.
    queue_id: one queue for all; queue_ids: one for each; neither: the writer goes round the topic's queues.
    properties: pairs for all messages, or a list with a mapping for each.
    batch: RocketMQ's all-or-nothing batch. wait: False answers before the sync of a SYNC_FLUSH store.
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

    def __len__(self) -> int:
        return len(self.bodies)

    def part(self, start: int, stop: int) -> Batch:
        """Messages [start, stop) as a batch."""
        names = ("bodies", "keys", "tags", "queue_ids", "born_timestamps_ms", "properties", "flags")
        return replace(self, **{name: _slice(getattr(self, name), start, stop) for name in names})


def _slice(column: Any, start: int, stop: int) -> Any:
    return column if column is None or isinstance(column, str | Mapping) else column[start:stop]


class AppendFrame(NamedTuple):
    """An append request, encoded. The message i has unique id `unique_prefix` + counter `unique_counter` + i."""

    topic: str
    count: int
    options: bytes
    payload: list[ReadableBuffer]
    unique_prefix: str
    unique_counter: int


# Checks

_checked_topics: set[str] = set()


def _check_topic(topic: str) -> None:
    """As `check_topic`; a name that passed is not looked at again."""
    if topic not in _checked_topics:
        check_topic(topic)
        if len(_checked_topics) >= 65_536:
            _checked_topics.clear()
        _checked_topics.add(topic)


def check_property(name: str, value: str) -> None:
    """Raise BadPropertyError unless a user's property would be stored and read back as it is."""
    if not isinstance(name, str) or not isinstance(value, str) or not name or not value:
        raise BadPropertyError(f"property {name!r} = {value!r}: name and value must be texts that are not empty")
    if name in RESERVED or name.startswith(TRANSIENT_PREFIX):
        raise BadPropertyError(f"property {name!r} is reserved")
    if found := _SEPARATOR.search(name) or _SEPARATOR.search(value):
        raise BadPropertyError(f"property {name!r} holds the separator byte 0x{ord(found[0]):02X}")


def check_tag(tag: str) -> None:
    """Raise BadPropertyError when a tag holds a separator byte."""
    if found := _SEPARATOR.search(tag):
        raise BadPropertyError(f"tag {tag[:64]!r} holds the separator byte 0x{ord(found[0]):02X}")


def check_keys(keys: Sequence[str]) -> None:
    """Raise BadPropertyError when a key is empty, or holds a separator byte or a space, at which it would be split."""
    if isinstance(keys, str):
        raise BadPropertyError(f"keys must be a sequence of texts, not the text {keys[:64]!r}")
    for key in keys:
        if not key:
            raise BadPropertyError("a key is empty")
        if found := _KEY_FORBIDDEN.search(key):
            raise BadPropertyError(f"key {key[:64]!r} holds the separator byte 0x{ord(found[0]):02X}")


# Columns of bytes


def _lengths_of(values: Sequence[Any], dtype: np.dtype[Any] = _LENGTH) -> NDArray[Any]:
    return np.fromiter(map(len, values), dtype, len(values))


def encode_bodies(bodies: Any) -> Column:
    """A body column of what `Batch.bodies` may be. Raises BadMessageError."""
    if isinstance(bodies, np.ndarray):
        return _numpy_bodies(bodies)
    if is_arrow(bodies):
        return arrow_column(bodies, _LENGTH, "bodies")
    if isinstance(bodies, str | bytes | bytearray | memoryview) or not isinstance(bodies, Sequence):
        raise BadMessageError(f"bodies must be a list of bytes, or a numpy or Arrow array, not {type(bodies).__name__}")
    return _list_bodies(bodies)


def _list_bodies(bodies: Sequence[Any]) -> Column:
    try:
        lengths = _lengths_of(bodies)
        size = int(lengths.sum(dtype=np.int64))
        if size < len(bodies) * _SCATTERED_BODY_BYTES:
            joined = b"".join(bodies)
            if len(joined) != size:
                raise TypeError("a body's items are not bytes")
            return Column(lengths, size, [joined])
        views: list[ReadableBuffer] = [memoryview(body).cast("B") for body in bodies if len(body)]
    except (TypeError, ValueError) as error:
        raise BadMessageError(f"bodies: {error}") from None
    return Column(lengths, size, views)


def _numpy_bodies(bodies: NDArray[Any]) -> Column:
    if bodies.dtype == np.uint8 and bodies.ndim == 2:
        rows = np.ascontiguousarray(bodies)
        return Column(np.full(len(rows), rows.shape[1], _LENGTH), rows.nbytes, [rows.reshape(-1).data])
    if bodies.dtype.kind == "S" and bodies.ndim == 1:
        return _padded_bodies(np.ascontiguousarray(bodies))
    if bodies.dtype.kind == "O" and bodies.ndim == 1:
        return _list_bodies(bodies.tolist())
    raise BadMessageError(f"bodies: a numpy array of {bodies.dtype} with {bodies.ndim} dimensions is no list of bodies")


def _padded_bodies(bodies: NDArray[np.bytes_]) -> Column:
    """Texts padded with zero bytes to one width, as numpy keeps them; the padding is not sent."""
    width = bodies.dtype.itemsize
    lengths = np.strings.str_len(bodies).astype(_LENGTH)
    rows = bodies.view(np.uint8).reshape(len(bodies), width)
    size = int(lengths.sum(dtype=np.int64))
    data = rows.reshape(-1) if size == rows.size else rows[np.arange(width) < lengths[:, None]]
    return Column(lengths, size, [data.data])


def encode_texts(texts: Texts, count: int, name: str) -> Column:
    """A column of short texts, one for each message; None and "" are none."""
    if is_arrow(texts):
        column = arrow_column(texts, _SHORT_LENGTH, name)
    else:
        values = texts.tolist() if isinstance(texts, np.ndarray) else texts
        if not isinstance(values, Sequence):
            raise BadPropertyError(f"{name} must be a list of texts or an Arrow array, not {type(texts).__name__}")
        column = _list_texts(values, name)
    if len(column.lengths) != count:
        raise BadMessageError(f"{len(column.lengths):,} {name} for {count:,} bodies")
    return column


def _list_texts(values: Sequence[Any], name: str) -> Column:
    try:
        joined = "".join(values)
        data = joined.encode()
        if len(data) == len(joined):
            sizes = _lengths_of(values, np.dtype(np.int64))
        else:
            sizes = _lengths_of(list(map(str.encode, values)), np.dtype(np.int64))
    except (TypeError, UnicodeEncodeError) as error:
        raise BadPropertyError(f"{name}: {error}") from None
    return Column(_short_lengths(sizes, name), len(data), [data])


def _short_lengths(sizes: NDArray[np.int64], name: str) -> NDArray[Any]:
    if len(sizes) and int(sizes.max()) > PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"{name} of {int(sizes.max()):,} bytes exceed {PROPERTIES_SIZE_MAX:,}")
    return sizes.astype(_SHORT_LENGTH)


def _contains(column: Column, byte: str) -> bool:
    needle = byte.encode()
    return any(needle in (part if type(part) is bytes else bytes(part)) for part in column.data)


def encode_keys(keys: Texts, count: int) -> Column:
    """The keys column: each message's keys joined by a space. Raises BadPropertyError."""
    spaces = 0
    if not is_arrow(keys) and not isinstance(keys, np.ndarray):
        lists = [index for index, value in enumerate(keys) if type(value) is not str] if _mixed(keys) else []
        if lists:
            keys = list(keys)
            for index in lists:
                check_keys(keys[index])
                spaces += max(0, len(keys[index]) - 1)
                keys[index] = KEY_SEPARATOR.join(keys[index])
    column = encode_texts(keys, count, "keys")
    found = sum(bytes(part).count(b" ") for part in column.data)
    if found != spaces:
        raise BadPropertyError("a key holds a space, at which it would be split")
    _check_separators(column, "key")
    return column


def _mixed(keys: Any) -> bool:
    """Whether some element is a list of keys."""
    return isinstance(keys, Sequence) and not all(map(str.__instancecheck__, keys)) if False else _any_list(keys)


def _any_list(keys: Any) -> bool:
    return isinstance(keys, Sequence) and set(map(type, keys)) != {str}


def _check_separators(column: Column, name: str) -> None:
    for separator in (NAME_END, PAIR_END):
        if _contains(column, separator):
            raise BadPropertyError(f"a {name} holds the separator byte 0x{ord(separator):02X}")
