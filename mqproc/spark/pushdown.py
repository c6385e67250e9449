"""`filterPushdown=true`: the query's own filters move into the kernel. For one query per `load()` only.

Spark keeps the planned read on the object behind a `load()`, and the filters of the query that was planned last with
it: another query of the same DataFrame gets rows that are filtered by the first one's. So this is never the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from mqproc.spark.columns import sources_of, types_of
from mqproc.spark.options import Selection
from mqproc.spark.source import BatchReader

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_NULL = frozenset({"topic", "queue_id"})
# What stands in a column for bytes that are no text, which the kernel compares as they are.
_REPLACED = "\ufffd"


class PushdownReader(BatchReader):
    """A reader that takes filters of topic, queue, tag and store time upon itself."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        sources = dict(sources_of(self.read_options.naming, list(types_of(self.read_options.naming))))
        selection = self.read_options.selection
        left: list[Filter] = []
        for each in filters:
            narrowed = _narrowed(selection, sources, each)
            if narrowed is None:
                left.append(each)
            else:
                selection = narrowed
        self.read_options = dataclasses.replace(self.read_options, selection=selection)
        return left


def _narrowed(selection: Selection, sources: dict[str, str], of: Filter) -> Selection | None:
    """The selection with one filter more; None when Spark must apply it."""
    attribute: tuple[str, ...] = getattr(of, "attribute", ())
    source = sources.get(attribute[0]) if len(attribute) == 1 else None
    if isinstance(of, IsNotNull):
        return selection if source in _NEVER_NULL else None
    if isinstance(of, EqualTo | In):
        return _among(selection, source, (of.value,) if isinstance(of, EqualTo) else tuple(of.value))
    if source == "store_timestamp" and isinstance(of, GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return _in_time(selection, of)
    return None


def _among(selection: Selection, source: str | None, values: tuple[Any, ...]) -> Selection | None:
    # A null is equal to nothing, and a tag that is empty is one that is not there: Spark's own business.
    if not values or None in values or "" in values or _REPLACED in "".join(map(str, values)):
        return None
    if source == "topic" and not selection.topics:
        return dataclasses.replace(selection, topics=values)
    if source == "queue_id" and not selection.queue_ids:
        return dataclasses.replace(selection, queue_ids=values)
    if source == "tag" and not selection.tags:
        return dataclasses.replace(selection, tags=values)
    return None


def _in_time(
    selection: Selection, of: GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
) -> Selection | None:
    """Stores keep whole milliseconds; the first one that a filter takes, or leaves out, is rounded up to."""
    if not isinstance(of.value, datetime):
        return None
    value = of.value if of.value.tzinfo else of.value.replace(tzinfo=UTC)
    ms, rest = divmod(value - _EPOCH, timedelta(milliseconds=1))
    ms += bool(rest)
    if not rest and isinstance(of, GreaterThan | LessThanOrEqual):
        ms += 1
    if isinstance(of, GreaterThan | GreaterThanOrEqual):
        return dataclasses.replace(selection, begin_ms=max(selection.begin_ms, ms))
    return dataclasses.replace(selection, end_ms=min(selection.end_ms, ms))
