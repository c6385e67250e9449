"""`mqproc store info` describes any store, also a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqproc import Message, QueueInfo
from mqproc.cli.store.info import read_contents
from mqproc.paths import StorePaths
from tests.golden.fixtures import GOLDEN, directories, load_fixture
from tests.support.command_line import call
from tests.support.fakes import CountedName
from tests.support.group import Group
from tests.support.store_builders import StoppedStore
from tests.support.store_checks import flip

BY_NAME = {str(each): each for each in directories(GOLDEN)}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_info_describes_any_store(tmp_path: Path, name: str) -> None:
    store = BY_NAME[name].unpack(tmp_path)
    outcome = call("store", "info", store, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert found["stopped_in_order"] == BY_NAME[name].closed
    assert found["written_by"].startswith("RocketMQ")
    expected = BY_NAME[name].expected
    if expected.get("maxPhyOffset"):
        assert found["segment_bytes"] == int(expected["config"]["mappedFileSizeCommitLog"])
    assert call("store", "info", store).code == 0


def test_info_shows_positions_and_contents(tmp_path: Path) -> None:
    fixture = load_fixture("g1_retention", tmp_path)
    found = call("store", "info", fixture.store, "--json").json
    records = fixture.expected["records"]
    assert (found["log_begin"], found["log_end"]) == (262_144, fixture.expected["maxPhyOffset"])
    assert found["first_store_timestamp_ms"] == records[0]["storeTimestamp"]
    assert found["last_store_timestamp_ms"] == max(each["storeTimestamp"] for each in records)
    assert found["messages"] == sum(
        queue["maxOffset"] - queue["minOffset"] for queue in fixture.expected["queues"] if queue["maxOffset"] > 0
    )
    headers = fixture.expected["diskBefore"]["indexFiles"]
    assert [(each["file"], each["entries"] + 1) for each in found["index_files"]] == [
        (each["name"], each["indexCount"]) for each in headers
    ]


def test_info_written_by_follows_the_durable_mark(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        for number in range(20):
            client.send(Message("orders", b"x" * 50, keys=[f"k{number}"]))
        client.wait_dispatched()
    running = call("store", "info", group.store, "--json").json
    assert (running["written_by"], running["group"], running["messages"]) == ("mqproc", "ready", 20)
    assert running["held_by"].startswith("pid ")
    assert running["stopped_in_order"] is False
    assert group.stop() == 0
    stopped = call("store", "info", group.store, "--json").json
    assert (stopped["written_by"], stopped["group"], stopped["stopped_in_order"]) == ("mqproc", "down", True)
    assert set(stopped["marks"]) == {"commitlog", "consumequeue", "index"}
    end = stopped["log_end"]
    assert stopped["marks"]["commitlog"] == end
    segment = group.store / "commitlog" / f"{0:020d}"
    flip(segment, end - 30)
    assert "the log does not match mqproc's mark" in call("store", "info", group.store, "--json").json["written_by"]
    flip(segment, end - 30)
    StorePaths(group.store).read_only.write_text("writer: Input/output error\n")
    assert call("store", "info", group.store, "--json").json["read_only"] == "writer: Input/output error"


def test_info_reports_known_damage(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    paths = StorePaths(store)
    paths.own.mkdir()
    paths.damage.write_text('{"holes": [{"start": 4, "stop": 9, "kind": "zeros", "first_seen_ms": 1}], "cuts": []}')
    found = call("store", "info", store, "--json").json
    assert [(hole["start"], hole["stop"]) for hole in found["holes"]] == [(4, 9)]
    assert "[4, 9)" in call("store", "info", store).out


def test_info_unusable_store_gives_the_reason(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    segment = store / "commitlog" / f"{8 * 65536:020d}"
    with segment.open("r+b") as file:
        file.truncate(100)
    found = call("store", "info", store, "--json").json
    assert "00000000000000524288: 100 bytes; a segment has 65,536" in found["trouble"]
    assert (found["log_end"], found["topics"], found["segments"]) == (None, None, 9)


NO_QUEUES = "the log has 290,296 bytes, but there are no queues: a start rebuilds them from the log"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("d14_middle_file_gone_clean/clean", "commitlog/00000000000000131072: segment_missing"),
        ("d17_empty_next_file/clean", "commitlog/00000000000000327680: segment_empty"),
        ("d18_stray_file/clean", "commitlog/notes.txt: stray_file"),
        ("d08_no_consumequeue_clean/clean", NO_QUEUES),
        ("d10_no_index_clean/clean", None),
        ("c4_killed_settled/before", None),
    ],
)
def test_info_reports_damaged_files(tmp_path: Path, name: str, said: str | None) -> None:
    store = BY_NAME[name].unpack(tmp_path)
    found = call("store", "info", store, "--json").json
    hint = "; mqproc store verify shows what to do" if said != NO_QUEUES else ""
    assert found["trouble"] == (said and f"{said}{hint}")


def test_info_names_one_of_several_damaged_files(tmp_path: Path) -> None:
    store = BY_NAME["d14_middle_file_gone_clean/clean"].unpack(tmp_path)
    (store / "commitlog" / "notes.txt").write_text("x")
    found = call("store", "info", store, "--json").json
    assert found["trouble"].endswith(" and 1 more file; mqproc store verify shows what to do")
    assert call("store", "repair", store, "--execute").code == 0
    found = call("store", "info", store, "--json").json
    assert (found["trouble"], [(hole["start"], hole["stop"]) for hole in found["holes"]]) == (None, [(131072, 196608)])


@pytest.mark.parametrize("emptied", [True, False])
def test_info_missing_log_is_unknown_writer(tmp_path: Path, emptied: bool) -> None:
    store = StoppedStore(tmp_path / "store")
    end = store.end
    for segment in (store.root / "commitlog").iterdir():
        if emptied:
            segment.write_bytes(b"")
        else:
            segment.unlink()
    found = call("store", "info", store.root, "--json").json
    said = f"unknown: the log is missing; by mqproc's mark it was durable up to {end:,}"
    assert found["written_by"] == said
    wanted = "0 bytes; a segment has" if emptied else "the log is empty, but its queues have 640 messages"
    assert wanted in found["trouble"]
    assert (found["first_store_timestamp_ms"], found["last_store_timestamp_ms"]) == (None, None)
    assert "first message" not in call("store", "info", store.root).out


def test_info_of_many_topics_takes_linear_time(tmp_path: Path) -> None:
    names = CountedName.many(300)
    queues = [QueueInfo(name, queue_id, 1, 3) for name in names for queue_id in range(4)]
    reader: Any = SimpleNamespace(
        visible=SimpleNamespace(begin=0, end=100),
        queues=lambda: queues,
        scan=lambda physical_offset: (),
        store_time_ms=lambda *_: 5,
    )
    found = read_contents(StorePaths(tmp_path), reader)
    compared = CountedName.compared
    assert [(each["topic"], each["queues"], each["messages"]) for each in found["by_topic"]] == [
        (str(name), 4, 8) for name in names
    ]
    assert (found["topics"], found["queues"], found["messages"]) == (300, 1_200, 2_400)
    assert compared <= 10 * len(queues)


def test_info_counts_quarantined_and_repaired_files(tmp_path: Path) -> None:
    """Only the owner deletes these files, so the owner must see them."""
    store = load_fixture("h_oversize", tmp_path).store
    for name, size in (("aside/commitlog.1.rest", 5000), ("aside/0/x", 7), ("repaired/20261127T000000000/files/y", 9)):
        path = store / "mqproc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    parts = call("store", "info", store, "--json").json["parts"]
    sizes = {name: (part["files"], part["bytes"]) for name, part in parts.items() if name.startswith("mqproc")}
    assert sizes == {"mqproc": (3, 5016), "mqproc/aside": (2, 5007), "mqproc/repaired": (1, 9)}


def test_info_accepts_any_broker_address(tmp_path: Path) -> None:
    """RocketMQ accepts a host name; only a group that starts here cannot use one."""
    store = load_fixture("g1_retention", tmp_path).store
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerIP1 = broker-a.example.com\nbrokerName = broker a\n")
    index = next((store / "index").iterdir())
    commands = [("info", store), ("verify", store), ("dump", store), ("dump", store / "checkpoint"), ("dump", index)]
    for command in commands:
        outcome = call("--config", conf, "store", *command)
        assert outcome.code == 0, outcome.err
    outcome = call("--config", conf, "up", "--store", tmp_path / "new")
    assert outcome.code == 8
    assert "broker_ip = 'broker-a.example.com' is not an IP address" in outcome.err
