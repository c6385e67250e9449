"""The index-flusher: makes index files durable and moves their mark; a filled file at once, when it is rung."""

from __future__ import annotations

from typing import Final

from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.roles.dispatched_flusher import DispatchedFlusher, FlusherWords
from mqproc.roles.loop import RoleContext
from mqproc.store.index_flush import IndexFlush, committed_state
from mqproc.store.page_cache import IndexPages

_WORDS: Final = FlusherWords(
    sync_errno=words_of.INDEX_SYNC_ERRNO,
    synced=words_of.INDEX_SYNCED,
    syncs=words_of.INDEX_SYNCS,
    passes=words_of.INDEX_PASSES,
    pass_ns=words_of.INDEX_PASS_NS,
    forced_passes=words_of.INDEX_FORCED_PASSES,
    forced_ns=words_of.INDEX_FORCED_NS,
    durations=figures.INDEX_FLUSHES,
)


class IndexFlusher(DispatchedFlusher):
    """The role."""

    name = words_of.INDEX_FLUSHER

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context, _WORDS, "index")
        options, io, paths = context.options, context.io, context.paths
        self._files = IndexFlush(io, self._syncs, paths.index)
        self._pages = IndexPages(io, paths.index, options.max_hash_slot_num, options.page_cache_behind_bytes)
        self._full_files = self._words[words_of.INDEX_FULL_FILES]

    def close(self) -> None:
        """Nothing is kept open between steps."""

    def _is_urgent(self) -> bool:
        seen, self._full_files = self._full_files, self._words[words_of.INDEX_FULL_FILES]
        return seen != self._full_files

    def _flush(self, least_pages: int, dispatched: int, timestamp_ms: int) -> int | None:
        state = committed_state(self._words)
        if state is None:
            return None
        with self._context.heart.busy(words_of.STATE_SYNCING):
            done = self._files.pass_(state, least_pages)
            # Another role's sync may have failed during the pass.
            if not self._syncs.ended():
                # RocketMQ's own index time is the end of the newest full file that is durable.
                self._store_checkpoint(
                    {checkpoint_layout.INDEX_TIMESTAMP: done.full_end_ms} if done.full_end_ms else {}
                )
                if done.complete:
                    self._move_mark(dispatched, timestamp_ms, {})
                    self._pages.let_go(dispatched, state.file_ms, state.items)
        return done.synced_files
