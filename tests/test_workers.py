"""Worker processes end with what they work for."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from tests.workers import worker_pool


def _interrupted() -> None:
    with worker_pool(2, 10) as pool:
        pool.submit(time.sleep, 0).result(60)
        pool.submit(time.sleep, 3600)
        raise KeyboardInterrupt


def test_what_ends_the_block_early_ends_the_workers() -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted()
    assert not multiprocessing.active_children()
