"""The engine's part in the start and end of a group."""

from __future__ import annotations

import time

from mqproc.cli.admin.kernel_cache import NOT_KEPT, is_cached, make_ready
from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.compat import RocketmqGuard
from mqproc.store.recovery.rebuild import usable_scanners
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.store.sync_guard import SyncWatch
from mqproc.supervisor.hooks import GroupContext, Hooks, Report

# Loading from the cache takes less; compiling is reported.
WARM_REPORT_S = 3.0


def adopted_options(paths: StorePaths, options: Options, report: Report) -> Options:
    """The options with the sizes of the store's existing files."""
    return adopt_sizes(StoreIO(), paths, options, report)


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
        warm=warm,
        check=check,
        recover=recover,
        sync_active_segments=active.sync,
        watch=active.follow,
        finish=finish,
    )
