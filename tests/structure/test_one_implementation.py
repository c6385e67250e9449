"""Simulator, outages and model run the product's code and neither know formats nor patch it.

Otherwise a second encoder, decoder or recovery would be tested instead of the store's own.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqproc.layout

ROOT = Path(__file__).parents[2]
HARNESSES = ("crash", "outages", "model")
FILES = sorted(path for name in HARNESSES for path in (ROOT / "tests" / name).rglob("*.py"))
# Modules and methods that convert between bytes and numbers.
CODERS = frozenset({"array", "ctypes", "numpy", "struct"})
CODING_METHODS = frozenset({"from_bytes", "to_bytes"})
# Places where a harness replaces the machine: files, clock, randomness.
SEAMS = frozenset({"Clock", "StoreIO", "UniqueIds"})
SEAM_VALUES = frozenset({"process_ids", "BOOT_ID"})
# The harness's own numbers, and kernel calls.
ALLOWED = {
    "crash/disk.py": {"to_bytes"},
    "crash/story.py": {"unit_walk.RUN_NS"},
    "outages/rig.py": {"ctypes", "struct"},
}
ROLES = "mqproc.roles"
ALLOWED_ROLES = {"mqproc.roles.role", "mqproc.roles.registry"}
LARGE = 1 << 24


def magic_numbers() -> frozenset[int]:
    """Large magic numbers of the store's files, as declared and unsigned."""
    found = set()
    for module in pkgutil.iter_modules(mqproc.layout.__path__):
        declared = vars(importlib.import_module(f"mqproc.layout.{module.name}"))
        found |= {value for name, value in declared.items() if "MAGIC" in name and isinstance(value, int)}
    found = {value for value in found if abs(value) > LARGE}
    return frozenset(found | {value % (1 << 32) for value in found} | {abs(value) for value in found})


MAGICS = magic_numbers()


def second_implementations(source: str, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """Parts of a module that repeat the product's work, with their lines."""
    tree = ast.parse(source)
    of_product = set(_names_of_product(tree))
    found = [
        *_coders(tree),
        *_subclasses(tree, of_product),
        *_patches(tree, of_product),
        *_roles(tree),
    ]
    return [f"line {line}: {what}" for line, what in found if what.split()[-1] not in allowed]


def _names_of_product(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mqproc":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.asname or "mqproc" for alias in node.names if alias.name.split(".")[0] == "mqproc")


def _modules_of(node: ast.AST) -> list[tuple[int, str]]:
    """(line, module) of each import."""
    if isinstance(node, ast.Import):
        return [(node.lineno, alias.name) for alias in node.names]
    return [(node.lineno, node.module or "")] if isinstance(node, ast.ImportFrom) else []


def _coders(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for line, module in _modules_of(node):
            if module.split(".")[0] in CODERS:
                yield line, f"coder {module.split('.')[0]}"
        if isinstance(node, ast.Attribute) and node.attr in CODING_METHODS:
            yield node.lineno, f"coder {node.attr}"
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in MAGICS:
            yield node.lineno, f"magic number {node.value}"


def _subclasses(tree: ast.Module, of_product: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            names = _dotted(base) or [""]
            if names[0] in of_product and names[-1] not in SEAMS:
                yield node.lineno, f"subclass of {names[-1]}"


def _patches(tree: ast.Module, of_product: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for target in _targets(node):
            names = _dotted(target)
            if len(names) > 1 and names[0] in of_product and names[-1] not in SEAM_VALUES:
                yield target.lineno, f"patch of {'.'.join(names)}"
        if isinstance(node, ast.Call) and _dotted(node.func)[-1:] in (["setattr"], ["patch"]):
            of_it = [argument for argument in node.args if _is_of_product(argument, of_product)]
            yield from ((argument.lineno, "patch by setattr") for argument in of_it)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Targets of an assignment."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _is_of_product(argument: ast.expr, of_product: set[str]) -> bool:
    """Whether it is one of the product's names, or a text that names a part of it."""
    text = argument.value if isinstance(argument, ast.Constant) else None
    return (isinstance(text, str) and text.startswith("mqproc")) or bool(set(_dotted(argument)[:1]) & of_product)


def _roles(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports of roles: a harness runs the supervisor's roles only."""
    for node in ast.walk(tree):
        for line, module in _modules_of(node):
            names = [f"{ROLES}.{alias.name}" for alias in getattr(node, "names", ())] if module == ROLES else [module]
            yield from (
                (line, f"role {name}") for name in names if name.startswith(ROLES) and name not in ALLOWED_ROLES
            )


def _dotted(node: ast.AST) -> list[str]:
    """The parts of a.b.c; empty for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return [*before, node.attr]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_harness_has_no_second_implementation(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(ROOT / "tests")), set())
    assert second_implementations(path.read_text(), allowed) == []


def test_allowed_exceptions_are_needed() -> None:
    for name, allowed in ALLOWED.items():
        found = second_implementations((ROOT / "tests" / name).read_text())
        assert {line.split()[-1] for line in found} == allowed


@pytest.mark.parametrize(
    "source",
    [
        "import struct\nHEAD = struct.Struct('>5i2qiq')",
        "from struct import pack",
        "import numpy as np\nUNIT = np.dtype('>i8')",
        "def unit(data): return int.from_bytes(data[:8], 'big')",
        "def unit(offset): return offset.to_bytes(8, 'big')",
        "BLANK_MAGIC = -875286124",
        "MAGIC = 0xDAA320A7",
        "from mqproc.store.recovery.recovery import Recovery\nclass Simulated(Recovery): pass",
        "from mqproc.roles import role\nclass Simulated(role.Role): pass",
        "import mqproc.store.commitlog.append\nmqproc.store.append.Appender.sync = None",
        "from mqproc.store.commitlog.append import Appender\nAppender.sync = lambda self: None",
        "from mqproc.store import append\nsetattr(append, 'Appender', None)",
        "def plant(monkeypatch): monkeypatch.setattr('mqproc.io.store_io.StoreIO.sync', None)",
        "from mqproc.roles.writer.role import Writer\nROLES = [Writer]",
    ],
)
def test_second_implementation_is_detected(source: str) -> None:
    assert second_implementations(source)


def test_seams_are_not_a_second_implementation() -> None:
    source = "from mqproc.io.store_io import StoreIO\nfrom mqproc.client import unique_id\n"
    source += "class Own(StoreIO): pass\nunique_id.process_ids = None\nself.value = 1\n"
    assert second_implementations(source) == []
