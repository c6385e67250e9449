"""Compile SQL92 filters to programs for the kernel that evaluates them (kernels/sql.py).

    compiled(text) ──parse──▶ expression tree ──program_of──▶ words and texts

Subexpressions without properties are evaluated at compile time, so the kernel never compares two literals.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mqproc.filters import expressions
from mqproc.filters.expressions import (
    Comparison,
    Double,
    Int,
    Long,
    Node,
    NotComparable,
    TextMatchKind,
    Value,
    double_key,
    error_at,
)
from mqproc.filters.parser import parse
from mqproc.kernels import sql as kernel
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout.properties import TAGS
from mqproc.topic_names import FILTER_BYTES_MAX

_OUTCOMES = {
    Comparison.LESS: kernel.BELOW,
    Comparison.LESS_OR_EQUAL: kernel.BELOW | kernel.SAME,
    Comparison.GREATER: kernel.ABOVE,
    Comparison.GREATER_OR_EQUAL: kernel.ABOVE | kernel.SAME,
}
_UNARY: dict[type[Node], int] = {
    expressions.IsNull: kernel.IS_NULL,
    expressions.Not: kernel.NOT,
    expressions.Cast: kernel.CAST,
    expressions.Negate: kernel.TO_NULL,
}
_PLACES = {
    TextMatchKind.CONTAINS: kernel.ANYWHERE,
    TextMatchKind.STARTS_WITH: kernel.AT_START,
    TextMatchKind.ENDS_WITH: kernel.AT_END,
}


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled filter: `words` int64, `texts` uint8, and the number of scratch words."""

    words: NDArray[np.int64]
    texts: NDArray[np.uint8]
    scratch_size: int


def program_of(node: Node) -> Program:
    """Compile an expression tree."""
    made = _Assembler()
    made.add(node)
    return made.program()


def required_tags(node: Node) -> frozenset[str] | None:
    """Tags of which every accepted message has one; None if any tag may be accepted."""
    match node:
        case expressions.Equal(expressions.PropertyRef(name), expressions.Literal(str(tag))) | expressions.Equal(
            expressions.Literal(str(tag)), expressions.PropertyRef(name)
        ) if name == TAGS:
            return frozenset((tag,))
        case expressions.In(expressions.PropertyRef(name), texts) if name == TAGS:
            return frozenset(texts)
        case expressions.And(conditions):
            known = [tags for condition in conditions if (tags := required_tags(condition)) is not None]
            return frozenset.intersection(*known) if known else None
        case expressions.Or(conditions):
            known = [tags for condition in conditions if (tags := required_tags(condition)) is not None]
            return frozenset().union(*known) if len(known) == len(conditions) else None
    return None


def _has_property(node: Node) -> bool:
    return isinstance(node, expressions.PropertyRef) or any(map(_has_property, node.parts()))


@dataclass(slots=True)
class _Assembler:
    """Assembler of a program."""

    names: dict[str, int] = field(default_factory=dict)
    name_words: list[int] = field(default_factory=list)
    list_words: list[int] = field(default_factory=list)
    code: list[tuple[int, int, int, int]] = field(default_factory=list)
    texts: bytearray = field(default_factory=bytearray)
    depth: int = 0
    depth_max: int = 0

    def program(self) -> Program:
        """Return the assembled program."""
        code_at = kernel.HEAD_SIZE + len(self.name_words) + len(self.list_words)
        lists_at = kernel.HEAD_SIZE + len(self.name_words)
        words = [len(self.names), code_at, *self.name_words, *self.list_words]
        for operation, a, b, c in self.code:
            words += (operation, a + lists_at if operation == kernel.IS_ONE_OF else a, b, c)
        scratch_size = len(self.name_words) + kernel.VALUE_SIZE * self.depth_max
        return Program(np.array(words, np.int64), as_kernel_array(self.texts), scratch_size)

    def add(self, node: Node) -> None:
        """Emit the instructions that leave a node's value on the stack."""
        if not _has_property(node):
            try:
                self._push(node.evaluate({}))
            except NotComparable:
                self._emit(kernel.FAIL, leaves=1)
            return
        match node:
            case expressions.PropertyRef(name):
                self._emit(kernel.LOAD, self._name(name), leaves=1)
            case expressions.Equal(left, right):
                self.add(left)
                self.add(right)
                self._emit(kernel.EQUALS, leaves=-1)
            case expressions.OrderedComparison(left, right, order):
                self._ordered(left, right, _OUTCOMES[order])
            case expressions.In(inner, texts):
                self.add(inner)
                self._emit(kernel.IS_ONE_OF, self._list(texts), len(texts))
            case expressions.TextMatch(_, _, ""):
                self._push(False)
            case expressions.TextMatch(inner, part, text, negated):
                self.add(inner)
                self._emit(kernel.TEXT_DIFFERS if negated else kernel.TEXT_MATCHES, _PLACES[part], *self._text(text))
            case (
                expressions.IsNull(inner) | expressions.Not(inner) | expressions.Cast(inner) | expressions.Negate(inner)
            ):
                self.add(inner)
                self._emit(_UNARY[type(node)])
            case expressions.And(conditions):
                self._chain(conditions, kernel.AND, kernel.JUMP_IF_FALSE)
            case expressions.Or(conditions):
                self._chain(conditions, kernel.OR, kernel.JUMP_IF_TRUE)
            case _:
                raise AssertionError(f"no instructions for {type(node).__name__}")

    def _ordered(self, left: Node, right: Node, outcomes: int) -> None:
        """Emit an ordered comparison; the right side, which may fail, is skipped after NULL."""
        self.add(left)
        jump_at = len(self.code)
        self._emit(kernel.JUMP_IF_NULL)
        self.add(right)
        self._emit(kernel.ORDERS, outcomes, leaves=-1)
        self.code[jump_at] = (kernel.JUMP_IF_NULL, len(self.code), 0, 0)

    def _chain(self, conditions: tuple[Node, ...], operation: int, jump: int) -> None:
        """Emit a chain of conditions with a jump to the end after each that may decide it."""
        jumps = []
        for number, condition in enumerate(conditions):
            if number:
                jumps.append(len(self.code))
                self._emit(jump)
            self.add(condition)
            if number:
                self._emit(operation, leaves=-1)
        for at in jumps:
            self.code[at] = (jump, len(self.code), 0, 0)

    def _push(self, value: Value) -> None:
        match value:
            case None:
                self._emit(kernel.PUSH, kernel.NULL, leaves=1)
            case bool():
                self._emit(kernel.PUSH, kernel.BOOLEAN, int(value), leaves=1)
            case str():
                self._emit(kernel.PUSH, kernel.TEXT, *self._text(value), leaves=1)
            case Int(number):
                self._emit(kernel.PUSH, kernel.INT, number, leaves=1)
            case Long(number):
                self._emit(kernel.PUSH, kernel.LONG, number, leaves=1)
            case Double(real):
                self._emit(kernel.PUSH, kernel.DOUBLE, double_key(real), leaves=1)

    def _emit(self, operation: int, a: int = 0, b: int = 0, c: int = 0, *, leaves: int = 0) -> None:
        """Emit an instruction; `leaves` is its net effect on the stack's depth."""
        self.code.append((operation, a, b, c))
        self.depth += leaves
        self.depth_max = max(self.depth_max, self.depth)

    def _name(self, name: str) -> int:
        if name not in self.names:
            self.names[name] = len(self.names)
            self.name_words += self._text(name)
        return self.names[name]

    def _list(self, texts: tuple[str, ...]) -> int:
        start = len(self.list_words)
        for text in texts:
            self.list_words += self._text(text)
        return start

    def _text(self, text: str) -> tuple[int, int]:
        """Add a text; returns its position and size."""
        data = text.encode("utf-8", "surrogatepass")
        self.texts += data
        return len(self.texts) - len(data), len(data)


COMPILED_MAX = 256
"""Size of the cache of compiled filters (LRU)."""


@dataclass(frozen=True, slots=True)
class CompiledFilter:
    """A compiled filter. `tags`: every accepted message has one of them; None = no restriction."""

    node: Node
    program: Program
    tags: frozenset[str] | None

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Evaluate the filter in Python; False for values that are not comparable."""
        try:
            return self.node.evaluate(properties) is True
        except NotComparable:
            return False


def check_size(expression: str) -> None:
    """Raise FilterSyntaxError if a filter is too long."""
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise error_at(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", FILTER_BYTES_MAX)


@functools.lru_cache(COMPILED_MAX)
def compiled(expression: str) -> CompiledFilter:
    """Compile a filter. Raises FilterSyntaxError with the position of the error."""
    check_size(expression)
    node = parse(expression)
    return CompiledFilter(node, program_of(node), required_tags(node))
