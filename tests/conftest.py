"""Fixtures and hooks of all tests: real groups, repeatable examples, order and scheduling."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mqproc.cli.admin.engine_hooks import fill_cache
from mqproc.kernels.jit import compile as jit
from tests.support.group import Group
from tests.support.processes import map_large_blocks

# The same examples in every run, so that a failure is caused by the change under test.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# One cache of compiled kernels, also for tests that change HOME.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# Here, because the controller of `-n` does not load conftest.py of inner folders.
pytest_plugins = ["tests.interop"]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection during collection of tests: it took a third of that time.

    It is enabled for the objects that tests create.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels once, so that worker processes do not compile within a test's time.

    A shell without job control (`pytest &` in a script) ignores SIGINT for its children, and `nohup` SIGHUP; processes
    that tests interrupt would inherit this.
    """
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    map_large_blocks()
    if jit.COMPILED and not hasattr(session.config, "workerinput"):
        fill_cache()


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Start groups on stores below `tmp_path`; all are ended after the test."""
    groups: list[Group] = []

    def make(name: str = "store", **options: Any) -> Group:
        groups.append(Group(tmp_path / name, **options))
        return groups[-1].start()

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def group(make_group: Callable[..., Group]) -> Group:
    """A running group with small files."""
    return make_group()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n …` start files with a longer timeout first, then those with many tests.

    So no long file runs last.
    """
    if not hasattr(config, "workerinput"):
        return
    times_s: dict[Path, float] = {}
    counts: Counter[Path] = Counter(item.path for item in items)
    for item in items:
        declared = item.get_closest_marker("timeout")
        time_s = float(declared.args[0]) if declared and declared.args else 0.0
        times_s[item.path] = max(time_s, times_s.get(item.path, 0.0))
    items.sort(key=lambda item: (-times_s[item.path], -counts[item.path], item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked slow unless they are selected."""
    if item.get_closest_marker("slow") and "slow" not in item.config.option.markexpr:
        pytest.skip("takes over a minute; run with -m slow")


_RELEASE = re.compile(r"\d+\.\d+\.\d+")
OWN_SPARK = {"tests/spark/jobs/test_cluster.py"}
"""Files that start Spark as other programs, without the shared session."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n …` keep a file's tests together, and run all that need Spark in one session.

    Tests of each release of RocketMQ are kept together.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            # Tests with a RocketMQ mostly wait for it: its releases run at the same time.
            if file.startswith("tests/interop/test_java"):
                return file + "".join(_RELEASE.findall(test))
            return "spark" if file.startswith("tests/spark/") and file not in OWN_SPARK else file

    # In the order of collection.
    config.option.loadscopereorder = False
    return ByFile(config, log)
