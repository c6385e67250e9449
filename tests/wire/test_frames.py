"""Frames without sockets: every split of a stream gives equal frames; bad bytes give errors.

A mutated stream may decode as something else, but must raise only MqprocErrors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.errors import (
    ERROR_BY_CODE,
    BadRequestError,
    FrameTooLargeError,
    InternalError,
    MqprocError,
    OffsetOutOfRangeError,
    ProtocolError,
    StoreBusyError,
    UnsupportedVersionError,
)
from mqproc.layout.frame import ANSWER, CONNECTION_ID, HEADER, HEADER_SIZE, MAGIC, REFUSAL, VERSION
from mqproc.wire.frames import (
    JOINED_FRAME_BYTES_MAX,
    NO_OPTIONS,
    ClientProtocol,
    FrameReader,
    decode_request,
    encode_frame,
    encode_refusal,
)
from mqproc.wire.operations import ANSWERS, REQUESTS, AppendRequest, Operation, PullRequest

FRAME_BYTES_MAX = 1 << 20

frames = st.tuples(
    st.integers(0, 0xFFFF),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=40),
    st.one_of(st.binary(max_size=200), st.integers(1000, 90_000).map(bytes)),
)


def stream_of(parts: list[tuple[int, int, bytes, bytes]]) -> bytes:
    return b"".join(b"".join(encode_frame(word, number, options, [data])) for word, number, options, data in parts)


def read_all(reader: FrameReader) -> list[tuple[int, int, bytes, bytes]]:
    found = []
    while (frame := reader.next_frame()) is not None:
        found.append((frame.operation, frame.request_id, bytes(frame.options), bytes(frame.payload)))
    return found


@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 40_000), min_size=1, max_size=20))
def test_frame_reader_any_split_gives_same_frames(parts: list[tuple[int, int, bytes, bytes]], cuts: list[int]) -> None:
    stream = stream_of(parts)
    reader = FrameReader(FRAME_BYTES_MAX)
    found = []
    at = 0
    while at < len(stream):
        room = reader.writable()
        count = min(len(room), cuts[at % len(cuts)], len(stream) - at)
        assert count > 0
        room[:count] = stream[at : at + count]
        reader.received(count)
        at += count
        found += read_all(reader)
    assert found == parts
    assert reader.waiting_bytes == 0


@given(st.lists(frames, max_size=6))
def test_frame_reader_accepts_whole_stream(parts: list[tuple[int, int, bytes, bytes]]) -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.feed(stream_of(parts))
    assert read_all(reader) == parts


@given(
    st.lists(frames, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_frame_reader_mutated_stream_never_crashes(
    parts: list[tuple[int, int, bytes, bytes]], mutations: list[tuple[int, int]]
) -> None:
    stream = bytearray(stream_of(parts))
    for place, value in mutations:
        stream[place % len(stream)] = value
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.feed(stream)
    try:
        for operation, _, options, _ in read_all(reader):
            if operation in REQUESTS:
                decode_request(operation, options)
    except MqprocError as error:
        reader.bad_frame(error)


@given(st.sampled_from(sorted(REQUESTS)), st.binary(max_size=60))
def test_decode_options_arbitrary_bytes_give_bad_request(operation: Operation, options: bytes) -> None:
    with contextlib.suppress(BadRequestError):
        assert isinstance(decode_request(operation, options), REQUESTS[operation])


def test_bad_request_names_operation() -> None:
    with pytest.raises(BadRequestError, match="options of PULL: "):
        decode_request(Operation.PULL, b"\x91\x01")


def header(**changes: int) -> bytes:
    fields = {"magic": MAGIC, "version": VERSION, "operation": 16, "id": 7, "options": 0, "zero": 0, "payload": 0}
    return HEADER.pack(*(fields | changes).values())


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (header(payload=FRAME_BYTES_MAX), FrameTooLargeError, "1,048,608 bytes exceeds 1,048,576"),
        (header(options=FRAME_BYTES_MAX - HEADER_SIZE + 1), FrameTooLargeError, "exceeds"),
        (header(payload=(1 << 64) - 1), FrameTooLargeError, "exceeds"),
        (header(zero=1), ProtocolError, "reserved"),
        (header(version=2), UnsupportedVersionError, "version 2; speaks 1..1"),
        (header(magic=0x20544547), UnsupportedVersionError, "0x20544547"),
    ],
)
def test_frame_reader_refuses_header_before_allocating(data: bytes, error: type[MqprocError], text: str) -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.feed(data)
    with pytest.raises(error, match=text.replace(".", r"\.")) as caught:
        reader.next_frame()
    assert type(caught.value) is error
    known = error is not UnsupportedVersionError
    assert reader.bad_frame(caught.value)[:2] == ((16, 7) if known else (0, CONNECTION_ID))


def test_frame_reader_detects_other_protocol_early() -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(UnsupportedVersionError):
        reader.next_frame()


def test_frame_reader_accepts_much_data_after_partial_frame() -> None:
    parts = [(1, number, b"", bytes(1000)) for number in range(200)]
    stream, reader = stream_of(parts), FrameReader(FRAME_BYTES_MAX)
    reader.feed(stream[:500])
    assert reader.next_frame() is None
    reader.feed(stream[500:])
    assert read_all(reader) == parts


def test_frame_reader_accepts_largest_frame() -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    payload = bytes(FRAME_BYTES_MAX - HEADER_SIZE)
    for piece in encode_frame(16, 1, b"", [payload]):
        reader.feed(piece)
    (frame,) = read_all(reader)
    assert frame[3] == payload


def test_encode_frame_does_not_copy_large_payload() -> None:
    column = np.arange(JOINED_FRAME_BYTES_MAX, dtype=np.int64)
    pieces = encode_frame(16, 1, b"ab", [b"", column.data, b"x" * JOINED_FRAME_BYTES_MAX])
    assert len(pieces) == 4
    assert np.shares_memory(np.frombuffer(pieces[2], np.uint8), column)
    assert len(encode_frame(16, 1, b"ab", [column[:4].data, b"x"])) == 1


# Client side


def answers_to(protocol: ClientProtocol, *pieces: bytes) -> list[tuple[int, bytes, bytes, MqprocError | None]]:
    for piece in pieces:
        protocol.reader.feed(piece)
    found = []
    while (answer := protocol.next_answer()) is not None:
        found.append((answer.request_id, bytes(answer.options), bytes(answer.payload), answer.error))
    return found


def answer(request_id: int, operation: int, payload: bytes = b"") -> bytes:
    return b"".join(encode_frame(operation | ANSWER, request_id, NO_OPTIONS, [payload]))


def test_client_matches_answers_in_any_order() -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    ids = [protocol.request(16, NO_OPTIONS)[0] for _ in range(3)]
    assert ids == [1, 2, 3]
    found = answers_to(protocol, answer(3, 16, b"c"), answer(1, 16, b"a"))
    assert [(row[0], row[2]) for row in found] == [(3, b"c"), (1, b"a")]
    assert protocol.waiting == 1


def test_client_drops_late_and_oneway_answers() -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    late, _ = protocol.request(16, NO_OPTIONS)
    oneway, _ = protocol.request(16, NO_OPTIONS, oneway=True)
    protocol.forget(late)
    assert answers_to(protocol, answer(late, 16), answer(oneway, 16)) == []


@pytest.mark.parametrize("frame", [answer(9, 16), answer(1, 17), answer(0, 16)])
def test_client_unmatched_answer_is_protocol_error(frame: bytes) -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    protocol.request(16, NO_OPTIONS)
    with pytest.raises(ProtocolError):
        answers_to(protocol, frame)


@pytest.mark.parametrize("code", sorted(ERROR_BY_CODE))
def test_errors_survive_encoding(code: str) -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    request_id, _ = protocol.request(32, NO_OPTIONS)
    ((_, _, _, error),) = answers_to(
        protocol, encode_refusal(32, request_id, ERROR_BY_CODE[code]("what happened", hint_ms=7))
    )
    assert type(error) is ERROR_BY_CODE[code]
    assert (str(error), error.hint_ms) == ("what happened", 7)


def test_error_fields_survive_encoding() -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    protocol.request(32, NO_OPTIONS)
    ((_, _, _, error),) = answers_to(
        protocol, encode_refusal(32, 1, OffsetOutOfRangeError("beyond", min_offset=3, max_offset=9))
    )
    assert isinstance(error, OffsetOutOfRangeError)
    assert (error.min_offset, error.max_offset) == (3, 9)


def test_connection_refusal_is_raised() -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    with pytest.raises(StoreBusyError):
        answers_to(protocol, encode_refusal(0, CONNECTION_ID, StoreBusyError("full")))


def test_unreadable_refusal_is_protocol_error() -> None:
    protocol = ClientProtocol(FRAME_BYTES_MAX)
    for options in (b"\xc1", msgspec.msgpack.encode(["CORRUPT", "x", {"no_such_detail": 1}])):
        request_id, _ = protocol.request(32, NO_OPTIONS)
        frame = b"".join(encode_frame(32 | ANSWER | REFUSAL, request_id, options))
        ((_, _, _, error),) = answers_to(protocol, frame)
        assert type(error) is ProtocolError
    unknown = msgspec.msgpack.encode(["FROM_THE_FUTURE", "x"])
    request_id, _ = protocol.request(32, NO_OPTIONS)
    ((_, _, _, error),) = answers_to(protocol, b"".join(encode_frame(32 | ANSWER | REFUSAL, request_id, unknown)))
    assert type(error) is InternalError


# Contract


def test_operations_have_request_and_answer_options() -> None:
    assert set(REQUESTS) == set(ANSWERS) == set(Operation)


def test_options_missing_trailing_fields_use_defaults() -> None:
    short = msgspec.msgpack.encode(["orders", 3, 17])
    assert decode_request(Operation.PULL, short) == PullRequest("orders", 3, 17)
    longer = msgspec.msgpack.encode([*msgspec.structs.astuple(PullRequest("orders", 3, 17)), "from a later version"])
    assert decode_request(Operation.PULL, longer) == PullRequest("orders", 3, 17)
    assert decode_request(Operation.APPEND, msgspec.msgpack.encode(["orders", 1])) == AppendRequest("orders", 1)


@pytest.mark.parametrize("count", [1, 2, 40_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, "<i4")])
def test_frame_size_is_bytes_of_its_pieces(kind: Callable[[bytes], Any], count: int) -> None:
    data = bytes(range(4)) * count
    for pieces in ((kind(data),), (kind(data), kind(data)), ()):
        stream = b"".join(encode_frame(16, 7, b"options", pieces))
        size = len(data) * len(pieces)
        assert stream == HEADER.pack(MAGIC, VERSION, 16, 7, 7, 0, size) + b"options" + data * len(pieces)
