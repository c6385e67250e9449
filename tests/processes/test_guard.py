"""A running group's file in `commitlog/` keeps RocketMQ from loading the store.

After a stop it does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.support.group import Group


def test_guard_exists_while_group_runs(make_group: Callable[..., Group]) -> None:
    group = make_group()
    guard = group.paths.guard
    assert sorted(os.listdir(group.paths.commit_log))[-1] == guard.name
    length = guard.stat().st_size
    assert 0 < length < 4096, "RocketMQ refuses a last file that is neither empty nor a whole segment"
    group.stop()
    assert not os.path.lexists(guard)


def test_guard_of_killed_group_dangles_and_is_replaced(make_group: Callable[..., Group]) -> None:
    group = make_group()
    guard = group.paths.guard
    old = os.readlink(guard)
    group.kill()
    assert os.path.lexists(guard)
    assert not guard.exists()
    group.start()
    assert guard.exists()
    assert os.readlink(guard) != old
