"""Where the next start begins to read the revive topic: at the first check point that is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqproc.names import REVIVE_GROUP, REVIVE_TOPIC
from mqproc.store.delays.timer_waiting import saved_check
from mqproc.store.groups.unwritable import UNWRITABLE

if TYPE_CHECKING:
    from mqproc.roles.loop import RoleContext
    from mqproc.roles.writes import Writes
    from mqproc.store.groups.open_check_points import OpenCheckPoints
    from mqproc.store.groups.progress import GroupProgress
    from mqproc.store.reads.reading import StoreReading


class ReviveProgress:
    """Progress of the system's group in the revive topic."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreReading,
        progress: GroupProgress,
        writes: Writes,
        open_points: OpenCheckPoints,
    ) -> None:
        self._io, self._paths = context.io, context.paths
        self._reading = reading
        self._progress = progress
        self._writes = writes
        self._open = open_points

    def move(self) -> None:
        """Let it go as far as nothing is open."""
        if self._writes.under_way or not self._progress.writable or not self._is_delivered():
            return
        first = self._open.revive_begins()
        for queue_id in self._reading.queues.ids(REVIVE_TOPIC):
            bounds = self._reading.queues.bounds(REVIVE_TOPIC, queue_id)
            offset = first.get(queue_id, bounds.max_offset if bounds is not None else 0)
            before = self._progress.offset(REVIVE_GROUP, REVIVE_TOPIC, queue_id)
            if offset > (before or 0):
                try:
                    self._progress.set(REVIVE_GROUP, REVIVE_TOPIC, queue_id, offset)
                except OSError as error:
                    if error.errno not in UNWRITABLE:
                        raise
                    # The next start reads more than it needs to.
                    return

    def _is_delivered(self) -> bool:
        """Whether the revive topic has what was parked at the start: a check point may come behind its ack."""
        if self._open.parked_until_ms >= 0 and saved_check(self._io, self._paths).read_ms > self._open.parked_until_ms:
            self._open.parked_until_ms = -1
        return self._open.parked_until_ms < 0
