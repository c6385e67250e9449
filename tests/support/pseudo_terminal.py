"""A command on a pseudo terminal: send keys, read the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Any

import pyte
import pytest

from tests.support.group import PATIENCE_S


class PseudoTerminal:
    """`mqproc …` on its own terminal; `before` has the initial terminal settings."""

    def __init__(
        self, *arguments: str | os.PathLike[str], columns: int = 110, lines: int = 30, kind: str = "xterm-256color"
    ) -> None:
        self._master, slave = os.openpty()
        self.resize(columns, lines, tell=False)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self._output = select.poll()
        self._output.register(self._master, select.POLLIN)
        self.raw = b""
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mqproc", *map(os.fspath, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": kind},
            preexec_fn=self._own_terminal,
        )

    def _own_terminal(self) -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, columns: int, lines: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        if tell:
            self.screen.resize(lines, columns)

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def text(self) -> str:
        """Current screen."""
        while self._output.poll(0):
            try:
                found = os.read(self._master, 65_536)
            except OSError:  # The other end is closed.
                break
            if not found:
                break
            self.raw += found
            self._stream.feed(found)
        return "\n".join(self.screen.display)

    def until(self, *wanted: str, timeout_s: float = PATIENCE_S) -> str:
        """Screen once it shows all the texts."""
        deadline = time.monotonic() + timeout_s
        while not all(text in (shown := self.text()) for text in wanted):
            if time.monotonic() > deadline:
                pytest.fail(f"{wanted} not on the screen within {timeout_s:g} s:\n{shown}")
            time.sleep(0.02)
        return shown

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit code once the command has ended."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.text()
            if time.monotonic() > deadline:
                pytest.fail(f"still there after {timeout_s:g} s:\n{self.text()}")
            time.sleep(0.02)
        self.text()
        return self.process.returncode

    def settings(self) -> list[Any]:
        """Current terminal settings."""
        return termios.tcgetattr(self._slave)

    def is_as_before(self) -> bool:
        """True if settings, cursor and screen are restored."""
        entered, left = self.raw.rfind(b"\x1b[?1049h"), self.raw.rfind(b"\x1b[?1049l")
        shown = self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
        return self.settings() == self.before and left > entered >= 0 and shown

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)
