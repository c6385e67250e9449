"""Writes, streams and replays into a running store, during which tasks, stages or the driver fail at a random moment.

`python -m tests.spark.failing --runs 100` does 100 runs of each kind and counts the rows in the target's log; tests do
a few. A failure happens once, at a random row, in a Python function between the source and the sink:

    raise    the function raises; Spark repeats the task, or the run repeats the write
    exit     the worker process ends
    shuffle  a file of the last shuffle is deleted, as by the loss of an executor: Spark repeats stages
    stop     the driver cancels the jobs or stops the query; the run repeats it
    kill     the driver and its workers are killed; another driver repeats the write
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqproc.client import Client
from mqproc.spark.jobs import replay
from mqproc.spark.session import local_session
from tests.spark import support
from tests.spark.support import messages_of
from tests.support.group import Group

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS = ("batch", "stream", "shuffled", "replay")
FAILURES = ("raise", "exit", "stop", "shuffle", "kill")
ROWS = 8_000
PARTITIONS = 2
TASK_FAILURES = 4
"""With `local[2,4]` Spark repeats a failed task up to three times."""
SOURCE = "Source"
RUN_S = 240
PROJECT = Path(__file__).parents[2]


def settings(folder: Path) -> dict[str, str]:
    """Small Arrow batches, so that a failure finds some of a task's rows stored."""
    return support.SETTINGS | {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        "spark.local.dir": str(folder / "local"),
        "spark.stage.maxConsecutiveAttempts": "10",
        "spark.log.level": "OFF",
    }


@dataclass(frozen=True)
class Failure:
    """A failure in a folder, once: at the row with this number."""

    folder: Path
    how: str
    row: int
    local: Path
    """Spark's folder for files of shuffles."""

    @property
    def armed(self) -> Path:
        return self.folder / "armed"

    @property
    def stopped(self) -> Path:
        return self.folder / "stop"

    def body(self, number: int) -> str:
        """The body of a row."""
        if number == self.row and self.armed.exists():
            self.armed.unlink()
            self._fail()
        return f"{number}"

    def _fail(self) -> None:
        if self.how == "raise":
            raise ValueError("fails once")
        if self.how == "exit":
            os._exit(7)
        if self.how == "stop":
            self.stopped.touch()
        if self.how == "kill":
            os.kill(int((self.folder / "driver").read_text()), signal.SIGKILL)
            time.sleep(60)
        if self.how == "shuffle":
            delete_shuffle(self.local)


def delete_shuffle(local: Path) -> bool:
    """Delete the file of the last map task so far of the newest shuffle; False without one."""
    files = [(_numbers(path), path) for path in local.rglob("shuffle_*_0.data")]
    if files:
        max(files)[1].unlink(missing_ok=True)
    return bool(files)


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.split("_")[1:])


class Run:
    """One write of `ROWS` rows with one failure."""

    def __init__(self, spark: SparkSession, kind: str, number: int, failure: Failure) -> None:
        self.spark = spark
        self.kind = kind
        self.how = failure.how
        self.target = str(failure.folder / "target")
        self.source = str(failure.folder / "source")
        self.topic = f"{kind}{failure.how}{number}"
        self.checkpoint = failure.folder / "checkpoints" / self.topic
        self.failure = failure

    def rows(self) -> DataFrame:
        """The rows, by the function that fails."""
        from pyspark.sql import functions as F

        body = F.udf(self.failure.body, "string")
        if self.kind == "stream":
            found = self.spark.readStream.format("mqproc").option("subscribe", SOURCE)
            found = found.option("startingOffsets", "earliest").option("minPartitions", str(PARTITIONS))
            return found.load(self.source).select(body(F.col("body").cast("string").cast("int")).alias("body"))
        numbers = self.spark.range(0, ROWS, 1, PARTITIONS)
        if self.how == "shuffle" or self.kind == "shuffled":
            numbers = numbers.repartition(PARTITIONS, F.col("id"))
        return numbers.select(body("id").alias("body"))

    def once(self) -> None:
        """Run the write to its end, or until it fails."""
        if self.kind == "replay":
            replay(
                self.spark,
                self.source,
                self.target,
                self.topic,
                topic=SOURCE,
                name=self.topic,
                streams=4,
                splitBytes=100_000,
            )
        elif self.kind == "stream":
            write = self.rows().writeStream.format("mqproc").option("topic", self.topic)
            query = write.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
            self._await(query.start(self.target))
        else:
            write = self.rows().write.format("mqproc").mode("append").option("topic", self.topic)
            write.option("writeId", self.topic).save(self.target)

    def _await(self, query: Any) -> None:
        deadline = time.monotonic() + RUN_S
        while not query.awaitTermination(0.1):
            assert time.monotonic() < deadline, "the query does not end"
            if self.failure.stopped.exists():
                self.failure.stopped.unlink()
                query.stop()
                raise InterruptedError("the query was stopped")

    def until_done(self) -> int:
        """Run it with the failure, then again until it ends; the number of runs that failed."""
        failed = 0
        while True:
            with self._stopping():
                try:
                    self.once()
                    return failed
                except Exception:
                    if self.failure.armed.exists() or failed > 3:
                        raise
                    failed += 1

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Cancel all jobs when the failure asks for it."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                if self.kind != "stream" and self.failure.stopped.exists():
                    self.failure.stopped.unlink()
                    self.spark.sparkContext.cancelAllJobs()
                if self.kind == "replay" and self.failure.armed.exists():
                    self._disturb_replay()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()

    def _disturb_replay(self) -> None:
        """Let a replay fail, whose rows pass through no function."""
        if self.how == "shuffle":
            if delete_shuffle(self.failure.local):
                self.failure.armed.unlink()
            return
        with Client(self.target) as client:
            topics = {info.topic for info in client.topics()}
            there = sum(queue.max_offset for queue in client.queues(self.topic)) if self.topic in topics else 0
        if there > self.failure.row // 2:
            self.failure.armed.unlink()
            self.spark.sparkContext.cancelAllJobs()


def count(store: Path, topic: str) -> tuple[int, int]:
    """(missing, doubles) of a topic's bodies in the target's log."""
    found = collections.Counter(int(message.body) for message in messages_of(store, topic=topic))
    expected = collections.Counter(range(ROWS))
    return (expected - found).total(), (found - expected).total()


class Place:
    """A source store with `ROWS` messages and a target, both running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = Group(folder / "source").start()
        self.target = Group(folder / "target").start()
        with self.source.client() as client:
            client.create_topic(SOURCE, 4)
            for first in range(0, ROWS, 1000):
                client.send_batch(SOURCE, [b"%d" % number for number in range(first, first + 1000)])
        self.source.wait_dispatched()

    def close(self) -> None:
        for group in (self.source, self.target):
            group.close()

    def arm(self) -> None:
        (self.folder / "armed").touch()
        (self.folder / "stop").unlink(missing_ok=True)

    def check(self, topic: str) -> None:
        self.target.wait_dispatched()
        missing, doubles = count(self.target.store, topic)
        assert (missing, doubles) == (0, 0), f"{topic}: {missing:,} rows are missing, {doubles:,} are doubles"


def run_in_session(
    place: Place, spark: SparkSession, kind: str, how: str, number: int, row: int, *, local: Path
) -> int:
    """One run with a failure that the driver survives; the number of writes that failed."""
    place.arm()
    run = Run(spark, kind, number, Failure(place.folder, how, row, local))
    failed = run.until_done()
    assert not (place.folder / "armed").exists(), "nothing has failed"
    place.check(run.topic)
    return failed


def run_in_driver(place: Place, kind: str, number: int, row: int) -> None:
    """One run whose driver is killed and replaced."""
    place.arm()
    for is_again in (False, True):
        command = [sys.executable, "-m", "tests.spark.failing", "--driver", str(place.folder)]
        command += ["--kind", kind, "--number", str(number), "--row", str(row)]
        with (place.folder / "driver.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=PROJECT, start_new_session=True, stdout=log, stderr=log)
        try:
            code = process.wait(RUN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log_end = (place.folder / "driver.log").read_text()[-3000:]
        assert code == (0 if is_again else -signal.SIGKILL), log_end
    place.check(f"{kind}kill{number}")


def drive(folder: Path, kind: str, number: int, row: int) -> None:
    """Body of a driver process."""
    (folder / "driver").write_text(f"{os.getpid()}")
    spark = session(folder)
    Run(spark, kind, number, Failure(folder, "kill", row, folder / "local")).once()
    spark.stop()


def session(folder: Path) -> SparkSession:
    return local_session(f"local[{PARTITIONS},{TASK_FAILURES}]", settings=settings(folder))


def failures_of(kind: str) -> list[str]:
    """The failures that apply to a kind of write."""
    if kind == "replay":
        return ["stop", "shuffle"]
    return [how for how in FAILURES if how != "shuffle" or kind == "shuffled"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100, help="of each kind of write")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        drive(given.driver, given.kind, given.number, given.row)
        return
    chance = random.Random(given.seed)
    done: collections.Counter[str] = collections.Counter()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mqproc-failing-") as folder:
        place = Place(Path(folder))
        spark = session(place.folder)
        try:
            for number in range(given.runs):
                for kind in given.kinds:
                    how, row = chance.choice(failures_of(kind)), chance.randrange(ROWS)
                    print(f"{time.monotonic() - began_s:.0f} s: {kind}{number}, {how} at row {row:,}", flush=True)
                    if how == "kill":
                        run_in_driver(place, kind, number, row)
                    else:
                        run_in_session(place, spark, kind, how, number, row, local=place.folder / "local")
                    done[f"{kind} {how}"] += 1
        finally:
            spark.stop()
            place.close()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
