# Generated from mqproc/client/_async/handling.py by tests/client/generate_sync.py: do not edit.
"""Handling of messages by a function: retries, redelivery, order within a queue."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mqproc.client.local_redelivery import (
    AGAIN_S,
    NO_ROOM,
    ORDERED_MESSAGES,
    STOP_CHECK_S,
    HandlerRun,
    LocalRedelivery,
    check_handler,
    check_stop,
    log_refused,
    queue_of,
)
from mqproc.errors import BadRequestError, MessageNotFoundError
from mqproc.types import StoredMessage
from mqproc.util.arguments import at_least_one, not_below_zero

_WRONG_HANDLER = "handler {!r} returned an awaitable, for consumers of AsyncClient: give a function"
Handler = Callable[[StoredMessage], object]
_log = logging.getLogger("mqproc.consumer")


class _Consumer(Protocol):
    @property
    def is_broadcast(self) -> bool: ...

    def check(self) -> None: ...

    def holds(self, message: StoredMessage) -> bool: ...

    def take_back(self, messages: Sequence[StoredMessage]) -> None: ...

    def receive(self, max_messages: int, timeout: float, *, ordered: bool = False) -> list[StoredMessage]: ...

    def ack(self, *messages: StoredMessage) -> None: ...

    def nack(self, *messages: StoredMessage, delay_level: int = 0) -> None: ...


class Handling:
    """One run of a handler. A subclass runs the workers."""

    def __init__(
        self,
        consumer: _Consumer,
        handler: Handler,
        workers: int,
        tries_in_order: int | None,
        stop: threading.Event,
        pause_s: float,
    ) -> None:
        """`tries_in_order`: failures before a message is a dead letter; None without order."""
        self._consumer = consumer
        self._handler = check_handler(handler)
        self._workers = at_least_one("workers", workers)
        self._tries_in_order = tries_in_order
        self._stop = check_stop(stop, awaited=False)
        self._pause_s = not_below_zero("pause_s", pause_s)
        self._state = HandlerRun(consumer, stop, in_order=tries_in_order is not None)
        self._redelivery = LocalRedelivery(self._state)

    def _receive(self, most: int, timeout_s: float) -> list[list[StoredMessage]]:
        """Receive messages, in lists that are handled one message after the other."""
        if (again := self._redelivery.due()) is not None:
            return [[again]]
        timeout_s = self._redelivery.left_s(timeout_s)
        if self._redelivery.is_full:
            self._consumer.check()
            self._pause(min(timeout_s, STOP_CHECK_S))
            return []
        if self._tries_in_order is None:
            return [[message] for message in self._consumer.receive(most, timeout_s)]
        queues: dict[tuple[str, int], list[StoredMessage]] = {}
        for message in self._consumer.receive(ORDERED_MESSAGES, timeout_s, ordered=True):
            queues.setdefault(queue_of(message), []).append(message)
        return list(queues.values())

    def _handle_each(self, messages: list[StoredMessage]) -> None:
        done = 0
        try:
            while done < len(messages) and self._state.continues(messages[done]) and self._finish(messages[done]):
                done += 1
        finally:
            self._state.leave(messages[done:])

    def _finish(self, message: StoredMessage) -> bool:
        """Handle a message or have it redelivered; False when the run must not handle it."""
        failures = 0
        while not self._handle(message):
            failures += 1
            pause_s = self._pause_s
            if self._tries_in_order is None or failures > self._tries_in_order:
                if self._state.is_latest(message) and self._redeliver_later(message):
                    return True
                pause_s = AGAIN_S
            if not self._continues_after(message, pause_s):
                return False
        return True

    def _handle(self, message: StoredMessage) -> bool:
        try:
            result = self._handler(message)
        except Exception:
            _log.warning("handling message %s of %s failed", message.message_id, message.topic, exc_info=True)
            return False
        if result is not None and inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise BadRequestError(_WRONG_HANDLER.format(self._handler))
        if self._state.is_latest(message):
            self._consumer.ack(message)
        return True

    def _redeliver_later(self, message: StoredMessage) -> bool:
        """Nack a message; False, with order, when the store has no room for it.

        A message that is gone counts as done: it would be redelivered for ever and hold up later ones.
        """
        if self._consumer.is_broadcast:
            _log.error("message %s of %s is skipped: broadcast has no redelivery", message.message_id, message.topic)
            self._consumer.ack(message)
            return True
        try:
            self._consumer.nack(message, delay_level=0 if self._tries_in_order is None else -1)
        except MessageNotFoundError as error:
            _log.error("message %s of %s is skipped: %s", message.message_id, message.topic, error)
            self._consumer.ack(message)
        except NO_ROOM as error:
            if self._tries_in_order is not None:
                log_refused(message, error)
                return False
            self._redelivery.put(message, error)
        return True

    def _continues_after(self, message: StoredMessage, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._state.continues(message) and (left_s := end - time.monotonic()) > 0:
            self._pause(min(left_s, STOP_CHECK_S))
        return self._state.continues(message)

    def _pause(self, seconds: float) -> None:
        """Sleep until the stop, at most so long."""
        self._stop.wait(seconds)
