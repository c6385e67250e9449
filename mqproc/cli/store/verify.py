"""`mqproc store verify`: compare all redundant data of a store, and report differences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.options import PATH, Command, Invocation, pass_invocation
from mqproc.cli.output import Output, OutputColumn, Progress, format_bytes
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.units import MIB, counted

if TYPE_CHECKING:
    from mqproc.config.options import Options
    from mqproc.store.verify import VerifyResult

EXIT_DAMAGE = 1
FINDING_COLUMNS = [
    OutputColumn("severity"),
    OutputColumn("kind"),
    OutputColumn("file"),
    OutputColumn("offset", kind="number"),
    OutputColumn("physical_offset", kind="number"),
    OutputColumn("size", kind="number"),
    OutputColumn("count", kind="number"),
    OutputColumn("text", "what"),
]
_KIND_COLUMNS = [
    OutputColumn("kind"),
    OutputColumn("severity"),
    OutputColumn("means"),
    OutputColumn("do", "what to do"),
]


@click.command(cls=Command)
@click.argument("folder", required=False, type=PATH)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), metavar="N", help="Number of processes.  [default: one per processor]"
)
@click.option("--kinds", is_flag=True, help="List all kinds of findings with meaning and remedy.")
@pass_invocation
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
    """Verify a store with a progress bar; `is_mine`: the caller holds its lock.

    Raises StoreAccessError.
    """
    from mqproc.store.verify import verify_store

    with Progress(out, "verify", "MiB", rate_unit="MiB") as progress:

        def show(done: int, total: int) -> None:
            progress.update(done, total, done // MIB)

        found = verify_store(StoreIO(), paths, options, jobs=jobs, is_mine=is_mine, on_progress=show)
        progress.end(found.size, found.size, found.size // MIB)
    return found


def print_verified(out: Output, found: VerifyResult) -> None:
    """Print findings, their meanings, and a summary."""
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
    """A finding for a table, without sizes and counts of 0."""
    return {**finding, "size": finding["size"] or None, "count": finding["count"] or None}


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
    from mqproc.store.verify import KINDS

    rows = [
        {"kind": str(kind), "severity": str(about.severity), "means": about.means, "do": about.do}
        for kind, about in KINDS.items()
    ]
    out.rows("kinds", _KIND_COLUMNS, rows)
