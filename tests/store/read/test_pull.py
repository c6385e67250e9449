"""Pulls of a single new record: equal to an ordinary pull, or declined."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc import StoreReader
from mqproc.errors import CorruptStoreError
from mqproc.layout import consume_queue, queue_table
from mqproc.layout import control as words_of
from mqproc.store.consumequeue.bounds import end_fillers
from mqproc.store.read import pull as pull_module
from mqproc.store.read.pull import Pulled, SingleRecordPulls
from mqproc.store.read.unit_walk import PullCounters, compile_filter
from mqproc.types import PullStatus
from tests.support.store_builders import LiveStore, StoppedStore

# Aa and BB have the same hash.
TAGS = ("", "x", "Aa", "BB")
TAG_FILTERS: tuple[tuple[str, ...], ...] = ((), ("x",), ("Aa",), ("BB", "x"), ("none",))
TOPICS = ("T", "Rolled")
FIRST_ROLLED = 98
"""Two units before the end of a ConsumeQueue file."""
BYTES_MAX = 4096
FILLER = bytes(8) + consume_queue.FILLER_SIZE.to_bytes(4, "big") + bytes(8)

Change = Callable[["SingleRecordStore"], None]


class SingleRecordStore(LiveStore):
    """A store with topics of one queue each, read by both kinds of pull."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.table = self.engine.table
        self.table.create_queue(TOPICS[0], 0)
        self.put(TOPICS[1], [0] * FIRST_ROLLED, "")
        self.words = np.frombuffer(self.engine.words.mapping, np.int64)
        self.counts = PullCounters(self.words, self.table.cells)
        self.single = SingleRecordPulls(self.table, self.reading.files, self.reading.records, self.counts)

    def put(self, topic: str, sizes: Sequence[int], tag: str) -> None:
        self.append(topic, [b"b" * size for size in sizes], queues=1, tags=[tag] * len(sizes))
        self.dispatch()

    def bounds(self, topic: str) -> tuple[int, int]:
        """Return (number, maximum offset) of a topic's queue, even if it is deleted."""
        number = self.table.entry(topic, 0)
        return number, self.table.max_offset(number)

    def last_unit(self, topic: str, unit: bytes) -> None:
        """Replace the last unit of a queue."""
        maximum = self.bounds(topic)[1]
        if maximum:
            self.files.write_run(topic, 0, maximum - 1, np.frombuffer(bytearray(unit), np.uint8))

    def counted(self) -> tuple[int, ...]:
        words = (words_of.PULLED_MESSAGES, words_of.PULLED_BYTES, words_of.PULLS, words_of.QUERY_REQUESTS)
        delivered = (self.table.cells[queue_table.entry_word(n, queue_table.DELIVERED)] for n in range(2))
        return (*(int(self.words[word]) for word in words), *map(int, delivered))

    def single_pull(self, topic: str, offset: int, tags: tuple[str, ...] = ()) -> Pulled | None:
        return self.single.pull(topic, 0, offset, compile_filter(topic, tags))

    def pull(self, topic: str, offset: int, tags: tuple[str, ...] = ()) -> Pulled:
        return self.reading.pull(topic, 0, offset, 1024, 8 << 20, tags, counts=self.counts)

    def compare(self, topic: str, offset: int, tags: tuple[str, ...]) -> bool:
        """Compare both kinds of pull; return whether the single-record pull answered."""
        before = np.array(self.counted())
        single = self.single_pull(topic, offset, tags)
        between = np.array(self.counted())
        pulled = self.pull(topic, offset, tags)
        after = np.array(self.counted())
        is_single = pulled.status is PullStatus.FOUND and offset + 1 == pulled.max_offset
        if single is None:
            assert before.tolist() == between.tolist()
            assert not is_single or len(pulled.records) > BYTES_MAX
            return False
        assert is_single
        assert (between - before).tolist() == (after - between).tolist()
        assert single.records.tobytes() == pulled.records.tobytes()
        fields = [name for name in Pulled.__struct_fields__ if name != "records"]
        assert [getattr(single, name) for name in fields] == [getattr(pulled, name) for name in fields]
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SingleRecordStore]:
    new = SingleRecordStore(tmp_path / "store")
    yield new
    new.close()


def damaged(topic: str, share: float) -> Change:
    """Change a byte of the last record of a queue."""

    def change(store: SingleRecordStore) -> None:
        end = store.table.last_physical_end(store.bounds(topic)[0])
        log = store.engine.log_bytes(0, end)
        at = int(len(log) - 1 - share * min(len(log) - 1, 300))
        if end:
            store.overwrite(at, bytes([log[at] ^ 0x10]))

    return change


def hashed(topic: str, code: int) -> Change:
    """Give the last unit of a queue another tags code than its record."""

    def change(store: SingleRecordStore) -> None:
        maximum = store.bounds(topic)[1]
        if store.files.starts(topic, 0) and maximum:
            unit = store.files.raw_units(topic, 0, maximum - 1, 1)
            store.last_unit(topic, unit[: consume_queue.TAGS_CODE] + code.to_bytes(8, "big", signed=True))

    return change


def unit_in_place(topic: str, unit: bytes) -> Change:
    return lambda store: store.last_unit(topic, unit)


def puts(topic: str, sizes: list[int], tag: str) -> Change:
    return lambda store: store.put(topic, sizes, tag)


def deletes(topic: str) -> Change:
    def change(store: SingleRecordStore) -> None:
        store.table.delete_queue(store.bounds(topic)[0], store.engine.written)

    return change


def expires(topic: str) -> Change:
    """Raise the minimum of a queue to its end, as retention does."""
    return lambda store: store.table.raise_min_offset(*store.bounds(topic))


def log_expires(store: SingleRecordStore) -> None:
    """Raise the minimum of the log to its end."""
    store.words[words_of.MIN_PHYSICAL_OFFSET] = store.engine.written


def loses_units(topic: str, *, whole: bool) -> Change:
    """Remove or truncate the files of a queue."""

    def change(store: SingleRecordStore) -> None:
        for start in store.files.starts(topic, 0):
            path = store.files.path(topic, 0, start)
            if whole:
                path.unlink()
            else:
                os.truncate(path, 0)
        store.files.forget(topic, 0)
        store.reading.files.forget(topic, 0)

    return change


UNITS = [FILLER, end_fillers(1, 0, 65536).tobytes(), consume_queue.unit_of(-1, 200, 0)]
UNITS += [consume_queue.unit_of(1 << 40, 200, 0), consume_queue.unit_of(0, 1 << 30, 0), bytes(20)]


def changes() -> st.SearchStrategy[list[Change]]:
    topics = st.sampled_from(TOPICS)
    sizes = st.lists(st.sampled_from([0, 1, 90, BYTES_MAX, 30_000]), min_size=1, max_size=2)
    put = st.builds(puts, topics, sizes, st.sampled_from(TAGS))
    rare = st.one_of(
        st.builds(damaged, topics, st.floats(0, 1)),
        st.builds(unit_in_place, topics, st.sampled_from(UNITS)),
        st.builds(deletes, topics),
        st.builds(expires, topics),
        st.just(log_expires),
        st.builds(hashed, topics, st.sampled_from([0, 1, -(1 << 40), -1])),
        st.builds(loses_units, topics, whole=st.booleans()),
    )
    return st.lists(st.one_of(put, put, put, rare), min_size=1, max_size=12)


@settings(max_examples=150)
@given(changes())
def test_single_record_pull_equals_pull(steps: list[Change]) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(pull_module, "RECORD_BYTES_MAX", BYTES_MAX):
        store = SingleRecordStore(Path(folder) / "store")
        for change in steps:
            change(store)
            for topic in TOPICS:
                maximum = store.bounds(topic)[1]
                for offset in range(maximum - 2, maximum + 2):
                    for tags in TAG_FILTERS:
                        store.compare(topic, offset, tags)
        store.close()


def test_single_record_pull_serves_only_the_last_record(store: SingleRecordStore) -> None:
    for topic in TOPICS:
        for number in range(5):
            store.put(topic, [number], TAGS[number % 4])
            maximum = store.bounds(topic)[1]
            taken = [store.compare(topic, offset, ()) for offset in range(maximum - 2, maximum + 2)]
            assert taken == [False, True, False, False]
    assert store.compare("T", 4, ("none",)) is False
    assert store.single_pull("Unknown", 0) is None
    store.put("T", [1, 1], "x")
    assert store.single_pull("T", 5) is None, "two records"
    store.put("T", [pull_module.RECORD_BYTES_MAX // 3], "x")
    assert store.compare("T", 7, ()), "any small record"
    with mock.patch.object(pull_module, "RECORD_BYTES_MAX", BYTES_MAX):
        assert store.single_pull("T", 7) is None


@pytest.mark.parametrize("code", [0, -1])
def test_single_record_pull_compares_hash_before_tag(store: SingleRecordStore, code: int) -> None:
    store.put("T", [1], "x")
    assert store.compare("T", 0, ("x",))
    hashed("T", code)(store)
    assert not store.compare("T", 0, ("x",))
    assert store.compare("T", 0, ())


def test_single_record_pull_result_is_not_overwritten(store: SingleRecordStore) -> None:
    store.put("T", [100], "x")
    first = store.single_pull("T", 0)
    assert first is not None
    records = first.records.tobytes()
    store.put("T", [100], "y")
    assert store.single_pull("T", 1) is not None
    assert first.records.tobytes() == records


def test_single_record_pull_ignores_deleted_queue(store: SingleRecordStore) -> None:
    store.put("T", [1], "x")
    assert store.compare("T", 0, ())
    deletes("T")(store)
    assert not store.compare("T", 0, ())
    store.put("T", [2], "x")
    assert store.compare("T", 1, ())
    assert not store.compare("T", 0, ())


def test_single_record_pull_short_segment_raises(store: SingleRecordStore) -> None:
    store.put("T", [1], "x")
    path = store.engine.segments.path(0)
    data = path.read_bytes()
    path.write_bytes(data[:1000])
    for pull in (store.single_pull, store.pull):
        with pytest.raises(CorruptStoreError):
            pull("T", 0)
    assert store.counted() == (0, 0, 0, 0, 0, 0)
    path.unlink()
    assert store.single_pull("T", 0) is None, "the segment is deleted"
    path.write_bytes(data)
    assert store.compare("T", 0, ())


# Zeros in a record


@pytest.mark.parametrize("lost", [17, 24], ids=["the CRC", "the CRC and more"])
def test_pull_record_with_zeroed_property_crc_is_corrupt(lost: int, tmp_path: Path) -> None:
    """Zeros replace the CRC that covers the properties."""
    store = StoppedStore(tmp_path / "store")
    at, following = store.offsets[20:22]
    with StoreReader(store.root) as reader:
        message = reader.look(at)
    assert message is not None
    store.overwrite(following - lost, bytes(lost))
    with StoreReader(store.root) as reader:
        with pytest.raises(CorruptStoreError, match="bad property CRC"):
            reader.look(at)
        pulled = reader.pull(message.topic, message.queue_id, message.queue_offset, 1)
        assert pulled.status is PullStatus.CORRUPT
