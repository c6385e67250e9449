"""Copy one running store to another by a query that is stopped and killed repeatedly.

        producer ──▶ source store ──▶ query ──▶ target store       retention deletes messages that the query has read
                                    ✕ stopped; or Spark's Python processes, or all of Spark, killed

`python -m tests.spark.streaming.restarting --kills 100` does this with 100 kills, every tenth one of the whole
driver, and prints statistics; a test does a few kills within one session. A kill happens at a random time after the
query has committed a micro-batch since its start, so that each round makes progress.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mqproc.client import Client
from mqproc.spark.session import local_session
from tests.processes.test_retention import RETAINING
from tests.spark import support
from tests.spark.support import messages_of
from tests.support.group import Group, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

GROUP = "query"
TOPIC = "Source"
COPIES = "Copies"
QUEUES = 4
PER_FRAME = 25
PAUSE_S = 0.05
PER_TRIGGER = 500
# Few micro-batches for the rest: each is slow on a busy machine.
FINISH_PER_TRIGGER = 50_000
FINISH_S = 300
COMMITTED_S = 120
# The process of a query's source; it lives as long as the query.
SOURCE_MODULE = "pyspark.sql.streaming.python_streaming_source_runner"
DAEMON_MODULES = {"pyspark.daemon", "mqproc.spark.worker"}
PROJECT = Path(__file__).parents[3]


class Producer:
    """Sends messages with distinct bodies until it is stopped; `count` are acknowledged."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0
        self._thread.start()

    def _run(self) -> None:
        with Client(self._store, timeout=60.0) as client:
            while not self._stopped.wait(PAUSE_S):
                numbers = range(self.count, self.count + PER_FRAME)
                client.send_batch(TOPIC, [b"%d " % number * 20 for number in numbers], tags="x")
                self.count += PER_FRAME

    def stop(self) -> int:
        """Stop and return the number of messages sent."""
        self._stopped.set()
        self._thread.join(120)
        return self.count


@dataclass
class Place:
    """Two running stores and a checkpoint."""

    folder: Path
    source: Group = field(init=False)
    target: Group = field(init=False)

    def __post_init__(self) -> None:
        self.source = Group(self.folder / "source", **(RETAINING | {"retention_guard": "groups"})).start()
        self.target = Group(self.folder / "target").start()
        with self.source.client() as client:
            client.create_topic(TOPIC, QUEUES)
            client.send_batch(TOPIC, [b"first"] * QUEUES)
            self.source.wait_dispatched()
            for queue_id in range(QUEUES):
                # Keep messages of the topic until the query has read them.
                client.groups.commit(GROUP, TOPIC, queue_id, 0)

    def close(self) -> None:
        for group in (self.source, self.target):
            group.close()

    def compare(self, sent: int) -> dict[str, int]:
        """Compare the target with the messages sent; also count messages deleted in the source."""
        self.target.wait_dispatched()
        found = collections.Counter(message.body for message in messages_of(self.target.store, topic=COPIES))
        expected = collections.Counter([b"%d " % number * 20 for number in range(sent)] + [b"first"] * QUEUES)
        with self.source.client() as client:
            deleted = sum(client.min_offset(TOPIC, queue_id) for queue_id in range(QUEUES))
        return {
            "messages": expected.total(),
            "missing": (expected - found).total(),
            "doubles": (found - expected).total(),
            "deleted_by_retention": deleted,
        }


def start(
    spark: SparkSession, folder: Path, *, available_now: bool = False, per_trigger: int = PER_TRIGGER
) -> StreamingQuery:
    options = {"subscribe": TOPIC, "startingOffsets": "earliest", "consumerGroup": GROUP}
    found = spark.readStream.format("mqproc").options(**options, maxOffsetsPerTrigger=str(per_trigger))
    rows = found.load(str(folder / "source")).select("body", "tag", "keys")
    write = rows.writeStream.format("mqproc").option("checkpointLocation", str(folder / "checkpoint"))
    write = write.option("topic", COPIES)
    trigger = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
    return write.trigger(**trigger).start(str(folder / "target"))


def finish(spark: SparkSession, folder: Path) -> None:
    """Copy all remaining messages."""
    query = start(spark, folder, available_now=True, per_trigger=FINISH_PER_TRIGGER)
    assert query.awaitTermination(FINISH_S), "the query does not end"


def committed(folder: Path) -> int:
    """The newest committed micro-batch; −1 for none."""
    return max((int(each.name) for each in (folder / "checkpoint" / "commits").glob("[0-9]*")), default=-1)


def await_committed(folder: Path) -> bool:
    """Wait until a micro-batch is committed; False on timeout."""
    number, deadline = committed(folder) + 1, time.monotonic() + COMMITTED_S
    while committed(folder) < number:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def python_processes(of: int) -> dict[str, list[psutil.Process]]:
    """Spark's Python processes below a driver: sources of queries, and workers.

    The daemons that fork workers are excluded: they do not take part in a query.
    """
    found: dict[str, list[psutil.Process]] = {"source": [], "worker": []}
    for process in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if SOURCE_MODULE in process.cmdline():
                found["source"].append(process)
            elif parent is not None and DAEMON_MODULES & set(parent.cmdline()):
                found["worker"].append(process)
    return found


def kill_python(of: int) -> bool:
    """Kill a query's source and all workers with SIGKILL; False and no kill when no query runs.

    A query fails without its source. It may survive the loss of idle workers alone. Nothing is killed while a query
    starts: otherwise it would fail again and again for callers that wait for it.
    """
    found = python_processes(of)
    if not found["source"]:
        return False
    killed = found["worker"] + found["source"]
    for process in killed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    # Spark may assign work to workers that are terminating.
    _gone, alive = psutil.wait_procs(killed, 30)
    assert not alive, f"{alive} outlive being killed"
    return True


# The command


def live(folder: Path) -> None:
    """Body of a driver process: run the query and restart it after each failure."""
    spark = local_session("local[2]", settings=support.SETTINGS)
    (folder / "up").write_text("")
    while True:
        # The step that fails after Python is killed is random: it may be the look-up of the source.
        try:
            start(spark, folder).awaitTermination()
        except Exception as error:
            with (folder / "failed").open("a") as failed:
                failed.write(f"{str(error)[:300]!r}\n")


@contextlib.contextmanager
def driver(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in its own process group, which is killed at exit."""
    (folder / "up").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.spark.streaming.restarting", "--live", str(folder)]
    with (folder / "driver.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=PROJECT, start_new_session=True, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "up").exists():
            assert process.poll() is None, "the driver has ended"
            assert time.monotonic() < deadline, "the driver does not come up"
            time.sleep(0.1)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def run(folder: Path, kills: int, per_driver: int, gap_s: float, seed: int) -> dict[str, Any]:
    """Statistics of this many kills; the last kill of each driver is of the driver itself."""
    chance, place = random.Random(seed), Place(folder)
    producer = Producer(place.source.store)
    drivers = done = worked = 0
    began_s = time.monotonic()
    try:
        while done < kills:
            with driver(folder) as process:
                drivers += 1
                last = min(done + per_driver, kills)
                while done < last:
                    worked += await_committed(folder)
                    time.sleep(chance.uniform(0.0, gap_s))
                    assert process.poll() is None, "the driver has ended"
                    done += 1
                    if done < last:
                        wait_until(lambda process=process: kill_python(process.pid), COMMITTED_S, "a query to kill")
            print(
                f"{done} kills, {committed(folder) + 1} epochs, {producer.count:,} messages, "
                f"{time.monotonic() - began_s:.0f} s",
                flush=True,
            )
        sent = producer.stop()
        spark = local_session("local[2]", settings=support.SETTINGS)
        finish(spark, folder)
        spark.stop()
        failed = (folder / "failed").read_text().count("\n") if (folder / "failed").exists() else 0
        return {
            "kills": done,
            "drivers_killed": drivers,
            "queries_failed": failed,
            "rounds_with_an_epoch": worked,
            "epochs": committed(folder) + 1,
        } | place.compare(sent)
    finally:
        producer.stop()
        place.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-driver", type=int, default=10)
    parser.add_argument(
        "--gap", type=float, default=1.0, help="a kill comes at most so many seconds after a micro-batch was done"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--live", type=Path)
    given = parser.parse_args()
    if given.live:
        live(given.live)
        return
    with tempfile.TemporaryDirectory(prefix="mqproc-restarting-") as folder:
        found = run(Path(folder), given.kills, given.per_driver, given.gap, given.seed)
    print(json.dumps(found))
    sys.exit(bool(found["missing"] or found["doubles"] or not found["deleted_by_retention"]))


if __name__ == "__main__":
    main()
