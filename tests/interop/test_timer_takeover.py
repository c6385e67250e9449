"""Takeover of RocketMQ's timer files: waiting messages are delivered once."""

from __future__ import annotations

import unittest.mock
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.layout import timer_files
from mqproc.paths import StorePaths
from mqproc.topic_names import TIMER_TOPIC
from tests.golden.fixtures import KEPT, load_store
from tests.interop.rocketmq import (
    CANCELLED,
    DELIVERED,
    FAR,
    TIMER_STORE,
    TIMER_STORE_TOPIC,
    VERSIONS,
    WAITING,
    dump_rows,
    golden_of,
    timer_units,
)
from tests.support.command_line import call
from tests.support.group import Group, wait_until
from tests.support.store_checks import damage_in

OPTIONS = KEPT | {"max_message_size": 32768}


@pytest.fixture(params=VERSIONS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The store of `make_timer_store`."""
    return load_store(TIMER_STORE, tmp_path, golden_of(request.param))


def bodies(group: Group) -> list[str]:
    """Delivered bodies: RocketMQ's, sorted (all due in one second), then mqproc's in order."""
    with group.client() as client:
        found = [message.body.decode() for message in client.range(TIMER_STORE_TOPIC)]
    return sorted(found[: len(DELIVERED)]) + found[len(DELIVERED) :]


def test_waiting_messages_of_rocketmqs_timer_are_read(store: Path) -> None:
    with StoreReader(store) as reader:
        of_offset = {
            message.physical_offset: message.body.decode() for message in reader.pull(TIMER_TOPIC, 0, 0, 100).messages
        }
    waiting = {of_offset[offset] for _, offset in timer_units(store)}
    assert waiting == {*WAITING, CANCELLED, "the cancellation", FAR}
    rows = [row for path in sorted((store / "timerlog").iterdir()) for row in dump_rows(path)]
    does = {of_offset[row["physical_offset"]]: row["does"] for row in rows}
    assert does.pop("the cancellation") == "cancel"
    assert does.pop(FAR) == "enqueue again, then deliver"
    assert does == dict.fromkeys([*DELIVERED, *WAITING, CANCELLED], "deliver")
    verified = call("store", "verify", store, "--json")
    assert (verified.code, damage_in(verified.json)) == (0, [])


def test_rocketmqs_timer_continues_at_its_position(store: Path) -> None:
    """Each is delivered once in time order, except the cancelled and the distant one."""
    group = Group(store)
    group.options = OPTIONS
    group.start()
    try:
        wait_until(lambda: group.words()["timed_messages"] == 1, what="all but the far message delivered")
        group.wait_dispatched()
        assert bodies(group) == DELIVERED + WAITING
        for how in (group.kill, group.stop):
            how()
            group.start()
            wait_until(lambda: group.words()["timed_messages"] == 1, what="the timer's files loaded")
        with group.client() as client:
            client.send(TIMER_STORE_TOPIC, b"ours", delay=0.1)
        wait_until(lambda: bodies(group)[-1] == "ours", what="the delivery of ours")
        assert bodies(group) == [*DELIVERED, *WAITING, "ours"]
        assert group.words()["deliveries_lost"] == 0
        assert group.stop() == 0
    finally:
        group.close()
    offsets = [offset for _, offset in timer_units(store)]
    with StoreReader(store) as reader:
        parked = reader.pull(TIMER_TOPIC, 0, 0, 100).messages
    waits = [message.body.decode() for message in parked if message.physical_offset in offsets]
    # The messages of a delivered slot stay until the next slot is delivered.
    assert [body for body in waits if body != "ours"] == [FAR]
    verified = call("store", "verify", store, "--json")
    assert (verified.code, damage_in(verified.json)) == (0, [])


def test_repair_lowers_timer_queue_offset_to_queue_end(store: Path) -> None:
    """All are delivered; empty units point to the log's first record, which is the timer's."""
    check = StorePaths(store).timer_check
    page = bytearray(check.read_bytes())
    for place, value in ((0, 1 << 44), (40, 1 << 44), (16, 99), (24, 99)):
        page[place : place + 8] = value.to_bytes(8, "big")
    check.write_bytes(page)
    with unittest.mock.patch("time.time_ns", return_value=(1 << 44) * 1_000_000):
        done = call("store", "repair", store, "--execute", "--json")
    assert (done.code, damage_in(done.json)) == (0, []), done
    assert timer_files.decode_check(check.read_bytes()).queue_offset == 11
