"""A consumer's membership of its group: a thread that joins, says that the consumer lives, and takes its assignments.

The member lives as long as this thread's connection. After a loss it joins again under its old name, with the queues
that it holds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqproc.client import group_calls, threads
from mqproc.client.core import QUERY, Call
from mqproc.client.lines import Line
from mqproc.client.outage import Outage
from mqproc.client.retry import ConnectionLost, RetryPolicy
from mqproc.client.subscription import Subscription
from mqproc.errors import (
    BadRequestError,
    GroupNotFoundError,
    MqprocError,
    NotRunningError,
    PermissionDeniedError,
    SendOutcomeUnknownError,
)
from mqproc.wire.group_operations import GroupAssignment

if TYPE_CHECKING:
    from mqproc.client.sync import Client

FINAL = (BadRequestError, GroupNotFoundError, PermissionDeniedError)
"""After these joining again cannot help."""
UNHEARD = (NotRunningError, SendOutcomeUnknownError)
"""After these nobody is there to be told that a member leaves: it would take the whole timeout once more."""


def joins_again(error: MqprocError | ConnectionLost, policy: RetryPolicy, failures: int, deadline: float) -> float:
    """Seconds to wait before another try to join for the first time; raises what the user shall see instead."""
    pause_s = policy.pause_s(failures)
    final = isinstance(error, FINAL) or time.monotonic() + pause_s >= deadline
    if isinstance(error, ConnectionLost):
        if final or not error.ever_connected:
            raise error.told() from None
    elif final or not error.retryable:
        raise error
    return pause_s


class Member:
    """What a membership knows, whoever keeps it alive."""

    def __init__(
        self,
        subscription: Subscription,
        holding: Callable[[], list[tuple[str, int, int]]],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[MqprocError], None],
    ) -> None:
        """`holding` tells what the consumer works on; `on_end` gets the error after which nothing comes any more."""
        self._subscription = subscription
        self._holding = holding
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._member_id = ""
        self._generation = -1
        self._heartbeat_s = 1.0
        self._asked_at = 0.0
        self.valid_until = 0.0
        """Until then, by the monotonic clock, the server surely counts this consumer as a member."""

    def _outage(self, policy: RetryPolicy) -> Outage:
        return Outage("mqproc.consumer", f"membership of group {self._subscription.group}", policy)

    def _joining(self) -> Call[GroupAssignment]:
        self._asked_at = time.monotonic()
        return self._subscription.join(self._member_id, self._holding())

    def _beating(self) -> Call[GroupAssignment]:
        self._asked_at = time.monotonic()
        return group_calls.heartbeat(self._subscription.group, self._member_id, self._generation, self._heartbeat_s)

    def _leaving(self) -> Call[None]:
        return group_calls.leave(self._subscription.group, self._member_id)

    def _take(self, answer: GroupAssignment) -> None:
        self._member_id = answer.member_id
        self._generation = answer.generation
        if answer.heartbeat_ms:
            self._heartbeat_s = answer.heartbeat_ms / 1000
        if answer.changed:
            self._on_assignment(answer)
        # What was taken away is not handed out any more, so the rest may be.
        self.valid_until = self._asked_at + self._subscription.session_timeout_ms / 1000


class Membership(Member):
    """The thread. `on_assignment` and `on_end` are called from it."""

    def __init__(
        self,
        client: Client,
        subscription: Subscription,
        holding: Callable[[], list[tuple[str, int, int]]],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[MqprocError], None],
    ) -> None:
        super().__init__(subscription, holding, on_assignment, on_end)
        self._client = client
        self._closing = threading.Event()
        self._line: Line | None = None
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
        try:
            threads.start(self._thread)
        except RuntimeError:  # There is no thread to be had, and nobody else would beat.
            self.leave()
            self._let_go()
            raise

    def leave(self, *, told: bool = True) -> None:
        """Stop being a member, and end the thread. The group is `told`, unless nobody is there."""
        self._closing.set()
        if self._member_id and told:
            # The end of the connection would say it too.
            with contextlib.suppress(MqprocError):
                self._client.run(self._leaving())
        if self._thread.is_alive():
            self._thread.join(self._heartbeat_s + self._client.timeout_s)

    def _run(self) -> None:
        outage = self._outage(self._client.retry)
        try:
            while not self._closing.is_set():
                try:
                    self._ask(self._line, self._beating()) if self._line is not None else self._join()
                    outage.over()
                    continue
                except FINAL as error:
                    self._on_end(error)
                    return
                except (MqprocError, ConnectionLost) as error:
                    pause_s = outage.failed(error)
                self._let_go()
                self._closing.wait(pause_s)
        finally:
            self._let_go()

    def _join(self) -> None:
        if self._line is None:
            self._line = self._client.take_line(QUERY)
        try:
            self._ask(self._line, self._joining())
        except BaseException:
            self._let_go()
            raise

    def _ask(self, line: Line, call: Call[GroupAssignment]) -> None:
        self._take(line.ask(call, self._client.deadline_of(call)))

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.connection.close()
            self._line = None
