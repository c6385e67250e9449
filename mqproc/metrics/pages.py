"""The monitor's pages as functions of the control file: /metrics, /healthz, /readyz, and a landing page at /.

Alive is not ready: a group that recovers is alive. Both answer 503 when they are not, with the reasons as text.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from mqproc.control import Control
from mqproc.layout import control as layout
from mqproc.metrics.collector import HEARTBEAT_TIMEOUT_NS, ControlCollector

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer: HTTP status, content type, body."""

    status: int
    content_type: str
    body: bytes


class Pages:
    """Makes a page for a path. `heartbeat_timeout_ms` is when a role counts as silent."""

    def __init__(self, control: Control, store: str, version: str, heartbeat_timeout_ms: int) -> None:
        # Without it every counter would have a second series with the time of its birth.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._control = control
        self._store = store
        self._version = version
        self._timeout_ns = heartbeat_timeout_ms * 1_000_000
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ControlCollector(control, version))
        self._pages: dict[str, Callable[[], Page]] = {
            "/": self._landing,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }

    def page(self, path: str) -> Page:
        """The page at a path; 404 when there is none."""
        make = self._pages.get(path)
        return make() if make else Page(404, TEXT, b"not found; there are / /metrics /healthz /readyz\n")

    def _metrics(self) -> Page:
        return Page(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry))

    def _healthz(self) -> Page:
        return _verdict(alive_problems(self._control))

    def _readyz(self) -> Page:
        return _verdict(ready_problems(self._control, self._timeout_ns))

    def _landing(self) -> Page:
        control = self._control
        problems = ready_problems(control, self._timeout_ns)
        rows = [
            ("store", self._store),
            ("group", layout.GROUP_NAMES[control.load(layout.GROUP_STATE)]),
            ("ready", "; ".join(problems) or "yes"),
            ("written", f"{control.load(layout.WRITTEN):,} bytes"),
            ("dispatch behind", f"{control.dispatch_behind_bytes:,} bytes"),
            ("flush behind", f"{control.flush_behind_bytes:,} bytes"),
        ]
        return Page(200, HTML, _landing_html(self._version, rows).encode())


def alive_problems(control: Control) -> list[str]:
    """Why the group does not live; none when it does."""
    silent_ns = time.monotonic_ns() - control.load(layout.SUPERVISOR_HEARTBEAT_NS)
    if silent_ns > HEARTBEAT_TIMEOUT_NS:
        return [f"the supervisor has been silent for {silent_ns / 1e9:.1f} s"]
    return []


def ready_problems(control: Control, timeout_ns: int) -> list[str]:
    """Why the group does not serve in full; none when it does."""
    problems = alive_problems(control)
    state = control.load(layout.GROUP_STATE)
    if state != layout.GROUP_READY:
        problems.append(f"the group is {layout.GROUP_NAMES[state]}")
    for role in layout.ROLES:
        supervised = control.load(layout.supervised_word(role, "supervised"))
        silent_ns = time.monotonic_ns() - control.load(layout.role_word(role, "heartbeat_ns"))
        busy = control.load(layout.role_word(role, "state")) in layout.BUSY_STATES
        if supervised != layout.RUNNING:
            problems.append(f"{role} is {layout.SUPERVISED_NAMES[supervised]}")
        elif silent_ns > timeout_ns and not busy:
            problems.append(f"{role} has been silent for {silent_ns / 1e9:.1f} s")
    if control.read_only:
        problems.append(f"the store is read-only: a sync failed with errno {control.sync_errno}")
    if control.damage_read_only:
        problems.append(f"the store is read-only: {control.damage_holes} damaged ranges, on_damage = read_only")
    if control.load(layout.DISK_FULL):
        problems.append("the disk is nearly full: sends are refused")
    return problems


def _verdict(problems: list[str]) -> Page:
    if problems:
        return Page(503, TEXT, ("\n".join(problems) + "\n").encode())
    return Page(200, TEXT, b"ok\n")


def _landing_html(version: str, rows: list[tuple[str, str]]) -> str:
    table = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>\n" for name, value in rows)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mqproc</title><style>'
        "body{font-family:sans-serif;margin:2em}th{text-align:left;padding-right:2em}</style></head><body>\n"
        f"<h1>mqproc {html.escape(version)}</h1>\n<table>\n{table}</table>\n"
        '<p><a href="/metrics">metrics</a> · <a href="/healthz">alive</a> · <a href="/readyz">ready</a></p>\n'
        "</body></html>\n"
    )
