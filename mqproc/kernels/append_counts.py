"""Counting what is appended, in the control file: frames, messages, sizes of records. `encode_frame` calls these.

What is encoded is not published yet, and may never be. As long as `written` stands where it stood when the first such
frame was encoded, the UNPUBLISHED words say what was counted since, and `uncount` takes that back.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.jit import inlined, kernel
from mqproc.kernels.primitive import Words
from mqproc.layout import control, figures

_SIZES = figures.MESSAGE_SIZES.index
_SIZES_SUM = figures.MESSAGE_SIZES.sum_index - _SIZES
_SIZES_WORDS = _SIZES_SUM + 1
_BOUNDS = len(figures.MESSAGE_SIZES.bounds)
_FIRST_BOUND = figures.MESSAGE_SIZES.bounds[0]
# Each bound is four times the one before.
assert figures.MESSAGE_SIZES.bounds == tuple(_FIRST_BOUND << 2 * place for place in range(_BOUNDS))

# Indices into the control file's words: the last ones of the state of `kernels.append`.
UNPUBLISHED_FROM = figures.APPEND_STATE + figures.APPEND_STATE_WORDS - 3 - _SIZES_WORDS
UNPUBLISHED_FRAMES = UNPUBLISHED_FROM + 1
UNPUBLISHED_MESSAGES = UNPUBLISHED_FROM + 2
UNPUBLISHED_SIZES = UNPUBLISHED_FROM + 3  # here and behind it: as the histogram of sizes, with its sum
_STOP = UNPUBLISHED_SIZES + _SIZES_WORDS


@kernel
def begin_counting(cells: Words) -> None:
    """Before anything of a frame is counted: a `written` that has moved says that what was counted is published."""
    if cells[UNPUBLISHED_FROM] != cells[control.WRITTEN]:
        cells[UNPUBLISHED_FROM] = cells[control.WRITTEN]
        for word in range(UNPUBLISHED_FRAMES, _STOP):
            cells[word] = 0


@kernel
def count_frame(cells: Words) -> None:
    """Count a frame, of which every message was counted."""
    cells[UNPUBLISHED_FRAMES] += 1
    cells[control.APPENDED_FRAMES] += 1


@inlined
def count_size(cells: Words, size: int) -> None:
    """Count a record's size."""
    bucket = 0
    while bucket < _BOUNDS and size > _FIRST_BOUND << 2 * bucket:
        bucket += 1
    cells[UNPUBLISHED_SIZES + bucket] += 1
    cells[_SIZES + bucket] += 1


@kernel
def count_messages(cells: Words, messages: int, size: int) -> None:
    """Count so many messages, of so many bytes together."""
    cells[UNPUBLISHED_MESSAGES] += messages
    cells[UNPUBLISHED_SIZES + _SIZES_SUM] += size
    cells[_SIZES + _SIZES_SUM] += size
    cells[control.APPENDED_MESSAGES] += messages


@kernel
def uncount(cells: Words) -> None:
    """Take back what was counted of frames that are not published, and never will be."""
    if cells[UNPUBLISHED_FROM] != cells[control.WRITTEN]:
        return
    cells[control.APPENDED_FRAMES] -= cells[UNPUBLISHED_FRAMES]
    cells[control.APPENDED_MESSAGES] -= cells[UNPUBLISHED_MESSAGES]
    for word in range(_SIZES_WORDS):
        cells[_SIZES + word] -= cells[UNPUBLISHED_SIZES + word]
    for word in range(UNPUBLISHED_FRAMES, _STOP):
        cells[word] = 0


def warm() -> None:
    """Compile or load the kernel that Python calls."""
    uncount(np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64))
