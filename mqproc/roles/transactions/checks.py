"""Transaction checks: when each is due, and the long polls of producers that answer them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqproc.errors import StoreBusyError
from mqproc.roles.request_limits import PendingRequest, TimerQueue
from mqproc.roles.transactions.open_transactions import OpenTransactions
from mqproc.store.transactions import HalfMessage, TransactionKey
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import TransactionPollAnswer, TransactionPollRequest

POLLS_MAX: Final = 16_384
MESSAGES_MAX: Final = 256
ANSWER_BYTES: Final = 8 << 20
HOLD_MS_MAX: Final = 60_000
COMPACT_MIN: Final = 4096


@dataclass(slots=True, eq=False)
class _Poll:
    request: PendingRequest
    group: str
    number: int
    held: bool = True


class CheckPolls:
    """Held polls of producers, matched with half messages to check."""

    def __init__(self, record_of: Callable[[HalfMessage], bytes | None]) -> None:
        """`record_of` returns the record of a half message, None when it is no longer open."""
        self._record_of = record_of
        self._polls: dict[str, dict[int, _Poll]] = {}
        self._of_connection: dict[ServerConnection, set[_Poll]] = {}
        self._deadlines: TimerQueue[_Poll] = TimerQueue()
        self._waiting_checks: dict[str, dict[TransactionKey, HalfMessage]] = {}
        self._number = 0
        self.count = 0

    def of(self, group: str) -> int:
        return len(self._polls.get(group, ()))

    def ask(self, half: HalfMessage) -> None:
        """Ask a polling producer of the half message's group, now or when one polls."""
        self._waiting_checks.setdefault(half.group, {})[half.key] = half
        self._match(half.group)

    def forget(self, half: HalfMessage) -> None:
        """Cancel the check of a half message."""
        checks = self._waiting_checks.get(half.group)
        if checks is not None and checks.get(half.key) is half:
            del checks[half.key]
            if not checks:
                del self._waiting_checks[half.group]

    def poll(self, request: PendingRequest, options: TransactionPollRequest, now_ns: int) -> None:
        """Answer a poll or hold it. Raises StoreBusyError when too many are held."""
        if self.count >= POLLS_MAX:
            raise StoreBusyError(f"{POLLS_MAX:,} producers poll already", hint_ms=1000)
        self._number += 1
        timeout_ns = min(max(options.timeout_ms, 0), HOLD_MS_MAX) * 1_000_000
        poll = _Poll(request, options.group, self._number)
        self.count += 1
        self._polls.setdefault(options.group, {})[poll.number] = poll
        self._of_connection.setdefault(request.connection, set()).add(poll)
        self._deadlines.set(poll, now_ns + timeout_ns)
        self._match(options.group)
        if poll.held and not timeout_ns:
            self._end(poll, [])

    def step(self, now_ns: int) -> int:
        """Answer polls that have timed out."""
        due = self._deadlines.pop_due(now_ns)
        for poll in due:
            self._end(poll, [])
        return len(due)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until a poll times out, `at_most_s` at most."""
        return self._deadlines.seconds_left(now_ns, at_most_s)

    def drop(self, connection: ServerConnection) -> None:
        for poll in list(self._of_connection.get(connection, ())):
            self._release(poll)

    def release_all(self) -> None:
        """Answer all polls without checks."""
        for poll in [poll for polls in self._polls.values() for poll in polls.values()]:
            self._end(poll, [])

    def _match(self, group: str) -> None:
        """Answer polls of a group with its waiting checks, the oldest poll first."""
        while (polls := self._polls.get(group)) and (checks := self._waiting_checks.get(group)):
            poll = next(iter(polls.values()))
            records = self._records(checks, poll.request.options.max_messages)
            if not checks:
                del self._waiting_checks[group]
            if records:
                self._end(poll, records)

    def _records(self, checks: dict[TransactionKey, HalfMessage], max_messages: int) -> list[bytes]:
        records: list[bytes] = []
        size = 0
        while checks and len(records) < min(max(max_messages, 1), MESSAGES_MAX) and size < ANSWER_BYTES:
            record = self._record_of(checks.pop(next(iter(checks))))
            if record is not None:
                records.append(record)
                size += len(record)
        return records

    def _end(self, poll: _Poll, records: list[bytes]) -> None:
        self._release(poll)
        poll.request.answer(TransactionPollAnswer(len(records)), [memoryview(record) for record in records])

    def _release(self, poll: _Poll) -> None:
        poll.held = False
        self._deadlines.forget(poll)
        self.count -= 1
        polls = self._polls[poll.group]
        del polls[poll.number]
        if not polls:
            del self._polls[poll.group]
        of_connection = self._of_connection[poll.request.connection]
        of_connection.discard(poll)
        if not of_connection:
            del self._of_connection[poll.request.connection]


class DueChecks:
    """Due times of open half messages, for a check or a copy; closed half messages drop out."""

    def __init__(self, table: OpenTransactions) -> None:
        self._table = table
        self._heap: list[tuple[int, int, HalfMessage]] = []
        self._number = 0

    def set(self, half: HalfMessage, due_ms: int) -> None:
        """Schedule a half message, replacing its earlier time."""
        half.due_ms = due_ms
        self._number += 1
        heapq.heappush(self._heap, (due_ms, self._number, half))
        if len(self._heap) > COMPACT_MIN and len(self._heap) > 2 * len(self._table):
            self._heap = [entry for entry in self._heap if self._is_current(entry[0], entry[2])]
            heapq.heapify(self._heap)

    def pop_due(self, now_ms: int) -> HalfMessage | None:
        """Remove and return a due half message, or None."""
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, half = heapq.heappop(self._heap)
            if self._is_current(due_ms, half) and not half.busy:
                return half
        return None

    def seconds_left(self, now_ms: int, at_most_s: float) -> float:
        """Time until the first one is due, `at_most_s` at most."""
        while self._heap and not self._is_current(self._heap[0][0], self._heap[0][2]):
            heapq.heappop(self._heap)
        return min(at_most_s, max(0.0, (self._heap[0][0] - now_ms) / 1e3)) if self._heap else at_most_s

    def _is_current(self, due_ms: int, half: HalfMessage) -> bool:
        """Whether the time is the latest one set and the half message is open."""
        return due_ms == half.due_ms and self._table.is_newest(half)
