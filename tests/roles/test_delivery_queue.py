"""Delivery: rescheduling of refused messages, and incremental saves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mqproc.errors import (
    BadTopicError,
    DiskFullError,
    InternalError,
    MqprocError,
    StoreBusyError,
    StoreReadOnlyError,
    TooManyQueuesError,
)
from mqproc.io.store_io import Clock
from mqproc.layout.record import PROPERTIES_SIZE_SURE
from mqproc.roles.delivery_queue import (
    SAVE_INTERVAL_NS,
    IncrementalSave,
    is_message_error,
    longer_level,
    reschedule_delayed,
    reschedule_timed,
)
from mqproc.roles.internal_producer import AppendColumns
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.util.units import DELAYS_MS

NOW_MS = 1_700_000_000_900


def refused(*strings: bytes) -> AppendColumns:
    count = len(strings)
    return AppendColumns(
        "T",
        8,
        3,
        b"host",
        np.full(count, 1, np.uint32),
        np.frombuffer(b"b" * count, np.uint8),
        np.fromiter(map(len, strings), np.uint16, count),
        np.frombuffer(b"".join(strings), np.uint8),
        np.arange(count, dtype=np.int64),
        np.arange(5, 5 + count, dtype=np.int32),
        np.arange(count, dtype=np.int32),
        np.arange(100, 100 + count, dtype=np.int64),
    )


def strings_of(columns: AppendColumns) -> list[bytes]:
    ends = np.cumsum(columns.property_lengths).tolist()
    return [columns.properties[begin:end].tobytes() for begin, end in zip([0, *ends], ends, strict=False)]


def queue_ids_of(columns: AppendColumns) -> list[int]:
    assert columns.queue_ids is not None
    found: list[int] = columns.queue_ids.tolist()
    return found


def test_timer_retries_double_their_delay() -> None:
    before = refused(
        b"TIMER_OUT_MS\x011\x02A\x01a\x02", b"A\x01a\x02TIMER_ROLL_TIMES\x013", b"TIMER_ROLL_TIMES\x0199\x02"
    )
    found = reschedule_timed(before, NOW_MS, 1000)
    assert (found.topic, found.sys_flag, found.reconsume_times, found.born_host) == (TIMER_TOPIC, 8, 3, b"host")
    assert found.prepared_transaction_offsets.tolist() == [100, 101, 102]
    assert queue_ids_of(found) == [0, 0, 0]
    assert strings_of(found) == [
        b"A\x01a\x02REAL_TOPIC\x01T\x02REAL_QID\x015\x02TIMER_OUT_MS\x011700000002000\x02TIMER_ROLL_TIMES\x011\x02",
        b"A\x01a\x02REAL_TOPIC\x01T\x02REAL_QID\x016\x02TIMER_OUT_MS\x011700000016000\x02TIMER_ROLL_TIMES\x014\x02",
        b"REAL_TOPIC\x01T\x02REAL_QID\x017\x02TIMER_OUT_MS\x011700003600000\x02TIMER_ROLL_TIMES\x01100\x02",
    ]


def test_timer_day_without_space_costs_dozens_of_records_a_message() -> None:
    """It was rewritten every nine or ten minutes while there was no space."""
    now_ms, waiting, count = NOW_MS, refused(b""), 0
    while now_ms < NOW_MS + 24 * 3_600_000:
        waiting = reschedule_timed(waiting, now_ms, 1000)
        (string,) = strings_of(waiting)
        now_ms = int(string.split(b"TIMER_OUT_MS\x01")[1].split(b"\x02")[0])
        count += 1
    assert count <= 40


@pytest.mark.parametrize(
    ("late_ms", "out_ms"), [(0, b"1700000002000"), (900_100, b"1700000901000"), (7_200_000, b"1700003600000")]
)
def test_timer_retry_without_room_for_count_doubles_its_lateness(late_ms: int, out_ms: bytes) -> None:
    """It was retried every two seconds while there was no room for it, one record each."""
    own = b"REAL_TOPIC\x01T\x02REAL_QID\x015\x02TIMER_OUT_MS\x01" + out_ms + b"\x02"
    string = b"TIMER_DELIVER_MS\x01%d\x02A\x01" % (NOW_MS - late_ms)
    string += b"a" * (PROPERTIES_SIZE_SURE - len(string) - len(own) - 1) + b"\x02"
    assert strings_of(reschedule_timed(refused(string), NOW_MS, 1000)) == [string + own]


def test_level_retry_uses_a_longer_level() -> None:
    found = reschedule_delayed(refused(b"DELAY\x013\x02A\x01a\x02", b"REAL_TOPIC\x01T\x02DELAY\x013\x02"), 3, DELAYS_MS)
    assert (found.topic, queue_ids_of(found)) == (SCHEDULE_TOPIC, [3, 3])
    assert strings_of(found) == [b"A\x01a\x02DELAY\x014\x02", b"REAL_TOPIC\x01T\x02DELAY\x014\x02"]


def test_level_retry_without_room_for_longer_number_keeps_level() -> None:
    string = b"DELAY\x019\x02A\x01" + b"a" * (PROPERTIES_SIZE_SURE - 11) + b"\x02"
    found = reschedule_delayed(refused(string), 9, DELAYS_MS)
    assert (strings_of(found), queue_ids_of(found)) == ([string], [8])


@pytest.mark.parametrize(
    ("level", "delays_ms", "expected"),
    [
        (1, DELAYS_MS, 2),
        (14, DELAYS_MS, 15),
        (17, DELAYS_MS, 17),
        (18, DELAYS_MS, 17),
        (1, (5000, 1000, 9000, 7000), 4),
        (3, (5000, 1000, 9000, 7000), 3),
        (2, (7_200_000, 10_800_000), 2),
        (9, (1000, 2000), 2),
    ],
)
def test_longer_level_orders_levels_by_delay(level: int, delays_ms: tuple[int, ...], expected: int) -> None:
    assert longer_level(level, delays_ms) == expected


@pytest.mark.parametrize("error", [TooManyQueuesError(""), BadTopicError("")])
def test_message_errors_are_attributed_to_the_message(error: MqprocError) -> None:
    assert is_message_error(error)


@pytest.mark.parametrize("error", [DiskFullError(""), StoreBusyError(""), StoreReadOnlyError(""), InternalError("")])
def test_general_errors_are_not_attributed_to_the_message(error: MqprocError) -> None:
    assert not is_message_error(error)


# IncrementalSave


class Saves:
    """Three parts a save; those in `failing` end it."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.failing = -1
        self.failures: list[OSError] = []
        self.save = IncrementalSave(Clock(), self._steps, self.failures.append)

    def _steps(self, durable: int) -> Iterator[None]:
        for part in range(3):
            if part == self.failing:
                raise OSError("no room")
            self.done.append((durable, part))
            if part < 2:
                yield


def test_incremental_save_writes_one_part_a_call() -> None:
    saves, before_ns = Saves(), Clock().monotonic_ns()
    for parts in (1, 2, 3):
        saves.save.step()
        assert (saves.done, saves.save.under_way) == ([(0, part) for part in range(parts)], parts < 3)
    assert saves.save.due_ns >= before_ns + SAVE_INTERVAL_NS


def test_incremental_save_complete_save_starts_over() -> None:
    saves = Saves()
    saves.save.step()
    saves.save.save_all(7)
    assert saves.done == [(0, 0), (7, 0), (7, 1), (7, 2)]
    assert not saves.save.under_way


def test_incremental_save_error_ends_it_and_the_next_starts_over() -> None:
    saves = Saves()
    saves.failing = 1
    saves.save.step()
    saves.save.step()
    assert (len(saves.failures), saves.save.under_way) == (1, False)
    saves.failing = -1
    saves.save.save_all(0)
    assert saves.done == [(0, 0), (0, 0), (0, 1), (0, 2)]
