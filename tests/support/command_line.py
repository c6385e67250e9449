"""Run `mqproc …` in the test's process, or on a pseudo terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import pyte
import pytest

from mqproc.cli.main import main
from tests.support.group import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@contextlib.contextmanager
def _stdin(data: bytes) -> Iterator[None]:
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))):
        yield


def call(*arguments: str | Path | int, stdin: bytes = b"", **environment: str) -> Outcome:
    """Run `mqproc` with these arguments and environment variables."""
    out, err = io.StringIO(), io.StringIO()
    others = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    variables = others | {"NO_COLOR": "1"} | environment
    with (
        mock.patch.dict("os.environ", variables, clear=True),
        _stdin(stdin),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


class PseudoTerminal:
    """`mqproc …` on its own terminal: send keys, read the screen.

    `before` has the initial settings of the terminal.
    """

    def __init__(
        self, *arguments: str | os.PathLike[str], columns: int = 110, lines: int = 30, kind: str = "xterm-256color"
    ) -> None:
        self._master, slave = os.openpty()
        self.screen = pyte.Screen(columns, lines)
        self.resize(columns, lines)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self._output = select.poll()
        self._output.register(self._master, select.POLLIN)
        self.raw = b""
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

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
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

    def until(self, *texts: str, timeout_s: float = PATIENCE_S) -> str:
        """Screen once it shows all the texts."""
        deadline = time.monotonic() + timeout_s
        while not all(text in (shown := self.text()) for text in texts):
            if time.monotonic() > deadline:
                pytest.fail(f"{texts} not on the screen within {timeout_s:g} s:\n{shown}")
            time.sleep(0.02)
        return shown

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit code once the command has ended."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.text()
            if time.monotonic() > deadline:
                pytest.fail(f"the command runs after {timeout_s:g} s:\n{self.text()}")
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
