"""A group's state as plain values, for the status page and `mqproc top`.

Counters are absolute: displays compute rates from two snapshots. Keys include units. Unknown values are None:
positions, queues and disk during recovery.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final

from mqproc.ipc import control_words
from mqproc.ipc.control import Control
from mqproc.ipc.counters import Buckets, read_buckets
from mqproc.ipc.health import DOWN, is_busy, is_silent, recovery_progress, unflushed_seconds
from mqproc.layout import control as layout
from mqproc.layout import histograms
from mqproc.metrics.collector import GroupState, MetricsCollector
from mqproc.metrics.groups import GroupLag, TopicFigures
from mqproc.paths import StorePaths
from mqproc.topic_names import retry_topic

ROWS_MAX: Final = 50
ERRORS_MAX: Final = 20

LATENCIES: Final = {
    "append": (histograms.APPENDS,),
    "dispatch": (histograms.DISPATCH_DELAYS,),
    "pull": (histograms.PULL_REQUESTS,),
    "key": (histograms.KEY_REQUESTS,),
    "flush": (histograms.WRITER_SYNCS, histograms.LOG_FLUSHES),
}
"""Latencies, and the histograms that contain them."""


def snapshot(collector: MetricsCollector, paths: StorePaths, *, rows_max: int = ROWS_MAX) -> dict[str, Any]:
    """State now; topics and groups are limited to the `rows_max` most active or furthest behind."""
    return as_values(collector, paths, collector.read_state(), rows_max=rows_max)


def as_values(
    collector: MetricsCollector, paths: StorePaths, state: GroupState, *, rows_max: int = ROWS_MAX, name: str = ""
) -> dict[str, Any]:
    """State as values; `name` selects topics and groups by substring, ignoring case."""
    control = collector.control
    words = state.words
    selection = name.lower()
    known = control_words.positions_known(words)
    topics = [topic for topic in (state.table.every if state.table else []) if selection in topic.topic.lower()]
    groups = [lag for lag in state.lags if selection in lag.group.lower() or selection in lag.topic.lower()]
    return {
        "time_ms": round(time.time() * 1000),
        "store": str(paths.root),
        "epoch": words["epoch"],
        "group": layout.name_of(words["group_state"], layout.GROUP_NAMES),
        "state": state.health.state,
        "ready": state.health.ready,
        "recovery": recovery_progress(words) if state.is_recovering else None,
        "problems": [dataclasses.asdict(problem) for problem in state.health.problems],
        "warnings": state.health.warnings,
        "started_ms": words["group_started_ms"],
        "sync_flush": collector.options.sync_flush,
        "path": {**_values_or_none(known, _path(state)), "read_only": control_words.refuses_messages(words)},
        "latencies": {name: _buckets(control, name) for name in LATENCIES},
        "roles": _roles(state, collector.options.heartbeat_timeout_ms * 1_000_000),
        "topics": _topics(topics, rows_max),
        "groups": _groups(groups, state.waiting_retries, rows_max),
        **_values_or_none(
            known,
            {
                "topics_found": len(topics),
                "topic_count": state.table.topic_count if state.table else 0,
                "queue_count": state.table.queue_count if state.table else 0,
                "groups_found": len(groups),
                "group_count": len(state.lags),
                "group_lag_messages": sum(lag.messages for lag in state.lags),
            },
        ),
        "disk": _disk(collector, state),
        "errors": [
            {"role": error.owner, "text": error.text, "count": error.count}
            | {"first_ms": error.first_ms, "last_ms": error.last_ms}
            for error in state.errors[:ERRORS_MAX]
        ],
    }


def _values_or_none(known: bool, values: dict[str, Any]) -> dict[str, Any]:
    """The values, or None for each when unknown."""
    return values if known else dict.fromkeys(values)


def latency(control: Control, name: str) -> Buckets:
    """One of LATENCIES, summed over its roles."""
    first, *more = (read_buckets(control.words, place) for place in LATENCIES[name])
    for buckets in more:
        first = first.plus(buckets)
    return first


def _buckets(control: Control, name: str) -> dict[str, Any]:
    buckets = latency(control, name)
    return {"bounds_s": buckets.bounds, "counts": buckets.counts, "sum_s": buckets.total}


def _path(state: GroupState) -> dict[str, Any]:
    words = state.words
    return {
        "appended_messages": words["appended_messages"],
        "appended_frames": words["appended_frames"],
        "written_bytes": words["written"],
        "min_bytes": words["min_physical_offset"],
        "flushed_bytes": control_words.flushed(words),
        "flush_behind_bytes": control_words.flush_behind_bytes(words),
        "unflushed_s": unflushed_seconds(words, time.monotonic_ns()),
        "dispatched_bytes": words["dispatched"],
        "dispatched_messages": words["dispatched_messages"],
        "index_entries": words["dispatched_entries"],
        "dispatch_behind_bytes": control_words.dispatch_behind_bytes(words),
        "dispatch_behind_messages": control_words.dispatch_behind_messages(words),
        "dispatch_behind_s": state.health.dispatch_behind_ms / 1000,
        "queues_behind_bytes": max(0, words["written"] - words["cq_synced"]),
        "index_behind_bytes": max(0, words["written"] - words["index_synced"]),
        "delivered_messages": words["pulled_messages"],
        "delivered_bytes": words["pulled_bytes"],
        "requests": words["query_requests"],
        "waiting_pulls": words["waiting_pulls"],
        "rejects": words["append_rejects"] + words["query_rejects"],
        "producers": words["writer_connections"],
        "consumers": words["query_connections"],
    }


def _roles(state: GroupState, timeout_ns: int) -> list[dict[str, Any]]:
    """All processes but the template. `silent` as in /readyz; `silent_s` may be None."""
    words = state.words
    now_ns = time.monotonic_ns()
    silent_ns = max(0, now_ns - words["supervisor_heartbeat_ns"])
    is_recovering = state.is_recovering and state.health.state != DOWN
    rows: list[dict[str, Any]] = [
        {
            "role": layout.SUPERVISOR,
            "state": layout.name_of(words["group_state"], layout.GROUP_NAMES),
            "pid": words["supervisor_pid"],
            "busy": is_recovering,
            "silent": silent_ns > control_words.SUPERVISOR_TIMEOUT_NS and not is_recovering,
            "silent_s": None if is_recovering else silent_ns / 1e9,
            "restarts": 0,
            "errors": state.supervisor_errors,
            "cycles": 0,
        }
    ]
    for role in layout.ROLES:
        supervised = layout.name_of(words[f"{role}.supervised"], layout.SUPERVISED_NAMES)
        own_state = layout.name_of(words[f"{role}.state"], layout.STATE_NAMES)
        # A role started before recovery runs long before the supervisor sees it.
        runs = supervised == "RUNNING" or (supervised, own_state) == ("STARTING", "running")
        beaten_ns = words[f"{role}.heartbeat_ns"] if words[f"{role}.pid"] else 0
        rows.append(
            {
                "role": role,
                "state": own_state if runs else supervised,
                "pid": words[f"{role}.pid"],
                "busy": is_busy(words, role),
                "silent": is_silent(words, role, timeout_ns, now_ns),
                "silent_s": max(0, now_ns - beaten_ns) / 1e9 if beaten_ns else None,
                "restarts": words[f"{role}.restarts"],
                "errors": words[f"{role}.errors"],
                "cycles": words[f"{role}.cycles"],
            }
        )
    for row in rows:
        figures_ = state.processes.get(row["role"])
        # A stopped process has None, not 0.
        row["memory_bytes"] = figures_.pss_bytes if figures_ else None
        row["cpu_s"] = figures_.cpu_s if figures_ else None
        row["open_fds"] = figures_.open_fds if figures_ else None
    return rows


def _topics(topics: list[TopicFigures], rows_max: int) -> list[dict[str, Any]]:
    # The most recently used topics.
    rows = sorted(topics, key=lambda topic: (-topic.last_store_timestamp_ms, topic.topic))
    return [
        {
            "topic": row.topic,
            "queues": row.queues,
            "appended": row.appended,
            "stored": row.stored,
            "delivered": row.delivered,
            "last_ms": row.last_store_timestamp_ms,
        }
        for row in rows[:rows_max]
    ]


def _groups(lags: list[GroupLag], waiting: Mapping[str, int], rows_max: int) -> list[dict[str, Any]]:
    rows = sorted(lags, key=lambda lag: (-lag.messages, lag.group, lag.topic))
    return [
        {"group": row.group, "topic": row.topic, "lag_messages": row.messages, "lag_s": row.seconds}
        | {"waiting_retries": waiting.get(retry_topic(row.group), 0)}
        for row in rows[:rows_max]
    ]


def _disk(collector: MetricsCollector, state: GroupState) -> dict[str, Any]:
    words, options = state.words, collector.options
    used, free = words["disk_used_bytes"], words["disk_free_bytes"]
    total = used + free
    return {
        # The keeper measures the disk; before its first measurement nothing is known.
        **_values_or_none(
            total > 0,
            {
                "used_bytes": used,
                "free_bytes": free,
                "used_ratio": used / max(1, total),
                "full": bool(words["disk_full"]),
            },
        ),
        "warning_ratio": options.disk_space_warning_level_ratio / 100,
        "clean_ratio": options.disk_max_used_space_ratio / 100,
        "reserved_hours": options.file_reserved_time,
        **_values_or_none(
            control_words.positions_known(words),
            {
                "log_bytes": words["written"] - words["min_physical_offset"],
                "oldest_ms": words["oldest_store_timestamp_ms"],
                "deleted_bytes": words["retention_bytes"],
                "deleted_segments": words["retention_segments"],
                "held_by": layout.name_of(words["retention_held_by"], layout.HELD_NAMES),
                "last_look_ms": words["retention_pass_ms"],
                "holes": control_words.damage_holes(words),
            },
        ),
    }
