"""Builder of a store with one record of known age per segment, and retention over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.paths import segment_start
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles, index_file_names
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.store.retention.delete import Retention
from mqproc.store.retention.plan import local_hour
from mqproc.store.retention.survey import correct_groups
from tests.support.store_builders import Engine

SEGMENT = 4096
HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000
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
            "mapped_file_size_commit_log": SEGMENT,
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
        return [int(start) // SEGMENT for name in names if (start := segment_start(name)) is not None]

    def queue_files(self, topic: str = "T", queue_id: int = 0) -> list[int]:
        """Return the numbers of a queue's files, ascending."""
        names = sorted(path.name for path in self.paths.queue(topic, queue_id).iterdir())
        return [int(name) // self.options.consume_queue_file_bytes for name in names]

    def index_files(self) -> int:
        return len(index_file_names(self.io, self.paths.index))

    def minimum(self) -> int:
        """Return the number of the segment at the log's minimum."""
        return self.words[words_of.MIN_PHYSICAL_OFFSET] // SEGMENT

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
    assert min(store.segments()) * SEGMENT == minimum
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
