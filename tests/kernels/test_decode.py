"""Decoding records into columns: matches the plain codec for any columns and any bytes."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.errors import CorruptStoreError
from mqproc.kernels import record_decode
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.record_decode import ALL_COLUMNS, FIXED_COLUMNS, HOST_TEXT_MAX, VARIABLE_COLUMNS, host_text
from mqproc.layout import properties
from mqproc.layout.record_codec import decode_records, host_bytes
from mqproc.util.record_text import host_text as host_text_of
from tests.support.records import (
    SmallLog,
    columns_of,
    encode_record,
    kernel_bytes,
    mutated,
    outcomes_uncompiled,
    small_log,
)

MUTATIONS = 60


@pytest.fixture(scope="module")
def log() -> SmallLog:
    return small_log(count=40)


def values(column: Any) -> list[Any]:
    """A column as Python values."""
    if isinstance(column, np.ndarray):
        return column.tolist()
    offsets, data = column
    assert offsets[-1] == len(data)
    return [data[start:stop].tobytes() for start, stop in itertools.pairwise(offsets)]


def test_columns_match_codec(log: SmallLog) -> None:
    columns = columns_of(log.records, len(log.places), ALL_COLUMNS)
    messages = decode_records(log.records)
    assert list(columns) == list(ALL_COLUMNS)
    for name in FIXED_COLUMNS:
        assert values(columns[name]) == [getattr(message, name) for message in messages], name
    for name in ("topic", "tag", "born_host", "store_host"):
        assert values(columns[name]) == [getattr(message, name).encode() for message in messages], name
    assert values(columns["body"]) == [message.body for message in messages]
    assert values(columns["keys"]) == [" ".join(message.keys).encode() for message in messages]
    decoded = [properties.decode(text.decode()) for text in values(columns["properties"])]
    assert decoded == [dict(message.properties) for message in messages]
    assert not any(b"__CRC32#" in text for text in values(columns["properties"]))


def test_columns_have_arrows_types(log: SmallLog) -> None:
    columns = columns_of(log.records, -1, ALL_COLUMNS)
    wide = {"physical_offset", "queue_offset", "born_timestamp_ms", "store_timestamp_ms", "prepared_transaction_offset"}
    for name in FIXED_COLUMNS:
        assert columns[name].dtype == (np.int64 if name in wide else np.int32)  # type: ignore[union-attr]
    for name in VARIABLE_COLUMNS:
        offsets, data = columns[name]
        assert (offsets.dtype, data.dtype) == (np.int32, np.uint8)


def test_hosts_similar_to_previous_are_decoded() -> None:
    """Hosts that are equal, differ in one byte, or have another length, in any order."""
    hosts = [host_bytes(*each) for each in (("10.0.0.1", 1), ("10.0.0.1", 2), ("11.0.0.1", 1), ("::1", 1), ("::2", 1))]
    rows = [hosts[number] for number in (0, 0, 1, 1, 0, 2, 2, 2, 3, 3, 4, 3, 3, 0, 0)]
    buf = kernel_bytes(b"".join(rows) + bytes(8))
    sizes = np.array([len(row) for row in rows], np.int64)
    starts = np.cumsum(sizes) - sizes
    places = np.concatenate([starts, sizes])
    for kernel in (record_decode.write_hosts, plain(record_decode.write_hosts)):
        offsets, data = np.zeros(len(rows) + 1, np.int32), np.zeros(HOST_TEXT_MAX * len(rows), np.uint8)
        assert kernel(buf, places, 0, len(rows), offsets, 0, data, 0) == offsets[-1]
        texts = [data[start:stop].tobytes().decode() for start, stop in itertools.pairwise(offsets)]
        assert texts == [host_text_of(row) for row in rows]


@settings(deadline=None)
@given(st.lists(st.sampled_from(ALL_COLUMNS), unique=True))
def test_any_subset_of_columns_matches_all(names: list[str]) -> None:
    log = small_log(count=9)
    every, some = (columns_of(log.records, 9, columns) for columns in (ALL_COLUMNS, names))
    assert list(some) == names
    assert all(values(some[name]) == values(every[name]) for name in names)


def test_no_records_give_empty_columns() -> None:
    columns = columns_of(b"", 0, ALL_COLUMNS)
    assert all(values(column) == [] for column in columns.values())


def test_wrong_counts_and_names_are_refused(log: SmallLog) -> None:
    count = len(log.places)
    for wrong in (count + 1, count - 1, 0, 1 << 40):
        with pytest.raises(CorruptStoreError):
            columns_of(log.records, wrong, ["body"])
    with pytest.raises(CorruptStoreError):
        columns_of(log.records[:-1], -1, ["body"])
    with pytest.raises(ValueError, match="no column"):
        columns_of(log.records, count, ["bodies"])


def test_the_plain_kernels_agree(log: SmallLog) -> None:
    buf, count = kernel_bytes(log.records), len(log.places)
    found = []
    for twin in (lambda kernel: kernel, plain):
        places = np.zeros(record_decode.PLACE_ROWS * count, np.int64)
        failed = np.zeros(8, np.int64)
        assert twin(record_decode.count_records)(buf, failed) == count
        assert twin(record_decode.locate_records)(buf, count, record_decode.rows_of(ALL_COLUMNS), places, failed) == 0
        longs, integers = np.zeros(count, np.int64), np.zeros(count, np.int32)
        twin(record_decode.copy_int64)(buf, places, record_decode.RECORD, 20, longs, 0, count)
        twin(record_decode.copy_int32)(buf, places, record_decode.RECORD, 16, integers, 0, count)
        offsets, data = np.zeros(count + 1, np.int32), np.zeros(len(buf), np.uint8)
        twin(record_decode.copy_values)(buf, places, record_decode.BODY, count, offsets, 0, data, 0)
        hosts = np.zeros(HOST_TEXT_MAX * count, np.uint8)
        twin(record_decode.write_hosts)(
            buf, places, record_decode.STORE_HOST, count, np.zeros(count + 1, np.int32), 0, hosts, 0
        )
        found.append([each.tolist() for each in (places, longs, integers, offsets, data, hosts)])
    assert found[0] == found[1]


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(-(2**31), 2**31 - 1))
def test_hosts_read_as_the_codec_writes_them(address: Any, port: int) -> None:
    host = host_bytes(str(address), port)
    out = np.zeros(HOST_TEXT_MAX, np.uint8)
    for kernel in (host_text, plain(host_text)):
        end = kernel(kernel_bytes(host), 0, len(host), out, 0)
        text = out[:end].tobytes().decode()
        # An IPv4-mapped address has two notations.
        if not (address.version == 6 and address.ipv4_mapped):
            assert text == host_text_of(host)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(max_size=40), st.text(st.characters(exclude_categories=["Cs"]), max_size=30)), max_size=8
    )
)
def test_any_bodies_and_properties(contents: list[tuple[bytes, str]]) -> None:
    records = b"".join(encode_record(topic="T", body=body, properties=text) for body, text in contents)
    columns = columns_of(records, len(contents), ALL_COLUMNS)
    messages = decode_records(records)
    assert values(columns["body"]) == [message.body for message in messages]
    assert values(columns["tag"]) == [message.tag.encode() for message in messages]


def outcomes() -> list[Any]:
    """Results for damaged records: columns, or the error text."""
    found: list[Any] = []
    for seed in range(MUTATIONS):
        data = mutated(small_log(count=6, seed=seed % 3).records, random.Random(seed))
        try:
            columns = columns_of(data, -1 if seed % 2 else 6, ALL_COLUMNS)
            found.append([[str(value) for value in values(column)] for column in columns.values()])
        except CorruptStoreError as error:
            found.append(str(error))
    return found


def test_uncompiled_gives_the_same_within_buffers() -> None:
    assert outcomes_uncompiled(__file__) == outcomes()


if __name__ == "__main__":
    print(json.dumps(outcomes()))
