"""Output of commands as table, plain text, JSON, JSON lines, CSV or raw; progress bars.

    table   a rich table on a terminal, aligned plain text into a pipe; sizes with units: 1.2 GiB
    json    one document: {"schema_version": 1, <name>: …}, exact integers, times as `_ms`
    jsonl   one JSON object per row
    csv     a header and rows of exact values
    raw     values separated by tabs, no header

Data goes to stdout, everything else to stderr. On a terminal control characters are escaped, so that a message cannot
control it; in the cells of a table they are always escaped.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec

from mqproc.paths import shell_quoted
from mqproc.util.units import format_bytes, format_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

SCHEMA_VERSION = 1
STDOUT, STDERR = 1, 2
FORMATS = ("table", "json", "jsonl", "csv", "raw")
COLORS = ("auto", "always", "never")

# Python escapes of the control characters C0, DEL and C1.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {9: "\\t", 10: "\\n", 13: "\\r"}
_CONTROLS_BUT_LINES = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\n\t"}

_CSV_END = "\r\n"
_TEXT_WIDTH_MIN = 8  # Characters; kept even on the narrowest terminal.


def discard_output(number: int) -> None:
    """Redirect a standard stream to /dev/null, as flushing it at exit would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextlib.contextmanager
def ignore_write_errors() -> Iterator[None]:
    """Ignore write errors of stderr in the block: the command continues."""
    try:
        yield
    except OSError:
        discard_output(STDERR)


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One value of a row. `kind` is text, count, bytes, time_ms or number."""

    name: str
    title: str = ""
    kind: str = "text"

    @property
    def heading(self) -> str:
        return self.title or self.name.replace("_", " ")

    @property
    def is_right_aligned(self) -> bool:
        return self.kind not in ("text", "time_ms")


def output_columns(*columns: str) -> list[OutputColumn]:
    """Columns as `name`, `name:kind` or `name:kind:title`, several separated by commas."""
    parts = [column.split(":") for text in columns for column in text.split(", ")]
    return [OutputColumn(name, "".join(rest[1:]), (rest or ["text"])[0]) for name, *rest in parts]


def format_value(value: Any, kind: str, *, terminal: bool) -> str:
    """Format a value for a table."""
    if value is None:
        return "-"
    if kind == "time_ms":
        return format_time(int(value))
    if kind == "bytes":
        return format_bytes(value)
    if kind == "count":
        return f"{value:,}" if terminal else str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def one_line(text: str) -> str:
    """Escape all control characters of a text."""
    return text.translate(_CONTROLS)


def escape_controls(text: str) -> str:
    """Escape the control characters of a text, except newlines and tabs, for a terminal."""
    return text.translate(_CONTROLS_BUT_LINES)


def encode_json(value: Any) -> str:
    """Encode a value as one line of JSON, with exact integers and escaped invalid UTF-8."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(value, enc_hook=str))).decode()


def _escape_surrogates(value: Any) -> Any:
    """Replace the surrogates in every text of a value by escapes."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(each) for key, each in value.items()}
    return [_escape_surrogates(each) for each in value] if isinstance(value, list) else value


class Output:
    """A command's output: its stream, its format and its colours."""

    def __init__(
        self, shape: str = "table", color: str = "auto", stream: TextIO | None = None, errors: TextIO | None = None
    ) -> None:
        self.shape = shape
        self.stream = stream if stream is not None else sys.stdout
        self.errors = errors if errors is not None else sys.stderr
        self._color = color

    @property
    def is_json(self) -> bool:
        """True for both JSON formats."""
        return self.shape in ("json", "jsonl")

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    @property
    def colored(self) -> bool:
        """Whether stdout gets colours: on a terminal without NO_COLOR, or with --color always."""
        return is_colored(self._color, self.stream)

    def console(self, *, errors: bool = False) -> Console:
        """A rich console on stdout, or on stderr."""
        from rich.console import Console

        stream = self.errors if errors else self.stream
        colored = is_colored(self._color, stream)
        return Console(
            file=stream,
            force_terminal=colored or None,
            no_color=not colored,
            # None also turns off other styles, such as bold.
            color_system="auto" if colored else None,
            highlight=False,
            soft_wrap=False,
        )

    # Data

    def printable(self, text: str) -> str:
        """Text for stdout: with escaped control characters on a terminal, unchanged into a pipe."""
        return escape_controls(text) if self.is_terminal else text

    def line(self, text: str) -> None:
        """Write a line of data."""
        self.stream.write(self.printable(text) + "\n")

    def data(self, data: bytes) -> None:
        """Write bytes unchanged."""
        self.stream.flush()
        self.stream.buffer.write(data)

    def flush(self) -> None:
        self.stream.flush()

    def document(self, value: Mapping[str, Any]) -> None:
        """Write a JSON document with the schema version."""
        versioned = {"schema_version": SCHEMA_VERSION, **value}
        if self.shape == "jsonl":
            self.line(encode_json(versioned))
        else:
            self.line(msgspec.json.format(encode_json(versioned), indent=2))

    def result(self, value: Mapping[str, Any], text: str) -> None:
        """Write a command's result: a JSON document, or a line for people on stderr."""
        if self.is_json:
            self.document(value)
        else:
            self.note(text)

    def rows(self, name: str, columns: Sequence[OutputColumn], rows: Iterable[Mapping[str, Any]], **more: Any) -> None:
        """Write rows; JSON has every value of a row, and `more` next to the rows."""
        if self.shape == "json":
            self.document({name: [dict(row) for row in rows], **more})
        elif self.shape == "jsonl":
            for row in rows:
                self.line(encode_json(dict(row)))
        elif self.shape in ("csv", "raw"):
            self._values(columns, rows, header=self.shape == "csv")
        else:
            self._table(columns, [[row.get(column.name) for column in columns] for row in rows])

    def further_rows(self, name: str, columns: Sequence[OutputColumn], rows: Iterable[Mapping[str, Any]]) -> None:
        """Write more rows after `rows` of the same columns: CSV gets no second header."""
        if self.shape == "csv":
            self._values(columns, rows, header=False)
        else:
            self.rows(name, columns, rows)

    def fields(self, columns: Sequence[OutputColumn], values: Mapping[str, Any]) -> None:
        """Write the values of one object, one per line."""
        if self.is_json:
            self.document(dict(values))
        elif self.shape in ("csv", "raw"):
            self._values(columns, [values], header=self.shape == "csv")
        else:
            self._pairs(columns, values)

    def note(self, text: str) -> None:
        """Write a line for people to stderr; a failure is ignored."""
        with ignore_write_errors():
            self.errors.write((escape_controls(text) if self.errors.isatty() else text) + "\n")
            self.errors.flush()

    def _values(self, columns: Sequence[OutputColumn], rows: Iterable[Mapping[str, Any]], *, header: bool) -> None:
        buffer = io.StringIO()
        # With \r\n as line end the writer also quotes a lone \r, which readers would take for the end of a row.
        writer = csv.writer(buffer, delimiter="," if self.shape == "csv" else "\t", lineterminator=_CSV_END)
        if header:
            writer.writerow(column.name for column in columns)
            self._write_csv_line(buffer)
        for row in rows:
            writer.writerow(_exact(row.get(column.name)) for column in columns)
            self._write_csv_line(buffer)

    def _write_csv_line(self, buffer: io.StringIO) -> None:
        """Write the row in a CSV writer's buffer and empty the buffer."""
        self.stream.write(self.printable(buffer.getvalue().removesuffix(_CSV_END) + "\n"))
        buffer.seek(0)
        buffer.truncate()

    def _table(self, columns: Sequence[OutputColumn], rows: Sequence[Sequence[Any]]) -> None:
        terminal = self.is_terminal
        cells = [
            [
                one_line(format_value(value, column.kind, terminal=terminal))
                for column, value in zip(columns, row, strict=True)
            ]
            for row in rows
        ]
        if terminal:
            self._rich_table(columns, cells)
        else:
            self._plain_table(columns, cells)

    def _rich_table(self, columns: Sequence[OutputColumn], cells: Sequence[Sequence[str]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        console = self.console()
        widths, total = _widths(columns, cells, console.width)
        # A table that is too wide is wrapped by the terminal: a folded number would be misread.
        console.width = max(console.width, total)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, width in zip(columns, widths, strict=True):
            justify: Literal["left", "right"] = "right" if column.is_right_aligned else "left"
            table.add_column(column.heading, justify=justify, overflow="fold", width=width)
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)

    def _plain_table(self, columns: Sequence[OutputColumn], cells: Sequence[Sequence[str]]) -> None:
        lines = [[column.heading for column in columns], *cells]
        widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
        for line in lines:
            padded = (
                text.rjust(width) if column.is_right_aligned else text.ljust(width)
                for column, text, width in zip(columns, line, widths, strict=True)
            )
            self.line("  ".join(padded).rstrip())

    def _pairs(self, columns: Sequence[OutputColumn], values: Mapping[str, Any]) -> None:
        width = max(len(column.heading) for column in columns)
        terminal = self.is_terminal
        for column in columns:
            shown = format_value(values.get(column.name), column.kind, terminal=terminal)
            self.line(f"{column.heading.ljust(width)}  {shown}".rstrip())


def _widths(columns: Sequence[OutputColumn], cells: Sequence[Sequence[str]], room: int) -> tuple[list[int | None], int]:
    """(width of each column, minimal width of the table) in characters.

    Numbers and times are never folded; text columns have None and share the remaining room. Headings are folded if
    they do not fit.
    """
    from rich.cells import cell_len

    filled = [max([cell_len(row[place]) for row in cells], default=0) for place in range(len(columns))]
    headings = [cell_len(column.heading) for column in columns]
    words = [max(map(cell_len, column.heading.split())) for column in columns]
    texts = [column.kind == "text" for column in columns]
    wide, narrow = (
        [
            min(max(cell, heading), _TEXT_WIDTH_MIN) if text else max(cell, heading)
            for cell, heading, text in zip(filled, each, texts, strict=True)
        ]
        for each in (headings, words)
    )
    between = 3 * len(columns) - 1
    chosen = wide if sum(wide) + between <= room else narrow
    return [None if text else width for width, text in zip(chosen, texts, strict=True)], sum(chosen) + between


def _exact(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if isinstance(value, (dict, bool)):
        return encode_json(value)
    return value


def is_colored(color: str, stream: TextIO) -> bool:
    """Whether a stream gets colours with this value of --color."""
    if color != "auto":
        return color == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# Progress

LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.1


@dataclass
class Progress:
    """Progress of long work on stderr: a bar on a terminal, else a line every few seconds.

    Short work shows nothing. `things` names the counted items; `rate_unit` is the unit of the rate if it is not plain
    items.
    """

    out: Output
    title: str
    things: str = "records"
    rate_unit: str = ""
    quiet: bool = False
    count: int = 0

    def __post_init__(self) -> None:
        self._per_second = f" {self.rate_unit}/s" if self.rate_unit else "/s"
        self._terminal = self.out.errors.isatty()
        self._started_s = time.monotonic()
        self._due_s = self._started_s + (_BAR_EVERY_S if self._terminal else LINE_EVERY_S)
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def rate(self) -> float:
        """Items per second since the start."""
        return self.count / max(self.seconds, 1e-9)

    def update(self, done: float, total: float, count: int) -> None:
        """Report `done` of `total` in one unit, 0 for an unknown total, and the number of items."""
        self.count = count
        now_s = time.monotonic()
        if self.quiet or now_s < self._due_s:
            return
        if self._terminal:
            self._due_s = now_s + _BAR_EVERY_S
            self._draw(done, total)
        else:
            self._due_s = now_s + LINE_EVERY_S
            self.out.note(self._line(done, total))

    def end(self, done: float, total: float, count: int) -> None:
        """Show the final state; the bar stays on the screen."""
        self.count = count
        if self._bar is not None:
            self._draw(done, total or done)
            self._bar.stop()
            self._bar = None

    def _line(self, done: float, total: float) -> str:
        share = f", {done / total:.0%}" if total else ""
        return f"{self.title}: {self.count:,} {self.things}{share}, {self.rate:,.0f}{self._per_second}"

    def _draw(self, done: float, total: float) -> None:
        if self._bar is None:
            self._bar, self._task = self._make_bar(total)
        assert self._task is not None
        self._bar.update(
            self._task, completed=done, total=total or None, count=f"{self.count:,}", rate=f"{self.rate:,.0f}"
        )

    def _make_bar(self, total: float) -> tuple[Bar, TaskID]:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[count]} " + self.things),
            TextColumn("{task.fields[rate]}" + self._per_second),
            TimeRemainingColumn(),
            console=self.out.console(errors=True),
        )
        task = bar.add_task(self.title, total=total or None, count="0", rate="0")
        bar.start()
        return bar, task


def rate_text(count: float, seconds: float, size: float = 0) -> str:
    """`177,000/s` or `177,000/s, 54.3 MiB/s`."""
    rate = f"{count / max(seconds, 1e-9):,.0f}/s"
    return f"{rate}, {format_bytes(size / max(seconds, 1e-9))}/s" if size else rate


# Commands in messages


def program() -> str:
    """The shell's name for this program: `mqproc`, or what to write where that is not found."""
    own, found = Path(sys.argv[0]), shutil.which("mqproc")
    if own.parts[-2:] == ("mqproc", "__main__.py") and not found:
        return f"{shell_quoted(Path(sys.executable))} -m mqproc"
    if own.name == "mqproc" and own.exists() and (not found or os.path.realpath(found) != os.path.realpath(own)):
        return shell_quoted(own.absolute())
    return "mqproc"


def with_program(text: str, commands: Iterable[str]) -> str:
    """A message whose commands can be pasted into the shell."""
    own = program()
    if own == "mqproc":
        return text
    return re.sub(rf"(?<![\w./-])mqproc (?=(?:{'|'.join(commands)})\b)", lambda _: f"{own} ", text)
