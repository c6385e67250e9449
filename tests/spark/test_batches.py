"""Record batches have the codec's values and pass Arrow's validation."""

from __future__ import annotations

import datetime
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.errors import BadRequestError
from mqproc.layout.record_codec import decode_records
from mqproc.spark.batches import BatchMaker
from mqproc.spark.options import MQPROC_COLUMNS
from mqproc.spark.record_reader import FoundRecords
from tests.support.records import encode_record, kernel_bytes, small_log

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def found_of(records: bytes) -> FoundRecords:
    starts = [message.physical_offset for message in decode_records(records)]
    return FoundRecords(kernel_bytes(records), np.array([start - starts[0] for start in starts], np.int64))


def batch_of(records: bytes, *names: str) -> pa.RecordBatch:
    [batch] = BatchMaker("mqproc", names or list(MQPROC_COLUMNS), "/stores/one").batches(found_of(records))
    batch.validate(full=True)
    return batch


def time_of(ms: int) -> datetime.datetime:
    return EPOCH + datetime.timedelta(milliseconds=ms)


def row_of(message: Any) -> dict[str, Any]:
    """The codec's values of a message, by column name."""
    return {
        "store": "/stores/one",
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "physical_offset": message.physical_offset,
        "size": message.size,
        "message_id": message.message_id,
        "keys": list(message.keys),
        "tag": message.tag or None,
        "body": message.body,
        "properties": sorted(message.properties.items()),
        "born_timestamp": time_of(message.born_timestamp_ms),
        "store_timestamp": time_of(message.store_timestamp_ms),
    }


def check(records: bytes) -> None:
    rows = batch_of(records).to_pylist()
    for row in rows:
        row["properties"] = sorted(row["properties"])
    expected = [row_of(message) for message in decode_records(records)]
    assert [{name: row[name] for name in each} for row, each in zip(rows, expected, strict=True)] == expected


def test_every_kind_of_record() -> None:
    check(small_log(count=70).records)


_TEXTS = st.text(st.one_of(st.sampled_from("\x01\x02 ABÄ€"), st.characters(exclude_categories=["Cs"])), max_size=30)
_PAIRS = st.dictionaries(st.sampled_from(["KEYS", "TAGS", "x", "größe"]), _TEXTS, max_size=3)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.binary(max_size=40), st.one_of(_TEXTS, _PAIRS)), min_size=1, max_size=12))
def test_any_bodies_and_properties(given: list[tuple[bytes, str | dict[str, str]]]) -> None:
    records = b""
    for body, pairs in given:
        text = pairs if isinstance(pairs, str) else "\x02".join(f"{name}\x01{value}" for name, value in pairs.items())
        records += encode_record(topic="T", body=body, properties=text, physical_offset=len(records))
    check(records)


def test_invalid_utf8_is_replaced() -> None:
    good = encode_record(topic="T", body=b"\xff", properties="KEYS\x01one a_b\x02x\x01a_b")
    records = good.replace(b"a_b", b"a\xffb")
    row = batch_of(records, "body", "keys", "properties", "topic").to_pylist()[0]
    assert row == {
        "body": b"\xff",
        "keys": ["one", "a\ufffdb"],
        "properties": [("KEYS", "one a\ufffdb"), ("x", "a\ufffdb")],
        "topic": "T",
    }
    [json] = BatchMaker("rocketmq", ["properties"], "/stores/one").batches(found_of(records))
    assert json.to_pylist() == [{"properties": '{"KEYS":"one a\ufffdb","x":"a\ufffdb"}'}]


def test_absent_tags_and_out_of_range_times_are_null() -> None:
    most = (2**63 - 1) // 1000
    times = [0, most, most + 1, -most, -most - 1, 2**63 - 1, -(2**63), 5, 6, 7]
    records = b"".join(
        encode_record(
            topic="T",
            body=b"",
            properties="" if number % 3 else "TAGS\x01t",
            born_timestamp_ms=ms,
            store_timestamp_ms=number,
        )
        for number, ms in enumerate(times)
    )
    positions, at = [], 0
    for message in decode_records(records):
        positions.append(at)
        at += message.size
    found = FoundRecords(kernel_bytes(records), np.array(positions, np.int64))
    [batch] = BatchMaker("mqproc", ["tag", "born_timestamp", "store_timestamp"], "/stores/one").batches(found)
    batch.validate(full=True)
    tags, born, stored = (batch.column(number) for number in range(3))
    assert tags.to_pylist() == ["t" if number % 3 == 0 else None for number in range(len(times))]
    expected = [ms * 1000 if -most <= ms <= most else None for ms in times]
    assert born.cast(pa.int64()).to_pylist() == expected
    assert (born.null_count, stored.null_count) == (4, 0)


def test_batch_with_too_much_text_is_rejected() -> None:
    found = found_of(small_log().records)
    store = "s" * (2**31 // len(found.positions) + 1)
    with pytest.raises(BadRequestError, match=r"column store: texts of 24 rows may exceed 2,147,483,647 bytes: lower"):
        list(BatchMaker("mqproc", ["queue_id", "store"], store).batches(found))


def test_large_decompressed_bodies_are_split_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqproc.arrow.batches.PLAIN_BYTES", 10_000)
    lengths = [4_000, 6_000, 1, 30_000, 0, 9_999, 2]
    records, positions = b"", []
    for length in lengths:
        positions.append(len(records))
        packed = zlib.compress(bytes(length))
        records += encode_record(topic="T", body=packed, sys_flag=0x301, physical_offset=len(records))
    found = FoundRecords(kernel_bytes(records), np.array(positions, np.int64))
    names = ["physical_offset", "body", "sys_flag"]
    made = list(BatchMaker("mqproc", names, "/stores/one", plain_bodies=True).batches(found))
    for batch in made:
        batch.validate(full=True)
    assert [[len(row["body"]) for row in batch.to_pylist()] for batch in made] == [
        [4_000, 6_000],
        [1],
        [30_000],
        [0, 9_999],
        [2],
    ]
    rows = [row for batch in made for row in batch.to_pylist()]
    assert [(row["physical_offset"], row["sys_flag"]) for row in rows] == [(each, 0) for each in positions]
    [flags] = BatchMaker("mqproc", ["sys_flag"], "/stores/one", plain_bodies=True).batches(found)
    assert flags.to_pylist() == [{"sys_flag": 0}] * len(lengths)
