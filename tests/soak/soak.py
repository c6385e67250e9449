"""The soak: a group, its clients, kills, and the final checks."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import numpy as np

from mqproc import (
    Client,
    Message,
    MqprocError,
    SendOutcomeUnknownError,
    StoredMessage,
    StoreReader,
    Transaction,
    TransactionEndedError,
)
from mqproc.layout import control as words_of
from mqproc.topic_names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from mqproc.types import QueueInfo
from tests.support.group import Group, wait_until
from tests.support.processes import loaded_context
from tests.support.store_builders import ALL_HOURS

# Resources of a whole group: memory, file descriptors, maps, and names in /dev/shm.


SAMPLES_MIN = 60
"""Fewer do not show growth."""
GROWTH = 1.25
"""Allowed factor for each figure, in addition to SLACK."""
SLACK = {"pss_bytes": 32 << 20, "descriptors": 20, "maps": 40, "shared_names": 4}
MEMORY_GROWTH_MAX = 1 << 20
"""Bytes an hour, for each role of a run without kills."""
STEADY_SECONDS_MIN = 1800.0
"""A shorter run does not show growth by the hour: memory grows in steps."""
LASTING_SLACK = 2
"""Allowance for processes that live as long as the group: they see every kill and must keep nothing of it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Sums over all processes of a group."""

    pss_bytes: int
    descriptors: int
    maps: int
    shared_names: int
    lasting_descriptors: int
    """Of the supervisor and the template, which are never killed here."""
    lasting_maps: int


def taken(group: Group) -> Taken:
    """Sample a group; processes that end meanwhile are left out."""
    words = group.words()
    lasting = {words["supervisor_pid"], words["template_pid"]}
    pids = lasting | {words[f"{role}.pid"] for role in words_of.ROLES}
    pss = descriptors = maps = lasting_descriptors = lasting_maps = 0
    for pid in pids - {0}:
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (process / "smaps_rollup").read_text().splitlines()
            pss += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            own_descriptors = len(list((process / "fd").iterdir()))
            own_maps = len((process / "maps").read_text().splitlines())
            descriptors += own_descriptors
            maps += own_maps
            if pid in lasting:
                lasting_descriptors += own_descriptors
                lasting_maps += own_maps
    names = len(list(Path("/dev/shm").iterdir()))
    return Taken(pss, descriptors, maps, names, lasting_descriptors, lasting_maps)


def anonymous_bytes(group: Group) -> dict[str, int]:
    """Anonymous memory of each running role: the part that a leak grows."""
    words = group.words()
    found = {}
    for role in words_of.ROLES:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{words[f'{role}.pid']}/smaps_rollup").read_text().splitlines()
            found[role] = sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return found


def growth_per_hour(samples: list[tuple[float, dict[str, int]]]) -> dict[str, float]:
    """Bytes an hour by which each role's memory grows: a line through the samples after the first quarter."""
    growth = {}
    for role in samples[-1][1]:
        points = [(at / 3600, found[role]) for at, found in samples[len(samples) // 4 :] if role in found]
        growth[role] = float(np.polyfit(*zip(*points, strict=True), 1)[0])
    return growth


def medians(samples: list[Taken]) -> tuple[Taken, Taken]:
    """Medians of the second fifth of a run, after warm-up, and of the last fifth."""
    fifth = len(samples) // 5
    early, late = (
        Taken(*(round(statistics.median(getattr(sample, figure.name) for sample in part)) for figure in fields(Taken)))
        for part in (samples[fifth : 2 * fifth], samples[-fifth:])
    )
    return early, late


def grown(samples: list[Taken]) -> list[str]:
    """Figures that grew by more than allowed from the second to the last fifth."""
    early, late = medians(samples)
    growth = []
    for figure in fields(Taken):
        before, after = getattr(early, figure.name), getattr(late, figure.name)
        lasting = figure.name.startswith("lasting")
        if after > (before + LASTING_SLACK if lasting else GROWTH * before + SLACK[figure.name]):
            growth.append(f"{figure.name}: from {before:,} to {after:,}")
    return growth


# Committed offsets are compared with the members' reports of consumed messages.


Queue = tuple[str, int]


class Worked:
    """Places reported by members, one line "at TOPIC QUEUE OFFSET" each; each line is read once."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._read: dict[Path, int] = {}
        self._ends: dict[Queue, int] = defaultdict(int)
        self._behind: dict[Queue, set[int]] = defaultdict(set)

    def check(self, progress: Mapping[Queue, int]) -> None:
        """Raise AssertionError unless all places below an offset that was read before are reported."""
        self._read_on()
        for queue, offset in progress.items():
            end = self._ends[queue]
            assert offset <= end, f"the committed offset of {queue} is {offset:,}, but {end:,} was not reported"

    def _read_on(self) -> None:
        for report in self._folder.glob(f"{self._name}*.report"):
            at = self._read.get(report, 0)
            with report.open("rb") as file:
                file.seek(at)
                # A killed process may leave an incomplete line.
                whole = file.read().rpartition(b"\n")
            self._read[report] = at + len(whole[0]) + len(whole[1])
            for line in whole[0].decode().splitlines():
                if line.startswith("at "):
                    _, topic, queue_id, offset = line.split()
                    self._behind[topic, int(queue_id)].add(int(offset))
        for queue, places in self._behind.items():
            while self._ends[queue] in places:
                places.discard(self._ends[queue])
                self._ends[queue] += 1


# Client processes of a soak. Each writes every answer as a line before it continues.


TOPICS: Final = ("soak-a", "soak-b")
GROUP: Final = "soak-group"
WORKERS: Final = "soak-workers"
PRODUCERS: Final = "soak-producers"
COMMITS: Final = "commits"
BATCH: Final = 50
PAUSE_S: Final = 0.1
RETRIES: Final = 2
INVISIBLE_S: Final = 5.0
TIMEOUT_S: Final = 30.0
Stop = Any


def _client(store: str) -> Client:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Client(store, timeout=TIMEOUT_S)


def send(store: str, name: str, stop: Stop, report: Path) -> None:
    """Send until stopped; report each body on one line, as acknowledged or of unknown outcome."""
    chance = random.Random(name)
    number = 0
    with _client(store) as client, report.open("a", buffering=1) as lines:
        while not stop.is_set():
            topic = chance.choice(TOPICS)
            bodies = [f"{name}-{number + each}" for each in range(BATCH + 2)]
            number += len(bodies)
            batch, tags = bodies[:BATCH], ["even", "odd"] * (BATCH // 2)
            encoded = [body.encode() for body in batch]
            _send(lines, batch, functools.partial(client.send_batch, topic, encoded, keys=batch, tags=tags))
            later: list[dict[str, Any]] = [{"delay_level": 1}, {"delay": chance.uniform(0.1, 3.0)}]
            for body, more in zip(bodies[BATCH:], later, strict=True):
                more["properties"] = {"name": name}
                _send(lines, [body], functools.partial(client.send, topic, body.encode(), keys=body, **more))
            time.sleep(PAUSE_S)


def _send(lines: Any, bodies: list[str], call: Callable[[], object]) -> None:
    try:
        call()
    except SendOutcomeUnknownError:
        word = "unknown"
    except MqprocError as error:
        if not error.retryable:
            raise
        return
    else:
        word = "acknowledged"
    lines.write("".join(f"{word} {body}\n" for body in bodies))


def transact(store: str, name: str, stop: Stop, report: Path) -> None:
    """Begin and end transactions, answer checks for the others; reports commits like `send`.

    An abandoned one is "unknown": with files that are not retained for a minimum time, it may be too old for a check.
    """
    chance = random.Random(name)
    number = 0
    with (
        _client(store) as client,
        client.transaction_producer(PRODUCERS, _commits) as producer,
        report.open("a", buffering=1) as lines,
    ):
        while not stop.is_set():
            number += 1
            body = f"{name}-{number}-{chance.choice((COMMITS, COMMITS, 'rolls-back'))}"
            transaction = producer.transaction(Message(chance.choice(TOPICS), body.encode(), keys=[body]))
            commits = body.endswith(COMMITS)
            acknowledged = _end(transaction, commits=commits, leaves=chance.random() < 0.2)
            if commits:
                lines.write(f"{'acknowledged' if acknowledged else 'unknown'} {body}\n")
            time.sleep(PAUSE_S)
        while client.transactions.open(PRODUCERS):
            time.sleep(PAUSE_S)


def _commits(message: StoredMessage) -> bool:
    return message.body.endswith(COMMITS.encode())


def _end(transaction: Transaction, *, commits: bool, leaves: bool) -> bool:
    """Begin a transaction and end it unless a check shall; whether both were answered."""
    try:
        transaction.begin()
        if leaves:
            return False
        if commits:
            transaction.commit()
        else:
            transaction.rollback()
    except MqprocError as error:
        if not isinstance(error, SendOutcomeUnknownError | TransactionEndedError) and not error.retryable:
            raise
        return False
    return True


def consume(store: str, name: str, stop: Stop, report: Path) -> None:
    """Consume in the group; reports "at TOPIC QUEUE OFFSET", then "done BODY" or "nacked BODY".

    Both are reported before the message is done.
    """
    chance = random.Random(name)
    with _client(store) as client, report.open("a", buffering=1) as lines:
        while not stop.is_set():
            try:
                with client.consumer(GROUP, TOPICS, start="earliest", session_timeout=5.0) as consumer:
                    for message in consumer.messages(timeout=1.0):
                        lines.write(f"at {message.stored_topic} {message.queue_id} {message.queue_offset}\n")
                        if chance.random() < 0.01:
                            lines.write(f"nacking {message.body.decode()}\n")
                            consumer.nack(message, delay_level=1)
                            lines.write(f"nacked {message.body.decode()}\n")
                        else:
                            lines.write(f"done {message.body.decode()}\n")
                        if stop.is_set():
                            break
            except MqprocError as error:
                lines.write(f"error {error.code}\n")
                time.sleep(0.2)


def receive(store: str, name: str, stop: Stop, report: Path) -> None:
    """Receive; reports "done BODY" before each acknowledgement; some are never acknowledged."""
    chance = random.Random(name)
    with _client(store) as client, report.open("a", buffering=1) as lines:
        worker = client.simple_consumer(WORKERS, TOPICS, start="earliest")
        while not stop.is_set():
            try:
                messages = worker.receive(256, invisible_duration=INVISIBLE_S, timeout=1.0)
                kept = [message for message in messages if chance.random() > 0.01]
                lines.write("".join(f"done {message.body.decode()}\n" for message in kept))
                if kept:
                    worker.ack(*kept)
            except MqprocError as error:
                lines.write(f"error {error.code}\n")
                time.sleep(0.2)


def read(store: str, name: str, stop: Stop, report: Path) -> None:
    """Send read requests of all kinds and check the results."""
    chance = random.Random(name)
    with _client(store) as client, report.open("a", buffering=1) as lines:
        while not stop.is_set():
            try:
                topic = chance.choice(TOPICS)
                for queue in client.queues(topic):
                    found = client.pull(
                        topic, queue.queue_id, max(queue.min_offset, queue.max_offset - 20), 20
                    ).messages
                    _check(client, found[:1], lines)
                client.count(topic)
                client.stats()
            except MqprocError as error:
                lines.write(f"error {error.code}\n")
            time.sleep(0.1)


def _check(client: Client, messages: list[Any], lines: Any) -> None:
    for message in messages:
        try:
            # By key first: messages found later existed then.
            by_key = [found.message_id for key in message.keys for found in client.by_key(message.topic, key)]
            same = client.get(message.message_id).body == message.body and message.message_id in by_key
        except MqprocError as error:
            lines.write(f"error {error.code}\n")
            continue
        if not same:
            lines.write(f"wrong {message.message_id}\n")
        lines.write("asked 1\n")


KILL_EVERY_S: Final = 5.0
MEMBER_KILL_EVERY_S: Final = 30.0
LOOK_S: Final = 1.0
DRAIN_S: Final = 300.0
KEPT_S: Final = 30.0
FOLLOWER: Final = "soak-follower"
BACKLOG: Final = "soak-backlog"
"""A topic without consumers."""
BACKLOG_MESSAGES: Final = 50_000
OPTIONS: Final[dict[str, Any]] = {
    "mapped_file_size_commit_log": 1 << 18,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 2_000,
    "max_index_num": 8_000,
    "max_message_size": 1 << 16,
    "file_reserved_time": 0,
    "delete_when": ALL_HOURS,
    "clean_resource_interval": 1000,
    "retention_guard": "groups",
    "transaction_timeout": 10_000,
}
CLIENTS: Final[dict[str, Callable[..., None]]] = {
    "sender-0": send,
    "sender-1": send,
    "sender-2": transact,
    "member-0": consume,
    "member-1": consume,
    "worker": receive,
    "reader": read,
}


@dataclass
class Soak:
    """One soak in a folder. `say` receives progress messages; with `kill_every_s` 0 nothing is killed.

    A run without kills fails also if the memory of a role grows by more than MEMORY_GROWTH_MAX.
    """

    folder: Path
    seconds: float
    say: Callable[[str], None] = print
    kill_every_s: float = KILL_EVERY_S
    seed: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    samples: list[Taken] = field(default_factory=list)
    role_memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def run(self) -> None:
        """Run it; raises AssertionError if a message is lost."""
        self._random = random.Random(self.seed)
        self._context = loaded_context()
        self._stops = {name: self._context.Event() for name in CLIENTS}
        self._lives: Counter[str] = Counter()
        self._ends: deque[tuple[float, list[QueueInfo]]] = deque()
        self._worked = Worked(self.folder, "member")
        group = self._group = Group(self.folder / "store", **OPTIONS).start()
        try:
            with group.client() as client:
                for topic in TOPICS:
                    client.create_topic(topic, 4)
                client.groups.change(GROUP, retry_max_times=RETRIES)
                for queue in [queue for topic in TOPICS for queue in client.queues(topic)]:
                    client.groups.commit(FOLLOWER, queue.topic, queue.queue_id, 0)
            self._clients = {name: self._start(name) for name in CLIENTS}
            if self.kill_every_s <= 0:
                self._fill_buffers()
            self._trouble()
            self._drain()
            self._check_progress()
            retried, dead = self._copies()
            assert group.stop() == 0, "the group did not stop in order"
        finally:
            for process in getattr(self, "_clients", {}).values():
                process.kill()
            group.close()
        self._check(retried, dead)

    def _start(self, name: str) -> BaseProcess:
        self._lives[name] += 1
        report = self.folder / f"{name}.{self._lives[name]}.report"
        arguments = str(self._group.store), f"{name}.{self._lives[name]}", self._stops[name], report
        process = self._context.Process(target=CLIENTS[name], args=arguments, name=name)
        process.start()
        return process

    def _fill_buffers(self) -> None:
        """Send a large batch: buffers that have a bound grow up to it once, which is no leak."""
        with self._group.client(timeout=TIMEOUT_S) as client:
            client.send_batch(BACKLOG, [b"backlog"] * BACKLOG_MESSAGES, keys=["backlog"] * BACKLOG_MESSAGES)
            client.wait_dispatched()

    def _trouble(self) -> None:
        """Kill roles in random order, each once per round, and sometimes a consumer."""
        roles: list[str] = []
        begin = now = time.monotonic()
        killing = self.kill_every_s > 0
        role_at, member_at = now + self.kill_every_s, now + MEMBER_KILL_EVERY_S
        while (now := time.monotonic()) < begin + self.seconds:
            self.samples.append(taken(self._group))
            if not killing:
                self.role_memory.append((now, anonymous_bytes(self._group)))
            if killing and now >= role_at:
                roles = roles or self._random.sample(words_of.ROLES, len(words_of.ROLES))
                self._kill(roles.pop())
                role_at += self.kill_every_s
            if killing and now >= member_at:
                self._clients["member-1"].kill()
                self._clients["member-1"].join(10)
                self._clients["member-1"] = self._start("member-1")
                member_at += MEMBER_KILL_EVERY_S
            self._look_at_clients()
            self._keep_a_while(now)
            time.sleep(LOOK_S)

    def _keep_a_while(self, now: float) -> None:
        """Move a trailing group that retains received messages until they are acknowledged."""
        with self._group.client(timeout=30.0) as client:
            self._ends.append((now, [queue for topic in TOPICS for queue in client.queues(topic)]))
            while now - self._ends[0][0] > KEPT_S:
                for queue in self._ends.popleft()[1]:
                    client.groups.commit(FOLLOWER, queue.topic, queue.queue_id, queue.max_offset)

    def _kill(self, role: str) -> None:
        pid = self._group.pid(role)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._group.pid(role) != pid, what=f"another {role}")
        self.kills[role] += 1
        self._check_progress()
        words = self._group.words()
        self.say(f"killed {role}; written {words['written']:,}, deleted below {words['min_physical_offset']:,}")

    def _check_progress(self) -> None:
        """Check that nothing counts as consumed without a report."""
        with self._group.client(timeout=30.0) as client:
            queues = client.groups.info(GROUP).queues
        self._worked.check({(queue.topic, queue.queue_id): queue.offset or 0 for queue in queues})

    def _look_at_clients(self) -> None:
        for name, process in self._clients.items():
            assert process.is_alive(), f"{name} has ended with exit code {process.exitcode}"

    def _drain(self) -> None:
        """Stop sending; consume everything, including late redeliveries."""
        for name in ("sender-0", "sender-1", "sender-2"):
            self._stop(name)
        with self._group.client(timeout=30.0) as client:
            end = time.monotonic() + DRAIN_S
            while left := self._left(client):
                assert time.monotonic() < end, f"not consumed within {DRAIN_S:g} s: {left}"
                time.sleep(LOOK_S)
        for name in ("member-0", "member-1", "worker", "reader"):
            self._stop(name)

    def _left(self, client: Client) -> dict[str, int]:
        """Numbers of waiting messages by kind; empty when everything is consumed."""
        words = self._group.words()
        # A message abandoned by a worker is below its committed offset already, and is redelivered.
        forgotten = self._lines("sender", "acknowledged").keys() - self._lines("worker", "done").keys()
        left = {
            "a delay level": words["delayed_messages"],
            "a time": words["timed_messages"],
            "a decision": words["open_transactions"],
            "dispatch": words["written"] - words["dispatched"],
            "the group": client.groups.info(GROUP).lag,
            "the workers": client.groups.info(WORKERS).lag,
            "coming again": len(forgotten),
        }
        return {what: count for what, count in left.items() if count}

    def _stop(self, name: str) -> None:
        self._stops[name].set()
        self._clients[name].join(60)
        assert self._clients[name].exitcode == 0, f"{name} has ended with exit code {self._clients[name].exitcode}"

    def _copies(self) -> tuple[int, int]:
        """Numbers of nacked messages, from the retry and dead-letter topics."""
        with self._group.client() as client:
            ends = [
                sum(queue.max_offset for queue in client.queues(prefix + GROUP))
                for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX)
            ]
        return ends[0], ends[1]

    def _lines(self, name: str, word: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for report in self.folder.glob(f"{name}*.report"):
            # A killed process may leave an incomplete line.
            whole = report.read_text().rpartition("\n")[0].splitlines()
            found.update(line.partition(" ")[2] for line in whole if line.startswith(f"{word} "))
        return found

    def _check(self, retried: int, dead: int) -> None:
        acknowledged, unknown = set(self._lines("sender", "acknowledged")), set(self._lines("sender", "unknown"))
        assert acknowledged, "nothing was sent"
        with StoreReader(self._group.store) as reader:
            stored = Counter(message.body.decode() for topic in TOPICS for message in reader.range(topic))
            letters = {message.body.decode() for message in reader.range(DEAD_LETTER_PREFIX + GROUP)}
        twice = [body for body, count in stored.items() if count > 1 and body not in unknown]
        assert not twice, f"{len(twice)} messages are stored twice: {twice[:5]}"
        consumed = set(self._lines("member", "done")) | set(self._lines("member", "nacking")) | letters
        received = set(self._lines("worker", "done"))
        # Most of the log is deleted by now: messages seen earlier count too.
        strangers = (stored.keys() | consumed | received) - acknowledged - unknown
        assert not strangers, f"{len(strangers)} messages were never sent: {sorted(strangers)[:5]}"
        self._check_consumed("the group", acknowledged, consumed)
        self._check_consumed("the workers", acknowledged, received)
        nacked, nacking = self._lines("member", "nacked").total(), self._lines("member", "nacking").total()
        assert nacked <= retried + dead <= nacking, (
            f"{nacked} to {nacking} nacks made {retried} retries, {dead} dead letters"
        )
        assert not self._lines("reader", "wrong"), "a message was another"
        assert self._lines("reader", "asked"), "nothing was asked"
        if len(self.samples) >= SAMPLES_MIN:
            assert not (more := grown(self.samples)), f"the group has grown: {more}"
        self._check_memory()
        self._verify()
        self.say(
            f"{len(acknowledged):,} messages sent, {len(unknown):,} unknown, {retried:,} retried, {dead:,} dead; "
            f"{self.kills.total()} kills: nothing is lost"
        )
        if len(self.samples) >= SAMPLES_MIN:
            early, late = medians(self.samples)
            self.say(f"taken in the second fifth {early}, in the last one {late}")

    def _check_memory(self) -> None:
        if not self.role_memory:
            return
        growth = growth_per_hour(self.role_memory)
        self.say("memory growth in KiB an hour: " + ", ".join(f"{r} {g / 1024:,.0f}" for r, g in growth.items()))
        if self.seconds >= STEADY_SECONDS_MIN:
            leaks = {role: round(bytes_) for role, bytes_ in growth.items() if bytes_ > MEMORY_GROWTH_MAX}
            assert not leaks, f"memory grows by more than {MEMORY_GROWTH_MAX:,} bytes an hour: {leaks}"

    def _check_consumed(self, who: str, acknowledged: set[str], consumed: set[str]) -> None:
        missing = acknowledged - consumed
        assert not missing, f"{who} never got {len(missing)} of {len(acknowledged)} messages: {sorted(missing)[:5]}"

    def _verify(self) -> None:
        flags = [part for name, value in self._group.options.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "mqproc", "store", "verify", str(self._group.store), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "known_hole" not in done.stdout, done.stdout
