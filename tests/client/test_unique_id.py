"""Unique ids have RocketMQ's layout and are unique, also in bursts, forks and threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest

from mqproc.client import message_fields as module
from mqproc.client.message_fields import COUNTERS, UniqueIds, reserve, unique_id


def ids_of(prefix: str, first: int, count: int) -> set[str]:
    return {unique_id(prefix, first + index) for index in range(count)}


def at(monkeypatch: pytest.MonkeyPatch, time_ns: Callable[[], int]) -> None:
    """Set the clock of unique ids only: other threads use the process's clock."""
    monkeypatch.setattr(module, "time", mock.Mock(wraps=time, time_ns=time_ns))


def test_unique_id_has_rocketmq_layout() -> None:
    now = time.localtime()
    month_start_ms = int(time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))) * 1000
    before_ms = time.time_ns() // 1_000_000
    prefix, counter = UniqueIds().reserve(1)
    after_ms = time.time_ns() // 1_000_000
    whole = unique_id(prefix, counter)
    assert len(whole) == 32
    assert whole == whole.upper()
    data = bytes.fromhex(whole)
    assert data[:4] == bytes((127, 0, 0, 1))
    assert int.from_bytes(data[4:6], "big") == os.getpid() & 0xFFFF
    assert before_ms <= month_start_ms + int.from_bytes(data[10:14], "big") <= after_ms
    assert int.from_bytes(data[14:], "big") == counter


def test_consecutive_counters_differ_by_one() -> None:
    source = UniqueIds()
    _, first = source.reserve(1)
    _, second = source.reserve(1)
    assert (second - first) % COUNTERS == 1


def test_unique_ids_of_a_burst_are_unique() -> None:
    source = UniqueIds()
    seen: set[tuple[str, int]] = set()
    total = 0
    for count in [COUNTERS, 1, COUNTERS - 1, 40_000, 40_000, 1000] * 5:
        prefix, first = source.reserve(count)
        seen.update((prefix, (first + index) % COUNTERS) for index in range(count))
        total += count
    assert len(seen) == total


def test_unique_ids_with_stopped_clock_stay_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = time.time_ns()
    at(monkeypatch, lambda: moment)
    source = UniqueIds()
    seen = set()
    for _ in range(200):
        prefix, first = source.reserve(1000)
        seen.update((prefix, (first + index) % COUNTERS) for index in range(1000))
    assert len(seen) == 200_000


def test_a_clock_that_goes_back_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1_700_000_000_000, 1_700_000_005_000, 1_700_000_000_000, 1_700_000_005_000])
    at(monkeypatch, lambda: next(moments) * 1_000_000)
    source = UniqueIds()
    seen = set()
    for _ in range(4):
        prefix, first = source.reserve(COUNTERS)
        seen.update((prefix, (first + index) % COUNTERS) for index in range(COUNTERS))
    assert len(seen) == 4 * COUNTERS


def test_a_new_month_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    start = int(time.mktime((2024, 3, 1, 0, 0, 0, 0, 0, -1))) * 1000
    for time_ms, expected in ((start - 1, 29 * 86_400_000 - 1), (start, 0), (start + 5, 5)):
        at(monkeypatch, lambda time_ms=time_ms: time_ms * 1_000_000)
        prefix, _ = UniqueIds().reserve(1)
        assert abs(int(prefix[-8:], 16) - expected) <= 3_600_000 * (expected > 5), "a change of the clock may shift it"


def test_threads_never_get_the_same() -> None:
    source = UniqueIds()
    seen: list[set[str]] = [set() for _ in range(4)]

    def draw(mine: set[str]) -> None:
        for _ in range(2000):
            prefix, first = source.reserve(3)
            mine |= ids_of(prefix, first, 3)

    threads = [threading.Thread(target=draw, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set.union(*seen)) == 4 * 6000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_ids_of_its_own() -> None:
    reserve(1)
    left, right = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(right, reserve(1)[0].encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = os.read(left, 100).decode()
    os.close(left)
    os.close(right)
    assert len(child) == 28
    assert child[12:20] != reserve(1)[0][12:20]
