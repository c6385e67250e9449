"""Requests of `read`. Importing this module needs pyarrow (`pip install mqproc[arrow]`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqproc.arrow.reading import PAGE_MESSAGES, QueueSpan, ReadPage, ReadPlan, TopicRead, with_times
from mqproc.client import requests
from mqproc.client.requests import Call, Steps


def plan(read: TopicRead, store: Path) -> Steps[ReadPlan]:
    """Find the offsets that a read begins and ends at."""
    spans = read.spans((yield requests.queues(read.topic)))
    if read.times is not None and not read.is_born:
        bounds = []
        for queue_id, _begin, _end in spans:
            first = yield requests.offset_at_ms(read.topic, queue_id, read.begin_ms)
            last = yield requests.offset_at_ms(read.topic, queue_id, read.end_ms - 1, upper=True)
            bounds.append((first, last))
        spans = with_times(spans, bounds)
    return ReadPlan(read, spans, store)


def page(plan: ReadPlan, at: QueueSpan, max_bytes: int) -> Call[ReadPage]:
    """The next page of a plan, from an offset of a queue on."""
    count = min(PAGE_MESSAGES, at.end - at.begin)
    place = plan.read.topic, at.queue_id, at.begin, count, min(max_bytes, requests.PULL_BYTES)
    request = requests.pull_request(*place, plan.read.selection)

    def parse(answer: Any, payload: memoryview) -> ReadPage:
        status = requests.status_of(answer)
        return plan.page(at, status, payload, answer.count, answer.next_offset, answer.detail)

    return requests.pull_as(request, parse)
