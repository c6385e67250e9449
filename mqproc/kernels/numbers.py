"""Texts as numbers by Java's rules: `Integer.valueOf`, `Long.valueOf` and `Double.valueOf` over bytes.

    parse_long(buf, at, stop, limit, out, place)     the number in out[place]
    parse_double(buf, at, stop, out, place)          a key that orders as Double.compare does (filters/values.py)

Both return PARSED, BAD, or UNDECIDED for what is left to Python: digits of other scripts, hexadecimal numbers, and
decimals of more than 18 digits that lie so near the middle of two doubles that the others count.

Decimals become the nearest double without a division: D. Lemire, *Number Parsing at a Gigabyte per Second*, Software:
Practice and Experience 51(8), 2021; that one step of it is never in doubt: N. Mushtak and D. Lemire, *Fast Number
Parsing Without Fallback*, 2023. Numbers of 64 bits are two halves here, since a kernel's integers have a sign.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.intrinsics import leading_zeros, load_u8
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words

BAD, PARSED, UNDECIDED = range(3)

NAN_KEY = 0x7FF8_0000_0000_0000
INFINITY_KEY = 0x7FF0_0000_0000_0000

_HALF = 0xFFFF_FFFF
_POWER_MIN = -342  # 10^19 × 10^q is 0 below it
_POWER_MAX = 308  # and infinite above it
_DIGITS_MAX = 18  # 10^18 < 2^60
_EXPONENT_MAX = 100_000  # an exponent beyond it is as good as this one
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
    """128 bits of 5^q, the highest one set, for each q: four halves from the highest. Rounded up below q = 0."""
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
    """The integer buf[at:stop] as Java takes it: a sign, then digits, between −limit − 1 and limit."""
    if at >= stop:
        return BAD
    first = load_u8(buf, at)
    negative = first == _MINUS
    if negative or first == _PLUS:
        at += 1
    if at >= stop:
        return BAD
    # Counted down, since the lowest number has no positive one.
    lowest = -limit - 1 if negative else -limit
    number = 0
    fits = True
    for i in range(at, stop):
        byte = load_u8(buf, i)
        if byte >= 0x80:
            return UNDECIDED
        digit = byte - _ZERO
        if digit < 0 or digit > 9:
            return BAD
        # limit // 10 is the same for both signs, as neither limit ends in 9.
        if fits and number >= -(limit // 10) and 10 * number >= lowest + digit:
            number = 10 * number - digit
        else:
            fits = False
    out[place] = number if negative else -number
    return PARSED if fits else BAD


@kernel
def _nearest_double(digits: int, power: int) -> int:
    """The bits of the double nearest to digits × 10^power, for 0 < digits < 2^60."""
    if power < _POWER_MIN:
        return 0
    if power > _POWER_MAX:
        return INFINITY_KEY
    # The highest bit of 64 is set: of 63 here, so that the sign stays clear.
    zeros = leading_zeros(digits)
    digits <<= zeros - 1
    high = digits >> 31
    low = (digits << 1) & _HALF
    row = 4 * (power - _POWER_MIN)
    # digits × the upper 64 bits of the power: 128 bits in p3 … p0.
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
        # The lower 64 bits of the power may carry into what counts: the upper half of their product is added.
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
        # Below the normal numbers.
        if 1 - exponent >= 64:
            return 0
        mantissa >>= 1 - exponent
        mantissa += mantissa & 1
        return mantissa >> 1
    # Exactly in the middle of two doubles: the even one.
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
    """The key of NaN or Infinity, 0 when buf[at:stop] is neither."""
    if stop - at == 3 and _word_at(buf, at, 3) == _NAN:
        return NAN_KEY
    if stop - at == 8 and _word_at(buf, at, 4) == _INFINITY_HEAD and _word_at(buf, at + 4, 4) == _INFINITY_TAIL:
        return INFINITY_KEY
    return 0


@kernel
def parse_double(buf: Bytes, at: int, stop: int, out: Words, place: int) -> int:
    """The number buf[at:stop] as Java takes it: blanks around it, a sign, digits with a point, an exponent, f or d."""
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
        return UNDECIDED
    digits = 0
    counted = 0  # digits in `digits`
    dropped = 0  # digits behind them, before the point
    behind = 0  # of the counted ones, behind the point
    more = False  # a dropped one is not 0
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
                behind += 1 if point else 0
            else:
                dropped += 0 if point else 1
                more |= byte != _ZERO
        else:
            break
        at += 1
    if not any_digit:
        return BAD
    power = dropped - behind
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
        return UNDECIDED
    out[place] = -1 - key if negative else key
    return PARSED


def warm() -> None:
    """Compile or load these kernels."""
    digit = np.full(8, _ZERO, np.uint8)
    out = np.zeros(1, np.int64)
    parse_long(digit, 0, 1, 9, out, 0)
    parse_double(digit, 0, 1, out, 0)
