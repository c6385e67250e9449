"""One frame of the screen as lines of text: the head (is it well, how far is dispatch behind), a view, the foot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from mqproc.cli.output import format_bytes, one_line
from mqproc.cli.times import format_duration
from mqproc.cli.top.figures import (
    VIEWS,
    Column,
    Row,
    Snapshot,
    lateness,
    path_rate,
    quantile_s,
    rows_of,
    shown_rows,
)
from mqproc.cli.top.state import HELP, State
from mqproc.layout import control as layout
from mqproc.metrics.health import readiness
from mqproc.quantities import counted

_BARS: Final = "▁▂▃▄▅▆▇█"
_GAP: Final = "  "
_TEXT_WIDTH_MIN: Final = 8
_TEXT_WIDTH_MAX: Final = 44
_STYLES: Final = {"well": "bold green", "late": "bold yellow", "stalled": "bold red", "unknown": "bold yellow"}
_GOOD_STATES: Final = frozenset({"running", "ready", "syncing", "allocating"})
_RECOVERS: Final = layout.GROUP_NAMES[layout.GROUP_RECOVERING]
# A role that has not been started yet is at no fault.
_OTHER_STATES: Final = {
    _RECOVERS: "bold yellow",
    layout.SUPERVISED_NAMES[layout.STARTING]: "bold yellow",
    layout.SUPERVISED_NAMES[layout.STOPPED]: "dim",
}
_QUIET_S: Final = 3.0
"""So long no role is silent that is well; a step of its may take longer, so this is no fault yet."""
_UNKNOWN: Final = "-"
_LABEL: Final = 10
HISTORY_MAX: Final = 60


class Screen:
    """Makes frames; remembers how far dispatch was behind."""

    def __init__(self, *, colored: bool = True) -> None:
        self._console = Console(
            file=StringIO(),
            force_terminal=True,
            color_system="256" if colored else None,
            highlight=False,
            legacy_windows=False,
        )
        self._history: list[int] = []

    def note(self, now: Snapshot) -> None:
        """A new snapshot has been taken."""
        if (behind := now["path"]["dispatch_behind_bytes"]) is not None:
            self._history = [*self._history[1 - HISTORY_MAX :], behind]

    def frame(self, state: State, now: Snapshot, before: Snapshot | None, columns: int, lines: int) -> list[str]:
        """Exactly `lines` lines of at most `columns` characters, with their colours."""
        head = self._head(state, now, before, columns)
        room = max(1, lines - len(head) - 1)
        body = _help() if state.helped else _table(state, now, before, room, columns)
        body = [*body[:room], *[Text()] * (room - len(body))]
        return self._lines([*head, *body, _foot(state)], columns)[:lines]

    def page(self, state: State, now: Snapshot, before: Snapshot | None, columns: int) -> list[str]:
        """All of it, for a pipe: no foot, no limit of rows."""
        rows = _table(state, now, before, 1 << 30, columns)
        return self._lines([*self._head(state, now, before, columns), *rows], columns)

    def _lines(self, texts: Sequence[Text], columns: int) -> list[str]:
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
        """What everybody wants to know first."""
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
    """What is wrong, but for recovery, which has a line of its own and comes to its end by itself."""
    problems: list[str] = now["problems"]
    if now["recovery"] is None:
        return problems
    return [problem for problem in problems if not problem.startswith(f"the group is {_RECOVERS}")]


def _not_known(now: Snapshot) -> Text:
    """In the place of dispatch, while positions are not known: how far recovery is."""
    if now["recovery"] is None:
        return Text.assemble(_label("dispatch"), (" not known ", "bold yellow reverse"), "  recovery was cut short")
    return Text.assemble(_label("recovery"), (f" {_RECOVERS} ", "bold yellow reverse"), f"  {now['recovery']}")


def _title(state: State, now: Snapshot, columns: int) -> Text:
    ready = now["ready"]
    word, style = readiness(now["group"], ready=ready), "bold green" if ready else "bold red"
    if now["recovery"] is not None:
        style = _STYLES["late"]
    since = format_duration((now["time_ms"] - now["started_ms"]) / 1000) if ready else "-"
    left = Text.assemble((" mqproc top ", "reverse bold"), f" {now['store']}  ", (word, style), f", up {since}")
    held = "held  " if state.held else f"every {state.interval_s:g} s  "
    right = f"{held}{time.strftime('%H:%M:%S', time.localtime(now['time_ms'] / 1000))} "
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
        # A narrow terminal has what is wrong, too.
        "   ",
        (f"{_rate(rate('rejects'))} refused/s", "bold red" if rate("rejects") else ""),
        f"   {_bytes(rate('written_bytes'))}/s   {_rate(rate('requests'))} requests/s",
    )


def _durable(now: Snapshot) -> Text:
    path = now["path"]
    kind = "SYNC_FLUSH" if now["sync_flush"] else "ASYNC_FLUSH"
    lost = f"a power loss takes {_bytes(path['flush_behind_bytes'])}, {_seconds(path['unflushed_s'])}"
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
    rows = shown_rows(view, all_rows, state.sort, ascending=state.ascending, wanted=state.filter)
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
        nothing = f"nothing here has {state.filter!r} in it" if all_rows else _nothing(view.name, now)
        lines.append(Text(f" {nothing}", "dim"))
    return lines


class _Field:
    """A column with its cells' texts and its width; 0 leaves it out."""

    def __init__(self, column: Column, state: State, rows: Sequence[Row]) -> None:
        self.column = column
        mark = ("▲" if state.ascending else "▼") if column.name == state.sort else ""
        self._title = f"{column.title}{mark}"
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
        to_the_left = self.column.kind == "text"
        parts = [(text, style), (padding, "")] if to_the_left else [(padding, ""), (text, style)]
        return [*parts, (_GAP, "")]


def _fit(fields: Sequence[_Field], most: int) -> None:
    """Leave minor columns out until a line fits, then cut texts; the last text may be as long as there is room."""

    def spare() -> int:
        shown = [field.width for field in fields if field.width]
        return most - sum(shown) - len(_GAP) * (len(shown) - 1)

    texts = [field for field in fields if field.column.kind == "text"]
    for field in texts[:-1]:
        field.width = min(field.width, _TEXT_WIDTH_MAX)
    for field in fields:
        if field.column.minor and not field.is_sorted and spare() < 0:
            field.width = 0
    for field in reversed(texts):
        if (missing := -spare()) > 0:
            field.width = max(_TEXT_WIDTH_MIN, field.width - missing)


def _tabs(state: State, shown: int, total: int) -> Text:
    parts: list[Any] = [" "]
    for number, view in enumerate(VIEWS, 1):
        parts += [(f" {number} {view.name} ", "reverse" if view is state.view else "dim"), " "]
    count = f" {shown:,} of {total:,}" if state.filter else f" {total:,} in all"
    wanted = f"  filter: {state.filter}" if state.filter or state.typing else ""
    return Text.assemble(*parts, (count, "dim"), (wanted, "bold yellow"), ("▏" if state.typing else "", "bold yellow"))


def _nothing(view: str, now: Snapshot) -> str:
    if now["topic_count"] is None and view in ("topics", "groups"):
        return "not known before recovery has come to its end"
    return {
        "topics": "no topic yet: mqproc send TOPIC TEXT makes one",
        "groups": "no consumer group has progress yet",
        "errors": "nothing has gone wrong",
    }.get(view, "nothing")


def _style(column: Column, row: Row) -> str:
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


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return _UNKNOWN
    if column.kind == "count":
        return f"{value:,}"
    if column.kind == "rate":
        signed = column.name == "lag_per_s" and round(value) > 0
        return f"{'+' if signed else ''}{_rate(value)}"
    if column.kind == "bytes":
        return format_bytes(value)
    if column.kind == "seconds":
        return _seconds(value)
    if column.kind == "percent":
        return f"{value:.1f}"
    if column.kind == "time":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value / 1000)) if value > 0 else "-"
    return one_line(str(value))


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


def _spark(values: Sequence[int]) -> str:
    """How far dispatch was behind lately, as bars; a line where it was not."""
    most = max(values, default=0)
    return "".join(_BARS[min(7, 7 * value // most)] if most and value else "·" for value in values)


# The foot


def _foot(state: State) -> Text:
    if state.typing:
        return Text.assemble((" Enter", "bold"), " keeps the filter  ", ("Esc", "bold"), " takes it back")
    parts: list[Any] = []
    for key, what in (("q", "quit"), ("1-4", "view"), ("←→", "sort"), ("r", "reverse"), ("/", "filter"),
                      ("space", "hold" if not state.held else "go on"), ("+-", "pace"), ("?", "help")):  # fmt: skip
        parts += [(f" {key} ", "reverse"), f" {what} "]
    return Text.assemble(*parts)


def _help() -> list[Text]:
    width = max(len(key) for key, _ in HELP)
    lines = [Text.assemble((f" {key:<{width}}  ", "bold"), what) for key, what in HELP]
    explained = (
        "",
        " dispatch   log that queues and index do not hold yet: consumers cannot see it. Bars: the last minute.",
        " durable    what is not on the disk yet; queues and index can be made again from the log.",
        " 99 % in    99 of 100 took no longer, since the last picture.",
        " sent ▸ dispatched ▸ delivered   the path of a message: writer, dispatcher, query.",
        "",
        " Any key goes back.",
    )
    return [*lines, *(Text(text) for text in explained)]
