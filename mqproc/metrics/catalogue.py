"""Catalogue of all metrics: name, type, unit, labels, help.

Names follow Prometheus' rules: one prefix, base units, `_total` for counters, timestamps instead of ages, except for
delays, which are 0 without a backlog. Metrics that RocketMQ has use its terms. Labels have few values: topics and
groups are limited by `metrics_series_max`, all others are fixed sets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mqproc.ipc.counters import Buckets

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

Labels = tuple[str, ...]
Samples = Sequence[tuple[Labels, float | Buckets]]
"""One metric's samples: label values in the catalogue's order, and the value."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric family. `name` is the name in queries, including `_total`."""

    name: str
    kind: str
    help: str
    labels: Labels

    @property
    def unit(self) -> str:
        """Unit at the end of the name, "" without one."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in ("seconds", "bytes", "ratio") else ""


def _counter(name: str, help_text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, GAUGE, help_text, labels)


def _histogram(name: str, help_text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, HISTOGRAM, help_text, labels)


METRICS: tuple[MetricSpec, ...] = (
    # The group
    _gauge("mqproc_up", "1 while the supervisor sends heartbeats or recovers the store."),
    _gauge("mqproc_build_info", "1, with the version of mqproc and of Python.", "version", "python"),
    _gauge("mqproc_group_ready", "1 while every role runs and the store takes messages, as /readyz says."),
    _gauge("mqproc_group_recovering", "1 during recovery, while positions and queues are unknown."),
    _gauge("mqproc_group_started_timestamp_seconds", "Unix time at which this supervisor started."),
    # Roles and their processes
    _gauge("mqproc_role_up", "1 while the role's process runs.", "role"),
    _gauge("mqproc_role_heartbeat_timestamp_seconds", "Unix time of the role's last heartbeat.", "role"),
    _counter("mqproc_role_restarts_total", "Unexpected exits of the role since the group started.", "role"),
    _counter("mqproc_role_cycles_total", "Steps of the role that did work.", "role"),
    _histogram("mqproc_role_cycle_seconds", "Duration of steps that did work, sampled.", "role"),
    _counter("mqproc_errors_total", "Errors logged by the role; the supervisor's include earlier runs.", "role"),
    _counter("mqproc_log_lines_dropped_total", "Log lines that the reader of the output did not take.", "role"),
    _counter("mqproc_process_cpu_seconds_total", "Processor time of the role's process.", "role"),
    _gauge("mqproc_process_resident_memory_bytes", "Resident memory, shared pages counted in full.", "role"),
    _gauge(
        "mqproc_process_proportional_memory_bytes",
        "Resident memory, shared pages counted proportionally: may be summed.",
        "role",
    ),
    _gauge("mqproc_process_open_fds", "Open descriptors of the process.", "role"),
    # The log
    _counter("mqproc_messages_appended_total", "Messages appended to the topic's queues, ever.", "topic"),
    _counter("mqproc_append_frames_total", "Append requests completed since the group started."),
    _counter("mqproc_repeats_dropped_total", "Duplicate messages dropped by unique id."),
    _counter("mqproc_append_failures_total", "Requests that the writer refused with an error."),
    _counter("mqproc_appended_bytes_total", "Bytes of records appended to the CommitLog, ever."),
    _histogram(
        "mqproc_append_duration_seconds",
        "Duration of the writer's step that stored a request, with its waits and syncs; sampled.",
    ),
    _histogram("mqproc_message_size_bytes", "Size of records."),
    _gauge("mqproc_commit_log_min_offset_bytes", "Physical offset of the first record that can be read."),
    _gauge("mqproc_commit_log_max_offset_bytes", "Physical offset after the last record."),
    _gauge("mqproc_last_append_timestamp_seconds", "Store time of the last record."),
    _gauge("mqproc_segments_ready", "Preallocated, unused CommitLog segments."),
    _counter("mqproc_segment_waits_total", "Times that the writer waited for a new segment."),
    _counter("mqproc_segment_wait_seconds_total", "Time that the writer has waited for new segments."),
    _gauge("mqproc_segment_blocked", "errno that prevents the creation of a segment, 0 without one."),
    _counter("mqproc_append_slowed_seconds_total", "Time that sends were delayed by dispatch back-pressure."),
    _counter("mqproc_clock_steps_total", "Backward steps of the clock."),
    # Flush
    _gauge("mqproc_flushed_offset_bytes", "Log position below which everything is durable.", "target"),
    _gauge("mqproc_flush_behind_bytes", "Log whose records, units or entries are not durable.", "target"),
    _gauge("mqproc_unflushed_seconds", "Age of the oldest message that a power loss could take."),
    _counter("mqproc_flushes_total", "Files synced since the group started.", "target"),
    _counter("mqproc_flush_passes_total", "Flush passes, with or without work.", "target"),
    _counter("mqproc_forced_flushes_total", "Passes that synced everything.", "target"),
    _histogram("mqproc_flush_duration_seconds", "Duration of passes that synced something.", "target"),
    _gauge("mqproc_last_flush_timestamp_seconds", "Unix time of the last completed pass.", "target"),
    _gauge("mqproc_last_forced_flush_timestamp_seconds", "Unix time of the last forced pass.", "target"),
    _gauge("mqproc_durable_mark_bytes", "The log's durable mark."),
    _gauge("mqproc_read_only", "1 while messages are refused after a failed sync, or by on_damage."),
    _gauge("mqproc_sync_failed", "1 after a failed sync, until the store is repaired."),
    _gauge("mqproc_sync_errno", "errno of the role's first failed sync, 0 without one.", "role"),
    # Dispatch
    _gauge("mqproc_dispatched_offset_bytes", "Queues and index hold all records below this log position."),
    _counter("mqproc_messages_dispatched_total", "Messages dispatched since the group started."),
    _counter("mqproc_index_entries_total", "Index entries written since the group started."),
    _gauge("mqproc_dispatch_behind_bytes", "Log that queues and index do not hold yet."),
    _gauge("mqproc_dispatch_behind_messages", "Messages that queues and index do not hold yet."),
    _gauge("mqproc_dispatch_behind_seconds", "Age of the oldest message that is not dispatched."),
    _histogram("mqproc_dispatch_delay_seconds", "Time from append to dispatch of a message."),
    _gauge("mqproc_dispatch_blocked", "errno that blocks dispatch, 0 without one."),
    _counter("mqproc_dispatch_gap_bytes_total", "Log that was deleted before it was dispatched."),
    # Reading
    _counter("mqproc_requests_total", "Requests answered by the query role since the group started."),
    _counter("mqproc_request_failures_total", "Requests that the query role answered with an error."),
    _counter("mqproc_rejected_total", "Refusals of a role by error code.", "role", "code"),
    _counter("mqproc_partial_frames_total", "Requests cut off by a closed connection.", "role"),
    _histogram("mqproc_request_duration_seconds", "Time from request to answer, without long polls.", "request"),
    _gauge("mqproc_requests_in_progress", "Requests in progress in the query role."),
    _counter("mqproc_pulls_total", "Pulls answered."),
    _counter("mqproc_pulls_empty_total", "Pulls answered without a message."),
    _counter("mqproc_messages_delivered_total", "Messages delivered since the group started.", "topic"),
    _counter("mqproc_delivered_bytes_total", "Bytes of records delivered."),
    _gauge("mqproc_waiting_pulls", "Long polls held now."),
    _gauge("mqproc_client_connections", "Open connections; the writer's include those of query and keeper.", "role"),
    _counter("mqproc_key_queries_total", "Index lookups by key."),
    _counter("mqproc_key_files_walked_total", "Index files whose chain was walked for a key."),
    _counter("mqproc_key_entries_walked_total", "Index entries read for keys: the length of the chains."),
    _counter("mqproc_key_entries_matched_total", "Index entries with the key's hash and time among them."),
    _gauge("mqproc_index_slots_used_ratio", "Hash slots in use of the newest index file, 0 to 1."),
    _gauge("mqproc_index_file_filled_ratio", "Entries of the newest index file, 0 to 1."),
    _gauge("mqproc_index_entries_per_slot", "Entries of the newest index file for each slot in use."),
    # Topics and consumer groups
    _gauge("mqproc_topics", "Topics that have queues."),
    _gauge("mqproc_queues", "Queues of all topics."),
    _gauge("mqproc_queue_table_used_ratio", "Queues, deleted ones included, of max_queues, 0 to 1."),
    _gauge("mqproc_stored_messages", "Messages of the topic that can be read.", "topic"),
    _gauge("mqproc_last_message_timestamp_seconds", "Store time of the topic's last message.", "topic"),
    _gauge("mqproc_consumer_groups", "Consumer groups with progress."),
    _gauge("mqproc_consumer_lag_messages", "Messages that the group has not consumed yet.", "group", "topic"),
    _gauge(
        "mqproc_consumer_lag_seconds",
        "Age of the oldest message not consumed yet; none while it is not known. Of 256 queues at a scrape.",
        "group",
        "topic",
    ),
    _gauge("mqproc_waiting_retries", "Messages of the group in a delay level, which are no part of its lag.", "group"),
    _counter(
        "mqproc_messages_consumed_total",
        "Messages consumed since the monitor started. A reset backwards subtracts nothing.",
        "group",
        "topic",
    ),
    _gauge("mqproc_consumer_members", "Current members of consumer groups."),
    _counter("mqproc_consumer_rebalances_total", "Rebalances of consumer groups."),
    _counter("mqproc_offsets_committed_total", "Offsets committed by consumers."),
    _counter("mqproc_messages_retried_total", "Messages sent to a retry topic."),
    _counter("mqproc_messages_dead_lettered_total", "Messages sent to a dead-letter topic."),
    _counter("mqproc_dead_letters_total", "Messages in the group's dead-letter topic, ever.", "group"),
    _gauge("mqproc_transactions_open", "Half messages neither committed nor rolled back."),
    _gauge("mqproc_oldest_transaction_timestamp_seconds", "Birth of the oldest open transaction, 0 for none."),
    _gauge("mqproc_transaction_producers", "Producers that wait for transaction checks now."),
    _counter("mqproc_transaction_checks_total", "Checks of open transactions."),
    _counter("mqproc_transactions_committed_total", "Transactions committed."),
    _counter("mqproc_transactions_rolled_back_total", "Transactions rolled back."),
    _counter("mqproc_transactions_given_up_total", "Transactions given up after too many checks."),
    # Delayed messages
    _gauge("mqproc_delayed_messages", "Delayed messages, by delay level or by time.", "by"),
    _gauge("mqproc_delay_error_seconds", "Delay of the last deliveries past their due time."),
    _counter("mqproc_delayed_messages_delivered_total", "Delayed messages delivered."),
    _counter("mqproc_delayed_messages_lost_total", "Delayed messages no longer in the log when due."),
    _counter("mqproc_delayed_deliveries_refused_total", "Deliveries refused by the writer, which are retried."),
    # Retention
    _gauge("mqproc_oldest_message_timestamp_seconds", "Store time of the log's first record."),
    _counter("mqproc_retention_deleted_files_total", "Files deleted since the group started.", "target"),
    _counter("mqproc_retention_deleted_bytes_total", "Disk space of deleted files."),
    _gauge("mqproc_retention_pending_bytes", "Disk space of deleted files that is not free yet."),
    _gauge("mqproc_retention_last_look_timestamp_seconds", "Unix time of the last retention pass."),
    _gauge("mqproc_retention_held_back", "1 while due segments are kept for this reason.", "reason"),
    _gauge("mqproc_retention_blocked", "errno that ended the last retention pass early, 0 without one."),
    _counter("mqproc_unconsumed_messages_deleted_total", "Messages deleted before a group had consumed them."),
    # The disk and recovery
    _gauge("mqproc_storage_bytes", "Bytes of stored records, units and entries.", "target"),
    _gauge("mqproc_segments", "Files that hold them.", "target"),
    _gauge("mqproc_disk_used_bytes", "Of the file system that holds the store."),
    _gauge("mqproc_disk_free_bytes", "Of the file system that holds the store."),
    _gauge("mqproc_disk_usage_ratio", "Used share of the file system that holds the store, 0 to 1."),
    _gauge(
        "mqproc_disk_limit_ratio",
        "Configured used share for each action: delete_expired, delete_any_age, refuse_sends.",
        "limit",
    ),
    _gauge("mqproc_disk_full", "1 while sends are refused because the disk is nearly full."),
    _gauge("mqproc_recovery_duration_seconds", "Duration of the last recovery."),
    _gauge("mqproc_recovery_cut_bytes", "Torn tail cut by the last recovery."),
    _gauge("mqproc_damage_holes", "Damaged log ranges that reads skip."),
    _counter("mqproc_scrapes_total", "Requests to the monitor."),
)

_FAMILY = re.compile(r"^# TYPE (mqproc_\w+) ", re.MULTILINE)


def family_names(text: str) -> set[str]:
    """The names of our metrics in a scrape's text."""
    return set(_FAMILY.findall(text))
