"""Clients that send, commit and delete until they are killed, and what they were told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from mqproc import Client, Message
from mqproc.client import group_requests as group_calls
from mqproc.errors import MqprocError
from mqproc.wire.operations.groups import EARLIEST, GroupJoinRequest
from tests.outages.warm_group import forked

TOPICS = ("outage-a", "outage-b")
GROUP = "outage-readers"
QUEUES = 2
BATCH_MAX = 30
BODY_MAX = 600
TIMEOUT_S = 3.0
PAUSE_S = 0.01
COMMIT_CHANCE = 0.1
DELETE_CHANCE = 0.03
ASIDE_CHANCE = 0.1
# Messages of these are not counted: they keep those roles at work that deliver, copy, decide, and hand out.
LATER, DECIDED, RECEIVED = "Later", "Decided", "Received"
# Simple consumers; the second group has members now and then, who get what comes again.
RECEIVERS = ("outage-receivers", "outage-both")
RECEIVED_MAX = 10
INVISIBLE_S = 1.0
SESSION_MS = 3_000
JOIN_CHANCE = 0.2


class Place(NamedTuple):
    """Where a message lies."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int


@dataclass(slots=True)
class Heard:
    """What all customers of a store have written down.

    `durable` is a place in the log: what lies above it a power cut may have taken. `lost` are names of what it has.
    """

    told: dict[str, Place] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    durable: float = math.inf
    lost: set[str] = field(default_factory=set)

    def read(self, report: Path) -> None:
        """Add a report; its last line may be half a one."""
        for line in report.read_text().rpartition("\n")[0].splitlines():
            word, *rest = json.loads(line)
            if word == "sending":
                self.sent.update(rest[0])
            elif word == "told":
                topic, names, *columns = rest
                self.told.update((name, Place(topic, *place)) for name, *place in zip(names, *columns, strict=True))
            else:
                self.refused[rest[0]] += 1


@contextlib.contextmanager
def customers(store: Path, folder: Path, life: str, count: int, heard: Heard, seed: int) -> Iterator[list[BaseProcess]]:
    """So many clients at work until the end of the block, where they are killed and heard. `folder` takes reports."""
    processes: list[BaseProcess] = []
    reports = []
    try:
        for number in range(count):
            reports.append(folder / f"{life}-{number}.report")
            processes.append(forked(_work, store, f"{life}-{number}", seed, reports[-1]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    for report in reports:
        if report.exists():
            heard.read(report)


def hold(processes: list[BaseProcess]) -> None:
    """From now on they hear nothing."""
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def _work(store: Path, name: str, seed: int, report: Path) -> None:
    chance = random.Random(f"{seed} {name}")
    with report.open("a", buffering=1) as lines, Client(store, timeout=TIMEOUT_S) as client:
        customer = _Customer(client, name, chance, lines)
        while True:
            try:
                customer.step()
            except MqprocError as error:
                customer.note("refused", error.code)
                time.sleep(PAUSE_S)


class _Customer:
    def __init__(self, client: Client, name: str, chance: random.Random, lines: Any) -> None:
        self._client = client
        self._name = name
        self._chance = chance
        self._lines = lines
        self._count = 0
        self._gone = 0

    def note(self, *what: Any) -> None:
        self._lines.write(json.dumps(what) + "\n")

    def step(self) -> None:
        choice = self._chance.random()
        if choice < DELETE_CHANCE:
            self._make_and_delete()
        elif choice < DELETE_CHANCE + COMMIT_CHANCE:
            self._commit()
        elif choice < DELETE_CHANCE + COMMIT_CHANCE + ASIDE_CHANCE:
            self._chance.choice((self._send_later, self._give_back, self._decide, self._receive))()
        else:
            self._send()

    def _send(self) -> None:
        chance = self._chance
        names = [f"{self._name}-{self._count + each}" for each in range(chance.randint(1, BATCH_MAX))]
        self._count += len(names)
        bodies = [name.encode() + b" " * chance.randrange(BODY_MAX) for name in names]
        topic = chance.choice(TOPICS)
        self.note("sending", names)
        properties = [{"name": name} for name in names] if len(names) % 2 else None
        told = self._client.send_batch(topic, bodies, keys=names, tags="t", properties=properties)
        columns = told.queue_ids.tolist(), told.queue_offsets.tolist(), told.physical_offsets.tolist()
        self.note("told", topic, names, *columns)

    def _commit(self) -> None:
        """Consume a queue up to its end, if there is one already."""
        queues = self._client.queues(self._chance.choice(TOPICS))
        if queues:
            queue = self._chance.choice(queues)
            self._client.groups.commit(GROUP, queue.topic, queue.queue_id, queue.max_offset)

    def _send_later(self) -> None:
        self._client.send(LATER, b"by level", delay_level=1)
        self._client.send(LATER, b"by time", delay=self._chance.random())

    def _give_back(self) -> None:
        """Nack the last message of a queue, if it has one."""
        queues = self._client.queues(self._chance.choice(TOPICS))
        there = [queue for queue in queues if queue.max_offset > queue.min_offset]
        if there:
            queue = self._chance.choice(there)
            place = queue.topic, queue.queue_id, queue.max_offset - 1
            self._client.run(group_calls.nack(GROUP, [place], 1, -1))

    def _decide(self) -> None:
        transaction = self._client.transaction("deciders", Message(DECIDED, b"decided")).begin()
        if self._chance.random() < 0.5:
            transaction.commit()
        else:
            transaction.rollback()

    def _receive(self) -> None:
        """Receive some messages: one is done, one gets more time, the others come again."""
        group = self._chance.choice(RECEIVERS)
        if group == RECEIVERS[-1] and self._chance.random() < JOIN_CHANCE:
            # Until its session is over: it never says a word again.
            self._client.run(
                group_calls.join(GroupJoinRequest(group, [RECEIVED], self._name, "", SESSION_MS, EARLIEST, 0, []))
            )
            return
        self._client.send_batch(RECEIVED, [b"received"] * RECEIVED_MAX)
        receiver = self._client.simple_consumer(group, RECEIVED, start="earliest")
        received = receiver.receive(RECEIVED_MAX, INVISIBLE_S)
        receiver.ack(*received[:1])
        for message in received[1:2]:
            receiver.change_invisible_duration(message, INVISIBLE_S)

    def _make_and_delete(self) -> None:
        self._gone += 1
        topic = f"gone-{self._name}-{self._gone}"
        self._client.send_batch(topic, [b"gone"] * 5)
        self._client.delete_topic(topic)
