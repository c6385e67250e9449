"""Groups of tiny roles, ended after each test in any case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.running_group import RunningGroup, titles_of, wait_until

StartGroup = Callable[..., RunningGroup]


@pytest.fixture
def start_group(tmp_path: Path) -> Iterator[StartGroup]:
    """Start groups on one store; at the end nothing of them may be left."""
    with groups_on(tmp_path / "store") as start:
        yield start


@pytest.fixture(scope="module")
def quiet_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """A whole group for read-only tests."""
    with groups_on(tmp_path_factory.mktemp("quiet") / "store") as start:
        yield start()


@contextlib.contextmanager
def groups_on(root: Path) -> Iterator[StartGroup]:
    started: list[RunningGroup] = []

    def start(*arguments: str, **options: Any) -> RunningGroup:
        group = RunningGroup(root, *arguments, **options)
        started.append(group)
        return group

    yield start
    for group in started:
        group.close()
    wait_until(lambda: not titles_of(root), "no process is left")
    if started:
        assert not [line for line in started[0].events if "two-at-once" in line]
