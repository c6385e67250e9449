"""Units of the timer's log as columns: what waits for which slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Filed:
    """Filed messages, int64[n] each; `due_ms` is 0 where only the record knows the exact time."""

    slots_ms: NDArray[np.int64]
    magics: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    due_ms: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.slots_ms)

    def chosen(self, which: NDArray[np.bool_] | slice) -> Filed:
        """Some of them, in the same order."""
        return Filed(
            self.slots_ms[which],
            self.magics[which],
            self.physical_offsets[which],
            self.sizes[which],
            self.due_ms[which],
        )
