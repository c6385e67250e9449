"""Stores that are read: one for all tests of a file that only look, and new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.reads.numbered import FRAMES, Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = Store(tmp_path_factory.mktemp("store"))
    for frame in range(FRAMES):
        made.put("Orders", frame)
        if frame % 10 == 0:
            made.put("Pay", frame)
    made.dispatch()
    yield made
    made.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store")
    yield made
    made.close()
