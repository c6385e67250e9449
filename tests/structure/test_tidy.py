"""The tree keeps its own rules: storage only through StoreIO, offsets only in layout, no leftovers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("mqproc", "supervisor") for path in (ROOT / folder).rglob("*.py"))
PYTHON = sorted({*SOURCES, *(ROOT / "tests").rglob("*.py")})
LINES_MAX = 510

# What only StoreIO calls on a store's files. Sockets, pipes and /proc are not storage.
_OS_CALLS = (
    "fdatasync",
    "fsync",
    "ftruncate",
    "lseek",
    "posix_fadvise",
    "posix_fallocate",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "rename",
    "replace",
)
STORAGE_CALLS = {("os", name) for name in _OS_CALLS} | {("mmap", "mmap")}
WITHOUT_STORE_IO = {
    "mqproc/io/store_io.py",
    # They measure what the machine does without us.
    "mqproc/bench/limits.py",
    "mqproc/bench/stores.py",
}


def calls(path: Path) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            found.add((function.value.id, function.attr))
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_storage_calls_go_through_store_io(path: Path) -> None:
    if relative(path) not in WITHOUT_STORE_IO:
        assert not calls(path) & STORAGE_CALLS


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_a_file_owns_one_noun(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_MAX


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    found = [relative(path) for path in PYTHON if words.search(path.read_text())]
    assert not found


def test_every_module_says_what_it_owns() -> None:
    written = [path for path in PYTHON if path.stat().st_size]
    assert not [relative(path) for path in written if not ast.get_docstring(ast.parse(path.read_text()))]


def test_offsets_stand_in_layout_only() -> None:
    """`struct` formats of RocketMQ's files are declared in layout; elsewhere big-endian structs are suspect."""
    big_endian = re.compile(r"""Struct\(\s*["']>""")
    found = [relative(path) for path in SOURCES if big_endian.search(path.read_text())]
    assert not [name for name in found if not name.startswith("mqproc/layout/")]
