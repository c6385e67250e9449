"""What parked records say of their time: read by place, a few properties of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mqproc.io import StoreIO
from mqproc.kernels.record_check import VERIFY_NOTHING, checked_size
from mqproc.layout import properties as names
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.record import BODY
from mqproc.layout.record_codec import fixed_of, topic_places
from mqproc.names import TIMER_TOPIC
from mqproc.store.consume_queue import as_units
from mqproc.store.verify.inventory import Inventory
from mqproc.store.verify.log_views import LogViews
from mqproc.store.verify.queue_pass import read_queue

_TOPIC = TIMER_TOPIC.encode()
_LET_GO_AFTER = 4096


class ParkedTime(NamedTuple):
    """A record of the timer's topic. `out_ms` None: it names no time or no topic, so it is never delivered."""

    size: int
    out_ms: int | None
    cancels: bool


class TimerRecords:
    """Records of one store's log that wait, or waited, for their time."""

    def __init__(self, io: StoreIO, inventory: Inventory) -> None:
        self._views = LogViews(io, inventory)
        self._read = 0

    def at(self, physical_offset: int) -> ParkedTime | None:
        """The record there; None when none of the timer's topic begins there."""
        base = self._views.start_of(physical_offset)
        view = self._views.view(base)
        place = physical_offset - base
        if view is None or place >= len(view):
            return None
        size = int(checked_size(view, place, len(view), physical_offset, VERIFY_NOTHING))
        if size <= 0:
            return None
        self._read += 1
        if self._read % _LET_GO_AFTER == 0:
            self._views.let_go_all()
        return _parked(bytes(view[place : place + size]))

    def close(self) -> None:
        self._views.close()


def _parked(record: bytes) -> ParkedTime | None:
    """Sizes hold: the record was checked."""
    fixed = fixed_of(record)
    more = len(fixed[9]) + len(fixed[11]) - 16
    topic, topic_end = topic_places(record, BODY + more + max(0, fixed[14]), fixed[1])
    if record[topic:topic_end] != _TOPIC:
        return None
    pairs = names.decode(record[topic_end + 2 :].decode("utf-8", "replace"))
    out = pairs.get(names.TIMER_OUT_MS, "")
    is_whole = out.isdigit() and pairs.get(names.REAL_TOPIC)
    return ParkedTime(len(record), int(out) if is_whole else None, bool(pairs.get(names.TIMER_DEL_UNIQKEY)))


def first_waiting(io: StoreIO, inventory: Inventory, read_ms: int) -> int:
    """The first queue offset whose message is due at `read_ms` or later; the queue's end when none is."""
    records, after = TimerRecords(io, inventory), 0
    try:
        for first, data, count in read_queue(io, inventory, (TIMER_TOPIC, 0)):
            if data is None:
                continue
            units = as_units(data[: count * UNIT_SIZE])
            # What was never written would lead to the log's first record.
            places = np.where(units["size"] > 0, units["physical_offset"], -1)
            for index, place in enumerate(places.tolist()):
                parked = records.at(place) if place >= 0 else None
                if parked is None:
                    continue
                if parked.out_ms is not None and parked.out_ms >= read_ms:
                    return first + index
                after = first + index + 1
        return after
    finally:
        records.close()
