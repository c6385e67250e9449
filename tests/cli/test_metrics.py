"""`mqproc metrics`: the catalogue, and what a running group offers of it, wherever its monitor listens."""

from __future__ import annotations

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
