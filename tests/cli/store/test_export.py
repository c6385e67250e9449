"""Exporting topics as lines, as Parquet and as a new store with the same queue offsets."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message, StoreReader
from mqproc.arrow.columns import USER_COLUMNS
from mqproc.cli.store.export import JsonLinesSink
from mqproc.types import StoredMessage
from tests.golden.fixtures import GOLDEN, directories, load_fixture
from tests.support.command_line import call
from tests.support.group import Group
from tests.support.store_builders import ITEMS, SLOTS, StoppedStore

BY_NAME = {str(each): each for each in directories(GOLDEN)}
OTHER_PLACE = ("message_id", "physical_offset", "properties")


def dumped(store: Path, *topics: str) -> list[dict[str, Any]]:
    return [row for row in call("store", "dump", store, "--json").json_lines if row["topic"] in topics]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_fixture("a_basic", tmp_path_factory.mktemp("golden")).store


def test_export_lines_equal_the_dump(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    outcome = call(
        "store", "export", golden, "--topic", "OrderTopic", "--topic", "%RETRY%group_one", "--to", target, "--json"
    )
    expected = dumped(golden, "OrderTopic", "%RETRY%group_one")
    assert outcome.code == 0
    assert lines_of(target) == expected
    found = outcome.json
    assert (found["messages"], found["bytes"]) == (len(expected), sum(row["size"] for row in expected))
    assert {row["topic"]: row["messages"] for row in found["topics"]} == {
        topic: sum(row["topic"] == topic for row in expected) for topic in ("OrderTopic", "%RETRY%group_one")
    }
    assert sorted(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("compression", ["zstd", "none", "gzip"])
def test_export_parquet_has_a_column_for_each_field(golden: Path, tmp_path: Path, compression: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "out.parquet"
    options = "--to", target, "--compression", compression, "--columns", "all"
    assert call("store", "export", golden, "--topic", "OrderTopic", *options).code == 0
    expected = dumped(golden, "OrderTopic")
    table = parquet.read_table(target)
    for name in ("physical_offset", "queue_id", "queue_offset", "topic", "keys", "sys_flag", "message_id"):
        assert table[name].to_pylist() == [row[name] for row in expected]
    assert table["tag"].to_pylist() == [row["tag"] or None for row in expected]
    assert [dict(row) for row in table["properties"].to_pylist()] == [row["properties"] for row in expected]
    times = table["store_timestamp"].cast("int64").to_pylist()
    assert times == [row["store_timestamp_ms"] for row in expected]
    codec = parquet.ParquetFile(target).metadata.row_group(0).column(0).compression
    assert codec == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


def test_export_empty_parquet_has_the_columns(golden: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "out.parquet"
    assert call("store", "export", golden, "--topic", "OrderTopic", "--begin", "1ms", "--to", target).code == 0
    table = parquet.read_table(target)
    assert table.num_rows == 0
    assert tuple(table.column_names) == USER_COLUMNS
    options = "--to", tmp_path / "two.parquet", "--columns"
    assert call("store", "export", golden, "--topic", "OrderTopic", *options, "tag,body").code == 0
    assert parquet.read_table(tmp_path / "two.parquet").column_names == ["tag", "body"]
    outcome = call("store", "export", golden, "--topic", "OrderTopic", *options, "colour")
    assert outcome.code == 2
    assert "no column is called 'colour'; there are topic, queue_id" in outcome.err


def test_export_parquet_without_pyarrow_names_it(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    outcome = call("store", "export", golden, "--topic", "OrderTopic", "--to", tmp_path / "out.parquet")
    assert outcome.code == 2
    assert "pip install 'mqproc[arrow]'" in outcome.err
    assert list(tmp_path.iterdir()) == []


def plain_of(message: StoredMessage | dict[str, Any]) -> dict[str, Any]:
    """A message without values that depend on its place in the log."""
    row = message.to_json() if isinstance(message, StoredMessage) else dict(message)
    properties = {name: value for name, value in row["properties"].items() if name != "__CRC32#"}
    return {**{name: value for name, value in row.items() if name not in OTHER_PLACE}, "properties": properties}


def assert_is_a_store_of(target: Path, expected: list[dict[str, Any]]) -> None:
    """Check that a clean store has exactly these messages; omitted ones are gaps."""
    verified = call("store", "verify", target, "--json")
    assert verified.code == 0
    assert {finding["kind"] for finding in verified.json["findings"]} <= {"queue_offset_gap"}
    assert verified.json["records"] == len(expected)
    by_place = {(row["topic"], row["queue_id"], row["queue_offset"]): plain_of(row) for row in expected}
    found = {}
    with StoreReader(target) as reader:
        for message in reader.messages():
            found[message.topic, message.queue_id, message.queue_offset] = plain_of(message)
        for row in expected[::7]:
            for key in row["keys"][:1]:
                places = [(each.queue_id, each.queue_offset) for each in reader.by_key(row["topic"], key)]
                assert (row["queue_id"], row["queue_offset"]) in places
    # Prepared and rolled-back messages have no place in a queue.
    in_queues = {place: row for place, row in by_place.items() if row["sys_flag"] & 4 == 0}
    assert found == in_queues


@pytest.mark.parametrize(
    ("name", "topics"),
    [
        ("a_basic/store", ["OrderTopic", "%RETRY%group_one"]),
        ("b_transaction/store", ["RMQ_SYS_TRANS_HALF_TOPIC", "TopicTest"]),
        ("e_delay/store", ["SCHEDULE_TOPIC_XXXX"]),
        ("f_batch/store", ["OrderTopic"]),
        ("g1_retention/store", ["Busy", "OrderTopic"]),
        ("c2_killed_dispatch_behind/before", ["TopicTest"]),
        ("d08_no_consumequeue_clean/clean", ["TopicTest", "OrderTopic"]),
    ],
)
def test_export_store_keeps_queue_offsets(tmp_path: Path, name: str, topics: list[str]) -> None:
    store = BY_NAME[name].unpack(tmp_path)
    target = tmp_path / "new"
    arguments = [part for topic in topics for part in ("--topic", topic)]
    assert call("store", "export", store, *arguments, "--to", target).code == 0
    expected = dumped(store, *topics)
    assert expected
    assert_is_a_store_of(target, expected)
    assert sorted(each.name for each in (target / "consumequeue").iterdir()) == sorted(
        {row["topic"] for row in expected}
    )


def test_export_twice_keeps_every_topic(golden: Path, tmp_path: Path) -> None:
    """V2 topics, IPv6 hosts, records of every size: export all, then export the result."""
    topics = sorted({row["topic"] for row in call("store", "dump", golden, "--json").json_lines})
    arguments = [part for topic in topics for part in ("--topic", topic)]
    first, second = tmp_path / "first", tmp_path / "second"
    assert call("store", "export", golden, *arguments, "--to", first).code == 0
    assert call("store", "export", first, *arguments, "--to", second).code == 0
    assert_is_a_store_of(second, dumped(golden, *topics))
    logs = [b"".join(each.read_bytes() for each in sorted((root / "commitlog").iterdir())) for root in (first, second)]
    assert logs[0] == logs[1]


def test_export_store_recomputes_record_crcs(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    flags = ("--set", f"max_hash_slot_num={SLOTS}", "--set", f"max_index_num={ITEMS}")
    target = tmp_path / "new"
    assert call("store", "export", store.root, "--topic", "Second", "--to", target, *flags).code == 0
    expected = dumped(store.root, "Second")
    assert expected[0]["physical_offset"] > 0
    assert "__CRC32#" in (target / "commitlog" / f"{0:020d}").read_bytes().decode("latin-1")
    assert_is_a_store_of(target, expected)


def test_export_time_range_fills_gaps(golden: Path, tmp_path: Path) -> None:
    rows = dumped(golden, "OrderTopic")
    times = sorted(row["store_timestamp_ms"] for row in rows)
    begin, end = times[len(times) // 3], times[2 * len(times) // 3]
    wanted = [row for row in rows if begin <= row["store_timestamp_ms"] < end]
    assert 0 < len(wanted) < len(rows)
    span = ("--begin", begin, "--end", end)
    assert call("store", "export", golden, "--topic", "OrderTopic", *span, "--to", tmp_path / "a.jsonl").code == 0
    assert lines_of(tmp_path / "a.jsonl") == wanted
    assert call("store", "export", golden, "--topic", "OrderTopic", *span, "--to", tmp_path / "new").code == 0
    assert_is_a_store_of(tmp_path / "new", wanted)


def test_export_damaged_store_exports_intact_records(tmp_path: Path) -> None:
    directory = BY_NAME["d14_middle_file_gone_clean/clean"]
    store = directory.unpack(tmp_path)
    outcome = call("store", "export", store, "--topic", "OrderTopic", "--to", tmp_path / "out.jsonl", "--json")
    assert outcome.code == 1
    assert outcome.json["holes"] == [{"start": 131072, "stop": 196608, "reason": "missing segment"}]
    assert f"{store / 'commitlog'}: hole [131072, 196608), 64.0 KiB: missing segment\n" in outcome.err
    listed = [
        each["phyOffset"]
        for each in directory.undamaged["records"]
        if each["topic"] == "OrderTopic" and not 131072 <= each["phyOffset"] < 196608
    ]
    assert [row["physical_offset"] for row in lines_of(tmp_path / "out.jsonl")] == listed
    outcome = call("store", "export", store, "--topic", "OrderTopic", "--to", tmp_path / "new")
    assert outcome.code == 1
    assert_is_a_store_of(tmp_path / "new", lines_of(tmp_path / "out.jsonl"))


def test_export_running_store_makes_a_usable_store(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group()
    with group.client() as client:
        for topic in ("keep", "other", "gone"):
            client.send_many([Message(topic, b"x" * 80, keys=[f"k{number}"], tag="t") for number in range(200)])
        client.wait_dispatched()
        client.delete_topic("gone")
        outcome = call("store", "export", group.store, "--topic", "keep", "--to", tmp_path / "new")
        assert outcome.code == 0
        assert call("store", "export", group.store, "--topic", "gone", "--to", tmp_path / "gone.jsonl").code == 5
    assert_is_a_store_of(tmp_path / "new", dumped(group.store, "keep"))
    new = make_group("new")
    with new.client() as client:
        before = {queue.queue_id: queue.max_offset for queue in client.queues("keep")}
        sent = [client.send(Message("keep", b"more")) for _ in range(16)]
        assert all(each.queue_offset >= before[each.queue_id] for each in sent)
    assert new.stop() == 0
    assert call("store", "verify", new.store).code == 0


def test_export_invalid_leaves_no_files(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for target, topic, code, said in (
        ("there.jsonl", "OrderTopic", 2, "there.jsonl: already exists; export does not overwrite files"),
        ("full", "OrderTopic", 2, "full: the folder is not empty; a new store needs an empty or a new one"),
        ("gone/out.jsonl", "OrderTopic", 5, "gone: no such folder"),
        ("pipe", "OrderTopic", 2, "pipe: neither a file nor a folder"),
        ("out.txt", "OrderTopic", 2, "export writes .parquet, .jsonl, or a folder"),
        ("out.jsonl", "Nobody", 5, "no topic 'Nobody'"),
        ("new", "Nobody", 5, "no topic 'Nobody'"),
        ("new", os.fsdecode(b"No\xff"), 5, r"no topic 'No\udcff'"),
    ):
        outcome = call("store", "export", golden, "--topic", topic, "--to", tmp_path / target)
        assert (outcome.code, outcome.out) == (code, ""), target
        assert said in outcome.err
        assert len(outcome.err.splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before
    assert call("store", "export", tmp_path, "--topic", "a", "--to", tmp_path / "out").code == 3
    assert call("store", "export", golden, "--to", tmp_path / "out").code == 2
    backwards = ("--begin", "2026-01-02", "--end", "2026-01-01")
    outcome = call("store", "export", golden, "--topic", "OrderTopic", "--to", tmp_path / "out", *backwards)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--end must be after --begin" in outcome.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("step", ["__init__", "write", "finish"])
def test_export_full_disk_names_target_and_leaves_no_files(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Errors of buffered files and Arrow name no file."""

    def no_room(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28]")

    monkeypatch.setattr(JsonLinesSink, step, no_room)
    target = tmp_path / "out.jsonl"
    done = call("store", "export", golden, "--topic", "OrderTopic", "--to", target)
    assert (done.code, done.err.strip().splitlines()[-1]) == (1, f"mqproc: {target}: No space left on device")
    assert list(tmp_path.iterdir()) == []
