"""Validation of append frames against a per-message model and the plain Python twin."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.kernels import append_frame as frame
from mqproc.kernels.jit.compile import plain
from mqproc.layout import record

HEAD_SIZE = 88
TOPIC_SIZE = 8
BODY_SIZE_MAX = 40
RECORD_SIZE_MAX = 200
QUEUES = 4
Texts = Sequence[bytes] | None


@dataclass
class Frame:
    """The frame of a client; `None` is a missing column."""

    bodies: Sequence[bytes]
    keys: Texts = None
    tags: Texts = None
    properties: Texts = None
    sharding_keys: Texts = None
    queues: Sequence[int] | None = None
    constant: int = 0
    unique: bool = True
    property_crc: bool = True
    surplus: bytes = b""

    def encoded(self) -> tuple[np.ndarray, np.ndarray]:
        """(payload, state)."""
        state = np.full(frame.STATE_WORDS, -1, np.int64)
        parts: list[bytes] = []

        def put(column: int, data: bytes) -> None:
            state[column] = sum(map(len, parts))
            parts.append(data)

        put(frame.BODY_LENGTHS, struct.pack(f"<{len(self.bodies)}I", *map(len, self.bodies)))
        put(frame.BODIES, b"".join(self.bodies))
        for column, texts in (
            (frame.KEY_LENGTHS, self.keys),
            (frame.TAG_LENGTHS, self.tags),
            (frame.PROPERTY_LENGTHS, self.properties),
        ):
            if texts is not None:
                put(column, struct.pack(f"<{len(texts)}H", *map(len, texts)))
                put(column + 1, b"".join(texts))
        if self.queues is not None:
            put(frame.QUEUES, struct.pack(f"<{len(self.queues)}I", *self.queues))
        if self.sharding_keys is not None:
            put(frame.SHARDING_LENGTHS, struct.pack(f"<{len(self.sharding_keys)}H", *map(len, self.sharding_keys)))
            put(frame.SHARDING_KEYS, b"".join(self.sharding_keys))
        payload = b"".join(parts) + self.surplus
        state[frame.PAYLOAD_SIZE] = len(payload)
        state[frame.COUNT] = len(self.bodies)
        state[frame.UNIQUE_COUNTER] = 5 if self.unique else -1
        state[frame.QUEUE_COUNT] = QUEUES
        state[frame.PROPERTY_CRC] = self.property_crc
        state[frame.HEAD_SIZE], state[frame.TOPIC_SIZE] = HEAD_SIZE, TOPIC_SIZE
        state[frame.BODY_SIZE_MAX], state[frame.RECORD_SIZE_MAX] = BODY_SIZE_MAX, RECORD_SIZE_MAX
        state[frame.PART_3_END] = self.constant
        return np.frombuffer(bytearray(payload), np.uint8), state

    def expected(self) -> tuple[int, int, int, int | None]:
        """(status, message, value, total record bytes or None on error)."""
        if self.surplus and (self.queues is None or self.sharding_keys is not None):
            # After a numeric column the payload size gives the same result and is checked first.
            return frame.COLUMNS_MISMATCH, -1, -1, None
        tail = frame.TAIL_SIZE if self.property_crc else 0
        total = 0
        for message, body in enumerate(self.bodies):
            size = self.constant + tail
            not_closed = 0
            if self.properties is not None:
                given = self.properties[message]
                if size != 0:
                    closing = int(given != b"" and not given.endswith(b"\2"))
                    not_closed = 1 - closing
                    size += closing
                size += len(given)
            else:
                size += frame.UNIQUE_DIGITS if self.unique else 0
                for texts, overhead in (
                    (self.keys, frame.PAIR_OVERHEAD),
                    (self.tags, frame.PAIR_OVERHEAD),
                    (self.sharding_keys, frame.SHARDING_OVERHEAD),
                ):
                    if texts is not None and texts[message]:
                        size += overhead + len(texts[message])
            record_size = HEAD_SIZE + len(body) + TOPIC_SIZE + 2 + size
            if len(body) > BODY_SIZE_MAX:
                return frame.BODY_TOO_LARGE, message, len(body), None
            if size > record.PROPERTIES_SIZE_MAX:
                return frame.PROPERTIES_TOO_LARGE, message, size, None
            if record_size > RECORD_SIZE_MAX:
                return frame.RECORD_TOO_LARGE, message, record_size, None
            if self.queues is not None and self.queues[message] >= QUEUES:
                return frame.QUEUE_OUT_OF_RANGE, message, self.queues[message], None
            total += record_size + not_closed
        for value, texts in enumerate((self.keys, self.tags, self.sharding_keys)):
            if texts is not None and any(byte in text for text in texts for byte in (1, 2)):
                return frame.SEPARATOR_BYTE, -1, value, None
        return frame.FRAME_OK, -1, -1, total

    def check(self, function: object = frame.check_frame) -> tuple[int, int, int, int | None]:
        payload, state = self.encoded()
        found = int(function(payload, state))  # type: ignore[operator]
        total = int(state[frame.TOTAL_SIZE]) if found == frame.FRAME_OK else None
        return found, int(state[frame.FAILED_MESSAGE]), int(state[frame.FAILED_VALUE]), total


TEXTS = st.one_of(st.binary(max_size=12), st.text("abc\x01", max_size=30).map(str.encode), st.just(b""))

GIVEN = st.integers(1, 80).map(lambda size: b"v" * size + b"\2")


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    count = draw(st.integers(1, 9))

    def column(values: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(st.none(), st.lists(values, min_size=count, max_size=count))

    given_properties = draw(st.booleans())
    nothing = st.none()
    return Frame(
        bodies=draw(st.lists(st.binary(max_size=BODY_SIZE_MAX + 1), min_size=count, max_size=count)),
        keys=draw(nothing if given_properties else column(TEXTS)),
        tags=draw(nothing if given_properties else column(TEXTS)),
        properties=draw(column(st.one_of(st.binary(max_size=60), GIVEN))) if given_properties else None,
        sharding_keys=draw(nothing if given_properties else column(TEXTS)),
        queues=draw(column(st.integers(0, QUEUES))),
        constant=draw(st.sampled_from([0, 0, 20, 60])),
        unique=draw(st.booleans()),
        property_crc=draw(st.booleans()),
        surplus=draw(st.sampled_from([b"", b"", b"", b"x"])),
    )


@settings(max_examples=300, deadline=None)
@given(frames())
def test_check_matches_model(sent: Frame) -> None:
    assert sent.check() == sent.expected()


@settings(max_examples=100, deadline=None)
@given(frames())
def test_check_matches_plain_twin(sent: Frame) -> None:
    called = ("_lengths16", "length16", "closing_of", "_check_each", "_composed_size", "_has_separator", "_column_size")
    with mock.patch.multiple(frame, **{name: plain(getattr(frame, name)) for name in called}):
        found = sent.check(plain(frame.check_frame))
    assert found == sent.expected()


def test_check_sizes_apply_per_message() -> None:
    sent = Frame([b"b" * BODY_SIZE_MAX, b""], keys=[b"", b"k" * 60], property_crc=False, unique=False)
    found, _, _, total = sent.check()
    assert (found, total) == (frame.FRAME_OK, 2 * (HEAD_SIZE + TOPIC_SIZE + 2) + BODY_SIZE_MAX + 60 + 6)


@pytest.mark.parametrize("end", [b"", b"\2"])
@pytest.mark.parametrize("more", [0, 1])
def test_check_properties_size_includes_last_byte(end: bytes, more: int) -> None:
    """RocketMQ reads a properties length of 32,768 as a negative number."""
    longest = record.PROPERTIES_SIZE_MAX - frame.TAIL_SIZE - 1
    sent = Frame([b""], properties=[b"n\1".ljust(longest + more, b"v") + end])
    payload, state = sent.encoded()
    state[frame.RECORD_SIZE_MAX] = 1 << 20
    assert frame.check_frame(payload, state) == (frame.PROPERTIES_TOO_LARGE if more else frame.FRAME_OK)


@pytest.mark.parametrize("size", [7, 8, 9, 16, 23])
@pytest.mark.parametrize("byte", [1, 2])
def test_separator_is_found_at_any_position(size: int, byte: int) -> None:
    clean = bytes(value for value in range(256) if value not in (1, 2))[:size]
    assert Frame([b""], keys=[clean]).check()[0] == frame.FRAME_OK
    for place in range(size):
        dirty = clean[:place] + bytes([byte]) + clean[place + 1 :]
        assert Frame([b""], keys=[dirty]).check()[0::2] == (frame.SEPARATOR_BYTE, 0)


def test_separator_matches_no_other_byte() -> None:
    for value in set(range(256)) - {1, 2}:
        assert Frame([b""], keys=[bytes([value]) * 16]).check()[0] == frame.FRAME_OK
