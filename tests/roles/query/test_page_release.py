"""Pages of the log: resident while query reads, released when it is idle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.roles.query.role import RELEASE_NS, RESIDENT_BYTES_MAX, PageRelease
from mqproc.store.commitlog.segments import PAGES_AROUND_BYTES, LogSegments
from mqproc.wire.operations import Operation, PullRequest
from tests.roles.query.test_role import Group
from tests.support.fakes import BadSectors

SEGMENT = 2 * RESIDENT_BYTES_MAX


def test_page_release_idle_role_releases_once(tmp_path: Path) -> None:
    segments = LogSegments(StoreIO(), tmp_path, SEGMENT, resident_bytes_max=RESIDENT_BYTES_MAX)
    pages = PageRelease(segments)
    assert pages.seconds_left(0, 5.0) == 5.0, "nothing is present"
    segments.note_read(0, 10 * PAGES_AROUND_BYTES)
    pages.worked(7)
    assert segments.resident_bytes == 10 * PAGES_AROUND_BYTES
    assert pages.seconds_left(7, 5.0) == 1.0
    assert pages.seconds_left(7 + RELEASE_NS // 2, 5.0) == 0.5
    assert pages.seconds_left(7, 0.25) == 0.25
    assert segments.resident_bytes
    assert pages.seconds_left(7 + RELEASE_NS, 5.0) == 5.0
    assert not segments.resident_bytes


def test_page_release_residency_stays_below_its_limit(tmp_path: Path) -> None:
    (tmp_path / f"{0:020d}").write_bytes(b"")
    segments = LogSegments(StoreIO(), tmp_path, SEGMENT, resident_bytes_max=4 * PAGES_AROUND_BYTES)
    segments.note_read(0, 4 * PAGES_AROUND_BYTES)
    assert segments.resident_bytes == 4 * PAGES_AROUND_BYTES
    segments.note_reads(np.array([5 * PAGES_AROUND_BYTES], np.int64))
    assert segments.resident_bytes == 0


def test_query_idle_releases_log_pages(tmp_path: Path) -> None:
    group = Group(tmp_path / "store")
    try:
        group.put("T", 0, queues=1)
        group.dispatch()
        caller = group.connect()
        caller.ask(Operation.PULL, PullRequest(topic="T", queue_id=0, offset=0))
        assert caller.answer() is not None
        segments = group.role._reading.segments
        assert segments.resident_bytes
        began_ns = group.context.clock.monotonic_ns()
        group.role.wait(60.0)
        waited_ns = group.context.clock.monotonic_ns() - began_ns
        assert RELEASE_NS // 2 < waited_ns < 30 * RELEASE_NS, "by its own time, not by the 60 s that it could wait"
        assert segments.resident_bytes
        group.role.wait(0)
        assert not segments.resident_bytes
    finally:
        group.close()


# Unreadable ConsumeQueue units


def test_pull_unreadable_units_ends_with_the_file_named(tmp_path: Path) -> None:
    """Their messages are in the log: a client that skipped the units would miss them."""
    io = BadSectors()
    group = Group(tmp_path / "store", io)
    for frame in range(40):
        group.put("Orders", frame)
    group.dispatch()
    file = group.context.paths.queue("Orders", 1) / f"{0:020d}"
    io.lose(file, 0)
    caller = group.connect()
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=f"^{file}: a part cannot be read; no message is lost"):
            caller.call(Operation.PULL, PullRequest("Orders", 1, 10, max_messages=5))
    answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 2, 10, max_messages=5))
    assert (answer.status, answer.count) == ("FOUND", 5)
    group.close()
