"""Checks of options: against each other, against the store's files, against what the store sees."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

from mqproc.cli.doctor.finding import Check, Said, error, note, ok, warning
from mqproc.cli.doctor.patient import Patient
from mqproc.cli.output import format_bytes
from mqproc.cli.times import format_duration
from mqproc.config import FIELDS
from mqproc.paths import in_shell
from mqproc.quantities import counted

ENTRIES_PER_SLOT_MAX: Final = 8
"""RocketMQ's defaults make 4 of a full file."""
RECORD_OVERHEAD: Final = 64 * 1024
"""What a record has besides its body, at most: topic, properties, fixed fields."""
ORDINARY_OVERHEAD: Final = 2048
"""The same with keys, a tag and a few properties."""
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


def _index_slots(patient: Patient) -> Said | None:
    """How many entries share a slot: what a look-up by key has to walk."""
    if not patient.options.message_index_enable:
        return ok("there is no index (message_index_enable = false)")
    slots, items = _index_shape(patient)
    entries = max(_entries_of_files(patient), default=0)
    worst, whole = max(entries, 1) / slots, items / slots
    if max(worst, whole) <= ENTRIES_PER_SLOT_MAX:
        return ok(f"{items:,} entries in {slots:,} slots make {whole:.1f} a slot when a file is full")
    shown = (
        f"{entries:,} entries of an index file share {slots:,} slots: {worst:.0f} a slot, {whole:.0f} when it is full"
        if entries
        else f"{items:,} entries of an index file will share {slots:,} slots: {whole:.0f} a slot when it is full"
    )
    mend = patient.set_options(max_hash_slot_num=-(-items // 4), max_index_num=items)
    if patient.inventory and patient.inventory.index and patient.paths:
        mend = _with_new_index(patient, mend)
    return warning(shown, f"a look-up by key walks {max(worst, whole):.0f} entries of the file instead of 4", mend)


def _with_new_index(patient: Patient, mend: str) -> str:
    """The index follows from the log: a start without one makes it again, in the shape that the options say."""
    assert patient.paths is not None
    return f"{patient.stop_first}rm -r {in_shell(patient.paths.index)}; {mend.removeprefix(patient.stop_first)}"


def _index_shape(patient: Patient) -> tuple[int, int]:
    sizes = patient.inventory.sizes if patient.inventory else None
    if sizes is None:
        return patient.options.max_hash_slot_num, patient.options.max_index_num
    return sizes.slots, sizes.items


def _entries_of_files(patient: Patient) -> Iterable[int]:
    from mqproc.store.verify.picture import read_index_headers

    if patient.inventory is None:
        return []
    return [file.header.count - 1 for file in read_index_headers(patient.io, patient.inventory)]


def _retention(patient: Patient) -> Said | None:
    """Whether what comes in the time that messages are kept fits on the disk, by the log's own times."""
    words, options = patient.words, patient.options
    if words is None or not words["oldest_store_timestamp_ms"]:
        return None
    span_ms = words["written_store_timestamp_ms"] - words["oldest_store_timestamp_ms"]
    log_bytes = words["written"] - words["min_physical_offset"]
    if span_ms < RATE_MS_MIN or log_bytes <= 0:
        return ok("too little has been stored to tell a rate")
    used, free = patient.io.disk_usage(patient.place)
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
        f"the disk decides what is kept: after {hours} h the oldest messages go, consumed or not",
        f"a disk of {format_bytes((needed + for_others) * 100 / options.disk_max_used_space_ratio)}, or "
        + patient.set_options(file_reserved_time=max(1, hours)),
    )


def _ratios(patient: Patient) -> Said | None:
    options = patient.options
    low, middle, high = (
        options.disk_max_used_space_ratio,
        options.disk_space_clean_forcibly_ratio,
        options.disk_space_warning_level_ratio,
    )
    if low <= middle <= high:
        return ok(f"{low} % ≤ {middle} % ≤ {high} %")
    low, middle, high = sorted((low, middle, high))
    return warning(
        f"disk_max_used_space_ratio = {options.disk_max_used_space_ratio}, disk_space_clean_forcibly_ratio = "
        f"{options.disk_space_clean_forcibly_ratio}, disk_space_warning_level_ratio = "
        f"{options.disk_space_warning_level_ratio} are not in this order",
        "a filling disk first deletes what has expired, then the oldest, and only then refuses sends",
        patient.set_options(
            disk_max_used_space_ratio=low, disk_space_clean_forcibly_ratio=middle, disk_space_warning_level_ratio=high
        ),
    )


def _segment_on_disk(patient: Patient) -> Said | None:
    """Retention deletes whole segments: three of them should fit between its two levels."""
    used, free = patient.io.disk_usage(patient.place)
    options = patient.options
    size = patient.inventory.sizes.segment if patient.inventory else options.mapped_file_size_commit_log
    between = (used + free) * (options.disk_space_warning_level_ratio - options.disk_max_used_space_ratio) // 100
    if 3 * size <= max(between, 0):
        return ok(f"segments of {format_bytes(size)} on a disk of {format_bytes(used + free)}")
    whole = max(1 << 20, between // 4 // 4096 * 4096)
    return warning(
        f"three segments of {format_bytes(size)} do not fit between {options.disk_max_used_space_ratio} % and "
        f"{options.disk_space_warning_level_ratio} % of {format_bytes(used + free)}",
        "one segment is written, one is ready, one is being deleted: the disk is full before retention has made room",
        "a larger disk, or for a new store " + patient.set_options(mapped_file_size_commit_log=whole),
    )


def _adopted_sizes(patient: Patient) -> Said | None:
    """Options that say other sizes than the store's files have."""
    if patient.inventory is None or not patient.inventory.segments:
        return None
    sizes = patient.inventory.sizes
    have = {
        "mapped_file_size_commit_log": sizes.segment,
        "mapped_file_size_consume_queue": sizes.queue_file,
        "max_hash_slot_num": sizes.slots,
        "max_index_num": sizes.items,
    }
    wanted = {name: _wanted(patient, name) for name in _ADOPTED if patient.said(name)}
    other = {name: value for name, value in wanted.items() if value != have[name]}
    if not other:
        return ok("files have the sizes that the options say")
    name, value = next(iter(other.items()))
    start = f"mqproc up {patient.store_flag}"
    anew = (
        f"for an index of the new shape: {_with_new_index(patient, start)}"
        if name in ("max_hash_slot_num", "max_index_num")
        else "for files of the new size copy into a new store: mqproc store export, mqproc import"
    )
    return warning(
        f"{name} = {value:,} ({patient.settings[name].source}), but the store's files have {have[name]:,}",
        "files of another size cannot lie beside them, so a start goes by what is there: the option does nothing",
        f"{patient.set_options(**{each: have[each] for each in other})}; {anew}",
    )


def _wanted(patient: Patient, name: str) -> int:
    value = getattr(patient.options, name)
    return int(patient.options.consume_queue_file_bytes if name == "mapped_file_size_consume_queue" else value)


def _message_size(patient: Patient) -> Said | None:
    options = patient.options
    segment = patient.inventory.sizes.segment if patient.inventory else options.mapped_file_size_commit_log
    largest = options.max_message_size
    if largest + RECORD_OVERHEAD > options.max_frame_bytes:
        return warning(
            f"max_message_size = {largest:,}, but a frame is at most max_frame_bytes = {options.max_frame_bytes:,}",
            "the largest messages are refused before they are looked at, and their connection is closed",
            patient.set_options(max_frame_bytes=min(1 << 30, 2 * largest)),
        )
    if largest + ORDINARY_OVERHEAD > segment:
        return warning(
            f"max_message_size = {largest:,}, but a segment has {segment:,} bytes",
            "a record lies in one segment: larger messages are refused whatever max_message_size says",
            patient.set_options(max_message_size=max(10, segment - ORDINARY_OVERHEAD)),
        )
    if largest > options.max_pull_bytes:
        return note(
            f"max_message_size = {largest:,}, max_pull_bytes = {options.max_pull_bytes:,}",
            "a pull answers with one such message at a time",
            patient.set_options(max_pull_bytes=min(options.max_frame_bytes, 2 * largest)),
        )
    return ok(f"messages of {format_bytes(largest)} fit into frames, segments and pulls")


def _late_deliveries(patient: Patient) -> Said | None:
    options = patient.options
    kept_s = options.file_reserved_time * 3600
    if options.timer_max_delay_sec <= kept_s:
        return ok(f"a message may wait {format_duration(options.timer_max_delay_sec)}, and is kept as long")
    return warning(
        f"a message may wait {options.timer_max_delay_sec:,} s for its time (timer_max_delay_sec), but is kept "
        f"{options.file_reserved_time} h (file_reserved_time)",
        "one that has been deleted when its time comes is never delivered",
        patient.set_options(file_reserved_time=-(-options.timer_max_delay_sec // 3600)),
    )


def _loss_window(patient: Patient) -> Said | None:
    options = patient.options
    window_ms = max(options.flush_interval_commit_log, options.flush_commit_log_thorough_interval)
    if options.sync_flush or window_ms <= LOSS_WINDOW_MS_MAX:
        return ok("SYNC_FLUSH: a send waits for its sync" if options.sync_flush else f"{window_ms / 1000:g} s at most")
    return warning(
        f"ASYNC_FLUSH with flush_commit_log_thorough_interval = {options.flush_commit_log_thorough_interval:,} ms",
        f"a loss of power takes up to {window_ms / 1000:,.0f} s of messages that senders hold for stored",
        patient.set_options(flush_commit_log_thorough_interval=10_000),
    )


def _queue_count(patient: Patient) -> Said | None:
    if patient.inventory is None:
        return None
    count, most = len(patient.inventory.queues), patient.options.max_queues
    if count <= QUEUES_RATIO_MAX * most:
        return ok(f"{counted(count, 'queue')} of {most:,}")
    return warning(
        f"{counted(count, 'queue')}, and max_queues = {most:,}",
        "beyond it topics cannot be made: TOO_MANY_QUEUES",
        patient.set_options(max_queues=min(1 << 20, 2 * most)),
    )


def _changed_options(patient: Patient) -> Said | None:
    """Settings that the running group does not go by yet."""
    if not patient.running or not patient.used:
        return None
    other = {
        name: value
        for name in FIELDS
        if patient.said(name) and (value := getattr(patient.options, name)) != patient.used.get(name, value)
    }
    adopted = [name for name in _ADOPTED if name in other]
    for name in adopted:
        del other[name]  # Told by `file-sizes`: a restart would not change them.
    if not other:
        return ok("the group runs with these settings")
    shown = ", ".join(
        f"{name} = {value} ({patient.settings[name].source}), the group has {patient.used[name]}"
        for name, value in other.items()
    )
    return warning(
        shown,
        "what was changed since the group started does nothing yet",
        patient.taking_up(other),
    )


def _monitor_port(patient: Patient) -> Said | None:
    options, words = patient.options, patient.words
    address = f"{options.metrics_host}:{options.metrics_port}"
    taken = warning(
        f"{address} is taken by another process",
        "the store runs, but there is no /metrics, no /readyz and no status page: no alert would tell",
        patient.set_options(metrics_port=options.metrics_port + 1),
    )
    if patient.running and words is not None:
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
                patient.set_options(metrics_host="127.0.0.1"),
            )
    return ok(f"{address} is free")


def _metrics_address(patient: Patient) -> Said | None:
    host = patient.options.metrics_host
    if host in ("127.0.0.1", "::1", "localhost"):
        return ok(f"the status page is for this machine only ({host})")
    return note(
        f"/metrics and the status page are open to whoever reaches {host}",
        "they tell names of topics and groups, and the texts of errors; there is no password",
        "a firewall or a proxy in front, or " + patient.set_options(metrics_host="127.0.0.1"),
    )


TUNING_CHECKS: Final = (
    Check("index-slots", "options", "index slots suffice for the keys", _index_slots),
    Check("retention", "options", "what is to be kept fits on the disk", _retention),
    Check("disk-ratios", "options", "the levels of a filling disk are in order", _ratios),
    Check("segment-size", "options", "segments are small against the disk", _segment_on_disk),
    Check("file-sizes", "options", "files have the sizes that options say", _adopted_sizes),
    Check("message-size", "options", "the largest message fits everywhere", _message_size),
    Check("late-deliveries", "options", "messages are kept until their time comes", _late_deliveries),
    Check("loss-window", "options", "a loss of power takes seconds at most", _loss_window),
    Check("queue-count", "options", "there is room for more queues", _queue_count),
    Check("changed-options", "options", "the group goes by these settings", _changed_options),
    Check("monitor-port", "options", "the monitor has its port", _monitor_port),
    Check("monitor-address", "options", "the status page is not open to everybody", _metrics_address),
)
