"""What commands print: rows as a table, plain text, JSON, JSON lines, CSV or raw, always from the same values.

    table   by rich on a terminal, aligned plain text into a pipe; sizes with unit on a terminal only
    json    one document: {"schema_version": 1, <name>: …}, exact integers, times as `_ms`
    jsonl   one JSON object a row
    csv     a header and rows of exact values
    raw     values separated by tabs, no header

Data goes to stdout, everything else to stderr. What a terminal would take for orders is told as \\xNN there: whoever
may send a message may not have a reader's terminal do things. What would break a table's rows is told so everywhere.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec

from mqproc.cli.times import format_time

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
STDOUT, STDERR = 1, 2
FORMATS = ("table", "json", "jsonl", "csv", "raw")
COLORS = ("auto", "always", "never")

# C0, DEL and C1, each as an escape of Python's.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {9: "\\t", 10: "\\n", 13: "\\r"}
_BUT_LINES = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\n\t"}

_CSV_END = "\r\n"
_TEXT_LEAST = 8  # Characters of a column of text, however narrow the terminal.
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def let_go(number: int) -> None:
    """Have what is still buffered go nowhere: when Python ends it would fail again, and be told, with exit code 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextlib.contextmanager
def heard_or_not() -> Iterator[None]:
    """For what goes to stderr: where nobody can read it a command goes on, and its exit code tells what went wrong."""
    try:
        yield
    except OSError:
        let_go(STDERR)


@dataclass(frozen=True, slots=True)
class Column:
    """One value of a row. `kind`: text, count, bytes, time_ms or number; all but text stand to the right."""

    name: str
    title: str = ""
    kind: str = "text"

    @property
    def heading(self) -> str:
        return self.title or self.name.replace("_", " ")

    @property
    def to_the_right(self) -> bool:
        return self.kind not in ("text", "time_ms")


def format_bytes(size: float) -> str:
    """`0 B`, `4.0 KiB`, `1.2 GiB`."""
    value = float(size)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_value(value: Any, kind: str, *, terminal: bool) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if kind == "time_ms":
        return format_time(int(value))
    if kind == "bytes":
        return format_bytes(value) if terminal else str(value)
    if kind == "count":
        return f"{value:,}" if terminal else str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def one_line(text: str) -> str:
    """Text without control characters, which are told as escapes."""
    return text.translate(_CONTROLS)


def harmless(text: str) -> str:
    """Text with no control characters but newlines and tabs, the others told as escapes: fit for a terminal."""
    return text.translate(_BUT_LINES)


def encode_json(value: Any) -> str:
    """One line of JSON, integers exact, paths and the like as text; names that are no UTF-8 as `shown` has them."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(msgspec.to_builtins(value, enc_hook=str))).decode()


def _writable(value: Any) -> Any:
    """A value with each text as one that can be written out."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
    if isinstance(value, dict):
        return {_writable(key): _writable(each) for key, each in value.items()}
    return [_writable(each) for each in value] if isinstance(value, list) else value


class Output:
    """Where a command's data goes, and in which shape."""

    def __init__(
        self, shape: str = "table", color: str = "auto", stream: TextIO | None = None, errors: TextIO | None = None
    ) -> None:
        self.shape = shape
        self.stream = stream if stream is not None else sys.stdout
        self.errors = errors if errors is not None else sys.stderr
        self._color = color

    @property
    def is_json(self) -> bool:
        """True for both JSON shapes."""
        return self.shape in ("json", "jsonl")

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    @property
    def colored(self) -> bool:
        """Whether stdout may get colours: never a pipe, unless asked for; never with NO_COLOR, unless asked for."""
        return _colored(self._color, self.stream)

    def console(self, *, errors: bool = False) -> Console:
        """A rich console on stdout, or on stderr."""
        from rich.console import Console

        stream = self.errors if errors else self.stream
        colored = _colored(self._color, stream)
        return Console(
            file=stream,
            force_terminal=colored or None,
            no_color=not colored,
            # Without a system rich writes no styles either: bold is an escape as colours are.
            color_system="auto" if colored else None,
            highlight=False,
            soft_wrap=False,
        )

    # Data

    def shown(self, text: str) -> str:
        """Text as it may be written to stdout: into a pipe as it is."""
        return harmless(text) if self.is_terminal else text

    def line(self, text: str) -> None:
        """A line of data."""
        self.stream.write(self.shown(text) + "\n")

    def data(self, data: bytes) -> None:
        """Bytes as they are."""
        self.stream.flush()
        self.stream.buffer.write(data)

    def flush(self) -> None:
        self.stream.flush()

    def document(self, value: Mapping[str, Any]) -> None:
        """A JSON document with the schema's version."""
        versioned = {"schema_version": SCHEMA_VERSION, **value}
        if self.shape == "jsonl":
            self.line(encode_json(versioned))
        else:
            self.line(msgspec.json.format(encode_json(versioned), indent=2))

    def rows(self, name: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], **more: Any) -> None:
        """Rows in the chosen shape. JSON gets every value of a row, and `more` beside them."""
        if self.shape == "json":
            self.document({name: [dict(row) for row in rows], **more})
        elif self.shape == "jsonl":
            for row in rows:
                self.line(encode_json(dict(row)))
        elif self.shape in ("csv", "raw"):
            self._values(columns, rows, header=self.shape == "csv")
        else:
            self._table(columns, [[row.get(column.name) for column in columns] for row in rows])

    def further_rows(self, name: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows that follow on `rows` of the same columns: in csv without a header."""
        if self.shape == "csv":
            self._values(columns, rows, header=False)
        else:
            self.rows(name, columns, rows)

    def fields(self, columns: Sequence[Column], values: Mapping[str, Any]) -> None:
        """One thing's values: a line each."""
        if self.is_json:
            self.document(dict(values))
        elif self.shape in ("csv", "raw"):
            self._values(columns, [values], header=self.shape == "csv")
        else:
            self._pairs(columns, values)

    def note(self, text: str) -> None:
        """A line for people, on stderr, if somebody reads it there."""
        with heard_or_not():
            self.errors.write((harmless(text) if self.errors.isatty() else text) + "\n")
            self.errors.flush()

    def _values(self, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, header: bool) -> None:
        buffer = io.StringIO()
        # What ends no line of the writer's it leaves unquoted: a lone \r, at which readers begin another row.
        writer = csv.writer(buffer, delimiter="," if self.shape == "csv" else "\t", lineterminator=_CSV_END)
        if header:
            writer.writerow(column.name for column in columns)
            self._take_line(buffer)
        for row in rows:
            writer.writerow(_exact(row.get(column.name)) for column in columns)
            self._take_line(buffer)

    def _take_line(self, buffer: io.StringIO) -> None:
        """Write out the row that a CSV writer has put into its buffer, which is empty then."""
        self.stream.write(self.shown(buffer.getvalue().removesuffix(_CSV_END) + "\n"))
        buffer.seek(0)
        buffer.truncate()

    def _table(self, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> None:
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

    def _rich_table(self, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        console = self.console()
        widths, total = _widths(columns, cells, console.width)
        # Where numbers and times leave no room the terminal wraps the lines: cut in two they would be others.
        console.width = max(console.width, total)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, width in zip(columns, widths, strict=True):
            justify: Literal["left", "right"] = "right" if column.to_the_right else "left"
            table.add_column(column.heading, justify=justify, overflow="fold", width=width)
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)

    def _plain_table(self, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
        lines = [[column.heading for column in columns], *cells]
        widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
        for line in lines:
            padded = (
                text.rjust(width) if column.to_the_right else text.ljust(width)
                for column, text, width in zip(columns, line, widths, strict=True)
            )
            self.line("  ".join(padded).rstrip())

    def _pairs(self, columns: Sequence[Column], values: Mapping[str, Any]) -> None:
        width = max(len(column.heading) for column in columns)
        terminal = self.is_terminal
        for column in columns:
            shown = format_value(values.get(column.name), column.kind, terminal=terminal)
            self.line(f"{column.heading.ljust(width)}  {shown}".rstrip())


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], room: int) -> tuple[list[int | None], int]:
    """The width of each column that is not folded, numbers and times, and the least one of the table, in characters.

    Headings are folded when there is no room for them otherwise; None for columns of text, which share what is left.
    """
    from rich.cells import cell_len

    filled = [max([cell_len(row[place]) for row in cells], default=0) for place in range(len(columns))]
    headings = [cell_len(column.heading) for column in columns]
    words = [max(map(cell_len, column.heading.split())) for column in columns]
    texts = [column.kind == "text" for column in columns]
    wide, narrow = (
        [
            min(max(cell, heading), _TEXT_LEAST) if text else max(cell, heading)
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


def _colored(color: str, stream: TextIO) -> bool:
    if color != "auto":
        return color == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
