"""Request validation: requests with decoded options, and the limits of every request."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from mqproc.config import options as config
from mqproc.errors import BadRequestError, FilterSyntaxError
from mqproc.topic_names import FILTER_BYTES_MAX
from mqproc.wire.codec import FrameOptions
from mqproc.wire.connection import ServerConnection
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
    cut = (min(max(number, -_INTEGER_MAX), _INTEGER_MAX) for number in numbers)
    return msgspec.structs.replace(options, **dict(zip(names, cut, strict=True)))


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


def client_limits(options: config.Options) -> ServerLimits:
    """Limits of a socket server for each of its clients."""
    return ServerLimits(
        connections=options.max_connections,
        frame_bytes=options.max_frame_bytes,
        output_bytes=options.client_output_bytes,
        frame_read_s=options.frame_read_timeout_ms / 1000,
    )
