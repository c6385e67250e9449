"""Where a stream stands: queue offsets by store, as Spark's checkpoint keeps them, and how a limit is shared.

    {"/stores/a": {"queues": {"orders": {"0": 23, "1": 19}},
                   "anchor": {"topic": "orders", "queue_id": 0, "queue_offset": 22, "physical_offset": 9180,
                              "store_timestamp_ms": 1700000000000}}}

A queue's offset is that of its next message. The anchor is a message that was read: it tells a store from another one
that has its place. Keys are sorted, since Spark compares offsets as texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mqproc.errors import BadRequestError
from mqproc.spark.options import Queue

Offsets = dict[Queue, int]
Place = tuple[str, Queue]
"""A queue of a store."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A message that a stream has read, by its place in its queue and in the log, with its store time."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_timestamp_ms: int

    @property
    def queue(self) -> Queue:
        return self.topic, self.queue_id


@dataclass(slots=True)
class StorePosition:
    """Where a stream stands in one store."""

    offsets: Offsets = field(default_factory=dict)
    anchor: Anchor | None = None


Position = dict[str, StorePosition]
"""By store, its path as the stream has found it."""


def to_json(position: Position) -> dict[str, Any]:
    """What Spark keeps."""
    return {uri: _store_json(position[uri]) for uri in sorted(position)}


def _store_json(of: StorePosition) -> dict[str, Any]:
    queues: dict[str, dict[str, int]] = {}
    for topic, queue_id in sorted(of.offsets):
        queues.setdefault(topic, {})[str(queue_id)] = of.offsets[topic, queue_id]
    return {"queues": queues} | ({} if of.anchor is None else {"anchor": asdict(of.anchor)})


def from_json(found: Mapping[str, Any]) -> Position:
    """What Spark has kept. Raises BadRequestError when it is none of ours."""
    try:
        return {uri: _store_position(of) for uri, of in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequestError(f"the checkpoint's offsets are none of mqproc's: {str(found)[:200]}: {error}") from None


def _store_position(of: Mapping[str, Any]) -> StorePosition:
    offsets = {
        (topic, int(queue_id)): int(offset)
        for topic, queues in of["queues"].items()
        for queue_id, offset in queues.items()
    }
    return StorePosition(offsets, Anchor(**of["anchor"]) if "anchor" in of else None)


def shared(limit: int, lags: Mapping[Any, int]) -> dict[Any, int]:
    """How many of `limit` messages each queue gives, in proportion to what waits there; together min(limit, all)."""
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {queue: limit * lag // total for queue, lag in lags.items()}
    # The rest goes to those that lost most by rounding down.
    by_loss = sorted(lags, key=lambda queue: (-(limit * lags[queue] % total), queue))
    for queue in by_loss[: limit - sum(shares.values())]:
        shares[queue] += 1
    return shares
