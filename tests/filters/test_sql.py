"""SQL92 filters match RocketMQ's results per message; errors include the position."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import FilterSyntaxError
from mqproc.filters.compiler import COMPILED_MAX, compiled
from mqproc.filters.expressions import DEPTH_MAX, Node, NotComparable
from mqproc.filters.parser import parse
from mqproc.topic_names import FILTER_BYTES_MAX

ANSWERS = Path(__file__).parent / "rocketmq_answers.jsonl.gz"


def recorded() -> Iterator[dict[str, Any]]:
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def letter(node: Node, properties: dict[str, str]) -> str:
    try:
        value = node.evaluate(properties)
    except NotComparable:
        return "X"
    assert value is None or isinstance(value, bool)
    return {True: "T", False: "F", None: "N"}[value]


def test_every_recorded_answer_of_rocketmq() -> None:
    compared = 0
    for case in recorded():
        if "answers" not in case:
            with pytest.raises(FilterSyntaxError):
                parse(case["expression"])
            continue
        node = parse(case["expression"])
        found = "".join(letter(node, properties) for properties in case["properties"])
        assert found == case["answers"], case["expression"]
        compared += len(found)
    assert compared > 10_000


# Cases of RocketMQ's own tests: filter, properties, expected match.
THREES = {"a": "3", "b": "5", "c": "6", "d": "1"}
ORIGINAL = [
    ("a=3 and b<>4 And c>5 AND d<=4", THREES, True),
    ("a=3 and b<>4 And c>5 AND d<=4", THREES | {"a": "4"}, False),
    ("a=3  and    b<>4 And c>5 AND d<=4", THREES, True),
    ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "3"}, True),
    ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "4", "b": "5"}, True),
    ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "4", "b": "4", "c": "6"}, True),
    ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "4", "b": "4", "c": "3", "d": "2"}, True),
    ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "4", "b": "4", "c": "3", "d": "10"}, False),
    ("a in ('3', '4', '5')", {"a": "3"}, True),
    ("a in ('3', '4', '5')", {"a": "4"}, True),
    ("a in ('3', '4', '5')", {"a": "5"}, True),
    ("a in ('3', '4', '5')", {"a": "8"}, False),
    ("a not in ('3', '4', '5')", {"a": "8"}, True),
    ("a not in ('3', '4', '5')", {"a": "3"}, False),
    ("a not in ('3', '4', '5')", {}, False),
    ("(a not in ('6', '4', '5')) or (b in ('3', '4', '5'))", {"a": "6", "b": "3"}, True),
    ("(a between 2 and 10) AND (b not between 6 and 9)", {"a": "2", "b": "5"}, True),
    ("a between 2 and 10", {"a": "2"}, True),
    ("a between 2 and 10", {"a": "10"}, True),
    ("a between 2 and 10", {"a": "3"}, True),
    ("a between 2 and 10", {"a": "1"}, False),
    ("a between 2 and 10", {"a": "11"}, False),
    ("a not between 2 and 10", {"a": "1"}, True),
    ("a not between 2 and 10", {"a": "11"}, True),
    ("a not between 2 and 10", {"a": "2"}, False),
    ("a not between 2 and 10", {"a": "10"}, False),
    ("a not between 2 and 10", {"a": "3"}, False),
    ("a is null", {"abc": "2"}, True),
    ("a is null", {"a": "2"}, False),
    ("a is not null", {"a": "2"}, True),
    ("a is not null", {"abc": "2"}, False),
    ("a is not null and a='hello'", {"a": "hello"}, True),
    ("a is not null and a='hello'", {}, False),
    ("a is null OR a='hello'", {}, True),
    ("a is null OR a='hello'", {"a": "hello"}, True),
    ("a is null OR a='hello'", {"a": "abc"}, False),
    ("a=TRUE OR b=FALSE", {"a": "true", "b": "false"}, True),
    ("a=TRUE OR b=FALSE", {"a": "false", "b": "true"}, False),
    ("TAGS is not null and TAGS='''''tag'''''", {"TAGS": "''tag''"}, True),
    ("a > 3.1E10", {"a": "3.1415E10"}, True),
    ("a > 3.14", {"a": "3.1415"}, True),
    ("a > b", {"a": "10", "b": "20"}, False),
    ("a > b", {"a": "20", "b": "10"}, True),
    ("a = b", {"a": "3.14", "b": "3.14"}, True),
    ("a <> b", {"a": "3.14", "b": "3.14"}, False),
    ("a <> b", {"a": "3.14", "b": "3.141"}, True),
    ("a between up and low", {"a": "3.14"}, False),
    ("a between up and low", {"a": "3.14", "up": "up", "low": "low"}, False),
    ("key is not null and key between 0 and 100", {"key": "con"}, False),
    ("a between 0 and 100", {"a": "abc"}, False),
    ("a <= now", {"a": "1", "now": "2"}, True),
    ("a contains 'ax'", {"a": "tax"}, True),
    ("a contains 'ax'", {"a": "tux"}, False),
    ("a contains 'ax'", {}, False),
    ("a contains '1'", {"a": "3.14"}, True),
    ("a contains 'u'", {"a": "true"}, True),
    ("a contains ''", {"a": "tax"}, False),
    ("a contains ' '", {"a": "t ax"}, True),
    ("a contains '%'", {"a": "100%"}, True),
    ("a contains '$'", {"a": "tax"}, False),
    ("a not contains 'ax'", {"a": "tux"}, True),
    ("a not contains 'ax'", {"a": "tax"}, False),
    ("a not contains 'ax'", {}, False),
    ("a not contains ''", {"a": "tax"}, False),
    ("a startswith 'ta'", {"a": "tax"}, True),
    ("a startswith 'ax'", {"a": "tax"}, False),
    ("a startswith 'taxes'", {"a": "tax"}, False),
    ("a not startswith 'ax'", {"a": "tax"}, True),
    ("a not startswith 'ta'", {}, False),
    ("a startswith ''", {"a": "tax"}, False),
    ("a endswith 'ax'", {"a": "tax"}, True),
    ("a endswith 'ta'", {"a": "tax"}, False),
    ("a not endswith 'ta'", {"a": "tax"}, True),
    ("a not endswith ''", {"a": "tax"}, False),
]


@pytest.mark.parametrize(("expression", "properties", "matches"), ORIGINAL)
def test_rocketmq_own_cases(expression: str, properties: dict[str, str], matches: bool) -> None:
    assert compiled(expression).matches(properties) is matches


def test_blanks_are_ignored() -> None:
    filters = ("a=3 and b<>4", "a=3  and\n\tb <> 4", "/* a */ a=3 and b<>4 -- the end")
    assert len({parse(each) for each in filters}) == 1
    assert parse("a=3 and b<>4") != parse("a=3 or b<>4")


@pytest.mark.parametrize(
    ("expression", "position", "problem"),
    [
        ("", 0, "ends where a property or a value is expected"),
        ("a and between 2 and 10", 6, "'between' found"),
        ("a > 100000000000000000000000", 4, "does not fit 64 bits"),
        ("a > " + "1" * 400 + ".1", 4, "is not between"),
        ("a = 0.0", 4, "is not between"),
        ("a between 10 and 0", 10, "lower bound is above"),
        ("a between null and 0", 10, "NULL cannot be a bound"),
        ("a = null", 4, "IS NULL"),
        ("a > 'x'", 4, "numbers only"),
        ("a > 1 > 2", 0, "numbers only"),
        ("true = 1", 7, "another literal"),
        ("5", 0, "a condition is expected"),
        ("a = 1 and -b", 11, "a condition is expected"),
        ("5 in ('5')", 0, "a property on its left"),
        ("a in ()", 6, "a text"),
        ("a in (5)", 6, "a text"),
        ("a contains b", 11, "a text"),
        ("a = 'x", 4, "unterminated text"),
        ("a = 1 /* x", 6, "unexpected character '/'"),
        ("a != 1", 2, "unexpected character '!'"),
        ("a.b = 1", 1, "unexpected character '.'"),
        ("(a = 1", 6, "ends where"),
        ("é = 1", 0, "unexpected character"),
    ],
)
def test_errors_include_position(expression: str, position: int, problem: str) -> None:
    with pytest.raises(FilterSyntaxError, match=problem) as caught:
        compiled(expression)
    assert caught.value.position == position
    assert f"character {position + 1} (the first is 1): " in str(caught.value), "people count from 1"


@pytest.mark.parametrize("expression", ["a = 1 b", "a = 1)", "a like 'x%'", "a - b", "a = 05", "a = --5"])
def test_words_after_end_are_rejected(expression: str) -> None:
    with pytest.raises(FilterSyntaxError):
        compiled(expression)


def test_length_and_depth_are_limited() -> None:
    many = " or ".join(f"a = {number}" for number in range(300))
    assert compiled(many).matches({"a": "299"})
    with pytest.raises(FilterSyntaxError, match="exceeds 4,096") as caught:
        compiled("a = 1 " + " " * FILTER_BYTES_MAX)
    assert caught.value.position == FILTER_BYTES_MAX
    compiled("(" * 1000 + "a = 1" + ")" * 1000)  # Brackets alone are not a level.
    with pytest.raises(FilterSyntaxError, match=f"more than {DEPTH_MAX} levels"):
        compiled("NOT " * 100 + "a")


def test_compiled_filters_are_cached_with_limit() -> None:
    assert compiled("a = 77") is compiled("a = 77")
    for number in range(COMPILED_MAX + 10):
        compiled(f"kept = {number}")
    assert compiled.cache_info().currsize == COMPILED_MAX
