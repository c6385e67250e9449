"""Consumer groups for asyncio, with the calls of `Groups`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from mqproc.client import core, group_calls, group_steps
from mqproc.client.amounts import each_of
from mqproc.client.core import PULL_BYTES, PULL_MESSAGES
from mqproc.client.driving import drive_async
from mqproc.client.group_steps import Move, ResetTo
from mqproc.client.subscription import named
from mqproc.groups import GroupInfo, GroupSummary
from mqproc.message import StoredMessage
from mqproc.store.groups.settings import dead_letter_topic

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient

T = TypeVar("T")


class AsyncGroups:
    """`AsyncClient.groups`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def all(self) -> list[GroupSummary]:
        """All groups with what they have not consumed."""
        return await self._client.run(group_calls.groups())

    async def info(self, group: str) -> GroupInfo:
        """One group. Raises GroupNotFoundError."""
        return await self._client.run(group_calls.info(group))

    async def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Say that a group has consumed a queue below `offset`; see `Groups.commit`."""
        await self._client.run(group_calls.commit(group, topic, queue_id, offset))

    async def plan_reset(
        self, group: str, to: ResetTo, topics: str | Sequence[str] = (), queues: Sequence[int] = ()
    ) -> list[Move]:
        """What a reset would move. Changes nothing."""
        return await drive_async(
            self._client.run, group_steps.plan_reset(group, to, named(topics), tuple(each_of("queues", queues)))
        )

    async def plan_clone(self, source: str, target: str, topics: str | Sequence[str] = ()) -> list[Move]:
        """What giving `target` the progress of `source` would move. Changes nothing."""
        return await drive_async(self._client.run, group_steps.plan_clone(source, target, named(topics)))

    async def execute(self, group: str, moves: Sequence[Move]) -> None:
        """Do what was planned, durably, all or nothing; members go on from there."""
        await drive_async(self._client.run, group_steps.execute(group, moves))

    async def change(
        self,
        group: str,
        *,
        retry_max_times: int | None = None,
        retry_queue_nums: int | None = None,
        enabled: bool | None = None,
    ) -> None:
        """Make a group, or change its settings; see `Groups.change`."""
        await self._client.run(group_calls.change(group, retry_max_times, retry_queue_nums, enabled))

    async def delete(self, group: str) -> None:
        """Forget a group; see `Groups.delete`."""
        await drive_async(self._client.run, group_steps.delete(group))

    async def dead_letters(self, group: str) -> AsyncIterator[StoredMessage]:
        """What the group could never consume, oldest first."""
        topic, most_bytes = dead_letter_topic(group), min(PULL_BYTES, self._client.pull_bytes_max)
        for queue in await self._client.run(core.queues(topic)):
            at = queue.min_offset
            while at < queue.max_offset:
                request = core.pull_request(topic, queue.queue_id, at, PULL_MESSAGES, most_bytes, "", 0.0, False)
                found = await self._client.run(core.pull(request))
                for message in found.messages:
                    yield message
                if found.next_offset <= at:
                    break
                at = found.next_offset

    async def resend(self, group: str, *messages: StoredMessage) -> int:
        """Have dead letters delivered to their group again; how many could be."""
        calls = group_calls.resends(group, messages)
        return sum([await self._client.run(call) for call in calls])
