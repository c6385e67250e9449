"""Progress that fits its queues: raised to their minima after retention.

What was raised is told, and counted in `mqproc/unconsumed.json`: by group and topic, messages that went before the
group had consumed them, since ever. So is what simple consumers have received, and would get again if it was there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import msgspec

from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.final_syncs import Syncing
from mqproc.store.groups.progress import GroupProgress, Tell

Unconsumed = dict[str, dict[str, int]]


class QueueOffsets(Protocol):
    """A queue table, or what stands for one."""

    def find(self, topic: str, queue_id: int) -> int: ...

    def min_offset(self, number: int) -> int: ...


def read_unconsumed(io: StoreIO, paths: StorePaths) -> Unconsumed:
    """What was counted so far; nothing when it cannot be read: it tells nothing that the store needs."""
    try:
        return io.read_json(paths.unconsumed, Unconsumed)
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


class Corrections:
    """Corrects one store's progress. Owns the word `retention_unconsumed` and the file."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        syncs: Syncing,
        words: Words,
        queues: QueueOffsets,
        progress: GroupProgress,
        tell: Tell,
    ) -> None:
        self._io = io
        self._syncs = syncs
        self._paths = paths
        self._words = words
        self._queues = queues
        self._progress = progress
        self._tell = tell
        self._went: Counter[tuple[str, str]] = Counter()
        """By group and topic, messages that are not counted yet."""

    def raise_to_minima(self) -> int:
        """Correct and count; how many offsets were below. Raises OSError."""
        found = self._progress.raise_to_minima(self._minimum_of)
        for each in found:
            self._went[each.group, each.topic] += each.messages
        self.count()
        return len(found)

    def went(self, group: str, topic: str, queue_id: int, offsets: Iterable[int]) -> None:
        """Have those of a queue's messages counted that lie below its minimum: they were received, and not done."""
        minimum = self._minimum_of(topic, queue_id)
        if minimum is not None and (messages := sum(offset < minimum for offset in offsets)):
            self._went[group, topic] += messages

    def count(self) -> int:
        """Tell and count what went; of how many groups and topics. Raises OSError."""
        if not self._went:
            return 0
        went, self._went = self._went, Counter()
        total = read_unconsumed(self._io, self._paths)
        by_group: Counter[str] = Counter()
        for (group, topic), messages in went.items():
            topics = total.setdefault(group, {})
            topics[topic] = topics.get(topic, 0) + messages
            by_group[group] += messages
        self._words.add(words_of.RETENTION_UNCONSUMED, by_group.total())
        for group, messages in by_group.items():
            self._tell("messages went before a group had consumed them", group=group, messages=messages)
        text = msgspec.json.format(msgspec.json.encode(total), indent=1)
        self._syncs.write_file_atomically(self._paths.unconsumed, text, 0o600)
        return len(went)

    def _minimum_of(self, topic: str, queue_id: int) -> int | None:
        number = self._queues.find(topic, queue_id)
        return self._queues.min_offset(number) if number >= 0 else None
