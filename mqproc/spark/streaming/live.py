"""The stores of a stream, looked at again and again: what their queues hold now, whoever starts and stops them.

A running group's positions are read from what it publishes, so a reader of it stays open. Of a store that nobody runs
the files are looked at anew, at most once a second. While a group recovers, the queues are in the making: then nothing
is said of that store, and a stream waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config import Options
from mqproc.errors import BadRequestError, MqprocError, StoreAccessError
from mqproc.io import StoreIO
from mqproc.ipc.lock import holder_of
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.spark.options import Queue, Selection
from mqproc.spark.ranges import StoreSelection
from mqproc.spark.stores import find_stores
from mqproc.spark.streaming.offsets import Anchor
from mqproc.store.consume_queue import as_units
from mqproc.store.reads.queue_bounds import each_queue
from mqproc.store.reads.reader import StoreReader
from mqproc.store.reads.store_views import identity_of, open_control
from mqproc.store.verify.deletions import read_deleted

_FILES_AGE_S: Final = 1.0
_WAIT_S: Final = 30.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Bounds:
    """Offsets [low, high) of a queue can be read now."""

    low: int
    high: int


class LiveStore:
    """One store in a folder of this machine."""

    def __init__(self, uri: str) -> None:
        """Raises BadRequestError for a store on remote storage."""
        if "://" in uri:
            raise BadRequestError(f"{uri}: a stream goes by a store's queues, which remote storage does not show")
        self.uri = uri
        self._io = StoreIO()
        self._paths = StorePaths(Path(uri))
        self._reader: StoreReader | None = None
        self._opened_s = 0.0
        self._group: tuple[int, ...] = ()
        self._options: Options | None = None

    def close(self) -> None:
        """Let go of files."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def state(self) -> tuple[tuple[int, ...], bool]:
        """(which group runs on the store, () for none; whether queues can be believed: not while it recovers)."""
        if holder_of(self._io, self._paths) is None:
            return (), True
        words = open_control(self._io, self._paths.control)
        if words is None:
            return (), True
        recovers = words[words_of.GROUP_STATE] in (words_of.GROUP_RECOVERING, words_of.GROUP_DOWN)
        return identity_of(words.cells), not recovers

    @property
    def settled(self) -> bool:
        """False while a group recovers: the queues are in the making then."""
        return self.state()[1]

    @property
    def reader(self) -> StoreReader:
        """A reader of what there is now. Raises StoreAccessError when there is no store."""
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

    def queues(self, selection: Selection) -> dict[Queue, Bounds] | None:
        """The wanted queues that there are; None while a group recovers."""
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

    def _queues(self, selection: Selection) -> dict[Queue, Bounds]:
        queues = self.reader.reading.queues
        topics = [topic for topic in queues.topics() if selection.takes_topic(topic)]
        return {
            (topic, queue_id): Bounds(bounds.min_offset, bounds.max_offset)
            for topic, queue_id, bounds in each_queue(queues, topics)
            if selection.takes(topic, queue_id)
        }

    def deleted(self) -> Mapping[Queue, int]:
        """By queue at which offset it ended when it was deleted."""
        found = read_deleted(self._io, self._paths, running=self.reader.running)
        return {queue: next_offset for queue, (_place, next_offset) in found.items()}

    def anchor(self, queue: Queue, offset: int) -> Anchor | None:
        """The message at an offset, None when there is none."""
        reader = self.reader
        stored_ms = reader.store_time_ms(*queue, offset)
        if stored_ms < 0:
            return None
        try:
            units = as_units(reader.reading.files.read_units(*queue, offset, 1))
        except FileNotFoundError:
            return None
        return Anchor(*queue, offset, int(units["physical_offset"][0]), stored_ms) if len(units) else None

    def selected(self, selection: Selection) -> StoreSelection:
        """What tasks must know of the store. Sizes of files change with the store only."""
        options = self._options or self.reader.options
        return StoreSelection(
            self.uri,
            options.mapped_file_size_commit_log,
            selection,
            queue_file_bytes=options.consume_queue_file_bytes,
        )


class LiveStores:
    """All stores that paths mean; new ones are found as they appear."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._stores: dict[str, LiveStore] = {}

    def close(self) -> None:
        """Let go of files."""
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def all(self) -> list[LiveStore]:
        """The stores that there are. Raises StoreAccessError when a path means none."""
        return [self._stores.setdefault(uri, LiveStore(uri)) for uri in find_stores(self._paths)]

    def get(self, uri: str) -> LiveStore:
        """The store with a name that a checkpoint has."""
        return self._stores.setdefault(uri, LiveStore(uri))

    def queues(self, selection: Selection) -> dict[str, dict[Queue, Bounds]]:
        """The wanted queues of all stores but those that recover."""
        found = ((store.uri, store.queues(selection)) for store in self.all())
        return {uri: queues for uri, queues in found if queues is not None}

    def all_queues(self, selection: Selection) -> dict[str, dict[Queue, Bounds]]:
        """The wanted queues of all stores, as soon as none recovers. Raises StoreAccessError when one takes long."""
        deadline = time.monotonic() + _WAIT_S
        while len(found := self.queues(selection)) < len(stores := self.all()):
            if time.monotonic() > deadline:
                busy = next(store.uri for store in stores if store.uri not in found)
                raise StoreAccessError(f"{busy}: its group still recovers after {_WAIT_S:g} s")
            time.sleep(_POLL_S)
        return found
