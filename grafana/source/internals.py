"""The internals: use, saturation and errors of each role; flush, segments, index, recovery."""

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
            "Proportional memory of each role: pages that several share are shared among them, so it adds up.",
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
            "Silent for",
            "Time since the last heartbeat: at most a second for a role that is well and not busy.",
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
            "How long a step that did work takes.",
            "s",
            quantiles("mqproc_role_cycle_seconds", by="role"),
        ),
        Panel(
            "Restarts and errors",
            "Roles that died unasked, and errors that were logged.",
            "short",
            [
                increase("mqproc_role_restarts_total", "{{role}} restarts"),
                increase("mqproc_errors_total", "{{role}} errors"),
            ],
        ),
        Panel(
            "Resident memory",
            "Memory of each role with shared pages in full.",
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
            "How long passes take that sync something.",
            "s",
            quantiles("mqproc_flush_duration_seconds", by="target"),
        ),
        Panel(
            "Passes",
            "Looks at what is to be synced, those that synced everything, and files synced.",
            "ops",
            [
                rate("mqproc_flush_passes_total", "{{target}} passes"),
                rate("mqproc_forced_flushes_total", "{{target}} forced"),
                rate("mqproc_flushes_total", "{{target}} files"),
            ],
        ),
        Panel(
            "Last pass",
            "Time since the last pass came to its end, and since the last that synced everything.",
            "s",
            [
                age("mqproc_last_flush_timestamp_seconds", "{{target}}"),
                age("mqproc_last_forced_flush_timestamp_seconds", "{{target}} forced"),
            ],
        ),
        Panel(
            "Durable",
            "Position in the log below which all is durable, and the mark that recovery begins at.",
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
            "Where the log begins and ends, and how far dispatch is.",
            "bytes",
            [
                Query("mqproc_commit_log_min_offset_bytes{$S}", "begin"),
                Query("mqproc_commit_log_max_offset_bytes{$S}", "end"),
                Query("mqproc_dispatched_offset_bytes{$S}", "dispatched"),
            ],
        ),
        Panel(
            "Segments",
            "Files, and segments of the log that are made ahead.",
            "short",
            [
                Query("mqproc_segments{$S}", "{{target}}"),
                Query("mqproc_segments_ready{$S}", "ready"),
            ],
        ),
        Panel(
            "Waits for segments",
            "How often the writer waited for a new segment, and what keeps one from being made.",
            "short",
            [
                increase("mqproc_segment_waits_total", "waits"),
                Query("mqproc_segment_blocked{$S}", "errno"),
            ],
        ),
        Panel(
            "Dispatch held up",
            "errno that holds dispatch up, and log that was deleted before it was dispatched.",
            "short",
            [
                Query("mqproc_dispatch_blocked{$S}", "errno"),
                increase("mqproc_dispatch_gap_bytes_total", "bytes lost to queues"),
            ],
        ),
        Panel(
            "Clock",
            "Times that the clock was seen to go back, and the age of the last record.",
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
            "Entries written and looked at a second.",
            "ops",
            [
                rate("mqproc_index_entries_total", "written"),
                rate("mqproc_key_entries_walked_total", "looked at"),
                rate("mqproc_key_entries_matched_total", "matched"),
            ],
        ),
        Panel(
            "Newest file",
            "How full its slots and its entries are; more than two entries a slot make long chains.",
            "percentunit",
            [
                Query("mqproc_index_slots_used_ratio{$S}", "slots used"),
                Query("mqproc_index_file_filled_ratio{$S}", "entries used"),
            ],
        ),
        Panel(
            "Chains",
            "Entries for each slot in use; entries and files looked at for one key.",
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
            "How long the last recovery took.",
            "s",
            [Query("mqproc_recovery_duration_seconds{$S}")],
        ),
        Panel(
            "Damage",
            "Torn tail cut by the last recovery, and holes that are served around.",
            "short",
            [
                Query("mqproc_recovery_cut_bytes{$S}", "bytes cut"),
                Query("mqproc_damage_holes{$S}", "holes"),
            ],
        ),
        Panel(
            "Group",
            "Version, when the group started, how often the monitor was asked, when retention looked last.",
            "short",
            [
                Query("max by (instance, version, python) (mqproc_build_info{$S})", "build"),
                Query("1000 * max by (instance) (mqproc_group_started_timestamp_seconds{$S})", "started", MOMENT),
                Query(
                    "1000 * max by (instance) (mqproc_retention_last_look_timestamp_seconds{$S} > 0)",
                    "retention's last look",
                    MOMENT,
                ),
                Query("sum by (instance) (mqproc_scrapes_total{$S})", "scrapes"),
            ],
            kind=TABLE,
        ),
    ],
)


def internals() -> Any:
    """The dashboard."""
    return make_dashboard(
        INTERNALS_UID,
        "mqproc internals",
        "What each role does, what it waits for, and what went wrong.",
        [_ROLES, _FLUSH, _LOG, _INDEX, _RECOVERY],
    ).build()
