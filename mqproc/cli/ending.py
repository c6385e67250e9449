"""A command that is told to end: SIGTERM and SIGHUP unwind it as Ctrl-C does, instead of ending it where it stands.

A benchmark's group would stay behind otherwise, and so would half an export. Full screens and the supervisor have
handlers of their own while they run.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Final

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_AGAIN_S: Final = 0.01
_mask_before: set[signal.Signals] | set[int] = set()
_unblocking = False


def end_in_order() -> None:
    """From now on the two signals raise SystemExit in the main thread, with a shell's code: 128 and their number.

    A signal that is ignored, as under nohup, stays so. Processes that are forked end at once, as they always do.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_come, after_in_child=_leave_to_the_system)


def _end(number: int, frame: FrameType | None) -> None:
    if _unblocking:
        # Python passes over what is raised here: it comes once more when the fork is over.
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
        return
    raise SystemExit(128 + number)


def _hold_back() -> None:
    # One that came between the fork and the change of handlers would be lost to the child.
    global _mask_before
    _mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_come() -> None:
    global _unblocking
    _unblocking = True
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before)
    finally:
        _unblocking = False


def _leave_to_the_system() -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)
    _let_come()
