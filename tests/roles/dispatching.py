"""Appending and dispatching by the engine itself, publishing what the roles would."""

from __future__ import annotations

import struct

import numpy as np

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.commitlog.append import CommitLogAppender
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate, topic_fields
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles

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
    """`count` messages with one key each to queue 0 of a topic: written, flushed (in words), dispatched."""
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
