"""What a start would compile, compiled beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.cli.admin import kernel_cache as warm_kernels
from tests.cli.calling import call


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the note of a full cache lies; children that compile do so at once."""
    note = tmp_path / "mqproc-warmed-now"
    monkeypatch.setattr(warm_kernels, "_full_cache_marker", lambda: note)
    monkeypatch.setattr(warm_kernels, "_compile_in_children", lambda: True)
    return note


def test_it_compiles_once(note: Path) -> None:
    found = call("warm")
    assert found.code == 0
    assert found.err.startswith("compiling\ncompiled in ")
    assert note.exists()
    assert (call("warm").code, call("warm").err) == (0, "all is compiled already\n")


def test_json_says_whether_it_compiled(note: Path) -> None:
    first, second = (call("warm", "--json").json for _ in range(2))
    assert (first["compiled"], first["kept"], second["compiled"]) == (True, True, False)


def test_where_nothing_can_be_kept_it_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_kernels, "_full_cache_marker", lambda: None)
    found = call("warm")
    assert found.code == 1
    assert "NUMBA_CACHE_DIR" in found.err
