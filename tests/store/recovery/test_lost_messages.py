"""Recovery, repair and verify name the messages that a damaged log has lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.ipc.error_log import seen_errors
from mqproc.layout.record_codec import decode_record
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.types import StoredMessage
from tests.support.command_line import Outcome, call
from tests.support.group import Group, wait_until
from tests.support.store_builders import FIRST_MS, SEGMENT, StoppedStore
from tests.support.store_checks import flags_of, overwrite

Offsets = dict[tuple[str, int], list[int]]


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    built = StoppedStore(tmp_path / "store")
    built.close_in_order()
    return built


def message(store: StoppedStore, number: int) -> StoredMessage:
    offset = store.offsets[number]
    return decode_record(store.segment(offset).read_bytes(), offset % SEGMENT)


def by_queue(messages: Iterable[StoredMessage]) -> Offsets:
    """Queue offsets of messages by queue."""
    found: Offsets = {}
    for each in messages:
        found.setdefault((each.topic, each.queue_id), []).append(each.queue_offset)
    return {queue: sorted(offsets) for queue, offsets in sorted(found.items())}


def named(outcome: Outcome) -> Offsets:
    """Lost queue offsets by queue in JSON output, whose times must be right."""
    found: Offsets = {}
    for row in outcome.json["lost_messages"]:
        assert row["messages"] == row["last_offset"] - row["first_offset"] + 1
        offsets = range(row["first_offset"], row["last_offset"] + 1)
        found.setdefault((row["topic"], row["queue_id"]), []).extend(offsets)
        assert (row["after_ms"] or FIRST_MS) <= (row["before_ms"] or FIRST_MS + 1000)
        assert row["after_ms"] or row["before_ms"]
    return {queue: sorted(offsets) for queue, offsets in sorted(found.items())}


def erase(store: StoppedStore, first: int, stop: int) -> Offsets:
    """Overwrite the records of messages [first, stop) in one segment; their queue offsets."""
    lost = by_queue(message(store, number) for number in range(first, stop))
    end = store.offsets[stop] if stop < len(store.offsets) else store.end
    store.overwrite(store.offsets[first], b"\xa5" * (end - store.offsets[first]))
    return lost


def errors(store: Path) -> list[str]:
    return [error.text for error in seen_errors(StoreIO(), StorePaths(store)) if "cannot be recovered" in error.text]


def test_repair_names_the_messages_of_damaged_records(store: StoppedStore) -> None:
    lost, flags = erase(store, 100, 105), flags_of(store.engine.options)
    assert named(call("store", "verify", store.root, "--json", *flags)) == lost
    plan = call("store", "repair", store.root, *flags)
    done = call("store", "repair", store.root, "--execute", *flags)
    for outcome in (plan, done):
        summary, *rows = outcome.out.splitlines()[-1 - len(lost) :]
        assert summary == "5 messages cannot be recovered:"
        for row, ((topic, queue_id), offsets) in zip(rows, lost.items(), strict=True):
            assert row.startswith(f"  {topic} queue {queue_id}, offset")
            assert str(offsets[0]) in row
            assert re.search(r", stored (at|between) 2023-11-1", row)
    topic = message(store, 99).topic
    assert [text.split(" cannot")[0] for text in errors(store.root)] == [f"5 messages of topic {topic}"]
    # Also later, when fillers have replaced the units.
    for command in ("verify", "repair"):
        later = call("store", command, store.root, *flags)
        assert (later.code, later.out.splitlines()[-1 - len(lost)]) == (0, summary)
        assert named(call("store", command, store.root, "--json", *flags)) == lost
    assert len(errors(store.root)) == 1


@pytest.mark.parametrize("without_queues", [False, True])
def test_repair_names_the_messages_of_a_missing_segment(store: StoppedStore, *, without_queues: bool) -> None:
    flags, start = flags_of(store.engine.options), SEGMENT
    numbers = [number for number, offset in enumerate(store.offsets) if start <= offset < start + SEGMENT]
    lost = by_queue(message(store, number) for number in numbers)
    store.segment(start).unlink()
    if without_queues:
        shutil.rmtree(store.root / "consumequeue")
    assert named(call("store", "repair", store.root, "--execute", "--json", *flags)) == lost
    assert named(call("store", "verify", store.root, "--json", *flags)) == lost


@pytest.mark.parametrize("zeros", [False, True])
def test_repair_names_the_messages_of_a_cut_log(store: StoppedStore, *, zeros: bool) -> None:
    flags, count = flags_of(store.engine.options), len(store.offsets)
    lost = erase(store, count - 7, count)
    if zeros:
        store.overwrite(store.offsets[count - 7], bytes(store.end - store.offsets[count - 7]))
    assert named(call("store", "verify", store.root, "--json", *flags)) == lost
    assert named(call("store", "repair", store.root, "--execute", "--json", *flags)) == lost
    # The units are gone by then.
    assert damage.load(StoreIO(), StorePaths(store.root)).lost
    assert named(call("store", "verify", store.root, "--json", *flags)) == lost
    assert sum(len(offsets) for offsets in lost.values()) == 7
    assert call("store", "verify", store.root, *flags).out.splitlines()[-1 - len(lost)].startswith("7 messages")


def test_recovery_names_intact_records_after_a_torn_one(store: StoppedStore) -> None:
    """Undispatched records after the mark, whose pages a power loss has kept in part."""
    before = len(store.offsets)
    store.put()
    store.put()
    store.engine.segments.close()
    (store.root / "abort").touch()
    lost = by_queue(message(store, number) for number in range(before + 1, len(store.offsets)))
    store.overwrite(store.offsets[before] + 100, b"\xa5" * 20)
    found = call("store", "recover", store.root, "--execute", "--json", *flags_of(store.engine.options))
    assert named(found) == lost
    assert any("31 messages cannot be recovered" in line for line in found.json["recovery"])
    assert len(errors(store.root)) == 2


def test_recovery_of_an_undamaged_store_reports_no_loss(store: StoppedStore) -> None:
    store.put()
    store.engine.segments.close()
    (store.root / "abort").touch()
    found = call("store", "recover", store.root, "--execute", "--json", *flags_of(store.engine.options))
    assert named(found) == {}
    assert not any("cannot be recovered" in line for line in found.json["recovery"])
    assert errors(store.root) == []


def test_started_group_names_the_messages_that_damage_swallowed(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("orders", 1)
        sent = [client.send("orders", b"%d" % number) for number in range(20)]
        wait_until(lambda: client.count("orders") == 20, what="the messages are dispatched")
    group.stop()
    begin, end = sent[10].physical_offset, sent[15].physical_offset
    overwrite(group.store / "commitlog" / f"{0:020d}", begin, bytes(end - begin))
    (group.store / "abort").touch()
    shutil.rmtree(group.store / "mqproc" / "marks")
    group.start()
    (text,) = errors(group.store)
    assert text.startswith("5 messages of topic orders cannot be recovered: orders queue 0, offsets 10 to 14, stored")
    assert "recovery: 5 messages cannot be recovered: orders queue 0, offsets 10 to 14" in group.output.read_text()
    assert "5 messages of topic orders" in call("errors", "--store", group.store).out
    # The next start finds nothing new.
    group.stop()
    group.start()
    (seen,) = (error for error in seen_errors(StoreIO(), group.paths) if "cannot be recovered" in error.text)
    assert seen.count == 1


def test_started_group_names_undispatched_messages_at_the_ends_of_queues(make_group: Callable[..., Group]) -> None:
    """No unit and no later record names them, but the queue table does."""
    group = make_group()
    with group.client() as client:
        client.create_topic("orders", 1)
        client.send("orders", b"first")
        wait_until(lambda: client.count("orders") == 1, what="the message is dispatched")
        os.kill(group.pid("dispatcher"), signal.SIGSTOP)
        sent = [client.send("orders", b"%d" % number) for number in range(5)]
        group.kill()
    begin = sent[0].physical_offset
    overwrite(group.store / "commitlog" / f"{0:020d}", begin, bytes(sent[-1].physical_offset - begin + 1000))
    group.start()
    (text,) = errors(group.store)
    assert text.startswith(
        "5 messages of topic orders cannot be recovered: orders queue 0, offsets 1 to 5, stored after"
    )
    with group.client() as client:
        assert client.count("orders") == 1


def test_dispatcher_names_the_messages_that_it_skips(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("orders", 1)
        os.kill(group.pid("dispatcher"), signal.SIGSTOP)
        sent = [client.send("orders", b"%d" % number) for number in range(20)]
        begin, end = sent[10].physical_offset, sent[15].physical_offset
        overwrite(group.store / "commitlog" / f"{0:020d}", begin, b"\xa5" * (end - begin))
        os.kill(group.pid("dispatcher"), signal.SIGCONT)
        wait_until(lambda: errors(group.store), what="the loss is reported")
    (text,) = errors(group.store)
    assert text.startswith("5 messages of topic orders cannot be recovered: orders queue 0, offsets 10 to 14")
    lost = json.loads(call("store", "verify", group.store, "--json").out)["lost_messages"]
    assert [(row["first_offset"], row["last_offset"]) for row in lost] == [(10, 14)]
