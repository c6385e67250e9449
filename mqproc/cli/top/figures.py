"""What two snapshots tell: rates, what is behind, rows of each view. Plain values; `screen` makes them look well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mqproc.ipc.histogram import Buckets
from mqproc.layout import control as layout

Snapshot = Mapping[str, Any]
Row = dict[str, Any]

_RECOVERING: Final = layout.GROUP_NAMES[layout.GROUP_RECOVERING]
_LATE_S: Final = 1.0
_VERY_LATE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a view. `kind`: text, number, count, rate, bytes, seconds, percent, time.

    A minor one is left out where the terminal is too narrow for all.
    """

    name: str
    title: str
    kind: str
    minor: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A table of the screen. `sort` is the column that it is ordered by at first, the largest first."""

    name: str
    columns: tuple[Column, ...]
    sort: str


VIEWS: Final = (
    View(
        "roles",
        (
            Column("role", "role", "text"),
            Column("state", "state", "text"),
            Column("pid", "pid", "number", minor=True),
            Column("cpu_percent", "cpu %", "percent"),
            Column("memory_bytes", "memory", "bytes"),
            Column("cycles_per_s", "steps/s", "rate", minor=True),
            Column("open_fds", "files", "count", minor=True),
            Column("restarts", "restarts", "count"),
            Column("errors", "errors", "count"),
            Column("silent_s", "silent", "seconds"),
        ),
        "cpu_percent",
    ),
    View(
        "topics",
        (
            Column("topic", "topic", "text"),
            Column("queues", "queues", "count"),
            Column("appended_per_s", "in/s", "rate"),
            Column("delivered_per_s", "out/s", "rate"),
            Column("stored", "stored", "count"),
            Column("appended", "ever", "count", minor=True),
            Column("last_ms", "last message", "time"),
        ),
        "appended_per_s",
    ),
    View(
        "groups",
        (
            Column("group", "group", "text"),
            Column("topic", "topic", "text"),
            Column("lag_messages", "lag", "count"),
            Column("lag_per_s", "change/s", "rate"),
            Column("lag_s", "oldest", "seconds"),
        ),
        "lag_messages",
    ),
    View(
        "errors",
        (
            Column("role", "role", "text"),
            Column("count", "times", "count"),
            Column("last_ms", "last", "time"),
            Column("text", "what", "text"),
        ),
        "last_ms",
    ),
)

_KEYS: Final = {"roles": ("role",), "topics": ("topic",), "groups": ("group", "topic"), "errors": ("role", "text")}
_GROWING: Final = {
    "roles": {"cycles_per_s": ("cycles", 1.0), "cpu_percent": ("cpu_s", 100.0)},
    "topics": {"appended_per_s": ("appended", 1.0), "delivered_per_s": ("delivered", 1.0)},
    "groups": {"lag_per_s": ("lag_messages", 1.0)},
}
"""By view: a rate's name, the figure that it is the rate of, and a factor."""


def passed_s(now: Snapshot, before: Snapshot | None) -> float:
    """Seconds between two snapshots of one group; 0 without an earlier one, or when another group has started.

    0, too, when recovery has ended between them: positions that were not known before are no rates.
    """
    if before is None or before["epoch"] != now["epoch"] or before["group"] == _RECOVERING != now["group"]:
        return 0.0
    passed_ms: int = now["time_ms"] - before["time_ms"]
    return max(0.0, passed_ms / 1000)


def rows_of(view: View, now: Snapshot, before: Snapshot | None) -> list[Row]:
    """A view's rows, with rates since the earlier snapshot."""
    seconds = passed_s(now, before)
    names = _KEYS[view.name]
    earlier = {tuple(row[name] for name in names): row for row in (before or {}).get(view.name, ())}
    rows = []
    for found in now[view.name]:
        row = dict(found)
        was = earlier.get(tuple(row[name] for name in names))
        for rate, (figure, factor) in _GROWING.get(view.name, {}).items():
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


def shown_rows(view: View, rows: list[Row], sort: str, *, ascending: bool, wanted: str) -> list[Row]:
    """Rows in order, those only that hold the wanted text in one of their texts."""
    texts = [column.name for column in view.columns if column.kind == "text"]
    lowered = wanted.lower()
    kept = [row for row in rows if not lowered or any(lowered in str(row[name]).lower() for name in texts)]
    kept.sort(key=lambda row: tuple(str(row[name]) for name in texts))
    # What is not known is less than any figure.
    kept.sort(key=lambda row: (row[sort] is not None, row[sort]), reverse=not ascending)
    return kept


def path_rate(name: str, now: Snapshot, before: Snapshot | None) -> float | None:
    """How fast one of the path's figures grows, a second; None when it is not known."""
    seconds = passed_s(now, before)
    if now["path"][name] is None:
        return None
    return max(0.0, (now["path"][name] - before["path"][name]) / seconds) if seconds and before is not None else 0.0


def quantile_s(name: str, share: float, now: Snapshot, before: Snapshot | None) -> float | None:
    """A latency's quantile since the earlier snapshot; None when nothing was timed."""
    counted = _buckets(now, name)
    if before is not None and passed_s(now, before):
        counted = counted.minus(_buckets(before, name))
    return counted.quantile(share) if sum(counted.counts) else None


def _buckets(snapshot: Snapshot, name: str) -> Buckets:
    found = snapshot["latencies"][name]
    return Buckets(tuple(found["bounds_s"]), tuple(found["counts"]), found["sum_s"])


def lateness(now: Snapshot, before: Snapshot | None) -> str:
    """How dispatch stands: `well`, `late`, `stalled` when it does not move or is very late, or `unknown`."""
    path = now["path"]
    behind = path["dispatch_behind_bytes"]
    if behind is None:
        return "unknown"
    if not behind:
        return "well"
    stands = bool(passed_s(now, before)) and before is not None and (
        path["dispatched_bytes"] == before["path"]["dispatched_bytes"] and before["path"]["dispatch_behind_bytes"] > 0
    )  # fmt: skip
    if stands or path["dispatch_behind_s"] >= _VERY_LATE_S:
        return "stalled"
    return "late" if path["dispatch_behind_s"] >= _LATE_S else "well"
