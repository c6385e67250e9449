"""The plain codec: RocketMQ's vectors, round trips, validation rules, invalid bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.errors import BadRequestError, CorruptStoreError, MqprocError, PropertiesTooLargeError
from mqproc.layout import properties as property_string
from mqproc.layout import record as layout
from mqproc.layout.record_codec import decode_message_id, decode_records, encode_blank, host_bytes, split_keys
from mqproc.types import StoredMessage
from tests.support.records import (
    RecordCheck,
    RecordFault,
    check_record,
    crc31,
    crc_tail,
    decode_record,
    encode_message_id,
    encode_record,
    iterate_records,
    property_crc,
    without_crc,
)

VECTOR = bytes.fromhex(
    "0000007bdaa320a73610a686000000030000000700000000000000050000000000000000000000000000018bcfe568007f00000100001388"
    "0000018bcfe56801c0a8010200002a9f0000000000000000000000000000000568656c6c6f09546f7069635465737400124b455953016b31"
    "0254414753015461674102"
)
FIELDS = {
    "topic": "TopicTest",
    "body": b"hello",
    "properties": "KEYS\x01k1\x02TAGS\x01TagA\x02",
    "queue_id": 3,
    "flag": 7,
    "queue_offset": 5,
    "born_timestamp_ms": 1_700_000_000_000,
    "born_host": host_bytes("127.0.0.1", 5000),
    "store_timestamp_ms": 1_700_000_000_001,
    "store_host": host_bytes("192.168.1.2", 10911),
}

hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).flatmap(
    lambda address: st.integers(0, 65535).map(lambda port: host_bytes(str(address), port))
)
pairs = st.dictionaries(
    st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != property_string.CRC32
    ),
    st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8),
    max_size=5,
)
i32 = st.integers(-(1 << 31), (1 << 31) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
records = st.fixed_dictionaries(
    {
        "topic": st.one_of(st.from_regex(r"[A-Za-z0-9_%|-]{1,20}", fullmatch=True), st.just("%RETRY%" + "g" * 200)),
        "body": st.binary(max_size=100),
        "queue_id": i32,
        "flag": i32,
        "queue_offset": i64,
        "physical_offset": i64,
        "sys_flag": i32,
        "born_timestamp_ms": i64,
        "born_host": hosts,
        "store_timestamp_ms": i64,
        "store_host": hosts,
        "reconsume_times": i32,
        "prepared_transaction_offset": i64,
        "append_crc": st.booleans(),
    }
)


def encode(fields: dict[str, object], properties: dict[str, str] | None = None) -> bytes:
    text = property_string.encode(properties) if properties is not None else fields.get("properties", "")
    return encode_record(**(fields | {"properties": text}))  # type: ignore[arg-type]


def test_the_vector_is_encoded() -> None:
    assert encode(FIELDS) == VECTOR
    assert check_record(VECTOR) == RecordCheck(123, True)


def test_the_vector_is_decoded() -> None:
    message = decode_record(VECTOR)
    assert message == StoredMessage(
        physical_offset=0,
        size=123,
        topic="TopicTest",
        queue_id=3,
        queue_offset=5,
        tag="TagA",
        keys=("k1",),
        flag=7,
        sys_flag=0,
        born_timestamp_ms=1_700_000_000_000,
        store_timestamp_ms=1_700_000_000_001,
        reconsume_times=0,
        prepared_transaction_offset=0,
        body_crc=907060870,
        body=b"hello",
        _properties=b"KEYS\x01k1\x02TAGS\x01TagA\x02",
        _hosts=host_bytes("127.0.0.1", 5000) + host_bytes("192.168.1.2", 10911),
    )
    assert type(message) is StoredMessage
    assert message.message_id == "C0A8010200002A9F0000000000000000"
    assert message.properties == {"KEYS": "k1", "TAGS": "TagA"}
    assert (message.born_host, message.store_host) == ("127.0.0.1:5000", "192.168.1.2:10911")
    with pytest.raises(AttributeError):
        message.topic = "other"  # type: ignore[misc]
    assert hash(message.message_id)


def test_vector_variants() -> None:
    long_topic = encode(FIELDS | {"topic": "t" * 128})
    assert long_topic[4:8].hex() == "daa320ab"
    assert len(long_topic) == 123 - 9 + 128 + 1
    assert len(encode(FIELDS | {"born_host": host_bytes("::1", 5000)})) == 135
    assert crc31(b"hello") == 907060870
    assert crc31(b"") == 0
    assert crc_tail(1234567890) == b"__CRC32#\x010987654321\x02"
    assert property_crc(b"a\x01b\x02" + crc_tail(1234567890)) == 1234567890
    assert encode_message_id(host_bytes("192.168.1.2", 10911), 4096) == "C0A8010200002A9F0000000000001000"


@given(records, pairs)
def test_a_record_round_trips(fields: dict[str, object], properties: dict[str, str]) -> None:
    data = encode(fields, properties)
    message = decode_record(b"before" + data + b"after", 6)
    for name in ("topic", "body", "queue_id", "flag", "queue_offset", "physical_offset", "born_timestamp_ms"):
        assert getattr(message, name) == fields[name]
    for name in ("store_timestamp_ms", "reconsume_times", "prepared_transaction_offset"):
        assert getattr(message, name) == fields[name]
    assert message.properties == properties
    assert message.tag == properties.get("TAGS", "")
    assert message.keys == split_keys(properties.get("KEYS", ""))
    assert message.size == len(data)
    assert message.sys_flag & ~0x30 == fields["sys_flag"] & ~0x30  # type: ignore[operator]
    assert decode_message_id(message.message_id) == (fields["store_host"], fields["physical_offset"])
    assert check_record(data, check_property_crc=True).success == fields["append_crc"]
    assert decode_records(data * 2) == [message, message]


@given(records, pairs, st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_found_by_the_records_own_crc(
    fields: dict[str, object], properties: dict[str, str], place: int, flip: int
) -> None:
    data = bytearray(encode(fields | {"append_crc": True}, properties))
    data[place % len(data)] ^= flip
    check = check_record(data, check_property_crc=True)
    blank = int.from_bytes(data[4:8], "big", signed=True) == layout.MAGIC_BLANK
    assert not check.success or blank or bytes(data[-20:-11]) != b"__CRC32#\x01"


@given(st.binary(max_size=200), st.integers(0, 50))
def test_arbitrary_bytes_are_checked_without_a_crash(data: bytes, offset: int) -> None:
    for property_crc_wanted in (False, True):
        check = check_record(data, offset, check_property_crc=property_crc_wanted)
        assert check.success or check.fault is not None
    if data:
        with pytest.raises(MqprocError):
            decode_records(data)


@given(records, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4))
def test_mutated_records_are_decoded_or_refused(fields: dict[str, object], mutations: list[tuple[int, int]]) -> None:
    data = bytearray(encode(fields, {"KEYS": "k1 k2", "TAGS": "t"}))
    for place, value in mutations:
        data[place % len(data)] = value
    if check_record(data).success:
        return
    with pytest.raises(CorruptStoreError):
        decode_record(data)


def changed(offset: int, value: int, size: int = 4) -> bytes:
    return VECTOR[:offset] + value.to_bytes(size, "big", signed=True) + VECTOR[offset + size :]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encode_blank(500), RecordCheck(0, True)),
        (bytes(100), RecordCheck(-1, False, RecordFault.NO_MAGIC)),
        (VECTOR[:7], RecordCheck(-1, False, RecordFault.CUT_SHORT)),
        (VECTOR[:60], RecordCheck(-1, False, RecordFault.CUT_SHORT)),
        (VECTOR[:-1], RecordCheck(-1, False, RecordFault.CUT_SHORT)),
        (changed(layout.TOTAL_SIZE, -5), RecordCheck(-1, False, RecordFault.CUT_SHORT)),
        (changed(layout.BODY_LENGTH, 1 << 30), RecordCheck(-1, False, RecordFault.CUT_SHORT)),
        (changed(layout.BODY + 5, -1, 1), RecordCheck(-1, False, RecordFault.CUT_SHORT)),
        (changed(layout.TOTAL_SIZE, 124), RecordCheck(124, False, RecordFault.LENGTHS_DIFFER)),
        (changed(layout.BODY, 0x68656C6D), RecordCheck(-1, False, RecordFault.BODY_CRC)),
        (changed(layout.BODY_CRC, 5), RecordCheck(-1, False, RecordFault.BODY_CRC)),
    ],
)
def test_check_rules_match_rocketmq(data: bytes, expected: RecordCheck) -> None:
    assert check_record(data) == expected
    with pytest.raises(CorruptStoreError):
        decode_record(data)


def test_negative_body_length_counts_as_zero() -> None:
    empty = encode(FIELDS | {"body": b""})
    data = empty[: layout.BODY_LENGTH] + (-100).to_bytes(4, "big", signed=True) + empty[layout.BODY :]
    assert check_record(data) == RecordCheck(118, True)
    assert [message.body for message in decode_records(data * 2)] == [b"", b""]


def test_unchecked_body_may_differ() -> None:
    assert check_record(changed(layout.BODY_CRC, 5), check_crc=False).success
    assert decode_record(changed(layout.BODY_CRC, 5), check_crc=False).body_crc == 5


def test_record_without_required_property_crc_is_rejected() -> None:
    assert check_record(VECTOR, check_property_crc=True).fault is RecordFault.PROPERTY_CRC
    assert check_record(encode(FIELDS | {"append_crc": True}), check_property_crc=True).success


def test_a_segment_is_iterated_up_to_its_end() -> None:
    segment = VECTOR + VECTOR + encode_blank(1000) + VECTOR
    assert [offset for offset, _ in iterate_records(segment)] == [0, 123]
    assert [offset for offset, _ in iterate_records(VECTOR + bytes(50))] == [0]


def test_decode_requires_whole_records() -> None:
    assert decode_records(b"") == []
    for data in (VECTOR[:-1], VECTOR + b"\0", bytes(200), VECTOR + encode_blank(8)):
        with pytest.raises(CorruptStoreError):
            decode_records(data)


CRC_PAIR = "__CRC32#\x01123"
PAIRS = "KeyA\x01ValueA\x02KeyB\x01ValueB"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        (CRC_PAIR, ""),
        (f"{CRC_PAIR}\x02", ""),
        ("__CRC32#\x01", ""),
        ("__CRC32#\x01\x02KeyA\x01ValueA\x02", "KeyA\x01ValueA\x02"),
        # First, in the middle, last, with and without an end.
        (f"{CRC_PAIR}\x02{PAIRS}", PAIRS),
        (f"{CRC_PAIR}\x02{PAIRS}\x02", f"{PAIRS}\x02"),
        (f"KeyA\x01ValueA\x02{CRC_PAIR}\x02KeyB\x01ValueB", PAIRS),
        (f"KeyA\x01ValueA\x02{CRC_PAIR}\x02KeyB\x01ValueB\x02", f"{PAIRS}\x02"),
        (f"{PAIRS}\x02{CRC_PAIR}", f"{PAIRS}\x02"),
        (f"{PAIRS}\x02{CRC_PAIR}\x02", f"{PAIRS}\x02"),
        # Repeated.
        (f"{CRC_PAIR}\x02{CRC_PAIR}\x02{PAIRS}", PAIRS),
        (f"{CRC_PAIR}\x02KeyA\x01ValueA\x02{CRC_PAIR}\x02KeyB\x01ValueB\x02{CRC_PAIR}", f"{PAIRS}\x02"),
        # The name inside a value, or without its own value.
        (f"KeyB\x01ValueB{CRC_PAIR}", f"KeyB\x01ValueB{CRC_PAIR}"),
        (f"KeyB\x01ValueB{CRC_PAIR}\x02{CRC_PAIR}\x02{PAIRS}", f"KeyB\x01ValueB{CRC_PAIR}\x02{PAIRS}"),
        ("KeyB\x01ValueB__CRC32#", "KeyB\x01ValueB__CRC32#"),
        ("KeyB\x01__CRC32#\x02", "KeyB\x01__CRC32#\x02"),
        ("__CRC32#", "__CRC32#"),
        (f"{PAIRS}\x02__CRC32#\x02", f"{PAIRS}\x02__CRC32#\x02"),
    ],
)
def test_property_crc_is_not_copied(text: str, expected: str) -> None:
    assert without_crc(text) == expected


def test_crc_tail_is_preceded_by_separator() -> None:
    record = encode(FIELDS | {"append_crc": True, "properties": "a\x01b"})
    assert record[-24 - 20 + 20 : -20] == b"a\x01b\x02"
    assert decode_record(record).properties == {"a": "b"}


def test_limits_of_a_record() -> None:
    largest = "b" * 32_764
    assert decode_record(encode(FIELDS | {"properties": f"a\x01{largest}\x02"})).properties == {"a": largest}
    with pytest.raises(PropertiesTooLargeError):
        encode(FIELDS | {"properties": "a\x01" + "b" * 32_765 + "\x02"})
    with pytest.raises(PropertiesTooLargeError):
        encode(FIELDS | {"append_crc": True, "properties": "a\x01" + "b" * 32_764 + "\x02"})


def test_message_ids_in_both_forms() -> None:
    for address, size in (("10.0.0.1", 32), ("2001:db8::1", 56)):
        host = host_bytes(address, 10911)
        text = encode_message_id(host, 1 << 40)
        assert len(text) == size
        assert decode_message_id(text) == (host, 1 << 40)
        assert decode_message_id(text.lower()) == (host, 1 << 40)


@pytest.mark.parametrize("text", ["", "xyz", "00" * 15, "00" * 17, " " + "00" * 16, "0" * 31])
def test_invalid_message_id_is_a_bad_request(text: str) -> None:
    with pytest.raises(BadRequestError):
        decode_message_id(text)
