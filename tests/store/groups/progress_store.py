"""A store's folder with nothing in it but the progress of groups, for the tests of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets.offset_store import OffsetStore


class Store:
    """A store's folder and who writes its progress."""

    def __init__(self, root: Path) -> None:
        self.io = StoreIO()
        self.paths = StorePaths(root)
        self.told: list[tuple[str, dict[str, Any]]] = []

    def open(self, *, successor: bool = False, io: StoreIO | None = None) -> OffsetStore:
        io = io or self.io
        return OffsetStore(io, self.paths, io, self.tell, successor=successor)

    def tell(self, event: str, **figures: Any) -> None:
        self.told.append((event, figures))

    def json(self) -> dict[tuple[str, str, int], int]:
        """What RocketMQ would read."""
        found = consumer_offset_json.load(self.io, self.paths).progress
        return {(at.group, at.topic, at.queue_id): at.offset for at in found}

    def write_json(self, text: str) -> None:
        self.paths.config.mkdir(exist_ok=True, parents=True)
        self.paths.consumer_offsets.write_text(text)


def as_dict(progress: OffsetStore, group: str) -> dict[tuple[str, int], int]:
    return {(at.topic, at.queue_id): at.offset for at in progress.of(group)}
