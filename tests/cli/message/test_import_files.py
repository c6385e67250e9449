"""An import stores every record exactly once, also after interrupts and crashes."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyarrow import parquet

from mqproc.cli.message import import_files as importer
from mqproc.cli.message.import_files import HEAD_BYTES, Fingerprint
from tests.support.command_line import Outcome, call
from tests.support.group import PATIENCE_S, Group, wait_until

TOPIC = "records"
BIG = 60_000


def write_csv(path: Path, count: int, first: int = 0) -> Path:
    with path.open("a") as file:
        if not first:
            file.write("id,kind,at,queue,text\n")
        file.writelines(
            f"{n},k{n % 7},2013-01-01T{n % 24:02d}:00:00Z,{n % 3},some text {n}\n" for n in range(first, first + count)
        )
    return path


OPTIONS = ("--key-field", "id", "--tag-field", "kind", "--time-field", "at")


def run(group: Group, path: Path | str, *more: str | int, topic: str = TOPIC, stdin: bytes = b"") -> Outcome:
    return call("import", path, "--topic", topic, "--store", group.store, *OPTIONS, *more, stdin=stdin)


def stored_ids(group: Group, topic: str = TOPIC) -> Counter[int]:
    """Number of copies of each record in the store, by the log."""
    group.wait_dispatched()
    rows = call("store", "dump", group.store, "--json", "--topic", topic).json_lines
    return Counter(int(row["keys"][0]) for row in rows)


def each_once(count: int) -> Counter[int]:
    return Counter(range(count))


def test_records_become_messages_with_key_tag_and_time(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 2500)
    outcome = run(group, path, "--typed", "--queue-field", "queue", "--queues", 3, "--json")
    assert outcome.code == 0
    assert outcome.json["imports"][0]["records"] == 2500
    group.wait_dispatched()
    with group.client() as client:
        (found,) = client.by_key(TOPIC, "1234")
        assert json.loads(found.body) == {
            "id": 1234, "kind": "k2", "at": "2013-01-01T10:00:00Z", "queue": 1, "text": "some text 1234",
        }  # fmt: skip
        assert (found.tag, found.queue_id, found.born_timestamp_ms) == ("k2", 1, 1_357_034_400_000)
        assert client.count(TOPIC) == 2500
    assert stored_ids(group) == each_once(2500)


def test_import_repeated_does_nothing_unless_restarted(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 1500)
    assert run(group, path).code == 0
    again = run(group, path, "--json")
    assert (again.json["imports"][0]["records"], again.json["imports"][0]["already_stored"]) == (0, 1500)
    assert "--restart imports them again" in again.err
    assert stored_ids(group) == each_once(1500)
    assert run(group, path, "--restart").code == 0
    assert set(stored_ids(group).values()) == {2}


def test_import_continues_a_grown_file(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 1000)
    assert run(group, path).code == 0
    write_csv(path, 700, 1000)
    assert run(group, path, "--json").json["imports"][0]["records"] == 700
    assert stored_ids(group) == each_once(1700)


def test_import_identifies_file_by_any_path(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 20)
    assert run(group, path).code == 0
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.csv").symlink_to(path)
    for other in (tmp_path / "folder" / ".." / "a.csv", tmp_path / "link.csv"):
        assert run(group, other, "--json").json["imports"][0]["already_stored"] == 20
    assert stored_ids(group) == each_once(20)


def import_lines(group: Group, path: Path, *more: str) -> Outcome:
    return call("import", path, "--topic", TOPIC, "--store", group.store, *more)


def stored_bodies(group: Group) -> list[bytes]:
    """Bodies in the store, sorted."""
    group.wait_dispatched()
    with group.client() as client:
        queues = range(len(client.queues(TOPIC)))
        return sorted(message.body for queue in queues for message in client.pull(TOPIC, queue, 0, 100).messages)


def test_import_accepts_names_that_are_not_utf8(group: Group, tmp_path: Path) -> None:
    """For files, streams and anything else on the command line."""
    path = Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"\xff.csv"))
    write_csv(path, 3)
    assert run(group, path, "--null", os.fsdecode(b"\xfe")).code == 0
    again = run(group, path, "--null", os.fsdecode(b"\xfe"), "--json")
    assert again.json["imports"][0]["already_stored"] == 3
    options = ("import", "-", "--topic", TOPIC, "--store", group.store)
    for name in (b"\xff", b"\xfe", b"\xff"):
        assert call(*options, "--name", os.fsdecode(name), stdin=b"a\n").code == 0
    group.wait_dispatched()
    with group.client() as client:
        assert client.count(TOPIC) == 5


def test_import_reports_last_line_that_grew(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text("alpha\nbra")
    assert import_lines(group, path).code == 0
    path.write_text("alpha\nbravo\ncharlie\n")
    outcome = import_lines(group, path)
    assert outcome.code == 2
    assert f"{path}: line 2 was imported before it was complete" in outcome.err
    assert stored_bodies(group) == [b"alpha", b"bra"]


@pytest.mark.parametrize(("begin", "whole"), [("alpha\nbravo", "alpha\nbravo\nx\n"), ("a\nb\r", "a\nb\r\nx\n")])
def test_import_continues_after_a_last_line_without_newline(
    group: Group, tmp_path: Path, begin: str, whole: str
) -> None:
    path = tmp_path / "g.txt"
    path.write_bytes(begin.encode())
    assert import_lines(group, path).code == 0
    path.write_bytes(whole.encode())
    assert import_lines(group, path).code == 0
    assert stored_bodies(group) == sorted(whole.encode().splitlines())


def test_import_counts_records_appended_while_reading(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text("alpha\nbra")
    looked_at = Fingerprint.of

    def grown_since(path: Path, size: int | None = None) -> Fingerprint:
        found = looked_at(path, size)
        path.write_text("alpha\nbravo\n")
        return found

    with mock.patch.object(Fingerprint, "of", grown_since):
        assert import_lines(group, path).code == 0
    path.write_text("alpha\nbravo\ncharlie\n")
    assert import_lines(group, path).code == 0
    assert stored_bodies(group) == [b"alpha", b"bravo", b"charlie"]


@pytest.mark.parametrize("last", ["omega\n", "om"])
def test_import_detects_a_replaced_file(group: Group, tmp_path: Path, last: str) -> None:
    path, newer = tmp_path / "g.txt", tmp_path / "newer.txt"
    path.write_text("alpha\n" + last)
    newer.write_text("bravo\ncharlie\ndelta\n")
    begin = importer.Importer.begin

    def replaced(self: importer.Importer) -> importer.Stored:
        newer.replace(path)
        return begin(self)

    with mock.patch.object(importer.Importer, "begin", replaced):
        assert import_lines(group, path).code == 0
    outcome = import_lines(group, path)
    assert outcome.code == 2
    assert f"{path} is not the file of the last import" in outcome.err
    assert stored_bodies(group) == [b"alpha", last.strip().encode()]


def test_import_refuses_another_file_of_the_same_name(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 10)
    assert run(group, path).code == 0
    path.write_text(path.read_text().replace("some", "else"))
    outcome = run(group, path)
    assert outcome.code == 2
    assert "--restart imports it from the start" in outcome.err


def test_import_without_journal_looks_up_the_store(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 12_345)
    assert run(group, path).code == 0
    for file in (group.paths.own / "imports").iterdir():
        file.unlink()
    assert run(group, path, "--json").json["imports"][0]["records"] == 0
    assert stored_ids(group) == each_once(12_345)


def test_import_with_small_position_stores_no_duplicates(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 12_000)
    assert run(group, path).code == 0
    for file in (group.paths.own / "imports").glob("*.position"):
        file.write_text(f"{3000:020d}")
    for file in (group.paths.own / "imports").glob("*.json"):
        file.write_text(file.read_text().replace('"finished_ms":', '"finished_ms":0,"was":'))
    assert run(group, path).code == 0
    assert stored_ids(group) == each_once(12_000)


def _importing(group: Group, path: Path, topic: str = TOPIC) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    command = [
        sys.executable,
        "-m",
        "mqproc",
        "import",
        str(path),
        "--topic",
        topic,
        "--store",
        str(group.store),
        *OPTIONS,
    ]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_import_terminated_continues_without_duplicates(group: Group, tmp_path: Path, number: signal.Signals) -> None:
    path = write_csv(tmp_path / "a.csv", BIG)
    # On a busy machine the signal may come too late; such a round shows nothing.
    topic = next((f"{TOPIC}-{each}" for each in range(3) if ended_twice(group, path, f"{TOPIC}-{each}", number)), None)
    assert topic is not None, "no import could be ended before its end"
    outcome = run(group, path, topic=topic)
    assert outcome.code == 0
    assert "continuing after record" in outcome.err
    assert stored_ids(group, topic) == each_once(BIG)


def ended_twice(group: Group, path: Path, topic: str, number: signal.Signals) -> bool:
    """Start an import and end it by a signal, twice; False if it finished earlier."""
    begin = group.words()["appended_messages"]
    for target in (BIG // 5, BIG // 2):
        child = _importing(group, path, topic)
        wait_until(lambda target=target: group.words()["appended_messages"] >= begin + target)
        child.send_signal(number)
        _, err = child.communicate(timeout=PATIENCE_S)
        if child.returncode == 0:
            return False
        assert child.returncode == (130 if number is signal.SIGINT else -number)
        assert number is not signal.SIGINT or b"the same command continues" in err
    return True


def test_import_survives_a_killed_writer(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", BIG)
    child = _importing(group, path)
    for target in (BIG // 5, BIG // 2):
        wait_until(lambda target=target: group.words()["written"] >= target * 300 or child.poll() is not None)
        os.kill(group.pid("writer"), signal.SIGKILL)
    _, err = child.communicate(timeout=2 * PATIENCE_S)
    assert child.returncode == 0, err
    assert stored_ids(group) == each_once(BIG)


def test_import_of_named_stdin_resumes(group: Group) -> None:
    lines = b"".join(b'{"id": "%d", "kind": "k", "at": null}\n' % n for n in range(3000))
    half = b"".join(lines.splitlines(keepends=True)[:1500])
    named = ("--format", "jsonl", "--name", "feed")
    assert run(group, "-", *named, stdin=half).code == 0
    assert run(group, "-", *named, stdin=lines).code == 0
    assert stored_ids(group) == each_once(3000)


def fed_pipe(path: Path, data: bytes) -> threading.Thread:
    """A named pipe with one writer."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    return writer


def test_import_reads_a_pipe_once(group: Group, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "a.csv", 5000).read_bytes()
    assert len(data) > 2 * HEAD_BYTES
    writer = fed_pipe(tmp_path / "pipe.csv", data)
    outcome = run(group, tmp_path / "pipe.csv", "--json")
    writer.join()
    assert outcome.json["imports"][0]["records"] == 5000
    assert f"{tmp_path / 'pipe.csv'}: 5,000 records to {TOPIC}" in outcome.err
    assert stored_ids(group) == each_once(5000)


def test_import_of_named_pipe_resumes(group: Group, tmp_path: Path) -> None:
    for count in (1500, 3000):
        data = write_csv(tmp_path / f"{count}.csv", count).read_bytes()
        writer = fed_pipe(tmp_path / f"pipe-{count}.csv", data)
        assert run(group, tmp_path / f"pipe-{count}.csv", "--name", "feed").code == 0
        writer.join()
    assert stored_ids(group) == each_once(3000)


def test_import_name_of_two_streams_is_refused(group: Group) -> None:
    outcome = call("import", "-", "/dev/null", "--name", "feed", "--topic", TOPIC, "--store", group.store)
    assert outcome.code == 2
    assert "--name feed names one stream, but there are" in outcome.err


def test_import_invalid_record_stores_those_before(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 2000)
    with path.open("a") as file:
        file.write("only,two\n")
    outcome = run(group, path)
    assert outcome.code == 2
    said = "record 2,001 has 2 fields, the header 5; records stored before it: 2,000; correct it and repeat"
    assert said in outcome.err
    assert stored_ids(group) == each_once(2000)


@pytest.mark.parametrize("mended", ["2500,k,,0,a good deal longer than it was before\n", "2500,k,,0,\n"])
@pytest.mark.parametrize("wrong", ["2500,k\n", "2500,k,,9,text\n"])
def test_import_continues_after_a_corrected_record(group: Group, tmp_path: Path, wrong: str, mended: str) -> None:
    path = write_csv(tmp_path / "a.csv", 2500)
    with path.open("a") as file:
        file.write(wrong)
    write_csv(path, 6499, 2501)
    options = ("--queue-field", "queue", "--queues", 3)
    assert run(group, path, *options).code == 2
    assert run(group, path, *options).code == 2
    path.write_text(path.read_text().replace(wrong, mended))
    assert run(group, path, *options).code == 0
    assert stored_ids(group) == each_once(9000)


def pack(folder: Path, packing: str, records: list[str]) -> Path:
    """Records of a CSV file whose bytes do not give their positions; Parquet has text in `at`."""
    text = "id,kind,at,queue,text\n" + "".join(records)
    if packing == "gz":
        path = folder / "a.csv.gz"
        path.write_bytes(gzip.compress(text.encode()))
    elif packing == "zip":
        path = folder / "a.csv.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.csv", text)
    else:
        path = folder / "a.parquet"
        rows = list(csv.DictReader(text.splitlines()))
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    return path


PACKINGS = ("gz", "zip", "parquet")


def records_of(count: int) -> list[str]:
    return [f"{n},k{n % 7},2013-01-01T{n % 24:02d}:00:00Z,{n % 3},some text {n}\n" for n in range(count)]


@pytest.mark.parametrize("wrong_at", [0, 999, 2500])
@pytest.mark.parametrize("packing", PACKINGS)
def test_import_of_compressed_file_continues_after_correction(
    group: Group, tmp_path: Path, packing: str, wrong_at: int
) -> None:
    right = records_of(9000)
    wrong = [*right[:wrong_at], f"{wrong_at},k,soon,0,text\n", *right[wrong_at + 1 :]]
    for _time in range(2):
        outcome = run(group, pack(tmp_path, packing, wrong), topic=packing)
        assert outcome.code == 2
        assert f"record {wrong_at + 1:,}: field 'at' = 'soon' is not a time" in outcome.err
        assert "; correct it and repeat the command" in outcome.err
    path = pack(tmp_path, packing, right)
    assert run(group, path, topic=packing).code == 0
    assert stored_ids(group, packing) == each_once(9000)
    again = run(group, path, "--json", topic=packing)
    assert (again.json["imports"][0]["records"], again.json["imports"][0]["already_stored"]) == (0, 9000)
    assert run(group, pack(tmp_path, packing, wrong), topic=packing).code == 2, "the whole file was imported"


@pytest.mark.parametrize("packing", PACKINGS)
def test_import_of_compressed_file_refuses_changed_records(group: Group, tmp_path: Path, packing: str) -> None:
    records = [*records_of(1500), "1500,k,soon,0,text\n"]
    assert run(group, pack(tmp_path, packing, records)).code == 2
    outcome = run(group, pack(tmp_path, packing, ["4711,k,,0,x\n", *records[1:1500]]))
    assert outcome.code == 2
    assert "--restart imports it from the start" in outcome.err
    assert stored_ids(group) == each_once(1000)


def test_import_failure_hides_no_error_if_the_file_is_gone(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path, "gz", [*records_of(1500), "1500,k,soon,0,text\n"])
    sent = importer.Importer.send

    def send(*given: Any) -> None:
        try:
            sent(*given)
        finally:
            path.unlink()

    monkeypatch.setattr(importer.Importer, "send", send)
    outcome = run(group, path)
    assert outcome.code == 2
    assert "record 1,501: field 'at' = 'soon' is not a time" in outcome.err


def test_import_refuses_changes_of_stored_records(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 1500)
    with path.open("a") as file:
        file.write("wrong\n")
    assert run(group, path).code == 2
    path.write_text(path.read_text().replace("wrong\n", "").replace("some text 999\n", "else text 999\n"))
    outcome = run(group, path)
    assert outcome.code == 2
    assert "--restart imports it from the start" in outcome.err


def test_import_detects_removed_records(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 1500)
    with path.open("a") as file:
        file.write("1500,k,,9,text\n")
    write_csv(path, 4000, 1501)
    options = ("--queue-field", "queue", "--queues", 3)
    assert run(group, path, *options).code == 2
    assert len(stored_ids(group)) > 1000, "frames behind the refused one are stored"
    path.write_text(path.read_text().replace("1500,k,,9,text\n", ""))
    outcome = run(group, path, *options)
    assert outcome.code == 2
    assert "record 2,001 is stored with another body, so the input has changed" in outcome.err


def test_import_continues_after_a_corrected_header(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 10)
    path.write_text(path.read_text().replace("id,", "ID,"))
    assert run(group, path).code == 2
    path.write_text(path.read_text().replace("ID,", "id,"))
    assert run(group, path).code == 0
    assert stored_ids(group) == each_once(10)


WRONG = 2500


@pytest.mark.parametrize(
    ("record", "reported"),
    [
        (f"{WRONG},k,,-1,x", "queue id -1 is below 0"),
        (f"{WRONG},k,,7,x", "queue id 7; topic has 3 queues"),
        (f"{WRONG},k,,0,{'x' * (4 << 20)}", "body of 4,194,35"),
        (f"{WRONG},k,,one,x", "field 'queue' = 'one' is not a queue id"),
        (f"{WRONG},k\1,,0,x", "tags: one holds the separator byte 0x01"),
        (f"{WRONG},k,soon,0,x", "field 'at' = 'soon' is not a time"),
    ],
)
def test_import_names_the_number_of_a_refused_record(group: Group, tmp_path: Path, record: str, reported: str) -> None:
    path = write_csv(tmp_path / "a.csv", WRONG)
    with path.open("a") as file:
        file.write(f"{record}\n")
    write_csv(path, 500, WRONG + 1)
    outcome = run(group, path, "--queue-field", "queue", "--queues", 3)
    assert outcome.code == 2
    assert f"{path}: record 2,501: {reported}" in outcome.err


def test_import_missing_file_exits_5(group: Group, tmp_path: Path) -> None:
    outcome = call("import", tmp_path / "none.csv", "--topic", "none", "--store", group.store)
    assert (outcome.code, outcome.err) == (5, f"mqproc: {tmp_path}/none.csv: No such file or directory\n")


def test_import_unknown_field_is_a_usage_error(group: Group, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 1)
    assert call("import", path, "--topic", TOPIC, "--store", group.store, "--key-field", "x").code == 2


@pytest.mark.parametrize("delimiter", ["", "ab", "\n", '"', "\\n"])
def test_import_delimiter_is_one_character(group: Group, tmp_path: Path, delimiter: str) -> None:
    outcome = run(group, write_csv(tmp_path / "a.csv", 1), "--delimiter", delimiter)
    assert outcome.code == 2
    assert f"{delimiter!r} is not one character that can separate fields" in outcome.err


def test_import_delimiter_accepts_escaped_tab(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\tb\n1\t2\n")
    assert import_lines(group, path, "--delimiter", "\\t").code == 0
    assert stored_bodies(group) == [b'{"a":"1","b":"2"}']


@pytest.mark.parametrize(("options", "seconds"), [((), 60.0), (("--timeout", 7), 7.0)])
def test_import_waits_for_dispatch_until_timeout(
    group: Group, tmp_path: Path, options: tuple[str | int, ...], seconds: float
) -> None:
    with mock.patch("mqproc.cli.message.import_files.wait_for_index") as settled:
        assert run(group, write_csv(tmp_path / "a.csv", 1), *options).code == 0
    assert settled.call_args.args[1].seconds == seconds


def test_import_lookup_window_covers_frames_in_flight() -> None:
    assert importer.WINDOW >= importer.IN_FLIGHT * importer.CHUNK_ROWS
