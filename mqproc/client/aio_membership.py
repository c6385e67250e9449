"""A consumer's membership of its group for asyncio: a task that joins, says that the consumer lives, takes queues."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mqproc.client import group_calls
from mqproc.client.core import QUERY, Call
from mqproc.client.membership import FINAL, joins_again
from mqproc.client.retry import ConnectionLost
from mqproc.client.subscription import Subscription
from mqproc.errors import MqprocError, RequestTimeoutError
from mqproc.wire.group_operations import GroupAssignment

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.aio_lines import Line

T = TypeVar("T")


class AsyncMembership:
    """As `Membership`, with a task in the place of the thread."""

    def __init__(
        self,
        client: AsyncClient,
        subscription: Subscription,
        holding: Callable[[], list[tuple[str, int, int]]],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[MqprocError], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._holding = holding
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._line: Line | None = None
        self._member_id = ""
        self._generation = -1
        self._heartbeat_s = 1.0
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.valid_until = 0.0
        """Until then, by the monotonic clock, the server surely counts this consumer as a member."""

    async def start(self) -> None:
        """Join, and go on in a task. Raises what the join was refused with."""
        deadline = time.monotonic() + self._client.timeout_s
        failures = 0
        while True:
            try:
                await self._join()
                break
            except (MqprocError, ConnectionLost) as error:
                failures += 1
                pause_s = joins_again(error, self._client.retry, failures, deadline)
            await asyncio.sleep(pause_s)
        self._task = asyncio.ensure_future(self._run())

    async def leave(self) -> None:
        """Stop being a member, and end the task."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._member_id:
            # The end of the connection would say it too.
            with contextlib.suppress(MqprocError):
                await self._client.run(group_calls.leave(self._subscription.group, self._member_id))
        self._let_go()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await (self._beat() if self._line is not None else self._join())
                failures = 0
                continue
            except FINAL as error:
                self._on_end(error)
                return
            except (MqprocError, ConnectionLost) as error:
                hint_ms = error.hint_ms if isinstance(error, MqprocError) else 0
            self._let_go()
            await asyncio.sleep(self._client.retry.pause_s(failures, hint_ms))
            failures += 1

    async def _join(self) -> None:
        if self._line is None:
            self._line = self._client.new_line(QUERY)
        try:
            self._take(await self._run_call(self._subscription.join(self._member_id, self._holding())))
        except BaseException:
            self._let_go()
            raise

    async def _beat(self) -> None:
        call = group_calls.heartbeat(self._subscription.group, self._member_id, self._generation, self._heartbeat_s)
        self._take(await self._run_call(call))

    def _take(self, answer: GroupAssignment) -> None:
        self._member_id = answer.member_id
        self._generation = answer.generation
        if answer.heartbeat_ms:
            self._heartbeat_s = answer.heartbeat_ms / 1000
        if answer.changed:
            self._on_assignment(answer)
        # What was taken away is not handed out any more, so the rest may be.
        self.valid_until = self._asked_at + self._subscription.session_timeout_ms / 1000

    async def _run_call(self, call: Call[T]) -> T:
        line = self._line
        assert line is not None
        self._asked_at = time.monotonic()
        _, future = line.submit(call)
        assert future is not None
        try:
            async with asyncio.timeout(self._client.timeout_s + call.wait_s):
                outcome = await future
        except TimeoutError:
            raise RequestTimeoutError("no answer in time") from None
        if outcome.error is not None:
            raise outcome.error
        value: Any = outcome.value
        found: T = value
        return found

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
