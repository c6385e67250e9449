"""Consumer groups on a full disk: reads are served, changes refused until there is space."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqproc.errors import DiskFullError, StoreReadOnlyError
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.offsets import offset_store as progress
from mqproc.store.offsets.offset_store import OffsetStore, committed_offsets
from mqproc.wire.operations import (
    EARLIEST,
    GroupCommitRequest,
    GroupJoinRequest,
    GroupRequest,
    GroupResetRequest,
    GroupSettingsRequest,
    Operation,
    PullRequest,
)
from tests.roles.query.test_role import PATIENCE_S, Caller, Group
from tests.support.fakes import FaultyIO


class FullDiskIO(StoreIO):
    """While `full`, files and folders cannot be created or grow; existing data is readable."""

    full = False
    number = errno.ENOSPC

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        if create and not path.exists():
            self._grow()
        return super().open(path, write=write, create=create, mode=mode)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._grow()
        super().allocate(fd, offset, size)

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        if not folder.exists():
            self._grow()
        super().make_folder(folder, mode, sync=sync)

    def _grow(self) -> None:
        if self.full:
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch) -> FullDiskIO:
    monkeypatch.setattr(progress, "SAVE_RETRY_NS", 1_000_000)
    return FullDiskIO()


@contextmanager
def started(root: Path, io: StoreIO) -> Iterator[Group]:
    group = Group(root, io)
    for frame in range(8):
        group.put("Orders", frame)
    group.dispatch()
    try:
        yield group
    finally:
        group.close()


CONFIG_FILES = {
    "consumerOffset.json": (Operation.GROUP_RESET, GroupResetRequest("g", [("Orders", 0, 1)])),
    "subscriptionGroup.json": (Operation.GROUP_SETTINGS, GroupSettingsRequest("g", retry_max_times=3)),
}


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_groups_file_failed_sync_is_final(tmp_path: Path, name: str) -> None:
    io = FaultyIO()
    with started(tmp_path / "store", io) as group:
        caller = group.connect()
        caller.call(Operation.GROUP_SETTINGS, GroupSettingsRequest("g", retry_max_times=5))
        io.failing = {name: errno.EIO}
        for _ in range(2):
            with pytest.raises(StoreReadOnlyError):
                caller.call(*CONFIG_FILES[name])
            io.failing = {}
        assert group.control.words[words_of.QUERY_SYNC_ERRNO] == errno.EIO
        assert name in group.context.paths.read_only.read_text()
        answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 0, 0))
        assert answer.count


def test_groups_reset_waits_for_the_durable_log_of_other_offsets(tmp_path: Path) -> None:
    io = FaultyIO()
    with started(tmp_path / "store", io) as group:
        words = group.control.words
        assert group.control.flushed < words[words_of.WRITTEN]
        caller = group.connect()
        caller.call(Operation.GROUP_SETTINGS, GroupSettingsRequest("g"))
        io.tried()
        caller.call(Operation.GROUP_RESET, GroupResetRequest("g", [("Orders", 0, 1)]))
        synced = io.tried()
        assert synced.index(f"{0:020d}") < synced.index("consumerOffset.json.tmp")
        io.failing = {"/commitlog/": errno.EIO}
        saved = group.context.paths.consumer_offsets.read_bytes()
        with pytest.raises(StoreReadOnlyError):
            caller.call(Operation.GROUP_RESET, GroupResetRequest("g", [("Orders", 0, 0)]))
        assert group.context.paths.consumer_offsets.read_bytes() == saved


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A store of which a group has consumed 3 messages, by RocketMQ's file."""
    root = tmp_path / "store"
    (root / "config").mkdir(parents=True)
    (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{"Orders@billing":{0:3}}}')
    (root / "config" / "subscriptionGroup.json").write_text("{ not json")
    return root


@pytest.fixture
def full(known: Path, io: FullDiskIO) -> Iterator[Group]:
    """The query role started without room for anything of groups."""
    io.full = True
    with started(known, io) as group:
        yield group


def commit(caller: Caller, offset: int, group: str = "billing") -> None:
    answer, _ = caller.call(Operation.GROUP_COMMIT, GroupCommitRequest(group, [("Orders", 0, -1, offset)]))
    assert answer.refused == []


def fill_up(progress: OffsetStore) -> None:
    """Use up the space left in the file."""
    for number in range(10_000):
        progress.set(f"filler-{number}", "T", 0, 0)


def until_committed(caller: Caller, offset: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return commit(caller, offset)
        except DiskFullError:
            assert time.monotonic() < deadline


def test_groups_full_disk_serves_reads_and_offsets(full: Group) -> None:
    caller = full.connect()
    answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 0, 0))
    assert answer.status == "FOUND"
    info, _ = caller.call(Operation.GROUP_INFO, GroupRequest("billing"))
    assert [row[:3] for row in info.queues] == [("Orders", 0, 3)] + [("Orders", queue, -1) for queue in (1, 2, 3)]


def test_groups_full_disk_refuses_changes_without_residue(full: Group) -> None:
    caller = full.connect()
    for operation, request in (
        (Operation.GROUP_COMMIT, GroupCommitRequest("billing", [("Orders", 0, -1, 4)])),
        (Operation.GROUP_JOIN, GroupJoinRequest("billing", ["Orders"], start=EARLIEST)),
        (Operation.GROUP_JOIN, GroupJoinRequest("billing", ["Orders"], "back", holding=[("Orders", 0, 7)])),
        (Operation.GROUP_DELETE, GroupRequest("billing")),
    ):
        with pytest.raises(DiskFullError, match="No space left on device"):
            caller.call(operation, request)
    info, _ = caller.call(Operation.GROUP_INFO, GroupRequest("billing"))
    assert (info.members, info.queues[0][:3]) == ([], ("Orders", 0, 3))


def test_groups_read_only_file_system_refuses_changes(known: Path, io: FullDiskIO) -> None:
    io.full, io.number = True, errno.EROFS
    with started(known, io) as group:
        caller = group.connect()
        answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 0, 0))
        assert answer.status == "FOUND"
        for operation, request in (
            (Operation.GROUP_COMMIT, GroupCommitRequest("billing", [("Orders", 0, -1, 4)])),
            (Operation.GROUP_JOIN, GroupJoinRequest("new", ["Orders"], start=EARLIEST)),
        ):
            with pytest.raises(StoreReadOnlyError, match="the file system has become read-only"):
                caller.call(operation, request)


def test_groups_changes_succeed_once_there_is_space(full: Group, io: FullDiskIO) -> None:
    caller = full.connect()
    with pytest.raises(DiskFullError):
        commit(caller, 4)
    io.full = False
    until_committed(caller, 4)
    joined, _ = caller.call(Operation.GROUP_JOIN, GroupJoinRequest("billing", ["Orders"], start=EARLIEST))
    assert sorted(joined.queues)[0][3] == 4
    paths = StorePaths(full.context.paths.root)
    assert ("Orders", 0, 4) in {(at.topic, at.queue_id, at.offset) for at in committed_offsets(io, paths)}
    assert (paths.quarantine / "config.subscriptionGroup.json").read_text() == "{ not json"


def test_groups_successor_ignores_words_of_an_earlier_run(known: Path, io: FullDiskIO) -> None:
    """No role of this run had space for the file; it belongs to another consumerOffset.json."""
    with started(known, io) as group:
        commit(group.connect(), 5)
    (known / "config" / "consumerOffset.json").write_text('{"offsetTable":{"Orders@billing":{0:2}}}')
    io.full = True
    group = Group(known, io)
    group.close()
    group = Group(known, io, incarnation=2)
    try:
        caller = group.connect()
        info, _ = caller.call(Operation.GROUP_INFO, GroupRequest("billing"))
        assert ("Orders", 0, 2) in [row[:3] for row in info.queues]
        io.full = False
    finally:
        group.close()


def test_groups_disk_filling_under_a_member_ends_no_role(tmp_path: Path, io: FullDiskIO) -> None:
    """Offsets of new queues need space: queues are assigned once there is some."""
    with started(tmp_path / "store", io) as group:
        caller = group.connect()
        joined, _ = caller.call(Operation.GROUP_JOIN, GroupJoinRequest("g", ["Orders", "New"], start=EARLIEST))
        assert {row[0] for row in joined.queues} == {"Orders"}
        io.full = True
        with pytest.raises(OSError, match="No space left"):
            fill_up(group.role._groups.state.progress)
        group.put("New", 0)
        group.dispatch()
        for _ in range(3):
            group.step()
        answer, _ = caller.call(Operation.PULL, PullRequest("New", 0, 0))
        assert answer.max_offset > 0
        io.full = False

        def given() -> bool:
            info, _ = caller.call(Operation.GROUP_INFO, GroupRequest("g"))
            return any(row[0] == "New" and row[6] == joined.member_id for row in info.queues)

        deadline = time.monotonic() + PATIENCE_S
        while not given():
            assert time.monotonic() < deadline
