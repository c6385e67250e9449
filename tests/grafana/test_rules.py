"""Alert rules pass promtool's linter and unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grafana.source.files import dump, prometheus_config
from grafana.source.rule_tests import CASES
from grafana.source.rules import alerts, rule_files
from grafana.source.settings import Durations
from tests.grafana.scenarios import needs_prometheus, promtool

FOLDER = Path(__file__).parents[2] / "grafana"
UNIT_TESTS = FOLDER / "tests" / "rules.yml"
THRESHOLDS = FOLDER / "tests" / "thresholds.yml"


@needs_prometheus
@pytest.mark.parametrize("name", ["recording.yml", "alerts.yml"])
def test_rules_pass_the_linter(name: str) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", FOLDER / "rules" / name)


@needs_prometheus
def test_folder_of_rules_is_valid_as_a_whole(tmp_path: Path) -> None:
    config = prometheus_config(Durations(), ["127.0.0.1:1"], str(FOLDER / "rules"))
    (tmp_path / "prometheus.yml").write_text(dump(config))
    promtool("check", "config", tmp_path / "prometheus.yml")


@needs_prometheus
def test_rules_with_short_durations_pass_too(tmp_path: Path) -> None:
    durations, folder = Durations(1 / 30), tmp_path / "rules"
    folder.mkdir()
    for name, rules in rule_files(durations).items():
        (folder / name).write_text(dump(rules))
    (tmp_path / "prometheus.yml").write_text(dump(prometheus_config(durations, ["127.0.0.1:1"], str(folder))))
    promtool("check", "config", tmp_path / "prometheus.yml")


@needs_prometheus
@pytest.mark.parametrize("path", [UNIT_TESTS, THRESHOLDS], ids=lambda path: path.stem)
def test_rules_pass_their_unit_tests(path: Path) -> None:
    promtool("test", "rules", path)


def test_unit_tests_cover_firing_and_silence() -> None:
    names = [case.alert for case in CASES]
    assert sorted(names) == sorted(alert.name for alert in alerts(Durations()))
    assert all(case.well for case in CASES)


def test_alerts_have_a_unit_test() -> None:
    tested = {
        test["alertname"]
        for group in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for test in group["alert_rule_test"]
    }
    assert tested == {alert.name for alert in alerts(Durations())}


def test_durations_use_prometheus_syntax() -> None:
    assert [Durations().of(seconds) for seconds in (15, 60, 900, 3600, 90)] == ["15s", "1m", "15m", "1h", "90s"]
    assert [Durations(1 / 30).of(seconds) for seconds in (15, 60, 900)] == ["500ms", "2s", "30s"]
    assert Durations(1 / 30).age(30) == "3"
