"""Consumer groups as users see them. Names and JSON keys are the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from mqproc.names import RETRY_PREFIX


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group. `lag`: how many messages it has not consumed; `retry_lag`: those of them in its retry topic."""

    group: str
    members: int
    topics: int
    lag: int
    retry_lag: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One consumer: `queues` it has, `silent_ms` since its last request."""

    member_id: str
    name: str
    topics: tuple[str, ...]
    queues: int
    silent_ms: int
    pid: int


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """A group's progress in one queue. `offset` is the next to consume, None when none is stored.

    `offset_time_ms`: store time of the message at the offset, None when there is none. `member_id` has the queue now.
    """

    topic: str
    queue_id: int
    offset: int | None
    min_offset: int
    max_offset: int
    offset_time_ms: int | None
    member_id: str

    @property
    def lag(self) -> int:
        """Messages not consumed yet."""
        return max(0, self.max_offset - max(self.min_offset, self.offset or 0))

    @property
    def is_retry(self) -> bool:
        return self.topic.startswith(RETRY_PREFIX)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One group: settings, members, and its progress queue by queue."""

    group: str
    generation: int
    retry_max_times: int
    retry_queue_nums: int
    consume_enable: bool
    members: tuple[GroupMember, ...]
    queues: tuple[GroupQueue, ...]

    @property
    def lag(self) -> int:
        """Messages of all queues not consumed yet."""
        return sum(queue.lag for queue in self.queues)
