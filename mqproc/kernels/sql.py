"""Evaluate a compiled SQL92 filter on a record's properties in place.

    verdict(buf, start, stop, program, texts, scratch) -> FAILS, PASSES, or UNDECIDED

A filter is a program for a stack machine. A value takes three words: its kind, then a number, the key of a double, or
the position and size of a text. filters/expressions.py defines the three-valued logic. UNDECIDED is returned for
numbers that this module does not parse; Python then evaluates the filter.

    program   NAMES (i64) · CODE (i64) · position and size of each name · of each list element · 4 words an instruction
    texts     names and literals of the filter, UTF-8
    scratch   position (−1 = absent) and size of each named property · the stack
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import leading_zeros, load_u8
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.kernels.record_fields import find_byte, same_bytes
from mqproc.layout import properties

# Numbers in texts, by the rules of Java's Integer.valueOf, Long.valueOf and Double.valueOf.
#
#     parse_long(buf, at, stop, limit, out, place)     the number in out[place]
#     parse_double(buf, at, stop, out, place)          a key that orders like Double.compare (filters/expressions.py)
#
# Both return PARSED, BAD, or UNPARSED for texts left to Python: digits of other scripts, hexadecimal numbers, and
# decimals of more than 18 digits that are too close to the midpoint of two doubles.
#
# Decimals are converted to the nearest double without a division: D. Lemire, *Number Parsing at a Gigabyte per Second*,
# Software: Practice and Experience 51(8), 2021. No fallback is needed for one step of it: N. Mushtak and D. Lemire,
# *Fast Number Parsing Without Fallback*, 2023. 64-bit numbers are processed as two halves, since a kernel's integers
# are signed.


BAD, PARSED, UNPARSED = range(3)

NAN_KEY = 0x7FF8_0000_0000_0000
INFINITY_KEY = 0x7FF0_0000_0000_0000

_HALF = 0xFFFF_FFFF
_POWER_MIN = -342  # below it 10^19 × 10^q rounds to 0
_POWER_MAX = 308  # above it the result is infinite
_DIGITS_MAX = 18  # 10^18 < 2^60
_EXPONENT_MAX = 100_000  # larger exponents give the same result
_MANTISSA_BITS = 52
_HIDDEN_BIT = 1 << _MANTISSA_BITS
_EXPONENT_BIAS = 1023
_INFINITE_EXPONENT = 0x7FF

_PLUS, _MINUS, _POINT, _ZERO, _NINE = (ord(character) for character in "+-.09")
_NAN = int.from_bytes(b"NaN", "big")
_INFINITY = b"Infinity"
_INFINITY_HEAD = int.from_bytes(_INFINITY[:4], "big")
_INFINITY_TAIL = int.from_bytes(_INFINITY[4:], "big")


def _powers_of_five() -> Words:
    """128 bits of each 5^q, the highest set, as four 32-bit words; rounded up for q < 0."""
    halves = []
    for q in range(_POWER_MIN, _POWER_MAX + 1):
        if q < 0:
            five = 5**-q
            width = five.bit_length()
            bits = (1 << (width + 127 if q >= -27 else 2 * width + 128)) // five + 1
        else:
            bits = 5**q << 128
        bits >>= bits.bit_length() - 128
        halves += [bits >> shift & _HALF for shift in (96, 64, 32, 0)]
    return np.array(halves, np.int64)


_FIVES = _powers_of_five()


@kernel
def parse_long(buf: Bytes, at: int, stop: int, limit: int, out: Words, place: int) -> int:
    """Parse buf[at:stop] as a Java integer: optional sign, digits, between −limit − 1 and limit."""
    if at >= stop:
        return BAD
    first = load_u8(buf, at)
    negative = first == _MINUS
    if negative or first == _PLUS:
        at += 1
    if at >= stop:
        return BAD
    # Accumulate negatively, since the minimum has no positive counterpart.
    lowest = -limit - 1 if negative else -limit
    number = 0
    fits = True
    for i in range(at, stop):
        byte = load_u8(buf, i)
        if byte >= 0x80:
            return UNPARSED
        digit = byte - _ZERO
        if digit < 0 or digit > 9:
            return BAD
        # limit // 10 is correct for both signs, as neither limit ends in 9.
        if fits and number >= -(limit // 10) and 10 * number >= lowest + digit:
            number = 10 * number - digit
        else:
            fits = False
    out[place] = number if negative else -number
    return PARSED if fits else BAD


@kernel
def _nearest_double(digits: int, power: int) -> int:
    """Bits of the double nearest to digits × 10^power, for 0 < digits < 2^60."""
    if power < _POWER_MIN:
        return 0
    if power > _POWER_MAX:
        return INFINITY_KEY
    # Normalise to 63 bits instead of 64, so that the sign bit stays clear.
    zeros = leading_zeros(digits)
    digits <<= zeros - 1
    high = digits >> 31
    low = (digits << 1) & _HALF
    row = 4 * (power - _POWER_MIN)
    # digits × the upper 64 bits of the power: a 128-bit product in p3 … p0.
    five = int(_FIVES[row])
    lower_five = int(_FIVES[row + 1])
    a = low * lower_five
    b = high * lower_five
    c = low * five
    d = high * five
    p0 = a & _HALF
    carry = ((a >> 32) & _HALF) + (b & _HALF) + (c & _HALF)
    p1 = carry & _HALF
    carry = (carry >> 32) + ((b >> 32) & _HALF) + ((c >> 32) & _HALF) + (d & _HALF)
    p2 = carry & _HALF
    p3 = ((carry >> 32) + ((d >> 32) & _HALF)) & _HALF
    if p2 & 0x1FF == 0x1FF:
        # The lower 64 bits of the power may carry into the result: add the upper half of their product.
        five = int(_FIVES[row + 2])
        lower_five = int(_FIVES[row + 3])
        a = low * lower_five
        b = high * lower_five
        c = low * five
        d = high * five
        carry = ((a >> 32) & _HALF) + (b & _HALF) + (c & _HALF)
        carry = (carry >> 32) + ((b >> 32) & _HALF) + ((c >> 32) & _HALF) + (d & _HALF)
        p0 += carry & _HALF
        p1 += (((carry >> 32) + ((d >> 32) & _HALF)) & _HALF) + (p0 >> 32)
        p2 += p1 >> 32
        p3 = (p3 + (p2 >> 32)) & _HALF
        p0 &= _HALF
        p1 &= _HALF
        p2 &= _HALF
    upper = p3 >> 31
    shift = upper + 9
    mantissa = (p3 << (32 - shift)) | (p2 >> shift)
    exponent = ((217706 * power) >> 16) + 63 + upper - zeros + _EXPONENT_BIAS
    if exponent <= 0:
        # Subnormal.
        if 1 - exponent >= 64:
            return 0
        mantissa >>= 1 - exponent
        mantissa += mantissa & 1
        return mantissa >> 1
    # Exactly halfway between two doubles: round to even.
    if p1 == 0 and p0 <= 1 and -4 <= power <= 23 and mantissa & 3 == 1 and p2 & ((1 << shift) - 1) == 0:
        mantissa &= ~1
    mantissa += mantissa & 1
    mantissa >>= 1
    if mantissa >= 2 * _HIDDEN_BIT:
        mantissa = _HIDDEN_BIT
        exponent += 1
    if exponent >= _INFINITE_EXPONENT:
        return INFINITY_KEY
    return (mantissa & (_HIDDEN_BIT - 1)) | (exponent << _MANTISSA_BITS)


@kernel
def _word_at(buf: Bytes, at: int, size: int) -> int:
    word = 0
    for i in range(size):
        word = word << 8 | load_u8(buf, at + i)
    return word


@kernel
def _named_key(buf: Bytes, at: int, stop: int) -> int:
    """Key of NaN or Infinity, 0 if buf[at:stop] is neither."""
    if stop - at == 3 and _word_at(buf, at, 3) == _NAN:
        return NAN_KEY
    if stop - at == 8 and _word_at(buf, at, 4) == _INFINITY_HEAD and _word_at(buf, at + 4, 4) == _INFINITY_TAIL:
        return INFINITY_KEY
    return 0


@kernel
def parse_double(buf: Bytes, at: int, stop: int, out: Words, place: int) -> int:
    """Parse buf[at:stop] as a Java double: sign, digits with a point, exponent, suffix."""
    while at < stop and load_u8(buf, at) <= 0x20:
        at += 1
    while at < stop and load_u8(buf, stop - 1) <= 0x20:
        stop -= 1
    if at >= stop:
        return BAD
    first = load_u8(buf, at)
    negative = first == _MINUS
    if negative or first == _PLUS:
        at += 1
    if at >= stop:
        return BAD
    key = _named_key(buf, at, stop)
    if key != 0:
        out[place] = -1 - key if negative and key != NAN_KEY else key
        return PARSED
    if stop - at > 2 and load_u8(buf, at) == _ZERO and load_u8(buf, at + 1) | 0x20 == 0x78:
        return UNPARSED
    digits = 0
    counted = 0  # digits in `digits`
    dropped = 0  # integer digits beyond these
    fraction = 0  # fraction digits among the counted ones
    more = False  # a dropped digit is not 0
    any_digit = False
    point = False
    while at < stop:
        byte = load_u8(buf, at)
        if byte == _POINT and not point:
            point = True
        elif _ZERO <= byte <= _NINE:
            any_digit = True
            if counted < _DIGITS_MAX:
                digits = 10 * digits + byte - _ZERO
                counted += 1 if digits > 0 else 0
                fraction += 1 if point else 0
            else:
                dropped += 0 if point else 1
                more |= byte != _ZERO
        else:
            break
        at += 1
    if not any_digit:
        return BAD
    power = dropped - fraction
    if at < stop and load_u8(buf, at) | 0x20 == 0x65:
        at += 1
        sign = load_u8(buf, at) if at < stop else 0
        if sign in (_MINUS, _PLUS):
            at += 1
        if at >= stop or not _ZERO <= load_u8(buf, at) <= _NINE:
            return BAD
        exponent = 0
        while at < stop and _ZERO <= load_u8(buf, at) <= _NINE:
            exponent = min(10 * exponent + load_u8(buf, at) - _ZERO, _EXPONENT_MAX)
            at += 1
        power += -exponent if sign == _MINUS else exponent
    if at < stop:
        letter = load_u8(buf, at) | 0x20
        if letter in (0x64, 0x66):
            at += 1
    if at < stop:
        return BAD
    key = _nearest_double(digits, power) if digits > 0 else 0
    if more and _nearest_double(digits + 1, power) != key:
        return UNPARSED
    out[place] = -1 - key if negative else key
    return PARSED


FAILS, PASSES, UNDECIDED = range(3)

# Header of the program.
NAMES, CODE = range(2)
HEAD_SIZE = 2
INSTRUCTION_SIZE = 4
VALUE_SIZE = 3

# Kinds of values.
(
    NULL,
    BOOLEAN,  # 0 or 1
    PROPERTY,  # position, size in the record
    TEXT,  # position, size in `texts`
    INT,  # the number
    LONG,
    DOUBLE,  # the key
) = range(7)

# Instructions, with operands and effect on the stack.
(
    PUSH,  # kind, a, b: → literal
    LOAD,  # name: → property, or NULL
    EQUALS,  # left, right → three-valued
    ORDERS,  # accepted outcomes: left, right → three-valued
    IS_NULL,  # value → BOOLEAN
    IS_ONE_OF,  # first word of the list, count: property → three-valued
    TEXT_MATCHES,  # kind of match, position and size of the text: value → BOOLEAN
    TEXT_DIFFERS,  # the negated form of TEXT_MATCHES
    NOT,  # three-valued → three-valued
    CAST,  # value → NULL or false
    TO_NULL,  # value → NULL
    JUMP_IF_FALSE,  # instruction: tests the top value, leaves it
    JUMP_IF_TRUE,
    JUMP_IF_NULL,
    AND,  # two three-valued values → one
    OR,
    FAIL,  # end the evaluation
) = range(17)

# Bits of the accepted outcomes of a comparison.
BELOW, SAME, ABOVE = 1, 2, 4
ANYWHERE, AT_START, AT_END = range(3)

# Outcomes of a comparison in addition to −1, 0 and 1.
_NOT_COMPARABLE = 2
_LEFT_TO_PYTHON = 3

_INT_MAX = 2**31 - 1
_LONG_MAX = 2**63 - 1
_ABSENT = -1
_NAME_END = ord(properties.NAME_END)
_PAIR_END = ord(properties.PAIR_END)
_TRUE = int.from_bytes(b"true", "big")
_LOWER_CASE = 0x20202020


@kernel
def _find_properties(buf: Bytes, start: int, stop: int, program: Words, texts: Bytes, scratch: Words) -> None:
    """Locate the values of the filter's names: the last pair of each with a value."""
    names = int(program[NAMES])
    for i in range(names):
        scratch[2 * i] = _ABSENT
    at = start
    while at < stop:
        end = find_byte(buf, at, stop, _PAIR_END)
        for i in range(names):
            size = int(program[HEAD_SIZE + 2 * i + 1])
            if (
                end - at >= size + 2
                and load_u8(buf, at + size) == _NAME_END
                and same_bytes(buf, at, texts, int(program[HEAD_SIZE + 2 * i]), size)
            ):
                scratch[2 * i] = at + size + 1
                scratch[2 * i + 1] = end - at - size - 1
        at = end + 1


@kernel
def _is_true(buf: Bytes, at: int, size: int) -> bool:
    """Java's Boolean.valueOf: "true" in any case."""
    return size == 4 and _word_at(buf, at, 4) | _LOWER_CASE == _TRUE


@kernel
def _order(left: int, right: int) -> int:
    return int(left > right) - int(left < right)


@kernel
def _same_text(buf: Bytes, texts: Bytes, scratch: Words, left: int, right: int) -> bool:
    """Whether two texts are equal: two properties, or a property and a literal."""
    size = int(scratch[left + 2])
    if size != int(scratch[right + 2]):
        return False
    left_at = int(scratch[left + 1])
    right_at = int(scratch[right + 1])
    if scratch[left] == TEXT:
        return same_bytes(texts, left_at, buf, right_at, size)
    if scratch[right] == TEXT:
        return same_bytes(buf, left_at, texts, right_at, size)
    return same_bytes(buf, left_at, buf, right_at, size)


@kernel
def _as_double(buf: Bytes, scratch: Words, value: int) -> int:
    """Replace a property's position by the key of its number; returns BAD, PARSED or UNPARSED."""
    at = int(scratch[value + 1])
    return parse_double(buf, at, at + int(scratch[value + 2]), scratch, value + 1)


@kernel
def _compare_with_number(buf: Bytes, scratch: Words, text: int, number: int) -> int:
    """Compare a property's text with a numeric literal."""
    kind = scratch[number]
    at = int(scratch[text + 1])
    stop = at + int(scratch[text + 2])
    if kind == DOUBLE:
        parsed = parse_double(buf, at, stop, scratch, text + 1)
    else:
        parsed = parse_long(buf, at, stop, _INT_MAX if kind == INT else _LONG_MAX, scratch, text + 1)
    if parsed == PARSED:
        return _order(int(scratch[text + 1]), int(scratch[number + 1]))
    return _NOT_COMPARABLE if parsed == BAD else _LEFT_TO_PYTHON


@kernel
def _compare(buf: Bytes, texts: Bytes, scratch: Words, left: int, right: int) -> int:
    """Compare two values; neither is NULL, and at least one comes from the message."""
    left_kind = scratch[left]
    right_kind = scratch[right]
    if left_kind == PROPERTY and right_kind >= INT:
        return _compare_with_number(buf, scratch, left, right)
    if right_kind == PROPERTY and left_kind >= INT:
        outcome = _compare_with_number(buf, scratch, right, left)
        return outcome if outcome > 1 else -outcome
    left_text = left_kind in (PROPERTY, TEXT)
    right_text = right_kind in (PROPERTY, TEXT)
    if left_text and right_text:
        return 0 if _same_text(buf, texts, scratch, left, right) else 1
    if left_kind == BOOLEAN and right_kind == BOOLEAN:
        return _order(int(scratch[left + 1]), int(scratch[right + 1]))
    if left_text and right_kind == BOOLEAN:
        at = int(scratch[left + 1])
        size = int(scratch[left + 2])
        truth = _is_true(texts, at, size) if left_kind == TEXT else _is_true(buf, at, size)
        return _order(int(truth), int(scratch[right + 1]))
    # A boolean differs from a number, and cannot be compared with a text on its right.
    return _NOT_COMPARABLE if right_text else -1


@kernel
def _equals(buf: Bytes, texts: Bytes, scratch: Words, left: int, right: int) -> int:
    """Replace the left value by the result of `=`; _NOT_COMPARABLE, _LEFT_TO_PYTHON or 0."""
    if scratch[left] == NULL or scratch[right] == NULL:
        both = scratch[left] == scratch[right]
        scratch[left + 1] = 1 if both else 0
        scratch[left] = BOOLEAN if both or scratch[left] != NULL else NULL
        return 0
    outcome = _compare(buf, texts, scratch, left, right)
    if outcome > 1:
        return outcome
    scratch[left] = BOOLEAN
    scratch[left + 1] = 1 if outcome == 0 else 0
    return 0


@kernel
def _orders(buf: Bytes, texts: Bytes, scratch: Words, left: int, right: int, holding: int) -> int:
    """The same for <, <=, > and >=; two properties are compared as numbers."""
    if scratch[left] == NULL or scratch[right] == NULL:
        scratch[left] = NULL
        return 0
    if scratch[left] == PROPERTY and scratch[right] == PROPERTY:
        first = _as_double(buf, scratch, left)
        second = _as_double(buf, scratch, right)
        if first == BAD or second == BAD:
            return _NOT_COMPARABLE
        if first != PARSED or second != PARSED:
            return _LEFT_TO_PYTHON
        outcome = _order(int(scratch[left + 1]), int(scratch[right + 1]))
    else:
        outcome = _compare(buf, texts, scratch, left, right)
    if outcome > 1:
        return outcome
    scratch[left] = BOOLEAN
    scratch[left + 1] = 1 if holding & (SAME if outcome == 0 else ABOVE if outcome > 0 else BELOW) else 0
    return 0


@kernel
def _is_one_of(buf: Bytes, program: Words, texts: Bytes, scratch: Words, value: int, list_at: int, count: int) -> None:
    if scratch[value] == NULL:
        return
    at = int(scratch[value + 1])
    size = int(scratch[value + 2])
    found = False
    for i in range(count):
        if int(program[list_at + 2 * i + 1]) == size and same_bytes(
            buf, at, texts, int(program[list_at + 2 * i]), size
        ):
            found = True
            break
    scratch[value] = BOOLEAN
    scratch[value + 1] = 1 if found else 0


@kernel
def _holds(buf: Bytes, texts: Bytes, scratch: Words, value: int, place: int, part_at: int, part_size: int) -> bool:
    """Whether a property's text contains, begins with or ends with a text."""
    at = int(scratch[value + 1])
    size = int(scratch[value + 2])
    if part_size > size:
        return False
    if place == AT_START:
        return same_bytes(buf, at, texts, part_at, part_size)
    last = at + size - part_size
    if place == AT_END:
        return same_bytes(buf, last, texts, part_at, part_size)
    first = load_u8(texts, part_at)
    while at <= last:
        at = find_byte(buf, at, last + 1, first)
        if at <= last and same_bytes(buf, at, texts, part_at, part_size):
            return True
        at += 1
    return False


@kernel
def _joined(scratch: Words, left: int, right: int, deciding: int) -> None:
    """Replace the left of two three-valued values by their AND (`deciding` 0) or OR (1)."""
    left_decides = scratch[left] == BOOLEAN and scratch[left + 1] == deciding
    right_decides = scratch[right] == BOOLEAN and scratch[right + 1] == deciding
    if left_decides or right_decides:
        scratch[left] = BOOLEAN
        scratch[left + 1] = deciding
    elif scratch[right] == NULL:
        scratch[left] = NULL


@kernel
def verdict(buf: Bytes, start: int, stop: int, program: Words, texts: Bytes, scratch: Words) -> int:
    """Evaluate a filter on the properties buf[start:stop]; `start` must be at least 8."""
    _find_properties(buf, start, stop, program, texts, scratch)
    bottom = 2 * int(program[NAMES])
    top = bottom - VALUE_SIZE
    code = int(program[CODE])
    at = code
    while at < program.size:
        operation = int(program[at])
        a = int(program[at + 1])
        b = int(program[at + 2])
        c = int(program[at + 3])
        at += INSTRUCTION_SIZE
        problem = 0
        if operation == LOAD:
            top += VALUE_SIZE
            place = int(scratch[2 * a])
            scratch[top] = NULL if place == _ABSENT else PROPERTY
            scratch[top + 1] = place
            scratch[top + 2] = scratch[2 * a + 1]
        elif operation == PUSH:
            top += VALUE_SIZE
            scratch[top] = a
            scratch[top + 1] = b
            scratch[top + 2] = c
        elif operation == EQUALS:
            top -= VALUE_SIZE
            problem = _equals(buf, texts, scratch, top, top + VALUE_SIZE)
        elif operation == ORDERS:
            top -= VALUE_SIZE
            problem = _orders(buf, texts, scratch, top, top + VALUE_SIZE, a)
        elif operation == JUMP_IF_FALSE:
            if scratch[top] == BOOLEAN and scratch[top + 1] == 0:
                at = code + INSTRUCTION_SIZE * a
        elif operation == JUMP_IF_TRUE:
            if scratch[top] == BOOLEAN and scratch[top + 1] == 1:
                at = code + INSTRUCTION_SIZE * a
        elif operation == JUMP_IF_NULL:
            if scratch[top] == NULL:
                at = code + INSTRUCTION_SIZE * a
        elif operation in (AND, OR):
            top -= VALUE_SIZE
            _joined(scratch, top, top + VALUE_SIZE, 0 if operation == AND else 1)
        elif operation == NOT:
            scratch[top + 1] = 1 - scratch[top + 1] if scratch[top] == BOOLEAN else 0
        elif operation == IS_NULL:
            scratch[top + 1] = 1 if scratch[top] == NULL else 0
            scratch[top] = BOOLEAN
        elif operation == IS_ONE_OF:
            _is_one_of(buf, program, texts, scratch, top, a, b)
        elif operation in (TEXT_MATCHES, TEXT_DIFFERS):
            text = scratch[top] == PROPERTY
            found = _holds(buf, texts, scratch, top, a, b, c) if text else False
            scratch[top] = BOOLEAN
            scratch[top + 1] = 1 if text and found == (operation == TEXT_MATCHES) else 0
        elif operation == CAST:
            scratch[top] = NULL if scratch[top] == NULL else BOOLEAN
            scratch[top + 1] = 0
        elif operation == TO_NULL:
            scratch[top] = NULL
        else:
            return FAILS
        if problem != 0:
            return FAILS if problem == _NOT_COMPARABLE else UNDECIDED
    return PASSES if scratch[top] == BOOLEAN and scratch[top + 1] == 1 else FAILS


def warm() -> None:
    """Compile or load these kernels."""
    digit = np.full(8, _ZERO, np.uint8)
    out = np.zeros(1, np.int64)
    parse_long(digit, 0, 1, 9, out, 0)
    parse_double(digit, 0, 1, out, 0)
    program = np.array([0, HEAD_SIZE, FAIL, 0, 0, 0], np.int64)
    nothing = np.zeros(0, np.uint8)
    verdict(nothing, 0, 0, program, nothing, np.zeros(VALUE_SIZE, np.int64))
