"""Kernels made ready before roles are forked: compiled once, in a process of its own, and from then on only loaded.

What compiling leaves in memory would stay in every role's. So a child fills the compiler's cache, and leaves a note
beside it that it is full; while the note is there nobody is forked for nothing.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, Final

import numba
from numba.core.registry import cpu_target

from mqproc.kernels import crc, jit
from mqproc.kernels.warming import warm_all

_NOTE: Final = "mqproc-warmed-"


def make_ready() -> None:
    """Load every kernel; what the cache lacks is compiled first."""
    note = _note_of_full_cache()
    if note is None or not note.exists():
        _compile_in_a_child(note)
    warm_all()


def _note_of_full_cache() -> Path | None:
    """The note's name tells compiler, processor and sources; None where nothing is cached."""
    kernel: Any = crc.crc32_update
    folder = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if folder is None:
        return None
    # numba goes by the times of the sources too.
    sources = sorted(Path(jit.__file__).parent.glob("*.py"))
    stamps = [(path.name, path.stat().st_mtime_ns) for path in sources]
    processor = cpu_target.target_context.codegen().magic_tuple()
    said = repr((numba.__version__, processor, jit.sources_fingerprint(), stamps))
    return Path(folder) / (_NOTE + hashlib.sha256(said.encode()).hexdigest()[:32])


def _compile_in_a_child(note: Path | None) -> None:
    child = os.fork()
    if child == 0:
        try:
            warm_all()
            if note is not None:
                _leave(note)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _leave(note: Path) -> None:
    with contextlib.suppress(OSError):  # Without it the next start looks again.
        for old in note.parent.glob(f"{_NOTE}*"):
            old.unlink(missing_ok=True)
        note.touch()
