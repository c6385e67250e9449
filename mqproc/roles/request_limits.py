"""Request validation: decoded requests, limits of requests, deadlines of held requests."""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from mqproc.config import options as config
from mqproc.config.parse import socket_access
from mqproc.errors import BadRequestError, FilterSyntaxError, MqprocError
from mqproc.kernels.pack import packed
from mqproc.topic_names import FILTER_BYTES_MAX
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import FrameOptions
from mqproc.wire.server import ServerLimits

Payload = Sequence[memoryview]
Reply = tuple[FrameOptions, Payload]
_INTEGER_MAX: Final = 1 << 62


class PendingRequest(Protocol):
    """A request whose options are decoded."""

    connection: ServerConnection
    request_id: int
    operation: int
    options: Any
    answered: bool

    def answer(self, options: FrameOptions, payload: Payload = ()) -> None:
        """Send the answer."""

    def refuse(self, error: MqprocError) -> None:
        """Send the error and count the refusal."""


def within_limits(options: FrameOptions) -> FrameOptions:
    """Clamp numbers to 64 bits, check filters. Raises BadRequestError, FilterSyntaxError."""
    names, numbers_of, has_tags, has_cursor = _parts_of(type(options))
    if has_tags:
        _check_tags(options.tags)  # type: ignore[attr-defined]
    if has_cursor:
        _check_cursor(options.cursor)  # type: ignore[attr-defined]
    numbers = numbers_of(options)
    if not names or _fit(numbers):
        return options
    clamped = (min(max(number, -_INTEGER_MAX), _INTEGER_MAX) for number in numbers)
    return msgspec.structs.replace(options, **dict(zip(names, clamped, strict=True)))


@functools.cache
def _parts_of(kind: type[FrameOptions]) -> tuple[list[str], Callable[[FrameOptions], Sequence[int]], bool, bool]:
    """Integer fields, a getter for them, whether there are tags, and a cursor."""
    fields: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(kind)}
    names = [name for name, kind_of in fields.items() if kind_of is int]
    numbers_of: Callable[[FrameOptions], Any]
    if len(names) > 1:
        numbers_of = operator.attrgetter(*names)
    else:
        numbers_of = lambda options: [getattr(options, name) for name in names]  # noqa: E731
    return names, numbers_of, "tags" in fields, "cursor" in fields


def _fit(numbers: Sequence[int]) -> bool:
    return min(numbers) >= -_INTEGER_MAX and max(numbers) <= _INTEGER_MAX


def _check_tags(tags: list[str]) -> None:
    if tags and (size := sum(len(tag.encode()) for tag in tags)) > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)


def _check_cursor(cursor: list[int]) -> None:
    if cursor and not _fit(cursor):
        raise BadRequestError(f"cursor {cursor[:2]} is not a cursor of this store")


def answer_payload(options: FrameOptions, records: Payload) -> Payload:
    """Payload of an answer: records, or an array of messages if the request wants one."""
    object_bytes: int = getattr(options, "object_bytes", 0)
    if object_bytes <= 0 or not records:
        return records
    messages = packed(records, object_bytes)
    return records if messages is None else (messages,)


def client_limits(options: config.Options) -> ServerLimits:
    """Limits of a socket server for each of its clients."""
    return ServerLimits(
        connections=options.max_connections,
        frame_bytes=options.max_frame_bytes,
        output_bytes=options.client_output_bytes,
        frame_read_s=options.frame_read_timeout_ms / 1000,
        access=socket_access(options),
    )


Key = TypeVar("Key", bound=Hashable)
COMPACT_MIN: Final = 64
DUE_MAX: Final = 256


class TimerQueue(Generic[Key]):
    """Priority queue of deadlines in ns by key; rescheduling a key invalidates its old entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Key]] = []
        self._newest: dict[Key, int] = {}
        self._number = 0

    def set(self, key: Key, due_ns: int) -> None:
        """Schedule a key, replacing its earlier deadline."""
        self._number += 1
        self._newest[key] = self._number
        heapq.heappush(self._heap, (due_ns, self._number, key))
        self._compact()

    def forget(self, key: Key) -> None:
        self._newest.pop(key, None)
        self._compact()

    def pop_due(self, now_ns: int) -> list[Key]:
        """Remove and return keys that are due, earliest first: DUE_MAX, so that a step has an end."""
        due: list[Key] = []
        self._drop_superseded()
        while self._heap and self._heap[0][0] <= now_ns and len(due) < DUE_MAX:
            key = heapq.heappop(self._heap)[2]
            del self._newest[key]
            due.append(key)
            self._drop_superseded()
        return due

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until the earliest deadline, `at_most_s` at most."""
        self._drop_superseded()
        return min(at_most_s, max(0, self._heap[0][0] - now_ns) / 1e9) if self._heap else at_most_s

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._newest) + COMPACT_MIN:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _drop_superseded(self) -> None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_current(self, entry: tuple[int, int, Key]) -> bool:
        return self._newest.get(entry[2]) == entry[1]
