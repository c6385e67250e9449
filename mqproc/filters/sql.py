"""SQL92 filters: `compiled` makes one of its text, once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from mqproc.filters.grammar import parse
from mqproc.filters.nodes import Node, error_at
from mqproc.filters.program import Program, program_of, required_tags
from mqproc.filters.values import NotComparable
from mqproc.names import FILTER_BYTES_MAX

COMPILED_MAX = 256
"""Compiled filters that are kept; the one that was not used for longest goes."""


@dataclass(frozen=True, slots=True)
class CompiledFilter:
    """A filter ready to be asked. `tags`: a message that passes has one of them; None when the filter does not say."""

    node: Node
    program: Program
    tags: frozenset[str] | None

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Whether a message with these properties passes: what the kernel does, in Python.

        Values that RocketMQ cannot compare end the evaluation, and the message does not pass.
        """
        try:
            return self.node.evaluate(properties) is True
        except NotComparable:
            return False


def check_size(expression: str) -> None:
    """Raise FilterSyntaxError when a filter is too long to be looked at."""
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise error_at(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", FILTER_BYTES_MAX)


@functools.lru_cache(COMPILED_MAX)
def compiled(expression: str) -> CompiledFilter:
    """The filter of an expression. Raises FilterSyntaxError, which has the position of what is wrong."""
    check_size(expression)
    node = parse(expression)
    return CompiledFilter(node, program_of(node), required_tags(node))
