"""`mqproc warm` compiles all kernels in advance."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from mqproc.cli.admin import engine_hooks
from mqproc.kernels.jit import cache
from tests.support.command_line import call
from tests.support.group import AS_NOBODY, PATIENCE_S, ROOT, skip_unless_nobody_can_run, wait_until


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Load all kernels: these tests are about the files of the cache."""
    engine_hooks.make_ready()


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installation for compiled code."""
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(cache, "INSTALLED", tmp_path / "kernels" / "__pycache__" / "compiled")
    return cache.INSTALLED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache."""
    monkeypatch.setattr(cache, "_only", [tmp_path])
    return cache.entry_folders()[0]


def count_compilations(monkeypatch: pytest.MonkeyPatch, *, well: bool = True) -> list[None]:
    """Calls of the compilation, which ends at once."""
    asked: list[None] = []

    def children() -> bool:
        asked.append(None)
        return well

    monkeypatch.setattr(engine_hooks, "compile_in_children", children)
    return asked


def test_warm_compiles_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch)
    found = call("warm")
    assert (found.code, len(asked)) == (0, 1)
    assert found.err.startswith("compiling\ncompiled in ")
    assert cache.is_full(folder)
    again = call("warm")
    assert (again.code, len(asked)) == (0, 1)
    assert again.err.startswith("everything is compiled already\n")


def test_warm_json_shows_whether_it_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_compilations(monkeypatch)
    first, second = (call("warm", "--json").json for _ in range(2))
    assert (first["compiled"], first["kept"], second["compiled"]) == (True, True, False)


def test_warm_without_cache_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "_only", [tmp_path / "file" / "cache"])
    found = call("warm")
    assert found.code == 1
    assert f"{tmp_path}/file is no folder" in found.err
    assert "NUMBA_CACHE_DIR" in found.err


def test_warm_folder_serves_other_user_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_nobody_can_run()
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        prepared = Path(made, "kernels")
        found = call("warm", prepared, "--json")
        assert (found.code, Path(found.json["folder"]).parent) == (0, prepared)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*AS_NOBODY, sys.executable, "-m", "mqproc", "warm"],
            env=environment | {"NUMBA_CACHE_DIR": str(prepared), "HOME": "/nonexistent"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, "everything is compiled already")


def test_warm_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    found = call("warm", shared)
    assert found.code == 8
    assert f"{shared} is not used for compiled code, as it can be written by other users" in found.err
    assert not list(shared.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's installation serves all users")
def test_warm_of_root_fills_the_installation(installed: Path) -> None:
    found = call("warm", "--json", NUMBA_CACHE_DIR="")
    full = Path(found.json["folder"])
    assert full.parent == installed
    assert cache.is_full(full)


# Kernels are compiled in child processes where the cache lacks them.


def test_make_ready_full_cache_is_only_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch)
    engine_hooks.make_ready()
    engine_hooks.make_ready()
    assert len(asked) == 1
    assert cache.is_full(folder)


def test_make_ready_without_cache_forks_no_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "_only", [tmp_path / "file" / "cache"])
    engine_hooks.make_ready()
    assert not asked


@pytest.mark.parametrize("kept", [True, False])
def test_start_without_cache_names_the_fix(folder: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    said: list[str] = []
    if kept:
        cache.make_folder(folder)
        cache.mark_full(folder)
    monkeypatch.setattr(engine_hooks, "make_ready", lambda: None)
    monkeypatch.setattr(engine_hooks, "WARM_REPORT_S", -1.0)
    context: Any = SimpleNamespace(report=said.append)
    engine_hooks.engine_hooks().warm(context)
    assert re.match(r"kernels: compiled in \d+ s", said[-1])
    assert ("NUMBA_CACHE_DIR" in said[-1]) is not kept


def test_start_reports_refused_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cache.make_folder(folder)
    cache.mark_full(folder)
    shared = folder.parent / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(cache, "_only", [shared, folder.parent])
    monkeypatch.setattr(engine_hooks, "make_ready", lambda: None)
    context: Any = SimpleNamespace(report=said.append)
    engine_hooks.engine_hooks().warm(context)
    assert said[-1].startswith(f"kernels: {shared} is not used for compiled code")


def test_fill_cache_failed_children_leave_no_mark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch, well=False)
    engine_hooks.make_ready()
    assert len(asked) == 1
    assert not cache.is_full(folder)


def test_fill_cache_second_process_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_compilations(monkeypatch)
    with engine_hooks.cache_lock(folder):
        second = threading.Thread(target=engine_hooks.make_ready)
        second.start()
        second.join(0.3)
        assert second.is_alive()
        cache.mark_full(folder)
    second.join(30)
    assert not second.is_alive()
    assert not asked


def test_compile_in_children_covers_every_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = tmp_path / "warmed"
    warmed.mkdir()
    modules = []
    for number in range(5):
        module = ModuleType(f"module{number}")
        module.warm = (warmed / str(number)).touch  # type: ignore[attr-defined]
        modules.append(module)
    monkeypatch.setattr(engine_hooks, "WARMED", modules)
    assert engine_hooks.compile_in_children()
    assert sorted(path.name for path in warmed.iterdir()) == ["0", "1", "2", "3", "4"]


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
