"""The monitor serves the counters, publishes its port, and retries a taken port."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mqproc.config.parse import load_options
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.bell import EventBell
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.roles.monitor import RETRY_NS, Monitor
from mqproc.roles.role import RoleContext
from tests.support.fakes import make_control


class SteppingClock(Clock):
    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def context(tmp_path: Path) -> Any:
    """The monitor's context."""
    control = make_control(tmp_path)
    bell = EventBell(control.cells, layout.role_word(layout.MONITOR, "sleeping"))

    class Context:
        io = StoreIO()
        paths = StorePaths(tmp_path)
        options = load_options(flags=["metrics_port=0"], environment={})
        clock = SteppingClock()

    Context.control = control  # type: ignore[attr-defined]
    Context.bell = bell  # type: ignore[attr-defined]
    yield Context()
    bell.close()
    control.close()


def fetch(monitor: Monitor, port: int, path: str) -> str:
    found: list[str] = []

    def get() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            found.append(answer.read().decode())

    thread = threading.Thread(target=get)
    thread.start()
    while thread.is_alive():
        monitor.wait(0.01)
    return found[0]


def test_monitor_serves_pages_at_the_published_port(context: Any) -> None:
    monitor = Monitor(cast(RoleContext, context))
    port = context.control.load(layout.MONITOR_PORT)
    assert port > 0
    assert "mqproc_dispatch_behind_bytes 3000.0\n" in fetch(monitor, port, "/metrics")
    assert fetch(monitor, port, "/healthz") == "ok\n"
    assert context.control.load(layout.SCRAPES) == 2
    monitor.close()
    assert context.control.load(layout.MONITOR_PORT) == 0


def test_monitor_bell_wakes_it(context: Any) -> None:
    monitor = Monitor(cast(RoleContext, context))
    context.bell.post()
    monitor.wait(10)
    monitor.close()


def test_monitor_taken_port_is_retried(context: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        context.options = load_options(flags=[f"metrics_port={port}"], environment={})
        # A predecessor that was killed has left it.
        context.control.store(layout.MONITOR_PORT, port)
        monitor = Monitor(cast(RoleContext, context))
        assert context.control.load(layout.MONITOR_PORT) == 0
        assert monitor.do_work() == 0
    context.clock.now_ns += RETRY_NS
    monitor.do_work()
    assert context.control.load(layout.MONITOR_PORT) == port
    monitor.close()


def test_monitor_stops_in_one_step(context: Any) -> None:
    monitor = Monitor(cast(RoleContext, context))
    stop: Callable[[], bool] = monitor.on_stop
    assert stop()
    monitor.close()
