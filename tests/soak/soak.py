"""The soak itself: a group, its clients, the kills, and what must be true at the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from mqproc import Client, StoreReader
from mqproc.layout import control as words_of
from mqproc.topic_names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from mqproc.types import QueueInfo
from tests.conftest import Group, wait_until
from tests.soak import clients
from tests.soak.clients import GROUP, RETRIES, TOPICS, WORKERS
from tests.soak.progress import Worked
from tests.soak.watching import SAMPLES_MIN, Taken, grown, medians, taken
from tests.support.aged_store import ALL_HOURS
from tests.workers import loaded_context

KILL_EVERY_S: Final = 5.0
MEMBER_KILL_EVERY_S: Final = 30.0
LOOK_S: Final = 1.0
DRAIN_S: Final = 300.0
KEPT_S: Final = 30.0
FOLLOWER: Final = "soak-follower"
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
    "sender-0": clients.send,
    "sender-1": clients.send,
    "sender-2": clients.transact,
    "member-0": clients.consume,
    "member-1": clients.consume,
    "worker": clients.receive,
    "reader": clients.read,
}


@dataclass
class Soak:
    """One soak in a folder. `say` is told what happens."""

    folder: Path
    seconds: float
    say: Callable[[str], None] = print
    kill_every_s: float = KILL_EVERY_S
    seed: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    samples: list[Taken] = field(default_factory=list)

    def run(self) -> None:
        """Raises AssertionError naming what was lost."""
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

    def _trouble(self) -> None:
        """Kill roles in turns, each once in every round, and a consumer now and then."""
        roles: list[str] = []
        begin = now = time.monotonic()
        role_at, member_at = now + self.kill_every_s, now + MEMBER_KILL_EVERY_S
        while (now := time.monotonic()) < begin + self.seconds:
            self.samples.append(taken(self._group))
            if now >= role_at:
                roles = roles or self._random.sample(words_of.ROLES, len(words_of.ROLES))
                self._kill(roles.pop())
                role_at += self.kill_every_s
            if now >= member_at:
                self._clients["member-1"].kill()
                self._clients["member-1"].join(10)
                self._clients["member-1"] = self._start("member-1")
                member_at += MEMBER_KILL_EVERY_S
            self._look_at_clients()
            self._keep_a_while(now)
            time.sleep(LOOK_S)

    def _keep_a_while(self, now: float) -> None:
        """A group that follows the others keeps what was received and not acknowledged: progress has passed that."""
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
        """Nothing is consumed that nobody has had."""
        with self._group.client(timeout=30.0) as client:
            queues = client.groups.info(GROUP).queues
        self._worked.check({(queue.topic, queue.queue_id): queue.offset or 0 for queue in queues})

    def _look_at_clients(self) -> None:
        for name, process in self._clients.items():
            assert process.is_alive(), f"{name} has ended with exit code {process.exitcode}"

    def _drain(self) -> None:
        """No more is sent; all that was sent is consumed, what comes later too."""
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
        """How many messages wait for what; empty when everything is consumed."""
        words = self._group.words()
        # What a worker has forgotten is behind its progress already, and comes again.
        forgotten = self._lines("sender", "told").keys() - self._lines("worker", "done").keys()
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
        """How many messages were nacked, by what the retry and the dead-letter topic have got."""
        with self._group.client() as client:
            ends = [
                sum(queue.max_offset for queue in client.queues(prefix + GROUP))
                for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX)
            ]
        return ends[0], ends[1]

    def _lines(self, name: str, word: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for report in self.folder.glob(f"{name}*.report"):
            # A killed process may have left half a line.
            whole = report.read_text().rpartition("\n")[0].splitlines()
            found.update(line.partition(" ")[2] for line in whole if line.startswith(f"{word} "))
        return found

    def _check(self, retried: int, dead: int) -> None:
        told, unknown = set(self._lines("sender", "told")), set(self._lines("sender", "unknown"))
        assert told, "nothing was sent"
        with StoreReader(self._group.store) as reader:
            stored = Counter(message.body.decode() for topic in TOPICS for message in reader.range(topic))
            letters = {message.body.decode() for message in reader.range(DEAD_LETTER_PREFIX + GROUP)}
        twice = [body for body, count in stored.items() if count > 1 and body not in unknown]
        assert not twice, f"{len(twice)} messages are stored twice: {twice[:5]}"
        consumed = set(self._lines("member", "done")) | set(self._lines("member", "nacking")) | letters
        received = set(self._lines("worker", "done"))
        # Most of what was stored is deleted by now, so what was seen of it counts too.
        strangers = (stored.keys() | consumed | received) - told - unknown
        assert not strangers, f"{len(strangers)} messages were never sent: {sorted(strangers)[:5]}"
        self._check_consumed("the group", told, consumed)
        self._check_consumed("the workers", told, received)
        nacked, nacking = self._lines("member", "nacked").total(), self._lines("member", "nacking").total()
        assert nacked <= retried + dead <= nacking, (
            f"{nacked} to {nacking} nacks made {retried} retries, {dead} dead letters"
        )
        assert not self._lines("reader", "wrong"), "a message was another"
        assert self._lines("reader", "asked"), "nothing was asked"
        if len(self.samples) >= SAMPLES_MIN:
            assert not (more := grown(self.samples)), f"the group has grown: {more}"
        self._verify()
        self.say(
            f"{len(told):,} messages told, {len(unknown):,} unknown, {retried:,} retried, {dead:,} dead; "
            f"{self.kills.total()} kills: nothing is lost"
        )
        if len(self.samples) >= SAMPLES_MIN:
            early, late = medians(self.samples)
            self.say(f"taken in the second fifth {early}, in the last one {late}")

    def _check_consumed(self, who: str, told: set[str], consumed: set[str]) -> None:
        missing = told - consumed
        assert not missing, f"{who} never got {len(missing)} of {len(told)} messages: {sorted(missing)[:5]}"

    def _verify(self) -> None:
        flags = [part for name, value in self._group.options.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "mqproc", "store", "verify", str(self._group.store), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "known_hole" not in done.stdout, done.stdout
