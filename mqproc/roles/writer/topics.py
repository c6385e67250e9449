"""Topics of the writer, prepared for the kernel.

A topic is deleted in this order: its entry in the topics' journal becomes durable, its queues become tombstones, its
ConsumeQueue files are removed. If the writer is killed in between, its successor does the rest; dispatch and recovery
remove files that appear afterwards.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import PermissionDeniedError, TooManyQueuesError, TopicNotFoundError
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.paths import StorePaths, segment_start
from mqproc.roles.role_log import get_logger
from mqproc.store.commitlog.append_templates import topic_fields
from mqproc.store.consumequeue.files import remove_tree
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.schedule.timer_store import messages_in_slot
from mqproc.store.sync_guard import Syncing
from mqproc.store.topics import PERM_WRITE, QUEUES_OF_A_TOPIC_MAX, TopicConfig, TopicDeletion, Topics
from mqproc.topic_names import MULTI_DISPATCH_PREFIX, check_topic, queues_of_own


@dataclass(slots=True)
class OpenTopic:
    """A topic ready for appends: `topic_fields`, queue numbers, rotation of all topics."""

    magic: int
    block: NDArray[np.uint8]
    queue_numbers: NDArray[np.int64]
    rounds: NDArray[np.int64]
    write_queues: int
    """Queues among which the writer chooses; a producer may name any."""

    @property
    def rotation(self) -> int:
        """Queue of the next message in rotation."""
        return int(self.rounds[self.queue_numbers[0]])

    @rotation.setter
    def rotation(self, queue_id: int) -> None:
        self.rounds[self.queue_numbers[0]] = queue_id


class WriterTopics:
    """Keeps topics.json, the queue table and the kernel's arrays consistent."""

    def __init__(
        self,
        io: StoreIO,
        syncs: Syncing,
        paths: StorePaths,
        options: Options,
        table: QueueTable,
        log_error: Callable[..., object] | None = None,
    ) -> None:
        self._io = io
        self._log_error = log_error or get_logger().error
        self._paths = paths
        self.options = options
        self._table = table
        self.topics = Topics(io, paths, syncs)
        self.topics.load()
        if self.topics.remark:
            get_logger().warning("topics.json was read with a remark", remark=self.topics.remark)
        self.rounds = np.zeros(table.capacity, np.int64)
        """int64[max_queues]: rotation position of each topic, by the number of its first queue."""
        self._open: dict[str, OpenTopic] = {}
        self.changes = 0
        """Incremented when a known topic is widened or deleted."""
        self.unsaved = self.topics.journaled
        self.save_errno = 0
        """errno of the last save, 0 if it succeeded."""
        self._finish_deletions()
        self._adopt_queues_of_table()
        if self.topics.forget_deletions(self._log_begin()):
            self.unsaved = True

    def count_waiting(self, slot_ms: int) -> int:
        """Number of messages in the wheel slot of a time."""
        return messages_in_slot(self._io, self._paths, slot_ms, self.options.timer_precision_ms)

    def find(self, topic: str) -> OpenTopic:
        """Find or create a topic. Raises TopicNotFoundError, BadTopicError, TooManyQueuesError."""
        found = self._open.get(topic)
        if found is not None:
            return found
        check_topic(topic)
        config = self.topics.get(topic)
        if config is None:
            if not self.options.auto_create_topic_enable:
                raise TopicNotFoundError(f"topic {topic!r} does not exist and auto_create_topic_enable is off")
            self._auto_create(topic, self.options.default_topic_queue_nums)
            return self._open[topic]
        return self._open_topic(config)

    def check_writable(self, topic: str) -> None:
        """Raise PermissionDeniedError for an existing topic without write permission."""
        config = self.topics.get(topic)
        if config is not None and not config.perm & PERM_WRITE:
            raise PermissionDeniedError(f"topic {topic!r} may not be sent to: its permissions are without write")

    def find_internal(self, topic: str, queues_min: int = 1) -> OpenTopic:
        """Find a topic for a role of the group, creating it or widening it to `queues_min` queues.

        Delayed messages must arrive although their topic was deleted meanwhile. A system topic gets all its queues,
        since a power loss may have left only those that were used. Raises TooManyQueuesError.
        """
        config = self.topics.get(topic)
        default = self.options.default_topic_queue_nums if config is None else config.queues
        queues = max(queues_of_own(topic, default), queues_min)
        if config is None or config.queues < queues:
            self._auto_create(topic, queues)
        return self._open.get(topic) or self.find(topic)

    def create(self, topic: str, queues: int, perm: int | None = None) -> bool:
        """Create or widen a topic, which the caller saves; returns whether anything changed."""
        self._check_capacity(topic, queues)
        changed = self.topics.add(topic, queues, perm)
        config = self.topics.get(topic)
        assert config is not None
        self._open_topic(config)
        if changed:
            self.topics.note(topic)
            self.unsaved = True
        return changed

    def _auto_create(self, topic: str, queues: int) -> None:
        """Create a topic for an append; the journal keeps all its queues after a kill."""
        self.create(topic, queues)
        with suppress(OSError):  # `save` logs the error and retries.
            self.topics.write()

    def delete(self, topic: str, written: int) -> None:
        """Delete a topic durably and leave tombstones for its queues.

        `written` is the end of the log, with nothing unpublished. Raises TopicNotFoundError, and OSError, after which
        nothing has changed.
        """
        config = self.topics.get(topic)
        if config is None:
            raise TopicNotFoundError(f"topic {topic!r} does not exist")
        before = self.topics.deletions.get(topic)
        queues = max(config.queues, len(before.next_offsets) if before else 0)
        numbers = [self._table.entry(topic, queue_id) for queue_id in range(queues)]
        next_offsets = [self._table.next_offset(number) if number >= 0 else 0 for number in numbers]
        self.topics.delete(topic, written, next_offsets)
        self._io.crash_point("topic.deletion_durable")
        self._open.pop(topic, None)
        self.changes += 1
        self.unsaved = True
        self._delete_queues((number for number in numbers if number >= 0), written)
        self._io.crash_point("topic.queues_deleted")
        self._remove_files(topic)

    def save(self, time_ms: int) -> None:
        """Write topics.json if anything changed.

        An error is logged; the journal keeps the change and the next call retries, except after a failed sync, which is
        final.
        """
        if not self.unsaved:
            return
        self.save_errno = 0
        try:
            self.topics.save(time_ms)
        except OSError as error:
            self.save_errno = error.errno or errno.EIO
            self._log_error("topics could not be saved yet", error=str(error))
            if not isinstance(error, FailedSyncError):
                return
        self.unsaved = False

    def _check_capacity(self, topic: str, queues: int) -> None:
        missing = sum(self._table.entry(topic, queue_id) < 0 for queue_id in range(min(queues, QUEUES_OF_A_TOPIC_MAX)))
        left = self._table.capacity - self._table.count
        if missing > left:
            deleted = self._table.tombstones
            kept = f"; deleted queues occupy {deleted:,} until the next start, or while the log has messages of them"
            raise TooManyQueuesError(
                f"{missing:,} more queues exceed max_queues = {self._table.capacity:,}; {left:,} are left"
                + (kept if deleted else "")
            )
        self._table.make_room(missing)

    def _delete_queues(self, numbers: Iterable[int], written: int) -> None:
        # Queues with messages last: if any is left, a successor knows that the deletion is unfinished. Queues that only
        # an earlier topic of this name had go first: if the topic is recreated, they must not look unfinished.
        table = self._table
        for number in sorted(numbers, key=lambda number: (table.is_live(number), table.next_offset(number))):
            table.delete_queue(number, written)

    def _remove_files(self, topic: str) -> None:
        """Remove ConsumeQueue files, now or at the next start; the records stay in the log."""
        try:
            remove_tree(self._io, self._paths.consume_queue / topic)
        except OSError as error:
            get_logger().warning("files of a deleted topic are left for the next start", topic=topic, error=str(error))

    def _finish_deletions(self) -> None:
        deleted = {topic: of for topic, of in self.topics.deletions.items() if self.topics.get(topic) is None}
        numbers: dict[str, list[int]] = {}
        for number, topic, _queue_id in self._table.live():
            if topic in deleted:
                numbers.setdefault(topic, []).append(number)
        for topic, of_topic in numbers.items():
            if any(self._lacks_deletion(number, deleted[topic]) for number in of_topic):
                self._delete_queues(of_topic, deleted[topic].physical_offset)
            else:
                # A send recreated the topic after the deletion, and the writer was killed before it was saved.
                del deleted[topic]
        left = sorted(deleted.keys() & set(self._io.names(self._paths.consume_queue)))
        if left and self._journal_is_durable():
            for topic in left:
                self._remove_files(topic)

    def _journal_is_durable(self) -> bool:
        """Sync the journal before files are removed.

        A writer may be killed between writing a deletion and its sync. If a power loss then drops the deletion, the
        topic still exists and needs its files.
        """
        try:
            self.topics.sync_journal()
        except OSError as error:
            self._log_error("files of deleted topics are left for the next start", error=str(error))
            return False
        return True

    def _lacks_deletion(self, number: int, deletion: TopicDeletion) -> bool:
        """Whether the deletion of a queue that had messages is missing in the table."""
        next_offset = deletion.next_offset(self._table.name(number)[1])
        return next_offset > 0 and self._table.deletion(number) != (deletion.physical_offset, next_offset)

    def _log_begin(self) -> int:
        starts = map(segment_start, self._io.names(self._paths.commit_log))
        return min((start for start in starts if start is not None), default=0)

    def _open_topic(self, config: TopicConfig) -> OpenTopic:
        numbers = [self._table.create_queue(config.topic, queue_id) for queue_id in range(config.queues)]
        if config.topic in self._open:
            self.changes += 1
        else:
            # The number may have belonged to another topic.
            self.rounds[numbers[0]] = 0
        found = OpenTopic(*topic_fields(config.topic), np.array(numbers, np.int64), self.rounds, config.write_queues)
        self._open[config.topic] = found
        return found

    def _adopt_queues_of_table(self) -> None:
        """Adopt topics and queues of the store that topics.json lacks.

        Folders whose number exceeds the maximum of a queue id, such as a date, are ignored.
        """
        widest: dict[str, int] = {}
        for _number, topic, queue_id in self._table.live():
            if not topic.startswith(MULTI_DISPATCH_PREFIX) and queue_id < QUEUES_OF_A_TOPIC_MAX:
                widest[topic] = max(widest.get(topic, 0), queue_id + 1)
        for topic, queues in widest.items():
            config = self.topics.get(topic)
            if config is None:
                self.topics.adopt(topic, queues)
                self.unsaved = True
            elif config.queues < queues:
                self.topics.widen(topic, queues)
                self.unsaved = True
