"""Planted bugs: one changed line of the product each. The harness must catch them all.

The source is changed while it is imported, in this process only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType


@dataclass(frozen=True, slots=True)
class Plant:
    """In `module`, `line` becomes `bug`. The line must occur exactly once."""

    module: str
    line: str
    bug: str
    seed: int
    """First seed to try: a story that has caught the bug. `--plants` reports another one if it does now."""


PLANTS = {
    "answer without the sync": Plant(
        "mqproc.roles.writer.role",
        "            self._appender.sync()",
        "            pass",
        seed=0,
    ),
    "publish before the bytes are written": Plant(
        "mqproc.roles.writer.role",
        "            self._appender.write_out()",
        "            self._appender.publish(); self._appender.write_out()",
        seed=0,
    ),
    "names are not synced": Plant(
        "mqproc.io.store_io", "        self.sync_folder(target.parent)", "        pass", seed=2
    ),
    "a cut tail stays as it is": Plant(
        "mqproc.store.recovery.log",
        "                cleared = zero_tail(self._io, fd, found.end - base)",
        "                cleared = 0",
        seed=2,
    ),
    "segments after the end stay": Plant(
        "mqproc.store.recovery.log",
        "            if start > found.end:",
        "            if False:",
        seed=2,
    ),
    "flushed is published without a sync": Plant(
        "mqproc.store.commitlog.flush",
        "            self._sync(synced, written)",
        "            pass",
        seed=7,
    ),
    "a new writer clears nothing": Plant(
        "mqproc.store.commitlog.takeover", "    if reserved_end > written:", "    if False:", seed=22
    ),
    "a new writer counts nothing": Plant(
        "mqproc.store.commitlog.takeover",
        "    latest_ms = restore_next_offsets(segments, table, words[control.TABLE_AT], written)",
        "    latest_ms = 0",
        seed=8,
    ),
    "index entries twice after a restart": Plant(
        "mqproc.roles.dispatcher",
        "                index.roll_back(committed(self._words))",
        "                committed(self._words)",
        seed=44,
    ),
    "queues' and index's marks run ahead of the log's": Plant(
        "mqproc.roles.flushers",
        "        position = min(dispatched, self._context.control.flushed)",
        "        position = dispatched",
        seed=7,
    ),
    "the queues' mark moves though files are dirty": Plant(
        "mqproc.roles.flushers",
        "                if done.complete:",
        "                if True:",
        seed=23,
    ),
    "the log's mark runs ahead of flushed": Plant(
        "mqproc.store.commitlog.flush",
        "        if not self._mark.move(flushed, timestamp_ms):",
        "        if not self._mark.move(words[control.WRITTEN], timestamp_ms):",
        seed=22,
    ),
    "the checkpoint confirms unflushed records": Plant(
        "mqproc.store.commitlog.flush",
        "                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: flushed,",
        "                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: words[control.WRITTEN],",
        seed=7,
    ),
    "a record that has lost its CRC is taken for whole": Plant(
        "mqproc.store.recovery.log",
        "            if whole_only"
        " and (bare := scan.find_without_crc(view, position, int(self._out[scan.STOPPED_AT]))) >= 0:",
        "            if False:",
        seed=74,
    ),
    "damage is cut as if it were torn": Plant(
        "mqproc.store.recovery.log",
        "            if next_record is None or not (found.end < durable_end or found.end in known_holes):",
        "            if True:",
        seed=9,
    ),
    "readers do not look at CRCs": Plant(
        "mqproc.store.read.unit_walk",
        "    verify: int = VERIFY_ALL",
        "    verify: int = 0",
        seed=31,
    ),
    "recovery leaves queues open": Plant(
        "mqproc.store.recovery.recovery",
        "        opened.callback(self._queues.close)",
        "        pass",
        seed=0,
    ),
    "a failed sync is tried again": Plant(
        "mqproc.store.sync_guard",
        "        self._words[self._errno_word] = number",
        "        pass",
        seed=32,
    ),
    "index files are trusted above their mark": Plant(
        "mqproc.store.index.files",
        "            kept = self._rebuild_file(name, floor, mark, store_timestamp_ms)",
        "            kept = self._rebuild_file(name, floor, 1 << 62, store_timestamp_ms)",
        seed=2,
    ),
    "a commit is answered and its message not stored": Plant(
        "mqproc.roles.transactions.coordinator",
        "        self._writes.store([new], stored, lambda error: self._refuse_end(request, half, error))",
        "        stored(-1)",
        seed=7,
    ),
    "a commit by a former owner is accepted": Plant(
        "mqproc.roles.groups.members",
        "        return of is not None and (of.member_id, of.epoch) == (member_id, epoch)",
        "        return of is not None",
        seed=444,
    ),
    "the offset passes received messages before their check points": Plant(
        "mqproc.roles.pop.receivers",
        "        self._writes.store([_message_of(found) for found in points], stored, refused)",
        "        self._pass(found); self._writes.store([_message_of(found) for found in points], stored, refused)",
        seed=2,
    ),
    "a start skips received messages in the order of the revive queues": Plant(
        "mqproc.roles.pop.receivers",
        "        for found in sorted(self._open, key=lambda found: found.key):",
        "        for found in sorted(self._open, key=lambda found: found.key, reverse=True):",
        seed=92,
    ),
    "an acknowledgement is answered and not stored": Plant(
        "mqproc.roles.pop.receivers",
        "        self._writes.store([self._ack_of(found, offsets) for found, offsets in acks], stored, refused)",
        "        stored(-1)",
        seed=6,
    ),
    "a task of the sink does not look for rows stored before": Plant(
        "mqproc.spark.sink",
        "                self._stored = self._count_stored(self._stored)",
        "                pass",
        seed=92,
    ),
    "a task of the sink looks before all rows are indexed": Plant(
        "mqproc.spark.sink",
        "                    wait_for_index(self._client, self._patience)",
        "                    pass",
        seed=119,
    ),
    "retention deletes what groups have not consumed": Plant(
        "mqproc.store.recovery.recovery",
        "        maker = compat.maker_of(io, paths)",
        "        maker = Maker.ROCKETMQ",
        seed=1,
    ),
    "a group with a failed sync seems ready": Plant(
        "mqproc.ipc.health",
        "    if failed := control_words.sync_errno(words):",
        "    if (failed := control_words.sync_errno(words)) < 0:",
        seed=5,
    ),
}


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, plant: Plant) -> None:
        super().__init__(name, path)
        self._plant = plant

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source, never the cached code."""
        source = self.get_data(self.path).decode()
        lines = source.split("\n")
        if lines.count(self._plant.line) != 1:
            raise ImportError(f"{fullname} has {lines.count(self._plant.line)} lines {self._plant.line!r}, not one")
        changed = "\n".join(self._plant.bug if line == self._plant.line else line for line in lines)
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, plant: Plant) -> None:
        self._plant = plant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._plant.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert found is not None
        assert found.origin is not None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, found.origin, self._plant))


def plant(name: str) -> None:
    """Plant a bug before the first import of its module."""
    bug = PLANTS[name]
    assert bug.module not in sys.modules, f"{bug.module} is imported already"
    sys.meta_path.insert(0, _Finder(bug))
