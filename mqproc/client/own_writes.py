"""Reading your own writes: a client's reads wait until dispatch has passed its last send.

answer to a send ──offset of its last record──▶ OwnWrites ◀── read: has dispatch passed it? ── control file
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from mqproc.client.retry import RetryPolicy
from mqproc.errors import MqprocError, RequestTimeoutError
from mqproc.ipc.control_words import log_positions
from mqproc.paths import StorePaths
from mqproc.wire.operations import Operation

AFTER_OWN_WRITES: Final = frozenset(
    map(
        int,
        (
            Operation.PULL,
            Operation.BY_KEY,
            Operation.BY_TAG,
            Operation.RANGE,
            Operation.COUNT,
            Operation.OFFSET_AT,
            Operation.QUEUES,
            Operation.TOPICS,
            Operation.QUERY_MESSAGE,
        ),
    )
)
"""Operations whose answers come from queues and index.

GET finds an offset id in the log, even while dispatch is held up; a message that it does not find is asked for again.
"""
OWN_WRITES_POLL_S: Final = 0.0001
"""Pause between reads of the control file; they cost the group nothing."""
STATS_PAUSES: Final = RetryPolicy(base_ms=1, max_ms=50, jitter=0)
"""Pauses between requests to the group; more frequent ones would delay other clients."""
# Physical offset, queue offset and queue id of each message in the answer to a send, column by column.
_OFFSET_BYTES: Final = 8
_ROW_BYTES: Final = 20


class DispatchPosition(NamedTuple):
    """Ends of the log as written, and as dispatched."""

    written: int
    dispatched: int


class OwnWrites:
    """Log position up to which a client's reads wait for dispatch. Thread-safe."""

    __slots__ = ("_paths", "dispatched", "last")

    def __init__(self, writer_socket: Path) -> None:
        self._paths = StorePaths(writer_socket.parent.parent)
        self.last = -1
        """Physical offset of the last message sent; dispatch has passed it when it is below `dispatched`."""
        self.dispatched = 0

    def sent(self, columns: memoryview) -> None:
        """Note the answer to a send."""
        end = len(columns) // _ROW_BYTES * _OFFSET_BYTES
        offset = int.from_bytes(columns[end - _OFFSET_BYTES : end], "little") if end else -1
        if offset > self.last:
            self.last = offset

    def positions(self) -> DispatchPosition | None:
        """Positions from the control file; None if it cannot be read."""
        try:
            return DispatchPosition(*log_positions(self._paths))
        except (MqprocError, OSError):
            return None

    def passed(self, found: DispatchPosition) -> bool:
        """Whether dispatch has passed all own writes.

        Also when everything in the log is dispatched: after a loss of power the log may end before them, and recovery
        dispatches all of it. Remembers the position in `dispatched`.
        """
        last = self.last
        if last < found.dispatched or found.dispatched >= found.written:
            self.dispatched = max(self.dispatched, last + 1)
            return True
        return False

    def not_passed(self, found: DispatchPosition, timeout_s: float) -> RequestTimeoutError:
        """The error of a read whose time is over."""
        left = f"{max(0, found.written - found.dispatched):,} bytes of the log are left"
        return RequestTimeoutError(f"dispatch has not reached this client's last send in {timeout_s:g} s: {left}")
