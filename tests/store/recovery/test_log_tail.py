"""Bytes cut after a torn record are quarantined if they contain intact records."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from mqproc.store.recovery import store_files
from mqproc.store.recovery.log import Resync
from tests.support.fakes import FaultyIO
from tests.support.store_builders import SEGMENT, StoppedStore, assert_whole
from tests.support.store_checks import Recovered


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    """A store with two segments of records above its marks."""
    store = StoppedStore(tmp_path / "store")
    while store.end < store.first.end + 2 * SEGMENT:
        store.put()
    return store


def tear(store: StoppedStore) -> int:
    """Tear the second record above the marks; return its physical offset."""
    torn = store.offsets[store.offsets.index(store.first.end) + 1]
    store.overwrite(torn + 4, b"garbage!")
    return torn


def kept(store: StoppedStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store.root / "mqproc" / "aside").glob("*")}


def lines_of_tail(found: Recovered) -> list[str]:
    return [line for line in found.said if "after the end of the log" in line]


def test_intact_records_after_torn_one_are_kept_and_reported(store: StoppedStore) -> None:
    torn, end = tear(store), store.end
    first = torn // SEGMENT * SEGMENT
    cut = {start: store.segment(start).read_bytes()[max(0, torn - start) :] for start in range(first, end, SEGMENT)}
    found = store.recover(clean=False)
    assert found.end == torn
    files = kept(store)
    assert files == {f"commitlog.{start:020d}.rest": data.rstrip(b"\0") for start, data in cut.items()}
    lines = lines_of_tail(found)
    assert len(lines) == len(files)
    assert all(any(name in line for line in lines) for name in files)
    store.numbers = store.offsets.index(torn)
    del store.offsets[store.numbers :]
    assert_whole(store, found)
    assert kept(store) == files


def test_kept_tail_is_limited(store: StoppedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_files, "TAIL_BYTES_MAX", 1000)
    torn = tear(store)
    cut = store.engine.log_bytes(torn, torn + 1000)
    found = store.recover(clean=False)
    assert list(kept(store).values()) == [cut]
    first, *others = lines_of_tail(found)
    assert "the first 1,000 kept in" in first
    assert others
    assert all(line.endswith("not kept") for line in others)


def test_kept_tail_full_disk_does_not_stop_start(store: StoppedStore) -> None:
    torn = tear(store)
    io = FaultyIO()
    io.refusing["/aside/"] = errno.ENOSPC
    found = store.recover(clean=False, io=io)
    assert found.end == torn
    assert "not kept: No space left on device" in lines_of_tail(found)[0]
    assert kept(store) == {}


def test_kept_tail_leaves_room_for_start(store: StoppedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start creates files too, and so does each later start that fails on a full disk."""
    torn, io = tear(store), FaultyIO()
    left = store_files.FREE_BYTES_MIN + 1000
    monkeypatch.setattr(io, "disk_usage", lambda _folder: (1 << 40, left))
    cut = store.engine.log_bytes(torn, torn + 1000)
    found = store.recover(clean=False, io=io)
    assert list(kept(store).values()) == [cut]
    assert all(line.endswith(f"not kept: {left:,} bytes are free") for line in lines_of_tail(found)[1:])


def test_torn_last_write_is_not_kept(store: StoppedStore) -> None:
    """A kill during a write: no bytes after the torn record."""
    last = store.offsets[-1]
    store.overwrite(last + 60, bytes(store.end - last - 60))
    found = store.recover(clean=False)
    assert found.end == last
    assert "; cut " in found.said_of("log")
    assert kept(store) == {}
    assert lines_of_tail(found) == []


@pytest.mark.parametrize("left", [0, 60])
@pytest.mark.parametrize("marks", [True, False])
def test_search_for_records_ends_at_last_nonzero_byte(
    store: StoppedStore, monkeypatch: pytest.MonkeyPatch, left: int, marks: bool
) -> None:
    """The last segment may end with a gigabyte of zeros; reading them allocates pages."""
    asked = []

    def search(self: Resync, position: int, limit: int) -> None:
        asked.append((position, limit))

    monkeypatch.setattr(Resync, "next_record", search)
    last, end = store.offsets[-1], store.end
    if left:
        store.overwrite(last + left, bytes(end - last - left))
    if not marks:
        shutil.rmtree(store.root / "mqproc" / "marks")
    assert store.recover(clean=False).end == (last if left else end)
    ((_position, limit),) = asked
    assert end % SEGMENT, "the end is inside a segment"
    assert limit <= (last + left if left else end)
