"""Task folders: each task's files are committed once or not at all, whatever its attempts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from mqproc.errors import MqprocError, StoreAccessError
from mqproc.spark.jobs import export, output
from mqproc.spark.jobs.copies import COMPRESSIONS, plan_compaction
from mqproc.spark.jobs.output import JobFolder, Written, roll_back_dead_jobs, write_batches
from mqproc.spark.jobs.parquet_files import Layout

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning")]


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def writing(text: str, *, fails: bool = False) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        (folder / "topic=a").mkdir()
        (folder / "topic=a" / f"part-{text}").write_text(text)
        if fails:
            raise MqprocError("once more")
        return Written(len(text), 10 * len(text), 1)

    return write


def test_publish_takes_only_accepted_attempts(tmp_path: Path) -> None:
    """Spark accepts one result of a task; an attempt that it gave up may have ended early without an error."""
    job = JobFolder.new(tmp_path / "out")
    with pytest.raises(MqprocError, match="once more"):
        job.write(0, 1, writing("failed", fails=True))
    # A killed attempt leaves its files.
    (tmp_path / "out" / "_temporary" / job.job / "attempt-0-2" / "files").mkdir(parents=True)
    (tmp_path / "out" / "_temporary" / job.job / "attempt-0-2" / "files" / "part-killed").touch()

    def overtaken(folder: Path) -> Written:
        assert job.write(0, 4, writing("cut off")) == Written(7, 70, 1)
        return writing("whole")(folder)

    assert job.write(0, 3, overtaken) == Written(5, 50, 1)
    assert job.write(1, 6, lambda folder: Written(0, 0, 0)) == Written(0, 0, 0)
    assert job.publish([(0, 3), (1, 6)]) == 1
    job.remove()
    assert files_below(tmp_path) == ["out/topic=a/part-whole"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["topic=a"]


def test_commit_failed_move_removes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topic=old").mkdir()
    job = JobFolder.new(tmp_path)

    def write(folder: Path) -> Written:
        (folder / "topic=new" / "day=1970-01-01").mkdir(parents=True)
        (folder / "topic=new" / "day=1970-01-01" / f"part-{job.job}").touch()
        return Written(1, 1, 1)

    def refused(source: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    job.write(0, 1, write)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refused)
        with pytest.raises(MqprocError, match="topic=new/day=1970-01-01: Invalid cross-device link"):
            job.publish([(0, 1)])
    job.roll_back()
    assert [path.name for path in tmp_path.rglob("*")] == ["topic=old"]


def test_attempt_at_other_path_or_after_removal_fails(tmp_path: Path) -> None:
    job = JobFolder.new(tmp_path / "out")
    with pytest.raises(StoreAccessError, match="at the same path"):
        JobFolder(tmp_path / "elsewhere", job.job).write(0, 1, writing("a"))

    def late(folder: Path) -> Written:
        job.remove()
        return writing("late")(folder)

    with pytest.raises(FileNotFoundError):
        job.write(0, 2, late)
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_concurrent_jobs_keep_each_others_files(tmp_path: Path) -> None:
    one, other = JobFolder.new(tmp_path), JobFolder.new(tmp_path)
    for job in (one, other):
        job.write(0, 1, writing(job.name_of(0)))
    assert one.publish([(0, 1)]) == 1
    other.roll_back()
    assert files_below(tmp_path / "topic=a") == [f"part-{one.name_of(0)}"]
    one.roll_back()
    assert list(tmp_path.iterdir()) == []


def killed_job(to: Path, *, while_gone: bool = False) -> None:
    """A driver killed after moving one of two files, or while removing its folder."""
    code = f"""
import os, signal, shutil
from pathlib import Path
from mqproc.spark.jobs.output import JobFolder, Written
job = JobFolder.new(Path({str(to)!r}))
def write(folder):
    for name in "ab":
        (folder / f"topic={{name}}").mkdir()
        (folder / f"topic={{name}}" / f"part-{{job.job}}").touch()
    return Written(2, 2, 2)
def killed(*given, **more):
    os.kill(os.getpid(), signal.SIGKILL)
with job.locked():
    job.write(0, 1, write)
    if {while_gone}:
        shutil.rmtree = killed
        job.remove()
    rename = Path.rename
    Path.rename = lambda source, target: (rename(source, target), killed())
    job.publish([(0, 1)])
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("while_gone", [False, True])
def test_killed_driver_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_gone: bool) -> None:
    killed_job(tmp_path, while_gone=while_gone)
    left = files_below(tmp_path)
    assert len([name for name in left if name.startswith("topic=")]) == (not while_gone)
    for module, name, elsewhere in ((output, "boot_id", (1, 2)), (os, "fstat", SimpleNamespace(st_dev=-1))):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, mock.Mock(return_value=elsewhere))
            roll_back_dead_jobs(tmp_path)
        known = [] if while_gone else left
        assert files_below(tmp_path) == known, "a driver on another machine, or mount, may be alive"
    living = JobFolder.new(tmp_path)
    with living.locked():
        living.write(0, 1, writing(living.job))
        roll_back_dead_jobs(tmp_path)
        assert [path.name for path in (tmp_path / "_temporary").iterdir()] == [living.job]
        assert living.publish([(0, 1)]) == 1
        living.remove()
    roll_back_dead_jobs(tmp_path)
    assert files_below(tmp_path) == [f"topic=a/part-{living.job}"]
    assert [path.name for path in tmp_path.iterdir()] == ["topic=a"]


def test_job_of_other_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_job(tmp_path)
    left = files_below(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", mock.Mock(side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
        roll_back_dead_jobs(tmp_path)
    assert files_below(tmp_path) == left


@pytest.mark.spark
class TestWithSpark:
    def test_output_matches_spark_output(self, spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
        export(spark, rolled_store, tmp_path / "ours", splitBytes=50_000)
        # With dynamic partition overwrite, Spark writes the files itself.
        spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
        try:
            done = export(spark, rolled_store, tmp_path / "sparks", mode="overwrite")
        finally:
            spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
        ours, sparks = (spark.read.parquet(str(tmp_path / name)) for name in ("ours", "sparks"))
        assert ours.schema == sparks.schema
        rows = [sorted(map(repr, frame.collect())) for frame in (ours, sparks)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == done.messages == 640
        assert list((tmp_path / "sparks").rglob("*.crc")) != [], "those of Spark's writer"
        schema = ds.dataset(tmp_path / "ours", partitioning="hive").schema
        assert str(schema.field("store_timestamp").type) == "timestamp[us, tz=UTC]"

    def test_append_with_compressions(self, spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
        for compression in COMPRESSIONS:
            export(spark, rolled_store, tmp_path, mode="append", topic="First", columns="body", compression=compression)
        found = {
            pq.ParquetFile(file).metadata.row_group(0).column(0).compression for file in tmp_path.rglob("*.parquet")
        }
        assert found == {"ZSTD", "SNAPPY", "GZIP", "LZ4", "UNCOMPRESSED"}
        bodies = spark.read.parquet(str(tmp_path))
        assert (bodies.count(), bodies.distinct().count()) == (5 * 224, 224)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["_SUCCESS", "topic=First"]

    def test_failed_commit_keeps_old_files(
        self, spark: SparkSession, rolled_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        export(spark, rolled_store, out, topic="First")
        before, rename = files_below(out), Path.rename
        calls: list[Path] = []

        def interrupted(source: Path, target: Path) -> Path:
            if target.suffix == ".parquet":
                calls.append(target)
                if len(calls) > 1:
                    raise KeyboardInterrupt
            return rename(source, target)

        for mode in ("append", "overwrite"):
            calls.clear()
            with monkeypatch.context() as patched:
                patched.setattr(Path, "rename", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    export(spark, rolled_store, out, mode=mode)
            assert (len(calls), files_below(out)) == (2, before)
            assert list(tmp_path.iterdir()) == [out]
            assert [path.name for path in out.iterdir() if path.is_dir()] == ["topic=First"]

    def test_append_rolls_back_killed_append(self, spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
        export(spark, rolled_store, tmp_path, mode="append", topic="First")
        before = files_below(tmp_path)
        killed_job(tmp_path)
        assert files_below(tmp_path) != before
        assert export(spark, rolled_store, tmp_path, mode="append", topic="Nobody").messages == 0
        assert files_below(tmp_path) == before

    def test_files_of_concurrent_job_in_new_folder_are_kept(
        self, spark: SparkSession, rolled_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish, out = JobFolder.publish, tmp_path / "out"

        def overtaken(job: JobFolder, attempts: object) -> int:
            monkeypatch.setattr(JobFolder, "publish", publish)
            export(spark, rolled_store, out, mode="append", topic="First")
            raise MqprocError("called off")

        monkeypatch.setattr(JobFolder, "publish", overtaken)
        with pytest.raises(MqprocError, match="called off"):
            export(spark, rolled_store, out, mode="append")
        assert spark.read.parquet(str(out)).count() == 224
        assert sorted(path.name for path in out.iterdir()) == ["_SUCCESS", "topic=First"]

    def test_publish_missing_files_raises(
        self, spark: SparkSession, rolled_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(JobFolder, "publish", lambda job, attempts: 1)
        with pytest.raises(StoreAccessError, match=r"out: 1 of 3 files arrived; a target must"):
            export(spark, rolled_store, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_empty_output_has_columns(self, spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
        last = plan_compaction(spark, rolled_store, drop_empty=False, columns=["topic", "keys"], topic="Nobody")
        done = write_batches(last, tmp_path / "out", [], mode="error", layout=Layout(list(last.types)))
        assert done == Written(0, 0, 0)
        assert spark.read.parquet(str(tmp_path / "out")).columns == ["key", "topic", "keys"]
        assert export(spark, rolled_store, tmp_path / "none", topic="Nobody").messages == 0
        assert [path.name for path in (tmp_path / "none").iterdir()] == ["_SUCCESS"]
