"""Folders of ConsumeQueues: which queues there are, how long their files are, and removing them."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mqproc.errors import BadTopicError
from mqproc.io import Entry, Kind, StoreIO
from mqproc.layout.consume_queue import FILLER_SIZE, SIZE, TAGS_CODE, UNIT_SIZE
from mqproc.names import check_topic
from mqproc.paths import is_text, segment_start

REMOVE_TRIES: Final = 3
QUEUE_ID_MAX: Final = (1 << 31) - 1
# Names the newest list of its files, in each RocksDB.
_ROCKSDB_FILE: Final = "CURRENT"


def queues_on_disk(io: StoreIO, folder: Path) -> tuple[list[tuple[str, int]], list[Path]]:
    """(topic, queue id) of every folder of a queue below `folder`, and what else lies there and is passed over."""
    queues: list[tuple[str, int]] = []
    strays: list[Path] = []
    for topic in io.entries(folder):
        if not is_topic(topic):
            strays.append(folder / topic.name)
            continue
        for entry in io.entries(folder / topic.name):
            name = entry.name
            if entry.kind is Kind.FOLDER and is_queue_id(name):
                queues.append((topic.name, int(name)))
            else:
                strays.append(folder / topic.name / name)
    return queues, strays


def is_topic(entry: Entry) -> bool:
    """Whether an entry is a topic's folder: a name that is no UTF-8 is nobody's."""
    return entry.kind is Kind.FOLDER and is_text(entry.name)


def bars_topic(entry: Entry) -> bool:
    """Whether something else than a folder lies where a topic's would be made: nothing could be dispatched to that."""
    return entry.kind is not Kind.FOLDER and _is_topic_name(entry.name)


def bars_queue(entry: Entry) -> bool:
    """Whether something else than a folder lies in a topic's folder where a queue's would be made."""
    return entry.kind is not Kind.FOLDER and is_queue_id(entry.name)


def _is_topic_name(name: str) -> bool:
    try:
        check_topic(name)
    except BadTopicError:
        return False
    return True


def is_queue_id(name: str) -> bool:
    """Whether a folder's name is a queue's id, written as RocketMQ writes it; a record has 32 bits for it."""
    return name.isascii() and name.isdigit() and str(int(name)) == name and int(name) <= QUEUE_ID_MAX


def has_rocksdb_queues(io: StoreIO, folder: Path) -> bool:
    """Whether RocksDB has a store's queues (`storeType = defaultRocksDB`): its files lie there, and no topic does."""
    entries = io.entries(folder)
    return {_ROCKSDB_FILE} == {entry.name for entry in entries if entry.name == _ROCKSDB_FILE or is_topic(entry)}


def rocksdb_config(io: StoreIO, folder: Path) -> Path | None:
    """The first folder in a store's `config` where RocksDB has topics, groups or progress, None without any."""
    folders = sorted(folder / entry.name for entry in io.entries(folder) if entry.kind is Kind.FOLDER)
    return next((found for found in folders if io.entry(found / _ROCKSDB_FILE) is not None), None)


def adopted_file_bytes(io: StoreIO, folder: Path, configured: int) -> int:
    """The size that most ConsumeQueue files below `folder` have, the configured one where any has that.

    Lengths that are no whole units, or that a file's name contradicts, say nothing, nor does a file of our own that
    a crash left short: it ends with a filler.
    """
    sizes: Counter[int] = Counter()
    starts: set[int] = set()
    for queue, entry in files_of_queues(io, folder):
        start = segment_start(entry.name)
        if start is None:
            continue
        if entry.size == configured:
            return configured
        starts.add(start)
        if not _ends_with_filler(io, queue / entry.name, entry.size):
            sizes[entry.size] += 1
    fitting = [size for size in sizes if size > 0 and size % UNIT_SIZE == 0 and not any(s % size for s in starts)]
    return max(fitting, key=lambda size: (sizes[size], size)) if fitting else configured


def files_of_queues(io: StoreIO, folder: Path) -> Iterator[tuple[Path, Entry]]:
    """(a queue's folder, file) of every file of a queue."""
    for topic in io.entries(folder):
        if not is_topic(topic):
            continue
        for queue in io.entries(folder / topic.name):
            if queue.kind is Kind.FOLDER and is_queue_id(queue.name):
                path = folder / topic.name / queue.name
                yield from ((path, entry) for entry in io.entries(path) if entry.kind is Kind.FILE)


def _ends_with_filler(io: StoreIO, path: Path, size: int) -> bool:
    fd = io.open(path)
    try:
        last = io.pread(fd, UNIT_SIZE, max(0, size - UNIT_SIZE))
    finally:
        io.close(fd)
    return int.from_bytes(last[SIZE:TAGS_CODE], "big") == FILLER_SIZE


def remove_tree(io: StoreIO, folder: Path) -> None:
    """Remove a folder of ConsumeQueues with all that is in it, if it is there, though others may touch it meanwhile.

    Raises OSError when it cannot be done, or something new comes to lie there each time.
    """
    for tries_left in reversed(range(REMOVE_TRIES)):
        try:
            io.remove_folder(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not tries_left:
                raise
        else:
            return
