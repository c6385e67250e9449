"""Record the answers of RocketMQ's filter to random questions (usage: README.md)."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.filters.expressions import VALUES, Expressions

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
