"""The state of a group by one rule: ready, degraded (why, since when, what to do) or down.

    group_health(…)     for `status`, /readyz, the page, `top`, `doctor`, clients and the metrics behind the alerts
    find_problems(…)    the same from words alone; the supervisor notes since when each problem exists

A group is degraded whenever it does not do its whole job; one that recovers is alive but not ready. Warnings concern a
group that does.
"""

from __future__ import annotations

import bisect
import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqproc.config.parse import parse_saved
from mqproc.errors import ConfigurationError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.control_words import SUPERVISOR_TIMEOUT_NS
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.util.units import counted, format_time

if TYPE_CHECKING:
    from mqproc.config.options import Options
    from mqproc.io.store_io import Clock
    from mqproc.ipc.control import Control

READY: Final = "ready"
DEGRADED: Final = "degraded"
DOWN: Final = "down"

BEHIND_MS: Final = 10_000
UNFLUSHED_S: Final = 60.0
"""Delays above this are reported, here and by the alerts."""
_NS_PER_MS: Final = 1_000_000
_LISTEN_NS: Final = 5_000_000_000
"""A monitor that has run for longer must listen: its port may have been in use only briefly."""
_SET_PORT: Final = "set metrics_port; see mqproc errors"
_SEE_ERRORS: Final = "see mqproc errors"
_FREE_SPACE: Final = "free space; mqproc store retention shows the files it keeps and why"


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a group does not do its whole job. `since_ms`: Unix time, 0 if not known."""

    problem: str
    since_ms: int
    remedy: str

    def __str__(self) -> str:
        return f"{self.dated}: {self.remedy}"

    @property
    def dated(self) -> str:
        """The problem and since when it exists."""
        return f"{self.problem}, since {format_time(self.since_ms)}" if self.since_ms else self.problem


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """State of a group, READY, DEGRADED or DOWN, and its problems."""

    state: str
    problems: list[Problem]
    warnings: list[str]
    dispatch_behind_ms: int

    @property
    def ready(self) -> bool:
        return self.state == READY


def group_health(io: StoreIO, paths: StorePaths, words: Mapping[str, int], options: Options) -> GroupHealth:
    """The group's state, from a snapshot just taken and its files."""
    now_ns = time.monotonic_ns()
    if words["group_state"] == layout.GROUP_DOWN:
        return GroupHealth(DOWN, [Problem("the group is down", 0, "mqproc up")], [], 0)
    silent = silent_supervisor(paths, words)
    if words["group_state"] == layout.GROUP_RECOVERING:
        # Only the monitor runs during recovery, and positions are unknown.
        return GroupHealth(DOWN if silent else DEGRADED, [*silent, _not_up(words)], [], 0)
    behind_ms = dispatch_behind_ms(io, paths, words)
    problems = list(silent)
    if words["group_state"] != layout.GROUP_READY:
        problems.append(_not_up(words))
    now_ms = round(time.time() * 1000)
    found = find_problems(words, options, now_ns) | file_problems(io, paths)
    for name, (text, remedy) in found.items():
        problems.append(Problem(text, words[f"{name}.problem_since_ms"] or now_ms, remedy))
    problems += _delays(words, now_ns, now_ms, behind_ms)
    state = DOWN if silent else DEGRADED if problems else READY
    return GroupHealth(state, problems, _warnings(words), behind_ms)


def read_health(paths: StorePaths, options: Options) -> GroupHealth:
    """The group's state now. Raises as `control_words.map_file`."""
    return group_health(StoreIO(), paths, control_words.read_words(paths), options)


def saved_options(paths: StorePaths) -> dict[str, Any]:
    """The running group's options by name. Raises OSError, ValueError, ConfigurationError."""
    return parse_saved(StoreIO().read_file(paths.settings), str(paths.settings))


def silent_supervisor(paths: StorePaths, words: Mapping[str, int]) -> list[Problem]:
    """The problem that the group is not alive, from a snapshot just taken; empty when it is."""
    silent_ns = time.monotonic_ns() - words["supervisor_heartbeat_ns"]
    if silent_ns <= SUPERVISOR_TIMEOUT_NS or control_words.is_recovering(paths, words):
        return []
    text = f"the supervisor has been silent for {silent_ns / 1e9:.1f} s"
    return [Problem(text, round(time.time() * 1000) - silent_ns // _NS_PER_MS, "mqproc errors, then mqproc up")]


def _not_up(words: Mapping[str, int]) -> Problem:
    """The problem of a group that recovers, starts or stops."""
    state = words["group_state"]
    if state == layout.GROUP_RECOVERING:
        return Problem(recovering(words), words["group_started_ms"], "wait until the recovery has finished")
    since_ms = words["group_started_ms"] if state == layout.GROUP_STARTING else 0
    return Problem(f"the group is {layout.name_of(state, layout.GROUP_NAMES)}", since_ms, "wait")


# The problems of a group that is up, by their names in `layout.control.PROBLEMS`


class Cause(NamedTuple):
    """A problem's text, and what to do about it."""

    problem: str
    remedy: str


def find_problems(words: Mapping[str, int], options: Options, now_ns: int) -> dict[str, Cause]:
    """Problems by name, from a snapshot just taken; `now_ns` is monotonic."""
    return {
        name: Cause(problem, remedy)
        for rule in (_role_problems, _refusal_problems, _blocked_problems, _metrics_problem, _kernels_problem)
        for name, problem, remedy in rule(words, options, now_ns)
    }


def _role_problems(words: Mapping[str, int], options: Options, now_ns: int) -> Iterator[tuple[str, str, str]]:
    remedies = {
        layout.STARTING: "wait",
        layout.STOPPING: "wait",
        layout.STOPPED: "wait",
        layout.LENT: "until mqproc run ends",
    }
    timeout_ns = options.heartbeat_timeout_ms * _NS_PER_MS
    for role in (*layout.ROLES, layout.TEMPLATE):
        supervised = words[f"{role}.supervised"]
        if supervised != layout.RUNNING:
            state = layout.name_of(supervised, layout.SUPERVISED_NAMES)
            yield role, f"{role} is {state}", remedies.get(supervised, _SEE_ERRORS)
        elif role != layout.TEMPLATE and is_silent(words, role, timeout_ns, now_ns):
            silent_s = (now_ns - words[f"{role}.heartbeat_ns"]) / 1e9
            yield role, f"{role} has been silent for {silent_s:.1f} s", "it will be restarted"


def _refusal_problems(words: Mapping[str, int], options: Options, _now_ns: int) -> Iterator[tuple[str, str, str]]:
    """Why messages are refused."""
    if failed := control_words.sync_errno(words):
        reason = control_words.why_read_only(failed)
        yield "sync", f"the store is read-only: {reason}", "repair the disk, mqproc down, mqproc store repair"
    if words["damage_read_only"] or words["dispatch_read_only"]:
        damaged = counted(control_words.damage_holes(words), "damaged range")
        yield "damage", f"the store is read-only: {damaged}, on_damage = read_only", "see mqproc store verify"
    if words["disk_full"]:
        held = words["retention_held_by"] in (layout.HELD_GROUP, layout.HELD_RECEIVED)
        kept = ", and messages that groups have not consumed are kept" if held else ""
        refusal = options.disk_refusal(words["disk_used_bytes"], words["disk_free_bytes"])
        reason = f": {refusal}" if refusal else ""
        yield "disk", f"the disk is nearly full: sends are refused{reason}{kept}", _FREE_SPACE
    if words["segment_errno"]:
        text = f"the log gets no new segment: {error_text(words['segment_errno'])}; sends are refused at its end"
        yield "segment", text, "free space or repair the disk"
    behind = control_words.dispatch_behind_bytes(words)
    if behind > options.max_dispatch_behind_bytes:
        limit = options.max_dispatch_behind_bytes
        text = f"sends are refused: dispatch lags by {behind:,} bytes, max_dispatch_behind_bytes is {limit:,}"
        yield "backlog", text, "wait; if dispatch is stuck: mqproc restart dispatcher"


_BLOCKED: Final = (
    ("dispatch", "dispatch_errno", "dispatch waits, and consumers see no new messages"),
    ("commitlog-flush", "commitlog_flush_errno", "the log is not flushed"),
    ("cq-flush", "cq_flush_errno", "the ConsumeQueues are not flushed"),
    ("index-flush", "index_flush_errno", "the index is not flushed"),
    ("retention", "retention_errno", "retention waits, and the disk fills up"),
    ("delivery", "delivery_errno", "scheduled delivery waits"),
    ("topics", "topics_errno", "topics.json cannot be saved"),
    ("offsets", "offsets_errno", "committed offsets cannot be saved"),
)
"""Problem, word with the errno of work that is retried, text."""
_LOST: Final = (
    ("offsets-lost", "offsets_lost", "consumerOffset.json could not be read: groups lack offsets"),
    ("settings-lost", "group_settings_lost", "subscriptionGroup.json could not be read: groups have default settings"),
)
_RETRIED: Final = "repair it; blocked work then continues by itself. mqproc errors names the file"


def _blocked_problems(words: Mapping[str, int], _options: Options, _now_ns: int) -> Iterator[tuple[str, str, str]]:
    """Work that fails and is retried, and files that were lost."""
    for name, word, text in _BLOCKED:
        if words[word]:
            yield name, f"{text}: {error_text(words[word])}", _RETRIED
    for name, word, text in _LOST:
        if words[word]:
            yield name, text, "the file is in mqproc/aside: put a good copy in its place, then mqproc down, mqproc up"


def _metrics_problem(words: Mapping[str, int], options: Options, now_ns: int) -> Iterator[tuple[str, str, str]]:
    """A monitor that runs but could not listen, as when another program has its port."""
    if words[f"{layout.MONITOR}.supervised"] != layout.RUNNING or words["monitor_port"]:
        return
    if now_ns - words[f"{layout.MONITOR}.state_since_ns"] > _LISTEN_NS:
        yield "metrics", _unavailable(options), _SET_PORT


def _kernels_problem(words: Mapping[str, int], _options: Options, _now_ns: int) -> Iterator[tuple[str, str, str]]:
    if words["kernels_failed"]:
        text = f"{counted(words['kernels_left'], 'kernel')} could not be compiled: requests that need them are refused"
        yield "kernels", text, "see mqproc errors; mqproc warm compiles them"


NOTE_LOST: Final = "note_lost"
"""Fact in `opened.json`: this start found no readable note of the store's maker."""


def file_problems(io: StoreIO, paths: StorePaths) -> dict[str, Cause]:
    """Problems with the group's own small files."""
    return _options_problem(io, paths) | _maker_problem(io, paths)


def _maker_problem(io: StoreIO, paths: StorePaths) -> dict[str, Cause]:
    """The problem that it is not known whether RocketMQ made the store."""
    try:
        if not io.read_json(paths.opened, dict[str, int]).get(NOTE_LOST):
            return {}
        reason = "it was lost or unreadable at the start"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
    text = f"{paths.opened}, which names the store's maker: {reason}; unconsumed messages are kept"
    return {"maker": Cause(text, "set retention_guard if they may be deleted, as in RocketMQ; then mqproc down and up")}


def _options_problem(io: StoreIO, paths: StorePaths) -> dict[str, Cause]:
    """The problem that clients and tools cannot read the running group's options."""
    try:
        parse_saved(io.read_file(paths.settings), str(paths.settings))
    except (OSError, ValueError, ConfigurationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        text = f"the group's options cannot be read from {paths.settings}: {reason}"
        return {"options": Cause(text, "mqproc down, then mqproc up, writes them again")}
    return {}


def note_problems(control: Control, io: StoreIO, paths: StorePaths, options: Options, clock: Clock) -> None:
    """Store since when each problem exists, for all readers: the supervisor's part."""
    found = find_problems(control.snapshot(), options, clock.monotonic_ns()) | file_problems(io, paths)
    for name, index in layout.PROBLEM_SINCE.items():
        if (name in found) != bool(control.load(index)):
            control.store(index, clock.time_ms() if name in found else 0)


def _delays(words: Mapping[str, int], now_ns: int, now_ms: int, behind_ms: int) -> Iterator[Problem]:
    """Work that is late, since the time that its age gives."""
    if behind_ms >= BEHIND_MS and not words["dispatch_errno"]:
        text = f"consumers see messages {behind_ms / 1000:.0f} s late"
        yield Problem(text, now_ms - behind_ms, "if dispatch is stuck: mqproc restart dispatcher")
    if (age_s := unflushed_seconds(words, now_ns)) >= UNFLUSHED_S:
        text = f"a power loss would take the last {age_s:.0f} s"
        yield Problem(text, now_ms - round(age_s * 1000), "check the disk and the commitlog-flusher")


def _warnings(words: Mapping[str, int]) -> list[str]:
    """Warnings for the operator of a group, with remedies."""
    found = []
    if words["kernels_left"] and not words["kernels_failed"]:
        found.append(f"{compiling(words)}; SQL92 filters and searches wait for them")
    if holes := control_words.damage_holes(words):
        damaged = counted(holes, "damaged range")
        found.append(f"the log has {damaged}, which reads skip: see mqproc store verify")
    if lost := words["retention_unconsumed"]:
        messages = counted(lost, "message")
        found.append(f"retention has deleted {messages} that groups had not consumed: see retention_guard")
    return found


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


def compiling(words: Mapping[str, int]) -> str:
    """Text for kernels that are being compiled."""
    left = f", about {words['kernels_left_ms'] / 1000:.0f} s" if words["kernels_left_ms"] else ""
    return f"{counted(words['kernels_left'], 'kernel')} left to compile{left}"


def recovery_progress(words: Mapping[str, int]) -> str:
    """Recovery's step and progress."""
    step, extent = words["recovery_step"], words["recovery_extent"]
    if step == layout.STEP_NONE:
        return "not at the log yet"
    if step == layout.STEP_KERNELS and words["kernels_left"]:
        return f"{layout.STEP_NAMES[step]}: {compiling(words)}"
    far = f", {min(words['recovery_done'], extent) / 1e6:,.1f} of {extent / 1e6:,.1f} MB" if extent else ""
    return f"{layout.name_of(step, layout.STEP_NAMES)}{far}"


def not_offered(options: Options) -> str:
    """Text for a monitor that does not listen although its group runs."""
    return f"{_unavailable(options)}: {_SET_PORT}"


def _unavailable(options: Options) -> str:
    return f"metrics and the status page are unavailable at {options.metrics_host}:{options.metrics_port}"


def readiness(group: str, state: str) -> str:
    """The state as text; a group that is not up has the name of its own state, too."""
    return state if group == layout.GROUP_NAMES[layout.GROUP_READY] else f"{group}, not ready"


def unflushed_seconds(words: Mapping[str, int], now_ns: int) -> float:
    """Upper bound of the age of the oldest message that a power loss could take; 0 if none."""
    if not control_words.flush_behind_bytes(words):
        return 0.0
    since_ns = words["all_flushed_ns"] or words["written_ns"]
    return max(0, now_ns - since_ns) / 1e9


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
