"""RocketMQ's checkpoint file: each flusher stores its words, recovery and tools read all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint as layout
from mqproc.store.sync_guard import Syncing


def read(io: StoreIO, path: Path) -> layout.Checkpoint:
    """The five words; zeros if the file is missing, short or a folder."""
    try:
        return layout.decode(io.read_file(path))
    except (FileNotFoundError, IsADirectoryError):
        return layout.Checkpoint()


def ensure(io: StoreIO, path: Path) -> None:
    """Create the file if it is missing or has another length, keeping its words."""
    if io.exists(path) and io.size_of(path) == layout.FILE_SIZE:
        return
    io.write_file_atomically(path, layout.encode(read(io, path)))


def store_words(io: StoreIO, path: Path, words: Mapping[int, int], syncs: Syncing) -> None:
    """Store words by their offsets and sync. Each word has one owner."""
    with io.opened(path, write=True) as fd:
        for offset, value in words.items():
            io.pwrite(fd, value.to_bytes(8, "big", signed=True), offset)
            io.crash_point("checkpoint.word_stored")
        syncs.sync(fd)
