"""A real Prometheus, and faults that make alerts fire in real groups.

A scenario has its own group. `cause` and `cure` run in a thread; `alerts` must fire for the group between the two
or soon after, and must be resolved at the end.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from grafana.source.files import dump, prometheus_config
from grafana.source.rules import rule_files
from grafana.source.settings import Durations
from mqproc import Message, MqprocError, StoreReadOnlyError
from mqproc.io.fault_injection import FAULT_VARIABLE, HANG_VARIABLE
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.control_words import flush_behind_bytes
from mqproc.layout import control as words_of
from tests.support.group import PATIENCE_S, SMALL, Group, wait_until
from tests.support.store_builders import Engine

# A real Prometheus on loopback, with the rules' durations divided by thirty


SHORT = Durations(1 / 30)
TIMEOUT_S = 120.0


def free_port() -> int:
    """A free port outside the range of ephemeral ports."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(1024, given))) as found:
            return int(found.getsockname()[1])


class Prometheus:
    """Runs within a `with` block."""

    def __init__(self, folder: Path, targets: list[int]) -> None:
        """`targets`: ports of the monitors."""
        (folder / "rules").mkdir(parents=True, exist_ok=True)
        for name, rules in rule_files(SHORT).items():
            (folder / "rules" / name).write_text(dump(rules))
        config = prometheus_config(SHORT, [f"127.0.0.1:{port}" for port in targets], str(folder / "rules"))
        (folder / "prometheus.yml").write_text(dump(config))
        self._port = free_port()
        self._output = folder / "output"
        self._command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]

    def __enter__(self) -> Prometheus:
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        self.wait(self._ready, "Prometheus answers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)

    def query(self, expr: str) -> list[Any]:
        """Series of an instant query."""
        found: list[Any] = self._get("/api/v1/query", query=expr)["result"]
        return found

    def targets_up(self) -> int:
        return sum(int(series["value"][1]) for series in self.query("up"))

    def firing(self) -> set[tuple[str, str]]:
        """(alert, port of the group) of every firing alert."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"]["instance"].rpartition(":")[2])
            for alert in alerts
            if alert["state"] == "firing"
        }

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Value of the condition once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self._process.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.2)
        return found

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", found
        return found["data"]


# promtool


REASON = "Prometheus is not installed: apt-get install prometheus"
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None, reason=REASON
)


def promtool(*arguments: str | Path, stdin: str = "") -> None:
    """Run promtool, and fail with its output if it reports a problem."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


HOURS = ";".join(f"{hour:02d}" for hour in range(24))
RAM_DISK_BYTES = 96 << 20
FAILING_SYNC = 100
"""Beyond those of a start, and one of the flushers' within a second or two of load."""


class Sender(threading.Thread):
    """Sends the same frame repeatedly and ignores refusals."""

    def __init__(self, group: Group, topic: str, count: int, size: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self._group = group
        self._messages = [Message(topic, b"x" * size, keys=["k"]) for _ in range(count)]
        self._pause_s = pause_s
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(MqprocError), self._group.client(timeout=8) as client:
                while not self._ended.wait(self._pause_s):
                    client.send_many(self._messages)

    def end(self) -> None:
        self._ended.set()
        self.join(20)


class Scenario(abc.ABC):
    """One group and its fault."""

    name = ""
    """Of the store's folder."""
    alerts: frozenset[str] = frozenset()
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.store = folder / self.name
        self.group = Group(self.store, metrics_port=self.port, **self.options)
        self.senders: list[Sender] = []

    def start(self) -> None:
        self.group.start()

    @abc.abstractmethod
    def cause(self) -> None:
        """Cause the condition of the alerts."""

    @abc.abstractmethod
    def cure(self, fired: Callable[[str], bool]) -> None:
        """Fix it; `fired` returns whether an alert of this group fires now."""

    def close(self) -> None:
        for sender in self.senders:
            sender.end()
        self.group.close()

    def send(self, topic: str, count: int, size: int, pause_s: float) -> None:
        """Start sending."""
        self.senders.append(Sender(self.group, topic, count, size, pause_s))
        self.senders[-1].start()

    def signal(self, role: str, number: signal.Signals) -> None:
        os.kill(self.group.pid(role), number)


class Roles(Scenario):
    """Roles that crash, run in a debugger, or are stopped as by a hanging disk."""

    name = "roles"
    alerts = frozenset(
        {
            "MqprocRoleRestarting",
            "MqprocRoleDown",
            "MqprocHeartbeatMissing",
            "MqprocDispatchStalled",
            "MqprocDispatchBehind",
            "MqprocFlushLate",
            "MqprocForcedFlushMissing",
            "MqprocLossWindow",
            "MqprocSegmentWaits",
            "MqprocAppendSlow",
        }
    )
    options = {  # noqa: RUF012
        "heartbeat_timeout_ms": 600_000,
        "busy_timeout_ms": 600_000,
        "flush_consume_queue_thorough_interval": 1000,
    }
    _stopped = (words_of.DISPATCHER, words_of.CQ_FLUSHER)

    def cause(self) -> None:
        self._kill_twice(words_of.INDEX_FLUSHER)
        self._lend(words_of.KEEPER)
        self.send("orders", 3, 200_000, 0.4)
        wait_until(lambda: self.group.words()["written"] > 2_000_000, what="messages flow")
        for role in self._stopped:
            self.signal(role, signal.SIGSTOP)
        self.signal(words_of.COMMITLOG_FLUSHER, signal.SIGSTOP)
        waits = self.group.words()["writer_segment_waits"]
        wait_until(lambda: self.group.words()["writer_segment_waits"] > waits, 60, "the writer waits for a segment")
        time.sleep(2)
        # The append continues: stored, but late.
        written = self.group.words()["written"]
        self.signal(words_of.COMMITLOG_FLUSHER, signal.SIGCONT)
        wait_until(lambda: self.group.words()["written"] > written, what="the late append")
        time.sleep(1.5)
        self.signal(words_of.COMMITLOG_FLUSHER, signal.SIGSTOP)

    def cure(self, fired: Callable[[str], bool]) -> None:
        for role in (*self._stopped, words_of.COMMITLOG_FLUSHER):
            self.signal(role, signal.SIGCONT)
        for sender in self.senders:
            sender.end()
        # Not SIGINT, which a child of a process that ignores it ignores too.
        self._borrower.send_signal(signal.SIGTERM)
        self._borrower.wait(30)

    def close(self) -> None:
        if hasattr(self, "_borrower"):
            self._borrower.kill()
            self._borrower.wait(10)
        super().close()

    def _kill_twice(self, role: str) -> None:
        for count in (1, 2):
            self.signal(role, signal.SIGKILL)
            self._wait_restarted(role, count)

    def _wait_restarted(self, role: str, count: int) -> None:
        def restarted() -> bool:
            words = self.group.words()
            return words[f"{role}.restarts"] == count and words[f"{role}.supervised"] == words_of.RUNNING

        wait_until(restarted, what=f"{role} runs again")

    def _lend(self, role: str) -> None:
        command = [sys.executable, "-m", "mqproc", "run", role, "--store", str(self.store)]
        self._borrower = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


class Damage(Scenario):
    """Log bytes changed while the group was stopped; then the whole group is killed."""

    name = "damage"
    alerts = frozenset({"MqprocDamaged", "MqprocReadOnly", "MqprocDegraded", "MqprocDown"})
    options = {"on_damage": "read_only"}  # noqa: RUF012

    def cause(self) -> None:
        with self.group.client() as client:
            client.send_many([Message("orders", bytes([number % 251]) * 1000) for number in range(500)])
        self.group.wait_dispatched()
        assert self.group.stop() == 0
        self._segment = min((self.store / "commitlog").glob("0*"))
        self._kept = self._segment.read_bytes()
        with self._segment.open("r+b") as file:
            file.seek(100_000)
            file.write(b"\xff" * 5000)
        # Below its mark the log is trusted; without one a start checks every record.
        shutil.rmtree(self.group.paths.marks)
        self.group.start()

    def cure(self, fired: Callable[[str], bool]) -> None:
        self.group.kill()
        wait_until(lambda: fired("MqprocDown"), 60, "the alert that the group is down")
        self._segment.write_bytes(self._kept)
        self.group.start()


class Room(Scenario):
    """Too many queues, a group that consumes nothing, and retention that must keep its messages."""

    name = "room"
    alerts = frozenset(
        {
            "MqprocQueueTableAlmostFull",
            "MqprocConsumerLagGrowing",
            "MqprocConsumerStopped",
            "MqprocRetentionHeldBack",
        }
    )
    options = {  # noqa: RUF012
        "max_queues": 16,
        "retention_guard": "groups",
        "file_reserved_time": 0,
        "delete_when": HOURS,
        "clean_resource_interval": 500,
    }

    def start(self) -> None:
        config = self.store / "config"
        config.mkdir(parents=True)
        self.store.chmod(0o700)
        (config / "consumerOffset.json").write_text('{"offsetTable":{"orders@billing":{0:0,1:0}}}')
        super().start()

    def cause(self) -> None:
        with self.group.client() as client:
            client.create_topic("orders", 15)
        self.send("orders", 300, 1500, 0.25)

    def cure(self, fired: Callable[[str], bool]) -> None:
        for sender in self.senders:
            sender.end()
        self.group.stop()
        self.group.options |= {"max_queues": 64}
        self.group.start()
        with self.group.client() as client:
            client.groups.delete("billing")


class Expired(Room):
    """Retention that deletes messages that a group has not consumed."""

    name = "expired"
    alerts = frozenset({"MqprocUnconsumedDeleted"})
    options = Room.options | {"max_queues": 64, "retention_guard": "none"}

    def cure(self, fired: Callable[[str], bool]) -> None:
        for sender in self.senders:
            sender.end()


class Failures(Scenario):
    """A clock set back, dead letters, segments deleted before dispatch, then a failed sync."""

    name = "failures"
    alerts = frozenset({"MqprocDeadLettersGrowing", "MqprocClockSteps", "MqprocDispatchGap", "MqprocSyncFailed"})

    def start(self) -> None:
        """The clock was ten minutes ahead at the last write, and has been corrected since."""
        engine = Engine(self.store, **SMALL)
        engine.append("before", [b"from later"], round(time.time() * 1000) + 600_000)
        engine.table.close()
        shutil.rmtree(engine.paths.own)
        self.store.chmod(0o700)
        super().start()

    def cause(self) -> None:
        assert self.group.words()["writer_clock_steps"] == 0
        with self.group.client() as client:
            client.send_many([Message("orders", b"x" * 100) for _ in range(20)])
            assert self.group.words()["writer_clock_steps"] == 1
            client.wait_dispatched()
            # All at once, right after the group's creation: Prometheus does not see the counter increase.
            with client.consumer("shipping", "orders", start="earliest") as consumer:
                given_up = 0
                while given_up < 20:
                    messages = consumer.receive(max_messages=64, timeout=PATIENCE_S)
                    assert messages, "no more messages to give up"
                    consumer.nack(*messages, delay_level=-1)
                    given_up += len(messages)
        self._delete_before_dispatch()

    def _delete_before_dispatch(self) -> None:
        """Delete segments before dispatch, which retention never does."""
        self.signal(words_of.DISPATCHER, signal.SIGSTOP)
        with self.group.client() as client:
            client.send_many([Message("orders", b"x" * 10_000) for _ in range(400)])
        control = Control.open(StoreIO(), self.group.paths, write=True)
        control.store(words_of.RETENTION_AIM, 2 << 20)
        control.close()
        self._restart(words_of.KEEPER)
        wait_until(lambda: self.group.words()["min_physical_offset"] == 2 << 20, PATIENCE_S, "the log's minimum moved")
        first = self.group.paths.commit_log / f"{0:020d}"
        wait_until(lambda: not first.exists(), PATIENCE_S, "the first segment deleted")
        self.signal(words_of.DISPATCHER, signal.SIGCONT)
        wait_until(lambda: self.group.words()["dispatch_gap_bytes"] > 0, PATIENCE_S, "the gap seen")

    def _restart(self, role: str) -> None:
        before = self.group.pid(role)
        self.signal(role, signal.SIGKILL)
        wait_until(lambda: self.group.pid(role) not in (0, before) and self.group.ready(), PATIENCE_S, f"{role} again")

    def cure(self, fired: Callable[[str], bool]) -> None:
        """A sync fails under load; a repair restores service."""
        self.group.stop()
        self.group.environment = {FAULT_VARIABLE: f"sync:{FAILING_SYNC}:EIO"}
        self.group.options |= {"flush_interval_commit_log": 20, "flush_commit_log_thorough_interval": 20}
        self.group.start()
        assert self._failed_syncs() == set()
        self.send("orders", 1, 100, 0.01)
        wait_until(lambda: fired("MqprocSyncFailed"), 60, "the alert that a sync failed")
        assert self._failed_syncs() == {errno.EIO}
        self.senders.pop().end()
        with self.group.client() as client, pytest.raises(StoreReadOnlyError):
            client.send("orders", b"refused")
        assert self.group.stop() == 1
        self.group.environment = {}
        command = [sys.executable, "-m", "mqproc", "store", "repair", "--execute", str(self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert not self.group.paths.read_only.exists(), done.stdout + done.stderr
        self.group.start()
        with self.group.client() as client:
            client.send("orders", b"taken")

    def _failed_syncs(self) -> set[int]:
        return {value for name, value in self.group.words().items() if name.endswith("sync_errno") and value}


class Hung(Scenario):
    """A role that hangs until the supervisor kills it."""

    name = "hung"
    alerts = frozenset({"MqprocHeartbeatMissing"})
    options = {"busy_timeout_ms": 15_000}  # noqa: RUF012

    def start(self) -> None:
        # While it syncs a role is busy, and may be silent for longer.
        self.group.environment = {HANG_VARIABLE: "flush.before_msync:3"}
        super().start()

    def cause(self) -> None:
        self.send("orders", 1, 20_000, 0.1)
        silent = "commitlog-flusher was unresponsive for"
        wait_until(lambda: silent in self.group.output.read_text(), 180, "the supervisor sees a role that hangs")

    def cure(self, fired: Callable[[str], bool]) -> None:
        """The supervisor logs the role's stack and starts another one."""
        self.senders.pop().end()
        wait_until(lambda: self.group.words()["commitlog-flusher.restarts"] == 1, PATIENCE_S, "the role is replaced")
        assert "in crash_point" in self.group.output.read_text()
        wait_until(lambda: flush_behind_bytes(self.group.words()) == 0, PATIENCE_S, "all is durable")


class FullDisk(Scenario):
    """A full disk while dispatch has data to write."""

    name = "disk"
    alerts = frozenset(
        {
            "MqprocDiskFull",
            "MqprocDiskAlmostFull",
            "MqprocDispatchBlocked",
            "MqprocRefusing",
            "MqprocErrorsLogged",
        }
    )
    options = {"max_queues": 64, "disk_space_clean_forcibly_ratio": 99}  # noqa: RUF012

    def start(self) -> None:
        self.store.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", f"size={RAM_DISK_BYTES},mode=0700", "mqproc-test", str(self.store)]
        subprocess.run(command, check=True, capture_output=True, timeout=20)
        super().start()

    def cause(self) -> None:
        self.signal(words_of.DISPATCHER, signal.SIGSTOP)
        with self.group.client() as client:
            client.send_many([Message("orders", b"x" * 100, keys=["k"]) for _ in range(100)])
        self._ballast = self.store / "ballast"
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(fd, bytes(1 << 16)):
                pass
        os.close(fd)
        self.signal(words_of.DISPATCHER, signal.SIGCONT)
        self.send("orders", 1, 100, 0.2)

    def cure(self, fired: Callable[[str], bool]) -> None:
        self._ballast.unlink()
        for sender in self.senders:
            sender.end()

    def close(self) -> None:
        super().close()
        if self.store.is_mount():
            wait_until(self._unmounted, 20, "the RAM disk is free")

    def _unmounted(self) -> bool:
        return subprocess.run(["umount", str(self.store)], capture_output=True, timeout=20, check=False).returncode == 0


KINDS: tuple[type[Scenario], ...] = (Roles, Damage, Room, Expired, Failures, Hung, FullDisk)


def scenarios(folder: Path) -> Iterator[Scenario]:
    """Scenarios that this machine supports: a disk of one's own needs root."""
    for kind in KINDS:
        if kind is FullDisk and not can_mount(folder):
            continue
        yield kind(folder)


def can_mount(folder: Path) -> bool:
    """Whether a RAM disk can be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    place = folder / "try"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1M", "mqproc-test", str(place)]
    if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode != 0:
        return False
    subprocess.run(["umount", str(place)], check=True, capture_output=True, timeout=20)
    return True
