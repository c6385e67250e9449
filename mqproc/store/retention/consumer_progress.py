"""How far consumer groups have come, as RocketMQ keeps it: `config/consumerOffset.json`.

    {"offsetTable": {"TOPIC@GROUP": {0:24,1:16}}, "dataVersion": …, "groupTopicMap": …}

The offset is that of the next message to consume. This module is all that knows the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json

_TABLE: Final = "offsetTable"
_SEPARATOR: Final = "@"
_INTEGER: Final = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Progress:
    """A group has consumed a queue's messages below `offset`."""

    group: str
    topic: str
    queue_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Messages [offset, minimum) of a queue went before the group had consumed them."""

    group: str
    topic: str
    queue_id: int
    offset: int
    minimum: int

    @property
    def messages(self) -> int:
        return self.minimum - self.offset


MinimumOf = Callable[[str, int], int | None]
"""A queue's first readable offset by topic and queue id; None for a queue that is not there."""


def skipped(progress: Iterable[Progress], minimum_of: MinimumOf) -> list[Skipped]:
    """What lies below the minima of what groups have not consumed."""
    found = []
    for at in progress:
        minimum = minimum_of(at.topic, at.queue_id)
        if minimum is not None and at.offset < minimum:
            found.append(Skipped(at.group, at.topic, at.queue_id, at.offset, minimum))
    return found


class ConsumerProgress:
    """The stored progress of one store's groups; nothing when no file is there."""

    def __init__(self, io: StoreIO, paths: StorePaths) -> None:
        self._io = io
        self._path = paths.consumer_offsets

    def load(self) -> list[Progress]:
        """Every group's progress in every queue. Raises CorruptStoreError, OSError."""
        return self._progress_in(self._read())

    def raise_to_minima(self, minimum_of: MinimumOf) -> list[Skipped]:
        """Correct progress that lies below a queue's minimum, durably; what was corrected.

        Raises CorruptStoreError, and OSError after which nothing is corrected.
        """
        value = self._read()
        found = skipped(self._progress_in(value), minimum_of)
        if found:
            for each in found:
                value[_TABLE][f"{each.topic}{_SEPARATOR}{each.group}"][str(each.queue_id)] = each.minimum
            rocketmq_json.save(self._io, self._path, value, integer_keys=True)
        return found

    def _read(self) -> dict[str, Any]:
        value, _remark = rocketmq_json.load(self._io, self._path)
        if value is None:
            return {}
        if not isinstance(value, dict) or not isinstance(value.get(_TABLE, {}), dict):
            raise CorruptStoreError(f"{self._path}: no {_TABLE} in it")
        return value

    def _progress_in(self, value: dict[str, Any]) -> list[Progress]:
        found = []
        for name, queues in value.get(_TABLE, {}).items():
            topic, separator, group = name.partition(_SEPARATOR)
            if not separator or not isinstance(queues, dict):
                raise CorruptStoreError(f"{self._path}: {_TABLE}: {name!r}: {queues!r}; expected TOPIC@GROUP: offsets")
            for queue_id, offset in queues.items():
                if not _INTEGER.fullmatch(queue_id) or type(offset) is not int:
                    place = f"{self._path}: {_TABLE}: {name!r}"
                    raise CorruptStoreError(f"{place}: {queue_id!r}: {offset!r}; expected queue id and offset")
                found.append(Progress(group, topic, int(queue_id), offset))
        return found
