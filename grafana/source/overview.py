"""The overview dashboard: health, rate, errors and duration of requests, lag, groups, disk."""

from __future__ import annotations

from typing import Any

from grafana.source.panels import HEATMAP, MOMENT, STAT, TABLE, Panel, Query, Row, make_dashboard
from grafana.source.queries import (
    RANGE,
    age,
    increase,
    quantiles,
    rate,
    rate_of_chosen,
    summed_increase,
    summed_rate,
    ten_largest,
)
from grafana.source.settings import OVERVIEW_UID


def _glance(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    warn: float | None = None,
    bad: float | None = None,
    maximum: float | None = None,
) -> Panel:
    """A single figure; eight fill a line."""
    return Panel(title, description, unit, queries, STAT, width=3, height=4, warn=warn, bad=bad, maximum=maximum)


_GLANCE = Row(
    "At a glance",
    [
        _glance(
            "Ready",
            "1 while every role runs and the store accepts messages.",
            "none",
            Query("min(mqproc_group_ready{$S})", "ready"),
        ),
        _glance(
            "Appended",
            "Messages appended a second.",
            "cps",
            Query(f"sum({rate_of_chosen('mqproc_messages_appended_total')})", "appended"),
        ),
        _glance(
            "Delivered",
            "Messages delivered a second.",
            "cps",
            Query(f"sum({rate_of_chosen('mqproc_messages_delivered_total')})", "delivered"),
        ),
        _glance(
            "Dispatch behind",
            "Age of the oldest record that consumers cannot see yet.",
            "s",
            Query("max(mqproc_dispatch_behind_seconds{$S})", "behind"),
            warn=1,
            bad=10,
        ),
        _glance(
            "Loss window",
            "A power loss would lose the messages of this many seconds.",
            "s",
            Query("max(mqproc_unflushed_seconds{$S})", "not durable"),
            warn=15,
            bad=60,
        ),
        _glance(
            "Groups behind",
            "Messages that consumer groups have not consumed.",
            "short",
            Query("sum(mqproc_consumer_lag_messages{$S})", "lag"),
        ),
        _glance(
            "Disk",
            "Used space as a share of each of the group's limits, which is exceeded above 100 %.",
            "percentunit",
            Query(
                "max by (limit) (mqproc_disk_usage_ratio{$S} / on (job, instance) group_right ()"
                ' mqproc_disk_limit_ratio{$S,limit=~"delete_any_age|refuse_sends"})',
                "{{limit}}",
            ),
            warn=0.9,
            bad=1,
        ),
        _glance(
            "Read-only",
            "1 after a failed sync, or by on_damage: no messages are accepted.",
            "none",
            Query("max(mqproc_read_only{$S})", "read-only"),
            Query("max(mqproc_sync_failed{$S})", "sync failed"),
            bad=1,
        ),
        Panel(
            "Messages",
            "Messages appended, dispatched and delivered a second.",
            "cps",
            [
                summed_rate("mqproc_messages_appended_total", "appended"),
                summed_rate("mqproc_messages_dispatched_total", "dispatched"),
                summed_rate("mqproc_messages_delivered_total", "delivered"),
            ],
            width=12,
        ),
        Panel(
            "Bytes",
            "Bytes of records appended and delivered a second.",
            "Bps",
            [
                summed_rate("mqproc_appended_bytes_total", "appended"),
                summed_rate("mqproc_delivered_bytes_total", "delivered"),
            ],
            width=12,
        ),
    ],
)

_REQUESTS = Row(
    "Requests: rate, errors, duration",
    [
        Panel(
            "Requests",
            "Append requests, other requests and pulls answered a second.",
            "reqps",
            [
                summed_rate("mqproc_append_frames_total", "appends"),
                summed_rate("mqproc_requests_total", "other requests"),
                summed_rate("mqproc_pulls_total", "pulls"),
                summed_rate("mqproc_pulls_empty_total", "pulls without a message"),
            ],
        ),
        Panel(
            "Rejections",
            "Requests answered with an error, by its code.",
            "reqps",
            [
                Query(f"sum by (role, code) (rate(mqproc_rejected_total{{$S}}{RANGE})) > 0", "{{role}} {{code}}"),
                Query(f"sum by (role) (rate(mqproc_partial_frames_total{{$S}}{RANGE}))", "{{role}} incomplete frames"),
                summed_rate("mqproc_append_failures_total", "writer, all"),
                summed_rate("mqproc_repeats_dropped_total", "repeats dropped"),
                summed_rate("mqproc_request_failures_total", "query, all"),
            ],
        ),
        Panel(
            "Waiting",
            "Waiting long polls, requests in progress, and connected clients.",
            "short",
            [
                Query("sum by (instance) (mqproc_waiting_pulls{$S})", "held pulls"),
                Query("sum by (instance) (mqproc_requests_in_progress{$S})", "in progress"),
                Query("sum by (role) (mqproc_client_connections{$S})", "clients of {{role}}"),
            ],
        ),
        Panel(
            "Append duration",
            "Duration of the writer's step that stored and answered a request, with all others that were ready; with "
            "SYNC_FLUSH including the sync. Time between client and writer is not included.",
            "s",
            quantiles("mqproc_append_duration_seconds"),
        ),
        Panel(
            "Request duration",
            "From the receipt of a request to its answer, without long polls.",
            "s",
            quantiles("mqproc_request_duration_seconds", by="request"),
        ),
        Panel(
            "Message size",
            "Sizes of records.",
            "bytes",
            [summed_rate("mqproc_message_size_bytes_bucket", "{{le}}", by="le")],
            kind=HEATMAP,
        ),
    ],
)

_LAG = Row(
    "Lag of dispatch and flush",
    [
        Panel(
            "Dispatch behind, bytes",
            "Bytes of the log that are not in queues and index yet.",
            "bytes",
            [Query("mqproc_dispatch_behind_bytes{$S}")],
        ),
        Panel(
            "Dispatch behind, messages and seconds",
            "Messages that are not dispatched, and the age of the oldest.",
            "short",
            [
                Query("mqproc_dispatch_behind_messages{$S}", "{{instance}} messages"),
                Query("mqproc_dispatch_behind_seconds{$S}", "{{instance}} seconds"),
            ],
        ),
        Panel(
            "Dispatch delay",
            "From a message's append to its dispatch to queue and index.",
            "s",
            quantiles("mqproc_dispatch_delay_seconds"),
        ),
        Panel(
            "Not durable",
            "Bytes of the log whose records, units or entries are not durable; units and entries can be rebuilt.",
            "bytes",
            [Query("mqproc_flush_behind_bytes{$S}", "{{instance}} {{target}}")],
        ),
        Panel(
            "Loss window",
            "Upper bound for the age of the oldest message that a power loss would lose.",
            "s",
            [Query("mqproc_unflushed_seconds{$S}")],
        ),
        Panel(
            "Back-pressure",
            "Share of time in which sends were slowed because dispatch was behind, or waited for a segment.",
            "percentunit",
            [
                rate("mqproc_append_slowed_seconds_total", "{{instance}} by dispatch"),
                rate("mqproc_segment_wait_seconds_total", "{{instance}} by segments"),
            ],
        ),
    ],
)

_GROUPS = Row(
    "Topics and consumer groups",
    [
        Panel(
            "Appended by topic",
            "The ten topics with the most messages a second.",
            "cps",
            [ten_largest(rate_of_chosen("mqproc_messages_appended_total"), "topic")],
        ),
        Panel(
            "Delivered by topic",
            "The ten topics with the most delivered messages a second.",
            "cps",
            [ten_largest(rate_of_chosen("mqproc_messages_delivered_total"), "topic")],
        ),
        Panel(
            "Lag, messages",
            "The ten groups that are furthest behind.",
            "short",
            [ten_largest('mqproc_consumer_lag_messages{$S,topic=~"$topic"}', "group", "topic")],
        ),
        Panel(
            "Lag, seconds",
            "Age of the oldest message that a group has not consumed.",
            "s",
            [ten_largest('mqproc_consumer_lag_seconds{$S,topic=~"$topic"}', "group", "topic", joined="max")],
        ),
        Panel(
            "Consumed by group",
            "Messages a second by which committed offsets advance; the ten busiest groups.",
            "cps",
            [ten_largest(rate_of_chosen("mqproc_messages_consumed_total"), "group", "topic")],
        ),
        Panel(
            "Delayed messages",
            "Messages that wait for a delay level or a delivery time.",
            "short",
            [Query("sum by (by) (mqproc_delayed_messages{$S})", "by {{by}}")],
        ),
        Panel(
            "Deliveries of delayed messages",
            "Delivered, rejected by the writer, and lost a second; how late the last ones were.",
            "short",
            [
                rate("mqproc_delayed_messages_delivered_total", "{{instance}} delivered"),
                rate("mqproc_delayed_deliveries_refused_total", "{{instance}} refused"),
                rate("mqproc_delayed_messages_lost_total", "{{instance}} lost"),
                Query("mqproc_delay_error_seconds{$S}", "{{instance}} late, seconds"),
            ],
        ),
        Panel(
            "Consumers",
            "Groups, their members, and rebalances.",
            "short",
            [
                Query("sum by (instance) (mqproc_consumer_groups{$S})", "groups"),
                Query("sum by (instance) (mqproc_consumer_members{$S})", "members"),
                summed_increase("mqproc_consumer_rebalances_total", "rebalances"),
            ],
        ),
        Panel(
            "Commits, retries, dead letters",
            "Offsets committed, messages sent to retry topics and to dead-letter topics a second.",
            "cps",
            [
                summed_rate("mqproc_offsets_committed_total", "commits"),
                summed_rate("mqproc_messages_retried_total", "retries"),
                summed_rate("mqproc_messages_dead_lettered_total", "dead letters"),
            ],
        ),
        Panel(
            "Waiting retries",
            "Messages in a delay level that groups get again later, no part of their lag; the ten largest.",
            "short",
            [ten_largest("mqproc_waiting_retries{$S}", "group")],
        ),
        Panel(
            "Open transactions",
            "Undecided half messages, the age of the oldest, and producers that can be checked.",
            "short",
            [
                Query("sum by (instance) (mqproc_transactions_open{$S})", "open"),
                age("mqproc_oldest_transaction_timestamp_seconds", "oldest, seconds"),
                Query("sum by (instance) (mqproc_transaction_producers{$S})", "producers"),
            ],
        ),
        Panel(
            "Transactions",
            "Commits, rollbacks, checks, and transactions given up, a second.",
            "cps",
            [
                summed_rate("mqproc_transactions_committed_total", "commits"),
                summed_rate("mqproc_transactions_rolled_back_total", "rollbacks"),
                summed_rate("mqproc_transaction_checks_total", "checks"),
                summed_rate("mqproc_transactions_given_up_total", "given up"),
            ],
        ),
        Panel(
            "Topics",
            "Readable messages, and the time of the last one.",
            "short",
            [
                Query('topk(50, sum by (topic) (mqproc_stored_messages{$S,topic=~"$topic"}))', "stored"),
                Query(
                    '1000 * topk(50, max by (topic) (mqproc_last_message_timestamp_seconds{$S,topic=~"$topic"}) > 0)',
                    "last",
                    MOMENT,
                ),
            ],
            kind=TABLE,
        ),
    ],
)

_DISK = Row(
    "Disk and retention",
    [
        Panel(
            "Disk",
            "Used and free bytes of the file system that holds the store.",
            "bytes",
            [
                Query("mqproc_disk_used_bytes{$S}", "{{instance}} used"),
                Query("mqproc_disk_free_bytes{$S}", "{{instance}} free"),
            ],
        ),
        Panel(
            "Stored",
            "Bytes of records, units and entries in the store.",
            "bytes",
            [Query("mqproc_storage_bytes{$S}", "{{instance}} {{target}}")],
        ),
        Panel(
            "Oldest message",
            "Age of the log's first record.",
            "s",
            [age("mqproc_oldest_message_timestamp_seconds")],
        ),
        Panel(
            "Deleted",
            "Files that retention deleted, and messages deleted before a group had consumed them.",
            "short",
            [
                summed_increase("mqproc_retention_deleted_files_total", "{{target}} files", by="target"),
                summed_increase("mqproc_unconsumed_messages_deleted_total", "unconsumed messages"),
            ],
        ),
        Panel(
            "Freed space",
            "Bytes of deleted files, and bytes of them that are not freed yet.",
            "bytes",
            [
                increase("mqproc_retention_deleted_bytes_total", "{{instance}} deleted"),
                Query("mqproc_retention_pending_bytes{$S}", "{{instance}} pending"),
            ],
        ),
        Panel(
            "Held back",
            "1 while expired segments are kept for a reason; rejected sends; errno of the last deletion.",
            "none",
            [
                Query("max by (reason) (mqproc_retention_held_back{$S})", "{{reason}}"),
                Query("mqproc_disk_full{$S}", "{{instance}} sends rejected"),
                Query("mqproc_retention_blocked{$S}", "{{instance}} errno"),
            ],
        ),
    ],
)


def overview() -> Any:
    """Build the dashboard."""
    return make_dashboard(
        OVERVIEW_UID,
        "mqproc overview",
        "Health and speed of the store, and the lag of dispatch, flush and consumers.",
        [_GLANCE, _REQUESTS, _LAG, _GROUPS, _DISK],
    ).build()
