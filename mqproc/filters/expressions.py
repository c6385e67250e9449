"""Expression tree of a filter, with three-valued logic.

True, False, None for unknown, or another value. A missing property is None. A message is accepted if the whole
expression is True. Expressions that RocketMQ rejects when it compiles a filter are rejected here when a node is
created.

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
import operator
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from mqproc.errors import FilterSyntaxError

# Values and their comparison, with Java's rules for numbers in texts.
#
#     properties   str, or None if the message lacks the property
#     literals     str, bool, None, Int (32 bits), Long (64 bits), Double
#
# A text compared with a number is parsed as that type of number: "5.5" and the integer 5 are an error, not unequal.


INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
DOUBLE_MAX: Final = 1.7976931348623157e308
DOUBLE_MIN: Final = 5e-324


class NotComparable(Exception):
    """RocketMQ cannot compare two values: the evaluation ends and the message is not accepted."""


@dataclass(frozen=True, slots=True)
class Int:
    """A 32-bit literal; a text compared with it must fit 32 bits too."""

    value: int


@dataclass(frozen=True, slots=True)
class Long:
    """A 64-bit literal."""

    value: int


@dataclass(frozen=True, slots=True)
class Double:
    """A literal with a decimal point or an exponent."""

    value: float


Number = Int | Long | Double
Value = str | bool | Number | None

# Characters removed by Java's String.trim.
_BLANKS: Final = "".join(map(chr, range(0x21)))
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[fFdD]?", re.ASCII)
_HEX = re.compile(r"([+-]?)0[xX](([0-9a-fA-F]+)\.?|([0-9a-fA-F]*)\.([0-9a-fA-F]+))[pP]([+-]?\d+)[fFdD]?", re.ASCII)
_NAMED: Final = {sign + name: f"{sign}{name}" for sign in ("", "+", "-") for name in ("NaN", "Infinity")}
_NAN_KEY: Final = 0x7FF8_0000_0000_0000
# Limit of hexadecimal literals, whose evaluation in Python would take long.
_HEX_CHARACTERS_MAX: Final = 256


def as_long(text: str, limit: int) -> int:
    """Parse a text like Java's Integer.valueOf or Long.valueOf. Raises NotComparable."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    values = [unicodedata.decimal(digit, -1) if ord(digit) < 0x10000 else -1 for digit in digits]
    if not values or min(values) < 0:
        raise NotComparable(f"{text[:64]!r} is not an integer")
    number = 0
    for value in values:
        number = 10 * number + value
        if number > limit + 1:
            break
    number = -number if text[0] == "-" else number
    if not -limit - 1 <= number <= limit:
        raise NotComparable(f"{text[:64]!r} is not an integer up to {limit:,}")
    return number


def as_double(text: str) -> float:
    """Parse a text like Java's Double.valueOf. Raises NotComparable."""
    text = text.strip(_BLANKS)
    if text in _NAMED:
        return float(_NAMED[text])
    if _NUMBER.fullmatch(text):
        return float(text.rstrip("fFdD"))
    found = _HEX.fullmatch(text)
    if found is None or len(text) > _HEX_CHARACTERS_MAX:
        raise NotComparable(f"{text[:64]!r} is not a number")
    sign, mantissa, _, _, _, exponent = found.groups()
    # Larger exponents give the same result.
    power = max(-100_000, min(100_000, int(exponent)))
    try:
        return float.fromhex(f"{sign}0x{mantissa}p{power}")
    except OverflowError:
        return float(f"{sign}inf")


def double_key(value: float) -> int:
    """Map a double to an i64 with the order of Java's Double.compare.

    −0.0 is below 0.0; NaN is above all other values and equal to itself.
    """
    if value != value:
        return _NAN_KEY
    (bits,) = struct.unpack(">q", struct.pack(">d", value))
    return int(bits) if bits >= 0 else int(bits ^ LONG_MAX)


def compare(left: str | bool | Number, right: str | bool | Number) -> int:
    """Compare two values like RocketMQ: negative, 0 or positive. Raises NotComparable."""
    if isinstance(left, str) and not isinstance(right, str):
        left = _as_kind_of(right, left)
    elif isinstance(right, str) and not isinstance(left, str):
        if isinstance(left, bool):
            raise NotComparable("a boolean on the left cannot be compared with a text")
        right = _as_kind_of(left, right)
    if isinstance(left, str) or isinstance(right, str):
        return 0 if left == right else 1
    if isinstance(left, bool) or isinstance(right, bool):
        return int(left) - int(right) if isinstance(left, bool) and isinstance(right, bool) else -1
    return _compare_numbers(left, right)


def compare_texts_as_numbers(left: str, right: str) -> int:
    """Compare two texts as doubles, for <, <=, > and >=. Raises NotComparable."""
    return _order(double_key(as_double(left)), double_key(as_double(right)))


def _as_kind_of(example: bool | Number, text: str) -> bool | Number:
    if isinstance(example, bool):
        return text.isascii() and text.lower() == "true"
    if isinstance(example, Int):
        return Int(as_long(text, INT_MAX))
    if isinstance(example, Long):
        return Long(as_long(text, LONG_MAX))
    return Double(as_double(text))


def _compare_numbers(left: Number, right: Number) -> int:
    if isinstance(left, Double) or isinstance(right, Double):
        return _order(double_key(float(left.value)), double_key(float(right.value)))
    return _order(left.value, right.value)


def _order(left: int, right: int) -> int:
    return (left > right) - (left < right)


DEPTH_MAX = 64
"""Maximum depth of the tree; a chain of ANDs or of ORs is one level."""

Properties = Mapping[str, str]


class Node(Protocol):
    """A node of the expression tree; `position` counts characters from 0."""

    @property
    def position(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def parts(self) -> Iterator[Node]:
        """Child nodes."""
        ...

    def evaluate(self, properties: Properties) -> Value:
        """Evaluate for a message. Raises NotComparable."""
        ...


class Comparison(enum.Enum):
    """Operators of ordered comparisons."""

    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="

    def holds(self, outcome: int) -> bool:
        """Whether the operator accepts an outcome of `compare`."""
        return _HOLDS[self](outcome, 0)


_HOLDS: Final[dict[Comparison, Callable[[int, int], bool]]] = {
    Comparison.LESS: operator.lt,
    Comparison.LESS_OR_EQUAL: operator.le,
    Comparison.GREATER: operator.gt,
    Comparison.GREATER_OR_EQUAL: operator.ge,
}


class TextMatchKind(enum.Enum):
    """Operators that search a text for another one."""

    CONTAINS = "CONTAINS"
    STARTS_WITH = "STARTSWITH"
    ENDS_WITH = "ENDSWITH"

    def found(self, text: str, part: str) -> bool:
        """Whether the text contains `part` at the required position."""
        if self is TextMatchKind.STARTS_WITH:
            return text.startswith(part)
        return text.endswith(part) if self is TextMatchKind.ENDS_WITH else part in text


class _Base:
    """Defaults of leaf nodes."""

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
class PropertyRef(_Base):
    """A property by name; names are case-sensitive."""

    name: str
    position: int = field(default=0, compare=False)

    def evaluate(self, properties: Properties) -> Value:
        return properties.get(self.name)


@dataclass(frozen=True, slots=True)
class _Composite(_Base):
    """A node with children."""

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
class _Unary(_Composite):
    """A node with one child."""

    inner: Node

    def parts(self) -> Iterator[Node]:
        yield self.inner


@dataclass(frozen=True, slots=True)
class _Binary(_Composite):
    """A node with two children."""

    left: Node
    right: Node

    def parts(self) -> Iterator[Node]:
        yield self.left
        yield self.right


class _Condition:
    """Marks nodes that are True, False or unknown: operands of AND, OR, NOT, and whole filters."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Negate(_Unary):
    """`-x`: the negative of a number; unknown for other values, including a property's text."""

    def evaluate(self, properties: Properties) -> Value:
        match self.inner.evaluate(properties):
            case Int(number):
                return Int(-number)
            case Long(number):
                return Long(-number)
            case Double(real):
                return Double(-real)
        return None


@dataclass(frozen=True, slots=True)
class Cast(_Unary, _Condition):
    """A property used as a condition: never True, since its value is a text."""

    def evaluate(self, properties: Properties) -> Value:
        return None if self.inner.evaluate(properties) is None else False


@dataclass(frozen=True, slots=True)
class Not(_Unary, _Condition):
    """Negation of a condition."""

    def evaluate(self, properties: Properties) -> Value:
        value = self.inner.evaluate(properties)
        return None if value is None else not value


@dataclass(frozen=True, slots=True)
class Equal(_Binary, _Condition):
    """`=`. `<>` is represented as NOT `=`."""

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if isinstance(side, Literal) and side.value is None:
                raise error("NULL cannot be compared; use IS NULL", side)
        if _is_boolean_literal(self.left) and isinstance(self.right, Literal) and not _is_boolean_literal(self.right):
            raise error("a boolean cannot be compared with another literal", self.right)
        _Composite.__post_init__(self)

    def evaluate(self, properties: Properties) -> Value:
        left, right = self.left.evaluate(properties), self.right.evaluate(properties)
        if left is None:
            return True if right is None else None
        return False if right is None else compare(left, right) == 0


@dataclass(frozen=True, slots=True)
class OrderedComparison(_Binary, _Condition):
    """`<`, `<=`, `>`, `>=` on numbers."""

    order: Comparison

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            no_number = isinstance(side, Literal) and not isinstance(side.value, Number)
            if isinstance(side, _Condition) or no_number:
                raise error(f"{self.order.value} compares numbers only", side)
        _Composite.__post_init__(self)

    def evaluate(self, properties: Properties) -> Value:
        # With NULL on the left the right side, which may fail, is not evaluated.
        if (left := self.left.evaluate(properties)) is None or (right := self.right.evaluate(properties)) is None:
            return None
        if isinstance(left, str) and isinstance(right, str):
            return self.order.holds(compare_texts_as_numbers(left, right))
        return self.order.holds(compare(left, right))


@dataclass(frozen=True, slots=True)
class IsNull(_Unary, _Condition):
    """IS NULL. IS NOT NULL is represented as NOT IS NULL."""

    def evaluate(self, properties: Properties) -> Value:
        return self.inner.evaluate(properties) is None


@dataclass(frozen=True, slots=True)
class In(_Unary, _Condition):
    """IN with texts. NOT IN is NOT IN(…), also unknown if the property is missing."""

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.inner, PropertyRef):
            raise error("IN needs a property on its left", self.inner)
        _Composite.__post_init__(self)

    def evaluate(self, properties: Properties) -> Value:
        value = self.inner.evaluate(properties)
        return None if value is None else value in self.texts


@dataclass(frozen=True, slots=True)
class TextMatch(_Unary, _Condition):
    """CONTAINS, STARTSWITH, ENDSWITH.

    False, also if negated, for an empty text or a value that is not a text.
    """

    part: TextMatchKind
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
class _Chain(_Composite, _Condition):
    """A chain of conditions, evaluated from the left until one decides."""

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
class And(_Chain):
    """Conjunction of conditions."""

    def evaluate(self, properties: Properties) -> Value:
        return self._evaluate(properties, False)


@dataclass(frozen=True, slots=True)
class Or(_Chain):
    """Disjunction of conditions."""

    def evaluate(self, properties: Properties) -> Value:
        return self._evaluate(properties, True)


def error(problem: str, node: Node) -> FilterSyntaxError:
    """Create the error for a node."""
    return error_at(problem, node.position)


def error_at(problem: str, position: int) -> FilterSyntaxError:
    """Create the error for a position from 0; the message counts from 1 as SQL tools do."""
    return FilterSyntaxError(f"filter, character {position + 1} (the first is 1): {problem}", position=position)


def condition(node: Node) -> Node:
    """Use a node as a condition. Raises FilterSyntaxError if it has another type."""
    if isinstance(node, _Condition) or (
        isinstance(node, Literal) and (node.value is None or isinstance(node.value, bool))
    ):
        return node
    if isinstance(node, PropertyRef):
        return Cast(node)
    raise error("a condition is expected here", node)


def between(value: Node, low: Node, high: Node) -> Node:
    """`value BETWEEN low AND high`.

    Raises FilterSyntaxError if the literal bounds exclude every value.
    """
    if isinstance(low, Literal) and isinstance(high, Literal):
        if low.value is None or high.value is None:
            raise error("NULL cannot be a bound", low if low.value is None else high)
        try:
            outcome = compare(high.value, low.value)
        except NotComparable as problem:
            raise error(str(problem), low) from None
        if outcome < 0:
            raise error("the lower bound is above the upper one", low)
    above = OrderedComparison(value, low, Comparison.GREATER_OR_EQUAL)
    return And((above, OrderedComparison(value, high, Comparison.LESS_OR_EQUAL)))


def not_between(value: Node, low: Node, high: Node) -> Node:
    """`value NOT BETWEEN low AND high`; as in RocketMQ the bounds may be reversed."""
    return Or((OrderedComparison(value, low, Comparison.LESS), OrderedComparison(value, high, Comparison.GREATER)))


def _is_boolean_literal(node: Node) -> bool:
    return isinstance(node, Literal) and isinstance(node.value, bool)
