"""`mqproc top`: a live view of a group on the whole terminal.

The loop reads a snapshot, draws a frame with rich's Live, waits for a key, and repeats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import FrameType
from typing import Any, Final, TextIO

import click
import structlog
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from mqproc.cli.options import SECONDS, Invocation, command
from mqproc.cli.output import OutputColumn, one_line, output_columns
from mqproc.config.options import Options
from mqproc.errors import NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.counters import Buckets
from mqproc.ipc.health import Problem, readiness
from mqproc.layout import control as layout
from mqproc.metrics.collector import MetricsCollector
from mqproc.metrics.snapshot import snapshot
from mqproc.paths import StorePaths
from mqproc.util.units import counted, format_bytes, format_duration

# Rows and rates

Snapshot = Mapping[str, Any]
Row = dict[str, Any]

_RECOVERING: Final = layout.GROUP_NAMES[layout.GROUP_RECOVERING]
_LATE_S: Final = 1.0
_VERY_LATE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class View:
    """A table of the screen; further kinds of columns are rate, seconds, percent and time.

    `sort` is its first sort column, in descending order. Minor columns are omitted on a narrow terminal.
    """

    name: str
    columns: Sequence[OutputColumn]
    sort: str
    minor: tuple[str, ...] = ()


VIEWS: Final = (
    View(
        "roles",
        output_columns(
            "role, state, pid:number, cpu_percent:percent:cpu %, memory_bytes:bytes:memory, cycles_per_s:rate:steps/s",
            "open_fds:count:files, restarts:count, errors:count, silent_s:seconds:silent",
        ),
        "cpu_percent",
        minor=("pid", "cycles_per_s", "open_fds"),
    ),
    View(
        "topics",
        output_columns(
            "topic, queues:count, appended_per_s:rate:in/s, delivered_per_s:rate:out/s, stored:count",
            "appended:count:ever, last_ms:time:last message",
        ),
        "appended_per_s",
        minor=("appended",),
    ),
    View(
        "groups",
        output_columns("group, topic, lag_messages:count:lag, lag_per_s:rate:change/s, lag_s:seconds:oldest"),
        "lag_messages",
    ),
    View("errors", output_columns("role, count:count:times, last_ms:time:last, text:text:what"), "last_ms"),
)

_ROW_KEYS: Final = {"roles": ("role",), "topics": ("topic",), "groups": ("group", "topic"), "errors": ("role", "text")}
_RATES_OF: Final = {
    "roles": {"cycles_per_s": ("cycles", 1.0), "cpu_percent": ("cpu_s", 100.0)},
    "topics": {"appended_per_s": ("appended", 1.0), "delivered_per_s": ("delivered", 1.0)},
    "groups": {"lag_per_s": ("lag_messages", 1.0)},
}
"""Rates of each view: name, counter, factor."""


def passed_s(now: Snapshot, before: Snapshot | None) -> float:
    """Seconds between two snapshots, 0 if there are no rates between them.

    That is the case without an earlier snapshot, after the start of another group, and if recovery ended in between, as
    positions were unknown before.
    """
    if before is None or before["epoch"] != now["epoch"] or before["group"] == _RECOVERING != now["group"]:
        return 0.0
    passed_ms: int = now["time_ms"] - before["time_ms"]
    return max(0.0, passed_ms / 1000)


def rows_of(view: View, now: Snapshot, before: Snapshot | None) -> list[Row]:
    """The rows of a view, with rates since the earlier snapshot."""
    seconds = passed_s(now, before)
    names = _ROW_KEYS[view.name]
    earlier = {tuple(row[name] for name in names): row for row in (before or {}).get(view.name, ())}
    rows = []
    for found in now[view.name]:
        row = dict(found)
        was = earlier.get(tuple(row[name] for name in names))
        for rate, (figure, factor) in _RATES_OF.get(view.name, {}).items():
            if row[figure] is None:
                row[rate] = None
                continue
            earlier_figure = was[figure] if was is not None else None
            grown = row[figure] - earlier_figure if earlier_figure is not None and seconds else 0
            row[rate] = factor * grown / seconds if seconds else 0.0
        if row.get("cpu_percent") is not None:
            row["cpu_percent"] = max(0.0, row["cpu_percent"])
        rows.append(row)
    return rows


def shown_rows(view: View, rows: list[Row], sort: str, *, ascending: bool, text: str) -> list[Row]:
    """The sorted rows that contain a text."""
    texts = [column.name for column in view.columns if column.kind == "text"]
    lowered = text.lower()
    kept = [row for row in rows if not lowered or any(lowered in str(row[name]).lower() for name in texts)]
    kept.sort(key=lambda row: tuple(str(row[name]) for name in texts))
    # Unknown values sort below all others.
    kept.sort(key=lambda row: (row[sort] is not None, row[sort]), reverse=not ascending)
    return kept


def path_rate(name: str, now: Snapshot, before: Snapshot | None) -> float | None:
    """Growth per second of a counter of the message path, None if it is unknown."""
    seconds = passed_s(now, before)
    if now["path"][name] is None:
        return None
    return max(0.0, (now["path"][name] - before["path"][name]) / seconds) if seconds and before is not None else 0.0


def quantile_s(name: str, share: float, now: Snapshot, before: Snapshot | None) -> float | None:
    """A quantile of a latency since the earlier snapshot, None without samples."""
    counted = _buckets(now, name)
    if before is not None and passed_s(now, before):
        counted = counted.minus(_buckets(before, name))
    return counted.quantile(share) if sum(counted.counts) else None


def _buckets(snapshot: Snapshot, name: str) -> Buckets:
    found = snapshot["latencies"][name]
    return Buckets(tuple(found["bounds_s"]), tuple(found["counts"]), found["sum_s"])


def lateness(now: Snapshot, before: Snapshot | None) -> str:
    """State of dispatch: `well`, `late`, `stalled` (no progress, or very late), or `unknown`."""
    path = now["path"]
    behind = path["dispatch_behind_bytes"]
    if behind is None:
        return "unknown"
    if not behind:
        return "well"
    is_stuck = bool(passed_s(now, before)) and before is not None and (
        path["dispatched_bytes"] == before["path"]["dispatched_bytes"] and before["path"]["dispatch_behind_bytes"] > 0
    )  # fmt: skip
    if is_stuck or path["dispatch_behind_s"] >= _VERY_LATE_S:
        return "stalled"
    return "late" if path["dispatch_behind_s"] >= _LATE_S else "well"


# The user's choices

HELP = (
    ("1 2 3 4, tab", "roles, topics, groups, errors"),
    ("← →", "sort by the previous or next column"),
    ("r", "reverse the order"),
    ("/", "show only rows with a text; Esc clears it"),
    ("↑ ↓ PgUp PgDn", "scroll"),
    ("space", "pause, resume"),
    ("+ -", "refresh more or less often"),
    ("?", "this help"),
    ("q, Ctrl-C", "quit"),
)
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.2, 60.0


@dataclass(slots=True)
class State:
    """The user's choices, which keys change."""

    view: View = VIEWS[0]
    interval_s: float = 1.0
    filter: str = ""
    typing: bool = False
    paused: bool = False
    shows_help: bool = False
    ended: bool = False
    first: int = 0
    """The first row shown."""
    orders: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    """Order of each view: (sort column, whether ascending)."""

    @property
    def sort(self) -> str:
        return self.orders.get(self.view.name, (self.view.sort, False))[0]

    @property
    def ascending(self) -> bool:
        return self.orders.get(self.view.name, (self.view.sort, False))[1]

    def sort_by(self, name: str, *, ascending: bool = False) -> None:
        """Sort the current view by a column."""
        self.orders[self.view.name] = (name, ascending)

    def handle_key(self, key: str) -> None:
        """Apply a key."""
        if self.typing:
            self._type(key)
        elif self.shows_help:
            self.shows_help, self.ended = False, key == "q"
        else:
            self._command(key)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key
        self.first = 0

    def _command(self, key: str) -> None:
        if key == "q":
            self.ended = True
        elif key == "?":
            self.shows_help = True
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self.filter = ""
        elif key == " ":
            self.paused = not self.paused
        elif key == "r":
            self.sort_by(self.sort, ascending=not self.ascending)
        elif key in ("+", "="):
            self.interval_s = max(INTERVAL_S_MIN, self.interval_s / 2)
        elif key == "-":
            self.interval_s = min(INTERVAL_S_MAX, self.interval_s * 2)
        elif key in ("left", "right"):
            self._move_sort(1 if key == "right" else -1)
        elif key == "tab" or (key.isdigit() and 0 < int(key) <= len(VIEWS)):
            self._show(VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)] if key == "tab" else VIEWS[int(key) - 1])
        else:
            self._scroll(key)

    def _show(self, view: View) -> None:
        self.view, self.first = view, 0

    def _move_sort(self, step: int) -> None:
        names = [column.name for column in self.view.columns]
        self.sort_by(names[(names.index(self.sort) + step) % len(names)], ascending=self.ascending)

    def _scroll(self, key: str) -> None:
        steps = {"up": -1, "down": 1, "page-up": -10, "page-down": 10, "home": -(1 << 30), "end": 1 << 30}
        self.first = max(0, self.first + steps.get(key, 0))


_BARS: Final = "▁▂▃▄▅▆▇█"
_GAP: Final = "  "
_TEXT_WIDTH_MIN: Final = 8
_TEXT_WIDTH_MAX: Final = 44
_STYLES: Final = {"well": "bold green", "late": "bold yellow", "stalled": "bold red", "unknown": "bold yellow"}
_GOOD_STATES: Final = frozenset({"running", "ready", "syncing", "allocating"})
# A role that has not started yet is not an error.
_OTHER_STATES: Final = {
    _RECOVERING: "bold yellow",
    layout.SUPERVISED_NAMES[layout.STARTING]: "bold yellow",
    layout.SUPERVISED_NAMES[layout.STOPPED]: "dim",
}
_QUIET_S: Final = 3.0
"""A healthy role is rarely silent for longer; a long step is still no error."""
_UNKNOWN: Final = "-"
_LABEL: Final = 10
HISTORY_MAX: Final = 60


def _console(file: TextIO, *, colored: bool) -> Console:
    return Console(
        file=file,
        force_terminal=True,
        color_system="256" if colored else None,
        no_color=not colored,
        highlight=False,
        legacy_windows=False,
    )


class Screen:
    """Renders frames; keeps the history of the dispatch lag."""

    def __init__(self, *, colored: bool = True) -> None:
        self._console = _console(StringIO(), colored=colored)
        self._history: list[int] = []

    def add(self, now: Snapshot) -> None:
        """Add a snapshot to the history."""
        if (behind := now["path"]["dispatch_behind_bytes"]) is not None:
            self._history = [*self._history[1 - HISTORY_MAX :], behind]

    def frame(self, state: State, now: Snapshot, before: Snapshot | None, columns: int, lines: int) -> list[Text]:
        """Render `lines` lines for a terminal; longer lines are cropped to `columns`."""
        head = self._head(state, now, before, columns)
        room = max(1, lines - len(head) - 1)
        body = _help() if state.shows_help else _table(state, now, before, room, columns)
        body = [*body[:room], *[Text()] * (room - len(body))]
        frame = [*head, *body, _foot(state)][:lines]
        for text in frame:
            text.no_wrap, text.overflow = True, "crop"
        return frame

    def page(self, state: State, now: Snapshot, before: Snapshot | None, columns: int) -> list[str]:
        """Render all rows for a pipe, without the key line."""
        rows = _table(state, now, before, 1 << 30, columns)
        texts = [*self._head(state, now, before, columns), *rows]
        self._console.width = columns
        with self._console.capture() as capture:
            for text in texts:
                self._console.print(text, no_wrap=True, overflow="crop", crop=True)
        return capture.get().split("\n")[: len(texts)]

    # The head

    def _head(self, state: State, now: Snapshot, before: Snapshot | None, columns: int) -> list[Text]:
        lines = [_title(state, now, columns), self._dispatch(now, before, columns), _rates(now, before)]
        lines += [_durable(now), _latencies(now, before), _machine(now)]
        lines += [Text.assemble((f" ✗ {problem}", "bold red")) for problem in _problems(now)[:3]]
        lines += [Text.assemble((f" ! {warning}", "bold yellow")) for warning in now["warnings"][:2]]
        return [*lines, Text()]

    def _dispatch(self, now: Snapshot, before: Snapshot | None, columns: int) -> Text:
        """The dispatch lag."""
        path, how = now["path"], lateness(now, before)
        if how == "unknown":
            return _not_known(now)
        words = {"well": "up with the log", "late": "late", "stalled": "STALLED"}[how]
        if how == "well" and path["dispatch_behind_bytes"]:
            words = "keeps up"
        text = Text.assemble(
            _label("dispatch"),
            (f" {words} ", f"{_STYLES[how]} reverse"),
            (
                f"  {format_bytes(path['dispatch_behind_bytes'])} behind, "
                f"{counted(path['dispatch_behind_messages'], 'message')}, {_seconds(path['dispatch_behind_s'])}",
                "bold" if how == "well" else _STYLES[how],
            ),
        )
        spark = _spark(self._history[-max(0, columns - len(text) - 4) :]) if columns > len(text) + 12 else ""
        return text + Text(f"  {spark}", "dim")


def _problems(now: Snapshot) -> list[str]:
    """Problems other than a running recovery, which has its own line."""
    problems = [Problem(**problem) for problem in now["problems"]]
    if now["recovery"] is not None:
        problems = [each for each in problems if not each.problem.startswith(f"the group is {_RECOVERING}")]
    return list(map(str, problems))


def _not_known(now: Snapshot) -> Text:
    """The line in place of dispatch while positions are unknown: progress of recovery."""
    if now["recovery"] is None:
        return Text.assemble(_label("dispatch"), (" not known ", "bold yellow reverse"), "  recovery was interrupted")
    return Text.assemble(_label("recovery"), (f" {_RECOVERING} ", "bold yellow reverse"), f"  {now['recovery']}")


def _title(state: State, now: Snapshot, columns: int) -> Text:
    ready = now["ready"]
    word, style = readiness(now["group"], now["state"]), "bold green" if ready else "bold red"
    if now["recovery"] is not None:
        style = _STYLES["late"]
    since = format_duration((now["time_ms"] - now["started_ms"]) / 1000) if ready else "-"
    left = Text.assemble((" mqproc top ", "reverse bold"), f" {now['store']}  ", (word, style), f", up {since}")
    pace = "paused  " if state.paused else f"every {state.interval_s:g} s  "
    right = f"{pace}{time.strftime('%H:%M:%S', time.localtime(now['time_ms'] / 1000))} "
    return left + Text(" " * max(2, columns - len(left) - len(right))) + Text(right, "dim")


def _label(text: str) -> tuple[str, str]:
    return f" {text:<{_LABEL}}", "cyan"


def _rates(now: Snapshot, before: Snapshot | None) -> Text:
    def rate(name: str) -> float | None:
        return path_rate(name, now, before)

    return Text.assemble(
        _label("rates"),
        f"sent {_rate(rate('appended_messages'))}/s",
        f" ▸ dispatched {_rate(rate('dispatched_messages'))}/s",
        f" ▸ delivered {_rate(rate('delivered_messages'))}/s",
        # Before the end of the line, which a narrow terminal cuts off.
        "   ",
        (f"{_rate(rate('rejects'))} refused/s", "bold red" if rate("rejects") else ""),
        f"   {_bytes(rate('written_bytes'))}/s   {_rate(rate('requests'))} requests/s",
    )


def _durable(now: Snapshot) -> Text:
    path = now["path"]
    kind = "SYNC_FLUSH" if now["sync_flush"] else "ASYNC_FLUSH"
    lost = f"a power loss would lose {_bytes(path['flush_behind_bytes'])}, {_seconds(path['unflushed_s'])}"
    return Text.assemble(
        _label("durable"),
        ("READ-ONLY  ", "bold red") if path["read_only"] else "",
        f"{lost}   queues {_bytes(path['queues_behind_bytes'])}, "
        f"index {_bytes(path['index_behind_bytes'])} behind   {kind}",
    )


def _latencies(now: Snapshot, before: Snapshot | None) -> Text:
    parts = []
    for name in ("append", "dispatch", "pull", "key", "flush"):
        found = quantile_s(name, 0.99, now, before)
        parts.append(f"{name} {_UNKNOWN if found is None else '≤ ' + _seconds(found)}")
    return Text.assemble(_label("99 % in"), "  ".join(parts))


def _machine(now: Snapshot) -> Text:
    disk, path = now["disk"], now["path"]
    clients = _UNKNOWN if path["producers"] is None else f"{path['producers']} + {path['consumers']}"
    memory = sum(role["memory_bytes"] or 0 for role in now["roles"])
    share = disk["used_ratio"]
    style = "bold red" if disk["full"] else "bold yellow" if (share or 0) > disk["clean_ratio"] else ""
    used = _UNKNOWN if share is None else f"{100 * share:.0f}"
    damage = (f"   {disk['holes']} DAMAGED RANGES", "bold red") if disk["holes"] else ""
    return Text.assemble(
        _label("disk"),
        (f"{used} % used, {_bytes(disk['free_bytes'])} free", style),
        damage,
        f"  log {_bytes(disk['log_bytes'])}  memory {format_bytes(memory)}  {clients} clients",
    )


# The view


def _table(state: State, now: Snapshot, before: Snapshot | None, room: int, columns: int) -> list[Text]:
    view = state.view
    all_rows = rows_of(view, now, before)
    rows = shown_rows(view, all_rows, state.sort, ascending=state.ascending, text=state.filter)
    visible = max(1, room - 2)
    state.first = min(state.first, max(0, len(rows) - visible))
    shown = rows[state.first : state.first + visible]
    fields = [_Field(column, state, shown) for column in view.columns]
    _fit(fields, columns - 1)
    fields = [field for field in fields if field.width]
    lines = [_tabs(state, len(rows), len(all_rows))]
    lines.append(Text.assemble(" ", *(part for field in fields for part in field.heading())))
    for place, row in enumerate(shown):
        lines.append(Text.assemble(" ", *(part for field in fields for part in field.cell(place, row))))
    if not rows:
        nothing = f"no row contains {state.filter!r}" if all_rows else _nothing(view.name, now)
        lines.append(Text(f" {nothing}", "dim"))
    return lines


class _Field:
    """A column with the texts of its cells and its width, 0 if it is omitted."""

    def __init__(self, column: OutputColumn, state: State, rows: Sequence[Row]) -> None:
        self.column = column
        self.is_minor = column.name in state.view.minor
        mark = ("▲" if state.ascending else "▼") if column.name == state.sort else ""
        self._title = f"{column.heading}{mark}"
        self._texts = [_cell(column, row[column.name]) for row in rows]
        self.is_sorted = bool(mark)
        self.width = max(len(self._title), *map(len, self._texts)) if rows else len(self._title)

    def heading(self) -> list[tuple[str, str]]:
        return self._padded(self._title, "bold underline")

    def cell(self, place: int, row: Row) -> list[tuple[str, str]]:
        return self._padded(self._texts[place], _style(self.column, row))

    def _padded(self, text: str, style: str) -> list[tuple[str, str]]:
        text = text if len(text) <= self.width else text[: max(0, self.width - 1)] + "…"
        padding = " " * (self.width - len(text))
        is_left_aligned = self.column.kind == "text"
        parts = [(text, style), (padding, "")] if is_left_aligned else [(padding, ""), (text, style)]
        return [*parts, (_GAP, "")]


def _fit(fields: Sequence[_Field], most: int) -> None:
    """Omit minor columns until a line fits, then shorten texts; the last gets the rest."""

    def spare() -> int:
        shown = [field.width for field in fields if field.width]
        return most - sum(shown) - len(_GAP) * (len(shown) - 1)

    texts = [field for field in fields if field.column.kind == "text"]
    for field in texts[:-1]:
        field.width = min(field.width, _TEXT_WIDTH_MAX)
    for field in fields:
        if field.is_minor and not field.is_sorted and spare() < 0:
            field.width = 0
    for field in reversed(texts):
        if (missing := -spare()) > 0:
            field.width = max(_TEXT_WIDTH_MIN, field.width - missing)


def _tabs(state: State, shown: int, total: int) -> Text:
    parts: list[Any] = [" "]
    for number, view in enumerate(VIEWS, 1):
        parts += [(f" {number} {view.name} ", "reverse" if view is state.view else "dim"), " "]
    count = f" {shown:,} of {total:,}" if state.filter else f" {total:,} in all"
    filtered = f"  filter: {state.filter}" if state.filter or state.typing else ""
    return Text.assemble(
        *parts, (count, "dim"), (filtered, "bold yellow"), ("▏" if state.typing else "", "bold yellow")
    )


def _nothing(view: str, now: Snapshot) -> str:
    if now["topic_count"] is None and view in ("topics", "groups"):
        return "unknown until recovery has finished"
    return {
        "topics": "no topic yet: mqproc send TOPIC TEXT creates one",
        "groups": "no consumer group has committed an offset yet",
        "errors": "no errors",
    }.get(view, "nothing")


def _style(column: OutputColumn, row: Row) -> str:
    name, value = column.name, row[column.name]
    if name == "state":
        return "green" if value in _GOOD_STATES else _OTHER_STATES.get(value, "bold red")
    if name in ("errors", "restarts") and value:
        return "bold yellow"
    if name == "silent_s":
        if row["silent"]:
            return "bold red"
        return "yellow" if (value or 0) > _QUIET_S and not row["busy"] else "dim"
    if name == "lag_per_s" and value > 0:
        return "yellow"
    return ""


def _cell(column: OutputColumn, value: Any) -> str:
    if value is None:
        return _UNKNOWN
    if column.name == "lag_per_s" and round(value) > 0:
        return f"+{_rate(value)}"
    return _FORMATS.get(column.kind, lambda value: one_line(str(value)))(value)


def _bytes(value: float | None) -> str:
    return _UNKNOWN if value is None else format_bytes(value)


def _rate(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 10 or not value else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    if value == float("inf"):
        return "longer"
    if 0 < value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.1f} s" if value < 60 else format_duration(value)


def _time(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ms / 1000)) if time_ms > 0 else "-"


_FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "count": "{:,}".format,
    "rate": _rate,
    "bytes": format_bytes,
    "seconds": _seconds,
    "percent": "{:.1f}".format,
    "time": _time,
}


def _spark(values: Sequence[int]) -> str:
    """Recent dispatch lag as bars, dots for none."""
    most = max(values, default=0)
    return "".join(_BARS[min(7, 7 * value // most)] if most and value else "·" for value in values)


# The foot


def _foot(state: State) -> Text:
    if state.typing:
        return Text.assemble((" Enter", "bold"), " keep the filter  ", ("Esc", "bold"), " clear it")
    parts: list[Any] = []
    pause = "resume" if state.paused else "pause"
    for key, what in (("q", "quit"), ("1-4", "view"), ("←→", "sort"), ("r", "reverse"), ("/", "filter"),
                      ("space", pause), ("+-", "interval"), ("?", "help")):  # fmt: skip
        parts += [(f" {key} ", "reverse"), f" {what} "]
    return Text.assemble(*parts)


def _help() -> list[Text]:
    width = max(len(key) for key, _ in HELP)
    lines = [Text.assemble((f" {key:<{width}}  ", "bold"), what) for key, what in HELP]
    explained = (
        "",
        " dispatch   log that queues and index do not contain yet: consumers cannot see it. Bars: the last minute.",
        " durable    data not synced yet; queues and index can be rebuilt from the log.",
        " 99 % in    99th percentile of latencies since the last refresh.",
        " sent ▸ dispatched ▸ delivered   the path of a message: writer, dispatcher, query.",
        "",
        " Press any key to return.",
    )
    return [*lines, *(Text(text) for text in explained)]


PAGE_COLUMNS: Final = 160
ROWS_MAX: Final = 10_000
_FIRST_REFRESH_S: Final = 0.5
# The bytes of one key arrive together: a lone Esc is an Esc that nothing follows in this time.
_SEQUENCE_S: Final = 0.05
_VIEW_BY_NAME: Final = {view.name: view for view in VIEWS}
_SORTS: Final = sorted({column.name for view in VIEWS for column in view.columns})
_KEY_NAMES: Final = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[5~": "page-up", b"\x1b[6~": "page-down", b"\x1b[H": "home", b"\x1b[F": "end",
    b"\x1b[1~": "home", b"\x1b[4~": "end",
    b"\x1b": "escape", b"\r": "enter", b"\n": "enter", b"\t": "tab", b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip


@command()
@click.option("--interval", type=SECONDS, default="1", help="Time between refreshes.  [default: 1s]")
@click.option("--view", type=click.Choice(list(_VIEW_BY_NAME)), default="roles", help="The first view.")
@click.option("--filter", "filter_", default="", metavar="TEXT", help="Show only rows that contain this text.")
@click.option("--sort", metavar="COLUMN", type=click.Choice(_SORTS), help="Sort the first view by this column.")
@click.option("--once", is_flag=True, help="Print one page, with rates over --interval, and exit.")
def top(invocation: Invocation, interval: float, view: str, filter_: str, sort: str | None, once: bool) -> int:
    """Watch a group live, full screen.

    Shows dispatch lag, rates, latencies, and tables of roles, topics, consumer groups and errors; the last line lists
    the keys. It only reads shared files, so it does not slow the group down. After a group has ended the last values
    stay on the screen until the next group starts. --once or --json prints a single page.
    """
    paths = invocation.existing_paths()
    state = State(_VIEW_BY_NAME[view], min(max(interval, INTERVAL_S_MIN), INTERVAL_S_MAX), filter_)
    if sort is not None:
        if sort not in {column.name for column in state.view.columns}:
            raise click.UsageError(f"the view {view} has no column {sort!r}")
        state.sort_by(sort)
    out = invocation.out
    source = SnapshotSource(paths, lambda: invocation.store_options(StoreIO(), paths))
    try:
        if out.is_json:
            out.document(source.read())
        elif once:
            _print_once(source, state, out.colored)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
            raise click.UsageError("top needs a terminal; --once prints one page, mqproc stat --watch prints lines")
        else:
            with full_screen(colored=out.colored) as terminal:
                _run(terminal, source, state, Screen(colored=out.colored))
    except TerminatedError as terminated:
        return terminated.exit_code
    finally:
        source.close()
    return 0


def _print_once(source: SnapshotSource, state: State, colored: bool) -> None:
    before = source.read()
    time.sleep(state.interval_s)
    now = source.read()
    screen = Screen(colored=colored)
    screen.add(now)
    for line in screen.page(state, now, before, PAGE_COLUMNS):
        sys.stdout.write(line.rstrip() + "\n")


def _run(terminal: FullScreen, source: SnapshotSource, state: State, screen: Screen) -> None:
    """Run until a key ends it. Raises TerminatedError, KeyboardInterrupt, NotRunningError."""
    before: dict[str, Any] | None = None
    now = source.read()
    screen.add(now)
    due = time.monotonic() + min(state.interval_s, _FIRST_REFRESH_S)
    while not state.ended:
        terminal.draw(screen.frame(state, now, before, *terminal.size()))
        key = terminal.read_key(due - time.monotonic())
        if key:
            state.handle_key(key)
            due = min(due, time.monotonic() + state.interval_s)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + state.interval_s
        if not state.paused:
            before, now = now, source.read()
            screen.add(now)


class SnapshotSource:
    """Snapshots of the group on a store, from shared files; follows a new group."""

    def __init__(self, paths: StorePaths, load_options: Callable[[], Options]) -> None:
        """`load_options` is called again after the group's options have changed.

        Raises NotRunningError if no group has ever run on the store, CorruptStoreError.
        """
        self._io = StoreIO()
        self._paths = paths
        self._load_options = load_options
        self._settings = self._read_settings()
        self._open()

    def _open(self) -> None:
        self._control = Control.open(self._io, self._paths)
        self._collector = MetricsCollector(self._control, self._io, self._paths, self._load_options(), "", cached=False)

    def _read_settings(self) -> bytes:
        """The file that a group writes at its start and at a reload; empty without one."""
        try:
            return self._io.read_file(self._paths.settings)
        except OSError:  # `ipc.health` reports it.
            return b""

    def read(self) -> dict[str, Any]:
        """Read a snapshot. Raises NotRunningError if the store is gone."""
        try:
            if not self._control.is_current(self._io, self._paths):
                old = self._collector
                self._open()
                old.close()
                old.control.close()
            if (settings := self._read_settings()) != self._settings:
                self._settings, self._collector.options = settings, self._load_options()
            with _without_log():
                return snapshot(self._collector, self._paths, rows_max=ROWS_MAX)
        except FileNotFoundError as error:
            raise NotRunningError(f"{error.filename or self._paths.root}: the store has gone away") from None

    def close(self) -> None:
        self._collector.close()
        self._control.close()


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Turn off the log about unreadable files: its lines would be part of the output."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(wrapper_class=before)


# The terminal


class TerminatedError(BaseException):
    """Raised on SIGTERM and SIGHUP while the screen is in use."""

    def __init__(self, number: int) -> None:
        super().__init__(f"terminated by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class FullScreen:
    """A terminal in full-screen mode: draws frames, reads keys. Made by `full_screen`."""

    def __init__(self, reader: int, writer: int, *, colored: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._settings = termios.tcgetattr(reader)
        self._pending = b""
        # A file of its own: text left over by a lost terminal must not fail the flush of sys.stdout.
        self._file = open(writer, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        self._console = _console(self._file, colored=colored)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def enter(self) -> None:
        """Take the screen. Keys arrive one by one, without echo; Ctrl-C and Ctrl-Z remain signals."""
        tty.setcbreak(self._reader, termios.TCSADRAIN)
        self._live.start()

    def leave(self) -> None:
        """Restore the screen and the terminal's settings; errors of a lost terminal are ignored."""
        with contextlib.suppress(OSError, termios.error):
            self._live.stop()
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._reader, termios.TCSADRAIN, self._settings)

    def close(self) -> None:
        self.leave()
        with contextlib.suppress(OSError):
            self._file.close()

    def size(self) -> tuple[int, int]:
        """The current (columns, lines)."""
        found = os.get_terminal_size(self._writer)
        return max(found.columns, 20), max(found.lines, 5)

    def draw(self, lines: Sequence[Text]) -> None:
        """Draw a frame of the current size."""
        columns, rows = self.size()
        self._console.size = ConsoleDimensions(columns, rows)
        self._live.update(Group(*lines), refresh=True)

    def read_key(self, timeout_s: float) -> str:
        """Read a key: a character or a name; "" after the timeout."""
        if not self._pending and not self._read(timeout_s):
            return ""
        if self._pending.startswith(b"\x1b"):
            until = time.monotonic() + _SEQUENCE_S
            while self._pending not in _KEY_NAMES or self._pending == b"\x1b":
                if len(self._pending) > 8 or not self._read(until - time.monotonic()):
                    break
        codes = [code for code in _KEY_NAMES if self._pending.startswith(code)]
        if codes:
            code = max(codes, key=len)
            self._pending = self._pending[len(code) :]
            return _KEY_NAMES[code]
        text = self._pending.decode(errors="ignore")[:1]
        self._pending = self._pending[len(text.encode()) or 1 :]
        return text if text.isprintable() else ""

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._reader], [], [], max(0.0, timeout_s))
        if not ready:
            return False
        found = os.read(self._reader, 64)
        if not found:  # The terminal is gone.
            raise TerminatedError(signal.SIGHUP)
        self._pending += found
        return True


@contextlib.contextmanager
def full_screen(reader: int = 0, writer: int = 1, *, colored: bool = True) -> Iterator[FullScreen]:
    """Use the terminal full-screen in the block, and restore it however the block ends.

    SIGTERM and SIGHUP raise TerminatedError in the block. Ctrl-Z restores the terminal while the process is stopped.
    """
    screen = FullScreen(reader, writer, colored=colored)

    def terminate(number: int, frame: FrameType | None) -> None:
        raise TerminatedError(number)

    def suspend(number: int, frame: FrameType | None) -> None:
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()

    handlers = {signal.SIGTERM: terminate, signal.SIGHUP: terminate, signal.SIGTSTP: suspend}
    before: dict[signal.Signals, Any] = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        screen.enter()
        yield screen
    finally:
        screen.close()
        for number, handler in before.items():
            signal.signal(number, handler)
