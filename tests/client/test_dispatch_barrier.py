"""Waits for dispatch after lost answers: timeout, and the cause in the error."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.client.connection import running_options
from mqproc.client.dispatch_barrier import Patience, check_index, wait_for_index
from mqproc.client.requests import Call
from mqproc.errors import BadRequestError, RequestTimeoutError
from mqproc.io.store_io import Clock
from mqproc.paths import StorePaths
from mqproc.util.units import MIB
from mqproc.wire.operations import Operation
from tests.support.command_line import call
from tests.support.group import Group


class FakeClock(Clock):
    """A clock that advances by sleeping."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class Store:
    """Answers of a store whose dispatch is stopped until a given time."""

    def __init__(self, clock: FakeClock, number: int, until_s: float = 1e9) -> None:
        self.clock = clock
        self.number = number
        self.until_ns = int(until_s * 1e9)

    def run(self, call: Call[Any]) -> Any:
        if call.operation != Operation.STATS:
            return None
        stands = self.clock.now_ns < self.until_ns
        number = self.number if stands else 0
        return {"written": 5000, "dispatched": 1000 if stands else 5000, "dispatch_errno": number}


def test_dispatch_wait_logs_the_cause_and_raises_it() -> None:
    clock, notes = FakeClock(), list[str]()
    patience = Patience(clock, 1, 3, notes.append)
    with pytest.raises(
        RequestTimeoutError, match=r"not caught up in 3 s: 4,000 bytes are left; dispatch waits: No space"
    ):
        wait_for_index(Store(clock, errno.ENOSPC), patience)
    assert 3e9 < clock.now_ns < 3.1e9
    assert notes == [f"dispatch waits: No space left on device (errno {errno.ENOSPC}); this waits 3 s for it"]


def test_dispatch_that_says_nothing_is_looked_after_by_status() -> None:
    clock = FakeClock()
    with pytest.raises(
        RequestTimeoutError, match="in 60 s: 4,000 bytes are left; it is slow or blocked: see mqproc st"
    ):
        wait_for_index(Store(clock, 0), Patience(clock, 1))


def test_dispatch_wait_returns_when_dispatch_advances() -> None:
    clock, notes = FakeClock(), list[str]()
    wait_for_index(Store(clock, errno.ENOSPC, until_s=2), Patience(clock, 1, 3, notes.append))
    assert 2e9 <= clock.now_ns < 2.1e9
    assert len(notes) == 1


@pytest.fixture(scope="module")
def without_index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Twenty messages of a topic in a store that has no index, and a topic that they can go to."""
    group = Group(tmp_path_factory.mktemp("plain") / "store", message_index_enable=False).start()
    with group.client() as client:
        client.create_topic("there", 2)
        client.send_batch("source", [b"%d" % number for number in range(20)])
    yield group
    group.close()


def stored(group: Group, topic: str) -> int:
    group.wait_dispatched()
    with group.client() as client:
        return sum(queue.max_offset for queue in client.queues(topic))


def test_store_without_index_is_found_by_folder_and_sockets(without_index: Group, tmp_path: Path) -> None:
    for name in (without_index.store, without_index.paths.socket("writer")):
        with pytest.raises(BadRequestError, match="message_index_enable is off"):
            check_index(name)
    check_index(tmp_path)


def test_running_options_of_oversized_file_are_refused(without_index: Group, tmp_path: Path) -> None:
    paths = StorePaths(tmp_path)
    paths.settings.parent.mkdir()
    text = without_index.paths.settings.read_bytes()
    paths.settings.write_bytes(text.ljust(MIB))
    assert running_options(paths) == running_options(without_index.paths)
    paths.settings.write_bytes(text.ljust(MIB + 1))
    with pytest.raises(OSError, match="1,048,577 bytes"):
        running_options(paths)
    check_index(tmp_path)


def test_named_replay_without_index_stores_nothing(without_index: Group) -> None:
    with without_index.client() as client:
        assert client.replay("source", "made", name="n").sent == 20
        for topic in ("made", "there"):
            before = stored(without_index, topic)
            with pytest.raises(BadRequestError, match="message_index_enable is off"):
                client.replay("source", topic, name="n")
            assert stored(without_index, topic) == before
        # A replay without a name needs no index.
        assert client.replay("source", "there").sent == 20


def test_cli_replay_needs_an_index_only_when_continued(without_index: Group) -> None:
    """A replay that was never started has no copies."""
    with without_index.client() as client:
        client.create_topic("commanded", 2)
    command = ("replay", "--topic", "source", "--to", "commanded", "--store", without_index.store)
    for times, more in ((1, ()), (1, ()), (2, ("--restart",))):
        assert call(*command, *more).code == 0
        assert stored(without_index, "commanded") == 20 * times
    (journal,) = (without_index.paths.own / "replays").glob("*.json")
    journal.write_text(json.dumps(json.loads(journal.read_text()) | {"finished_ms": 0}))
    outcome = call(*command)
    assert outcome.code == 2
    assert "they might be stored twice; --restart sends all of them again" in outcome.err
    assert stored(without_index, "commanded") == 40


def test_import_without_index_does_not_continue(without_index: Group, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{number}\n" for number in range(10)))
    command = ("import", path, "--topic", "lines", "--format", "lines", "--store", without_index.store)
    assert call(*command).code == 0
    assert stored(without_index, "lines") == 10
    with path.open("a") as file:
        file.write("10\n")
    outcome = call(*command)
    assert outcome.code == 2
    assert "message_index_enable is off" in outcome.err
    assert "--restart imports everything again" in outcome.err
    assert stored(without_index, "lines") == 10
    assert call(*command, "--restart").code == 0
    assert stored(without_index, "lines") == 21
