"""The filter kernel gives the same verdicts as the filter's nodes, compiled and plain."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest

from mqproc.errors import FilterSyntaxError
from mqproc.filters.compiler import Program, compiled
from mqproc.filters.expressions import INT_MAX, LONG_MAX, NotComparable, as_double, as_long, double_key
from mqproc.kernels import sql
from mqproc.kernels.jit.compile import plain
from mqproc.layout.properties import encode
from tests.filters.expressions import VALUES, Expressions
from tests.filters.test_sql import recorded
from tests.support.records import kernel_bytes

HEAD = bytes(8)


def verdicts(program: Program, properties: str) -> int:
    """The kernel's verdict; compiled and plain must agree."""
    buffer = kernel_bytes(HEAD + properties.encode())
    found = {
        kernel(buffer, len(HEAD), len(buffer), program.words, program.texts, np.zeros(program.scratch_size, np.int64))
        for kernel in (sql.verdict, plain(sql.verdict))
    }
    assert len(found) == 1
    return found.pop()


def test_kernel_matches_recorded_answers() -> None:
    left_to_python = compared = 0
    for number, case in enumerate(recorded()):
        if "answers" not in case:
            continue
        filtering = compiled(case["expression"])
        each = list(zip(case["properties"], case["answers"], strict=True))
        for properties, letter in each if len(each) < 200 else each[number % 3 :: 7]:
            found = verdicts(filtering.program, encode(properties))
            compared += 1
            if found == sql.UNDECIDED:
                left_to_python += 1
                assert filtering.matches(properties) is (letter == "T")
            else:
                assert (found == sql.PASSES) is (letter == "T"), (case["expression"], properties)
    assert left_to_python < compared / 20


def test_kernel_matches_nodes_for_random_filters() -> None:
    source = Expressions(seed=7)
    for _ in range(300):
        expression = source.expression()
        try:
            filtering = compiled(expression)
        except FilterSyntaxError:
            continue
        for properties in (source.message() for _ in range(3)):
            found = verdicts(filtering.program, encode(properties))
            if found != sql.UNDECIDED:
                assert (found == sql.PASSES) is filtering.matches(properties), (expression, properties)


def test_last_value_of_name_counts_unless_empty() -> None:
    program = compiled("a = 'x'").program
    assert verdicts(program, "a\x01y\x02a\x01x\x02") == sql.PASSES
    assert verdicts(program, "a\x01x\x02a\x01y\x02") == sql.FAILS
    assert verdicts(program, "a\x01x\x02a\x01\x02") == sql.PASSES
    assert verdicts(program, "ab\x01x\x02b\x01a\x01x\x02") == sql.FAILS
    assert verdicts(program, "a\x01x") == sql.PASSES
    assert verdicts(program, "") == sql.FAILS


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("TAGS = 'a'", {"a"}),
        ("'a' = TAGS and b > 1", {"a"}),
        ("TAGS in ('a', 'b') and TAGS <> 'a'", {"a", "b"}),
        ("TAGS = 'a' or TAGS = 'b' and c = 1", {"a", "b"}),
        ("TAGS = 'a' and TAGS = 'b'", set()),
        ("TAGS = 'a' or b = 1", None),
        ("TAGS <> 'a'", None),
        ("not (TAGS = 'a')", None),
        ("tags = 'a'", None),
    ],
)
def test_required_tags_of_filter(expression: str, tags: set[str] | None) -> None:
    assert compiled(expression).tags == tags


# Numbers


def parsed(kernel: object, text: str, *limit: int) -> tuple[int, int]:
    out = np.zeros(1, np.int64)
    data = kernel_bytes(text.encode())
    status = kernel(data, 0, len(data), *limit, out, 0)  # type: ignore[operator]
    return int(status), int(out[0]) if status == sql.PARSED else 0


def check_double(text: str) -> int:
    status, key = parsed(sql.parse_double, text)
    assert (status, key) == parsed(plain(sql.parse_double), text)
    if status == sql.UNPARSED:
        return status
    try:
        expected = (sql.PARSED, double_key(as_double(text)))
    except NotComparable:
        expected = (sql.BAD, 0)
    assert (status, key) == expected, text
    return status


@pytest.mark.parametrize("text", VALUES)
def test_unusual_numbers_are_parsed(text: str) -> None:
    check_double(text)
    for limit in (INT_MAX, LONG_MAX):
        status, value = parsed(sql.parse_long, text, limit)
        assert (status, value) == parsed(plain(sql.parse_long), text, limit)
        try:
            expected = (sql.PARSED, as_long(text, limit))
        except NotComparable:
            expected = (sql.BAD, 0)
        assert status == sql.UNPARSED or (status, value) == expected


def test_random_doubles_are_rounded_to_nearest() -> None:
    rng = random.Random(5)
    undecided = 0
    for _ in range(4000):
        (value,) = struct.unpack(">d", rng.randbytes(8))
        if not math.isfinite(value):
            continue
        for text in (
            repr(value),
            f"{value:.{rng.randint(0, 17)}e}",
            f"{rng.randrange(10**18)}e{rng.randint(-345, 310)}",
        ):
            undecided += check_double(text) == sql.UNPARSED
        # The midpoint of two doubles, with as many digits as fit.
        middle = rng.getrandbits(53) * 2 + 1
        undecided += check_double(str(middle)) == sql.UNPARSED
    assert undecided == 0
    assert check_double("9007199254740993." + "0" * 40 + "1") == sql.UNPARSED


def test_keys_order_as_java_compares_doubles() -> None:
    ordered = [-math.inf, -1.5, -5e-324, -0.0, 0.0, 5e-324, 1.0, 1e308, math.inf, math.nan]
    keys = [double_key(value) for value in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
