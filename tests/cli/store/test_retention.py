"""`mqproc store retention`: the plan matches the execution, stopped and running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.cli.store.retention import RunningGroup
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import StoreLock
from mqproc.paths import StorePaths
from mqproc.store.read.reader import StoreReader
from tests.golden.fixtures import load_fixture
from tests.support.command_line import Outcome, call
from tests.support.group import Group, wait_until

SEGMENT = 65536
BEGIN, LAST = 4 * SEGMENT, 7 * SEGMENT
# The index has another size than the options' defaults.
SIZES = ("--set", "max_hash_slot_num=200", "--set", "max_index_num=800")
Told = dict[str, Any]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that RocketMQ filled, cleaned and closed: three full segments and the last one."""
    return load_fixture("g1_retention", tmp_path).store


def retention(store: Path, *arguments: str, **environment: str) -> Outcome:
    return call("store", "retention", "--store", store, "--json", *SIZES, *arguments, **environment)


def plan(store: Path, *arguments: str) -> Told:
    outcome = retention(store, *arguments)
    assert outcome.code == 0, outcome.err
    told: Told = outcome.json
    return told


def parts(told: Told) -> dict[str, int]:
    found = [file["part"] for file in told["files"]]
    return {part: found.count(part) for part in ("commitlog", "consumequeue", "index")}


def files(store: Path) -> set[str]:
    """Files except those that a running group reuses as the next segment."""
    return {str(path.relative_to(store)) for path in store.rglob("*") if path.suffix != ".tmp" and path.is_file()}


def test_retention_young_store_deletes_nothing(store: Path) -> None:
    told = plan(store, "--set", "file_reserved_time=1000000")
    assert (told["files"], told["bytes"], told["queues"], told["held_by"]) == ([], 0, [], None)
    assert (told["executed"], told["running"]) == (False, False)
    assert told["expires_after_ms"] == 1_000_000 * 3_600_000


def test_retention_plan_changes_nothing_and_gives_reasons(store: Path) -> None:
    before = files(store)
    told = plan(store, "--dry-run", "--older-than", "0s")
    assert files(store) == before
    assert parts(told) == {"commitlog": 3, "consumequeue": 2, "index": 2}
    first = told["files"][0]
    assert first["file"] == f"commitlog/{BEGIN:020d}"
    assert first["why"].startswith("last stored 20")
    whys = {file["part"]: file["why"] for file in told["files"]}
    assert whys["consumequeue"] == f"last unit points below {LAST:,}"
    assert whys["index"] == f"last entry points below {LAST:,}"
    assert (told["min_physical_offset_before"], told["min_physical_offset"]) == (BEGIN, LAST)
    assert told["bytes"] == sum(file["bytes"] for file in told["files"])


def test_retention_plan_exit_code_can_report_changes(store: Path) -> None:
    assert retention(store, "--older-than", "0s").code == 0
    assert retention(store, "--older-than", "0s", "--detailed-exitcode").code == 2
    unchanged = ("--set", "file_reserved_time=1000000", "--detailed-exitcode")
    assert retention(store, *unchanged).code == 0


def test_retention_age_without_unit_is_refused(store: Path) -> None:
    """It would be seconds, and delete nearly everything."""
    before = files(store)
    outcome = retention(store, "--older-than", "15", "--execute")
    assert (outcome.code, files(store)) == (2, before)
    assert "'15' is not a duration; write 500ms, 90s, 15m" in outcome.err


def test_retention_executes_the_plan(store: Path) -> None:
    told = plan(store, "--older-than", "0s")
    before = files(store)
    done = retention(store, "--execute", "--older-than", "0s")
    assert done.code == 0, done.err
    gone = before - files(store)
    assert gone == {file["file"] for file in told["files"]}
    assert done.json["executed"] is True
    assert (done.json["segments"], done.json["bytes"]) == (3, told["bytes"])
    assert done.json["min_physical_offset"] == told["min_physical_offset"]
    # The remaining messages read the same, and every queue begins at the planned offset.
    with StoreReader(store) as reader:
        moved = {(queue["topic"], queue["queue_id"]): queue["after"] for queue in told["queues"]}
        for queue in reader.queues():
            if (place := (queue.topic, queue.queue_id)) in moved:
                assert queue.min_offset == moved[place]
        messages = list(reader.messages())
    assert messages
    assert all(message.physical_offset >= LAST for message in messages)
    again = plan(store, "--older-than", "0s")
    assert again["files"] == []


def test_retention_cleaned_store_starts(store: Path, make_group: Callable[..., Group]) -> None:
    told = plan(store, "--older-than", "0s")
    ends = {(queue["topic"], queue["queue_id"]): queue["after"] for queue in told["queues"]}
    assert retention(store, "--now", "--older-than", "0s").code == 0
    shutil.move(store, store.with_name("cleaned"))
    group = make_group("cleaned", mapped_file_size_commit_log=SEGMENT, max_message_size=30_000,
                       mapped_file_size_consume_queue=2000, max_hash_slot_num=200, max_index_num=800)  # fmt: skip
    with group.client() as client:
        minima = {(queue.topic, queue.queue_id): queue.min_offset for queue in client.queues()}
        assert {queue: minima[queue] for queue in ends} == ends
        maxima = {(queue.topic, queue.queue_id): queue.max_offset for queue in client.queues("OrderTopic")}
        sent = client.send("OrderTopic", b"next", queue_id=0)
        assert sent.queue_offset == maxima["OrderTopic", 0]


def test_retention_reports_and_guards_lagging_groups(store: Path) -> None:
    config = store / "config"
    config.mkdir(exist_ok=True)
    (config / "consumerOffset.json").write_text('{"offsetTable":{"OrderTopic@slow":{0:33,1:100000}}}')
    told = plan(store, "--older-than", "0s")
    ((_, minimum),) = [
        (queue["before"], queue["after"])
        for queue in told["queues"]
        if (queue["topic"], queue["queue_id"]) == ("OrderTopic", 0)
    ]
    assert told["groups"] == [
        {"group": "slow", "topic": "OrderTopic", "queue_id": 0, "offset": 33, "minimum": minimum,
         "messages": minimum - 33},
    ]  # fmt: skip
    assert told["unconsumed_messages"] == minimum - 33
    guarded = plan(store, "--older-than", "0s", "--set", "retention_guard=groups")
    assert guarded["held_by"] == "consumer group"
    assert guarded["held_detail"] == "group slow is at 33 of OrderTopic/0"
    assert guarded["unconsumed_messages"] == 0
    done = retention(store, "--execute", "--older-than", "0s").json
    assert done["unconsumed_messages"] == minimum - 33
    assert json.loads((store / "mqproc" / "unconsumed.json").read_text()) == {"slow": {"OrderTopic": minimum - 33}}
    after = plan(store, "--older-than", "0s")
    assert (after["groups"], after["unconsumed_since_ever"]) == ([], {"slow": {"OrderTopic": minimum - 33}})


def test_retention_reports_unreadable_progress(store: Path) -> None:
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "consumerOffset.json").write_text("{half")
    told = plan(store, "--older-than", "0s")
    assert "consumerOffset.json" in told["progress_error"]
    assert told["files"]
    assert plan(store, "--older-than", "0s", "--set", "retention_guard=groups")["files"] == []


def test_retention_table(store: Path) -> None:
    outcome = call("store", "retention", store, *SIZES, "--older-than", "0s")
    assert outcome.code == 0
    assert f"the log would begin at {LAST:,}, now {BEGIN:,}" in outcome.out
    assert f"commitlog/{BEGIN:020d}" in outcome.out
    assert "automatic deletion: at hour 04" in outcome.out or "automatic deletion: now" in outcome.out
    done = call("store", "retention", store, *SIZES, "--older-than", "0s", "--execute")
    assert done.out.startswith("deleted 3 segments, ")
    rows = call("store", "retention", store, *SIZES, "--older-than", "0s", "--output", "csv")
    assert rows.out == "part,file,bytes,why\n"


def test_retention_killed_store_shows_plan_only(store: Path) -> None:
    (store / "abort").write_text("1")
    assert plan(store, "--older-than", "0s")["files"]
    before = files(store)
    outcome = retention(store, "--execute", "--older-than", "0s")
    assert outcome.code == 3
    assert "not shut down cleanly" in outcome.err
    assert files(store) - {"lock"} == before - {"lock"}


def test_retention_read_only_store_is_refused(store: Path) -> None:
    (store / "mqproc").mkdir(mode=0o700)
    (store / "mqproc" / "read_only").write_text("commitlog: Input/output error\n")
    outcome = retention(store, "--execute", "--older-than", "0s")
    assert outcome.code == 1
    assert "repair" in outcome.err


def test_retention_store_in_use_is_refused(store: Path) -> None:
    lock = StoreLock.acquire(StoreIO(), StorePaths(store))
    try:
        assert retention(store, "--execute", "--older-than", "0s").code == 7
    finally:
        lock.close()


def test_retention_dry_run_and_execute_exclude_each_other(store: Path) -> None:
    assert retention(store, "--execute", "--dry-run").code == 2


def test_retention_unreadable_options_name_the_fix(store: Path) -> None:
    """Without its options too much could be deleted; the error named the file only."""
    settings = StorePaths(store).settings
    settings.mkdir(parents=True)
    for _ in range(2):
        refused = retention(store, "--dry-run")
        assert refused.code == 6
        assert f"{settings}: " in refused.err
        assert "; mqproc store repair quarantines it" in refused.err
        if settings.is_dir():
            settings.rmdir()
            settings.write_text("garbage")


def test_retention_unknown_options_are_not_damage(store: Path) -> None:
    """`store repair` leaves such a file in place."""
    settings = StorePaths(store).settings
    settings.parent.mkdir(exist_ok=True)
    settings.write_text('{"max_queues": "many"}')
    refused = retention(store, "--dry-run")
    said = f"mqproc: {settings}: max_queues = 'many' is not a whole number; mqproc up rewrites the file\n"
    assert (refused.code, refused.err) == (6, said)


def test_retention_folder_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    outcome = retention(tmp_path, "--execute")
    assert (outcome.code, outcome.err) == (3, f"mqproc: {tmp_path}: not a store: it has no folder commitlog\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 100])
def test_retention_log_without_end_deletes_old_segments(store: Path, size: int) -> None:
    """The last segment with a record stays: here it is the last but one."""
    os.truncate(store / "commitlog" / f"{LAST:020d}", size)
    told = plan(store, "--older-than", "0s")
    assert (parts(told)["commitlog"], told["min_physical_offset"]) == (2, LAST - SEGMENT)
    before = files(store)
    done = retention(store, "--execute", "--older-than", "0s")
    assert (done.code, done.json["segments"], done.json["min_physical_offset"]) == (0, 2, LAST - SEGMENT)
    assert before - files(store) == {file["file"] for file in told["files"]}
    # A short segment is left to the next start.
    assert (store / "commitlog" / f"{LAST:020d}").stat().st_size == size


def test_retention_short_segment_has_the_age_of_its_rest(store: Path) -> None:
    middle = LAST - SEGMENT
    whole = plan(store, "--older-than", "0s")
    os.truncate(store / "commitlog" / f"{middle:020d}", 0)
    told = plan(store, "--older-than", "0s")
    assert [file["file"] for file in told["files"]] == [file["file"] for file in whole["files"]]
    assert retention(store, "--execute", "--older-than", "0s").json["min_physical_offset"] == LAST


# A running group


@pytest.fixture
def group(make_group: Callable[..., Group]) -> Iterator[Group]:
    """Some full segments that are a moment old."""
    group = make_group(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=2000, max_index_num=200,
                       max_hash_slot_num=50, max_message_size=30_000, delete_commit_log_files_interval=1,
                       delete_consume_queue_files_interval=1, retention_guard="none")  # fmt: skip
    with group.client() as client:
        for number in range(40):
            client.send_batch("T", [b"x" * 500] * 25, keys=[f"k{number}-{each}" for each in range(25)])
    group.wait_dispatched()
    wait_until(lambda: marks(group) >= group.words()["written"], what="marks at the end")
    yield group
    assert group.stop() == 0


def marks(group: Group) -> int:
    words = group.words()
    return min(words["commitlog_mark"], words["cq_synced"], words["index_synced"])


def test_retention_running_group_executes_the_plan(group: Group) -> None:
    told = plan(group.store, "--older-than", "0s")
    full = group.words()["written"] // SEGMENT
    assert (told["running"], parts(told)["commitlog"]) == (True, full)
    before = files(group.store)
    done = retention(group.store, "--execute", "--older-than", "0s")
    assert done.code == 0, done.err
    assert (done.json["segments"], done.json["min_physical_offset"]) == (full, full * SEGMENT)
    gone = before - files(group.store)
    assert gone == {file["file"] for file in told["files"]}
    assert retention(group.store, "--execute").json["segments"] == 0
    with group.client() as client:
        minima = {queue.queue_id: queue.min_offset for queue in client.queues("T")}
        assert minima == {queue["queue_id"]: queue["after"] for queue in told["queues"]}
        assert client.send("T", b"after").physical_offset >= full * SEGMENT


def test_retention_keeper_hanging_is_a_timeout(group: Group) -> None:
    os.kill(group.pid("keeper"), signal.SIGSTOP)
    outcome = retention(group.store, "--execute", "--older-than", "0s", "--timeout", "0.5s")
    assert outcome.code == 4
    assert "the keeper has not finished" in outcome.err
    os.kill(group.pid("keeper"), signal.SIGKILL)
    full = group.words()["written"] // SEGMENT
    wait_until(lambda: group.words()["min_physical_offset"] == full * SEGMENT, what="the successor's work")


def test_retention_concurrent_requests_are_both_answered(group: Group) -> None:
    outcomes: list[Outcome] = []

    def ask() -> None:
        running = RunningGroup.find(StoreIO(), StorePaths(group.store))
        assert running is not None
        outcomes.append(Outcome(0, json.dumps(running.delete(0, 20.0)), ""))
        running.close()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 3
    assert max(outcome.json["segments"] for outcome in outcomes) == group.words()["written"] // SEGMENT
