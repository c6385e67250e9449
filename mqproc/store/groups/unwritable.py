"""Progress of consumer groups that can be read and not changed, as its file cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from mqproc.control_words import why_read_only
from mqproc.errors import DiskFullError, MqprocError, StoreReadOnlyError
from mqproc.store.groups.offsets_json import Progress

UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""What a full disk, a used up quota, or a file system that became read-only says."""


def refusal(error: OSError) -> MqprocError:
    """What a client is told of one of UNWRITABLE."""
    if error.errno == errno.EROFS:
        return StoreReadOnlyError(f"{why_read_only(errno.EROFS)}: {error}; run mqproc store repair")
    return DiskFullError(f"no room on the disk: {error}")


class UnwritableProgress:
    """Stands for a ProgressFile until one can be made. Every change raises the OSError that its making raised."""

    unsaved: Final = False
    reset_at = 0

    def __init__(self, progress: list[Progress], path: Path, error: OSError) -> None:
        self._progress: dict[str, dict[tuple[str, int], Progress]] = {}
        for at in progress:
            self._progress.setdefault(at.group, {})[at.topic, at.queue_id] = at
        self._path = path
        self._error = error

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        found = self._progress.get(group, {}).get((topic, queue_id))
        return found.offset if found is not None else None

    def groups(self) -> list[str]:
        return sorted(self._progress)

    def topics(self, group: str) -> list[str]:
        return sorted({topic for topic, _queue_id in self._progress.get(group, {})})

    def of(self, group: str) -> Iterator[Progress]:
        queues = self._progress.get(group, {})
        yield from (queues[place] for place in sorted(queues))

    def all(self) -> Iterator[Progress]:
        for group in self.groups():
            yield from self.of(group)

    def put(self, _group: str, _topic: str, _queue_id: int, _offset: int) -> NoReturn:
        self.refuse()

    def begin_anew(self, _group: str, _topic: str, _queue_id: int, _offset: int) -> NoReturn:
        self.refuse()

    def oldest_epoch(self, _group: str, _topic: str, _queue_id: int) -> int:
        return 0

    def forget(self, _group: str) -> NoReturn:
        self.refuse()

    def take_epoch(self, _above: int = 0) -> NoReturn:
        self.refuse()

    def close(self) -> None:
        """Nothing is open."""

    def refuse(self) -> NoReturn:
        """Raise what every change raises."""
        raise OSError(self._error.errno, f"{self._error.strerror}: progress of groups cannot change", str(self._path))
