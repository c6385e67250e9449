"""Jobs by spark-submit on a cluster with two workers, and as commands of the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from mqproc.cli.spark import script as spark_script
from mqproc.spark import jobs
from mqproc.spark.session import prepare_environment, register
from tests.spark import support
from tests.spark.support import files_below, messages_of
from tests.support.group import Group

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PROJECT = Path(__file__).parents[3]


def submit(master: str, *arguments: str | Path, local: Path) -> subprocess.CompletedProcess[str]:
    """Run spark-submit with a small driver heap and without network access."""
    prepare_environment()
    settings = support.SETTINGS | {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.extraJavaOptions": support.JAVA_OPTIONS,
        "spark.local.dir": str(local),
    }
    command = [str(Path(sys.executable).with_name("spark-submit")), "--master", master]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(PROJECT)])}
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=local, env=environment, capture_output=True, text=True, timeout=580
    )


def test_cluster_with_two_workers(rolled_store: Path, running: Group, tmp_path: Path) -> None:
    arguments = (rolled_store, tmp_path, running.store)
    done = submit("local-cluster[2,1,1024]", __file__, *arguments, local=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {
        "master": "local-cluster[2,1,1024]",
        "units": 640,
        "clean": [True],
        "counts": {"First": 224, "Second": 208, "Third": 208},
        "exported": 224,
        "in_files": 224,
        "keys": 640,
        "replayed": 224,
        "lag": 0,
    }
    for folder in ("consumequeue", "index"):
        assert files_below(tmp_path / "built" / folder) == files_below(rolled_store / folder), folder
    running.wait_dispatched()
    expected = sorted(message.body for message in messages_of(rolled_store, topic="First"))
    assert sorted(message.body for message in messages_of(running.store, topic="Replayed")) == expected


def test_script_runs_commands(rolled_store: Path, tmp_path: Path) -> None:
    counted = ("counts", rolled_store, "--no-latencies", "--json")
    done = submit("local[1]", spark_script.__file__, *counted, local=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)["counts"]
    assert {row["topic"]: row["messages"] for row in rows} == {"First": 224, "Second": 208, "Third": 208}


def main(store: Path, folder: Path, target: Path) -> None:
    """Program for spark-submit: run jobs and write their results to a JSON file."""
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    built = jobs.rebuild(spark, store, folder / "built", share_bytes=100_000)
    counted = jobs.counts(spark, store, latencies=False)
    found = {
        "master": spark.sparkContext.master,
        "units": sum(row.units for row in built.queues.collect()),
        "clean": [row.clean for row in jobs.verify(spark, store, share_bytes=100_000).collect()],
        "counts": {row.topic: row.messages for row in counted.collect()},
        "exported": jobs.export(spark, store, folder / "parquet", topic="First").messages,
        "in_files": spark.read.parquet(str(folder / "parquet")).count(),
        "keys": jobs.compact(spark, store, columns=["topic"]).count(),
        "replayed": jobs.replay(spark, store, target, "Replayed", topic="First", streams=2).sent,
        "lag": jobs.lag(spark, store).count(),
    }
    (folder / "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
