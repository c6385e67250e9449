"""Signals that end a block of work, or are deferred until a block has ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from mqproc.errors import BadRequestError

_TERMINATING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stopping_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; the next one ends the process at once.

    Raises BadRequestError outside the main thread, the only one that can handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise BadRequestError("signals=True outside the main thread, the only one that can handle signals")

    def first(number: int, frame: FrameType | None) -> None:
        for each in _STOPPING:
            signal.signal(each, signal.SIG_DFL)
        stop()

    with contextlib.ExitStack() as stack:
        for number in _STOPPING:
            stack.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(number, first)
        yield


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
