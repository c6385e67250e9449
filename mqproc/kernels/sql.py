"""Evaluating a compiled filter over the properties of a record, as it lies in the log (filters/program.py makes it).

    verdict(buf, start, stop, program, texts, scratch) -> FAILS, PASSES, or UNDECIDED

A filter is a program for a stack of values. A value is three words: what it is, then a number, a double's key, or
where a text lies. Three-valued logic, and what is unknown when, is told in filters/nodes.py, which also decides what
is UNDECIDED here: texts whose number is left to Python (kernels/numbers.py).

    program   NAMES (i64) · CODE (i64) · for each name: at, size · lists: at, size each · code: 4 words an instruction
    texts     names and texts of the filter, UTF-8
    scratch   where each name's value is (at, or −1; size) · the stack
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.fields import find_byte
from mqproc.kernels.intrinsics import load_u8
from mqproc.kernels.jit import kernel
from mqproc.kernels.numbers import BAD, PARSED, parse_double, parse_long
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.queue_lookup import same_bytes
from mqproc.layout import properties

FAILS, PASSES, UNDECIDED = range(3)

# The program's head.
NAMES, CODE = range(2)
HEAD_SIZE = 2
INSTRUCTION_SIZE = 4
VALUE_SIZE = 3

# What a value is.
(
    NULL,
    BOOLEAN,  # 0 or 1
    PROPERTY,  # at, size in the record
    TEXT,  # at, size in `texts`
    INT,  # the number
    LONG,
    DOUBLE,  # the key
) = range(7)

# Instructions; what they take from the stack → what they leave.
(
    PUSH,  # kind, a, b: → a literal
    LOAD,  # name: → the property, or NULL
    EQUALS,  # left, right → three-valued
    ORDERS,  # outcomes that hold: left, right → three-valued
    IS_NULL,  # value → BOOLEAN
    IS_ONE_OF,  # first word of the list, count: property → three-valued
    HOLDS,  # place, at, size of the text: value → BOOLEAN
    LACKS,  # the same, for the negated forms
    NOT,  # three-valued → three-valued
    CAST,  # value → NULL or false
    FORGET,  # value → NULL
    JUMP_IF_FALSE,  # instruction: looks at the top only
    JUMP_IF_TRUE,
    JUMP_IF_NULL,
    AND,  # two three-valued → one
    OR,
    FAIL,  # evaluation ends
) = range(17)

# Bits of the outcomes that hold.
BELOW, SAME, ABOVE = 1, 2, 4
ANYWHERE, AT_START, AT_END = range(3)

# Of a comparison, beside −1, 0 and 1.
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
    """Where the values of the filter's names are; the last of a name counts, one without a value does not."""
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
    if size != 4:
        return False
    word = 0
    for i in range(4):
        word = word << 8 | load_u8(buf, at + i)
    return word | _LOWER_CASE == _TRUE


@kernel
def _order(left: int, right: int) -> int:
    return int(left > right) - int(left < right)


@kernel
def _same_text(buf: Bytes, texts: Bytes, scratch: Words, left: int, right: int) -> bool:
    """Whether two values are the same text: properties, or a property and a literal."""
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
    """Put the key of a property's text into its second word; BAD, PARSED or UNDECIDED."""
    at = int(scratch[value + 1])
    return parse_double(buf, at, at + int(scratch[value + 2]), scratch, value + 1)


@kernel
def _compare_with_number(buf: Bytes, scratch: Words, text: int, number: int) -> int:
    """A property's text against a literal that is a number."""
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
    """Two values of which none is NULL and one at least comes from the message."""
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
    # A boolean beside a number differs; beside a text on its right it cannot be compared.
    return _NOT_COMPARABLE if right_text else -1


@kernel
def _equals(buf: Bytes, texts: Bytes, scratch: Words, left: int, right: int) -> int:
    """Put what `=` is into the left value's place; NOT_COMPARABLE, LEFT_TO_PYTHON or 0."""
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
    """The same for `<` and its like; two texts are compared as numbers."""
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
    """Whether a property's text has a part."""
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
    """AND (`deciding` 0) or OR (1) of two three-valued ones, in the left one's place."""
    left_decides = scratch[left] == BOOLEAN and scratch[left + 1] == deciding
    right_decides = scratch[right] == BOOLEAN and scratch[right + 1] == deciding
    if left_decides or right_decides:
        scratch[left] = BOOLEAN
        scratch[left + 1] = deciding
    elif scratch[right] == NULL:
        scratch[left] = NULL


@kernel
def verdict(buf: Bytes, start: int, stop: int, program: Words, texts: Bytes, scratch: Words) -> int:
    """Whether the message whose properties are buf[start:stop] passes. At least 8 bytes lie before `start`."""
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
        elif operation in (HOLDS, LACKS):
            text = scratch[top] == PROPERTY
            found = _holds(buf, texts, scratch, top, a, b, c) if text else False
            scratch[top] = BOOLEAN
            scratch[top + 1] = 1 if text and found == (operation == HOLDS) else 0
        elif operation == CAST:
            scratch[top] = NULL if scratch[top] == NULL else BOOLEAN
            scratch[top + 1] = 0
        elif operation == FORGET:
            scratch[top] = NULL
        else:
            return FAILS
        if problem != 0:
            return FAILS if problem == _NOT_COMPARABLE else UNDECIDED
    return PASSES if scratch[top] == BOOLEAN and scratch[top + 1] == 1 else FAILS


def warm() -> None:
    """Compile or load these kernels."""
    program = np.array([0, HEAD_SIZE, FAIL, 0, 0, 0], np.int64)
    nothing = np.zeros(0, np.uint8)
    verdict(nothing, 0, 0, program, nothing, np.zeros(VALUE_SIZE, np.int64))
