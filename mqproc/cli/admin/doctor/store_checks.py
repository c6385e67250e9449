"""Checks of a store's files and of its group: what a quick look sees, without reading the log."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections import Counter
from typing import Final

import msgspec

from mqproc.cli.admin.doctor.context import Check, DoctorContext, Said, error, note, ok, warning
from mqproc.errors import NotRunningError
from mqproc.ipc import control_words
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.metrics.health import error_text, is_silent, recovering
from mqproc.paths import in_shell
from mqproc.util.units import counted
from mqproc.wire.address import connect_path

SOCKETS: Final = ("ctl", "writer", "query")
SEGMENTS_LOOKED_AT: Final = 64
"""The first record of at most so many segments is looked at: the newest ones."""


def _lock(context: DoctorContext) -> Said | None:
    if context.paths is None:
        return None
    holder = context.holder
    if holder is None:
        return ok("nobody holds the store's lock")
    if context.running:
        return ok(f"held by the group, supervisor {context.supervisor_pid}")
    if holder.ended:
        return error(
            f"held by {holder}",
            "their supervisor is dead and they did not end with it; a start waits for the lock and gives up (7)",
            f"fuser -v {in_shell(context.paths.lock)}; kill -9 what it names",
        )
    words = context.words
    if words is not None and words["supervisor_pid"] == holder.pid:
        return error(
            f"held by {holder}, whose supervisor has stopped beating",
            "it hangs or is stopped: roles are not watched, nothing is restarted",
            f"kill -CONT {holder.pid}; if that does not help kill -9 {holder.pid}, then mqproc up {context.store_flag}",
        )
    if context.other_version:
        return warning(
            f"held by {holder}, as it seems a group of another version of mqproc",
            "clients are served, but status, stat and top cannot tell of it, and it is not looked at here",
            f"{context.restart}, when it suits: then this version runs",
        )
    return error(
        f"held by {holder}, which is no group of mqproc's",
        "RocketMQ or another program has the store: a start is refused (exit code 7)",
        f"stop it: ps -fp {holder.pid or '…'}",
    )


def _ended_in_order(context: DoctorContext) -> Said | None:
    if context.paths is None or context.held or not context.paths.root.is_dir():
        return None
    if not context.io.exists(context.paths.abort):
        return ok("the last group stopped in order")
    return note(
        "the last group was killed, or lost power (there is a file `abort`)",
        "the next start looks at everything behind the durable marks, which takes longer",
        f"mqproc store recover --dry-run {context.named} shows what it will do; mqproc up {context.store_flag}",
    )


def _read_only(context: DoctorContext) -> Said | None:
    if context.paths is None:
        return None
    words = context.words
    failed = words is not None and control_words.read_only(words)
    if not context.io.exists(context.paths.read_only) and not failed:
        return ok("no sync has failed")
    return error(
        "the store is read-only: a sync has failed",
        "which of the newest messages are on the disk is not known; a second sync would succeed and prove nothing",
        f"dmesg for the disk's error; {context.stop_first}mqproc store repair {context.named} --execute",
    )


def _known_damage(context: DoctorContext) -> Said | None:
    from mqproc.store import damage

    if context.paths is None:
        return None
    try:
        holes = damage.load(context.io, context.paths).holes
    except msgspec.MsgspecError:
        return error(
            f"{context.paths.damage} cannot be read",
            "ranges of the log that are known to be damaged are not known any more",
            f"mqproc store verify {context.named}; {context.stop_first}mqproc store repair {context.named}",
        )
    if not holes:
        return ok("no damage is known")
    return warning(
        f"{counted(len(holes), 'damaged range')} of the log, the first at {holes[0].start:,}",
        "the messages in them are lost unless a copy has the segments; everything else is served",
        f"put the segments back from a copy and restart, or leave it; mqproc store verify {context.named}",
    )


def _files(context: DoctorContext) -> Said | None:
    """Names and lengths, as `store verify` takes them first."""
    from mqproc.store.verify.findings import KINDS, FindingKind, Severity

    inventory = context.inventory
    if inventory is None:
        return None
    harmful = [
        finding
        for finding in inventory.findings
        if finding.severity is Severity.DAMAGE
        # The newest segment of a store at work may just be in the making.
        and not (context.held and finding.kind in (FindingKind.SEGMENT_SHORT, FindingKind.SEGMENT_EMPTY))
    ]
    if not harmful:
        files = len(inventory.segments) + len(inventory.index) + sum(map(len, inventory.queues.values()))
        return ok(f"{counted(files, 'file')} with the right names and lengths")
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


def _first_records(context: DoctorContext) -> Said | None:
    """Each segment begins with a record or a filler that says where it lies."""
    inventory = context.inventory
    if inventory is None or not inventory.segments:
        return None
    if context.held and context.words is None:
        return None  # Segments are made ahead, and how far the log goes only its holder knows.
    end = context.words["written"] if context.words is not None else None
    wrong = []
    newest = sorted(inventory.segments)[-SEGMENTS_LOOKED_AT:]
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
        return ok(f"{counted(len(newest), 'segment')} looked at begin with a record")
    return error(
        f"commitlog/{wrong[0]:020d} does not begin with a record of its own place"
        + (f"; {counted(len(wrong) - 1, 'more segment')}" if wrong[1:] else ""),
        "the bytes have changed, or the file is another one's: its messages may be lost",
        f"mqproc store verify {context.named}; put the file back from a copy, or {context.stop_first}"
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


def _sockets(context: DoctorContext) -> Said | None:
    """Who listens at the store's sockets."""
    if context.paths is None:
        return None
    states = {name: _listens(context, name) for name in SOCKETS}
    if context.running:
        deaf = [name for name, listens in states.items() if not listens]
        if not deaf:
            return ok("the group listens")
        return error(
            f"a group runs, but nobody answers at {', '.join(f'{name}.sock' for name in deaf)}",
            "clients cannot reach it: the file was removed, or lies where this user cannot see it",
            context.restart,
        )
    left = [context.paths.socket(name) for name in SOCKETS if states[name] is False]
    if not left:
        return ok("no socket was left behind")
    return note(
        f"{left[0]} is left of a group that was killed" + (f"; {len(left) - 1} more" if left[1:] else ""),
        "it does no harm; the next start puts its own in the place",
        "rm " + " ".join(map(in_shell, left)),
    )


def _listens(context: DoctorContext, name: str) -> bool | None:
    """None when there is no such socket."""
    assert context.paths is not None
    try:
        target = connect_path(context.paths.socket(name))
    except NotRunningError:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            if not stat.S_ISSOCK(os.stat(target).st_mode):
                return False
            sock.connect(os.fspath(target))
        except OSError as problem:
            return problem.errno == errno.EAGAIN
    return True


def _group(context: DoctorContext) -> Said | None:
    """A running group's own words."""
    words = context.words
    if not context.running or words is None:
        return None
    if words["group_state"] == layout.GROUP_RECOVERING:
        # Of the roles only the monitor runs then.
        return warning(
            recovering(words),
            "nothing can be sent or read until it has",
            f"let it come to its end; mqproc status {context.store_flag} tells how far it is",
        )
    problems = _problems(context)
    if not problems:
        return ok("every role runs")
    return error(
        "; ".join(problems),
        "the group does not serve in full",
        f"mqproc errors {context.store_flag} tells why; mqproc restart ROLE {context.store_flag} is safe at any time",
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
            found.append(f"{what} is held up: {error_text(number)}")
    return found


def _held_segments(context: DoctorContext) -> Said | None:
    words = context.words
    if not context.running or words is None:
        return None
    held = words["retention_held_by"]
    if held == layout.HELD_NOTHING:
        return ok("nothing keeps segments that have expired")
    return warning(
        f"segments that are due are kept: {layout.name_of(held, layout.HELD_NAMES)}",
        "the disk fills although messages have expired",
        f"mqproc store retention {context.store_flag} shows them; mqproc group list {context.store_flag}",
    )


REMAINS_CHECKS: Final = (
    Check("lock", "store", "the lock is the group's or nobody's", _lock),
    Check("ended-in-order", "store", "the last group stopped in order", _ended_in_order),
    Check("read-only", "store", "no sync has failed", _read_only),
    Check("known-damage", "store", "no part of the log is damaged", _known_damage),
    Check("files", "store", "files have the right names and lengths", _files),
    Check("first-records", "store", "segments begin with a record", _first_records),
    Check("sockets", "store", "sockets have listeners", _sockets),
    Check("group", "group", "every role runs and beats", _group),
    Check("held-segments", "group", "expired segments can go", _held_segments),
)
