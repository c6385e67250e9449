"""Generated files match their source, and dashboards pass the rules of Grafana's linter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.source.files import generated_files
from grafana.source.rules import alerts, recordings
from grafana.source.settings import Durations
from mqproc.metrics.catalogue import COUNTER, HISTOGRAM, METRICS

FOLDER = Path(__file__).parents[2] / "grafana"
FILES = generated_files()
DASHBOARDS = {name: json.loads(text) for name, text in FILES.items() if name.startswith("dashboards/")}
METRIC = re.compile(r"\bmqproc_\w+")


def panels(dashboard: Any) -> Iterator[Any]:
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


ALL_PANELS = [
    pytest.param(panel, id=f"{name}:{panel['title']}") for name, board in DASHBOARDS.items() for panel in panels(board)
]
TABLES = [
    pytest.param(panel, id=panel["title"])
    for board in DASHBOARDS.values()
    for panel in panels(board)
    if panel["type"] == "table"
]


def family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.mark.parametrize("name", FILES)
def test_generated_file_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == FILES[name], "python -m grafana.source rewrites it"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_passes_the_linter(name: str) -> None:
    board = DASHBOARDS[name]
    assert board["uid"]
    assert board["editable"] is False
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for choice in ("job", "instance"):
        assert variables[choice]["refresh"] == 2, "values are asked for when the time changes"
        assert variables[choice]["multi"]
        assert variables[choice]["allValue"] == ".+"
    first, *others = [panel for panel in board["panels"] if panel["type"] == "row"]
    assert not first.get("collapsed")
    assert all(row["collapsed"] for row in others)


@pytest.mark.parametrize("panel", ALL_PANELS)
def test_panel_passes_the_linter(panel: Any) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] in ("timeseries", "stat", "table", "heatmap")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    for target in panel["targets"]:
        query = target["expr"]
        for found in METRIC.finditer(query):
            rest = query[found.end() :]
            assert rest.startswith('{job=~"$job",instance=~"$instance"'), query
        assert not re.search(r"\[\d", query), f"a rate's range is $__rate_interval: {query}"
        assert "$S" not in query


@pytest.mark.parametrize("panel", ALL_PANELS)
def test_counters_are_shown_as_rates(panel: Any) -> None:
    counters = {metric.name for metric in METRICS if metric.kind == COUNTER}
    if panel["type"] == "table":
        return
    for target in panel["targets"]:
        for name in set(METRIC.findall(target["expr"])) & counters:
            assert re.search(rf"(rate|increase)\({name}\{{", target["expr"]), target["expr"]


@pytest.mark.parametrize("panel", TABLES)
def test_tables_show_times_as_times(panel: Any) -> None:
    merged, organized = panel["transformations"]
    assert merged["id"] == "merge", "Grafana shows one query's answer else"
    names = organized["options"]["renameByName"]
    units = {
        override["matcher"]["options"]: {each["id"]: each["value"] for each in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    for target in panel["targets"]:
        name = names[f"Value #{target['refId']}"]
        is_time = "_timestamp_seconds" in target["expr"]
        assert is_time == target["expr"].startswith("1000 * "), "Grafana takes milliseconds"
        assert units.get(name, {}) == ({"unit": "dateTimeAsIso"} if is_time else {})
    # A label that joins rows must not distinguish them.
    assert all(" by (" in target["expr"] for target in panel["targets"])


def test_metrics_are_shown_or_alerted_on() -> None:
    durations = Durations()
    texts = [target["expr"] for board in DASHBOARDS.values() for panel in panels(board) for target in panel["targets"]]
    texts += [each.expr for each in (*alerts(durations), *recordings(durations))]
    used = {
        family(name) if name not in {m.name for m in METRICS} else name
        for text in texts
        for name in METRIC.findall(text)
    }
    catalogue = {metric.name for metric in METRICS}
    assert catalogue - used == set()
    recorded = {each.name.split(":")[1] for each in recordings(durations)}
    assert used - catalogue <= recorded | {"mqproc_messages_appended"}, "queries ask for metrics that there are"


def test_histograms_are_queried_by_buckets() -> None:
    histograms = {metric.name for metric in METRICS if metric.kind == HISTOGRAM}
    for board in DASHBOARDS.values():
        for panel in panels(board):
            for target in panel["targets"]:
                assert not set(METRIC.findall(target["expr"])) & histograms, target["expr"]


def test_alerts_have_a_runbook() -> None:
    headings = re.findall(r"^### (\w+)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert headings == [alert.name for alert in alerts(Durations())]
    for alert in alerts(Durations()):
        assert alert.rule(Durations())["annotations"]["runbook_url"] == f"grafana/README.md#{alert.name.lower()}"


def test_compose_file_allows_the_host_name_of_its_prometheus() -> None:
    (scrape,) = yaml.safe_load(FILES["prometheus.yml"])["scrape_configs"]
    ((target,),) = (each["targets"] for each in scrape["static_configs"])
    services = yaml.safe_load(FILES["compose.yaml"])["services"]
    host = target.partition(":")[0]
    assert f"metrics_allowed_hosts={host}" in services[host]["command"]


def test_generator_refuses_an_option_as_folder(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, "-m", "grafana.source", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "usage: python -m grafana.source [-h] [folder]" in done.stdout
    assert list(tmp_path.iterdir()) == []
