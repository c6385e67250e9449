"""Arguments of clients and store readers that select messages, checked."""

from __future__ import annotations

import datetime
from typing import Final, Literal

from mqproc.errors import BadRequestError, FilterSyntaxError
from mqproc.topic_names import check_sql, parse_tags
from mqproc.types import Filter, SqlFilter, TagFilter
from mqproc.util.arguments import Time, time_ms

TimeKind = Literal["store", "born"]
Selection = tuple[list[str], str]
"""The tags and the SQL92 text of a filter, both empty for all messages."""
EVERYTHING: Final[Selection] = ([], "")
TIME_MIN_MS: Final = -(1 << 62)
TIME_MAX_MS: Final = 1 << 62


def chosen(tags: str, filter: Filter | None) -> Selection:
    """Tags and SQL92 of a filter; `tags` is short for a TagFilter. Raises FilterSyntaxError.

    The server parses an SQL92 filter and refuses it with the same error.
    """
    if filter is None:
        return parse_tags(tags), ""
    if tags:
        raise BadRequestError("tags and filter are both given; tags is short for filter=TagFilter(…)")
    if isinstance(filter, TagFilter):
        return parse_tags(filter.expression), ""
    if not isinstance(filter, SqlFilter):
        raise BadRequestError(f"filter is a {type(filter).__name__}, neither TagFilter nor SqlFilter")
    return [], check_sql(filter.expression)


def is_sql(text: str) -> bool:
    """Whether a text is an SQL92 condition, other than a single word.

    A word may be a property or a tag.
    """
    if "||" in text or (len(text.split()) < 2 and not any(sign in text for sign in "<>=")):
        return False
    # Most programs have no such filter, and do not import the parser.
    from mqproc.filters.parser import parse

    try:
        parse(check_sql(text))
    except FilterSyntaxError:
        return False
    return True


def time_bounds(begin: Time, end: Time) -> tuple[int, int]:
    """Bounds in ms of begin ≤ time < end. Raises BadRequestError."""
    begin_ms, end_ms = time_ms(begin, TIME_MIN_MS), time_ms(end, TIME_MAX_MS)
    if end_ms < begin_ms:
        raise BadRequestError(f"the end {_moment_text(end_ms)} is before the begin {_moment_text(begin_ms)}")
    return begin_ms, end_ms


def _moment_text(moment_ms: int) -> str:
    """ISO 8601 in UTC; the number itself when it is outside the range of datetimes."""
    try:
        return datetime.datetime.fromtimestamp(moment_ms / 1000, datetime.UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(moment_ms)


def is_born(time: str) -> bool:
    """Whether a kind of time is the born time. Raises BadRequestError for another than "store"."""
    if not isinstance(time, str) or time not in ("store", "born"):
        raise BadRequestError(f"time is {repr(time)[:64]}, neither 'store' nor 'born'")
    return time == "born"
