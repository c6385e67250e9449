"""Writing batches to partitioned Parquet files within limits of memory and open files."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqproc.errors import DiskFullError, MqprocError
from mqproc.spark.jobs.parquet_files import Layout, ParquetFiles, file_errors, folder_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning")]

LAYOUT = Layout(["topic", "place"], ["topic", "day"])


def batch_of(topics: list[str | None], days: list[int | None], place: int = 0) -> pa.RecordBatch:
    columns = [pa.array(topics), pa.array(days, pa.date32()), pa.array(range(place, place + len(topics)), pa.int64())]
    return pa.RecordBatch.from_arrays(columns, ["topic", "day", "place"])


def written(folder: Path, batches: list[pa.RecordBatch], layout: Layout = LAYOUT, **given: Any) -> ParquetFiles:
    folder.mkdir()
    with ParquetFiles(folder, layout, "part", **given) as files:
        for batch in batches:
            files.add(batch)
        files.finish()
    return files


def places_in(folder: Path) -> list[int]:
    """Values in the files of a folder, in the order of file names."""
    return [each for file in sorted(folder.glob("*.parquet")) for each in pq.read_table(file)["place"].to_pylist()]


def test_files_many_folders_within_memory_and_open_limits(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    # A few folders have many rows, most have few.
    drawn = (random.pareto(1.0, 4000) * 5).astype(int) % 60
    batches = [
        batch_of([f"t{each}" for each in drawn[at : at + 50]], [int(each) % 2 for each in drawn[at : at + 50]], at)
        for at in range(0, 4000, 50)
    ]
    files = written(tmp_path / "out", batches, waiting_bytes=4096, open_max=3)
    for number in set(drawn.tolist()):
        folder = tmp_path / "out" / f"topic=t{number}" / f"day=1970-01-0{number % 2 + 1}"
        assert places_in(folder) == np.flatnonzero(drawn == number).tolist()
    found = list((tmp_path / "out").rglob("*.parquet"))
    assert len({file.name for file in found}) == len(found) == files.files > len(set(drawn.tolist()))
    assert pq.read_schema(found[0]).names == ["place"]
    whole = written(tmp_path / "whole", batches)
    assert whole.files == len(set(drawn.tolist())), "a file each where there is room"


def test_files_open_limit_closes_least_recently_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with ParquetFiles(tmp_path / "out", LAYOUT, "part", waiting_bytes=1, open_max=2) as files:
        for topic in ("a", "b", "a", "c", "a", "b"):
            files.add(batch_of([topic], [0]))
        files.finish()
    # When c arrived, b was the least recently used open file and was closed.
    assert [len(list((tmp_path / "out" / f"topic={each}").rglob("*.parquet"))) for each in "abc"] == [1, 2, 1]


def test_files_one_folder_has_one_row_group(tmp_path: Path) -> None:
    layout = Layout(["place"], compression="none")
    written(tmp_path / "out", [batch_of(["a", "b"], [0, 1]), batch_of([], []), batch_of(["a"], [0], 2)], layout)
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "part-00000.parquet"
    found = pq.ParquetFile(file)
    assert (found.metadata.num_row_groups, found.read()["place"].to_pylist()) == (1, [0, 1, 2])


def test_files_waiting_rows_release_written_memory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with ParquetFiles(tmp_path / "out", Layout(["place"], ["topic"]), "part", waiting_bytes=1 << 20) as files:
        before = pa.total_allocated_bytes()
        # Distinguishes memory of unwritten rows from memory that an open file holds.
        columns = [pa.array([*["a"] * 4000, "b"]), pa.array(range(4001)), pa.array(["x" * 1000] * 4001)]
        files.add(pa.RecordBatch.from_arrays(columns, ["topic", "place", "text"]))
        del columns
        assert files.files == 1, "of b, more may come"
        assert pa.total_allocated_bytes() - before < 1 << 20
        files.finish()
    assert places_in(tmp_path / "out" / "topic=b") == [4000]


def test_files_null_partition_values(tmp_path: Path) -> None:
    written(tmp_path / "out", [batch_of(["a", "a", None, ""], [None, 0, 1, 1])])
    default = "__HIVE_DEFAULT_PARTITION__"
    assert places_in(tmp_path / "out" / "topic=a" / f"day={default}") == [0]
    assert sorted(places_in(tmp_path / "out" / f"topic={default}" / "day=1970-01-02")) == [2, 3]
    assert places_in(tmp_path / "out" / "topic=a" / "day=1970-01-01") == [1]


@pytest.mark.spark
def test_files_folder_names_match_spark(spark: SparkSession, tmp_path: Path) -> None:
    jvm: Any = spark._jvm
    spelled = jvm.org.apache.spark.sql.catalyst.catalog.ExternalCatalogUtils.getPartitionPathString
    for name in ("%RETRY%group", "a/b", *map(chr, range(1, 384)), "", None):
        assert folder_name("topic", name) == spelled("topic", name)
    days = [0, -1, 2932897, -719529, 106751991, -106751991]
    frame = spark.createDataFrame([(day,) for day in days], "day int").selectExpr("date_from_unix_date(day) day", "1 n")
    frame.write.partitionBy("day").parquet(str(tmp_path / "sparks"))
    written(tmp_path / "ours", [batch_of(["a"] * len(days), list(days))], Layout(["place"], ["day"]))
    sparks, ours = (sorted(path.name for path in (tmp_path / of).glob("day=*")) for of in ("sparks", "ours"))
    assert ours == sparks


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files of this process to 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("rows", [10_000, 600], ids=["in a page", "at the end"])
def test_files_write_error_names_file(tmp_path: Path, rows: int) -> None:
    batch = batch_of(["a"] * rows, [0] * rows)
    places = pa.array(np.random.default_rng(1).integers(0, 1 << 60, rows))
    with pytest.raises(MqprocError, match=r"topic=a/day=1970-01-01/part-00000\.zstd\.parquet: File too large"):
        written(tmp_path / "out", [batch.set_column(2, "place", places)])


def test_files_full_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="out: No space left on device"), file_errors(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28]")


def test_files_missing_folder_is_not_recreated(tmp_path: Path) -> None:
    with ParquetFiles(tmp_path / "gone", LAYOUT, "part") as files:
        files.add(batch_of(["a"], [0]))
        with pytest.raises(MqprocError, match="gone/topic=a: No such file or directory"):
            files.finish()
    assert list(tmp_path.iterdir()) == []
