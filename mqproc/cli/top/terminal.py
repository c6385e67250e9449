"""A terminal's whole screen, taken and given back: frames out, keys in.

Whatever ends it (a key, Ctrl-C, SIGTERM, an exception, Ctrl-Z for a while), the terminal is as it was before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

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
