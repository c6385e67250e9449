"""Unit tests of the alerts at their thresholds, for `promtool test rules`.

With the series above a threshold an alert fires at the end, but not before its hold time; with the others it is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from grafana.source.rules import alerts
from grafana.source.settings import JOB, MINUTE, SCRAPE_S, Durations

Series = Mapping[str, str]
"""Values in promtool's notation, by metric with labels."""

END_S: Final = 30 * MINUTE
_SAMPLES: Final = round(END_S / SCRAPE_S)
_EARLIER: Final = 80
"""Sample number of a step that is within 15 minutes before the end."""

_FIRES: Final = "it fires"


@dataclass(frozen=True, slots=True)
class Case:
    """An alert: series that make it fire, and named series that come close without firing."""

    alert: str
    ill: Series
    well: Mapping[str, Series]


def stays(value: float) -> str:
    """A constant value."""
    return f"{value:g}x{_SAMPLES}"


def grows(by: float, first: float = 0) -> str:
    """A value that grows with each scrape."""
    return f"{first:g}{by:+g}x{_SAMPLES}"


def ago(seconds: float) -> str:
    """A time with a constant age; at first before 1970, which counts as unset."""
    return grows(SCRAPE_S, -seconds)


def seldom_scraped(seconds: float) -> str:
    """A time with a constant age when it is scraped, every two minutes."""
    moments = (number * SCRAPE_S - seconds for number in range(_SAMPLES + 1))
    return " ".join(f"{at:g}" if number % 8 == 1 else "_" for number, at in enumerate(moments))


def steps(by: float) -> str:
    """A step from 0 to a value."""
    return f"0x{_EARLIER} {by:g}x{_SAMPLES - _EARLIER - 1}"


def _level(alert: str, metric: str, well: float, ill: float) -> Case:
    """An alert on a value."""
    return Case(alert, {metric: stays(ill)}, {f"{well:g} is no more than allowed": {metric: stays(well)}})


def _events(alert: str, metric: str) -> Case:
    """An alert on recent events."""
    return Case(alert, {metric: steps(1)}, {"all of it was long ago": {metric: stays(7)}})


def _disk_limits(delete_any_age: float, refuse_sends: float) -> Series:
    return {
        'mqproc_disk_limit_ratio{limit="delete_any_age"}': stays(delete_any_age),
        'mqproc_disk_limit_ratio{limit="refuse_sends"}': stays(refuse_sends),
    }


def _append_buckets(fast: int) -> Series:
    """200 appends per scrape, of which `fast` take under 0.5 s and the others under 1 s."""
    bucket = "mqproc_append_duration_seconds_bucket"
    return {f'{bucket}{{le="{le}"}}': grows(count) for le, count in (("0.5", fast), ("1", 200), ("+Inf", 200))}


_ROLE = 'role="writer"'
_HEARTBEAT = f"mqproc_role_heartbeat_timestamp_seconds{{{_ROLE}}}"
_ROLE_UP = f"mqproc_role_up{{{_ROLE}}}"
_FLUSH = 'mqproc_last_flush_timestamp_seconds{target="index"}'
_FORCED = "mqproc_last_forced_flush_timestamp_seconds"
_LAG = 'mqproc_consumer_lag_messages{group="g",topic="t"}'
_CONSUMED = 'mqproc_messages_consumed_total{group="g",topic="t"}'
_RESTARTS = f"mqproc_role_restarts_total{{{_ROLE}}}"

CASES: Final = (
    Case("MqprocDown", {"mqproc_up": stays(0)}, {"it answers and runs": {"up": stays(1), "mqproc_up": stays(1)}}),
    Case(
        "MqprocDegraded",
        {"mqproc_group_ready": stays(0), "mqproc_up": stays(1)},
        {
            "it is ready": {"mqproc_group_ready": stays(1), "mqproc_up": stays(1)},
            "it does not run at all": {"mqproc_group_ready": stays(0), "mqproc_up": stays(0)},
        },
    ),
    _level("MqprocReadOnly", "mqproc_read_only", 0, 1),
    Case(
        "MqprocRefusing",
        {f'mqproc_rejected_total{{{_ROLE},code="STORE_BUSY"}}': grows(1)},
        {
            "all of it was long ago": {f'mqproc_rejected_total{{{_ROLE},code="STORE_BUSY"}}': stays(7)},
            "it is the clients' fault": {f'mqproc_rejected_total{{{_ROLE},code="TOPIC_NOT_FOUND"}}': grows(1)},
        },
    ),
    Case("MqprocAppendSlow", _append_buckets(197), {"one in two hundred is slow": _append_buckets(199)}),
    Case(
        "MqprocDispatchStalled",
        {"mqproc_dispatch_behind_bytes": stays(1), "mqproc_dispatched_offset_bytes": stays(1000)},
        {
            "it moves": {"mqproc_dispatch_behind_bytes": stays(9e9), "mqproc_dispatched_offset_bytes": grows(1)},
            "there is nothing to do": {
                "mqproc_dispatch_behind_bytes": stays(0),
                "mqproc_dispatched_offset_bytes": stays(1000),
            },
        },
    ),
    _level("MqprocDispatchBehind", "mqproc_dispatch_behind_seconds", 10, 10.1),
    _level("MqprocDispatchBlocked", "mqproc_dispatch_blocked", 0, 28),
    Case(
        "MqprocConsumerLagGrowing",
        {_LAG: grows(1, 1001)},
        {
            "it is not a thousand": {_LAG: grows(8)},
            "it is much and becomes less": {_LAG: grows(-10, 5000)},
            "it is much and stays": {_LAG: stays(5000)},
        },
    ),
    Case(
        "MqprocConsumerStopped",
        {_LAG: stays(5), _CONSUMED: stays(7)},
        {
            "it has nothing to consume": {_LAG: stays(0), _CONSUMED: stays(7)},
            "it consumes": {_LAG: stays(5), _CONSUMED: grows(1)},
        },
    ),
    _events("MqprocDeadLettersGrowing", 'mqproc_dead_letters_total{group="g"}'),
    _events("MqprocUnconsumedDeleted", "mqproc_unconsumed_messages_deleted_total"),
    _events("MqprocDispatchGap", "mqproc_dispatch_gap_bytes_total"),
    _level("MqprocLossWindow", "mqproc_unflushed_seconds", 60, 61),
    Case(
        "MqprocFlushLate",
        {_FLUSH: ago(31)},
        {
            "the last pass is young enough": {_FLUSH: ago(30)},
            "the last scrape is old": {_FLUSH: seldom_scraped(1)},
            "none has come yet": {_FLUSH: stays(0)},
        },
    ),
    Case(
        "MqprocForcedFlushMissing",
        {f'{_FORCED}{{target="index"}}': ago(181)},
        {
            "the last pass is young enough": {f'{_FORCED}{{target="index"}}': ago(180)},
            "the log has no such pass": {f'{_FORCED}{{target="commitlog"}}': ago(900)},
            "none has come yet": {f'{_FORCED}{{target="index"}}': stays(0)},
        },
    ),
    _level("MqprocSyncFailed", f"mqproc_sync_errno{{{_ROLE}}}", 0, 5),
    _level("MqprocDamaged", "mqproc_damage_holes", 0, 1),
    Case(
        "MqprocRoleDown",
        {_ROLE_UP: stays(0), "mqproc_up": stays(1)},
        {
            "it runs": {_ROLE_UP: stays(1), "mqproc_up": stays(1)},
            "nothing runs": {_ROLE_UP: stays(0), "mqproc_up": stays(0)},
            "the store is recovered first": {
                _ROLE_UP: stays(0),
                "mqproc_up": stays(1),
                "mqproc_group_recovering": stays(1),
            },
        },
    ),
    Case(
        "MqprocRoleRestarting",
        {_RESTARTS: steps(2)},
        {"it died once": {_RESTARTS: steps(1)}, "it died long ago": {_RESTARTS: stays(7)}},
    ),
    Case(
        "MqprocHeartbeatMissing",
        {_HEARTBEAT: ago(16), _ROLE_UP: stays(1)},
        {
            "the last beat is young enough": {_HEARTBEAT: ago(15), _ROLE_UP: stays(1)},
            "the last scrape is old": {_HEARTBEAT: seldom_scraped(1), _ROLE_UP: stays(1)},
            "the role does not run": {_HEARTBEAT: ago(900), _ROLE_UP: stays(0)},
        },
    ),
    _events("MqprocErrorsLogged", f"mqproc_errors_total{{{_ROLE}}}"),
    _events("MqprocClockSteps", "mqproc_clock_steps_total"),
    _level("MqprocDiskFull", "mqproc_disk_full", 0, 1),
    Case(
        "MqprocDiskAlmostFull",
        {"mqproc_disk_usage_ratio": stays(0.86), **_disk_limits(0.85, 0.9)},
        {
            "it is no more than allowed": {"mqproc_disk_usage_ratio": stays(0.85), **_disk_limits(0.85, 0.9)},
            "the options allow more": {"mqproc_disk_usage_ratio": stays(0.94), **_disk_limits(0.95, 0.98)},
        },
    ),
    Case(
        "MqprocSegmentWaits",
        {"mqproc_segment_wait_seconds_total": grows(0.16)},
        {"it is less than a hundredth": {"mqproc_segment_wait_seconds_total": grows(0.14)}},
    ),
    _level("MqprocRetentionHeldBack", 'mqproc_retention_held_back{reason="dispatch"}', 0, 1),
    _level("MqprocQueueTableAlmostFull", "mqproc_queue_table_used_ratio", 0.9, 0.91),
)


def rule_tests() -> dict[str, Any]:
    """The file for promtool, for rules with their real durations.

    Each case has its own instance, so that one test covers all.
    """
    holds = {alert.name: alert.hold_s for alert in alerts(Durations())}
    every = Durations().of(SCRAPE_S)
    test: dict[str, Any] = {
        "interval": every,
        "input_series": [each for case in CASES for each in _series(case)],
        "promql_expr_test": [each for case in CASES for each in _expected(case, holds[case.alert])],
    }
    return {"rule_files": ["../rules/*.yml"], "evaluation_interval": every, "tests": [test]}


def _series(case: Case) -> list[dict[str, str]]:
    return [
        {"series": _of_instance(metric, f"{case.alert}: {name}"), "values": values}
        for name, series in {_FIRES: case.ill, **case.well}.items()
        for metric, values in series.items()
    ]


def _expected(case: Case, hold_s: float) -> list[dict[str, Any]]:
    early = [_firing(case.alert, _FIRES, hold_s - SCRAPE_S, 0)] if hold_s else []
    silent = [_firing(case.alert, why, END_S, 0) for why in case.well]
    return [*early, _firing(case.alert, _FIRES, END_S, 1), *silent]


def _firing(alert: str, name: str, at_s: float, times: int) -> dict[str, Any]:
    return {
        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing",instance="{alert}: {name}"}})',
        "eval_time": Durations().of(at_s),
        "exp_samples": [{"labels": "{}", "value": times}] if times else [],
    }


def _of_instance(metric: str, instance: str) -> str:
    name, _, labels = metric.rstrip("}").partition("{")
    return f'{name}{{{labels}{"," if labels else ""}job="{JOB}",instance="{instance}"}}'
