"""Groups of tiny roles, ended after each test whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_group import RunningGroup, titles_of, wait_until

StartGroup = Callable[..., RunningGroup]


@pytest.fixture
def start_group(tmp_path: Path) -> Iterator[StartGroup]:
    """Starts groups on one store; at the end nothing of them may be left."""
    started: list[RunningGroup] = []
    root = tmp_path / "store"

    def start(*arguments: str, wait: bool = True) -> RunningGroup:
        group = RunningGroup(root, *arguments, wait=wait)
        started.append(group)
        return group

    yield start
    for group in started:
        group.close()
    wait_until(lambda: not titles_of(root), "no process is left")
    events = (root / "events").read_text() if root.exists() and (root / "events").exists() else ""
    assert "two-at-once" not in events, events
