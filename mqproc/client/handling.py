"""Handlers: a consumer's messages given to a function, by several threads at once or strictly in order by queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

from mqproc.client.amounts import at_least_one
from mqproc.errors import MessageNotFoundError
from mqproc.message import StoredMessage

if TYPE_CHECKING:
    from mqproc.client.consumer import Consumer

Handler = Callable[[StoredMessage], object]
MESSAGES_AT_ONCE: Final = 64
IDLE_S: Final = 1.0
BUSY_S: Final = 0.01
_log = logging.getLogger("mqproc.consumer")


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
        self._handler = handler
        self._workers = at_least_one("workers", workers)
        self._tries_in_order = tries_in_order
        self._stop = stop
        self._pause_s = pause_s

    def run(self) -> None:
        """Until the stop. What the consumer raises, and what acknowledging raises, is raised here."""
        under_way: set[Future[None]] = set()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="mqproc-handler") as pool:
            while not self._stop.is_set():
                if len(under_way) >= 2 * self._workers:
                    wait(under_way, IDLE_S, FIRST_COMPLETED)
                under_way = _raised(under_way)
                if len(under_way) < 2 * self._workers:
                    timeout_s = BUSY_S if under_way else IDLE_S
                    under_way |= {pool.submit(self._each, run) for run in self._receive(timeout_s)}
        _raised(under_way)

    def _receive(self, timeout_s: float) -> list[list[StoredMessage]]:
        """Messages by what is handled one after the other."""
        if self._tries_in_order is None:
            return [[message] for message in self._consumer.receive(2 * self._workers, timeout_s)]
        queues: dict[tuple[str, int], list[StoredMessage]] = {}
        for message in self._consumer.receive(MESSAGES_AT_ONCE, timeout_s, ordered=True):
            queues.setdefault((message.topic, message.queue_id), []).append(message)
        return list(queues.values())

    def _each(self, messages: Iterable[StoredMessage]) -> None:
        for message in messages:
            failures = 0
            while not self._handled(message):
                failures += 1
                if self._tries_in_order is None or failures > self._tries_in_order:
                    self._again_later(message)
                    break
                if self._stop.wait(self._pause_s):
                    return

    def _again_later(self, message: StoredMessage) -> None:
        """A message that is gone would come again for ever, and hold up those behind it: it is done."""
        if self._consumer.is_broadcast:
            _log.error("message %s of %s is passed over: it was broadcast", message.message_id, message.topic)
            self._consumer.ack(message)
            return
        try:
            self._consumer.nack(message, delay_level=0 if self._tries_in_order is None else -1)
        except MessageNotFoundError as error:
            _log.error("message %s of %s is passed over: %s", message.message_id, message.topic, error)
            self._consumer.ack(message)

    def _handled(self, message: StoredMessage) -> bool:
        try:
            self._handler(message)
        except Exception:
            _log.warning("handling message %s of %s failed", message.message_id, message.topic, exc_info=True)
            return False
        self._consumer.ack(message)
        return True


def _raised(under_way: set[Future[None]]) -> set[Future[None]]:
    """Those that are not through; raises the error of one that failed."""
    left = set()
    for future in under_way:
        if future.done():
            future.result()
        else:
            left.add(future)
    return left
