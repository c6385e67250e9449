"""Every metric: name, type, unit, labels, help, and the words of the control file that it is read from.

Names follow Prometheus' rules: one prefix, base units, `_total` for counters, timestamps instead of ages. A metric that
RocketMQ's users know has RocketMQ's words in its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COUNTER, GAUGE = "counter", "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `name` is what a query says, `_total` included."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, COUNTER, unit, help_text, labels)


def _gauge(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, GAUGE, unit, help_text, labels)


METRICS: tuple[Metric, ...] = (
    # The group
    _gauge("mqproc_up", "", "1 while the supervisor's heartbeat goes on."),
    _gauge("mqproc_build_info", "", "1, with the version of mqproc and of Python.", "version", "python"),
    _gauge("mqproc_group_ready", "", "1 while every role runs and the store takes messages."),
    _gauge("mqproc_group_started_timestamp_seconds", "seconds", "Unix time at which this supervisor started."),
    _gauge("mqproc_role_up", "", "1 while the role's process runs.", "role"),
    _gauge("mqproc_role_heartbeat_timestamp_seconds", "seconds", "Unix time of the role's last heartbeat.", "role"),
    _counter("mqproc_role_restarts_total", "", "Times that the role died unasked in this run of the group.", "role"),
    _counter("mqproc_role_cycles_total", "", "Steps of the role that did work.", "role"),
    _counter("mqproc_errors_total", "", "Errors that the role logged.", "role"),
    # The log
    _counter("mqproc_messages_appended_total", "", "Messages appended since the group started."),
    _counter("mqproc_append_frames_total", "", "Append requests carried out since the group started."),
    _counter("mqproc_append_failures_total", "", "Append requests refused with an error."),
    _counter("mqproc_appended_bytes_total", "bytes", "Bytes of records appended to the CommitLog, ever."),
    _gauge("mqproc_commit_log_min_offset_bytes", "bytes", "Physical offset of the first record that can be read."),
    _gauge("mqproc_commit_log_max_offset_bytes", "bytes", "Physical offset behind the last record."),
    _gauge("mqproc_last_append_timestamp_seconds", "seconds", "Store time of the last record."),
    _counter("mqproc_segment_waits_total", "", "Times that the writer had to wait for a new segment."),
    _counter("mqproc_append_slowed_seconds_total", "seconds", "Time that sends were held back by dispatch."),
    _counter("mqproc_clock_steps_total", "", "Times that the clock was seen to go back."),
    # Flush
    _gauge("mqproc_flushed_offset_bytes", "bytes", "Log position below which all is durable.", "target"),
    _gauge("mqproc_flush_behind_bytes", "bytes", "Log whose records, units or entries are not durable.", "target"),
    _counter("mqproc_flushes_total", "", "Files synced since the group started.", "target"),
    _counter("mqproc_forced_flushes_total", "", "Passes that synced everything.", "target"),
    _counter("mqproc_flush_seconds_total", "seconds", "Time spent in syncs of the CommitLog."),
    _gauge("mqproc_last_forced_flush_timestamp_seconds", "seconds", "Unix time of the last forced pass.", "target"),
    _gauge("mqproc_durable_mark_bytes", "bytes", "The log's durable mark."),
    _gauge("mqproc_read_only", "", "1 after a failed sync, or by on_damage: nothing more is taken."),
    # Dispatch
    _gauge("mqproc_dispatched_offset_bytes", "bytes", "Queues and index hold all records below this log position."),
    _counter("mqproc_messages_dispatched_total", "", "Messages dispatched since the group started."),
    _counter("mqproc_index_entries_total", "", "Index entries written since the group started."),
    _gauge("mqproc_dispatch_behind_bytes", "bytes", "Log that queues and index do not hold yet."),
    _gauge("mqproc_dispatch_behind_messages", "", "Messages that queues and index do not hold yet."),
    _gauge("mqproc_dispatch_behind_seconds", "seconds", "Store time between the last dispatched and the last record."),
    _gauge("mqproc_dispatch_blocked", "", "errno that holds dispatch up, 0 when it goes on."),
    _counter("mqproc_dispatch_gap_bytes_total", "bytes", "Log that was deleted before it was dispatched."),
    # Reading
    _counter("mqproc_requests_total", "", "Requests answered by the query role since the group started."),
    _counter("mqproc_request_failures_total", "", "Requests that the query role answered with an error."),
    _counter("mqproc_messages_delivered_total", "", "Messages handed out."),
    _counter("mqproc_delivered_bytes_total", "bytes", "Bytes of records handed out."),
    _gauge("mqproc_waiting_pulls", "", "Long polls held now."),
    _gauge("mqproc_client_connections", "", "Clients connected now.", "role"),
    # Retention
    _gauge("mqproc_oldest_message_timestamp_seconds", "seconds", "Store time of the log's first record."),
    _counter("mqproc_retention_deleted_files_total", "", "Files deleted since the group started.", "target"),
    _counter("mqproc_retention_deleted_bytes_total", "bytes", "What deleted files took on disk."),
    _gauge("mqproc_retention_pending_bytes", "bytes", "Of deleted files whose space is taken yet."),
    _gauge("mqproc_retention_last_look_timestamp_seconds", "seconds", "Unix time of the last look at what is due."),
    _gauge("mqproc_retention_held_back", "", "1 while segments that are due are kept for this reason.", "reason"),
    _gauge("mqproc_retention_blocked", "", "errno that ended the last look early, 0 when none did."),
    _counter("mqproc_unconsumed_messages_deleted_total", "", "Messages deleted before a group had consumed them."),
    # The disk and recovery
    _gauge("mqproc_disk_used_bytes", "bytes", "Of the file system that holds the store."),
    _gauge("mqproc_disk_free_bytes", "bytes", "Of the file system that holds the store."),
    _gauge("mqproc_disk_usage_ratio", "ratio", "Used share of the file system that holds the store, 0 to 1."),
    _gauge("mqproc_recovery_duration_seconds", "seconds", "Duration of the last recovery."),
    _gauge("mqproc_recovery_cut_bytes", "bytes", "Torn tail cut by the last recovery."),
    _gauge("mqproc_damage_holes", "", "Holes in the log that are served around."),
    _counter("mqproc_scrapes_total", "", "Scrapes of /metrics."),
)

METRIC_BY_NAME = {metric.name: metric for metric in METRICS}

_SAMPLE = re.compile(r"^(mqproc_\w+)(?:\{| )", re.MULTILINE)


def sample_names(text: str) -> set[str]:
    """The names of our samples in a scrape's text."""
    return set(_SAMPLE.findall(text))
