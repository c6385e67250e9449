"""`mqproc store verify`, `repair` and `recover`: check a store, plan a repair, execute it."""

from __future__ import annotations

import contextlib
import datetime
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.options import Invocation, command, detailed_exitcode_option, execute_option, folder_argument
from mqproc.cli.output import Output, OutputColumn, Progress, output_columns
from mqproc.errors import MqprocError, StoreAccessError, StoreLockedError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import StoreLock, lock_holder
from mqproc.paths import StorePaths
from mqproc.util.units import MIB, counted, format_bytes

if TYPE_CHECKING:
    from mqproc.config.options import Options
    from mqproc.store.lost_messages import LostMessages
    from mqproc.store.recovery.repair import RecoveryPlan, Repair, RepairPlan
    from mqproc.store.verify import VerifyResult

# Verify

EXIT_DAMAGE = 1
FINDING_COLUMNS = output_columns(
    "severity, kind, file, offset:number, physical_offset:number, size:bytes, count:number, text:text:what"
)
_KIND_COLUMNS = output_columns("kind", "severity", "means", "do:text:what to do")


_jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 1024), metavar="N", help="Number of processes.  [default: one per processor]"
)


@command()
@folder_argument
@_jobs_option
@click.option("--kinds", is_flag=True, help="List all kinds of findings with meaning and remedy.")
def verify(invocation: Invocation, folder: Path | None, jobs: int | None, kinds: bool) -> int:
    """Check every record, unit and index entry.

    FOLDER is any store of mqproc or RocketMQ, running or stopped. It is read-only. Checked are sizes and CRCs of
    records, ConsumeQueue units and index entries against their records, records against their units and entries, the
    checkpoint, durable marks, settings, and names and sizes of files. The exit code is 0 for a clean store, 1 for
    damage; notes are not damage.
    """
    out = invocation.out
    if kinds:
        _print_kinds(out)
        return 0
    io = StoreIO()
    paths = invocation.store_argument(io, folder)
    found = verify_with_progress(paths, invocation.store_options(io, paths), out, jobs or 0)
    print_verified(out, found)
    return 0 if found.clean else EXIT_DAMAGE


def verify_with_progress(
    paths: StorePaths, options: Options, out: Output, jobs: int = 0, *, is_mine: bool = False
) -> VerifyResult:
    """Verify a store, whose lock the caller holds if `is_mine`. Raises StoreAccessError."""
    from mqproc.store.verify import verify_store

    with Progress(out, "verify", "MiB", rate_unit="MiB") as progress:

        def show(done: int, total: int) -> None:
            progress.update(done, total, done // MIB)

        found = verify_store(StoreIO(), paths, options, jobs=jobs, is_mine=is_mine, on_progress=show)
        progress.end(found.size, found.size, found.size // MIB)
    return found


def print_verified(out: Output, found: VerifyResult, *, with_lost: bool = True) -> None:
    """Print findings, their meanings, a summary, and which messages are lost."""
    findings = found.findings
    listed = [finding.to_json() for finding in findings.in_order()]
    if out.shape == "json":
        lost = [each.to_json() for each in found.lost]
        out.document({**summary(found), "findings": listed, "lost_messages": lost})
        return
    if listed or out.shape != "table":
        # A table omits sizes and counts of 0.
        rows = [row | {"size": row["size"] or None, "count": row["count"] or None} for row in listed]
        out.rows("findings", FINDING_COLUMNS, rows if out.shape == "table" else listed)
    if out.shape != "table":
        return
    _explain(out, listed, findings.omitted)
    out.line(_verdict(found))
    if with_lost:
        _print_lost(out, found.lost)


def _explain(out: Output, listed: Sequence[dict[str, Any]], omitted: int) -> None:
    explained = {str(row["kind"]): row for row in listed}
    if explained:
        out.line("")
    for kind, row in explained.items():
        out.line(f"{kind}: {row['means']}; {row['do']}")
    if omitted:
        out.line(f"{counted(omitted, 'more finding')} not listed")
    if listed:
        out.line("")


def _print_lost(out: Output, lost: Sequence[LostMessages]) -> None:
    from mqproc.store.lost_messages import lines_about

    for line in lines_about(lost, _ROWS_MAX):
        out.line(line)


def summary(found: VerifyResult) -> dict[str, Any]:
    """Totals of a verification."""
    findings = found.findings
    return {
        **found.figures(),
        "seconds": round(found.seconds, 3),
        "bytes_per_second": round(found.bytes_per_second),
        "counts": {str(kind): count for kind, count in sorted(findings.counts.items())},
    }


def _verdict(found: VerifyResult) -> str:
    findings = found.findings
    notes = findings.counts.total() - findings.damaged
    verdict = "clean" if found.clean else f"DAMAGED: {counted(findings.damaged, 'finding')}"
    noted = f", {counted(notes, 'note')}" if notes else ""
    running = " of a running store" if found.running else ""
    looked = (
        f"{counted(found.records, 'record')} [{found.log_begin:,}, {found.log_end:,}){running}, "
        f"{counted(found.units, 'unit')} of {counted(found.queues, 'queue')}, {counted(found.items, 'index entry')}"
    )
    rate = f"{format_bytes(found.size)} in {found.seconds:.2f} s, {format_bytes(found.bytes_per_second)}/s"
    return f"{verdict}{noted}: {looked}: {rate}"


def _print_kinds(out: Output) -> None:
    from mqproc.store.verify import FindingKind

    rows = [
        {"kind": str(kind), "severity": str(kind.severity), "means": kind.means, "do": kind.do} for kind in FindingKind
    ]
    out.rows("kinds", _KIND_COLUMNS, rows)


# Rows of a table; JSON and CSV have all.
_ROWS_MAX = 100
_DOWN = "; mqproc down stops a group"
_ACTIONS = output_columns("file", "what", "why")
_CHANGES = output_columns(
    "file, what, was_bytes:bytes:was, bytes:bytes:becomes, first_byte:number:from byte",
    "differing_bytes:bytes:differing, moved_to",
)


@command()
@folder_argument
@execute_option
@_jobs_option
def repair(invocation: Invocation, folder: Path | None, execute: bool, jobs: int | None) -> int:
    """Show the plan to repair a damaged store, or execute it.

    FOLDER is any stopped store of mqproc or RocketMQ. It is verified, then repaired in memory: that is the plan.

    --execute first copies every file that changes to mqproc/repaired/TIME/files, then repairs the store and verifies it
    again. To undo the repair, before anything else has run on the store, delete the files that repair.json next to the
    copies lists as created, and copy the files back. Delete the folder when it is no longer needed.

    After a failed sync a store is read-only. Repair reads it from the disk instead of the page cache; afterwards it
    accepts messages again. The exit code is 1 if the store is damaged and the plan was executed, or nothing of it can
    be repaired.
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
            if plan.nothing_to_do:
                return 0 if found.clean else EXIT_DAMAGE
            return invocation.plan_exit_code(True)
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


@command()
@folder_argument
@click.option("--dry-run", is_flag=True, help="Only show the changes. This is the default.")
@click.option("--execute", "--yes", "execute", is_flag=True, help="Recover now, without starting a group.")
@detailed_exitcode_option
def recover(invocation: Invocation, folder: Path | None, dry_run: bool, execute: bool) -> int:
    """Show the changes that a start would make to a stopped store.

    FOLDER is any stopped store of mqproc or RocketMQ. Recovery runs in memory and shows its steps, cuts, holes and
    files. Unlike mqproc store repair it only reads the part that may have changed since the last durable marks, and
    keeps no copies. The exit code is 1 if a start would be refused, or a recovery that was executed found damage.
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
    if plan.refused or (execute and (plan.holes or plan.cuts)):
        return EXIT_DAMAGE
    return 0 if execute else invocation.plan_exit_code(bool(plan.changes))


@contextlib.contextmanager
def _exclusive(io: StoreIO, paths: StorePaths, *, execute: bool) -> Iterator[None]:
    """Hold the store's lock if it is to be changed; otherwise check that it is free.

    Raises StoreLockedError, StoreAccessError.
    """
    # A plan keeps every changed file open.
    _limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        if not execute:
            if (holder := lock_holder(io, paths)) is not None:
                raise StoreLockedError(f"{paths.root}: the store is in use by {holder}{_DOWN}")
            yield
            return
        try:
            lock = StoreLock.acquire(io, paths)
        except StoreLockedError as error:
            raise StoreLockedError(f"{error}{_DOWN}") from None
        with contextlib.closing(lock):
            yield
    except PermissionError as error:
        raise StoreAccessError(f"{error.filename}: {error.strerror}") from None


def _print_repair(
    out: Output,
    paths: StorePaths,
    found: VerifyResult,
    plan: RepairPlan,
    after: VerifyResult | None = None,
    kept: str = "",
) -> None:
    """Print findings and plan; `after` and `kept` if it was executed."""
    from mqproc.store.lost_messages import merged_losses
    from mqproc.store.recovery.repair import action_row, change_row

    actions = [action_row(action, paths) for action in plan.actions]
    changes = [change_row(change, paths) for change in plan.changes]
    last = after or found
    lost = merged_losses([*last.lost, *plan.lost])
    if out.is_json:
        document = {"store": str(paths.root), "executed": after is not None, "clean": last.clean}
        document |= {"before": summary(found), "after": summary(after) if after else None}
        document |= {"findings": [finding.to_json() for finding in last.findings.in_order()], "actions": actions}
        document |= {"lost_messages": [each.to_json() for each in lost]}
        out.document(document | {"recovery": plan.reported, "changes": changes, "kept_in": kept or None})
        return
    if out.shape != "table":
        out.rows("changes", _CHANGES, changes)
        return
    print_verified(out, found, with_lost=False)
    if plan.nothing_to_do:
        out.line("nothing to repair" if found.clean else "nothing more can be repaired")
        _print_lost(out, lost)
        return
    _print_plan(out, plan, actions, changes, executed=after is not None)
    for finding in plan.unrepairable:
        out.line(f"stays: {finding.kind} {finding.file} {finding.text}".rstrip())
    if after is None:
        out.line("nothing was changed; --execute executes the plan and keeps copies in mqproc/repaired")
    else:
        out.line(f"copies of the changed files are in {kept}; delete them when they are no longer needed")
        out.line("")
        print_verified(out, after, with_lost=False)
    _print_lost(out, lost)


def _print_plan(
    out: Output, plan: RepairPlan, actions: list[dict[str, Any]], changes: list[dict[str, Any]], *, executed: bool
) -> None:
    out.line("")
    out.line("done:" if executed else "plan:")
    if actions:
        _print_rows(out, "actions", _ACTIONS, actions)
    for line in () if executed else plan.reported:
        out.line(line)
    _print_changes(out, changes)
    out.line("")


def _print_changes(out: Output, changes: list[dict[str, Any]]) -> None:
    if changes:
        out.line("")
        _print_rows(out, "changes", _CHANGES, changes)


def _print_rows(out: Output, name: str, columns: list[OutputColumn], rows: list[dict[str, Any]]) -> None:
    out.rows(name, columns, rows[:_ROWS_MAX])
    if len(rows) > _ROWS_MAX:
        out.line(f"and {len(rows) - _ROWS_MAX:,} more; --json lists them all")


def _print_recovery(out: Output, paths: StorePaths, plan: RecoveryPlan, *, executed: bool) -> None:
    from mqproc.store.recovery.repair import change_row

    changes = [change_row(change, paths) for change in plan.changes]
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
                "lost_messages": [each.to_json() for each in plan.lost],
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
    _print_lost(out, plan.lost)
    out.line("recovered" if executed else "nothing was changed")
