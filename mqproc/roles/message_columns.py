"""New messages as columns: what one frame to the writer has, without an object for each message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

FRAME_BYTES_MAX: Final = 4 << 20
FRAME_MESSAGES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Messages that a role adds, of one topic, sys flag, number of consumptions and born host.

    Bodies and properties lie one behind the other. `queue_ids` None lets the writer go round. What the other columns
    mean is told at `appender.NewMessage`.
    """

    topic: str
    sys_flag: int
    reconsume_times: int
    born_host: bytes
    body_lengths: NDArray[np.uint32]
    bodies: NDArray[np.uint8]
    property_lengths: NDArray[np.uint16]
    properties: NDArray[np.uint8]
    born_timestamps_ms: NDArray[np.int64]
    queue_ids: NDArray[np.int32] | None
    flags: NDArray[np.int32]
    prepared_transaction_offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.body_lengths)

    @property
    def size(self) -> int:
        """Bytes of bodies and properties."""
        return len(self.bodies) + len(self.properties)

    def chosen(self, which: NDArray[np.bool_]) -> MessageColumns:
        """Some of them, in the same order; `which` is bool[n]."""
        if which.all():
            return self
        return replace(
            self,
            body_lengths=self.body_lengths[which],
            bodies=self.bodies[np.repeat(which, self.body_lengths)],
            property_lengths=self.property_lengths[which],
            properties=self.properties[np.repeat(which, self.property_lengths)],
            born_timestamps_ms=self.born_timestamps_ms[which],
            queue_ids=None if self.queue_ids is None else self.queue_ids[which],
            flags=self.flags[which],
            prepared_transaction_offsets=self.prepared_transaction_offsets[which],
        )

    def parts(self, edges: Sequence[int]) -> Iterator[MessageColumns]:
        """Those from each edge up to the next one."""
        bodies = np.append(0, np.cumsum(self.body_lengths, dtype=np.int64))
        properties = np.append(0, np.cumsum(self.property_lengths, dtype=np.int64))
        for first, stop in itertools.pairwise(edges):
            yield replace(
                self,
                body_lengths=self.body_lengths[first:stop],
                bodies=self.bodies[bodies[first] : bodies[stop]],
                property_lengths=self.property_lengths[first:stop],
                properties=self.properties[properties[first] : properties[stop]],
                born_timestamps_ms=self.born_timestamps_ms[first:stop],
                queue_ids=None if self.queue_ids is None else self.queue_ids[first:stop],
                flags=self.flags[first:stop],
                prepared_transaction_offsets=self.prepared_transaction_offsets[first:stop],
            )

    def halves(self) -> list[MessageColumns]:
        """Those of the lower and of the higher half of their queues, in the same order; one part if all are of one."""
        if self.queue_ids is None:
            return [self]
        ids = np.unique(self.queue_ids)
        if len(ids) < 2:
            return [self]
        lower = self.queue_ids < ids[len(ids) // 2]
        return [self.chosen(lower), self.chosen(~lower)]

    def frames(self) -> Iterator[MessageColumns]:
        """The same in parts that each fit into a frame; a message alone may be larger."""
        if self.size <= FRAME_BYTES_MAX and len(self) <= FRAME_MESSAGES_MAX:
            return iter((self,))
        ends = np.cumsum(self.body_lengths.astype(np.int64) + self.property_lengths)
        edges = [0]
        while edges[-1] < len(self):
            first = edges[-1]
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + FRAME_BYTES_MAX, "right"))
            edges.append(min(max(stop, first + 1), first + FRAME_MESSAGES_MAX, len(self)))
        return self.parts(edges)
