"""`kill -9` of each process under load: acknowledged messages are stored exactly once.

Four client processes continuously send batches and record the answers. After the kills, every acknowledged message must
be found at its offset; queues and index must equal a rebuild from the log, byte for byte.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import MqprocError, SendOutcomeUnknownError
from mqproc.layout import control as words_of
from tests.support.group import Group, assert_equals_rebuild, wait_until
from tests.support.processes import loaded_context

CLIENTS = 4
BATCH = 20
ROLE_BACK_S = 5.0
GAP_S = 5.0
"""So long a client may be without an answer when a role is killed."""
SHORT_S = 0.1
Gap = tuple[float, float]
"""When, by the clock that all processes share, a client had an answer and the next one."""


def send_until_stopped(store: str, number: int, stop: Any, report: str) -> None:
    """A client process: send batches with unique bodies; write the answers to a file at the end."""
    from mqproc import Client

    acknowledged: list[tuple[str, int, int, int]] = []
    unknown: list[str] = []
    gaps: list[Gap] = []
    last = time.monotonic()
    sequence = 0
    with Client(store, timeout=20.0) as client:
        while not stop.is_set():
            names = [f"{number}-{sequence + each}" for each in range(BATCH)]
            sequence += BATCH
            try:
                sent = client.send_batch("kill", [name.encode() for name in names], keys=names, tags="t")
            except SendOutcomeUnknownError:
                unknown += names
                continue
            except MqprocError:
                continue
            now = time.monotonic()
            if now - last > SHORT_S:
                gaps.append((last, now))
            last = now
            columns = (sent.queue_ids.tolist(), sent.queue_offsets.tolist(), sent.physical_offsets.tolist())
            acknowledged += list(zip(names, *columns, strict=True))
    Path(report).write_text(json.dumps([acknowledged, unknown, gaps]))


class Load:
    """Four running client processes."""

    def __init__(self, group: Group, folder: Path) -> None:
        context = loaded_context()
        self.stop = context.Event()
        self.reports = [folder / f"client{number}.json" for number in range(CLIENTS)]
        self.processes = [
            context.Process(
                target=send_until_stopped, args=(str(group.store), number, self.stop, str(self.reports[number]))
            )
            for number in range(CLIENTS)
        ]
        for process in self.processes:
            process.start()

    def finish(self) -> tuple[dict[str, tuple[int, int, int]], set[str], list[Gap]]:
        """(acknowledged by name: queue id, queue offset, physical offset; unknown names; gaps)."""
        self.stop.set()
        for process in self.processes:
            process.join(120)
            assert process.exitcode == 0
        acknowledged: dict[str, tuple[int, int, int]] = {}
        unknown: set[str] = set()
        gaps: list[Gap] = []
        for report in self.reports:
            own_acknowledged, own_unknown, own_gaps = json.loads(report.read_text())
            acknowledged |= {name: (queue_id, offset, at) for name, queue_id, offset, at in own_acknowledged}
            unknown |= set(own_unknown)
            gaps += [(begin, end) for begin, end in own_gaps]
        return acknowledged, unknown, gaps


def all_messages(group: Group) -> dict[str, list[tuple[int, int, int]]]:
    """Every message of the topic by body, with all its offsets."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    with group.client() as client:
        for queue in client.queues("kill"):
            offset = queue.min_offset
            while offset < queue.max_offset:
                pulled = client.pull("kill", queue.queue_id, offset, max_messages=4096)
                for message in pulled.messages:
                    place = (message.queue_id, message.queue_offset, message.physical_offset)
                    found.setdefault(message.body.decode(), []).append(place)
                assert pulled.next_offset > offset, pulled
                offset = pulled.next_offset
    return found


def check_all(group: Group, acknowledged: dict[str, tuple[int, int, int]], unknown: set[str]) -> None:
    group.wait_dispatched()
    found = all_messages(group)
    missing = {name for name in acknowledged if name not in found}
    assert not missing, f"{len(missing)} of {len(acknowledged)} acknowledged messages are gone: {sorted(missing)[:5]}"
    moved = {name for name, place in acknowledged.items() if found[name] != [tuple(place)]}
    assert not moved, {name: (acknowledged[name], found[name]) for name in sorted(moved)[:5]}
    strangers = set(found) - set(acknowledged) - unknown
    assert not strangers, sorted(strangers)[:5]
    assert all(len(places) == 1 for places in found.values())


@pytest.mark.parametrize("role", words_of.ROLES)
def test_killed_role_restarts_without_loss(group: Group, tmp_path: Path, role: str) -> None:
    load = Load(group, tmp_path)
    wait_until(lambda: group.words()["appended_messages"] > 2000, what="load")
    kills: list[float] = []
    back_s: list[float] = []
    for _ in range(3):
        kills.append(time.monotonic())
        back_s.append(kill_and_wait(group, role))
        before = group.words()["appended_messages"]
        wait_until(lambda before=before: group.words()["appended_messages"] > before + 400, what="appends continue")
    acknowledged, unknown, gaps = load.finish()
    assert len(acknowledged) > 2000
    # Each kill is a round: other load makes a time longer, never shorter.
    assert min(back_s) < ROLE_BACK_S, back_s
    longest_s = [longest(gaps, begin, end) for begin, end in itertools.pairwise([*kills, math.inf])]
    assert min(longest_s) < GAP_S, longest_s
    check_all(group, acknowledged, unknown)
    assert group.stop() == 0
    assert_equals_rebuild(group)


def longest(gaps: list[Gap], begin: float, end: float) -> float:
    """The longest gap that overlaps the interval."""
    return max((until - since for since, until in gaps if until > begin and since < end), default=0.0)


def kill_and_wait(group: Group, role: str) -> float:
    """Kill a role; return the seconds until its successor runs."""
    words, killed = group.words(), time.monotonic()
    os.kill(words[f"{role}.pid"], signal.SIGKILL)
    incarnation = words[f"{role}.incarnation"]

    def back() -> bool:
        now = group.words()
        running = now[f"{role}.state"] == words_of.STATE_RUNNING
        return now[f"{role}.incarnation"] > incarnation and running

    wait_until(back, what=f"{role} back")
    return time.monotonic() - killed


def test_killed_template_is_replaced(group: Group) -> None:
    words = group.words()
    os.kill(words["template_pid"], signal.SIGKILL)
    wait_until(lambda: group.words()["template_pid"] not in (0, words["template_pid"]), what="new template")
    for role in words_of.ROLES:
        assert group.words()[f"{role}.pid"] == words[f"{role}.pid"]
    kill_and_wait(group, words_of.WRITER)
    with group.client() as client:
        assert client.send("kill", b"after").queue_offset == 0


def test_killed_supervisor_ends_group_and_store_recovers(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group()
    acknowledged: dict[str, tuple[int, int, int]] = {}
    unknown: set[str] = set()
    for life in range(2):
        folder = tmp_path / str(life)
        folder.mkdir()
        load = Load(group, folder)
        wait_until(lambda: group.words()["appended_messages"] > 2000, what="load")
        load.stop.set()
        group.kill()
        new, new_unknown, _gaps = load.finish()
        # Each run assigns new names.
        acknowledged = {name: place for name, place in acknowledged.items() if name not in new}
        acknowledged |= new
        unknown |= new_unknown
        group.start()
        group.wait_dispatched()
        found = all_messages(group)
        for name, place in new.items():
            assert tuple(place) in found.get(name, []), name
    assert group.stop() == 0
    assert_equals_rebuild(group)


def test_deleted_own_folder_loses_nothing(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        sent = client.send_batch("kill", [b"%d" % n for n in range(5000)], keys=[f"k{n}" for n in range(5000)])
    group.wait_dispatched()
    assert group.stop() == 0
    for path in sorted(group.paths.own.rglob("*"), reverse=True):
        path.unlink() if not path.is_dir() else path.rmdir()
    group.paths.own.rmdir()
    group.start()
    with group.client() as client:
        assert sum(queue.max_offset for queue in client.queues("kill")) == 5000
        (message,) = client.by_key("kill", "k4999")
        assert message.physical_offset == sent.physical_offsets[4999]
        assert client.send("kill", b"next").physical_offset > sent.physical_offsets[-1]
    assert group.stop() == 0
    assert_equals_rebuild(group)
