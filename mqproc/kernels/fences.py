"""Store, full fence, load: what a ringer and a listener each do so that no bell is lost.

The ringer publishes a word and then looks whether the listener sleeps; the listener says that it sleeps and then looks
at the word again. Each must do its store before its load, which only a full fence guarantees: without it both may see
the other's old value, and a wake-up is lost.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import fence, load_acquire, store_release
from mqproc.kernels.jit.lowering import Words


@kernel
def publish_and_peek(words: Words, index: int, value: int, peek_index: int) -> int:
    """Publish `value` as word `index`, then load word `peek_index`, with a full fence in between."""
    store_release(words, index, value)
    fence()
    return load_acquire(words, peek_index)


@kernel
def fence_and_peek(words: Words, peek_index: int) -> int:
    """Load word `peek_index` after everything that this process stored before."""
    fence()
    return load_acquire(words, peek_index)


def warm() -> None:
    """Compile or load these kernels."""
    words = np.zeros(2, np.int64)
    publish_and_peek(words, 0, 0, 1)
    fence_and_peek(words, 1)
