"""Closed or full output streams: the work is done, and the exit code shows the result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import Client
from tests.support.command_line import call
from tests.support.group import Group

# Their results are more than a pipe holds.
COUNT = 2000
MQPROC = f'"{sys.executable}" -m mqproc'
LINES = f"seq 1 {COUNT}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    group = Group(tmp_path_factory.mktemp("group") / "store").start()
    yield group.store
    group.close()


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


def _count(store: Path, topic: str) -> int:
    with Client(store) as client:
        client.wait_dispatched()
    return int(call("message", "range", topic, "--count", "--store", store).out)


def test_send_with_closed_output_sends_all(store: Path) -> None:
    send = f"{LINES} | {MQPROC} send unread --json --store '{store}'"
    outcome = _run(f"{send} | head -n 1; exit ${{PIPESTATUS[1]}}")
    assert (outcome.returncode, outcome.stdout.count("\n")) == (0, 1)
    assert (outcome.stderr.count("\n"), outcome.stderr.split(" stored")[0]) == (1, f"{COUNT:,} messages")
    assert _count(store, "unread") == COUNT


def test_send_with_closed_output_reports_unstored_messages(store: Path) -> None:
    lines = f"({LINES}; head -c 5000000 /dev/zero)"
    outcome = _run(f"{lines} | {MQPROC} send large --json --store '{store}' | head -n 1; exit ${{PIPESTATUS[1]}}")
    assert outcome.returncode == 1
    assert "not stored: 1 message" in outcome.stderr


def test_send_with_full_output_sends_all_and_fails(store: Path) -> None:
    outcome = _run(f"{LINES} | {MQPROC} send full --json --store '{store}' > /dev/full")
    assert outcome.returncode == 1
    assert outcome.stderr.splitlines()[1:] == ["mqproc: standard output: No space left on device"]
    assert _count(store, "full") == COUNT


# In development mode, and always from 3.13 on, Python reports failed writes when a file is closed.
TELLS_ALL = "PYTHONUNBUFFERED= PYTHONDEVMODE=1"


@pytest.mark.parametrize("variables", ["PYTHONUNBUFFERED=", "PYTHONUNBUFFERED=1", TELLS_ALL])
@pytest.mark.parametrize("command", ["topic list", "stat", "config doc", "tail one -n 1", "send one x", "send --help"])
def test_full_output_is_not_reported_as_a_full_store(store: Path, command: str, variables: str) -> None:
    call("send", "one", "x", "--store", store)
    assert _count(store, "one") > 0
    outcome = _run(f"{variables} {MQPROC} {command} --store '{store}' > /dev/full")
    assert (outcome.returncode, outcome.stderr) == (1, "mqproc: standard output: No space left on device\n")


def test_closed_reader_ends_command_quietly(store: Path, unread: int) -> None:
    script = f"{TELLS_ALL} {MQPROC} topic list --store '{store}'"
    outcome = subprocess.run(["bash", "-c", script], stdout=unread, stderr=subprocess.PIPE, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, b"")


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe whose reader is gone."""
    reader, pipe = os.pipe()
    os.close(reader)
    yield pipe
    os.close(pipe)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["send", "--help"]])
def test_help_into_closed_pipe_succeeds(unread: int, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mqproc", *arguments]
    outcome = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, b"")


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["nothing"], 2), (["status", "--store", "/nowhere"], 5)])
def test_error_into_closed_pipe_keeps_its_exit_code(unread: int, arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "mqproc", *arguments]
    assert subprocess.run(command, stdout=unread, stderr=unread, check=False).returncode == code


@pytest.mark.parametrize("stderr", ["gone", "full"])
def test_closed_stderr_does_not_stop_a_send(store: Path, unread: int, stderr: str) -> None:
    """The second line has no key, which is an error; the third one is sent anyway."""
    command = [
        sys.executable,
        "-m",
        "mqproc",
        "send",
        f"stderr-{stderr}",
        "--key-delimiter",
        ":",
        "--store",
        str(store),
    ]
    with open("/dev/full", "wb") as full:
        told = unread if stderr == "gone" else full
        outcome = subprocess.run(command, input=b"k:1\n:2\nk:3\n", stdout=told, stderr=told, check=False)
    assert outcome.returncode == 1
    assert _count(store, f"stderr-{stderr}") == 2


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_stdout_discards_output(store: Path, closed: str) -> None:
    for command in (f"send closed x --json --store '{store}'", f"topic list --store '{store}'"):
        outcome = _run(f"{MQPROC} {command} {closed}")
        assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")
    assert _run(f"{MQPROC} tail nothing --store '{store}' {closed}").returncode == 5


def test_c_locale_output_is_escaped(store: Path) -> None:
    assert call("send", "locale", "caf\u00e9", "--store", store).code == 0
    assert _count(store, "locale") == 1
    locale = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    outcome = _run(f"{locale} {MQPROC} message range locale --output raw --store '{store}'")
    assert (outcome.returncode, outcome.stdout.split("\t")[-1]) == (0, "caf\\u00e9\n")
