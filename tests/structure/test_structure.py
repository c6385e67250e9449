"""The source keeps its structure: layers, names, sizes, plain prose."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.structure import measures
from tests.structure.measures import ROOT

PRODUCT = measures.modules()
TESTS = measures.modules(("tests",))
DOCUMENTS = [
    path
    for folder in (ROOT / "mqproc", ROOT / "supervisor", ROOT / "grafana", ROOT / "tests")
    for path in sorted(folder.rglob("*.md"))
    if not any(parent.is_symlink() for parent in path.parents) and not path.is_symlink()
] + [ROOT / "README.md", ROOT / "CHANGELOG.md"]

# Limits only go down: 330 modules, 84,000 lines, 40 helpers, and no violation in tests are the aim.
PRODUCT_MODULES_MAX = 356
PRODUCT_LINES_MAX = 99_000
TEST_HELPERS_MAX = 41
TEST_PHRASES_MAX = 0
TEST_PRIVATE_USES_MAX = 0
TEST_LONG_NAMES_MAX = 0
README_LINES_MAX = 200
CHANGELOG_LINES_MAX = 150

FRAGMENTS_ALLOWED: dict[str, str] = {
    "mqproc/integrations/kombu_entry.py": "an entry point, imported before kombu's transports can be",
    "mqproc/metrics/exposition.py": "imported at the first scrape: prometheus_client takes 50 ms",
    "supervisor/cpu_latency.py": "an optional feature of Linux, apart from the supervisor's loop",
}
"""Short modules with one importer in their package, each with the reason why it stays a module."""

# System calls on a store's files, which only StoreIO makes. Sockets, pipes and /proc are not storage.
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
STORAGE_CALLS_ALLOWED = {
    "mqproc/io/store_io.py": "the only path to storage",
    "mqproc/client/broadcast_progress.py": "replaces a file outside the store",
    "mqproc/bench/limits.py": "measures the machine without StoreIO",
    "mqproc/kernels/jit/cache.py": "replaces files of compiled kernels, outside stores",
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            found.add((function.value.id, function.attr))
    return found


def test_product_size_stays_within_limits() -> None:
    assert len(PRODUCT) <= PRODUCT_MODULES_MAX
    assert sum(len(path.read_text().splitlines()) for path in PRODUCT) <= PRODUCT_LINES_MAX


def test_readme_and_changelog_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= CHANGELOG_LINES_MAX


def test_short_modules_with_one_importer_are_listed_with_a_reason() -> None:
    found = {line.partition(":")[0] for line in measures.fragments(measures.import_graph())}
    assert found == set(FRAGMENTS_ALLOWED)


def test_import_graph_has_no_cycles() -> None:
    assert measures.cycles(measures.import_graph()) == []


def test_public_class_names_are_unique() -> None:
    repeated = {name: places for name, places in measures.public_classes().items() if len(places) > 1}
    assert repeated == {}


def test_functions_stay_within_limits() -> None:
    assert [found for path in PRODUCT for found in measures.large_functions(path)] == []


def test_modules_use_no_private_names_of_others() -> None:
    assert [found for path in PRODUCT for found in measures.private_uses(path)] == []
    assert len([found for path in TESTS for found in measures.private_uses(path)]) <= TEST_PRIVATE_USES_MAX


def phrases_in(files: list[Path]) -> list[str]:
    files = [path for path in files if path != Path(measures.__file__)]
    return [f"{relative(path)}:{line}: {text}" for path in files for line, text in measures.banned_phrases(path)]


def test_prose_has_no_banned_phrases() -> None:
    of_tests = [path for path in DOCUMENTS if ROOT / "tests" in path.parents]
    assert phrases_in([*PRODUCT, *(path for path in DOCUMENTS if path not in of_tests)]) == []
    assert len(phrases_in([*TESTS, *of_tests])) <= TEST_PHRASES_MAX


def test_docstring_summaries_fit_on_a_line() -> None:
    assert [found for path in PRODUCT for found in measures.long_summaries(path)] == []


def test_modules_have_docstrings() -> None:
    written = [path for path in [*PRODUCT, *TESTS] if path.stat().st_size]
    assert [relative(path) for path in written if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_test_names_are_short() -> None:
    assert len([found for path in TESTS for found in measures.long_test_names(path)]) <= TEST_LONG_NAMES_MAX


def test_helper_modules_of_tests_are_few() -> None:
    others = ("__init__.py", "__main__.py", "conftest.py")
    helpers = [path for path in TESTS if not path.name.startswith("test_") and path.name not in others]
    assert len(helpers) <= TEST_HELPERS_MAX


def test_storage_calls_go_through_store_io() -> None:
    found = {relative(path) for path in PRODUCT if calls(path) & STORAGE_CALLS}
    assert found == set(STORAGE_CALLS_ALLOWED)


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    assert not [relative(path) for path in [*PRODUCT, *TESTS] if words.search(path.read_text())]


def test_byte_offsets_are_declared_in_layout_only() -> None:
    """RocketMQ's files are big-endian: a big-endian struct outside layout describes one of them a second time."""
    big_endian = re.compile(r"""Struct\(\s*["']>""")
    found = [relative(path) for path in PRODUCT if big_endian.search(path.read_text())]
    assert not [name for name in found if not name.startswith("mqproc/layout/")]


def test_glossary_terms_lead_to_their_modules() -> None:
    """Each row of the glossary names a term, its meaning, and a module in which the term occurs."""
    text = (ROOT / "mqproc" / "README.md").read_text().partition("## Glossary")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 55
    for term, _meaning, place in rows:
        path = ROOT / place
        assert path.exists(), place
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        words = re.split(r"[ -]", re.sub(r"\(.*?\)", "", term).split(",")[0].strip().lower())
        found = any(all(word in (file.read_text() + file.name).lower() for word in words) for file in files)
        assert found, (term, place)
