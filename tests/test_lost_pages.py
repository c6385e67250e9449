"""SIGBUS, which ends a process without a word: the command names file, place and reason."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.cli.main import EXIT_CODES

CUT = """
import mmap, os, sys
import mqproc.cli.main
from mqproc.io import StoreIO
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
FORKED = """if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return 0
"""


def run(path: Path, before: str) -> subprocess.CompletedProcess[str]:
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-c", CUT.format(before=before), path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("before", "code", "told"),
    [
        ("", 1, ": the file was cut while it was read"),
        (ROOM, 1, ": there is no room for a page of the file: make room on the disk"),
        (UNREADABLE, 6, " cannot be read: Input/output error; put the file back from a copy, or copy what can be read"),
    ],
    ids=["cut", "no room", "unreadable"],
)
def test_a_page_that_cannot_be_had_is_named(tmp_path: Path, before: str, code: int, told: str) -> None:
    done = run(tmp_path / "a segment", before)
    assert done.stderr.startswith(f"mqproc: {tmp_path}/a segment: offset 5,000{told}"), done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert code in EXIT_CODES


def test_who_is_forked_dies_by_the_signal_for_its_parent_to_tell(tmp_path: Path) -> None:
    done = run(tmp_path / "segment", FORKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGBUS}\n", "")
