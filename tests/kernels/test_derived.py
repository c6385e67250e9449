"""Columns derived from records match the codec for any properties, compiled and plain."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.kernels import arrow, record_decode
from mqproc.kernels.jit.compile import plain
from mqproc.layout.record_codec import decode_records
from tests.support.records import encode_record, kernel_bytes, outcomes_uncompiled, small_log

BEGIN = 3
KERNELS = ("write_message_ids", "write_words", "write_pairs", "write_json")


def columns(records: bytes, *, compiled: bool = True) -> dict[str, list[Any]]:
    """All derived columns of whole records, as Python values."""
    ids, words, pairs, objects = (getattr(arrow, name) for name in KERNELS)
    if not compiled:
        ids, words, pairs, objects = map(plain, (ids, words, pairs, objects))
    buf = kernel_bytes(records)
    starts = [message.physical_offset for message in decode_records(records)]
    positions = np.array([start - starts[0] for start in starts], np.int64)
    places = record_decode.places_at(buf, positions, record_decode.rows_of(record_decode.ALL_COLUMNS))
    count, room = len(positions), len(records) + len(positions) + 1
    # `offsets` has the lists first, with names before values; so has `data`.
    one, two = count + 1, count + 1 + room
    offsets = np.zeros(two + room, np.int32)
    data = np.zeros((arrow.JSON_GROWTH + 1) * room + 200 * count, np.uint8)
    lists = offsets[:one]
    found: dict[str, list[Any]] = {}
    size = ids(buf, places, count, offsets, one, data, BEGIN)
    found["ids"] = _texts(offsets[one:], data[BEGIN:], count)
    assert size == offsets[one + count]
    total = int(words(buf, places, record_decode.KEYS, count, offsets, 0, one, data, BEGIN))
    found["keys"] = _lists(lists, _texts(offsets[one:], data[BEGIN:], total))
    sizes = places.reshape(record_decode.PLACE_ROWS, count)
    assert total <= arrow.words_max(int(sizes[record_decode.KEYS_LENGTH].sum()), count)
    total = int(pairs(buf, places, count, offsets, 0, one, two, data, 0, room))
    assert total <= arrow.pairs_max(int(sizes[record_decode.PROPERTIES_SIZE].sum()), count)
    named = list(zip(_texts(offsets[one:], data, total), _texts(offsets[two:], data[room:], total), strict=True))
    found["properties"] = [sorted(each) for each in _lists(lists, named)]
    objects(buf, places, count, offsets, one, data, BEGIN)
    found["json"] = _texts(offsets[one:], data[BEGIN:], count)
    return found


def _texts(offsets: Any, data: Any, count: int) -> list[str]:
    return [data[offsets[i] : offsets[i + 1]].tobytes().decode() for i in range(count)]


def _lists(lists: Any, items: list[Any]) -> list[list[Any]]:
    return [items[lists[i] : lists[i + 1]] for i in range(len(lists) - 1)]


def check(records: bytes) -> None:
    messages = decode_records(records)
    found = columns(records)
    assert found["ids"] == [message.message_id for message in messages]
    assert found["keys"] == [list(message.keys) for message in messages]
    assert found["properties"] == [sorted(message.properties.items()) for message in messages]
    assert [json.loads(text) for text in found["json"]] == [dict(message.properties) for message in messages]


def test_every_kind_of_record() -> None:
    records = small_log().records
    check(records)
    assert columns(records, compiled=False) == columns(records)


_TEXTS = st.text(
    st.one_of(st.sampled_from('\x01\x02 "\\\tKEYSA'), st.characters(exclude_categories=["Cs"])), max_size=40
)


@settings(deadline=None, max_examples=150)
@given(st.lists(_TEXTS, min_size=1, max_size=6))
def test_any_properties(texts: list[str]) -> None:
    records = b""
    for text in texts:
        records += encode_record(topic="T", body=b"b", properties=text, physical_offset=len(records))
    check(records)


def outcomes() -> dict[str, list[Any]]:
    return columns(small_log(seed=1).records)


def test_uncompiled_gives_the_same() -> None:
    assert outcomes_uncompiled(__file__) == json.loads(json.dumps(outcomes()))


if __name__ == "__main__":
    print(json.dumps(outcomes()))
