"""Symlinks in place of files that are written: their target is never changed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mqproc import Message
from mqproc.errors import StoreAccessError
from mqproc.io.store_io import SYMLINK, StoreIO
from mqproc.paths import StorePaths
from mqproc.store.commitlog.flush import make_segment
from tests.support.command_line import call
from tests.support.group import Group


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    target = tmp_path / "outside"
    target.write_bytes(b"precious")
    return target


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    for name in ("commitlog", "mqproc"):
        (folder / name).mkdir(parents=True)
    return folder


def test_open_for_writing_refuses_a_symlink(store: Path, outside: Path) -> None:
    link = store / "checkpoint"
    link.symlink_to(outside)
    for create in (False, True):
        with pytest.raises(OSError, match=re.escape(SYMLINK)):
            StoreIO().open(link, write=True, create=create)
    assert outside.read_bytes() == b"precious"


def test_next_version_that_is_a_symlink_is_replaced(store: Path, outside: Path) -> None:
    link = store / "mqproc" / "settings.json.tmp"
    link.symlink_to(outside)
    StoreIO().write_file_atomically(store / "mqproc" / "settings.json", b"{}")
    assert (store / "mqproc" / "settings.json").read_bytes() == b"{}"
    assert (outside.read_bytes(), link.is_symlink()) == (b"precious", False)


def test_next_segment_that_is_a_symlink_is_replaced(store: Path, outside: Path) -> None:
    paths = StorePaths(store)
    paths.next_segment.symlink_to(outside)
    make_segment(StoreIO(), paths, 0, 1 << 16)
    (segment,) = paths.commit_log.iterdir()
    assert (segment.is_symlink(), segment.stat().st_size) == (False, 1 << 16)
    assert outside.read_bytes() == b"precious"


def test_dangling_symlink_creates_nothing_outside(store: Path, tmp_path: Path) -> None:
    (store / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match=re.escape(SYMLINK)):
        StoreIO().open(store / "lock", write=True, create=True)
    assert not (tmp_path / "new").exists()


def test_group_replaces_symlinks_of_next_versions(tmp_path: Path, outside: Path) -> None:
    group = Group(tmp_path / "store").start()
    try:
        for name in ("segment.tmp", "settings.json.tmp", "progress.tmp", "opened.tmp"):
            path = group.paths.own / name
            path.unlink(missing_ok=True)
            path.symlink_to(outside)
        with group.client() as client:
            # More than a segment of SMALL, so that others are made.
            for _ in range(12):
                client.send(Message("T", os.urandom(200_000)))
    finally:
        group.stop()
        group.close()
    assert outside.read_bytes() == b"precious"


def test_detached_group_refuses_a_log_that_is_a_symlink(store: Path, outside: Path) -> None:
    (store / "mqproc" / "log.jsonl").symlink_to(outside)
    shown = call("up", "--detach", "--store", store, "--set", "metrics_port=0")
    assert (shown.code, SYMLINK in shown.err) == (StoreAccessError.exit_code, True)
    assert outside.read_bytes() == b"precious"
