"""Index recovery when a record's entries span two files and one of them is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.store_builders import FIRST_MS, StoppedStore
from tests.support.store_checks import RecordingIO


class SplitStore(StoppedStore):
    """A store with records of many keys each, which span the ends of index files."""

    def __init__(self, root: Path, keys_each: int) -> None:
        super().__init__(root)
        for number in range(700 // keys_each + 2):
            keys = " ".join(f"k{number}.{each}" for each in range(keys_each))
            self.engine.append("First", [b"many keys"], FIRST_MS + 5000, keys=[keys], queues=4)
        self.recover(clean=False)

    def index(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.index_files()}


@pytest.fixture(params=[1, 2, 3, 7, 900])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SplitStore:
    return SplitStore(tmp_path / "store", request.param)


def test_index_intact_is_left_unchanged(store: SplitStore) -> None:
    io = RecordingIO()
    store.recover(io=io)
    assert io.lasting_calls == []


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "killed"])
def test_index_any_file_lost_is_rebuilt_exactly(store: SplitStore, clean: bool) -> None:
    whole = store.index()
    assert len(whole) >= 4
    for name in whole:
        (store.root / "index" / name).unlink()
        store.recover(clean=clean)
        assert store.index() == whole, name
