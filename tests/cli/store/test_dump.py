"""`mqproc store dump` explains every byte of every file exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message
from mqproc.layout import queue_table
from mqproc.paths import StorePaths
from tests.golden.fixtures import Fixture, load_fixture
from tests.support.command_line import call
from tests.support.group import Group
from tests.support.records import decode_record


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return load_fixture("a_basic", tmp_path_factory.mktemp("golden"))


def assert_covers(path: Path, ranges: list[dict[str, Any]]) -> None:
    """Check that the ranges are adjacent and cover the file."""
    at = 0
    for each in ranges:
        assert each["offset"] == at, each
        assert each["size"] > 0
        assert each["name"]
        at += each["size"]
    assert at == path.stat().st_size


def explained(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(document, fields) of a file, after checking the ranges of both."""
    found = call("store", "dump", path, "--json").json
    if found.get("layout"):
        assert_covers(path, found["layout"])
    fields = call("store", "dump", path, "--fields", "--json").json["rows"]
    assert_covers(path, fields)
    return found, fields


def kinds_of(store: Path) -> dict[str, str]:
    return {
        str(path.relative_to(store)): explained(path)[0]["kind"] for path in sorted(store.rglob("*")) if path.is_file()
    }


def test_dump_explains_every_byte_of_rocketmq_files(golden: Fixture) -> None:
    files = [golden.store / "checkpoint", *(golden.store / "index").iterdir()]
    files += [golden.store / "commitlog" / f"{start:020d}" for start in (0, 8 * 65536)]
    files += sorted((golden.store / "consumequeue" / "OrderTopic").rglob("0*"))[:4]
    for path in files:
        if path.is_file():
            explained(path)


def test_dump_record_fields_match_the_record(golden: Fixture) -> None:
    segment = golden.store / "commitlog" / f"{65536:020d}"
    data = segment.read_bytes()
    _document, fields = explained(segment)
    starts = [number for number, each in enumerate(fields) if each["name"] == "total_size"]
    assert len(starts) > 50
    for begin in starts:
        at = fields[begin]["offset"]
        message = decode_record(data, at)
        named = {}
        for each in fields[begin : begin + 20]:
            if each["offset"] < at + message.size:
                named[each["name"]] = each
        assert named["physical_offset"]["value"] == message.physical_offset == 65536 + at
        assert named["queue_offset"]["value"] == message.queue_offset
        assert named["store_timestamp_ms"]["value"] == message.store_timestamp_ms
        assert named["topic"]["value"] == message.topic
        assert named["sys_flag"]["value"] == message.sys_flag
        assert named["body"]["size"] == len(message.body) if message.body else "body" not in named
        last = max(named.values(), key=lambda each: each["offset"])
        assert last["offset"] + last["size"] == at + message.size


def test_dump_segment_layout(golden: Fixture) -> None:
    names = {
        start: [each["name"] for each in explained(golden.store / "commitlog" / f"{start:020d}")[0]["layout"]]
        for start in (0, 8 * 65536)
    }
    assert names == {0: ["records", "blank", "rest"], 8 * 65536: ["records", "unwritten"]}


def test_dump_segment_damage_is_a_range(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    segment = store / "commitlog" / f"{0:020d}"
    rows = call("store", "dump", segment, "--json").json["rows"]
    data = bytearray(segment.read_bytes())
    data[rows[5]["offset"] + 4] ^= 0xFF
    segment.write_bytes(data)
    found, _fields = explained(segment)
    damage = [each for each in found["layout"] if each["name"] == "damage"]
    assert [(each["offset"], each["size"], each["help"]) for each in damage] == [
        (rows[5]["offset"], rows[5]["size"], "bad magic")
    ]
    assert call("store", "dump", segment).code == 1
    assert call("store", "dump", segment, "--fields").code == 1
    rows_now = call("store", "dump", segment, "--json").json["rows"]
    assert rows_now[5] == {
        **{name: rows[5][name] for name in ("offset", "physical_offset", "size")},
        "topic": "(bad magic)",
    }
    assert rows_now[:5] + rows_now[6:] == rows[:5] + rows[6:]


def test_dump_segment_torn_tail_is_damage(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    segment = store / "commitlog" / f"{8 * 65536:020d}"
    outcome = call("store", "dump", segment, "--json")
    assert outcome.code == 0
    unwritten = outcome.json["layout"][-1]
    with segment.open("r+b") as file:
        file.seek(unwritten["offset"])
        file.write(b"\0\0\1\0\xda\xa3\x20\xa7")
    outcome = call("store", "dump", segment, "--json")
    assert outcome.code == 1
    assert [(each["offset"], each["size"], each["name"]) for each in outcome.json["layout"][1:]] == [
        (unwritten["offset"], 8, "damage"),
        (unwritten["offset"] + 8, unwritten["size"] - 8, "unwritten"),
    ]


def test_dump_empty_segment(tmp_path: Path) -> None:
    segment = tmp_path / "commitlog" / f"{0:020d}"
    segment.parent.mkdir()
    segment.touch()
    outcome = call("store", "dump", segment, "--json")
    assert (outcome.code, outcome.json["layout"], outcome.json["rows"]) == (0, [], [])


def test_dump_index_fields_are_its_items(golden: Fixture) -> None:
    path = sorted((golden.store / "index").iterdir())[0]
    found, fields = explained(path)
    offsets = [each["value"] for each in fields if each["name"] == "physical_offset"]
    assert offsets == [row["physical_offset"] for row in found["rows"]]
    slots = [each for each in fields if each["name"].startswith("slot ")]
    assert len(slots) == found["slots_used"]
    assert [each["name"] for each in found["layout"]] == ["header", "slots", "item 0", "items"]


def test_dump_explains_every_file_of_a_group(make_group: Callable[..., Group]) -> None:
    """With a running group; sockets are not files, and maps are read while they are written."""
    group = make_group(mapped_file_size_commit_log=65536)
    with group.client() as client:
        client.create_topic("orders", 3)
        for number in range(30):
            client.send(Message("orders", b"x" * 100, keys=[f"k{number}"], tag="t"))
        client.wait_dispatched()
    paths = StorePaths(group.store)
    rows = call("store", "dump", paths.queues, "--json").json["rows"]
    assert {(row["topic"], row["queue_id"]) for row in rows} == {("orders", queue) for queue in range(3)}
    fields = explained(paths.queues)[1]
    topics = [each for each in fields if each["name"] == "topic"]
    first = queue_table.entry_offset(0) + queue_table.TOPIC_OFFSET_BYTES
    assert (topics[0]["offset"], topics[0]["value"]) == (first, "orders")
    words = {each["name"]: each["value"] for each in explained(paths.control)[1]}
    assert words["written"] == words["dispatched"] > 0
    assert group.stop() == 0
    paths.topics_journal.write_bytes(b'["a",4,6]\n["b",0,0]\n["c",')
    paths.read_only.write_text("writer: commitlog: Input/output error\n")
    kinds = {name.split("/")[-1]: kind for name, kind in kinds_of(group.store).items() if not name.endswith(".jsonl")}
    assert kinds["control"] == "control"
    assert kinds["queues"] == "queue table"
    assert kinds["topics.journal"] == "topics journal"
    assert kinds["read_only"] == kinds["lock"] == "text"
    assert kinds["checkpoint"] == "checkpoint"
    assert kinds["topics.json"] == "config"
    assert {kinds[name] for name in ("commitlog", "consumequeue", "index")} == {"mark"}
    changes = call("store", "dump", paths.topics_journal, "--json").json["rows"]
    assert [each["value"] for each in changes] == ['["a",4,6]', '["b",0,0]', '["c",']
    assert "never acknowledged" in changes[2]["help"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mqproc/control", b"short"),
        ("mqproc/queues", b"short"),
        ("mqproc/queues", (0x3130485551514D).to_bytes(8, "little") + b"\xff" * 4096),
        ("config/topics.json", b"{"),
        ("index/20261121071930298", b"x"),
    ],
)
def test_dump_garbage_file_is_one_error_line(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(data)
    outcome = call("store", "dump", path)
    assert (outcome.code, outcome.out) == (6, "")
    assert len(outcome.err.splitlines()) == 1
    assert str(path) in outcome.err
