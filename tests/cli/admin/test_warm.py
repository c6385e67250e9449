"""`mqproc warm` compiles all kernels in advance."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from mqproc.cli.admin import engine_hooks
from mqproc.cli.admin.compilation import LOW_PRIORITY, Compilation
from mqproc.config.options import Options
from mqproc.kernels.jit import cache
from mqproc.paths import StorePaths
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


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Number of modules compiled by other processes; modules of the test take the place of the kernels'."""
    (tmp_path / "compiled").mkdir()
    parent = os.getpid()

    def warm() -> None:
        if os.getpid() != parent:
            tempfile.mkstemp(dir=tmp_path / "compiled")

    modules = [module_of(warm) for _ in range(5)]
    monkeypatch.setattr(engine_hooks, "SERVING", (*modules[:3],))
    monkeypatch.setattr(engine_hooks, "LATER", (*modules[3:],))
    return lambda: len(list((tmp_path / "compiled").iterdir()))


def module_of(warm: Callable[[], object]) -> ModuleType:
    module = ModuleType("module")
    module.warm = warm  # type: ignore[attr-defined]
    return module


def test_warm_compiles_once(folder: Path, compiled: Callable[[], int]) -> None:
    found = call("warm")
    assert (found.code, compiled()) == (0, 5)
    assert re.match(r"compiling\n(kernels: .*\n)*compiled in ", found.err)
    assert cache.is_full(folder)
    again = call("warm")
    assert (again.code, compiled()) == (0, 5)
    assert again.err.startswith("everything is compiled already\n")


@pytest.mark.usefixtures("folder", "compiled")
def test_warm_json_shows_whether_it_compiled() -> None:
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


def test_make_ready_full_cache_is_only_loaded(folder: Path, compiled: Callable[[], int]) -> None:
    engine_hooks.make_ready()
    engine_hooks.make_ready()
    assert compiled() == 5
    assert cache.is_full(folder)


def test_start_continues_an_unfinished_compilation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Callable[[], int]
) -> None:
    monkeypatch.setattr(cache, "progress", lambda without=(): (7, 7))  # All kernels for serving.
    monkeypatch.setattr(engine_hooks, "_SERVES_WITHIN_S", 0.2)
    context: Any = SimpleNamespace(
        options=Options(), paths=StorePaths(tmp_path), control=SimpleNamespace(store=lambda word, value: None)
    )
    kernels = engine_hooks.GroupKernels(lambda line: None)
    began_s = time.monotonic()
    kernels.make_ready(context)
    kernels.watch()
    assert not compiled()
    wait_until(lambda: (kernels.watch(), not kernels.is_compiling)[1], what="the rest is compiled")
    assert time.monotonic() >= began_s + 0.2
    assert compiled() == 2
    assert cache.is_full(folder)


def test_make_ready_without_cache_forks_no_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Callable[[], int]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "_only", [tmp_path / "file" / "cache"])
    engine_hooks.make_ready()
    assert not compiled()


@pytest.mark.parametrize("kept", [True, False])
def test_start_without_cache_names_the_fix(folder: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    said: list[str] = []
    if kept:
        cache.make_folder(folder)
        cache.mark_full(folder)
    monkeypatch.setattr(engine_hooks.GroupKernels, "make_ready", lambda self, context: None)
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
    monkeypatch.setattr(engine_hooks.GroupKernels, "make_ready", lambda self, context: None)
    context: Any = SimpleNamespace(report=said.append)
    engine_hooks.engine_hooks().warm(context)
    assert said[-1].startswith(f"kernels: {shared} is not used for compiled code")


def test_start_of_a_user_without_a_cache_compiles_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Callable[[], int]
) -> None:
    monkeypatch.setattr(cache, "_only", [tmp_path / "file" / "cache"])
    (tmp_path / "file").touch()
    paths = StorePaths(tmp_path / "store")
    paths.own.mkdir(parents=True)
    words: dict[int, int] = {}
    context: Any = SimpleNamespace(options=Options(), paths=paths, control=SimpleNamespace(store=words.__setitem__))
    kernels = engine_hooks.GroupKernels(lambda line: None)
    kernels.make_ready(context)
    assert compiled() >= 3
    wait_until(lambda: (kernels.watch(), not kernels.is_compiling)[1], what="the rest is compiled")
    assert compiled() == 5
    assert cache.is_full(cache.entry_folders()[0])
    assert cache.entry_folders()[0].parent == paths.kernels


@pytest.mark.usefixtures("compiled")
def test_fill_cache_failed_children_leave_no_mark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hooks, "LATER", (module_of(fail_in_child(os.getpid())),))
    engine_hooks.make_ready()
    assert not cache.is_full(folder)


def fail_in_child(parent: int) -> Callable[[], None]:
    def warm() -> None:
        if os.getpid() != parent:
            raise ZeroDivisionError

    return warm


def test_compilation_lowers_priority_after_urgent_modules(folder: Path, tmp_path: Path) -> None:
    def warm() -> None:
        tempfile.mkstemp(prefix=f"{os.getpriority(os.PRIO_PROCESS, 0)}.", dir=tmp_path)

    compilation = Compilation(folder, [module_of(warm) for _ in range(5)], 2)
    compilation.start()
    was_urgent = compilation.is_urgent
    while compilation.wait(PATIENCE_S):
        pass
    compilation.close()
    assert (was_urgent, compilation.is_urgent, compilation.left) == (True, False, set())
    own = os.getpriority(os.PRIO_PROCESS, 0)
    low = max(own, LOW_PRIORITY)
    found = sorted(int(path.name.partition(".")[0]) for path in tmp_path.glob("*.*"))
    assert found in ([own] * 2 + [low] * 3, [low] * 5), "the other child takes an urgent one before it is lowered"


def test_compilation_failed_module_is_left(folder: Path) -> None:
    compilation = Compilation(folder, [module_of(fail_in_child(os.getpid()))], 1)
    compilation.start()
    assert not compilation.wait(PATIENCE_S)
    compilation.close()
    assert compilation.left == {0}


def test_fill_cache_interrupted_leaves_no_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hooks, "SERVING", tuple(module_of(signal.pause) for _ in range(8)))
    others = {*psutil.Process().children()}

    def own() -> set[psutil.Process]:
        return {*psutil.Process().children()} - others

    def interrupt() -> None:
        wait_until(lambda: len(own()) > 0, what="children")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        engine_hooks.fill_cache()
    interrupting.join()
    assert not own(), "a child is alive, or was not waited for"
