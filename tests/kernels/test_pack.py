"""Messages that the kernel packs equal those that Python decodes from the records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.errors import CorruptStoreError
from mqproc.kernels.jit.compile import COMPILED, plain
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.pack import REFUSED, STATE_SIZE, is_utf8, pack_messages, packed
from mqproc.layout.record_codec import decode_records, host_bytes, messages_of
from tests.support.records import encode_record

HOSTS = [host_bytes("127.0.0.1", 10911), host_bytes("2001:db8::1", 1)]
TEXT = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(TEXT, st.lists(TEXT, max_size=20).map(" ".join), st.integers(0, 70).map(lambda size: "k" * size))
ANY_SIZE = 1 << 30


@st.composite
def records(draw: st.DrawFn) -> bytes:
    names = st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "colour", "KEYSx", ""])
    pairs = draw(st.lists(st.tuples(names, VALUES), max_size=6))
    return encode_record(
        topic=draw(st.sampled_from(["a", "orders", "t" * 130, "größe"])),
        body=draw(st.binary(max_size=60)),
        properties="\x02".join(f"{name}\x01{value}" for name, value in pairs) + draw(st.sampled_from(["", "\x02"])),
        queue_id=draw(st.integers(0, 9)),
        flag=draw(st.integers(-5, 5)),
        queue_offset=draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        physical_offset=draw(st.integers(0, 1 << 50)),
        born_timestamp_ms=draw(st.integers(-5, 1 << 42)),
        born_host=draw(st.sampled_from(HOSTS)),
        store_timestamp_ms=draw(st.integers(0, 1 << 42)),
        store_host=draw(st.sampled_from(HOSTS)),
        reconsume_times=draw(st.integers(0, 16)),
        append_crc=draw(st.booleans()),
    )


def pack(*parts: bytes, bytes_max: int = ANY_SIZE) -> memoryview | None:
    return packed([memoryview(part) for part in parts], bytes_max)


@given(st.lists(records(), min_size=1, max_size=4), st.lists(records(), max_size=2))
def test_packed_messages_equal_decoded_records(parts: list[bytes], others: list[bytes]) -> None:
    first, second = b"".join(parts), b"".join(others)
    expected = decode_records(first + second)
    found = pack(first, second)
    if found is None:  # Tag and keys are there twice.
        assert any(2 * len(message.tag) + 3 * sum(map(len, message.keys)) > message.size // 4 for message in expected)
        return
    assert messages_of(found) == expected
    assert list(map(repr, messages_of(found))) == list(map(repr, expected))
    assert found.nbytes <= 1.5 * len(first + second) + 64
    assert pack(first, second, bytes_max=found.nbytes - 1) is None


@given(records())
def test_uncompiled_kernel_writes_the_same_bytes(data: bytes) -> None:
    outputs = [np.zeros(3 * len(data) + 64, np.uint8) for _ in range(2)]
    source, state = as_kernel_array(data), np.zeros(STATE_SIZE, np.int64)
    ends = [
        kernel(source, out, 0, state)
        for kernel, out in zip((pack_messages, plain(pack_messages)), outputs, strict=True)
    ]
    assert ends[0] == ends[1] > 0
    assert outputs[0].tobytes() == outputs[1].tobytes()


@given(records(), st.integers(0, 400))
def test_kernel_writes_nothing_beyond_its_buffer(data: bytes, size: int) -> None:
    memory = np.full(size + 1000, 0xAA, np.uint8)
    end = pack_messages(as_kernel_array(data), memory[:size], 0, np.zeros(STATE_SIZE, np.int64))
    assert end == REFUSED or 0 < end <= size
    assert (memory[size:] == 0xAA).all()


def test_kernel_is_compiled_once() -> None:
    assert pack(encode_record(topic="a", body=b"")) is not None
    array = np.frombuffer(encode_record(topic="a", body=b""), np.uint8).copy()
    assert packed([array.data], ANY_SIZE) is not None
    if COMPILED:
        assert len(pack_messages.signatures) == 1  # type: ignore[attr-defined]


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert pack(data or b"\0") is None


@given(
    st.one_of(
        st.binary(max_size=24),
        TEXT.map(str.encode),
        st.tuples(TEXT, st.binary(max_size=3)).map(lambda pair: pair[0].encode() + pair[1]),
    )
)
def test_utf8_check_equals_pythons(data: bytes) -> None:
    try:
        data.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    assert is_utf8(as_kernel_array(b"\0" * 8 + data), 8, 8 + len(data)) == valid


@pytest.mark.parametrize("text", ["topic", "tag-1", "key-1", "other"])
def test_text_that_is_not_utf8_is_left_to_python(text: str) -> None:
    record = encode_record(topic="topic", body=b"body", properties="TAGS\x01tag-1\x02KEYS\x01key-1\x02a\x01other\x02")
    broken = record.replace(text.encode(), b"\xed\xa0\x80".ljust(len(text), b"x"))
    found = pack(broken)
    assert (found is None) == (text != "other")
    if found is not None:
        assert messages_of(found) == decode_records(broken)
        assert messages_of(found)[0].properties["a"] == "\ufffd\ufffd\ufffdxx"


@pytest.mark.parametrize("wrong", [b"\xdd\0\0\0\2", b"\x91\x91\xa1a", b"\xc1", b"\x93"])
def test_malformed_array_is_reported(wrong: bytes) -> None:
    with pytest.raises(CorruptStoreError, match="no record, and no array of messages"):
        messages_of(wrong)
