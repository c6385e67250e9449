"""The batching producer: gathers messages of many threads into frames, and tells each message's future the outcome.

    producer.send ──▶ Batcher ──Group──▶ sender thread ──frames──▶ Pipeline ──results──▶ futures

One thread sends and receives. Memory is bounded: `send` waits while `max_buffered_bytes` are waiting or under way.

A forked process has none of its parent's threads, and may have got locks that one of them held: there every producer
begins anew, without the messages that its parent will send.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn

from mqproc.client import core, sending, threads
from mqproc.client.amounts import moment_after
from mqproc.client.batching import Batcher, Group, Limits
from mqproc.client.encoding import check_message
from mqproc.errors import BadRequestError, MqprocError, RequestTimeoutError, StoreBusyError
from mqproc.message import Message, SendResult

if TYPE_CHECKING:
    from mqproc.client.sync import Client

Results = Future[SendResult]
_clock = time.monotonic
EXIT_FLUSH_S: Final = 10.0
"""How long the end of the program waits for what producers that nobody closed have left to send."""

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class Producer:
    """Made by `Client.producer`; thread-safe.

        with client.producer(linger_ms=2) as producer:
            future = producer.send("orders", b"…", keys="order-1")
        print(future.result().queue_offset)

    A message waits at most `linger_ms` for others of its topic. With several frames in flight a frame that the store
    refused for now is sent again after later ones; with `max_in_flight=1` messages of one sharding key stay in their
    order then too. `close`, the end of the `with` block and that of the program send what is left; the last waits for
    it at most 10 s, and warns. A forked process may use its parent's producer: what the parent gave it stays there.

    `on_done` is called by the producer's thread: it may send, which never waits for room there, but not flush or close.
    """

    def __init__(
        self,
        client: Client,
        *,
        linger_ms: float,
        max_batch_messages: int,
        max_batch_bytes: int,
        max_in_flight: int,
        max_buffered_bytes: int,
    ) -> None:
        self._limits = Limits.of_user(linger_ms, max_batch_messages, max_batch_bytes, max_in_flight, max_buffered_bytes)
        self._client = client
        self._closing = False
        self._begin()
        _producers.add(self)

    def _begin(self) -> None:
        """As in a new process: nothing waits, nothing is under way, and no thread runs."""
        self._batcher: Batcher[Results] = Batcher(self._limits)
        self._changed = threading.Condition()
        self._flushing = 0
        self._under_way = 0  # messages taken by the sender and not yet resolved
        self._thread: threading.Thread | None = None
        self._taking = False  # whether there is a thread that sends what is given now
        self._failed = 0  # messages that failed after the closing began

    def _start(self) -> None:
        if self._closing:
            raise BadRequestError("the producer is closed")
        _see_to_the_end()
        thread = threading.Thread(target=self._run, name="mqproc-producer", daemon=True)
        threads.start(thread)
        self._thread, self._taking = thread, True

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """Put a message in line; its future gets the SendResult or the error. `on_done` is called with the future.

        Waits while the buffer is full, at most `timeout` seconds, then raises StoreBusyError. Raises BadRequestError
        at once for a message that cannot be sent.
        """
        message = sending.message_of(
            topic, body, tag, keys, properties, queue_id, flag, born_timestamp_ms, sharding_key=sharding_key
        )
        check_message(message)
        patience_s = _patience_s(timeout)
        future: Results = Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        with self._changed:
            if not self._batcher.has_room(message) and not self._is_own_thread():
                self._wait_for_room(message, patience_s)
            if not self._taking:
                self._start()
            if self._batcher.add(message, future, _clock()):
                self._changed.notify_all()
        return future

    def _wait_for_room(self, message: Message, patience_s: float | None) -> None:
        if not self._changed.wait_for(lambda: self._closing or self._batcher.has_room(message), patience_s):
            raise StoreBusyError(f"{self._batcher.buffered_bytes:,} bytes are waiting to be sent")

    def _is_own_thread(self) -> bool:
        """Whether `on_done` calls, for which all else that this thread does waits."""
        return threading.current_thread() is self._thread

    def _check_other_thread(self, what: str) -> None:
        if self._is_own_thread():
            raise BadRequestError(f"on_done cannot {what} its producer, whose thread would wait for itself")

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything given so far has its outcome. Raises RequestTimeoutError."""
        self._check_other_thread("flush")
        patience_s = _patience_s(timeout)
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._batcher.empty and not self._under_way, patience_s):
                    raise RequestTimeoutError(f"not everything was sent within {patience_s:g} s")
            finally:
                self._flushing -= 1

    def _flush_by(self, deadline: float) -> None:
        self.flush(max(0.0, deadline - _clock()))

    def close(self, timeout: float | None = None) -> None:
        """Send what is left and end the thread. Raises RequestTimeoutError; the thread then goes on."""
        self._check_other_thread("close")
        patience_s = _patience_s(timeout)
        with self._changed:
            self._end()
            thread = self._thread
        if thread is None:
            return
        thread.join(patience_s)
        if thread.is_alive():
            raise RequestTimeoutError(f"not everything was sent within {patience_s:g} s")

    def _end(self) -> None:
        """Take nothing more."""
        self._closing = True
        self._taking = False
        self._changed.notify_all()

    def _unsent(self) -> int:
        """How many messages were there at the closing and are not stored."""
        with self._changed:
            return self._failed + self._under_way + self._batcher.messages

    # The sender thread

    def _run(self) -> None:
        pipeline = self._client.pipeline(core.WRITER)
        groups: deque[Group[Results]] = deque()
        try:
            while (group := self._next_group(idle=not groups)) is not None or groups:
                if group is None or len(groups) >= self._limits.in_flight:
                    self._finish(groups.popleft(), pipeline.finish)
                if group is not None:
                    groups.append(group)
                    try:
                        pipeline.start(sending.send_group(group.messages))
                    except BadRequestError as error:
                        self._finish(groups.pop(), functools.partial(_raise, error))
        except BaseException as error:
            # A defect: nobody must wait for ever for what this thread will not do any more.
            self._give_up(groups, error)
            raise
        finally:
            pipeline.close()

    def _give_up(self, groups: deque[Group[Results]], error: BaseException) -> None:
        with self._changed:
            self._end()
            while (group := self._batcher.take(_clock(), everything=True)) is not None:
                groups.append(group)
            for group in groups:
                for future in group.futures:
                    if not future.done():
                        self._fail(future, error)
                self._batcher.done(group)
            self._under_way = 0
            self._changed.notify_all()

    def _next_group(self, *, idle: bool) -> Group[Results] | None:
        """The next group to send. None when answers should be fetched, or, if `idle`, when all is over."""
        with self._changed:
            while True:
                everything = bool(self._flushing) or self._closing
                group = self._batcher.take(_clock(), everything=everything)
                if group is not None:
                    live = _without_cancelled(group)
                    if live.messages:
                        self._under_way += len(live.messages)
                        return live
                    self._batcher.done(live)
                    self._changed.notify_all()
                elif not idle or (self._closing and self._batcher.empty):
                    return None
                else:
                    self._changed.wait(self._batcher.wait_s(_clock()))

    def _finish(self, group: Group[Results], results: Callable[[], list[SendResult]]) -> None:
        """Resolve a group's futures from its frame's answer."""
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
                self._under_way -= len(group.messages)
                self._batcher.done(group)
                self._changed.notify_all()

    def _one_by_one(self, group: Group[Results], error: MqprocError) -> None:
        """One message was refused, so none of its frame was stored: the others shall not suffer for it."""
        for message, future in zip(group.messages, group.futures, strict=True):
            if len(group.messages) == 1:
                self._fail(future, error)
                return
            try:
                future.set_result(self._client.run(sending.send(message)))
            except MqprocError as own:
                self._fail(future, own)

    def _fail(self, future: Results, error: BaseException) -> None:
        self._failed += self._closing
        future.set_exception(error)


def _patience_s(timeout: float | None) -> float | None:
    """As long as Python's locks can wait; None for ever. Raises BadRequestError for what is no number of seconds."""
    if timeout is None:
        return None
    moment_after("timeout", timeout)
    return min(float(timeout), threading.TIMEOUT_MAX)


def _raise(error: MqprocError) -> NoReturn:
    raise error


def _without_cancelled(group: Group[Results]) -> Group[Results]:
    """The group without messages whose futures were cancelled in time; it keeps its size."""
    kept = [
        (message, future)
        for message, future in zip(group.messages, group.futures, strict=True)
        if future.set_running_or_notify_cancel()
    ]
    return Group(group.due, [message for message, _ in kept], [future for _, future in kept], group.size)


def _begin_all() -> None:
    for producer in _producers:
        producer._begin()


def _see_to_the_end() -> None:
    """A process of multiprocessing ends without what atexit was told, but with finalizers that it made itself."""
    loaded = sys.modules.get("multiprocessing.process")
    if loaded is not None and loaded.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, close_all, exitpriority=0)


def flush_all(producers: Iterable[Producer], timeout_s: float) -> None:
    """Send what they have left. Raises RequestTimeoutError, when each has been waited for.

    Those that the program's end has waited for are not waited for again.
    """
    deadline = _clock() + timeout_s
    with contextlib.ExitStack() as steps:
        for producer in producers:
            if producer in _producers:
                steps.callback(producer._flush_by, deadline)


def close_all() -> None:
    """Send what is left when the program ends: its daemon threads still run here. Once for each producer."""
    deadline = _clock() + EXIT_FLUSH_S
    for producer in list(_producers):
        told = producer._failed  # Its user closed it, and was told of these by their futures.
        with contextlib.suppress(RequestTimeoutError):
            producer.close(max(0.0, deadline - _clock()))
        if unsent := producer._unsent() - told:
            warnings.warn(f"{unsent:,} messages of a producer were not sent at the program's end", stacklevel=1)
        _producers.discard(producer)


os.register_at_fork(after_in_child=_begin_all)
atexit.register(close_all)
