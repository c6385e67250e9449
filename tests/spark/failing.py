"""Writes, streams and replays during which a task, stage or driver fails at a random moment.

`python -m tests.spark.failing --runs 100` does 100 runs of each kind and counts the rows in the target's log; tests do
a few. Half of the source's bodies are compressed. A failure happens once: at a random row, in a Python function between
source and sink, or when a replay has sent so many rows.

    raise    the function raises; Spark repeats the task, or the run repeats the write
    exit     the worker processes end
    shuffle  a file of the last shuffle is deleted, as by the loss of an executor: Spark repeats stages
    damage   a record of the source is damaged, and repaired when the write has failed
    stop     the driver cancels the jobs or stops the query; the run repeats it
    kill     the driver and its workers are killed; another driver repeats the write
    slow     a task is so slow that Spark runs a second attempt at the same time (speculation); needs a cluster
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mqproc.client import Client
from mqproc.client.replay import send_copies
from mqproc.layout import record
from mqproc.spark.jobs import replay
from mqproc.spark.session import local_session, prepare_environment
from mqproc.types import Message
from tests.spark import support
from tests.spark.streaming.restarting import python_processes
from tests.spark.support import messages_of, rows_of
from tests.support.group import SMALL, Group, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FAILURES = {
    "batch": ("raise", "exit", "stop", "kill"),
    "stream": ("raise", "exit", "damage", "stop", "kill"),
    "shuffled": ("raise", "exit", "shuffle", "stop", "kill"),
    "unnamed": ("raise", "exit", "shuffle"),
    "replay": ("exit", "shuffle", "damage", "stop", "kill"),
}
"""Kinds of writes with their failures. Spark itself must repeat a write without a name."""

ROWS = 8_000
PER_FRAME = 1_000
PARTITIONS = 2
# More than run at once: the later ones need a file that the first ones delete.
SHUFFLED_PARTITIONS = 4
LOCAL = f"local[{PARTITIONS},4]"
"""Spark repeats a failed task up to three times."""
SOURCE = "Source"
QUEUES = 4
# Messages a second, so that a replay takes some seconds.
REPLAY_RATE = 8_000
ATTEMPTS = 4
# Runs until a lost shuffle makes Spark repeat a stage.
SHUFFLE_RUNS = 20
# A busy machine may take minutes for a query that takes seconds.
RUN_S = 540
PROJECT = Path(__file__).parents[2]
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "0.1",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": support.JAVA_OPTIONS,
    "spark.executorEnv.PYTHONPATH": str(PROJECT),
    "spark.driver.host": "127.0.0.1",
}


def settings(folder: Path) -> dict[str, str]:
    """Small Arrow batches, so that a failure finds some of a task's rows stored."""
    return support.SETTINGS | {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        "spark.local.dir": str(folder / "local"),
        # A killed driver leaves files.
        "spark.driver.extraJavaOptions": f"{support.JAVA_OPTIONS} -Djava.io.tmpdir={folder}",
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
    since_ns: int = 0
    """Older files are of other runs."""
    damaged_at: int = 0
    """Log position of the damaged byte."""

    @property
    def armed(self) -> Path:
        return self.folder / "armed"

    @property
    def stopped(self) -> Path:
        return self.folder / "stop"

    @property
    def speculated(self) -> Path:
        return self.folder / "speculated"

    def disarm(self) -> bool:
        """Whether the failure has not happened before."""
        try:
            self.armed.unlink()
        except FileNotFoundError:
            return False
        return True

    def body(self, number: int) -> str:
        """The body of a row."""
        if self._is_due(number) and self.disarm():
            self._fail()
        return f"{number}"

    def _is_due(self, number: int) -> bool:
        if self.how != "shuffle":
            return number == self.row
        from pyspark import TaskContext

        task = TaskContext.get()
        return number >= self.row and task is not None and task.partitionId() < PARTITIONS

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
            delete_shuffle(self.local, self.since_ns)
        if self.how == "slow":
            deadline = time.monotonic() + 60
            while not self.speculated.exists() and time.monotonic() < deadline:
                time.sleep(0.01)


def delete_shuffle(local: Path, since_ns: int) -> bool:
    """Delete the file of the last map task so far of the newest shuffle; False without one."""
    files = shuffle_files(local, since_ns)
    if files:
        max(files)[1].unlink(missing_ok=True)
    return bool(files)


def shuffle_files(local: Path, since_ns: int) -> list[tuple[tuple[int, ...], Path]]:
    """Numbers (shuffle, map task, 0) and paths of the files of shuffles since a time."""
    found = []
    for path in local.rglob("shuffle_*_0.data"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns >= since_ns:
                found.append((tuple(int(part) for part in path.stem.split("_")[1:]), path))
    return found


@contextlib.contextmanager
def losing_shuffles(local: Path) -> Iterator[None]:
    """Meanwhile delete one file of each shuffle, as soon as it appears."""
    since_ns, ended, lost = time.time_ns(), threading.Event(), set()

    def watch() -> None:
        while not ended.wait(0.001):
            for numbers, path in shuffle_files(local, since_ns):
                if numbers[0] not in lost:
                    lost.add(numbers[0])
                    path.unlink(missing_ok=True)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def repeated_stages(spark: SparkSession) -> set[int]:
    """The stages that this session has repeated."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup()]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    return {stage.stageId for stage in stages if stage and stage.currentAttemptId > 0}


class Run:
    """One write of `ROWS` rows with one failure."""

    def __init__(self, spark: SparkSession, kind: str, topic: str, failure: Failure) -> None:
        self.spark = spark
        self.kind = kind
        self.how = failure.how
        self.target = str(failure.folder / "target")
        self.source = str(failure.folder / "source")
        self.topic = topic
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
        if self.kind in ("shuffled", "unnamed"):
            numbers = numbers.repartition(SHUFFLED_PARTITIONS, F.col("id"))
        return numbers.select(body("id").alias("body"))

    def once(self) -> None:
        """Run the write to its end, or until it fails."""
        with self._watching():
            if self.kind == "replay":
                given: dict[str, Any] = {"topic": SOURCE, "name": self.topic, "splitBytes": 100_000}
                replay(self.spark, self.source, self.target, self.topic, streams=3, rate=REPLAY_RATE, **given)
            elif self.kind == "stream":
                write = self.rows().writeStream.format("mqproc").option("topic", self.topic)
                query = write.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
                self._await(query.start(self.target))
            else:
                write = self.rows().write.format("mqproc").mode("append").option("topic", self.topic)
                if self.kind != "unnamed":
                    write = write.option("writeId", self.topic)
                write.save(self.target)

    def _await(self, query: Any) -> None:
        deadline = time.monotonic() + RUN_S
        try:
            while not query.awaitTermination(0.1):
                assert time.monotonic() < deadline, "the query does not end"
                if self.failure.stopped.exists():
                    self.failure.stopped.unlink()
                    raise InterruptedError("the query was stopped")
        finally:
            query.stop()

    def until_done(self) -> int:
        """Run it until it ends; the number of runs that failed."""
        failed = 0
        while True:
            try:
                self.once()
                return failed
            except Exception as error:
                failed += 1
                print(f"{self.topic}: {str(error)[:200]!r}", flush=True)
                if failed == ATTEMPTS or self.kind == "unnamed":
                    raise
            if self.how == "damage" and self.failure.disarm():
                invert_byte(Path(self.source), self.failure.damaged_at)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Cause failures outside of tasks."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                if self.kind != "stream" and self.failure.stopped.exists():
                    self.failure.stopped.unlink()
                    self.spark.sparkContext.cancelAllJobs()
                if self.how == "slow":
                    self._note_speculation()
                elif self.kind == "replay" and self.how != "damage" and self.failure.armed.exists():
                    self._disturb_replay()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()

    def _note_speculation(self) -> None:
        """Touch a file when a task runs twice at once."""
        tracker = self.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        if any(stage and stage.numActiveTasks + stage.numCompletedTasks > stage.numTasks for stage in stages):
            self.failure.speculated.touch()

    def _disturb_replay(self) -> None:
        """Let a replay fail, whose rows pass through no function."""
        if self.how == "shuffle":
            if delete_shuffle(self.failure.local, self.failure.since_ns):
                self.failure.disarm()
            return
        with Client(self.target) as client:
            topics = {info.topic for info in client.topics()}
            there = sum(queue.max_offset for queue in client.queues(self.topic)) if self.topic in topics else 0
        if there <= self.failure.row // 2:
            return
        self.failure.disarm()
        if self.how == "stop":
            self.spark.sparkContext.cancelAllJobs()
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            for process in python_processes(os.getpid())["worker"]:
                with contextlib.suppress(psutil.Error):
                    process.kill()


def invert_byte(store: Path, position: int) -> None:
    """Invert a byte of a log; the second time restores it."""
    size = SMALL["mapped_file_size_commit_log"]
    with (store / "commitlog" / f"{position // size * size:020d}").open("r+b") as segment:
        segment.seek(position % size)
        (byte,) = segment.read(1)
        segment.seek(position % size)
        segment.write(bytes([byte ^ 0xFF]))


def count(store: Path, topic: str) -> tuple[int, int]:
    """(missing, doubles) of a topic's bodies in the target's log."""
    rows = rows_of(store, ["body"], topic=topic, byUnits=False)
    found = collections.Counter(int(row["body"]) for row in rows)
    expected = collections.Counter(range(ROWS))
    return (expected - found).total(), (found - expected).total()


class Place:
    """A source store with `ROWS` messages and a target, both running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = Group(folder / "source").start()
        self.target = Group(folder / "target").start()
        with self.source.client() as client:
            client.create_topic(SOURCE, QUEUES)
            for frame in range(ROWS // PER_FRAME):
                bodies = [b"%d" % number for number in range(frame * PER_FRAME, (frame + 1) * PER_FRAME)]
                flags = frame // QUEUES % 2 and record.SYS_FLAG_COMPRESSED
                bodies = [zlib.compress(body) for body in bodies] if flags else bodies
                client.run(send_copies([Message(SOURCE, body, queue_id=frame % QUEUES) for body in bodies], flags))
        self.source.wait_dispatched()
        self.bodies = [message.physical_offset + record.BODY for message in messages_of(self.source.store)]
        """Log positions of the source's bodies."""

    def close(self) -> None:
        for group in (self.source, self.target):
            group.close()

    def arm(self) -> None:
        (self.folder / "armed").touch()
        for name in ("stop", "speculated"):
            (self.folder / name).unlink(missing_ok=True)

    def check(self, topic: str) -> None:
        assert not (self.folder / "armed").exists(), "nothing has failed"
        self.target.wait_dispatched()
        missing, doubles = count(self.target.store, topic)
        assert (missing, doubles) == (0, 0), f"{topic}: {missing:,} rows are missing, {doubles:,} are doubles"


def run_in_session(
    place: Place, spark: SparkSession, kind: str, how: str, number: int, row: int, *, local: Path
) -> int:
    """One run with a failure that the driver survives; the number of writes that failed.

    With a lost shuffle it is run again until Spark has repeated a stage.
    """
    # Most rows have others after them in the first partitions of a shuffle.
    row = row * 3 // 4 if how == "shuffle" else row
    damaged_at = place.bodies[row]
    for again in range(SHUFFLE_RUNS):
        stages = repeated_stages(spark)
        place.arm()
        if how == "damage":
            invert_byte(place.source.store, damaged_at)
        failure = Failure(place.folder, how, row, local, time.time_ns(), damaged_at)
        run = Run(spark, kind, f"{kind}{how}{number}" + "again" * again, failure)
        failed = run.until_done()
        place.check(run.topic)
        if how != "shuffle" or repeated_stages(spark) - stages:
            return failed
        # The later tasks had read the file: lose it earlier.
        row = row * 3 // 4
    raise AssertionError("no stage was repeated")


def run_in_drivers(place: Place, kind: str, how: str, number: int, row: int, *, master: str = LOCAL) -> int:
    """One run in driver processes; the number that failed.

    The first is killed unless `how` is slow.
    """
    place.arm()
    codes: list[int] = []
    command = [sys.executable, "-m", "tests.spark.failing", "--driver", str(place.folder), "--master", master]
    command += ["--kinds", kind, "--how", how, "--first", str(number), "--row", str(row)]
    while 0 not in codes:
        with (place.folder / "driver.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=PROJECT, start_new_session=True, stdout=log, stderr=log)
        try:
            codes.append(process.wait(RUN_S))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert len(codes) < ATTEMPTS, (codes, (place.folder / "driver.log").read_text()[-3000:])
    assert how != "kill" or -signal.SIGKILL in codes, codes
    assert how != "slow" or (place.folder / "speculated").exists(), "no task has run twice at once"
    place.check(f"{kind}{how}{number}")
    return len(codes) - 1


def drive(folder: Path, kind: str, how: str, number: int, row: int, master: str) -> None:
    """Body of a driver process."""
    (folder / "driver").write_text(f"{os.getpid()}")
    spark = local_session(master, settings=settings(folder) | (SPECULATION if how == "slow" else {}))
    failure = Failure(folder, how, row, folder / "local")
    Run(spark, kind, f"{kind}{how}{number}", failure).once()
    if how == "slow" and kind == "replay":
        failure.disarm()
    spark.stop()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The URL of a master with two workers of one processor each.

    Spark runs a second attempt only on another host, so each worker has an address of its own.
    """
    import pyspark

    prepare_environment()
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"

    with contextlib.ExitStack() as stack:

        def start(name: str, role: str, *arguments: str | Path) -> Path:
            log = folder / f"{name}.log"
            command = [program, f"org.apache.spark.deploy.{role}", "--webui-port", "0", *arguments]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(map(str, command)), cwd=folder, start_new_session=True, stdout=output, stderr=output
                )
            stack.callback(process.wait, 30)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            return log

        log = start("master", "master.Master", "--host", "127.0.0.1", "--port", "0")
        url = str(wait_until(lambda: re.search(r"spark://[\d.:]+", log.read_text()), 120, "a master")[0])
        for host in ("127.0.0.1", "127.0.0.2"):
            start(host, "worker.Worker", "--host", host, "--cores", "1", "--memory", "1g", "--work-dir", folder, url)
        yield url


def run_all(given: argparse.Namespace, done: dict[str, int], progress: Path | None) -> None:
    """Do the runs that are not in `done`, and save it after each."""
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mqproc-failing-", ignore_cleanup_errors=True) as folder,
        contextlib.closing(Place(Path(folder))) as place,
    ):
        try:
            for number in range(given.first, given.first + given.runs):
                for kind in given.kinds:
                    if number < done.get(kind, 0):
                        continue
                    chance = random.Random(f"{given.seed} {kind} {number}")
                    how, row = given.how or chance.choice(FAILURES[kind]), chance.randrange(ROWS)
                    print(f"{time.monotonic() - began_s:.0f} s: {kind} {number}, {how} at row {row:,}", flush=True)
                    if how == "kill":
                        run_in_drivers(place, kind, how, number, row)
                    else:
                        # Each run gets a Java of its own: one that has had many failures may end.
                        spark = local_session(LOCAL, settings=settings(place.folder))
                        run_in_session(place, spark, kind, how, number, row, local=place.folder / "local")
                        support.end_session()
                    done[kind] = number + 1
                    if progress is not None:
                        progress.write_text(json.dumps(done))
        except BaseException:
            print(f"repeat: python -m tests.spark.failing --kinds {kind} --first {number} --runs 1 --seed {given.seed}")
            raise
        finally:
            support.end_session()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.spark.failing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=100, help="of each kind of write (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--kinds", nargs="+", choices=sorted(FAILURES), default=list(FAILURES))
    parser.add_argument("--how", help="the failure (default: a random one)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--progress", type=Path, help="save progress in this file, and resume from it")
    for name in ("--driver", "--row", "--master"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        drive(Path(given.driver), given.kinds[0], given.how, given.first, int(given.row), given.master)
        return
    found = given.progress is not None and given.progress.exists()
    done: dict[str, int] = json.loads(given.progress.read_text()) if found else {}
    run_all(given, done, given.progress)
    print(f"{given.runs:,} runs of each kind, no row missing or twice")


if __name__ == "__main__":
    main()
