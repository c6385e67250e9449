"""A small store of known ages, a record a segment, and retention over it step by step, without processes."""

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
from tests.store.engine import Engine

SEGMENT = 4096
HOUR_MS = 3_600_000
# Noon of a day, wherever the tests run.
NOW_MS = 1_800_000_000_000
# More than half a segment: the next record opens a new one.
BODY = b"x" * 2500
ALL_HOURS = ";".join(map(str, range(24)))
# Hours: more and less than `file_reserved_time`.
OLD, YOUNG = 73.0, 1.0


class DiskIO(StoreIO):
    """Says of the disk what a test tells it: `disk` is (used, free) in bytes."""

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


class Aged:
    """A store whose segments have one record each. All is dispatched and durable unless a test says otherwise."""

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
        self.told: list[tuple[str, dict[str, Any]]] = []

    def fill(self, count: int, age_hours: float, topic: str = "T", queue_id: int = 0) -> list[int]:
        """Store records of one queue, `age_hours` old, each with a key of its own; their places in the log."""
        time_ms = self.now_ms - int(age_hours * HOUR_MS)
        places = []
        for _ in range(count):
            key = f"k{self.words[words_of.APPENDED_MESSAGES]}-{self.engine.written}"
            found = self.engine.append(topic, [BODY], time_ms, keys=[key], queues=queue_id + 1, fixed_queue=queue_id)
            places.append(int(found[0]))
        self.dispatch()
        self.settle()
        return places

    def dispatch(self) -> None:
        """Bring queues and index to the end of the log."""
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

    def settle(self) -> None:
        """All of the log is durable by its marks, and nothing in it received and not acknowledged."""
        end = self.engine.written
        for word in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED, words_of.FLUSHER_SYNCED):
            self.words[word] = end
        self.words[words_of.RECEIVED_FROM] = end

    # Retention

    def tell(self, event: str, **figures: Any) -> None:
        self.told.append((event, figures))

    def retention(self, io: StoreIO | None = None) -> Retention:
        """The engine of a keeper that has just begun."""
        return Retention(
            io or self.io,
            self.paths,
            self.options,
            self.words,
            self.table,
            io or self.io,
            self.tell,
            self.now_ns,
        )

    def run(self, retention: Retention, ms: int) -> None:
        """Let time pass; whatever is due is done when it is due."""
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

    def pass_by(self, looks: int = 1) -> None:
        """A keeper begins, looks so often at what is due, and ends; then progress of groups follows."""
        retention = self.retention()
        self.run(retention, looks * self.options.clean_resource_interval + self.options.clean_resource_interval // 2)
        retention.close()
        correct_groups(self.io, self.paths, self.table, self.words, self.now_ms, self.tell)

    # What there is

    def segments(self) -> list[int]:
        """Numbers of the segments, the one of position 0 being 0."""
        names = sorted(path.name for path in self.paths.commit_log.iterdir())
        return [int(start) // SEGMENT for name in names if (start := segment_start(name)) is not None]

    def queue_files(self, topic: str = "T", queue_id: int = 0) -> list[int]:
        """Numbers of a queue's files, the one of offset 0 being 0."""
        names = sorted(path.name for path in self.paths.queue(topic, queue_id).iterdir())
        return [int(name) // self.options.consume_queue_file_bytes for name in names]

    def index_files(self) -> int:
        return len(index_file_names(self.io, self.paths.index))

    def minimum(self) -> int:
        """The log's minimum in segments."""
        return self.words[words_of.MIN_PHYSICAL_OFFSET] // SEGMENT

    def min_offset(self, topic: str = "T", queue_id: int = 0) -> int:
        return self.table.min_offset(self.table.find(topic, queue_id))

    def reading(self) -> StoreQueries:
        """Reads as the query role does; the caller closes it."""
        view = WordsView(self.words, self.table, sync_flush=False)
        return StoreQueries(self.io, self.paths, self.options, view)

    def held_by(self) -> str:
        return words_of.HELD_NAMES[self.words[words_of.RETENTION_HELD_BY]]


def aged(root: Path, **options: object) -> Aged:
    """RocketMQ's own scenario: 55 messages, a segment each; the first 15 have expired."""
    store = Aged(root, **options)
    store.fill(15, OLD)
    store.fill(40, YOUNG)
    return store


def another_hour() -> str:
    """An hour that the store's clock is far from."""
    return str((local_hour(NOW_MS) + 6) % 24)


def check_minima(store: Aged) -> None:
    """Every unit that can be seen has its record; what lies below the minima is gone, but for last files."""
    minimum = store.words[words_of.MIN_PHYSICAL_OFFSET]
    assert min(store.segments()) * SEGMENT == minimum
    files = ConsumeQueueFiles(store.io, store.paths.consume_queue, store.options.consume_queue_file_bytes)
    for number, topic, queue_id in store.table.live():
        low, high = store.table.min_offset(number), store.table.max_offset(number)
        units = as_units(files.read_units(topic, queue_id, low, high - low)) if high > low else []
        assert all(int(unit["physical_offset"]) >= minimum for unit in units)
        if low > 0:
            before = as_units(files.read_units(topic, queue_id, low - 1, 1)) if _there(store, topic, low - 1) else []
            assert all(int(unit["physical_offset"]) < minimum for unit in before)
    files.close()


def _there(store: Aged, topic: str, offset: int) -> bool:
    return offset * 20 // store.options.consume_queue_file_bytes in store.queue_files(topic)
