"""Worker pools."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from tests.support.processes import worker_pool


def _interrupted() -> None:
    with worker_pool(2, 10) as pool:
        pool.submit(time.sleep, 0).result(60)
        pool.submit(time.sleep, 3600)
        raise KeyboardInterrupt


def test_worker_pool_early_exit_ends_workers() -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(KeyboardInterrupt):
        _interrupted()
    assert {child.pid for child in multiprocessing.active_children()} <= before


@pytest.mark.timeout(100)
def test_worker_pool_replaces_workers_that_ended_together() -> None:
    with worker_pool(2, 2) as pool:
        tasks = [pool.submit(abs, -number) for number in range(20)]
        assert [task.result(60) for task in tasks] == list(range(20))
