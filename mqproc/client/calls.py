"""Making calls over sockets of one's own, with waiting and retries: what the synchronous client stands on. Thread-safe.

A thread that calls takes a free connection of the role, or makes one; so a long poll keeps nobody else waiting.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mqproc.client import core
from mqproc.client.amounts import above_zero, at_least_one, not_below_zero
from mqproc.client.connection import ANSWER_BYTES, FRAME_BYTES_MAX
from mqproc.client.core import TIMEOUT_S, Call
from mqproc.client.lines import Line, Lines
from mqproc.client.pipeline import Pipeline
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy, policy_of
from mqproc.errors import MqprocError
from mqproc.paths import given_path

if TYPE_CHECKING:
    from mqproc.client.consumer import Consumer
    from mqproc.client.producer import Producer

T = TypeVar("T")

MAX_SPIN_US = 250
_clock = time.monotonic


class Calls:
    """Connections to the roles of one store, and calls over them. Connects at the first call and again after a loss."""

    def __init__(
        self,
        store_or_socket: str | Path,
        *,
        timeout: float = TIMEOUT_S,
        retry: RetryPolicy | None = None,
        max_spin_us: float = MAX_SPIN_US,
        max_frame_bytes: int = FRAME_BYTES_MAX,
    ) -> None:
        self.store = given_path(store_or_socket)
        self.timeout_s = above_zero("timeout", timeout)
        self.retry = policy_of(retry)
        self._frame_bytes_max = at_least_one("max_frame_bytes", max_frame_bytes)
        self.pull_bytes_max = max(1, self._frame_bytes_max - ANSWER_BYTES)
        """So much of messages is asked for at once: one that is larger comes alone, and may not fit."""
        self._again = functools.partial(
            type(self), timeout=timeout, retry=retry, max_spin_us=max_spin_us, max_frame_bytes=self._frame_bytes_max
        )
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        spin_s = not_below_zero("max_spin_us", max_spin_us) / 1e6
        self._lines = {
            role: Lines(path, spin_s, self._frame_bytes_max)
            for role, path in core.socket_paths(store_or_socket).items()
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.store)!r})"

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        """Pickled and copied, as workers are given one, it is a client of the same store that is not connected yet."""
        return self._again, (self.store,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, those that other threads use now when they are done with them.

        The client can still be used: it connects again.
        """
        for lines in self._lines.values():
            lines.close()

    def _not_waited_for(self, why: str) -> None:
        """From now on a call fails at once when the group does not run, told by `why`: no restart is hoped for."""
        for lines in self._lines.values():
            lines.leave(why)

    # Running calls

    def deadline_of(self, call: Call[Any]) -> float:
        return _clock() + self.timeout_s + call.wait_s

    def take_line(self, role: str) -> Line:
        return self._lines[role].take()

    def give_line(self, role: str, line: Line) -> None:
        self._lines[role].give(line)

    def run(self, call: Call[T]) -> T:
        """Make a call, again when that is safe, and return its value or raise its error."""
        deadline = _clock() + self.timeout_s + call.wait_s
        try:
            return self._run_once(call, deadline)
        except (MqprocError, ConnectionLost) as error:
            failure = error
        return self.run_again(call, deadline, failure)

    def run_again(
        self, call: Call[T], deadline: float, failure: MqprocError | ConnectionLost, *, at_once: bool = False
    ) -> T:
        """After a failed attempt: wait and try again as long as that is safe and time is left; the first time
        `at_once` where somebody else has waited."""
        attempts = Attempts(self.retry, deadline, repeatable=call.repeatable, is_send=call.is_send)
        call = call.again or call
        while True:
            pause_s = attempts.pause_after(failure, _clock())
            if not at_once:
                time.sleep(pause_s)
            at_once = False
            try:
                return self._run_once(call, deadline)
            except (MqprocError, ConnectionLost) as error:
                failure = error

    def _run_once(self, call: Call[T], deadline: float) -> T:
        lines = self._lines[call.role]
        line = lines.take()
        try:
            request_id = line.connection.submit(call)
            if line.connection.sending:
                line.push(deadline)
            if call.oneway:
                return self._told(call, line)
            value: T = line.finish(request_id, deadline, not call.wait_s)
            return value
        finally:
            lines.give(line)

    def _told(self, call: Call[T], line: Line) -> T:
        """A oneway call is done when its bytes are the socket's."""
        if line.connection.closed:
            raise ConnectionLost("the server closed the connection", taken=False)
        return call.parse(memoryview(b""), memoryview(b""))

    def pipeline(self, role: str) -> Pipeline:
        """For several calls to one role under way at once."""
        return Pipeline(self, role)

    def run_all(self, calls: Iterable[Call[T]], role: str, in_flight: int) -> Iterator[T]:
        """Make calls with up to `in_flight` of them under way; yields the values in order.

        At an error the calls under way are given up.
        """
        in_flight = at_least_one("in_flight", in_flight)
        pipeline = Pipeline(self, role)
        try:
            for call in calls:
                if len(pipeline) >= in_flight:
                    yield pipeline.finish()
                pipeline.start(call)
            while len(pipeline):
                yield pipeline.finish()
        finally:
            pipeline.close()
