"""A consumer's membership of its group for asyncio: a task that joins, says that the consumer lives, takes queues."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqproc.client import tasks
from mqproc.client.core import QUERY, Call
from mqproc.client.membership import FINAL, Member, joins_again
from mqproc.client.retry import ConnectionLost
from mqproc.client.subscription import Subscription
from mqproc.errors import MqprocError
from mqproc.wire.group_operations import GroupAssignment

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.aio_lines import Line


class AsyncMembership(Member):
    """As `Membership`, with a task in the place of the thread."""

    def __init__(
        self,
        client: AsyncClient,
        subscription: Subscription,
        holding: Callable[[], list[tuple[str, int, int]]],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[MqprocError], None],
    ) -> None:
        super().__init__(subscription, holding, on_assignment, on_end)
        self._client = client
        self._line: Line | None = None
        self._task: asyncio.Task[None] | None = None

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

    async def leave(self, *, told: bool = True) -> None:
        """Stop being a member, and end the task. The group is `told`, unless nobody is there."""
        try:
            if self._task is not None:
                await tasks.end(self._task, self._client.timeout_s)
            if self._member_id and told:
                # The end of the connection would say it too.
                with contextlib.suppress(MqprocError):
                    await self._client.run(self._leaving())
        finally:
            self._let_go()

    async def _run(self) -> None:
        outage = self._outage(self._client.retry)
        while True:
            try:
                await (self._ask(self._line, self._beating()) if self._line is not None else self._join())
                outage.over()
                continue
            except FINAL as error:
                self._on_end(error)
                return
            except (MqprocError, ConnectionLost) as error:
                pause_s = outage.failed(error)
            self._let_go()
            await asyncio.sleep(pause_s)

    async def _join(self) -> None:
        if self._line is None:
            self._line = self._client.new_line(QUERY)
        try:
            await self._ask(self._line, self._joining())
        except BaseException:
            self._let_go()
            raise

    async def _ask(self, line: Line, call: Call[GroupAssignment]) -> None:
        self._take(await line.ask(call, self._client.timeout_s + call.wait_s))

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
