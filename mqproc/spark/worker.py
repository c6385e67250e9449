"""What a Python process of Spark's keeps from one task to the next: memory that was freed, and what is loaded.

A worker makes a full garbage collection behind each task. Through all that Spark, Arrow and numba have loaded, which
is never garbage, that is 0.1 s of a processor: more than a small task does.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import TypeVar

from mqproc.roles.memory import keep_freed_memory

T = TypeVar("T")


@functools.cache
def keep_loaded() -> None:
    """Leave what is there by now out of garbage collections. The first call in a process counts."""
    gc.freeze()


def as_task(results: Iterator[T]) -> Iterator[T]:
    """What a task gives, made in a process that keeps; the first task brings in most of what is loaded."""
    keep_freed_memory()
    yield from results
    keep_loaded()
