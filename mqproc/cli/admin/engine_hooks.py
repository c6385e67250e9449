"""The engine's part in the start and end of a group: compiled kernels and recovery.

The first start on a machine compiles the kernels, later starts load them from a cache. Memory that the compiler uses
would stay in every forked role, so children fill the cache, one module after another. A marker file next to it records
that the cache is full. Of groups that start at the same time one compiles, and the others wait.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numba
from numba.core.registry import cpu_target

from mqproc.kernels import (
    append_frame,
    append_run,
    arrow,
    crc,
    dedupe,
    dispatch,
    dispatch_step,
    gather,
    hashing,
    index,
    log_match,
    record_check,
    record_decode,
    scan,
    sql,
    verify,
)
from mqproc.kernels.jit import compile as jit
from mqproc.kernels.jit import intrinsics
from mqproc.store.compat import RocketmqGuard
from mqproc.store.recovery.rebuild import usable_scanners
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.sync_guard import SyncWatch
from mqproc.supervisor import signals as prctl
from mqproc.supervisor.hooks import GroupContext, Hooks
from mqproc.util.file_lock import wait_for_flock

# Compiled kernels

NOT_KEPT: Final = (
    "neither the package's folder nor the home folder is writable; NUMBA_CACHE_DIR=DIR in the environment names another"
)
WARMED: Final[tuple[ModuleType, ...]] = (
    record_check, append_run, append_frame, gather, sql, index, dispatch, arrow, dispatch_step, scan, record_decode,
    dedupe, log_match, crc, hashing, verify, intrinsics,
)  # fmt: skip
"""Modules with kernels, in descending order of their compile time.

Includes those that decode pulled records into Arrow batches: a client's first batch would otherwise wait for five
seconds.
"""
_MARKER: Final = "mqproc-warmed-"
_LOCK: Final = "mqproc-warming.lock"
_CHILDREN_MAX: Final = 4
# Longer than any compilation. After that a second compilation does no harm.
_LOCK_WAIT_S: Final = 300.0
_LOCK_POLL_S: Final = 0.1


def make_ready() -> None:
    """Load every kernel for all roles, compiling those that no cache has."""
    fill_cache()
    for module in WARMED:
        module.warm()


def is_cached() -> bool:
    """Whether compiled kernels can be cached, so that only the first start compiles."""
    return full_cache_marker() is not None


def is_filled() -> bool:
    """Whether every kernel is compiled, so that a start only loads them."""
    marker = full_cache_marker()
    return marker is not None and marker.exists()


def fill_cache() -> None:
    """Compile every kernel that the cache lacks, in other processes."""
    marker = full_cache_marker()
    if marker is not None and not marker.exists():
        with cache_lock(marker.with_name(_LOCK)):
            if not marker.exists() and compile_in_children():
                _write_marker(marker)


def full_cache_marker() -> Path | None:
    """Path of the marker, named by compiler, processor and sources; None if nothing is cached."""
    kernel: Any = crc.crc32_update
    folder = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if folder is None:
        return None
    # numba also compares the modification times of the sources.
    sources = sorted(Path(jit.__file__).parents[1].rglob("*.py"))
    stamps = [(path.name, path.stat().st_mtime_ns) for path in sources]
    processor = cpu_target.target_context.codegen().magic_tuple()
    key = repr((numba.__version__, processor, jit.sources_fingerprint(), stamps))
    return Path(folder) / (_MARKER + hashlib.sha256(key.encode()).hexdigest()[:32])


@contextlib.contextmanager
def cache_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file, which is free when its holder ends; a wait without success ends too."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # Two compilations at once do no harm.
        yield
        return
    try:
        wait_for_flock(fd, _LOCK_WAIT_S, poll_s=_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def compile_in_children() -> bool:
    """Compile all modules, in one child per processor; whether all of them succeeded."""
    work_fd, queue_fd = os.pipe()
    os.write(queue_fd, bytes(range(len(WARMED))))
    os.close(queue_fd)
    children: list[int] = []
    statuses: list[int] = []
    try:
        for _ in range(min(len(os.sched_getaffinity(0)), _CHILDREN_MAX)):
            children.append(_fork_child(work_fd))
        while children:
            statuses.append(os.waitpid(children[-1], 0)[1])
            children.pop()
    finally:
        os.close(work_fd)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return not any(statuses)


def _fork_child(work_fd: int) -> int:
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
        # A module that failed fails again in the parent, which reports it.
        os._exit(status)


def _write_marker(marker: Path) -> None:
    """Mark the cache as full and delete markers and code of other sources."""
    with contextlib.suppress(OSError):  # Without a marker the next start checks again.
        for old in marker.parent.glob(f"{_MARKER}*"):
            old.unlink(missing_ok=True)
        for code in marker.parent.glob(f"*{jit.CODE_SUFFIX}"):
            if not code.name.endswith(jit.code_ending()):
                code.unlink(missing_ok=True)
        marker.touch()


# Loading from the cache takes less; compiling is reported.
WARM_REPORT_S = 3.0


def engine_hooks() -> Hooks:
    """Hooks for one run of a group."""
    active = SyncWatch()
    guards: list[RocketmqGuard] = []
    checked: list[Recovery] = []

    def warm(context: GroupContext) -> None:
        context.report("kernels: loading (the first start on a machine compiles them)")
        started = time.perf_counter()
        make_ready()
        if (took_s := time.perf_counter() - started) > WARM_REPORT_S:
            again = "" if is_cached() else f", and at each start again: {NOT_KEPT}"
            context.report(f"kernels: compiled in {took_s:.0f} s{again}")

    def check(context: GroupContext) -> None:
        recovery = Recovery(
            context.io,
            context.paths,
            context.options,
            context.control.words,
            context.report,
            clean=context.clean,
            scanners=usable_scanners(),
        )
        recovery.check()
        checked.append(recovery)

    def recover(context: GroupContext) -> None:
        context.io.make_folder(context.paths.commit_log)
        guards.append(RocketmqGuard(context.io, context.paths))
        checked.pop().run()
        active.open(context.io, context.paths, context.options, context.control.words)

    def finish(_context: GroupContext, _clean: bool) -> None:
        while guards:
            guards.pop().remove()

    return Hooks(
        warm=warm, check=check, recover=recover, sync_active_segments=active.sync, watch=active.follow, finish=finish
    )
