"""Liveness and readiness with reasons; the page loads only its own resources; events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.cli.admin.top import VIEWS, Screen, State, rows_of
from mqproc.ipc.control import Control
from mqproc.ipc.error_log import ErrorLog
from mqproc.layout import control as layout
from mqproc.metrics.app import STREAMS_MAX, StatusFeed, make_app
from mqproc.metrics.groups import GroupLag
from mqproc.metrics.snapshot import snapshot
from mqproc.paths import StorePaths
from mqproc.util.units import format_time
from tests.support.fakes import IO, beat, make_collector, make_control, make_queues, write_record


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = make_control(tmp_path)
    yield control
    control.close()


class Answer:
    """Status, headers and body that an application sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")


def get(control: Control, store: Path, path: str, method: str = "GET") -> Answer:
    app = make_app(make_collector(store, control), StorePaths(store), "1.2.3")
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "root_path": ""}
    answer = Answer()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app(scope, receive, answer.send))
    return answer


def test_health_running_group_is_alive_and_ready(control: Control, tmp_path: Path) -> None:
    assert get(control, tmp_path, "/healthz").status == 200
    assert get(control, tmp_path, "/readyz").body == b"ok\n"


def test_health_dead_supervisor_is_not_alive_nor_ready(control: Control, tmp_path: Path) -> None:
    control.store(layout.SUPERVISOR_HEARTBEAT_NS, 1)
    assert get(control, tmp_path, "/healthz").status == 503
    assert b"supervisor has been silent" in get(control, tmp_path, "/readyz").body


def test_readyz_names_role_that_is_not_ready(control: Control, tmp_path: Path) -> None:
    control.store(layout.role_word(layout.QUERY, "supervised"), layout.BACKOFF)
    control.store(layout.role_word(layout.WRITER, "heartbeat_ns"), 1)
    control.store(layout.WRITER_SYNC_ERRNO, 5)
    text = get(control, tmp_path, "/readyz").body.decode()
    assert re.search(r"query is BACKOFF, since .*: see mqproc errors\n", text)
    assert "writer has been silent" in text
    assert re.search("a sync failed with errno 5, since .*: repair the disk, mqproc down, mqproc store repair", text)


SINCE_MS = 1_700_000_000_000
DEGRADED: dict[str, tuple[dict[int, int], str, str]] = {
    "sync": ({layout.CQ_SYNC_ERRNO: 5}, "the store is read-only: a sync failed with errno 5", "store repair"),
    "damage": ({layout.DISPATCH_READ_ONLY: 1, layout.DISPATCH_HOLES: 1}, "the store is read-only: 1 damaged", "verify"),
    "disk": ({layout.DISK_FULL: 1}, "the disk is nearly full: sends are refused", "free space"),
    "segment": ({layout.SEGMENT_ERRNO: 122}, "the log gets no new segment: Disk quota exceeded (errno 122)", "free"),
    "backlog": ({layout.WRITTEN: 5 << 30}, "sends are refused: dispatch lags by", "mqproc restart dispatcher"),
    "dispatch": ({layout.DISPATCH_ERRNO: 20}, "dispatch waits, and consumers see no new messages: Not a dir", "repair"),
    "commitlog-flush": ({layout.COMMITLOG_FLUSH_ERRNO: 24}, "the log is not flushed: Too many open files", "repair"),
    "cq-flush": ({layout.CQ_FLUSH_ERRNO: 20}, "the ConsumeQueues are not flushed: Not a directory", "repair"),
    "index-flush": ({layout.INDEX_FLUSH_ERRNO: 20}, "the index is not flushed: Not a directory", "repair"),
    "retention": ({layout.RETENTION_ERRNO: 1}, "retention waits, and the disk fills up: Operation not", "repair"),
    "delivery": ({layout.DELIVERY_ERRNO: 28}, "scheduled delivery waits: No space left on device", "repair"),
    "topics": ({layout.TOPICS_ERRNO: 21}, "topics.json cannot be saved: Is a directory (errno 21)", "repair"),
    "offsets": ({layout.OFFSETS_ERRNO: 28}, "committed offsets cannot be saved: No space left on device", "repair"),
    "offsets-lost": ({layout.OFFSETS_LOST: 1}, "consumerOffset.json could not be read", "mqproc/aside"),
    "kernels": ({layout.KERNELS_FAILED: 1, layout.KERNELS_LEFT: 3}, "3 kernels could not be compiled", "mqproc warm"),
    "settings-lost": ({layout.GROUP_SETTINGS_LOST: 1}, "subscriptionGroup.json could not be read", "mqproc/aside"),
    "metrics": ({layout.MONITOR_PORT: 0}, "metrics and the status page are unavailable at 127.0", "set metrics_port"),
    "query": ({layout.role_word(layout.QUERY, "supervised"): layout.BACKOFF}, "query is BACKOFF", "mqproc errors"),
    "writer": ({layout.role_word(layout.WRITER, "heartbeat_ns"): 1}, "writer has been silent", "restarted"),
    "template": ({layout.role_word(layout.TEMPLATE, "supervised"): layout.BACKOFF}, "template is BACKOFF", "errors"),
}


@pytest.mark.parametrize(("name", "case"), DEGRADED.items(), ids=DEGRADED)
def test_group_with_a_problem_is_degraded_everywhere(
    control: Control, tmp_path: Path, name: str, case: tuple[dict[int, int], str, str]
) -> None:
    changes, text, remedy = case
    for word, value in changes.items():
        control.store(word, value)
    control.store(layout.PROBLEM_SINCE[name], SINCE_MS)
    found = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    assert (found["state"], found["ready"]) == ("degraded", False)
    problem = found["problems"][0]
    assert problem["problem"].startswith(text)
    assert (problem["since_ms"], remedy in problem["remedy"]) == (SINCE_MS, True)
    answer = get(control, tmp_path, "/readyz")
    assert (answer.status, answer.body.decode().startswith(text)) == (503, True)
    assert f", since {format_time(SINCE_MS)}: " in answer.body.decode()
    assert get(control, tmp_path, "/healthz").status == 200
    assert dict(make_collector(tmp_path, control).samples()["mqproc_group_ready"]) == {(): 0}
    page = "\n".join(Screen().page(State(VIEWS[0], 1.0, ""), found, None, 300))
    assert "degraded" in page
    assert text in page


def test_every_problem_has_a_case() -> None:
    roles = {*layout.ROLES, layout.TEMPLATE}
    of_files = {"options", "maker"}
    assert set(layout.PROBLEMS) - roles - of_files == DEGRADED.keys() - roles


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({layout.DISPATCHED: 7000}, " s late"),
        ({layout.ALL_FLUSHED_NS: 1}, "a power loss would take the last"),
    ],
    ids=["behind", "not durable"],
)
def test_late_work_degrades_the_group_since_it_is_late(
    control: Control, tmp_path: Path, changes: dict[int, int], said: str
) -> None:
    assert snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))["problems"] == []
    written_s = time.time() - 12
    write_record(tmp_path, 7000, round(written_s * 1000))
    for word, value in changes.items():
        control.store(word, value)
    found = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    (problem,) = found["problems"]
    assert said in problem["problem"]
    assert problem["since_ms"] <= written_s * 1000 + 1


@pytest.mark.parametrize("damage", ["missing", "garbled"])
def test_group_whose_options_are_lost_is_degraded(control: Control, tmp_path: Path, damage: str) -> None:
    settings = StorePaths(tmp_path).settings
    if damage == "missing":
        settings.unlink()
    else:
        settings.write_bytes(b"{")
    text = get(control, tmp_path, "/readyz").body.decode()
    assert text.startswith(f"the group's options cannot be read from {settings}: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({layout.DAMAGE_HOLES: 2}, "2 damaged ranges, which reads skip: see mqproc store verify"),
        ({layout.RETENTION_UNCONSUMED: 7}, "retention has deleted 7 messages that groups had not consumed"),
    ],
    ids=["damage", "unconsumed"],
)
def test_warning_leaves_the_group_ready(control: Control, tmp_path: Path, changes: dict[int, int], said: str) -> None:
    assert snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))["warnings"] == []
    for word, value in changes.items():
        control.store(word, value)
    found = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    assert (found["state"], found["problems"]) == ("ready", [])
    (warning,) = found["warnings"]
    assert said in warning


def test_health_busy_role_is_not_silent(control: Control, tmp_path: Path) -> None:
    control.store(layout.role_word(layout.WRITER, "heartbeat_ns"), 1)
    control.store(layout.role_word(layout.WRITER, "state"), layout.STATE_SYNCING)
    assert get(control, tmp_path, "/readyz").status == 200
    now = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    assert not any(role["silent"] for role in now["roles"])


@pytest.mark.parametrize(("silent_s", "silent"), [(5, False), (20, True)])
def test_page_and_top_mark_role_dead_as_readyz_does(
    control: Control, tmp_path: Path, silent_s: int, silent: bool
) -> None:
    """A role in one long step has not sent heartbeats for seconds, but is healthy."""
    beaten_ns = time.monotonic_ns() - silent_s * 1_000_000_000
    control.store(layout.role_word(layout.WRITER, "heartbeat_ns"), beaten_ns)
    assert (get(control, tmp_path, "/readyz").status == 503) == silent
    now = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    (writer,) = (role for role in now["roles"] if role["role"] == layout.WRITER)
    assert writer["silent"] == silent
    assert silent_s <= writer["silent_s"] < (time.monotonic_ns() - beaten_ns) / 1e9
    # Only then does `top` show it in red.
    shown = "\n".join(Screen().page(State(VIEWS[0], 1.0, ""), now, None, 200))
    assert (f"\x1b[1;31m{writer['silent_s']:.1f}" in shown) == silent


def test_snapshot_stopped_role_has_no_memory_value(control: Control, tmp_path: Path) -> None:
    """Other processes have values as soon as they run: rates begin then."""
    control.store(layout.role_word(layout.QUERY, "pid"), 0)
    now = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    (query,) = (role for role in now["roles"] if role["role"] == layout.QUERY)
    assert (query["memory_bytes"], query["cpu_s"], query["open_fds"]) == (None, None, None)
    began = {**query, "memory_bytes": 1 << 20, "cpu_s": 1.5, "open_fds": 3}
    later = {**now, "time_ms": now["time_ms"] + 1000, "roles": [began]}
    (row,) = rows_of(VIEWS[0], {**now, "roles": [query]}, later)
    assert row["cpu_percent"] is None
    (row,) = rows_of(VIEWS[0], later, {**now, "roles": [query]})
    assert row["cpu_percent"] == 0
    Screen().page(State(VIEWS[0], 1.0, ""), now, None, 200)


def test_page_loads_only_own_resources(control: Control, tmp_path: Path) -> None:
    page = get(control, tmp_path, "/").body.decode()
    asked = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert {"/status.js", "/status.css", "/icon.svg", "/metrics"} <= set(asked)
    for path in asked:
        assert path.startswith("/")
        beat(control)
        assert get(control, tmp_path, path).status == 200, path
    assert "http" not in page
    assert "default-src 'none'" in get(control, tmp_path, "/").headers["content-security-policy"]


@pytest.mark.parametrize(("path", "method", "status"), [("/other", "GET", 404), ("/metrics", "POST", 405)])
def test_app_unknown_path_is_404(control: Control, tmp_path: Path, path: str, method: str, status: int) -> None:
    assert get(control, tmp_path, path, method).status == status


def test_app_head_has_no_body(control: Control, tmp_path: Path) -> None:
    assert get(control, tmp_path, "/healthz", "HEAD").status == 200


def test_events_send_group_snapshots(control: Control, tmp_path: Path) -> None:
    make_queues(tmp_path, topics=60, queues=2, messages=10)
    errors = ErrorLog.create(IO, StorePaths(tmp_path), layout.KEEPER)
    assert errors is not None
    errors.note("disk nearly full", 1_700_000_000_000)
    collector = make_collector(tmp_path, control)
    event = StatusFeed(collector, StorePaths(tmp_path), "1.2.3").event()
    collector.close()
    found = json.loads(event.removeprefix(b"data: "))
    assert event.endswith(b"\n\n")
    assert found["ready"]
    assert found["path"]["dispatch_behind_bytes"] == 3000
    assert found["roles"][0]["errors"] == 0
    assert [role["role"] for role in found["roles"]] == [layout.SUPERVISOR, *layout.ROLES]
    assert len(found["topics"]) == 50
    assert found["topic_count"] == 60
    assert (found["group_count"], found["group_lag_messages"]) == (0, 0)
    assert found["topics"][0] == {
        "topic": "topic-59",
        "queues": 2,
        "appended": 20,
        "stored": 16,
        "delivered": 120,
        "last_ms": 1_700_000_000_059,
    }
    assert found["errors"][0]["text"] == "disk nearly full"
    assert found["topics_found"] == 60
    assert sum(found["latencies"]["append"]["counts"]) == 0


@pytest.mark.parametrize("series_max", [3, 1000], ids=["more than metrics have", "all in metrics"])
def test_events_filter_searches_all_topics_and_groups(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, series_max: int
) -> None:
    make_queues(tmp_path, topics=260, queues=1, messages=10)
    lags = [GroupLag(f"group-{number}", "orders", 10, 1.0) for number in range(70)]
    collector = make_collector(tmp_path, control, metrics_series_max=series_max)
    state = dataclasses.replace(collector.read_state(), lags=lags)
    monkeypatch.setattr(collector, "read_state", lambda: state)
    feed = StatusFeed(collector, StorePaths(tmp_path), "1.2.3")

    def looked_for(name: str) -> tuple[int, int, int, int, int, int]:
        found = json.loads(feed.event(name).removeprefix(b"data: "))
        assert found["name"] == name
        return (
            *(len(found["topics"]), found["topics_found"], found["topic_count"]),
            *(len(found["groups"]), found["groups_found"], found["group_count"]),
        )

    assert looked_for("") == (50, 260, 260, 50, 70, 70)
    assert looked_for("PIC-7") == (11, 11, 260, 0, 0, 70)
    assert looked_for("topic-1") == (50, 111, 260, 0, 0, 70)
    assert looked_for("group-6") == (0, 0, 260, 11, 11, 70)
    assert looked_for("orders") == (0, 0, 260, 50, 70, 70)
    assert looked_for("") == (50, 260, 260, 50, 70, 70)
    collector.close()


def test_events_totals_include_groups_not_sent(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lags = [GroupLag(f"group-{number}", "orders", 10, 1.0) for number in range(70)]
    collector = make_collector(tmp_path, control)
    state = dataclasses.replace(collector.read_state(), lags=lags)
    monkeypatch.setattr(collector, "read_state", lambda: state)
    found = snapshot(collector, StorePaths(tmp_path))
    assert len(found["groups"]) == 50
    assert (found["group_count"], found["group_lag_messages"]) == (70, 700)


def test_snapshot_supervisor_row_has_its_errors(control: Control, tmp_path: Path) -> None:
    errors = ErrorLog.create(IO, StorePaths(tmp_path), layout.SUPERVISOR)
    assert errors is not None
    errors.note("query has died", 1_700_000_000_000)
    errors.note("query has died", 1_700_000_000_000)
    (row,) = [role for role in snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))["roles"]
              if role["role"] == layout.SUPERVISOR]  # fmt: skip
    assert row["errors"] == 2


def test_events_subscribers_are_bounded(control: Control, tmp_path: Path) -> None:
    app = make_app(make_collector(tmp_path, control), StorePaths(tmp_path), "1.2.3")
    scope = {"type": "http", "method": "GET", "path": "/events", "headers": [], "query_string": b"", "root_path": ""}

    async def come_together() -> tuple[list[int], int]:
        leave = asyncio.Event()

        async def receive() -> Any:
            await leave.wait()
            return {"type": "http.disconnect"}

        answers = [Answer() for _ in range(2 * STREAMS_MAX)]
        clients = [asyncio.create_task(app(scope, receive, answer.send)) for answer in answers]
        async with asyncio.timeout(60):
            while not all(answer.body for answer in answers):
                await asyncio.sleep(0)
            leave.set()
            await asyncio.gather(*clients)
            later = Answer()
            await app(scope, receive, later.send)
        return [answer.status for answer in answers], later.status

    statuses, later = asyncio.run(come_together())
    assert sorted(statuses) == [200] * STREAMS_MAX + [503] * STREAMS_MAX
    assert later == 200
