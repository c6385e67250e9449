"""The parts of a filter, and what each is for a message: True, False, None for unknown, or another value.

A missing property is None. AND, OR and NOT have three values; a message matches when the whole is True. What RocketMQ
refuses when it compiles is refused here too, where a part is made.

| part | when its property is missing |
|---|---|
| `a = 1`, `a > 1`, `a IN (…)`, `a` alone | unknown |
| `1 = a` | False: only the left side decides |
| `a = b` with both missing | True |
| `a CONTAINS 'x'`, `a NOT CONTAINS 'x'`, and the same with an empty text | False |
| `a IS NULL` | True |
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mqproc.errors import FilterSyntaxError
from mqproc.filters.values import (
    Double,
    Int,
    Long,
    NotComparable,
    Value,
    compare,
    compare_texts_as_numbers,
)

DEPTH_MAX = 64
"""Levels of parts within parts; a chain of ANDs or of ORs is one."""

Properties = Mapping[str, str]


class Node(Protocol):
    """A part of a filter; `position` counts characters from 0."""

    @property
    def position(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def parts(self) -> Iterator[Node]:
        """The parts within."""
        ...

    def evaluate(self, properties: Properties) -> Value:
        """Its value. Raises NotComparable."""
        ...


class Order(enum.Enum):
    """Ordering comparisons, each with the outcomes that hold."""

    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="

    def holds(self, outcome: int) -> bool:
        """Whether it holds of two values of which the left one is below (−1), at (0) or above (1) the right one."""
        return _HOLDS[self](outcome)


_HOLDS: dict[Order, Callable[[int], bool]] = {
    Order.LESS: lambda outcome: outcome < 0,
    Order.LESS_OR_EQUAL: lambda outcome: outcome <= 0,
    Order.GREATER: lambda outcome: outcome > 0,
    Order.GREATER_OR_EQUAL: lambda outcome: outcome >= 0,
}


class Part(enum.Enum):
    """Where in a text another one is looked for."""

    CONTAINS = "CONTAINS"
    STARTS_WITH = "STARTSWITH"
    ENDS_WITH = "ENDSWITH"

    def found(self, text: str, part: str) -> bool:
        """Whether `part` is there."""
        if self is Part.STARTS_WITH:
            return text.startswith(part)
        return text.endswith(part) if self is Part.ENDS_WITH else part in text


class _Base:
    """What all parts have."""

    __slots__ = ()

    @property
    def depth(self) -> int:
        return 1

    def parts(self) -> Iterator[Node]:
        return iter(())


@dataclass(frozen=True, slots=True)
class Literal(_Base):
    """A number, a text, TRUE, FALSE or NULL."""

    value: Value
    position: int = field(default=0, compare=False)

    def evaluate(self, properties: Properties) -> Value:
        return self.value


@dataclass(frozen=True, slots=True)
class Property(_Base):
    """A property by name; upper and lower case are different."""

    name: str
    position: int = field(default=0, compare=False)

    def evaluate(self, properties: Properties) -> Value:
        return properties.get(self.name)


@dataclass(frozen=True, slots=True)
class _Inner(_Base):
    """A part with parts within."""

    depth: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        depth = 1 + max((part.depth for part in self.parts()), default=0)
        if depth > DEPTH_MAX:
            raise error(f"more than {DEPTH_MAX} levels", next(self.parts()))
        object.__setattr__(self, "depth", depth)

    @property
    def position(self) -> int:
        return next(self.parts()).position


@dataclass(frozen=True, slots=True)
class _One(_Inner):
    """A part with one part within."""

    inner: Node

    def parts(self) -> Iterator[Node]:
        yield self.inner


@dataclass(frozen=True, slots=True)
class _Two(_Inner):
    """A part with two parts within."""

    left: Node
    right: Node

    def parts(self) -> Iterator[Node]:
        yield self.left
        yield self.right


class _Truth:
    """Marks the parts that are True, False or unknown: what AND, OR, NOT and a whole filter are made of."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Negate(_One):
    """`-x`: of a number its negative, of anything else unknown, a property's text included."""

    def evaluate(self, properties: Properties) -> Value:
        value = self.inner.evaluate(properties)
        match value:
            case Int(number):
                return Int(-number)
            case Long(number):
                return Long(-number)
            case Double(real):
                return Double(-real)
        return None


@dataclass(frozen=True, slots=True)
class Cast(_One, _Truth):
    """A property in the place of a condition: never True, since its value is a text."""

    def evaluate(self, properties: Properties) -> Value:
        return None if self.inner.evaluate(properties) is None else False


@dataclass(frozen=True, slots=True)
class Not(_One, _Truth):
    """NOT."""

    def evaluate(self, properties: Properties) -> Value:
        value = self.inner.evaluate(properties)
        return None if value is None else not value


@dataclass(frozen=True, slots=True)
class Equal(_Two, _Truth):
    """`=`; `<>` is NOT of it."""

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if isinstance(side, Literal) and side.value is None:
                raise error("NULL cannot be compared; IS NULL asks for it", side)
        if _is_boolean_literal(self.left) and isinstance(self.right, Literal) and not _is_boolean_literal(self.right):
            raise error("a boolean cannot be compared with another literal", self.right)
        _Inner.__post_init__(self)

    def evaluate(self, properties: Properties) -> Value:
        left, right = self.left.evaluate(properties), self.right.evaluate(properties)
        if left is None or right is None:
            if left is None and right is None:
                return True
            return None if left is None else False
        return compare(left, right) == 0


@dataclass(frozen=True, slots=True)
class Ordered(_Two, _Truth):
    """`<`, `<=`, `>`, `>=`: numbers only."""

    order: Order

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if isinstance(side, _Truth) or (
                isinstance(side, Literal) and not isinstance(side.value, Int | Long | Double)
            ):
                raise error(f"{self.order.value} compares numbers only", side)
        _Inner.__post_init__(self)

    def evaluate(self, properties: Properties) -> Value:
        left = self.left.evaluate(properties)
        if left is None:
            return None
        right = self.right.evaluate(properties)
        if right is None:
            return None
        if isinstance(left, str) and isinstance(right, str):
            return self.order.holds(compare_texts_as_numbers(left, right))
        return self.order.holds(compare(left, right))


@dataclass(frozen=True, slots=True)
class IsNull(_One, _Truth):
    """IS NULL; IS NOT NULL is NOT of it."""

    def evaluate(self, properties: Properties) -> Value:
        return self.inner.evaluate(properties) is None


@dataclass(frozen=True, slots=True)
class In(_One, _Truth):
    """IN over texts; NOT IN is NOT of it, unknown as well where the property is missing."""

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Property):
            raise error("IN needs a property on its left", self.inner)
        _Inner.__post_init__(self)

    def evaluate(self, properties: Properties) -> Value:
        value = self.inner.evaluate(properties)
        return None if value is None else value in self.texts


@dataclass(frozen=True, slots=True)
class Holds(_One, _Truth):
    """CONTAINS, STARTSWITH, ENDSWITH. Of what is no text, and for an empty text, both polarities are False."""

    part: Part
    text: str
    negated: bool

    def evaluate(self, properties: Properties) -> Value:
        if not self.text:
            return False
        value = self.inner.evaluate(properties)
        if not isinstance(value, str):
            return False
        return self.part.found(value, self.text) is not self.negated


@dataclass(frozen=True, slots=True)
class _Several(_Inner, _Truth):
    """A chain of conditions, evaluated from the left until it is decided."""

    conditions: tuple[Node, ...]

    def parts(self) -> Iterator[Node]:
        return iter(self.conditions)

    def _evaluate(self, properties: Properties, deciding: bool) -> Value:
        unknown = False
        for condition in self.conditions:
            value = condition.evaluate(properties)
            if value is deciding:
                return deciding
            unknown |= value is None
        return None if unknown else not deciding


@dataclass(frozen=True, slots=True)
class And(_Several):
    """AND."""

    def evaluate(self, properties: Properties) -> Value:
        return self._evaluate(properties, False)


@dataclass(frozen=True, slots=True)
class Or(_Several):
    """OR."""

    def evaluate(self, properties: Properties) -> Value:
        return self._evaluate(properties, True)


def error(problem: str, node: Node) -> FilterSyntaxError:
    """What is wrong with a part."""
    return error_at(problem, node.position)


def error_at(problem: str, position: int) -> FilterSyntaxError:
    """What is wrong at a place: `position` counts from 0 as Python does, the text from 1 as SQL tools do."""
    return FilterSyntaxError(f"filter, character {position + 1} (the first is 1): {problem}", position=position)


def condition(node: Node) -> Node:
    """The part as a condition. Raises FilterSyntaxError when it can be none."""
    if isinstance(node, _Truth) or (isinstance(node, Literal) and (node.value is None or isinstance(node.value, bool))):
        return node
    if isinstance(node, Property):
        return Cast(node)
    raise error("a condition is expected here", node)


def between(value: Node, low: Node, high: Node) -> Node:
    """`value BETWEEN low AND high`. Raises FilterSyntaxError when no number lies between."""
    if isinstance(low, Literal) and isinstance(high, Literal):
        if low.value is None or high.value is None:
            raise error("NULL bounds nothing", low if low.value is None else high)
        try:
            outcome = compare(high.value, low.value)
        except NotComparable as problem:
            raise error(str(problem), low) from None
        if outcome < 0:
            raise error("the lower bound is above the upper one", low)
    above, below = Ordered(value, low, Order.GREATER_OR_EQUAL), Ordered(value, high, Order.LESS_OR_EQUAL)
    return And((above, below))


def not_between(value: Node, low: Node, high: Node) -> Node:
    """`value NOT BETWEEN low AND high`; the bounds may be the wrong way round, as in RocketMQ."""
    return Or((Ordered(value, low, Order.LESS), Ordered(value, high, Order.GREATER)))


def _is_boolean_literal(node: Node) -> bool:
    return isinstance(node, Literal) and isinstance(node.value, bool)
