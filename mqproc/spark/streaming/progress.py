"""A query's progress as that of a consumer group: `mqproc group lag` shows it, and retention can wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mqproc.client import Client
from mqproc.errors import (
    NoSuchQueueError,
    NotRunningError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
    StaleOffsetError,
    TopicNotFoundError,
)
from mqproc.spark.streaming.offsets import Place, Position

# The progress is told again with the next micro-batch.
_PASSING: Final = (NotRunningError, RequestTimeoutError, RetryLaterError, SendOutcomeUnknownError)


def tell(group: str, position: Position, told: Mapping[Place, int]) -> dict[Place, int]:
    """Commit a position in the stores that run; what was told before, and now, by queue.

    Raises GroupInUseError when consumers have the queues.
    """
    done = dict(told)
    for uri, of in position.items():
        new = {queue: offset for queue, offset in of.offsets.items() if done.get((uri, queue)) != offset}
        if not new:
            continue
        try:
            with Client(uri) as client:
                for queue, offset in new.items():
                    _commit(client, group, *queue, offset)
                    done[uri, queue] = offset
        except _PASSING:
            continue
    return done


def _commit(client: Client, group: str, topic: str, queue_id: int, offset: int) -> None:
    try:
        client.groups.commit(group, topic, queue_id, offset)
    except (StaleOffsetError, NoSuchQueueError, TopicNotFoundError):
        # A query that is done again from an older checkpoint: what the group has is not taken back. Or one whose
        # checkpoint has a queue that was deleted.
        return
