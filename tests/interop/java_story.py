"""What happens to each store: ours, then RocketMQ's, then ours again, then RocketMQ's again; with what each side saw.

    left        the folder as we left it
    first       what RocketMQ told of it
    answers     of the messages that RocketMQ appended
    second      what RocketMQ told then, and closed
    extended    the folder as RocketMQ left it
    served      what a started group of ours answered about it
    added       what our group appended, and stopped
    ended       the folder as our group left it
    third       what RocketMQ told at last

Folders are copies without `mqproc/`, so that what is read of them later comes from RocketMQ's files alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqproc import Message
from mqproc.message import StoredMessage
from tests.conftest import wait_until
from tests.interop.java_stores import Handed, Sent, rocketmqs_messages
from tests.interop.rocketmq import Dump, Line, RocketMq, rocketmq_options

UP_TIMEOUT_S = 60
PAGE_MESSAGES = 500
GROUPS_AT_A_TIME = 2


@dataclass(slots=True)
class Served:
    """What the clients of a running group got: queue by queue, and by key (True: a unique id)."""

    queues: dict[tuple[str, int], list[StoredMessage]] = field(default_factory=dict)
    keys: dict[tuple[str, str, bool], list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Story:
    """One store's way.

    `victim` is the physical offset of a damaged record, −1 without; RocketMQ appends the first `appends_max` messages.
    """

    handed: Handed
    victim: int = -1
    appends_max: int | None = None
    opened: Line = field(default_factory=dict)
    closed: list[Line] = field(default_factory=list)
    messages: list[Line] = field(default_factory=list)
    answers: list[Line] = field(default_factory=list)
    dumps: dict[str, Dump] = field(default_factory=dict)
    served: Served = field(default_factory=Served)
    served_ms: tuple[int, int] = 0, 0
    """When our group had not started yet, and when it had answered."""
    added: dict[int, Sent] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.handed.root

    def folder(self, moment: str) -> Path:
        return self.root.with_name(f"{self.root.name}.{moment}")

    def keep(self, moment: str) -> None:
        shutil.copytree(self.root, self.folder(moment), ignore=shutil.ignore_patterns("mqproc", "~*"))


def tell(stories: list[Story], rocketmq: RocketMq) -> subprocess.CompletedProcess[str]:
    """Go through all stores at the same time; returns what `mqproc up` said while RocketMQ held one of them."""
    for story in stories:
        story.keep("left")
    _open(stories, rocketmq)
    _dump(stories, rocketmq, "first")
    refused = _up(stories[0].root)
    asked = []
    for story in stories:
        story.messages = rocketmqs_messages(story.handed.name)[: story.appends_max]
        asked.append((story.root, {"messages": story.messages}))
    for story, answers in zip(stories, rocketmq.ask_all("append", asked), strict=True):
        story.answers = answers
    _dump(stories, rocketmq, "second")
    _close(stories, rocketmq)
    with ThreadPoolExecutor(GROUPS_AT_A_TIME) as threads:
        list(threads.map(_go_on, stories))
    _open(stories, rocketmq)
    _dump(stories, rocketmq, "third")
    _close(stories, rocketmq)
    return refused


def _up(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mqproc", "up", "--store", str(root), "--set", "metrics_port=0"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=UP_TIMEOUT_S)


def _open(stories: list[Story], rocketmq: RocketMq) -> None:
    asked = [(story.root, {"options": rocketmq_options(story.handed.group.options)}) for story in stories]
    for story, opened in zip(stories, rocketmq.ask_all("open", asked), strict=True):
        assert opened["started"], (story.handed.name, opened)
        story.opened = story.opened or opened


def _dump(stories: list[Story], rocketmq: RocketMq, moment: str) -> None:
    files = [story.root.with_name(f"{story.root.name}.{moment}.jsonl") for story in stories]
    rocketmq.ask_all("dump", [(story.root, {"to": str(file)}) for story, file in zip(stories, files, strict=True)])
    for story, file in zip(stories, files, strict=True):
        story.dumps[moment] = Dump(file)


def _close(stories: list[Story], rocketmq: RocketMq) -> None:
    for story, closed in zip(stories, rocketmq.ask_all("close", [(each.root, {}) for each in stories]), strict=True):
        story.closed.append(closed)


def _go_on(story: Story) -> None:
    """Start a group on what RocketMQ left, read everything, append, stop."""
    story.keep("extended")
    begin_ms = _now_ms()
    group = story.handed.group.start()
    due = len(story.dumps["second"].parked(begin_ms))
    wait_until(lambda: group.words()["delivered_messages"] >= due, what="the messages whose time had come")
    group.wait_dispatched()
    with group.client() as client:
        _read_queues(story, client)
        _read_keys(story, client)
        story.served_ms = begin_ms, _now_ms()
        for message in _our_messages():
            told = client.send(message)
            place = told.queue_id, told.queue_offset
            story.added[told.physical_offset] = Sent(
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
            assert pulled.next_offset > offset, (story.handed.name, queue, pulled.status)
            offset = pulled.next_offset


def _read_keys(story: Story, client: Any) -> None:
    for topic, key, unique in keys_of(story.dumps["second"].records.values()):
        found = client.by_key(topic, key, max_messages=1000, unique=unique)
        story.served.keys[(topic, key, unique)] = [message.physical_offset for message in found]


def keys_of(records: Iterable[Line]) -> dict[tuple[str, str, bool], list[int]]:
    """Physical offsets by (topic, key, unique) that the records themselves tell; rolled back ones are not indexed."""
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
