"""Store, full fence, load: the two halves of a wake-up that cannot be lost.

The sender publishes a word and then checks whether the receiver sleeps; the receiver announces that it sleeps and then
checks the word again. Each side must store before it loads, which only a full fence guarantees. Without it both sides
may see the other's old value, and the wake-up is lost.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import fence, load_acquire, store_release
from mqproc.kernels.jit.lowering import Words


@kernel
def publish_and_peek(words: Words, index: int, value: int, peek_index: int) -> int:
    """Publish `value` as word `index`, then load word `peek_index` after a full fence."""
    store_release(words, index, value)
    fence()
    return load_acquire(words, peek_index)


@kernel
def fence_and_peek(words: Words, peek_index: int) -> int:
    """Load word `peek_index` after all earlier stores of this process."""
    fence()
    return load_acquire(words, peek_index)


def warm() -> None:
    """Compile or load these kernels."""
    words = np.zeros(2, np.int64)
    publish_and_peek(words, 0, 0, 1)
    fence_and_peek(words, 1)
