"""The error log: one entry per distinct error, kept across starts, readable during writes."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

from mqproc.io.store_io import StoreIO
from mqproc.ipc.error_log import ErrorLog, seen_errors
from mqproc.layout import control as words_of
from mqproc.layout import error_log as layout
from mqproc.paths import StorePaths
from mqproc.roles import role_log as log

IO = StoreIO()


def make(store: Path, owner: str = words_of.WRITER) -> ErrorLog:
    paths = StorePaths(store)
    paths.own.mkdir(parents=True, exist_ok=True)
    made = ErrorLog.create(IO, paths, owner)
    assert made is not None
    return made


def test_error_log_merges_errors_differing_in_numbers(tmp_path: Path) -> None:
    errors = make(tmp_path)
    errors.note("sync failed at 4,096", 1000)
    errors.note("sync failed at 8,192", 3000)
    errors.note("disk nearly full", 2000)
    found = seen_errors(IO, StorePaths(tmp_path))
    assert [(error.text, error.count, error.first_ms, error.last_ms) for error in found] == [
        ("sync failed at 4,096", 2, 1000, 3000),
        ("disk nearly full", 1, 2000, 2000),
    ]
    assert {error.owner for error in found} == {words_of.WRITER}


def test_error_log_counts_on_across_restarts(tmp_path: Path) -> None:
    make(tmp_path).note("no room", 1000)
    make(tmp_path).note("no room", 2000)
    make(tmp_path, words_of.KEEPER).note("no room", 3000)
    counts = {(error.owner, error.count) for error in seen_errors(IO, StorePaths(tmp_path))}
    assert counts == {(words_of.WRITER, 2), (words_of.KEEPER, 1)}


def test_error_log_evicts_least_recent_error(tmp_path: Path) -> None:
    errors = make(tmp_path)
    for number in range(layout.ENTRIES + 1):
        errors.note("error " + "x" * number, 1000 + number)
    texts = {error.text for error in seen_errors(IO, StorePaths(tmp_path))}
    assert len(texts) == layout.ENTRIES
    assert "error " not in texts
    assert "error " + "x" * layout.ENTRIES in texts


def test_error_log_truncates_between_characters(tmp_path: Path) -> None:
    make(tmp_path).note("ö" * 1000, 1000)
    (found,) = seen_errors(IO, StorePaths(tmp_path))
    assert set(found.text) == {"ö"}
    assert len(found.text.encode()) <= layout.TEXT_BYTES_MAX


def test_error_log_escapes_undecodable_name(tmp_path: Path) -> None:
    make(tmp_path).note(os.fsdecode(b"bad-\xff: left alone"), 1000)
    assert [error.text for error in seen_errors(IO, StorePaths(tmp_path))] == ["bad-\\udcff: left alone"]


def test_error_log_replaces_garbage(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path)
    paths.own.mkdir()
    paths.errors.write_bytes(b"\xff" * layout.FILE_SIZE)
    assert seen_errors(IO, paths) == []
    make(tmp_path).note("no room", 1000)
    assert len(seen_errors(IO, paths)) == 1


def test_error_log_missing_file_is_empty(tmp_path: Path) -> None:
    assert seen_errors(IO, StorePaths(tmp_path)) == []
    assert ErrorLog.open(IO, StorePaths(tmp_path), words_of.WRITER) is None


def test_error_log_merges_errors_differing_in_ids(tmp_path: Path) -> None:
    errors = make(tmp_path)
    for unique in ("7F00000154081EDB5E6F7E1D1280CE8F", "7F00000154081EDB5E6F7E1D16A0D077"):
        errors.note(f"transaction is given up transaction={unique} group=billing", 1000)
    errors.note(f"transaction is given up transaction={unique} group=shipping", 1000)
    assert sorted(error.count for error in seen_errors(IO, StorePaths(tmp_path))) == [1, 2]


def test_error_log_counts_suppressed_errors(tmp_path: Path) -> None:
    stream = io.StringIO()
    log.configure(words_of.WRITER, stream, make(tmp_path))
    try:
        for _ in range(log.BURST + 3):
            log.get_logger().error("flush waits", error="no room")
        log.get_logger().info("all is well")
        try:
            raise OSError("gone")
        except OSError:
            log.get_logger().exception("unexpected error")
    finally:
        log.configure(words_of.WRITER, sys.stderr)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len([line for line in lines if line["event"] == "flush waits"]) == log.BURST
    found = {error.text: error.count for error in seen_errors(IO, StorePaths(tmp_path))}
    assert found == {"flush waits error=no room": log.BURST + 3, "unexpected error OSError: gone": 1}
