"""Handlers: a consumer's messages given to a function, by several threads at once or strictly in order by queue."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from mqproc.client.amounts import at_least_one, not_below_zero
from mqproc.client.aside import AGAIN_S, NO_ROOM, Aside, tell_refused
from mqproc.client.threads import program_ends
from mqproc.errors import BadRequestError, MessageNotFoundError
from mqproc.message import StoredMessage

if TYPE_CHECKING:
    from mqproc.client.consumer import Consumer

Handler = Callable[[StoredMessage], object]
MESSAGES_AT_ONCE: Final = 64
IDLE_S: Final = 1.0
BUSY_S: Final = 0.01
LOOK_S: Final = 0.1
"""How often who pauses looks whether the run is over."""
_log = logging.getLogger("mqproc.consumer")


H = TypeVar("H", bound=Callable[[StoredMessage], object])
S = TypeVar("S")


def check_handler(handler: H) -> H:
    """Raise BadRequestError for what cannot be called: each message would fail, and be a dead letter in the end."""
    if not callable(handler):
        raise BadRequestError(f"handler = {handler!r} cannot be called: give a function of one message")
    return handler


def check_stop(stop: S, *, awaited: bool) -> S:
    """Raise BadRequestError for what is no event: one of threads, where it is awaited, would hold up the event loop."""
    if not hasattr(stop, "is_set") or inspect.iscoroutinefunction(getattr(stop, "wait", None)) is not awaited:
        raise BadRequestError(f"stop = {repr(stop)[:64]} is no {'asyncio' if awaited else 'threading'}.Event")
    return stop


def queue_of(message: StoredMessage) -> tuple[str, int]:
    """What an ordered run handles one after the other."""
    return message.topic, message.queue_id


class _Holder(Protocol):
    """A consumer, sync or async."""

    def holds(self, message: StoredMessage) -> bool: ...

    def take_back(self, messages: Sequence[StoredMessage]) -> None: ...


class _Stop(Protocol):
    """An Event of threads or of tasks."""

    def is_set(self) -> bool: ...


class Rest:
    """What one run still handles of what it has received, and what becomes of the rest; for threads and tasks alike."""

    def __init__(self, consumer: _Holder, stop: _Stop, *, in_order: bool) -> None:
        self._consumer = consumer
        self._stop = stop
        self._in_order = in_order
        self._left: list[StoredMessage] = []
        self._latest: dict[tuple[str, int], dict[int, StoredMessage]] = {}
        """In order: what was received last of each queue, by `id`; received again, a message is another object."""
        self.broken = False
        """Something was raised, or the run is cancelled: what is handled now is the last."""

    def begin(self, messages: list[StoredMessage]) -> None:
        """In order: messages of one queue are to be handled from now on. What was received of it before is not, but for
        the one that is being handled: the queue was reset, or lost and got again, and begins anew."""
        self._latest[queue_of(messages[0])] = {id(message): message for message in messages}

    def is_latest(self, message: StoredMessage) -> bool:
        """Whether it has not been received once more."""
        return not self._in_order or id(message) in self._latest[queue_of(message)]

    def goes_on(self, message: StoredMessage) -> bool:
        """Whether a message is to be handled. In order it is not when its queue shall be, or is, another member's:
        that one handles it, and everything behind it, as soon as it is given back here."""
        if self.broken or self._stop.is_set():
            return False
        return not self._in_order or (self.is_latest(message) and self._consumer.holds(message))

    def is_held(self, message: StoredMessage) -> bool:
        """Whether a message's queue is this consumer's still, in whatever order it is handled."""
        return self._consumer.holds(message)

    def take_back(self, message: StoredMessage) -> None:
        """A message comes again at once, and what was received behind it."""
        self._consumer.take_back([message])

    def leave(self, messages: list[StoredMessage]) -> None:
        """Messages come again: at once where nobody else handles any of their queue, else at the end of the run."""
        if self._in_order:
            self._consumer.take_back([message for message in messages if self.is_latest(message)])
        else:
            self._left += messages

    def give_back(self) -> None:
        """The run is over."""
        self._consumer.take_back(self._left)


class _Here:
    """What stands for a pool where Python has none any more: the thread that asks does the work."""

    def submit(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        future: Future[None] = Future()
        try:
            work(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future


class Handling:
    """One run of a handler."""

    def __init__(
        self,
        consumer: Consumer,
        handler: Handler,
        workers: int,
        tries_in_order: int | None,
        stop: threading.Event,
        pause_s: float,
    ) -> None:
        """`tries_in_order`: after how many failures a message is a dead letter; None when order does not matter."""
        self._consumer = consumer
        self._handler = check_handler(handler)
        self._workers = at_least_one("workers", workers)
        self._tries_in_order = tries_in_order
        self._stop = check_stop(stop, awaited=False)
        self._pause_s = not_below_zero("pause_s", pause_s)
        self._rest = Rest(consumer, stop, in_order=tries_in_order is not None)
        self._aside = Aside(self._rest)
        self._latest: dict[tuple[str, int], Future[None]] = {}
        """In order: what handles each queue."""
        self._is_alone = False

    def run(self) -> None:
        """Until the stop. What the consumer raises, and what acknowledging raises, is raised here.

        What is being handled then is handled to its end; all else that was received comes again.
        """
        under_way: set[Future[None]] = set()
        try:
            with ThreadPoolExecutor(self._workers, thread_name_prefix="mqproc-handler") as pool:
                try:
                    self._go_on(pool, under_way)
                except BaseException:
                    self._rest.broken = True
                    raise
            _raised(under_way)
        finally:
            self._aside.leave()
            self._rest.give_back()

    def _go_on(self, pool: ThreadPoolExecutor, under_way: set[Future[None]]) -> None:
        while not (self._stop.is_set() or self._rest.broken):
            if len(under_way) >= 2 * self._workers:
                wait(under_way, IDLE_S, FIRST_COMPLETED)
            under_way -= _raised(under_way)
            if len(under_way) < 2 * self._workers:
                timeout_s = BUSY_S if under_way else IDLE_S
                under_way.update(self._begun(pool, self._receive(timeout_s)))

    def _begun(self, pool: ThreadPoolExecutor, runs: Sequence[list[StoredMessage]]) -> Iterator[Future[None]]:
        """What the pool takes: nothing more when the program's main thread has ended. That is a stop for a daemon
        thread; another one, for which the program waits, goes on without a pool."""
        for messages in runs:
            try:
                future = self._submitted(pool, messages)
            except RuntimeError as error:
                if not program_ends(error):
                    raise
                if threading.current_thread().daemon:
                    self._rest.leave(messages)
                    self._rest.broken = True
                    continue
                self._tell_alone()
                future = self._submitted(_Here(), messages)
                # Before the rest of these runs: nobody looks at the future until they are through.
                self._rest.broken = self._rest.broken or future.exception() is not None
            yield future

    def _tell_alone(self) -> None:
        if not self._is_alone:
            self._is_alone = True
            _log.warning("the program's main thread has ended: messages are handled one by one from now on")

    def _submitted(self, pool: ThreadPoolExecutor | _Here, messages: list[StoredMessage]) -> Future[None]:
        if self._tries_in_order is None:
            return pool.submit(self._each, messages)
        self._rest.begin(messages)
        queue = queue_of(messages[0])
        future = self._latest[queue] = pool.submit(self._each_behind, self._latest.get(queue), messages)
        return future

    def _receive(self, timeout_s: float) -> list[list[StoredMessage]]:
        """Messages by what is handled one after the other."""
        if (again := self._aside.due()) is not None:
            return [[again]]
        timeout_s = self._aside.left_s(timeout_s)
        if self._aside.is_full:
            self._consumer.check()
            self._stop.wait(min(timeout_s, LOOK_S))
            return []
        if self._tries_in_order is None:
            return [[message] for message in self._consumer.receive(2 * self._workers, timeout_s)]
        queues: dict[tuple[str, int], list[StoredMessage]] = {}
        for message in self._consumer.receive(MESSAGES_AT_ONCE, timeout_s, ordered=True):
            queues.setdefault(queue_of(message), []).append(message)
        return list(queues.values())

    def _each_behind(self, before: Future[None] | None, messages: list[StoredMessage]) -> None:
        """When `before` has ended, which the pool has begun already."""
        if before is not None:
            wait([before])
        self._each(messages)

    def _each(self, messages: list[StoredMessage]) -> None:
        done = 0
        try:
            while done < len(messages) and self._rest.goes_on(messages[done]) and self._settled(messages[done]):
                done += 1
        finally:
            self._rest.leave(messages[done:])

    def _settled(self, message: StoredMessage) -> bool:
        """Handled, or left to come again later; False when it is not to be handled here any more."""
        failures = 0
        while not self._handled(message):
            failures += 1
            pause_s = self._pause_s
            if self._tries_in_order is None or failures > self._tries_in_order:
                if self._rest.is_latest(message) and self._again_later(message):
                    return True
                pause_s = AGAIN_S
            if not self._goes_on_after(message, pause_s):
                return False
        return True

    def _goes_on_after(self, message: StoredMessage, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._rest.goes_on(message) and (left_s := end - time.monotonic()) > 0:
            self._stop.wait(min(left_s, LOOK_S))
        return self._rest.goes_on(message)

    def _again_later(self, message: StoredMessage) -> bool:
        """False without room for it, in order: nothing behind it is handled meanwhile.

        A message that is gone would come again for ever, and hold up those behind it: it is done.
        """
        if self._consumer.is_broadcast:
            _log.error("message %s of %s is passed over: it was broadcast", message.message_id, message.topic)
            self._consumer.ack(message)
            return True
        try:
            self._consumer.nack(message, delay_level=0 if self._tries_in_order is None else -1)
        except MessageNotFoundError as error:
            _log.error("message %s of %s is passed over: %s", message.message_id, message.topic, error)
            self._consumer.ack(message)
        except NO_ROOM as error:
            if self._tries_in_order is not None:
                tell_refused(message, error)
                return False
            self._aside.put(message, error)
        return True

    def _handled(self, message: StoredMessage) -> bool:
        try:
            given = self._handler(message)
        except Exception:
            _log.warning("handling message %s of %s failed", message.message_id, message.topic, exc_info=True)
            return False
        if given is not None and inspect.isawaitable(given):
            raise _never_awaited(given, self._handler)
        if self._rest.is_latest(message):
            self._consumer.ack(message)
        return True


def _never_awaited(given: object, handler: Handler) -> BadRequestError:
    """What is said of a handler that has not handled its message."""
    if inspect.iscoroutine(given):
        given.close()
    return BadRequestError(f"handler {handler!r} is to be awaited, which AsyncClient's consumers do: give a function")


def _raised(under_way: set[Future[None]]) -> set[Future[None]]:
    """Those that are through; raises the error of one that failed."""
    through = {future for future in under_way if future.done()}
    for future in through:
        future.result()
    return through
