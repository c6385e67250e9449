"""Opening a store of RocketMQ's in this process: recovered as `mqproc up` recovers it, then asked as the query role."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.reading import StoreReading
from mqproc.store.reads.store_views import WordsView
from mqproc.store.recovery.recovery import Recovery, adopt_sizes


@dataclass(frozen=True, slots=True)
class Opened:
    """A store that can be asked. `said` is what recovery reported, `holes` what it served around."""

    paths: StorePaths
    options: Options
    reading: StoreReading
    words: Words
    said: list[str]
    holes: list[tuple[int, int]]


@contextmanager
def recovered(root: Path, options: Options) -> Iterator[Opened]:
    """Recover the store at `root`, which is changed by it, and open it for reading."""
    io, paths, said = StoreIO(), StorePaths(root), list[str]()
    options = adopt_sizes(io, paths, options, said.append)
    words = Words(bytearray(words_of.FILE_SIZE))
    Recovery(io, paths, options, words, said.append, clean=not io.exists(paths.abort)).run()
    view = WordsView(words, QueueTable(io, paths.queues), sync_flush=False)
    reading = StoreReading(io, paths, options, view.queues, view.visible, view.newest_index_ms)
    try:
        yield Opened(paths, options, reading, words, said, _holes(paths))
    finally:
        reading.close()
        view.close()


def _holes(paths: StorePaths) -> list[tuple[int, int]]:
    if not paths.damage.exists():
        return []
    return [(hole["start"], hole["stop"]) for hole in json.loads(paths.damage.read_text())["holes"]]
