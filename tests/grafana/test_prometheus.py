"""A real Prometheus scrapes a loaded group: it passes the linter, every query has data."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grafana.source.files import generated_files
from mqproc import Message, MqprocError
from mqproc.metrics.catalogue import METRICS, family_names
from tests.grafana.scenarios import Prometheus, free_port, needs_prometheus, promtool
from tests.grafana.test_dashboards import panels
from tests.support.group import Group

pytestmark = [needs_prometheus, pytest.mark.timeout(600)]


class Load(threading.Thread):
    """Sends, pulls, queries by key and invalid requests until stopped."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._ended = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        with self._group.client(timeout=60) as client:
            client.transaction("payers", Message("orders", b"never decided")).begin()
            while not self._ended.wait(0.05):
                for topic in ("orders", "payments"):
                    messages = [Message(topic, b"x" * 300, keys=[f"k{number}"]) for number in range(50)]
                    client.send_many(messages)
                client.pull("orders", 0, 0, 32)
                client.by_key("orders", "k7", max_messages=10)
                with pytest.raises(MqprocError):
                    client.send(Message("no good topic", b"x"))
                with pytest.raises(MqprocError):
                    client.send(Message("orders", b"x" * (1 << 19)))
                self.rounds += 1

    def end(self) -> None:
        self._ended.set()
        self.join(30)


@pytest.fixture
def loaded(tmp_path: Path, make_group: Callable[..., Group]) -> Iterator[Group]:
    """A group under load, with a consumer group that has consumed ten messages of a queue."""
    config = tmp_path / "store" / "config"
    config.mkdir(parents=True)
    (config / "consumerOffset.json").write_text('{"offsetTable":{"orders@billing":{0:10}}}')
    (tmp_path / "store").chmod(0o700)
    group = make_group(
        metrics_port=free_port(),
        flush_consume_queue_thorough_interval=1000,
        flush_commit_log_thorough_interval=1000,
        clean_resource_interval=1000,
    )
    load = Load(group)
    load.start()
    yield group
    load.end()
    assert load.rounds > 0


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query) of every dashboard, with Grafana's variables replaced."""
    for name, text in generated_files().items():
        if name.startswith("dashboards/"):
            for panel in panels(json.loads(text)):
                for target in panel["targets"]:
                    query = target["expr"].replace("$__rate_interval", "10s")
                    yield f"{name}: {panel['title']}", re.sub(r"\$\w+", ".+", query)


def test_scrape_passes_linter_and_queries_have_data(tmp_path: Path, loaded: Group) -> None:
    port = loaded.options["metrics_port"]
    with Prometheus(tmp_path / "prometheus", [port]) as prometheus:
        prometheus.wait(lambda: prometheus.targets_up() == 1, "the group is scraped")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        promtool("check", "metrics", stdin=text)
        assert family_names(text) == {metric.name for metric in METRICS}
        # Each is checked until it had data once: some have data only while something happens.
        missing = set(queries())

        def all_had_data() -> bool:
            missing.difference_update([each for each in missing if prometheus.query(each[1])])
            return not missing

        try:
            prometheus.wait(all_had_data, "data for every query")
        finally:
            assert not missing
        prometheus.wait(lambda: bool(prometheus.query("instance:mqproc_messages_appended:rate5m > 0")), "a rate")
        (quickest,) = prometheus.query("min_over_time(scrape_duration_seconds[5m])")
        assert float(quickest["value"][1]) < 1
