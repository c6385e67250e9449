"""The tables of this folder's README name existing tests and files."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"`([a-z_0-9/]+\.py|[a-z0-9]+(?:_[a-z0-9]+){3,})`")


def test_readme_tables_name_existing_tests() -> None:
    sources = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    defined = set(re.findall(r"def test_(\w+)\(", "\n".join(sources.values())))
    named = set(NAMED.findall((Path(__file__).parent / "README.md").read_text()))
    assert len(named) > 30
    files = {name for name in named if name.endswith(".py")}
    assert named - files <= defined
    assert not [name for name in files if not ((TESTS / name).exists() or (TESTS / "scenarios" / name).exists())]
