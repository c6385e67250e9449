"""Columns of scheduled records and their properties equal the single records."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mqproc.errors import CorruptStoreError
from mqproc.layout.record import PROPERTIES_SIZE_SURE
from mqproc.layout.record_codec import decode_records
from mqproc.roles.internal_producer import FRAME_BYTES_MAX, FRAME_MESSAGES_MAX, AppendColumns
from mqproc.roles.scheduled_records import PropertyColumns, ScheduledRecords
from mqproc.topic_names import TIMER_TOPIC
from mqproc.types import StoredMessage
from tests.support.store_builders import LiveStore

NAMES = ("REAL_TOPIC", "REAL_QID", "X_REAL_TOPIC", "TIMER_OUT_MS", "A")


def columns_of(strings: list[bytes]) -> PropertyColumns:
    offsets = np.cumsum([0, *map(len, strings)])
    return PropertyColumns(offsets, np.frombuffer(b"".join(strings), np.uint8))


def value_of(string: bytes, name: str) -> bytes:
    """The last value of a name, by splitting."""
    pairs = [pair.partition(b"\x01") for pair in string.split(b"\x02")]
    return next((value for key, end, value in reversed(pairs) if end and key == name.encode()), b"")


def without(string: bytes, *names: str) -> bytes:
    parts = [part for part in string.split(b"\x02") if part.partition(b"\x01")[0].decode() not in names]
    return b"\x02".join(parts)


def random_string(chance: random.Random) -> bytes:
    values = ("", "0", "7", "12x", "1795245511725", "9" * 18, "9" * 19, "-5", "topic", "é")
    pairs = [f"{chance.choice(NAMES)}\x01{chance.choice(values)}" for _ in range(chance.randrange(6))]
    end = "\x02" if pairs and chance.random() < 0.8 else ""
    return ("\x02".join(pairs) + end).encode()


@pytest.mark.parametrize("seed", range(20))
def test_property_columns_equal_the_parsed_strings(seed: int) -> None:
    chance = random.Random(seed)
    strings = [random_string(chance) for _ in range(chance.choice((1, 3, 50)))]
    columns = columns_of(strings)
    assert columns.strings() == strings
    for name in NAMES:
        values = [value_of(string, name) for string in strings]
        assert columns.texts(name) == values
        numbers = [int(value) if value.isdigit() and len(value) <= 18 else -1 for value in values]
        assert columns.numbers(name).tolist() == numbers
    for gone in itertools.combinations(NAMES, 2):
        left = columns.without(*gone)
        for string, rest in zip(strings, left.strings(), strict=True):
            # A pair removed from the end leaves the end of the one before it.
            assert rest.removesuffix(b"\x02") == without(string, *gone).removesuffix(b"\x02")


def test_property_columns_shared_text_applies_to_each_message() -> None:
    strings = [b"TAGS\x01a\x02REAL_TOPIC\x01orders\x02", b"REAL_TOPIC\x01orders\x02"] * 20
    assert columns_of(strings).texts("REAL_TOPIC") == [b"orders"] * 40
    for other in (b"REAL_TOPIC\x01orderS\x02", b"REAL_TOPIC\x01order\x02", b"A\x01orders\x02", b""):
        mixed = [*strings, other]
        assert columns_of(mixed).texts("REAL_TOPIC") == [value_of(string, "REAL_TOPIC") for string in mixed]
    assert columns_of([b"REAL_TOPIC\x01\x02"] * 3).texts("REAL_TOPIC") == [b""] * 3


@pytest.mark.parametrize("string", [b"S\x01x\x02", b"\x01\x02", b"", b"OUT_MS\x017\x02"])
def test_property_columns_short_strings_lack_the_name(string: bytes) -> None:
    columns = columns_of([string])
    assert columns.texts("TIMER_OUT_MS") == [b""]
    assert columns.numbers("TIMER_OUT_MS").tolist() == [-1]
    assert columns.without("TIMER_OUT_MS").strings() == [string]


def parked_store(root: Path) -> tuple[list[StoredMessage], ScheduledRecords]:
    """Messages of two topics, kinds and hosts in turn."""
    store = LiveStore(root)
    for number in range(12):
        pairs = f"A\x01{number}\x02REAL_TOPIC\x01T{number % 3 // 2}\x02REAL_QID\x01{number % 4}\x02B\x01b\x02"
        store.append(
            TIMER_TOPIC,
            [b"body %d" % number],
            queues=1,
            parts=(b"", b"", b"", pairs.encode()),
            sys_flag=8 * (number % 2),
            flag=number,
            reconsume_times=number // 6,
            born_timestamp_ms=1000 + number,
        )
    store.dispatch()
    pulled = store.reading.pull(TIMER_TOPIC, 0, 0, 100, 1 << 20)
    messages = decode_records(pulled.records)
    store.close()
    return messages, ScheduledRecords(pulled.records, pulled.count)


def rows_of(columns: AppendColumns) -> list[tuple[object, ...]]:
    """Messages one by one."""
    ends = [0, *np.cumsum(columns.body_lengths).tolist()]
    property_ends = [0, *np.cumsum(columns.property_lengths).tolist()]
    assert columns.queue_ids is not None
    return [
        (
            columns.topic,
            columns.sys_flag,
            columns.reconsume_times,
            columns.born_host,
            columns.bodies[ends[row] : ends[row + 1]].tobytes(),
            columns.properties[property_ends[row] : property_ends[row + 1]].tobytes(),
            int(columns.born_timestamps_ms[row]),
            int(columns.queue_ids[row]),
            int(columns.flags[row]),
            int(columns.prepared_transaction_offsets[row]),
        )
        for row in range(len(columns))
    ]


def expected(message: StoredMessage, *, to_roll: bool) -> tuple[object, ...]:
    number = message.flag
    kept = f"A\x01{number}\x02B\x01b\x02".encode()
    real = f"A\x01{number}\x02REAL_TOPIC\x01T{number % 3 // 2}\x02REAL_QID\x01{number % 4}\x02B\x01b\x02".encode()
    return (
        TIMER_TOPIC if to_roll else f"T{number % 3 // 2}",
        8 * (number % 2),
        number // 6,
        bytes([127, 0, 0, 1, 0, 0, 0x13, 0x88]),
        message.body,
        real + b"TIMER_ROLL_TIMES\x011\x02" if to_roll else kept,
        1000 + number,
        0 if to_roll else number % 4,
        number,
        message.physical_offset or 1,
    )


@pytest.mark.parametrize("to_roll", [False, True])
def test_scheduled_records_released_equal_delayed(tmp_path: Path, to_roll: bool) -> None:
    messages, parked = parked_store(tmp_path)
    assert parked.in_topic(TIMER_TOPIC).all()
    assert not parked.in_topic("rmq_sys_wheel_timeR").any()
    assert parked.has_topic.all()
    which = np.arange(len(messages)) != 5
    frames = parked.to_roll(which) if to_roll else parked.to_deliver(which, keeps_real=False)
    found = [row for frame in frames for row in rows_of(frame)]
    wanted = [expected(message, to_roll=to_roll) for message in messages if message.flag != 5]
    assert sorted(found, key=repr) == sorted(wanted, key=repr)
    for frame in frames:
        numbers = frame.flags.tolist()
        assert numbers == sorted(numbers), "a frame's messages are in their order"
    assert len({rows_of(frame)[0][:4] for frame in frames}) == len(frames), "one frame for each kind"
    assert parked.to_deliver(np.zeros(len(messages), np.bool_), keeps_real=True) == []


@pytest.mark.parametrize("room", [-1, 0])
def test_scheduled_record_without_room_for_count_rolls_without_it(tmp_path: Path, room: int) -> None:
    """It would be refused for ever and block the queue."""
    pairs = "REAL_TOPIC\x01T\x02REAL_QID\x010\x02A\x01"
    count = "TIMER_ROLL_TIMES\x011\x02"
    pairs += "a" * (PROPERTIES_SIZE_SURE - len(pairs) - 1 - len(count) - room) + "\x02"
    store = LiveStore(tmp_path)
    store.append(TIMER_TOPIC, [b"body"], queues=1, parts=(b"", b"", b"", pairs.encode()))
    store.dispatch()
    pulled = store.reading.pull(TIMER_TOPIC, 0, 0, 1, 1 << 20)
    store.close()
    (columns,) = ScheduledRecords(pulled.records, 1).to_roll(np.ones(1, np.bool_))
    assert columns.properties.tobytes().decode() == pairs + (count if room == 0 else "")


def test_scheduled_records_invalid_record_is_refused() -> None:
    with pytest.raises(CorruptStoreError, match="no record at byte 0"):
        ScheduledRecords(np.zeros(200, np.uint8), 1)
    assert len(ScheduledRecords(np.zeros(0, np.uint8), 0)) == 0


def test_append_columns_are_split_into_frames_below_the_limit(tmp_path: Path) -> None:
    _messages, parked = parked_store(tmp_path)
    (whole, *_others) = parked.to_roll(parked.column("flag") < 1)
    count = FRAME_MESSAGES_MAX + 3
    lengths = np.full(count, 10, np.uint32)
    lengths[7] = FRAME_BYTES_MAX + 1
    many = AppendColumns(
        whole.topic,
        whole.sys_flag,
        whole.reconsume_times,
        whole.born_host,
        lengths,
        np.zeros(int(lengths.sum()), np.uint8),
        np.zeros(count, np.uint16),
        np.zeros(0, np.uint8),
        np.arange(count),
        None,
        np.zeros(count, np.int32),
        np.arange(count),
    )
    frames = list(many.frames())
    assert [len(frame) for frame in frames] == [7, 1, count - 8]
    assert [frame.size for frame in frames] == [70, FRAME_BYTES_MAX + 1, 10 * (count - 8)]
    assert np.concatenate([frame.born_timestamps_ms for frame in frames]).tolist() == list(range(count))
    small = many.chosen(lengths == 10)
    assert [len(frame) for frame in small.frames()] == [FRAME_MESSAGES_MAX, 2]


def test_scheduled_records_at_missing_offsets_are_left_out(tmp_path: Path) -> None:
    store = LiveStore(tmp_path)
    bodies = [bytes([number]) * 3000 for number in range(60)]
    places = np.concatenate([store.append("T", [body]).physical_offsets for body in bodies])
    assert len(set((places // store.engine.segments.segment_size).tolist())) >= 3
    store.overwrite(int(places[20]) + 200, b"damage")
    asked = places[[50, 2, 20, 3, 59]]
    asked = np.concatenate((asked, [int(places[3]) + 4, -5, 1 << 40, store.engine.written]))
    records, found = store.reading.records.gathered(asked)
    assert found.tolist() == [True, True, False, True, True, False, False, False, False]
    assert [message.body for message in decode_records(records)] == [bodies[number] for number in (50, 2, 3, 59)]
    records, found = store.reading.records.gathered(np.zeros(0, np.int64))
    assert (len(records), len(found)) == (0, 0)
    store.close()


def test_append_columns_halved_by_queue_end_with_single_messages(tmp_path: Path) -> None:
    _messages, parked = parked_store(tmp_path)
    for columns in parked.to_deliver(np.ones(len(parked), np.bool_), keeps_real=True):
        rows, found = rows_of(columns), [columns]
        while any(len(part.halves()) > 1 for part in found):
            found = [half for part in found for half in part.halves()]
        assert [rows_of(part) for part in found] == [
            [row for row in rows if row[7] == queue_id] for queue_id in sorted({row[7] for row in rows})
        ]
    assert len(replace(columns, queue_ids=None).halves()) == 1
