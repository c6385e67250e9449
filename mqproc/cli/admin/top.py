"""`mqproc top`: look, draw, wait for a key, again."""

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

from mqproc.cli.admin.top_screen import INTERVAL_S_MAX, INTERVAL_S_MIN, VIEWS, Screen, State
from mqproc.cli.options import SECONDS, Command, Invocation, pass_invocation
from mqproc.config.options import Options
from mqproc.errors import NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.metrics.collector import MetricsCollector
from mqproc.metrics.snapshot import snapshot
from mqproc.paths import StorePaths

# --- terminal ---
# A terminal's whole screen, taken and given back: frames out, keys in.
#
# Whatever ends it (a key, Ctrl-C, SIGTERM, an exception, Ctrl-Z for a while), the terminal is as it was before.


_ENTER: Final = b"\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE: Final = b"\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_REST_OF_LINE: Final = "\x1b[K"
_REST_OF_SCREEN: Final = "\x1b[J"
_SEQUENCE_S: Final = 0.05
"""The bytes of one key come together; a lone Esc is known by nothing following it."""

KEYS: Final = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[5~": "page-up", b"\x1b[6~": "page-down", b"\x1b[H": "home", b"\x1b[F": "end",
    b"\x1b[1~": "home", b"\x1b[4~": "end",
    b"\x1b": "escape", b"\r": "enter", b"\n": "enter", b"\t": "tab", b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip


class Ended(BaseException):
    """SIGTERM or SIGHUP has come."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class FullScreen:
    """A terminal in full-screen mode; made by `full_screen`."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._before = termios.tcgetattr(reader)
        self._pending = b""

    def enter(self) -> None:
        """Keys come one by one and unseen; Ctrl-C and Ctrl-Z stay signals."""
        tty.setcbreak(self._reader, termios.TCSADRAIN)
        self._write(_ENTER)

    def leave(self) -> None:
        """Give everything back. The terminal may have gone away."""
        with contextlib.suppress(OSError, termios.error):
            self._write(_LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._reader, termios.TCSADRAIN, self._before)

    def size(self) -> tuple[int, int]:
        """(columns, lines) now."""
        found = os.get_terminal_size(self._writer)
        return max(found.columns, 20), max(found.lines, 5)

    def draw(self, lines: Sequence[str]) -> None:
        """A frame, in one write, so that it does not flicker."""
        text = f"{_REST_OF_LINE}\r\n".join(lines)
        self._write(f"{_HOME}{text}{_REST_OF_LINE}{_REST_OF_SCREEN}".encode())

    def key(self, timeout_s: float) -> str:
        """The next key: a character, or a name of KEYS; "" when none came in time."""
        if not self._pending and not self._read(timeout_s):
            return ""
        if self._pending.startswith(b"\x1b"):
            until = time.monotonic() + _SEQUENCE_S
            while self._pending not in KEYS or self._pending == b"\x1b":
                if len(self._pending) > 8 or not self._read(until - time.monotonic()):
                    break
            named = next((code for code in sorted(KEYS, key=len, reverse=True) if self._pending.startswith(code)), b"")
        else:
            named = self._pending[:1] if self._pending[:1] in KEYS else b""
        if named:
            self._pending = self._pending[len(named) :]
            return KEYS[named]
        text = self._pending.decode(errors="ignore")[:1]
        self._pending = self._pending[len(text.encode()) or 1 :]
        return text if text.isprintable() else ""

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._reader], [], [], max(0.0, timeout_s))
        if not ready:
            return False
        found = os.read(self._reader, 64)
        if not found:  # The terminal is gone.
            raise Ended(signal.SIGHUP)
        self._pending += found
        return True

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._writer, data) :]


@contextlib.contextmanager
def full_screen(reader: int = 0, writer: int = 1) -> Iterator[FullScreen]:
    """The terminal at these descriptors for the length of the block. Signals that end the block raise Ended in it."""
    screen = FullScreen(reader, writer)

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    def stop(number: int, frame: FrameType | None) -> None:
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()

    handlers = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: stop}
    before: dict[signal.Signals, Any] = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        screen.enter()
        yield screen
    finally:
        screen.leave()
        for number, handler in before.items():
            signal.signal(number, handler)


# --- source ---
# Snapshots of the group on a store, whichever supervisor it has by now. Reads shared files; asks nobody.


ROWS_MAX = 10_000


class Source:
    """Opens what a group leaves in shared files, and opens it anew when another group has started."""

    def __init__(self, paths: StorePaths, options: Callable[[], Options]) -> None:
        """`options` are asked for again when the group's own have changed.

        Raises NotRunningError when no group has ever run on the store, CorruptStoreError.
        """
        self._io = StoreIO()
        self._paths = paths
        self._options = options
        self._settings = self._read_settings()
        self._open()

    def _open(self) -> None:
        self._control = Control.open(self._io, self._paths)
        self._collector = MetricsCollector(
            self._control, self._io, self._paths, self._options(), "", processes_every_s=0.0
        )

    def _read_settings(self) -> bytes:
        """The file that a group writes when it starts and when its options are reloaded; empty without one."""
        try:
            return self._io.read_file(self._paths.settings)
        except FileNotFoundError:
            return b""

    def look(self) -> dict[str, Any]:
        """The group now. Raises NotRunningError when the store itself has gone away."""
        try:
            if not self._control.is_current(self._io, self._paths):
                old = self._collector
                self._open()
                old.close()
                old.control.close()
            if (settings := self._read_settings()) != self._settings:
                self._settings, self._collector.options = settings, self._options()
            return snapshot(self._collector, self._paths, rows_max=ROWS_MAX)
        except FileNotFoundError as error:
            raise NotRunningError(f"{error.filename or self._paths.root}: the store has gone away") from None

    def close(self) -> None:
        """Let go of the files."""
        self._collector.close()
        self._control.close()


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
    source = Source(paths, lambda: invocation.store_options(StoreIO(), paths))
    try:
        if out.is_json:
            out.document(source.look())
            return 0
        if once:
            return _print_once(source, state, out.colored)
        if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
            raise click.UsageError("top needs a terminal; --once prints one picture, mqproc stat --watch follows")
        with full_screen() as terminal:
            run_top(terminal, source, state, Screen(colored=out.colored))
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


def run_top(terminal: FullScreen, source: Source, state: State, screen: Screen) -> None:
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
