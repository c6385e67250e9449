"""`gather` with a property filter, a kernel of its own.

Pulls without a filter do not wait for its compilation.
"""

from __future__ import annotations

from types import FunctionType
from typing import Final

import numpy as np

from mqproc.kernels import gather as unfiltered
from mqproc.kernels.gather import DECIDED, DECIDED_UNIT, STATE_SIZE
from mqproc.kernels.jit.compile import inlined, kernel, plain
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.kernels.record_fields import properties_at, properties_end
from mqproc.kernels.sql import FAILS, PASSES, verdict


@inlined
def _verdict(
    view: Bytes, at: int, total: int, unit: int, program: Words, texts: Bytes, scratch: Words, state: Words
) -> int:
    """FAILS, PASSES or UNDECIDED: Python's decision about the unit, else the filter's verdict."""
    if state[DECIDED_UNIT] == unit + 1:
        return PASSES if state[DECIDED] != 0 else FAILS
    return verdict(view, properties_at(view, at), properties_end(view, at, total), program, texts, scratch)


def _twin() -> FunctionType:
    """The source of `gather.gather` with another function for the properties."""
    globals_ = vars(unfiltered) | {"passes_properties": _verdict}
    twin = FunctionType(plain(unfiltered.gather).__code__, globals_, "gather_sql")
    twin.__qualname__ = "gather_sql"  # The cache's name of it.
    twin.__annotations__ = unfiltered.gather.__annotations__
    return twin


gather: Final = kernel(_twin())


def warm() -> None:
    """Compile or load these kernels."""
    empty, words = np.zeros(0, np.uint8), np.zeros(0, np.int64)
    gather(empty, empty, words, empty, words, words, empty, words, empty, np.zeros(STATE_SIZE, np.int64))
