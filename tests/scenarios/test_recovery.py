"""Stop and start a store: offsets are kept, a damaged last message is overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.layout.record_codec import decode_records
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from tests.roles.rigs import Rig

COUNT = 20
BODY = b"body"


class Started:
    """The store at `root`, recovered as at a start."""

    def __init__(self, root: Path) -> None:
        self.rig = Rig(root)
        self.table = QueueTable(self.rig.io, self.rig.paths.queues)

    @property
    def log_end(self) -> int:
        return self.rig.control.load(words_of.WRITTEN)

    @property
    def max_offset(self) -> int:
        return self.table.max_offset(self.table.find("T", 0))

    def reading(self) -> StoreQueries:
        rig = self.rig
        view = WordsView(rig.control.words, self.table, sync_flush=False)
        return StoreQueries(rig.io, rig.paths, rig.options, view)

    def offsets(self) -> list[int]:
        """Physical offsets of all messages that pulls from the queue's beginning return."""
        reading = self.reading()
        pulled = reading.pull("T", 0, 0, 1000, 1 << 20)
        found = [message.physical_offset for message in decode_records(pulled.records)]
        reading.close()
        return found


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, int, list[int]]:
    """Create a cleanly stopped store with COUNT messages in one queue.

    Returns (folder, end of the log, physical offsets).
    """
    root = tmp_path / "store"
    Started(root).rig.dispatch(COUNT)
    # A clean stop leaves the durable marks at the end.
    started = Started(root)
    assert started.max_offset == COUNT
    return root, started.log_end, started.offsets()


def damage_last(root: Path, offset: int) -> None:
    """Zero the 16 bytes after the body of the last message."""
    segment = root / "commitlog" / f"{0:020d}"
    with segment.open("r+b") as file:
        file.seek(0)
        data = file.read()
        file.seek(data.index(BODY, offset) + len(BODY))
        file.write(bytes(16))


def test_stop_and_start_keep_all_maxima(stopped: tuple[Path, int, list[int]]) -> None:
    root, end, offsets = stopped
    started = Started(root)
    assert (started.log_end, started.max_offset, started.offsets()) == (end, COUNT, offsets)


@pytest.mark.parametrize("aborted", [False, True], ids=["clean", "abort"])
@pytest.mark.parametrize("own_folder", [True, False], ids=["ours", "rocketmqs"])
def test_damaged_last_message_is_overwritten(
    stopped: tuple[Path, int, list[int]], own_folder: bool, aborted: bool
) -> None:
    """Both maximum offsets decrease by exactly that message.

    Tested with and without an `abort` file and durable marks. A mark is ignored if the fingerprint of the log before it
    differs.
    """
    root, _end, offsets = stopped
    if not own_folder:
        shutil.rmtree(root / "mqproc")
    damage_last(root, offsets[-1])
    if aborted:
        (root / "abort").write_text("1")
    started = Started(root)
    assert (started.log_end, started.max_offset) == (offsets[-1], COUNT - 1)
    assert started.offsets() == offsets[:-1]

    started.rig.dispatch(2)
    assert started.max_offset == COUNT + 1
    assert started.offsets()[COUNT - 1] == offsets[-1]
    again = Started(root)
    assert (again.log_end, again.offsets()) == (started.log_end, started.offsets())
