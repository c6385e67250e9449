"""Fault injection for tests: kill, hang, or fail a storage call, by environment variables.

    MQPROC_CRASH=flush.before_mark        kill -9 the first process that reaches this point
    MQPROC_CRASH=flush.before_mark:5      the fifth one
    MQPROC_HANG=flush.before_msync:5      the fifth one sleeps there forever
    MQPROC_FAULT=sync:20:EIO              the 20th call of `sync` fails
    MQPROC_FAULT=pwrite:7:ENOSPC:sticky   the 7th and all later calls of `pwrite` fail

Counts start at 1 and cover all processes of a group. A crash or hang happens once, so a restarted role continues.
Without the variables a plain StoreIO is used.
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import ConfigurationError
from mqproc.io.store_io import FailedSyncError, StoreIO

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

CRASH_VARIABLE: Final = "MQPROC_CRASH"
HANG_VARIABLE: Final = "MQPROC_HANG"
FAULT_VARIABLE: Final = "MQPROC_FAULT"

CRASH_POINTS: Final = {
    "ack.before_send": "writer: messages are stored, and synced if requested; senders have no answer",
    "append.reserved": "writer: the next part of the log is reserved, nothing of it is written",
    "append.half_written": "writer: half of its write is in the log",
    "append.before_publish": "writer: bytes are in the log, `written` does not cover them",
    "append.after_publish": "writer: `written` covers them, next offsets do not, senders have no answer",
    "checkpoint.word_stored": "flushers, recovery: a word of RocketMQ's checkpoint is stored, others may not be",
    "control.created": "supervisor: the new control file is complete under its temporary name",
    "control.epoch": "supervisor: the new control file has its name, and the next epoch with it",
    "cq.half_unit": "dispatcher, recovery: half of the units that it is writing are in a ConsumeQueue file",
    "cq.roll": "dispatcher, recovery: a queue's next file is there, nothing is in it",
    "delay.delivered": "keeper: messages of a level are delivered, it counts them still as waiting",
    "dispatch.units_written": "dispatcher: units are in their queues, index entries are not",
    "dispatch.entries_put": "dispatcher: units and entries are there, nothing is published",
    "dispatch.queues_published": "dispatcher: queues show the units, `dispatched` does not",
    "index.roll": "dispatcher, recovery: the next index file is there, nothing is in it",
    "flush.before_msync": "writer, commitlog-flusher: a sync of the log is next",
    "flush.after_msync": "commitlog-flusher: the log is synced, the position is not published",
    "flush.before_mark": "flushers: a durable mark is next",
    "mark.slot_half": "flushers, recovery, supervisor: half of a slot of a durable mark is written",
    "mark.slot_written": "flushers, recovery, supervisor: a slot of a durable mark is written, not synced",
    "mark.synced": "flushers, recovery, supervisor: a durable mark is synced, not published",
    "offsets.tmp": "query: the new consumerOffset.json is durable under its temporary name",
    "offsets.renamed": "query: consumerOffset.json is replaced, its folder is not synced",
    "offsets.dirsynced": "query: its folder is synced too, nothing is published",
    "pop.checked_in": "query: a check point is stored, progress is not advanced, the receiver has no answer",
    "pop.acknowledged": "query: an acknowledgement is stored, the client has no answer",
    "pop.renewed": "query: a check point with a new time is stored, the previous one is open, no answer is sent",
    "pop.copied": "query: received messages are sent for redelivery, their check point is open",
    "pop.revived": "query: and their check point is closed in the log, not in memory",
    "pop.moved": "query: redelivered pop messages are copied for members, progress is not advanced",
    "recover.scanned": "recovery: the log's end is known, nothing is changed",
    "recover.tail_zeroed": "recovery: the torn tail is zeroed",
    "recover.tail_synced": "recovery: the zeroed tail is synced",
    "recover.later_unlinked": "recovery: a segment after the end is removed",
    "recover.cq_cut": "recovery: queues are cut to their mark",
    "recover.cq_rebuilt": "recovery: redispatch is complete",
    "recover.index_cut": "recovery: the index is cut to its mark",
    "recover.marked": "recovery: marks are moved, the checkpoint is not",
    "recover.ckpt": "recovery: the checkpoint is stored",
    "retention.min_stored": "keeper: minima are moved, nothing is deleted",
    "retention.log_unlinked": "keeper: a segment is deleted",
    "retention.cq_unlinked": "keeper: a ConsumeQueue file is deleted",
    "retention.index_unlinked": "keeper: an index file is deleted",
    "retry.copied": "query: copies of nacked messages are stored, the client has no answer",
    "retry.original_done": "query: progress has passed messages, nacked ones too; the client has no answer",
    "roll.blank": "writer: a segment's end is marked, the next one is unused",
    "roll.created": "commitlog-flusher, recovery: the next segment has a temporary name, and no room yet",
    "roll.fallocated": "commitlog-flusher, recovery: the next segment has its room under its temporary name",
    "roll.renamed": "commitlog-flusher, recovery: the next segment has its name, its folder is not synced",
    "roll.dirsynced": "commitlog-flusher, recovery: its folder is synced too, not published",
    "supervisor.abort_removed": "supervisor: all roles have ended, `abort` is removed, that is not durable yet",
    "supervisor.bells": "supervisor: semaphores have names, sockets listen, no process was forked",
    "supervisor.buried": "supervisor: a role has ended and was waited for, its successor is not started",
    "supervisor.locked": "supervisor: the lock is taken, nothing is made",
    "supervisor.recovered": "supervisor: recovery is done, no role runs",
    "supervisor.forked": "supervisor: a role was forked",
    "supervisor.stopped": "supervisor: all roles have ended, `abort` is still there",
    "timer.delivered": "keeper: due messages are delivered, its counters still include them",
    "timer.filed": "keeper: messages are in the timer's log and wheel, how far it has read is not noted",
    "topic.deletion_durable": "writer: a topic's deletion is durable, its queues are still there",
    "topic.queues_deleted": "writer: its queues are tombstones, its files are still there",
    "transaction.committed": "query: a committed message is stored, its half message not marked, no answer sent",
    "transaction.rolled_back": "query: a half message is marked as rolled back, no answer is sent",
}
"""All names passed to `crash_point` and `crash_amid`: the process, and its progress there."""

FAILING_CALLS: Final = (
    "allocate",
    "keep_link",
    "make_folder",
    "map",
    "open",
    "pread",
    "pread_into",
    "pwrite",
    "read_file",
    "rename",
    "set_size",
    "sync",
    "sync_file_system",
    "sync_folder",
    "unlink",
    "zero",
)
"""Methods of StoreIO that can fail. Calls from other methods of StoreIO count too."""

_NAP_S: Final = 3600.0


class FaultInjectionIO(StoreIO):
    """StoreIO with faults. Made before the first fork, so that counts cover all processes.

    The parameters are the values of the variables, empty for none. Raises ConfigurationError.
    """

    def __init__(self, crash: str = "", fault: str = "", hang: str = "") -> None:
        super().__init__()
        self._crash_point, self._crash_nth = _parse_point(CRASH_VARIABLE, crash)
        self._hang_point, self._hang_nth = _parse_point(HANG_VARIABLE, hang)
        self._call, self._fault_nth, self._errno, self._sticky = _parse_fault(fault) if fault else ("", 0, 0, False)
        # Shared by fork. Two simultaneous increments may count as one.
        self._crashing, self._hanging, self._called = (memoryview(self.shared_memory(8)).cast("Q") for _ in range(3))

    def crash_point(self, name: str) -> None:
        if self._ends_at(name):
            os.kill(os.getpid(), signal.SIGKILL)
        self._hang_at(name)

    def crash_amid(self, name: str, fd: int, data: Buffer, offset: int) -> None:
        """A kill leaves half of `data` plus a byte: never a whole number of units or words."""
        if self._ends_at(name):
            whole = memoryview(data).cast("B")
            StoreIO.pwrite(self, fd, whole[: len(whole) // 2 + 1], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        self._hang_at(name)

    def _ends_at(self, name: str) -> bool:
        return name == self._crash_point and _increment(self._crashing) == self._crash_nth

    def _hang_at(self, name: str) -> None:
        if name == self._hang_point and _increment(self._hanging) == self._hang_nth:
            while True:
                time.sleep(_NAP_S)

    def _about_to(self, call: str) -> None:
        if call != self._call:
            return
        count = _increment(self._called)
        if count == self._fault_nth or (self._sticky and count > self._fault_nth):
            kind = FailedSyncError if call.startswith("sync") else OSError
            raise kind(self._errno, os.strerror(self._errno), f"{FAULT_VARIABLE}, call {count:,} of {call}")


def _failing(name: str) -> Callable[..., Any]:
    plain = getattr(StoreIO, name)

    @functools.wraps(plain)
    def call(self: FaultInjectionIO, *arguments: Any, **named: Any) -> Any:
        self._about_to(name)
        return plain(self, *arguments, **named)

    return call


for _name in FAILING_CALLS:
    setattr(FaultInjectionIO, _name, _failing(_name))


def io_from_environment(environment: Mapping[str, str]) -> StoreIO:
    """The StoreIO for the environment's variables. Raises ConfigurationError."""
    values = [environment.get(name, "") for name in (CRASH_VARIABLE, FAULT_VARIABLE, HANG_VARIABLE)]
    return FaultInjectionIO(*values) if any(values) else StoreIO()


def _increment(counter: memoryview) -> int:
    counter[0] = count = int(counter[0]) + 1
    return count


def _parse_point(variable: str, text: str) -> tuple[str, int]:
    if not text:
        return "", 0
    name, _, nth = text.partition(":")
    _check_name(variable, text, "point", name, CRASH_POINTS)
    return name, _number(variable, text, nth or "1")


def _parse_fault(text: str) -> tuple[str, int, int, bool]:
    parts = text.split(":")
    if len(parts) not in (3, 4) or parts[3:] not in ([], ["sticky"]):
        raise ConfigurationError(f"{FAULT_VARIABLE} = {text!r} is not CALL:NUMBER:ERRNO or CALL:NUMBER:ERRNO:sticky")
    call, nth, name = parts[:3]
    _check_name(FAULT_VARIABLE, text, "call", call, FAILING_CALLS)
    _check_name(FAULT_VARIABLE, text, "errno", name, errno.errorcode.values())
    return call, _number(FAULT_VARIABLE, text, nth), getattr(errno, name), len(parts) == 4


def _check_name(variable: str, text: str, what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{variable} = {text!r}: no {what} is called {name!r}{hint}")


def _number(variable: str, text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit() and int(number)):
        raise ConfigurationError(f"{variable} = {text!r}: {number!r} is not a number from 1 on")
    return int(number)
