"""Overwriting a target: a failed job keeps the old contents, a successful one replaces them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from mqproc.errors import BadRequestError
from mqproc.spark.jobs import export
from mqproc.spark.jobs.output import HadoopPath, write_parquet, write_whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def damaged_store(rolled_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Damage in the middle of the log that only a full read detects."""
    store = shutil.copytree(rolled_store, tmp_path_factory.mktemp("damaged") / "store")
    segment = store / "commitlog" / f"{65536:020d}"
    data = bytearray(segment.read_bytes())
    data[30_000:30_300] = b"\xff" * 300
    segment.write_bytes(data)
    return store


def rows_in(folder: Path) -> int:
    return int(ds.dataset(folder, partitioning="hive").count_rows())


@pytest.mark.parametrize("spelled", ["out", "{}/out/", "file:{}/out"])
def test_overwrite_failed_by_damage_keeps_old_files(
    spark: SparkSession,
    rolled_store: Path,
    damaged_store: Path,
    tmp_path: Path,
    spelled: str,
) -> None:
    # Java's working directory is a different one.
    to = spelled.format(tmp_path) if "{" in spelled else os.path.relpath(tmp_path / spelled)
    out = tmp_path / "out"
    for mode in ("error", "overwrite"):
        with pytest.raises(PySparkException, match="no intact record"):
            export(spark, damaged_store, to, mode=mode)
        assert list(tmp_path.iterdir()) == [], f"{mode} may be run once more"
    export(spark, rolled_store, to)
    for mode in ("overwrite", "append"):
        with pytest.raises(PySparkException, match="no intact record"):
            export(spark, damaged_store, to, mode=mode)
        assert (list(tmp_path.iterdir()), rows_in(out)) == ([out], 640)
    (tmp_path / "out.partial").mkdir()
    assert export(spark, rolled_store, to, mode="overwrite", topic="First").messages == rows_in(out)
    assert [path.name for path in out.glob("topic=*")] == ["topic=First"]
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_keeps_store_next_to_target(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out.partial" / "commitlog").mkdir(parents=True)
    with pytest.raises(BadRequestError, match="is the store"):
        export(spark, rolled_store, tmp_path / "out", mode="overwrite")


def test_overwrite_removes_only_leftovers_of_killed_jobs(spark: SparkSession, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    out.mkdir()
    partial.mkdir()
    (partial / "mine.txt").write_text("of a user")
    with pytest.raises(BadRequestError, match=r"out\.partial: exists and is not an unfinished write"):
        write_parquet(spark.range(3).toDF("id"), out, [], mode="overwrite")
    assert (partial / "mine.txt").read_text() == "of a user"
    (partial / "mine.txt").rename(partial / "part-0.parquet")
    (partial / "_temporary").mkdir()
    write_parquet(spark.range(3).toDF("id"), out, [], mode="overwrite")
    assert (list(tmp_path.iterdir()), rows_in(out)) == ([out], 3)


def test_overwrite_dynamic_partitions_replaces_only_written_ones(
    spark: SparkSession, rolled_store: Path, tmp_path: Path
) -> None:
    export(spark, rolled_store, tmp_path / "out", topic="First")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        for _run in range(2):
            export(spark, rolled_store, tmp_path / "out", topic="Second", mode="overwrite")
        with pytest.raises(BadRequestError, match=r"/out: already exists; mode append adds to it, overwrite"):
            export(spark, rolled_store, tmp_path / "out", topic="Second")
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert rows_in(tmp_path / "out") == 224 + 208


def test_overwrite_unsupported_target_is_left_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    written: list[tuple[str, str]] = []
    session: Any = object()
    for of, to in ((session, "out"), (spark, "/")):
        write_whole(of, to, "overwrite", lambda *given: written.append(given), lambda path: None)
    assert written == [("out", "overwrite"), ("/", "overwrite")]


def test_overwrite_failed_replace_names_written_folder(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(HadoopPath, "remove", lambda path: False)
    with pytest.raises(BadRequestError, match=r"cannot be replaced; the output is in file:\S+out\.partial"):
        write_parquet(spark.range(3).toDF("id"), tmp_path / "out", [], mode="overwrite")
    assert rows_in(tmp_path / "out.partial") == 3


def test_write_interrupted_without_java_removes_target(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: str, mode: str) -> None:
        (tmp_path / "out" / "_temporary").mkdir(parents=True)
        raise KeyboardInterrupt

    def remove(path: HadoopPath) -> bool:
        raise Py4JNetworkError("Answer from Java side is empty")

    monkeypatch.setattr(HadoopPath, "remove", remove)
    with pytest.raises(KeyboardInterrupt):
        write_whole(spark, str(tmp_path / "out"), "error", write, lambda path: None)
    assert list(tmp_path.iterdir()) == []
