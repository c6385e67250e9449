"""The append engine over an empty folder, with words in plain memory: what tests of the engine begin with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.sync_guard import SyncGuard

BORN_HOST = bytes([127, 0, 0, 1, 0, 0, 0x13, 0x88])
STORE_HOST = bytes([192, 168, 1, 2, 0, 0, 0x2A, 0x9F])


class Engine:
    """One store's log, its writer and its words. Segments are made when one is full, up to `segments_max`."""

    def __init__(
        self,
        root: Path,
        *,
        io: StoreIO | None = None,
        words: Words | None = None,
        segments_max: int = 64,
        **options: Any,
    ) -> None:
        settings = {"mapped_file_size_commit_log": 65536, "max_message_size": 32768} | options
        self.options = Options(**settings)
        self.io = io or StoreIO()
        self.paths = StorePaths(root)
        for folder in (self.paths.commit_log, self.paths.own, self.paths.marks, self.paths.index):
            self.io.make_folder(folder)
        self.table = QueueTable.create(self.io, self.paths.queues, 1024)
        self.segments = LogSegments(self.io, self.paths.commit_log, self.options.mapped_file_size_commit_log)
        self.words = words or Words(bytearray(words_of.FILE_SIZE))
        self.syncs = SyncGuard(self.io, self.paths, self.words, words_of.WRITER, words_of.WRITER_SYNC_ERRNO)
        self.segments_max = segments_max
        self.make_segment(0)
        self.appender = CommitLogAppender(
            self.syncs, self.options, self.words, self.table, self.segments, STORE_HOST, self.make_segment
        )

    def make_segment(self, start: int) -> None:
        """What the writer role waits for: the segment, made when it is not there."""
        if self.words[words_of.SEGMENTS_READY_END] > start:
            return
        size = self.segments.segment_size
        if start // size >= self.segments_max:
            raise OSError(28, "No space left on device")
        make_segment(self.io, self.paths, start, size)
        self.words[words_of.SEGMENTS_READY_END] = start + size

    def use_words(self, words: Words) -> None:
        """Go on with the words of a control file."""
        self.words = words
        self.appender = CommitLogAppender(
            self.syncs, self.options, words, self.table, self.segments, STORE_HOST, self.make_segment
        )

    def plan(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        queues: int = 4,
        **changes: Any,
    ) -> AppendPlan:
        """A frame as the writer role would make it."""
        numbers = [self.table.create_queue(topic, queue_id) for queue_id in range(queues)]
        parts = [struct.pack(f"<{len(bodies)}I", *map(len, bodies)), b"".join(bodies)]
        columns = [0, 4 * len(bodies)]
        for texts in (keys, tags):
            if texts is None:
                columns += [-1, -1]
                continue
            encoded = [text.encode() for text in texts]
            at = sum(map(len, parts))
            parts += [struct.pack(f"<{len(encoded)}H", *map(len, encoded)), b"".join(encoded)]
            columns += [at, at + 2 * len(encoded)]
        columns += [-1, -1, -1, -1, -1, -1, -1, -1]
        magic, topic_block = topic_fields(topic)
        of_frame = {name: changes.pop(name) for name in list(changes) if name in AppendPlan.__struct_fields__}
        template: dict[str, Any] = {
            "magic": magic,
            "topic_block": topic_block,
            "queue_numbers": np.array(numbers, np.int64),
            "fixed_queue": -1,
            "parts": (b"", b"", b"", b""),
            "born_host": BORN_HOST,
        }
        frame: dict[str, Any] = {
            "template": AppendTemplate(**(template | changes)),
            "payload": np.frombuffer(bytearray(b"".join(parts)), np.uint8),
            "count": len(bodies),
            "columns": tuple(columns),
            "rotation": 0,
            "born_timestamp_ms": 1_700_000_000_000,
        }
        return AppendPlan(**(frame | of_frame))

    def append(
        self, topic: str, bodies: Sequence[bytes], time_ms: int = 1_700_000_000_001, **changes: Any
    ) -> np.ndarray:
        """Append and publish; returns the physical offsets int64[n]."""
        answer = self.appender.add(self.plan(topic, bodies, **changes), time_ms)
        self.appender.write_out()
        self.appender.publish()
        return answer[: 8 * len(bodies)].view(np.int64)

    @property
    def written(self) -> int:
        return self.words[words_of.WRITTEN]

    def log_bytes(self, start: int, stop: int) -> bytes:
        """Bytes of the log, over segment borders."""
        found = b""
        while start < stop:
            base = self.segments.start_of(start)
            end = min(stop, base + self.segments.segment_size)
            data = self.segments.path(base).read_bytes()
            found += data[start - base : end - base]
            start = end
        return found
