"""Background tasks of an asyncio client object, and the fetcher of its consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from mqproc.client.retry import ConnectionLost, OutageLog
from mqproc.errors import BadRequestError, FrameTooLargeError, MqprocError

if TYPE_CHECKING:
    from mqproc.client._async.connection import AsyncConnections
    from mqproc.client.requests import Call

_NO_TURN: Final = contextlib.nullcontext(True)
Done = Callable[[Any, MqprocError | ConnectionLost | None], None]


async def end_task(task: asyncio.Task[Any], timeout_s: float) -> None:
    """Cancel a task and wait at most `timeout_s` for its end. Raises the task's own exception.

    Awaiting the task itself would confuse a cancellation of the caller with that of the task.
    """
    task.cancel()
    await asyncio.wait([task], timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.result()


def is_cancelled() -> bool:
    """Whether the current task, rather than an object that it awaits, is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncBackground:
    """A task that works for one object until it is stopped."""

    stopping = False
    """A stopped task is cancelled, so it never needs to ask."""

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.get_running_loop().create_task(self._work(), name=self._name)

    async def pause(self, seconds: float) -> None:
        """Sleep, in the task."""
        await asyncio.sleep(seconds)

    async def stop(self, timeout_s: float) -> None:
        """Cancel the task and wait at most `timeout_s` for its end. Raises the task's exception."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task, timeout_s)


class AsyncFetcher:
    """Calls of a consumer that run without being waited for: pulls and commits."""

    is_waited_for = True
    """Whether a task may wait for `wake`."""
    usable = True
    """Whether calls may start now: each call waits for its own retries."""

    def __init__(self, client: AsyncConnections, name: str) -> None:
        """`name` identifies the consumer in the log."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._outage = OutageLog("mqproc.consumer", f"fetching by {name}", client.retry)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def check_owner(self) -> None:
        """Raise BadRequestError in another event loop, also that of a forked process.

        Such a copy has the queues in memory without a membership: it would handle the same messages twice.
        """
        if self._loop is not asyncio.get_running_loop():
            raise BadRequestError("this consumer belongs to another event loop: make one in each")

    def in_turn(self, _timeout_s: float = -1) -> AbstractContextManager[bool]:
        """Tasks need no turns."""
        return _NO_TURN

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task that `close` cancels."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def start(self, call: Call[Any], done: Done) -> None:
        """Make a call; `done` gets its value or its error."""
        self.spawn(self._run(call, done))

    async def _run(self, call: Call[Any], done: Done) -> None:
        try:
            value = await self._client.run(call, self._outage.failed)
        except (BadRequestError, FrameTooLargeError) as error:
            done(None, error)
        except MqprocError as error:
            await asyncio.sleep(self._client.retry.pause_s(0, error.hint_ms))
            done(None, error)
        else:
            self._outage.over()
            done(value, None)
        self._changed.set()

    def poll(self) -> None:
        """Begin a new wait: only a `wake` from now on ends it."""
        self._changed.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for an outcome, a `wake` or the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def wake(self) -> None:
        """End a `wait`."""
        self._changed.set()

    async def close(self) -> None:
        """Cancel the calls in flight."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
