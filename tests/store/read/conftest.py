"""Fixtures: a read-only store per test module, and an empty store per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.store_builders import FRAME_COUNT, NumberedStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberedStore]:
    new = NumberedStore(tmp_path_factory.mktemp("store"))
    for frame in range(FRAME_COUNT):
        new.put("Orders", frame)
        if frame % 10 == 0:
            new.put("Pay", frame)
    new.dispatch()
    yield new
    new.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[NumberedStore]:
    new = NumberedStore(tmp_path / "store")
    yield new
    new.close()
