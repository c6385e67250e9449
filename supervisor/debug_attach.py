"""A role lent to somebody's terminal, for a debugger: `mqproc run ROLE`.

    caller ── RUN_ROLE ──▶ supervisor ── role stops in order ──▶ template forks it again ──▶ role
      └── its open files /proc/PID/fd/0, 1, 2 ─────────────────── become the role's own ──────┘

A loan is over when the role has ended, or when the caller's connection has; then the role runs again as any other.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqproc.errors import BadRequestError, MqprocError
from mqproc.supervisor.hooks import Death

# Appended, because a file behind it is opened anew: without, each process would write at a place of its own.
_WRITE: Final = os.O_WRONLY | os.O_APPEND
_FLAGS: Final = (os.O_RDONLY, _WRITE, _WRITE)


@dataclass(frozen=True, slots=True)
class Terminal:
    """Paths of what becomes a role's standard input, output and error output."""

    stdin: str
    stdout: str
    stderr: str

    def check(self, caller: int) -> None:
        """Raise BadRequestError unless these are open files of the process `caller`, and can be opened here."""
        own = re.compile(rf"/proc/{caller}/fd/\d+")
        for path, flags in self._openings():
            if not own.fullmatch(path):
                raise BadRequestError(f"{path!r} is not an open file of pid {caller}, who asks")
            try:
                os.close(_open(path, flags))
            except OSError as error:
                raise BadRequestError(f"{path}: {error.strerror}; it cannot be handed over") from None

    def attach(self) -> None:
        """Make these this process's descriptors 0, 1 and 2, and Python's streams. Raises OSError."""
        for target, (path, flags) in enumerate(self._openings()):
            fd = _open(path, flags)
            if fd != target:
                os.dup2(fd, target)
                os.close(fd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115

    def _openings(self) -> list[tuple[str, int]]:
        return list(zip((self.stdin, self.stdout, self.stderr), _FLAGS, strict=True))


def _open(path: str, flags: int) -> int:
    """Neither wait for a pipe's other end nor get a controlling terminal."""
    fd = os.open(path, flags | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


@dataclass(slots=True, eq=False)
class DebugAttachment:
    """One role at one caller's terminal."""

    borrower: int
    """The caller's pid."""
    terminal: Terminal
    debug: bool
    ended: Callable[[Death | MqprocError], None]
    """Called once: how the role ended there, or why it never began."""
    begun: bool = False
    """The role has been started at the terminal."""
    given_back: bool = False
    """The caller has gone."""
