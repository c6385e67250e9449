"""Builders of small stores in this process, without roles.

`Engine`: the log, its appender and the queue table. `LiveStore`: an engine with dispatch and reads. `NumberedStore`:
a live store whose message bodies are numbers. `TaggedStore`: a live store with and without entries for tags in its
index. `StoppedStore`: a recovered store on disk, for tests that damage it.
`RecoveredStore`: a writer whose other roles are replaced by recovery. `AgedStore`: one record of known age per segment,
for retention.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import checkpoint
from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths, segment_start
from mqproc.store.commitlog.append import CommitLogAppender
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate, topic_fields
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles, index_file_names
from mqproc.store.index.lookup import IndexReader
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.retention.delete import Retention
from mqproc.store.retention.plan import local_hour
from mqproc.store.retention.survey import correct_groups
from mqproc.store.sync_guard import SyncGuard
from mqproc.store.topics import Topics
from mqproc.types import BatchResult, StoredMessage
from tests.support.store_checks import NOW_MS, RecordingIO, Recovered, contents, recover

BORN_HOST = bytes([127, 0, 0, 1, 0, 0, 0x13, 0x88])
STORE_HOST = bytes([192, 168, 1, 2, 0, 0, 0x2A, 0x9F])


class Engine:
    """A log, its appender and its words in plain memory, with up to `segments_max` segments."""

    def __init__(
        self,
        root: Path,
        *,
        io: StoreIO | None = None,
        words: Words | None = None,
        segments_max: int = 64,
        **options: Any,
    ) -> None:
        settings = {"mapped_file_size_commit_log": 65536, "max_message_size": 32768} | options
        self.options = Options(**settings)
        self.io = io or StoreIO()
        self.paths = StorePaths(root)
        for folder in (self.paths.commit_log, self.paths.own, self.paths.marks, self.paths.index):
            self.io.make_folder(folder)
        self.table = QueueTable.create(self.io, self.paths.queues, 1024)
        self.segments = LogSegments(self.io, self.paths.commit_log, self.options.mapped_file_size_commit_log)
        self.words = words or Words(bytearray(words_of.FILE_SIZE))
        self.syncs = SyncGuard(self.io, self.paths, self.words, words_of.WRITER, words_of.WRITER_SYNC_ERRNO)
        self.segments_max = segments_max
        self.make_segment(0)
        self.appender = CommitLogAppender(
            self.syncs, self.options, self.words, self.table, self.segments, STORE_HOST, self.make_segment
        )

    def make_segment(self, start: int) -> None:
        """Create a segment unless it exists; the appender calls this at a segment's end."""
        if self.words[words_of.SEGMENTS_READY_END] > start:
            return
        size = self.segments.segment_size
        if start // size >= self.segments_max:
            raise OSError(28, "No space left on device")
        make_segment(self.io, self.paths, start, size)
        self.words[words_of.SEGMENTS_READY_END] = start + size

    def use_words(self, words: Words) -> None:
        """Continue with the words of a control file."""
        self.words = words
        self.appender = CommitLogAppender(
            self.syncs, self.options, words, self.table, self.segments, STORE_HOST, self.make_segment
        )

    def plan(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        queues: int = 4,
        **changes: Any,
    ) -> AppendPlan:
        """Build the plan of a frame as the writer role does."""
        numbers = [self.table.create_queue(topic, queue_id) for queue_id in range(queues)]
        parts = [struct.pack(f"<{len(bodies)}I", *map(len, bodies)), b"".join(bodies)]
        columns = [0, 4 * len(bodies)]
        for texts in (keys, tags):
            if texts is None:
                columns += [-1, -1]
                continue
            encoded = [text.encode() for text in texts]
            at = sum(map(len, parts))
            parts += [struct.pack(f"<{len(encoded)}H", *map(len, encoded)), b"".join(encoded)]
            columns += [at, at + 2 * len(encoded)]
        columns += [-1, -1, -1, -1, -1, -1, -1, -1]
        magic, topic_block = topic_fields(topic)
        of_frame = {name: changes.pop(name) for name in list(changes) if name in AppendPlan.__struct_fields__}
        template: dict[str, Any] = {
            "magic": magic,
            "topic_block": topic_block,
            "queue_numbers": np.array(numbers, np.int64),
            "fixed_queue": -1,
            "parts": (b"", b"", b"", b""),
            "born_host": BORN_HOST,
        }
        frame: dict[str, Any] = {
            "template": AppendTemplate(**(template | changes)),
            "payload": np.frombuffer(bytearray(b"".join(parts)), np.uint8),
            "count": len(bodies),
            "columns": tuple(columns),
            "rotation": 0,
            "born_timestamp_ms": 1_700_000_000_000,
        }
        return AppendPlan(**(frame | of_frame))

    def append(
        self, topic: str, bodies: Sequence[bytes], time_ms: int = 1_700_000_000_001, **changes: Any
    ) -> np.ndarray:
        """Append and publish; returns the physical offsets int64[n]."""
        answer = self.appender.add(self.plan(topic, bodies, **changes), time_ms)
        self.appender.write_out()
        self.appender.publish()
        return answer[: 8 * len(bodies)].view(np.int64)

    @property
    def written(self) -> int:
        return self.words[words_of.WRITTEN]

    def log_bytes(self, start: int, stop: int) -> bytes:
        """Bytes of the log, over segment borders."""
        found = b""
        while start < stop:
            base = self.segments.start_of(start)
            end = min(stop, base + self.segments.segment_size)
            data = self.segments.path(base).read_bytes()
            found += data[start - base : end - base]
            start = end
        return found


# Live store

FIRST_MS = 1_700_000_000_000
SMALL: dict[str, Any] = {"max_hash_slot_num": 100, "max_index_num": 400, "mapped_file_size_consume_queue": 2000}
EVERYTHING = 1 << 30


class LiveStore:
    """An engine with dispatch and reading. `options` are changes of those of a small store."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.engine = Engine(root, **(SMALL | options))
        engine = self.engine
        self.options = engine.options
        self.files = ConsumeQueueFiles(
            engine.io, engine.paths.consume_queue, self.options.consume_queue_file_bytes, write=True
        )
        self.index = IndexFiles(
            engine.io, engine.paths.index, self.options.max_hash_slot_num, self.options.max_index_num
        )
        self.dispatching = Dispatch(engine.io, self.options, engine.table, engine.segments, self.files, self.index)
        view = self.view()
        self.reading = StoreQueries(engine.io, engine.paths, self.options, view)

    def view(self) -> WordsView:
        """Return the current view."""
        return WordsView(self.engine.words, self.engine.table, sync_flush=self.options.sync_flush)

    def append(self, topic: str, bodies: Sequence[bytes], time_ms: int = FIRST_MS, **changes: Any) -> BatchResult:
        """Append a frame and publish it; return the places of its messages."""
        appender = self.engine.appender
        answer = appender.add(self.engine.plan(topic, bodies, **changes), time_ms)
        appender.write_out()
        appender.publish()
        count = len(bodies)
        offsets = answer[: 16 * count].view(np.int64)
        return BatchResult(topic, answer[16 * count :].view(np.int32), offsets[count:], offsets[:count], time_ms)

    def dispatch(self) -> None:
        """Dispatch the log up to its visible end."""
        words = self.engine.words
        confirmed = self.view().visible().end
        while words[words_of.DISPATCHED] < confirmed:
            step = self.dispatching.step(words[words_of.DISPATCHED], confirmed)
            assert not step.stuck
            words[words_of.INDEX_FILE_MS] = self.index.commit().file_ms
            words[words_of.DISPATCHED] = step.position

    def messages(self, topic: str, queue_id: int = 0, offset: int = 0, count: int = 1024) -> list[StoredMessage]:
        """Pull up to `count` messages from a queue offset on."""
        found: list[StoredMessage] = []
        while len(found) < count:
            pulled = self.reading.pull(topic, queue_id, offset, count - len(found), EVERYTHING)
            if not pulled.count:
                break
            found += decode_records(pulled.records)
            offset = pulled.next_offset
        return found

    def overwrite(self, physical_offset: int, data: bytes) -> None:
        """Overwrite bytes of the log on disk."""
        start = self.engine.segments.start_of(physical_offset)
        with self.engine.segments.path(start).open("r+b") as file:
            file.seek(physical_offset - start)
            file.write(data)

    def close(self) -> None:
        self.reading.close()
        self.dispatching.close()


class TaggedStore(LiveStore):
    """A live store whose records have tags, of which some are in the index as RocketMQ makes it since 5.4."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.offsets: list[int] = []

    def add(self, count: int, *, tags: bool, tag: str = "paid") -> TaggedStore:
        """Append records with two keys and a tag (`''`: none); dispatch them with or without entries for tags."""
        engine, options = self.engine, dataclasses.replace(self.options, message_index_tags=tags)
        self.dispatching = Dispatch(engine.io, options, engine.table, engine.segments, self.files, self.index)
        for first in range(0, count, 50):
            numbers = range(first, min(first + 50, count))
            columns: dict[str, Any] = {"keys": [f"a{number} b" for number in numbers]}
            if tag:
                columns["tags"] = [tag] * len(numbers)
            self.offsets += self.append("orders", [b"x"] * len(numbers), **columns).physical_offsets.tolist()
        self.dispatch()
        return self

    def close_as_rocketmq(self) -> Path:
        """Leave only RocketMQ's files, closed in order; returns the store's folder."""
        self.close()
        self.engine.segments.close()
        paths = self.engine.paths
        shutil.rmtree(paths.own)
        paths.checkpoint.write_bytes(checkpoint.encode(checkpoint.Checkpoint(FIRST_MS, FIRST_MS, FIRST_MS)))
        return paths.root


# Stopped store

SEGMENT = 65536
SLOTS, ITEMS = 50, 400
QUEUE_FILE_BYTES = 800
FRAMES, PER_FRAME = 40, 16
FOREVER = 1 << 60


class StoppedStore:
    """A stopped store of three topics with four queues each, whose marks are at its end."""

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
        """Append a frame of messages, each with its own key."""
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
        """Leave the store as a group that held its lock and stopped."""
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
    """Check that every record except `lost` is in its queue and index.

    The index may keep keys of lost records. A second recovery must change nothing.
    """
    assert found.dispatched == found.end
    by_queue: dict[tuple[str, int], list[tuple[int, int]]] = {}
    units = {queue: found.units(*queue) for queue in found.queues()}
    expected = {offset for number, offset in enumerate(store.offsets) if number not in lost}
    for queue, of_queue in units.items():
        by_queue[queue] = [(offset, size) for offset, size, _code in of_queue.values()]
    placed = {offset for of_queue in by_queue.values() for offset, size in of_queue if size != FILLER_SIZE}
    assert placed == expected
    for number, offset in enumerate(store.offsets):
        assert number in lost or keyed(found, number).count(offset) == 1, number
    before = contents(store.root)
    io = RecordingIO()
    again = store.recover(io=io)
    assert io.lasting_calls == []
    assert contents(store.root) == before
    assert again.queues() == found.queues()


def keyed(found: Recovered, number: int) -> list[int]:
    """Return the offsets that the index has for a message's key."""
    reader = IndexReader(StoreIO(), found.paths.index, SLOTS, ITEMS, 64)
    reader.refresh(1)
    topic = ("First", "Second", "Third")[number // PER_FRAME % 3]
    offsets = reader.query_offset(topic, f"n{number}", 64, 0, FOREVER).offsets
    reader.close()
    return list(offsets)


# Numbered messages

FRAME_COUNT, FRAME_MESSAGES = 40, 25
MESSAGE_COUNT = FRAME_COUNT * FRAME_MESSAGES


class NumberedStore(LiveStore):
    """A live store with the number of each message in its body; frames are 100 ms apart."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.offsets: list[int] = []

    def put(self, topic: str, frame: int, count: int = FRAME_MESSAGES, **changes: Any) -> None:
        numbers = range(frame * FRAME_MESSAGES, frame * FRAME_MESSAGES + count)
        columns: dict[str, Any] = {
            "rotation": frame * FRAME_MESSAGES % changes.get("queues", 4),
            "keys": [f"key-{number % 100} n{number}" for number in numbers],
            "tags": [f"Tag{number % 5}" for number in numbers],
        }
        bodies = [f"body {number}".encode() * 3 for number in numbers]
        found = self.engine.append(topic, bodies, FIRST_MS + 100 * frame, **(columns | changes))
        self.offsets += found.tolist()

    def damage(self, physical_offset: int, at: int, data: bytes) -> None:
        self.overwrite(physical_offset + at, data)


def numbers_of(records: Any) -> list[int]:
    """Return the number in each message's body."""
    return [int(message.body.split(b"body ")[1]) for message in decode_records(records.data)]


def all_numbers(batches: Any) -> list[int]:
    return [number for part in batches.records for number in numbers_of(part)]


# Store with a writer, recovered on demand

SMALL_QUEUE_FILE_BYTES = 400


@dataclass(frozen=True)
class RecoveredQueue:
    """A queue after recovery; `units` are (queue offset, physical offset) of its records."""

    min_offset: int
    max_offset: int
    next_offset: int
    units: list[tuple[int, int]]


class RecoveredStore:
    """A store with a writer; recovery replaces the other roles."""

    def __init__(self, root: Path) -> None:
        self.engine = Engine(
            root, mapped_file_size_consume_queue=SMALL_QUEUE_FILE_BYTES, max_hash_slot_num=50, max_index_num=2000
        )
        self.paths = self.engine.paths
        self.topics = Topics(StoreIO(), self.paths)
        self.topics.load()
        self.report: list[str] = []

    def append(self, topic: str, count: int, queues: int = 2) -> list[int]:
        """Append `count` messages to a topic's queues in turn; return their physical offsets."""
        config = self.topics.get(topic)
        if config is None:
            self.topics.add(topic, queues)
            self.topics.note(topic)
            self.topics.commit()
        return self.engine.append(topic, [b"x"] * count, queues=queues, keys=["k"] * count).tolist()

    def delete(self, topic: str, queues: int = 2) -> None:
        """Delete a topic as the writer does."""
        table = self.engine.table
        numbers = [table.entry(topic, queue_id) for queue_id in range(queues)]
        self.topics.delete(topic, self.engine.written, [table.next_offset(number) for number in numbers])
        for number in numbers:
            table.delete_queue(number, self.engine.written)

    def recover(self, *, clean: bool = True) -> dict[tuple[str, int], RecoveredQueue]:
        """Recover the store; return its queues."""
        words = Words(bytearray(words_of.FILE_SIZE))
        options = self.engine.options
        self.report.clear()
        Recovery(StoreIO(), self.paths, options, words, self.report.append, clean=clean).run()
        assert words[words_of.DISPATCHED] == self.engine.written
        table = QueueTable(StoreIO(), self.paths.queues)
        files = ConsumeQueueFiles(StoreIO(), self.paths.consume_queue, SMALL_QUEUE_FILE_BYTES)
        found = {}
        for number, topic, queue_id in table.live():
            low, high = table.min_offset(number), table.max_offset(number)
            data = files.read_units(topic, queue_id, low, high - low) if high > low else b""
            physical = [int(unit["physical_offset"]) for unit in as_units(data)]
            units = list(zip(range(low, high), physical, strict=True))
            found[topic, queue_id] = RecoveredQueue(low, high, table.next_offset(number), units)
        files.close()
        table.close()
        return found

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in self.paths.consume_queue.rglob("*") if path.is_file())
        return {str(path.relative_to(self.paths.consume_queue)): path.read_bytes() for path in found}

    def forget_derived(self) -> None:
        """Remove all files except the log and `config/`."""
        for folder in (self.paths.consume_queue, self.paths.index, self.paths.own):
            shutil.rmtree(folder, ignore_errors=True)


def recovered_queue(first: int, units: list[int]) -> RecoveredQueue:
    """Return a queue that starts at `first` and has these records."""
    stop = first + len(units)
    return RecoveredQueue(first, stop, stop, list(zip(range(first, stop), units, strict=True)))


# Store with one record of known age per segment, and retention over it


AGED_SEGMENT = 4096
HOUR_MS = 3_600_000
# More than half a segment: the next record opens a new one.
BODY = b"x" * 2500
ALL_HOURS = ";".join(map(str, range(24)))
# Hours: above and below `file_reserved_time`.
OLD, YOUNG = 73.0, 1.0


class DiskIO(StoreIO):
    """Reports `disk`, (used, free) in bytes, as the disk's usage and records unlinked files."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = (10, 90)
        self.unlinked: list[Path] = []

    def disk_usage(self, folder: Path) -> tuple[int, int]:
        return self.disk

    def unlink(self, path: Path) -> None:
        if path.exists():
            self.unlinked.append(path)
        super().unlink(path)


class AgedStore:
    """A store with one record per segment, dispatched and durable."""

    def __init__(self, root: Path, io: StoreIO | None = None, **options: Any) -> None:
        self.io = io or DiskIO()
        settings = {
            "mapped_file_size_commit_log": AGED_SEGMENT,
            "mapped_file_size_consume_queue": 128,
            "max_message_size": 3000,
            "max_hash_slot_num": 20,
            "max_index_num": 8,
            "delete_when": ALL_HOURS,
            "clean_resource_interval": 1000,
            "delete_commit_log_files_interval": 10,
            "delete_consume_queue_files_interval": 10,
        }
        self.engine = Engine(root, io=self.io, segments_max=1 << 20, **(settings | options))
        self.paths, self.words, self.table = self.engine.paths, self.engine.words, self.engine.table
        self.options = self.engine.options
        self.now_ns = 1
        self.now_ms = NOW_MS
        self.reported: list[tuple[str, dict[str, Any]]] = []

    def fill(self, count: int, age_hours: float, topic: str = "T", queue_id: int = 0) -> list[int]:
        """Append records of an age to one queue, each with its own key; return their offsets."""
        time_ms = self.now_ms - int(age_hours * HOUR_MS)
        places = []
        for _ in range(count):
            key = f"k{self.words[words_of.APPENDED_MESSAGES]}-{self.engine.written}"
            found = self.engine.append(topic, [BODY], time_ms, keys=[key], queues=queue_id + 1, fixed_queue=queue_id)
            places.append(int(found[0]))
        self.dispatch()
        self.mark_durable()
        return places

    def dispatch(self) -> None:
        """Dispatch to the end of the log."""
        options, io, words = self.options, self.io, self.words
        queues = ConsumeQueueFiles(io, self.paths.consume_queue, options.consume_queue_file_bytes, write=True)
        index = IndexFiles(io, self.paths.index, options.max_hash_slot_num, options.max_index_num)
        dispatch = Dispatch(io, options, self.table, self.engine.segments, queues, index)
        while (position := words[words_of.DISPATCHED]) < self.engine.written:
            words[words_of.DISPATCHED] = dispatch.step(position, self.engine.written).position
        commit = dispatch.index_commit
        for slot in (0, 1):
            words[words_of.COMMIT_INDEX_MS[slot]] = commit.file_ms
            words[words_of.COMMIT_INDEX_ITEMS[slot]] = commit.count
        words[words_of.INDEX_FILE_MS] = commit.file_ms
        dispatch.close()
        self.engine.segments.close()

    def mark_durable(self) -> None:
        """Mark the whole log durable, without unacknowledged messages."""
        end = self.engine.written
        for word in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED, words_of.FLUSHER_SYNCED):
            self.words[word] = end
        self.words[words_of.RECEIVED_FROM] = end

    def report(self, event: str, **figures: Any) -> None:
        self.reported.append((event, figures))

    def retention(self, io: StoreIO | None = None) -> Retention:
        """Return the retention of a newly started keeper."""
        return Retention(
            io or self.io,
            self.paths,
            self.options,
            self.words,
            self.table,
            io or self.io,
            self.report,
            self.now_ns,
        )

    def run(self, retention: Retention, ms: int) -> None:
        """Advance the clock by `ms`, with each step of retention at its due time."""
        end_ns = self.now_ns + ms * 1_000_000
        start_ns, start_ms = self.now_ns, self.now_ms
        while True:
            while retention.step(self.now_ns, self.now_ms):
                pass
            due_ns = max(self.now_ns + 1, retention.due_ns)
            if due_ns > end_ns:
                break
            self.now_ns = due_ns
            self.now_ms = start_ms + (due_ns - start_ns) // 1_000_000
        self.now_ns, self.now_ms = end_ns, start_ms + ms

    def run_passes(self, passes: int = 1) -> None:
        """Run a new keeper for some passes, then correct the offsets of consumer groups."""
        retention = self.retention()
        self.run(retention, passes * self.options.clean_resource_interval + self.options.clean_resource_interval // 2)
        retention.close()
        correct_groups(self.io, self.paths, self.table, self.words, self.now_ms, self.report)

    def segments(self) -> list[int]:
        """Return the numbers of the segments in the log, ascending."""
        names = sorted(path.name for path in self.paths.commit_log.iterdir())
        return [int(start) // AGED_SEGMENT for name in names if (start := segment_start(name)) is not None]

    def queue_files(self, topic: str = "T", queue_id: int = 0) -> list[int]:
        """Return the numbers of a queue's files, ascending."""
        names = sorted(path.name for path in self.paths.queue(topic, queue_id).iterdir())
        return [int(name) // self.options.consume_queue_file_bytes for name in names]

    def index_files(self) -> int:
        return len(index_file_names(self.io, self.paths.index))

    def minimum(self) -> int:
        """Return the number of the segment at the log's minimum."""
        return self.words[words_of.MIN_PHYSICAL_OFFSET] // AGED_SEGMENT

    def min_offset(self, topic: str = "T", queue_id: int = 0) -> int:
        return self.table.min_offset(self.table.find(topic, queue_id))

    def open_queries(self) -> StoreQueries:
        """Open a reader like the query role's; the caller closes it."""
        view = WordsView(self.words, self.table, sync_flush=False)
        return StoreQueries(self.io, self.paths, self.options, view)

    def held_by(self) -> str:
        return words_of.HELD_NAMES[self.words[words_of.RETENTION_HELD_BY]]


def expired_store(root: Path, **options: object) -> AgedStore:
    """Build the store of RocketMQ's test: 55 segments, of which the first 15 have expired."""
    store = AgedStore(root, **options)
    store.fill(15, OLD)
    store.fill(40, YOUNG)
    return store


def distant_hour() -> str:
    """Return an hour of the day that is far from the store's clock."""
    return str((local_hour(NOW_MS) + 6) % 24)


def check_minima(store: AgedStore) -> None:
    """Check that exactly the units from each queue's minimum on have a record in the log."""
    minimum = store.words[words_of.MIN_PHYSICAL_OFFSET]
    assert min(store.segments()) * AGED_SEGMENT == minimum
    files = ConsumeQueueFiles(store.io, store.paths.consume_queue, store.options.consume_queue_file_bytes)
    for number, topic, queue_id in store.table.live():
        low, high = store.table.min_offset(number), store.table.max_offset(number)
        units = as_units(files.read_units(topic, queue_id, low, high - low)) if high > low else []
        assert all(int(unit["physical_offset"]) >= minimum for unit in units)
        if low > 0:
            before = (
                as_units(files.read_units(topic, queue_id, low - 1, 1)) if _file_exists(store, topic, low - 1) else []
            )
            assert all(int(unit["physical_offset"]) < minimum for unit in before)
    files.close()


def _file_exists(store: AgedStore, topic: str, offset: int) -> bool:
    return offset * 20 // store.options.consume_queue_file_bytes in store.queue_files(topic)
