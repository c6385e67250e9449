"""Requests of `read`. Importing this module needs pyarrow (`pip install mqproc[arrow]`)."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqproc.arrow.reading import PAGE_MESSAGES, QueueSpan, ReadPage, ReadPlan, TopicRead, after, with_times
from mqproc.client import requests
from mqproc.client.requests import Call, Steps
from mqproc.types import PullStatus
from mqproc.wire.operations import PullRequest

if TYPE_CHECKING:
    from mqproc.client._sync.connection_pool import Connections


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

    def parse(answer: Any, payload: memoryview) -> ReadPage:
        status = requests.status_of(answer)
        return plan.page(at, status, payload, answer.count, answer.next_offset, answer.detail)

    return requests.pull_as(_request(plan, at, max_bytes), parse)


def _request(plan: ReadPlan, at: QueueSpan, max_bytes: int) -> PullRequest:
    count = min(PAGE_MESSAGES, at.end - at.begin)
    place = plan.read.topic, at.queue_id, at.begin, count, min(max_bytes, requests.PULL_BYTES)
    return requests.pull_request(*place, plan.read.selection)


# Reading ahead, of a synchronous client: the store reads a page while the client makes the batches of the one before.

_KEPT_S: Final = 10.0
"""An answer that is not fetched for so long is asked for again: the server ends connections that are not read."""


class _Pulled(NamedTuple):
    """An answer without its batches; `records` are valid until the next one is parsed."""

    status: PullStatus
    records: memoryview
    messages: int
    next_offset: int
    detail: str


def pages(client: Connections, plan: ReadPlan, max_bytes: int) -> Generator[ReadPage]:
    """Read the pages of a plan in order. Raises as `ReadPlan.page`."""
    return _PageReader(client, plan, max_bytes).pages()


class _PageReader:
    """Reads the pages of a plan once."""

    def __init__(self, client: Connections, plan: ReadPlan, max_bytes: int) -> None:
        self._client = client
        self._plan = plan
        self._max_bytes = max_bytes
        self._records = memoryview(bytearray())
        self._asked_s = 0.0
        self._ahead = True
        """Whether the caller takes pages fast enough to ask ahead."""
        self._kept_s = min(_KEPT_S, client.timeout_s / 2)
        self._pipeline = client.pipeline()

    def pages(self) -> Generator[ReadPage]:
        """The pages, each asked for before the one before it is made."""
        spans = iter([span for span in self._plan.spans if span.begin < span.end])
        at = next(spans, None)
        try:
            self._ask(at)
            while at is not None:
                pulled = self._answer(at)
                rest = after(at, pulled.next_offset)
                following = rest if rest.begin < rest.end else next(spans, None)
                self._ask(following)
                yield self._plan.page(at, *pulled)
                at = following
        finally:
            self._pipeline.close()

    def _call(self, at: QueueSpan) -> Call[_Pulled]:
        return requests.pull_as(_request(self._plan, at, self._max_bytes), self._parse)

    def _parse(self, answer: Any, payload: memoryview) -> _Pulled:
        # The connection's buffer may get the next answer before these records are decoded.
        if len(self._records) < len(payload):
            self._records = memoryview(bytearray(len(payload)))
        records = self._records[: len(payload)]
        records[:] = payload
        return _Pulled(requests.status_of(answer), records, answer.count, answer.next_offset, answer.detail)

    def _ask(self, at: QueueSpan | None) -> None:
        if at is not None and self._ahead:
            self._asked_s = time.monotonic()
            self._pipeline.start(self._call(at))

    def _answer(self, at: QueueSpan) -> _Pulled:
        if not self._ahead:
            return self._client.run(self._call(at))
        # A forked process cannot read its parent's answer.
        if self._pipeline.usable and time.monotonic() <= self._asked_s + self._kept_s:
            found: _Pulled = self._pipeline.finish()
            return found
        self._ahead = False
        self._pipeline.close()
        return self._client.run(self._call(at))
