"""Dumping a RocketMQ store matches its manifest, record by record."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import durable_marks
from mqproc.paths import StorePaths
from tests.golden.fixtures import Fixture, load_fixture
from tests.support.command_line import call
from tests.support.fakes import make_control


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return load_fixture("a_basic", tmp_path_factory.mktemp("golden"))


FIELDS = [
    "message_id", "physical_offset", "size", "topic", "queue_id", "queue_offset", "tag", "keys", "properties", "flag",
    "sys_flag", "born_timestamp_ms", "born_host", "store_timestamp_ms", "store_host", "reconsume_times",
    "prepared_transaction_offset", "body_crc", "body_base64",
]  # fmt: skip


def test_dump_prints_every_record(golden: Fixture) -> None:
    rows = call("store", "dump", golden.store, "--json").json_lines
    put = [entry for entry in golden.manifest if entry["result"]["status"] == "PUT_OK"]
    assert [row["physical_offset"] for row in rows] == [entry["result"]["physicalOffset"] for entry in put]
    for row, entry in zip(rows, put, strict=True):
        result = entry["result"]
        assert list(row) == FIELDS
        assert row["message_id"] == result["msgId"]
        assert row["size"] == result["wroteBytes"]
        assert (row["topic"], row["queue_id"], row["queue_offset"]) == (
            entry["topic"],
            entry["queueId"],
            result["queueOffset"],
        )
        assert hashlib.sha256(base64.b64decode(row["body_base64"])).hexdigest() == entry["bodySha256"]
        assert row["born_timestamp_ms"] == entry["bornTimestamp"]
        assert row["store_timestamp_ms"] == result["storeTimestamp"]
        assert row["keys"] == (entry["keys"] or "").split()
        assert row["tag"] == (entry["tags"] or "")


def test_dump_can_be_limited(golden: Fixture) -> None:
    assert len(call("store", "dump", golden.store, "--max", 5).out.splitlines()) == 5
    rows = call("store", "dump", golden.store, "--json", "--topic", "OrderTopic").json_lines
    assert {row["topic"] for row in rows} == {"OrderTopic"}
    assert call("store", "dump", golden.store / "commitlog", "--max", 1, "--json").code == 0


def test_dump_reports_a_hole_and_continues(golden: Fixture, tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    rows = call("store", "dump", store, "--json").json_lines
    victim = rows[10]
    segment = store / "commitlog" / "00000000000000000000"
    data = bytearray(segment.read_bytes())
    data[victim["physical_offset"] + 60] ^= 0xFF
    data[victim["physical_offset"] + 90] ^= 0xFF
    segment.write_bytes(data)
    outcome = call("store", "dump", store, "--json")
    assert outcome.code == 1
    begin = victim["physical_offset"]
    assert f"hole [{begin}, {begin + victim['size']})" in outcome.err
    assert outcome.json_lines == rows[:10] + rows[11:]


def test_dump_reports_a_torn_tail(golden: Fixture, tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    last = call("store", "dump", store, "--json").json_lines[-1]
    assert call("store", "dump", store, "--json").err == ""
    segment = store / "commitlog" / "00000000000000524288"
    data = bytearray(segment.read_bytes())
    end = last["physical_offset"] + last["size"] - 524288
    data[end : end + 8] = b"\x00\x00\x01\x00\xda\xa3\x20\xa7"
    segment.write_bytes(data)
    assert f"hole [{524288 + end}, " in call("store", "dump", store, "--json").err


def test_dump_preallocated_segment_is_not_a_hole(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    before = call("store", "dump", store, "--json")
    StoreIO().write_file_atomically(store / "commitlog" / f"{9 * 65536:020d}", bytes(65536))
    with (store / "commitlog" / f"{10 * 65536:020d}").open("wb") as sparse:
        sparse.truncate(65536)
    after = call("store", "dump", store, "--json")
    assert (after.code, after.err, after.out) == (0, "", before.out)


@pytest.mark.parametrize(
    "command",
    [
        ["info"],
        ["verify"],
        ["retention"],
        ["repair"],
        ["recover"],
        ["export", "--topic", "T", "--to", "new.jsonl"],
        ["dump"],
    ],
    ids=lambda command: command[0],
)
def test_dump_path_that_is_not_a_store_is_refused(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, code, said in (("empty", 3, "not a store: it has no folder commitlog"), ("gone", 5, "no such ")):
        outcome = call("store", *command, tmp_path / name)
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.err.startswith(f"mqproc: {tmp_path / name}: {said}")
        assert len(outcome.err.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_info_describes_the_path(golden: Fixture) -> None:
    found = call("store", "info", golden.store, "--json").json
    assert found["parts"]["commitlog"] == {
        "files": 9,
        "bytes": 9 * 65536,
        "on_disk": found["parts"]["commitlog"]["on_disk"],
    }
    assert found["stopped_in_order"] is True
    assert found["held_by"] is None
    assert (found["log_begin"], found["log_end"], found["segments"]) == (0, 569_448, 9)
    assert "stopped in order" in call("store", "info", "--store", golden.store).out


def test_dump_checkpoint(golden: Fixture) -> None:
    rows = call("store", "dump", golden.store / "checkpoint", "--json").json["rows"]
    expected = golden.expected["diskBefore"]["checkpoint"]
    assert [row["value"] for row in rows[:3]] == [
        expected["physicMsgTimestamp"],
        expected["logicsMsgTimestamp"],
        expected["indexMsgTimestamp"],
    ]
    assert [row["offset"] for row in rows] == [0, 8, 16, 24, 32, 40]


def test_dump_index_file(golden: Fixture) -> None:
    for expected in golden.expected["diskBefore"]["indexFiles"]:
        found = call("store", "dump", golden.store / "index" / expected["name"], "--json").json
        assert found["kind"] == "index file"
        assert (found["slots"], found["slots_used"], found["count"]) == (
            200,
            expected["hashSlotCount"],
            expected["indexCount"],
        )
        assert (found["begin_timestamp_ms"], found["end_physical_offset"]) == (
            expected["beginTimestamp"],
            expected["endPhyOffset"],
        )
        assert len(found["rows"]) == expected["indexCount"] - 1


def test_dump_consume_queue_units_match_records(golden: Fixture) -> None:
    records = {row["physical_offset"]: row for row in call("store", "dump", golden.store, "--json").json_lines}
    found = call("store", "dump", golden.store / "consumequeue/OrderTopic/1/00000000000000002000", "--json").json
    assert found["first_queue_offset"] == 100
    for row in found["rows"]:
        record = records[row["physical_offset"]]
        assert (record["topic"], record["queue_id"], record["queue_offset"]) == ("OrderTopic", 1, row["queue_offset"])
        assert record["size"] == row["size"]


def test_dump_segment_is_a_table_of_records(golden: Fixture) -> None:
    out = call("store", "dump", golden.store / "commitlog" / "00000000000000000000", "--max", 2).out
    assert "CommitLog segment" in out
    assert "%RETRY%group_one" in out


def test_dump_marks_control_and_config(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    paths = StorePaths(tmp_path)
    paths.marks.mkdir()
    mark = durable_marks.Mark(7, 4711, 1_700_000_000_000, 0xABCD)
    slots = bytearray(durable_marks.FILE_SIZE)
    slots[durable_marks.slot_offset(7) : durable_marks.slot_offset(7) + durable_marks.SLOT_SIZE] = durable_marks.encode(
        mark
    )
    paths.mark("commitlog").write_bytes(slots)
    rows = call("store", "dump", paths.mark("commitlog"), "--json").json["rows"]
    assert rows[0] == {"slot": 0, "valid": False, "is_mark": False}
    assert (rows[1]["is_mark"], rows[1]["offset"], rows[1]["sequence"]) == (True, 4711, 7)
    words = {row["name"]: row["value"] for row in call("store", "dump", paths.control, "--json").json["rows"]}
    assert words["written"] == 9000
    StoreIO().make_folder(paths.config)
    (paths.config / "consumerOffset.json").write_text('{"offsetTable":{"t@g":{0:5}}}')
    rows = call("store", "dump", paths.config / "consumerOffset.json", "--json").json["rows"]
    assert rows == [{"group": "g", "topic": "t", "queue_id": 0, "next_offset": 5}]


def test_dump_unknown_file_is_refused(tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.write_bytes(b"x")
    assert call("store", "dump", strange).code == 6


def test_dump_bodies_are_stored_bytes(golden: Fixture) -> None:
    row = call("store", "dump", golden.store, "--json", "--max", 1).json_lines[0]
    assert base64.b64decode(row["body_base64"]) == golden.body_at(0)
