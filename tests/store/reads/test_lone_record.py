"""The short way for the one record that a queue has got: it gives what a pull gives, or leaves it to that."""

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

from mqproc.errors import CorruptStoreError
from mqproc.layout import consume_queue, queue_table
from mqproc.layout import control as words_of
from mqproc.store.consumequeue.fillers import end_fillers
from mqproc.store.read import pull as lone_record
from mqproc.store.read.filter_program import compile_filter
from mqproc.store.read.pull import Pulled, SingleRecordPulls
from mqproc.store.read.unit_walk import PullCounters
from mqproc.types import PullStatus
from tests.store.live_store import LiveStore

# Two tags with the same hash among them.
TAGS = ("", "x", "Aa", "BB")
ASKED: tuple[tuple[str, ...], ...] = ((), ("x",), ("Aa",), ("BB", "x"), ("none",))
TOPICS = ("T", "Rolled")
FIRST_ROLLED = 98
"""Two units before the end of a ConsumeQueue file."""
BYTES_MAX = 4096
FILLER = bytes(8) + consume_queue.FILLER_SIZE.to_bytes(4, "big") + bytes(8)

Change = Callable[["Lone"], None]


class Lone(LiveStore):
    """A store with topics of one queue each, and both ways to read it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.table = self.engine.table
        self.table.create_queue(TOPICS[0], 0)
        self.put(TOPICS[1], [0] * FIRST_ROLLED, "")
        self.words = np.frombuffer(self.engine.words.mapping, np.int64)
        self.counts = PullCounters(self.words, self.table.cells)
        self.lone = SingleRecordPulls(self.table, self.reading.files, self.reading.records, self.counts)

    def put(self, topic: str, sizes: Sequence[int], tag: str) -> None:
        self.append(topic, [b"b" * size for size in sizes], queues=1, tags=[tag] * len(sizes))
        self.dispatch()

    def bounds(self, topic: str) -> tuple[int, int]:
        """(number, maximum offset) of a topic's queue, as if it were there."""
        number = self.table.entry(topic, 0)
        return number, self.table.max_offset(number)

    def last_unit(self, topic: str, unit: bytes) -> None:
        """Put another unit in the place of a queue's last one."""
        maximum = self.bounds(topic)[1]
        if maximum:
            self.files.write_run(topic, 0, maximum - 1, np.frombuffer(bytearray(unit), np.uint8))

    def counted(self) -> tuple[int, ...]:
        words = (words_of.PULLED_MESSAGES, words_of.PULLED_BYTES, words_of.PULLS, words_of.QUERY_REQUESTS)
        delivered = (self.table.cells[queue_table.entry_word(n, queue_table.DELIVERED)] for n in range(2))
        return (*(int(self.words[word]) for word in words), *map(int, delivered))

    def short(self, topic: str, offset: int, tags: tuple[str, ...] = ()) -> Pulled | None:
        return self.lone.pull(topic, 0, offset, compile_filter(topic, tags))

    def long(self, topic: str, offset: int, tags: tuple[str, ...] = ()) -> Pulled:
        return self.reading.pull(topic, 0, offset, 1024, 8 << 20, tags, counts=self.counts)

    def compare(self, topic: str, offset: int, tags: tuple[str, ...]) -> bool:
        """Ask for the same in both ways; whether the short one had an answer."""
        before = np.array(self.counted())
        short = self.short(topic, offset, tags)
        between = np.array(self.counted())
        pulled = self.long(topic, offset, tags)
        after = np.array(self.counted())
        is_lone = pulled.status is PullStatus.FOUND and offset + 1 == pulled.max_offset
        if short is None:
            assert before.tolist() == between.tolist()
            assert not is_lone or len(pulled.records) > BYTES_MAX
            return False
        assert is_lone
        assert (between - before).tolist() == (after - between).tolist()
        assert short.records.tobytes() == pulled.records.tobytes()
        fields = [name for name in Pulled.__struct_fields__ if name != "records"]
        assert [getattr(short, name) for name in fields] == [getattr(pulled, name) for name in fields]
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Lone]:
    made = Lone(tmp_path / "store")
    yield made
    made.close()


def damaged(topic: str, share: float) -> Change:
    """A byte of the last record of a queue is another."""

    def change(store: Lone) -> None:
        end = store.table.last_physical_end(store.bounds(topic)[0])
        log = store.engine.log_bytes(0, end)
        at = int(len(log) - 1 - share * min(len(log) - 1, 300))
        if end:
            store.overwrite(at, bytes([log[at] ^ 0x10]))

    return change


def hashed(topic: str, code: int) -> Change:
    """The last unit of a queue has another hash than its record's tag."""

    def change(store: Lone) -> None:
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
    def change(store: Lone) -> None:
        store.table.delete_queue(store.bounds(topic)[0], store.engine.written)

    return change


def expires(topic: str) -> Change:
    """Retention: the queue's minimum comes to its end."""
    return lambda store: store.table.raise_min_offset(*store.bounds(topic))


def log_expires(store: Lone) -> None:
    """The log has nothing any more; the minima of queues follow."""
    store.words[words_of.MIN_PHYSICAL_OFFSET] = store.engine.written


def loses_units(topic: str, *, whole: bool) -> Change:
    """The queue's files are gone, or are empty."""

    def change(store: Lone) -> None:
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
def test_both_ways_give_the_same_and_count_the_same(made: list[Change]) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(lone_record, "RECORD_BYTES_MAX", BYTES_MAX):
        store = Lone(Path(folder) / "store")
        for change in made:
            change(store)
            for topic in TOPICS:
                maximum = store.bounds(topic)[1]
                for offset in range(maximum - 2, maximum + 2):
                    for tags in ASKED:
                        store.compare(topic, offset, tags)
        store.close()


def test_the_short_way_is_taken_by_the_last_record_alone(store: Lone) -> None:
    for topic in TOPICS:
        for number in range(5):
            store.put(topic, [number], TAGS[number % 4])
            maximum = store.bounds(topic)[1]
            taken = [store.compare(topic, offset, ()) for offset in range(maximum - 2, maximum + 2)]
            assert taken == [False, True, False, False]
    assert store.compare("T", 4, ("none",)) is False
    assert store.short("Unknown", 0) is None
    store.put("T", [1, 1], "x")
    assert store.short("T", 5) is None, "there are two"
    store.put("T", [lone_record.RECORD_BYTES_MAX // 3], "x")
    assert store.compare("T", 7, ()), "any small one"
    with mock.patch.object(lone_record, "RECORD_BYTES_MAX", BYTES_MAX):
        assert store.short("T", 7) is None


@pytest.mark.parametrize("code", [0, -1])
def test_the_hash_counts_before_the_tag(store: Lone, code: int) -> None:
    store.put("T", [1], "x")
    assert store.compare("T", 0, ("x",))
    hashed("T", code)(store)
    assert not store.compare("T", 0, ("x",))
    assert store.compare("T", 0, ())


def test_what_was_given_stays_as_it_is(store: Lone) -> None:
    store.put("T", [100], "x")
    first = store.short("T", 0)
    assert first is not None
    records = first.records.tobytes()
    store.put("T", [100], "y")
    assert store.short("T", 1) is not None
    assert first.records.tobytes() == records


def test_a_queue_that_is_made_again_gives_nothing_of_the_one_before(store: Lone) -> None:
    store.put("T", [1], "x")
    assert store.compare("T", 0, ())
    deletes("T")(store)
    assert not store.compare("T", 0, ())
    store.put("T", [2], "x")
    assert store.compare("T", 1, ())
    assert not store.compare("T", 0, ())


def test_a_segment_that_is_short_is_an_error_in_both_ways(store: Lone) -> None:
    store.put("T", [1], "x")
    path = store.engine.segments.path(0)
    data = path.read_bytes()
    path.write_bytes(data[:1000])
    for way in (store.short, store.long):
        with pytest.raises(CorruptStoreError):
            way("T", 0)
    assert store.counted() == (0, 0, 0, 0, 0, 0)
    path.unlink()
    assert store.short("T", 0) is None, "retention has just taken it"
    path.write_bytes(data)
    assert store.compare("T", 0, ())
