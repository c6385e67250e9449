"""Replay into a running store: in time order, no duplicates under one name, rate limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mqproc.client import Client
from mqproc.client.replay import REPLAYED
from mqproc.errors import BadRequestError, CorruptStoreError, NotRunningError, StoreAccessError, TopicReservedError
from mqproc.spark.jobs import replay
from mqproc.spark.jobs.replaying import ReplayStream, ReplayTarget
from mqproc.types import StoredMessage
from tests.spark import support
from tests.spark.support import messages_of
from tests.support.group import Group
from tests.support.store_builders import FIRST_MS, LiveStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def said(message: StoredMessage) -> tuple[object, ...]:
    return message.body, message.keys, message.tag, message.born_timestamp_ms


def test_replay_repeated_under_same_name_resumes(spark: SparkSession, rolled_store: Path, group: Group) -> None:
    first = messages_of(rolled_store, topic="First")
    some = [message for message in first if message.store_timestamp_ms < FIRST_MS + 200]
    done = replay(spark, rolled_store, group.store, "Again", topic="First", name="r", end=FIRST_MS + 200)
    assert (done.sent, done.found) == (len(some), 0)
    whole = replay(spark, rolled_store, group.store, "Again", topic="First", name="r", streams=2)
    assert (whole.sent, whole.found) == (len(first) - len(some), len(some))
    group.wait_dispatched()
    copies = messages_of(group.store, topic="Again")
    assert sorted(map(said, copies)) == sorted(map(said, first))
    assert {copy.properties[REPLAYED] for copy in copies} == {message.message_id for message in first}
    of_queue = [copy for copy in copies if copy.queue_id == 1][:10]
    assert [said(copy) for copy in of_queue] == [said(message) for message in first if message.queue_id == 1][:10]


def test_replay_waits_for_unavailable_target(rolled_store: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request may create topics, query the sent rows, or query the stored copies."""
    window = [(str(rolled_store), message) for message in messages_of(rolled_store, topic="First")]
    with group.client() as client:
        for is_missing, found in ((True, 0), (False, len(window))):
            target = ReplayTarget(str(group.store), "Away", 8, "r", 0.0, is_new=False, is_missing=is_missing)
            stream = ReplayStream(_Leaving(client), target)  # type: ignore[arg-type]
            stream.send(window)
            assert (stream.sent, stream.found) == (len(window) - found, found)


class _Leaving:
    """A client whose first call of each method fails."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._failed: set[tuple[str, str]] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            place = name, str(arguments[1:2])
            if place in self._failed:
                return getattr(self._client, name)(*arguments)
            self._failed.add(place)
            raise NotRunningError("away")

        return call


def test_replay_killed_and_repeated_copies_each_once(spark: SparkSession, rolled_store: Path, group: Group) -> None:
    first = messages_of(rolled_store, topic="First")
    command = [sys.executable, "-m", "mqproc", "spark", "replay", str(rolled_store), "--topic", "First", "--rate", "10"]
    command += ["--to", "Killed", "--to-store", str(group.store), "--name", "k", "--master", "local[1]"]
    command += ["--conf", f"spark.driver.extraJavaOptions={support.JAVA_OPTIONS}"]
    with (
        subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as replaying,
        group.client() as client,
    ):
        deadline = time.monotonic() + 240
        while not any(topic.topic == "Killed" and client.max_offset("Killed", 0) > 3 for topic in client.topics()):
            assert time.monotonic() < deadline
            assert replaying.poll() is None
            time.sleep(0.05)
        os.killpg(replaying.pid, signal.SIGKILL)
    done = replay(spark, rolled_store, group.store, "Killed", topic="First", name="k")
    assert done.found > 0
    assert done.sent + done.found == len(first)
    assert done.sent > 0
    group.wait_dispatched()
    copies = messages_of(group.store, topic="Killed")
    assert sorted(copy.properties[REPLAYED] for copy in copies) == sorted(message.message_id for message in first)


def test_replay_rate_limit_and_invalid_arguments(
    spark: SparkSession, rolled_store: Path, group: Group, tmp_path: Path
) -> None:
    began = time.monotonic()
    done = replay(spark, rolled_store, group.store, "Slow", topic="First", key="n5,n6,n7,n8", rate=2)
    assert done.sent == 4
    assert time.monotonic() - began >= 1.5
    with pytest.raises(BadRequestError, match="must not be negative"):
        replay(spark, rolled_store, group.store, "Slow", topic="First", rate=-1)
    with pytest.raises(BadRequestError, match="needs topics"):
        replay(spark, rolled_store, group.store, "Slow", topic=[])
    with pytest.raises(StoreAccessError, match="no such folder"):
        replay(spark, tmp_path / "missing", group.store, "New", topic="First")
    for reserved in ("SCHEDULE_TOPIC_XXXX", "%DLQ%x"):
        with pytest.raises(TopicReservedError, match="the system's own"):
            replay(spark, rolled_store, group.store, reserved, topic="First")
    assert replay(spark, rolled_store, group.store, "New", topic="nosuch").sent == 0
    with group.client() as client:
        assert [info.topic for info in client.topics() if info.topic in ("New", "%DLQ%x")] == []


def test_replay_onto_itself_is_rejected_for_any_spelling(spark: SparkSession, group: Group, tmp_path: Path) -> None:
    with group.client() as client:
        client.send("Own", b"once")
    group.wait_dispatched()
    (tmp_path / "link").symlink_to(group.store)
    for path, target in ((tmp_path / "link", group.store), (group.store, tmp_path / "link")):
        assert replay(spark, path, target, "Own", topic="Own").sent == 0


def test_replay_skips_damage_with_source_option(
    spark: SparkSession, rolled_store: Path, group: Group, tmp_path: Path
) -> None:
    store = shutil.copytree(rolled_store, tmp_path / "damaged")
    (store / "commitlog" / f"{65536:020d}").unlink()
    with pytest.raises(CorruptStoreError, match="is missing"):
        replay(spark, store, group.store, "Whole", topic="First", key="n0")
    assert replay(spark, store, group.store, "Whole", topic="First", key="n0", failOnDataLoss=False).sent == 1


def test_replay_keeps_born_times_beyond_year_9999(spark: SparkSession, group: Group, tmp_path: Path) -> None:
    """Microseconds given as milliseconds; a time outside Spark's range becomes a new born time."""
    store = LiveStore(tmp_path / "source")
    before_ms = time.time_ns() // 1_000_000
    for body, born_ms in ((b"us", FIRST_MS * 1000 + 1), (b"none", 1 << 62), (b"1969", -1), (b"ms", FIRST_MS)):
        store.append("Topic", [body], born_timestamp_ms=born_ms)
    store.close()
    assert replay(spark, tmp_path / "source", group.store, "Again", topic="Topic").sent == 4
    group.wait_dispatched()
    born = {copy.body: copy.born_timestamp_ms for copy in messages_of(group.store, topic="Again")}
    assert before_ms <= born.pop(b"none") <= time.time_ns() // 1_000_000
    assert born == {b"us": FIRST_MS * 1000 + 1, b"1969": -1, b"ms": FIRST_MS}


def test_replay_to_store_without_message_index_is_rejected(
    spark: SparkSession, rolled_store: Path, tmp_path: Path
) -> None:
    """Also the first time: Spark may repeat a stage, and copies could not be found."""
    target = Group(tmp_path / "target", message_index_enable=False).start()
    with pytest.raises(BadRequestError, match="message_index_enable is off"):
        replay(spark, rolled_store, target.store, "Again", topic="First", name="r")
    with target.client() as client:
        assert client.topics() == []
    target.close()
