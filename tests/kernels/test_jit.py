"""The kernel decorator: no versions by constants, the fingerprint of sources, loading without the compiler."""

from __future__ import annotations

import _thread
import ast
import importlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

import mqproc
from mqproc.cli.admin import engine_hooks
from mqproc.kernels import crc
from mqproc.kernels.jit import cache
from mqproc.kernels.jit.cache import sources_fingerprint
from mqproc.kernels.jit.compile import COMPILED, kernel, plain, uninterrupted
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.kernels.modules import LATER, SERVING
from mqproc.util import sources
from tests.support.group import ROOT

pytestmark = pytest.mark.skipif(not COMPILED, reason="nothing is compiled")


@kernel
def field(buf: Bytes, i: int) -> int:
    return load_be32(buf, i)


@kernel
def both(buf: Bytes) -> int:
    return field(buf, 0) + field(buf, 4)


def test_constants_between_kernels_compile_no_version() -> None:
    buf = np.arange(8, dtype=np.uint8)
    assert both(buf) == plain(both)(buf) == 0x00010203 + 0x04050607
    field(buf, 4)
    assert len(_dispatcher(field).signatures) == 1


def test_plain_returns_original_function() -> None:
    assert plain(field).__name__ == "field"
    assert not hasattr(plain(field), "py_func")
    assert plain(plain(field)) is plain(field)


def test_fingerprint_changes_with_any_source(tmp_path: Path) -> None:
    files = ("kernels/offsets.py", "kernels/jit/offsets.py", "layout/offsets.py", *sources.MODULES)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("START = 0\n")
    seen = set()
    for path in (*files, "layout/new.py"):
        sources_fingerprint.cache_clear()
        seen.add(sources_fingerprint(str(tmp_path)))
        (tmp_path / path).write_text("START = 8\n")
    sources_fingerprint.cache_clear()
    seen.add(sources_fingerprint(str(tmp_path)))
    assert len(seen) == len(files) + 2


def test_fingerprint_covers_all_modules_with_constants() -> None:
    """A module outside of it could change offsets in code that is already compiled."""
    package = Path(mqproc.__file__).parent
    left = [path for folder in ("kernels", "layout") for path in (package / folder).rglob("*.py")]
    found: set[str] = set()
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (name for name in names if name.startswith("mqproc.")):
                parts = name.split(".")[1:]
                file = next((f for n in (2, 1) if (package / (f := f"{'/'.join(parts[:n])}.py")).is_file()), "")
                if file and parts[0] not in ("kernels", "layout") and file not in found:
                    found.add(file)
                    left.append(package / file)
    assert found == set(sources.MODULES)


def test_cached_code_is_reused_until_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_only", [tmp_path])

    def compile_again() -> int:
        compiled = kernel(plain(field))
        compiled(np.zeros(8, np.uint8), 0)
        return sum(_dispatcher(compiled).stats.cache_hits.values())

    assert [compile_again(), compile_again()] == [0, 1]
    monkeypatch.setattr(cache, "fingerprint", lambda: "of other sources")
    assert [compile_again(), compile_again()] == [0, 1]


def test_loading_imports_no_compiler_until_a_kernel_is_compiled() -> None:
    """In a fresh process: this one has loaded the compiler."""
    program = """
import sys
import numpy as np
from mqproc.kernels import crc
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.kernels.jit.compile import kernel

def compiles():
    return "numba.np.arrayobj" in sys.modules

crc.warm()
assert not compiles(), "loading imports what only the compiler needs"
assert kernel(lambda buf: load_be32(buf, 0))(np.full(4, 1, np.uint8)) == 0x01010101
assert compiles()
"""
    crc.warm()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_exception_of_a_signal_handler_waits_for_the_end() -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise Interrupted

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert interrupted.wait(60)
        ended.set()

    interrupted, ended = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            uninterrupted(work)()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.is_set()


def test_kernels_are_loaded_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert kernel(plain(field))(np.full(4, 1, np.uint8), 0) == 0x01010101


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_kernel_called_by_another_is_compiled_again_for_python() -> None:
    @kernel
    def callee(words: Words, place: int) -> int:
        return int(words[place]) + 1

    @kernel
    def caller(words: Words, place: int) -> int:
        return 2 * callee(words, place)

    words = np.arange(4)
    assert caller(words, 1) == 4
    assert (callee(words, 1), callee(words, 2)) == (2, 3)
    assert caller(words, 2) == 6
    assert len(callee.signatures) == 1  # type: ignore[attr-defined]


def test_interrupted_load_of_a_kernel_leaves_it_usable() -> None:
    """In another process, which an interrupt within numba or llvmlite would kill."""
    program = """
import random
import signal
import sys
from mqproc.kernels.modules import LATER, SERVING

class Interrupted(BaseException):
    pass

def interrupt(number, frame):
    raise Interrupted

def load(module, longest_s):
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, longest_s))
        module.warm()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        return False
    return True

sys.unraisablehook = lambda _: None
signal.signal(signal.SIGALRM, interrupt)
choose, interrupts = random.Random(1), 0
for module in (*SERVING, *LATER):
    longest_s = 0.002
    while not load(module, longest_s):
        longest_s *= 1.05
        interrupts += 1
print(interrupts)
"""
    engine_hooks.fill_cache()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_kernels_that_python_calls_are_compiled_in_advance() -> None:
    """A call of another one compiles it in the process that calls, after a wait for the compilation of all others.

    In a process of its own: here other tests have called kernels.
    """
    program = "from tests.kernels.test_jit import show_uncompiled; show_uncompiled()"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, timeout=120)
    count, *uncompiled = shown.stdout.decode().splitlines()
    assert int(count) > 100
    assert uncompiled == []


def show_uncompiled() -> None:
    """Print the number of kernels that Python calls, and those that are not compiled in advance."""
    for module in (*SERVING, *LATER):
        module.warm()
    called = {place: each for path in PRODUCT for place, each in _kernels_used_by(path)}
    print(len(called), *(place for place, each in called.items() if not each.signatures), sep="\n")


PRODUCT = [path for path in Path(mqproc.__file__).parent.rglob("*.py") if "kernels" not in path.parts[-3:-1]]


def _kernels_used_by(path: Path) -> Iterator[tuple[str, Any]]:
    """The kernels that a module names, by file and name."""
    tree = ast.parse(path.read_text())
    imported = [
        (each.asname or each.name, node.module, each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mqproc.kernels")
        for each in node.names
    ]
    for name, source, original in imported:
        found = getattr(importlib.import_module(str(source)), original, None)
        if isinstance(found, ModuleType):
            attributes = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
            }
            uses = {f"{name}.{attribute}": getattr(found, attribute, None) for attribute in attributes}
        else:
            uses = {name: found}
        yield from ((f"{path.name}: {use}", each) for use, each in uses.items() if isinstance(each, CPUDispatcher))


def test_bitcode_is_parsed_only_when_a_caller_is_compiled() -> None:
    """Parsing takes half the time and most of the memory of loading all kernels."""
    program = """
import numpy as np
from llvmlite import binding
from mqproc.kernels import crc
from mqproc.kernels.jit.compile import kernel

parsed = []
parse = binding.parse_bitcode
binding.parse_bitcode = lambda code: parsed.append(code) or parse(code)
crc.warm()
assert not parsed
one = kernel(lambda buf: crc.crc32(buf, 0, buf.size) + 1)
two = kernel(lambda buf: crc.crc32(buf, 0, buf.size) + 2)
digits = np.frombuffer(bytearray(b"123456789"), np.uint8)
assert one(digits) == 0xCBF43926 + 1
assert len(parsed) == 1
assert two(digits) == 0xCBF43926 + 2
assert len(parsed) == 1
"""
    crc.warm()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def _dispatcher(compiled: Callable[..., Any]) -> Any:
    return compiled
