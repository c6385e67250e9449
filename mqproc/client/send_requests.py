"""Requests that send messages, and the grouping of streams into frames. No I/O."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import re
import struct
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.batch import Batch, Delay, by_time, deliver_at_ms
from mqproc.client.columns import body_bytes, own_pieces
from mqproc.client.encoding import (
    FRAME_MESSAGES_MAX,
    AppendFrame,
    are_sendable,
    check_message,
    encode_batch,
    encode_message,
    encode_messages,
    encode_plain,
    encode_uniform,
    frame_key,
    is_plain,
    plain_frame,
    snapshot,
    usual_bytes,
)
from mqproc.client.message_fields import (
    COUNTERS,
    PREFIX_CHARACTERS,
    check_born,
    check_delay,
    check_flag,
    plain_text,
    reserve,
)
from mqproc.client.requests import IN_FLIGHT, WRITER, Call, nothing
from mqproc.client.send_results import FrameResults, SendResults, SentPart
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    FrameTooLargeError,
    MqprocError,
    ProtocolError,
)
from mqproc.layout.properties import KEY_SEPARATOR, NAME_END, PAIR_END
from mqproc.layout.record_codec import host_hex
from mqproc.types import BatchResult, Message, SendResult
from mqproc.util.arguments import Time, at_least_one, each_of, not_below_zero
from mqproc.wire.operations import (
    COLUMN_ABSENT,
    QUEUE_ANY,
    UNDECODABLE,
    AppendAnswer,
    AppendRequest,
    Operation,
    encoded,
)

_log = logging.getLogger("mqproc.producer")
P = ParamSpec("P")
T = TypeVar("T")
# Limits of a frame of a stream.
GROUP_MESSAGES_MAX: Final = 4000
GROUP_BYTES_MAX: Final = 1 << 20
# Bodies are counted before they are encoded, keys and tags afterwards.
_PAYLOAD_BYTES_MAX: Final = 4 * GROUP_BYTES_MAX
# A list that is not uniform is tried again in parts of so many messages.
_PART_MESSAGES: Final = 1000
# Python may let the producer's thread run only every 5 ms: a frame must hold all messages sent meanwhile.
PRODUCER_MESSAGES_MAX: Final = 10_000

_decode_append = msgspec.msgpack.Decoder(AppendAnswer).decode
_APPEND = int(Operation.APPEND)
_APPEND_MESSAGES = int(Operation.APPEND_MESSAGES)
# Smaller frames cost the writer less as columns than as MessagePack.
PLAIN_MESSAGES_MIN: Final = 32
# Errors of the fast paths for values that are not checked one by one, such as pandas' NA.
_UNCHECKED: Final = (TypeError, ValueError)
# Errors for a malformed answer: the server is at fault, not the caller.
_UNREADABLE: Final = (*UNDECODABLE, struct.error, ValueError)
_MESSAGE: Final = re.compile(r"message (\d+): (.*)", re.DOTALL)
_unique_id_of = operator.attrgetter("unique_id")
_ONE_ROW = struct.Struct("<qqi")
_MASK64: Final = (1 << 64) - 1
_SHOWN_RUNS: Final = 5
_ZERO: Final = 0
"""A message's default numbers are this object; an equal value may have another type."""
_NO_PARTS: Final = (None,) * 5
_NO_TIMES: Final = (0, None, None)


def message_of(
    topic: Message | str,
    body: bytes | None,
    tag: str,
    keys: str | Sequence[str],
    properties: Mapping[str, str] | None,
    sharding_key: str,
    numbers: tuple[int | None, int, int | None],
    times: tuple[int, Time, Delay | None] = _NO_TIMES,
) -> Message:
    """Make a message of the arguments of `send`.

    `numbers`: queue id, flag and born time. `times`: delay level, time to deliver at, and delay from now.
    """
    queue_id, flag, born_timestamp_ms = numbers
    delay_level, deliver_at, delay = times
    if isinstance(topic, Message):
        parts = tag, keys, properties, flag, delay_level, sharding_key
        _check_no_parts((body, queue_id, born_timestamp_ms, deliver_at, delay), parts)
        return topic
    if body is None:
        raise BadMessageError("a message needs a body")
    try:
        several = (keys,) if isinstance(keys, str) and keys else keys or ()
        pairs = properties or {}
    except (TypeError, ValueError):  # Arrays and pandas' NA have no truth value.
        kinds = type(keys).__name__, type(properties).__name__
        raise BadPropertyError(f"keys must be a sequence of texts, and properties a mapping, not {kinds}") from None
    return Message(
        topic,
        body,
        tag,
        several,
        pairs,
        queue_id,
        flag,
        born_timestamp_ms,
        delay_level=delay_level,
        deliver_at_ms=0 if deliver_at is None and delay is None else deliver_at_ms(deliver_at, delay),
        sharding_key=sharding_key,
    )


def _check_no_parts(optional: tuple[object, ...], others: tuple[object, ...]) -> None:
    """Raise BadRequestError for arguments given beside a Message."""
    try:
        is_alone = optional == _NO_PARTS and not any(others)
    except (TypeError, ValueError):  # As in message_of.
        is_alone = False
    if not is_alone:
        raise BadRequestError("give a Message, or a topic and its parts, not both")


# Templates of append frames, which encode most single messages in few steps

# Messages of one topic, tag and queue without further properties differ in body, key, unique id and time. The constant
# parts are encoded once, when the second such message is sent, and each send fills in the rest. Messages that are
# larger, or have other fields or types, take the general path in `encoding`.

# Limits of sizes: bodies are joined with the rest, and keys and tags of so many characters certainly fit.
_BODY_BYTES_MAX: Final = 8 << 10
_KEY_MAX: Final = 1024
_TAG_MAX: Final = 64
SINGLE_TEMPLATES_MAX: Final = 4096

# Like _ZERO, for texts.
_NO_TEXT: Final = ""

# msgpack types of the variable options: always the widest, so that a template has a fixed length.
_UINT16, _UINT32, _INT32, _UINT64, _TEXT28 = b"\xcd", b"\xce", b"\xd2", b"\xcf", b"\xbc"
_FIELDS: Final = AppendRequest.__struct_fields__
_SIZES_AT: Final = _FIELDS.index("bodies_bytes")
_OWN_AT: Final = _FIELDS.index("unique_prefix")
assert _FIELDS[_SIZES_AT : _SIZES_AT + 2] == ("bodies_bytes", "keys_bytes")
assert _FIELDS[_OWN_AT : _OWN_AT + 3] == ("unique_prefix", "unique_counter", "born_timestamp_ms")
_ARRAY_BYTES: Final = 3  # header of an array of 16 items or more
assert len(_FIELDS) >= 16

_pack_length = struct.Struct("<I").pack
_pack_short_length = struct.Struct("<H").pack

_TemplateKey = tuple[str, str, int | None]  # topic, tag and queue
# A packer, and the constant options before, between and after the variable options.
_Template = tuple[Callable[..., bytes], bytes, bytes, bytes]
single_templates: dict[_TemplateKey, _Template | None] = {}  # None: seen once, as many are


def encode_single(message: Message, *, wait: bool = True) -> AppendFrame:
    """Encode one message; equal to `encode_message`."""
    topic, tag, queue_id, properties = message.topic, message.tag, message.queue_id, message.properties
    if (
        type(topic) is not str
        or type(tag) is not str
        or (queue_id is not None and type(queue_id) is not int)
        or type(properties) is not dict
        or properties
        or not message.flag is message.delay_level is message.deliver_at_ms is _ZERO
        or message.born_timestamp_ms is not None
        or not message.unique_id is message.sharding_key is _NO_TEXT
        or wait is not True
    ):
        return encode_message(message, wait=wait)
    template_key = topic, tag, queue_id
    template = single_templates.get(template_key)
    if template is not None:
        frame = _encode_by_template(template, topic, message.body, message.keys)
        return encode_message(message) if frame is None else frame
    frame = encode_message(message)
    if len(tag) <= _TAG_MAX:
        _add_template(template_key)
    return frame


def _encode_by_template(template: _Template, topic: str, body: object, keys: object) -> AppendFrame | None:
    """Encode a message by its template; None when its body or keys need the general path."""
    if type(body) is not bytes or (type(keys) is not tuple and type(keys) is not list) or len(keys) > 1:
        return None
    size, keys_size = len(body), COLUMN_ABSENT
    if size > _BODY_BYTES_MAX:
        return None
    if keys:
        key = keys[0]
        if type(key) is not str or not key or len(key) > _KEY_MAX:
            return None
        if KEY_SEPARATOR in key or NAME_END in key or PAIR_END in key:
            return None
        try:
            data = key.encode()
        except UnicodeEncodeError:
            return None
        keys_size = len(data)
        payload = b"".join((_pack_length(size), body, _pack_short_length(keys_size), data))
    else:
        payload = _pack_length(size) + body
    prefix, counter = reserve(1)
    now_ms = time.time_ns() // 1_000_000
    pack, begin, middle, end = template
    options = pack(begin, size, _INT32, keys_size, middle, prefix.encode(), _UINT16, counter, _UINT64, now_ms, end)
    return AppendFrame(topic, 1, options, [payload], prefix, counter)


def _add_template(key: _TemplateKey) -> None:
    """Make the template after the second message, which the general path has checked."""
    if key not in single_templates:
        if len(single_templates) >= SINGLE_TEMPLATES_MAX:
            single_templates.clear()
        single_templates[key] = None
        return
    topic, tag, queue_id = key
    request = AppendRequest(topic, 1, QUEUE_ANY if queue_id is None else queue_id, tag=tag)
    fields = list(map(msgspec.msgpack.encode, msgspec.structs.astuple(request)))
    begin = b"".join((encoded(request)[:_ARRAY_BYTES], *fields[:_SIZES_AT], _UINT32))
    middle = b"".join((*fields[_SIZES_AT + 2 : _OWN_AT], _TEXT28))
    end = b"".join(fields[_OWN_AT + 3 :])
    options = struct.Struct(f">{len(begin)}sIci{len(middle)}s{PREFIX_CHARACTERS}scHcQ{len(end)}s")
    single_templates[key] = options.pack, begin, middle, end


# Requests


def _append_call(frame: AppendFrame, parse: Callable[[memoryview, memoryview], T], *, oneway: bool = False) -> Call[T]:
    return Call(WRITER, _APPEND, frame.options, frame.payload, parse, False, 0.0, oneway)


def send(message: Message, *, wait: bool = True, transaction: bool = False) -> Call[SendResult]:
    """Send one message; `transaction` for a half message, whose properties say so."""
    try:
        if transaction:
            frame = encode_messages([message], wait=wait, transaction=True)
        else:
            frame = encode_single(message, wait=wait)
    except _UNCHECKED:
        check_message(message)
        raise
    parse = functools.partial(_send_result, message.unique_id, frame.unique_prefix, frame.unique_counter)
    return Call(WRITER, _APPEND, frame.options, frame.payload, parse, False)


def send_system(message: Message) -> Call[SendResult]:
    """Send a message that the client makes itself, with SystemProperties."""
    frame = encode_messages([message])
    parse = functools.partial(_send_result, message.unique_id, frame.unique_prefix, frame.unique_counter)
    return Call(WRITER, _APPEND, frame.options, frame.payload, parse, False)


def _send_result(
    own_id: str, unique_prefix: str, unique_counter: int, options: memoryview, payload: memoryview
) -> SendResult:
    """Parse one message's answer; without an own unique id it has the frame's."""
    try:
        answer = _decode_append(options)
        physical_offset, queue_offset, queue_id = _ONE_ROW.unpack(payload)
    except _UNREADABLE as error:
        raise _not_readable(error) from None
    return SendResult(
        f"{host_hex(answer.store_host)}{physical_offset & _MASK64:016X}",
        own_id or f"{unique_prefix}{unique_counter % COUNTERS:04X}",
        queue_id,
        queue_offset,
        physical_offset,
        answer.store_timestamp_ms,
    )


def _not_readable(error: Exception) -> ProtocolError:
    return ProtocolError(f"answer to APPEND cannot be read: {error}")


def _checked(parse: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors of a malformed append answer into ProtocolError."""

    @functools.wraps(parse)
    def checked(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return parse(*arguments, **named)
        except _UNREADABLE as error:
            raise _not_readable(error) from None

    return checked


def send_oneway(message: Message, frame_bytes_max: int) -> Call[None]:
    """Send one message without an answer. Raises the errors of the writer."""
    check_born(message.born_timestamp_ms)
    if message.flag is not _ZERO:
        check_flag(message.flag)
    if message.delay_level is not _ZERO or message.deliver_at_ms is not _ZERO:
        check_delay(message.delay_level, message.deliver_at_ms)
    try:
        frame = encode_message(message, wait=False, oneway=True)
    except _UNCHECKED:
        check_message(message)
        raise
    size = len(frame.options) + frame.payload_bytes
    if size > frame_bytes_max:
        raise FrameTooLargeError(f"frame of {size:,} bytes exceeds {frame_bytes_max:,}")
    return _append_call(frame, nothing, oneway=True)


def _columns(payload: memoryview, count: int) -> tuple[Any, Any, Any]:
    """Columns of an append answer, as copies: physical offsets, queue offsets, queue ids."""
    data = bytes(payload)
    if len(data) != count * _ONE_ROW.size:
        raise ValueError(f"{len(data)} bytes for {count} messages")
    return (
        np.frombuffer(data, "<i8", count),
        np.frombuffer(data, "<i8", count, 8 * count),
        np.frombuffer(data, "<i4", count, 16 * count),
    )


def send_group(
    messages: Sequence[Message], *, wait: bool = True, places: Sequence[int] | None = None
) -> Call[Sequence[SendResult]]:
    """Send messages with one `frame_key` in one frame; `places` are for errors."""
    try:
        frame = encode_messages(messages, wait=wait)
    except (BadRequestError, *_UNCHECKED):
        _refuse_first_wrong(messages, places or range(len(messages)))
        raise
    return _append_call(frame, functools.partial(_group_results, messages, frame))


def send_encoded(messages: Sequence[Message], payload: bytes, *, wait: bool = True) -> Call[Sequence[SendResult]]:
    """Send messages that `payload` has in MessagePack in one frame.

    The writer refuses any that are not `is_plain`, or of another topic, and stores nothing then.
    """
    frame = plain_frame(messages[0].topic, len(messages), payload, wait=wait)
    call = _append_call(frame, functools.partial(_group_results, (), frame))
    call.operation = _APPEND_MESSAGES
    return call


def send_plain(messages: Sequence[Message], payload: bytes, *, wait: bool = True) -> Call[Sequence[SendResult]]:
    """Send messages with one `frame_key`, all `is_plain`, in MessagePack in one frame.

    If the writer refuses them so, they are sent as columns, for the error that names the message and the reason.
    """
    call = send_encoded(messages, payload, wait=wait)
    call.instead = functools.partial(send_group, messages, wait=wait)
    return call


def _refuse_first_wrong(messages: Sequence[Message], places: Sequence[int]) -> None:
    """Raise the error of the first message that cannot be sent, with its position."""
    for place, message in zip(places, messages, strict=True):
        try:
            check_message(message)
            encode_message(message)
        except BadRequestError as error:
            raise (type(error)(f"message {place:,}: {error}") if len(messages) > 1 or place else error) from None


def at_its_place(error: MqprocError, places: Sequence[int]) -> MqprocError:
    """The store's error about a message, with the message's position in the caller's input."""
    found = _MESSAGE.match(str(error)) if isinstance(error, BadRequestError) else None
    return error if found is None else type(error)(f"message {places[int(found[1])]:,}: {found[2]}")


def without_place(error: MqprocError) -> MqprocError:
    """The store's error about the only message of a frame."""
    found = _MESSAGE.match(str(error)) if isinstance(error, BadRequestError) else None
    return error if found is None else type(error)(found[2])


def results_or_error(parts: Sequence[SentPart], failures: Sequence[Exception]) -> SendResults:
    """Results of a stream in order; raises the first failure, which notes the stored messages."""
    results = SendResults(parts)
    if failures:
        count = len(results)
        failures[0].add_note(f"{count:,} messages were stored{f': {_runs(parts)}' if count else ''}")
        raise failures[0]
    return results


def _runs(parts: Sequence[SentPart]) -> str:
    """The places of stored messages, like 0 to 999, 2,000 to 2,499."""
    places = np.sort(np.concatenate([np.asarray(part.places, np.int64) for part in parts]))
    gaps = np.flatnonzero(np.diff(places) > 1)
    firsts, lasts = places[np.r_[0, gaps + 1]], places[np.r_[gaps, len(places) - 1]]
    shown = [f"{first:,} to {last:,}" for first, last in zip(firsts[:_SHOWN_RUNS], lasts[:_SHOWN_RUNS], strict=True)]
    return ", ".join(shown) + (", …" if len(firsts) > _SHOWN_RUNS else "")


@_checked
def _group_results(
    messages: Sequence[Message], frame: AppendFrame, options: memoryview, payload: memoryview
) -> Sequence[SendResult]:
    answer = _decode_append(options)
    columns = _columns(payload, frame.count)
    results = FrameResults(answer, columns, frame.unique_prefix, frame.unique_counter)
    if any(map(_unique_id_of, messages)):
        own = zip(messages, results, strict=True)
        return [msgspec.structs.replace(each, unique_id=message.unique_id or each.unique_id) for message, each in own]
    return results


def send_batch(batch: Batch, frame_bytes_max: int) -> Iterator[Call[BatchResult]]:
    """Send a batch: one call, or several when it is too large for a frame."""
    for frame in encode_batch(batch, frame_bytes_max):
        frame.payload = own_pieces(frame.payload)
        yield _batch_call(frame)


def send_batches(batches: Iterable[Batch], frame_bytes_max: int) -> Iterator[Call[BatchResult]]:
    """Send batches one after the other."""
    for index, batch in enumerate(each_of("batches", batches)):
        if not isinstance(batch, Batch):
            raise BadRequestError(f"item {index:,} is no Batch: {repr(batch)[:64]}")
        yield from send_batch(batch, frame_bytes_max)


def _batch_call(frame: AppendFrame) -> Call[BatchResult]:
    return _append_call(frame, functools.partial(_batch_result, frame.topic, frame.count))


@_checked
def _batch_result(topic: str, count: int, options: memoryview, payload: memoryview) -> BatchResult:
    physical_offsets, queue_offsets, queue_ids = _columns(payload, count)
    return BatchResult(topic, queue_ids, queue_offsets, physical_offsets, _decode_append(options).store_timestamp_ms)


class BatchCalls:
    """Calls of a batch, whose messages may have a delay each; `places` are for `joined`."""

    def __init__(self, batch: Batch, frame_bytes_max: int) -> None:
        self._batch = batch
        self._parts, self.places = by_time(batch)
        self._frame_bytes_max = frame_bytes_max
        self._no_call: MqprocError | None = None

    @property
    def in_flight(self) -> int:
        """Calls in flight at once; one with sharding keys, to keep their order."""
        return IN_FLIGHT if self._batch.sharding_keys is None else 1

    def __iter__(self) -> Iterator[Call[BatchResult]]:
        try:
            for part in self._parts:
                yield from send_batch(part, self._frame_bytes_max)
        except MqprocError as error:
            self._no_call = error
            raise

    def placed(self, error: MqprocError, results: Sequence[BatchResult]) -> MqprocError:
        """The error that replaced the next result, with the message's position in the batch."""
        if error is self._no_call:
            return error
        places = np.arange(len(self._batch)) if self.places is None else self.places
        return at_its_place(error, places[sum(map(len, results)) :].tolist())


def joined(topic: str, results: Sequence[BatchResult], places: NDArray[np.int64] | None = None) -> BatchResult:
    """Join the results of frames, messages at `places`, with the last store time."""
    if len(results) == 1 and places is None:
        return results[0]
    if not results:
        empty = np.empty(0, np.int64)
        return BatchResult(plain_text(topic), np.empty(0, np.int32), empty, empty, 0)
    order = slice(None) if places is None else np.argsort(places)
    return BatchResult(
        plain_text(topic),
        np.concatenate([result.queue_ids for result in results])[order],
        np.concatenate([result.queue_offsets for result in results])[order],
        np.concatenate([result.physical_offsets for result in results])[order],
        results[-1].store_timestamp_ms,
    )


class NotUniform(Exception):
    """The writer did not take a frame whose messages only seemed uniform, and stored nothing."""


class StreamGroup(msgspec.Struct, eq=False):
    """Messages of a stream for one frame, with their places in the stream.

    `plain`: all are, see `encoding.is_plain`. `size`: their bytes, about. `payload`: the encoded messages, which seem
    to be plain and to have one `frame_key`; the call of a group with a payload may raise NotUniform, then `parts` has
    the groups to send instead.
    """

    messages: list[Message]
    places: list[int] | range
    plain: bool = True
    size: int = 0
    payload: bytes | None = None

    def call(self, *, wait: bool) -> Call[Sequence[SendResult]]:
        """The request that sends these messages."""
        messages = self.messages
        if self.payload is not None:
            call = send_encoded(messages, self.payload, wait=wait)
            call.instead = _refuse_frame
            return call
        if self.plain and len(messages) >= PLAIN_MESSAGES_MIN and are_sendable(messages[0].topic, messages):
            payload = encode_plain(messages)
            if payload is not None:
                return send_plain(messages, payload, wait=wait)
        return send_group(messages, wait=wait, places=self.places)

    def parts(self, limits: GroupLimits) -> list[StreamGroup]:
        """Groups of these messages with one `frame_key` each, to be sent as columns."""
        groups: dict[Hashable, StreamGroup] = {}
        parts = [*_full_groups(groups, self.messages, self.places[0], limits), *groups.values()]
        for part in parts:
            part.plain = False
        return parts


def _refuse_frame() -> Call[Sequence[SendResult]]:
    raise NotUniform


class GroupLimits(NamedTuple):
    """Limits of a frame of a stream."""

    messages: int
    bytes: int

    @classmethod
    def of_frame(cls, frame_bytes_max: int) -> GroupLimits:
        """Limits for a client whose frames, also those of answers, have `frame_bytes_max` at most."""
        half = frame_bytes_max // 2
        return cls(min(GROUP_MESSAGES_MAX, max(1, half // _ONE_ROW.size)), min(GROUP_BYTES_MAX, half))


def groups_of(messages: Iterable[Message], limits: GroupLimits) -> Iterator[StreamGroup]:
    """Cut a stream of messages into groups, one frame each, by their `frame_key`."""
    groups: dict[Hashable, StreamGroup] = {}
    start = 0
    for chunk, is_usual in _chunks(messages, limits):
        yield from _groups_of_chunk(groups, chunk, start, limits, is_usual=is_usual)
        start += len(chunk)
    yield from groups.values()


def _groups_of_chunk(
    groups: dict[Hashable, StreamGroup], chunk: list[Message], start: int, limits: GroupLimits, *, is_usual: bool
) -> Iterator[StreamGroup]:
    """Yield the chunk as one group if it seems uniform, else the full groups of its messages."""
    payload = encode_uniform(chunk) if is_usual and len(chunk) >= PLAIN_MESSAGES_MIN else None
    if payload is not None and len(payload) <= _PAYLOAD_BYTES_MAX and are_sendable(chunk[0].topic, chunk):
        earlier = groups.pop(frame_key(chunk[0]), None)
        if earlier is not None:
            yield earlier
        yield StreamGroup(chunk, range(start, start + len(chunk)), payload=payload)
    elif is_usual and len(chunk) > _PART_MESSAGES:  # Few messages may differ from the others.
        for first in range(0, len(chunk), _PART_MESSAGES):
            part = chunk[first : first + _PART_MESSAGES]
            yield from _groups_of_chunk(groups, part, start + first, limits, is_usual=True)
    else:
        yield from _full_groups(groups, chunk, start, limits)


def _chunks(messages: Iterable[Message], limits: GroupLimits) -> Iterator[tuple[list[Message], bool]]:
    """Cut a stream into lists, of copies where its source may change messages that it has given.

    With each list: whether its messages have usual types, and bodies within the limit.
    """
    if type(messages) is list:
        yield from _slices(messages, limits)
        return
    chunk, size, is_usual = [], 0, True
    for index, message in enumerate(each_of("messages", messages)):
        if type(message) is Message and type(message.body) is bytes and type(message.keys) is tuple:
            size += len(message.body)
            if type(message.properties) is not dict or message.properties:
                message, _ = _snapshot_of(index, message)
        else:
            message, body_size = _snapshot_of(index, message)
            size += body_size
            is_usual = is_usual and usual_bytes([message]) is not None
        chunk.append(message)
        if len(chunk) >= limits.messages or size >= limits.bytes:
            yield chunk, is_usual
            chunk, size, is_usual = [], 0, True
    if chunk:
        yield chunk, is_usual


def _slices(messages: list[Message], limits: GroupLimits) -> Iterator[tuple[list[Message], bool]]:
    """Cut a list into `_chunks`, shorter while the bodies are large."""
    start, count = 0, limits.messages
    while start < len(messages):
        chunk = messages[start : start + count]
        size = usual_bytes(chunk)
        if size is not None and size > limits.bytes and len(chunk) > 1:
            count = max(1, len(chunk) // 2)
            continue
        yield chunk, size is not None
        start += len(chunk)
        if size is not None and size <= limits.bytes // 2:
            count = min(2 * count, limits.messages)


def _snapshot_of(index: int, message: Any) -> tuple[Message, int]:
    """A copy of a message, and the size of its body."""
    try:
        message = snapshot(message)
        body = message.body
        return message, len(body) if type(body) is bytes else body_bytes(body)
    except (AttributeError, TypeError, ValueError):
        raise _no_message(index, message) from None


def _no_message(index: int, message: Any) -> BadRequestError:
    return BadRequestError(f"item {index:,} is no Message that can be sent: {repr(message)[:64]}")


def _full_groups(
    groups: dict[Hashable, StreamGroup], messages: list[Message], start: int, limits: GroupLimits
) -> Iterator[StreamGroup]:
    """Add messages, whose places begin at `start`, to groups one by one; yields the full ones."""
    for index, given in enumerate(messages, start):
        message, size = _snapshot_of(index, given)
        try:
            key = frame_key(message)
            group = groups.get(key) or groups.setdefault(key, StreamGroup([], []))
        except (AttributeError, TypeError, ValueError):
            raise _no_message(index, message) from None
        group.plain = group.plain and is_plain(message)
        group.size += size if group.plain else _size_of(message, size)
        group.messages.append(message)
        assert isinstance(group.places, list)
        group.places.append(index)
        if len(group.messages) >= limits.messages or group.size >= limits.bytes:
            yield groups.pop(key)


def _size_of(message: Message, body_size: int) -> int:
    """Bytes of a message that may have parts of wrong types, which its check refuses."""
    try:
        return text_bytes(message)
    except (AttributeError, TypeError, ValueError):
        return body_size


# Batching producers


G = TypeVar("G", bound="ProducerGroup")

# Approximate memory of a waiting message besides its texts.
MESSAGE_OVERHEAD_BYTES: Final = 512
# Approximate bytes of a message in a frame besides its texts.
FRAMED_BYTES: Final = 24
# The same with topic, tag and key of a plain message.
_PARTS_BYTES: Final = FRAMED_BYTES + 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a producer's groups and buffer. Times in seconds, sizes in bytes."""

    linger_s: float
    messages: int
    bytes: int
    in_flight: int
    buffered_bytes: int

    @classmethod
    def of_user(cls, linger_ms: float, *sizes: int) -> Limits:
        """Check a producer's arguments. Raises BadRequestError if it would never send."""
        names = ("max_batch_messages", "max_batch_bytes", "max_in_flight", "max_buffered_bytes")
        return cls(not_below_zero("linger_ms", linger_ms) / 1000, *map(at_least_one, names, sizes))


Waiter = tuple[Any, Callable[[Any], object]]
"""A handle and its callback."""


class ProducerGroup:
    """Messages of one frame of a producer, and their outcomes when they are known.

    A message is its number in the group. `plain`: all are, see `encoding.is_plain`. `size`: their bytes in the frame,
    `buffered_bytes`: in the buffer, once the group is taken. `taken`: they are sent, and can no longer be cancelled.
    `kept`: numbers of the messages that are sent, None for all. `waiters`: callbacks of each handle, by number.
    `tracebacks`: of the errors among the outcomes, by identity.
    """

    __slots__ = (
        *("buffered_bytes", "cancelled", "due", "kept", "messages", "outcomes"),
        *("plain", "seen", "size", "taken", "tracebacks", "waiters"),
    )

    def __init__(self, due: float) -> None:
        self.due = due
        self.messages: list[Message] = []
        self.waiters: dict[int, list[Waiter]] = {}
        self.plain = True
        self.size = 0
        self.buffered_bytes = 0
        self.taken = False
        self.cancelled: set[int] = set()
        self.kept: list[int] | None = None
        self.outcomes: Sequence[SendResult | BaseException] | None = None
        self.tracebacks: dict[int, TracebackType | None] = {}
        self.seen = False
        """Whether an outcome was asked for, or has a callback."""

    def __del__(self) -> None:
        if self.tracebacks and not self.seen:
            assert self.outcomes is not None
            first = next(each for each in self.outcomes if isinstance(each, BaseException))
            _log.error("messages of a producer were not stored, and no handle was asked: first %r", first)

    def take(self) -> None:
        """Begin to send the messages that are not cancelled."""
        self.taken = True
        if self.cancelled:
            self.kept = [number for number in range(len(self.messages)) if number not in self.cancelled]
            self.messages = [self.messages[number] for number in self.kept]

    def settle(self, outcomes: Sequence[SendResult | BaseException]) -> list[Waiter]:
        """Set a result or an error for each sent message; returns the callbacks to call."""
        if isinstance(outcomes, list):
            self.tracebacks = {id(each): each.__traceback__ for each in outcomes if isinstance(each, BaseException)}
        self.outcomes = outcomes
        self.messages = []  # Callers may keep handles, which must not keep the bodies.
        callbacks, self.waiters = self.waiters, {}
        self.seen = bool(callbacks)
        return list(itertools.chain.from_iterable(callbacks.values()))

    def is_done(self, number: int) -> bool:
        """Whether a message has its outcome, or is cancelled."""
        return self.outcomes is not None or number in self.cancelled

    def outcome(self, number: int) -> SendResult | BaseException:
        """The outcome of a message that is done and not cancelled."""
        assert self.outcomes is not None
        self.seen = True
        return self.outcomes[number if self.kept is None else bisect_left(self.kept, number)]

    def result(self, outcome: SendResult | BaseException) -> SendResult:
        """Return a result or raise an error, whose traceback would grow with each raise otherwise."""
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(self.tracebacks.get(id(outcome)))
        return outcome

    def add_waiter(self, number: int, handle: Any, on_done: Callable[[Any], object]) -> None:
        """Let `settle` and `cancel` return a callback of a message."""
        self.waiters.setdefault(number, []).append((handle, on_done))

    def cancel(self, number: int) -> list[Waiter]:
        """Cancel a message of a group that is not taken; returns the callbacks to call."""
        self.cancelled.add(number)
        return self.waiters.pop(number, [])

    def shown(self, kind: str, number: int) -> str:
        """The `repr` of a message's handle."""
        if number in self.cancelled:
            return f"<{kind}: cancelled>"
        return f"<{kind}: waiting>" if self.outcomes is None else f"<{kind}: {self.outcome(number)!r}>"

    def call(self) -> Call[Sequence[SendResult]]:
        """The request that sends these messages. Raises BadRequestError."""
        messages = self.messages
        payload = encode_plain(messages) if self.plain and len(messages) >= PLAIN_MESSAGES_MIN else None
        if payload is None:
            return send_group(messages)
        return send_plain(messages, payload)


class ProducerHandle(msgspec.Struct, eq=False, frozen=True, gc=False):
    """Base of both producers' handles: a message is its group and its number."""

    _group: Any
    _number: int

    def __repr__(self) -> str:
        return str(self._group.shown(type(self).__name__, self._number))

    def done(self) -> bool:
        """Whether the outcome is known or the message cancelled. Example: `handle.done()`"""
        return bool(self._group.is_done(self._number))

    def cancelled(self) -> bool:
        """Whether `cancel` was in time. Example: `handle.cancelled()`"""
        return self._number in self._group.cancelled

    def running(self) -> bool:
        """Whether the message is being sent. Example: `handle.running()`"""
        return self._group.taken and not self.done()


def text_bytes(message: Message) -> int:
    """Bytes of a message's body and texts, about."""
    body, keys, properties = message.body, message.keys, message.properties
    size = len(body) if type(body) is bytes else body_bytes(body)
    size += len(message.topic) + len(message.tag) + len(message.sharding_key)
    if keys:
        size += sum(map(len, keys))
    if properties:
        size += sum(map(len, properties)) + sum(map(len, properties.values()))
    return size


class Batcher(Generic[G]):
    """Messages of a producer grouped by topic.

    `buffered_bytes` counts them until `done`, also those in flight.
    """

    def __init__(
        self, limits: Limits, make_group: Callable[[float], G], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self._make_group = make_group
        self._clock = clock
        self.messages_max = min(limits.messages, FRAME_MESSAGES_MAX)
        self.open_groups: dict[Hashable, G] = {}
        self._full: deque[G] = deque()
        self.buffered_bytes = 0

    @property
    def empty(self) -> bool:
        """Whether no message waits; those in flight may still count as buffered."""
        return not self.open_groups and not self._full

    @property
    def has_full(self) -> bool:
        """Whether a full group waits."""
        return bool(self._full)

    @property
    def messages(self) -> int:
        """Number of waiting messages."""
        return sum(len(group.messages) for group in (*self._full, *self.open_groups.values()))

    def has_room(self, size: int) -> bool:
        """Whether a message of so many `text_bytes` fits; a larger one fits an empty buffer."""
        buffered = self.buffered_bytes
        return buffered == 0 or buffered + size + FRAMED_BYTES + MESSAGE_OVERHEAD_BYTES <= self.limits.buffered_bytes

    def add(self, message: Message, size: int, *, plain: bool = True) -> tuple[G, bool]:
        """Add a message of so many `text_bytes` to the open group under its `frame_key`.

        Returns the group, and True when the sender should wake up: the group is full or new.
        """
        key: Hashable = frame_key(message)
        if key == (message.topic, True):
            key = message.topic
        group = self.open_groups.get(key)
        if group is None:
            group = self.open_groups[key] = self._make_group(self._clock() + self.limits.linger_s)
        # No calls, after which a signal handler may raise: none comes between these steps.
        group.messages += (message,)
        group.size += size + FRAMED_BYTES
        self.buffered_bytes += size + FRAMED_BYTES + MESSAGE_OVERHEAD_BYTES
        if not plain:
            group.plain = False
        count = len(group.messages)
        if count < self.messages_max and group.size < self.limits.bytes:
            return group, count == 1
        self._full += (group,)
        del self.open_groups[key]
        return group, True

    def add_plain(self, message: Message) -> G | None:
        """Add a plain message to its open group unless that becomes full; returns the group."""
        group = self.open_groups.get(message.topic)
        if group is None:
            return None
        size = len(message.body) + _PARTS_BYTES
        buffered = self.buffered_bytes + size + MESSAGE_OVERHEAD_BYTES
        limits = self.limits
        if (
            len(group.messages) + 1 >= self.messages_max
            or group.size + size >= limits.bytes
            or buffered > limits.buffered_bytes
        ):
            return None
        group.size += size
        self.buffered_bytes = buffered
        group.messages += (message,)
        return group

    def take(self, now: float, *, everything: bool = False) -> G | None:
        """The next group to send: a full group, a due group, or any group with `everything`."""
        if self._full:
            group = self._full.popleft()
        elif self.open_groups:
            # Groups are in the order of their start, so the first is due first.
            key, group = next(iter(self.open_groups.items()))
            if not everything and group.due > now:
                return None
            del self.open_groups[key]
        else:
            return None
        group.buffered_bytes = group.size + MESSAGE_OVERHEAD_BYTES * len(group.messages)
        return group

    def wait_s(self, now: float) -> float | None:
        """Seconds until `take` returns a group by time alone; None when no message waits."""
        if self._full:
            return 0.0
        group = next(iter(self.open_groups.values()), None)
        return None if group is None else max(0.0, group.due - now)

    def done(self, group: ProducerGroup) -> None:
        """Free the buffer space of a group that is stored or failed."""
        self.buffered_bytes -= group.buffered_bytes
