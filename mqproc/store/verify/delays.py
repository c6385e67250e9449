"""The delay levels that a store's units were made with: units of the schedule topic hold times that follow from them.

RocketMQ's `messageDelayLevel` may say other delays than its defaults, and no file of a store tells them; units do.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from mqproc.delay_levels import DELAY_LEVELS, DELAY_MS_MAX, DELAY_STEP_MS, delays_ms_of
from mqproc.io import StoreIO
from mqproc.kernels.record_check import stored_at_ms
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.names import SCHEDULE_TOPIC
from mqproc.store.consume_queue import as_units
from mqproc.store.verify.inventory import Inventory, Queue
from mqproc.store.verify.log_views import LogViews
from mqproc.store.verify.queue_pass import read_queue

_INT32_MAX: Final = 2**31 - 1
_SAMPLE_UNITS: Final = 7


def delays_of(io: StoreIO, inventory: Inventory, configured: str) -> tuple[int, ...]:
    """The levels' delays in ms: the configured ones, but of a level that has none of its units the one that most have.

    A delay that no configuration could say, since it has no whole seconds, is one unit's damage.
    """
    delays = list(delays_ms_of(configured))
    views = LogViews(io, inventory)
    for topic, queue_id in sorted(inventory.queues):
        if topic != SCHEDULE_TOPIC or queue_id >= DELAY_LEVELS:
            continue
        found = _sampled_delays(io, inventory, views, (topic, queue_id))
        usual = delays[min(queue_id, len(delays) - 1)]
        if found and usual not in found:
            delays += [delays[-1]] * (queue_id + 1 - len(delays))
            delays[queue_id] = found.most_common(1)[0][0]
    views.close()
    return tuple(delays)


def _sampled_delays(io: StoreIO, inventory: Inventory, views: LogViews, queue: Queue) -> Counter[int]:
    """Delays in ms of some units spread over a queue, and how many have each."""
    delays: Counter[int] = Counter()
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
                delay = int(timed[index]["tags_code"]) - stored
                if stored >= 0 and 0 <= delay <= DELAY_MS_MAX and delay % DELAY_STEP_MS == 0:
                    delays[delay] += 1
        if delays:
            break
    return delays
