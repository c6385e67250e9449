"""The collector's values equal the store's, and it exports exactly the catalogue."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqproc.ipc.control import Control
from mqproc.ipc.counters import Histogram, error_counter
from mqproc.ipc.error_log import LINES_DROPPED, ErrorLog
from mqproc.layout import control as layout
from mqproc.layout import histograms, queue_table
from mqproc.metrics.catalogue import COUNTER, METRICS, family_names
from mqproc.metrics.collector import KNOWN_IN_RECOVERY
from mqproc.metrics.groups import OTHERS
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from tests.support.fakes import IO, make_collector, make_control, make_queues, render

Scrape = Callable[..., str]


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return make_control(tmp_path)


@pytest.fixture
def scrape(tmp_path: Path, control: Control) -> Scrape:
    def scrape(**options: object) -> str:
        collector = make_collector(tmp_path, control, **options)
        text = render(collector.samples()).decode()
        collector.close()
        return text

    return scrape


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"no sample {name} {labels}")


def test_collector_exports_exactly_the_catalogue(scrape: Scrape) -> None:
    assert family_names(scrape()) == {metric.name for metric in METRICS}


def test_collector_labels_match_the_catalogue(tmp_path: Path, scrape: Scrape) -> None:
    make_queues(tmp_path, 2, 2, 10)
    declared = {metric.name: set(metric.labels) for metric in METRICS}
    for family in text_string_to_metric_families(scrape()):
        for sample in family.samples:
            name = sample.name
            if family.type == "histogram":
                name = re.sub(r"_(bucket|sum|count)$", "", name)
            assert set(sample.labels) - {"le"} == declared[name], sample


def test_collector_lag_is_difference_of_words(scrape: Scrape) -> None:
    text = scrape()
    assert value(text, "mqproc_dispatch_behind_bytes") == 3000
    assert value(text, "mqproc_dispatch_behind_messages") == 30
    assert 0 <= value(text, "mqproc_dispatch_behind_seconds") < 30
    assert value(text, "mqproc_flush_behind_bytes", target="commitlog") == 4500
    assert value(text, "mqproc_disk_usage_ratio") == 0.3


def test_collector_disk_limits_come_from_options(scrape: Scrape) -> None:
    text = scrape(disk_space_clean_forcibly_ratio=60, disk_space_warning_level_ratio=70)
    limits = {"delete_expired": 0.75, "delete_any_age": 0.6, "refuse_sends": 0.7}
    assert {limit: value(text, "mqproc_disk_limit_ratio", limit=limit) for limit in limits} == limits


def test_collector_unflushed_age_counts_from_last_full_flush(control: Control, scrape: Scrape) -> None:
    assert 7 <= value(scrape(), "mqproc_unflushed_seconds") < 30
    control.store(layout.FLUSHER_SYNCED, 9000)
    assert value(scrape(), "mqproc_unflushed_seconds") == 0


@pytest.mark.parametrize(
    ("word", "number"),
    [
        (layout.role_word(layout.QUERY, "supervised"), layout.LENT),
        (layout.role_word(layout.KEEPER, "supervised"), layout.BACKOFF),
        (layout.role_word(layout.WRITER, "heartbeat_ns"), 1),
        (layout.WRITER_SYNC_ERRNO, 5),
        (layout.DAMAGE_READ_ONLY, 1),
        (layout.DISK_FULL, 1),
        (layout.GROUP_STATE, layout.GROUP_RECOVERING),
    ],
    ids=["lent", "missing", "silent", "read-only", "damage", "disk full", "recovering"],
)
def test_collector_ready_equals_readyz(control: Control, scrape: Scrape, word: int, number: int) -> None:
    assert value(scrape(), "mqproc_group_ready") == 1
    control.store(word, number)
    assert value(scrape(), "mqproc_group_ready") == 0


def test_collector_counts_supervisor_errors(tmp_path: Path, scrape: Scrape) -> None:
    assert value(scrape(), "mqproc_errors_total", role=layout.SUPERVISOR) == 0
    errors = ErrorLog.create(IO, StorePaths(tmp_path), layout.SUPERVISOR)
    assert errors is not None
    for text in ("query has died", "query has died", "recovery has cut a tail"):
        errors.note(text, 1_700_000_000_000)
    text = scrape()
    assert value(text, "mqproc_errors_total", role=layout.SUPERVISOR) == 3
    assert value(text, "mqproc_errors_total", role=layout.WRITER) == 0


def test_collector_counts_dropped_log_lines(tmp_path: Path, scrape: Scrape) -> None:
    errors = ErrorLog.create(IO, StorePaths(tmp_path), layout.WRITER)
    assert errors is not None
    for text in (f"{LINES_DROPPED}: no room", f"{LINES_DROPPED}: no room", "another error"):
        errors.note(text, 1_700_000_000_000)
    text = scrape()
    assert value(text, "mqproc_log_lines_dropped_total", role=layout.WRITER) == 2
    assert value(text, "mqproc_log_lines_dropped_total", role=layout.SUPERVISOR) == 0


def test_collector_heartbeats_are_unix_time(scrape: Scrape) -> None:
    text = scrape()
    for role in layout.ROLES:
        assert value(text, "mqproc_role_up", role=role) == 1
        assert abs(value(text, "mqproc_role_heartbeat_timestamp_seconds", role=role) - time.time()) < 60
        assert value(text, "mqproc_process_resident_memory_bytes", role=role) > 1 << 20
    assert value(text, "mqproc_build_info", version="1.2.3", python=platform.python_version()) == 1


def test_collector_histogram_sums_two_roles(control: Control, scrape: Scrape) -> None:
    Histogram(control.words, histograms.WRITER_SYNCS).observe(3_000_000)
    Histogram(control.words, histograms.LOG_FLUSHES).observe(20_000_000_000, 2)
    text = scrape()
    name = "mqproc_flush_duration_seconds"
    assert value(text, f"{name}_bucket", target="commitlog", le="0.0025") == 0
    assert value(text, f"{name}_bucket", target="commitlog", le="0.005") == 1
    assert value(text, f"{name}_bucket", target="commitlog", le="10.0") == 1
    assert value(text, f"{name}_bucket", target="commitlog", le="+Inf") == 3
    assert value(text, f"{name}_count", target="commitlog") == 3
    assert value(text, f"{name}_sum", target="commitlog") == pytest.approx(40.003)


def test_collector_counts_refusals_by_role_and_code(control: Control, scrape: Scrape) -> None:
    error_counter(control.words, layout.WRITER)("DISK_FULL")
    error_counter(control.words, layout.QUERY)("DISK_FULL")
    error_counter(control.words, layout.QUERY)("DISK_FULL")
    text = scrape()
    assert value(text, "mqproc_rejected_total", role="writer", code="DISK_FULL") == 1
    assert value(text, "mqproc_rejected_total", role="query", code="DISK_FULL") == 2
    assert value(text, "mqproc_rejected_total", role="query", code="INTERNAL") == 0


def test_collector_counts_partial_frames_by_role(control: Control, scrape: Scrape) -> None:
    control.store(layout.WRITER_PARTIAL_FRAMES, 3)
    control.store(layout.QUERY_PARTIAL_FRAMES, 4)
    text = scrape()
    assert value(text, "mqproc_partial_frames_total", role="writer") == 3
    assert value(text, "mqproc_partial_frames_total", role="query") == 4


def test_collector_topic_sums_its_queues(tmp_path: Path, scrape: Scrape) -> None:
    make_queues(tmp_path, topics=3, queues=4, messages=10)
    text = scrape()
    assert value(text, "mqproc_topics") == 3
    assert value(text, "mqproc_queues") == 12
    assert value(text, "mqproc_queue_table_used_ratio") == 1
    assert value(text, "mqproc_messages_appended_total", topic="topic-1") == 40
    assert value(text, "mqproc_messages_delivered_total", topic="topic-1") == 8
    assert value(text, "mqproc_stored_messages", topic="topic-1") == 32
    assert value(text, "mqproc_last_message_timestamp_seconds", topic="topic-2") == 1_700_000_000.002
    assert value(text, "mqproc_storage_bytes", target="consumequeue") == 3 * 32 * 20


def test_collector_recreated_topic_keeps_its_counts(tmp_path: Path, scrape: Scrape) -> None:
    make_queues(tmp_path, topics=2, queues=4, messages=10)
    table = QueueTable(IO, StorePaths(tmp_path).queues, write=True)
    numbers = [number for number, topic, _ in table.live() if topic == "topic-1"]
    for number in numbers:
        table.delete_queue(number)
    assert 'topic="topic-1"' not in scrape()
    table.create_queue("topic-1", 0)
    text = scrape()
    assert value(text, "mqproc_queues") == 5
    assert value(text, "mqproc_messages_appended_total", topic="topic-1") == 40
    assert value(text, "mqproc_messages_delivered_total", topic="topic-1") == 8
    assert value(text, "mqproc_stored_messages", topic="topic-1") == 0
    assert value(text, "mqproc_last_message_timestamp_seconds", topic="topic-1") == 0
    table.store(numbers[0], queue_table.NEXT_OFFSET, 11)
    table.store(numbers[0], queue_table.MAX_OFFSET, 11)
    text = scrape()
    assert value(text, "mqproc_messages_appended_total", topic="topic-1") == 41
    assert value(text, "mqproc_stored_messages", topic="topic-1") == 1
    assert value(text, "mqproc_last_message_timestamp_seconds", topic="topic-1") > 0
    table.close()


def test_collector_topics_above_limit_are_summed(tmp_path: Path, scrape: Scrape) -> None:
    make_queues(tmp_path, topics=5, queues=1, messages=10)
    text = scrape(metrics_series_max=2)
    assert value(text, "mqproc_topics") == 5
    assert len(re.findall(r"^mqproc_stored_messages\{", text, re.MULTILINE)) == 3
    assert value(text, "mqproc_messages_appended_total", topic=OTHERS) == 30


def test_collector_sum_above_limit_survives_topic_deletion(tmp_path: Path, control: Control) -> None:
    make_queues(tmp_path, topics=5, queues=1, messages=10, room=1)
    collector = make_collector(tmp_path, control, metrics_series_max=2)
    table = QueueTable(IO, StorePaths(tmp_path).queues, write=True)

    def look() -> tuple[set[str], float, float]:
        text = render(collector.samples()).decode()
        kept = set(re.findall(r'^mqproc_stored_messages\{topic="([\w-]+)"', text, re.MULTILINE))
        ever = value(text, "mqproc_messages_appended_total", topic=OTHERS)
        return kept, ever, value(text, "mqproc_stored_messages", topic=OTHERS)

    assert look() == ({"topic-0", "topic-1"}, 30, 24)
    table.delete_queue(table.find("topic-0", 0))
    assert look() == ({"topic-1"}, 30, 24)
    table.delete_queue(table.find("topic-3", 0))
    assert look() == ({"topic-1"}, 30, 16)
    table.create_queue("fresh", 0)
    table.create_queue("topic-3", 0)
    assert look() == ({"fresh", "topic-1"}, 30, 16), "a new topic takes the place of a deleted one"
    table.close()
    collector.close()


@pytest.mark.parametrize("seen", [True, False], ids=["recovery was seen", "it was too short to be seen"])
def test_collector_start_begins_with_new_table(tmp_path: Path, control: Control, *, seen: bool) -> None:
    control.store(layout.GROUP_STATE, layout.GROUP_DOWN)
    make_queues(tmp_path, topics=2, queues=1, messages=10)
    collector = make_collector(tmp_path, control)

    def topics() -> int | None:
        table = collector.read_state().table
        return table.topic_count if table else None

    assert topics() == 2
    if seen:
        control.store(layout.GROUP_STATE, layout.GROUP_RECOVERING)
        assert topics() is None
    make_queues(tmp_path, topics=3, queues=1, messages=10)
    assert topics() == (None if seen else 2)
    control.store(layout.GROUP_STATE, layout.GROUP_STARTING)
    assert topics() == 3
    make_queues(tmp_path, topics=4, queues=1, messages=10)
    control.store(layout.GROUP_STATE, layout.GROUP_STOPPING)
    assert topics() == 3, "one group has one"
    collector.close()


def test_collector_recovering_group_exports_known_values(control: Control, scrape: Scrape) -> None:
    control.store(layout.GROUP_STATE, layout.GROUP_RECOVERING)
    text = scrape()
    assert family_names(text) == {metric.name for metric in METRICS}
    samples = {line.split("{")[0].split()[0] for line in text.splitlines() if not line.startswith("#")}
    assert samples == KNOWN_IN_RECOVERY
    assert value(text, "mqproc_group_recovering") == 1


def test_catalogue_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"mqproc_[a-z0-9_]+", metric.name)
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == COUNTER), metric.name
        if metric.unit in ("bytes", "seconds", "ratio"):
            assert metric.name.removesuffix("_total").endswith(metric.unit), metric.name


def test_catalogue_has_each_metric_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
