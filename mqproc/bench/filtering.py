"""`mqproc bench filter`: how fast queues are searched for the few messages that match a filter."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final

from mqproc.bench.clients import TIMEOUT_S, counters_of
from mqproc.bench.load import Messages, Recorder, Shape, topic_name
from mqproc.bench.modes import LOADER
from mqproc.bench.runs import Bench, Run, Settings
from mqproc.client import Batch, Client, core
from mqproc.message import Filter, SqlFilter, TagFilter

_FRAME_MESSAGES: Final = 1000
# Of a frame's tags each is the tag of as many messages.
_TAGS: Final = 100
_REGIONS: Final = ("north", "south", "east", "west")
_PASSES_TAG: Final = "tag-7"
_PASSES_SQL: Final = {"price": "15.25", "region": _REGIONS[0]}

FILTERS: Final[dict[str, Filter]] = {
    "tag": TagFilter(_PASSES_TAG),
    "sql": SqlFilter("price BETWEEN 10.5 AND 19.5 AND region IN ('north', 'south')"),
}


def filters(bench: Bench, settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """Consumers look through the loaded queues again and again, with a filter that 1 message in 100 passes."""
    shape = settings.shape
    bench.create_topics(shape.topics, shape.queues)
    load_tagged(bench, shape, settings.messages)
    bench.await_dispatch()
    found: dict[str, Any] = {}
    for name in names:
        starts = [(seek, (bench.store, shape, name)) for _ in range(settings.producers)]
        with Run(bench, starts, replace(settings, messages=0)) as run:
            result = run.measure("looked through", shape.size)
        settings.say(f"{name}: " + result.figures.line("looked through"))
        found[name] = result.to_json()
    return {"filter": found}


def load_tagged(bench: Bench, shape: Shape, messages: int) -> None:
    """Each frame's messages have every tag in turn; its price and region are 1 in 100 times in the filter's range.

    Each queue's last message passes all filters: who reads with one gets to the queue's end, and need not wait there.
    """
    maker = Messages(replace(shape, batch=_FRAME_MESSAGES), LOADER)
    tags = [f"tag-{number % _TAGS}" for number in range(_FRAME_MESSAGES)]

    def batches() -> Iterator[Batch]:
        for turn in range(-(-messages // _FRAME_MESSAGES)):
            price = 15.25 if turn % 50 == 0 else 100.25 + turn
            properties = {"price": f"{price}", "region": _REGIONS[turn // 50 % len(_REGIONS)]}
            bodies, keys = maker.bodies(_FRAME_MESSAGES), maker.keys(_FRAME_MESSAGES)
            maker.passed(_FRAME_MESSAGES)
            yield Batch(topic_name(turn % shape.topics), bodies, keys=keys, tags=tags, properties=properties)
        for number in range(shape.topics):
            bodies, keys = maker.bodies(shape.queues), maker.keys(shape.queues)
            maker.passed(shape.queues)
            yield Batch(
                topic_name(number), bodies, keys, _PASSES_TAG, queue_ids=range(shape.queues), properties=_PASSES_SQL
            )

    with Client(bench.store, timeout=TIMEOUT_S) as client:
        for _ in client.send_batches(batches(), in_flight=4):
            pass


def seek(store: Path, shape: Shape, name: str, index: int, memory_name: str, result: Path) -> None:
    """Pull with a filter, queue after queue; what counts is every message that was looked at."""
    memory = SharedMemory(memory_name)
    recorder = Recorder(counters_of(memory, index))
    with Client(store, timeout=TIMEOUT_S) as client:
        queues = deque((info.topic, info.queue_id) for info in client.queues() if info.max_offset > 0)
        offsets = dict.fromkeys(queues, 0)
        while not recorder.stopped:
            queue = queues[0]
            queues.rotate(-1)
            started_ns = time.monotonic_ns()
            found = client.pull(*queue, offsets[queue], shape.batch, max_bytes=core.PULL_BYTES, filter=FILTERS[name])
            looked_at = found.next_offset - offsets[queue]
            recorder.add(started_ns, looked_at, looked_at * shape.size)
            offsets[queue] = found.next_offset if found.next_offset < found.max_offset else 0
    recorder.save(result)
    del recorder
    memory.close()
