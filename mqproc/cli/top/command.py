"""`mqproc top`: look, draw, wait for a key, again."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from mqproc.cli.commands import SECONDS, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.store_options import options_for
from mqproc.cli.top.figures import VIEWS
from mqproc.cli.top.screen import Screen
from mqproc.cli.top.source import Source
from mqproc.cli.top.state import INTERVAL_S_MAX, INTERVAL_S_MIN, State
from mqproc.cli.top.terminal import Ended, FullScreen, full_screen
from mqproc.io import StoreIO

_VIEW_BY_NAME = {view.name: view for view in VIEWS}
_SORTS = sorted({column.name for view in VIEWS for column in view.columns})
PAGE_COLUMNS = 160


@click.command(cls=Command)
@click.option("--interval", type=SECONDS, default="1", help="Pause between two looks.  [default: 1s]")
@click.option("--view", type=click.Choice(list(_VIEW_BY_NAME)), default="roles", help="What is shown first.")
@click.option("--filter", "filter_", default="", metavar="TEXT", help="Show only rows with this text.")
@click.option("--sort", metavar="COLUMN", type=click.Choice(_SORTS), help="Order the first view by this column.")
@click.option("--once", is_flag=True, help="Print one picture, with rates over --interval, and end.")
@pass_invocation
def top(invocation: Invocation, interval: float, view: str, filter_: str, sort: str | None, once: bool) -> int:
    """Watch a group live on the whole screen.

    How far dispatch is behind, rates, latencies, and tables of roles, topics, consumer groups and errors; the keys
    stand at the bottom. It reads shared files only, so it costs the group nothing, shows the last picture of a group
    that has ended, and follows a new one. With --once or --json it prints one picture.
    """
    paths = invocation.existing_paths()
    state = State(_VIEW_BY_NAME[view], min(max(interval, INTERVAL_S_MIN), INTERVAL_S_MAX), filter_)
    if sort is not None:
        if sort not in {column.name for column in state.view.columns}:
            raise click.UsageError(f"the view {view} has no column {sort!r}")
        state.sort_by(sort)
    out = invocation.out
    source = Source(paths, lambda: options_for(invocation, StoreIO(), paths))
    try:
        if out.is_json:
            out.document(source.look())
            return 0
        if once:
            return _print_once(source, state, out.colored)
        if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
            raise click.UsageError("top needs a terminal; --once prints one picture, mqproc stat --watch follows")
        with full_screen() as terminal:
            run(terminal, source, state, Screen(colored=out.colored))
    except Ended as ended:
        return ended.exit_code
    finally:
        source.close()
    return 0


def _print_once(source: Source, state: State, colored: bool) -> int:
    before = source.look()
    time.sleep(state.interval_s)
    now = source.look()
    screen = Screen(colored=colored)
    screen.note(now)
    for line in screen.page(state, now, before, PAGE_COLUMNS):
        sys.stdout.write(line.rstrip() + "\n")
    return 0


def run(terminal: FullScreen, source: Source, state: State, screen: Screen) -> None:
    """Until the person leaves. Raises Ended, KeyboardInterrupt, NotRunningError when the store goes away."""
    before: dict[str, Any] | None = None
    now = source.look()
    screen.note(now)
    due = time.monotonic() + min(state.interval_s, 0.5)
    while not state.ended:
        terminal.draw(screen.frame(state, now, before, *terminal.size()))
        key = terminal.key(due - time.monotonic())
        if key:
            state.key(key)
            due = min(due, time.monotonic() + state.interval_s)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + state.interval_s
        if not state.held:
            before, now = now, source.look()
            screen.note(now)
