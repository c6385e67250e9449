"""In-process redelivery for messages that the store cannot accept for a retry.

It keeps the state of a handler's run for the threads and the tasks that run handlers.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from mqproc.errors import BadRequestError, DiskFullError, TooManyQueuesError
from mqproc.types import StoredMessage

ORDERED_MESSAGES: Final = 64
"""Messages that a run with order receives at a time."""
IDLE_S: Final = 1.0
BUSY_S: Final = 0.01
STOP_CHECK_S: Final = 0.1
"""Interval at which a pause checks whether the run is over."""

NO_ROOM: Final = DiskFullError, TooManyQueuesError
"""Errors of a nack that persist until an operator makes room."""
AGAIN_S: Final = 5.0
"""Pause before a message is handled here again."""
WAITING_MAX: Final = 1024
WAITING_BYTES_MAX: Final = 64 << 20
_log = logging.getLogger("mqproc.consumer")

H = TypeVar("H", bound=Callable[[StoredMessage], object])
S = TypeVar("S")


def check_handler(handler: H) -> H:
    """Raise BadRequestError unless `handler` can be called."""
    if not callable(handler):
        raise BadRequestError(f"handler = {handler!r} cannot be called: give a function of one message")
    return handler


def check_stop(stop: S, *, awaited: bool) -> S:
    """Raise BadRequestError unless `stop` is an Event of asyncio (`awaited`) or of threading."""
    if not hasattr(stop, "is_set") or inspect.iscoroutinefunction(getattr(stop, "wait", None)) is not awaited:
        raise BadRequestError(f"stop = {repr(stop)[:64]} is no {'asyncio' if awaited else 'threading'}.Event")
    return stop


def queue_of(message: StoredMessage) -> tuple[str, int]:
    """The queue within which a run with order handles messages one after the other."""
    return message.stored_topic, message.queue_id


class _Holder(Protocol):
    """A consumer, sync or async."""

    def holds(self, message: StoredMessage) -> bool: ...

    def take_back(self, messages: Sequence[StoredMessage]) -> None: ...


class _Stop(Protocol):
    """An Event of threading or asyncio."""

    def is_set(self) -> bool: ...


class HandlerRun:
    """Messages of one run: which are still handled, and which are given back to the consumer."""

    def __init__(self, consumer: _Holder, stop: _Stop, *, in_order: bool) -> None:
        self.consumer = consumer
        self._stop = stop
        self._in_order = in_order
        self._left: list[StoredMessage] = []
        self._latest: dict[tuple[str, int], dict[int, StoredMessage]] = {}
        """In order only: last messages of each queue, by `id`; a redelivered one is a new object."""
        self.broken = False
        """An error was raised, or the run is cancelled: no further message is handled."""

    def begin(self, messages: list[StoredMessage]) -> None:
        """Accept the next messages of one queue; in order only.

        Messages received from it before are not handled any more, except for the current message: the queue was reset,
        or lost and assigned again.
        """
        self._latest[queue_of(messages[0])] = {id(message): message for message in messages}

    def is_latest(self, message: StoredMessage) -> bool:
        """Whether a message was not received again."""
        return not self._in_order or id(message) in self._latest[queue_of(message)]

    def continues(self, message: StoredMessage) -> bool:
        """Whether a message is to be handled.

        In order only: not if its queue belongs, or will belong, to another member, which handles the message and all
        later messages once they are given back here.
        """
        if self.broken or self._stop.is_set():
            return False
        return not self._in_order or (self.is_latest(message) and self.consumer.holds(message))

    def leave(self, messages: list[StoredMessage]) -> None:
        """Redeliver messages: at once with order, otherwise at the end of the run."""
        if self._in_order:
            self.consumer.take_back([message for message in messages if self.is_latest(message)])
        else:
            self._left += messages

    def give_back(self) -> None:
        """End the run."""
        self.consumer.take_back(self._left)


def log_refused(message: StoredMessage, error: Exception) -> None:
    """Log why a message is handled here again."""
    text = "message %s of %s cannot be stored for a retry, and is handled here again in %g s: %s"
    _log.warning(text, message.message_id, message.topic, AGAIN_S, error)


class LocalRedelivery:
    """Failed messages of one run that wait to be handled again, in order of their times.

    Workers put them.
    """

    def __init__(self, run: HandlerRun) -> None:
        self._run = run
        self._waiting: deque[tuple[float, StoredMessage]] = deque()
        self._others_first = False

    @property
    def is_full(self) -> bool:
        """Whether the run must stop receiving, since later messages would be redelivered."""
        waiting = tuple(self._waiting)
        return len(waiting) >= WAITING_MAX or sum(len(message.body) for _, message in waiting) >= WAITING_BYTES_MAX

    def put(self, message: StoredMessage, error: Exception) -> None:
        """Add a message that the store refused with `error`."""
        log_refused(message, error)
        self._waiting.append((time.monotonic() + AGAIN_S, message))

    def due(self) -> StoredMessage | None:
        """The next message whose time has come.

        After each such message the run receives new messages once, so that repeated failures do not block them.
        """
        others_first, self._others_first = self._others_first, False
        while not others_first and self.left_s(1.0) <= 0:
            _, message = self._waiting.popleft()
            if self._run.consumer.holds(message):
                self._others_first = True
                return message
            # Its queue was reset or now belongs to another member, which gets the message.
            self._run.consumer.take_back([message])
        return None

    def left_s(self, at_most_s: float) -> float:
        """Seconds until the next message is due."""
        return min(at_most_s, max(0.0, self._waiting[0][0] - time.monotonic())) if self._waiting else at_most_s

    def leave(self) -> None:
        """End the run: the messages are redelivered."""
        self._run.leave([message for _, message in self._waiting])
