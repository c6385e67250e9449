"""A consumer's membership of its group: a thread that joins, says that the consumer lives, and takes its assignments.

The member lives as long as this thread's connection. After a loss it joins again under its old name, with the queues
that it holds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mqproc.client import group_calls
from mqproc.client.core import QUERY, Call
from mqproc.client.lines import Line
from mqproc.client.retry import ConnectionLost, RetryPolicy
from mqproc.client.subscription import Subscription
from mqproc.errors import (
    BadRequestError,
    GroupNotFoundError,
    MqprocError,
    NotAMemberError,
    NotRunningError,
    PermissionDeniedError,
)
from mqproc.wire.group_operations import GroupAssignment

if TYPE_CHECKING:
    from mqproc.client.sync import Client

T = TypeVar("T")
FINAL = (BadRequestError, GroupNotFoundError, PermissionDeniedError)
"""After these joining again cannot help."""


def joins_again(error: MqprocError | ConnectionLost, policy: RetryPolicy, failures: int, deadline: float) -> float:
    """Seconds to wait before another try to join for the first time; raises what the user shall see instead."""
    pause_s = policy.pause_s(failures)
    final = isinstance(error, FINAL) or time.monotonic() + pause_s >= deadline
    if isinstance(error, ConnectionLost):
        if final or not error.ever_connected:
            raise NotRunningError(str(error)) from None
    elif final or not error.retryable:
        raise error
    return pause_s


class Membership:
    """The thread. `on_assignment` and `on_end` are called from it."""

    def __init__(
        self,
        client: Client,
        subscription: Subscription,
        holding: Callable[[], list[tuple[str, int, int]]],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[MqprocError], None],
    ) -> None:
        """`holding` tells what the consumer works on; `on_end` gets the error after which nothing comes any more."""
        self._client = client
        self._subscription = subscription
        self._holding = holding
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._closing = threading.Event()
        self._line: Line | None = None
        self._member_id = ""
        self._generation = -1
        self._heartbeat_s = 1.0
        self._asked_at = 0.0
        self.valid_until = 0.0
        """Until then, by the monotonic clock, the server surely counts this consumer as a member."""
        self._thread = threading.Thread(target=self._run, name="mqproc-consumer", daemon=True)

    def start(self) -> None:
        """Join, and go on in the thread. Raises what the join was refused with."""
        deadline = time.monotonic() + self._client.timeout_s
        failures = 0
        while True:
            try:
                self._join()
                break
            except (MqprocError, ConnectionLost) as error:
                failures += 1
                pause_s = joins_again(error, self._client.retry, failures, deadline)
            time.sleep(pause_s)
        self._thread.start()

    def leave(self) -> None:
        """Stop being a member, and end the thread."""
        self._closing.set()
        if self._member_id:
            # The end of the connection would say it too.
            with contextlib.suppress(MqprocError):
                self._client.run(group_calls.leave(self._subscription.group, self._member_id))
        if self._thread.is_alive():
            self._thread.join(self._heartbeat_s + self._client.timeout_s)

    def _run(self) -> None:
        policy: RetryPolicy = self._client.retry
        failures = 0
        try:
            while not self._closing.is_set():
                try:
                    self._beat() if self._line is not None else self._join()
                    failures = 0
                except (NotAMemberError, ConnectionLost):
                    self._let_go()
                    self._closing.wait(policy.pause_s(failures))
                    failures += 1
                except FINAL as error:
                    self._on_end(error)
                    return
                except MqprocError as error:
                    self._let_go()
                    self._closing.wait(policy.pause_s(failures, error.hint_ms))
                    failures += 1
        finally:
            self._let_go()

    def _join(self) -> None:
        if self._line is None:
            self._line = self._client.take_line(QUERY)
        try:
            self._take(self._run_call(self._subscription.join(self._member_id, self._holding())))
        except BaseException:
            self._let_go()
            raise

    def _beat(self) -> None:
        call = group_calls.heartbeat(self._subscription.group, self._member_id, self._generation, self._heartbeat_s)
        self._take(self._run_call(call))

    def _take(self, answer: GroupAssignment) -> None:
        self._member_id = answer.member_id
        self._generation = answer.generation
        if answer.heartbeat_ms:
            self._heartbeat_s = answer.heartbeat_ms / 1000
        if answer.changed:
            self._on_assignment(answer)
        # What was taken away is not handed out any more, so the rest may be.
        self.valid_until = self._asked_at + self._subscription.session_timeout_ms / 1000

    def _run_call(self, call: Call[T]) -> T:
        line = self._line
        assert line is not None
        deadline = self._client.deadline_of(call)
        self._asked_at = time.monotonic()
        request_id = line.connection.submit(call)
        line.push(deadline)
        value: Any = line.finish(request_id, deadline, spin=False)
        found: T = value
        return found

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.connection.close()
            self._line = None
