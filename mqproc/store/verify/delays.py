"""How long a store's delay levels are: units of the schedule topic hold times that follow from them.

RocketMQ's `messageDelayLevel` may say other delays than its defaults, and no file of a store tells them; units do.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.delay_levels import DELAY_LEVELS, DELAYS_MS
from mqproc.io import StoreIO
from mqproc.kernels.record_check import stored_at_ms
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.names import SCHEDULE_TOPIC
from mqproc.store.consume_queue import as_units
from mqproc.store.verify.inventory import Inventory, Queue
from mqproc.store.verify.log_views import LogViews
from mqproc.store.verify.picture import Picture
from mqproc.store.verify.queue_pass import read_queue

_INT32_MAX: Final = 2**31 - 1
_SAMPLE_UNITS: Final = 7


def learned_shifts(io: StoreIO, picture: Picture) -> dict[Queue, int]:
    """By how much the delays of a store's levels differ from RocketMQ's defaults, by queue: as its own units tell."""
    shifts: dict[Queue, int] = {}
    views = LogViews(io, picture.inventory)
    for queue in picture.inventory.queues:
        if queue[0] != SCHEDULE_TOPIC:
            continue
        delays = _sampled_delays(io, picture.inventory, views, queue)
        if delays:
            usual = DELAYS_MS[min(queue[1], DELAY_LEVELS - 1)]
            shifts[queue] = max(set(delays), key=delays.count) - usual
    views.close()
    return shifts


def _sampled_delays(io: StoreIO, inventory: Inventory, views: LogViews, queue: Queue) -> list[int]:
    """Delays of some units spread over a queue, in ms."""
    delays: list[int] = []
    for _first, data, count in read_queue(io, inventory, queue):
        if data is None:
            continue
        units = as_units(data[: count * UNIT_SIZE])
        timed = units[(units["tags_code"] > _INT32_MAX) & (units["size"] != FILLER_SIZE) & (units["size"] > 0)]
        for index in np.linspace(0, len(timed) - 1, min(_SAMPLE_UNITS, len(timed))).astype(int).tolist():
            physical_offset = int(timed[index]["physical_offset"])
            base = views.start_of(physical_offset)
            view = views.view(base)
            if view is not None:
                stored = int(stored_at_ms(view, physical_offset - base, len(view), physical_offset))
                if stored >= 0:
                    delays.append(int(timed[index]["tags_code"]) - stored)
        if delays:
            break
    return delays
