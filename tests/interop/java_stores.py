"""Stores that mqproc and RocketMQ open in turn, with the acknowledged messages of both."""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mqproc import Message, StoreReader
from mqproc.config.options import Options
from mqproc.errors import MqprocError
from mqproc.layout.record import SYS_FLAG_COMMIT, SYS_FLAG_PREPARED, SYS_FLAG_ROLLBACK
from mqproc.types import BatchResult, SendResult, StoredMessage
from tests.interop.golden_store import fields_of
from tests.interop.rocketmq import (
    BODY_MAX,
    SEGMENT_SIZE,
    SIZES,
    UNITS_OF_A_FILE,
    Dump,
    Line,
    RocketMq,
    rocketmq_options,
)
from tests.support.command_line import call
from tests.support.group import Group, wait_until
from tests.support.store_builders import Engine

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
RETRY_TOPIC = "%RETRY%" + "group-" * 30
LONG_TOPIC = "T" * 130
V1_TOPIC = "t" * 127
# RocketMQ's recovery begins at a file that is 3 s older than the checkpoint.
KILL_AFTER_S = 5.0
FLUSHED_OFTEN = {
    "flush_commit_log_thorough_interval": 300,
    "flush_consume_queue_thorough_interval": 300,
    "flush_interval_consume_queue": 100,
}
PAUSE_S = 0.03
HURRIED_MESSAGES = 200
FRAMES_MAX = 20_000
BORN_V6 = ipaddress.ip_address("2001:db8::7").packed + (5000).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class Sent:
    """One acknowledged message. `queued`: it belongs to a queue."""

    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    tag: str
    keys: tuple[str, ...]
    queued: bool = True


@dataclass(slots=True)
class SharedStore:
    """One store: its group (stopped or killed) and the acknowledged messages by physical offset."""

    name: str
    group: Group
    sent: dict[int, Sent] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.group.store

    @property
    def options(self) -> Options:
        return Options(**self.group.options)

    @property
    def begin(self) -> int:
        """The begin of the log."""
        return min(int(path.name) for path in self.group.paths.commit_log.iterdir() if path.name.isdigit())

    def note(self, message: Message, result: SendResult) -> None:
        keys = tuple(message.keys)
        self.sent[result.physical_offset] = Sent(
            message.topic, result.queue_id, result.queue_offset, message.body, message.tag, keys
        )

    def note_batch(
        self,
        result: BatchResult,
        bodies: Sequence[bytes],
        keys: Sequence[Sequence[str]] | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        places = zip(result.physical_offsets, result.queue_ids, result.queue_offsets, strict=True)
        for index, (offset, queue_id, queue_offset) in enumerate(places):
            self.sent[int(offset)] = Sent(
                result.topic,
                int(queue_id),
                int(queue_offset),
                bodies[index],
                tags[index] if tags else "",
                tuple(keys[index]) if keys else (),
            )


# Through a group and its clients


def stopped(folder: Path) -> SharedStore:
    """A cleanly stopped store with all kinds of messages, in rolled files of every kind."""
    store = SharedStore("stopped", Group(folder / "stopped", **SIZES).start())
    with store.group.client() as client:
        _send_everything(store, client)
    store.group.wait_dispatched()
    assert store.group.stop() == 0
    return store


def retained(folder: Path) -> SharedStore:
    """A store with its first segments, queue files and index files deleted by retention.

    `sent` has the remaining messages.
    """
    store = SharedStore("retained", Group(folder / "retained", **SIZES, **FLUSHED_OFTEN).start())
    try:
        _send_and_delete(store)
        assert store.group.stop() == 0
    finally:
        store.group.close()
    store.sent = {offset: each for offset, each in store.sent.items() if offset >= store.begin}
    return store


def _send_and_delete(store: SharedStore) -> None:
    rng = random.Random(4)
    with store.group.client() as client:
        for number in range(10):
            client.send(Message("gone", b"gone %d" % number, keys=[f"gone-{number}"]))
        _send_orders(store, client, rng, frames=24)
        store.group.wait_dispatched()
        wait_until(lambda: _delete_expired(store) == "", what="durable marks near the log's end")
        _send_orders(store, client, rng, frames=8)
        store.note(Message("odd", b"o", keys=["Aa"]), client.send(Message("odd", b"o", keys=["Aa"])))
    store.group.wait_dispatched()


def _delete_expired(store: SharedStore) -> str:
    """Have everything except the newest files deleted; return the reason why some remain."""
    done = call("store", "retention", store.root, "--execute", "--older-than", "0s", "--json")
    assert done.code == 0, done
    return done.json["held_by"] or ""


def _send_everything(store: SharedStore, client: Any) -> None:
    rng = random.Random(1)
    client.create_topic("unused", 3)
    _send_orders(store, client, rng, frames=8)
    for message in _odd_messages():
        store.note(message, client.send(message))
    bodies = [rng.randbytes(50) for _ in range(33)]
    store.note_batch(client.send_batch("batched", bodies, queue_id=1, batch=True), bodies)
    # Files of these two queues end exactly where the queue does.
    for queue_id, count in ((0, UNITS_OF_A_FILE), (1, 2 * UNITS_OF_A_FILE)):
        bodies = [b"%d" % number for number in range(count)]
        keys = [[f"exact-{queue_id}-{number}"] for number in range(count)]
        store.note_batch(client.send_batch("exact", bodies, keys=keys, queue_id=queue_id), bodies, keys)
    # The last segment has many records, so that damage can be placed between them.
    _send_orders(store, client, rng, frames=6, body_max=100)


def _send_orders(store: SharedStore, client: Any, rng: random.Random, *, frames: int, body_max: int = 600) -> None:
    for frame in range(frames):
        first = len(store.sent)
        bodies = [rng.randbytes(rng.randrange(body_max)) for _ in range(40)]
        keys = [[f"order-{first + each}", f"customer-{each}"][: 1 + frame % 2] for each in range(40)]
        tags = [("new", "paid", "Aa", "BB", "schlußtag")[each % 5] for each in range(40)]
        store.note_batch(client.send_batch("orders", bodies, keys=keys, tags=tags), bodies, keys, tags)


def _odd_messages() -> list[Message]:
    return [
        Message("odd", b""),
        Message("odd", b"x", keys=["Aa"]),
        Message("odd", b"y", keys=["BB", "Aa"]),
        Message("odd", b"z", keys=["schlüssel", "\N{GRINNING FACE}"], tag="\N{GRINNING FACE}"),
        Message("odd", b"p", properties={"colour": "grün", "a": "b", "REGION": "eu"}, flag=7),
        Message("odd", b"n", flag=-(1 << 31), born_timestamp_ms=1),
        Message("odd", bytes(range(256)) * (BODY_MAX // 256), tag="largest"),
        Message("odd", b"w", keys=["k" * 300], properties={"big": "v" * 20_000}),
        Message(V1_TOPIC, b"127 bytes of topic", keys=["v1"]),
    ]


class KilledGroup:
    """A group killed under load, late enough for RocketMQ to recover from the middle."""

    def __init__(self, folder: Path) -> None:
        self.store = SharedStore("killed", Group(folder / "killed", **SIZES, **FLUSHED_OFTEN).start())
        self._started = time.monotonic()
        self._hurry = threading.Event()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def kill(self) -> SharedStore:
        """Kill it under full load; its answers are in `sent`."""
        time.sleep(max(0.0, self._started + KILL_AFTER_S - time.monotonic()))
        self._hurry.set()
        enough = len(self.store.sent) + HURRIED_MESSAGES
        wait_until(lambda: len(self.store.sent) >= enough or not self._sender.is_alive(), what="messages under load")
        assert self._sender.is_alive()
        self.store.group.kill()
        self.close()
        return self.store

    def close(self) -> None:
        """Stop the sender, which ends without its group."""
        self.store.group.close()
        self._sender.join()

    def _send(self) -> None:
        rng = random.Random(2)
        with self.store.group.client(timeout=30) as client:
            for frame in range(FRAMES_MAX):
                bodies = [rng.randbytes(rng.randrange(300)) for _ in range(10)]
                keys = [[f"kill-{frame}-{each}"] for each in range(10)]
                try:
                    result = client.send_batch("killed", bodies, keys=keys, tags="t")
                except MqprocError:
                    return
                self.store.note_batch(result, bodies, keys, ["t"] * 10)
                if not self._hurry.is_set():
                    time.sleep(PAUSE_S)


# Written by the append engine, like system topics


def internal(folder: Path) -> SharedStore:
    """Long topics, delays, transactions, IPv6 hosts, with and without CRCs of whole records.

    The first part is written by the append engine, the second by a group whose store host is an IPv6 address.
    """
    group = Group(folder / "internal", **(SIZES | {"broker_ip": "::1", "enabled_append_prop_crc": False}))
    store = SharedStore("internal", group)
    _append_internally(store)
    group.start()
    with group.client() as client:
        for number in range(40):
            message = Message("six", b"six %d" % number, keys=[f"six-{number}"], tag="v6")
            store.note(message, client.send(message))
    group.wait_dispatched()
    assert group.stop() == 0
    return store


def _append_internally(store: SharedStore) -> None:
    engine = Engine(store.root, enabled_append_prop_crc=False)
    for append_crc in (False, True):
        engine.appender.set_options(dataclasses.replace(engine.options, enabled_append_prop_crc=append_crc))
        for topic in (RETRY_TOPIC, LONG_TOPIC, V1_TOPIC):
            _append(store, engine, topic, fixed_queue=0, parts=(b"", b"", b"", b"RETRY_TOPIC\x01orders\x02"))
        for level in (1, 3, 18, 20, 0):
            pairs = f"DELAY\x01{level}\x02REAL_TOPIC\x01orders\x02REAL_QID\x012\x02".encode()
            queue_id = max(1, min(level, 18)) - 1
            _append(store, engine, SCHEDULE_TOPIC, queues=18, fixed_queue=queue_id, parts=(pairs, b"", b"", b""))
        for flag in (SYS_FLAG_PREPARED, SYS_FLAG_COMMIT, SYS_FLAG_ROLLBACK):
            _append(store, engine, "txn", sys_flag=flag, prepared_transaction_offset=1000)
        _append(store, engine, "RMQ_SYS_TRANS_HALF_TOPIC", fixed_queue=0)
        _append(store, engine, "hosts", born_host=BORN_V6, reconsume_times=3)
        for _ in range(5):
            _append(store, engine, "rolling", count=30)
    engine.appender.close()
    engine.segments.close()
    engine.table.close()
    # Like a store from elsewhere: only RocketMQ's files are left.
    shutil.rmtree(engine.paths.own)


def _append(store: SharedStore, engine: Engine, topic: str, *, count: int = 6, **changes: Any) -> None:
    first = len(store.sent)
    bodies = [b"%s %d" % (topic.encode(), first + each) * 9 for each in range(count)]
    keys = [f"{first + each}" for each in range(count)]
    time_ms = int(time.time() * 1000) - 10_000 + first
    plan = engine.plan(topic, bodies, keys=keys, tags=["tag"] * count, born_timestamp_ms=time_ms, **changes)
    answer = engine.appender.add(plan, time_ms)
    engine.appender.write_out()
    engine.appender.publish()
    queued = changes.get("sys_flag", 0) in (0, SYS_FLAG_COMMIT)
    physical_offsets, queue_offsets = answer[: 16 * count].view(np.int64).reshape(2, count).tolist()
    queue_ids = answer[16 * count :].view(np.int32).tolist()
    for index, offset in enumerate(physical_offsets):
        place = queue_ids[index], queue_offsets[index]
        store.sent[offset] = Sent(topic, *place, bodies[index], "tag", (keys[index],), queued)


# Damaged


def damaged(
    source: SharedStore,
    name: str,
    choose: Callable[[list[StoredMessage]], StoredMessage],
    *,
    without: Sequence[str] = ("consumequeue", "index"),
) -> tuple[SharedStore, int]:
    """A copy of a stopped store with a changed body byte and no marks, extended by mqproc.

    The folders in `without` are missing. Also returns the physical offset of the damaged record.
    """
    group = Group(source.root.with_name(name), **source.group.options)
    store = SharedStore(name, group, dict(source.sent))
    shutil.copytree(source.root, group.store, ignore=shutil.ignore_patterns("mqproc", "~*", *without))
    with StoreReader(source.root) as reader:
        victim = choose(list(reader.scan()))
    start = victim.physical_offset - victim.physical_offset % SEGMENT_SIZE
    segment = group.paths.commit_log / f"{start:020d}"
    data = bytearray(segment.read_bytes())
    at = data.index(victim.body, victim.physical_offset - start)
    data[at] ^= 1
    segment.write_bytes(data)
    group.start()
    with group.client() as client:
        _send_orders(store, client, random.Random(3), frames=2)
    group.wait_dispatched()
    assert group.stop() == 0
    del store.sent[victim.physical_offset]
    return store, victim.physical_offset


def in_an_early_segment(messages: list[StoredMessage]) -> StoredMessage:
    """A record of the second segment whose queue has later records in that segment."""
    return _with_a_successor(messages, SEGMENT_SIZE)


def in_the_last_segment(messages: list[StoredMessage]) -> StoredMessage:
    """A record of the last segment whose queue has later records in it."""
    return _with_a_successor(messages, messages[-1].physical_offset // SEGMENT_SIZE * SEGMENT_SIZE)


def at_a_queues_end(messages: list[StoredMessage]) -> StoredMessage:
    """The last record of a queue, in a segment before the last one."""
    return next(each for each in reversed(messages) if (each.topic, each.queue_id) == ("batched", 1))


def _with_a_successor(messages: list[StoredMessage], start: int) -> StoredMessage:
    there = [
        each
        for each in messages
        if start <= each.physical_offset < start + SEGMENT_SIZE and each.topic == "orders" and len(each.body) > 20
    ]
    half = there[len(there) // 2]
    assert sum(each.queue_id == half.queue_id for each in there[len(there) // 2 :]) > 1
    return half


# Messages that RocketMQ appends


def rocketmqs_messages(name: str) -> list[dict[str, Any]]:
    """Puts of all kinds for the Java program, enough to roll files of every kind."""
    rng = random.Random(name)
    puts = [_put(rng, "orders", each % 8, keys=f"late-{each} shared", tag="late") for each in range(40)]
    puts += [_put(rng, "fresh", 2, size=20_000, keys=f"large-{each}") for each in range(4)]
    puts += [_put(rng, "exact", 0, keys=f"x-{each} y-{each} z-{each}") for each in range(UNITS_OF_A_FILE + 20)]
    puts += [_put(rng, topic, 0, keys="long", tag="long") for topic in (RETRY_TOPIC, LONG_TOPIC, V1_TOPIC)]
    puts += [_put(rng, "hosts", 1, bornHost="2001:db8::9", storeHost="::1", keys="v6")]
    puts += [_put(rng, "hosts", 1, bornHost="2001:db8::9", keys="v6-born"), _put(rng, "hosts", 1, storeHost="::1")]
    puts += [
        _put(rng, SCHEDULE_TOPIC, level - 1, more={"DELAY": str(level), "REAL_TOPIC": "orders", "REAL_QID": "0"})
        for level in (1, 3, 18)
    ]
    puts += [_put(rng, "txn", 0, sysFlag=flag, keys="txn") for flag in (SYS_FLAG_PREPARED, SYS_FLAG_COMMIT)]
    parts = [{"body": _base64(rng.randbytes(30)), "properties": {"KEYS": f"part-{each}"}} for each in range(7)]
    puts += [_put(rng, "batched", 1) | {"batch": parts}]
    puts += [_put(rng, "txn", 0, sysFlag=SYS_FLAG_ROLLBACK, keys="gone"), _put(rng, "orders", 3, keys="last")]
    return puts


def _put(
    rng: random.Random,
    topic: str,
    queue_id: int,
    *,
    size: int = 80,
    keys: str = "",
    tag: str = "",
    more: dict[str, str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    properties = {"KEYS": keys, "TAGS": tag, "colour": "grün", "UNIQ_KEY": rng.randbytes(16).hex().upper()}
    return {
        "topic": topic,
        "queueId": queue_id,
        "body": _base64(rng.randbytes(size)),
        "properties": {name: value for name, value in properties.items() if value} | (more or {}),
        "sysFlag": 0,
        "bornHost": "10.1.2.3",
        "storeHost": "192.168.1.2",
    } | fields


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# Stories: mqproc, RocketMQ, mqproc and RocketMQ open a store in turn
#
#     left        copy of the store after mqproc
#     first       RocketMQ's dump of it
#     answers     for the messages that RocketMQ appended
#     second      RocketMQ's dump after that
#     extended    copy of the store after RocketMQ
#     served      answers of a group started on it
#     added       messages that the group appended
#     ended       copy of the store after the group
#     third       RocketMQ's last dump
#
# The copies have no `mqproc/`: later reads use RocketMQ's files alone.


UP_TIMEOUT_S = 60
PAGE_MESSAGES = 500
GROUPS_AT_A_TIME = 2


@dataclass(slots=True)
class Served:
    """The answers of a running group, by queue and by key (True: a unique id)."""

    queues: dict[tuple[str, int], list[StoredMessage]] = field(default_factory=dict)
    keys: dict[tuple[str, str, bool], list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Story:
    """The history of one store.

    `victim` is the physical offset of a damaged record, −1 without; RocketMQ appends the first `appends_max` messages.
    """

    store: SharedStore
    victim: int = -1
    appends_max: int | None = None
    opened: Line = field(default_factory=dict)
    closed: list[Line] = field(default_factory=list)
    messages: list[Line] = field(default_factory=list)
    answers: list[Line] = field(default_factory=list)
    dumps: dict[str, Dump] = field(default_factory=dict)
    served: Served = field(default_factory=Served)
    served_ms: tuple[int, int] = 0, 0
    """Times before our group started and after it answered."""
    added: dict[int, Sent] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.store.root

    def folder(self, moment: str) -> Path:
        return self.root.with_name(f"{self.root.name}.{moment}")

    def keep(self, moment: str) -> None:
        shutil.copytree(self.root, self.folder(moment), ignore=shutil.ignore_patterns("mqproc", "~*"))


def run_stories(stories: list[Story], rocketmq: RocketMq) -> subprocess.CompletedProcess[str]:
    """Run all stories at the same time; returns the result of `mqproc up` on an opened store."""
    for story in stories:
        story.keep("left")
    _open(stories, rocketmq)
    _dump(stories, rocketmq, "first")
    refused = _up(stories[0].root)
    asked = []
    for story in stories:
        story.messages = rocketmqs_messages(story.store.name)[: story.appends_max]
        asked.append((story.root, {"messages": story.messages}))
    for story, answers in zip(stories, rocketmq.ask_all("append", asked), strict=True):
        story.answers = answers
    _dump(stories, rocketmq, "second")
    _close(stories, rocketmq)
    with ThreadPoolExecutor(GROUPS_AT_A_TIME) as threads:
        list(threads.map(_continue, stories))
    _open(stories, rocketmq)
    _dump(stories, rocketmq, "third")
    _close(stories, rocketmq)
    return refused


def _up(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mqproc", "up", "--store", str(root), "--set", "metrics_port=0"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=UP_TIMEOUT_S)


def _open(stories: list[Story], rocketmq: RocketMq) -> None:
    asked = [(story.root, {"options": rocketmq_options(story.store.group.options)}) for story in stories]
    for story, opened in zip(stories, rocketmq.ask_all("open", asked), strict=True):
        assert opened["started"], (story.store.name, opened)
        story.opened = story.opened or opened


def _dump(stories: list[Story], rocketmq: RocketMq, moment: str) -> None:
    files = [story.root.with_name(f"{story.root.name}.{moment}.jsonl") for story in stories]
    rocketmq.ask_all("dump", [(story.root, {"to": str(file)}) for story, file in zip(stories, files, strict=True)])
    for story, file in zip(stories, files, strict=True):
        story.dumps[moment] = Dump(file)


def _close(stories: list[Story], rocketmq: RocketMq) -> None:
    for story, closed in zip(stories, rocketmq.ask_all("close", [(each.root, {}) for each in stories]), strict=True):
        story.closed.append(closed)


def _continue(story: Story) -> None:
    """Start a group on the store that RocketMQ left, read everything, append, stop."""
    story.keep("extended")
    begin_ms = _now_ms()
    group = story.store.group.start()
    due = len(story.dumps["second"].due_undelivered(begin_ms))
    wait_until(lambda: group.words()["delivered_messages"] >= due, what="the due messages")
    group.wait_dispatched()
    with group.client() as client:
        _read_queues(story, client)
        _read_keys(story, client)
        story.served_ms = begin_ms, _now_ms()
        for message in _our_messages():
            result = client.send(message)
            place = result.queue_id, result.queue_offset
            story.added[result.physical_offset] = Sent(
                message.topic, *place, message.body, message.tag, tuple(message.keys)
            )
    group.wait_dispatched()
    assert group.stop() == 0
    story.keep("ended")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _our_messages() -> Iterable[Message]:
    for number in range(60):
        topic = ("orders", "fresh", "exact", "after")[number % 4]
        queue_id = {"fresh": 2, "exact": 0}.get(topic)
        yield Message(topic, b"after %d" % number * 9, keys=[f"after-{number}"], tag="after", queue_id=queue_id)


def _read_queues(story: Story, client: Any) -> None:
    for queue in client.queues():
        found = story.served.queues[(queue.topic, queue.queue_id)] = []
        offset = queue.min_offset
        while offset < queue.max_offset:
            pulled = client.pull(queue.topic, queue.queue_id, offset, PAGE_MESSAGES)
            found += pulled.messages
            assert pulled.next_offset > offset, (story.store.name, queue, pulled.status)
            offset = pulled.next_offset


def _read_keys(story: Story, client: Any) -> None:
    for topic, key, unique in keys_of(story.dumps["second"].records.values()):
        found = client.by_key(topic, key, max_messages=1000, unique=unique)
        story.served.keys[(topic, key, unique)] = [message.physical_offset for message in found]


def keys_of(records: Iterable[Line]) -> dict[tuple[str, str, bool], list[int]]:
    """Physical offsets by (topic, key, unique) from the records, without rolled back ones."""
    found: dict[tuple[str, str, bool], list[int]] = {}
    for line in records:
        if line["sysFlag"] & 0xC == 0xC:
            continue
        properties = line["properties"]
        keys = {(key, False) for key in properties.get("KEYS", "").split(" ") if key}
        if "UNIQ_KEY" in properties:
            keys.add((properties["UNIQ_KEY"], True))
        for key, unique in keys:
            found.setdefault((line["topic"], key, unique), []).append(line["offset"])
    return found


# RocketMQ's dumps compared with the sent messages and with mqproc's reader


def assert_dumped(dump: Dump, sent: dict[int, Sent]) -> None:
    """RocketMQ's log contains the messages; its queues contain those that belong to one."""
    for offset, each in sent.items():
        line = dump.records[offset]
        properties = line["properties"]
        found = Sent(
            line["topic"],
            line["queueId"],
            line["queueOffset"],
            base64.b64decode(line["body"]),
            properties.get("TAGS", ""),
            tuple(properties.get("KEYS", "").split()),
            each.queued,
        )
        assert found == each
        assert (_unit_at(dump, each) == offset) is each.queued, each


def _unit_at(dump: Dump, sent: Sent) -> int | None:
    """The physical offset in RocketMQ's queue for a message; None without a unit."""
    queue = dump.queues.get((sent.topic, sent.queue_id), {"minOffset": 0, "units": []})
    place = sent.queue_offset - queue["minOffset"]
    return queue["units"][place][0] if 0 <= place < len(queue["units"]) else None


def assert_delivered(story: Story, delivered: dict[tuple[str, int], list[StoredMessage]]) -> None:
    """The due messages follow RocketMQ's records, each once and in its queue."""
    early, late = (story.dumps["second"].due_undelivered(moment_ms) for moment_ms in story.served_ms)
    origins: list[int] = []
    for queue, messages in delivered.items():
        for message in messages:
            line = late[message.prepared_transaction_offset]
            properties = line["properties"]
            assert queue == (properties["REAL_TOPIC"], int(properties["REAL_QID"]))
            assert as_line(message)["body"] == line["body"]
            origins.append(line["offset"])
    assert len(set(origins)) == len(origins)
    assert early.keys() <= set(origins)
    assert early, "no message of this store was due"


def as_line(message: StoredMessage) -> Line:
    """A message of mqproc in the form of StoreDump.java."""
    return {
        **fields_of(message),
        "offset": message.physical_offset,
        "physicalOffset": message.physical_offset,
        "size": message.size,
        "messageId": message.message_id,
        "bornHost": _host(message.born_host),
        "storeHost": _host(message.store_host),
        "bodyCrc": message.body_crc,
        "body": base64.b64encode(message.body).decode(),
    }


def _host(text: str) -> str:
    address, _, port = text.rpartition(":")
    return f"{ipaddress.ip_address(address.strip('[]')).packed.hex()}:{port}"
