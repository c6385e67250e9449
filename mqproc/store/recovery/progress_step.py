"""Consumer groups after a cut of the log: one that stands beyond the end of a queue would miss what comes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.groups.offsets_json import Progress
from mqproc.store.groups.progress import GroupProgress, all_progress
from mqproc.store.queue_table import QueueTable


class ProgressStep:
    """Looks at the progress of one store's groups before any role does. `table` has every queue's next offset."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        table: QueueTable,
        report: Callable[[str], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._io = io
        self._paths = paths
        self._table = table
        self._report = report
        self._now_ms = now_ms

    def run(self) -> None:
        """Set back what is beyond its queue's end, durably, a line each. Raises OSError, FailedSyncError."""
        if self._io.exists(self._paths.read_only):
            # A sync has failed, and another one would not tell: this must wait for the repair.
            return
        beyond = [at for at in self._progress() if self._is_beyond(at)]
        if not beyond:
            return
        progress = GroupProgress(self._io, self._paths, self._io, self._tell)
        try:
            progress.lower_to_maxima(self._end_of)
            progress.save(self._now_ms())
        finally:
            progress.close()
        for at in beyond:
            queue, end = f"{at.topic} queue {at.queue_id}", self._end_of(at.topic, at.queue_id)
            self._report(f"recovery: group {at.group}: {queue}: set back from {at.offset:,} to its end {end:,}")

    def _progress(self) -> list[Progress]:
        try:
            return list(all_progress(self._io, self._paths))
        except CorruptStoreError as error:
            self._report(f"recovery: groups: {error}; they begin anew")
            return []

    def _is_beyond(self, at: Progress) -> bool:
        end = self._end_of(at.topic, at.queue_id)
        return end is not None and at.offset > end

    def _end_of(self, topic: str, queue_id: int) -> int | None:
        """A queue's next offset; what cannot be dispatched yet counts too, and where one that is gone would go on.

        None for a queue of which the table has nothing.
        """
        number = self._table.entry(topic, queue_id)
        return self._table.next_offset(number) if number >= 0 else None

    def _tell(self, event: str, **figures: Any) -> None:
        self._report(f"recovery: groups: {event}: {', '.join(f'{name} {value}' for name, value in figures.items())}")
