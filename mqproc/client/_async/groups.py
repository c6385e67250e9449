"""Consumer groups for people and tools: inspection, moving progress, dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from mqproc.client import group_requests, requests
from mqproc.client._async.connection import AsyncConnections, run_steps
from mqproc.client.connection import ClientPart
from mqproc.client.group_requests import Move, ResetTo
from mqproc.client.requests import PULL_BYTES, PULL_MESSAGES
from mqproc.client.subscription import named
from mqproc.topic_names import dead_letter_topic
from mqproc.types import GroupInfo, GroupSummary, StoredMessage
from mqproc.util.arguments import each_of


class AsyncGroups(ClientPart):
    """Administration of consumer groups: `AsyncClient.groups`.

    for group in await client.groups.all():
        print(group.group, group.lag)
    moves = await client.groups.plan_reset("billing", ResetTo(time="2026-11-21T10:00"))
    await client.groups.execute("billing", moves)
    """

    def __init__(self, client: AsyncConnections) -> None:
        self._client = client

    async def all(self) -> list[GroupSummary]:
        """List all groups with their lag. Example: `await client.groups.all()`"""
        return await self._client.run(group_requests.groups())

    async def info(self, group: str) -> GroupInfo:
        """Describe one group. Raises GroupNotFoundError.

        Example: `(await client.groups.info("billing")).lag`
        """
        return await self._client.run(group_requests.info(group))

    async def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit that a group has consumed a queue below `offset`, without being a member.

        Raises StaleOffsetError when the offset is below the committed one, OffsetOverflowError beyond the queue's end,
        GroupInUseError when a member has the queue. Example: `await client.groups.commit("audit", "orders", 0, 1)`
        """
        await self._client.run(group_requests.commit(group, topic, queue_id, offset))

    async def plan_reset(
        self, group: str, to: ResetTo, topics: str | Sequence[str] = (), queues: Sequence[int] = ()
    ) -> list[Move]:
        """Compute the moves of a reset, of all the group's topics or of these. Changes nothing.

        Raises GroupNotFoundError, TopicNotFoundError, NoSuchQueueError.
        Example: `await client.groups.plan_reset("billing", ResetTo(shift=-10), "orders")`
        """
        steps = group_requests.plan_reset(group, to, named(topics), tuple(each_of("queues", queues)))
        return await run_steps(self._client.run, steps)

    async def plan_clone(self, source: str, target: str, topics: str | Sequence[str] = ()) -> list[Move]:
        """Compute the moves that give `target` the progress of `source`. Changes nothing.

        Raises GroupNotFoundError, TopicNotFoundError. Example: `await client.groups.plan_clone("billing", "audit")`
        """
        return await run_steps(self._client.run, group_requests.plan_clone(source, target, named(topics)))

    async def execute(self, group: str, moves: Sequence[Move]) -> None:
        """Apply planned moves durably, all or nothing; members continue from there.

        Example:
            moves = await client.groups.plan_reset("billing", ResetTo(earliest=True))
            await client.groups.execute("billing", moves)
        """
        await run_steps(self._client.run, group_requests.execute(group, moves))

    async def change(
        self,
        group: str,
        *,
        retry_max_times: int | None = None,
        retry_queue_nums: int | None = None,
        enabled: bool | None = None,
    ) -> None:
        """Create a group, or change its settings.

        With `enabled=False` the members lose their queues as soon as no message of them is in progress, and no consumer
        joins or receives until the group is enabled again.
        Example: `await client.groups.change("billing", retry_max_times=5)`
        """
        await self._client.run(group_requests.change(group, retry_max_times, retry_queue_nums, enabled))

    async def delete(self, group: str) -> None:
        """Delete a group with its progress, settings, receipts and retry topics.

        Dead letters stay. Raises GroupInUseError while the group has members, GroupNotFoundError when it does not
        exist; topics that an earlier, interrupted deletion left are deleted in that case as well.
        Example: `await client.groups.delete("old")`
        """
        await run_steps(self._client.run, group_requests.delete_steps(group))

    async def dead_letters(self, group: str) -> AsyncIterator[StoredMessage]:
        """Iterate over the group's dead letters, oldest first.

        Example:
            async for message in client.groups.dead_letters("billing"):
                print(message.body)
        """
        topic, max_bytes = dead_letter_topic(group), min(PULL_BYTES, self._client.pull_bytes_max)
        for queue in await self._client.run(requests.queues(topic)):
            at = queue.min_offset
            while at < queue.max_offset:
                request = requests.pull_request(topic, queue.queue_id, at, PULL_MESSAGES, max_bytes)
                found = await self._client.run(requests.pull(request, self._client.pull_bytes_max))
                for message in found.messages:
                    yield message
                if found.next_offset <= at:
                    break
                at = found.next_offset

    async def resend(self, group: str, *messages: StoredMessage) -> int:
        """Deliver dead letters to their group again; returns how many were sent.

        They stay in the dead-letter topic. Raises BadRequestError for other messages, SendOutcomeUnknownError.

        Example:
            letters = [message async for message in client.groups.dead_letters("billing")]
            await client.groups.resend("billing", *letters)
        """
        calls = group_requests.resends(group, messages)
        return sum([await self._client.run(call) for call in calls])
