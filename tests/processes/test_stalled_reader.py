"""A reader of the group's output that stalls: lines are dropped and counted, and the group works on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.ipc.error_log import LINES_DROPPED, seen_errors
from mqproc.layout import control as words_of
from mqproc.roles import role_log
from tests.support.command_line import call
from tests.support.group import SMALL, START_TIMEOUT_S, STOP_TIMEOUT_S, Group, wait_until

Ends = tuple[int, int]
"""Descriptors of the stalled reader, and of the output."""


def fill(fd: int) -> None:
    """Write until nothing more is taken; leave the descriptor blocking."""
    os.set_blocking(fd, False)
    try:
        while True:
            os.write(fd, b"x")
    except BlockingIOError:
        os.set_blocking(fd, True)


def pipe(_folder: Path) -> Ends:
    return os.pipe()


def fifo(folder: Path) -> Ends:
    """As `exec 9<>p` opens it: for reading too."""
    os.mkfifo(folder / "fifo")
    fd = os.open(folder / "fifo", os.O_RDWR)
    return os.dup(fd), fd


def journal(_folder: Path) -> Ends:
    """The output of a unit of systemd is a socket."""
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


def terminal(_folder: Path) -> Ends:
    """Nothing reads its other end, as after Ctrl-S."""
    return os.openpty()


@pytest.fixture(params=[pipe, fifo, journal, terminal])
def stalled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    made: Callable[[Path], Ends] = request.param
    reader, writer = made(tmp_path)
    fill(writer)
    yield writer
    os.close(writer)
    os.close(reader)


def start(store: Path, output: int) -> tuple[Group, subprocess.Popen[bytes]]:
    group = Group(store)
    flags = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "mqproc", "up", "--store", str(store), *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    wait_until(lambda: process.poll() is not None or group.is_ready(), START_TIMEOUT_S, "a ready group")
    return group, process


def test_stalled_reader_stops_no_process(tmp_path: Path, stalled: int) -> None:
    group, process = start(tmp_path / "store", stalled)
    try:
        before = group.pid("writer")
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: group.words()["writer.incarnation"] == 2 and group.is_ready(), what="another writer")
        process.send_signal(signal.SIGHUP)
        with group.client() as client:
            client.send("t", b"1")
        assert call("restart", "query", "--store", group.store).code == 0
        dropped = [error for error in seen_errors(StoreIO(), group.paths) if error.text.startswith(LINES_DROPPED)]
        assert {error.owner for error in dropped} == {words_of.SUPERVISOR}
        assert sum(error.count for error in dropped) > 10
        assert os.get_blocking(stalled), "programs that share the output still wait for it"
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_role_drops_lines_that_are_not_taken(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fill(writer)
    group, process = start(tmp_path / "store", writer)
    try:
        os.truncate(group.paths.queues, 0)  # Each role that reads it logs an error.
        wait_until(
            lambda: any(
                error.text.startswith(LINES_DROPPED) and error.owner in words_of.ROLES
                for error in seen_errors(StoreIO(), group.paths)
            ),
            what="a dropped line of a role",
        )
    finally:
        process.kill()
        process.wait()
        os.close(writer)
        os.close(reader)


def test_line_after_a_cut_one_begins_on_its_own_line() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        role_log.write_line(writer, b"x" * (1 << 20) + b"\n")
    os.read(reader, 1 << 20)
    role_log.write_line(writer, b"next\n")
    assert os.read(reader, 100) == b"\nnext\n"
    os.close(reader)
    os.close(writer)


def test_log_file_has_json_lines_only(tmp_path: Path) -> None:
    """Also after a reload, whose options differ from the store's sizes."""
    store = tmp_path / "store"
    config = tmp_path / "mqproc.toml"
    values = SMALL | {"mapped_file_size_commit_log": 1 << 22}
    config.write_text("".join(f"{name} = {value}\n" for name, value in SMALL.items()))
    first = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    run("up", "--detach", "--store", store, *first)
    group = Group(store)
    with group.client() as client:
        client.send("t", b"1")
    run("down", "--store", store)
    run("up", "--detach", "--store", store, "--config", config)
    try:
        os.kill(group.pid(words_of.SUPERVISOR), signal.SIGHUP)
        log = group.paths.log
        wait_until(lambda: "options reloaded" in log.read_text(), what="reloaded options")
        lines = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        assert sum("mapped_file_size_commit_log: the store's files have" in line for line in lines) == 1
    finally:
        run("down", "--store", store)


def run(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "mqproc", *map(str, arguments)]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_TIMEOUT_S, check=True)


@pytest.mark.parametrize(
    "statement",
    [
        "raise ValueError('surprise')",
        "import warnings; warnings.warn('surprise')",
        "import logging; logging.getLogger('asyncio').error('%s', 'surprise')",
        "import threading; threading.Thread(target=[].index, args=('surprise',)).start()",
        "C = type('C', (), {'__del__': lambda self: [].index('surprise')}); C()",
    ],
)
def test_what_python_prints_is_logged_as_json(statement: str) -> None:
    program = f"from mqproc.roles import role_log as r\nr.configure('writer')\nr.log_python_messages()\n{statement}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["role"] == "writer"
    assert "surprise" in str(line)
