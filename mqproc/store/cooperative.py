"""Cooperative multitasking for long requests: generators that yield between slices.

A server steps several of them in turn; a script runs one to its end with `finish`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Slices = Generator[None, None, T]


def finish(slices: Slices[T]) -> T:
    """Run all slices; returns the answer."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            value: T = end.value
            return value


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Records of one answer: `count` of them in `records`, each uint8[n] of whole records.

    `cursor` continues the request; `complete`: there are no more.
    """

    count: int
    records: Sequence[NDArray[np.uint8]]
    cursor: tuple[int, ...] = ()
    complete: bool = True
