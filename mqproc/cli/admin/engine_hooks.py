"""The engine's part in the start and end of a group: compiled kernels and recovery.

The first start on a machine compiles the kernels, later starts load them from a cache. Before a group serves, those for
sending, dispatch and pulling are compiled; the rest follows in the background, and a role refuses requests that need it
until then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Final

from mqproc.cli.admin.compilation import LOW_PRIORITY, Compilation
from mqproc.kernels import dedupe
from mqproc.kernels.jit import cache
from mqproc.kernels.jit.cache import own_target, target
from mqproc.kernels.jit.compile import COMPILED, uninterrupted
from mqproc.kernels.modules import LATER, LATER_NAMES, SERVING
from mqproc.layout import control as layout
from mqproc.roles.role_log import get_logger
from mqproc.store.compat import RocketmqGuard
from mqproc.store.lost_messages import errors_about
from mqproc.store.recovery.rebuild import usable_scanners
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.sync_guard import SyncWatch
from mqproc.store.unsupported import refuse_unsupported
from mqproc.supervisor import signals
from mqproc.supervisor.hooks import GroupContext, Hooks

# Compiled kernels

_AGAIN_S: Final = 60.0
_BETTER: Final = frozenset(("+vpclmulqdq", "+avx512f"))
"""Features that gain more than 5 %: CRCs of bodies from 1 KB on. AVX-512 alone gains nothing."""
_PAUSE_S: Final = 1.0
_ESTIMATED_FROM: Final = 10  # After a tenth of the kernels.
Progress = Callable[[str], None]
"""Receives a line for people about a compilation, once a second, and an empty line at its end."""


def make_ready(progress: Progress = lambda line: None) -> None:
    """Load every kernel, compiling those that no cache has."""
    if not COMPILED:
        return
    fill_cache(progress)
    for module in (*SERVING, *LATER):
        uninterrupted(module.warm)()


def fill_cache(progress: Progress = lambda line: None) -> None:
    """Compile every kernel that the cache lacks, in other processes."""
    if full := cache.full_folder():
        cache.mark_used(full)
    elif folder := cache.writable_folder():
        modules = (*SERVING, *LATER)
        compilation = Compilation(folder, modules, len(modules))
        with closing(compilation):
            compilation.start()
            estimate = _Estimate()
            while compilation.left and compilation.wait(_PAUSE_S):
                progress(estimate.update())
            progress("")
        if not compilation.left:
            _mark_full(folder)


def _mark_full(folder: Path) -> None:
    with contextlib.suppress(OSError):  # If the mark is missing, the next start checks again.
        cache.mark_full(folder)
    cache.delete_unused(folder)


def not_kept() -> str:
    """Why the compiled kernels are not kept, and what helps."""
    reasons = "; ".join(cache.problems()) or "a kernel was not compiled"
    return f"{reasons}; NUMBA_CACHE_DIR=DIR in the environment names another folder"


_SERVES_WITHIN_S: Final = 2.0
"""Time that the roles of a group with compiled kernels need to start."""


class _Estimate:
    """How many kernels are left, and for how long at the pace so far."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self._without = without
        self._began_s = time.monotonic()
        self._first, self._total = cache.progress(without)
        self.left, self.left_s = self._total - self._first, 0.0

    def update(self) -> str:
        """Count again; returns a line for people."""
        done, total = cache.progress(self._without)
        self.left = total - done
        if done - self._first > total // _ESTIMATED_FROM:
            self.left_s = (time.monotonic() - self._began_s) / (done - self._first) * self.left
        left = f", {self.left_s:.0f} s left" if self.left_s else ""
        return f"kernels: {done} of {total} compiled{left}"


class GroupKernels:
    """Kernels of one run of a group: serving waits for some, and the rest is compiled meanwhile."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._compilation: Compilation | None = None
        self._folder: Path | None = None
        self._next_s = 0.0
        self._was_ended = False
        self._has_better = False

    def make_ready(self, context: GroupContext) -> None:
        """Load what serving needs for all roles, and begin to compile the rest."""
        self._control = context.control
        if full := cache.full_folder():
            cache.mark_used(full)
            self._has_better = _is_better(own_target()) and not _is_better(target())
        urgent = (*SERVING, dedupe) if context.options.dedupe_window_messages else SERVING
        if full is None and not self._compile(cache.writable_folder(), urgent):
            self._compile(self._own_folder(context), urgent)
        for module in urgent if self._folder is not None else (*SERVING, *LATER):
            uninterrupted(module.warm)()
        if self._folder is not None:
            self._estimate = _Estimate()
            self._store_progress()

    def _own_folder(self, context: GroupContext) -> Path | None:
        """The store's folder for compiled code, for a user without another.

        Compiled in this process, code would delay the start and leave the compiler in the memory of all roles.
        """
        cache.use_only(context.paths.kernels)
        if full := cache.full_folder():
            cache.mark_used(full)
            return None
        return cache.writable_folder()

    def _compile(self, folder: Path | None, urgent: tuple[ModuleType, ...]) -> bool:
        """Compile modules into a folder and begin with the others; whether that was possible."""
        self._folder = folder
        if folder is None:
            return False
        self._estimate = _Estimate(LATER_NAMES)
        done, known = cache.progress(LATER_NAMES)
        if done == known and dedupe not in urgent:
            # An earlier start ended before the others were compiled: `watch` continues once the group serves.
            self._next_s = time.monotonic() + _SERVES_WITHIN_S
            return True
        later = [module for module in LATER if module not in urgent]
        compilation = self._compilation = Compilation(folder, (*urgent, *later), len(urgent))
        try:
            compilation.start()
            while compilation.is_urgent and compilation.wait(_PAUSE_S):
                self._progress(self._store_progress())
        except BaseException:
            compilation.close()
            raise
        self._progress("")
        if compilation.is_urgent:
            compilation.close()
            self._compilation = None
            return False
        return True

    def _store_progress(self) -> str:
        line = self._estimate.update()
        self._control.store(layout.KERNELS_LEFT, self._estimate.left)
        self._control.store(layout.KERNELS_LEFT_MS, round(1000 * self._estimate.left_s))
        return line

    @property
    def is_compiling(self) -> bool:
        """Whether the rest is compiled in the background."""
        return self._folder is not None

    def watch(self) -> None:
        """Follow the compilation in the background: one step."""
        if self._has_better:
            self._has_better = False
            compile_for_this_processor()
        if self._folder is None or (now_s := time.monotonic()) < self._next_s:
            return
        self._next_s = now_s + _PAUSE_S
        if self._compilation is None:
            compilation = Compilation(self._folder, LATER, 0)
            try:
                compilation.start()
            except OSError:  # No descriptor is left.
                compilation.close()
                return
            self._compilation = compilation
        compilation = self._compilation
        if compilation.wait(0):
            self._store_progress()
            return
        compilation.close()
        self._compilation = None
        if not compilation.left:
            _mark_full(self._folder)
            self._folder = None
            self._control.store(layout.KERNELS_LEFT, 0)
            self._control.store(layout.KERNELS_FAILED, 0)
        elif self._was_ended:
            get_logger().error("kernels could not be compiled in the background", again_s=_AGAIN_S)
            self._next_s = now_s + _AGAIN_S
            self._control.store(layout.KERNELS_FAILED, 1)
        # After a death of the template the supervisor ends unknown children: the first time is no failure.
        self._was_ended = True


def _is_better(processor: cache.Target) -> bool:
    return _BETTER.issubset(processor[2].split(","))


def compile_for_this_processor() -> None:
    """Replace a wheel's kernels for later starts: `mqproc warm` in the background.

    It ends with the group, whose supervisor reaps it, and the next one continues.
    """
    _, name, features = own_target()
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-P", "-m", "mqproc", "warm"],
            env=os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_as_background,
        )


def _as_background() -> None:
    signals.die_with_parent()
    os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), LOW_PRIORITY))


# Loading from the cache takes less; compiling is reported.
WARM_REPORT_S = 3.0


def _load(kernels: GroupKernels, context: GroupContext) -> None:
    """Make the kernels ready, and report how."""
    if not COMPILED:
        context.report("kernels: NUMBA_DISABLE_JIT is set: they run uncompiled, a thousand times slower")
        return
    context.report("kernels: loading (the first start on a machine compiles them)")
    started = time.perf_counter()
    kernels.make_ready(context)
    if (took_s := time.perf_counter() - started) > WARM_REPORT_S:
        more = "; the rest follows in the background" if kernels.is_compiling else ""
        if not (more or cache.full_folder()):
            more = f", and at each start again: {not_kept()}"
        context.report(f"kernels: compiled in {took_s:.0f} s{more}")
    if cache.full_folder():
        for problem in cache.problems():
            context.report(f"kernels: {problem}")


def engine_hooks(progress: Progress = lambda line: None) -> Hooks:
    """Hooks for one run of a group."""
    active = SyncWatch()
    kernels = GroupKernels(progress)
    guards: list[RocketmqGuard] = []
    checked: list[Recovery] = []

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

    def watch() -> None:
        active.follow()
        kernels.watch()

    def finish(_context: GroupContext, _clean: bool) -> None:
        while guards:
            guards.pop().remove()

    return Hooks(
        warm=lambda context: _load(kernels, context),
        check=check,
        recover=recover,
        sync_active_segments=active.sync,
        watch=watch,
        lost_file=active.lost_segment,
        finish=finish,
    )
