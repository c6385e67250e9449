"""The control file: created atomically, rejected in another version, consistent figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError, NotRunningError, OtherVersionError
from mqproc.io.fault_injection import FaultInjectionIO
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.control import Control
from mqproc.layout import control as layout
from mqproc.paths import StorePaths

IO = StoreIO()


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    return StorePaths(tmp_path)


def create(paths: StorePaths) -> Control:
    return Control.create(IO, paths, Clock(), os.getpid())


def test_control_new_file_has_header_and_zeros(paths: StorePaths) -> None:
    control = create(paths)
    words = control.snapshot()
    named = {name for name, value in words.items() if value}
    assert named == {
        "magic",
        "version",
        "epoch",
        "store_id",
        "supervisor_pid",
        "pid_namespace",
        "group_started_ms",
        "supervisor_heartbeat_ns",
    }
    assert words["epoch"] == 1
    assert list(words) == list(layout.WORDS)
    assert paths.control.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in paths.own.iterdir()] == ["control"]
    control.close()


def test_control_next_file_increments_epoch_and_keeps_store_id(paths: StorePaths) -> None:
    first = create(paths)
    second = create(paths)
    assert second.load(layout.EPOCH) == 2
    assert second.load(layout.STORE_ID) == first.load(layout.STORE_ID)
    assert not first.is_current(IO, paths)
    assert second.is_current(IO, paths)


def test_control_of_another_store_at_same_path_has_new_id(paths: StorePaths) -> None:
    first = create(paths)
    paths.control.unlink()
    second = create(paths)
    assert second.load(layout.EPOCH) == first.load(layout.EPOCH)
    assert not first.is_current(IO, paths)
    assert second.is_current(IO, paths)


@pytest.mark.parametrize("garbage", [b"", b"\0" * layout.FILE_SIZE, os.urandom(layout.FILE_SIZE), b"MQPROC01"])
def test_control_garbage_fails_readers_and_is_replaced_by_owner(paths: StorePaths, garbage: bytes) -> None:
    paths.own.mkdir()
    paths.control.write_bytes(garbage)
    with pytest.raises(CorruptStoreError, match=r"control: .*expected .* found"):
        Control.open(IO, paths)
    assert create(paths).load(layout.EPOCH) == 1


def test_control_other_version_raises(paths: StorePaths) -> None:
    control = create(paths)
    control.store(layout.HEADER_VERSION, layout.VERSION + 1)
    control.close()
    with pytest.raises(OtherVersionError, match="another version of mqproc, layout 5 instead of 4: mqproc down stops"):
        Control.open(IO, paths)
    assert create(paths).load(layout.EPOCH) == 1


def test_control_missing_file_raises_not_running(paths: StorePaths) -> None:
    with pytest.raises(NotRunningError):
        Control.open(IO, paths)


def test_control_reader_sees_stores_but_cannot_store(paths: StorePaths) -> None:
    owner, reader = create(paths), Control.open(IO, paths)
    owner.store(layout.WRITTEN, 4096)
    owner.add(layout.WRITTEN, 4)
    assert reader.load(layout.WRITTEN) == reader.cells[layout.WRITTEN] == 4100
    with pytest.raises(TypeError):
        reader.store(layout.WRITTEN, 1)
    owner.cells[layout.WRITTEN] = 8
    assert reader.snapshot()["written"] == 8
    reader.close()
    owner.close()


def test_control_distance_counts_bytes_between_words(paths: StorePaths) -> None:
    control = create(paths)
    for index, value in (
        (layout.WRITTEN, 1000),
        (layout.DISPATCHED, 400),
        (layout.WRITER_SYNCED, 300),
        (layout.FLUSHER_SYNCED, 700),
    ):
        control.store(index, value)
    assert control.flushed == 700
    assert (control.confirmed(sync_flush=False), control.confirmed(sync_flush=True)) == (1000, 700)
    words = control.snapshot()
    assert control.dispatch_behind_bytes == control_words.dispatch_behind_bytes(words) == 600
    assert control_words.flush_behind_bytes(words) == 300
    control.store(layout.DISPATCHED, 1000)
    words = control.snapshot()
    assert control.dispatch_behind_bytes == control_words.dispatch_behind_bytes(words) == 0


@pytest.mark.parametrize("index", layout.SYNC_ERRNO_WORDS)
def test_control_any_failed_sync_makes_store_read_only(paths: StorePaths, index: int) -> None:
    control = create(paths)
    assert not control.read_only
    control.store(index, 5)
    assert control.read_only
    assert control.sync_errno == 5


def test_control_every_sync_errno_word_counts() -> None:
    named = {word.index for word in layout.WORDS.values() if word.name.endswith("_sync_errno")}
    assert named == set(layout.SYNC_ERRNO_WORDS)


def test_control_words_of_one_role(paths: StorePaths) -> None:
    control = create(paths)
    control.store(layout.role_word("cq-flusher", "errors"), 3)
    control.store(layout.role_word("cq-flusher", "pid"), 77)
    words = control.snapshot()
    assert [words[f"cq-flusher.{name}"] for name in ("errors", "pid", "cycles")] == [3, 77, 0]


def test_control_without_space_keeps_old_file_only(paths: StorePaths) -> None:
    Control.create(IO, paths, Clock(), 1).close()
    before = paths.control.read_bytes()
    with pytest.raises(OSError, match="No space left"):
        Control.create(FaultInjectionIO(fault="allocate:1:ENOSPC"), paths, Clock(), 2)
    assert [path.name for path in paths.own.iterdir()] == ["control"]
    assert paths.control.read_bytes() == before
