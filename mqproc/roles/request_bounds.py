"""Bounds that hold for the options of every request to the query role."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError, FilterSyntaxError
from mqproc.names import FILTER_BYTES_MAX
from mqproc.wire.operations import Options

_INTEGER_MAX: Final = 1 << 62


def bounded(options: Options) -> Options:
    """The options with numbers that fit 64-bit arithmetic. Raises BadRequestError, FilterSyntaxError."""
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
def _parts_of(kind: type[Options]) -> tuple[list[str], Callable[[Options], Sequence[int]], bool, bool]:
    """What is looked at: the numbers by name, how to get all of them at once, whether there are tags, or a cursor."""
    fields: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(kind)}
    names = [name for name, kind_of in fields.items() if kind_of is int]
    numbers_of: Callable[[Options], Any]
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
        raise BadRequestError(f"cursor {cursor[:2]} is none of ours")
