"""Searches by key in stores whose index has more hits than a look takes, and whose messages are large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.layout.record_codec import decode_records
from mqproc.store.reads import key_search
from mqproc.store.slices import Batch, finish
from tests.store.live_store import FIRST_MS, LiveStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    made = LiveStore(tmp_path / "store")
    yield made
    made.close()


def numbers_of(batch: Batch) -> list[int]:
    """Which messages these are: the number in the body."""
    return [int(message.body.split()[1]) for part in batch.records for message in decode_records(part.data)]


@pytest.mark.parametrize("born", [False, True])
def test_a_key_of_more_messages_than_a_round_looks_at(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch, born: bool
) -> None:
    """All of one moment: a time is no place to go on at. Others have the same key later, and the index rolls."""
    monkeypatch.setattr(key_search, "CANDIDATES_MAX", 8)
    for number in range(8):
        early = number < 4
        time_ms = FIRST_MS if early else FIRST_MS + 10
        bodies = [b"body %d" % (100 * number + place) for place in range(100)]
        store.engine.append("T", bodies, time_ms, born_timestamp_ms=time_ms, keys=["same twice"] * 100, queues=1)
    store.dispatch()
    assert len(list(store.engine.paths.index.iterdir())) > 1
    for end_ms, count in ((FIRST_MS, 400), (FIRST_MS + 9, 400), (FIRST_MS + 10, 800)):
        for most in (3, 399, 400, 9999):
            search = store.reading.by_key("T", "same", 0, end_ms, born_time=born, max_messages=most, max_bytes=1 << 30)
            batch = finish(search)
            assert (numbers_of(batch), batch.complete) == (list(range(count))[-most:], count <= most)


def test_a_search_by_key_looks_at_few_bytes_between_other_requests(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are none of its time may be large ones."""
    store.engine.append("T", [b"body 0" + bytes(1000)] * 40, FIRST_MS, keys=["k"] * 40, queues=1)
    store.dispatch()
    monkeypatch.setattr(key_search, "SLICE_BYTES", 5000)
    slices = store.reading.by_key("T", "k", 0, 5, born_time=True, max_messages=9, max_bytes=1 << 30)
    assert sum(1 for _ in slices) >= 8
