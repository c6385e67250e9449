"""Every row of this folder's README names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
HERE = Path(__file__).parent
ROWS = 35


def test_every_row_has_a_test() -> None:
    sources = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    defined = set(re.findall(r"def test_(\w+)\(", sources))
    rows: set[int] = set()
    for line in (HERE / "README.md").read_text().splitlines():
        if not re.match(r"\| \d", line):
            continue
        numbers, *_, tests = line.strip("| ").split(" | ")
        rows |= {int(number) for number in numbers.split(",")}
        named = re.findall(r"`([^`]+)`", tests)
        assert named, line
        files = {name for name in named if name.endswith(".py")}
        assert not [name for name in files if not ((TESTS / name).exists() or (HERE / name).exists())], line
        assert set(named) - files <= defined, line
    assert rows == set(range(1, ROWS + 1))
