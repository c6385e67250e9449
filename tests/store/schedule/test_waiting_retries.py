"""Counts of retries that wait in a delay level."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mqproc.layout import control
from mqproc.store.cooperative import finish
from mqproc.store.schedule import waiting_retries
from mqproc.store.schedule.waiting_retries import WaitingRetries
from mqproc.topic_names import SCHEDULE_TOPIC, retry_topic
from tests.support.store_builders import LiveStore

LEVEL = 2
BILLING, AUDIT = retry_topic("billing"), retry_topic("audit")


@pytest.fixture
def store(tmp_path: Path) -> LiveStore:
    return LiveStore(tmp_path / "store")


def add(store: LiveStore, topic: str, count: int) -> None:
    """Add messages for a topic to the level."""
    parts = b"", b"", b"", f"REAL_TOPIC\x01{topic}\x02".encode()
    store.append(SCHEDULE_TOPIC, [b"x"] * count, queues=18, fixed_queue=LEVEL, parts=parts)
    store.dispatch()


def counts(waiting: WaitingRetries, store: LiveStore) -> Counter[str]:
    finish(waiting.update(store.reading))
    return waiting.counts()


def test_waiting_retries_keep_a_number_for_each_group(store: LiveStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_retries, "BATCH_MESSAGES", 7)
    words = store.engine.words
    waiting = WaitingRetries(words)
    add(store, BILLING, 100)
    add(store, AUDIT, 50)
    add(store, "orders", 20)
    assert counts(waiting, store) == {BILLING: 100, AUDIT: 50}
    words[control.LEVEL_OFFSETS[LEVEL]] = 60
    assert counts(waiting, store) == {BILLING: 40, AUDIT: 50}
    add(store, BILLING, 3)
    words[control.LEVEL_OFFSETS[LEVEL]] = 120
    assert counts(waiting, store) == {BILLING: 3, AUDIT: 30}
    assert [len(level.counts) for level in waiting._levels if level.counts] == [2]
    words[control.LEVEL_OFFSETS[LEVEL]] = 173
    assert counts(waiting, store) == {}


def test_waiting_retries_are_counted_again_after_retention(store: LiveStore) -> None:
    """Some of the delivered messages cannot be read any more."""
    words, waiting = store.engine.words, WaitingRetries(store.engine.words)
    add(store, BILLING, 100)
    assert counts(waiting, store) == {BILLING: 100}
    table = store.engine.table
    table.raise_min_offset(table.find(SCHEDULE_TOPIC, LEVEL), 30)
    words[control.LEVEL_OFFSETS[LEVEL]] = 80
    assert counts(waiting, store) == {BILLING: 20}
    words[control.LEVEL_OFFSETS[LEVEL]] = 70
    assert counts(waiting, store) == {BILLING: 30}, "a keeper that was killed delivers some again"
