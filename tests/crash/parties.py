"""What all clients of a story have in common, and what those that belong to consumer groups share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.offsets.offset_store import committed_offsets
from tests.crash.placed import Placed, expect
from tests.crash.schedule import Schedule, SimulatedClock

Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Found:
    """What a store holds: its log's records, and where groups stand."""

    records: Sequence[Placed]
    progress: Mapping[str, Mapping[Queue, int]]
    """By group."""
    sync_flush: bool
    minima: Mapping[Queue, int]
    """Each queue's first offset: of a topic that was deleted and made again it lies behind what went."""
    minimum: int = 0
    """Retention was to delete the log up to here, and has taken groups past it; some of it may be there yet."""

    def of_group(self, group: str) -> Mapping[Queue, int]:
        return self.progress.get(group, {})


def found_in(paths: StorePaths, records: Sequence[Placed], *, sync_flush: bool, minimum: int = 0) -> Found:
    """What the store at `paths` holds, as far as `records` are its log."""
    progress: dict[str, dict[Queue, int]] = {}
    for at in committed_offsets(StoreIO(), paths):
        progress.setdefault(at.group, {})[at.topic, at.queue_id] = at.offset
    table = QueueTable(StoreIO(), paths.queues)
    try:
        minima = {(topic, queue_id): table.min_offset(number) for number, topic, queue_id in table.live()}
    finally:
        table.close()
    return Found(records, progress, sync_flush, minima, minimum)


class Party(Protocol):
    """Clients of one kind over all lives of a store, and what they were told."""

    patient: bool
    """In a last life without trouble nothing is left undone."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """The life of one of them: a task of the schedule."""

    def forget(self, topic: str) -> None:
        """Somebody deletes a topic."""

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        """A life is over, and the next one begins with this."""

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Raise Broken unless what was told holds."""

    def left(self, found: Found) -> int:
        """How much is still to be done."""


@dataclass(slots=True)
class Commits:
    """How far one group has come, as its consumers were told."""

    group: str
    committed: dict[Queue, int] = field(default_factory=dict)
    """Commits that were answered; a power loss may take them."""
    asked: dict[Queue, int] = field(default_factory=dict)
    """The furthest that was ever asked for."""
    deleted: set[str] = field(default_factory=set)

    def ask(self, queue: Queue, end: int) -> None:
        """Somebody commits."""
        self.asked[queue] = max(self.asked.get(queue, 0), end)

    def answered(self, queue: Queue, end: int) -> None:
        """The commit was taken."""
        if queue[0] not in self.deleted:
            self.committed[queue] = max(self.committed.get(queue, 0), end)

    def forget(self, topic: str) -> None:
        """A topic is deleted, and with it what the group had consumed of it, now or when the writer comes to it."""
        self.deleted.add(topic)
        for queue in [queue for queue in self.committed if queue[0] == topic]:
            del self.committed[queue]

    def go_on(self, *, power_loss: bool) -> None:
        """The next life begins; a power loss may have taken what was answered."""
        if power_loss:
            self.committed.clear()

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Progress is neither lost nor invented."""
        progress = found.of_group(self.group)
        for queue, offset in progress.items():
            if queue[0] in self.deleted:
                continue  # It was raised to the queue's end, if the crash came before it was forgotten.
            asked = self.asked.get(queue, 0)
            raised_to = max(_minimum(queue, found), found.minima.get(queue, 0))
            expect(offset <= max(asked, raised_to), f"{queue}: {offset} is beyond {asked}")
        for queue, offset in {} if power_loss else self.committed.items():
            expect(progress.get(queue, 0) >= offset, f"{queue}: {progress.get(queue)} is below the commit of {offset}")


def _minimum(queue: Queue, found: Found) -> int:
    """The first offset of a queue that the log has, or is to have: progress is raised to it."""
    offsets = (offset for offset, placed in in_queue(queue, found) if placed.offset >= found.minimum)
    return min(offsets, default=1 << 62)


def in_queue(queue: Queue, found: Found) -> list[tuple[int, Placed]]:
    """(queue offset, record) of the records of a queue."""
    return [
        (placed.message.queue_offset, placed)
        for placed in found.records
        if (placed.message.topic, placed.message.queue_id) == queue
    ]
