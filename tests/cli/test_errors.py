"""`mqproc errors`: what a group's processes have logged, while it lives, after it died, and as it comes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Message
from mqproc.errors import MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.error_log import ErrorLog
from mqproc.paths import StorePaths
from tests.cli.calling import call
from tests.conftest import START_TIMEOUT_S, Group, wait_until


def a_log(store: Path, owner: str) -> ErrorLog:
    StorePaths(store).own.mkdir(parents=True, exist_ok=True)
    log = ErrorLog.create(StoreIO(), StorePaths(store), owner)
    assert log is not None
    return log


def test_each_distinct_error_stands_once_the_newest_last(tmp_path: Path) -> None:
    now_ms = round(time.time() * 1000)
    writer, keeper = a_log(tmp_path, "writer"), a_log(tmp_path, "keeper")
    writer.note("no segment for 5 ms", now_ms - 7_200_000)
    keeper.note("disk nearly full used_bytes=90", now_ms - 60_000)
    writer.note("no segment for 7 ms", now_ms - 3_600_000)
    rows = call("errors", "--store", tmp_path, "--json").json["errors"]
    assert [(row["owner"], row["count"]) for row in rows] == [("writer", 2), ("keeper", 1)]
    assert rows[0]["first_ms"] == now_ms - 7_200_000
    assert [line.split()[0] for line in call("errors", "--store", tmp_path).out.splitlines()] == [
        "role", "writer", "keeper",
    ]  # fmt: skip
    assert [row["owner"] for row in call("errors", "--store", tmp_path, "--since", "10m", "--json").json["errors"]] == [
        "keeper"
    ]
    assert call("errors", "--store", tmp_path, "--role", "writer", "--output", "csv").out.count("\n") == 2


def test_a_store_without_errors_says_so(tmp_path: Path) -> None:
    outcome = call("errors", "--store", tmp_path)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "no errors\n")
    assert call("errors", "--store", tmp_path, "--json").json["errors"] == []


def test_followed_errors_come_as_they_happen(tmp_path: Path) -> None:
    log = a_log(tmp_path, "writer")
    log.note("first", 1000)
    command = [sys.executable, "-m", "mqproc", "errors", "--follow", "--json", "--interval", "50ms"]
    with subprocess.Popen([*command, "--store", tmp_path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["text"] == "first"
            log.note("second", 2000)
            found = json.loads(process.stdout.readline())
            assert (found["text"], found["new"]) == ("second", 1)
            log.note("first", 3000)
            assert json.loads(process.stdout.readline())["count"] == 2
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


def test_following_ends_at_the_timeout(tmp_path: Path) -> None:
    log = a_log(tmp_path, "writer")
    log.note("first", 1000)
    began_s = time.monotonic()
    for interval in ("50ms", "1h"):
        follow = ("--follow", "--timeout", "300ms", "--interval", interval, "--json")
        outcome = call("errors", "--store", tmp_path, *follow)
        assert outcome.code == 0
        assert [row["text"] for row in outcome.json_lines] == ["first"]
    assert 0.6 <= time.monotonic() - began_s < 60


def texts(group: Group) -> list[str]:
    return [row["text"] for row in call("errors", "--store", group.store, "--json").json["errors"]]


@pytest.mark.parametrize(("number", "what"), [(signal.SIGSEGV, "a role crashed"), (signal.SIGKILL, "a role died")])
def test_a_role_that_died_is_told_with_the_group_dead(
    make_group: Callable[..., Group], number: signal.Signals, what: str
) -> None:
    group = make_group()
    before = group.pid("query")
    os.kill(before, number)
    wait_until(lambda: group.pid("query") not in (0, before), what="another query role")
    group.kill()
    assert [text.startswith(what) and "query" in text for text in texts(group)] == [True], texts(group)


def test_a_page_that_a_role_could_not_have_is_told_with_its_file(make_group: Callable[..., Group]) -> None:
    """The queue table's, which more roles than one write to; a disk that cannot read it does the same."""
    group = make_group()
    with group.client() as client, group.client(timeout=0.5) as impatient:
        client.send("topic", b"before")
        os.truncate(group.paths.queues, 0)
        with pytest.raises(MqprocError):
            impatient.send("topic", b"after")
    told = re.compile(f"{group.paths.queues}: offset [0-9,]+: the file was truncated while it was read")
    wait_until(lambda: any(told.fullmatch(text) for text in texts(group)), what="a role that tells of it")
    wait_until(lambda: "Current thread" in group.output.read_text(), what="its Python stack")


def test_what_halted_a_group_is_told_afterwards(make_group: Callable[..., Group]) -> None:
    group = make_group()
    process = group.process
    assert process is not None
    killed = 0

    def ended_or_back() -> bool:
        return process.poll() is not None or group.words()["query.pid"] not in (0, killed)

    while process.poll() is None:
        killed = group.words()["query.pid"]
        os.kill(killed, signal.SIGKILL)
        wait_until(ended_or_back, what="query again, or the end of the group")
    assert any(text.startswith("the group halts reason=query") for text in texts(group)), texts(group)


def test_why_a_group_did_not_start_is_told_afterwards(make_group: Callable[..., Group]) -> None:
    group = make_group(on_damage="refuse")
    with group.client() as client:
        client.send_many([Message("orders", b"x" * 1000) for _ in range(3)])
        client.wait_dispatched()
    assert group.stop() == 0
    with min(group.paths.commit_log.iterdir()).open("r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 100)
    # Without a mark everything is looked at.
    shutil.rmtree(group.paths.marks)
    group.launch(["up", "--store", str(group.store), "--set", "on_damage=refuse"])
    assert group.process is not None
    assert group.process.wait(START_TIMEOUT_S) == 6
    assert any(text.startswith("the group did not start: ") for text in texts(group)), texts(group)
