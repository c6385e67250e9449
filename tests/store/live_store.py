"""A store under work in this process: the append engine, dispatch and reading over one folder and one set of words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mqproc.layout import control as words_of
from mqproc.layout.record_codec import decode_records
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.types import BatchResult, StoredMessage
from tests.store.engine import Engine

FIRST_MS = 1_700_000_000_000
SMALL: dict[str, Any] = {"max_hash_slot_num": 100, "max_index_num": 400, "mapped_file_size_consume_queue": 2000}
EVERYTHING = 1 << 30


class LiveStore:
    """An engine with dispatch and reading. `options` are changes of those of a small store."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.engine = Engine(root, **(SMALL | options))
        engine = self.engine
        self.options = engine.options
        self.files = ConsumeQueueFiles(
            engine.io, engine.paths.consume_queue, self.options.consume_queue_file_bytes, write=True
        )
        self.index = IndexFiles(
            engine.io, engine.paths.index, self.options.max_hash_slot_num, self.options.max_index_num
        )
        self.dispatching = Dispatch(engine.io, self.options, engine.table, engine.segments, self.files, self.index)
        view = self.view()
        self.reading = StoreQueries(engine.io, engine.paths, self.options, view)

    def view(self) -> WordsView:
        """What may be seen now."""
        return WordsView(self.engine.words, self.engine.table, sync_flush=self.options.sync_flush)

    def append(self, topic: str, bodies: Sequence[bytes], time_ms: int = FIRST_MS, **changes: Any) -> BatchResult:
        """Append a frame and publish it; where its messages are."""
        appender = self.engine.appender
        answer = appender.add(self.engine.plan(topic, bodies, **changes), time_ms)
        appender.write_out()
        appender.publish()
        count = len(bodies)
        offsets = answer[: 16 * count].view(np.int64)
        return BatchResult(topic, answer[16 * count :].view(np.int32), offsets[count:], offsets[:count], time_ms)

    def dispatch(self) -> None:
        """Bring queues and index to the end of what may be seen of the log."""
        words = self.engine.words
        confirmed = self.view().visible().end
        while words[words_of.DISPATCHED] < confirmed:
            step = self.dispatching.step(words[words_of.DISPATCHED], confirmed)
            assert not step.stuck
            words[words_of.INDEX_FILE_MS] = self.index.commit().file_ms
            words[words_of.DISPATCHED] = step.position

    def messages(self, topic: str, queue_id: int = 0, offset: int = 0, count: int = 1024) -> list[StoredMessage]:
        """What pulls find from a queue offset on, `count` messages at most."""
        found: list[StoredMessage] = []
        while len(found) < count:
            pulled = self.reading.pull(topic, queue_id, offset, count - len(found), EVERYTHING)
            if not pulled.count:
                break
            found += decode_records(pulled.records)
            offset = pulled.next_offset
        return found

    def overwrite(self, physical_offset: int, data: bytes) -> None:
        """Change bytes of the log on disk."""
        start = self.engine.segments.start_of(physical_offset)
        with self.engine.segments.path(start).open("r+b") as file:
            file.seek(physical_offset - start)
            file.write(data)

    def close(self) -> None:
        self.reading.close()
        self.dispatching.close()
