"""Tasks that run a handler, several at a time."""

from __future__ import annotations

import asyncio

from mqproc.client._async.handling import AsyncHandling
from mqproc.client.local_redelivery import BUSY_S, IDLE_S, queue_of
from mqproc.types import StoredMessage


class HandlerTasks(AsyncHandling):
    """A run of a handler by up to `workers` tasks."""

    async def run(self) -> None:
        """Run until the stop. Raises errors of the consumer and of acknowledging.

        Handlers that run then finish; all other received messages are redelivered.
        """
        in_flight: set[asyncio.Task[None]] = set()
        try:
            await self._start_tasks(in_flight)
        except BaseException:
            self._state.broken = True
            raise
        finally:
            try:
                await asyncio.gather(*in_flight, return_exceptions=True)
            finally:
                # A second cancellation cancels the handlers: their messages are redelivered all the same.
                self._redelivery.leave()
                self._state.give_back()
        _raise_errors(in_flight)

    async def _start_tasks(self, in_flight: set[asyncio.Task[None]]) -> None:
        latest: dict[tuple[str, int], asyncio.Task[None]] = {}  # by queue, with order
        while not self._stop.is_set():
            if len(in_flight) >= self._workers:
                await asyncio.wait(in_flight, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            in_flight -= _raise_errors(in_flight)
            room = self._workers - len(in_flight)
            if room <= 0:
                continue
            for messages in await self._receive(room, BUSY_S if in_flight else IDLE_S):
                if self._tries_in_order is None:
                    in_flight.add(asyncio.ensure_future(self._handle_each(messages)))
                    continue
                self._state.begin(messages)
                queue = queue_of(messages[0])
                task = asyncio.ensure_future(self._handle_each_after(latest.get(queue), messages))
                latest[queue] = task
                in_flight.add(task)

    async def _handle_each_after(self, before: asyncio.Task[None] | None, messages: list[StoredMessage]) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
        except BaseException:
            self._state.leave(messages)
            raise
        await self._handle_each(messages)


def _raise_errors(in_flight: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The finished tasks; raises the error of one that failed."""
    finished = {task for task in in_flight if task.done()}
    for task in finished:
        task.result()
    return finished
