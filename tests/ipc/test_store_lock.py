"""The store's lock against other processes: mqproc's, and those that lock like RocketMQ.

RocketMQ takes a POSIX lock on byte 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.errors import StoreAccessError, StoreLockedError
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import StoreLock, lock_holder
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.util.procfs import is_running
from tests.support.group import wait_until

ROCKETMQ = """
import fcntl, sys
file = open(sys.argv[1], "w+")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    print("refused", flush=True)
else:
    print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def rocketmq(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that locks like Java's `FileChannel.tryLock(0, 1, false)`."""
    process = subprocess.Popen(
        [sys.executable, "-c", ROCKETMQ, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    return StorePaths(tmp_path)


def test_store_lock_has_one_holder_even_in_one_process(paths: StorePaths) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    with pytest.raises(StoreLockedError):
        StoreLock.acquire(io, paths)
    lock.close()
    StoreLock.acquire(io, paths).close()


def test_store_lock_file_content_equals_rocketmq(paths: StorePaths) -> None:
    paths.lock.write_bytes(b"something longer")
    StoreLock.acquire(StoreIO(), paths).close()
    assert paths.lock.read_bytes() == b"lock"


def test_store_lock_survives_close_of_other_descriptor(paths: StorePaths) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    os.close(os.open(paths.lock, os.O_RDWR))
    assert lock_holder(io, paths) is not None
    lock.close()


def test_store_lock_excludes_rocketmq(paths: StorePaths) -> None:
    lock = StoreLock.acquire(StoreIO(), paths)
    with rocketmq(paths.lock) as process:
        assert said(process) == "refused"
    lock.close()
    with rocketmq(paths.lock) as process:
        assert said(process) == "held"


def test_store_lock_held_by_rocketmq_names_it(paths: StorePaths) -> None:
    with rocketmq(paths.lock) as process:
        assert said(process) == "held"
        with pytest.raises(StoreLockedError, match=rf"in use by pid {process.pid} since \d{{4}}-"):
            StoreLock.acquire(StoreIO(), paths)


def test_store_lock_holder_is_read_from_control_file(paths: StorePaths) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    Control.create(io, paths, Clock(), pid=os.getpid()).close()
    with pytest.raises(StoreLockedError, match=rf"in use by pid {os.getpid()} since \d{{4}}-"):
        StoreLock.acquire(io, paths)
    lock.close()


def test_store_lock_holder_is_read_from_abort_file(paths: StorePaths) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    paths.abort.write_text(str(os.getpid()))
    with pytest.raises(StoreLockedError, match=rf"in use by pid {os.getpid()} since \d{{4}}-"):
        StoreLock.acquire(io, paths)
    lock.close()


def test_store_lock_unknown_holder_is_reported(paths: StorePaths) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    with pytest.raises(StoreLockedError, match="in use by another process"):
        StoreLock.acquire(io, paths)
    lock.close()


@pytest.mark.parametrize("pid", [0, -1, (1 << 22) + 1, 1 << 62])
@pytest.mark.parametrize("since_ms", [-1, 1 << 62])
def test_store_lock_damaged_control_file_names_no_holder(paths: StorePaths, pid: int, since_ms: int) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    control = Control.create(io, paths, Clock(), os.getpid())
    control.store(layout.SUPERVISOR_PID, pid)
    control.store(layout.GROUP_STARTED_MS, since_ms)
    with pytest.raises(StoreLockedError, match=r"in use by another process$"):
        StoreLock.acquire(io, paths)
    control.close()
    lock.close()


_ROLE_THAT_HOLDS_IT = """
import sys
from pathlib import Path
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.roles.role import set_title
from mqproc.ipc.store_lock import StoreLock
root = Path(sys.argv[1])
lock = StoreLock.acquire(StoreIO(), StorePaths(root))
set_title("writer", root)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ended(paths: StorePaths) -> int:
    """The pid of the last group's supervisor, which was killed."""
    supervisor = subprocess.Popen([sys.executable, "-c", ""])
    supervisor.wait()
    Control.create(StoreIO(), paths, Clock(), pid=supervisor.pid).close()
    return supervisor.pid


def test_store_lock_waits_for_orphaned_roles_then_names_them(paths: StorePaths, ended: int) -> None:
    command = [sys.executable, "-c", _ROLE_THAT_HOLDS_IT, str(paths.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as role:
        assert role.stdout is not None
        assert role.stdout.readline() == b"held\n"
        with pytest.raises(StoreLockedError, match=f"in use by processes that pid {ended} left behind"):
            StoreLock.acquire(StoreIO(), paths, patience_s=0.05)
        holder = lock_holder(StoreIO(), paths)
        assert holder is not None
        assert holder.ended
        role.communicate()


def test_store_lock_held_by_command_is_not_an_orphaned_role(paths: StorePaths, ended: int) -> None:
    """A repair may take long; a message about orphaned processes might make a user kill it."""
    assert ended
    lock = StoreLock.acquire(StoreIO(), paths)
    with pytest.raises(StoreLockedError, match=rf"in use by pid {os.getpid()} since \d{{4}}-"):
        StoreLock.acquire(StoreIO(), paths, patience_s=0.05)
    holder = lock_holder(StoreIO(), paths)
    assert holder is not None
    assert (holder.pid, holder.ended) == (os.getpid(), False)
    lock.close()


_GROUP_IN_RECOVERY = """
import os, sys
from pathlib import Path
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.roles.role import set_title
paths = StorePaths(Path(sys.argv[1]))
set_title("supervisor", paths.root)
lock = StoreLock.acquire(StoreIO(), paths)
control = Control.create(StoreIO(), paths, Clock(), os.getpid())
control.store(layout.GROUP_STATE, layout.GROUP_RECOVERING)
control.store(layout.SUPERVISOR_HEARTBEAT_NS, 1)
print("held", os.getpid(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def group_in_another_pid_namespace(paths: StorePaths) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and whose pid is that of another process here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root has namespaces of its own")
    command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    command += [sys.executable, "-c", _GROUP_IN_RECOVERY, str(paths.root)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        if (line := said(process)) != "held 1":
            process.kill()
            pytest.skip(f"no PID namespace here: {line} {process.stderr.read()}")
        yield process
        process.stdin.close()


def test_store_lock_holder_in_another_pid_namespace_has_no_pid(paths: StorePaths) -> None:
    """Its pid 1 is the machine's first process here, which began long before."""
    with group_in_another_pid_namespace(paths):
        holder = lock_holder(StoreIO(), paths)
        assert holder is not None
        assert (holder.pid, holder.ended, holder.elsewhere) == (0, False, True)
        with pytest.raises(StoreLockedError, match="in use by a group in another PID namespace, as of a container, si"):
            StoreLock.acquire(StoreIO(), paths, patience_s=0.05)
    assert lock_holder(StoreIO(), paths) is None


def test_command_that_holds_store_of_group_elsewhere_is_named(paths: StorePaths) -> None:
    with group_in_another_pid_namespace(paths):
        pass
    lock = StoreLock.acquire(StoreIO(), paths)
    holder = lock_holder(StoreIO(), paths)
    assert holder is not None
    assert (holder.pid, holder.elsewhere) == (os.getpid(), False)
    lock.close()


def test_recovery_in_another_pid_namespace_ends_with_its_process(paths: StorePaths) -> None:
    """Not with a process here that has the same pid."""
    with group_in_another_pid_namespace(paths) as process:
        words = control_words.read_words(paths)
        assert words["supervisor_pid"] == 1
        assert not control_words.has_valid_pids(words)
        assert control_words.is_recovering(paths, words)
        assert control_words.supervisor_alive(paths, words, time.monotonic_ns())
        process.kill()
        wait_until(lambda: lock_holder(StoreIO(), paths) is None, what="the end of the group")
        assert is_running(1)
        assert not control_words.is_recovering(paths, words)
        assert not control_words.supervisor_alive(paths, words, time.monotonic_ns())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_store_lock_is_kept_by_forked_process(paths: StorePaths) -> None:
    io = StoreIO()
    lock = StoreLock.acquire(io, paths)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    lock.close()
    assert lock_holder(io, paths) is not None
    os.close(writer)
    os.waitpid(child, 0)
    assert lock_holder(io, paths) is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EISDIR])
def test_store_lock_error_is_reported(paths: StorePaths, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(*_arguments: object, **_options: object) -> int:
        raise OSError(code, os.strerror(code), str(paths.lock))

    monkeypatch.setattr(StoreIO, "open", fails)
    with pytest.raises(StoreAccessError, match=f"{paths.lock}: {os.strerror(code)}"):
        StoreLock.acquire(StoreIO(), paths)


def test_store_lock_of_new_store_has_no_holder(paths: StorePaths) -> None:
    assert lock_holder(StoreIO(), paths) is None
    assert not paths.lock.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change another user's store")
def test_store_lock_root_refuses_symlink_in_store_of_other_user(tmp_path: Path) -> None:
    paths, elsewhere = StorePaths(tmp_path / "store"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    paths.root.mkdir()
    paths.own.symlink_to(elsewhere)
    StoreLock.acquire(StoreIO(), paths).close()
    os.chown(paths.root, 65534, 65534)
    with pytest.raises(StoreAccessError, match=f"{paths.own}: a symlink; root changes nothing .* of user 65534: run"):
        StoreLock.acquire(StoreIO(), paths)
