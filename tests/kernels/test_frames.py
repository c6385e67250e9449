"""The extent of a run of whole frames, against the reader that parses frames one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.errors import ProtocolError
from mqproc.kernels.append_run import leading_run
from mqproc.kernels.jit.compile import plain
from mqproc.layout.frame import HEADER, HEADER_SIZE, MAGIC, VERSION
from mqproc.wire.frames import FrameReader

OPERATION = 16
FRAME_BYTES_MAX = 200
KERNELS: Sequence[Callable[..., int]] = (leading_run, plain(leading_run))
# Sizes that exceed any payload here: the maximum frame size, and limits of 64-bit numbers.
HUGE = (FRAME_BYTES_MAX, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 63) - HEADER_SIZE, 1 << 63, (1 << 64) - 1)


@st.composite
def good_frames(draw: st.DrawFn) -> bytes:
    options, payload = draw(st.binary(max_size=30)), draw(st.binary(max_size=60))
    request_id = draw(st.integers(0, (1 << 64) - 1))
    return HEADER.pack(MAGIC, VERSION, OPERATION, request_id, len(options), 0, len(payload)) + options + payload


@st.composite
def frames_of_any_size(draw: st.DrawFn) -> bytes:
    """Frames of the maximum size, or one byte more or less."""
    rest = FRAME_BYTES_MAX - HEADER_SIZE + draw(st.integers(-1, 1))
    options = draw(st.integers(0, rest))
    return HEADER.pack(MAGIC, VERSION, OPERATION, 1, options, 0, rest - options) + bytes(rest)


@st.composite
def other_frames(draw: st.DrawFn) -> bytes:
    """Frames with an invalid header field, or of another operation."""
    fields = [MAGIC, VERSION, OPERATION, 7, 3, 0, 5]
    place, value = draw(
        st.one_of(
            st.tuples(st.just(0), st.sampled_from([MAGIC ^ 1, MAGIC ^ (1 << 31), 0])),
            st.tuples(st.just(1), st.sampled_from([0, 2, VERSION | 0x100])),
            st.tuples(st.just(2), st.sampled_from([0, 17, OPERATION | 0x8000, OPERATION << 8])),
            st.tuples(st.just(4), st.sampled_from([FRAME_BYTES_MAX, 1 << 31, (1 << 32) - 1])),
            st.tuples(st.just(5), st.sampled_from([1, 1 << 31])),
            st.tuples(st.just(6), st.sampled_from(HUGE)),
        )
    )
    fields[place] = value
    return HEADER.pack(*fields) + bytes(8)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, int, int]:
    """(buffer, start of the first frame, filled size)."""
    before = draw(st.binary(max_size=9))
    frames = draw(st.lists(st.one_of(good_frames(), good_frames(), good_frames(), frames_of_any_size()), max_size=6))
    last = draw(st.one_of(st.just(b""), other_frames()))
    place = draw(st.integers(0, len(frames)))
    stream = before + b"".join([*frames[:place], last, *frames[place:]])
    end = draw(st.one_of(st.just(len(stream)), st.integers(len(before), len(stream))))
    # A truncated frame continues after the filled part, or the buffer ends there.
    return (stream if draw(st.booleans()) else stream[:end]), len(before), end


def cut(stream: bytes, at: int, end: int, limit: int) -> tuple[int, int]:
    """(end of the run of frames, how many more there may be), frame by frame."""
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.adopt(memoryview(stream), at, end)
    while limit > 0:
        try:
            frame = reader.next_frame()
        except ProtocolError:
            break
        if frame is None or frame.operation != OPERATION:
            break
        at = reader.place()[1]
        limit -= 1
    return at, limit


def run(stream: bytes, at: int, end: int, limit: int, kernel: Callable[..., int]) -> tuple[int, int]:
    buffer = np.frombuffer(bytearray(stream) or bytearray(1), np.uint8)
    left = np.array([limit], np.int64)
    return int(kernel(buffer, at, end, OPERATION, FRAME_BYTES_MAX, left)), int(left[0])


@settings(max_examples=500, deadline=None)
@given(streams(), st.integers(0, 7))
def test_run_matches_frame_reader(given_stream: tuple[bytes, int, int], limit: int) -> None:
    stream, at, end = given_stream
    for kernel in KERNELS:
        assert run(stream, at, end, limit, kernel) == cut(stream, at, end, limit)


@settings(max_examples=100, deadline=None)
@given(st.lists(good_frames(), min_size=1, max_size=4), st.data())
def test_run_excludes_partial_frame(frames: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(frames[:-1])
    part = frames[-1][: data.draw(st.integers(0, len(frames[-1]) - 1))]
    for kernel in KERNELS:
        assert run(whole + part, 0, len(whole + part), 9, kernel) == (len(whole), 9 - len(frames) + 1)


def test_run_checks_every_header_bit() -> None:
    frame = HEADER.pack(MAGIC, VERSION, OPERATION, 5, 0, 0, 0)
    # The request id is not checked; a bit set in the size makes the frame longer than the buffer.
    for bit in range(8 * HEADER_SIZE):
        is_of_id = 64 <= bit < 128
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        for kernel in KERNELS:
            assert run(bytes(changed), 0, HEADER_SIZE, 1, kernel)[0] == (HEADER_SIZE if is_of_id else 0), bit


def test_run_includes_frame_of_maximum_size_only() -> None:
    for surplus, options in ((0, 0), (0, 50), (1, 0), (1, 50)):
        rest = FRAME_BYTES_MAX - HEADER_SIZE + surplus
        stream = HEADER.pack(MAGIC, VERSION, OPERATION, 5, options, 0, rest - options) + bytes(rest)
        for kernel in KERNELS:
            assert run(stream, 0, len(stream), 1, kernel) == ((0, 1) if surplus else (FRAME_BYTES_MAX, 0))
