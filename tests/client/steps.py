"""Steps of Python's that something takes: each costs some 0.5 µs where the processor has slept."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def steps_of(run: Callable[[], T]) -> tuple[T, list[str]]:
    """What `run` returns, and the functions called meanwhile; those of C only where they raise.

    No garbage is collected meanwhile: hypothesis has a function of its own called whenever it is.
    """
    steps: list[str] = []

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "call" and frame.f_code is not run.__code__:
            steps.append(frame.f_code.co_name)
        elif event == "c_exception":
            steps.append(f"{called!r} raises")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        value = run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return value, steps
