"""A store whose messages are numbered: which ones an answer has is seen in their bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqproc.layout.record_codec import decode_records
from tests.store.live_store import FIRST_MS, LiveStore

FRAMES, PER_FRAME = 40, 25
COUNT = FRAMES * PER_FRAME


class Store(LiveStore):
    """Frame f is stored 100 ms after frame f − 1."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.offsets: list[int] = []

    def put(self, topic: str, frame: int, count: int = PER_FRAME, **changes: Any) -> None:
        numbers = range(frame * PER_FRAME, frame * PER_FRAME + count)
        columns: dict[str, Any] = {
            "rotation": frame * PER_FRAME % changes.get("queues", 4),
            "keys": [f"key-{number % 100} n{number}" for number in numbers],
            "tags": [f"Tag{number % 5}" for number in numbers],
        }
        bodies = [f"body {number}".encode() * 3 for number in numbers]
        found = self.engine.append(topic, bodies, FIRST_MS + 100 * frame, **(columns | changes))
        self.offsets += found.tolist()

    def damage(self, physical_offset: int, at: int, data: bytes) -> None:
        self.overwrite(physical_offset + at, data)


def numbers_of(records: Any) -> list[int]:
    """Which messages these are: the number in the body."""
    return [int(message.body.split(b"body ")[1]) for message in decode_records(records.data)]


def all_numbers(batches: Any) -> list[int]:
    return [number for part in batches.records for number in numbers_of(part)]
