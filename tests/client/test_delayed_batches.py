"""Batches with one delivery time for each message are split by time, results joined."""

from __future__ import annotations

import datetime
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mqproc.client import requests
from mqproc.client.batch import Batch, by_time, deliver_at_ms
from mqproc.client.encoding import encode_batch
from mqproc.client.send_requests import joined
from mqproc.errors import BadLevelError, BadMessageError, BadRequestError, BadTimeError
from mqproc.types import BatchResult

FRAME_BYTES = 1 << 26


def batch(count: int = 5, **changes: Any) -> Batch:
    return Batch("T", [b"%d" % number for number in range(count)], **changes)


def test_batch_with_one_time_is_not_split() -> None:
    for whole in (batch(), batch(delay_level=3), batch(deliver_at_ms=5)):
        assert by_time(whole) == ([whole], None)


def test_every_column_goes_with_its_message() -> None:
    whole = batch(
        keys=pa.array(["k0", "k1", "k2", "k3", "k4"]),
        tags=["t0", "t1", "t2", "t3", "t4"],
        queue_ids=np.arange(5),
        born_timestamps_ms=pa.array([10, 11, 12, 13, 14]),
        properties=[{"n": str(number)} for number in range(5)],
        flags=(0, 1, 2, 3, 4),
        delay_level=np.array([2, 0, 2, 1, 0]),
    )
    parts, places = by_time(whole)
    assert places is not None
    assert places.tolist() == [1, 4, 3, 0, 2]
    assert [(part.delay_level, part.bodies) for part in parts] == [(0, [b"1", b"4"]), (1, [b"3"]), (2, [b"0", b"2"])]
    last = parts[2]
    assert last.keys.to_pylist() == ["k0", "k2"]
    assert (last.tags, list(last.queue_ids), list(last.flags)) == (["t0", "t2"], [0, 2], [0, 2])
    assert list(last.born_timestamps_ms) == [10, 12]
    assert last.properties == [{"n": "0"}, {"n": "2"}]


def test_results_are_in_the_order_of_the_messages() -> None:
    parts, places = by_time(batch(delay_level=[2, 1, 2, 1, 1]))
    results = []
    for part in parts:
        numbers = np.array([int(body) for body in part.bodies])
        results.append(BatchResult("T", numbers.astype(np.int32), numbers + 10, numbers + 100, 7))
    found = joined("T", results, places)
    assert found.queue_ids.tolist() == [0, 1, 2, 3, 4]
    assert found.queue_offsets.tolist() == [10, 11, 12, 13, 14]
    assert found.physical_offsets.tolist() == [100, 101, 102, 103, 104]


@pytest.mark.parametrize(
    "times",
    [
        [1_000, 2_000],
        np.array([1_000, 2_000]),
        np.array(["1970-01-01T00:00:01", "1970-01-01T00:00:02"], "datetime64[ns]"),
        pa.array([1_000, 2_000], pa.timestamp("ms")),
        pa.chunked_array([pa.array([1_000]), pa.array([2_000])]),
        [datetime.datetime.fromtimestamp(second) for second in (1, 2)],
        ["1970-01-01T00:00:01Z", datetime.datetime(1970, 1, 1, 0, 0, 2, tzinfo=datetime.UTC)],
        ["1970-01-01T00:00:01+00:00", "1970-01-01T00:00:02+00:00"],
    ],
)
def test_times_may_be_numbers_or_moments(times: Any) -> None:
    parts, _places = by_time(batch(2, deliver_at_ms=deliver_at_ms(times, None)))
    assert [part.deliver_at_ms for part in parts] == [1_000, 2_000]


def test_delays_count_from_now_on() -> None:
    now_ms = time.time_ns() // 1_000_000
    assert now_ms + 1_500 <= deliver_at_ms(None, 1.5) <= now_ms + 60_000
    first, second = deliver_at_ms(None, np.array([0.25, 2])).tolist()
    assert now_ms + 250 <= first == second - 1_750
    assert deliver_at_ms(None, None) == 0
    with pytest.raises(BadRequestError, match="not both"):
        deliver_at_ms(5, 1.0)


def test_wrong_times_are_refused() -> None:
    for column in ([1, 2], [1.5] * 5, ["x"] * 5, [[1]] * 5, np.array([1, 2, 3])):
        with pytest.raises(BadMessageError):
            by_time(batch(delay_level=column))
    for changes in ({"batch": True}, {"unique": ("A" * 28, 0)}, {"deliver_at_ms": [1] * 5}):
        with pytest.raises(BadMessageError, match="one time"):
            by_time(batch(delay_level=[1] * 5, **changes))
    with pytest.raises(BadMessageError, match="one time"):
        list(encode_batch(batch(delay_level=[1] * 5), FRAME_BYTES))
    for level in (-1, 19):
        parts, _places = by_time(batch(delay_level=[1, 1, 1, 1, level]))
        wrong = next(part for part in parts if part.delay_level == level)
        with pytest.raises(BadLevelError):
            list(encode_batch(wrong, FRAME_BYTES))
    with pytest.raises(BadMessageError, match="not both"):
        list(encode_batch(batch(delay_level=1, deliver_at_ms=5), FRAME_BYTES))


NO_DELAYS = [float("nan"), float("inf"), -float("inf"), 1e30, [1.0, float("nan")], np.array(["NaT", 1], "m8[s]")]
NO_DELAYS += [np.array([1, 1 << 62], f"m8[{unit}]") for unit in ("ms", "s", "m", "D", "100ms")]


@pytest.mark.parametrize("delay", NO_DELAYS)
def test_batch_invalid_delay_is_refused(delay: Any) -> None:
    with pytest.raises(BadTimeError, match="no number of seconds"):
        deliver_at_ms(None, np.array(delay) if isinstance(delay, list) else delay)


MIXED = [np.array([np.timedelta64(500, "ms"), other], object) for other in (2, datetime.timedelta(1))]


@pytest.mark.parametrize("delay", ["soon", object(), [datetime.timedelta(1), 1], [1, datetime.timedelta(1)], *MIXED])
def test_a_delay_that_is_neither_seconds_nor_timedelta_is_refused(delay: Any) -> None:
    with pytest.raises(BadTimeError, match="a delay is a number of seconds or a timedelta"):
        deliver_at_ms(None, delay)


def test_a_delay_is_seconds_or_a_timedelta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_795_420_000_000_000_000)
    half = datetime.timedelta(milliseconds=500)
    for one in (0.5, half, np.timedelta64(500, "ms")):
        assert deliver_at_ms(None, one) == 1_795_420_000_500
    columns = [
        [0.5, 2],
        [half, 4 * half],
        np.array([500, 2000], "m8[ms]"),
        np.array([np.timedelta64(500, "ms"), np.timedelta64(2, "s")], object),
        pa.array([half, 4 * half], pa.duration("us")),
    ]
    for column in columns:
        assert deliver_at_ms(None, column).tolist() == [1_795_420_000_500, 1_795_420_002_000]
    assert deliver_at_ms(None, []).tolist() == []


@pytest.mark.parametrize(("unit", "days"), [("W", 7), ("D", 1), ("h", 1 / 24)])
@pytest.mark.parametrize("count", [1, 200_000, 300_000])
def test_timedelta64s_of_units_far_apart_are_as_long_as_they_say(
    monkeypatch: pytest.MonkeyPatch, unit: str, days: float, count: int
) -> None:
    """In the finest unit large ones came out below 0, or as another delay."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_795_420_000_000_000_000)
    delays = np.array([np.timedelta64(2_000_000, "ns"), np.timedelta64(count, unit)], object)
    expected = [1_795_420_000_002, 1_795_420_000_000 + round(count * days * 86_400_000)]
    assert deliver_at_ms(None, delays).tolist() == expected


def test_timedelta64s_of_no_fixed_length_are_refused() -> None:
    """Beside others they were taken for seconds."""
    with pytest.raises(BadTimeError, match="a delay is a number of seconds or a timedelta"):
        deliver_at_ms(None, np.array([np.timedelta64(2, "M"), np.timedelta64(1, "D")], object))


@pytest.mark.parametrize("seconds", [1_795_420_000, 1_795_420_000.5, [1_795_420_000], np.array([0.0, 1_795_420_000.5])])
def test_seconds_are_not_taken_for_milliseconds(seconds: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^17954\d+(\.5)? looks like seconds: Unix times are in ms, 17954\d{8},"):
        deliver_at_ms(seconds, None)
    assert requests.time_ms(0, 7) == 0
    assert requests.time_ms(1_795_420_000_000, 7) == 1_795_420_000_000
    assert requests.time_ms(datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC), 7) == 31_536_000_000


def test_a_moment_is_cut_to_the_millisecond_as_store_times_are() -> None:
    moment = datetime.datetime(2026, 11, 25, 12, tzinfo=datetime.UTC)
    for microsecond in (0, 1, 499, 500, 999, 1000, 122_999, 123_000, 999_999):
        expected = 1_795_608_000_000 + microsecond // 1000
        assert requests.time_ms(moment.replace(microsecond=microsecond), 0) == expected
        assert requests.time_ms(moment.replace(microsecond=microsecond).isoformat(), 0) == expected
    for ms in range(1_795_608_000_000, 1_795_608_001_000):
        assert requests.time_ms(datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC), 0) == ms
    assert requests.time_ms(datetime.datetime(1969, 12, 31, 23, 59, 59, 999_500, datetime.UTC), 0) == -1


def test_nothing_waits_for_nothing() -> None:
    parts, places = by_time(batch(0, delay_level=np.array([], int)))
    assert parts == []
    assert joined("T", [], places).physical_offsets.tolist() == []


def test_long_timedeltas_stay_long() -> None:
    longest = datetime.timedelta(days=213_503_983)  # As microseconds a little more than 64 bits hold.
    for delay in (longest, [longest], np.array([213_503_983], "m8[D]")):
        assert deliver_at_ms(None, delay) > longest // datetime.timedelta(milliseconds=1)
