"""A Prometheus collector over the control file: every value is read at scrape, so nothing has to be counted twice.

Lag is the difference of two words read at one moment, survives the death of any role, and is the same number that
`mqproc stat` prints. Cumulative words begin at 0 with each start of the group, which Prometheus takes for a reset.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mqproc.control import Control
from mqproc.layout import control as layout
from mqproc.metrics.catalogue import COUNTER, METRICS

Labels = tuple[str, ...]
Sample = tuple[Labels, float]

NS = 1_000_000_000
HEARTBEAT_TIMEOUT_NS = 3 * NS
# The log's marks and their flushers: the words that hold how far each is.
_SYNCED = {"consumequeue": "cq_synced", "index": "index_synced"}
_SYNCS = {"commitlog": "commitlog_syncs", "consumequeue": "cq_syncs", "index": "index_syncs"}
_FORCED = {"consumequeue": "cq_forced_passes", "index": "index_forced_passes"}
_FORCED_NS = {"consumequeue": "cq_forced_ns", "index": "index_forced_ns"}
_DELETED = {
    "commitlog": "retention_segments",
    "consumequeue": "retention_queue_files",
    "index": "retention_index_files",
}
_CONNECTIONS = {layout.WRITER: "writer_connections", layout.QUERY: "query_connections"}


class ControlCollector(Collector):
    """Gives the catalogue's metrics from one control file. `version` goes into the build's info."""

    def __init__(self, control: Control, version: str) -> None:
        self._control = control
        self._version = version

    def describe(self) -> Iterable[Metric]:
        """Nothing to say before a scrape; without this a registry would collect once at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        samples = self.samples()
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in samples[metric.name]:
                family.add_metric(labels, value)
            yield family

    def samples(self) -> dict[str, list[Sample]]:
        """Every metric's samples by its name: (label values, value)."""
        control = self._control
        words = control.snapshot()
        clock = _ClockOffset()
        found: dict[str, list[Sample]] = {name: [((), value)] for name, value in _plain(words).items()}
        found |= self._derived(words)
        for name, samples in _by_role(words, clock.to_unix).items():
            found[name] = samples
        # Of the same snapshot: a later look could show more flushed than written.
        flushed = max(words["writer_synced"], words["flusher_synced"])
        for name, samples in _by_target(words, flushed, clock.to_unix).items():
            found[name] = samples
        found["mqproc_build_info"] = [((self._version, platform.python_version()), 1)]
        return found

    def _derived(self, words: Mapping[str, int]) -> dict[str, list[Sample]]:
        control = self._control
        age_ns = time.monotonic_ns() - words["supervisor_heartbeat_ns"]
        used, free = words["disk_used_bytes"], words["disk_free_bytes"]
        takes_nothing = control.read_only or control.damage_read_only
        values = {
            "mqproc_up": 0 <= age_ns < HEARTBEAT_TIMEOUT_NS,
            "mqproc_group_ready": words["group_state"] == layout.GROUP_READY and not takes_nothing,
            "mqproc_read_only": takes_nothing,
            "mqproc_damage_holes": words["damage_holes"] + words["dispatch_holes"],
            "mqproc_dispatch_behind_bytes": max(0, words["written"] - words["dispatched"]),
            "mqproc_dispatch_behind_messages": max(0, words["appended_messages"] - words["dispatched_messages"]),
            "mqproc_dispatch_behind_seconds": _behind_seconds(words),
            "mqproc_disk_usage_ratio": used / (used + free) if used + free else 0.0,
        }
        return {name: [((), float(value))] for name, value in values.items()}


def _behind_seconds(words: Mapping[str, int]) -> float:
    if words["written"] <= words["dispatched"]:
        return 0.0
    return max(0, words["written_store_timestamp_ms"] - words["dispatched_store_timestamp_ms"]) / 1000


# Metrics that are one word, perhaps in another unit: name → (word, factor).
_PLAIN: dict[str, tuple[str, float]] = {
    "mqproc_group_started_timestamp_seconds": ("group_started_ms", 1e-3),
    "mqproc_messages_appended_total": ("appended_messages", 1),
    "mqproc_append_frames_total": ("appended_frames", 1),
    "mqproc_append_failures_total": ("append_rejects", 1),
    "mqproc_appended_bytes_total": ("written", 1),
    "mqproc_commit_log_min_offset_bytes": ("min_physical_offset", 1),
    "mqproc_commit_log_max_offset_bytes": ("written", 1),
    "mqproc_last_append_timestamp_seconds": ("written_store_timestamp_ms", 1e-3),
    "mqproc_segment_waits_total": ("writer_segment_waits", 1),
    "mqproc_append_slowed_seconds_total": ("writer_slowed_ms", 1e-3),
    "mqproc_clock_steps_total": ("writer_clock_steps", 1),
    "mqproc_flush_seconds_total": ("commitlog_sync_us", 1e-6),
    "mqproc_durable_mark_bytes": ("commitlog_mark", 1),
    "mqproc_dispatched_offset_bytes": ("dispatched", 1),
    "mqproc_messages_dispatched_total": ("dispatched_messages", 1),
    "mqproc_index_entries_total": ("dispatched_entries", 1),
    "mqproc_dispatch_blocked": ("dispatch_errno", 1),
    "mqproc_requests_total": ("query_requests", 1),
    "mqproc_request_failures_total": ("query_rejects", 1),
    "mqproc_messages_delivered_total": ("pulled_messages", 1),
    "mqproc_delivered_bytes_total": ("pulled_bytes", 1),
    "mqproc_waiting_pulls": ("waiting_pulls", 1),
    "mqproc_oldest_message_timestamp_seconds": ("oldest_store_timestamp_ms", 1e-3),
    "mqproc_retention_deleted_bytes_total": ("retention_bytes", 1),
    "mqproc_retention_pending_bytes": ("retention_pending_bytes", 1),
    "mqproc_retention_last_look_timestamp_seconds": ("retention_pass_ms", 1e-3),
    "mqproc_retention_blocked": ("retention_errno", 1),
    "mqproc_unconsumed_messages_deleted_total": ("retention_unconsumed", 1),
    "mqproc_disk_used_bytes": ("disk_used_bytes", 1),
    "mqproc_disk_free_bytes": ("disk_free_bytes", 1),
    "mqproc_recovery_duration_seconds": ("recovery_us", 1e-6),
    "mqproc_recovery_cut_bytes": ("recovery_cut_bytes", 1),
    "mqproc_dispatch_gap_bytes_total": ("dispatch_gap_bytes", 1),
    "mqproc_scrapes_total": ("scrapes", 1),
}


def _plain(words: Mapping[str, int]) -> dict[str, float]:
    return {name: words[word] * factor for name, (word, factor) in _PLAIN.items()}


def _by_role(words: Mapping[str, int], to_unix: Callable[[int], float]) -> dict[str, list[Sample]]:
    def of(name: str) -> list[Sample]:
        return [((role,), words[f"{role}.{name}"]) for role in layout.ROLES]

    running = {role: words[f"{role}.supervised"] == layout.RUNNING for role in layout.ROLES}
    beats: list[Sample] = [((role,), to_unix(words[f"{role}.heartbeat_ns"])) for role in layout.ROLES]
    return {
        "mqproc_role_up": [((role,), float(up)) for role, up in running.items()],
        "mqproc_role_heartbeat_timestamp_seconds": beats,
        "mqproc_role_restarts_total": of("restarts"),
        "mqproc_role_cycles_total": of("cycles"),
        "mqproc_errors_total": of("errors"),
        "mqproc_client_connections": [((role,), words[word]) for role, word in _CONNECTIONS.items()],
    }


def _by_target(words: Mapping[str, int], flushed: int, to_unix: Callable[[int], float]) -> dict[str, list[Sample]]:
    positions = {"commitlog": flushed, **{target: words[word] for target, word in _SYNCED.items()}}
    written = words["written"]
    return {
        "mqproc_flushed_offset_bytes": [((target,), position) for target, position in positions.items()],
        "mqproc_flush_behind_bytes": [((target,), max(0, written - at)) for target, at in positions.items()],
        "mqproc_flushes_total": [((target,), words[word]) for target, word in _SYNCS.items()],
        "mqproc_forced_flushes_total": [((target,), words[word]) for target, word in _FORCED.items()],
        "mqproc_retention_deleted_files_total": [((target,), words[word]) for target, word in _DELETED.items()],
        "mqproc_retention_held_back": [
            ((name,), float(words["retention_held_by"] == number))
            for number, name in enumerate(layout.HELD_NAMES)
            if number != layout.HELD_NOTHING
        ],
        "mqproc_last_forced_flush_timestamp_seconds": [
            ((target,), to_unix(words[word])) for target, word in _FORCED_NS.items()
        ],
    }


class _ClockOffset:
    """Between the monotonic clock of the words and Unix time, taken once a scrape."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def to_unix(self, monotonic_ns: int) -> float:
        """Unix seconds; 0 for what has never happened."""
        return (monotonic_ns + self._offset_ns) / NS if monotonic_ns else 0.0
