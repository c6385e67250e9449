"""A stopped store that our own engine wrote, recovered once so that its marks are at its end; to be harmed by tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.index.lookup import IndexReader
from tests.store.engine import Engine
from tests.store.recovery.recovering import RecordingIO, Recovered, contents, recover

FIRST_MS = 1_700_000_000_000
SEGMENT = 65536
SLOTS, ITEMS = 50, 400
QUEUE_FILE_BYTES = 800
FRAMES, PER_FRAME = 40, 16
FOREVER = 1 << 60


class StoppedStore:
    """A stopped store of three topics with four queues each, recovered once: its marks are at its end."""

    def __init__(self, root: Path, **options: Any) -> None:
        engine = Engine(
            root,
            max_hash_slot_num=SLOTS,
            max_index_num=ITEMS,
            mapped_file_size_consume_queue=QUEUE_FILE_BYTES,
            max_queues=1024,
            **options,
        )
        self.engine = engine
        self.root = root
        self.offsets: list[int] = []
        self.numbers = 0
        for _frame in range(FRAMES):
            self.put()
        self.first = self.recover()

    def put(self) -> None:
        """A frame of messages; all have a key of their own."""
        topic = ("First", "Second", "Third")[self.numbers // PER_FRAME % 3]
        keys = [f"n{self.numbers + each}" for each in range(PER_FRAME)]
        bodies = [b"%4d" % (self.numbers + each) * 50 for each in range(PER_FRAME)]
        time_ms = FIRST_MS + self.numbers
        self.offsets += self.engine.append(topic, bodies, time_ms, keys=keys, queues=4).tolist()
        self.numbers += PER_FRAME

    @property
    def end(self) -> int:
        return self.engine.written

    def recover(self, *, clean: bool = True, io: StoreIO | None = None, **options: Any) -> Recovered:
        self.engine.segments.close()
        return recover(self.root, dataclasses.replace(self.engine.options, **options), clean=clean, io=io)

    def close_in_order(self) -> None:
        """Leave it as a group does that had its lock and has stopped."""
        StoreLock.acquire(self.engine.io, self.engine.paths).close()
        self.recover()

    def segment(self, offset: int) -> Path:
        return self.root / "commitlog" / f"{offset // SEGMENT * SEGMENT:020d}"

    def overwrite(self, offset: int, data: bytes) -> None:
        write_at(self.segment(offset), offset % SEGMENT, data)

    def queue_file(self, topic: str, queue_id: int, start: int = 0) -> Path:
        return self.root / "consumequeue" / topic / str(queue_id) / f"{start:020d}"

    def index_files(self) -> list[Path]:
        return sorted((self.root / "index").iterdir())


def write_at(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def assert_whole(store: StoppedStore, found: Recovered, *, lost: Collection[int] = ()) -> None:
    """Every record but the lost ones (by number) is in its queue and found once by its key; a second run does nothing.

    Keys of lost ones may be found: they lead nowhere.
    """
    assert found.dispatched == found.end
    by_queue: dict[tuple[str, int], list[tuple[int, int]]] = {}
    units = {queue: found.units(*queue) for queue in found.queues()}
    wanted = {offset for number, offset in enumerate(store.offsets) if number not in lost}
    for queue, of_queue in units.items():
        by_queue[queue] = [(offset, size) for offset, size, _code in of_queue.values()]
    placed = {offset for of_queue in by_queue.values() for offset, size in of_queue if size != FILLER_SIZE}
    assert placed == wanted
    for number, offset in enumerate(store.offsets):
        assert number in lost or keyed(found, number).count(offset) == 1, number
    before = contents(store.root)
    io = RecordingIO()
    again = store.recover(io=io)
    assert io.lasting_calls == []
    assert contents(store.root) == before
    assert again.queues() == found.queues()


def keyed(found: Recovered, number: int) -> list[int]:
    """Offsets that the index gives for a message's key."""
    reader = IndexReader(StoreIO(), found.paths.index, SLOTS, ITEMS, 64)
    reader.refresh(1)
    topic = ("First", "Second", "Third")[number // PER_FRAME % 3]
    offsets = reader.query_offset(topic, f"n{number}", 64, 0, FOREVER).offsets
    reader.close()
    return list(offsets)
