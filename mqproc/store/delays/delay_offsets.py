"""`config/delayOffset.json`: how far each delay level's queue has been delivered.

    {"dataVersion": {…}, "offsetTable": {1: 12, 18: 3}, "mqproc": {"log": 4096}}

Keys of `offsetTable` are levels from 1 on, values the next queue offset. `mqproc.log` is ours and RocketMQ passes it
over: every delivery of a unit at or above those offsets lies at or above this position of the log, so a walk from there
on tells which of them were made. It is missing when RocketMQ wrote the file last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mqproc.io import StoreIO
from mqproc.names import DELAY_LEVELS
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json

NO_LOG_POSITION = -1


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
        value, remark = rocketmq_json.load(io, paths.delay_offsets)
        if not isinstance(value, dict):
            return cls(remark=remark)
        table = value.get("offsetTable") or {}
        offsets = {int(level): max(0, int(offset)) for level, offset in table.items()}
        known = {level: offset for level, offset in offsets.items() if 1 <= level <= DELAY_LEVELS}
        log = (value.get("mqproc") or {}).get("log", NO_LOG_POSITION)
        version = (value.get("dataVersion") or {}).get("counter", 0)
        return cls(known, log if isinstance(log, int) else NO_LOG_POSITION, remark, int(version))

    def save(self, io: StoreIO, paths: StorePaths, time_ms: int) -> None:
        """Replace the file. Raises OSError."""
        self.version += 1
        value: dict[str, Any] = {
            "dataVersion": {"counter": self.version, "stateVersion": 0, "timestamp": time_ms},
            "offsetTable": {str(level): offset for level, offset in sorted(self.offsets.items())},
            "mqproc": {"log": self.log},
        }
        rocketmq_json.save(io, paths.delay_offsets, value, integer_keys=True)
