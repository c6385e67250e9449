"""The internals dashboard: utilization and errors of roles, flush, log, index, recovery."""

from __future__ import annotations

from typing import Any

from grafana.source.panels import MOMENT, TABLE, Panel, Query, Row, make_dashboard
from grafana.source.queries import RANGE, age, increase, quantiles, rate
from grafana.source.settings import INTERNALS_UID

_ROLES = Row(
    "Roles",
    [
        Panel(
            "Processor",
            "Share of one processor that each role uses.",
            "percentunit",
            [rate("mqproc_process_cpu_seconds_total", "{{role}}")],
        ),
        Panel(
            "Memory",
            "Proportional memory of each role: shared pages are divided among roles, so that the sum is right.",
            "bytes",
            [
                Query("mqproc_process_proportional_memory_bytes{$S}", "{{role}}"),
                Query("sum by (instance) (mqproc_process_proportional_memory_bytes{$S})", "all"),
            ],
        ),
        Panel(
            "Running",
            "1 while the role's process runs; the group as a whole, and whether its store is being recovered.",
            "none",
            [
                Query("mqproc_role_up{$S}", "{{role}}"),
                Query("mqproc_up{$S}", "supervisor"),
                Query("mqproc_group_recovering{$S}", "recovering"),
            ],
        ),
        Panel(
            "Heartbeat age",
            "Time since the last heartbeat: at most a second for a healthy role that is not busy.",
            "s",
            [age("mqproc_role_heartbeat_timestamp_seconds", "{{role}}")],
        ),
        Panel(
            "Steps",
            "Steps a second that did work.",
            "ops",
            [rate("mqproc_role_cycles_total", "{{role}}")],
        ),
        Panel(
            "Step length",
            "Duration of a step that did work.",
            "s",
            quantiles("mqproc_role_cycle_seconds", by="role"),
        ),
        Panel(
            "Restarts and errors",
            "Crashes of roles, logged errors, and lines of the log that the reader of the output did not take.",
            "short",
            [
                increase("mqproc_role_restarts_total", "{{role}} restarts"),
                increase("mqproc_errors_total", "{{role}} errors"),
                increase("mqproc_log_lines_dropped_total", "{{role}} dropped lines"),
            ],
        ),
        Panel(
            "Resident memory",
            "Memory of each role, with shared pages counted fully.",
            "bytes",
            [Query("mqproc_process_resident_memory_bytes{$S}", "{{role}}")],
        ),
        Panel(
            "Descriptors",
            "Open descriptors of each role.",
            "short",
            [Query("mqproc_process_open_fds{$S}", "{{role}}")],
        ),
    ],
)

_FLUSH = Row(
    "Flush",
    [
        Panel(
            "Flush duration",
            "Duration of passes that sync something.",
            "s",
            quantiles("mqproc_flush_duration_seconds", by="target"),
        ),
        Panel(
            "Passes",
            "Flush passes, passes that synced everything, and files synced.",
            "ops",
            [
                rate("mqproc_flush_passes_total", "{{target}} passes"),
                rate("mqproc_forced_flushes_total", "{{target}} forced"),
                rate("mqproc_flushes_total", "{{target}} files"),
            ],
        ),
        Panel(
            "Last pass",
            "Time since the end of the last pass, and of the last that synced everything.",
            "s",
            [
                age("mqproc_last_flush_timestamp_seconds", "{{target}}"),
                age("mqproc_last_forced_flush_timestamp_seconds", "{{target}} forced"),
            ],
        ),
        Panel(
            "Durable",
            "Log position below which everything is durable, and the mark from which recovery starts.",
            "bytes",
            [
                Query("mqproc_flushed_offset_bytes{$S}", "{{target}}"),
                Query("mqproc_durable_mark_bytes{$S}", "mark"),
            ],
        ),
    ],
)

_LOG = Row(
    "Log and dispatch",
    [
        Panel(
            "Positions",
            "Start and end of the log, and the dispatched position.",
            "bytes",
            [
                Query("mqproc_commit_log_min_offset_bytes{$S}", "begin"),
                Query("mqproc_commit_log_max_offset_bytes{$S}", "end"),
                Query("mqproc_dispatched_offset_bytes{$S}", "dispatched"),
            ],
        ),
        Panel(
            "Segments",
            "Files, and preallocated segments of the log.",
            "short",
            [
                Query("mqproc_segments{$S}", "{{target}}"),
                Query("mqproc_segments_ready{$S}", "ready"),
            ],
        ),
        Panel(
            "Waits for segments",
            "Waits of the writer for a new segment, and the errno that prevents its creation.",
            "short",
            [
                increase("mqproc_segment_waits_total", "waits"),
                Query("mqproc_segment_blocked{$S}", "errno"),
            ],
        ),
        Panel(
            "Dispatch blocked",
            "errno that blocks dispatch, and bytes of the log deleted before they were dispatched.",
            "short",
            [
                Query("mqproc_dispatch_blocked{$S}", "errno"),
                increase("mqproc_dispatch_gap_bytes_total", "bytes lost to queues"),
            ],
        ),
        Panel(
            "Clock",
            "Backward steps of the clock, and the age of the last record.",
            "short",
            [
                increase("mqproc_clock_steps_total", "steps back"),
                age("mqproc_last_append_timestamp_seconds", "last record, seconds ago"),
            ],
        ),
        Panel(
            "Queue table",
            "Queues and topics, and the share of max_queues in use.",
            "short",
            [
                Query("mqproc_queues{$S}", "queues"),
                Query("mqproc_topics{$S}", "topics"),
                Query("100 * mqproc_queue_table_used_ratio{$S}", "used, percent"),
            ],
        ),
    ],
)

_INDEX = Row(
    "Index and key queries",
    [
        Panel(
            "Index entries",
            "Entries written and examined a second.",
            "ops",
            [
                rate("mqproc_index_entries_total", "written"),
                rate("mqproc_key_entries_walked_total", "examined"),
                rate("mqproc_key_entries_matched_total", "matched"),
            ],
        ),
        Panel(
            "Newest file",
            "Used slots and entries; more than two entries per slot make long chains.",
            "percentunit",
            [
                Query("mqproc_index_slots_used_ratio{$S}", "slots used"),
                Query("mqproc_index_file_filled_ratio{$S}", "entries used"),
            ],
        ),
        Panel(
            "Chains",
            "Entries per used slot; entries and files examined per key.",
            "short",
            [
                Query("mqproc_index_entries_per_slot{$S}", "entries a slot"),
                Query(
                    f"rate(mqproc_key_entries_walked_total{{$S}}{RANGE})"
                    f" / rate(mqproc_key_files_walked_total{{$S}}{RANGE})",
                    "chain length",
                ),
                Query(
                    f"rate(mqproc_key_files_walked_total{{$S}}{RANGE}) / rate(mqproc_key_queries_total{{$S}}{RANGE})",
                    "files a key",
                ),
            ],
        ),
    ],
)

_RECOVERY = Row(
    "Recovery and build",
    [
        Panel(
            "Recovery",
            "Duration of the last recovery.",
            "s",
            [Query("mqproc_recovery_duration_seconds{$S}")],
        ),
        Panel(
            "Damage",
            "Torn tail cut by the last recovery, and damaged ranges that reads skip.",
            "short",
            [
                Query("mqproc_recovery_cut_bytes{$S}", "bytes cut"),
                Query("mqproc_damage_holes{$S}", "holes"),
            ],
        ),
        Panel(
            "Group",
            "Version, start of the group, scrapes, and the last check of retention.",
            "short",
            [
                Query("max by (instance, version, python) (mqproc_build_info{$S})", "build"),
                Query("1000 * max by (instance) (mqproc_group_started_timestamp_seconds{$S})", "started", MOMENT),
                Query(
                    "1000 * max by (instance) (mqproc_retention_last_look_timestamp_seconds{$S} > 0)",
                    "retention's last check",
                    MOMENT,
                ),
                Query("sum by (instance) (mqproc_scrapes_total{$S})", "scrapes"),
            ],
            kind=TABLE,
        ),
    ],
)


def internals() -> Any:
    """Build the dashboard."""
    return make_dashboard(
        INTERNALS_UID,
        "mqproc internals",
        "Activity, waits and errors of each role.",
        [_ROLES, _FLUSH, _LOG, _INDEX, _RECOVERY],
    ).build()
