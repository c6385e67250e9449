"""Deferred signals: handlers of SIGINT, SIGTERM and SIGHUP run after a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_TERMINATING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def deferred_signals(*, forking: bool = False) -> Iterator[None]:
    """Raise signals that arrive in the block at its end; signals without handler act at once.

    Signals are not blocked, since a process started in the block would inherit the mask. With `forking` they are: the
    block forks, Python ignores exceptions in its fork hooks, and a child starts with its parent's handlers. The child
    then calls `reset_signals_in_child`.
    """
    received: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        received.append(number)

    with contextlib.ExitStack() as stack:
        if forking:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATING)
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        stack.callback(_raise_each, received)
        # Handlers run in the main thread only. The mask is not enough: a library's thread may receive the signal.
        if threading.current_thread() is threading.main_thread():
            for number in _TERMINATING:
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, keep)
        yield


def _raise_each(received: list[int]) -> None:
    for number in dict.fromkeys(received):
        signal.raise_signal(number)


def reset_signals_in_child() -> None:
    """Ignore SIGINT, and let SIGTERM and SIGHUP end a child forked within `deferred_signals`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINATING)
