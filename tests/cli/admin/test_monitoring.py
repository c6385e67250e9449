"""`mqproc stat`, `errors` and `metrics` of running and stopped groups."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Message
from mqproc.errors import CorruptStoreError, MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.error_log import ErrorLog
from mqproc.layout import control as layout
from mqproc.metrics.catalogue import METRICS
from mqproc.paths import StorePaths
from tests.support.command_line import Outcome, call
from tests.support.fakes import make_control
from tests.support.group import START_TIMEOUT_S, Group, wait_until


def test_stat_words_match_the_control_file(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    words = control_words.read_words(StorePaths(tmp_path))
    assert words == control.snapshot()
    for index in layout.SYNC_ERRNO_WORDS:
        control.store(index, 5)
        assert control_words.read_only(control_words.read_words(StorePaths(tmp_path)))
        control.store(index, 0)
    control.store(layout.HEADER_VERSION, 99)
    with pytest.raises(CorruptStoreError, match="version"):
        control_words.read_words(StorePaths(tmp_path))
    control.close()


def test_stat_figures_are_derived_from_words(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    words = call("stat", "--store", tmp_path, "--json").json["words"]
    assert words["dispatch_behind_bytes"] == 3000
    assert 0 <= words["dispatch_behind_ms"] < 30_000
    assert words["flush_behind_bytes"] == 4500
    assert words["written"] == 9000
    assert words["alive"] == 1


@pytest.mark.parametrize("why", [layout.SYNC_ERRNO_WORDS[0], layout.DAMAGE_READ_ONLY, layout.DISPATCH_READ_ONLY])
def test_stat_store_without_sends_is_read_only(tmp_path: Path, why: int) -> None:
    control = make_control(tmp_path)
    for value in (0, 1):
        control.store(why, value)
        assert call("stat", "--store", tmp_path, "--json").json["words"]["read_only"] == value
    control.close()


def test_stat_killed_group_is_dead(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    control.store(layout.SUPERVISOR_HEARTBEAT_NS, 1)
    control.close()
    assert call("stat", "--store", tmp_path, "--json").json["words"]["alive"] == 0


def test_stat_sizes_have_units_in_tables_only(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    control.store(layout.WRITTEN, 5 << 20)
    control.close()
    arguments = ("stat", "--store", tmp_path, "--prefix", "written")
    line = next(line for line in call(*arguments).out.splitlines() if line.startswith("written "))
    assert "  5.0 MiB  " in line
    assert call(*arguments, "--json").json["words"]["written"] == 5 << 20
    assert f"written,{5 << 20},bytes," in call(*arguments, "--output", "csv").out


def test_stat_words_have_unit_owner_and_meaning(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    out = call("stat", "--store", tmp_path).out
    for word in layout.WORDS.values():
        if word.name not in ("magic", "version", "store_id"):
            line = next(line for line in out.splitlines() if line.split()[0] == word.name)
            assert word.owner in line
            assert word.help in line
    assert "ready (3)" in out


def test_stat_prefix_and_changed_select_words(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    rows = call("stat", "--store", tmp_path, "--prefix", "dispatched", "--output", "csv").out.splitlines()[1:]
    assert [row.split(",")[0] for row in rows][:2] == ["dispatched", "dispatched_store_timestamp_ms"]
    assert "dispatched_entries" not in call("stat", "--store", tmp_path, "--changed").out


def test_stat_without_control_file_is_not_running(tmp_path: Path) -> None:
    assert call("stat", "--store", tmp_path).code == 9


def test_stat_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "control"
    file.touch()
    outcome = call("stat", "--store", file)
    assert outcome.code == 3
    assert outcome.err == f"mqproc: {file}: a file; --store takes the folder that holds a store's files\n"


def watched(store: Path, *how: str) -> Outcome:
    """Output of a watch with at least two blocks; a busy machine may delay the first."""
    for timeout in ("300ms", "3s", "20s"):
        outcome = call("stat", "--store", store, "--watch", "--timeout", timeout, *how)
        assert outcome.code == 0, outcome
        if outcome.out.count("dispatch_behind_bytes") >= 2:
            break
    return outcome


def test_stat_watch_ends_at_timeout(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    began_s = time.monotonic()
    for interval in ("50ms", "1h"):
        blocks = [block["words"] for block in watched(tmp_path, "--interval", interval, "--json").json_lines]
        assert len(blocks) >= 2
        assert {block["dispatch_behind_bytes"] for block in blocks} == {3000}
    assert 0.6 <= time.monotonic() - began_s < 60


def test_stat_watch_changed_omits_zeros(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    for flags, there in (((), True), (("--changed",), False)):
        watch = ("--watch", "--timeout", "150ms", "--interval", "50ms", "--json", *flags)
        outcome = call("stat", "--store", tmp_path, *watch)
        for block in outcome.json_lines:
            assert ("read_only" in block["words"]) == there
            assert block["words"]["dispatch_behind_bytes"] == 3000


def test_stat_watch_prints_csv(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    watch = ("--interval", "50ms")
    lines = watched(tmp_path, *watch, "--output", "csv").out.splitlines()
    header, *rows = csv.reader(lines)
    assert header == ["time_ms", "name", "value", "per_second", "unit"]
    assert {len(row) for row in rows} == {5}
    behind = [row for row in rows if row[1] == "dispatch_behind_bytes"]
    assert len(behind) >= 2
    assert header not in rows
    blocks = watched(tmp_path, *watch, "--json").json_lines
    for times in ([int(row[0]) for row in behind], [block["time_ms"] for block in blocks]):
        assert times == sorted(times)
        assert abs(times[-1] - time.time() * 1000) < 60_000


def test_stat_watch_prints_rates(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    command = [sys.executable, "-m", "mqproc", "stat", "--watch", "--interval", "50ms", "--json", "--store", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())["words"]
            assert (first["written"], first["dispatch_behind_bytes"]) == (9000, 3000)
            control.store(layout.WRITTEN, 12_000)
            blocks = (json.loads(line)["words"] for line in process.stdout if line.strip())
            changed = next(words for words in blocks if "written" in words)
            assert (changed["written"], changed["dispatch_behind_bytes"]) == (12_000, 6000)
            # Words only if they changed; rates always.
            assert "dispatched" not in changed
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    control.close()


# errors


def a_log(store: Path, owner: str) -> ErrorLog:
    StorePaths(store).own.mkdir(parents=True, exist_ok=True)
    log = ErrorLog.create(StoreIO(), StorePaths(store), owner)
    assert log is not None
    return log


def test_errors_lists_each_error_once_newest_last(tmp_path: Path) -> None:
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


def test_errors_of_clean_store_prints_no_errors(tmp_path: Path) -> None:
    outcome = call("errors", "--store", tmp_path)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "no errors\n")
    assert call("errors", "--store", tmp_path, "--json").json["errors"] == []


def test_errors_follow_prints_new_errors(tmp_path: Path) -> None:
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


def test_errors_follow_ends_at_timeout(tmp_path: Path) -> None:
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
def test_errors_reports_killed_role_of_dead_group(
    make_group: Callable[..., Group], number: signal.Signals, what: str
) -> None:
    group = make_group()
    before = group.pid("query")
    os.kill(before, number)
    wait_until(lambda: group.pid("query") not in (0, before), what="another query role")
    group.kill()
    assert [text.startswith(what) and "query" in text for text in texts(group)] == [True], texts(group)


def test_errors_names_the_file_of_an_unreadable_page(make_group: Callable[..., Group]) -> None:
    """A page of the queue table, which several roles write, cannot be read."""
    group = make_group()
    with group.client() as client, group.client(timeout=0.5) as impatient:
        client.send("topic", b"before")
        os.truncate(group.paths.queues, 0)
        with pytest.raises(MqprocError):
            impatient.send("topic", b"after")
    reported = re.compile(f"{group.paths.queues}: offset [0-9,]+: the file was truncated while it was read")
    wait_until(lambda: any(reported.fullmatch(text) for text in texts(group)), what="the error of a role")
    wait_until(lambda: "Current thread" in group.output.read_text(), what="its Python stack")


def test_errors_reports_why_a_group_halted(make_group: Callable[..., Group]) -> None:
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


def test_errors_reports_why_a_start_failed(make_group: Callable[..., Group]) -> None:
    group = make_group(on_damage="refuse")
    with group.client() as client:
        client.send_many([Message("orders", b"x" * 1000) for _ in range(3)])
        client.wait_dispatched()
    assert group.stop() == 0
    with min(group.paths.commit_log.iterdir()).open("r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 100)
    # Without a mark every record is checked.
    shutil.rmtree(group.paths.marks)
    group.launch(["up", "--store", str(group.store), "--set", "on_damage=refuse"])
    assert group.process is not None
    assert group.process.wait(START_TIMEOUT_S) == 6
    assert any(text.startswith("the group did not start: ") for text in texts(group)), texts(group)


# metrics


needs_ipv6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")


def test_metrics_lists_the_catalogue() -> None:
    rows = call("metrics", "--json").json["metrics"]
    assert [row["name"] for row in rows] == [metric.name for metric in METRICS]
    for row, metric in zip(rows, METRICS, strict=True):
        assert (row["kind"], row["unit"], tuple(row["labels"])) == (metric.kind, metric.unit, metric.labels)
        assert row["help"] == metric.help


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), pytest.param("::1", "[::1]", marks=needs_ipv6)],
)
def test_metrics_check_running_group_offers_all(make_group: Callable[..., Group], host: str, reached: str) -> None:
    group = make_group(metrics_host=host)
    port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    done = call("metrics", "--check", "--store", group.store)
    count = len(METRICS)
    assert done.code == 0
    assert done.out == f"{count} of {count} metrics of the catalogue at http://{reached}:{port}/metrics\n"
    assert call("metrics", "--check", "--json", "--store", group.store).json["missing"] == []
    assert group.stop() == 0
    assert call("metrics", "--check", "--store", group.store).code == 9


def test_metrics_check_uses_no_proxy(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert call("metrics", "--check", "--store", group.store).code == 0


def test_metrics_port_in_use_is_reported(make_group: Callable[..., Group]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        group = make_group(metrics_port=taken.getsockname()[1])
        said = f"metrics and the status page are unavailable at {address}: set metrics_port; see mqproc errors"
        wait_until(lambda: said in group.output.read_text(), what="a note about the port")
        assert "metrics are not offered" in call("errors", "--store", group.store).out
        done = call("metrics", "--check", "--store", group.store)
        assert done.code == 9
        assert said in done.err


def test_up_with_metrics_prints_no_note(group: Group) -> None:
    group.wait_for_step("query")
    assert "not offered" not in group.output.read_text()
