"""`config/delayOffset.json`: how far each delay level's queue has been delivered.

    {"dataVersion": {…}, "offsetTable": {1: 12, 18: 3}, "mqproc": {"log": 4096}}

Keys of `offsetTable` are levels from 1 on, values the next queue offset. `mqproc.log` is ours and RocketMQ passes it
over: every delivery of a unit at or above those offsets lies at or above this position of the log, so a walk from there
on tells which of them were made. It is missing when RocketMQ wrote the file last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from mqproc.delay_levels import DELAY_LEVELS
from mqproc.io import StoreIO
from mqproc.names import SCHEDULE_TOPIC
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.final_syncs import Syncing
from mqproc.store.groups.offsets_json import Progress

NO_LOG_POSITION = -1
_TABLE = "offsetTable"
# Python may refuse to convert more digits than these.
_LEVEL: Final = re.compile(r"\d{1,640}")


@dataclass(slots=True)
class DelayOffsets:
    """What the file says; `log` is NO_LOG_POSITION where it does not say it."""

    offsets: dict[int, int] = field(default_factory=dict)
    log: int = NO_LOG_POSITION
    remark: str = ""
    version: int = 0

    @classmethod
    def load(cls, io: StoreIO, paths: StorePaths) -> DelayOffsets:
        """The file or its copy; nothing delivered when there is none. Raises CorruptStoreError."""
        value, remark = rocketmq_json.load(io, paths.delay_offsets, _levels_in)
        if value is None:
            return cls(remark=remark)
        offsets = _levels_in(value)
        known = {level: max(0, offset) for level, offset in offsets.items() if 1 <= level <= DELAY_LEVELS}
        own, version = value.get("mqproc"), value.get("dataVersion")
        log = own.get("log", NO_LOG_POSITION) if isinstance(own, dict) else NO_LOG_POSITION
        counter = version.get("counter", 0) if isinstance(version, dict) else 0
        return cls(
            known,
            log if isinstance(log, int) else NO_LOG_POSITION,
            remark,
            counter if isinstance(counter, int) else 0,
        )

    def save(self, io: StoreIO, syncs: Syncing, paths: StorePaths, time_ms: int) -> None:
        """Replace the file. Raises OSError, FailedSyncError."""
        for _ in self.save_steps(io, syncs, paths, time_ms):
            pass

    def save_steps(self, io: StoreIO, syncs: Syncing, paths: StorePaths, time_ms: int) -> Iterator[None]:
        """The same in steps, so that others have a turn in between; what is saved is of the first one."""
        self.version += 1
        value: dict[str, Any] = {
            "dataVersion": {"counter": self.version, "stateVersion": 0, "timestamp": time_ms},
            _TABLE: {str(level): offset for level, offset in sorted(self.offsets.items())},
            "mqproc": {"log": self.log},
        }
        keeps_old, path = not self.remark, paths.delay_offsets
        yield from rocketmq_json.save_steps(io, syncs, path, value, integer_keys=True, keeps_old=keeps_old)
        self.remark = ""


def levels(io: StoreIO, paths: StorePaths) -> dict[int, int]:
    """The next queue offset of every level that the file names, known here or not. Raises CorruptStoreError."""
    value, _remark = rocketmq_json.load(io, paths.delay_offsets, _levels_in)
    return {} if value is None else _levels_in(value)


def waiting(io: StoreIO, paths: StorePaths) -> list[Progress]:
    """How far the levels have been delivered, as if they were a group. Raises CorruptStoreError."""
    offsets = levels(io, paths)
    return [
        Progress("of the delay levels", SCHEDULE_TOPIC, level - 1, offsets.get(level, 0))
        for level in range(1, DELAY_LEVELS + 1)
    ]


def lower(io: StoreIO, paths: StorePaths, end_of: Callable[[int], int | None]) -> dict[int, int]:
    """Set levels that are beyond their queue's end (None: unknown) back to it; all else in the file stays.

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
    """Raises ValueError for what cannot be used."""
    table = rocketmq_json.table_in(value, _TABLE)
    for level, offset in table.items():
        if not _LEVEL.fullmatch(level) or type(offset) is not int:
            raise ValueError(f"{_TABLE}: {level!r}: {offset!r}; expected level and offset")
    return {int(level): offset for level, offset in table.items()}
