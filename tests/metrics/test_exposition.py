"""Prometheus' own parser accepts the exposition."""

from __future__ import annotations

import gzip

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from mqproc.ipc.counters import Buckets
from mqproc.metrics.exposition import Exposition
from tests.support.fakes import render


def test_exposition_escapes_label_values() -> None:
    topic = 'a"b\\c\nd'
    text = render({"mqproc_stored_messages": [((topic,), 3)]}).decode()
    (sample,) = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert (sample.name, sample.labels, sample.value) == ("mqproc_stored_messages", {"topic": topic}, 3)


def test_exposition_histogram_is_cumulative_up_to_infinity() -> None:
    buckets = Buckets((0.5, 1.0), (1, 0, 2), 7.25)
    text = render({"mqproc_append_duration_seconds": [((), buckets)]}).decode()
    lines = [line for line in text.splitlines() if line.startswith("mqproc_append_duration_seconds")]
    assert lines == [
        'mqproc_append_duration_seconds_bucket{le="0.5"} 1.0',
        'mqproc_append_duration_seconds_bucket{le="1.0"} 1.0',
        'mqproc_append_duration_seconds_bucket{le="+Inf"} 3.0',
        "mqproc_append_duration_seconds_count 3.0",
        "mqproc_append_duration_seconds_sum 7.25",
    ]


def scrape(query: bytes = b"", **headers: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of a scrape of one topic's messages."""
    exposition = Exposition(lambda: {"mqproc_messages_appended_total": [(("orders",), 3)], "mqproc_topics": [((), 1)]})
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    response = exposition.response(Request({"type": "http", "query_string": query, "headers": encoded}))
    return dict(response.headers), bytes(response.body)


def test_plain_text_is_the_default_format() -> None:
    headers, body = scrape()
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'\nmqproc_messages_appended_total{topic="orders"} 3.0\n' in body


def test_openmetrics_is_sent_when_accepted() -> None:
    headers, body = scrape(accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(body.decode())}
    assert families["mqproc_messages_appended"].samples[0].value == 3
    assert families["mqproc_storage_bytes"].unit == "bytes"


def test_gzip_is_sent_when_accepted() -> None:
    headers, body = scrape(accept_encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    assert b"mqproc_topics 1.0" in gzip.decompress(body)


def test_name_parameter_restricts_the_scrape() -> None:
    _, body = scrape(b"name[]=mqproc_messages_appended_total")
    assert [line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE")] == [
        "mqproc_messages_appended_total"
    ]
