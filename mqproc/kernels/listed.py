"""Records at places that a queue's units name: which are what they must be, and which of those are wanted.

    select_listed(view, listed, numbers, offsets, …, positions, state)

`view` uint8[n] is a segment, BASE the log position of its byte 0. Indices of the state and what `tags` and `keys` mean
are `log_range`'s; AT is an index into `listed` here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.ahead import prefetch_bytes
from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.jit import kernel
from mqproc.kernels.log_range import (
    AT,
    BASE,
    BEGIN_MS,
    BYTES_MAX,
    CUT_BY_VIEW,
    END_MS,
    FOUND,
    FOUND_BYTES,
    FULL,
    LIMIT,
    STATE_SIZE,
    VERIFY,
    has_tag_and_key,
)
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.queue_lookup import find_queue
from mqproc.kernels.record_check import (
    REACHED_STOP,
    checked_size,
    signed_topic_length,
    store_timestamp_at,
    topic_length_at,
    topic_length_size,
)
from mqproc.layout import record

OTHER_PLACE = CUT_BY_VIEW + 2
"""Why select_listed stopped, beside record_check's reasons and FULL: the record is of another place in the queues."""

# Records lie apart, so the processor is told so many ahead where it reads next.
_AHEAD = 8
_AHEAD_BYTES = 256


@kernel
def _prefetch_record(view: Bytes, listed: Words, index: int, base: int) -> None:
    if index < listed.size:
        prefetch_bytes(view, int(listed[index]) - base, _AHEAD_BYTES)


@kernel
def _is_of(view: Bytes, at: int, number: int, queues: Bytes, cells: Words, slots: NDArray[np.int32]) -> bool:
    """Whether the record at `at`, whose sizes hold, is of the queue with that number in the table."""
    width = topic_length_size(view, at)
    length_at = topic_length_at(view, at)
    size = signed_topic_length(view, length_at, width)
    topic = length_at + width
    topic_hash = java_hash_utf8(view, topic, topic + size, 0)
    queue_id = load_be32(view, at + record.QUEUE_ID)
    return find_queue(queues, cells, slots, view, topic, size, topic_hash, queue_id) == number


@kernel
def select_listed(
    view: Bytes,
    listed: Words,
    numbers: Words,
    offsets: Words,
    queues: Bytes,
    cells: Words,
    slots: NDArray[np.int32],
    tags: Bytes,
    tag_ends: Words,
    keys: Bytes,
    key_ends: Words,
    positions: Words,
    state: Words,
) -> int:
    """Positions in the view of the wanted ones of the listed records into `positions` int64[m]; why it stopped.

    `listed` int64[n] are log positions, ascending; `numbers` int64[n] says of which queue of the table each must be,
    `offsets` int64[n] its offset there. REACHED_STOP: all have been looked at; FULL: more may follow at AT; any other
    reason says why the record at AT is not the listed one.
    """
    at = int(state[AT])
    base = int(state[BASE])
    limit = min(int(state[LIMIT]), view.size)
    begin_ms = int(state[BEGIN_MS])
    end_ms = int(state[END_MS])
    verify = int(state[VERIFY])
    bytes_max = int(state[BYTES_MAX])
    found = 0
    size = 0
    reason = REACHED_STOP
    while at < listed.size:
        _prefetch_record(view, listed, at + _AHEAD, base)
        place = int(listed[at]) - base
        total = checked_size(view, place, limit, base + place, verify)
        if total < 0:
            reason = -total
            break
        if load_be64(view, place + record.QUEUE_OFFSET) != offsets[at] or not _is_of(
            view, place, int(numbers[at]), queues, cells, slots
        ):
            reason = OTHER_PLACE
            break
        stored = load_be64(view, store_timestamp_at(view, place))
        if begin_ms <= stored < end_ms and has_tag_and_key(view, place, total, tags, tag_ends, keys, key_ends, state):
            if found == positions.size or (found > 0 and size + total > bytes_max):
                reason = FULL
                break
            positions[found] = place
            found += 1
            size += total
        at += 1
    state[AT] = at
    state[FOUND] = found
    state[FOUND_BYTES] = size
    return reason


def warm() -> None:
    """Compile or load this kernel."""
    nothing = np.zeros(0, np.uint8)
    words = np.zeros(STATE_SIZE, np.int64)
    none = words[:0]
    slots = np.zeros(1, np.int32)
    select_listed(nothing, none, none, none, nothing, words, slots, nothing, none, nothing, none, none, words)
