"""Taking topics out of a store: their intact records in the order of the log, in large pieces or as a new store.

    log ──▶ whole records ──▶ those of the topics ──▶ buffers ──▶ Parquet, JSON lines, or a new log
                                                                  └──▶ recovery builds queues and index

A new store keeps queue ids, queue offsets and everything else of a record; only physical offsets are others, and the
CRC that covers them. Queue offsets that the selection leaves out become fillers, as behind a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config import MIB, Options
from mqproc.errors import BadRequestError, StoreAccessError
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.kernels import select
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.intrinsics import load_be32
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.record_codec import encode_blank
from mqproc.paths import StorePaths
from mqproc.store.intact_records import LostRange, Piece
from mqproc.store.log_flush import make_segment
from mqproc.store.queue_folders import queues_on_disk
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.recovery.scan_ahead import usable_scanners
from mqproc.store.topics import TopicConfig, Topics
from mqproc.store.verify.deletions import Deleted

BUFFER_BYTES: Final = 32 * MIB


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records: topics, and begin_ms ≤ store time < end_ms; none of queues that have been deleted since."""

    topics: Sequence[str]
    begin_ms: int = TIME_MIN
    end_ms: int = TIME_MAX
    deleted: Deleted = field(default_factory=dict)


@dataclass(slots=True)
class Taken:
    """What a pass has taken so far: messages by topic, their bytes. `lost` are ranges of the log without records."""

    by_topic: dict[str, int] = field(default_factory=dict)
    size: int = 0
    lost: list[LostRange] = field(default_factory=list)

    @property
    def messages(self) -> int:
        return sum(self.by_topic.values())


class Selector:
    """Fills buffers with the selected records of a log."""

    def __init__(self, selection: Selection, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._chosen = QueueTable.in_memory(max(16, len(selection.topics)))
        self._topics = selection.topics
        for topic in selection.topics:
            self._chosen.create_queue(topic, select.CHOSEN_QUEUE)
        self._counts = np.zeros(len(selection.topics), np.int64)
        self._deleted = QueueTable.in_memory(max(16, len(selection.deleted)))
        for queue, deletion in selection.deleted.items():
            self._deleted.remember_deletion(*queue, *deletion)
        self._buffer = np.empty(buffer_bytes, np.uint8)
        self._state = np.zeros(select.STATE_SIZE, np.int64)
        self._state[select.BEGIN_MS], self._state[select.END_MS] = selection.begin_ms, selection.end_ms

    def buffers(self, found: Iterable[Piece | LostRange], taken: Taken) -> Iterator[NDArray[np.uint8]]:
        """Whole records one after the other, uint8[n], valid until the next; `taken` is told how far this is."""
        state = self._state
        for each in found:
            if isinstance(each, LostRange):
                taken.lost.append(each)
                continue
            state[select.AT], state[select.STOP], state[select.BASE] = each.start, each.stop, each.base
            while not self._select(each):
                if state[select.FILLED] == 0:
                    # Longer than the buffer.
                    size = load_be32(each.view, int(state[select.AT]) + record.TOTAL_SIZE)
                    self._buffer = np.empty(size, np.uint8)
                    continue
                yield self._filled(taken)
        if state[select.FILLED]:
            yield self._filled(taken)
        taken.by_topic = dict(zip(self._topics, self._counts.tolist(), strict=True))

    def _select(self, piece: Piece) -> bool:
        chosen, deleted = self._chosen, self._deleted
        return bool(
            select.select_records(
                piece.view,
                chosen.bytes_view,
                chosen.cells,
                chosen.slots,
                deleted.bytes_view,
                deleted.cells,
                deleted.slots,
                self._buffer,
                self._counts,
                self._state,
            )
        )

    def _filled(self, taken: Taken) -> NDArray[np.uint8]:
        size = int(self._state[select.FILLED])
        self._state[select.FILLED] = 0
        taken.by_topic = dict(zip(self._topics, self._counts.tolist(), strict=True))
        taken.size += size
        return self._buffer[:size]


class NewStore:
    """A store that is being written: its log first, then everything else is built from that."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options) -> None:
        """Begin one at `paths`, an empty folder or none; `options` give its sizes. Raises BadRequestError."""
        if io.names(paths.root):
            raise BadRequestError(f"{paths.root}: not empty; a new store needs a folder of its own")
        self._io = io
        self._paths = paths
        self._options = options
        self._size = options.mapped_file_size_commit_log
        self._position = 0
        self._fd = -1
        io.make_folder(paths.own, mode=0o700)
        io.make_folder(paths.commit_log)

    def append(self, records: NDArray[np.uint8]) -> None:
        """Add whole records, which are changed. Raises OSError, StoreAccessError for one larger than a segment."""
        at = 0
        while at < len(records):
            if self._fd < 0:
                self._roll()
            room = self._size - self._position % self._size
            end = int(select.relocate_records(records, at, len(records), self._position, room))
            if end > at:
                self._io.pwrite(self._fd, records[at:end], self._position % self._size)
                self._position += end - at
            elif room == self._size:
                size = load_be32(records, at)
                raise StoreAccessError(f"a record of {size:,} bytes is larger than a segment of {self._size:,}")
            at = end
            if at < len(records):
                self._end_segment()

    def finish(self, topics: Iterable[TopicConfig], now_ms: int, report: Callable[[str], None]) -> None:
        """Make the log durable, build queues and index, write the topics' settings. Raises OSError.

        A topic of `topics` gets as many queues as it has settings or records for.
        """
        if self._fd < 0 and self._position == 0:
            self._roll()
        self._close_segment()
        words = Words(bytearray(words_of.FILE_SIZE))
        scanners = usable_scanners()
        Recovery(self._io, self._paths, self._options, words, report, clean=True, scanners=scanners).run()
        configured = Topics(self._io, self._paths)
        there, _strays = queues_on_disk(self._io, self._paths.consume_queue)
        queues: dict[str, int] = {}
        for name, queue_id in there:
            queues[name] = max(queues.get(name, 0), queue_id + 1)
        for topic in topics:
            configured.adopt(topic.topic, max(topic.queues, queues.get(topic.topic, 0)))
            adopted = configured.get(topic.topic)
            assert adopted is not None
            adopted.perm, adopted.attributes, adopted.extra = topic.perm, dict(topic.attributes), dict(topic.extra)
        configured.save(now_ms)

    def close(self) -> None:
        """Close what is open."""
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1

    def _roll(self) -> None:
        make_segment(self._io, self._paths, self._position, self._size)
        self._fd = self._io.open(self._paths.commit_log / f"{self._position:020d}", write=True)

    def _end_segment(self) -> None:
        """A BLANK: the log goes on in the next segment."""
        place = self._position % self._size
        if place:
            self._io.pwrite(self._fd, encode_blank(self._size - place), place)
            self._position += self._size - place
        self._close_segment()

    def _close_segment(self) -> None:
        if self._fd >= 0:
            self._io.sync(self._fd)
            self.close()
