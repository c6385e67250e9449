"""What must be known of deleted topics: `config/deletedTopics.json`, which the writer keeps beside topics.json.

Records of a deleted topic stay in the log until they expire. A deletion tells them from those of a topic of the same
name that is made later, whose queue offsets go on where the old ones stood:

    {"deletedTopicTable": {"T": {"physicalOffset": 123, "nextOffsets": [3, 0, 5]}}}

A record of T lies before the deletion when its position is below `physicalOffset` and its queue offset below that
queue's next offset. The file is ours; RocketMQ passes it over. It lies in `config/` because it must outlive `mqproc/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.final_syncs import Syncing

if TYPE_CHECKING:
    from mqproc.store.queue_table import QueueTable

_TABLE = "deletedTopicTable"
_Offset = Annotated[int, msgspec.Meta(ge=0)]


class Deletion(msgspec.Struct, frozen=True, rename="camel"):
    """One topic's last deletion: the log's end at that time, and the next offset of each of its queues by id."""

    physical_offset: _Offset
    next_offsets: tuple[_Offset, ...]

    @classmethod
    def of(cls, physical_offset: int, next_offsets: Sequence[int]) -> Deletion | None:
        """None when no queue has ever had a message: there is nothing to tell apart then."""
        used = len(next_offsets)
        while used and next_offsets[used - 1] == 0:
            used -= 1
        return cls(physical_offset, tuple(next_offsets[:used])) if used else None

    def next_offset(self, queue_id: int) -> int:
        """What the offsets of a queue go on at."""
        return self.next_offsets[queue_id] if queue_id < len(self.next_offsets) else 0

    def covers(self, queue_id: int, max_offset: int, physical_end: int) -> bool:
        """Whether all of a queue is of before the deletion: its last unit's record ends at `physical_end`."""
        return max_offset <= self.next_offset(queue_id) and physical_end <= self.physical_offset


def load(io: StoreIO, paths: StorePaths) -> dict[str, Deletion]:
    """Deletions by topic; none without the file. Raises CorruptStoreError when no copy of it can be read."""
    value, _remark = rocketmq_json.load(io, paths.deleted_topics)
    if value is None:
        return {}
    try:
        return msgspec.convert(value, dict[str, dict[str, Deletion]]).get(_TABLE, {})
    except msgspec.ValidationError as error:
        raise CorruptStoreError(f"{paths.deleted_topics}: {error}") from None


def save(io: StoreIO, syncs: Syncing, paths: StorePaths, deletions: Mapping[str, Deletion]) -> None:
    """Replace the file. Raises OSError, FailedSyncError."""
    table: dict[str, Any] = {topic: msgspec.to_builtins(deletions[topic]) for topic in sorted(deletions)}
    rocketmq_json.save(io, syncs, paths.deleted_topics, {_TABLE: table})


def tell_table(table: QueueTable, deletions: Mapping[str, Deletion]) -> None:
    """Put the deletions of earlier runs into a table that has the queues of the files. Raises TooManyQueuesError."""
    for topic, deletion in deletions.items():
        for queue_id, next_offset in enumerate(deletion.next_offsets):
            if next_offset > 0 or table.entry(topic, queue_id) >= 0:
                table.remember_deletion(topic, queue_id, deletion.physical_offset, next_offset)
