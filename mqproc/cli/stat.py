"""`mqproc stat`: every word of the control file, and what follows from several of them.

Reads the file only, so it works with the group dead: the values then are those of its last moment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from mqproc import control_words
from mqproc.cli.commands import SECONDS, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column, Output
from mqproc.cli.times import now_ms
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.metrics.dispatch_lag import dispatch_behind_ms
from mqproc.paths import StorePaths

_COLUMNS = [Column("name"), Column("value", kind="number"), Column("unit"), Column("owner"), Column("help", "meaning")]
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
        _watch(paths, out, prefix, changed, max(interval, 0.05), invocation.ends_s())
        return
    _print(out, read_all(paths), prefix, changed)


def read_all(paths: StorePaths) -> dict[str, Any]:
    """What follows from several words, then every word, read at one moment. What is not known yet is None."""
    words = control_words.read_words(paths)
    found: dict[str, Any] = {
        "alive": int(control_words.is_alive(words, time.monotonic_ns())),
        "dispatch_behind_bytes": control_words.dispatch_behind_bytes(words),
        "dispatch_behind_ms": dispatch_behind_ms(StoreIO(), paths, words),
        "flush_behind_bytes": control_words.flush_behind_bytes(words),
        "flushed": control_words.flushed(words),
        "read_only": int(control_words.takes_nothing(words)),
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


def _rows(values: dict[str, Any], prefix: str, changed: bool) -> Iterator[dict[str, Any]]:
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


def _print(out: Output, values: dict[str, Any], prefix: str, changed: bool) -> None:
    rows = list(_rows(values, prefix, changed))
    if out.shape == "json":
        out.document({"words": {row["name"]: row["value"] for row in rows}})
        return
    if out.shape == "table":
        rows = [row | {"value": shown(row["name"], row["value"])} for row in rows]
    out.rows("words", _COLUMNS, rows)


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
    rows = [row for row in _rows(values, prefix, False) if _moving(row["name"], row["value"], before, changed)]
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
