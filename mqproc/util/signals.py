"""Signals that must not break off what cannot be undone by half, as the start of a process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Final

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """What a signal would raise in the block, such as KeyboardInterrupt, is raised at its end.

    Signals that nobody here handles stay as they are. They are not blocked, which a process that is started would be
    born with.
    """
    if threading.current_thread() is not threading.main_thread():  # Nothing is raised in others.
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for held_back in came:
            signal.raise_signal(held_back)
