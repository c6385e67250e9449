"""A record's entries may lie on both sides of an index file's end: a lost file takes some of them along."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.recovery.recovering import RecordingIO
from tests.store.stopped_store import FIRST_MS, StoppedStore


class SplitStore(StoppedStore):
    """Behind the first records come some with so many keys each: at files' ends they are cut."""

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


def test_a_whole_index_is_left_as_it_is(store: SplitStore) -> None:
    io = RecordingIO()
    store.recover(io=io)
    assert io.lasting_calls == []


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "killed"])
def test_whichever_file_is_lost_every_entry_comes_back(store: SplitStore, clean: bool) -> None:
    whole = store.index()
    assert len(whole) >= 4
    for name in whole:
        (store.root / "index" / name).unlink()
        store.recover(clean=clean)
        assert store.index() == whole, name
