"""A store that contains only committed offsets, in files of mqproc and of RocketMQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets.offset_store import OffsetStore


class OffsetFolder:
    """The folder of a store, and the events reported by its offset store."""

    def __init__(self, root: Path) -> None:
        self.io = StoreIO()
        self.paths = StorePaths(root)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def open(self, *, successor: bool = False, io: StoreIO | None = None) -> OffsetStore:
        io = io or self.io
        return OffsetStore(io, self.paths, io, self._report, successor=successor)

    def _report(self, event: str, **figures: Any) -> None:
        self.events.append((event, figures))

    def event_names(self) -> list[str]:
        return [event for event, _figures in self.events]

    def json(self) -> dict[tuple[str, str, int], int]:
        """The offsets that RocketMQ would read."""
        found = consumer_offset_json.load(self.io, self.paths).progress
        return {(at.group, at.topic, at.queue_id): at.offset for at in found}

    def write_json(self, text: str) -> None:
        self.paths.config.mkdir(exist_ok=True, parents=True)
        self.paths.consumer_offsets.write_text(text)


def offsets_of(offsets: OffsetStore, group: str) -> dict[tuple[str, int], int]:
    return {(at.topic, at.queue_id): at.offset for at in offsets.of(group)}


@pytest.fixture
def store(tmp_path: Path) -> OffsetFolder:
    return OffsetFolder(tmp_path / "store")
