"""Reads about consumer groups take time by their queues, not by queues times topics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mqproc.ipc.control_words import Words
from mqproc.layout import control
from mqproc.roles.query.reads import QUEUES_PER_SLICE, ReadRequests
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import ReadOnlyOffsets
from mqproc.store.read.views import FoundQueues, QueueBounds
from mqproc.store.schedule.waiting_retries import WaitingRetries
from mqproc.wire.operations import Empty
from tests.support.fakes import CountedName

TOPICS = 300
QUEUES = 4


def read_requests(progress: list[CommittedOffset], subscribed: list[str]) -> ReadRequests:
    """Reads of a group that has `progress`, and members that subscribe to topics."""
    found = {(topic, queue_id): QueueBounds(0, 0, 9) for topic in subscribed for queue_id in range(QUEUES)}
    members = {"billing": SimpleNamespace(topics=subscribed)} if subscribed else {}
    queues = FoundQueues(found)
    state = SimpleNamespace(progress=ReadOnlyOffsets(progress, Path(), OSError()), consumed=queues)
    groups: Any = SimpleNamespace(state=state, members=lambda: members)
    reading: Any = SimpleNamespace(queues=queues)
    context: Any = SimpleNamespace(clock=None)
    return ReadRequests(context, reading, groups, no_retries())


def no_retries() -> WaitingRetries:
    return WaitingRetries(Words(bytearray(control.FILE_SIZE)))


def test_group_reads_many_topics_avoid_queue_lookups_per_topic() -> None:
    names = CountedName.many(TOPICS)
    progress = [CommittedOffset("billing", name, queue_id, queue_id) for name in names for queue_id in range(QUEUES)]
    rows = list(read_requests(progress, []).queues_of("billing"))
    compared = CountedName.compared
    assert rows == [(str(name), queue_id, queue_id) for name in names for queue_id in range(QUEUES)]
    assert compared <= 10 * len(rows)


def test_group_reads_list_queues_with_offsets_or_subscriptions() -> None:
    progress = [CommittedOffset("billing", "gone", 7, 3), CommittedOffset("billing", "orders", 2, 5)]
    rows = list(read_requests(progress, ["orders"]).queues_of("billing"))
    assert rows == [("gone", 7, 3), ("orders", 0, -1), ("orders", 1, -1), ("orders", 2, 5), ("orders", 3, -1)]
    assert list(read_requests([], []).queues_of("billing")) == []


def test_group_reads_many_groups_are_answered_in_slices() -> None:
    """The role answers others in between, however few queues each group has."""
    names = [f"g{number}" for number in range(1000)]
    found = FoundQueues({("orders", queue_id): QueueBounds(0, 0, 9) for queue_id in range(QUEUES)})
    offsets = [CommittedOffset(name, "orders", queue_id, 5) for name in names for queue_id in range(QUEUES)]
    progress = ReadOnlyOffsets(offsets, Path(), OSError())
    state = SimpleNamespace(progress=progress, consumed=found, settings=SimpleNamespace(names=list))
    groups: Any = SimpleNamespace(state=state, members=dict)
    context: Any = SimpleNamespace(clock=None)
    reading: Any = SimpleNamespace(queues=found)
    requests = ReadRequests(context, reading, groups, no_retries())
    slices = requests.group_list(Empty())
    count = 0
    while True:
        try:
            next(slices)
        except StopIteration as end:
            rows = end.value[0].groups
            break
        count += 1
    assert count >= len(names) * QUEUES // QUEUES_PER_SLICE
    assert rows == [(name, 0, 1, 4 * QUEUES, 0, 0) for name in sorted(names)]
