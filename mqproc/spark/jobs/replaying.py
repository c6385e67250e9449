"""Replay stored messages to a topic of a running store: throttled and resumable.

    messages of stores ──in log order──▶ streams ──copies with ids of their sources──▶ the target's writer
                                                        └──which are stored already?──▶ its index

`mqproc.client.replay` is the sequential form within one store, and defines the copies.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from mqproc.errors import BadRequestError, TopicExistsError
from mqproc.layout import record
from mqproc.layout.record_codec import stored_message
from mqproc.spark.batch_read import flags_of, messages
from mqproc.spark.jobs.output import check_sources
from mqproc.spark.jobs.tasks import batches_of
from mqproc.spark.options import PathArgument
from mqproc.store.topics import check_sendable
from mqproc.topic_names import check_topic
from mqproc.types import Message, StoredMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mqproc.client import Client
    from mqproc.client.requests import Call

_T = TypeVar("_T")
_Copy = tuple[Message, int]
"""A copy, and the sys_flag of its source."""
_COLUMNS: Final = (
    *("store", "topic", "queue_id", "queue_offset", "message_id", "keys", "tag", "body", "properties", "flag"),
    *("sys_flag", "born_timestamp"),
)
_DONE: Final = pa.schema([("sent", pa.int64()), ("found", pa.int64())])
# Messages that are looked up and sent together.
_WINDOW: Final = 4000
_FRAME: Final = 1000
_LOOKUPS_IN_FLIGHT: Final = 64
_FRAMES_IN_FLIGHT: Final = 4
_PAUSE_S: Final = 0.1
# Queues of a topic that is created.
_QUEUES: Final = 8
# Frames per second when there is a rate, for an even load.
_FRAMES_PER_SECOND: Final = 20


@dataclass(frozen=True, slots=True)
class Replayed:
    """Messages sent, and messages that were stored already."""

    sent: int
    found: int


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """A topic with `queues` queues in a store that runs on the executors' machine.

    Ids of copies are derived from `name` and the source's position. `is_new`: no copy was stored when the replay began.
    `is_missing`: the topic is created with the first copies, so that a replay without messages leaves nothing.
    """

    store: str
    topic: str
    queues: int
    name: str
    rate: float
    is_new: bool
    is_missing: bool


def replay(
    spark: SparkSession,
    path: PathArgument,
    to_store: str | Path,
    to_topic: str,
    *,
    topic: str | Sequence[str],
    name: str = "",
    rate: float = 0.0,
    streams: int = 1,
    queues: int = 0,
    **selection: Any,
) -> Replayed:
    """Send the messages of `topic` that `selection` includes; it has arguments of `messages`.

    They become messages of `to_topic` in the running store `to_store`; a missing topic is created with `queues` queues
    (default: 8). Under the same `name` no message is copied twice, so a replay can be resumed. `rate` is in messages a
    second over all streams. One stream keeps the order of each log; several are faster.

    A topic replayed to itself gets messages of other stores only. Raises BadRequestError for a system topic, and when
    the target has no index to find copies in; StoreAccessError for a path without a store, and for a target of another
    user; NotRunningError when the target does not run.
    """
    from pyspark.sql import functions as F

    topics = [topic] if isinstance(topic, str) else list(topic)
    if not all(topics) or not topics:
        raise BadRequestError("a replay needs topics")
    if rate < 0:
        raise BadRequestError(f"rate = {rate:g} messages a second; it must not be negative")
    if streams < 1:
        raise BadRequestError(f"streams = {streams}; at least one is needed")
    check_topic(to_topic)
    check_sendable(to_topic)
    stores = check_sources(path, fail_on_data_loss=flags_of(selection).fail_on_data_loss)
    target = replay_target(str(to_store), to_topic, name, rate / streams, queues)
    # A decompressed body could exceed the limit of the target.
    found = messages(spark, path, topic=topics, columns=_COLUMNS, **{"plainBodies": False} | selection)
    if to_topic in topics:
        # The folder may have several names.
        itself = [store for store in stores if os.path.realpath(store) == os.path.realpath(target.store)]
        found = found.where((F.col("topic") != to_topic) | ~F.col("store").isin(itself))
    sums = _sent(found.coalesce(streams), target).selectExpr("sum(sent)", "sum(found)").first()
    assert sums is not None
    return Replayed(int(sums[0] or 0), int(sums[1] or 0))


def replay_target(store: str, topic: str, name: str, rate: float, queues: int) -> ReplayTarget:
    from mqproc.client import Client
    from mqproc.client.dispatch_barrier import check_index

    with Client(store) as client:
        there = {info.topic: info.write_queues for info in client.topics()}.get(topic)
    check_index(store)
    is_new, is_missing = there is None or not name, there is None
    place, name = str(Path(store).absolute()), name or str(uuid.uuid4())
    return ReplayTarget(place, topic, there or queues or _QUEUES, name, rate, is_new=is_new, is_missing=is_missing)


def _sent(found: DataFrame, target: ReplayTarget) -> DataFrame:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        from mqproc.client import Client
        from mqproc.spark.attempts import SendTurn

        task: Any = TaskContext.get()
        identity = f"replay\0{target.name}\0{target.topic}\0{task.partitionId()}"
        with closing(Client(target.store)) as client, closing(SendTurn(target.store, identity)):
            stream = ReplayStream(client, target)
            for batch in batches:
                for at in range(0, len(batch), _WINDOW):
                    stream.send(_messages(batch.slice(at, _WINDOW)))
        yield from batches_of(_DONE, [{"sent": stream.sent, "found": stream.found}])

    return found.mapInArrow(run, "sent bigint, found bigint")


def _messages(batch: pa.RecordBatch) -> list[tuple[str, StoredMessage]]:
    """(store, message) of each row.

    Times stay integers: producers that pass µs for ms exceed Python's years. A message without one is born now.
    """
    at = batch.schema.get_field_index("born_timestamp")
    born_us = batch.column(at).cast(pa.int64()).fill_null(time.time_ns() // 1000)
    found = []
    for row in batch.set_column(at, "born_timestamp", born_us).to_pylist():
        store, born_ms = row.pop("store"), row.pop("born_timestamp") // 1000
        row |= {"tag": row["tag"] or "", "keys": tuple(row["keys"]), "born_timestamp_ms": born_ms}
        found.append((store, stored_message(row.pop("message_id"), dict(row.pop("properties")), **row)))
    return found


class ReplayStream:
    """Sends the messages of one task."""

    def __init__(self, client: Client, target: ReplayTarget) -> None:
        self._client = client
        self._target = target
        self._families: dict[tuple[str, str], str] = {}
        self._due_s = 0.0
        self._topic_is_missing = target.is_missing
        self._check_stored = True
        self.sent = 0
        self.found = 0
        _retry(self._settle)

    def send(self, window: list[tuple[str, StoredMessage]]) -> None:
        """Send the messages of a window that are not stored.

        Raises MqprocError when the target is away for long.
        """
        from mqproc.client.dispatch_barrier import OUTCOME_UNKNOWN

        copies = [(self._copy(store, message), message.sys_flag) for store, message in window]
        if self._topic_is_missing:
            _retry(self._make_topic)
            self._topic_is_missing = False
        left = _retry(lambda: self._missing(copies)) if self._check_stored else copies
        if self._target.is_new and len(left) == len(copies):
            # Another attempt of this task has sent nothing: it completes a window before it begins the next.
            self._check_stored = False
        self.found += len(copies) - len(left)
        self.sent += len(left)
        try:
            self._send_copies(left)
        except OUTCOME_UNKNOWN:
            _retry(lambda: self._send_rest(left))

    def _make_topic(self) -> None:
        with suppress(TopicExistsError):  # Another stream may have created it.
            self._client.create_topic(self._target.topic, self._target.queues)

    def _send_rest(self, copies: list[_Copy]) -> None:
        """After a lost answer, send the messages of a window that are not stored."""
        time.sleep(_PAUSE_S)
        self._settle()
        self._send_copies(self._missing(copies))

    def _settle(self) -> None:
        """Wait until the index has all copies. Raises BadRequestError without an index."""
        from mqproc.client.dispatch_barrier import check_index, wait_for_index

        check_index(self._target.store)
        wait_for_index(self._client)

    def _copy(self, store: str, message: StoredMessage) -> Message:
        from mqproc.client.replay import copy_of

        target = self._target
        family = self._families.get((store, message.topic))
        if family is None:
            identity = f"{target.name}\0{target.topic}\0{store}\0{message.topic}"
            family = hashlib.sha256(identity.encode()).hexdigest()[:12]
            self._families[store, message.topic] = family
        unique_id = f"{family}{message.queue_id:06x}{message.queue_offset:014x}".upper()
        return copy_of(message, target.topic, message.queue_id % target.queues, unique_id)

    def _missing(self, copies: list[_Copy]) -> list[_Copy]:
        """The copies that the target's index does not have."""
        from mqproc.client import requests

        calls = (requests.by_unique_id(copy.topic, copy.unique_id) for copy, _flag in copies)
        answers = self._client.run_all(calls, _LOOKUPS_IN_FLIGHT)
        return [copy for copy, there in zip(copies, answers, strict=True) if not there]

    def _send_copies(self, copies: list[_Copy]) -> None:
        # With a rate there is time to wait for each answer.
        in_flight = 1 if self._target.rate else _FRAMES_IN_FLIGHT
        for _answer in self._client.run_all(self._calls(copies), in_flight):
            pass

    def _calls(self, copies: list[_Copy]) -> Iterator[Call[Any]]:
        from mqproc.client.replay import frames_of, send_copies

        rate = self._target.rate
        size = _FRAME if not rate else max(1, min(_FRAME, int(rate / _FRAMES_PER_SECOND)))
        # The order within a queue stays; a frame is for one queue.
        ordered = sorted(copies, key=lambda copy: copy[0].queue_id or 0)
        for _queue, run in itertools.groupby(ordered, key=_same_frame):
            for frame in frames_of(run, size, lambda copy: len(copy[0].body)):
                self._wait_for_turn(len(frame))
                yield send_copies([copy for copy, _flag in frame], frame[0][1])

    def _wait_for_turn(self, count: int) -> None:
        """Sleep to keep the rate."""
        if not self._target.rate:
            return
        now_s = time.monotonic()
        if self._due_s > now_s:
            time.sleep(min(self._due_s - now_s, threading.TIMEOUT_MAX))
        self._due_s = max(self._due_s, now_s) + count / self._target.rate


def _retry(step: Callable[[], _T]) -> _T:
    """Repeat a step while the target is away. Raises its MqprocError after a timeout."""
    from mqproc.client.dispatch_barrier import OUTCOME_UNKNOWN, PATIENCE_S

    began_s = time.monotonic()
    while True:
        try:
            return step()
        except OUTCOME_UNKNOWN:
            if time.monotonic() - began_s > PATIENCE_S:
                raise
            time.sleep(_PAUSE_S)


def _same_frame(copy: _Copy) -> tuple[int, int]:
    """Key that is equal for copies of one frame."""
    return copy[0].queue_id or 0, copy[1] & record.SYS_FLAG_BODY
