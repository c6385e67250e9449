"""Consumer groups for people and tools: looking at them, moving their progress, their dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from mqproc.client import core, group_calls, group_steps
from mqproc.client.amounts import each_of
from mqproc.client.core import PULL_BYTES, PULL_MESSAGES
from mqproc.client.driving import drive
from mqproc.client.group_steps import Move, ResetTo
from mqproc.client.subscription import named
from mqproc.groups import GroupInfo, GroupSummary
from mqproc.message import StoredMessage
from mqproc.store.groups.settings import dead_letter_topic

if TYPE_CHECKING:
    from mqproc.client.sync import Client

T = TypeVar("T")


class Groups:
    """`Client.groups`.

    for group in client.groups.all():
        print(group.group, group.lag)
    moves = client.groups.plan_reset("billing", ResetTo(time="2026-11-21T10:00"))
    client.groups.execute("billing", moves)
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def all(self) -> list[GroupSummary]:
        """All groups with what they have not consumed."""
        return self._client.run(group_calls.groups())

    def info(self, group: str) -> GroupInfo:
        """One group. Raises GroupNotFoundError."""
        return self._client.run(group_calls.info(group))

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Say that a group has consumed a queue below `offset`, without being a member.

        Raises StaleOffsetError when that goes back, OffsetOverflowError beyond the queue's end, GroupInUseError when a
        member has the queue.
        """
        self._client.run(group_calls.commit(group, topic, queue_id, offset))

    def plan_reset(
        self, group: str, to: ResetTo, topics: str | Sequence[str] = (), queues: Sequence[int] = ()
    ) -> list[Move]:
        """What a reset would move, of all the group's topics or of these. Changes nothing."""
        return drive(
            self._client.run, group_steps.plan_reset(group, to, named(topics), tuple(each_of("queues", queues)))
        )

    def plan_clone(self, source: str, target: str, topics: str | Sequence[str] = ()) -> list[Move]:
        """What giving `target` the progress of `source` would move. Changes nothing."""
        return drive(self._client.run, group_steps.plan_clone(source, target, named(topics)))

    def execute(self, group: str, moves: Sequence[Move]) -> None:
        """Do what was planned, durably, all or nothing; members go on from there."""
        drive(self._client.run, group_steps.execute(group, moves))

    def change(
        self,
        group: str,
        *,
        retry_max_times: int | None = None,
        retry_queue_nums: int | None = None,
        enabled: bool | None = None,
    ) -> None:
        """Make a group, or change its settings.

        With `enabled=False` its members have their queues taken away, as soon as nobody has messages of them, and
        nobody joins or receives, until it is enabled again.
        """
        self._client.run(group_calls.change(group, retry_max_times, retry_queue_nums, enabled))

    def delete(self, group: str) -> None:
        """Forget a group: progress, settings, what its simple consumers have, and the topics where messages came again
        to it alone. Its dead letters stay. Raises GroupInUseError while it has members, GroupNotFoundError where there
        is none; what a deletion before has left of its topics is deleted then all the same."""
        drive(self._client.run, group_steps.delete(group))

    def dead_letters(self, group: str) -> Iterator[StoredMessage]:
        """What the group could never consume, oldest first."""
        topic, most_bytes = dead_letter_topic(group), min(PULL_BYTES, self._client.pull_bytes_max)
        for queue in self._client.run(core.queues(topic)):
            at = queue.min_offset
            while at < queue.max_offset:
                request = core.pull_request(topic, queue.queue_id, at, PULL_MESSAGES, most_bytes, "", 0.0, False)
                found = self._client.run(core.pull(request))
                yield from found.messages
                if found.next_offset <= at:
                    break
                at = found.next_offset

    def resend(self, group: str, *messages: StoredMessage) -> int:
        """Have dead letters delivered to their group again; how many could be. They stay in the dead-letter topic."""
        calls = group_calls.resends(group, messages)
        return sum(self._client.run(call) for call in calls)
