"""`mqproc import` refuses options that match no file, and counts values that JSON lacks."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from mqproc.cli.message.import_files import ColumnMaker, FieldNames
from mqproc.cli.message.sources import Reading, Source, not_finite
from tests.support.command_line import Outcome, call
from tests.support.group import Group


def refused(*arguments: str | Path) -> str:
    outcome = call("import", *arguments, "--topic", "records", "--store", "nowhere")
    assert outcome.code == 2
    return " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("name", "option", "reported"),
    [
        ("a.jsonl", ("--typed",), "--typed is for csv; {} is jsonl"),
        ("a.parquet", ("--delimiter", ";"), "--delimiter is for csv; {} is parquet"),
        ("a.parquet", ("--null", "NA"), "--null is for csv and jsonl; {} is parquet"),
        ("a.txt", ("--null", "NA"), "--null is for csv and jsonl; {} is lines"),
        ("a.csv", ("--typed", "--format", "lines"), "--typed is for csv; {} is lines"),
        ("a.zip", ("--typed", "--format", "jsonl"), "--typed is for csv; {} is jsonl"),
        ("a.csv", ("--member", "b.csv"), "--member b.csv is for a .zip file, but not for {}"),
        ("a.csv", ("--time-format", "ms"), "--time-format ms needs --time-field"),
        ("a.csv", ("--name", "n"), "--name n is for a stream; the import of a file resumes by the file's name"),
    ],
)
def test_options_without_matching_file_are_refused(
    tmp_path: Path, name: str, option: tuple[str, ...], reported: str
) -> None:
    (tmp_path / name).touch()
    assert reported.format(tmp_path / name) in refused(tmp_path / name, *option)


def test_options_matching_one_of_several_files_are_accepted(group: Group, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\n1\n")
    (tmp_path / "b.jsonl").write_text('{"id": 2}\n')
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("c.csv", "id\n3\n")
        archive.writestr("d.csv", "id\n4\n")
    assert imported(group, tmp_path / "a.csv", tmp_path / "b.jsonl", "--typed").code == 0
    assert imported(group, tmp_path / "c.zip", "--typed", "--member", "d.csv").code == 0
    with group.client() as client:
        client.wait_dispatched()
        assert sorted(json.loads(message.body)["id"] for message in client.range("records")) == [1, 2, 4]


def imported(group: Group, *arguments: str | Path) -> Outcome:
    return call("import", *arguments, "--topic", "records", "--store", group.store)


def test_delimiter_applies_to_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb;c\n1\t2;3\n")
    for delimiter, names in (("", ["a", "b;c"]), (";", ["a\tb", "c"])):
        with Source(str(tmp_path / "a.tsv")) as source:
            (chunk,) = source.chunks(Reading(delimiter=delimiter))
        assert list(json.loads(chunk.bodies[0])) == names


def test_non_finite_numbers_become_null_and_are_counted(group: Group, tmp_path: Path) -> None:
    table = pa.table({"x": [1.5, math.nan, None], "y": [[math.inf], [2.0], None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    outcome = imported(group, tmp_path / "a.parquet")
    assert outcome.code == 0
    assert "a.parquet: 2 numbers NaN or infinite, stored as null: JSON has no such numbers" in outcome.err
    with group.client() as client:
        client.wait_dispatched()
        found = [json.loads(message.body) for message in client.range("records")]
    assert found == [{"x": 1.5, "y": [None]}, {"x": None, "y": [2.0]}, {"x": None, "y": None}]
    parquet.write_table(pa.table({"x": [1.5, None]}), tmp_path / "b.parquet")
    assert "NaN" not in imported(group, tmp_path / "b.parquet").err


@pytest.mark.parametrize(
    ("values", "count"),
    [
        (pa.array([1.0, math.nan, -math.inf, None], pa.float32()), 2),
        (pa.array([1.0, math.nan], pa.float16()), 1),
        (pa.array([{"a": math.nan, "b": [math.inf, 1.0]}, None]), 2),
        (pa.array([{"a": 1}, {"b": 2}]), 0),
        (pa.array([[("k", math.nan)]], pa.map_(pa.string(), pa.float64())), 1),
        (pa.array([1.0, math.nan, math.nan]).dictionary_encode(), 2),
        (pa.array([], pa.float64()), 0),
        (pa.array(["nan", None]), 0),
        (pa.array([1, 2]), 0),
    ],
)
def test_non_finite_numbers_are_found_in_nested_values(values: pa.Array, count: int) -> None:
    assert not_finite(values) == count
    assert not_finite(pa.RecordBatch.from_arrays([values, values], ["a", "b"])) == 2 * count


@pytest.mark.parametrize("number", ["-0", "0", "-0.0", "1e3", "2.50", "18446744073709551616", "-" + "9" * 40])
def test_key_is_the_json_number(tmp_path: Path, number: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"k":1,"far":1e999,"k":{number}}}\n')
    with Source(str(tmp_path / "a.jsonl")) as source:
        (chunk,) = source.chunks(Reading(fields=("k",)))
    assert ColumnMaker(FieldNames(keys=("k",)), 0, "a").columns(chunk).keys == [number]
