"""What passes a filter, as the kernel that gathers records takes it.

tags     hash in the unit ──▶ the tag itself in the record
SQL92    hash in the unit, where the filter names the tags ──▶ properties of the record
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.filters.sql import CompiledFilter, compiled
from mqproc.kernels.views import as_kernel_array
from mqproc.layout.java_hash import java_hash
from mqproc.names import SCHEDULE_TOPIC

_NOTHING = np.empty(0, np.uint8)
_NO_WORDS = np.empty(0, np.int64)
# What Java's String.trim takes away.
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
# Hashes are 32 bits wide: no unit has this one.
_NO_HASH = 1 << 32


@dataclass(frozen=True, slots=True)
class Passing:
    """Records that pass: `codes` int64[k] by the hash in their units, then `tags` uint8 with `ends` int64[k] byte for
    byte, then `sql` by their properties. Empty codes, ends, and no `sql` let everything pass.
    """

    codes: NDArray[np.int64]
    tags: NDArray[np.uint8]
    ends: NDArray[np.int64]
    sql: CompiledFilter | None = None

    @property
    def program(self) -> NDArray[np.int64]:
        """The filter by properties for the kernel; empty for none."""
        return _NO_WORDS if self.sql is None else self.sql.program.words

    @property
    def texts(self) -> NDArray[np.uint8]:
        """The program's texts."""
        return _NOTHING if self.sql is None else self.sql.program.texts

    def scratch(self) -> NDArray[np.int64]:
        """Room for one evaluation at a time."""
        return _NO_WORDS if self.sql is None else np.zeros(self.sql.program.scratch_size, np.int64)


@functools.lru_cache(1024)
def passing(topic: str, tags: tuple[str, ...] = (), sql: str = "") -> Passing:
    """What passes some tags of a topic, or an SQL92 filter. Raises FilterSyntaxError, and BadRequestError for both."""
    if tags and sql:
        raise BadRequestError("a filter goes by tags or by properties, not by both")
    if sql:
        return _passing_sql(topic, compiled(sql))
    names = [tag.encode() for tag in tags]
    return Passing(
        codes=_codes(topic, tags) if tags else _NO_WORDS,
        tags=as_kernel_array(bytearray(b"".join(names))),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
    )


def _passing_sql(topic: str, sql: CompiledFilter) -> Passing:
    return Passing(_NO_WORDS if sql.tags is None else _codes(topic, sql.tags), _NOTHING, _NO_WORDS, sql)


def _codes(topic: str, tags: Iterable[str]) -> NDArray[np.int64]:
    """The hashes of tags, one that no unit has for no tag; empty for the schedule topic, whose units have the time to
    deliver at in their place.
    """
    if topic == SCHEDULE_TOPIC:
        return _NO_WORDS
    return np.array(sorted({java_hash(tag) for tag in tags} or {_NO_HASH}), np.int64)


@functools.lru_cache(1024)
def subscribed(expression: str) -> Passing:
    """What passes a subscription of RocketMQ's like `a || b`: by the hash alone.

    The empty one and `*` mean all; one that names no tag lets nothing pass.
    """
    if expression in ("", "*"):
        return Passing(_NO_WORDS, _NOTHING, _NO_WORDS)
    tags = [tag for part in expression.split("||") if (tag := part.strip(_JAVA_BLANKS))]
    return Passing(_codes("", tags), _NOTHING, _NO_WORDS)
