"""What is written is what Prometheus' own parser reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mqproc.ipc.histogram import Buckets
from mqproc.metrics.exposition import number, render


def test_label_values_are_escaped() -> None:
    topic = 'a"b\\c\nd'
    text = render({"mqproc_stored_messages": [((topic,), 3)]}).decode()
    (sample,) = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert (sample.name, sample.labels, sample.value) == ("mqproc_stored_messages", {"topic": topic}, 3)


def test_a_histogram_is_added_up_and_ends_at_infinity() -> None:
    buckets = Buckets((0.5, 1.0), (1, 0, 2), 7.25)
    text = render({"mqproc_append_duration_seconds": [((), buckets)]}).decode()
    lines = [line for line in text.splitlines() if line.startswith("mqproc_append_duration_seconds")]
    assert lines == [
        'mqproc_append_duration_seconds_bucket{le="0.5"} 1',
        'mqproc_append_duration_seconds_bucket{le="1"} 1',
        'mqproc_append_duration_seconds_bucket{le="+Inf"} 3',
        "mqproc_append_duration_seconds_sum 7.25",
        "mqproc_append_duration_seconds_count 3",
    ]


def test_whole_numbers_are_exact() -> None:
    assert number(float(2**53)) == "9007199254740992"
    assert number(True) == "1"
    assert number(0.1) == "0.1"
