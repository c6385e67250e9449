"""`mqproc stat`: every word of the control file, and what follows from several of them.

Reads the file only, so it works with the group dead: the values then are those of its last moment.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, Final

import click

from mqproc.cli.options import SECONDS, TIME, Command, Invocation, pass_invocation
from mqproc.cli.output import Column, Output
from mqproc.cli.times import SOCKET_WAIT_MAX_S, now_ms
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.control import Control
from mqproc.ipc.error_log import SeenError, seen_errors
from mqproc.layout import control as layout
from mqproc.layout.error_log import OWNERS
from mqproc.metrics.catalogue import METRICS, family_names
from mqproc.metrics.health import dispatch_behind_ms, not_offered
from mqproc.paths import StorePaths

_WORD_COLUMNS = [
    Column("name"),
    Column("value", kind="number"),
    Column("unit"),
    Column("owner"),
    Column("help", "meaning"),
]
_WATCHED = [Column("name"), Column("value", kind="number"), Column("per_second", "per s", "number"), Column("unit")]
# In CSV one block follows on the other.
_RECORDED = [Column("time_ms", "time", "time_ms"), *_WATCHED]
# Words that hold the header's format: nobody asks for them by eye.
_HIDDEN = frozenset({"magic", "version", "store_id"})
_STATE_WORDS = {
    "state": layout.STATE_NAMES,
    "supervised": layout.SUPERVISED_NAMES,
    "group_state": layout.GROUP_NAMES,
    "recovery_step": layout.STEP_NAMES,
    "retention_trigger": layout.DUE_NAMES,
    "retention_held_by": layout.HELD_NAMES,
}


@click.command(cls=Command)
@click.option("--prefix", default="", metavar="TEXT", help="Only names that begin so: writer, disp, cq-flusher…")
@click.option("--changed", is_flag=True, help="Leave out what is 0, of the figures of --watch too.")
@click.option("--watch", is_flag=True, help="Print again and again, with rates, until Ctrl-C or a --timeout.")
@click.option("--interval", type=SECONDS, default="1", help="Pause between two prints of --watch.  [default: 1s]")
@pass_invocation
def stat(invocation: Invocation, prefix: str, changed: bool, watch: bool, interval: float) -> None:
    """Show every shared word, also of a dead group.

    Figures that follow from several words stand first: how far dispatch and flush are behind, whether the group lives.
    Amid recovery positions and counters are not known yet, and have no value.
    """
    out = invocation.out
    paths = invocation.existing_paths()
    if watch:
        _watch(paths, out, prefix, changed, max(interval, 0.05), invocation.deadline_s())
        return
    _print_words(out, read_all(paths), prefix, changed)


def read_all(paths: StorePaths) -> dict[str, Any]:
    """What follows from several words, then every word, read at one moment. What is not known yet is None."""
    words = control_words.read_words(paths)
    found: dict[str, Any] = {
        "alive": int(control_words.supervisor_alive(words, time.monotonic_ns())),
        "dispatch_behind_bytes": control_words.dispatch_behind_bytes(words),
        "dispatch_behind_ms": dispatch_behind_ms(StoreIO(), paths, words),
        "flush_behind_bytes": control_words.flush_behind_bytes(words),
        "flushed": control_words.flushed(words),
        "read_only": int(control_words.refuses_messages(words)),
        **words,
    }
    if control_words.positions_known(words):
        return found
    return found | dict.fromkeys(_KNOWN_AFTER_RECOVERY)


_FIGURE_HELP = {
    "alive": ("", "1 while the supervisor's heartbeat goes on"),
    "dispatch_behind_bytes": ("bytes", "log that queues and index do not hold yet"),
    "dispatch_behind_ms": ("ms", "age of the oldest message that queues and index do not hold yet"),
    "flush_behind_bytes": ("bytes", "log that a power loss could take"),
    "flushed": ("bytes", "end of the durable log"),
    "read_only": ("", "1 when no messages are taken: a sync failed, or on_damage = read_only and there is damage"),
}


_OF_EVERY_ROLE = tuple(f".{name}" for name in layout.COMMON_NAMES)
# Zeros until recovery has come to its end. What a role says of its own process is known, and all of the monitor's,
# which runs meanwhile.
_KNOWN_AFTER_RECOVERY = (
    *(name for name in _FIGURE_HELP if name not in ("alive", "read_only")),
    *(
        name
        for name, word in layout.WORDS.items()
        if word.owner in layout.ROLES and word.owner != layout.MONITOR and not name.endswith(_OF_EVERY_ROLE)
    ),
)


def _word_rows(values: dict[str, Any], prefix: str, changed: bool) -> Iterator[dict[str, Any]]:
    for name, value in values.items():
        if not name.startswith(prefix) or (changed and not value) or name in _HIDDEN:
            continue
        word = layout.WORDS.get(name)
        unit, text = (word.unit, word.help) if word else _FIGURE_HELP[name]
        yield {"name": name, "value": value, "unit": unit, "owner": word.owner if word else "", "help": text}


def shown(name: str, value: int | None) -> int | str | None:
    """A state's name beside its number; everything else as it is."""
    if value is None:
        return None
    names = _STATE_WORDS.get(name.rpartition(".")[2])
    return f"{names[value]} ({value})" if names and 0 <= value < len(names) else value


def _print_words(out: Output, values: dict[str, Any], prefix: str, changed: bool) -> None:
    rows = list(_word_rows(values, prefix, changed))
    if out.shape == "json":
        out.document({"words": {row["name"]: row["value"] for row in rows}})
        return
    if out.shape == "table":
        rows = [row | {"value": shown(row["name"], row["value"])} for row in rows]
    out.rows("words", _WORD_COLUMNS, rows)


def _watch(paths: StorePaths, out: Output, prefix: str, changed: bool, interval_s: float, ends_s: float) -> None:
    """A block each time: changed words with their rates. Follows a new group when one has started.

    The last block is printed at `ends_s`, of the monotonic clock.
    """
    before: dict[str, Any] = {}
    before_s = 0.0
    if out.shape == "csv":
        out.rows("words", _RECORDED, ())
    while True:
        values, now_s = read_all(paths), time.monotonic()
        if before and before["epoch"] != values["epoch"]:
            before = {}
        _print_block(out, values, before, now_s - before_s, prefix, changed)
        before, before_s = values, now_s
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(interval_s, left_s))


def _print_block(
    out: Output, values: dict[str, Any], before: dict[str, Any], passed_s: float, prefix: str, changed: bool
) -> None:
    rows = [row for row in _word_rows(values, prefix, False) if _moving(row["name"], row["value"], before, changed)]
    for row in rows:
        name, value = row["name"], row["value"]
        known = value is not None and before.get(name) is not None
        row["per_second"] = round((value - before[name]) / passed_s) if known else None if value is None else 0
        if out.shape == "table":
            row["value"] = shown(name, value)
    if out.shape == "json":
        out.shape = "jsonl"
    if out.shape == "table" and out.is_terminal:
        sys.stdout.write("\x1b[2J\x1b[H")
    time_ms = now_ms()
    if out.is_json:
        out.document({"time_ms": time_ms, "words": {row["name"]: row["value"] for row in rows}})
    elif out.shape == "table":
        out.rows("words", _WATCHED, rows)
        out.line("")
    else:
        out.further_rows("words", _RECORDED, [row | {"time_ms": time_ms} for row in rows])
    out.flush()


def _moving(name: str, value: int | None, before: dict[str, Any], changed: bool) -> bool:
    """Watched are the figures, and words that changed since the last block (all that are not 0 in the first).

    With `changed` the figures, too, only when they are not 0 or have just become so.
    """
    if name in _FIGURE_HELP:
        return not changed or bool(value) or (bool(before) and before[name] != value)
    if name.endswith("_ns"):
        return False
    return before[name] != value if before else bool(value)


# --- errors ---
# `mqproc errors`: the distinct errors of a group's processes, with how often each came, and when first and last.


_ERROR_COLUMNS = [
    Column("owner", "role"),
    Column("count", "times", "count"),
    Column("first_ms", "first", "time_ms"),
    Column("last_ms", "last", "time_ms"),
    Column("text", "what"),
]


@click.command(cls=Command)
@click.option("--role", type=click.Choice(OWNERS), help="Only those of one process.")
@click.option("--since", type=TIME, help="Only those that came after this: a time, or 15m, 2h.")
@click.option("--follow", is_flag=True, help="Go on and print each error as it comes, until Ctrl-C or a --timeout.")
@click.option(
    "--interval", type=SECONDS, default="500ms", help="Pause between two looks of --follow.  [default: 500ms]"
)
@pass_invocation
def errors(invocation: Invocation, role: str | None, since: int | None, follow: bool, interval: float) -> None:
    """Show what has gone wrong: each distinct error once.

    Warnings and errors of every process of the group, kept in the store from one start to the next: with the group
    dead they are what it died of. Two are the same when they differ in numbers and ids only; the newest comes
    last.
    """
    paths, out = invocation.existing_paths(), invocation.out
    found = _selected_errors(paths, role, since)
    if not follow:
        _print_errors(out, found)
        return
    if out.shape == "json":
        out.shape = "jsonl"
    _print_errors(out, found)
    out.flush()
    seen = {_error_key(error): error.count for error in found}
    _follow_errors(paths, out, role, seen, max(interval, 0.05), invocation.deadline_s())


def _selected_errors(paths: StorePaths, role: str | None, since_ms: int | None) -> list[SeenError]:
    """Oldest first, so that the newest stands where the reader's prompt is."""
    found = [
        error
        for error in seen_errors(StoreIO(), paths)
        if (role is None or error.owner == role) and (since_ms is None or error.last_ms >= since_ms)
    ]
    return found[::-1]


def _print_errors(out: Output, found: Iterable[SeenError]) -> None:
    rows = [dataclasses.asdict(error) for error in found]
    if not rows and out.shape == "table":
        out.note("nothing has gone wrong")
        return
    out.rows("errors", _ERROR_COLUMNS, rows)


def _error_key(error: SeenError) -> tuple[str, str]:
    return error.owner, error.text


def _follow_errors(
    paths: StorePaths,
    out: Output,
    role: str | None,
    seen: dict[tuple[str, str], int],
    pause_s: float,
    ends_s: float,
) -> None:
    """A line for each error that has come since the last look, with how often; the last look is at `ends_s`."""
    while (left_s := ends_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        found = _selected_errors(paths, role, None)
        for error in found:
            more = error.count - seen.get(_error_key(error), 0)
            # An entry that was used again for another error begins at 1.
            more = error.count if more < 0 else more
            if more:
                _print_error(out, error, more)
        seen = {_error_key(error): error.count for error in found}
        out.flush()


def _print_error(out: Output, error: SeenError, more: int) -> None:
    row: dict[str, Any] = {**dataclasses.asdict(error), "new": more}
    if out.shape != "table":
        out.further_rows("errors", _ERROR_COLUMNS, [row])
        return
    moment = time.strftime("%H:%M:%S", time.localtime(error.last_ms / 1000))
    out.line(f"{moment}  {error.owner}  {f'{more:,} times  ' if more > 1 else ''}{error.text}")


# --- metrics ---
# `mqproc metrics`: the catalogue of what /metrics offers, and a check of a running group's answer against it.


PORT_MAX: Final = 65_535
_METRIC_COLUMNS = [Column("name"), Column("kind", "type"), Column("unit"), Column("labels"), Column("help", "meaning")]


@click.command(cls=Command)
@click.option("--check", is_flag=True, help="Scrape the running group and compare; exit code 1 when they differ.")
@pass_invocation
def metrics(invocation: Invocation, check: bool) -> int:
    """List the metrics that /metrics offers."""
    if check:
        return _check_metrics(invocation)
    rows = [
        {"name": metric.name, "kind": metric.kind, "unit": metric.unit, "labels": metric.labels, "help": metric.help}
        for metric in METRICS
    ]
    invocation.out.rows("metrics", _METRIC_COLUMNS, rows)
    return 0


def _check_metrics(invocation: Invocation) -> int:
    io, paths = StoreIO(), invocation.existing_paths()
    control = Control.open(io, paths)
    port = control.load(layout.MONITOR_PORT)
    alive = control_words.supervisor_alive(control.snapshot(), time.monotonic_ns())
    control.close()
    options = invocation.store_options(io, paths)
    if alive and not port:
        raise NotRunningError(not_offered(options))
    if not 0 <= port <= PORT_MAX:
        raise CorruptStoreError(f"{paths.control}: monitor_port = {port:,} is no port; from 1 to {PORT_MAX:,}")
    address = f"http://{_reached_at(options.metrics_host)}:{port}/metrics"
    try:
        # The monitor is on this machine: a proxy of the environment would look on its own.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(address, timeout=min(invocation.timeout, SOCKET_WAIT_MAX_S)) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise NotRunningError(f"{address}: {error}") from None
    found = family_names(text)
    expected = {metric.name for metric in METRICS}
    missing, unknown = sorted(expected - found), sorted(found - expected)
    out = invocation.out
    if out.is_json:
        out.document({"address": address, "missing": missing, "unknown": unknown})
    else:
        for text, names in (("not offered", missing), ("not in the catalogue", unknown)):
            for name in names:
                out.line(f"{name}: {text}")
        out.line(f"{len(found & expected)} of {len(expected)} metrics of the catalogue at {address}")
    return 1 if missing or unknown else 0


def _reached_at(host: str) -> str:
    """The host of a URL for a monitor that listens at `host`: this machine for one that listens at every address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
