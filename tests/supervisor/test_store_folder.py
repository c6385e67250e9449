"""The store's folder: only the last path component is created, foreign folders are refused."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from mqproc.errors import DiskFullError, StartError, StoreAccessError
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc import bell
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.roles.role import RoleSpec
from mqproc.supervisor.store_folder import Resources, lost_name, prepare_folder, starting
from mqproc.wire.address import listen
from tests.supervisor.running_group import RunningGroup, titles_of, wait_until

StartGroup = Callable[..., RunningGroup]


def prepare(root: Path) -> None:
    prepare_folder(StoreIO(), StorePaths(root))


def test_store_folder_is_created_with_mode_0700(tmp_path: Path) -> None:
    prepare(tmp_path / "store")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("store", "store/mqproc")] == [0o700, 0o700]


def test_store_folder_without_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match="its parent folder does not exist"):
        prepare(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "link"), [("store", ""), ("store/a", "{}/store is "), ("store/a/b", "{}/store is ")])
def test_store_folder_dangling_symlink_is_refused(tmp_path: Path, name: str, link: str) -> None:
    (tmp_path / "store").symlink_to("nowhere")
    reason = f"{link.format(tmp_path)}a symlink to {tmp_path}/nowhere, which does not exist"
    with pytest.raises(StoreAccessError, match=f"^{tmp_path}/{name}: {reason}$"):
        prepare(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_store_folder_of_rocketmq_is_accepted_own_part_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mqproc").mkdir(mode=0o755)
    prepare(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "mqproc").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("folder", ["", "mqproc"])
def test_store_folder_world_writable_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "mqproc").mkdir()
    (tmp_path / folder).chmod(0o777)
    with pytest.raises(StoreAccessError, match="writable by everyone"):
        prepare(tmp_path)


def test_store_folder_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreAccessError, match="not a folder"):
        prepare(tmp_path / "store")


@pytest.mark.parametrize("name", ["control", "settings.json"])
def test_store_folder_with_folder_for_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "mqproc" / name).mkdir(parents=True)
    with pytest.raises(StoreAccessError, match=f"mqproc/{name}: a folder"):
        prepare(tmp_path)


@pytest.mark.parametrize("name", ["lock", "mqproc/log.jsonl"])
@pytest.mark.parametrize(("make", "reason"), [(os.mkdir, "a folder"), (os.mkfifo, "a pipe")])
def test_store_folder_unwritable_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], None], reason: str
) -> None:
    """A pipe without a reader would block the group."""
    (tmp_path / "mqproc").mkdir()
    make(tmp_path / name)
    with pytest.raises(StoreAccessError, match=f"{name}: {reason}"):
        prepare(tmp_path)


def test_store_folder_own_part_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mqproc").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreAccessError, match="a symlink"):
        prepare(tmp_path / "store")


def move(root: Path) -> None:
    root.rename(root.with_name("moved"))


def delete_our_part(root: Path) -> None:
    shutil.rmtree(root / "mqproc")


def put_another_in_its_place(root: Path) -> None:
    move(root)
    prepare(root)
    for name in ("lock", "mqproc/ctl.sock"):
        (root / name).write_text("another's")


@pytest.mark.parametrize("how", [move, delete_our_part, put_another_in_its_place])
def test_group_of_removed_store_ends_and_writes_nothing(
    start_group: StartGroup, tmp_path: Path, how: Callable[[Path], None]
) -> None:
    group = start_group("--roles=writer,dispatcher")
    root = group.root
    how(root)
    there = sorted(path.relative_to(root) for path in root.rglob("*")) if root.exists() else []
    assert group.wait() == 3
    wait_until(lambda: not titles_of(root), "all of it has ended")
    name = "mqproc/ctl.sock" if how is delete_our_part else "lock"
    assert any(f"{root / name} was deleted, moved or replaced under the group" in line for line in group.lines)
    assert there == (sorted(path.relative_to(root) for path in root.rglob("*")) if root.exists() else [])
    # The rest is a store that starts after a crash.
    left = root if how is delete_our_part else root.with_name("moved")
    assert (left / "abort").exists()


def test_group_on_read_only_file_system_ends_normally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    paths = StorePaths(tmp_path)
    control = Control.create(StoreIO(), paths, Clock(), os.getpid())
    resources = Resources.make(paths, control, [])
    tried = []

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        tried.append(path)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patches:
        patches.setattr(Path, "unlink", refuse)
        resources.remove_sockets()
    resources.close()
    control.close()
    assert tried == [paths.socket("ctl")]


def test_start_that_cannot_listen_leaves_no_semaphores(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path)
    control = Control.create(StoreIO(), paths, Clock(), os.getpid())
    paths.socket("ctl").mkdir()
    with pytest.raises(StoreAccessError, match="cannot listen"):
        Resources.make(paths, control, [RoleSpec(layout.KEEPER, Mock())])
    assert bell.semaphore_names(control.load(layout.STORE_ID)) == []
    control.close()


def test_store_briefly_unreadable_is_not_lost(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path)
    lock = StoreLock.acquire(StoreIO(), paths)
    try:
        assert lost_name(paths, lock) == paths.socket("ctl")
        paths.own.symlink_to("mqproc")
        assert lost_name(paths, lock) is None  # ELOOP: neither present nor missing
        paths.own.unlink()
        paths.own.write_text("")
        assert lost_name(paths, lock) == paths.socket("ctl")
    finally:
        lock.close()


def test_store_with_long_path_is_lost_with_its_socket(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path / ("long" * 30))
    paths.own.mkdir(parents=True)
    with contextlib.closing(StoreLock.acquire(StoreIO(), paths)) as lock, listen(paths.socket("ctl")):
        assert lost_name(paths, lock) is None
        paths.socket("ctl").unlink()
        assert lost_name(paths, lock) == paths.socket("ctl")


def test_store_folder_of_a_volume_asks_for_one_below(tmp_path: Path) -> None:
    """As the root of a volume of Kubernetes."""
    tmp_path.chmod(0o777)
    with pytest.raises(StoreAccessError, match=f"a folder of your own below it: --store {tmp_path}/store"):
        prepare_folder(StoreIO(), StorePaths(tmp_path))
    prepare_folder(StoreIO(), StorePaths(tmp_path / "store"))


def test_store_folder_of_another_user_asks_for_one_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StoreAccessError, match=r"belongs to user .* a folder of your own below it"):
        prepare_folder(StoreIO(), StorePaths(tmp_path))


@pytest.mark.parametrize(
    "error",
    [
        DiskFullError("no room on the disk for 1 more queue"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/store/mqproc/control.tmp"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    ],
)
def test_start_without_space_says_what_frees_it(tmp_path: Path, error: Exception) -> None:
    paths = StorePaths(tmp_path)
    with pytest.raises(StartError) as empty, starting(paths):
        raise error
    assert "retention" not in str(empty.value)
    paths.commit_log.mkdir()
    with pytest.raises(StartError) as raised, starting(paths):
        raise error
    hint = f"mqproc store retention --store {tmp_path} shows deletable files, --execute deletes them"
    assert str(raised.value) == f"{empty.value}; {hint}"
    assert str(raised.value).startswith(f"{tmp_path}: the group cannot start: ")
    assert raised.value.exit_code == 3


def test_start_without_shm_space_does_not_suggest_deleting_messages(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path)
    paths.commit_log.mkdir()
    with pytest.raises(StartError, match="/dev/shm: No space left") as raised, starting(paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), bell.SEMAPHORE_FOLDER)
    assert "retention" not in str(raised.value)
