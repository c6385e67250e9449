"""`mqproc doctor`: run every check once and report the findings."""

from __future__ import annotations

import os
import platform
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from mqproc.cli.admin.doctor.context import ORDER, Check, DoctorContext, DoctorFinding, Level, read_context
from mqproc.cli.admin.doctor.machine_checks import DISK_CHECKS, MACHINE_CHECKS
from mqproc.cli.admin.doctor.store_checks import OPTION_CHECKS, STORE_CHECKS
from mqproc.cli.options import Invocation, command
from mqproc.cli.output import Output, output_columns
from mqproc.paths import dangling_link
from mqproc.util.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.text import Text

CHECKS: Final[tuple[Check, ...]] = (*MACHINE_CHECKS, *DISK_CHECKS, *OPTION_CHECKS, *STORE_CHECKS)
EXIT_FOUND: Final = 1
_FINDING_COLUMNS: Final = output_columns("level", "area", "check", "found", "why", "mend:text:fix")
_CHECK_COLUMNS: Final = output_columns("check", "area", "asks:text:checks that")
_MARKS: Final = {Level.ERROR: "✗", Level.WARNING: "!", Level.NOTE: "·", Level.OK: "✓"}
_STYLES: Final = {Level.ERROR: "bold red", Level.WARNING: "bold yellow", Level.NOTE: "cyan", Level.OK: "green"}
_WIDTH_MIN: Final = 40
_WIDTH_MAX: Final = 110
_INDENT: Final = 4


@command()
@click.option("--all", "all_", is_flag=True, help="Also show the checks without findings.")
@click.option("--list", "list_", is_flag=True, help="List all checks with their questions.")
def doctor(invocation: Invocation, all_: bool, list_: bool) -> int:
    """Check this machine, the options and a store, and say how to fix each problem.

    Works with a running or stopped group, and without a store for the machine only. It changes nothing. Run it as the
    user of the group. The exit code is 1 if there are errors or warnings, else 0.
    """
    out = invocation.out
    if list_:
        out.rows(
            "checks",
            _CHECK_COLUMNS,
            [{"check": each.name, "area": each.area, "asks": each.question} for each in CHECKS],
        )
        return 0
    context = read_context(invocation)
    found = examine(context)
    if out.shape == "json":
        out.document({**_summary(context, found), "findings": [finding.to_json() for finding in found]})
    elif out.shape != "table":
        out.rows("findings", _FINDING_COLUMNS, [finding.to_json() for finding in found])
    else:
        _print(out, context, found, all_)
    return EXIT_FOUND if any(finding.level in (Level.ERROR, Level.WARNING) for finding in found) else 0


def examine(context: DoctorContext, checks: Sequence[Check] = CHECKS) -> list[DoctorFinding]:
    """Run the checks; the most severe findings first."""
    found = [finding for check in checks if (finding := check.run(context)) is not None]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


def _summary(context: DoctorContext, found: Sequence[DoctorFinding]) -> dict[str, Any]:
    counts = Counter(finding.level for finding in found)
    return {
        "store": str(context.paths.root) if context.paths else None,
        "running": context.running,
        "healthy": not counts[Level.ERROR] and not counts[Level.WARNING],
        "checks": len(found),
        "errors": counts[Level.ERROR],
        "warnings": counts[Level.WARNING],
        "notes": counts[Level.NOTE],
    }


def _print(out: Output, context: DoctorContext, found: Sequence[DoctorFinding], all_: bool) -> None:
    console = out.console()
    width = min(max(console.width, _WIDTH_MIN), _WIDTH_MAX) if out.is_terminal else _WIDTH_MAX

    def line(text: Text | str = "") -> None:
        if isinstance(text, str):
            out.line(text)
        else:
            console.print(text, soft_wrap=True)

    line(_heading(context))
    line()
    for finding in found:
        if finding.level is Level.OK:
            continue
        for text in _lines(finding, width):
            line(text)
        line()
    if all_:
        for text in _passed_lines(found):
            line(text)
        line()
    line(_verdict(found, all_))


def _heading(context: DoctorContext) -> str:
    memory = context.host.memory().get("MemTotal", 0)
    machine = f"{context.host.processors()} processors, {format_bytes(memory)}, Linux {platform.release()}"
    if context.paths is None:
        return f"This machine ({machine}); no store is named; --store DIR checks one."
    if context.running:
        state = f"a group runs{context.supervisor}"
    elif context.held and context.other_version:
        state = "a group of another version runs"
    elif os.path.isdir(context.paths.root):
        state = "no group runs"
    else:
        state = dangling_link(context.paths.root) or "does not exist yet"
    return f"{context.paths.root}: {state} ({machine})."


def _lines(finding: DoctorFinding, width: int) -> list[Text]:
    """A finding as a paragraph: finding, reason, fix."""
    from rich.text import Text

    lines = [_line(finding, width)]
    for heading, text in (("why", finding.why), ("fix", finding.fix)):
        wrapped = textwrap.wrap(text, width - _INDENT - 6, break_long_words=False, break_on_hyphens=False)
        for number, part in enumerate(wrapped):
            label = heading if number == 0 else ""
            style = "bold" if heading == "fix" else ""
            lines.append(Text.assemble(" " * _INDENT, (f"{label:<6}", "dim"), (part, style)))
    return lines


def _line(finding: DoctorFinding, width: int) -> Text:
    from rich.text import Text

    mark, style = _MARKS[finding.level], _STYLES[finding.level]
    text = Text.assemble("  ", (mark, style), " ", (finding.check, style), "  ")
    indent = " " * (_INDENT + 6)
    wrapped = textwrap.wrap(
        finding.found, width, initial_indent=" " * len(text), subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return text + Text("\n".join(wrapped)[len(text) :])


def _passed_lines(found: Sequence[DoctorFinding]) -> list[Text]:
    """Checks without problems, a line each, by area."""
    from rich.text import Text

    fine = sorted((finding for finding in found if finding.level is Level.OK), key=lambda finding: finding.area)
    names, areas = (max((len(text) for text in texts), default=0) for texts in (
        [finding.check for finding in fine], [finding.area for finding in fine],
    ))  # fmt: skip
    mark, style = _MARKS[Level.OK], _STYLES[Level.OK]
    return [
        Text.assemble(
            "  ",
            (mark, style),
            " ",
            (f"{finding.area:<{areas}}  ", "dim"),
            f"{finding.check:<{names}}  ",
            finding.found,
        )
        for finding in fine
    ]


def _verdict(found: Sequence[DoctorFinding], all_: bool) -> str:
    counts = Counter(finding.level for finding in found)
    parts = [counted(counts[level], str(level)) for level in (Level.ERROR, Level.WARNING, Level.NOTE) if counts[level]]
    fine = f"{counts[Level.OK]} of {len(found)} checks found nothing"
    more = "" if all_ else "; --all shows them"
    if not counts[Level.ERROR] and not counts[Level.WARNING]:
        return f"healthy: {', '.join([*parts, fine])}{more}"
    return f"{', '.join([*parts, fine])}{more}"
