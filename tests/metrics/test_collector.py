"""The collector's numbers are the control file's, and what it offers is exactly what the catalogue says."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from mqproc.layout import control as layout
from mqproc.metrics.catalogue import COUNTER, METRICS, sample_names
from mqproc.metrics.pages import Pages
from tests.metrics.control_file import make_control


def scrape(store: Path) -> str:
    control = make_control(store)
    text = Pages(control, str(store), "1.2.3", 10_000).page("/metrics").body.decode()
    control.close()
    return text


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"no sample {name} {labels}")


def test_the_scrape_offers_the_catalogue_and_nothing_else(tmp_path: Path) -> None:
    assert sample_names(scrape(tmp_path)) == {metric.name for metric in METRICS}


def test_lag_is_the_difference_of_words(tmp_path: Path) -> None:
    text = scrape(tmp_path)
    assert value(text, "mqproc_dispatch_behind_bytes") == 3000
    assert value(text, "mqproc_dispatch_behind_messages") == 30
    assert value(text, "mqproc_dispatch_behind_seconds") == 1.5
    assert value(text, "mqproc_flush_behind_bytes", target="commitlog") == 4500
    assert value(text, "mqproc_disk_usage_ratio") == 0.3


def test_roles_are_up_with_heartbeats_in_unix_time(tmp_path: Path) -> None:
    text = scrape(tmp_path)
    for role in layout.ROLES:
        assert value(text, "mqproc_role_up", role=role) == 1
        assert value(text, "mqproc_role_heartbeat_timestamp_seconds", role=role) > 1.6e9
    assert value(text, "mqproc_build_info", version="1.2.3", python=_python()) == 1


def _python() -> str:
    import platform

    return platform.python_version()


def test_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"mqproc_[a-z0-9_]+", metric.name)
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == COUNTER), metric.name
        if metric.unit in ("bytes", "seconds", "ratio"):
            assert metric.name.removesuffix("_total").endswith(metric.unit), metric.name


def test_every_metric_stands_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
