"""Frames of one operation that come one behind the other: handed over as a run, with no step of Python's for each.

For a role whose kernel reads frames itself. What is no whole frame of that operation is cut as ever.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.frames import leading_run
from mqproc.wire.connection import Connection, FrameRun


class RunCutter:
    """Finds runs of frames of `operation`."""

    def __init__(self, operation: int, frame_bytes_max: int) -> None:
        self._operation = int(operation)  # an enum member would be another type to a kernel
        self._frame_bytes_max = frame_bytes_max
        self._limit = np.zeros(1, np.int64)
        self._left = self._limit.data

    def cut(self, connection: Connection, buffer: NDArray[np.uint8], at: int, end: int, limit: int) -> FrameRun | None:
        """The run of at most `limit` frames at `at` of `buffer`, which is filled up to `end`; None without one."""
        self._left[0] = limit
        stop = leading_run(buffer, at, end, self._operation, self._frame_bytes_max, self._limit)
        if stop == at:
            return None
        return FrameRun(connection, buffer, at, stop, limit - self._left[0])
