"""Files of queues and index that the disk cannot read: a verify tells each, and looks at all else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.store.verify import verifier
from mqproc.store.verify.findings import FindingKind
from mqproc.store.verify.verifier import verify_store
from tests.store.bad_sectors import BadSectors
from tests.store.stopped_store import StoppedStore


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    return store


def test_each_is_told_and_all_else_is_looked_at(store: StoppedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ended the command, and a repair with it; of an index file by SIGBUS."""
    io, engine = BadSectors(), store.engine
    lost = {store.queue_file("First", 1): 0, store.queue_file("Third", 2, 800): 0, store.index_files()[-1]: 1}
    for path, page in lost.items():
        io.lose(path, page)
    began: list[object] = []
    run = verifier._Verifier.run

    def counted(self: verifier._Verifier) -> verifier.VerifyResult:
        began.append(self)
        return run(self)

    monkeypatch.setattr(verifier._Verifier, "run", counted)
    found = verify_store(io, engine.paths, engine.options, jobs=1)
    assert len(began) == 2, "a verify for each file takes as long as so many"
    told = {each.file for each in found.findings.in_order() if each.kind is FindingKind.FILE_UNREADABLE}
    assert told == {str(path.relative_to(store.root)) for path in lost}
    assert found.records == len(store.offsets)
    assert {FindingKind.UNIT_MISSING, FindingKind.ENTRY_MISSING} <= found.findings.counts.keys()


def test_a_process_that_died_of_a_page_of_the_index_leaves_a_look_at_all_of_it(
    store: StoppedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which page that was only the process could have told."""
    io, engine = BadSectors(), store.engine
    first, *_others, last = store.index_files()
    io.lose(first, 1)
    io.lose(last, 1)
    run = verifier._Verifier.run

    def dies(self: verifier._Verifier) -> verifier.VerifyResult:
        if len(self.unreadable) < 2:
            raise CorruptStoreError("a page of a file could not be read")
        return run(self)

    monkeypatch.setattr(verifier._Verifier, "run", dies)
    found = verify_store(io, engine.paths, engine.options, jobs=1)
    assert found.findings.counts[FindingKind.FILE_UNREADABLE] == 2
    io.lost.clear()
    with pytest.raises(CorruptStoreError, match="a page of a file"):
        verify_store(io, engine.paths, engine.options, jobs=1)


def test_a_log_that_cannot_be_read_ends_it(store: StoppedStore) -> None:
    io, engine = BadSectors(), store.engine
    io.lose(store.segment(store.end), store.end % 65536 // 4096)
    with pytest.raises(OSError, match="Input/output error"):
        verify_store(io, engine.paths, engine.options, jobs=1)
