"""A store with the first flights of the demo's file and a few dead letters."""

from __future__ import annotations

import csv
import io
import itertools
import json
import zipfile
from pathlib import Path
from typing import Any

from mqproc.cli.admin.demo import find_flights
from mqproc.cli.times import parse_time_ms
from tests.support.store_builders import LiveStore

_TEXTS = ("carrier", "tailnum", "origin", "dest", "time_hour")
FLIGHTS = 600
DEAD = 3


def first_flights(count: int = FLIGHTS) -> list[dict[str, Any]]:
    """Rows of the file as the demo's import reads them: numbers are numeric, NA is null."""
    with zipfile.ZipFile(find_flights()) as archive:
        text = io.TextIOWrapper(archive.open(archive.namelist()[0]), "utf-8")
        rows = list(itertools.islice(csv.DictReader(text), count))
    return [{name: _value(name, value) for name, value in row.items()} for row in rows]


def _value(name: str, value: str) -> Any:
    if value in ("", "NA"):
        return None
    return value if name in _TEXTS else int(value)


def make_store(root: Path, flights: list[dict[str, Any]]) -> Path:
    """A stopped store with these flights, born at their scheduled hours."""
    live = LiveStore(root)
    for flight in flights:
        live.append(
            "flights",
            [json.dumps(flight).encode()],
            keys=[flight["tailnum"] or "none"],
            tags=[flight["carrier"]],
            born_timestamp_ms=parse_time_ms(flight["time_hour"]),
            queues=2,
        )
    live.append("%DLQ%late_readers", [b"gone"] * DEAD, tags=["UA"] * DEAD, queues=1, reconsume_times=16)
    live.dispatch()
    return root
