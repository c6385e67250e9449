"""Checks of options, of a store's files and of its group, without reading the log."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from mqproc.cli.admin.doctor.context import Check, DoctorContext, DoctorFinding, error, note, ok, warning
from mqproc.config.options import FIELDS
from mqproc.config.parse import unsupported_options
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.health import DOWN, read_health, recovering
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.paths import shell_quoted
from mqproc.store.topics import queues_in_use
from mqproc.util.units import counted, format_bytes, format_duration
from mqproc.wire.address import connect

ENTRIES_PER_SLOT_MAX: Final = 8
"""RocketMQ's defaults result in 4 for a full file."""
RECORD_OVERHEAD: Final = 64 * 1024
"""Upper bound of a record's size besides its body: topic, properties, fixed fields."""
ORDINARY_OVERHEAD: Final = 2048
"""The same for a record with keys, a tag and a few properties."""
RATE_MS_MIN: Final = 60_000
HOUR_MS: Final = 3_600_000
QUEUES_RATIO_MAX: Final = 0.9
LOSS_WINDOW_MS_MAX: Final = 60_000
_ADOPTED: Final = (
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
)


def _index_slots(context: DoctorContext) -> DoctorFinding | None:
    """Entries per slot, which is the length of a lookup by key."""
    if not context.options.message_index_enable:
        return ok("there is no index (message_index_enable = false)")
    slots, items = _index_shape(context)
    entries = max(_entries_of_files(context), default=0)
    worst, whole = max(entries, 1) / slots, items / slots
    if max(worst, whole) <= ENTRIES_PER_SLOT_MAX:
        return ok(f"{items:,} entries in {slots:,} slots make {whole:.1f} a slot when a file is full")
    shown = (
        f"{entries:,} entries of an index file share {slots:,} slots: {worst:.0f} a slot, {whole:.0f} when it is full"
        if entries
        else f"{items:,} entries of an index file will share {slots:,} slots: {whole:.0f} a slot when it is full"
    )
    fix = context.set_options(max_hash_slot_num=-(-items // 4), max_index_num=items)
    if context.inventory and context.inventory.index and context.paths:
        fix = _with_new_index(context, fix)
    return warning(shown, f"a lookup by key reads {max(worst, whole):.0f} entries of the file instead of 4", fix)


def _with_new_index(context: DoctorContext, fix: str) -> str:
    """Remove the index first: a start rebuilds it from the log with the sizes of the options."""
    assert context.paths is not None
    return f"{context.stop_first}rm -r {shell_quoted(context.paths.index)}; {fix.removeprefix(context.stop_first)}"


def _index_shape(context: DoctorContext) -> tuple[int, int]:
    sizes = context.inventory.sizes if context.inventory else None
    if sizes is None:
        return context.options.max_hash_slot_num, context.options.max_index_num
    return sizes.slots, sizes.items


def _entries_of_files(context: DoctorContext) -> Iterable[int]:
    from mqproc.store.verify.snapshot import read_index_headers

    if context.inventory is None:
        return []
    return [file.header.count - 1 for file in read_index_headers(context.io, context.inventory)]


def _retention(context: DoctorContext) -> DoctorFinding | None:
    """Whether the messages of the retention time fit on the disk, by the log's rate."""
    words, options = context.words, context.options
    if words is None or not words["oldest_store_timestamp_ms"]:
        return None
    span_ms = words["written_store_timestamp_ms"] - words["oldest_store_timestamp_ms"]
    log_bytes = words["written"] - words["min_physical_offset"]
    if span_ms < RATE_MS_MIN or log_bytes <= 0:
        return ok("too little has been stored to know a rate")
    used, free = context.io.disk_usage(context.place)
    for_others = max(0, used - log_bytes)
    room = max(0, (used + free) * options.disk_max_used_space_ratio // 100 - for_others)
    per_hour = log_bytes * HOUR_MS / span_ms
    needed = per_hour * options.file_reserved_time
    hours = int(room / per_hour)
    shown = (
        f"{format_bytes(per_hour)} an hour for {options.file_reserved_time} h (file_reserved_time) are "
        f"{format_bytes(needed)}; up to {options.disk_max_used_space_ratio} % of the disk there is room for "
        f"{format_bytes(room)}"
    )
    if needed <= room:
        return ok(shown)
    return warning(
        shown,
        f"after {hours} h the oldest messages are deleted for lack of space, consumed or not",
        f"a disk of {format_bytes((needed + for_others) * 100 / options.disk_max_used_space_ratio)}, or "
        + context.set_options(file_reserved_time=max(1, hours)),
    )


def _ratios(context: DoctorContext) -> DoctorFinding | None:
    names = ("disk_max_used_space_ratio", "disk_space_clean_forcibly_ratio", "disk_space_warning_level_ratio")
    ratios = [getattr(context.options, name) for name in names]
    if ratios == sorted(ratios):
        return ok(" ≤ ".join(f"{ratio} %" for ratio in ratios))
    shown = ", ".join(f"{name} = {ratio}" for name, ratio in zip(names, ratios, strict=True))
    return warning(
        f"{shown} are not in this order",
        "a filling disk first deletes expired segments, then the oldest, and only then refuses sends",
        context.set_options(**dict(zip(names, sorted(ratios), strict=True))),
    )


def _segment_on_disk(context: DoctorContext) -> DoctorFinding | None:
    """Retention deletes whole segments, so three should fit between its two limits."""
    used, free = context.io.disk_usage(context.place)
    options = context.options
    size = context.inventory.sizes.segment if context.inventory else options.mapped_file_size_commit_log
    between = (used + free) * (options.disk_space_warning_level_ratio - options.disk_max_used_space_ratio) // 100
    if 3 * size <= max(between, 0):
        return ok(f"segments of {format_bytes(size)} on a disk of {format_bytes(used + free)}")
    whole = max(1 << 20, between // 4 // 4096 * 4096)
    return warning(
        f"three segments of {format_bytes(size)} do not fit between {options.disk_max_used_space_ratio} % and "
        f"{options.disk_space_warning_level_ratio} % of {format_bytes(used + free)}",
        "one segment is written, one is ready, one is being deleted: the disk is full before retention has freed space",
        "a larger disk, or for a new store " + context.set_options(mapped_file_size_commit_log=whole),
    )


def _adopted_sizes(context: DoctorContext) -> DoctorFinding | None:
    """Size options that differ from the store's files."""
    if context.inventory is None or not context.inventory.segments:
        return None
    sizes = context.inventory.sizes
    have = {
        "mapped_file_size_commit_log": sizes.segment,
        "mapped_file_size_consume_queue": sizes.queue_file,
        "max_hash_slot_num": sizes.slots,
        "max_index_num": sizes.items,
    }
    configured = {name: getattr(context.options, name) for name in _ADOPTED if context.is_set(name)}
    if "mapped_file_size_consume_queue" in configured:
        configured["mapped_file_size_consume_queue"] = context.options.consume_queue_file_bytes
    other = {name: value for name, value in configured.items() if value != have[name]}
    if not other:
        return ok("files have the configured sizes")
    name, value = next(iter(other.items()))
    start = f"mqproc up {context.store_flag}"
    alternative = (
        f"for an index of the new shape: {_with_new_index(context, start)}"
        if name in ("max_hash_slot_num", "max_index_num")
        else "for files of the new size copy into a new store: mqproc store export, mqproc import"
    )
    return warning(
        f"{name} = {value:,} ({context.settings[name].source}), but the store's files have {have[name]:,}",
        "a store cannot have files of several sizes, so a start uses the existing size and the option has no effect",
        f"{context.set_options(**{each: have[each] for each in other})}; {alternative}",
    )


def _message_size(context: DoctorContext) -> DoctorFinding | None:
    options = context.options
    segment = context.inventory.sizes.segment if context.inventory else options.mapped_file_size_commit_log
    largest = options.max_message_size
    if largest + RECORD_OVERHEAD > options.max_frame_bytes:
        return warning(
            f"max_message_size = {largest:,}, but a frame is at most max_frame_bytes = {options.max_frame_bytes:,}",
            "the largest messages are refused unread, and their connection is closed",
            context.set_options(max_frame_bytes=min(1 << 30, 2 * largest)),
        )
    if largest + ORDINARY_OVERHEAD > segment:
        return warning(
            f"max_message_size = {largest:,}, but a segment has {segment:,} bytes",
            "a record must fit into a segment: larger messages are refused, whatever max_message_size allows",
            context.set_options(max_message_size=max(10, segment - ORDINARY_OVERHEAD)),
        )
    if largest > options.max_pull_bytes:
        return note(
            f"max_message_size = {largest:,}, max_pull_bytes = {options.max_pull_bytes:,}",
            "a pull returns one such message at a time",
            context.set_options(max_pull_bytes=min(options.max_frame_bytes, 2 * largest)),
        )
    return ok(f"messages of {format_bytes(largest)} fit into frames, segments and pulls")


def _late_deliveries(context: DoctorContext) -> DoctorFinding | None:
    options = context.options
    kept_s = options.file_reserved_time * 3600
    if options.timer_max_delay_sec <= kept_s:
        return ok(f"a message may wait {format_duration(options.timer_max_delay_sec)}, and is kept long enough")
    return warning(
        f"a message may wait {options.timer_max_delay_sec:,} s for its time (timer_max_delay_sec), but is kept "
        f"{options.file_reserved_time} h (file_reserved_time)",
        "a message that is deleted before its delivery time is never delivered",
        context.set_options(file_reserved_time=-(-options.timer_max_delay_sec // 3600)),
    )


def _loss_window(context: DoctorContext) -> DoctorFinding | None:
    options = context.options
    window_ms = max(options.flush_interval_commit_log, options.flush_commit_log_thorough_interval)
    if options.sync_flush or window_ms <= LOSS_WINDOW_MS_MAX:
        return ok("SYNC_FLUSH: a send waits for its sync" if options.sync_flush else f"{window_ms / 1000:g} s at most")
    return warning(
        f"ASYNC_FLUSH with flush_commit_log_thorough_interval = {options.flush_commit_log_thorough_interval:,} ms",
        f"a power loss loses up to {window_ms / 1000:,.0f} s of acknowledged messages",
        context.set_options(flush_commit_log_thorough_interval=10_000),
    )


def _queue_count(context: DoctorContext) -> DoctorFinding | None:
    if context.inventory is None:
        return None
    assert context.paths is not None
    count, most = queues_in_use(StoreIO(), context.paths), context.options.max_queues
    if count <= QUEUES_RATIO_MAX * most:
        return ok(f"{counted(count, 'queue')} of {most:,}")
    found = f"{counted(count, 'queue')}, deleted ones included, and max_queues = {most:,}"
    fix = context.set_options(max_queues=min(FIELDS["max_queues"].metadata["high"], 2 * max(count, most)))
    if count > most:
        return error(found, "a group does not start with fewer queues than the store has", fix)
    return warning(found, "at the limit new topics are refused: TOO_MANY_QUEUES", fix)


def _changed_options(context: DoctorContext) -> DoctorFinding | None:
    """Changed options that the running group does not use yet."""
    if not context.running or not context.used:
        return None
    other = {
        name: value
        for name in FIELDS
        if context.is_set(name) and (value := getattr(context.options, name)) != context.used.get(name, value)
    }
    adopted = [name for name in _ADOPTED if name in other]
    for name in adopted:
        del other[name]  # The check `file-sizes` reports them: a restart does not change them.
    other.pop("message_index_tags", None)  # The index decides at each start, and the group reports it.
    if not other:
        return ok("the group runs with these settings")
    shown = ", ".join(
        f"{name} = {value} ({context.settings[name].source}), the group has {context.used[name]}"
        for name, value in other.items()
    )
    return warning(
        shown, "options changed after the start of the group have no effect yet", context.how_to_apply(other)
    )


def _monitor_port(context: DoctorContext) -> DoctorFinding | None:
    options, words = context.options, context.words
    address = f"{options.metrics_host}:{options.metrics_port}"
    taken = warning(
        f"{address} is taken by another process",
        "the store runs, but there is no /metrics, no /readyz and no status page: and no alerts",
        context.set_options(metrics_port=options.metrics_port + 1),
    )
    if context.running and words is not None:
        if words["monitor_port"]:
            return ok(f"the monitor listens at port {words['monitor_port']}")
        return taken
    if options.metrics_port == 0:
        return ok("the system will choose a port")
    with socket.socket(socket.AF_INET6 if ":" in options.metrics_host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.metrics_host, options.metrics_port))
        except OSError as problem:
            if problem.errno == 98:
                return taken
            return error(
                f"{address}: {problem.strerror}",
                "the monitor cannot listen there: no /metrics, no status page",
                context.set_options(metrics_host="127.0.0.1"),
            )
    return ok(f"{address} is free")


def _metrics_address(context: DoctorContext) -> DoctorFinding | None:
    host = context.options.metrics_host
    if host in ("127.0.0.1", "::1", "localhost"):
        return ok(f"the status page is for this machine only ({host})")
    return note(
        f"/metrics and the status page are open to all clients that can reach {host}",
        "they show names of topics and groups, and error texts, without a password",
        "a firewall or a proxy in front, or " + context.set_options(metrics_host="127.0.0.1"),
    )


OPTION_CHECKS: Final = (
    Check("index-slots", "options", "the index has enough slots", _index_slots),
    Check("retention", "options", "the retained messages fit on the disk", _retention),
    Check("disk-ratios", "options", "the limits of disk usage are in order", _ratios),
    Check("segment-size", "options", "segments are small compared to the disk", _segment_on_disk),
    Check("file-sizes", "options", "files have the configured sizes", _adopted_sizes),
    Check("message-size", "options", "the largest message fits everywhere", _message_size),
    Check("late-deliveries", "options", "messages are kept until their time comes", _late_deliveries),
    Check("loss-window", "options", "a power loss loses seconds at most", _loss_window),
    Check("queue-count", "options", "there is room for more queues", _queue_count),
    Check("changed-options", "options", "the group uses the current options", _changed_options),
    Check("monitor-port", "options", "the monitor has its port", _monitor_port),
    Check("monitor-address", "options", "the status page is not public", _metrics_address),
)


# The store and its group

SOCKETS: Final = ("ctl", "writer", "query")
SEGMENTS_CHECKED: Final = 64
"""Number of newest segments whose first record is checked."""


def _lock(context: DoctorContext) -> DoctorFinding | None:
    if context.paths is None:
        return None
    holder = context.holder
    if holder is None:
        return ok("the store's lock is free")
    if context.running:
        return ok(f"held by the group{context.supervisor}")
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


def _read_only(context: DoctorContext) -> DoctorFinding | None:
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


def _known_damage(context: DoctorContext) -> DoctorFinding | None:
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


def _files(context: DoctorContext) -> DoctorFinding | None:
    """Names and sizes of files, as in the first step of `store verify`."""
    from mqproc.store.verify.findings import FindingKind, Severity

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
    repair = f"mqproc store repair {context.named} shows the plan, --execute does it"
    return error(
        f"{first.file}: {str(first.kind).replace('_', ' ')}{f' ({first.text})' if first.text else ''}"
        + (f"; in all {', '.join(f'{count} {kind}' for kind, count in counts.items())}" if harmful[1:] else ""),
        first.kind.means,
        f"{context.stop_first}{repair if 'mqproc store repair' in first.kind.do else first.kind.do}",
    )


def _unsupported(context: DoctorContext) -> DoctorFinding | None:
    """Check the store and broker.conf for data of RocketMQ that mqproc does not read."""
    from mqproc.store.unsupported import find_unsupported

    if context.paths is None:
        return None
    found = [(str(each), each.feature) for each in find_unsupported(context.io, context.paths)]
    found += [
        (f"{context.config_file}: {line.name} = {line.value}", feature)
        for line, feature in unsupported_options(context.config_file)
    ]
    if not found:
        return ok("mqproc reads all parts of the store")
    shown = "; ".join(text for text, _feature in found)
    effects = "; ".join(dict.fromkeys(feature.effect for _text, feature in found))
    if context.options.ignore_kvstore and all(feature.ignorable for _text, feature in found):
        return warning(shown, f"ignored by ignore_kvstore: {effects}", "use the store with RocketMQ first")
    return error(shown, f"a start is refused: {effects}", "; ".join(dict.fromkeys(each.remedy for _, each in found)))


def _first_records(context: DoctorContext) -> DoctorFinding | None:
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


def _sockets(context: DoctorContext) -> DoctorFinding | None:
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            connect(sock, context.paths.socket(name))
        except OSError as problem:
            return problem.errno == errno.EAGAIN
    return True


def _group(context: DoctorContext) -> DoctorFinding | None:
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
    assert context.paths is not None
    try:
        health = read_health(context.paths, context.options)
    except (NotRunningError, CorruptStoreError) as problem:
        # The group has ended since its words were read, or its files were removed.
        return error(
            f"the group's state cannot be read: {problem}",
            "status, top and metrics get the same error",
            context.restart,
        )
    if health.ready:
        return ok("the group does its whole job")
    why = "nothing works" if health.state == DOWN else "the group does not do its whole job"
    remedies = dict.fromkeys(problem.remedy for problem in health.problems)
    return error("; ".join(problem.dated for problem in health.problems), why, "; ".join(remedies))


def _held_segments(context: DoctorContext) -> DoctorFinding | None:
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
    Check("unsupported", "store", "mqproc reads all parts of the store", _unsupported),
    Check("first-records", "store", "segments begin with a record", _first_records),
    Check("sockets", "store", "the group's sockets accept connections", _sockets),
    Check("group", "group", "every role is running", _group),
    Check("held-segments", "group", "expired segments can be deleted", _held_segments),
)
