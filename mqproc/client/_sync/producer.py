"""The batching producer: gathers messages of many threads into frames.

    producer.send ──▶ Batcher ──group──▶ sender thread ──frames──▶ Pipeline ──results──▶ group ◀── SendHandle

A message costs no lock or condition of its own: its handle is its group, which has the outcomes, and its number. One
thread sends and receives. Memory is bounded: `send` blocks while `max_buffered_bytes` are waiting or in flight.

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
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mqproc.client import send_requests
from mqproc.client._sync.background import Condition, start_thread
from mqproc.client.codecs import encoded_arguments
from mqproc.client.encoding import check_message, is_plain, plain_message
from mqproc.client.send_requests import Batcher, Limits, ProducerGroup, ProducerHandle, text_bytes
from mqproc.errors import BadRequestError, MqprocError, RequestTimeoutError, StoreBusyError
from mqproc.types import Message, SendResult
from mqproc.util.arguments import moment_after

if TYPE_CHECKING:
    from mqproc.client._sync.connection_pool import Connections

_log = logging.getLogger("mqproc.producer")
_clock = time.monotonic
# A default argument is this object; an equal value may have another type.
_ZERO: Final = 0
_NO_TEXT: Final = ""
EXIT_FLUSH_S: Final = 10.0
"""How long the end of the program waits for the remaining messages of producers that were not closed."""

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class SharedGroup(ProducerGroup):
    """A group whose messages several threads send, wait for and cancel."""

    __slots__ = ("changed",)

    def __init__(self, due: float) -> None:
        super().__init__(due)
        self.changed = Condition()

    def take(self) -> None:
        """Begin to send the messages that are not cancelled."""
        with self.changed:
            super().take()

    def set_outcomes(self, outcomes: Sequence[SendResult | BaseException]) -> None:
        """Set a result or an error for each sent message, and call their callbacks."""
        with self.changed:
            callbacks = self.settle(outcomes)
            self.changed.notify_all()
        for handle, on_done in callbacks:
            _call(on_done, handle)

    def wait_for(self, number: int, timeout_s: float | None) -> SendResult | BaseException:
        """A message's outcome. Raises TimeoutError, and CancelledError for a cancelled message."""
        if self.outcomes is None:
            with self.changed:
                if not self.changed.wait_for(lambda: self.is_done(number), timeout_s):
                    raise TimeoutError(f"no outcome within {timeout_s:g} s")
        if number in self.cancelled:
            raise CancelledError
        return self.outcome(number)


class SendHandle(ProducerHandle, eq=False, frozen=True, gc=False):
    """Outcome of one message, returned by `Producer.send`; it has the methods of a Future.

        handle = producer.send("orders", b"paid")
        print(handle.result(timeout=10).queue_offset)

    `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take its `future()`. An error that no
    handle is asked for is logged.
    """

    _group: SharedGroup
    _number: int

    def result(self, timeout: float | None = None) -> SendResult:
        """Return the SendResult once the message is stored.

        Raises the message's error, TimeoutError after `timeout` seconds, CancelledError after `cancel`.
        Example: `handle.result(timeout=10).queue_offset`
        """
        group = self._group
        return group.result(group.wait_for(self._number, _timeout_s(timeout)))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the message's error, None when it is stored; raises as `result` otherwise.

        Example: `print(handle.exception(timeout=10))`
        """
        outcome = self._group.wait_for(self._number, _timeout_s(timeout))
        return outcome if isinstance(outcome, BaseException) else None

    def cancel(self) -> bool:
        """Drop the message; False when it is being sent or done. Example: `handle.cancel()`"""
        group = self._group
        with group.changed:
            if group.taken or self._number in group.cancelled:
                return self._number in group.cancelled
            mine = group.cancel(self._number)
            group.changed.notify_all()
        for handle, on_done in mine:
            _call(on_done, handle)
        return True

    def add_done_callback(self, fn: Callable[[SendHandle], object]) -> None:
        """Call `fn` with the handle when the outcome is known, at once if it is.

        The producer's thread calls it otherwise.
        Example: `handle.add_done_callback(lambda handle: print(handle.exception()))`
        """
        with self._group.changed:
            is_done = self.done()
            if not is_done:
                self._group.add_waiter(self._number, self, fn)
        if is_done:
            _call(fn, self)

    def future(self) -> Future[SendResult]:
        """Return a Future of the standard library; cancelling it does not cancel the message.

        Example: `handle.future().result(timeout=10)`
        """
        future = Future[SendResult]()
        future.set_running_or_notify_cancel()

        def settle(handle: SendHandle) -> None:
            try:
                future.set_result(handle.result())
            except BaseException as error:
                future.set_exception(error)

        self.add_done_callback(settle)
        return future


def _call(on_done: Callable[[SendHandle], object], handle: SendHandle) -> None:
    """Call a callback; its exception must not end the producer's thread."""
    try:
        on_done(handle)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise
        _log.exception("calling %r for a message failed", on_done)


class Producer:
    """Made by `Client.producer`; thread-safe.

        with client.producer(linger_ms=2) as producer:
            handle = producer.send("orders", b"…", keys="order-1")
        print(handle.result().queue_offset)

    A message waits at most `linger_ms` for others of its topic. With several frames in flight a frame that the store
    refused for now is resent after later ones; `max_in_flight=1` keeps the order of messages with one sharding key.
    `close`, the end of the `with` block and the end of the program send the remaining messages; the last waits for them
    at most 10 s, and warns. A forked process may use its parent's producer; the parent's messages stay in the parent.

    `on_done` is called by the producer's thread: it may send, which never waits for room there, but not flush or close.
    """

    def __init__(self, client: Connections, limits: Limits) -> None:
        self._limits = limits
        self._client = client
        self._codec = client._codec
        self._closing = False
        self._reset()
        _producers.add(self)
        client.register_producer(self)

    def _reset(self) -> None:
        """Reset to the state of a new producer without a thread."""
        self._batcher = Batcher(self._limits, SharedGroup)
        self._changed = Condition()
        self._flushing = 0
        self._idle = False  # whether the thread waits until it is woken, also by a send after an interrupted one
        self._in_flight = 0  # messages that the thread sends and whose outcomes are not set
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

    def __repr__(self) -> str:
        return f"Producer({self._client!r})"

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        topic: Message | str,
        body: Any = None,
        *,
        tag: str = "",
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        flag: int = 0,
        born_timestamp_ms: int | None = None,
        sharding_key: str = "",
        on_done: Callable[[SendHandle], object] | None = None,
        timeout: float | None = None,
    ) -> SendHandle:
        """Queue a message; its handle gets the SendResult or the error.

        `on_done` is called with the handle. Blocks while the buffer is full, at most `timeout` seconds, then raises
        StoreBusyError. Raises BadRequestError at once for a message that cannot be sent.

        Example:
            producer.send("orders", b"paid", keys="order-1", on_done=lambda handle: print(handle.exception()))
        """
        if self._codec is not None:
            topic, body = encoded_arguments(self._codec, topic, body)
        if (
            properties is None
            and queue_id is born_timestamp_ms is None
            and on_done is None
            and timeout is None
            and flag is _ZERO
            and sharding_key is _NO_TEXT
            and (plain := plain_message(topic, body, tag, keys)) is not None
        ):
            with self._changed:
                # The thread must be woken for a new group or a full one.
                group = None if self._idle or not self._accepting else self._batcher.add_plain(plain)
                if group is not None:
                    return SendHandle(group, len(group.messages) - 1)
        numbers = queue_id, flag, born_timestamp_ms
        message = send_requests.message_of(topic, body, tag, keys, properties, sharding_key, numbers)
        return self._send_checked(check_message(message), on_done, _timeout_s(timeout))

    def _send_checked(
        self, message: Message, on_done: Callable[[SendHandle], object] | None, timeout_s: float | None
    ) -> SendHandle:
        size = text_bytes(message)
        with self._changed:
            if not self._batcher.has_room(size) and not self._is_own_thread():
                self._wait_for_room(size, timeout_s)
            if not self._accepting:
                self._start()
            group, wake = self._batcher.add(message, size, plain=is_plain(message))
            handle = SendHandle(group, len(group.messages) - 1)
            if on_done is not None:
                group.add_waiter(handle._number, handle, on_done)
            if wake or self._idle:
                self._changed.notify_all()
        return handle

    def _wait_for_room(self, size: int, timeout_s: float | None) -> None:
        if not self._changed.wait_for(lambda: self._closing or self._batcher.has_room(size), timeout_s):
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
        groups: deque[SharedGroup] = deque()
        try:
            while (group := self._next_group(idle=not groups)) is not None or groups:
                if group is None or len(groups) >= self._limits.in_flight:
                    self._finish(groups.popleft(), pipeline.finish)
                if group is not None:
                    groups.append(group)
                    try:
                        pipeline.start(group.call())
                    except BadRequestError as error:
                        self._finish(groups.pop(), functools.partial(_raise, error))
        except BaseException as error:
            # A defect: no caller must wait for ever for the outcomes.
            self._give_up(groups, error)
            raise
        finally:
            pipeline.close()

    def _give_up(self, groups: deque[SharedGroup], error: BaseException) -> None:
        with self._changed:
            self._end()
            while (group := self._batcher.take(_clock(), everything=True)) is not None:
                group.take()
                groups.append(group)
            for group in groups:
                self._failed += len(group.messages)
                self._batcher.done(group)
            self._in_flight = 0
            self._changed.notify_all()
        for group in groups:
            group.set_outcomes([error] * len(group.messages))

    def _next_group(self, *, idle: bool) -> SharedGroup | None:
        """The next group to send.

        None when answers should be fetched or, if `idle`, when the producer has ended.
        """
        with self._changed:
            while True:
                everything = bool(self._flushing) or self._closing
                group = self._batcher.take(_clock(), everything=everything)
                if group is not None:
                    group.take()
                    if group.messages:
                        self._in_flight += len(group.messages)
                        return group
                    self._batcher.done(group)
                    self._changed.notify_all()
                elif not idle or (self._closing and self._batcher.empty):
                    return None
                else:
                    wait_s = self._batcher.wait_s(_clock())
                    self._idle = wait_s is None
                    self._changed.wait(wait_s)
                    self._idle = False

    def _finish(self, group: SharedGroup, results: Callable[[], Sequence[SendResult]]) -> None:
        """Set a group's outcomes from its frame's answer."""
        outcomes: Sequence[SendResult | BaseException]
        count = len(group.messages)
        try:
            outcomes = results()
        except BadRequestError as error:
            outcomes = self._one_by_one(group, error)
        except BaseException as error:
            outcomes = [error] * count
            if not isinstance(error, MqprocError):
                raise
        finally:
            if self._closing and isinstance(outcomes, list):
                self._failed += sum(isinstance(outcome, BaseException) for outcome in outcomes)
            group.set_outcomes(outcomes)
            with self._changed:
                self._in_flight -= count
                self._batcher.done(group)
                self._changed.notify_all()

    def _one_by_one(self, group: SharedGroup, error: MqprocError) -> list[SendResult | BaseException]:
        """Send the messages of a refused frame one by one, as only one of them may be invalid."""
        if len(group.messages) == 1:
            return [send_requests.without_place(error)]
        outcomes: list[SendResult | BaseException] = []
        for message in group.messages:
            try:
                outcomes.append(self._client.run(send_requests.send(message)))
            except MqprocError as own:
                outcomes.append(send_requests.without_place(own))
        return outcomes


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
        known = producer._failed  # Its user closed it, and got these errors from their handles.
        with contextlib.suppress(RequestTimeoutError):
            producer.close(max(0.0, deadline - _clock()))
        if unsent := producer._unsent() - known:
            warnings.warn(f"{unsent:,} messages of a producer were not sent at the program's end", stacklevel=1)
        _producers.discard(producer)


os.register_at_fork(after_in_child=_reset_all)
atexit.register(close_all)
