"""`mqproc warm` compiles all kernels in advance."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from mqproc.cli.admin import engine_hooks
from mqproc.kernels.jit import compile as jit
from tests.support.command_line import call
from tests.support.group import wait_until


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the marker of a full cache; compilation succeeds at once."""
    marker = tmp_path / "mqproc-warmed-now"
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: marker)
    monkeypatch.setattr(engine_hooks, "compile_in_children", lambda: True)
    return marker


def test_warm_compiles_once(marker: Path) -> None:
    found = call("warm")
    assert found.code == 0
    assert found.err.startswith("compiling\ncompiled in ")
    assert marker.exists()
    assert (call("warm").code, call("warm").err) == (0, "everything is compiled already\n")


def test_warm_json_shows_whether_it_compiled(marker: Path) -> None:
    first, second = (call("warm", "--json").json for _ in range(2))
    assert (first["compiled"], first["kept"], second["compiled"]) == (True, True, False)


def test_warm_without_cache_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: None)
    found = call("warm")
    assert found.code == 1
    assert "NUMBA_CACHE_DIR" in found.err


# Kernels are compiled in child processes where the cache lacks them.


def count_compilations(monkeypatch: pytest.MonkeyPatch, *, well: bool = True) -> list[None]:
    """Calls of the compilation."""
    asked: list[None] = []

    def children() -> bool:
        asked.append(None)
        return well

    monkeypatch.setattr(engine_hooks, "compile_in_children", children)
    return asked


def test_make_ready_full_cache_is_only_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, marker = count_compilations(monkeypatch), tmp_path / "mqproc-warmed-now"
    (tmp_path / "mqproc-warmed-before").touch()
    (tmp_path / "other").touch()
    (tmp_path / "crc.total-1.py311.1.nbc").touch()  # From a version that named code by number only.
    (tmp_path / "crc.total-1.py311.1.0123456789abcdef.nbc").touch()
    kept = tmp_path / f"crc.total-1.py311.1{jit.code_ending()}"
    kept.touch()
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: marker)
    engine_hooks.make_ready()
    engine_hooks.make_ready()
    assert len(asked) == 1
    left = {"mqproc-warmed-now", "mqproc-warming.lock", "other", kept.name}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_make_ready_without_cache_forks_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch)
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: None)
    engine_hooks.make_ready()
    assert not asked


@pytest.mark.parametrize("kept", [True, False])
def test_start_without_cache_names_the_fix(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_hooks, "make_ready", lambda: None)
    monkeypatch.setattr(engine_hooks, "is_cached", lambda: kept)
    monkeypatch.setattr(engine_hooks, "WARM_REPORT_S", -1.0)
    context: Any = SimpleNamespace(report=said.append)
    engine_hooks.engine_hooks().warm(context)
    assert re.match(r"kernels: compiled in \d+ s", said[-1])
    assert ("NUMBA_CACHE_DIR" in said[-1]) is not kept


def test_fill_cache_failed_children_leave_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, marker = count_compilations(monkeypatch, well=False), tmp_path / "mqproc-warmed-now"
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: marker)
    engine_hooks.make_ready()
    assert len(asked) == 1
    assert not marker.exists()


def test_fill_cache_without_lock_file_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: tmp_path / "file" / "mqproc-warmed-now")
    engine_hooks.make_ready()
    assert len(asked) == 1


def test_fill_cache_second_process_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, marker = count_compilations(monkeypatch), tmp_path / "mqproc-warmed-now"
    monkeypatch.setattr(engine_hooks, "full_cache_marker", lambda: marker)
    with engine_hooks.cache_lock(tmp_path / "mqproc-warming.lock"):
        second = threading.Thread(target=engine_hooks.make_ready)
        second.start()
        second.join(0.3)
        assert second.is_alive()
        marker.touch()
    second.join(30)
    assert not second.is_alive()
    assert not asked


@pytest.mark.skipif(not jit.COMPILED, reason="nothing is cached")
def test_marker_depends_on_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_hooks.full_cache_marker()
    assert before is not None
    assert before == engine_hooks.full_cache_marker()
    monkeypatch.setattr(jit, "sources_fingerprint", lambda: "another")
    after = engine_hooks.full_cache_marker()
    assert after is not None
    assert (after.parent, after.name != before.name) == (before.parent, True)


def test_compile_in_children_covers_every_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    for number in range(5):
        module = ModuleType(f"module{number}")
        module.warm = (tmp_path / str(number)).touch  # type: ignore[attr-defined]
        modules.append(module)
    monkeypatch.setattr(engine_hooks, "WARMED", modules)
    assert engine_hooks.compile_in_children()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]


def test_compile_in_children_reports_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    module = ModuleType("module")
    module.warm = fail  # type: ignore[attr-defined]
    monkeypatch.setattr(engine_hooks, "WARMED", [module])
    assert not engine_hooks.compile_in_children()


def test_compile_in_children_interrupted_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    for number in range(8):
        module = ModuleType(f"module{number}")
        module.warm = signal.pause  # type: ignore[attr-defined]
        modules.append(module)
    monkeypatch.setattr(engine_hooks, "WARMED", modules)
    parent = os.getpid()
    others = {*psutil.Process().children()}

    def own() -> set[psutil.Process]:
        return {*psutil.Process().children()} - others

    def waits() -> bool:
        """Whether the parent waits for its children, all of which have started."""
        return bool(own()) and Path(f"/proc/{parent}/task/{parent}/wchan").read_text() == "do_wait"

    def interrupt() -> None:
        wait_until(waits, what="a parent that waits for its children")
        os.kill(parent, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        engine_hooks.compile_in_children()
    interrupting.join()
    assert not own(), "a child is alive, or was not waited for"
