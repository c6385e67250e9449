"""`mqproc store verify`: everything that a store's files say twice, compared; what differs, where, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.options import PATH, Command, Invocation, pass_invocation
from mqproc.cli.output import Column, Output, Progress, format_bytes
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.units import MIB, counted

if TYPE_CHECKING:
    from mqproc.config.options import Options
    from mqproc.store.verify import VerifyResult

EXIT_DAMAGE = 1
FINDING_COLUMNS = [
    Column("severity"),
    Column("kind"),
    Column("file"),
    Column("offset", kind="number"),
    Column("physical_offset", kind="number"),
    Column("size", kind="number"),
    Column("count", kind="number"),
    Column("text", "what"),
]
_KIND_COLUMNS = [Column("kind"), Column("severity"), Column("means"), Column("do", "what to do")]


@click.command(cls=Command)
@click.argument("folder", required=False, type=PATH)
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [one for each processor]")
@click.option("--kinds", is_flag=True, help="List every kind of finding with what it means and what to do, and end.")
@pass_invocation
def verify(invocation: Invocation, folder: Path | None, jobs: int | None, kinds: bool) -> int:
    """Check every record, unit and index entry.

    FOLDER is any store, ours or RocketMQ's, running or not; nothing is changed. Sizes and CRCs of records, ConsumeQueue
    units and index entries against the records that they lead to, records against the units and entries that they
    should have, checkpoint, marks, settings, names and lengths. The exit code is 0 for a clean store, 1 for damage;
    notes are no damage.
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
    """Verify a store with a bar on stderr; `is_mine`: the caller holds its lock. Raises StoreAccessError."""
    from mqproc.store.verify import verify_store

    with Progress(out, "verify", "MiB", rate_unit="MiB") as progress:

        def show(done: int, total: int) -> None:
            progress.update(done, total, done // MIB)

        found = verify_store(StoreIO(), paths, options, jobs=jobs, is_mine=is_mine, on_progress=show)
        progress.end(found.size, found.size, found.size // MIB)
    return found


def print_verified(out: Output, found: VerifyResult) -> None:
    """Findings, what they mean, and a summary."""
    findings = found.findings
    listed = [finding.to_json() for finding in findings.in_order()]
    if out.shape == "json":
        out.document({**summary(found), "findings": listed})
        return
    if listed or out.shape != "table":
        out.rows("findings", FINDING_COLUMNS, map(_row, listed) if out.shape == "table" else listed)
    if out.shape != "table":
        return
    explained = {str(row["kind"]): row for row in listed}
    if explained:
        out.line("")
    for kind, row in explained.items():
        out.line(f"{kind}: {row['means']}; {row['do']}")
    if findings.omitted:
        out.line(f"{counted(findings.omitted, 'more finding')} not listed")
    if listed:
        out.line("")
    out.line(_verdict(found))


def _row(finding: dict[str, Any]) -> dict[str, Any]:
    """For a table: a size and a count that make no sense are empty places, as offsets are."""
    return {**finding, "size": finding["size"] or None, "count": finding["count"] or None}


def summary(found: VerifyResult) -> dict[str, Any]:
    """What was looked at, and how much of it was damaged."""
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
    from mqproc.store.verify import KINDS

    rows = [
        {"kind": str(kind), "severity": str(about.severity), "means": about.means, "do": about.do}
        for kind, about in KINDS.items()
    ]
    out.rows("kinds", _KIND_COLUMNS, rows)
