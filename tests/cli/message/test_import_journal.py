"""The import journal: durable, one per input, locked, with stable ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.cli.message.import_files import Fingerprint, Journal, import_id, unique_id_of, unique_id_prefix
from mqproc.errors import BadRequestError, StoreLockedError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths

IDENTITY = {"source": "/data/a.csv", "topic": "t"}


def journal(folder: Path) -> Journal:
    (folder / "mqproc").mkdir(exist_ok=True)
    return Journal(StoreIO(), StorePaths(folder), IDENTITY)


def test_journal_keeps_position_and_entry(tmp_path: Path) -> None:
    first = journal(tmp_path)
    assert first.entry is None
    first.begin(Fingerprint(3, 3, "x"), 2, 1000)
    first.advance(4711)
    first.close()
    second = journal(tmp_path)
    assert second.position == 4711
    assert second.entry is not None
    assert (second.entry.generation, second.entry.started_ms, second.entry.finished_ms) == (2, 1000, 0)
    second.finish(second.entry, 5000, 2000)
    second.close()
    third = journal(tmp_path)
    assert third.entry is not None
    assert (third.entry.finished_ms, third.entry.records) == (2000, 5000)
    third.close()


def test_journal_locks_the_import(tmp_path: Path) -> None:
    first = journal(tmp_path)
    with pytest.raises(StoreLockedError, match="already running"):
        journal(tmp_path)
    first.close()
    journal(tmp_path).close()


def test_journal_corrupt_file_is_named(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.close()
    (first.folder / f"{first.name}.json").write_text("{")
    with pytest.raises(BadRequestError, match="remove the file to start over"):
        journal(tmp_path)


def test_journal_missing_position_is_zero(tmp_path: Path) -> None:
    first = journal(tmp_path)
    assert first.position == 0
    first.close()


def test_unique_ids_share_a_prefix_in_a_block() -> None:
    name = import_id(IDENTITY)
    ids = {unique_id_of(name, generation, record) for generation in (0, 1) for record in (0, 1, 65535, 65536, 1 << 40)}
    assert len(ids) == 10
    assert {len(found) for found in ids} == {32}
    assert unique_id_of(name, 0, 65536 + 7) == unique_id_prefix(name, 0, 65536) + "0007"
    assert unique_id_prefix(name, 0, 0) == unique_id_prefix(name, 0, 65535) != unique_id_prefix(name, 0, 65536)
    assert import_id({"topic": "t", "source": "/data/a.csv"}) == name


def test_fingerprint_accepts_growth_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"first line\n")
    before = Fingerprint.of(path)
    path.write_bytes(b"first line\nsecond\n")
    assert before.is_continued_by(path, may_grow=True)
    assert not before.is_continued_by(path, may_grow=False)
    path.write_bytes(b"other line\nsecond\n")
    assert not before.is_continued_by(path, may_grow=True)
    path.write_bytes(b"first")
    assert not before.is_continued_by(path, may_grow=True)
