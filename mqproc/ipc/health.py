"""Liveness and readiness of a group, and warnings, from its control file.

A group that recovers is alive but not ready. Each result is a list of problems with remedies; warnings are problems of
a group that is ready.
"""

from __future__ import annotations

import bisect
import errno
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.control_words import SUPERVISOR_TIMEOUT_NS
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.util.units import counted

if TYPE_CHECKING:
    from mqproc.config.options import Options

BEHIND_MS: Final = 10_000
UNFLUSHED_S: Final = 60.0
"""Delays above this are reported, here and by the alerts."""

_SEE_ERRORS = ": see mqproc errors"
_REMEDIES: Final = {
    layout.BACKOFF: _SEE_ERRORS,
    layout.EXITED: _SEE_ERRORS,
    layout.FATAL: _SEE_ERRORS,
    layout.LENT: ": until mqproc run ends",
}


def alive_problems(words: Mapping[str, int]) -> list[str]:
    """Reasons why the group is not alive, from a snapshot just taken; empty when it is."""
    silent_ns = time.monotonic_ns() - words["supervisor_heartbeat_ns"]
    if silent_ns > SUPERVISOR_TIMEOUT_NS and not control_words.is_recovering(words):
        return [f"the supervisor has been silent for {silent_ns / 1e9:.1f} s: mqproc errors, then mqproc up"]
    return []


def ready_problems(words: Mapping[str, int], timeout_ns: int) -> list[str]:
    """Reasons why the group is not ready, from a snapshot just taken; empty when it is.

    `timeout_ns`: limit of a role's heartbeat age.
    """
    now_ns = time.monotonic_ns()
    problems = alive_problems(words)
    state = words["group_state"]
    if state == layout.GROUP_RECOVERING:
        # Only the monitor runs during recovery, and positions are unknown.
        return [*problems, recovering(words)]
    if state != layout.GROUP_READY:
        problems.append(f"the group is {layout.name_of(state, layout.GROUP_NAMES)}")
    for role in layout.ROLES:
        supervised = words[f"{role}.supervised"]
        if supervised != layout.RUNNING:
            name = layout.name_of(supervised, layout.SUPERVISED_NAMES)
            problems.append(f"{role} is {name}{_REMEDIES.get(supervised, '')}")
        elif is_silent(words, role, timeout_ns, now_ns):
            silent_s = (now_ns - words[f"{role}.heartbeat_ns"]) / 1e9
            problems.append(f"{role} has been silent for {silent_s:.1f} s: it will be restarted")
    if failed := control_words.sync_errno(words):
        reason = control_words.why_read_only(failed)
        problems.append(f"the store is read-only: {reason}; repair the disk, mqproc down, mqproc store repair")
    if words["damage_read_only"] or words["dispatch_read_only"]:
        damaged = counted(control_words.damage_holes(words), "damaged range")
        problems.append(f"the store is read-only: {damaged}, on_damage = read_only; see mqproc store verify")
    if words["disk_full"]:
        problems.append("the disk is nearly full: sends are refused; free space, see mqproc store retention")
    return problems


def is_silent(words: Mapping[str, int], role: str, timeout_ns: int, now_ns: int) -> bool:
    """Whether a role runs, and had no heartbeat for longer than `heartbeat_timeout_ms`.

    All reports use this rule. Busy roles are exempt: a sync may take that long.
    """
    if words[f"{role}.supervised"] != layout.RUNNING or is_busy(words, role):
        return False
    return now_ns - words[f"{role}.heartbeat_ns"] > timeout_ns


def is_busy(words: Mapping[str, int], role: str) -> bool:
    """Whether a role reports a long operation, during which it sends no heartbeats."""
    return words[f"{role}.state"] in layout.BUSY_STATES


def recovering(words: Mapping[str, int]) -> str:
    """Text for a group in recovery, with its progress."""
    text = f"the group is {layout.GROUP_NAMES[layout.GROUP_RECOVERING]}"
    return text if words["recovery_step"] == layout.STEP_NONE else f"{text}: {recovery_progress(words)}"


def recovery_progress(words: Mapping[str, int]) -> str:
    """Recovery's step and progress."""
    step, extent = words["recovery_step"], words["recovery_extent"]
    if step == layout.STEP_NONE:
        return "not at the log yet"
    far = f", {min(words['recovery_done'], extent) / 1e6:,.1f} of {extent / 1e6:,.1f} MB" if extent else ""
    return f"{layout.name_of(step, layout.STEP_NAMES)}{far}"


def not_offered(options: Options) -> str:
    """Text for a monitor that does not listen although its group runs."""
    address = f"{options.metrics_host}:{options.metrics_port}"
    return f"metrics and the status page are unavailable at {address}: set metrics_port; see mqproc errors"


def readiness(group: str, *, ready: bool) -> str:
    """The group's state as text; a running group that is not ready is reported as such."""
    if ready:
        return "ready"
    return "not ready" if group == layout.GROUP_NAMES[layout.GROUP_READY] else f"{group}, not ready"


def unflushed_seconds(words: Mapping[str, int], now_ns: int) -> float:
    """Upper bound of the age of the oldest message that a power loss could take; 0 if none."""
    if not control_words.flush_behind_bytes(words):
        return 0.0
    since_ns = words["all_flushed_ns"] or words["written_ns"]
    return max(0, now_ns - since_ns) / 1e9


def warnings_of(words: Mapping[str, int], now_ns: int, behind_ms: int) -> list[str]:
    """Problems of a ready group, with remedies. `now_ns` is monotonic.

    `behind_ms` is the result of `dispatch_behind_ms`.
    """
    found = []
    if words["dispatch_errno"]:
        found.append(f"dispatch waits: {error_text(words['dispatch_errno'])}; it continues once that is fixed")
    elif behind_ms >= BEHIND_MS:
        found.append(
            f"consumers see messages {behind_ms / 1000:.0f} s late; if dispatch is stuck: mqproc restart dispatcher"
        )
    if (age_s := unflushed_seconds(words, now_ns)) >= UNFLUSHED_S:
        found.append(f"a power loss would take the last {age_s:.0f} s: check the disk and the commitlog-flusher")
    if words["segment_errno"]:
        found.append(
            f"the log gets no new segment: {error_text(words['segment_errno'])}; free space or repair the disk"
        )
    if holes := control_words.damage_holes(words):
        damaged = counted(holes, "damaged range")
        found.append(f"the log has {damaged}, which reads skip: see mqproc store verify")
    return found


def error_text(number: int) -> str:
    """Text of an errno word; damaged files of stopped groups may hold other numbers."""
    return f"{os.strerror(number)} (errno {number})" if number in errno.errorcode else f"errno {number}"


# Dispatch delay: the age of the oldest message that is not in queues and index.
#
# It is read from the log at the dispatched position, so it starts with the message's own age, and grows while dispatch
# is stuck. It reads files only, so it works on stopped groups, and needs neither numpy nor options.


_TIME_SIZE = 8
_HEAD_SIZE = record.BORN_HOST + record.HOST_V6_SIZE + _TIME_SIZE


def dispatch_behind_ms(io: StoreIO, paths: StorePaths, words: Mapping[str, int]) -> int:
    """Age of the oldest message not dispatched, 0 without one.

    If its record is damaged, the age of the newest message: a lower bound.
    """
    at, end = words["dispatched"], words["written"]
    if at >= end:
        return 0
    try:
        stored_ms = _stored_ms(io, paths, at, end)
    except OSError:
        stored_ms = None
    if stored_ms is None:
        stored_ms = words["written_store_timestamp_ms"]
    return max(0, round(time.time() * 1000) - stored_ms) if stored_ms else 0


def _stored_ms(io: StoreIO, paths: StorePaths, at: int, end: int) -> int | None:
    """Store time of the record at an offset, or of the next segment's first record.

    0 when `end` precedes it. None when the record is invalid.
    """
    starts = sorted(start for name in io.names(paths.commit_log) if (start := segment_start(name)) is not None)
    number = bisect.bisect_right(starts, at) - 1
    while 0 <= number < len(starts):
        start = starts[number]
        with io.opened(paths.commit_log / segment_name(start)) as fd:
            head = io.pread(fd, _HEAD_SIZE, at - start)
        if int.from_bytes(head[record.MAGIC : record.MAGIC + 4], "big", signed=True) != record.MAGIC_BLANK:
            return _store_time(head, at)
        number += 1
        at = starts[number] if number < len(starts) else end
        if at >= end:
            return 0
    return None


def _store_time(head: bytes, at: int) -> int | None:
    if len(head) < record.STORE_TIMESTAMP + _TIME_SIZE:  # Shorter than any record.
        return None
    _size, magic, *_others, place, sys_flag, _born = record.HEAD.unpack_from(head)
    time_at = record.STORE_TIMESTAMP + (record.IPV6_EXTRA if sys_flag & record.SYS_FLAG_BORN_HOST_V6 else 0)
    stored_ms = int.from_bytes(head[time_at : time_at + _TIME_SIZE], "big", signed=True)
    return stored_ms if magic in (record.MAGIC_V1, record.MAGIC_V2) and place == at and stored_ms > 0 else None
