"""ConsumeQueue files of which the disk cannot read a part: what lies around it is served, and it is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.record_codec import decode_records
from mqproc.message import PullStatus
from mqproc.store.consume_queue import as_units
from mqproc.store.lost_units import LOST_PLACE, ServedQueueFiles
from mqproc.store.reads.reading import StoreReading
from mqproc.store.slices import finish
from tests.store.bad_sectors import PAGE, BadSectors
from tests.store.live_store import EVERYTHING, FIRST_MS, LiveStore

# 500 units of 20 bytes: a little more than two pages.
FILE_UNITS = 500
COUNT = 1200
LOST_PAGE = 1
# Bytes [4096, 8192) of the first file, with the units that reach over their borders.
LOST = range(204, 410)


class Served:
    """A store with a queue of three files, read as the query role does."""

    def __init__(self, root: Path) -> None:
        self.store = LiveStore(
            root, mapped_file_size_consume_queue=FILE_UNITS * 20, mapped_file_size_commit_log=1 << 20
        )
        for first in range(0, COUNT, 100):
            bodies = [b"%d" % number for number in range(first, first + 100)]
            self.store.append("T", bodies, FIRST_MS + first, queues=1)
        self.store.dispatch()
        self.io = BadSectors()
        self.told: list[str] = []
        view = self.store.view()
        self.reading = StoreReading(
            self.io,
            self.store.engine.paths,
            self.store.options,
            view.queues,
            view.visible,
            view.newest_index_ms,
            tell_lost=self.told.append,
        )
        self.first_file = root / "consumequeue/T/0" / f"{0:020d}"

    def pulled(self, *, rocketmq_limits: bool = False) -> tuple[list[int], list[str]]:
        """Queue offsets of all that pulls give, and what they say of damage."""
        found: list[int] = []
        told: list[str] = []
        offset = 0
        while offset < COUNT:
            pulled = self.reading.pull("T", 0, offset, 1000, EVERYTHING, rocketmq_limits=rocketmq_limits)
            assert pulled.next_offset > offset, pulled
            if pulled.status is PullStatus.CORRUPT:
                told.append(pulled.detail)
            offset = pulled.next_offset
            found += [message.queue_offset for message in decode_records(pulled.records.data)]
        return found, told


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.reading.close()
    served.store.close()


def test_pulls_go_around_a_page_that_cannot_be_read(served: Served) -> None:
    """The whole file was passed over without a word, or each pull was an error and nobody came behind it."""
    assert served.pulled() == (list(range(COUNT)), [])
    served.io.lose(served.first_file, LOST_PAGE)
    units = as_units(served.store.files.read_units("T", 0, 0, COUNT))
    log = [int(units["physical_offset"][number]) for number in (LOST.start, LOST.stop)]
    found, told = served.pulled()
    assert found == [number for number in range(COUNT) if number not in LOST]
    assert told == [
        f"queue offsets [{LOST.start}, {LOST.stop}) have no intact record: log [{log[0]}, {log[1]}): "
        "a part of the queue's file cannot be read"
    ]
    assert len(served.told) == 1
    assert served.told[0].startswith(f"{served.first_file}: offset 4,080 cannot be read: Input/output error; ")


def test_the_rocketmq_way_goes_around_it_too(served: Served) -> None:
    served.io.lose(served.first_file, LOST_PAGE)
    assert served.pulled(rocketmq_limits=True)[0] == [number for number in range(COUNT) if number not in LOST]


def test_a_page_is_tried_again_when_the_file_has_changed(served: Served) -> None:
    """A disk takes its time to say that it cannot read; the dispatcher may write over such a page."""
    served.io.lose(served.first_file, LOST_PAGE)
    served.pulled()
    tried = served.io.tried
    assert tried == 3
    served.pulled()
    assert served.io.tried == tried
    served.io.lost.clear()
    assert len(served.pulled()[0]) == COUNT - len(LOST)
    os.utime(served.first_file)
    assert served.pulled() == (list(range(COUNT)), [])


@pytest.mark.parametrize("lost_page", [0, 1, 2])
def test_searches_by_time_and_ranges_find_what_lies_around(served: Served, lost_page: int) -> None:
    served.io.lose(served.first_file, lost_page)
    lost = {number for number in range(FILE_UNITS) if lost_page in (number * 20 // PAGE, (number * 20 + 19) // PAGE)}
    readable = [number for number in range(COUNT) if number not in lost]
    for number in range(0, COUNT, 100):
        found = served.reading.offset_at("T", 0, FIRST_MS + number)
        assert [n for n in readable if n >= found] == [n for n in readable if n >= number]
    batch = finish(served.reading.range("T", 0, 1 << 60, max_messages=EVERYTHING, max_bytes=EVERYTHING))
    assert batch.count == len(readable)


def test_a_file_that_is_not_there_is_told_as_such(served: Served) -> None:
    served.io.lose(served.first_file, LOST_PAGE)
    files = served.reading.files
    assert isinstance(files, ServedQueueFiles)
    assert len(files.raw_units("T", 0, 0, 10 * COUNT)) == 3 * FILE_UNITS * 20
    units = as_units(files.raw_units("T", 0, LOST.start, 1))[0]
    assert (int(units["size"]), int(units["physical_offset"])) == (FILLER_SIZE, LOST_PLACE)
    with pytest.raises(FileNotFoundError):
        files.raw_units("T", 0, 10 * COUNT, 1)


def test_other_errors_are_raised(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(served.io, "pread", refuse)
    with pytest.raises(PermissionError):
        served.pulled()
    assert served.told == []
