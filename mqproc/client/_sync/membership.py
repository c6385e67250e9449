# Generated from mqproc/client/_async/membership.py by tests/client/generate_sync.py: do not edit.
"""Sources of a consumer's queues: membership of a group, or broadcast.

A member lives as long as the connection of its background work. After a loss it joins again under its old name, with
the queues that it holds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from mqproc.client import group_requests
from mqproc.client._sync.background import Background
from mqproc.client._sync.connection_pool import Connections, PooledConnection, run_steps
from mqproc.client.assignment import Assignment, entries
from mqproc.client.broadcast_progress import LOOK_S, OwnProgress
from mqproc.client.requests import QUERY, Call
from mqproc.client.retry import ConnectionLost, OutageLog, RetryPolicy
from mqproc.client.subscription import Subscription
from mqproc.errors import (
    BadRequestError,
    GroupNotFoundError,
    MqprocError,
    NotRunningError,
    PermissionDeniedError,
    SendOutcomeUnknownError,
)
from mqproc.wire.operations import GroupAssignment

FINAL = (BadRequestError, GroupNotFoundError, PermissionDeniedError)
"""Errors after which joining again cannot succeed."""
UNREACHABLE = (NotRunningError, SendOutcomeUnknownError)
"""Errors after which a request to leave the group would only wait for the whole timeout again."""
_log = logging.getLogger("mqproc.consumer")


class Membership:
    """Membership of a group: joins, sends heartbeats and receives assignments in the background."""

    def __init__(
        self,
        client: Connections,
        subscription: Subscription,
        assignment: Assignment[Any],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        """`assignment` has the consumer's queues; `on_end` gets the error that ends the membership."""
        self._client = client
        self._subscription = subscription
        self._assignment = assignment
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._member_id = ""
        self._generation = -1
        self._heartbeat_s = 1.0
        self._asked_at = 0.0
        self.valid_until = 0.0
        """Monotonic time until which the server certainly counts this consumer as a member."""
        self._connection: PooledConnection | None = None
        self._background = Background("mqproc-consumer", self._run)

    def start(self) -> None:
        """Join, and continue in the background. Raises the error that refused the join.

        After any exception `leave` must be called.
        """
        deadline = time.monotonic() + self._client.timeout_s
        failures = 0
        while True:
            try:
                self._join()
                break
            except (MqprocError, ConnectionLost) as error:
                failures += 1
                pause_s = _pause_before_join(error, self._client.retry, failures, deadline)
            time.sleep(pause_s)
        self._background.start()

    def leave(self, *, reachable: bool = True) -> None:
        """End the membership and the background work.

        `reachable` False sends no request to leave the group.
        """
        try:
            self._background.request_stop()
            if self._member_id and reachable and self._connection is not None:
                # The end of the connection has the same effect: a group that is gone is not waited for.
                with contextlib.suppress(MqprocError):
                    self._client.run(group_requests.leave(self._subscription.group, self._member_id))
        finally:
            if self._background.join(self._heartbeat_s + self._client.timeout_s):
                self._close_connection()

    def _run(self) -> None:
        outage = OutageLog(_log, f"membership of group {self._subscription.group}", self._client.retry)
        try:
            while not self._background.stopping:
                try:
                    if self._connection is None:
                        self._join()
                    else:
                        self._ask(self._connection, self._heartbeat())
                        self._commit_done(self._connection)
                    outage.over()
                    continue
                except FINAL as error:
                    self._on_end(error)
                    return
                except (MqprocError, ConnectionLost) as error:
                    pause_s = outage.failed(error)
                self._close_connection()
                self._background.pause(pause_s)
        finally:
            self._close_connection()

    def _join(self) -> None:
        if self._connection is None:
            self._connection = self._client.take_connection(QUERY)
        try:
            call = self._subscription.join(self._member_id, self._assignment.holding())
            self._ask(self._connection, call)
        except BaseException:
            self._close_connection()
            raise

    def _heartbeat(self) -> Call[GroupAssignment]:
        group = self._subscription.group
        return group_requests.heartbeat(group, self._member_id, self._generation, self._heartbeat_s)

    def _ask(self, connection: PooledConnection, call: Call[GroupAssignment]) -> None:
        self._asked_at = time.monotonic()
        answer = connection.ask(call, self._client.deadline_of(call))
        self._member_id = answer.member_id
        self._generation = answer.generation
        if answer.heartbeat_ms:
            self._heartbeat_s = answer.heartbeat_ms / 1000
        if answer.changed:
            self._on_assignment(answer)
        # After the assignment, so that queues that were taken away are not handed out under the new time.
        self.valid_until = self._asked_at + self._subscription.session_timeout_ms / 1000

    def _commit_done(self, connection: PooledConnection) -> None:
        """Commit finished messages, since the caller commits nothing while it handles one."""
        sent = self._assignment.to_commit()
        if not sent:
            return
        call = group_requests.commit_of_member(self._subscription.group, self._member_id, entries(sent))
        try:
            refused = connection.ask(call, self._client.deadline_of(call))
        except BaseException:
            self._assignment.not_committed(sent)
            raise
        self._assignment.committed(sent, refused)

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _pause_before_join(
    error: MqprocError | ConnectionLost, policy: RetryPolicy, failures: int, deadline: float
) -> float:
    """Seconds to wait before the next attempt at a first join, or the user's error."""
    pause_s = policy.pause_s(failures)
    final = isinstance(error, FINAL) or time.monotonic() + pause_s >= deadline
    if isinstance(error, ConnectionLost):
        if final or not error.ever_connected:
            raise error.user_error() from None
    elif final or not error.retryable:
        raise error
    return pause_s


class Broadcast(OwnProgress):
    """Search for the queues of a broadcast consumer, in place of a membership."""

    def __init__(
        self,
        client: Connections,
        subscription: Subscription,
        path: str,
        assignment: Assignment[Any],
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        super().__init__(subscription, path, on_assignment, on_end)
        self._client = client
        self._assignment = assignment
        self._background = Background("mqproc-broadcast", self._run)

    def start(self) -> None:
        """Find the queues, and continue in the background.

        Raises as `open`, and the error of the first search. After any exception `leave` must be called.
        """
        self.open()
        run_steps(self._client.run, self.find_queues())
        self._background.start()

    def leave(self, *, reachable: bool = True) -> None:
        """End the background work and save the progress. No group needs to be `reachable`."""
        try:
            self._background.stop()
        finally:
            self.end()

    def _run(self) -> None:
        while True:
            self._background.pause(LOOK_S)
            if self._background.stopping:
                return
            self.commit_done(self._assignment)
            try:
                run_steps(self._client.run, self.find_queues())
            except OSError as error:
                self._on_end(error)
                return
            except MqprocError:
                continue  # The group does not answer, as the fetcher reports; or no descriptor is left for now.
