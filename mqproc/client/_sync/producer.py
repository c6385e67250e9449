"""The batching producer: gathers messages of many threads into frames.

    producer.send ──▶ Batcher ──Group──▶ sender thread ──frames──▶ Pipeline ──results──▶ futures

One thread sends and receives. Memory is bounded: `send` blocks while `max_buffered_bytes` are waiting or in flight.

A forked process has no thread of its parent, and may have copied locks that one of them held: every producer is
reset there, without the messages that its parent will send.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NoReturn

from mqproc.client import send_requests
from mqproc.client._sync.background import Condition, start_thread
from mqproc.client.encoding import check_message
from mqproc.client.send_requests import Batcher, Limits, MessageGroup
from mqproc.errors import BadRequestError, MqprocError, RequestTimeoutError, StoreBusyError
from mqproc.types import Message, SendResult
from mqproc.util.arguments import moment_after

if TYPE_CHECKING:
    from mqproc.client._sync.connection_pool import Connections

Results = Future[SendResult]
_log = logging.getLogger("mqproc.producer")
_clock = time.monotonic
EXIT_FLUSH_S: Final = 10.0
"""How long the end of the program waits for the remaining messages of producers that were not closed."""

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class _Future(Future[SendResult]):
    """A Future that stays unlocked after a signal handler's exception; callbacks may exit."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]

    def add_done_callback(self, fn: Callable[[Results], object]) -> None:
        super().add_done_callback(functools.partial(_call, fn))


def _call(on_done: Callable[[Results], object], future: Results) -> None:
    """Call a callback; an exception such as SystemExit must not end the producer's thread."""
    try:
        on_done(future)
    except Exception:
        raise  # Python logs it.
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            raise
        _log.exception("calling %r for a message failed", on_done)


class Producer:
    """Made by `Client.producer`; thread-safe.

        with client.producer(linger_ms=2) as producer:
            future = producer.send("orders", b"…", keys="order-1")
        print(future.result().queue_offset)

    A message waits at most `linger_ms` for others of its topic. With several frames in flight a frame that the store
    refused for now is resent after later ones; `max_in_flight=1` keeps the order of messages with one sharding key.
    `close`, the end of the `with` block and the end of the program send the remaining messages; the last waits for them
    at most 10 s, and warns. A forked process may use its parent's producer; the parent's messages stay in the parent.

    `on_done` is called by the producer's thread: it may send, which never waits for room there, but not flush or close.
    """

    def __init__(self, client: Connections, limits: Limits) -> None:
        self._limits = limits
        self._client = client
        self._closing = False
        self._reset()
        _producers.add(self)
        client.register_producer(self)

    def _reset(self) -> None:
        """Reset to the state of a new producer without a thread."""
        self._batcher: Batcher[Results] = Batcher(self._limits)
        self._changed = Condition()
        self._flushing = 0
        self._idle = False  # whether the thread waits until it is woken, also by a send after an interrupted one
        self._in_flight = 0  # messages that the thread sends and whose futures are not set
        self._thread: threading.Thread | None = None
        self._accepting = False  # whether a thread accepts messages
        self._ended = False  # whether the thread has sent everything after a close
        self._failed = 0  # messages that failed after the close began

    def _start(self) -> None:
        """Start the thread under the lock; if interrupted, the thread ends once it has the lock."""
        if self._closing:
            raise BadRequestError("the producer is closed")
        _register_close()
        thread = threading.Thread(target=self._run, name="mqproc-producer", daemon=True)
        start_thread(thread)
        self._thread, self._accepting = thread, True

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        topic: Message | str,
        body: bytes | None = None,
        *,
        tag: str = "",
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        born_timestamp_ms: int | None = None,
        sharding_key: str = "",
        on_done: Callable[[Results], object] | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Queue a message; its future gets the SendResult or the error.

        `on_done` is called with the future. Blocks while the buffer is full, at most `timeout` seconds, then raises
        StoreBusyError. Raises BadRequestError at once for a message that cannot be sent.

        Example:
            producer.send("orders", b"paid", keys="order-1", on_done=lambda future: print(future.exception()))
        """
        numbers = queue_id, flag, born_timestamp_ms
        message = send_requests.message_of(topic, body, tag, keys, properties, sharding_key, numbers)
        message = check_message(message)
        timeout_s = _timeout_s(timeout)
        future = _Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        with self._changed:
            if not self._batcher.has_room(message) and not self._is_own_thread():
                self._wait_for_room(message, timeout_s)
            if not self._accepting:
                self._start()
            if self._batcher.add(message, future, _clock()) or self._idle:
                self._changed.notify_all()
        return future

    def _wait_for_room(self, message: Message, timeout_s: float | None) -> None:
        if not self._changed.wait_for(lambda: self._closing or self._batcher.has_room(message), timeout_s):
            raise StoreBusyError(f"{self._batcher.buffered_bytes:,} bytes are waiting to be sent")

    def _is_own_thread(self) -> bool:
        """Whether the caller is `on_done`, which holds up the producer's thread."""
        return threading.current_thread() is self._thread

    def _check_other_thread(self, what: str) -> None:
        if self._is_own_thread():
            raise BadRequestError(f"on_done cannot {what} its producer, whose thread would wait for itself")

    def flush(self, timeout: float | None = None) -> None:
        """Return when all messages so far have their outcomes. Raises RequestTimeoutError.

        Example: `producer.flush(timeout=10)`
        """
        self._check_other_thread("flush")
        timeout_s = _timeout_s(timeout)
        with self._changed:
            self._flushing += 1
            try:
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._batcher.empty and not self._in_flight, timeout_s):
                    raise RequestTimeoutError(f"not everything was sent within {timeout_s:g} s")
            finally:
                self._flushing -= 1

    def _flush_by(self, deadline: float) -> None:
        self.flush(max(0.0, deadline - _clock()))

    def close(self, timeout: float | None = None) -> None:
        """Send the remaining messages and end the thread.

        Raises RequestTimeoutError; the thread then continues. Example: `producer.close(timeout=10)`
        """
        self._check_other_thread("close")
        timeout_s = _timeout_s(timeout)
        with self._changed:
            self._end()
            # Not by `join`: after an exception of a signal handler Python 3.11 takes the thread for ended.
            if self._thread is not None and not self._changed.wait_for(lambda: self._ended, timeout_s):
                raise RequestTimeoutError(f"not everything was sent within {timeout_s:g} s")

    def _end(self) -> None:
        """Accept no more messages."""
        self._closing = True
        self._accepting = False
        self._changed.notify_all()

    def _unsent(self) -> int:
        """Number of messages that the close left unstored."""
        with self._changed:
            return self._failed + self._in_flight + self._batcher.messages

    # The sender thread

    def _run(self) -> None:
        with self._changed:
            if self._thread is not threading.current_thread():
                return
        try:
            self._send_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _send_all(self) -> None:
        pipeline = self._client.pipeline()
        groups: deque[MessageGroup[Results]] = deque()
        try:
            while (group := self._next_group(idle=not groups)) is not None or groups:
                if group is None or len(groups) >= self._limits.in_flight:
                    self._finish(groups.popleft(), pipeline.finish)
                if group is not None:
                    groups.append(group)
                    try:
                        pipeline.start(send_requests.send_group(group.messages))
                    except BadRequestError as error:
                        self._finish(groups.pop(), functools.partial(_raise, error))
        except BaseException as error:
            # A defect: no caller must wait for ever for the outcomes.
            self._give_up(groups, error)
            raise
        finally:
            pipeline.close()

    def _give_up(self, groups: deque[MessageGroup[Results]], error: BaseException) -> None:
        with self._changed:
            self._end()
            while (group := self._batcher.take(_clock(), everything=True)) is not None:
                groups.append(group)
            for group in groups:
                for future in group.futures:
                    if not future.done():
                        self._fail(future, error)
                self._batcher.done(group)
            self._in_flight = 0
            self._changed.notify_all()

    def _next_group(self, *, idle: bool) -> MessageGroup[Results] | None:
        """The next group to send.

        None when answers should be fetched or, if `idle`, when the producer has ended.
        """
        with self._changed:
            while True:
                everything = bool(self._flushing) or self._closing
                group = self._batcher.take(_clock(), everything=everything)
                if group is not None:
                    live = _without_cancelled(group)
                    if live.messages:
                        self._in_flight += len(live.messages)
                        return live
                    self._batcher.done(live)
                    self._changed.notify_all()
                elif not idle or (self._closing and self._batcher.empty):
                    return None
                else:
                    wait_s = self._batcher.wait_s(_clock())
                    self._idle = wait_s is None
                    self._changed.wait(wait_s)
                    self._idle = False

    def _finish(self, group: MessageGroup[Results], results: Callable[[], list[SendResult]]) -> None:
        """Set a group's futures from its frame's answer."""
        try:
            for future, result in zip(group.futures, results(), strict=True):
                future.set_result(result)
        except BadRequestError as error:
            self._one_by_one(group, error)
        except MqprocError as error:
            for future in group.futures:
                self._fail(future, error)
        finally:
            with self._changed:
                self._in_flight -= len(group.messages)
                self._batcher.done(group)
                self._changed.notify_all()

    def _one_by_one(self, group: MessageGroup[Results], error: MqprocError) -> None:
        """Send the messages of a refused frame one by one, as only one of them may be invalid."""
        for message, future in zip(group.messages, group.futures, strict=True):
            if len(group.messages) == 1:
                self._fail(future, error)
                return
            try:
                future.set_result(self._client.run(send_requests.send(message)))
            except MqprocError as own:
                self._fail(future, own)

    def _fail(self, future: Results, error: BaseException) -> None:
        self._failed += self._closing
        future.set_exception(error)


def _timeout_s(timeout: float | None) -> float | None:
    """A timeout within the limit of Python's locks; None for ever.

    Raises BadRequestError unless it is a number.
    """
    if timeout is None:
        return None
    moment_after("timeout", timeout)
    return min(float(timeout), threading.TIMEOUT_MAX)


def _raise(error: MqprocError) -> NoReturn:
    raise error


def _without_cancelled(group: MessageGroup[Results]) -> MessageGroup[Results]:
    """The group without messages whose futures were cancelled; it keeps its size."""
    kept = [
        (message, future)
        for message, future in zip(group.messages, group.futures, strict=True)
        if future.set_running_or_notify_cancel()
    ]
    return MessageGroup(group.due, [message for message, _ in kept], [future for _, future in kept], group.size)


def _reset_all() -> None:
    for producer in _producers:
        producer._reset()


def _register_close() -> None:
    """Register the close with multiprocessing, whose processes end without functions of atexit."""
    loaded = sys.modules.get("multiprocessing.process")
    if loaded is not None and loaded.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, close_all, exitpriority=0)


def flush_all(producers: Iterable[Producer], timeout_s: float) -> None:
    """Send the remaining messages of producers.

    Raises RequestTimeoutError after waiting for each.

    Producers that the program's end has waited for are skipped.
    """
    deadline = _clock() + timeout_s
    with contextlib.ExitStack() as steps:
        for producer in producers:
            if producer in _producers:
                steps.callback(producer._flush_by, deadline)


def close_all() -> None:
    """Send the remaining messages when the program ends, while its daemon threads still run.

    Once per producer.
    """
    deadline = _clock() + EXIT_FLUSH_S
    for producer in list(_producers):
        known = producer._failed  # Its user closed it, and got these errors from their futures.
        with contextlib.suppress(RequestTimeoutError):
            producer.close(max(0.0, deadline - _clock()))
        if unsent := producer._unsent() - known:
            warnings.warn(f"{unsent:,} messages of a producer were not sent at the program's end", stacklevel=1)
        _producers.discard(producer)


os.register_at_fork(after_in_child=_reset_all)
atexit.register(close_all)
