"""Signals of the supervisor: handlers only queue, the loop acts. Process controls by prctl."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from mqproc.roles import role_log

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
HANDLED: Final = (*STOPPING, signal.SIGHUP, signal.SIGUSR1)
_QUEUE_BYTES: Final = 4096


class Signals:
    """A queue of signal numbers with a descriptor for epoll; main thread only."""

    def __init__(self) -> None:
        self._interrupting = False
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in HANDLED:
            self._before[number] = signal.signal(number, self._on_signal)
        # With an inherited SIG_IGN for SIGCHLD, children would be reaped before the supervisor waits.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupting and number in STOPPING:
            raise KeyboardInterrupt

    def fileno(self) -> int:
        """Readable while signals are queued."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Signals since the last call, oldest first."""
        try:
            return list(self._reader.recv(_QUEUE_BYTES))
        except BlockingIOError:
            return []

    def _waiting(self) -> bytes:
        """The queued signals, without removing them."""
        try:
            return self._reader.recv(_QUEUE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt for SIGTERM and SIGINT within the block.

        Recovery may be aborted at any point. A queued one raises it at once.
        """
        self._interrupting = True
        try:
            if any(number in STOPPING for number in self._waiting()):
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupting = False

    def close(self) -> None:
        """Restore the previous handlers."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._reader.close()
        self._writer.close()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the handled signals, so that a forked child can install its handlers first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset_in_child() -> None:
    """Reset the supervisor's handlers in a forked child; SIGTERM and SIGHUP stay blocked.

    Ctrl-C is ignored. SIGUSR1 reopens the log file, also in further forks.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, role_log.on_reopen_signal)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM, signal.SIGHUP})


_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Adopt orphaned descendants, in place of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Be killed when the parent ends. The caller must then check that it has not ended before."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
