"""The engine's part in the start and end of a group: compiled kernels and recovery.

The first start on a machine compiles the kernels, later starts load them from a cache. Memory that the compiler uses
would stay in every forked role, so children fill the cache, one module after another. If several
groups start at the same time, one compiles and the others wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

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
from mqproc.kernels.jit import cache, intrinsics
from mqproc.kernels.jit.compile import uninterrupted
from mqproc.roles.role_log import get_logger
from mqproc.store.compat import RocketmqGuard
from mqproc.store.lost_messages import errors_about
from mqproc.store.recovery.rebuild import usable_scanners
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.sync_guard import SyncWatch
from mqproc.store.unsupported import refuse_unsupported
from mqproc.supervisor import signals as prctl
from mqproc.supervisor.hooks import GroupContext, Hooks
from mqproc.util.file_lock import wait_for_flock

# Compiled kernels

WARMED: Final[tuple[ModuleType, ...]] = (
    record_check, append_run, append_frame, gather, sql, index, dispatch, arrow, dispatch_step, scan, record_decode,
    dedupe, log_match, crc, hashing, verify, intrinsics,
)  # fmt: skip
"""Modules with kernels, in descending order of their compile time.

Includes those that decode pulled records into Arrow batches: a client's first batch would otherwise wait for five
seconds.
"""
_CHILDREN_MAX: Final = 4
# Longer than any compilation. After that a second compilation does no harm.
_LOCK_WAIT_S: Final = 300.0
_LOCK_POLL_S: Final = 0.1


def make_ready() -> None:
    """Load every kernel for all roles, compiling those that no cache has."""
    fill_cache()
    for module in WARMED:
        uninterrupted(module.warm)()


def fill_cache() -> None:
    """Compile every kernel that the cache lacks, in other processes."""
    if full := cache.full_folder():
        cache.mark_used(full)
    elif folder := cache.writable_folder():
        with cache_lock(folder):
            if cache.full_folder() is None and compile_in_children():
                with contextlib.suppress(OSError):  # If the mark is missing, the next start checks again.
                    cache.mark_full(folder)
                cache.delete_unused(folder)


def not_kept() -> str:
    """Why the compiled kernels are not kept, and what helps."""
    reasons = "; ".join(cache.problems()) or "a kernel was not compiled"
    return f"{reasons}; NUMBA_CACHE_DIR=DIR in the environment names another folder"


@contextlib.contextmanager
def cache_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder; a wait without success ends after five minutes."""
    try:
        cache.make_folder(folder)
        fd = os.open(folder / cache.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            again = "" if cache.full_folder() else f", and at each start again: {not_kept()}"
            context.report(f"kernels: compiled in {took_s:.0f} s{again}")
        if cache.full_folder():
            for problem in cache.problems():
                context.report(f"kernels: {problem}")

    def check(context: GroupContext) -> None:
        ignore = context.options.ignore_kvstore
        refuse_unsupported(context.io, context.paths, context.report, ignore=ignore)
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
        recovery = checked.pop()
        recovery.run()
        for text in errors_about(recovery.lost, "the log"):
            get_logger().error(text)
        active.open(context.io, context.paths, context.options, context.control.words)

    def finish(_context: GroupContext, _clean: bool) -> None:
        while guards:
            guards.pop().remove()

    return Hooks(
        warm=warm,
        check=check,
        recover=recover,
        sync_active_segments=active.sync,
        watch=active.follow,
        lost_file=active.lost_segment,
        finish=finish,
    )
