"""`mqproc metrics`: the catalogue of what /metrics offers, and a check of a running group's answer against it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Final

import click

from mqproc import control_words
from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.cli.store_options import options_for
from mqproc.cli.times import SOCKET_WAIT_MAX_S
from mqproc.control import Control
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.metrics.catalogue import METRICS, family_names
from mqproc.metrics.health import not_offered

PORT_MAX: Final = 65_535
_COLUMNS = [Column("name"), Column("kind", "type"), Column("unit"), Column("labels"), Column("help", "meaning")]


@click.command(cls=Command)
@click.option("--check", is_flag=True, help="Scrape the running group and compare; exit code 1 when they differ.")
@pass_invocation
def metrics(invocation: Invocation, check: bool) -> int:
    """List the metrics that /metrics offers."""
    if check:
        return _check(invocation)
    rows = [
        {"name": metric.name, "kind": metric.kind, "unit": metric.unit, "labels": metric.labels, "help": metric.help}
        for metric in METRICS
    ]
    invocation.out.rows("metrics", _COLUMNS, rows)
    return 0


def _check(invocation: Invocation) -> int:
    io, paths = StoreIO(), invocation.existing_paths()
    control = Control.open(io, paths)
    port = control.load(layout.MONITOR_PORT)
    alive = control_words.is_alive(control.snapshot(), time.monotonic_ns())
    control.close()
    options = options_for(invocation, io, paths)
    if alive and not port:
        raise NotRunningError(not_offered(options))
    if not 0 <= port <= PORT_MAX:
        raise CorruptStoreError(f"{paths.control}: monitor_port = {port:,} is no port; from 1 to {PORT_MAX:,}")
    address = f"http://{_reached_at(options.metrics_host)}:{port}/metrics"
    try:
        # The monitor is on this machine: a proxy of the environment would look on its own.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(address, timeout=min(invocation.timeout, SOCKET_WAIT_MAX_S)) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise NotRunningError(f"{address}: {error}") from None
    found = family_names(text)
    expected = {metric.name for metric in METRICS}
    missing, unknown = sorted(expected - found), sorted(found - expected)
    out = invocation.out
    if out.is_json:
        out.document({"address": address, "missing": missing, "unknown": unknown})
    else:
        for text, names in (("not offered", missing), ("not in the catalogue", unknown)):
            for name in names:
                out.line(f"{name}: {text}")
        out.line(f"{len(found & expected)} of {len(expected)} metrics of the catalogue at {address}")
    return 1 if missing or unknown else 0


def _reached_at(host: str) -> str:
    """The host of a URL for a monitor that listens at `host`: this machine for one that listens at every address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
