"""SQL92 filters that take long for a record: a run ends by time, the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqproc.kernels import gather
from mqproc.layout.record_codec import decode_records
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.cooperative import Slices, finish
from mqproc.store.read import unit_walk
from mqproc.types import PullStatus
from tests.support.store_builders import MESSAGE_COUNT, NumberedStore

SQL = "KEYS CONTAINS 'n7' OR KEYS ENDSWITH 'n1'"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk takes the time of a whole run."""
    monkeypatch.setattr(unit_walk, "RUN_NS", 0)


def slices_of(slices: Slices[Any]) -> int:
    """Number of slices of a request."""
    return sum(1 for _ in slices)


def counting(store: NumberedStore) -> Slices[Any]:
    return store.reading.count("Orders", sql=SQL)


def ranging(store: NumberedStore) -> Slices[Any]:
    return store.reading.range("Orders", 0, 1 << 60, sql=SQL, max_messages=9999, max_bytes=1 << 30)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("request_of", [counting, ranging])
def test_costly_filter_ends_each_slice(store: NumberedStore, request_of: Callable[[NumberedStore], Any]) -> None:
    assert slices_of(request_of(store)) >= MESSAGE_COUNT


def test_costly_filter_gives_the_same_result(store: NumberedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    count, page = finish(counting(store)), finish(ranging(store))
    monkeypatch.setattr(unit_walk, "RUN_NS", 0)
    assert finish(counting(store)) == count > 0
    again = finish(ranging(store))
    assert [bytes(part) for part in again.records] == [bytes(part) for part in page.records]


def test_costly_filter_limits_each_chunk(store: NumberedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is known how long the filter takes for the next records, as after cheap ones."""
    cost = unit_walk.compile_filter("Orders", (), SQL).cost
    steps: list[int] = []
    chunk = unit_walk.QueueWalk._chunk

    def noted(walk: unit_walk.QueueWalk, *given: Any) -> unit_walk.WalkEnd:
        units = as_units(walk._units)[: int(walk._state[gather.UNIT_STOP])]
        steps.append(int(units["size"].sum()) * cost if len(units) > 1 else 0)
        return chunk(walk, *given)

    monkeypatch.setattr(unit_walk.QueueWalk, "_chunk", noted)
    monkeypatch.setattr(unit_walk, "RUN_NS", 1 << 62)
    expected = finish(counting(store))
    limit = 5000 * cost
    assert max(steps) > limit
    steps.clear()
    monkeypatch.setattr(unit_walk, "SQL_STEPS_MAX", limit)
    assert finish(counting(store)) == expected
    assert 0 < max(steps) <= limit


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("limits", [{"tags": ["Tag3"]}, {"begin_ms": 0, "end_ms": 1 << 60, "born_time": True}])
def test_count_ends_each_slice_by_time(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    """Records that match count for no limit of their cost."""
    expected = finish(store.reading.count("Orders", **limits))
    for name in ("FIRST_CHUNK_UNITS", "CHUNK_UNITS_MAX"):
        monkeypatch.setattr(unit_walk, name, 10)
    assert slices_of(store.reading.count("Orders", **limits)) >= MESSAGE_COUNT // 10
    assert finish(store.reading.count("Orders", **limits)) == expected > 0


@pytest.mark.usefixtures("slow")
def test_pull_with_a_costly_filter_continues_where_it_stopped(store: NumberedStore) -> None:
    found, offset, pulls = [], 0, 0
    end = store.reading.queues.bounds("Orders", 1).max_offset
    while offset < end:
        pulled = store.reading.pull("Orders", 1, offset, 1024, 1 << 20, sql="TAGS = 'Tag3'")
        assert pulled.status in (PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE)
        found += [one.queue_offset for one in decode_records(pulled.records)] if pulled.count else []
        assert pulled.next_offset > offset
        offset, pulls = pulled.next_offset, pulls + 1
    assert pulls == end
    assert found == [one.queue_offset for one in store.messages("Orders", 1, count=9999) if one.tag == "Tag3"]
