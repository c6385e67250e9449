"""The last unit of a queue whose last record is lost: RocketMQ must append after it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.store.consumequeue.bounds import as_units, end_fillers, filler_position
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from tests.store.recovery.test_recovery import kill_as_it_ends
from tests.support.store_builders import QUEUE_FILE_BYTES, SEGMENT, StoppedStore, assert_whole, write_at
from tests.support.store_checks import Recovered

# A queue's last record, with others after it in the log.
BEFORE_THE_LAST = 4


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    """A store without marks whose fourth record from the end is damaged."""
    store = StoppedStore(tmp_path / "store")
    store.overwrite(store.offsets[-BEFORE_THE_LAST] + 100, b"\xff")
    shutil.rmtree(store.root / "mqproc" / "marks")
    return store


def ends(found: Recovered) -> list[bytes]:
    """The last unit of each queue, read from disk."""
    files = ConsumeQueueFiles(StoreIO(), found.paths.consume_queue, found.options.consume_queue_file_bytes)
    try:
        return [files.raw_units(*queue, stop - 1, 1) for queue, (_start, stop) in found.queues().items()]
    finally:
        files.close()


def end_of_damaged(store: StoppedStore, lost: int = -BEFORE_THE_LAST) -> bytes:
    return end_fillers(1, filler_position(store.offsets[lost], SEGMENT), SEGMENT).tobytes()


def test_end_unit_does_not_reach_beyond_log(store: StoppedStore) -> None:
    """RocketMQ skips a record that ends at or below the end of a queue's last unit."""
    found = store.recover()
    assert ends(found).count(end_of_damaged(store)) == 1
    for (unit,) in (as_units(end).tolist() for end in ends(found)):
        assert unit[0] + unit[1] <= found.end
    assert_whole(store, found, lost={len(store.offsets) - BEFORE_THE_LAST})


def test_end_unit_plain_filler_is_replaced(store: StoppedStore) -> None:
    """Earlier versions wrote a plain filler."""
    found = store.recover()
    usual = struct.pack(">qiq", filler_position(store.offsets[-BEFORE_THE_LAST], SEGMENT), FILLER_SIZE, 0)
    for path in (each for each in (store.root / "consumequeue").rglob("*") if each.is_file()):
        data = path.read_bytes()
        if (at := data.find(end_of_damaged(store))) >= 0:
            assert at % UNIT_SIZE == 0
            write_at(path, at, usual)
    assert end_of_damaged(store) not in ends(found)
    shutil.rmtree(store.root / "mqproc" / "marks")
    assert ends(store.recover(clean=False)).count(end_of_damaged(store)) == 1


def test_queue_continues_after_end_unit(store: StoppedStore) -> None:
    """It is then an ordinary filler, and is kept."""
    lost = len(store.offsets) - BEFORE_THE_LAST
    store.recover()
    for _topic in range(3):
        store.put()
    found = store.recover(clean=False)
    assert end_of_damaged(store, lost) not in ends(found)
    assert_whole(store, found, lost={lost})


def test_end_unit_stays_after_interrupted_rebuild(store: StoppedStore) -> None:
    """The rebuild lowers the mark; the queue's offsets must still not be assigned again."""
    queues = store.recover().queues()
    store.queue_file("Second", 1, QUEUE_FILE_BYTES).unlink()
    kill_as_it_ends(store)
    assert store.recover(clean=False).queues() == queues
