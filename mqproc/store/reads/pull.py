"""RocketMQ's getMessage: the next records of a queue from an offset on, with its statuses and next offsets.

Ours (`pull`) checks CRCs, compares tags themselves or evaluates a filter by properties, goes over file borders, steps
over damage, and looks at UNITS_MAX units and LOOK_BYTES_MAX of records at most when few match. `get_message` gives the
original's answers: tags by hash, no CRC, one ConsumeQueue file a call, 32 messages and 256 KiB at most, an empty queue
where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.errors import BadRequestError
from mqproc.kernels.record_check import VERIFY_NOTHING
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.message import PullStatus
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.passing import Passing, passing, subscribed
from mqproc.store.reads.queue_bounds import QueueBounds, Queues, RocketmqQueues
from mqproc.store.reads.unit_walk import NOT_COUNTED, Counts, Halt, Limits, Miss, Walk

UNITS_MAX = 1 << 20
"""Units that one pull looks at; a filter that matches nothing costs some milliseconds."""
LOOK_BYTES_MAX = 8 << 20
"""What records that one pull reads and that do not match may cost; see `Limits.look_bytes`."""

# Smaller wishes than this for an answer's size count as this, as in RocketMQ.
ROCKETMQ_BYTES_MIN = 100

_NO_RECORDS = np.empty(0, np.uint8)


class Pulled(msgspec.Struct, frozen=True):
    """One pull's answer: `count` records, one after the other, in `records` uint8[n]."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    count: int = 0
    records: NDArray[np.uint8] = msgspec.field(default_factory=lambda: _NO_RECORDS)
    detail: str = ""


class QueuePulls:
    """Pulls from the queues of one store."""

    def __init__(self, queues: Queues, files: ConsumeQueueFiles, records: LogRecords, options: Options) -> None:
        self._queues = queues
        self._rocketmq_queues = RocketmqQueues(queues, files)
        self._files = files
        self._records = records
        self._options = options

    def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int,
        max_bytes: int,
        tags: Sequence[str] = (),
        *,
        sql: str = "",
        rocketmq_limits: bool = False,
        counts: Counts = NOT_COUNTED,
    ) -> Pulled:
        """Records of a queue from `offset` on. The first record is handed out whatever its size.

        With `rocketmq_limits` this is `get_message`. `counts` gets pulls with records, and what they hand out.
        """
        if rocketmq_limits and sql:
            raise BadRequestError("RocketMQ's limits go with tags, not with a filter by properties")
        if rocketmq_limits:
            return self.get_message(topic, queue_id, offset, max_messages, max_bytes, "||".join(tags), counts)
        chosen = passing(topic, tuple(tags), sql)
        bounds = self._queues.bounds(topic, queue_id)
        if bounds is None:
            return Pulled(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        outside = out_of_bounds(offset, bounds)
        if outside is not None:
            return outside
        limits = Limits(
            messages=max(max_messages, 1),
            bytes=min(max(max_bytes, 1), self._options.max_pull_bytes),
            look_bytes=LOOK_BYTES_MAX,
        )
        walk = self._walk((topic, queue_id), bounds, offset, chosen, limits, counts)
        try:
            return self._pulled(walk, (topic, queue_id), bounds, offset, limits, filtered=bool(tags or sql))
        except BaseException:
            walk.uncount()
            raise

    def _pulled(
        self, walk: Walk, queue: tuple[str, int], bounds: QueueBounds, offset: int, limits: Limits, *, filtered: bool
    ) -> Pulled:
        # Without a filter more units than messages are never needed.
        stop = min(bounds.max_offset, offset + (UNITS_MAX if filtered else min(UNITS_MAX, limits.messages)))
        halt = walk.run(stop)
        if walk.miss is Miss.REMOVED and not walk.count:
            # Retention may just have moved the minimum.
            outside = out_of_bounds(offset, self._queues.bounds(*queue) or bounds)
            if outside is not None:
                return outside
        if halt is Halt.DONE and walk.miss is Miss.REMOVED and not walk.count:
            # Units of removed segments cost nothing: go on to the first one that has a record.
            stop = min(bounds.max_offset, offset + UNITS_MAX)
            halt = walk.run(stop)
        return self._answer(walk, halt, queue, bounds, stop)

    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int,
        max_bytes: int,
        expression: str = "*",
        counts: Counts = NOT_COUNTED,
    ) -> Pulled:
        """RocketMQ's own answer. `expression` is its subscription: `a || b`, or `*` for all."""
        bounds = self._rocketmq_queues.bounds(topic, queue_id)
        outside = out_of_bounds(offset, bounds)
        if outside is not None:
            return outside
        options = self._options
        limits = Limits(
            messages=max(min(max_messages, options.max_transfer_count_on_message_in_memory), 1),
            bytes=min(max(max_bytes, ROCKETMQ_BYTES_MIN), options.max_transfer_bytes_on_message_in_memory),
            verify=VERIFY_NOTHING,
            segment_by_segment=True,
        )
        walk = self._walk((topic, queue_id), bounds, offset, subscribed(expression), limits, counts)
        scan_units = -(-max(options.max_filter_message_size, max_messages * UNIT_SIZE) // UNIT_SIZE)
        stop = min(bounds.max_offset, offset + scan_units, self._files.following_file(offset))
        try:
            halt = walk.run(stop)
            while halt is Halt.DAMAGE:
                walk.pass_over_as_removed()
                halt = walk.run(stop)
            return self._answer(walk, halt, (topic, queue_id), bounds, stop)
        except BaseException:
            walk.uncount()
            raise

    def _walk(
        self,
        queue: tuple[str, int],
        bounds: QueueBounds,
        offset: int,
        chosen: Passing,
        limits: Limits,
        counts: Counts,
    ) -> Walk:
        return Walk(self._records, self._files, queue, bounds.number, offset, chosen, limits, counts)

    def _answer(self, walk: Walk, halt: Halt, queue: tuple[str, int], bounds: QueueBounds, stop: int) -> Pulled:
        count = walk.count
        if count:
            records = walk.gathered
            return Pulled(PullStatus.FOUND, walk.next_offset, bounds.min_offset, bounds.max_offset, count, records)
        detail = ""
        next_offset = walk.next_offset
        if halt is Halt.DAMAGE:
            status = PullStatus.CORRUPT
            detail = str(walk.step_over_damage(stop))
            next_offset = walk.next_offset
        elif halt is Halt.NO_UNITS:
            return self._without_units(queue, next_offset, bounds)
        else:
            removed = walk.miss is Miss.REMOVED
            status = PullStatus.MESSAGE_WAS_REMOVING if removed else PullStatus.NO_MATCHED_MESSAGE
        return Pulled(status, next_offset, bounds.min_offset, bounds.max_offset, detail=detail)

    def _without_units(self, queue: tuple[str, int], offset: int, bounds: QueueBounds) -> Pulled:
        """The ConsumeQueue file is not there: retention may have just moved the minimum, so look at it again."""
        again = self._queues.bounds(*queue) or bounds
        outside = out_of_bounds(offset, again)
        if outside is not None:
            return outside
        following = self._files.following_file(offset)
        return Pulled(PullStatus.OFFSET_FOUND_NULL, following, again.min_offset, again.max_offset)


def out_of_bounds(offset: int, bounds: QueueBounds) -> Pulled | None:
    """The answer to an offset outside a queue, None for one inside."""
    low, high = bounds.min_offset, bounds.max_offset
    if high == 0:
        return Pulled(PullStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
    if offset < low:
        return Pulled(PullStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return Pulled(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    if offset > high:
        return Pulled(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    return None
