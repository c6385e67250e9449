"""Crash points and failing calls, configured by environment variables."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mqproc.errors import ConfigurationError
from mqproc.io.fault_injection import CRASH_POINTS, FAILING_CALLS, FaultInjectionIO, io_from_environment
from mqproc.io.store_io import FailedSyncError, StoreIO
from tests.support.group import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ROOT = Path(__file__).parents[2]


def in_a_child(io: StoreIO, point: str, times: int) -> int:
    """Fork; reach a crash point `times` times; return the signal that ended the child, else 0."""
    if (pid := os.fork()) == 0:
        for _ in range(times):
            io.crash_point(point)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_make_io_without_variables_is_plain_store_io() -> None:
    assert type(io_from_environment({})) is StoreIO


def test_crash_point_passes_are_counted_across_processes() -> None:
    io = io_from_environment({"MQPROC_CRASH": "flush.before_mark:3"})
    assert in_a_child(io, "flush.after_msync", 5) == 0
    assert in_a_child(io, "flush.before_mark", 2) == 0
    assert in_a_child(io, "flush.before_mark", 1) == signal.SIGKILL
    assert in_a_child(io, "flush.before_mark", 5) == 0


def test_crash_in_write_leaves_half_of_it(tmp_path: Path) -> None:
    io = io_from_environment({"MQPROC_CRASH": "mark.slot_half:2"})
    fd = io.open(tmp_path / "file", write=True, create=True)
    for ended, there in ((0, b""), (signal.SIGKILL, b"\0\0half"), (0, b"\0\0half")):
        if (pid := os.fork()) == 0:
            io.crash_amid("mark.slot_half", fd, np.frombuffer(b"halfway", np.uint8), 2)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == ended
        assert io.pread(fd, 9, 0) == there
    io.close(fd)


def test_hang_point_stops_one_process_until_killed() -> None:
    io = io_from_environment({"MQPROC_HANG": "flush.before_mark:2"})
    assert in_a_child(io, "flush.before_mark", 1) == 0
    if (pid := os.fork()) == 0:
        io.crash_point("flush.before_mark")
        os._exit(0)
    wait_until(lambda: Path(f"/proc/{pid}/wchan").read_text() == "hrtimer_nanosleep", what="it sleeps")
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert in_a_child(io, "flush.before_mark", 3) == 0


def test_io_fault_fails_one_call(tmp_path: Path) -> None:
    io = io_from_environment({"MQPROC_FAULT": "pwrite:2:ENOSPC"})
    fd = io.open(tmp_path / "file", write=True, create=True)
    io.pwrite(fd, b"1", 0)
    with pytest.raises(OSError, match="call 2 of pwrite") as failed:
        io.pwrite(fd, b"2", 1)
    assert failed.value.errno == errno.ENOSPC
    io.pwrite(fd, b"3", 1)
    assert io.pread(fd, 9, 0) == b"13"
    io.close(fd)


def test_sticky_io_fault_keeps_failing_and_sync_raises_failed_sync(tmp_path: Path) -> None:
    io = io_from_environment({"MQPROC_FAULT": "sync_folder:2:EIO:sticky"})
    io.sync_folder(tmp_path)
    for _ in range(2):
        with pytest.raises(FailedSyncError, match="Input/output error"):
            io.rename(tmp_path / "one", tmp_path / "two") if io.exists(tmp_path / "one") else io.sync_folder(tmp_path)
        (tmp_path / "one").touch()
    assert (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        (
            "MQPROC_CRASH",
            "flush.before_marks",
            "no point is called 'flush.before_marks'; did you mean flush.before_mark",
        ),
        ("MQPROC_CRASH", "flush.before_mark:0", "'0' is not a number from 1 on"),
        ("MQPROC_HANG", "flush.before", "no point is called 'flush.before'; did you mean"),
        ("MQPROC_FAULT", "sink:1:EIO", "no call is called 'sink'; did you mean"),
        ("MQPROC_FAULT", "sync:1:EBAD", "no errno is called 'EBAD'"),
        ("MQPROC_FAULT", "sync:x:EIO", "'x' is not a number"),
        ("MQPROC_FAULT", "sync:1:EIO:always", "is not CALL:NUMBER:ERRNO"),
    ],
)
def test_fault_variable_with_invalid_value_is_refused(variable: str, value: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as refused:
        io_from_environment({variable: value})
    assert variable in str(refused.value)
    assert repr(value) in str(refused.value)


def test_group_with_unknown_crash_point_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mqproc", "up", "--store", str(tmp_path / "store")]
    environment = os.environ | {"MQPROC_CRASH": "nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ConfigurationError.exit_code
    assert "MQPROC_CRASH = 'nowhere': no point is called 'nowhere'" in done.stderr
    assert not (tmp_path / "store").exists()


def test_crash_points_used_and_listed_are_the_same() -> None:
    used = set()
    for folder in ("mqproc", "supervisor"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("crash_point", "crash_amid"):
                    name = node.args[0]
                    assert isinstance(name, ast.Constant), f"{path}: a name that is not written out"
                    used.add(name.value)
    assert used == {*CRASH_POINTS}


def test_fault_calls_are_methods_of_store_io() -> None:
    for name in FAILING_CALLS:
        assert getattr(FaultInjectionIO, name) is not getattr(StoreIO, name)
