"""Verify reports unreadable queue and index files, and checks the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.store.verify import verifier
from mqproc.store.verify.findings import FindingKind
from mqproc.store.verify.verifier import verify_store
from tests.support.fakes import BadSectors
from tests.support.store_builders import StoppedStore


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    return store


def test_verify_reports_unreadable_files_and_checks_rest(store: StoppedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify must continue after the first one, also after a SIGBUS of an index file."""
    io, engine = BadSectors(), store.engine
    lost = {store.queue_file("First", 1): 0, store.queue_file("Third", 2, 800): 0, store.index_files()[-1]: 1}
    for path, page in lost.items():
        io.lose(path, page)
    began: list[object] = []
    run = verifier.VerifyRun.run

    def counted(self: verifier.VerifyRun) -> verifier.VerifyResult:
        began.append(self)
        return run(self)

    monkeypatch.setattr(verifier.VerifyRun, "run", counted)
    found = verify_store(io, engine.paths, engine.options, jobs=1)
    assert len(began) == 2, "a verify for each file takes as long as so many"
    reported = {each.file for each in found.findings.in_order() if each.kind is FindingKind.FILE_UNREADABLE}
    assert reported == {str(path.relative_to(store.root)) for path in lost}
    assert found.records == len(store.offsets)
    assert {FindingKind.UNIT_MISSING, FindingKind.ENTRY_MISSING} <= found.findings.counts.keys()


def test_verify_sigbus_without_page_reads_all_index_files(store: StoppedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is known only to the dead process."""
    io, engine = BadSectors(), store.engine
    first, *_others, last = store.index_files()
    io.lose(first, 1)
    io.lose(last, 1)
    run = verifier.VerifyRun.run

    def dies(self: verifier.VerifyRun) -> verifier.VerifyResult:
        if len(self.unreadable) < 2:
            raise CorruptStoreError("a page of a file could not be read")
        return run(self)

    monkeypatch.setattr(verifier.VerifyRun, "run", dies)
    found = verify_store(io, engine.paths, engine.options, jobs=1)
    assert found.findings.counts[FindingKind.FILE_UNREADABLE] == 2
    io.lost.clear()
    with pytest.raises(CorruptStoreError, match="a page of a file"):
        verify_store(io, engine.paths, engine.options, jobs=1)


def test_verify_unreadable_log_raises(store: StoppedStore) -> None:
    io, engine = BadSectors(), store.engine
    io.lose(store.segment(store.end), store.end % 65536 // 4096)
    with pytest.raises(OSError, match="Input/output error"):
        verify_store(io, engine.paths, engine.options, jobs=1)
