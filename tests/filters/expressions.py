"""Random filters and messages: all grammar forms, boundary literals, unusual numbers.

As a program, records the answers of RocketMQ's filter to random questions (usage: README.md).
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("a", "b", "c", "TAGS", "A", "$x", "_y1")
TEXTS = ("x", "5", "", "true", "it''s", "TagA", "%", "$", " ", "5.5", "abc", "b", "é", "日本")
INTEGERS = ("0", "5", "10", "3", "2147483647", "2147483648", "9223372036854775807", "5L", "7l")
REALS = (
    *("5.5", "3.", "0.25", ".5", "1e3", "5E-1", "1.7976931348623157E308", "4.9e-324", "3.14", "05.5", "1e23"),
    *("100000000000000000000000.0", "9007199254740993.0"),
)
PLAIN_VALUES = (
    *("5", "5.5", "x", "true", "TRUE", "false", "tRuE", "-5", "+5", "0", "-0", "00", "10", "3", "7", "0.25", "abc"),
    *("TagA", "it's", "%", "$", " ", "b", "é", "日本"),
)
ODD_NUMBERS = (
    *(" 5", "5 ", "\t5\n", "5d", "5F", "5.", "1e3", ".5", "1e", "1e+", ".", "-", "+", "5e-0", "1E2", "1e2f", "x5"),
    *("NaN", "-NaN", "Infinity", "-Infinity", "infinity", "0x1p3", "0x.8p1", "0x1", "0X1P-3d", "1_000"),
    *("2147483647", "2147483648", "-2147483648", "-2147483649", "000000000000000000000000005"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809"),
    *("3.14", "3.1400000000000001", "3.14000000000000012434497875801753252744674682617187500001"),
    *("1e400", "-1e400", "1e-400", "4.9e-324", "2.4703282292062328e-324", "2.4703282292062327e-324"),
    *("9007199254740993", "9007199254740993.0", "9007199254740992.99999999999999999"),
    *("9007199254740993.00000000000000001", "1e23", "8.41e21", "123456789012345678901234567890"),
    *("0.1234567890123456", "0.0", "-0.0", "1e99999999999", "0e99999999999", "５", "٣", "5５"),
)
VALUES = PLAIN_VALUES + ODD_NUMBERS


class Expressions:
    """Generates filters; some are invalid, and RocketMQ rejects them too."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def expression(self) -> str:
        """One filter."""
        return self._either(self._random.choice((0, 1, 1, 2, 3)))

    def message(self) -> dict[str, str]:
        """The properties of one message."""
        chosen = self._random
        return {
            name: chosen.choice(VALUES) if chosen.random() < 0.8 else chosen.choice(("5", "x", "true", "3"))
            for name in NAMES
            if chosen.random() < 0.55
        }

    def _one_of(self, words: Sequence[str]) -> str:
        return self._random.choice(words)

    def _literal(self) -> str:
        kind = self._random.random()
        if kind < 0.5:
            return self._one_of(INTEGERS + REALS)
        if kind < 0.8:
            return f"'{self._one_of(TEXTS)}'"
        return self._one_of(("TRUE", "false", "True", "NULL") if kind > 0.97 else ("TRUE", "false", "True"))

    def _primary(self, depth: int) -> str:
        kind = self._random.random()
        if kind < 0.5:
            return self._one_of(NAMES)
        return self._literal() if kind < 0.85 or depth <= 0 else f"({self._either(depth - 1)})"

    def _prefixed(self, depth: int) -> str:
        kind = self._random.random()
        if depth > 0 and kind < 0.15:
            return self._one_of(("- ", "+", "NOT ")) + self._prefixed(depth - 1)
        return self._primary(depth)

    def _texts(self) -> str:
        return ",".join(f"'{self._one_of(TEXTS)}'" for _ in range(self._random.randint(1, 6)))

    def _comparison(self, depth: int) -> str:
        made = self._prefixed(depth)
        for _ in range(self._random.choice((0, 1, 1, 1, 1, 1, 2)) if depth > 0 else 1):
            kind, negated = self._random.random(), self._one_of(("", "", "not ", "NOT "))
            if kind < 0.5:
                made += self._one_of((" > ", "<=", " < ", ">=")) + self._prefixed(depth - 1)
            elif kind < 0.62:
                made += f" {negated}BETWEEN {self._prefixed(0)} and {self._prefixed(0)}"
            elif kind < 0.75:
                made += f" {negated}in ({self._texts()})"
            else:
                word = self._one_of(("contains", "STARTSWITH", "EndsWith"))
                made += f" {negated}{word} '{self._one_of(TEXTS)}'"
        return made

    def _equality(self, depth: int) -> str:
        kind = self._random.random()
        made = self._comparison(depth) if kind < 0.45 else self._prefixed(depth)
        for _ in range(self._random.choice((0, 1, 1, 1, 2)) if kind < 0.6 else 1):
            kind = self._random.random()
            if kind < 0.45:
                made += " = " + (self._comparison(depth - 1) if kind < 0.1 else self._prefixed(depth - 1))
            elif kind < 0.7:
                made += "<>" + self._prefixed(depth - 1)
            else:
                made += " is null" if kind < 0.85 else " IS not NULL"
        return made

    def _both(self, depth: int) -> str:
        parts = (self._equality(depth) for _ in range(self._random.choice((1, 1, 1, 2, 3))))
        return self._one_of((" AND ", " and ")).join(parts)

    def _either(self, depth: int) -> str:
        parts = (self._both(depth) for _ in range(self._random.choice((1, 1, 1, 2, 3))))
        return self._one_of((" OR ", " or ")).join(parts)


# Recording of RocketMQ's answers

FOLDER = Path(__file__).parent
ANSWERS = FOLDER / "rocketmq_answers.jsonl.gz"
EXPRESSIONS = 1500
CHARACTERS_MAX = 160
REFUSED_MAX = 250
LITERALS = ("5", "2147483648", "3.14", "5.5", "1e23", "9007199254740992.0", "0.25", "4.9e-324", "9223372036854775807")
OPERATORS = ("=", "<", ">=")


def questions() -> list[dict[str, Any]]:
    """Random filters over random messages; all literals and two properties over all values."""
    source = Expressions(seed=92)
    random_ones = [text for _ in range(EXPRESSIONS) if len(text := source.expression()) <= CHARACTERS_MAX]
    asked = [(text, [source.message() for _ in range(6)]) for text in dict.fromkeys(random_ones)]
    one = [{"a": value} for value in VALUES]
    two = [{"a": value, "b": other} for value in VALUES for other in VALUES[::2]]
    asked += [(f"a {operator} {literal}", one) for literal in LITERALS for operator in OPERATORS]
    asked += [(f"{literal} {operator} a", one) for literal in LITERALS for operator in OPERATORS]
    asked += [(f"a {operator} b", two) for operator in OPERATORS]
    return [{"expression": text, "properties": messages} for text, messages in asked]


def main(classpath: str) -> None:
    asked = questions()
    lines = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in asked)
    program = ["java", "-cp", classpath, str(FOLDER / "java" / "Answers.java")]
    said = subprocess.run(program, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    refused = [
        {"expression": each["expression"]} for each, letters in zip(asked, said, strict=True) if letters == "refused"
    ]
    answered = [{**each, "answers": letters} for each, letters in zip(asked, said, strict=True) if letters != "refused"]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in refused[:REFUSED_MAX] + answered)
    with gzip.GzipFile(ANSWERS, "wb", 9, mtime=0) as file:
        file.write(text.encode())


if __name__ == "__main__":
    main(sys.argv[1])
