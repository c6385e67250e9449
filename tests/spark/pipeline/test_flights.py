"""The example pipeline, run by its command, against the source file of the flights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.dataset as ds
import pytest

from mqproc.cli.times import parse_time_ms
from mqproc.errors import BadRequestError
from mqproc.spark.jobs.pipeline import PipelineFolder, prepare
from tests.spark import quick
from tests.spark.pipeline.flights_store import DEAD, first_flights, make_store
from tests.support.command_line import call


def rows_of(folder: PipelineFolder, table: str) -> list[dict[str, Any]]:
    return list(ds.dataset(folder.table(table), format="parquet").to_table().to_pylist())


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_pipeline_creates_tables(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    flights = first_flights()
    store = make_store(tmp_path / "store", flights)
    conf = [part for setting in quick.SETTINGS.items() for part in ("--conf", "=".join(setting))]
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
