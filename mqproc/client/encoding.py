"""Encoding of messages as append frames: columns of lengths and bytes.

Bodies, keys and tags may be lists, numpy arrays or Arrow arrays, whose buffers are sent without a copy. Values that the
store would change are refused here: separator bytes, keys with a space, reserved names.
"""

from __future__ import annotations

import itertools
import operator
import struct
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.batch import Batch, aligned, part_of, unique_of
from mqproc.client.columns import (
    NO_COLUMN,
    Column,
    Texts,
    arrow_texts,
    as_bytes,
    as_list,
    encode_bodies,
    encode_keys,
    encode_sharding_keys,
    encode_tags,
    encode_texts,
    joined_keys,
    list_bodies,
    numbers,
    queue_numbers,
)
from mqproc.client.message_fields import (
    COUNTERS,
    FIXED_PAIRS_BYTES,
    ID_CHARACTERS,
    NO_GAPS,
    SHARDING_PAIR_BYTES,
    Gaps,
    SystemProperties,
    check_born,
    check_delay,
    check_flag,
    check_keys,
    check_property_rows,
    check_queue_id,
    check_sharding_key,
    check_tag,
    check_unique_id,
    not_properties,
    plain_text,
    reserve,
    split_at_gaps,
    unique_id,
    utf8,
    whole_properties,
)
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    FrameTooLargeError,
    PropertiesTooLargeError,
)
from mqproc.layout.properties import KEY_SEPARATOR
from mqproc.layout.record import PROPERTIES_SIZE_MAX
from mqproc.topic_names import check_topic
from mqproc.types import Message
from mqproc.wire.frames import size_of
from mqproc.wire.operations import COLUMN_ABSENT, QUEUE_ANY, QUEUE_COLUMN, AppendRequest, encoded

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# All unique ids of a frame have one prefix, which has COUNTERS ids.
FRAME_MESSAGES_MAX: Final = COUNTERS
# Room for a frame's header and options.
_OVERHEAD_BYTES: Final = 128 << 10
# A property string whose tag, keys and sharding key are no longer than this always fits.
_SHORT: Final = 4096
_PLAIN_BYTES_MAX: Final = PROPERTIES_SIZE_MAX - FIXED_PAIRS_BYTES
_GAPS: Final = ("gap_before_unique", "gap_before_tag", "gap_before_keys", "gap_after_keys")
_TOPICS_REMEMBERED_MAX: Final = 65_536
# Only short tags are remembered.
_SHORT_TAG: Final = 64
_TAGS_REMEMBERED_MAX: Final = 65_536
_SHORT_KEY: Final = 64

# Called for each message of a frame, without a Python frame.
_body_of, _tag_of, _several_keys_of = (operator.attrgetter(name) for name in ("body", "tag", "keys"))
_born_of, _flag_of = operator.attrgetter("born_timestamp_ms"), operator.attrgetter("flag")
_properties_of, _unique_id_of = operator.attrgetter("properties"), operator.attrgetter("unique_id")
_sharding_key_of = operator.attrgetter("sharding_key")
_encode_array = msgspec.msgpack.Encoder().encode
_KEYS: Final = {tuple, list}
_MESSAGE: Final = {Message}
_NO_PAIRS: Final[dict[str, str]] = {}
# The fields of an encoded message after its keys when none is given, and the head of a message.
_NOT_GIVEN: Final = _encode_array(Message("", b""))[-8:]
_HEAD: Final = _encode_array(Message("", b""))[:1]
_pack_length = struct.Struct("<I").pack
_pack_short_length = struct.Struct("<H").pack


class AppendFrame(msgspec.Struct):
    """An encoded append request.

    Message i has the unique id `unique_prefix` + counter `unique_counter` + i.
    """

    topic: str
    count: int
    options: bytes
    payload: list[ReadableBuffer]
    unique_prefix: str
    unique_counter: int

    @property
    def payload_bytes(self) -> int:
        return size_of(self.payload)


# Checks

_checked_topics: set[str] = set()
_checked_tags: set[str] = {""}
_TEXT: Final = {str}


def _check_topic(topic: str) -> None:
    """As `check_topic`, once for each name."""
    if not isinstance(topic, str) or topic not in _checked_topics:  # Other types may have no hash.
        check_topic(topic)
        if len(_checked_topics) >= _TOPICS_REMEMBERED_MAX:
            _checked_topics.clear()
        _checked_topics.add(topic)


def _check_tag(tag: str) -> bool:
    """As `check_tag`; returns whether the tag is short, and remembers it then."""
    check_tag(tag)
    if len(tag) > _SHORT_TAG:
        return False
    if len(_checked_tags) >= _TAGS_REMEMBERED_MAX:
        _checked_tags.clear()
    _checked_tags.add(tag)
    return True


def snapshot(message: Message) -> Message:
    """A copy of the message that later changes by the caller do not affect.

    None is not given, and texts are exact. Values of other types are left to the checks.
    """
    keys, properties = message.keys, message.properties
    if type(properties) is dict and not properties and _is_immutable(message):
        return message
    if keys is None or (isinstance(keys, Sequence) and not isinstance(keys, str | bytes)):
        keys = tuple(map(plain_text, keys or ()))
    if not isinstance(properties, SystemProperties) and (properties is None or isinstance(properties, Mapping)):
        pairs = (properties or {}).items()
        properties = {plain_text(name): plain_text(value) for name, value in pairs}
    given = (message.tag, message.sharding_key, message.unique_id)
    texts = ("" if text is None else plain_text(text) for text in given)
    changed = dict(zip(("tag", "sharding_key", "unique_id"), texts, strict=True))
    return msgspec.structs.replace(
        message,
        topic=plain_text(message.topic),
        body=_own_body(message.body),
        keys=keys,
        properties=properties,
        **changed,
    )


def _is_immutable(message: Message) -> bool:
    """Whether body, texts and keys are of exact, immutable types."""
    topic, tag, sharding_key, unique = message.topic, message.tag, message.sharding_key, message.unique_id
    keys = message.keys
    return (
        type(message.body) is bytes
        and type(topic) is type(tag) is type(sharding_key) is type(unique) is str
        and type(keys) is tuple
        and (not keys or set(map(type, keys)) == _TEXT)
    )


def _own_body(body: Any) -> Any:
    try:
        return body if type(body) is bytes else as_bytes(body)
    except BadMessageError:
        return body  # The check refuses it.


# Frames


class _Columns(msgspec.Struct):
    """Checked parts of a frame."""

    topic: str
    bodies: Column
    keys: Column = NO_COLUMN
    tags: Column = NO_COLUMN
    properties: Column = NO_COLUMN
    born: NDArray[np.int64] | None = None
    queues: NDArray[np.int32] | None = None
    flags: NDArray[np.int32] | None = None
    sharding_keys: Column = NO_COLUMN
    queue_id: int = QUEUE_ANY
    tag: str = ""
    gaps: Gaps = NO_GAPS
    born_timestamp_ms: int = 0
    unique_prefix: str = ""
    unique_counter: int = 0
    further: dict[str, Any] = {}  # rare options, by name


_columns_of = operator.attrgetter("bodies", "keys", "tags", "properties", "sharding_keys", "born", "queues", "flags")


def _frame(columns: _Columns, *, wait: bool, batch: bool = False, oneway: bool = False) -> AppendFrame:
    bodies, keys, tags, whole, sharding_keys, born, queues, flags = _columns_of(columns)
    count, gaps, further = len(bodies.lengths), columns.gaps, columns.further
    prefix, counter = columns.unique_prefix, columns.unique_counter
    if whole is not NO_COLUMN:
        prefix, counter = "", 0
    elif keys.longest + tags.longest + sharding_keys.longest + len(columns.tag) > _SHORT or gaps is not NO_GAPS:
        _check_property_sizes(columns)
    if gaps is not NO_GAPS:
        further = further | dict(zip(_GAPS, gaps, strict=True))
    options = AppendRequest(
        columns.topic,
        count,
        columns.queue_id,
        bodies.size,
        keys.size,
        tags.size,
        whole.size,
        born is not None,
        queues is not None,
        flags is not None,
        columns.tag,
        prefix,
        counter,
        columns.born_timestamp_ms,
        wait=wait,
        batch=batch,
        oneway=oneway,
        sharding_bytes=sharding_keys.size,
        **further,
    )
    payload = [*bodies.pieces, *keys.pieces, *tags.pieces, *whole.pieces]
    if born is not None or queues is not None or flags is not None:
        payload += [numbers.data for numbers in (born, queues, flags) if numbers is not None]
    payload += sharding_keys.pieces
    return AppendFrame(columns.topic, count, encoded(options), payload, columns.unique_prefix, columns.unique_counter)


def _check_property_sizes(columns: _Columns) -> None:
    """Check the sizes of the property strings that the writer will make, without CRC."""
    constant = FIXED_PAIRS_BYTES + len(columns.tag.encode()) + sum(map(len, columns.gaps))
    keys, tags, sharding_keys = columns.keys, columns.tags, columns.sharding_keys
    if sharding_keys is not NO_COLUMN:
        constant += SHARDING_PAIR_BYTES
    if constant + keys.longest + tags.longest + sharding_keys.longest <= PROPERTIES_SIZE_MAX:
        return
    sizes = np.full(len(columns.bodies.lengths), constant, np.int64)
    for column in (keys, tags, sharding_keys):
        if column is not NO_COLUMN:
            sizes += column.lengths
    if int(sizes.max()) > PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {int(sizes.max()):,} bytes exceed {PROPERTIES_SIZE_MAX:,}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def encode_message(message: Message, *, wait: bool = True, oneway: bool = False) -> AppendFrame:
    """Encode one message: the path of single sends, without any step for other cases."""
    topic, body, queue_id = message.topic, message.body, message.queue_id
    if type(topic) is not str or topic not in _checked_topics:
        _check_topic(topic)
    if type(body) is not bytes:
        body = as_bytes(body)
    if not _has_only_tag_and_keys(message):
        return encode_messages([snapshot(message)], wait=wait, oneway=oneway)
    keys = _check_plain(message)
    prefix, counter = reserve(1)
    born = message.born_timestamp_ms
    options = AppendRequest(
        topic=topic,
        count=1,
        queue_id=QUEUE_ANY if queue_id is None else queue_id,
        bodies_bytes=len(body),
        keys_bytes=len(keys) if keys else COLUMN_ABSENT,
        tag=message.tag or "",
        unique_prefix=prefix,
        unique_counter=counter,
        born_timestamp_ms=_now_ms() if born is None else born,
        flag=message.flag,
        wait=wait,
        oneway=oneway,
        delay_level=message.delay_level,
        deliver_at_ms=message.deliver_at_ms,
    )
    payload: list[ReadableBuffer] = [_pack_length(len(body)), body]
    if keys:
        payload += (_pack_short_length(len(keys)), keys)
    return AppendFrame(topic, 1, encoded(options), payload, prefix, counter)


def _has_only_tag_and_keys(message: Message) -> bool:
    """Whether the writer can make a message's property string of its tag and keys."""
    try:
        return not (message.properties or message.unique_id or message.sharding_key)
    except (TypeError, ValueError):  # Columns and pandas' NA have no truth value.
        check_unique_id(message.unique_id)
        check_sharding_key(message.sharding_key, {}, names_queue=False)
        raise not_properties(message.properties) from None


def _check_plain(message: Message) -> bytes:
    """Check tag, keys, queue, flag and time of a plain message; return its keys.

    Raises BadRequestError.
    """
    tag, several, keys = message.tag, message.keys, b""
    tag = "" if tag is None else tag
    try:
        short = type(tag) is str and tag in _checked_tags
        if not short and tag != "":
            short = _check_tag(tag)
        if several:
            check_keys(several)
            keys = KEY_SEPARATOR.join(several).encode()
            if (not short or len(keys) > _SHORT) and len(keys) + len(tag.encode()) > _PLAIN_BYTES_MAX:
                raise PropertiesTooLargeError(f"keys of {len(keys):,} bytes exceed {PROPERTIES_SIZE_MAX:,}")
        elif not short and len(tag.encode()) > _PLAIN_BYTES_MAX:
            raise PropertiesTooLargeError(f"a tag of {len(tag.encode()):,} bytes exceeds {PROPERTIES_SIZE_MAX:,}")
        _check_numbers(message)
    except (TypeError, ValueError) as error:  # As in _has_only_tag_and_keys; or an unpaired surrogate.
        check_keys(message.keys)
        check_flag(message.flag)
        check_delay(message.delay_level, message.deliver_at_ms)
        raise BadPropertyError(f"tag = {tag!r}, keys = {message.keys!r}: {error}") from None
    return keys


def _check_numbers(message: Message) -> None:
    if message.queue_id is not None:
        check_queue_id(message.queue_id)
    if message.flag:
        check_flag(message.flag)
    if message.delay_level or message.deliver_at_ms:
        check_delay(message.delay_level, message.deliver_at_ms)


def check_message(message: Message) -> Message:
    """A snapshot of a message. Raises BadRequestError when it cannot be sent."""
    message = snapshot(message)
    _check_topic(message.topic)
    if type(message.body) is not bytes:
        as_bytes(message.body)
    check_born(message.born_timestamp_ms)
    if _has_only_tag_and_keys(message):
        _check_plain(message)
        return message
    check_tag(message.tag)
    check_unique_id(message.unique_id)
    check_sharding_key(message.sharding_key, message.properties, names_queue=message.queue_id is not None)
    keys = _keys_of(message)
    if message.queue_id is not None:
        check_queue_id(message.queue_id)
    check_flag(message.flag)
    check_delay(message.delay_level, message.deliver_at_ms)
    unique = message.unique_id or "0" * ID_CHARACTERS
    whole = whole_properties(message.tag, keys, message.properties, unique, message.sharding_key)
    size = len(utf8("properties", whole))
    if size > PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {size:,} bytes exceed {PROPERTIES_SIZE_MAX:,}")
    return message


def is_plain(message: Message) -> bool:
    """Whether the writer reads a message from MessagePack.

    Its values have exact types, and it has no properties, unique id or delay.
    """
    queue_id, born = message.queue_id, message.born_timestamp_ms
    return (
        type(message) is Message
        and type(message.properties) is dict
        and not message.properties
        and _is_immutable(message)
        and not message.unique_id
        and (queue_id is None or type(queue_id) is int)
        and (born is None or type(born) is int)
        and type(message.flag) is type(message.delay_level) is type(message.deliver_at_ms) is int
        and not (message.delay_level or message.deliver_at_ms)
    )


def plain_message(topic: object, body: object, tag: object, keys: object) -> Message | None:
    """A plain message, if its parts were checked before or certainly can be sent."""
    if (
        type(topic) is str
        and topic in _checked_topics
        and type(body) is bytes
        and type(tag) is str
        and tag in _checked_tags
    ):
        if type(keys) is str:
            # A printable text has neither separators nor unpaired surrogates.
            if keys.isprintable() and " " not in keys and 0 < len(keys) <= _SHORT_KEY:
                return Message(topic, body, tag, (keys,), _NO_PAIRS)
        elif type(keys) is tuple and not keys:
            return Message(topic, body, tag, keys, _NO_PAIRS)
    return None


def frame_key(message: Message) -> tuple[Hashable, ...]:
    """Key that is equal for messages of one frame."""
    if message.delay_level or message.deliver_at_ms:
        return message.topic, message.queue_id, message.delay_level, message.deliver_at_ms, message.sharding_key
    return message.topic, message.queue_id is None


def encode_messages(
    messages: Sequence[Message], *, wait: bool = True, oneway: bool = False, transaction: bool = False
) -> AppendFrame:
    """Encode messages with one `frame_key` as a frame; `transaction` for a half message."""
    first, count = messages[0], len(messages)
    _check_topic(first.topic)
    now_ms, (prefix, counter) = _now_ms(), reserve(count)
    columns = _Columns(
        first.topic,
        list_bodies(list(map(_body_of, messages))),
        born_timestamp_ms=now_ms,
        unique_prefix=prefix,
        unique_counter=counter,
    )
    if set(map(_born_of, messages)) != {None}:
        born = [now_ms if message.born_timestamp_ms is None else message.born_timestamp_ms for message in messages]
        columns.born = numbers(born, "i8", count, "born times")
    if any(map(_flag_of, messages)):
        columns.flags = numbers([message.flag for message in messages], "i4", count, "flags")
    _set_queues(columns, messages, transaction=transaction)
    if any(map(_sharding_key_of, messages)):
        columns.sharding_keys = _sharding_column(messages)
    if any(map(_properties_of, messages)) or any(map(_unique_id_of, messages)):
        columns.properties = _whole_column(messages, prefix, counter)
    else:
        columns.keys = _keys_column(messages)
        columns.tags = encode_tags(list(map(_tag_of, messages)), count)
    return _frame(columns, wait=wait, oneway=oneway)


def usual_bytes(messages: list[Any]) -> int | None:
    """Bytes of the bodies if all are Messages whose keys are tuples or lists; else None."""
    try:
        if set(map(type, messages)) != _MESSAGE or not set(map(type, map(_several_keys_of, messages))) <= _KEYS:
            return None
        return sum(map(len, map(_body_of, messages)))
    except TypeError:
        return None


def encode_uniform(messages: list[Message]) -> bytes | None:
    """Encode messages as MessagePack if they seem to differ only in body, keys and tag.

    Returns None otherwise. The messages have `usual_bytes`. Without a Python step per message: the encoded fields after
    the keys, which most messages do not have, are counted with the next message's topic. Bodies can be chosen to have
    these bytes; the writer checks each message.
    """
    topic = messages[0].topic
    keys = itertools.chain.from_iterable(map(_several_keys_of, messages))
    try:
        if type(topic) is not str or not set(map(type, keys)) <= _TEXT:
            return None
        payload = _encode_array(messages)
    except (TypeError, ValueError, OverflowError, BufferError):
        return None
    is_uniform = payload.count(_NOT_GIVEN + _HEAD + _encode_array(topic)) == len(messages) - 1
    return payload if is_uniform and payload.endswith(_NOT_GIVEN) else None


def encode_plain(messages: Sequence[Message]) -> bytes | None:
    """Encode messages, all `is_plain`, as MessagePack; None if that is not possible."""
    try:
        return _encode_array(messages)
    except (TypeError, ValueError, OverflowError, BufferError):
        return None


def are_sendable(topic: str, messages: Sequence[Message]) -> bool:
    """Whether the topic and the tags, which the writer does not check, can be sent."""
    try:
        _check_topic(topic)
        tags = set(map(_tag_of, messages))
        if not tags <= _checked_tags:
            for tag in tags:
                _check_tag(tag)
    except (BadRequestError, TypeError):
        return False
    return True


def plain_frame(topic: str, count: int, payload: bytes, *, wait: bool = True) -> AppendFrame:
    """A frame of messages in MessagePack."""
    prefix, counter = reserve(count)
    now_ms = _now_ms()
    options = AppendRequest(
        topic, count, unique_prefix=prefix, unique_counter=counter, born_timestamp_ms=now_ms, wait=wait
    )
    return AppendFrame(topic, count, encoded(options), [payload], prefix, counter)


def _set_queues(columns: _Columns, messages: Sequence[Message], *, transaction: bool) -> None:
    """Set the queues, and the delay; delayed and half messages of a frame have one queue."""
    first = messages[0]
    if first.delay_level or first.deliver_at_ms:
        for message in messages:
            check_delay(message.delay_level, message.deliver_at_ms)
        columns.further = {"delay_level": first.delay_level, "deliver_at_ms": first.deliver_at_ms}
    elif transaction:
        columns.further = {"transaction": True}
    elif first.queue_id is not None:
        columns.queues = queue_numbers([message.queue_id for message in messages], len(messages))
        columns.queue_id = QUEUE_COLUMN
        return
    columns.queue_id = QUEUE_ANY if first.queue_id is None else first.queue_id


def _keys_of(message: Message) -> str:
    try:
        if not message.keys:
            return ""
    except (TypeError, ValueError):
        pass  # An array has no truth value; the check refuses it.
    check_keys(message.keys)
    return KEY_SEPARATOR.join(message.keys)


def _keys_column(messages: Sequence[Message]) -> Column:
    """Encode keys; checks them one by one only unless each message has one key."""
    keys = list(map(_several_keys_of, messages))
    if set(map(type, keys)) == {tuple} and set(map(len, keys)) == {1}:
        single = [key for (key,) in keys]
        if "" not in single and set(map(type, single)) == {str}:
            return encode_keys(single, len(single))
    return encode_texts(list(map(_keys_of, messages)), len(messages), "keys")


def _sharding_column(messages: Sequence[Message]) -> Column:
    for message in messages:
        check_sharding_key(message.sharding_key, message.properties, names_queue=message.queue_id is not None)
    return encode_sharding_keys([message.sharding_key for message in messages], len(messages))


def _whole_column(messages: Sequence[Message], prefix: str, counter: int) -> Column:
    texts = []
    for index, message in enumerate(messages):
        check_tag(message.tag)
        check_unique_id(message.unique_id)
        unique = message.unique_id or unique_id(prefix, counter + index)
        keys = _keys_of(message)
        texts.append(whole_properties(message.tag, keys, message.properties, unique, message.sharding_key))
    return encode_texts(texts, len(texts), "properties")


def encode_batch(batch: Batch, frame_bytes_max: int, first: int = 0) -> Iterator[AppendFrame]:
    """Encode a batch as one frame, or several when it is too large.

    `first`: number of messages before it.
    """
    count = len(batch)
    if count == 0:
        return
    try:
        frame = _encode_whole(batch) if count <= FRAME_MESSAGES_MAX else None
    except BadPropertyError as error:
        raise (BadPropertyError(f"after the first {first:,} messages: {error}") if first else error) from None
    if frame is not None and frame.payload_bytes <= frame_bytes_max - _OVERHEAD_BYTES:
        yield frame
        return
    if batch.batch or count == 1:
        raise FrameTooLargeError(
            f"{count:,} messages that must go together exceed a frame of {frame_bytes_max:,} bytes"
            f" or {FRAME_MESSAGES_MAX:,} messages"
        )
    whole, middle = aligned(batch), count // 2
    yield from encode_batch(part_of(whole, 0, middle), frame_bytes_max, first)
    yield from encode_batch(part_of(whole, middle, count), frame_bytes_max, first + middle)


def _encode_whole(batch: Batch) -> AppendFrame:
    count = len(batch)
    _check_topic(batch.topic)
    bodies = encode_bodies(batch.bodies)
    columns = _Columns(plain_text(batch.topic), bodies)
    columns.unique_prefix, columns.unique_counter = unique_of(batch) or reserve(count)
    check_delay(batch.delay_level, batch.deliver_at_ms)
    if batch.delay_level or batch.deliver_at_ms:
        columns.further = {"delay_level": batch.delay_level, "deliver_at_ms": batch.deliver_at_ms}
    if batch.queue_id is not None:
        check_queue_id(batch.queue_id, batch.queue_ids)
        columns.queue_id = batch.queue_id
    elif batch.queue_ids is not None:
        columns.queues = queue_numbers(batch.queue_ids, count)
        columns.queue_id = QUEUE_COLUMN
    if batch.sharding_keys is not None:
        columns.sharding_keys = _batch_sharding_keys(batch)
    if batch.born_timestamps_ms is None:
        columns.born_timestamp_ms = _now_ms()
    else:
        columns.born = numbers(batch.born_timestamps_ms, "i8", count, "born times")
    if batch.flags is not None:
        columns.flags = numbers(batch.flags, "i4", count, "flags")
    if batch.properties is not None and not isinstance(batch.properties, Mapping):
        columns.properties = _own_properties(batch, columns)
    else:
        _add_columns(batch, columns)
    return _frame(columns, wait=batch.wait, batch=batch.batch)


def _batch_sharding_keys(batch: Batch) -> Column:
    """Encode a batch's sharding keys.

    Raises BadRequestError when they conflict with queue ids or delays.
    """
    if batch.queue_id is not None or batch.queue_ids is not None:
        raise BadRequestError("a batch has sharding keys, which pick the queues, or queue ids, not both")
    if (batch.delay_level or batch.deliver_at_ms) and not isinstance(batch.sharding_keys, str):
        raise BadMessageError("messages that wait for their time have one sharding key for all")
    return encode_sharding_keys(batch.sharding_keys, len(batch))


def _add_columns(batch: Batch, columns: _Columns) -> None:
    """Encode keys, tags, and properties that all messages share."""
    count = len(batch)
    if batch.keys is not None:
        columns.keys = encode_keys(batch.keys, count)
    if isinstance(batch.tags, str):
        check_tag(batch.tags)
        columns.tag = batch.tags
    elif batch.tags is not None:
        columns.tags = encode_tags(batch.tags, count)
    if batch.properties:
        assert isinstance(batch.properties, Mapping)
        if columns.sharding_keys is not NO_COLUMN:
            check_sharding_key("any", batch.properties, names_queue=False)
        columns.gaps = split_at_gaps(batch.properties)


def _own_properties(batch: Batch, columns: _Columns) -> Column:
    """Encode whole property strings, for messages with properties of their own."""
    pairs = check_property_rows(batch.properties, len(batch))
    keys = _per_message(batch.keys, len(batch), "keys")
    tags = _per_message(batch.tags, len(batch), "tags")
    sharding_keys = _per_message(batch.sharding_keys, len(batch), "sharding keys")
    texts = []
    rows = zip(tags, keys, sharding_keys, pairs, strict=True)
    for index, (tag, key, sharding_key, properties) in enumerate(rows):
        try:
            tag, sharding_key = "" if tag is None else tag, "" if sharding_key is None else sharding_key
            properties = {} if properties is None else properties
            check_tag(tag)
            check_sharding_key(sharding_key, properties, names_queue=False)
            unique = unique_id(columns.unique_prefix, columns.unique_counter + index)
            texts.append(whole_properties(tag, joined_keys(key), properties, unique, sharding_key))
        except BadRequestError as error:
            raise (type(error)(f"message {index:,}: {error}") if len(batch) > 1 else error) from None
    return encode_texts(texts, len(texts), "properties")


def _per_message(texts: Texts, count: int, name: str) -> Sequence[Any]:
    """Texts in any form as one per message."""
    if texts is None or isinstance(texts, str):
        return [texts] * count
    values = as_list(texts, name)
    if values is None:
        values = arrow_texts(texts, name).to_pylist()
    if len(values) != count:
        raise BadMessageError(f"{len(values):,} {name} for {count:,} bodies")
    return list(values)
