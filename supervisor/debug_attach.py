"""`mqproc run ROLE`: a role attached to the caller's terminal, for a debugger.

    caller ── RUN_ROLE ──▶ supervisor ── role stops in order ──▶ template forks it again ──▶ role
      └── its open files /proc/PID/fd/0, 1, 2 ─────────────────── become the role's own ──────┘

It ends with the role or with the caller's connection; then the role is started normally.
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

# O_APPEND, because each open of a file has its own position: processes would overwrite each other.
_WRITE: Final = os.O_WRONLY | os.O_APPEND
_FLAGS: Final = (os.O_RDONLY, _WRITE, _WRITE)


@dataclass(frozen=True, slots=True)
class Terminal:
    """Paths of a role's standard input, output and error output."""

    stdin: str
    stdout: str
    stderr: str

    def check(self, caller: int) -> None:
        """Check that these are open files of process `caller` that this process can open."""
        own = re.compile(rf"/proc/{caller}/fd/\d+")
        for path, flags in self._openings():
            if not own.fullmatch(path):
                raise BadRequestError(f"{path!r} is not an open file of pid {caller}, the caller")
            try:
                os.close(_open(path, flags))
            except OSError as error:
                raise BadRequestError(f"{path}: {error.strerror}; it cannot be attached") from None

    def attach(self) -> None:
        """Make these descriptors 0, 1 and 2, and Python's streams. Raises OSError."""
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
    """Do not wait for a pipe's other end, nor acquire a controlling terminal."""
    fd = os.open(path, flags | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


@dataclass(slots=True, eq=False)
class DebugAttachment:
    """One role at one caller's terminal."""

    caller_pid: int
    """The caller's pid."""
    terminal: Terminal
    debug: bool
    ended: Callable[[Death | MqprocError], None]
    """Called once: how the role ended, or why it did not start."""
    begun: bool = False
    """The role runs at the terminal."""
    detached: bool = False
    """The caller has disconnected."""
