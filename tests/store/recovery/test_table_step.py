"""Queues of topics.json that the table cannot take: who is told, and of which file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqproc.errors import TooManyQueuesError
from tests.store.stopped_store import StoppedStore


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    return StoppedStore(tmp_path / "store")


def ask_for(store: StoppedStore, queues: int) -> Path:
    """Have topics.json say that a topic of no messages has so many queues."""
    path = store.engine.paths.topics
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"topicConfigTable": {"Wide": {"writeQueueNums": queues}}}))
    return path


def test_a_topic_of_more_queues_than_there_may_be_names_its_file(store: StoppedStore) -> None:
    path = ask_for(store, 2000)
    with pytest.raises(TooManyQueuesError) as raised:
        store.recover()
    told = "queue 1012 of topic 'Wide': max_queues = 1,024 queues are in use, deleted ones included"
    assert str(raised.value) == f"{path}: topic 'Wide' has 2,000 queues: {told}"


def test_a_number_of_queues_that_no_topic_has_ends_no_start(store: StoppedStore) -> None:
    path = ask_for(store, 1_000_000_000)
    found = store.recover()
    (line,) = [line for line in found.said if "Wide" in line]
    assert line == "recovery: topics: topic 'Wide': 1,000,000,000 queues; a topic has 65,535 at most"
    assert (len(found.queues()), path.exists()) == (12, True)
