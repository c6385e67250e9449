"""Filters compiled for the kernel that gathers records.

tags     hash in the unit ──▶ the tag itself in the record
SQL92    hash in the unit, if the filter names the tags ──▶ properties of the record
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.filters.compiler import CompiledFilter, compiled
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout.java_hash import java_hash
from mqproc.topic_names import SCHEDULE_TOPIC

_NOTHING = np.empty(0, np.uint8)
_NO_WORDS = np.empty(0, np.int64)
# Characters that Java's String.trim removes.
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
# Hashes have 32 bits: no unit has this one.
_NO_HASH = 1 << 32


@dataclass(frozen=True, slots=True)
class FilterProgram:
    """Filter by `codes` int64[k] (hashes), exact `tags` uint8 with `ends` int64[k], then `sql`.

    Empty codes and ends without `sql` accept everything.
    """

    codes: NDArray[np.int64]
    tags: NDArray[np.uint8]
    ends: NDArray[np.int64]
    sql: CompiledFilter | None = None

    @property
    def program(self) -> NDArray[np.int64]:
        """The program of the SQL92 filter; empty without one."""
        return _NO_WORDS if self.sql is None else self.sql.program.words

    @property
    def texts(self) -> NDArray[np.uint8]:
        return _NOTHING if self.sql is None else self.sql.program.texts

    def scratch(self) -> NDArray[np.int64]:
        """Working memory of an evaluation."""
        return _NO_WORDS if self.sql is None else np.zeros(self.sql.program.scratch_size, np.int64)


@functools.lru_cache(1024)
def compile_filter(topic: str, tags: tuple[str, ...] = (), sql: str = "") -> FilterProgram:
    """Compile a filter by tags or SQL92. Raises FilterSyntaxError, BadRequestError."""
    if tags and sql:
        raise BadRequestError("a filter is either by tags or by properties, not by both")
    if sql:
        compiled_sql = compiled(sql)
        codes = _NO_WORDS if compiled_sql.tags is None else _codes(topic, compiled_sql.tags)
        return FilterProgram(codes, _NOTHING, _NO_WORDS, compiled_sql)
    names = [tag.encode() for tag in tags]
    return FilterProgram(
        codes=_codes(topic, tags) if tags else _NO_WORDS,
        tags=as_kernel_array(bytearray(b"".join(names))),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
    )


def _codes(topic: str, tags: Iterable[str]) -> NDArray[np.int64]:
    """Hashes of tags; for no tags one that no unit has.

    Empty for the schedule topic, whose units have the delivery time in place of the hash.
    """
    if topic == SCHEDULE_TOPIC:
        return _NO_WORDS
    return np.array(sorted({java_hash(tag) for tag in tags} or {_NO_HASH}), np.int64)


@functools.lru_cache(1024)
def compile_subscription(expression: str) -> FilterProgram:
    """Compile RocketMQ's subscription expression like `a || b`, by hash alone.

    The empty expression and `*` accept everything; one without tags accepts nothing.
    """
    if expression in ("", "*"):
        return FilterProgram(_NO_WORDS, _NOTHING, _NO_WORDS)
    tags = [tag for part in expression.split("||") if (tag := part.strip(_JAVA_BLANKS))]
    return FilterProgram(_codes("", tags), _NOTHING, _NO_WORDS)
