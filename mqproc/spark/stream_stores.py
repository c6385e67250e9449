"""The stores of a stream, their queues, and positions in Spark's checkpoint.

    {"/stores/a": {"queues": {"orders": {"0": 23, "1": 19}},
                   "anchor": {"topic": "orders", "queue_id": 0, "queue_offset": 22, "physical_offset": 9180,
                              "store_timestamp_ms": 1700000000000}}}

A queue's offset is that of its next message. The anchor is a message that was read; it identifies the store, in case
another one takes its path. Keys are sorted because Spark compares offsets as strings.

Positions of a running group come from shared memory, so its reader stays open. The files of a stopped store are read
again at most once a second. While a group recovers, its queues are being rebuilt: the stream waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, MqprocError, StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control
from mqproc.paths import StorePaths
from mqproc.spark.options import Queue, ReadSelection
from mqproc.spark.partitions import StoreSelection
from mqproc.spark.survey import find_stores
from mqproc.store.consumequeue.files import as_units
from mqproc.store.read.reader import StoreReader
from mqproc.store.read.views import each_queue, identity_of, open_control
from mqproc.store.verify.snapshot import read_deleted

_FILES_AGE_S: Final = 1.0
_WAIT_S: Final = 30.0
_POLL_S: Final = 0.05

QueueOffsets = dict[Queue, int]
Place = tuple[str, Queue]
"""A queue of a store."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A message that a stream has read: its place in queue and log, and its store time."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_timestamp_ms: int

    @property
    def queue(self) -> Queue:
        return self.topic, self.queue_id


@dataclass(slots=True)
class StorePosition:
    """A stream's position in one store."""

    offsets: QueueOffsets = field(default_factory=dict)
    anchor: Anchor | None = None


Position = dict[str, StorePosition]
"""Positions by store, named by the path that the stream has found it at."""


def to_json(position: Position) -> dict[str, Any]:
    """Serialize a position for Spark's checkpoint."""
    return {uri: _store_json(position[uri]) for uri in sorted(position)}


def _store_json(store_position: StorePosition) -> dict[str, Any]:
    queues: dict[str, dict[str, int]] = {}
    for topic, queue_id in sorted(store_position.offsets):
        queues.setdefault(topic, {})[str(queue_id)] = store_position.offsets[topic, queue_id]
    return {"queues": queues} | ({} if store_position.anchor is None else {"anchor": asdict(store_position.anchor)})


def from_json(found: Mapping[str, Any]) -> Position:
    """Parse a position of Spark's checkpoint. Raises BadRequestError when it is not mqproc's."""
    try:
        return {uri: _store_position(store_position) for uri, store_position in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequestError(f"the checkpoint's offsets are not mqproc's: {str(found)[:200]}: {error}") from None


def _store_position(store_position: Mapping[str, Any]) -> StorePosition:
    offsets = {
        (topic, int(queue_id)): int(offset)
        for topic, queues in store_position["queues"].items()
        for queue_id, offset in queues.items()
    }
    return StorePosition(offsets, Anchor(**store_position["anchor"]) if "anchor" in store_position else None)


def share_limit(limit: int, lags: Mapping[Any, int]) -> dict[Any, int]:
    """Share `limit` messages among queues in proportion to their lag."""
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {queue: limit * lag // total for queue, lag in lags.items()}
    # The remainder goes to the queues that lost most by rounding down.
    by_loss = sorted(lags, key=lambda queue: (-(limit * lags[queue] % total), queue))
    for queue in by_loss[: limit - sum(shares.values())]:
        shares[queue] += 1
    return shares


@dataclass(frozen=True, slots=True)
class Bounds:
    """Offsets [low, high) of a queue that can be read now."""

    low: int
    high: int


class LiveStore:
    """One store in a folder of this machine."""

    def __init__(self, uri: str) -> None:
        """Raises BadRequestError for a store on remote storage."""
        if "://" in uri:
            raise BadRequestError(f"{uri}: a stream reads a store's queues, which remote storage does not have")
        self.uri = uri
        self._io = StoreIO()
        self._paths = StorePaths(Path(uri))
        self._reader: StoreReader | None = None
        self._opened_s = 0.0
        self._group: tuple[int, ...] = ()
        self._options: Options | None = None

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def state(self) -> tuple[tuple[int, ...], bool]:
        """(identity of the running group or (), whether queues are complete).

        They are not while the group recovers.
        """
        if lock_holder(self._io, self._paths) is None:
            return (), True
        words = open_control(self._io, self._paths.control)
        if words is None:
            return (), True
        recovers = words[control.GROUP_STATE] in (control.GROUP_RECOVERING, control.GROUP_DOWN)
        return identity_of(words.cells), not recovers

    @property
    def reader(self) -> StoreReader:
        """A current reader. Raises StoreAccessError when the store does not exist."""
        group = self.state()[0]
        if self._reader is None or group != self._group or (not group and self._age_s > _FILES_AGE_S):
            self.close()
            self._group = group
            self._reader = StoreReader(self.uri)
            self._options = self._reader.options
            self._opened_s = time.monotonic()
        return self._reader

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._opened_s

    def queues(self, selection: ReadSelection) -> dict[Queue, Bounds] | None:
        """The existing selected queues; None while a group recovers."""
        before = self.state()
        while before[1]:
            try:
                found = self._queues(selection)
            except (OSError, MqprocError):
                if self.state() == before:
                    raise
            else:
                if self.state() == before:
                    return found
            self.close()
            before = self.state()
        return None

    def _queues(self, selection: ReadSelection) -> dict[Queue, Bounds]:
        queues = self.reader.reading.queues
        topics = [topic for topic in queues.topics() if selection.includes_topic(topic)]
        return {
            (topic, queue_id): Bounds(bounds.min_offset, bounds.max_offset)
            for topic, queue_id, bounds in each_queue(queues, topics)
            if selection.includes(topic, queue_id)
        }

    def deleted(self) -> Mapping[Queue, int]:
        """The end offset of each deleted queue."""
        found = read_deleted(self._io, self._paths, running=self.reader.running)
        return {queue: next_offset for queue, (_place, next_offset) in found.items()}

    def anchor(self, queue: Queue, offset: int) -> Anchor | None:
        """The message at an offset, or None."""
        reader = self.reader
        stored_ms = reader.store_time_ms(*queue, offset)
        if stored_ms < 0:
            return None
        try:
            units = as_units(reader.reading.files.read_units(*queue, offset, 1))
        except FileNotFoundError:
            return None
        return Anchor(*queue, offset, int(units["physical_offset"][0]), stored_ms) if len(units) else None

    def store_selection(self, selection: ReadSelection) -> StoreSelection:
        """The store as a task needs it. File sizes are fixed for a store."""
        options = self._options or self.reader.options
        return StoreSelection(
            self.uri,
            options.mapped_file_size_commit_log,
            selection,
            queue_file_bytes=options.consume_queue_file_bytes,
        )


class LiveStores:
    """All stores at some paths; new ones are found as they appear."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._stores: dict[str, LiveStore] = {}

    def close(self) -> None:
        """Close the files."""
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def all(self) -> list[LiveStore]:
        """The existing stores. Raises StoreAccessError when a path names none."""
        return [self._stores.setdefault(uri, LiveStore(uri)) for uri in find_stores(self._paths)]

    def get(self, uri: str) -> LiveStore:
        """The store that a checkpoint names."""
        return self._stores.setdefault(uri, LiveStore(uri))

    def queues(self, selection: ReadSelection) -> dict[str, dict[Queue, Bounds]]:
        """The selected queues of all stores that do not recover."""
        found = ((store.uri, store.queues(selection)) for store in self.all())
        return {uri: queues for uri, queues in found if queues is not None}

    def all_queues(self, selection: ReadSelection) -> dict[str, dict[Queue, Bounds]]:
        """The selected queues of all stores once none recovers. Raises StoreAccessError."""
        deadline = time.monotonic() + _WAIT_S
        while len(found := self.queues(selection)) < len(stores := self.all()):
            if time.monotonic() > deadline:
                busy = next(store.uri for store in stores if store.uri not in found)
                raise StoreAccessError(f"{busy}: its group still recovers after {_WAIT_S:g} s")
            time.sleep(_POLL_S)
        return found
