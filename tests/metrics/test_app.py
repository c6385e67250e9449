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
from tests.support.fakes import IO, make_collector, make_control, make_queues, write_record


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
    assert "query is BACKOFF: see mqproc errors" in text
    assert "writer has been silent" in text
    assert "read-only: a sync failed with errno 5; repair the disk, mqproc down, mqproc store repair" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({layout.DISPATCH_ERRNO: 28}, "dispatch waits: No space left on device (errno 28)"),
        ({layout.DISPATCHED: 7000}, " s late; if dispatch is stuck: mqproc restart"),
        ({layout.ALL_FLUSHED_NS: 1}, "a power loss would take the last"),
        ({layout.SEGMENT_ERRNO: 122}, "the log gets no new segment: Disk quota exceeded (errno 122); free space"),
        ({layout.DAMAGE_HOLES: 2}, "2 damaged ranges, which reads skip: see mqproc store verify"),
    ],
    ids=["blocked", "behind", "not durable", "no segment", "damage"],
)
def test_readyz_degraded_group_says_what_to_do(
    control: Control, tmp_path: Path, changes: dict[int, int], said: str
) -> None:
    assert snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))["warnings"] == []
    written_s = time.time() - 12
    write_record(tmp_path, 7000, round(written_s * 1000))
    for word, value in changes.items():
        control.store(word, value)
    found = snapshot(make_collector(tmp_path, control), StorePaths(tmp_path))
    assert found["ready"]
    (warning,) = found["warnings"]
    assert said in warning
    if layout.DISPATCHED in changes:
        late_s = int(re.search(r"(\d+) s late", warning)[1])  # type: ignore[index]
        assert 12 <= late_s <= round(time.time() - written_s)


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
