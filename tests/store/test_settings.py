"""The options that a group runs with, kept and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.read.reader import settings_of
from mqproc.store.settings import read_settings, write_settings


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    found = StorePaths(tmp_path)
    found.own.mkdir()
    return found


def test_they_survive_the_file(paths: StorePaths) -> None:
    options = Options(max_queues=17, broker_ip="10.0.0.1")
    write_settings(StoreIO(), paths, options)
    assert read_settings(StoreIO(), paths) == options


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"7", b'["\xf6"]', b'{"max_queues": "many"}'])
def test_what_nobody_can_read_keeps_no_reader_out(paths: StorePaths, text: bytes) -> None:
    """A store without our own files is one too."""
    paths.settings.write_bytes(text)
    assert settings_of(StoreIO(), paths) == Options()
