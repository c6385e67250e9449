"""Dumping files without messages: timer, offsets, errors, settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.ipc.error_log import ErrorLog
from mqproc.layout import committed_offsets, control, error_log, timer_files
from mqproc.layout.properties import java_hash
from mqproc.paths import StorePaths
from tests.cli.store import test_repair_timer as timed
from tests.cli.store.test_dump import explained
from tests.support.command_line import call


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> StorePaths:
    return StorePaths(timed.make_timed_store(tmp_path_factory.mktemp("timed")))


def test_dump_names_the_kind_of_every_file(paths: StorePaths) -> None:
    kinds = {}
    for path in sorted(paths.root.rglob("*")):
        if path.is_file():
            kinds[str(path.relative_to(paths.root))] = explained(path)[0]["kind"]
    assert kinds["timerwheel"] == "timer wheel"
    assert kinds["config/timercheck"] == "timer check"
    assert kinds["timerlog/00000000000000001024"] == "timer log"
    assert kinds["mqproc/progress"] == "progress"
    assert kinds["mqproc/errors"] == "errors"
    assert kinds["config/delayOffset.json"] == kinds["mqproc/settings.json"] == "config"


def test_dump_timer_log_units(paths: StorePaths) -> None:
    starts = sorted(int(path.name) for path in paths.timer_log.iterdir())
    found = [explained(paths.timer_log / f"{start:020d}") for start in starts]
    assert [part["name"] for part in found[0][0]["layout"]] == ["units", "end", "rest"]
    assert [part["name"] for part in found[-1][0]["layout"]] == ["units", "unwritten"]
    rows = [row for document, _fields in found for row in document["rows"]]
    assert len(rows) == timed.WAITING + 5
    waiting = rows[5:]
    records = {row["physical_offset"]: row for row in call("store", "dump", paths.root, "--json").json_lines}
    for number, row in enumerate(waiting):
        record = records[row["physical_offset"]]
        assert (record["topic"], record["size"]) == ("rmq_sys_wheel_timer", row["message_size"])
        assert record["properties"]["TIMER_DELIVER_MS"] == str(row["due_ms"])
        assert row["slot_ms"] == int(record["properties"]["TIMER_OUT_MS"])
        assert (row["does"], row["topic_hash"]) == ("deliver", java_hash("later"))
        assert row["previous"] == (waiting[number - 4]["position"] if number >= 4 else -1)
    values = [each["value"] for each in found[0][1] if each["name"] == "physical_offset"]
    assert values == [row["physical_offset"] for row in rows[: timed.PER_FILE]]
    data = (paths.timer_log / f"{0:020d}").read_bytes()
    for each in found[0][1]:
        if each["name"] not in ("rest", "magic"):
            size = each["size"]
            assert int.from_bytes(data[each["offset"] : each["offset"] + size], "big", signed=True) == each["value"]


def test_dump_timer_log_damage_is_a_range(paths: StorePaths, tmp_path: Path) -> None:
    folder = tmp_path / "timerlog"
    folder.mkdir()
    path = Path(shutil.copy(paths.timer_log / f"{0:020d}", folder))
    data = bytearray(path.read_bytes())
    data[2 * timer_files.UNIT_SIZE + 3] = 51
    path.write_bytes(data)
    layout = explained(path)[0]["layout"]
    assert [(part["name"], part["offset"]) for part in layout][:2] == [("units", 0), ("damage", 104)]


def test_dump_timer_wheel_slots(paths: StorePaths) -> None:
    found, fields = explained(paths.timer_wheel)
    check = {row["name"]: row["value"] for row in explained(paths.timer_check)[0]["rows"]}
    waiting = [row for row in found["rows"] if row["slot_ms"] >= check["read_ms"]]
    assert sorted(row["messages"] for row in waiting) == [10, 10, 10, 10]
    for row in waiting:
        assert row["offset"] == row["slot_ms"] // 1000 % timer_files.SLOTS * timer_files.SLOT_SIZE
        assert row["last"] - row["first"] >= 9 * 4 * timer_files.UNIT_SIZE
    assert (found["slots"], found["size"]) == (timer_files.SLOTS, timer_files.WHEEL_FILE_SIZE)
    assert len([each for each in fields if each["name"] == "time"]) == found["in_use"] == len(found["rows"])
    assert {part["name"] for part in found["layout"]} == {"slots", "empty slots"}


def test_dump_timer_check_words(paths: StorePaths) -> None:
    found, fields = explained(paths.timer_check)
    words = {row["name"]: row["value"] for row in found["rows"]}
    assert words["queue_offset"] == words["master_queue_offset"] == timed.WAITING + 5
    assert words["timer_log_flushed"] == 2 * 1024 + (timed.WAITING + 5 - 38) * timer_files.UNIT_SIZE
    assert (words["own_counter"], words["own_timestamp_ms"]) == (words["counter"], words["timestamp_ms"])
    assert words["log"] > 0
    assert [each["name"] for each in fields if each["name"] != "unused"] == list(words)


def test_dump_progress_words(paths: StorePaths) -> None:
    found, fields = explained(paths.progress)
    rows = {(row["group"], row["topic"], row["queue_id"]): row for row in found["rows"]}
    assert rows["billing", "later", 0]["next_offset"] >= 0
    block = next(part for part in found["layout"] if part["name"] == "block")
    assert block["offset"] == committed_offsets.HEADER_SIZE
    named = [each for each in fields if each["offset"] >= block["offset"]]
    assert [each["value"] for each in named if each["name"] in ("group", "topic")][:2] == ["billing", "later"]
    header = {each["name"]: each["value"] for each in fields if each["offset"] < committed_offsets.HEADER_SIZE}
    assert (header["magic"], header["end"]) == (committed_offsets.MAGIC, found["end"])


def test_dump_error_entries(paths: StorePaths, tmp_path: Path) -> None:
    copy = StorePaths(tmp_path)
    copy.own.mkdir()
    shutil.copy(paths.errors, copy.errors)
    log = ErrorLog.open(StoreIO(), copy, control.KEEPER)
    assert log is not None
    before = len(explained(copy.errors)[0]["rows"])
    log.note("the disk is full: Größe 7", 1_700_000_000_000)
    log.note("the disk is full: Größe 8", 1_700_000_000_500)
    found, fields = explained(copy.errors)
    row = next(row for row in found["rows"] if row["owner"] == control.KEEPER)
    assert len(found["rows"]) == before + 1
    assert (row["text"], row["count"]) == ("the disk is full: Größe 7", 2)
    assert (row["first_ms"], row["last_ms"]) == (1_700_000_000_000, 1_700_000_000_500)
    values = {each["name"]: each["value"] for each in fields if each["offset"] >= row["offset"] and each["value"]}
    assert values["text"] == row["text"]
    names = [part["name"] for part in found["layout"]]
    assert names == ["header", *(f"entries of {owner}" for owner in error_log.OWNERS)]


def test_dump_settings_are_rows(paths: StorePaths) -> None:
    def rows(path: Path) -> list[dict[str, Any]]:
        found = call("store", "dump", path, "--json").json
        assert found["about"]
        assert found["fault"] is None
        listed: list[dict[str, Any]] = found["rows"]
        return listed

    topics = {row["topic"]: row for row in rows(paths.topics)}
    assert (topics["later"]["writeQueueNums"], topics["later"]["perm"]) == (1, 6)
    assert {row["group"]: row["retryMaxTimes"] for row in rows(paths.subscription_groups)} == {"billing": 16}
    assert ("billing", "later", 0) in {
        (row["group"], row["topic"], row["queue_id"]) for row in rows(paths.consumer_offsets)
    }
    assert {row["level"]: row["next_offset"] for row in rows(paths.delay_offsets)} in ({}, {18: 0})


def test_dump_group_log_lines(tmp_path: Path) -> None:
    path = tmp_path / "mqproc" / "log.jsonl"
    path.parent.mkdir()
    path.write_text('{"ts": "2026-11-21T15:37:34.26", "role": "keeper", "event": "first"}\ntorn')
    found = explained(path)[0]
    assert [(row["offset"], row["event"]) for row in found["rows"]] == [(0, "first"), (69, "torn")]


@pytest.mark.parametrize("size", [0, 1, timer_files.SLOT_SIZE - 1])
def test_dump_truncated_wheel(tmp_path: Path, size: int) -> None:
    """A copy that a full disk has truncated."""
    path = tmp_path / "timerwheel"
    path.write_bytes(bytes(size))
    found = call("store", "dump", path, "--json")
    assert (found.code, found.json["size"], found.json["slots"], found.json["rows"]) == (0, size, 0, [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("topics.json", '{"topicConfigTable":{"t":7}}', "no attribute"),
        ("subscriptionGroup.json", '{"subscriptionGroupTable":[]}', "no subscriptionGroupTable in it"),
        ("subscriptionGroup.json", '{"subscriptionGroupTable":{"g":{"retryMaxTimes":"many"}}}', "invalid literal"),
        ("consumerOffset.json", '{"offsetTable":{"t":{0:5}}}', "expected TOPIC@GROUP"),
        ("consumerOffset.json", f'{{"offsetTable":{{"t@g":{{{"9" * 5000}:5}}}}}}', "expected queue id and offset"),
        ("delayOffset.json", '{"offsetTable":{"one":5}}', "expected level and offset"),
        ("delayOffset.json", '{"offsetTable":{"²":5}}', "expected level and offset"),
        ("delayOffset.json", f'{{"offsetTable":{{{"9" * 5000}:5}}}}', "expected level and offset"),
        ("deletedTopics.json", '{"deletedTopics":{"t":{}}}', "physicalOffset"),
    ],
)
def test_dump_invalid_settings_are_a_fault(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / "config" / name
    path.parent.mkdir()
    path.write_text(text)
    found = call("store", "dump", path, "--json")
    assert found.code == 1
    assert said in found.json["fault"]
