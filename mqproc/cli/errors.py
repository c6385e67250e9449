"""`mqproc errors`: the distinct errors of a group's processes, with how often each came, and when first and last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import click

from mqproc.cli.commands import MOMENT, SECONDS, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column, Output
from mqproc.io import StoreIO
from mqproc.layout.error_log import OWNERS
from mqproc.metrics.error_log import SeenError, seen_errors
from mqproc.paths import StorePaths

_COLUMNS = [
    Column("owner", "role"),
    Column("count", "times", "count"),
    Column("first_ms", "first", "time_ms"),
    Column("last_ms", "last", "time_ms"),
    Column("text", "what"),
]


@click.command(cls=Command)
@click.option("--role", type=click.Choice(OWNERS), help="Only those of one process.")
@click.option("--since", type=MOMENT, help="Only those that came after this: a time, or 15m, 2h.")
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
    found = _wanted(paths, role, since)
    if not follow:
        _print(out, found)
        return
    if out.shape == "json":
        out.shape = "jsonl"
    _print(out, found)
    out.flush()
    seen = {_key(error): error.count for error in found}
    _follow(paths, out, role, seen, max(interval, 0.05), invocation.ends_s())


def _wanted(paths: StorePaths, role: str | None, since_ms: int | None) -> list[SeenError]:
    """Oldest first, so that the newest stands where the reader's prompt is."""
    found = [
        error
        for error in seen_errors(StoreIO(), paths)
        if (role is None or error.owner == role) and (since_ms is None or error.last_ms >= since_ms)
    ]
    return found[::-1]


def _print(out: Output, found: Iterable[SeenError]) -> None:
    rows = [dataclasses.asdict(error) for error in found]
    if not rows and out.shape == "table":
        out.note("nothing has gone wrong")
        return
    out.rows("errors", _COLUMNS, rows)


def _key(error: SeenError) -> tuple[str, str]:
    return error.owner, error.text


def _follow(
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
        found = _wanted(paths, role, None)
        for error in found:
            more = error.count - seen.get(_key(error), 0)
            # An entry that was used again for another error begins at 1.
            more = error.count if more < 0 else more
            if more:
                _print_line(out, error, more)
        seen = {_key(error): error.count for error in found}
        out.flush()


def _print_line(out: Output, error: SeenError, more: int) -> None:
    row: dict[str, Any] = {**dataclasses.asdict(error), "new": more}
    if out.shape != "table":
        out.further_rows("errors", _COLUMNS, [row])
        return
    moment = time.strftime("%H:%M:%S", time.localtime(error.last_ms / 1000))
    out.line(f"{moment}  {error.owner}  {f'{more:,} times  ' if more > 1 else ''}{error.text}")
