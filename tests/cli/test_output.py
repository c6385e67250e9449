"""Rows in every output format; only data on stdout, no colour into a pipe."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest

from mqproc.cli import output as progress
from mqproc.cli.output import SCHEMA_VERSION, Output, OutputColumn, encode_json
from mqproc.util.units import format_bytes

COLUMNS = [
    OutputColumn("name"),
    OutputColumn("size", kind="bytes"),
    OutputColumn("count", kind="count"),
    OutputColumn("tags"),
]
ROWS = [
    {"name": "a", "size": 4096, "count": 1234, "tags": ["x", "y"]},
    {"name": "bb", "size": 1, "count": None, "tags": []},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(shape: str, stream: io.StringIO) -> str:
    Output(shape, stream=stream).rows("things", COLUMNS, ROWS)
    return stream.getvalue()


def test_json_is_one_document_with_a_schema_version() -> None:
    assert json.loads(rows("json", io.StringIO())) == {"schema_version": SCHEMA_VERSION, "things": ROWS}


def test_json_lines_are_one_object_a_row() -> None:
    assert [json.loads(line) for line in rows("jsonl", io.StringIO()).splitlines()] == ROWS


@pytest.mark.parametrize(("shape", "delimiter"), [("csv", ","), ("raw", "\t")])
def test_csv_row_with_line_ends_is_read_back(shape: str, delimiter: str) -> None:
    """A lone carriage return ends a row for a reader unless it is quoted."""
    texts = ["a\rb", "a\r\nb", "a\nb", "\r", 'a"b', "a,b", "a\tb", ""]
    stream = io.StringIO(newline="")
    out = Output(shape, stream=stream)
    columns = [OutputColumn("body"), OutputColumn("after")]
    out.rows("things", columns, ({"body": text, "after": 1} for text in texts))
    found = list(csv.reader(io.StringIO(stream.getvalue(), newline=""), delimiter=delimiter))
    assert found[len(found) - len(texts) :] == [[text, "1"] for text in texts]


def test_csv_has_a_header_and_exact_values() -> None:
    assert rows("csv", io.StringIO()) == "name,size,count,tags\na,4096,1234,x y\nbb,1,,\n"


def test_csv_further_rows_have_no_header() -> None:
    stream = io.StringIO()
    out = Output("csv", stream=stream)
    out.rows("things", COLUMNS, ROWS[:1])
    out.further_rows("things", COLUMNS, ROWS[1:])
    assert stream.getvalue() == rows("csv", io.StringIO())


def test_raw_has_no_header() -> None:
    assert rows("raw", io.StringIO()).splitlines()[0] == "a\t4096\t1234\tx y"


def test_table_in_a_pipe_is_aligned() -> None:
    lines = ["name     size  count  tags", "a     4.0 KiB   1234  x y", "bb        1 B      -"]
    assert rows("table", io.StringIO()).splitlines() == lines


def test_table_on_a_terminal_has_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = rows("table", Terminal())
    assert "4.0 KiB" in text
    assert "1,234" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_table_on_a_narrow_terminal_keeps_numbers_whole(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """The terminal wraps long values; texts are folded, and headings need no extra width."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    kinds = {"queue_offset": "count", "stored": "time_ms", "size": "bytes", "body": "text"}
    row = {"queue_offset": 1_234_567, "stored": 1_795_726_193_690, "size": 4096, "body": "folded " * 20}
    Output("table", stream=terminal).rows(
        "things", [OutputColumn(name, kind=kind) for name, kind in kinds.items()], [row]
    )
    first = next(line for line in terminal.getvalue().splitlines() if "1,234,567" in line)
    assert re.search(r"1,234,567 +2026-11-26T20:49:53\.690\+00:00 +4\.0 KiB +folded", first), terminal.getvalue()
    assert "queue offset" in terminal.getvalue() or columns < 80
    assert columns < 80 or max(map(len, terminal.getvalue().splitlines())) <= columns


def test_sizes_have_units_for_people_and_are_exact_otherwise() -> None:
    assert {"4.0 KiB", "1 B"} <= set(re.split(r"  +", rows("table", io.StringIO()).replace("\n", "  ")))
    for shape in ("json", "jsonl", "csv", "raw"):
        text = rows(shape, io.StringIO())
        assert "4096" in text
        assert "KiB" not in text


def test_color_never_and_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for color, stream in (("never", Terminal()), ("auto", Terminal())):
        Output("table", color, stream).rows("things", COLUMNS, ROWS)
        assert ("\x1b[" in stream.getvalue()) == (color == "auto")
    monkeypatch.setenv("NO_COLOR", "1")
    for color in ("never", "always"):
        piped = io.StringIO()
        Output("table", color, piped).console().print("x", style="red")
        assert ("\x1b[31m" in piped.getvalue()) == (color == "always")


ORDERS = "a\x1b[31mb\x9b2J\x07\r\nc\td"


def test_control_characters_are_escaped() -> None:
    stream, errors = Terminal(), Terminal()
    out = Output("table", "never", stream, errors)
    out.line(ORDERS)
    out.fields([OutputColumn("body")], {"body": ORDERS})
    out.note(ORDERS)
    Output("csv", "never", stream).rows("things", [OutputColumn("body")], [{"body": ORDERS}])
    reported = "a\\x1b[31mb\\x9b2J\\x07\\r\nc\td"
    assert stream.getvalue() == f'{reported}\nbody  {reported}\nbody\n"{reported}"\n'
    assert errors.getvalue() == f"{reported}\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_table_values_do_not_break_rows(stream: io.StringIO) -> None:
    Output("table", "never", stream).rows("things", [OutputColumn("name")], [{"name": ORDERS}])
    assert "a\\x1b[31mb\\x9b2J\\x07\\r\\nc\\td" in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue()


def test_table_in_a_pipe_is_not_cut() -> None:
    stream = io.StringIO()
    out = Output("table", "never", stream)
    out.line(ORDERS)
    out.fields([OutputColumn("body")], {"body": ORDERS})
    assert stream.getvalue() == f"{ORDERS}\nbody  {ORDERS}\n"


@pytest.mark.parametrize(
    ("color", "terminal", "no_color", "expected"),
    [("auto", True, "", True), ("auto", True, "1", False), ("auto", False, "", False), ("always", False, "1", True),
     ("never", True, "", False)],
)  # fmt: skip
def test_colors(monkeypatch: pytest.MonkeyPatch, color: str, terminal: bool, no_color: str, expected: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    assert Output("table", color, Terminal() if terminal else io.StringIO()).colored is expected


def test_sizes() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB"]


def test_json_escapes_names_that_are_not_utf8() -> None:
    name = os.fsdecode(b"bad\xff")
    value = {"store": Path(name), "files": [{name: name}], "count": 1 << 62, "word": "Grüße"}
    shown = r"bad\xff"
    expected = {"store": shown, "files": [{shown: shown}], "count": 1 << 62, "word": "Grüße"}
    assert json.loads(encode_json(value)) == expected


# Progress without a terminal, line by line.


@pytest.mark.parametrize(
    ("things", "rate_unit", "expected"),
    [("MiB", "MiB", r"job: 35 MiB, 50%, [\d,]+ MiB/s\n"), ("records", "", r"job: 35 records, 50%, [\d,]+/s\n")],
)
def test_progress_rate_has_the_unit_of_the_items(
    monkeypatch: pytest.MonkeyPatch, things: str, rate_unit: str, expected: str
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    errors = io.StringIO()
    with progress.Progress(Output(errors=errors), "job", things, rate_unit=rate_unit) as work:
        work.update(5, 10, 35)
    assert re.fullmatch(expected, errors.getvalue()), errors.getvalue()
