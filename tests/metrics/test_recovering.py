"""The monitor of a real group during and after recovery."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqproc import Message
from mqproc.cli.admin import supervisor_client
from mqproc.ipc.control_words import SUPERVISOR_TIMEOUT_NS
from mqproc.layout import control as layout
from mqproc.metrics.collector import KNOWN_IN_RECOVERY
from mqproc.supervisor.supervise import EXIT_INTERRUPTED
from mqproc.wire.address import BACKLOG
from tests.support.chromium import Chromium, browser
from tests.support.command_line import call
from tests.support.group import POINTS, START_TIMEOUT_S, HeldGroup, wait_until

MESSAGES = 3000


@pytest.fixture
def group(tmp_path: Path) -> Iterator[HeldGroup]:
    """A group whose store is recovered from its log alone.

    The last run's queue table is garbage.
    """
    group = HeldGroup(tmp_path / "store")
    group.start()
    with group.client() as client:
        client.create_topic("orders", 2)
        client.send_many([Message("orders", b"x" * 500, queue_id=number % 2) for number in range(MESSAGES)])
        client.wait_dispatched()
        client.groups.commit("billing", "orders", 0, 100)
    group.kill()
    # Without marks the whole log is read.
    shutil.rmtree(group.paths.marks)
    group.paths.queues.write_bytes(b"garbage")
    group.begin()
    yield group
    group.close()


def values(text: str) -> dict[str, float]:
    """Samples without labels, by name."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }


def first_event(group: HeldGroup) -> Any:
    with urllib.request.urlopen(f"{group.url()}/events", timeout=60) as answer:
        return json.loads(answer.readline().removeprefix(b"data: "))


def maps_a_table(group: HeldGroup) -> bool:
    maps = Path(f"/proc/{group.pid(layout.MONITOR)}/maps").read_text()
    assert "(deleted)" not in "".join(line for line in maps.splitlines() if str(group.store) in line)
    return str(group.paths.queues) in maps


def test_doctor_does_not_interrupt_recovery(group: HeldGroup) -> None:
    group.wait_at(POINTS[0])
    found = {row["check"]: row for row in call("doctor", "--store", group.store, "--json").json["findings"]}
    assert found["group"]["level"] == "warning"
    assert found["group"]["found"].startswith("the group is recovering: reading the log")
    assert "restart" not in found["group"]["mend"]


@pytest.mark.parametrize("point", POINTS)
def test_down_ends_recovery_and_the_next_start_repeats_it(group: HeldGroup, point: str) -> None:
    group.continue_from(*POINTS[: POINTS.index(point)])
    group.wait_at(point)
    outcome = call("down", "--store", group.store)
    assert outcome.code == 0, outcome
    assert group.process is not None
    assert group.process.wait(60) == EXIT_INTERRUPTED, group.output.read_text()[-3000:]
    assert call("down", "--store", group.store).code == 9
    group.continue_from(*POINTS)
    group.begin()
    wait_ready(group)
    with group.client() as client:
        assert sum(queue.max_offset for queue in client.queues("orders")) == MESSAGES


def test_status_polling_does_not_block_recovery(group: HeldGroup) -> None:
    """A script polls `mqproc status`; the supervisor accepts connections only after recovery."""
    group.wait_at(POINTS[0])
    for _ in range(BACKLOG + 1):
        supervisor_client.check_listening(group.paths)
    outcome = call("status", "--store", group.store)
    assert (outcome.code, outcome.err) == (1, "")
    assert "the group is recovering" in outcome.out
    assert call("down", "--store", group.store).code == 0


def test_status_unreachable_supervisor_is_reported_running(group: HeldGroup) -> None:
    group.wait_at(POINTS[0])
    with ExitStack() as waiting:
        for _ in range(BACKLOG + 1):
            waiting.enter_context(connected(group))
        assert call("status", "--store", group.store).code == 1
        outcome = call("down", "--store", group.store, "--timeout", "300ms")
    assert (outcome.code, outcome.err) == (
        4,
        f"mqproc: {group.store}: the supervisor accepted no connection in 0.3 s\n",
    )


def connected(group: HeldGroup) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(str(group.paths.socket("ctl")))
    return client


def test_down_waits_until_group_has_ended(group: HeldGroup) -> None:
    group.wait_at(POINTS[0])
    process = group.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        outcome = call("down", "--store", group.store, "--timeout", "300ms")
    finally:
        process.send_signal(signal.SIGCONT)
    assert outcome.code == 4
    assert outcome.err == f"mqproc: {group.store}: the group has not stopped yet; it continues to stop\n"
    assert process.wait(60) == EXIT_INTERRUPTED


def test_down_supervisor_without_local_pid_is_not_signalled(group: HeldGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor in another container has no local pid.

    A signal to pid 0 would go to the caller's process group.
    """
    group.wait_at(POINTS[0])
    # Not the module's function: other code of this process sends signals too.
    os_of_down = mock.Mock(wraps=os, kill=mock.Mock())
    with monkeypatch.context() as patched:
        patched.setattr(supervisor_client, "peer_pid", lambda _sock: 0)
        patched.setattr(supervisor_client, "os", os_of_down)
        outcome = call("down", "--store", group.store, "--timeout", "300ms")
    assert os_of_down.kill.call_args_list == []
    assert "did not answer in 0.3 s" in outcome.err
    # The stop request is sent all the same, and obeyed after recovery.
    group.continue_from(*POINTS)
    assert group.process is not None
    group.process.wait(START_TIMEOUT_S)
    assert group.output.read_text().endswith("group down\n")


def wait_ready(group: HeldGroup) -> None:
    wait_until(group.ready, START_TIMEOUT_S, "group ready")


def test_health_recovering_group_is_alive_but_not_ready(group: HeldGroup) -> None:
    log, dispatch, durable = POINTS
    group.wait_at(log)
    monitor = group.pid(layout.MONITOR)
    # Longer than the heartbeat timeout of a supervisor that is not recovering.
    beaten_ns = group.words()["supervisor_heartbeat_ns"]
    wait_until(lambda: time.monotonic_ns() - beaten_ns > SUPERVISOR_TIMEOUT_NS, what="a long recovery")

    assert group.get("/healthz") == (200, "ok\n")
    status, text = group.get("/readyz")
    assert status == 503
    found = re.fullmatch(
        r"the group is recovering: reading the log, ([\d.]+) of ([\d.]+) MB, since .*: wait .*\n", text
    )
    assert found is not None, text
    assert 1 <= float(found[1]) < float(found[2])
    status, text = group.get("/metrics")
    assert status == 200
    offered = {line.split("{")[0].split()[0] for line in text.splitlines() if line and not line.startswith("#")}
    assert offered == KNOWN_IN_RECOVERY
    samples = values(text)
    assert [samples[f"mqproc_{name}"] for name in ("up", "group_ready", "group_recovering")] == [1, 0, 1]
    event = first_event(group)
    assert (event["group"], event["ready"], event["topics"]) == ("recovering", False, [])
    assert event["recovery"].startswith("reading the log, ")
    assert set(event["path"].values()) == {None, False}, "but for read_only"
    assert (event["topic_count"], event["group_count"]) == (None, None)
    assert (event["disk"]["used_ratio"], event["disk"]["full"]) == (None, None)
    assert not any(role["silent"] for role in event["roles"])
    (problem,) = event["problems"]
    assert problem["problem"].startswith("the group is recovering: reading the log")
    assert not maps_a_table(group)

    group.continue_from(log)
    group.wait_at(dispatch)
    status, text = group.get("/readyz")
    assert status == 503
    found = re.fullmatch(r"the group is recovering: dispatching, ([\d.]+) of ([\d.]+) MB, since .*: wait .*\n", text)
    assert found is not None, text
    group.continue_from(dispatch)
    group.wait_at(durable)
    status, text = group.get("/readyz")
    assert (status, text.partition(",")[0]) == (503, "the group is recovering: making it durable")
    # The new table exists, and is opened when recovery is over.
    assert first_event(group)["topics"] == []
    assert not maps_a_table(group)

    group.continue_from(durable)
    wait_ready(group)
    assert group.get("/readyz") == (200, "ok\n")
    assert (group.pid(layout.MONITOR), group.words()["monitor.restarts"]) == (monitor, 0)
    status, text = group.get("/metrics")
    assert values(text)["mqproc_group_recovering"] == 0
    assert f'mqproc_messages_appended_total{{topic="orders"}} {MESSAGES}.0\n' in text
    assert maps_a_table(group)
    # A snapshot is cached for half a second.
    wait_until(lambda: first_event(group)["ready"], what="a picture of the ready group")
    event = first_event(group)
    assert (event["group"], event["problems"]) == ("ready", [])
    assert [topic["stored"] for topic in event["topics"] if topic["topic"] == "orders"] == [MESSAGES]
    (lag,) = event["groups"]
    assert (lag["group"], lag["lag_messages"]) == ("billing", MESSAGES // 2 - 100)
    assert event["errors"] == []
    assert group.words()["recovery_step"] == layout.STEP_NONE
    assert group.stop() == 0


def words_of(group: HeldGroup) -> dict[str, Any]:
    """The control words as in `mqproc stat`."""
    words: dict[str, Any] = call("stat", "--store", group.store, "--json").json["words"]
    return words


def test_status_recovering_group_is_reported(group: HeldGroup) -> None:
    group.wait_at(POINTS[0])
    began_s = time.monotonic()
    status = call("status", "--store", group.store, "--timeout", "30s")
    assert time.monotonic() - began_s < 30, "the command does not wait for an answer"
    assert status.code == 1
    assert status.out.startswith(f"{group.store}: recovering, not ready")
    assert "✗ the group is recovering: reading the log, " in status.out
    roles = {role["role"]: role for role in call("status", "--store", group.store, "--json").json["roles"]}
    assert roles[layout.MONITOR]["pid"] == group.pid(layout.MONITOR)
    assert (roles[layout.WRITER]["state"], roles[layout.WRITER]["pid"]) == ("STOPPED", 0)
    # It has started before it listens.
    wait_until(lambda: words_of(group)["monitor_port"] > 0, what="the monitor's port")
    words = words_of(group)
    assert (words["alive"], words["recovery_step"]) == (1, layout.STEP_LOG)
    # Zeros for unknown values would look healthy.
    assert "positions are unknown until recovery has finished" in status.out
    assert "behind" not in status.out
    found = call("status", "--store", group.store, "--json").json
    assert found["recovery"].startswith("reading the log, ")
    assert {found[f"{name}_bytes"] for name in ("written", "dispatch_behind", "flush_behind")} == {None}
    unknown = ("written", "dispatched", "disk_used_bytes", "dispatch_behind_bytes", "dispatch_behind_ms", "flushed")
    assert {words[name] for name in unknown} == {None}
    page = call("top", "--store", group.store, "--once", "--interval", "200ms").out
    assert "recovering, not ready" in page
    assert re.search(r"^ recovery +recovering +reading the log, [\d.]+ of [\d.]+ MB$", page, re.MULTILINE), page
    assert "a power loss would lose -, -   queues -, index - behind" in page
    assert "- % used, - free  log -" in page
    assert "up with the log" not in page
    assert "✗" not in page, "recovery is no fault"
    assert re.search(r"^ supervisor .* -$", page, re.MULTILINE), "it need not beat"
    assert re.search(r"^ monitor +running ", page, re.MULTILINE)
    page = call("top", "--store", group.store, "--once", "--interval", "200ms", "--view", "topics").out
    assert "unknown until recovery has finished" in page
    group.continue_from(*POINTS)
    wait_ready(group)
    assert call("status", "--store", group.store).code == 0


def test_status_recovering_group_omits_unknown_positions(group: HeldGroup) -> None:
    group.wait_at(POINTS[0])
    assert call("down", "--store", group.store).code == 0
    page = call("top", "--store", group.store, "--once", "--interval", "200ms").out
    assert "not known   recovery was interrupted" in page, page
    assert call("stat", "--store", group.store, "--json").json["words"]["written"] is None


def test_status_group_killed_in_recovery_is_dead(group: HeldGroup) -> None:
    group.wait_at(POINTS[0])
    assert group.process is not None
    group.process.kill()
    group.process.wait(60)
    beaten_ns = group.words()["supervisor_heartbeat_ns"]
    wait_until(lambda: time.monotonic_ns() - beaten_ns > SUPERVISOR_TIMEOUT_NS, what="silence")
    assert call("stat", "--store", group.store, "--json").json["words"]["alive"] == 0
    assert call("status", "--store", group.store).code == 9


@pytest.mark.skipif(browser() is None, reason="no Chromium is installed: apt-get install chromium")
def test_page_recovering_group_is_shown_and_updated(group: HeldGroup, tmp_path: Path) -> None:
    group.wait_at(POINTS[0])
    with Chromium(tmp_path / "profile") as page:
        page.open(f"{group.url()}/")
        page.wait(lambda: page.text("#verdict") == "recovering", "the page says recovering")
        assert page.text("#problems").startswith("the group is recovering: reading the log, ")
        assert not page.value("document.querySelector('#problems').hidden")
        assert page.value("document.querySelector('#verdict').className") == "badge warn"
        assert page.text("[data-show=dispatcher]") == page.text("#dispatch-behind") == "–"
        assert page.text("[data-show=unflushed_bytes]") == page.text("[data-show=queues]") == "–"
        assert page.value("document.querySelectorAll('.bad:not([hidden])').length") == 0, "nothing is at fault"
        assert page.text("#disk tr td:last-child") == "–", "used space is unknown"
        assert page.text("#topics tbody") == "not known yet"
        group.continue_from(*POINTS)
        page.wait(lambda: page.text("#verdict") == "ready", "the page says ready", START_TIMEOUT_S)
        page.wait(lambda: "orders" in page.text("#topics tbody"), "the topics are there")
        assert page.text("[data-show=write_rate]") == "0 B/s", "earlier writes are no rate"
        assert page.value("document.querySelector('#lost').hidden")
        assert page.problems == []
