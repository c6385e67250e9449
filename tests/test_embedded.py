"""`mqproc.open`: a group for as long as a block of code needs one, whoever else needs it at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mqproc
from mqproc.errors import NotRunningError
from tests.conftest import PATIENCE_S, Group


def test_a_group_that_runs_is_used_and_left_running(group: Group) -> None:
    with mqproc.open(group.store) as client:
        assert client.send("orders", b"x").queue_offset == 0
    with group.client() as after:
        assert after.health()


def test_of_two_that_start_it_at_once_one_does_and_the_other_waits_for_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    both = threading.Barrier(2)

    def use(number: int) -> int:
        with mqproc.open(store) as client:
            stored = client.send("orders", b"%d" % number, queue_id=0).queue_offset
            both.wait(PATIENCE_S)  # Whoever started it stops it at the end of its block.
        return stored

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(use, range(2))) == [0, 1]
    with pytest.raises(NotRunningError), mqproc.Client(store, timeout=2.0) as client:
        client.health()
