"""Deduplication by unique id: a repeated message returns the first offsets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.errors import BadMessageError, MessageTooLargeError
from mqproc.kernels import dedupe as kernel
from mqproc.kernels.jit.compile import plain
from mqproc.layout import control as words_of
from mqproc.layout.properties import encode
from mqproc.store.commitlog.append_templates import AppendPlan
from mqproc.store.dedupe import DedupeWindow
from mqproc.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from tests.support.store_builders import FIRST_MS, LiveStore

PREFIX = "7F00000100AA11223344BBCC0000"
CAPACITY = 100


class Sender:
    """A writer with a dedupe window, without a process."""

    def __init__(self, root: Path, capacity: int = CAPACITY) -> None:
        self.store = LiveStore(root)
        self.capacity = capacity
        self.published = 0
        self.delayed_topic = TIMER_TOPIC
        self.restart()

    def restart(self) -> None:
        engine = self.store.engine
        self.window = DedupeWindow(engine.words, engine.table, engine.segments, engine.appender, self.capacity)

    def publish(self) -> None:
        self.store.engine.appender.write_out()
        self.store.engine.appender.publish()
        self.published += 1

    def send(self, plan: AppendPlan, *, publish: bool = True) -> list[tuple[int, int, int]]:
        """Send a frame; return (physical offset, queue offset, queue id) of each message."""
        answer = self.window.add(plan, FIRST_MS, self.publish)
        if publish:
            self.publish()
        count = plan.count
        offsets = answer[: 16 * count].view(np.int64)
        queues = answer[16 * count :].view(np.int32)
        return list(zip(offsets[:count].tolist(), offsets[count:].tolist(), queues.tolist(), strict=True))

    def counted(self, counter: int, count: int = 1, topic: str = "T", **changes: Any) -> AppendPlan:
        """Return a frame whose unique ids consist of a prefix and a counter."""
        ids = {
            "parts": (b"UNIQ_KEY\x01", b"\x02", b"", b""),
            "prefix_size": len(PREFIX),
            "unique_prefix": PREFIX.encode(),
            "unique_counter": counter,
        }
        bodies = [b"body %d" % (counter + index) for index in range(count)]
        return self.store.engine.plan(topic, bodies, queues=4, **(ids | changes))

    def named(self, *names: str, topic: str = "T", **changes: Any) -> AppendPlan:
        """Return a frame whose unique ids are in property strings."""
        plan = self.store.engine.plan(topic, [name.encode() for name in names], queues=4, **changes)
        texts = [encode({"UNIQ_KEY": name, "color": "red"} if name else {"color": "red"}).encode() for name in names]
        lengths = np.array([len(text) for text in texts], "<u2").view(np.uint8)
        at = len(plan.payload)
        columns = list(plan.columns)
        columns[6:8] = at, at + len(lengths)
        plan.payload = np.concatenate([plan.payload, lengths, np.frombuffer(b"".join(texts), np.uint8)])
        plan.columns = tuple(columns)
        return plan

    def delayed(self, name: str, real_topic: str) -> AppendPlan:
        """Return a delayed or half message of a topic."""
        plan = self.named(name, topic=self.delayed_topic)
        text = encode({"UNIQ_KEY": name, "REAL_TOPIC": real_topic}).encode()
        at = plan.columns[6]
        size = np.array([len(text)], "<u2").view(np.uint8)
        plan.payload = np.concatenate([plan.payload[:at], size, np.frombuffer(text, np.uint8)])
        plan.template.real_topic = real_topic.encode()
        plan.template.real_queues = self.store.engine.plan(real_topic, [b""], queues=4).template.queue_numbers
        return plan

    def delete(self, topic: str) -> None:
        table, written = self.store.engine.table, self.store.engine.words[words_of.WRITTEN]
        for queue_id in range(4):
            table.delete_queue(table.find(topic, queue_id), written)

    def bodies(self, topic: str = "T") -> list[bytes]:
        self.store.dispatch()
        found = [message for queue in range(4) for message in self.store.messages(topic, queue)]
        return [message.body for message in sorted(found, key=lambda message: message.physical_offset)]


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    new = Sender(tmp_path / "store")
    yield new
    new.store.close()


def test_dedupe_repeated_frame_returns_first_offsets(sender: Sender) -> None:
    first = sender.send(sender.counted(0xFFFE, 5))
    end = sender.store.engine.appender.end
    assert sender.send(sender.counted(0xFFFE, 5)) == first
    assert sender.store.engine.appender.end == end
    assert sender.window.dropped == 5
    assert sender.bodies() == [b"body %d" % (0xFFFE + index) for index in range(5)]


def test_dedupe_partly_repeated_frame_stores_new_messages(sender: Sender) -> None:
    (b,) = sender.send(sender.named("b"))
    (d,) = sender.send(sender.named("d"))
    found = sender.send(sender.named("a", "b", "c", "d", "", "e", ""))
    assert (found[1], found[3]) == (b, d)
    assert len(set(found)) == 7
    assert sender.bodies() == [b"b", b"d", b"a", b"c", b"", b"e", b""]
    # Frames with counters are split in the same way.
    sender.send(sender.counted(10, 2))
    found = sender.send(sender.counted(8, 6))
    assert sender.bodies()[7:] == [b"body %d" % number for number in (10, 11, 8, 9, 12, 13)]
    assert sender.send(sender.counted(8, 6)) == found


def test_dedupe_same_id_twice_in_frame_is_stored_once(sender: Sender) -> None:
    found = sender.send(sender.named("a", "b", "a", "", "a", ""))
    assert found[0] == found[2] == found[4]
    assert sender.bodies() == [b"a", b"b", b"", b""]


def test_dedupe_id_is_per_topic(sender: Sender) -> None:
    sender.send(sender.named("a"))
    sender.send(sender.named("a", topic="U"))
    assert (sender.bodies("T"), sender.bodies("U")) == ([b"a"], [b"a"])


@pytest.mark.parametrize("topic", [TIMER_TOPIC, SCHEDULE_TOPIC, HALF_TOPIC])
def test_dedupe_id_of_delayed_message_is_per_real_topic(sender: Sender, topic: str) -> None:
    sender.delayed_topic = topic
    first = {real: sender.send(sender.delayed("a", real)) for real in ("T", "U")}
    assert first["T"] != first["U"]
    for _ in range(2):
        assert [sender.send(sender.delayed("a", real)) for real in ("U", "T")] == [first["U"], first["T"]]
        sender.restart()
    assert sender.send(sender.delayed("a", "V")) not in first.values()


def test_dedupe_equal_hash_of_other_real_topic_is_stored(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "hash_ids", lambda texts, ids, block, real, hashes: hashes.fill(5))
    assert sender.send(sender.delayed("a", "T")) != sender.send(sender.delayed("a", "U"))
    assert sender.window.dropped == 0


def test_dedupe_equal_hash_of_other_id_is_stored(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages have the same hash; each hit is compared by id."""
    monkeypatch.setattr(kernel, "hash_ids", lambda texts, ids, block, real, hashes: hashes.fill(5))
    for name in ("a", "b", "c"):
        sender.send(sender.named(name))
    assert sender.bodies() == [b"a", b"b", b"c"]
    assert sender.window.dropped == 0


def test_dedupe_window_keeps_the_newest(sender: Sender) -> None:
    sender.send(sender.counted(0, 30))
    sender.send(sender.counted(30, CAPACITY))
    assert len(sender.window) == CAPACITY
    sender.send(sender.counted(29, 2))
    assert sender.window.dropped == 1
    assert sender.bodies().count(b"body 29") == 2


def test_dedupe_repeat_of_unpublished_frame_is_dropped(sender: Sender) -> None:
    first = sender.send(sender.counted(1, 3), publish=False)
    assert sender.send(sender.counted(1, 3), publish=False) == first
    assert sender.published == 1
    sender.publish()
    assert len(sender.bodies()) == 3


def test_dedupe_rolled_back_messages_are_forgotten(sender: Sender) -> None:
    sender.send(sender.counted(1))
    sender.send(sender.counted(2, 2), publish=False)
    sender.store.engine.appender.roll_back()
    sender.send(sender.counted(1, 3))
    assert sender.bodies() == [b"body 1", b"body 2", b"body 3"]


def test_dedupe_new_writer_reads_window_from_log(sender: Sender) -> None:
    for number in range(0, 60, 3):
        sender.send(sender.counted(number, 3))
    sender.send(sender.named("named", ""))
    sender.restart()
    assert len(sender.window) == 61
    sender.send(sender.counted(0, 60))
    sender.send(sender.named("named"))
    assert sender.window.dropped == 61


def test_dedupe_window_larger_or_smaller_than_segment(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "store", 1000)
    size = sender.store.engine.segments.segment_size
    number = 0
    while sender.store.engine.appender.end < 2 * size + 1000:
        plan = sender.counted(number, 1)
        sender.send(plan)
        number += 1
    sender.restart()
    assert len(sender.window) == min(number, 1000)
    sender.capacity = 10
    sender.restart()
    sender.send(sender.counted(number - 10, 10))
    assert sender.window.dropped == 10
    sender.send(sender.counted(number - 11, 1))
    assert sender.window.dropped == 10
    # Records deleted by retention are not in the window.
    sender.capacity = 1000
    sender.store.engine.segments.path(0).unlink()
    sender.store.engine.words[words_of.MIN_PHYSICAL_OFFSET] = size
    sender.restart()
    assert 0 < len(sender.window) < number
    sender.send(sender.counted(0, 1))
    assert sender.window.dropped == 0
    sender.store.close()


def test_dedupe_messages_of_deleted_topic_are_forgotten(sender: Sender) -> None:
    sender.send(sender.named("a"))
    sender.delete("T")
    sender.send(sender.named("a"))
    assert sender.window.dropped == 0


def test_dedupe_delayed_messages_of_deleted_topic_are_forgotten(sender: Sender) -> None:
    """After the topic is recreated, a repeated message is stored."""
    (first,), (other,) = (sender.send(sender.delayed("a", topic)) for topic in ("T", "U"))
    sender.delete("T")
    late = sender.named("a")
    late.template.delayed_template = sender.delayed("a", "T").template
    (again,) = sender.send(late)
    assert again != first
    for _ in range(2):
        late = sender.named("a")
        late.template.delayed_template = sender.delayed("a", "T").template
        assert sender.send(late) == [again]
        assert sender.send(sender.delayed("a", "U")) == [other]
        sender.restart()
    assert sender.send(sender.delayed("a", "T")) != [first]


def test_dedupe_invalid_frame_changes_nothing(sender: Sender) -> None:
    sender.send(sender.named("b"))
    end = sender.store.engine.appender.end
    big = "x" * (sender.store.options.max_message_size + 1)
    plan = sender.named("a", "b", big[:30])
    plan.payload = sender.store.engine.plan("T", [b"a", b"b", big.encode()]).payload
    plan.columns = sender.store.engine.plan("T", [b"a", b"b", big.encode()]).columns
    named = sender.named("a", "b", "c")
    lengths = named.payload[named.columns[6] :]
    at = len(plan.payload)
    plan.columns = (*plan.columns[:6], at, at + 6, *plan.columns[8:])
    plan.payload = np.concatenate([plan.payload, lengths])
    with pytest.raises(MessageTooLargeError):
        sender.send(plan)
    assert sender.store.engine.appender.end == end
    with pytest.raises(BadMessageError, match="1 of the batch's 2"):
        sender.send(sender.named("a", "b", batch=True))
    assert sender.send(sender.named("b", batch=True))
    assert sender.bodies() == [b"b"]


def test_dedupe_strings_beyond_the_frame_are_not_read(sender: Sender) -> None:
    """Lengths are checked at the append, after the search for ids."""
    plan = sender.named("one", "two")
    whole, places = plan.payload, np.full(4, -1, np.int64)
    no_ids = np.empty(0, np.uint8)
    lengths_at, properties_at = plan.columns[6:8]
    for cut, found in (0, [3, 3]), (1, [3, 0]):
        payload = whole[: len(whole) - cut]
        kernel.locate_ids(payload, 2, lengths_at, properties_at, -1, no_ids, no_ids, places)
        assert places[1::2].tolist() == found
    plan.payload = whole[:-1]
    with pytest.raises(BadMessageError, match="do not have the sizes"):
        sender.send(plan)
    assert sender.send(sender.named("one"))[0][1] == 0


def test_dedupe_window_matches_a_model() -> None:
    """Compiled and plain kernels agree on random ids; the window contains the newest."""
    rng = random.Random(3)
    capacity = 7
    windows = []
    for module in (lambda function: function, plain):
        ring = np.zeros(kernel.ENTRY_WORDS * capacity, np.int64)
        slots = np.full(4, kernel.NONE, np.int64)
        windows.append((module, ring, slots, np.zeros(kernel.WINDOW_SIZE, np.int64)))
    newest: list[tuple[int, int]] = []
    for place in range(2000):
        if newest and rng.random() < 0.1:
            cut = rng.choice(newest)[1]
            newest = [each for each in newest if each[1] < cut]
            for module, ring, slots, window in windows:
                module(kernel.remove_from)(cut, ring, slots, window)
        found = rng.randrange(1, 30)
        newest = [*newest, (found, place)][-capacity:]
        latest = dict(newest)
        asked_ids = np.arange(1, 31)
        for module, ring, slots, window in windows:
            module(kernel.insert)(np.array([found]), np.array([place]), ring, slots, window)
            places = np.zeros(30, np.int64)
            count = module(kernel.lookup)(asked_ids, ring, slots, places)
            assert places.tolist() == [latest.get(each, kernel.NONE) for each in range(1, 31)]
            assert count == len(latest)


def test_dedupe_compiled_and_plain_hash_agree() -> None:
    rng = random.Random(4)
    for size in range(40):
        data = np.frombuffer(rng.randbytes(max(size, 1)), np.uint8).copy()
        ids = np.array([0, size, 0, 0], np.int64)
        block = np.frombuffer(b"\x05Topic", np.uint8).copy()
        both = []
        for function in (kernel.hash_ids, plain(kernel.hash_ids)):
            hashes = np.zeros(2, np.int64)
            function(data, ids, block, data[:0], hashes)
            both.append(hashes.tolist())
            function(data, ids, block, block, hashes)
            assert hashes[0] != both[-1][0] or size == 0
        assert both[0] == both[1]
        assert both[0][1] == kernel.NO_ID
        assert both[0][0] > 0 or size == 0
