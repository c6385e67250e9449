"""A store whose timer files RocketMQ wrote is gone on with: what waits is delivered, what was delivered is not."""

from __future__ import annotations

import tarfile
import unittest.mock
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.layout import timer_check
from mqproc.names import TIMER_TOPIC
from mqproc.paths import StorePaths
from tests.cli.calling import call
from tests.cli.repairing import damage_in
from tests.conftest import Group, wait_until
from tests.golden.fixtures import GOLDEN, KEPT, unpack
from tests.interop.timer_store import CANCELLED, DELIVERED, FAR, NAME, TOPIC, WAITING, dumped, units

OPTIONS = KEPT | {"max_message_size": 32768}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """See `timer_store.make`."""
    with tarfile.open(GOLDEN / f"{NAME}.tar.gz") as archive:
        unpack(archive, tmp_path)
    return tmp_path / "store"


def bodies(group: Group) -> list[str]:
    """What is delivered: RocketMQ's in no order, since theirs were due in one second, then ours as they came."""
    with group.client() as client:
        found = [message.body.decode() for message in client.range(TOPIC)]
    return sorted(found[: len(DELIVERED)]) + found[len(DELIVERED) :]


def test_what_waits_in_rocketmqs_timer_files_is_read(store: Path) -> None:
    with StoreReader(store) as reader:
        of_offset = {
            message.physical_offset: message.body.decode() for message in reader.pull(TIMER_TOPIC, 0, 0, 100).messages
        }
    waiting = {of_offset[offset] for _, offset in units(store)}
    assert waiting == {*WAITING, CANCELLED, "the cancellation", FAR}
    rows = [row for path in sorted((store / "timerlog").iterdir()) for row in dumped(path)]
    does = {of_offset[row["physical_offset"]]: row["does"] for row in rows}
    assert does.pop("the cancellation") == "cancel"
    assert does.pop(FAR) == "park again, then deliver"
    assert does == dict.fromkeys([*DELIVERED, *WAITING, CANCELLED], "deliver")
    verified = call("store", "verify", store, "--json")
    assert (verified.code, damage_in(verified.json)) == (0, [])


def test_rocketmqs_timer_is_gone_on_with_where_it_stood(store: Path) -> None:
    """In the order of their times, each once, none that was cancelled; what is far off waits on."""
    group = Group(store)
    group.options = OPTIONS
    group.start()
    try:
        wait_until(lambda: group.words()["timed_messages"] == 1, what="nothing left but what is far off")
        group.wait_dispatched()
        assert bodies(group) == DELIVERED + WAITING
        for how in (group.kill, group.stop):
            how()
            group.start()
            wait_until(lambda: group.words()["timed_messages"] == 1, what="the timer's files are read")
        with group.client() as client:
            client.send(TOPIC, b"ours", delay=0.1)
        wait_until(lambda: bodies(group)[-1] == "ours", what="the delivery of ours")
        assert bodies(group) == [*DELIVERED, *WAITING, "ours"]
        assert group.words()["deliveries_lost"] == 0
        assert group.stop() == 0
    finally:
        group.close()
    offsets = [offset for _, offset in units(store)]
    with StoreReader(store) as reader:
        parked = reader.pull(TIMER_TOPIC, 0, 0, 100).messages
    waits = [message.body.decode() for message in parked if message.physical_offset in offsets]
    # Of a slot that is up its messages are there until the next one is.
    assert [body for body in waits if body != "ours"] == [FAR]
    verified = call("store", "verify", store, "--json")
    assert (verified.code, damage_in(verified.json)) == (0, [])


def test_a_repair_has_no_more_filed_than_there_is(store: Path) -> None:
    """All is delivered, and the log's first record, to which empty units lead, is the timer's."""
    check = StorePaths(store).timer_check
    page = bytearray(check.read_bytes())
    for place, value in ((0, 1 << 44), (40, 1 << 44), (16, 99), (24, 99)):
        page[place : place + 8] = value.to_bytes(8, "big")
    check.write_bytes(page)
    with unittest.mock.patch("time.time_ns", return_value=(1 << 44) * 1_000_000):
        done = call("store", "repair", store, "--execute", "--json")
    assert (done.code, damage_in(done.json)) == (0, []), done
    assert timer_check.decode(check.read_bytes()).queue_offset == 11
