"""Values of a filter and how RocketMQ compares them, with Java's rules for turning texts into numbers.

    properties   str, or None where the message has no such property
    literals     str, bool, None, Int (32 bits), Long (64 bits), Double

A text beside a number becomes a number of that very kind: "5.5" beside the integer 5 is an error, not unequal.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from dataclasses import dataclass
from typing import Final

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
DOUBLE_MAX: Final = 1.7976931348623157e308
DOUBLE_MIN: Final = 5e-324


class NotComparable(Exception):
    """Two values that RocketMQ cannot compare: evaluation ends, and the message does not match."""


@dataclass(frozen=True, slots=True)
class Int:
    """A literal that fits 32 bits; a text beside it must, too."""

    value: int


@dataclass(frozen=True, slots=True)
class Long:
    """A literal of 64 bits."""

    value: int


@dataclass(frozen=True, slots=True)
class Double:
    """A literal with a point or an exponent."""

    value: float


Number = Int | Long | Double
Value = str | bool | Number | None

# What Java's String.trim takes away.
_BLANKS: Final = "".join(map(chr, range(0x21)))
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[fFdD]?", re.ASCII)
_HEX = re.compile(r"([+-]?)0[xX](([0-9a-fA-F]+)\.?|([0-9a-fA-F]*)\.([0-9a-fA-F]+))[pP]([+-]?\d+)[fFdD]?", re.ASCII)
_NAMED: Final = {sign + name: f"{sign}{name}" for sign in ("", "+", "-") for name in ("NaN", "Infinity")}
_NAN_KEY: Final = 0x7FF8_0000_0000_0000
# Hex digits and exponents beyond this are no numbers that anybody means; Python would compute them for long.
_HEX_CHARACTERS_MAX: Final = 256


def as_long(text: str, limit: int) -> int:
    """The text as Java's Integer.valueOf (`limit` INT_MAX) or Long.valueOf takes it. Raises NotComparable."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    values = [unicodedata.decimal(digit, -1) if ord(digit) < 0x10000 else -1 for digit in digits]
    if not values or min(values) < 0:
        raise NotComparable(f"{text[:64]!r} is no integer")
    number = 0
    for value in values:
        number = 10 * number + value
        if number > limit + 1:
            break
    number = -number if text[0] == "-" else number
    if not -limit - 1 <= number <= limit:
        raise NotComparable(f"{text[:64]!r} is no integer up to {limit:,}")
    return number


def as_double(text: str) -> float:
    """The text as Java's Double.valueOf takes it. Raises NotComparable."""
    text = text.strip(_BLANKS)
    if text in _NAMED:
        return float(_NAMED[text])
    if _NUMBER.fullmatch(text):
        return float(text.rstrip("fFdD"))
    found = _HEX.fullmatch(text)
    if found is None or len(text) > _HEX_CHARACTERS_MAX:
        raise NotComparable(f"{text[:64]!r} is no number")
    sign, mantissa, _, _, _, exponent = found.groups()
    # An exponent of many digits is as good as this one.
    power = max(-100_000, min(100_000, int(exponent)))
    try:
        return float.fromhex(f"{sign}0x{mantissa}p{power}")
    except OverflowError:
        return float(f"{sign}inf")


def double_key(value: float) -> int:
    """An i64 that orders doubles as Java's Double.compare does: −0.0 below 0.0, NaN above all and equal to itself."""
    if value != value:
        return _NAN_KEY
    (bits,) = struct.unpack(">q", struct.pack(">d", value))
    return int(bits) if bits >= 0 else int(bits ^ LONG_MAX)


def compare(left: str | bool | Number, right: str | bool | Number) -> int:
    """Below 0, 0 or above 0, as RocketMQ compares two values that are there. Raises NotComparable."""
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
    """What `<` and its like make of two texts. Raises NotComparable."""
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
