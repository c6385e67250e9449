"""`mqproc store repair` and `recover`: show the planned changes to a store, or execute them."""

from __future__ import annotations

import contextlib
import datetime
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.options import PATH, Command, Invocation, pass_invocation
from mqproc.cli.output import Output, OutputColumn
from mqproc.cli.store.verify import print_verified, summary, verify_with_progress
from mqproc.errors import MqprocError, StoreAccessError, StoreLockedError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import StoreLock, lock_holder
from mqproc.paths import StorePaths
from mqproc.util.units import counted

if TYPE_CHECKING:
    from mqproc.store.recovery.dry_run import Change
    from mqproc.store.recovery.repair import RecoveryPlan, Repair, RepairPlan
    from mqproc.store.verify import VerifyResult

EXIT_DAMAGE = 1
# Rows of a table; JSON and CSV have all.
_ROWS_MAX = 100
_DOWN = "; mqproc down stops a group"
_ACTIONS = [OutputColumn("file"), OutputColumn("what"), OutputColumn("why")]
_CHANGES = [
    OutputColumn("file"),
    OutputColumn("what"),
    OutputColumn("was_bytes", "was", "number"),
    OutputColumn("bytes", "becomes", "number"),
    OutputColumn("first_byte", "from byte", "number"),
    OutputColumn("differing_bytes", "differing", "number"),
    OutputColumn("moved_to"),
]


@click.command(cls=Command)
@click.argument("folder", required=False, type=PATH)
@click.option("--execute", is_flag=True, help="Execute the plan instead of showing it.")
@click.option(
    "--jobs", type=click.IntRange(1, 1024), metavar="N", help="Number of processes.  [default: one per processor]"
)
@pass_invocation
def repair(invocation: Invocation, folder: Path | None, execute: bool, jobs: int | None) -> int:
    """Show the plan to repair a damaged store, or execute it.

    FOLDER is any stopped store of mqproc or RocketMQ. It is verified, then repaired in memory: that is the plan.

    --execute first copies every file that changes to mqproc/repaired/TIME/files, then repairs the store and verifies it
    again. To undo the repair, before anything else has run on the store, delete the files that repair.json next to the
    copies lists as created, and copy the files back. Delete the folder when it is no longer needed.

    After a failed sync a store is read-only. Repair reads it from the disk instead of the page cache; afterwards it
    accepts messages again. The exit code is 0 if the store is clean in the end, else 1.
    """
    from mqproc.store.recovery.repair import Repair, drop_page_cache

    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    out = invocation.out
    with _exclusive(io, paths, execute=execute):
        options = invocation.store_options(io, paths)
        if io.exists(paths.read_only):
            drop_page_cache(io, paths)
        found = verify_with_progress(paths, options, out, jobs or 0, is_mine=execute)
        job = Repair(paths, options, found, datetime.datetime.now())
        plan = job.plan()
        if not execute or plan.nothing_to_do:
            _print_repair(out, paths, found, plan)
            return 0 if found.clean else EXIT_DAMAGE
        _execute(io, out, job, plan)
        after = verify_with_progress(paths, options, out, jobs or 0, is_mine=True)
    _print_repair(out, paths, found, plan, after, kept=str(job.kept.relative_to(paths.root)))
    return 0 if after.clean else EXIT_DAMAGE


def _execute(io: StoreIO, out: Output, job: Repair, plan: RepairPlan) -> None:
    try:
        job.execute(io, plan, out.note)
    except (MqprocError, OSError, KeyboardInterrupt, SystemExit):
        if io.exists(job.kept):
            out.note(f"not finished; {job.kept} has copies of the changed files; the next repair continues")
        raise


@click.command(cls=Command)
@click.argument("folder", required=False, type=PATH)
@click.option("--dry-run", is_flag=True, help="Only show the changes. This is the default.")
@click.option("--execute", is_flag=True, help="Recover now, without starting a group.")
@pass_invocation
def recover(invocation: Invocation, folder: Path | None, dry_run: bool, execute: bool) -> int:
    """Show the changes that a start would make to a stopped store.

    FOLDER is any stopped store of mqproc or RocketMQ. Recovery runs in memory and shows its steps, cuts, holes and
    files. Unlike mqproc store repair it only reads the part that may have changed since the last durable marks, and
    keeps no copies. The exit code is 1 if it finds damage or would refuse to start.
    """
    from mqproc.store.recovery.repair import plan_recovery, run_recovery

    if dry_run and execute:
        raise click.UsageError("--dry-run and --execute exclude each other")
    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    with _exclusive(io, paths, execute=execute):
        options = invocation.store_options(io, paths)
        plan = plan_recovery(paths, options)
        executed = execute and not plan.refused
        if executed:
            plan.reported = run_recovery(io, paths, options)
    _print_recovery(invocation.out, paths, plan, executed=executed)
    return EXIT_DAMAGE if plan.refused or plan.holes or plan.cuts else 0


@contextlib.contextmanager
def _exclusive(io: StoreIO, paths: StorePaths, *, execute: bool) -> Iterator[None]:
    """Hold the store's lock if it is to be changed; otherwise check that it is free.

    Raises StoreLockedError, StoreAccessError.
    """
    # A plan keeps every changed file open.
    _limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        if execute:
            with contextlib.closing(_acquire(io, paths)):
                yield
        elif (holder := lock_holder(io, paths)) is not None:
            raise StoreLockedError(f"{paths.root}: the store is in use by {holder}{_DOWN}")
        else:
            yield
    except PermissionError as error:
        raise StoreAccessError(f"{error.filename}: {error.strerror}") from None


def _acquire(io: StoreIO, paths: StorePaths) -> StoreLock:
    try:
        return StoreLock.acquire(io, paths)
    except StoreLockedError as error:
        raise StoreLockedError(f"{error}{_DOWN}") from None


def _print_repair(
    out: Output,
    paths: StorePaths,
    found: VerifyResult,
    plan: RepairPlan,
    after: VerifyResult | None = None,
    kept: str = "",
) -> None:
    """Print findings and plan; `after` and `kept` if it was executed."""
    from mqproc.store.recovery.repair import action_row

    actions = [action_row(action, paths) for action in plan.actions]
    changes = _rows(plan.changes, paths)
    if out.is_json:
        last = after or found
        document = {"store": str(paths.root), "executed": after is not None, "clean": last.clean}
        document |= {"before": summary(found), "after": summary(after) if after else None}
        document |= {"findings": [finding.to_json() for finding in last.findings.in_order()], "actions": actions}
        out.document(document | {"recovery": plan.reported, "changes": changes, "kept_in": kept or None})
    elif out.shape != "table":
        out.rows("changes", _CHANGES, changes)
    else:
        _print_repair_table(out, found, plan, actions, changes, after, kept)


def _print_repair_table(
    out: Output,
    found: VerifyResult,
    plan: RepairPlan,
    actions: list[dict[str, Any]],
    changes: list[dict[str, Any]],
    after: VerifyResult | None,
    kept: str,
) -> None:
    print_verified(out, found)
    if plan.nothing_to_do:
        out.line("nothing to repair" if found.clean else "nothing more can be repaired")
        return
    out.line("")
    out.line("plan:" if after is None else "done:")
    if actions:
        _print_rows(out, "actions", _ACTIONS, actions)
    if after is None:
        for line in plan.reported:
            out.line(line)
    _print_changes(out, changes)
    out.line("")
    for finding in plan.unrepairable:
        out.line(f"stays: {finding.kind} {finding.file} {finding.text}".rstrip())
    if after is None:
        out.line("nothing was changed; --execute executes the plan and keeps copies in mqproc/repaired")
        return
    out.line(f"copies of the changed files are in {kept}; delete them when they are no longer needed")
    out.line("")
    print_verified(out, after)


def _rows(changes: list[Change], paths: StorePaths) -> list[dict[str, Any]]:
    from mqproc.store.recovery.repair import change_row

    return [change_row(change, paths) for change in changes]


def _print_changes(out: Output, changes: list[dict[str, Any]]) -> None:
    if changes:
        out.line("")
        _print_rows(out, "changes", _CHANGES, changes)


def _print_rows(out: Output, name: str, columns: list[OutputColumn], rows: list[dict[str, Any]]) -> None:
    out.rows(name, columns, rows[:_ROWS_MAX])
    if len(rows) > _ROWS_MAX:
        out.line(f"and {len(rows) - _ROWS_MAX:,} more; --json lists them all")


def _print_recovery(out: Output, paths: StorePaths, plan: RecoveryPlan, *, executed: bool) -> None:
    changes = _rows(plan.changes, paths)
    if out.is_json:
        out.document(
            {
                "store": str(paths.root),
                "executed": executed,
                "refused": plan.refused or None,
                "log_begin": plan.log_begin,
                "log_end": plan.log_end,
                "cut_bytes": plan.cut_bytes,
                "holes": [{"start": start, "stop": stop} for start, stop in plan.holes],
                "lost": [{"end": end, "durable_end": durable_end} for end, durable_end in plan.cuts],
                "recovery": plan.reported,
                "changes": changes,
            }
        )
        return
    if out.shape != "table":
        out.rows("changes", _CHANGES, changes)
        return
    for line in plan.reported:
        out.line(line)
    _print_changes(out, changes)
    out.line("")
    if plan.refused:
        out.line(f"a start would be refused: {plan.refused}")
    else:
        holes = f", around {counted(len(plan.holes), 'damaged range')}" if plan.holes else ""
        out.line(f"the log is [{plan.log_begin:,}, {plan.log_end:,}){holes}")
        for end, durable_end in plan.cuts:
            out.line(f"lost: the log was durable up to {durable_end:,} and ends at {end:,}")
    out.line("recovered" if executed else "nothing was changed")
