"""Background tasks of a client object for asyncio, its consumer's fetcher, argument copies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from mqproc.client.codecs import own_value
from mqproc.client.columns import as_bytes
from mqproc.client.encoding import snapshot
from mqproc.client.retry import ConnectionLost, OutageLog
from mqproc.errors import BadMessageError, BadRequestError, FrameTooLargeError, MqprocError
from mqproc.types import Message

if TYPE_CHECKING:
    from mqproc.client._async.connection import AsyncConnections
    from mqproc.client.requests import Call

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Done = Callable[[Any, MqprocError | ConnectionLost | None], None]
_log = logging.getLogger("mqproc.consumer")
# Types of arguments that need no copy.
_UNCHANGING: Final = frozenset({bytes, str, int, float, bool, type(None)})
_NO_COPY: Final = (str, bytes, np.generic)


async def end_task(task: asyncio.Task[Any], timeout_s: float) -> None:
    """Cancel a task and wait at most `timeout_s` for its end. Raises the task's own exception.

    Awaiting the task itself would confuse the cancellation of the caller and of the task.
    """
    task.cancel()
    await asyncio.wait([task], timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.result()


def is_cancelled() -> bool:
    """Whether the current task, rather than an object that it awaits, is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ContinuedIterator(AsyncIterator[T]):
    """Iterates by a generator; replaces one that a cancelled `anext` has ended."""

    def __init__(self, begin: Callable[[], AsyncIterator[T]]) -> None:
        self._begin = begin
        self._generator: AsyncIterator[T] | None = None

    async def __anext__(self) -> T:
        if self._generator is None:
            self._generator = self._begin()
        try:
            return await anext(self._generator)
        except asyncio.CancelledError:
            self._generator = None
            raise

    async def aclose(self) -> None:
        """End the iteration, as of a generator."""
        if isinstance(self._generator, AsyncGenerator):
            await self._generator.aclose()


def continued(generator: Callable[P, AsyncIterator[T]]) -> Callable[P, ContinuedIterator[T]]:
    """Decorate a method whose new generator continues where a cancelled one ended."""

    @functools.wraps(generator)
    def begin(*arguments: P.args, **named: P.kwargs) -> ContinuedIterator[T]:
        return ContinuedIterator(functools.partial(generator, *arguments, **named))

    return begin


def own_argument(value: Any) -> Any:
    """A copy of an argument of a send that later changes by the caller do not affect.

    Values of unknown types are left to the checks.
    """
    if type(value) in _UNCHANGING or isinstance(value, _NO_COPY):
        return value
    if isinstance(value, Message):
        try:
            return snapshot(value)
        except (AttributeError, TypeError, ValueError):
            return value  # The check refuses it.
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple) and set(map(type, value)) <= _UNCHANGING:
        return list(value)
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return list(map(own_argument, value)) if isinstance(value, Sequence) else value
    try:
        return memoryview(view.tobytes()).cast(view.format, view.shape)  # type: ignore[call-overload]
    except (TypeError, ValueError):  # An empty one, or items that `cast` does not know.
        pass
    try:
        return as_bytes(value)
    except BadMessageError:
        return value  # The check refuses it.


def _own_encodable(value: Any) -> Any:
    """As `own_argument`, of a client with a codec: a value that it encodes may be of any type."""
    owned = own_argument(value)
    if isinstance(owned, Message):
        return own_value(owned)
    is_value = owned is value or isinstance(value, Mapping | list | tuple)
    return own_value(value) if is_value and not isinstance(value, np.ndarray) else owned


def with_own_arguments(
    send: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Decorate a coroutine method to copy its arguments at the call.

    The coroutine may run later, when the caller has changed them.
    """

    @functools.wraps(send)
    def begin(sender: S, /, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        own = own_argument if getattr(sender, "_codec", None) is None else _own_encodable
        return send(sender, *map(own, arguments), **{name: own(value) for name, value in named.items()})

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(begin)
    return begin


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
        self._outage = OutageLog(_log, f"fetching by {name}", client.retry)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def check_owner(self) -> None:
        """Raise BadRequestError in another event loop, also that of a forked process.

        Such a copy has the queues in memory without a membership: it would handle the same messages twice.
        """
        if self._loop is not asyncio.get_running_loop():
            raise BadRequestError("this consumer belongs to another event loop: make one in each")

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
