"""`mqproc store verify`: exit codes, output formats, progress, wrong input, running stores."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message
from mqproc.store.verify import FindingKind
from tests.golden.fixtures import GOLDEN, directories, load_fixture
from tests.support.command_line import call
from tests.support.group import Group
from tests.support.store_checks import flip, overwrite

BY_NAME = {str(each): each for each in directories(GOLDEN)}


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return BY_NAME["d07_body_flip_middle_file_clean/clean"].unpack(tmp_path)


def test_verify_clean_store_exits_0(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    outcome = call("store", "verify", store)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("clean: 738 records [0, 569,448), 738 units of 21 queues, 1,188 index entries")
    assert call("store", "verify", "--store", store).code == 0
    found = call("store", "verify", store, "--json").json
    assert (found["clean"], found["findings"], found["damage"], found["notes"]) == (True, [], 0, 0)
    assert (found["records"], found["log_end"], found["store"]) == (738, 569_448, str(store))


def test_verify_damage_exits_1_and_is_listed_first(damaged: Path) -> None:
    outcome = call("store", "verify", damaged, "--json")
    found = outcome.json
    assert outcome.code == 1
    assert (found["clean"], found["damage"]) == (False, 1)
    first = found["findings"][0]
    assert first == {
        "severity": "damage",
        "kind": "record_body_crc",
        "file": "commitlog/00000000000000131072",
        "offset": 2264,
        "physical_offset": 133336,
        "size": 211,
        "count": 0,
        "text": "",
        "means": first["means"],
        "do": first["do"],
    }
    assert "mqproc store repair" in first["do"]
    assert {finding["severity"] for finding in found["findings"][1:]} == {"note"}


def test_verify_table_explains_findings(damaged: Path) -> None:
    outcome = call("store", "verify", damaged)
    lines = outcome.out.splitlines()
    assert outcome.code == 1
    assert lines[0].split() == ["severity", "kind", "file", "offset", "physical", "offset", "size", "count", "what"]
    assert "commitlog/00000000000000131072" in lines[1]
    assert any(line.startswith("record_body_crc: the body of a record does not match its CRC") for line in lines)
    assert lines[-2].startswith("DAMAGED: 1 finding, 2 notes: ")
    assert lines[-1].startswith("1 message cannot be recovered: ")


def test_verify_findings_as_lines_and_csv(damaged: Path) -> None:
    rows = call("store", "verify", damaged, "--output", "jsonl").json_lines
    assert [row["kind"] for row in rows][:2] == ["record_body_crc", "unit_in_hole"]
    assert call("store", "verify", damaged, "--output", "csv").out.splitlines()[1].split(",")[:5] == [
        "damage",
        "record_body_crc",
        "commitlog/00000000000000131072",
        "2264",
        "133336",
    ]


def test_verify_kinds_are_explained() -> None:
    rows = call("store", "verify", "--kinds", "--json").json["kinds"]
    assert [row["kind"] for row in rows] == [str(kind) for kind in FindingKind]
    assert all(row["means"] and row["do"] and row["severity"] in ("damage", "note") for row in rows)


def test_verify_changes_nothing(damaged: Path) -> None:
    def state() -> dict[Path, tuple[int, int, bytes]]:
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_size, path.read_bytes())
            for path in damaged.rglob("*")
            if path.is_file()
        }

    before = state()
    call("store", "verify", damaged, "--jobs", 2)
    assert state() == before


@contextmanager
def as_nobody() -> Iterator[None]:
    """As an unprivileged user; root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_verify_invalid_input_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    locked = load_fixture("c3_killed_fresh", tmp_path / "locked").store.parent
    for path, code, said in (
        (tmp_path / "gone", 5, "gone: no such folder"),
        (tmp_path / "file", 3, "file: a file, not a store's folder"),
        (Path("/dev/null"), 3, "/dev/null: neither file nor folder, not a store's folder"),
        (tmp_path / "empty", 3, "empty: not a store: it has no folder commitlog"),
    ):
        outcome = call("store", "verify", path)
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.err == f"mqproc: {tmp_path / said}\n"
    store = locked / "after"
    store.chmod(0)
    with as_nobody():
        outcome = call("store", "verify", store)
    store.chmod(0o700)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.endswith("Permission denied\n")
    assert len(outcome.err.splitlines()) == 1
    assert call("store", "verify", store, "--jobs", 0).code == 2


def test_verify_running_store_is_clean(make_group: Callable[..., Group]) -> None:
    """Writer, dispatcher and flushers continue while verify reads published data."""
    group = make_group()
    stop = threading.Event()
    sent: list[int] = []

    def send() -> None:
        with group.client() as client:
            number = 0
            while not stop.is_set():
                batch = [
                    Message(f"topic-{(number + each) % 5}", b"x" * (each % 300), keys=[f"k{number + each}"], tag="t")
                    for each in range(200)
                ]
                client.send_many(batch)
                number += len(batch)
                sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        seen = []
        while len(seen) < 6 or len(sent) < 40:
            outcome = call("store", "verify", group.store, "--json", "--jobs", 2)
            found: dict[str, Any] = outcome.json
            assert found["findings"] == []
            assert outcome.code == 0
            assert found["running"]
            seen.append(found["records"])
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    group.wait_dispatched()
    found = call("store", "verify", group.store, "--json").json
    assert found["records"] == found["units"] == sent[-1]
    assert group.stop() == 0
    found = call("store", "verify", group.store, "--json").json
    assert (found["running"], found["findings"], found["records"]) == (False, [], sent[-1])


def test_verify_running_store_reports_damage(group: Group) -> None:
    with group.client() as client:
        sent = [client.send(Message("orders", b"hello" * 20, keys=[f"k{number}"])) for number in range(50)]
        client.wait_dispatched()
    flip(group.store / "commitlog" / f"{0:020d}", sent[20].physical_offset + 100)
    outcome = call("store", "verify", group.store, "--json")
    assert outcome.code == 1
    damage = [finding for finding in outcome.json["findings"] if finding["severity"] == "damage"]
    assert [(each["kind"], each["physical_offset"]) for each in damage] == [
        ("record_body_crc", sent[20].physical_offset)
    ]


def test_verify_file_being_created_is_not_damage(group: Group) -> None:
    """A new file has its name before its length; one that stays short is reported."""
    with group.client() as client:
        client.send(Message("orders", b"hello"))
        client.wait_dispatched()
    (queue,) = (group.store / "consumequeue" / "orders").iterdir()
    (first,) = queue.iterdir()
    made = queue / f"{first.stat().st_size:020d}"
    made.touch()
    outcome = call("store", "verify", group.store, "--json")
    assert [(each["kind"], each["file"]) for each in outcome.json["findings"]] == [
        ("queue_file_length", str(made.relative_to(group.store)))
    ]
    making = threading.Timer(0.1, os.truncate, (made, first.stat().st_size))
    making.start()
    outcome = call("store", "verify", group.store, "--json")
    assert (outcome.code, outcome.json["findings"]) == (0, [])
    assert made.stat().st_size == first.stat().st_size
    making.join()


def test_verify_killed_group_is_clean_or_undispatched(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        for number in range(20):
            client.send_many([Message("orders", b"x" * 100, keys=[f"k{number}-{each}"]) for each in range(100)])
    group.kill()
    outcome = call("store", "verify", group.store, "--json")
    kinds = {finding["kind"] for finding in outcome.json["findings"]}
    assert outcome.code == 0
    assert kinds <= {"not_closed", "not_dispatched", "not_indexed", "file_begun"}
    assert outcome.json["records"] == 2000


def _empty(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("lose", "pending"),
    [
        (lambda store: _empty(store / "index"), {"not_indexed"}),
        (lambda store: shutil.rmtree(store / "index"), {"not_indexed"}),
        (lambda store: (_empty(store / "index"), _empty(store / "consumequeue")), {"not_indexed", "not_dispatched"}),
        (
            lambda store: (shutil.rmtree(store / "index"), shutil.rmtree(store / "consumequeue")),
            {"not_indexed", "not_dispatched"},
        ),
    ],
)
def test_verify_store_killed_early_may_lack_units(
    tmp_path: Path, lose: Callable[[Path], object], pending: set[str]
) -> None:
    store = BY_NAME["c3_killed_fresh/before"].unpack(tmp_path)
    lose(store)
    overwrite(store / "checkpoint", 8, bytes(16))
    found = call("store", "verify", store, "--json")
    assert (found.code, found.json["damage"], set(found.json["counts"])) == (0, 0, {*pending, "not_closed"})
    # Synced data must have existed.
    overwrite(store / "checkpoint", 8, (1).to_bytes(8, "big"))
    assert call("store", "verify", store).code == 1
    overwrite(store / "checkpoint", 8, bytes(8))
    (store / "abort").unlink()
    assert call("store", "verify", store).code == 1


def test_verify_units_older_than_index_are_rebuilt_by_a_start(tmp_path: Path) -> None:
    store = BY_NAME["c3_killed_fresh/before"].unpack(tmp_path)
    shutil.rmtree(store / "consumequeue")
    overwrite(store / "checkpoint", 8, bytes(16))
    assert set(call("store", "verify", store, "--json").json["counts"]) == {"not_dispatched", "not_closed"}


def test_verify_records_of_deleted_topic_are_not_damage(make_group: Callable[..., Group]) -> None:
    group = make_group()

    def findings() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = call("store", "verify", group.store, "--json").json["findings"]
        return found

    with group.client() as client:
        for topic in ("gone", "kept", "gone"):
            client.send_many([Message(topic, b"x" * 60, keys=[f"k{number}"]) for number in range(40)])
        client.wait_dispatched()
        client.delete_topic("gone")
        assert findings() == []
        client.send_many([Message("gone", b"again", keys=[f"k{number}"]) for number in range(10)])
        client.wait_dispatched()
        assert findings() == []
        client.delete_topic("gone")
    assert group.stop() == 0
    assert findings() == []


def test_verify_progress_of_recreated_topic_is_valid(make_group: Callable[..., Group]) -> None:
    """Its queues continue at their old offsets, and have no file yet that shows it."""
    group = make_group()
    with group.client() as client:
        client.create_topic("again", 2)
        client.send_many([Message("again", b"x") for _ in range(10)])
        with client.consumer("readers", "again", start="earliest") as consumer:
            assert len([message.body for message in itertools.islice(consumer, 10)]) == 10
        client.delete_topic("again")
        client.create_topic("again", 2)
        assert [(queue.min_offset, queue.max_offset) for queue in client.queues("again")] == [(5, 5), (5, 5)]
    assert group.stop() == 0
    assert call("store", "verify", group.store, "--json").json["findings"] == []
    offsets = group.paths.consumer_offsets
    offsets.write_text(offsets.read_text().replace("0:5", "0:6"))
    found = call("store", "verify", group.store, "--json").json["findings"]
    assert [(row["kind"], row["text"]) for row in found] == [
        ("progress_beyond_end", "group readers: again queue 0: 6; the queue ends at 5")
    ]


def test_verify_records_of_topic_deleted_by_rocketmq_are_notes(tmp_path: Path) -> None:
    store = load_fixture("i_broker", tmp_path).store
    records = call("store", "dump", store, "--json").json_lines
    topic = next(name.name for name in (store / "consumequeue").iterdir() if not name.name.startswith(("%", "SCHED")))
    shutil.rmtree(store / "consumequeue" / topic)
    found = call("store", "verify", store, "--json").json
    assert {finding["kind"] for finding in found["findings"]} == {"unit_missing"}
    settings = store / "config" / "topics.json"
    settings.write_text(settings.read_text().replace(f'"{topic}"', '"another"'))
    found = call("store", "verify", store, "--json").json
    assert found["clean"]
    assert {finding["kind"] for finding in found["findings"]} == {"topic_deleted"}
    assert sum(each["count"] for each in found["findings"]) == sum(each["topic"] == topic for each in records)


def test_verify_group_without_index_is_clean(make_group: Callable[..., Group]) -> None:
    group = make_group(message_index_enable=False)
    with group.client() as client:
        client.send_many([Message("orders", b"x" * 60, keys=[f"k{number}"]) for number in range(40)])
        client.wait_dispatched()
    assert call("store", "verify", group.store, "--json").json["findings"] == []
    assert group.stop() == 0
    assert call("store", "verify", group.store, "--json").json["findings"] == []
    outcome = call("store", "verify", group.store, "--json", "--set", "message_index_enable=true")
    assert (outcome.code, [each["kind"] for each in outcome.json["findings"]]) == (1, ["index_missing"])


def test_verify_finding_without_value_is_empty(damaged: Path) -> None:
    (damaged / "checkpoint").unlink()
    listed = {row["kind"]: row for row in call("store", "verify", damaged, "--json").json["findings"]}
    assert (listed["checkpoint_missing"]["size"], listed["checkpoint_missing"]["count"]) == (0, 0)
    lines = call("store", "verify", damaged).out.splitlines()
    row = next(line for line in lines if line.split()[1:2] == ["checkpoint_missing"])
    assert row.split()[3:7] == ["-"] * 4


def test_verify_lost_log_end_comes_from_units(tmp_path: Path) -> None:
    """Units give the end of the last record, the index only its start."""
    store = BY_NAME["d19_commitlog_gone/clean"].unpack(tmp_path)
    end = 290_296
    listed = {row["kind"]: row for row in call("store", "verify", store, "--json").json["findings"]}
    known = f"consumequeue refers to records up to {end:,}"
    size = "the segment size is unknown, 1,073,741,824 bytes are assumed from the options"
    assert listed["segment_missing"]["text"] == f"{known}; {size}"
    assert (listed["log_ends_early"]["size"], listed["log_ends_early"]["text"]) == (end, f"the log ends at 0; {known}")
    shutil.rmtree(store / "consumequeue")
    found = call("store", "verify", store, "--set", "message_index_enable=true", "--json").json["findings"]
    early = next(row for row in found if row["kind"] == "log_ends_early")
    assert early["text"].endswith("refers to a record at 289,916")
    assert early["size"] == 289_917
