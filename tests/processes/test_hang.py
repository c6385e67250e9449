"""A hung role: the supervisor detects it, its Python stack is logged, no message is lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import Message, MqprocError
from mqproc.layout import control as words_of
from tests.support.group import Group, wait_until

pytestmark = pytest.mark.timeout(400)  # Slow: with `-n …` it starts before others.

SILENT_MS = 8000
BUSY_MS = 15_000
"""Also the time that a role has to start in: more than it takes on a busy machine."""


class Sender(threading.Thread):
    """Sends numbered messages in small batches until ended; records which were acknowledged."""

    def __init__(self, group: Group) -> None:
        super().__init__(daemon=True)
        self._group = group
        self._ended = threading.Event()
        self.acknowledged: list[str] = []

    def run(self) -> None:
        number = 0
        with self._group.client(timeout=30) as client:
            while not self._ended.wait(0.005):
                bodies = [f"{number + each}" for each in range(5)]
                number += len(bodies)
                try:
                    client.send_many([Message("T", body.encode(), keys=[body]) for body in bodies])
                    client.groups.commit("G", "T", 0, number // 100)
                except MqprocError:
                    continue  # Outcome unknown, so not expected.
                self.acknowledged += bodies

    def end(self) -> None:
        self._ended.set()
        self.join(120)
        assert not self.is_alive()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    found = Group(
        tmp_path / "store",
        heartbeat_timeout_ms=SILENT_MS,
        busy_timeout_ms=BUSY_MS,
        flush_interval_commit_log=20,
        flush_commit_log_thorough_interval=50,
    )
    yield found
    found.close()


@pytest.mark.parametrize(
    ("role", "point", "state", "limit_ms", "frame"),
    [
        (words_of.WRITER, "append.before_publish:40", "running", SILENT_MS, "roles/writer/role.py"),
        (words_of.DISPATCHER, "dispatch.units_written:20", "running", SILENT_MS, "roles/dispatcher.py"),
        (words_of.QUERY, "offsets.tmp:1", "running", SILENT_MS, "roles/query/role.py"),
        (words_of.COMMITLOG_FLUSHER, "flush.before_msync:20", "syncing", BUSY_MS, "roles/flushers.py"),
    ],
)
def test_hung_role_is_replaced_and_stack_logged(
    group: Group, role: str, point: str, state: str, limit_ms: int, frame: str
) -> None:
    group.environment = {"MQPROC_HANG": point}
    group.start()
    pid = group.pid(role)
    sender = Sender(group)
    sender.start()
    wait_until(lambda: group.words()[f"{role}.restarts"] == 1, 60, f"{role} is replaced")
    wait_until(lambda: group.ready() and group.pid(role) != pid, 30, f"{role} runs again")
    # The role does the remaining work and continues.
    acknowledged = len(sender.acknowledged)
    wait_until(lambda: len(sender.acknowledged) > acknowledged + 100, 60, "messages are taken")
    sender.end()

    output = group.output.read_text()
    silent = re.search(rf"{role} was unresponsive for ([0-9.]+) s while {state}: aborted", output)
    assert silent is not None, output[-4000:]
    assert float(silent[1]) * 1000 >= limit_ms
    (crash,) = [line for line in output.splitlines() if "a role was aborted" in line]
    assert "SIGABRT" in crash
    assert f"it was unresponsive for {silent[1]} s while {state}" in crash
    assert "fault_injection.py" in crash
    assert "in crash_point" in crash
    assert frame in crash

    with group.client() as client:
        client.wait_dispatched()
        stored = [message.body.decode() for message in client.range("T")]
        assert {*sender.acknowledged} <= {*stored}
        assert len(stored) == len({*stored})
        for body in sender.acknowledged[:: len(sender.acknowledged) // 20]:
            assert [message.body.decode() for message in client.by_key("T", body)] == [body]
    assert {name: group.words()[f"{name}.restarts"] for name in words_of.ROLES} == {
        name: int(name == role) for name in words_of.ROLES
    }
    assert group.stop() == 0
