"""`mqproc top`: a live view of a group on the whole terminal.

The loop reads a snapshot, draws a frame with rich's Live, waits for a key, and repeats.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

import click
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from mqproc.cli.admin.top_screen import INTERVAL_S_MAX, INTERVAL_S_MIN, VIEWS, Screen, State
from mqproc.cli.options import SECONDS, Command, Invocation, pass_invocation
from mqproc.config.options import Options
from mqproc.errors import NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.metrics.collector import MetricsCollector
from mqproc.metrics.snapshot import snapshot
from mqproc.paths import StorePaths

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


@click.command(cls=Command)
@click.option("--interval", type=SECONDS, default="1", help="Time between refreshes.  [default: 1s]")
@click.option("--view", type=click.Choice(list(_VIEW_BY_NAME)), default="roles", help="The first view.")
@click.option("--filter", "filter_", default="", metavar="TEXT", help="Show only rows that contain this text.")
@click.option("--sort", metavar="COLUMN", type=click.Choice(_SORTS), help="Sort the first view by this column.")
@click.option("--once", is_flag=True, help="Print one page, with rates over --interval, and exit.")
@pass_invocation
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
    """Run until a key ends it.

    Raises TerminatedError, KeyboardInterrupt, NotRunningError if the store is gone.
    """
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
    """Snapshots of the group on a store, read from shared files.

    Follows a new group after a restart.
    """

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
        self._collector = MetricsCollector(
            self._control, self._io, self._paths, self._load_options(), "", processes_every_s=0.0
        )

    def _read_settings(self) -> bytes:
        """The file that a group writes at its start and at a reload of its options.

        Empty without one.
        """
        try:
            return self._io.read_file(self._paths.settings)
        except FileNotFoundError:
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
            return snapshot(self._collector, self._paths, rows_max=ROWS_MAX)
        except FileNotFoundError as error:
            raise NotRunningError(f"{error.filename or self._paths.root}: the store has gone away") from None

    def close(self) -> None:
        self._collector.close()
        self._control.close()


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
        self._console = Console(
            file=self._file,
            force_terminal=True,
            color_system="256" if colored else None,
            no_color=not colored,
            highlight=False,
            legacy_windows=False,
        )
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
