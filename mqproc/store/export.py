"""Export of topics: their intact records in log order, in large buffers or as a new store.

    log ──▶ whole records ──▶ those of the topics ──▶ buffers ──▶ Parquet, JSON lines, or a new log
                                                                  └──▶ recovery builds queues and index

A new store keeps queue ids, queue offsets and all other fields of a record except the physical offset and the CRC that
covers it. Queue offsets outside the selection become fillers, like those of a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels import log_match
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.layout import control, record
from mqproc.layout.record_codec import encode_blank
from mqproc.paths import StorePaths
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.scan import LostRange, RecordRun
from mqproc.store.compat import note_maker
from mqproc.store.consumequeue.files import queues_on_disk
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.recovery.rebuild import usable_scanners
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.topics import TopicConfig, Topics
from mqproc.store.verify.snapshot import Deleted
from mqproc.util.units import MIB

BUFFER_BYTES: Final = 32 * MIB


@dataclass(frozen=True, slots=True)
class RecordSelection:
    """Records of topics with begin_ms ≤ store time < end_ms, without those of deleted queues."""

    topics: Sequence[str]
    begin_ms: int = TIME_MIN
    end_ms: int = TIME_MAX
    deleted: Deleted = field(default_factory=dict)


@dataclass(slots=True)
class ExportProgress:
    """Messages by topic and bytes exported so far. `lost` are ranges of the log without records."""

    by_topic: dict[str, int] = field(default_factory=dict)
    size: int = 0
    lost: list[LostRange] = field(default_factory=list)

    @property
    def messages(self) -> int:
        return sum(self.by_topic.values())


class RecordSelector:
    """Fills buffers with the selected records of a log."""

    def __init__(self, selection: RecordSelection, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._chosen = QueueTable.in_memory(max(16, len(selection.topics)))
        self._topics = selection.topics
        for topic in selection.topics:
            self._chosen.create_queue(topic, log_match.CHOSEN_QUEUE)
        self._counts = np.zeros(len(selection.topics), np.int64)
        self._deleted = QueueTable.in_memory(max(16, len(selection.deleted)))
        for queue, deletion in selection.deleted.items():
            self._deleted.remember_deletion(*queue, *deletion)
        self._buffer = np.empty(buffer_bytes, np.uint8)
        self._state = np.zeros(log_match.STATE_SIZE, np.int64)
        self._state[log_match.BEGIN_MS], self._state[log_match.END_MS] = selection.begin_ms, selection.end_ms

    def buffers(self, found: Iterable[RecordRun | LostRange], progress: ExportProgress) -> Iterator[NDArray[np.uint8]]:
        """Buffers of whole records, uint8[n], each valid until the next, updating `progress`."""
        state = self._state
        for item in found:
            if isinstance(item, LostRange):
                progress.lost.append(item)
                continue
            state[log_match.AT], state[log_match.STOP], state[log_match.BASE] = item.start, item.stop, item.base
            while not self._select(item):
                if state[log_match.FILLED] == 0:
                    # The record is larger than the buffer.
                    size = load_be32(item.view, int(state[log_match.AT]) + record.TOTAL_SIZE)
                    self._buffer = np.empty(size, np.uint8)
                    continue
                yield self._filled_bytes(progress)
        if state[log_match.FILLED]:
            yield self._filled_bytes(progress)
        progress.by_topic = dict(zip(self._topics, self._counts.tolist(), strict=True))

    def _select(self, piece: RecordRun) -> bool:
        tables = *self._chosen.arrays, *self._deleted.arrays
        return bool(log_match.select_records(piece.view, *tables, self._buffer, self._counts, self._state))

    def _filled_bytes(self, progress: ExportProgress) -> NDArray[np.uint8]:
        size = int(self._state[log_match.FILLED])
        self._state[log_match.FILLED] = 0
        progress.by_topic = dict(zip(self._topics, self._counts.tolist(), strict=True))
        progress.size += size
        return self._buffer[:size]


class NewStore:
    """A store being written: first its log, from which recovery builds everything else."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options) -> None:
        """Begin a store at `paths`, an empty or missing folder. Raises BadRequestError."""
        if io.names(paths.root):
            raise BadRequestError(f"{paths.root}: not empty; a new store needs a folder of its own")
        self._io = io
        self._paths = paths
        self._options = options
        self._size = options.mapped_file_size_commit_log
        self._position = 0
        self._fd = -1
        io.make_folder(paths.own, mode=0o700)
        note_maker(io, paths)
        io.make_folder(paths.commit_log)

    def append(self, records: NDArray[np.uint8]) -> None:
        """Append whole records, relocating them in place.

        Raises OSError, and StoreAccessError for a record larger than a segment.
        """
        at = 0
        while at < len(records):
            if self._fd < 0:
                self._roll()
            room = self._size - self._position % self._size
            end = int(log_match.relocate_records(records, at, len(records), self._position, room))
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

        A topic gets enough queues for its settings in `topics` and its records.
        """
        if self._fd < 0 and self._position == 0:
            self._roll()
        self._close_segment()
        words = Words(bytearray(control.FILE_SIZE))
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
            if topic.is_narrowed:
                adopted.read_queues, adopted.write_queues = topic.read_queues, topic.write_queues
            adopted.perm, adopted.attributes, adopted.extra = topic.perm, dict(topic.attributes), dict(topic.extra)
        configured.save(now_ms)

    def close(self) -> None:
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1

    def _roll(self) -> None:
        make_segment(self._io, self._paths, self._position, self._size)
        self._fd = self._io.open(self._paths.commit_log / f"{self._position:020d}", write=True)

    def _end_segment(self) -> None:
        """Write a BLANK: the log continues in the next segment."""
        place = self._position % self._size
        if place:
            self._io.pwrite(self._fd, encode_blank(self._size - place), place)
            self._position += self._size - place
        self._close_segment()

    def _close_segment(self) -> None:
        if self._fd >= 0:
            self._io.sync(self._fd)
            self.close()
