"""The cq-flusher: makes ConsumeQueues durable and moves their mark."""

from __future__ import annotations

from typing import Final

from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.roles.dispatched_flusher import DispatchedFlusher, FlusherWords
from mqproc.roles.loop import RoleContext
from mqproc.store.page_cache import QueuePages
from mqproc.store.queue_flush import ConsumeQueueFlush
from mqproc.store.queue_table import QueueTable

_WORDS: Final = FlusherWords(
    sync_errno=words_of.CQ_SYNC_ERRNO,
    synced=words_of.CQ_SYNCED,
    syncs=words_of.CQ_SYNCS,
    passes=words_of.CQ_PASSES,
    pass_ns=words_of.CQ_PASS_NS,
    forced_passes=words_of.CQ_FORCED_PASSES,
    forced_ns=words_of.CQ_FORCED_NS,
    durations=figures.QUEUE_FLUSHES,
)


class CqFlusher(DispatchedFlusher):
    """The role."""

    name = words_of.CQ_FLUSHER

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context, _WORDS, "consumequeue")
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues)
        file_bytes = options.consume_queue_file_bytes
        self._files = ConsumeQueueFlush(io, self._syncs, paths.consume_queue, file_bytes, self._table)
        behind_bytes = options.page_cache_behind_bytes
        self._pages = QueuePages(io, paths.consume_queue, file_bytes, self._table, behind_bytes)

    def close(self) -> None:
        self._table.close()

    def _flush(self, least_pages: int, dispatched: int, timestamp_ms: int) -> int:
        with self._context.heart.busy(words_of.STATE_SYNCING):
            done = self._files.pass_(least_pages)
            # Another role's sync may have failed during the pass.
            if done.complete and not self._syncs.ended():
                self._move_mark(dispatched, timestamp_ms, {checkpoint_layout.LOGICS_TIMESTAMP: timestamp_ms})
        self._pages.let_go(dispatched, self._files.synced)
        return done.synced_files
