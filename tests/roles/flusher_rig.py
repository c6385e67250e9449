"""A recovered store, its words and a clock by hand, on which roles run step by step."""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path

import numpy as np

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.ipc.bell import EventBell
from mqproc.ipc.control import Control
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.roles.role import Heartbeat, RoleContext
from mqproc.store.commitlog.append import CommitLogAppender
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate, topic_fields
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles
from mqproc.store.recovery.recovery import Recovery
from tests.support.fakes import ManualClock
from tests.support.faulty_io import FaultyIO

# Appends and dispatch by the engine itself


HOST = bytes([127, 0, 0, 1, 0, 0, 0, 9])


def append_and_dispatch(
    io: StoreIO,
    paths: StorePaths,
    options: Options,
    words: Words,
    count: int,
    topic: str = "T",
    properties: bytes = b"",
) -> None:
    """Append, flush (in words) and dispatch `count` messages with one key to queue 0 of a topic."""
    table = QueueTable(io, paths.queues, write=True)
    segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)

    def next_segment(start: int) -> None:
        if not segments.path(start).exists():
            make_segment(io, paths, start, segments.segment_size)

    appender = CommitLogAppender(io, options, words, table, segments, HOST, next_segment)
    appender.add(plan(table, count, topic, properties), 1_700_000_000_000)
    appender.write_out()
    appender.publish()
    end = words[words_of.WRITTEN]
    words[words_of.FLUSHER_SYNCED] = end
    queues = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, write=True)
    index = IndexFiles(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    dispatch = Dispatch(io, options, table, segments, queues, index)
    while (position := words[words_of.DISPATCHED]) < end:
        words[words_of.DISPATCHED] = dispatch.step(position, end).position
    sequence = words[words_of.COMMIT_SEQUENCE] + 1
    words[words_of.COMMIT_INDEX_MS[sequence & 1]] = dispatch.index_commit.file_ms
    words[words_of.COMMIT_INDEX_ITEMS[sequence & 1]] = dispatch.index_commit.count
    words[words_of.COMMIT_SEQUENCE] = sequence
    words.add(words_of.INDEX_FULL_FILES, index.full_files)
    dispatch.close()
    appender.close()


def plan(table: QueueTable, count: int, topic: str, properties: bytes) -> AppendPlan:
    keys = [b"k%d" % number for number in range(count)]
    columns = [struct.pack(f"<{count}I", *[4] * count), b"body" * count]
    columns += [struct.pack(f"<{count}H", *map(len, keys)), b"".join(keys)]
    key_lengths = 8 * count
    magic, topic_block = topic_fields(topic)
    template = AppendTemplate(
        magic=magic,
        topic_block=topic_block,
        queue_numbers=np.array([table.create_queue(topic, 0)], np.int64),
        fixed_queue=0,
        parts=(b"", b"", b"", properties),
        born_host=HOST,
    )
    return AppendPlan(
        template,
        np.frombuffer(bytearray(b"".join(columns)), np.uint8),
        count=count,
        columns=(0, 4 * count, key_lengths, key_lengths + 2 * count, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
        rotation=0,
        born_timestamp_ms=1_700_000_000_000,
    )


class Rig:
    """The context of roles; `options` override those of a small store."""

    def __init__(self, root: Path, **options: object) -> None:
        self.io = FaultyIO()
        self.clock = ManualClock()
        self.paths = StorePaths(root)
        self.io.make_folder(self.paths.own, 0o700)
        self.control = Control.create(self.io, self.paths, self.clock, os.getpid())
        sizes = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 2000}
        self.options = Options(**(sizes | options))  # type: ignore[arg-type]
        clean = not self.paths.abort.exists()
        Recovery(self.io, self.paths, self.options, self.control.words, lambda line: None, clean=clean).run()
        self.bells = {role: self._bell(role) for role in words_of.ROLES}
        self.io.tried()

    def _bell(self, role: str) -> EventBell:
        """Close with its last user: a process runs hundreds of tests."""
        bell = EventBell(self.control.cells, words_of.role_word(role, "sleeping"))
        weakref.finalize(bell, os.close, bell.fileno())
        return bell

    def context(self, role: str) -> RoleContext:
        heartbeat = Heartbeat(self.control, role, self.clock)
        return RoleContext(
            role, self.paths, self.options, self.control, self.io, self.clock, self.bells, {}, 1, heartbeat
        )

    def dispatch(self, messages: int) -> None:
        """Store and dispatch messages of one queue, as the writer and the dispatcher would."""
        append_and_dispatch(self.io, self.paths, self.options, self.control.words, messages)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))

    def taken(self, folder: str) -> int:
        """Count the files of a folder synced since the last call; syncfs counts as one."""
        count = sum(path.endswith("*") or (f"/{folder}/" in path and path[-1] != "/") for path in self.io.synced)
        self.io.synced.clear()
        return count
