"""Kernels made ready before roles are forked: compiled once, in processes of their own, and from then on only loaded.

What compiling leaves in memory would stay in every role's. So children fill the compiler's cache, a module after the
other between them, and a note beside it tells that it is full; while the note is there nobody is forked for nothing.
Groups that start at the same time let one of them compile, and wait for it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numba
from numba.core.registry import cpu_target

from mqproc.kernels import crc
from mqproc.kernels.jit import compile as jit
from mqproc.kernels.jit.warming import WARMED, warm_all
from mqproc.supervisor import signals as prctl
from mqproc.util.file_lock import wait_for_flock

NOT_KEPT: Final = (
    "they cannot be kept in their folder or the home; NUMBA_CACHE_DIR=DIR in the environment names another"
)
_NOTE: Final = "mqproc-warmed-"
_LOCK: Final = "mqproc-warming.lock"
_CHILDREN_MAX: Final = 4
# Longer than one takes that compiles; then a second one does no harm.
_LOCK_WAIT_S: Final = 300.0
_LOCK_POLL_S: Final = 0.1


def make_ready() -> None:
    """Load every kernel; what the cache lacks is compiled first. Without a cache each is compiled here."""
    fill_cache()
    warm_all()


def are_kept() -> bool:
    """Whether there is a folder for compiled kernels, so that only the first start compiles them."""
    return _note_of_full_cache() is not None


def is_filled() -> bool:
    """Whether every kernel is compiled, so that a start only loads them."""
    note = _note_of_full_cache()
    return note is not None and note.exists()


def fill_cache() -> None:
    """Have every kernel compiled that the cache lacks, by other processes."""
    note = _note_of_full_cache()
    if note is not None and not note.exists():
        with _only_one(note.with_name(_LOCK)):
            if not note.exists() and _compile_in_children():
                _leave(note)


def _note_of_full_cache() -> Path | None:
    """The note's name tells compiler, processor and sources; None where nothing is cached."""
    kernel: Any = crc.crc32_update
    folder = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if folder is None:
        return None
    # numba goes by the times of the sources too.
    sources = sorted(Path(jit.__file__).parents[1].rglob("*.py"))
    stamps = [(path.name, path.stat().st_mtime_ns) for path in sources]
    processor = cpu_target.target_context.codegen().magic_tuple()
    said = repr((numba.__version__, processor, jit.sources_fingerprint(), stamps))
    return Path(folder) / (_NOTE + hashlib.sha256(said.encode()).hexdigest()[:32])


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock that is free once its holder has ended, however it did; nobody is waited for without end."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # Two that compile do no harm.
        yield
        return
    try:
        wait_for_flock(fd, _LOCK_WAIT_S, poll_s=_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _compile_in_children() -> bool:
    """Have all modules compiled, by a child for each processor; whether none of them failed."""
    work_fd, tell_fd = os.pipe()
    os.write(tell_fd, bytes(range(len(WARMED))))
    os.close(tell_fd)
    children: list[int] = []
    statuses: list[int] = []
    try:
        for _ in range(min(len(os.sched_getaffinity(0)), _CHILDREN_MAX)):
            children.append(_begin_child(work_fd))
        while children:
            statuses.append(os.waitpid(children[-1], 0)[1])
            children.pop()
    finally:
        os.close(work_fd)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return not any(statuses)


def _begin_child(work_fd: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        prctl.die_with_parent()
        while taken := os.read(work_fd, 1):
            WARMED[taken[0]].warm()
        status = 0
    finally:
        # What failed fails again in the parent, which tells it.
        os._exit(status)


def _leave(note: Path) -> None:
    """Say that the cache is full; what was there before, of other sources, is of no use any more."""
    with contextlib.suppress(OSError):  # Without it the next start looks again.
        for old in note.parent.glob(f"{_NOTE}*"):
            old.unlink(missing_ok=True)
        for code in note.parent.glob(f"*{jit.CODE_SUFFIX}"):
            if not code.name.endswith(jit.code_ending()):
                code.unlink(missing_ok=True)
        note.touch()
