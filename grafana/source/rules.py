"""Recording rules and alerts. Recorded series are named level:metric:operations.

Symptoms come before causes. README.md has a section for each alert: its meaning, where to look, what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from grafana.source.settings import JOB, MINUTE, RUNBOOKS, Durations

WARNING: Final = "warning"
CRITICAL: Final = "critical"

# Rejections caused by the store rather than by clients.
_STORE_CODES = "INTERNAL|STORE_BUSY|DISK_FULL|STORE_READ_ONLY|FLUSH_FAILED|TOO_MANY_CONNECTIONS|TOO_MANY_QUEUES"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert, which fires after `hold_s`. Texts may use Prometheus' templates."""

    name: str
    severity: str
    expr: str
    hold_s: float
    summary: str
    description: str

    def rule(self, durations: Durations) -> dict[str, Any]:
        """The rule in Prometheus' format."""
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": durations.of(self.hold_s)} if self.hold_s else {}),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded series."""

    name: str
    expr: str

    def rule(self, _durations: Durations) -> dict[str, Any]:
        """The rule in Prometheus' format."""
        return {"record": self.name, "expr": self.expr}


def recordings(durations: Durations) -> list[Recording]:
    """Series that dashboards and alerts use often."""
    window = durations.of(5 * MINUTE)

    def share(metric: str, quantile: float) -> str:
        return f"histogram_quantile({quantile}, rate({metric}_bucket[{window}]))"

    return [
        Recording(
            "instance:mqproc_messages_appended:rate5m",
            f"sum without (topic) (rate(mqproc_messages_appended_total[{window}]))",
        ),
        Recording(
            "instance:mqproc_messages_delivered:rate5m",
            f"sum without (topic) (rate(mqproc_messages_delivered_total[{window}]))",
        ),
        Recording(
            "instance:mqproc_rejected:rate5m",
            f"sum without (role, code) (rate(mqproc_rejected_total[{window}]))",
        ),
        Recording("instance:mqproc_append_duration_seconds:p99_5m", share("mqproc_append_duration_seconds", 0.99)),
        Recording("instance:mqproc_dispatch_delay_seconds:p99_5m", share("mqproc_dispatch_delay_seconds", 0.99)),
        Recording("instance:mqproc_request_duration_seconds:p99_5m", share("mqproc_request_duration_seconds", 0.99)),
        Recording("instance:mqproc_flush_duration_seconds:p99_5m", share("mqproc_flush_duration_seconds", 0.99)),
        Recording(
            "instance:mqproc_process_memory_bytes:sum",
            "sum without (role) (mqproc_process_proportional_memory_bytes)",
        ),
        Recording("group:mqproc_consumer_lag_messages:sum", "sum without (topic) (mqproc_consumer_lag_messages)"),
        Recording("group:mqproc_consumer_lag_seconds:max", "max without (topic) (mqproc_consumer_lag_seconds)"),
    ]


def _age(metric: str) -> str:
    """Age of a time at its scrape, without the time since the scrape."""
    return f"timestamp({metric}) - {metric}"


def _grown(counter: str, durations: Durations, least: float = 0, *, young: str = "") -> str:
    """A counter that has grown by more than `least` within 15 minutes.

    Prometheus sees no growth before its first scrape of a group. As the counter starts at 0 with the group, its whole
    value counts during the first 15 minutes; `young` selects the series for which this is so.
    """
    recent = f"time() - mqproc_group_started_timestamp_seconds < {durations.age(15 * MINUTE)}"
    return (
        f"increase({counter}[{durations.of(15 * MINUTE)}]) > {least:g}"
        f" or {counter}{young} > {least:g} and on (job, instance) {recent}"
    )


def _dead_letters(durations: Durations) -> str:
    """Groups with new dead letters.

    The dead letters of a group can be older than its first sample. So they count as new if the monitor has been scraped
    before the group's first sample: then it has more samples within the window than the group.
    """
    counter, window = "mqproc_dead_letters_total", durations.of(15 * MINUTE)
    return (
        f"increase({counter}[{window}]) > 0 or {counter} > 0 and"
        f" count_over_time({counter}[{window}])"
        f" < on (job, instance) group_left count_over_time(mqproc_consumer_groups[{window}])"
    )


def alerts(durations: Durations) -> list[Alert]:
    """Every alert, symptoms first."""
    groups = (_symptoms, _lag, _losses, _durability, _roles, _room)
    return [alert for group in groups for alert in group(durations)]


def _symptoms(durations: Durations) -> list[Alert]:
    window = durations.of(5 * MINUTE)
    return [
        Alert(
            "MqprocDown",
            CRITICAL,
            f'up{{job="{JOB}"}} == 0 or mqproc_up == 0',
            MINUTE,
            "mqproc on {{ $labels.instance }} does not run",
            "Nothing can be sent or read. The supervisor or the monitor does not respond.",
        ),
        Alert(
            "MqprocDegraded",
            WARNING,
            "mqproc_group_ready == 0 and mqproc_up == 1",
            5 * MINUTE,
            "mqproc on {{ $labels.instance }} does not do its whole job",
            "The group runs but is degraded, or recovers. mqproc status says why, since when, and what to do.",
        ),
        Alert(
            "MqprocReadOnly",
            CRITICAL,
            "mqproc_read_only == 1",
            0,
            "the store on {{ $labels.instance }} is read-only",
            "A sync has failed, or there is damage and on_damage = read_only. Stored messages can be read.",
        ),
        Alert(
            "MqprocRefusing",
            WARNING,
            f'sum without (code) (rate(mqproc_rejected_total{{code=~"{_STORE_CODES}"}}[{window}])) > 0',
            MINUTE,
            "{{ $labels.role }} on {{ $labels.instance }} rejects requests",
            "{{ $value | humanize }} requests a second are rejected because of the store's state.",
        ),
        Alert(
            "MqprocAppendSlow",
            WARNING,
            "instance:mqproc_append_duration_seconds:p99_5m > 0.5",
            MINUTE,
            "sends to {{ $labels.instance }} are slow",
            "One append in a hundred takes longer than {{ $value | humanizeDuration }}.",
        ),
    ]


def _lag(durations: Durations) -> list[Alert]:
    return [
        Alert(
            "MqprocDispatchStalled",
            CRITICAL,
            "mqproc_dispatch_behind_bytes > 0"
            f" and changes(mqproc_dispatched_offset_bytes[{durations.of(5 * MINUTE)}]) == 0",
            MINUTE,
            "dispatch on {{ $labels.instance }} has stalled",
            "{{ $value | humanize1024 }}B of the log are not dispatched and cannot be consumed; nothing advances.",
        ),
        Alert(
            "MqprocDispatchBehind",
            WARNING,
            f"mqproc_dispatch_behind_seconds > {durations.age(10)}",
            5 * MINUTE,
            "dispatch on {{ $labels.instance }} is behind",
            "Consumers see messages {{ $value | humanizeDuration }} late.",
        ),
        Alert(
            "MqprocDispatchBlocked",
            CRITICAL,
            "mqproc_dispatch_blocked != 0",
            MINUTE,
            "dispatch on {{ $labels.instance }} is blocked",
            "A step fails repeatedly with errno {{ $value }}; 28 is a full disk. Dispatch continues by itself.",
        ),
        Alert(
            "MqprocConsumerLagGrowing",
            WARNING,
            "mqproc_consumer_lag_messages > 1000"
            f" and deriv(mqproc_consumer_lag_messages[{durations.of(10 * MINUTE)}]) > 0",
            10 * MINUTE,
            "group {{ $labels.group }} falls behind in {{ $labels.topic }}",
            "{{ $value | humanize }} messages wait for it, and their number grows.",
        ),
        Alert(
            "MqprocConsumerStopped",
            WARNING,
            "mqproc_consumer_lag_messages > 0 and"
            f" increase(mqproc_messages_consumed_total[{durations.of(15 * MINUTE)}]) == 0",
            15 * MINUTE,
            "group {{ $labels.group }} consumes nothing of {{ $labels.topic }}",
            "{{ $value | humanize }} messages wait for it: it has no members, or they are stuck.",
        ),
    ]


def _losses(durations: Durations) -> list[Alert]:
    return [
        Alert(
            "MqprocDeadLettersGrowing",
            WARNING,
            _dead_letters(durations),
            0,
            "messages of group {{ $labels.group }} become dead letters",
            "{{ $value | humanize }} messages could not be consumed within 15 minutes.",
        ),
        Alert(
            "MqprocUnconsumedDeleted",
            CRITICAL,
            _grown("mqproc_unconsumed_messages_deleted_total", durations),
            0,
            "retention on {{ $labels.instance }} deletes unconsumed messages",
            "{{ $value | humanize }} messages were deleted before a group had consumed them.",
        ),
        Alert(
            "MqprocDispatchGap",
            CRITICAL,
            _grown("mqproc_dispatch_gap_bytes_total", durations),
            0,
            "messages on {{ $labels.instance }} were deleted before they were dispatched",
            "{{ $value | humanize1024 }}B of the log were not dispatched and cannot be consumed.",
        ),
    ]


def _durability(durations: Durations) -> list[Alert]:
    flush = "mqproc_last_flush_timestamp_seconds"
    forced = 'mqproc_last_forced_flush_timestamp_seconds{target!="commitlog"}'
    return [
        Alert(
            "MqprocLossWindow",
            CRITICAL,
            f"mqproc_unflushed_seconds > {durations.age(60)}",
            MINUTE,
            "the log on {{ $labels.instance }} is not durable",
            "A power loss would lose the messages of the last {{ $value | humanizeDuration }}.",
        ),
        Alert(
            "MqprocFlushLate",
            WARNING,
            f"{_age(flush)} > {durations.age(30)} and {flush} > 0",
            MINUTE,
            "{{ $labels.target }} on {{ $labels.instance }} is not flushed",
            "The last pass ended {{ $value | humanizeDuration }} ago; there should be one every second.",
        ),
        Alert(
            "MqprocForcedFlushMissing",
            WARNING,
            f"{_age(forced)} > {durations.age(180)} and {forced} > 0",
            MINUTE,
            "{{ $labels.target }} on {{ $labels.instance }} is not flushed in full",
            "The last full pass was {{ $value | humanizeDuration }} ago; there should be one every minute.",
        ),
        Alert(
            "MqprocSyncFailed",
            CRITICAL,
            "mqproc_sync_errno != 0",
            0,
            "a sync of {{ $labels.role }} on {{ $labels.instance }} has failed",
            "errno {{ $value }}: 5 is a disk error. The durable position is unknown; the store is read-only.",
        ),
        Alert(
            "MqprocDamaged",
            WARNING,
            "mqproc_damage_holes > 0",
            0,
            "the log on {{ $labels.instance }} is damaged",
            "{{ $value }} ranges of the log have no intact records. Everything else is served.",
        ),
    ]


def _roles(durations: Durations) -> list[Alert]:
    return [
        Alert(
            "MqprocRoleDown",
            CRITICAL,
            "mqproc_role_up == 0 and on (job, instance) mqproc_up == 1"
            " unless on (job, instance) mqproc_group_recovering == 1",
            MINUTE,
            "{{ $labels.role }} on {{ $labels.instance }} does not run",
            "The supervisor runs but the role does not: its restart is delayed, or it runs in a terminal.",
        ),
        Alert(
            "MqprocRoleRestarting",
            WARNING,
            _grown("mqproc_role_restarts_total", durations, 1.5),
            0,
            "{{ $labels.role }} on {{ $labels.instance }} keeps crashing",
            "It crashed {{ $value | humanize }} times within 15 minutes.",
        ),
        Alert(
            "MqprocHeartbeatMissing",
            CRITICAL,
            f"{_age('mqproc_role_heartbeat_timestamp_seconds')} > {durations.age(15)} and mqproc_role_up == 1",
            MINUTE / 2,
            "{{ $labels.role }} on {{ $labels.instance }} hangs",
            "Its last heartbeat was {{ $value | humanizeDuration }} ago.",
        ),
        Alert(
            "MqprocErrorsLogged",
            WARNING,
            # The supervisor's count includes earlier runs.
            _grown("mqproc_errors_total", durations, young='{role!="supervisor"}'),
            0,
            "{{ $labels.role }} on {{ $labels.instance }} logs errors",
            "{{ $value | humanize }} errors within 15 minutes; mqproc errors shows them.",
        ),
        Alert(
            "MqprocClockSteps",
            WARNING,
            _grown("mqproc_clock_steps_total", durations),
            0,
            "the clock of {{ $labels.instance }} was set back",
            "Seen {{ $value | humanize }} times within 15 minutes: store times stop or jump.",
        ),
    ]


def _room(durations: Durations) -> list[Alert]:
    window = durations.of(5 * MINUTE)
    return [
        Alert(
            "MqprocDiskFull",
            CRITICAL,
            "mqproc_disk_full == 1",
            0,
            "the disk of {{ $labels.instance }} is full",
            "Sends are rejected until space is free.",
        ),
        Alert(
            "MqprocDiskAlmostFull",
            WARNING,
            # The group exports the limits that follow from its options.
            "mqproc_disk_usage_ratio > ignoring (limit)"
            ' min without (limit) (mqproc_disk_limit_ratio{limit=~"delete_any_age|refuse_sends"})',
            5 * MINUTE,
            "the disk of {{ $labels.instance }} is almost full",
            "{{ $value | humanizePercentage }} are used"
            '{{ range printf `mqproc_disk_limit_ratio{limit="refuse_sends",job=%q,instance=%q}`'
            " $labels.job $labels.instance | query }}"
            "; sends are rejected above {{ . | value | humanizePercentage }}{{ end }}.",
        ),
        Alert(
            "MqprocSegmentWaits",
            WARNING,
            f"rate(mqproc_segment_wait_seconds_total[{window}]) > 0.01",
            0,
            "the writer on {{ $labels.instance }} waits for segments",
            "It spends {{ $value | humanizePercentage }} of its time waiting for the next segment of the log.",
        ),
        Alert(
            "MqprocRetentionHeldBack",
            WARNING,
            "mqproc_retention_held_back == 1",
            15 * MINUTE,
            "retention on {{ $labels.instance }} cannot delete",
            "Expired segments are kept: {{ $labels.reason }}.",
        ),
        Alert(
            "MqprocQueueTableAlmostFull",
            WARNING,
            "mqproc_queue_table_used_ratio > 0.9",
            5 * MINUTE,
            "{{ $labels.instance }} has few free queues",
            "{{ $value | humanizePercentage }} of max_queues are in use; beyond that no topic can be created.",
        ),
    ]


def rule_files(durations: Durations) -> dict[str, dict[str, Any]]:
    """Contents of the rule files by name."""
    return {
        "recording.yml": {
            "groups": [{"name": "mqproc-recording", "rules": [each.rule(durations) for each in recordings(durations)]}]
        },
        "alerts.yml": {
            "groups": [{"name": "mqproc-alerts", "rules": [each.rule(durations) for each in alerts(durations)]}]
        },
    }
