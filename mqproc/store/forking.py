"""Signals around a fork: none is lost between parent and child, and the child leaves Ctrl-C to its parent."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """What handlers of signals that end a program would raise is raised at the end of the block, in which one forks.

    Python passes over exceptions within the fork's hooks, and a child begins with the handlers of its parent.
    """
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with contextlib.ExitStack() as stack:
        # For the child. It is not enough for the parent: another thread, a library's, may take the signal.
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, _HELD))
        stack.callback(_raise_again, came)
        # Handlers run in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, keep)
        yield


def _raise_again(came: list[int]) -> None:
    for number in dict.fromkeys(came):
        signal.raise_signal(number)


def leave_signals_to_the_parent() -> None:
    """In a process that was forked with `signals_held`: it passes over Ctrl-C, and SIGTERM and SIGHUP end it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
