"""Bells: no wake-up is lost, an awake listener needs none, and every wait ends."""

from __future__ import annotations

import errno
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import posix_ipc
import pytest
from numpy.typing import NDArray

from mqproc.ipc import bell as bell_module
from mqproc.ipc.bell import (
    MAX_WAIT_S,
    Bell,
    EventBell,
    SemaphoreBell,
    semaphore_name,
    semaphore_names,
    unlink_semaphore,
    warm,
)
from tests.support.group import PATIENCE_S

ROUNDS = 20_000
# Words of a test's map, each in its own cache line.
PING_SLEEPING, PONG_SLEEPING, PING, PONG = 0, 8, 16, 24
Cells = NDArray[np.int64]
MakeBell = Callable[[Cells, int], Bell]


def semaphore(cells: Cells, sleeping: int) -> Bell:
    bell = SemaphoreBell(semaphore_name(secrets.randbits(60), 1, sleeping), cells, sleeping)
    bell.unlink()
    return bell


@pytest.fixture(params=[semaphore, EventBell], ids=["semaphore", "event"])
def make_bell(request: pytest.FixtureRequest) -> MakeBell:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def cells() -> Cells:
    return np.frombuffer(mmap.mmap(-1, 4096), np.int64)


@pytest.fixture
def bell(make_bell: MakeBell, cells: Cells) -> Iterator[Bell]:
    made = make_bell(cells, PING_SLEEPING)
    yield made
    made.close()


def listen(bell: Bell, cells: Cells, index: int, wanted: int) -> bool:
    """Wait until a word has a value; False if a wait timed out."""
    while cells[index] < wanted:
        bell.announce()
        in_time = cells[index] >= wanted or bell.wait(PATIENCE_S)
        bell.awake()
        if not in_time:
            return False
    return True


def play(ours: Bell, theirs: Bell, cells: Cells, wait_for: int, publish: int, first: bool) -> int:
    """One side of a ping-pong: publish a number after seeing the other's.

    Returns how many were seen.
    """
    for number in range(1, ROUNDS + 1):
        if first:
            theirs.publish(publish, number)
        if not listen(ours, cells, wait_for, number):
            return number - 1
        if not first:
            theirs.publish(publish, number)
    return ROUNDS


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_bell_loses_no_wakeup_between_processes(
    make_bell: MakeBell, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than any process is descheduled.
    monkeypatch.setattr(bell_module, "MAX_WAIT_S", PATIENCE_S / 2)
    warm()
    ping, pong = make_bell(cells, PING_SLEEPING), make_bell(cells, PONG_SLEEPING)
    child = os.fork()
    if child == 0:
        os._exit(play(pong, ping, cells, PING, PONG, first=False) != ROUNDS)
    seen = play(ping, pong, cells, PONG, PING, first=True)
    _, status = os.waitpid(child, 0)
    # A lost wake-up would be a wait until the timeout.
    assert (seen, os.waitstatus_to_exitcode(status)) == (ROUNDS, 0)
    ping.close()
    pong.close()


def test_bell_ring_posts_only_to_sleeping_listener(bell: Bell, cells: Cells) -> None:
    bell.ring()
    assert silent(bell)
    bell.announce()
    assert cells[PING_SLEEPING] == 1
    bell.ring()
    assert rung(bell)
    bell.awake()
    assert cells[PING_SLEEPING] == 0


def test_bell_expedite_alone_wakes_lingering_listener(bell: Bell, cells: Cells) -> None:
    bell.expedite()
    assert silent(bell)
    bell.announce()
    bell.expedite()
    assert silent(bell), "`expedite` wakes only a lingering listener"
    bell.linger()
    bell.ring()
    bell.publish(PING, 1)
    assert silent(bell)
    bell.expedite()
    assert rung(bell)
    bell.awake()
    assert cells[PING_SLEEPING] == 0


def test_bell_publish_stores_and_rings(bell: Bell, cells: Cells) -> None:
    bell.publish(PING, 41)
    assert cells[PING] == 41
    assert silent(bell)
    bell.announce()
    bell.publish(PING, 42)
    assert cells[PING] == 42
    assert rung(bell)


@pytest.mark.parametrize("begin", [Bell.announce, Bell.linger])
def test_bell_wait_ignores_earlier_posts(bell: Bell, begin: Callable[[Bell], None]) -> None:
    for _ in range(5):
        bell.post()
    begin(bell)
    assert silent(bell)
    bell.post()
    assert rung(bell)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_bell_wait_invalid_timeout_returns_at_once(
    bell: Bell, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bell_module, "MAX_WAIT_S", 60.0)
    began = time.monotonic()
    bell.wait(timeout_s)
    assert time.monotonic() - began < 30


def test_bell_wait_is_capped(bell: Bell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_WAIT_S == 1.0
    monkeypatch.setattr(bell_module, "MAX_WAIT_S", 0.1)
    began = time.monotonic()
    bell.wait(3600.0)
    assert 0.09 < time.monotonic() - began < 30


def test_bell_only_event_kind_has_descriptor(cells: Cells) -> None:
    event, by_semaphore = EventBell(cells, PING_SLEEPING), semaphore(cells, PONG_SLEEPING)
    assert event.fileno() >= 0
    with pytest.raises(TypeError, match=r"BellKind\.EVENT"):
        by_semaphore.fileno()
    event.close()
    by_semaphore.close()


def test_semaphores_of_store_are_found_for_any_epoch(cells: Cells) -> None:
    store_id = secrets.randbits(60)
    names = [semaphore_name(store_id, epoch, 3) for epoch in (1, 7, 1 << 31)]
    bells = [SemaphoreBell(name, cells, 0) for name in names]
    assert semaphore_names(store_id) == sorted(names)
    assert semaphore_names(store_id + 1) == []
    for bell in bells:
        bell.unlink()
        bell.close()
    assert semaphore_names(store_id) == []


def test_semaphore_names_are_hex_and_not_reused(cells: Cells) -> None:
    name = semaphore_name(0x1234, 7, 3)
    assert name == "/00000000000012340000000703"
    unlink_semaphore(name)
    first = SemaphoreBell(name, cells, PING_SLEEPING)
    with pytest.raises(posix_ipc.ExistentialError):
        SemaphoreBell(name, cells, PING_SLEEPING)
    first.unlink()
    first.unlink()
    first.post()
    assert rung(first)
    first.close()


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (posix_ipc.PermissionsError("Permission denied"), errno.EACCES),
        (posix_ipc.ExistentialError("No semaphore exists with the specified name"), errno.ENOENT),
    ],
)
def test_semaphore_creation_error_names_folder(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, number: int
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise error

    folder = str(tmp_path / "shm")
    monkeypatch.setattr(bell_module, "SEMAPHORE_FOLDER", folder)
    monkeypatch.setattr(posix_ipc, "Semaphore", refuse)
    with pytest.raises(OSError, match=f"{os.strerror(number)}; the group's semaphores are files there") as caught:
        SemaphoreBell("/1", cells, PING_SLEEPING)
    assert (caught.value.errno, caught.value.filename) == (number, folder)


def rung(bell: Bell) -> bool:
    """Consume a post; True if one was pending."""
    return bell.wait(MAX_WAIT_S)


def silent(bell: Bell) -> bool:
    """True if no post was pending."""
    return not bell.wait(0.2)
