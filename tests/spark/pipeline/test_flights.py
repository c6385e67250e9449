"""The example pipeline, run by its command, against the source file of the flights."""

from __future__ import annotations

import csv
import io
import itertools
import json
import zipfile
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.dataset as ds
import pytest

from mqproc.cli.admin.demo import find_flights
from mqproc.errors import BadRequestError
from mqproc.spark.jobs.pipeline import PipelineFolder, prepare
from mqproc.util.units import parse_time_ms
from tests.spark import support
from tests.support.command_line import call
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


def rows_of(folder: PipelineFolder, table: str) -> list[dict[str, Any]]:
    return list(ds.dataset(folder.table(table), format="parquet").to_table().to_pylist())


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_pipeline_creates_tables(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    flights = first_flights()
    store = make_store(tmp_path / "store", flights)
    conf = [part for setting in support.SETTINGS.items() for part in ("--conf", "=".join(setting))]
    done = call("spark", "pipeline", "--store", store, "--to", tmp_path / "pipeline", *conf, "--json")
    assert done.code == 0, done.err
    folder = PipelineFolder(tmp_path / "pipeline")
    assert {row["table"]: row["rows"] for row in done.json["tables"]}["flights"] == len(flights)
    hours = {
        (row["hour"].value // 1_000_000, row["origin"]): row["flights"] for row in rows_of(folder, "hourly_counts")
    }
    assert hours == Counter((parse_time_ms(flight["time_hour"]), flight["origin"]) for flight in flights)
    for row in rows_of(folder, "carrier_delays"):
        delays = [flight["dep_delay"] for flight in flights if flight["carrier"] == row["carrier"]]
        there = [delay for delay in delays if delay is not None]
        assert (row["flights"], row["cancelled"]) == (len(delays), len(delays) - len(there))
        assert row["departure_delay_mean"] == pytest.approx(mean(there), abs=0.01)
    (dead,) = rows_of(folder, "dead_letters")
    assert (dead["group"], dead["tag"], dead["messages"], dead["reconsumed_max"]) == ("late_readers", "UA", DEAD, 16)


def test_pipeline_keeps_changed_code(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "pipeline", tmp_path / "store")
    code = folder.root / "transformations" / "flights.py"
    code.write_text("# mine\n")
    prepare(tmp_path / "pipeline", tmp_path / "store")
    assert code.read_text() == "# mine\n"
    with pytest.raises(BadRequestError, match="lies in the store"):
        prepare(tmp_path / "store" / "pipeline", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_pipeline_missing_store_is_rejected(tmp_path: Path) -> None:
    missing = call("spark", "pipeline", "--store", tmp_path / "missing", "--to", tmp_path / "pipeline")
    assert missing.code == 5
    assert "no such folder" in missing.err
    assert not (tmp_path / "pipeline").exists()
