"""SIGBUS, which normally ends a process silently: the error names file, offset and reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.cli.main import EXIT_CODES

CUT = """
import mmap, os, sys, threading
from pathlib import Path
import mqproc.cli.main
from mqproc.io.store_io import StoreIO
program = sys.modules["mqproc.cli.main"]
file = open(sys.argv.pop(), "r+b")
mapping = mmap.mmap(file.fileno(), 8192)
os.truncate(file.fileno(), 4096)

def command(*arguments, **named):
    {before}
    return mapping[5000]

program.cli.main = command
sys.exit(program.main())
"""
UNREADABLE = "def pread(*place): raise OSError(5, os.strerror(5))\n    StoreIO.pread = pread"
ROOM = "StoreIO.pread = lambda *place: b'x'"
THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
"""As numpy has some."""
HIDDEN = "def read_bytes(path): raise FileNotFoundError(path)\n    Path.read_bytes = read_bytes"
FORKED = """if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return 0
"""


ZEROS = """
import mmap, os, sys
from pathlib import Path
from mqproc.io.sigbus import ZeroFill, install_sigbus_handler, zero_filled_pages
from mqproc.io.store_io import StoreIO
path, access = Path(sys.argv[1]), getattr(mmap, sys.argv[2])
{before}
install_sigbus_handler(lambda text, code: print("dies"), ZeroFill({Path(sys.argv[3]): "nothing is reported"}, print))
sys.stdout.reconfigure(line_buffering=True)
with path.open("r+b") as file:
    mapping = mmap.mmap(file.fileno(), 12288, access=access)
    os.truncate(file.fileno(), 4096)
print(mapping[4000], mapping[5000], mapping[9000], mapping[5000], zero_filled_pages())
"""


def run(path: Path, before: str) -> subprocess.CompletedProcess[str]:
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-c", CUT.format(before=before), path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("before", "code", "message"),
    [
        ("", 1, ": the file was truncated while it was read"),
        (THREAD, 1, ": the file was truncated while it was read"),
        (ROOM, 1, ": no space for a page of the file: free space on the disk"),
        (UNREADABLE, 6, " cannot be read: Input/output error; restore the file from a copy, or copy its readable part"),
    ],
    ids=["cut", "with threads", "no room", "unreadable"],
)
def test_sigbus_names_file_and_page(tmp_path: Path, before: str, code: int, message: str) -> None:
    done = run(tmp_path / os.fsdecode(b"a segm\xe9nt"), before)
    assert done.stderr.startswith(f"mqproc: {tmp_path}/a segm\\xe9nt: offset 5,000{message}"), done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert code in EXIT_CODES


def test_sigbus_without_address_ends_process(tmp_path: Path) -> None:
    """Otherwise the faulting access would invoke the handler endlessly."""
    done = run(tmp_path / "segment", HIDDEN)
    assert (done.returncode, done.stderr) == (1, "mqproc: a page of memory is inaccessible\n")


def test_sigbus_in_forked_child_kills_it_for_parent_to_report(tmp_path: Path) -> None:
    done = run(tmp_path / "segment", FORKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGBUS}\n", "")


def read_on(path: Path, access: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ZEROS.replace("{before}", before), path, access, folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("there", "message"),
    [("os.truncate(path, 12288)", ""), ("None", ": offset 5,000 could not be read; nothing is reported")],
)
def test_sigbus_transient_error_is_retried_once(tmp_path: Path, there: str, message: str) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"\x01" * 12288)
    done = read_on(path, "ACCESS_READ", tmp_path, f"StoreIO.pread = lambda *place: {there} or b'x'")
    ends = f"1 0 0 0 {2 if message else 0}\n"
    assert (done.returncode, done.stdout.endswith(ends), message in done.stdout) == (0, True, True), done
    assert done.stdout.count("\n") == (2 if message else 1)


@pytest.mark.parametrize(
    ("access", "folder", "continues"),
    [("ACCESS_READ", "store", True), ("ACCESS_WRITE", "store", False), ("ACCESS_READ", "", False)],
    ids=["read only", "writable", "of another folder"],
)
def test_sigbus_on_read_only_mapping_reads_zeros(tmp_path: Path, access: str, folder: str, continues: bool) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    path = store / "segment"
    path.write_bytes(b"\x01" * 12288)
    done = read_on(path, access, tmp_path / "link" / folder)
    if continues:
        message = f"{path}: offset 5,000: the file was truncated while it was read; nothing is reported"
        assert done.stdout == f"{message}\n1 0 0 0 2\n"
    assert (done.returncode, done.stdout == "dies\n") == ((0, False) if continues else (-signal.SIGBUS, True)), done
