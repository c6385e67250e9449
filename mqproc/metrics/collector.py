"""Collects the state of a running group, and derives every metric's samples from it.

    control file    words, histograms, error counters
    health          the group's problems, age of the oldest message not dispatched (`ipc.health`)
    errors          the supervisor's (`ipc.error_log`)
    queue table     topics (`metrics.topics`)
    progress        consumer groups (`metrics.groups`)
    processes       memory and processor time (`util.procfs`)

Lag is the difference of two words of one snapshot, or the age of a message. It survives the death of any role, and
equals the output of `mqproc stat`. Most counters restart at 0 with the group, which Prometheus treats as a reset; the
supervisor's errors persist.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.control import Control
from mqproc.ipc.counters import Buckets, read_buckets, read_error_counters
from mqproc.ipc.error_log import LINES_DROPPED, SeenError, seen_errors
from mqproc.ipc.health import DOWN, GroupHealth, group_health, unflushed_seconds
from mqproc.layout import control as layout
from mqproc.layout import histograms, index_file
from mqproc.metrics.catalogue import Samples
from mqproc.metrics.groups import OTHERS, GroupLabels, GroupLag, GroupLags, TableFigures, TopicTable
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.index.files import index_file_names
from mqproc.topic_names import RETRY_PREFIX
from mqproc.util.procfs import ProcessUsage, process_usage

NS: Final = 1_000_000_000
TARGETS: Final = {"commitlog": "commitlog", "consumequeue": "cq", "index": "index"}
"""Flush targets, and the prefix of their flushers' words."""

_SYNCED = {"consumequeue": "cq_synced", "index": "index_synced"}
_DELETED = {
    "commitlog": "retention_segments",
    "consumequeue": "retention_queue_files",
    "index": "retention_index_files",
}
_DELAYED = {"level": "delayed_messages", "time": "timed_messages"}
_CONNECTIONS = {layout.WRITER: "writer_connections", layout.QUERY: "query_connections"}
_PARTIAL_FRAMES = {layout.WRITER: "writer_partial_frames", layout.QUERY: "query_partial_frames"}
_HISTOGRAMS = {
    "append": "mqproc_append_duration_seconds",
    "message_size": "mqproc_message_size_bytes",
    "flush": "mqproc_flush_duration_seconds",
    "dispatch_delay": "mqproc_dispatch_delay_seconds",
    "request": "mqproc_request_duration_seconds",
    "role_step": "mqproc_role_cycle_seconds",
}

_DISK_LIMITS: Final[Mapping[str, Callable[[Options], int]]] = {
    "delete_expired": lambda options: options.disk_max_used_space_ratio,
    "delete_any_age": lambda options: options.disk_space_clean_forcibly_ratio,
    "refuse_sends": lambda options: options.disk_space_warning_level_ratio,
}

_SYNC_ERRNOS = tuple(word.name for word in layout.WORDS.values() if word.index in layout.SYNC_ERRNO_WORDS)

PLAIN: Final[Mapping[str, tuple[str, float]]] = {
    "mqproc_group_started_timestamp_seconds": ("group_started_ms", 1e-3),
    "mqproc_append_frames_total": ("appended_frames", 1),
    "mqproc_append_failures_total": ("append_rejects", 1),
    "mqproc_repeats_dropped_total": ("dropped_repeats", 1),
    "mqproc_appended_bytes_total": ("written", 1),
    "mqproc_commit_log_min_offset_bytes": ("min_physical_offset", 1),
    "mqproc_commit_log_max_offset_bytes": ("written", 1),
    "mqproc_last_append_timestamp_seconds": ("written_store_timestamp_ms", 1e-3),
    "mqproc_segment_waits_total": ("writer_segment_waits", 1),
    "mqproc_segment_wait_seconds_total": ("writer_segment_wait_us", 1e-6),
    "mqproc_segment_blocked": ("segment_errno", 1),
    "mqproc_append_slowed_seconds_total": ("writer_slowed_ms", 1e-3),
    "mqproc_clock_steps_total": ("writer_clock_steps", 1),
    "mqproc_durable_mark_bytes": ("commitlog_mark", 1),
    "mqproc_dispatched_offset_bytes": ("dispatched", 1),
    "mqproc_messages_dispatched_total": ("dispatched_messages", 1),
    "mqproc_index_entries_total": ("dispatched_entries", 1),
    "mqproc_dispatch_blocked": ("dispatch_errno", 1),
    "mqproc_dispatch_gap_bytes_total": ("dispatch_gap_bytes", 1),
    "mqproc_requests_total": ("query_requests", 1),
    "mqproc_request_failures_total": ("query_rejects", 1),
    "mqproc_requests_in_progress": ("query_waiting", 1),
    "mqproc_pulls_total": ("pulls", 1),
    "mqproc_pulls_empty_total": ("empty_pulls", 1),
    "mqproc_delivered_bytes_total": ("pulled_bytes", 1),
    "mqproc_waiting_pulls": ("waiting_pulls", 1),
    "mqproc_key_queries_total": ("key_queries", 1),
    "mqproc_key_files_walked_total": ("key_files", 1),
    "mqproc_key_entries_walked_total": ("key_items", 1),
    "mqproc_key_entries_matched_total": ("key_matches", 1),
    "mqproc_consumer_members": ("group_members", 1),
    "mqproc_consumer_rebalances_total": ("group_rebalances", 1),
    "mqproc_offsets_committed_total": ("group_commits", 1),
    "mqproc_messages_retried_total": ("group_retries", 1),
    "mqproc_messages_dead_lettered_total": ("group_dead_letters", 1),
    "mqproc_transactions_open": ("open_transactions", 1),
    "mqproc_oldest_transaction_timestamp_seconds": ("oldest_transaction_ms", 1e-3),
    "mqproc_transaction_producers": ("transaction_producers", 1),
    "mqproc_transaction_checks_total": ("transaction_checks", 1),
    "mqproc_transactions_committed_total": ("transaction_commits", 1),
    "mqproc_transactions_rolled_back_total": ("transaction_rollbacks", 1),
    "mqproc_transactions_given_up_total": ("transaction_discards", 1),
    "mqproc_delay_error_seconds": ("delivery_late_ms", 1e-3),
    "mqproc_delayed_messages_delivered_total": ("delivered_messages", 1),
    "mqproc_delayed_messages_lost_total": ("deliveries_lost", 1),
    "mqproc_delayed_deliveries_refused_total": ("deliveries_refused", 1),
    "mqproc_oldest_message_timestamp_seconds": ("oldest_store_timestamp_ms", 1e-3),
    "mqproc_retention_deleted_bytes_total": ("retention_bytes", 1),
    "mqproc_retention_pending_bytes": ("retention_pending_bytes", 1),
    "mqproc_retention_last_look_timestamp_seconds": ("retention_pass_ms", 1e-3),
    "mqproc_retention_blocked": ("retention_errno", 1),
    "mqproc_unconsumed_messages_deleted_total": ("retention_unconsumed", 1),
    "mqproc_disk_used_bytes": ("disk_used_bytes", 1),
    "mqproc_disk_free_bytes": ("disk_free_bytes", 1),
    "mqproc_disk_full": ("disk_full", 1),
    "mqproc_recovery_duration_seconds": ("recovery_us", 1e-6),
    "mqproc_recovery_cut_bytes": ("recovery_cut_bytes", 1),
    "mqproc_scrapes_total": ("scrapes", 1),
}
"""Metrics that are one word, scaled: name → (word, factor)."""


def samples_of_words(
    control: Control, options: Options, words: Mapping[str, int], health: GroupHealth
) -> dict[str, Samples]:
    """Samples by metric, from one consistent snapshot `words` and the `health` found in it."""
    now_ns = time.monotonic_ns()
    unix_offset_ns = time.time_ns() - now_ns

    def to_unix(monotonic_ns: int) -> float:
        """Unix seconds; 0 for an event that never happened."""
        return (monotonic_ns + unix_offset_ns) / NS if monotonic_ns else 0.0

    plain: dict[str, Samples] = {name: [((), words[word] * factor)] for name, (word, factor) in PLAIN.items()}
    single = _derived_metrics(control, options, words, now_ns) | {
        "mqproc_up": health.state != DOWN,
        "mqproc_group_ready": health.ready,
        "mqproc_dispatch_behind_seconds": health.dispatch_behind_ms / 1000,
    }
    return {
        **plain,
        **{name: [((), float(value))] for name, value in single.items()},
        **_by_role(control, words, to_unix),
        **_by_target(words, to_unix),
        **_histograms(control),
        "mqproc_disk_limit_ratio": [((limit,), of(options) / 100) for limit, of in _DISK_LIMITS.items()],
    }


def _derived_metrics(control: Control, options: Options, words: Mapping[str, int], now_ns: int) -> dict[str, float]:
    used, free = words["disk_used_bytes"], words["disk_free_bytes"]
    ready_end, segment = words["segments_ready_end"], options.mapped_file_size_commit_log
    slots_used = words[f"commit_index_slots_{words['commit_sequence'] & 1}"]
    entries = max(0, words["index_items"] - 1)
    return {
        "mqproc_group_recovering": words["group_state"] == layout.GROUP_RECOVERING,
        "mqproc_read_only": control_words.refuses_messages(words),
        "mqproc_sync_failed": control.read_only,
        "mqproc_damage_holes": control_words.damage_holes(words),
        "mqproc_dispatch_behind_bytes": control_words.dispatch_behind_bytes(words),
        "mqproc_dispatch_behind_messages": control_words.dispatch_behind_messages(words),
        "mqproc_unflushed_seconds": unflushed_seconds(words, now_ns),
        "mqproc_segments_ready": max(0, ready_end - words["written"]) // segment,
        "mqproc_disk_usage_ratio": used / (used + free) if used + free else 0.0,
        "mqproc_index_slots_used_ratio": slots_used / options.max_hash_slot_num,
        "mqproc_index_file_filled_ratio": entries / max(1, options.max_index_num - 1),
        "mqproc_index_entries_per_slot": entries / slots_used if slots_used else 0.0,
    }


def _by_role(control: Control, words: Mapping[str, int], to_unix: Callable[[int], float]) -> dict[str, Samples]:
    def of(name: str) -> Samples:
        return [((role,), words[f"{role}.{name}"]) for role in layout.ROLES]

    codes = {role: read_error_counters(control.words, role) for role in histograms.REJECTS}
    return {
        "mqproc_role_up": [((role,), float(words[f"{role}.supervised"] == layout.RUNNING)) for role in layout.ROLES],
        "mqproc_role_heartbeat_timestamp_seconds": [
            ((role,), to_unix(words[f"{role}.heartbeat_ns"])) for role in layout.ROLES
        ],
        "mqproc_role_restarts_total": of("restarts"),
        "mqproc_role_cycles_total": of("cycles"),
        "mqproc_errors_total": of("errors"),
        "mqproc_client_connections": [((role,), words[word]) for role, word in _CONNECTIONS.items()],
        "mqproc_partial_frames_total": [((role,), words[word]) for role, word in _PARTIAL_FRAMES.items()],
        "mqproc_sync_errno": [((layout.WORDS[name].owner,), words[name]) for name in _SYNC_ERRNOS],
        "mqproc_delayed_messages": [((by,), words[word]) for by, word in _DELAYED.items()],
        "mqproc_rejected_total": [
            ((role, code), count) for role, counts in codes.items() for code, count in counts.items()
        ],
    }


def _by_target(words: Mapping[str, int], to_unix: Callable[[int], float]) -> dict[str, Samples]:
    def of(word: str) -> Samples:
        return [((target,), words[f"{prefix}_{word}"]) for target, prefix in TARGETS.items()]

    def unix_times(word: str) -> Samples:
        return [((target,), to_unix(words[f"{prefix}_{word}"])) for target, prefix in TARGETS.items()]

    positions = {"commitlog": control_words.flushed(words), **{target: words[word] for target, word in _SYNCED.items()}}
    written = words["written"]
    return {
        "mqproc_flushed_offset_bytes": [((target,), position) for target, position in positions.items()],
        "mqproc_flush_behind_bytes": [((target,), max(0, written - at)) for target, at in positions.items()],
        "mqproc_flushes_total": of("syncs"),
        "mqproc_flush_passes_total": of("passes"),
        "mqproc_forced_flushes_total": of("forced_passes"),
        "mqproc_last_flush_timestamp_seconds": unix_times("pass_ns"),
        "mqproc_last_forced_flush_timestamp_seconds": unix_times("forced_ns"),
        "mqproc_retention_deleted_files_total": [((target,), words[word]) for target, word in _DELETED.items()],
        "mqproc_retention_held_back": [
            ((name,), float(words["retention_held_by"] == number))
            for number, name in enumerate(layout.HELD_NAMES)
            if number != layout.HELD_NOTHING
        ],
    }


def _histograms(control: Control) -> dict[str, Samples]:
    """All histograms; histograms of several roles with one label are summed."""
    found: dict[str, dict[str, Buckets]] = {metric: {} for metric in _HISTOGRAMS.values()}
    for place in histograms.HISTOGRAMS:
        of_metric = found[_HISTOGRAMS[place.name]]
        buckets = read_buckets(control.words, place)
        before = of_metric.get(place.label)
        of_metric[place.label] = before.plus(buckets) if before else buckets
    return {
        metric: [((label,) if label else (), buckets) for label, buckets in by_label.items()]
        for metric, by_label in found.items()
    }


KNOWN_IN_RECOVERY: Final = frozenset(
    """
    mqproc_up mqproc_build_info mqproc_group_ready mqproc_group_recovering mqproc_group_started_timestamp_seconds
    mqproc_role_up mqproc_role_heartbeat_timestamp_seconds mqproc_role_restarts_total mqproc_role_cycles_total
    mqproc_errors_total mqproc_log_lines_dropped_total mqproc_process_cpu_seconds_total
    mqproc_process_resident_memory_bytes mqproc_process_proportional_memory_bytes mqproc_process_open_fds
    mqproc_scrapes_total
    """.split()
)
"""Metrics known during recovery. For others 0 would be wrong: a position that drops to 0 and returns is a huge rate."""

PROCESSES_EVERY_S: Final = 2.0
"""Reading a process's memory makes the kernel walk its pages, so it is done at most this often."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group at one moment."""

    words: Mapping[str, int]
    processes: Mapping[str, ProcessUsage]
    """Usage by role, including supervisor and template."""
    table: TableFigures | None
    """None until recovery has built the queue table."""
    lags: list[GroupLag]
    waiting_retries: Mapping[str, int]
    """Number of waiting retries by retry topic."""
    health: GroupHealth
    errors: list[SeenError]
    """All distinct errors, the most recent first."""

    @property
    def is_recovering(self) -> bool:
        """Whether positions and queues are not known yet."""
        return self.words["group_state"] == layout.GROUP_RECOVERING

    def lines_dropped(self, role: str) -> int:
        """Number of log lines that the output of a role did not accept."""
        own = [error for error in self.errors if error.owner == role]
        return sum(error.count for error in own if error.text.startswith(LINES_DROPPED))

    @property
    def supervisor_errors(self) -> int:
        """Number of errors of the supervisor, counted in the store's error log: it has no word."""
        return sum(error.count for error in self.errors if error.owner == layout.SUPERVISOR)


class MetricsCollector:
    """Reads one group's state. `version` is reported in `mqproc_build_info`."""

    def __init__(
        self,
        control: Control,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        version: str,
        *,
        cached: bool = True,
    ) -> None:
        """`cached`: whether results that take long to read are reused for a while."""
        self.control = control
        self._io = io
        self._paths = paths
        self.options = options
        self._version = version
        self._topics: TopicTable | None = None
        self._groups: GroupLags | None = None
        self._labels = GroupLabels(options.metrics_series_max)
        self._opened_in = layout.GROUP_DOWN
        self._processes: dict[str, ProcessUsage] = {}
        self._processes_due = 0.0
        self._cached = cached

    def read_health(self, words: Mapping[str, int]) -> GroupHealth:
        """The group's health, from a snapshot just taken."""
        return group_health(self._io, self._paths, words, self.options)

    def read_state(self) -> GroupState:
        # Words first: a slightly newer queue table contradicts nothing derived from them.
        words = self.control.snapshot()
        # Evaluated at once, or heartbeats would appear older than they were when read.
        health = self.read_health(words)
        self._update_table(words["group_state"])
        return GroupState(
            words=words,
            processes=self._read_processes(words),
            table=self._topics.figures() if self._topics else None,
            lags=self._groups.figures() if self._groups else [],
            waiting_retries=self._groups.waiting_retries if self._groups else {},
            health=health,
            errors=self._seen_errors(),
        )

    def samples(self) -> dict[str, Samples]:
        """Samples by metric name; during recovery only known metrics."""
        state = self.read_state()
        of_words = samples_of_words(
            self.control,
            self.options,
            state.words,
            state.health,
        )
        of_words["mqproc_errors_total"] = [
            ((layout.SUPERVISOR,), state.supervisor_errors),
            *of_words["mqproc_errors_total"],
        ]
        of_words["mqproc_log_lines_dropped_total"] = [
            ((role,), state.lines_dropped(role)) for role in (layout.SUPERVISOR, *layout.ROLES)
        ]
        of_words |= _of_processes(state.processes)
        of_words["mqproc_build_info"] = [((self._version, platform.python_version()), 1)]
        if state.is_recovering:
            return {name: samples for name, samples in of_words.items() if name in KNOWN_IN_RECOVERY}
        return {
            **of_words,
            **_of_topics(state.table),
            **self._of_groups(state),
            **self._of_storage(state),
        }

    def close(self) -> None:
        """Close the queue table; the control file belongs to the caller."""
        if self._topics is not None:
            self._topics.table.close()
            self._topics = self._groups = None

    def _seen_errors(self) -> list[SeenError]:
        try:
            return seen_errors(self._io, self._paths)
        except (OSError, CorruptStoreError):
            return []

    def _update_table(self, state: int) -> None:
        """Open the queue table of this run: a start replaces it at the end of recovery."""
        started = self._opened_in == layout.GROUP_DOWN != state
        if state == layout.GROUP_RECOVERING or started:
            self.close()
        if state != layout.GROUP_RECOVERING and self._topics is None:
            self._opened_in = state
            self._open_table()

    def _open_table(self) -> None:
        try:
            table = QueueTable(self._io, self._paths.queues)
        except (FileNotFoundError, CorruptStoreError):
            return
        options = self.options
        self._topics = TopicTable(table, options.metrics_series_max, options.consume_queue_file_bytes)
        self._groups = GroupLags(self._io, self._paths, options, self.control.words, table, cached=self._cached)

    def _read_processes(self, words: Mapping[str, int]) -> dict[str, ProcessUsage]:
        now = time.monotonic()
        if now >= self._processes_due:
            self._processes_due = now + PROCESSES_EVERY_S if self._cached else now
            pids = {layout.SUPERVISOR: words["supervisor_pid"], layout.TEMPLATE: words["template_pid"]}
            pids |= {role: words[f"{role}.pid"] for role in layout.ROLES}
            pids = pids if control_words.has_valid_pids(words) else {}
            found = {role: process_usage(pid) for role, pid in pids.items()}
            self._processes = {role: figures for role, figures in found.items() if figures is not None}
        return self._processes

    def _of_groups(self, state: GroupState) -> dict[str, Samples]:
        if self._groups is None or state.table is None:
            return {}
        lags = self._groups.bounded(state.lags, self.options.metrics_series_max)
        dead = state.table.dead_letters
        waiting = {topic.removeprefix(RETRY_PREFIX): count for topic, count in state.waiting_retries.items()}
        # Each group has a series from its first use on: the first dead letter is an increase.
        labels = self._labels.of([*(lag.group for lag in state.lags), *self._groups.created, *dead])
        return {
            "mqproc_consumer_groups": [((), len({lag.group for lag in state.lags}))],
            "mqproc_consumer_lag_messages": [((lag.group, lag.topic), lag.messages) for lag in lags],
            "mqproc_consumer_lag_seconds": [
                ((lag.group, lag.topic), lag.seconds) for lag in lags if lag.seconds is not None
            ],
            "mqproc_messages_consumed_total": [((lag.group, lag.topic), lag.consumed) for lag in lags],
            "mqproc_waiting_retries": _by_label(labels, waiting),
            "mqproc_dead_letters_total": _by_label(labels, dead),
        }

    def _of_storage(self, state: GroupState) -> dict[str, Samples]:
        words, options = state.words, self.options
        segment = options.mapped_file_size_commit_log
        begin = words["min_physical_offset"]
        slots, items = options.max_hash_slot_num, options.max_index_num
        index_files = len(index_file_names(self._io, self._paths.index))
        newest = index_file.item_offset(slots, max(words["index_items"], index_file.FIRST_ITEM))
        files = {
            "commitlog": -(-(words["segments_ready_end"] - begin // segment * segment) // segment),
            "consumequeue": state.table.unit_files if state.table else 0,
            "index": index_files,
        }
        sizes = {
            "commitlog": words["written"] - begin,
            "consumequeue": state.table.unit_bytes if state.table else 0,
            "index": (index_files - 1) * index_file.file_size(slots, items) + newest if index_files else 0,
        }
        return {
            "mqproc_storage_bytes": [((target,), max(0, size)) for target, size in sizes.items()],
            "mqproc_segments": [((target,), max(0, count)) for target, count in files.items()],
        }


def _by_label(labels: Mapping[str, str], counts: Mapping[str, int]) -> Samples:
    """Counts of groups, summed by label; 0 for a group without a count."""
    totals = dict.fromkeys(labels.values(), 0)
    for group, count in counts.items():
        label = labels.get(group, OTHERS)
        totals[label] = totals.get(label, 0) + count
    return [((label,), total) for label, total in totals.items()]


def _of_processes(processes: Mapping[str, ProcessUsage]) -> dict[str, Samples]:
    return {
        "mqproc_process_cpu_seconds_total": [((role,), of.cpu_s) for role, of in processes.items()],
        "mqproc_process_resident_memory_bytes": [((role,), of.resident_bytes) for role, of in processes.items()],
        "mqproc_process_proportional_memory_bytes": [((role,), of.pss_bytes) for role, of in processes.items()],
        "mqproc_process_open_fds": [((role,), of.open_fds) for role, of in processes.items()],
    }


def _of_topics(table: TableFigures | None) -> dict[str, Samples]:
    if table is None:
        return {name: [((), 0)] for name in ("mqproc_topics", "mqproc_queues", "mqproc_queue_table_used_ratio")}
    # Label tuples are created once: there may be thousands.
    topics = [((of.topic,), of) for of in table.topics]
    return {
        "mqproc_topics": [((), table.topic_count)],
        "mqproc_queues": [((), table.queue_count)],
        "mqproc_queue_table_used_ratio": [((), table.used_ratio)],
        "mqproc_messages_appended_total": [(labels, of.appended) for labels, of in topics],
        "mqproc_messages_delivered_total": [(labels, of.delivered) for labels, of in topics],
        "mqproc_stored_messages": [(labels, of.stored) for labels, of in topics],
        "mqproc_last_message_timestamp_seconds": [(labels, of.last_store_timestamp_ms / 1000) for labels, of in topics],
    }
