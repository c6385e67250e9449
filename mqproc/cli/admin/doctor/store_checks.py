"""Checks of a store's files and its group, without reading the log."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections import Counter
from typing import Final

import msgspec

from mqproc.cli.admin.doctor.context import Check, CheckResult, DoctorContext, error, ok, warning
from mqproc.errors import NotRunningError
from mqproc.ipc import control_words
from mqproc.ipc.health import error_text, is_silent, recovering
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.paths import shell_quoted
from mqproc.util.units import counted
from mqproc.wire.address import connect_path

SOCKETS: Final = ("ctl", "writer", "query")
SEGMENTS_CHECKED: Final = 64
"""Number of newest segments whose first record is checked."""


def _lock(context: DoctorContext) -> CheckResult | None:
    if context.paths is None:
        return None
    holder = context.holder
    if holder is None:
        return ok("the store's lock is free")
    if context.running:
        return ok(f"held by the group, supervisor {context.supervisor_pid}")
    if holder.ended:
        return error(
            f"held by {holder}",
            "their supervisor is dead but they have not ended; a start waits for the lock and fails (exit code 7)",
            f"fuser -v {shell_quoted(context.paths.lock)}; kill -9 the listed processes",
        )
    words = context.words
    if words is not None and words["supervisor_pid"] == holder.pid:
        return error(
            f"held by {holder}, whose supervisor has no heartbeat",
            "it hangs or is stopped: roles are not watched or restarted",
            f"kill -CONT {holder.pid}; if that does not help kill -9 {holder.pid}, then mqproc up {context.store_flag}",
        )
    if context.other_version:
        return warning(
            f"held by {holder}, apparently a group of another version of mqproc",
            "clients are served, but status, stat, top and this command cannot read its state",
            f"{context.restart} at a convenient time, to run this version",
        )
    return error(
        f"held by {holder}, which is not a group of mqproc",
        "RocketMQ or another program uses the store: a start is refused (exit code 7)",
        f"stop it: ps -fp {holder.pid or '…'}",
    )


def _read_only(context: DoctorContext) -> CheckResult | None:
    if context.paths is None:
        return None
    words = context.words
    failed = words is not None and control_words.read_only(words)
    if not context.io.exists(context.paths.read_only) and not failed:
        return ok("no sync has failed")
    return error(
        "the store is read-only: a sync has failed",
        "it is unknown which of the newest messages are on the disk; a second sync would succeed without proving it",
        f"look into dmesg for disk errors; {context.stop_first}mqproc store repair {context.named} --execute",
    )


def _known_damage(context: DoctorContext) -> CheckResult | None:
    from mqproc.store import damage

    if context.paths is None:
        return None
    try:
        holes = damage.load(context.io, context.paths).holes
    except msgspec.MsgspecError:
        return error(
            f"{context.paths.damage} cannot be read",
            "the known damaged ranges of the log are lost",
            f"mqproc store verify {context.named}; {context.stop_first}mqproc store repair {context.named}",
        )
    if not holes:
        return ok("no damage is known")
    return warning(
        f"{counted(len(holes), 'damaged range')} of the log, the first at {holes[0].start:,}",
        "their messages are lost unless a backup has the segments; all others are served",
        f"restore the segments from a backup and restart, or ignore it; mqproc store verify {context.named}",
    )


def _files(context: DoctorContext) -> CheckResult | None:
    """Names and sizes of files, as in the first step of `store verify`."""
    from mqproc.store.verify.findings import KINDS, FindingKind, Severity

    inventory = context.inventory
    if inventory is None:
        return None
    harmful = [
        finding
        for finding in inventory.findings
        if finding.severity is Severity.DAMAGE
        # A running group may be creating the newest segment.
        and not (context.held and finding.kind in (FindingKind.SEGMENT_SHORT, FindingKind.SEGMENT_EMPTY))
    ]
    if not harmful:
        files = len(inventory.segments) + len(inventory.index) + sum(map(len, inventory.queues.values()))
        return ok(f"{counted(files, 'file')} with correct names and sizes")
    first = harmful[0]
    counts = Counter(str(finding.kind) for finding in harmful)
    about = KINDS[first.kind]
    repair = f"mqproc store repair {context.named} shows the plan, --execute does it"
    return error(
        f"{first.file}: {str(first.kind).replace('_', ' ')}{f' ({first.text})' if first.text else ''}"
        + (f"; in all {', '.join(f'{count} {kind}' for kind, count in counts.items())}" if harmful[1:] else ""),
        about.means,
        f"{context.stop_first}{repair if 'mqproc store repair' in about.do else about.do}",
    )


def _first_records(context: DoctorContext) -> CheckResult | None:
    """Each segment must begin with a record of its position, or a BLANK."""
    inventory = context.inventory
    if inventory is None or not inventory.segments:
        return None
    if context.held and context.words is None:
        return None  # Segments are created in advance, and only the holder knows the log's end.
    end = context.words["written"] if context.words is not None else None
    wrong = []
    newest = sorted(inventory.segments)[-SEGMENTS_CHECKED:]
    for start in newest:
        if end is not None and start >= end:
            continue
        fd = context.io.open(context.paths.commit_log / f"{start:020d}") if context.paths else -1
        try:
            head = context.io.pread(fd, record.HEAD.size, 0)
        finally:
            context.io.close(fd)
        if not _begins(head, start, is_last=start == newest[-1] and end is None):
            wrong.append(start)
    if not wrong:
        return ok(f"{counted(len(newest), 'segment')} checked begin with a record")
    return error(
        f"commitlog/{wrong[0]:020d} does not begin with a record of its position"
        + (f"; {counted(len(wrong) - 1, 'more segment')}" if wrong[1:] else ""),
        "the file was modified or misnamed: its messages may be lost",
        f"mqproc store verify {context.named}; restore the file from a backup, or {context.stop_first}"
        f"mqproc store repair {context.named}",
    )


def _begins(head: bytes, start: int, *, is_last: bool) -> bool:
    if len(head) < record.HEAD.size:
        return False
    fields = record.HEAD.unpack(head)
    magic, offset = fields[1], fields[6]
    if not any(head):
        return is_last
    return magic == record.MAGIC_BLANK or (magic in (record.MAGIC_V1, record.MAGIC_V2) and offset == start)


def _sockets(context: DoctorContext) -> CheckResult | None:
    """Whether the group's sockets accept connections."""
    if not context.running:
        return None
    closed = [name for name in SOCKETS if not _listens(context, name)]
    if not closed:
        return ok("the group accepts connections")
    return error(
        f"a group runs, but nothing listens at {', '.join(f'{name}.sock' for name in closed)}",
        "clients cannot connect: the socket was removed, or this user cannot see it",
        context.restart,
    )


def _listens(context: DoctorContext, name: str) -> bool:
    assert context.paths is not None
    try:
        target = connect_path(context.paths.socket(name))
    except NotRunningError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            if not stat.S_ISSOCK(os.stat(target).st_mode):
                return False
            sock.connect(os.fspath(target))
        except OSError as problem:
            return problem.errno == errno.EAGAIN
    return True


def _group(context: DoctorContext) -> CheckResult | None:
    """State of a running group."""
    words = context.words
    if not context.running or words is None:
        return None
    if words["group_state"] == layout.GROUP_RECOVERING:
        # During recovery only the monitor runs.
        return warning(
            recovering(words),
            "nothing can be sent or read until it has finished",
            f"wait; mqproc status {context.store_flag} shows the progress",
        )
    problems = _problems(context)
    if not problems:
        return ok("every role runs")
    return error(
        "; ".join(problems),
        "the group is not fully available",
        f"mqproc errors {context.store_flag} shows why; mqproc restart ROLE {context.store_flag} is safe at any time",
    )


def _problems(context: DoctorContext) -> list[str]:
    words = context.words
    assert words is not None
    found = []
    if words["group_state"] != layout.GROUP_READY:
        found.append(f"the group is {layout.name_of(words['group_state'], layout.GROUP_NAMES)}")
    now_ns, limit_ns = time.monotonic_ns(), context.options.heartbeat_timeout_ms * 1_000_000
    for role in layout.ROLES:
        state = words[f"{role}.supervised"]
        if state != layout.RUNNING:
            found.append(f"{role} is {layout.name_of(state, layout.SUPERVISED_NAMES)}")
        elif is_silent(words, role, limit_ns, now_ns):
            found.append(f"{role} has been silent for {(now_ns - words[f'{role}.heartbeat_ns']) / 1e9:.0f} s")
    for word, what in (("dispatch_errno", "dispatch"), ("segment_errno", "the next segment")):
        if number := words[word]:
            found.append(f"{what} is blocked: {error_text(number)}")
    return found


def _held_segments(context: DoctorContext) -> CheckResult | None:
    words = context.words
    if not context.running or words is None:
        return None
    held = words["retention_held_by"]
    if held == layout.HELD_NOTHING:
        return ok("no expired segments are kept")
    return warning(
        f"expired segments are kept: {layout.name_of(held, layout.HELD_NAMES)}",
        "the disk fills although messages have expired",
        f"mqproc store retention {context.store_flag} shows them; mqproc group list {context.store_flag}",
    )


STORE_CHECKS: Final = (
    Check("lock", "store", "the lock is free or held by the group", _lock),
    Check("read-only", "store", "no sync has failed", _read_only),
    Check("known-damage", "store", "no part of the log is damaged", _known_damage),
    Check("files", "store", "files have correct names and sizes", _files),
    Check("first-records", "store", "segments begin with a record", _first_records),
    Check("sockets", "store", "the group's sockets accept connections", _sockets),
    Check("group", "group", "every role is running", _group),
    Check("held-segments", "group", "expired segments can be deleted", _held_segments),
)
