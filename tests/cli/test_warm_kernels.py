"""Kernels are compiled by a child where the cache lacks them, and nobody is forked where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.cli import warm_kernels
from mqproc.kernels import jit


def forks(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """For which notes a child is asked to compile; it has nothing to do but to leave them."""
    asked: list[Path | None] = []

    def child(note: Path | None) -> None:
        asked.append(note)
        if note is not None:
            warm_kernels._leave(note)

    monkeypatch.setattr(warm_kernels, "_compile_in_a_child", child)
    return asked


def test_a_full_cache_is_only_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, note = forks(monkeypatch), tmp_path / "mqproc-warmed-now"
    (tmp_path / "mqproc-warmed-before").touch()
    (tmp_path / "other").touch()
    monkeypatch.setattr(warm_kernels, "_note_of_full_cache", lambda: note)
    warm_kernels.make_ready()
    warm_kernels.make_ready()
    assert asked == [note]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mqproc-warmed-now", "other"]


def test_without_a_cache_a_child_compiles_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = forks(monkeypatch)
    monkeypatch.setattr(warm_kernels, "_note_of_full_cache", lambda: None)
    warm_kernels.make_ready()
    warm_kernels.make_ready()
    assert asked == [None, None]


@pytest.mark.skipif(not jit.COMPILED, reason="nothing is cached")
def test_other_sources_are_another_note(monkeypatch: pytest.MonkeyPatch) -> None:
    before = warm_kernels._note_of_full_cache()
    assert before is not None
    assert before == warm_kernels._note_of_full_cache()
    monkeypatch.setattr(jit, "sources_fingerprint", lambda: "another")
    after = warm_kernels._note_of_full_cache()
    assert after is not None
    assert (after.parent, after.name != before.name) == (before.parent, True)


def test_the_child_leaves_its_note(tmp_path: Path) -> None:
    note = tmp_path / "mqproc-warmed-by-a-child"
    warm_kernels._compile_in_a_child(note)
    assert note.exists()
