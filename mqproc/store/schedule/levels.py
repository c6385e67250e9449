"""Offsets of the delay levels: `config/delayOffset.json`, the progress of delivery.

    {"dataVersion": {…}, "offsetTable": {1: 12, 18: 3}, "mqproc": {"log": 4096}}

Keys of `offsetTable` are levels from 1 on, values are next queue offsets. `mqproc.log`, which RocketMQ ignores, is a
log position below all deliveries of units at or above those offsets: a scan from there finds the deliveries that were
made. It is missing if RocketMQ wrote the file last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.sync_guard import Syncing
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.util.units import DELAY_LEVELS

NO_LOG_POSITION = -1
_TABLE = "offsetTable"
# Python refuses to convert more digits than this.
_LEVEL: Final = re.compile(r"\d{1,640}")


@dataclass(slots=True)
class DelayOffsets:
    """Content of the file; `log` is NO_LOG_POSITION if it is missing."""

    offsets: dict[int, int] = field(default_factory=dict)
    log: int = NO_LOG_POSITION
    remark: str = ""
    version: int = 0

    @classmethod
    def load(cls, io: StoreIO, paths: StorePaths) -> DelayOffsets:
        """Load the file or its copy; empty without either. Raises CorruptStoreError."""
        value, remark = rocketmq_json.load(io, paths.delay_offsets, _levels_in)
        if value is None:
            return cls(remark=remark)
        offsets = _levels_in(value)
        known = {level: max(0, offset) for level, offset in offsets.items() if 1 <= level <= DELAY_LEVELS}
        own, version = value.get("mqproc"), value.get("dataVersion")
        log = own.get("log", NO_LOG_POSITION) if isinstance(own, dict) else NO_LOG_POSITION
        counter = version.get("counter", 0) if isinstance(version, dict) else 0
        log = log if isinstance(log, int) else NO_LOG_POSITION
        return cls(known, log, remark, counter if isinstance(counter, int) else 0)

    def save(self, io: StoreIO, syncs: Syncing, paths: StorePaths, time_ms: int) -> None:
        """Replace the file. Raises OSError, FailedSyncError."""
        for _ in self.save_steps(io, syncs, paths, time_ms):
            pass

    def save_steps(self, io: StoreIO, syncs: Syncing, paths: StorePaths, time_ms: int) -> Iterator[None]:
        """`save` in steps, for cooperative callers; the content is fixed in the first one."""
        self.version += 1
        value: dict[str, Any] = {
            "dataVersion": {"counter": self.version, "stateVersion": 0, "timestamp": time_ms},
            _TABLE: {str(level): offset for level, offset in sorted(self.offsets.items())},
            "mqproc": {"log": self.log},
        }
        keeps_old, path = not self.remark, paths.delay_offsets
        yield from rocketmq_json.save_steps(io, syncs, path, value, integer_keys=True, keeps_old=keeps_old)
        self.remark = ""


def read_levels(io: StoreIO, paths: StorePaths) -> dict[int, int]:
    """Next queue offset of every level in the file, known or not. Raises CorruptStoreError."""
    value, _remark = rocketmq_json.load(io, paths.delay_offsets, _levels_in)
    return {} if value is None else _levels_in(value)


def level_progress(io: StoreIO, paths: StorePaths) -> list[CommittedOffset]:
    """Progress of the levels as committed offsets of a group. Raises CorruptStoreError."""
    offsets = read_levels(io, paths)
    return [
        CommittedOffset("of the delay levels", SCHEDULE_TOPIC, level - 1, offsets.get(level, 0))
        for level in range(1, DELAY_LEVELS + 1)
    ]


def lower_levels(io: StoreIO, paths: StorePaths, end_of: Callable[[int], int | None]) -> dict[int, int]:
    """Lower levels beyond their queue's end (None: unknown) to it, keeping the rest.

    Returns the ends of those levels. Raises CorruptStoreError, OSError.
    """
    value, remark = rocketmq_json.load(io, paths.delay_offsets, _levels_in)
    offsets = {} if value is None else _levels_in(value)
    ends = {level: end for level in offsets if (end := end_of(level)) is not None and end < offsets[level]}
    if ends:
        value[_TABLE] |= {str(level): end for level, end in ends.items()}
        rocketmq_json.save(io, io, paths.delay_offsets, value, integer_keys=True, keeps_old=not remark)
    return ends


def _levels_in(value: Any) -> dict[int, int]:
    """Parse the offsets. Raises ValueError for unusable offsets."""
    table = rocketmq_json.table_in(value, _TABLE)
    for level, offset in table.items():
        if not _LEVEL.fullmatch(level) or type(offset) is not int:
            raise ValueError(f"{_TABLE}: {level!r}: {offset!r}; expected level and offset")
    return {int(level): offset for level, offset in table.items()}
