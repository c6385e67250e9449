"""Inputs of every format and compression give the same records and record numbers."""

from __future__ import annotations

import bz2
import datetime
import errno
import gzip
import io
import itertools
import json
import lzma
import re
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from mqproc.cli.message.import_files import ColumnMaker, FieldNames
from mqproc.cli.message.sources import Chunk, CountingStream, Reading, Source, guess_kind
from mqproc.errors import BadMessageError, BadRequestError

CSV = 'id,name,price,ok\n1,Ann,1.50,true\n007,"B ""x"", y",,false\n3,Öl %s,-2e3,maybe\n'
ROWS = [
    {"id": "1", "name": "Ann", "price": "1.50", "ok": "true"},
    {"id": "007", "name": 'B "x", y', "price": "", "ok": "false"},
    {"id": "3", "name": "Öl %s", "price": "-2e3", "ok": "maybe"},
]


def read(path: Path | str, reading: Reading | None = None, kind: str = "", member: str = "") -> list[Chunk]:
    with Source(str(path), kind, member) as source:
        return list(source.chunks(reading or Reading()))


def bodies(chunks: list[Chunk]) -> list[bytes]:
    return [body for chunk in chunks for body in chunk.bodies]


def packed(path: Path, data: bytes) -> Path:
    packings = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if path.suffix.lower() in packings:
        path.write_bytes(packings[path.suffix.lower()](data))
    elif path.suffix.lower() == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(path.stem, data)
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.bz2", "a.csv.xz", "a.csv.zip", "a.CSV.GZ", "a.csv.Zip"])
def test_csv_records_become_json_objects_of_text(tmp_path: Path, name: str) -> None:
    found = bodies(read(packed(tmp_path / name, CSV.encode())))
    assert [json.loads(body) for body in found] == ROWS


def test_csv_typed_keeps_written_numbers(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv", CSV.encode())
    found = bodies(read(path, Reading(typed=True)))
    assert found[0] == b'{"id":1,"name":"Ann","price":1.50,"ok":true}'
    assert json.loads(found[1]) == {"id": "007", "name": 'B "x", y', "price": None, "ok": False}
    assert json.loads(found[2]) == {"id": 3, "name": "Öl %s", "price": -2000.0, "ok": "maybe"}


def test_fields_are_read_beside_bodies(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv", CSV.encode())
    (chunk,) = read(path, Reading(fields=("name", "price")))
    assert chunk.fields == {"name": ["Ann", 'B "x", y', "Öl %s"], "price": ["1.50", None, "-2e3"]}


def test_missing_field_lists_the_fields(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="no field 'x'; there are id, name, price, ok"):
        read(packed(tmp_path / "a.csv", CSV.encode()), Reading(fields=("x",)))


def test_csv_record_of_another_width_names_its_number(tmp_path: Path) -> None:
    with pytest.raises(BadMessageError, match="record 2 has 1 fields, the header 2"):
        read(packed(tmp_path / "a.csv", b"a,b\n1,2\n3\n"))


def test_csv_duplicate_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="twice"):
        read(packed(tmp_path / "a.csv", b"a,a\n1,2\n"))


@pytest.mark.parametrize(("separator", "shown"), [(";", ";"), ("\t", "\\t"), ("|", "|")])
def test_csv_of_another_separator_is_refused(tmp_path: Path, separator: str, shown: str) -> None:
    path = packed(tmp_path / "a.csv", f"id{separator}name\n1{separator}x\n".encode())
    with pytest.raises(BadMessageError, match=re.escape(f"is one column; --delimiter '{shown}' divides it")):
        read(path)
    assert len(bodies(read(path, Reading(delimiter=separator)))) == 1
    assert len(bodies(read(path, Reading(delimiter=",")))) == 1


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 1000])
def test_csv_unclosed_quote_names_its_record(tmp_path: Path, chunk_rows: int) -> None:
    path = packed(tmp_path / "a.csv", b'a,b\n1,2\n"3\n",4\n5,"6\n7,8\n9,10\n')
    with pytest.raises(BadMessageError, match=r"a\.csv: record 3 has an unclosed quote"):
        read(path, Reading(chunk_rows=chunk_rows))
    with pytest.raises(BadMessageError, match="the header has an unclosed quote"):
        read(packed(tmp_path / "b.csv", b'a,"b\n1,2\n'))


def test_csv_quotes_inside_a_field_are_text(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv", b'a,b\n5" disk,""\n"x"y,"z"')
    assert [json.loads(body) for body in bodies(read(path))] == [{"a": '5" disk', "b": ""}, {"a": "xy", "b": "z"}]


@pytest.mark.parametrize("data", [b"", b"a,b\n", b"a,b", b"a,b\r\n\r\n"])
def test_csv_without_records_has_none(tmp_path: Path, data: bytes) -> None:
    assert read(packed(tmp_path / "a.csv", data)) == []


def test_csv_accepts_carriage_returns(tmp_path: Path) -> None:
    assert bodies(read(packed(tmp_path / "a.csv", b"a,b\r1,2\r3,4"))) == [b'{"a":"1","b":"2"}', b'{"a":"3","b":"4"}']


def test_csv_field_may_be_as_long_as_a_message(tmp_path: Path) -> None:
    long = "x" * 3_000_000
    assert bodies(read(packed(tmp_path / "a.csv", f"a\n{long}\n".encode()))) == [f'{{"a":"{long}"}}'.encode()]


def test_csv_field_larger_than_a_frame_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv", b"a\nx\nyyyyy\n")
    with (
        mock.patch("mqproc.cli.message.sources.FRAME_BYTES_MAX", 4),
        pytest.raises(BadMessageError, match=r"a\.csv: record 2 cannot be read: field larger than field limit \(4\)"),
    ):
        read(path)


def test_csv_delimiters(tmp_path: Path) -> None:
    for name in ("a.tsv", "a.TSV.GZ"):
        assert bodies(read(packed(tmp_path / name, b"a\tb\n1\t2\n"))) == [b'{"a":"1","b":"2"}']
    found = read(packed(tmp_path / "a.csv", b"\xef\xbb\xbfa;b\n1;2\n"), Reading(delimiter=";"))
    assert bodies(found) == [b'{"a":"1","b":"2"}']


def test_lines_are_bodies_unchanged(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.log.gz", b"one\n\ntwo\r\n\xff\xfe\nlast")
    assert bodies(read(path)) == [b"one", b"", b"two", b"\xff\xfe", b"last"]
    with pytest.raises(click.UsageError, match="plain lines have no fields"):
        read(path, Reading(fields=("a",)))


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert bodies(read(packed(tmp_path / "a.txt", mark + b"one\n" + mark + b"two\n"))) == [b"one", mark + b"two"]
    (chunk,) = read(packed(tmp_path / "a.jsonl", mark + b'{"a":1}\n'), Reading(fields=("a",)))
    assert (chunk.bodies, chunk.fields) == ([b'{"a":1}'], {"a": [1]})
    assert read(packed(tmp_path / "b.txt", mark)) == []


def test_json_lines_are_bodies_and_have_fields(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.jsonl", b'{"a": 1, "b": "x"}\n\n{"a": null}\n')
    (chunk,) = read(path, Reading(fields=("a", "b")))
    assert chunk.bodies == [b'{"a": 1, "b": "x"}', b'{"a": null}']
    assert chunk.fields == {"a": [1, None], "b": ["x", None]}
    for line in (b"[1]", b'{"a": "\xff"}'):
        broken = packed(tmp_path / "b.jsonl", b'{"a": 1}\n' + line + b"\n")
        assert len(bodies(read(broken))) == 2
        with pytest.raises(BadMessageError, match="record 2 is not a JSON object"):
            read(broken, Reading(fields=("a",)))


def test_json_number_keeps_its_text_as_key_and_tag(tmp_path: Path) -> None:
    written = [b"1e3", b"1.50", b"-0.0", b"1E+2", b"7", b"123456789012345678901234567890", b"1.0"]
    path = packed(tmp_path / "a.jsonl", b"".join(b'{"b":2.50, "a" : %b }\n' % number for number in written))
    (chunk,) = read(path, Reading(fields=("a",)))
    found = ColumnMaker(FieldNames(keys=("a",), tag="a"), 0, "a.jsonl").columns(chunk)
    assert found.keys == found.tags == [number.decode() for number in written]
    assert chunk.fields["a"][:2] == [1000.0, 1.5], "times and queues go by the number"
    assert str(chunk.fields["a"][0]) == "1000.0"


def test_parquet_records_become_json_objects(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": [1, 2, 3], "b": ["x", None, "z"]}), path)
    chunks = read(path, Reading(fields=("b",), chunk_rows=2, skip=1))
    assert [json.loads(body) for body in bodies(chunks)] == [{"a": 2, "b": None}, {"a": 3, "b": "z"}]
    assert [(chunk.first, chunk.fields["b"]) for chunk in chunks] == [(1, [None]), (2, ["z"])]


def test_parquet_duplicate_column_is_refused(tmp_path: Path) -> None:
    """Its objects would have only the last of the two values."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(click.UsageError, match=r"a\.parquet: the header names a field twice: a, a"):
        read(path)


def test_parquet_nanoseconds_are_read_with_pandas(tmp_path: Path) -> None:
    """Pandas writes nanoseconds, which pyarrow returns as pandas objects."""
    pytest.importorskip("pandas")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    moments, spans = [10**18 + 5000, None, 10**18 + 5], [1_500_000_000, None, 1500]
    columns = {
        "at": pa.array(moments, pa.timestamp("ns")),
        "utc": pa.array(moments, pa.timestamp("ns", "UTC")),
        "took": pa.array(spans, pa.duration("ns")),
        "all": pa.array([[moment] for moment in moments], pa.list_(pa.timestamp("ns"))),
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table(columns), path)
    (chunk,) = read(path, Reading(fields=("at",)))
    first, third = "2001-09-09T01:46:40.000005", "2001-09-09T01:46:40.000000005"
    assert [json.loads(body) for body in chunk.bodies] == [
        {"at": first, "utc": f"{first}Z", "took": "PT1.5S", "all": [first]},
        {"at": None, "utc": None, "took": None, "all": [None]},
        {"at": third, "utc": f"{third}Z", "took": "P0DT0H0M0.0000015S", "all": [third]},
    ]
    assert chunk.fields["at"] == [datetime.datetime(2001, 9, 9, 1, 46, 40, 5), None, third]


def test_stdin_is_read_when_named(tmp_path: Path) -> None:
    with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n"))):
        assert bodies(read("-")) == [b"a", b"b"]
    # As with the shell's `<&-`.
    with mock.patch("sys.stdin", None), pytest.raises(click.UsageError, match="stdin is closed"):
        Source("-")


NUMBERS = b"".join(b'{"n": %d}\n' % n for n in range(50_000))


@pytest.mark.parametrize("skip", [0, 25, 7777])
def test_gz_truncated_names_the_record(tmp_path: Path, skip: int) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(NUMBERS)[:-20_000])
    with pytest.raises(
        BadMessageError, match=r"a\.jsonl\.gz: record \d+,\d+ cannot be read: .*ended before"
    ) as reported:
        read(path, Reading(skip=skip))
    ends: list[int] = []
    with Source(str(path)) as source, pytest.raises(BadMessageError):
        ends.extend(chunk.end for chunk in source.chunks(Reading(chunk_rows=1)))
    assert f"record {ends[-1] + 1:,} " in str(reported.value)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
def test_gz_invalid_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}.gz"
    path.write_bytes(NUMBERS)
    with pytest.raises(BadMessageError, match=r"a\.\w+\.gz: .* cannot be read: Not a gzipped file"):
        read(path)
    data = bytearray(gzip.compress(NUMBERS))
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(BadMessageError, match=r"a\.\w+\.gz: record \d+,\d+ "):
        read(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt"])
@pytest.mark.parametrize("packing", ["bz2", "xz"])
def test_compressed_file_damaged_is_refused(tmp_path: Path, suffix: str, packing: str) -> None:
    path = packed(tmp_path / f"a.{suffix}.{packing}", NUMBERS)
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-20])
    with pytest.raises(BadMessageError, match=r"a\.\w+\.\w+: .* cannot be read: Compressed file ended"):
        read(path)
    data[len(data) // 2] ^= 0xFF
    data[60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BadMessageError, match=r"a\.\w+\.\w+: .* cannot be read: (Invalid data|Corrupt input)"):
        read(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_damaged_member_is_refused(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.txt.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.txt", NUMBERS)
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    with pytest.raises(BadMessageError, match=r"a\.txt\.zip: record \d.* cannot be read: (Invalid data|Corrupt input)"):
        read(path)


def test_disk_error_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(CountingStream, "readinto", fails)
    for name in ("a.csv", "a.txt"):
        with pytest.raises(OSError, match="Input/output error"):
            read(packed(tmp_path / name, CSV.encode()))


@pytest.mark.parametrize("text", ['[\n{"n": 1},\n{"n": 2}\n]\n', '{\n "n": 1\n}\n'])
def test_json_document_over_many_lines_is_refused(tmp_path: Path, text: str) -> None:
    path = packed(tmp_path / "a.json", text.encode())
    with pytest.raises(BadMessageError, match=r"a\.json: record 1 is not JSON, one value per line: .*--format lines"):
        read(path)
    assert len(bodies(read(path, kind="lines"))) == len(text.splitlines())
    assert bodies(read(packed(tmp_path / "b.json", b'{"n": NaN}\n'))) == [b'{"n": NaN}']


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_lines_not_utf8_are_refused(tmp_path: Path, encoding: str) -> None:
    """Their newlines are bytes inside a line, though Python parses the JSON."""
    with pytest.raises(BadMessageError, match=r"a\.jsonl: record 1 is not JSON"):
        read(packed(tmp_path / "a.jsonl", '{"n": 1}\n{"n": 2}\n'.encode(encoding)))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.csv.zst", "A.TGZ", "a.xlsx"])
def test_unsupported_formats_are_refused(tmp_path: Path, name: str) -> None:
    path = packed(tmp_path / name, b"1\n2\n")
    with pytest.raises(click.UsageError, match=r"\.\w+ is not supported; decompress or convert it"):
        read(path)
    assert bodies(read(path, kind="lines")) == [b"1", b"2"]


def test_zip_of_several_files_needs_member(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one.txt", "1\n")
        archive.writestr("two.txt", "2\n")
    with pytest.raises(click.UsageError, match="contains 2 files"):
        read(path)
    assert bodies(read(path, member="two.txt")) == [b"2"]


def test_zip_format_comes_from_the_member_name(tmp_path: Path) -> None:
    """As plain lines the header would be a message, and Parquet garbage."""
    path = tmp_path / "of-2026.11.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("in/a.CSV", "n,t\n1,x\n")
        archive.writestr("a.tsv", "n\tt\n1\tx\n")
        archive.writestr("a.log", "n,t\n")
        archive.writestr("a.csv.gz", gzip.compress(b"n,t\n"))
        archive.writestr("a.xlsx", "no lines")
    assert bodies(read(path, member="in/a.CSV")) == bodies(read(path, member="a.tsv")) == [b'{"n":"1","t":"x"}']
    assert bodies(read(path, member="a.log")) == [b"n,t"]
    assert bodies(read(path, member="in/a.CSV", kind="lines")) == [b"n,t", b"1,x"]
    for member, reported in (("a.csv.gz", "is compressed itself"), ("a.xlsx", "is not supported")):
        with pytest.raises(click.UsageError, match=reported):
            read(path, member=member)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_chunk_of_large_records_is_small(tmp_path: Path, name: str) -> None:
    """A thousand records of 4 MB would take several times 4 GB of memory."""
    head, line = (b"n,t\n", b"2" * 200_000 + b",y") if name == "a.csv" else (b"", b'"%b"' % (b"2" * 200_000))
    path = packed(tmp_path / name, head + (line + b"\n") * 250)
    assert [(chunk.first, len(chunk.bodies)) for chunk in read(path)] == [(0, 95), (95, 95), (190, 60)]
    assert [(chunk.first, len(chunk.bodies)) for chunk in read(path, Reading(skip=120))] == [(120, 95), (215, 35)]


def test_chunk_of_largest_records_is_smaller(tmp_path: Path) -> None:
    """It ends within the first hundred records, which would be 400 MB."""
    path = packed(tmp_path / "a.txt", (b"x" * (4 << 20) + b"\n") * 10)
    assert [(chunk.first, len(chunk.bodies)) for chunk in read(path)] == [(0, 7), (7, 3)]


def test_chunk_of_large_parquet_records_is_small(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"{number:06}" * 40_000 for number in range(200)]
    parquet.write_table(pa.table({"t": texts}), path, row_group_size=120)
    sizes = [len(chunk.bodies) for chunk in read(path)]
    assert (sum(sizes), max(sizes)) == (200, pytest.approx(69, abs=3))
    assert sum(len(chunk.bodies) for chunk in read(path, Reading(skip=120))) == 80


def test_zip_missing_member_lists_the_members(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv.zip", CSV.encode())
    with pytest.raises(click.UsageError, match=r"a\.csv\.zip has no member 'nope'; there are a\.csv"):
        read(path, member="nope")


def test_zip_invalid_or_empty_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(b"no zip")
    with pytest.raises(BadRequestError, match=r"a\.zip cannot be decompressed: File is not a zip file"):
        read(path)
    zipfile.ZipFile(path, "w").close()
    with pytest.raises(click.UsageError, match=r"a\.zip contains no file$"):
        read(path)


def test_zip_damaged_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.txt.zip", b"some line\n")
    path.write_bytes(path.read_bytes().replace(b"some line", b"same line"))
    with pytest.raises(BadMessageError, match=r"a\.txt\.zip: record 1 cannot be read: Bad CRC-32"):
        read(path)


@pytest.mark.parametrize(
    ("data", "reported"),
    [(b"a,\xff\n1,2\n", "the header"), (gzip.compress(CSV.encode(), mtime=0), "the header"),
     (b"a,b\n1,2\n3,4\n5,\xff\n", "record 3"), ("a,b\n1,2\n".encode("utf-16"), "the header")],
)  # fmt: skip
def test_csv_not_utf8_names_the_record(tmp_path: Path, data: bytes, reported: str) -> None:
    with pytest.raises(BadMessageError, match=rf"a\.csv: {reported} is not valid UTF-8"):
        read(packed(tmp_path / "a.csv", data), Reading(chunk_rows=2))


def parquet_bytes(count: int) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"n": list(range(count))}), sink, row_group_size=1000)
    return sink.getvalue()


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz", "a.parquet.xz", "a.parquet.zip"])
def test_compressed_parquet_is_read(tmp_path: Path, name: str) -> None:
    found = bodies(read(packed(tmp_path / name, parquet_bytes(5))))
    assert found == [b'{"n":%d}' % n for n in range(5)]


def test_parquet_invalid_or_truncated_is_refused(tmp_path: Path) -> None:
    whole = parquet_bytes(10)
    for name, data in (
        ("a.parquet", b""),
        ("b.parquet", b"no Parquet"),
        ("c.parquet", whole[:-5]),
        ("d.parquet.gz", whole),
        ("e.parquet.gz", gzip.compress(whole)[:-20]),
        ("f.parquet.gz", gzip.compress(whole[:-5])),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadMessageError, match=rf"{name}: Parquet cannot be read after record 0: "):
            read(tmp_path / name)


def test_parquet_damaged_page_names_its_place(tmp_path: Path) -> None:
    data = bytearray(parquet_bytes(2000))
    middle = len(data) // 2
    data[middle : middle + 100] = bytes(100)
    with pytest.raises(BadMessageError, match=r"a\.parquet: Parquet cannot be read after record \d") as reported:
        read(packed(tmp_path / "a.parquet", bytes(data)))
    assert "\n" not in str(reported.value)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "lines", "parquet"])
@pytest.mark.parametrize("skip", [0, 1, 7, 25, 26])
def test_skipping_leaves_out_exactly_the_first_records(tmp_path: Path, kind: str, skip: int) -> None:
    path = tmp_path / f"a.{kind}"
    numbers = range(25)
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"n": list(numbers)}), path)
    elif kind == "csv":
        path.write_text("n\n" + "".join(f"{n}\n" for n in numbers))
    else:
        path.write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
    chunks = read(path, Reading(chunk_rows=4, skip=skip, typed=True), kind)
    found: list[Any] = [json.loads(body)["n"] for body in bodies(chunks)]
    assert found == list(numbers)[skip:]
    assert all(json.loads(chunk.bodies[0])["n"] == chunk.first for chunk in chunks)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.csv", "csv"), ("a.tsv.gz", "csv"), ("A.TSV.GZ", "csv"), ("a.ndjson", "jsonl"), ("a.parquet", "parquet"),
     ("-", "lines"), ("a.log", "lines"), ("x.CSV.zip", "csv")],
)  # fmt: skip
def test_format_comes_from_the_file_name(name: str, kind: str) -> None:
    assert guess_kind(name) == kind


@pytest.mark.parametrize("kind", ["csv", "jsonl", "lines"])
@pytest.mark.parametrize("count", [1, 50, 3000, 40_000])
def test_chunk_knows_the_least_bytes_of_its_records(tmp_path: Path, kind: str, count: int) -> None:
    lines = ["1\n", *(f'"{n} {"öx" * (n % 9)}"\n' for n in range(count))]
    path = packed(tmp_path / "a.txt", "".join(lines).encode())
    ends = list(itertools.accumulate(len(line.encode()) for line in lines))
    header = 1 if kind == "csv" else 0
    for chunk in read(path, Reading(chunk_rows=7), kind):
        end = ends[chunk.end + header - 1]
        exact = kind != "csv" or end < 1 << 17
        assert chunk.taken == end if exact else end - (1 << 17) < chunk.taken <= end


def test_progress_is_in_the_units_of_the_total(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv.zip", CSV.encode())
    with Source(str(path)) as source:
        list(source.chunks(Reading()))
        assert source.done() == source.total == len(CSV.encode())
