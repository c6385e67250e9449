"""`mqproc metrics`: the catalogue, and what a running group offers of it, wherever its monitor listens."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.metrics.catalogue import METRICS
from tests.cli.calling import call
from tests.conftest import Group, wait_until

needs_ipv6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")


def test_the_catalogue_is_listed_with_type_unit_labels_and_meaning() -> None:
    rows = call("metrics", "--json").json["metrics"]
    assert [row["name"] for row in rows] == [metric.name for metric in METRICS]
    for row, metric in zip(rows, METRICS, strict=True):
        assert (row["kind"], row["unit"], tuple(row["labels"])) == (metric.kind, metric.unit, metric.labels)
        assert row["help"] == metric.help


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), pytest.param("::1", "[::1]", marks=needs_ipv6)],
)
def test_a_running_group_offers_all_of_it_where_its_monitor_listens(
    make_group: Callable[..., Group], host: str, reached: str
) -> None:
    group = make_group(metrics_host=host)
    port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    done = call("metrics", "--check", "--store", group.store)
    count = len(METRICS)
    assert done.code == 0
    assert done.out == f"{count} of {count} metrics of the catalogue at http://{reached}:{port}/metrics\n"
    assert call("metrics", "--check", "--json", "--store", group.store).json["missing"] == []
    assert group.stop() == 0
    assert call("metrics", "--check", "--store", group.store).code == 9


def test_the_check_asks_no_proxy(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert call("metrics", "--check", "--store", group.store).code == 0


def test_a_taken_port_is_told_at_the_start_and_by_the_check(make_group: Callable[..., Group]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        group = make_group(metrics_port=taken.getsockname()[1])
        said = f"metrics and the status page are unavailable at {address}: set metrics_port; see mqproc errors"
        wait_until(lambda: said in group.output.read_text(), what="the start tells of the port")
        assert "metrics are not offered" in call("errors", "--store", group.store).out
        done = call("metrics", "--check", "--store", group.store)
        assert done.code == 9
        assert said in done.err


def test_a_start_with_metrics_says_nothing_of_them(group: Group) -> None:
    group.went_round("query")
    assert "not offered" not in group.output.read_text()
