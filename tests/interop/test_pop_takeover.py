"""A broker's store with messages that were received by POP requests: what is open in it, and what is done with."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.io import StoreIO
from mqproc.names import REVIVE_GROUP, REVIVE_QUEUES, REVIVE_TOPIC
from mqproc.paths import StorePaths
from mqproc.store.delays.timer_waiting import saved_check
from mqproc.store.groups import offsets_json
from mqproc.store.groups.check_points import CheckPoint
from mqproc.store.groups.open_check_points import OpenCheckPoints, begins_of
from mqproc.store.slices import finish
from tests.conftest import Group, wait_until
from tests.golden.fixtures import GOLDEN, KEPT, unpack
from tests.interop.pop_store import GROUP, LATE_MS, LATER_MS, NAME, TOPIC

RETRY = f"%RETRY%{GROUP}_{TOPIC}"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """See `pop_store.make`."""
    with tarfile.open(GOLDEN / f"{NAME}.tar.gz") as archive:
        unpack(archive, tmp_path)
    return tmp_path / "store"


def read(store: Path, read_ms: int | None = None) -> OpenCheckPoints:
    """What is open; `read_ms`: what the timer has delivered, if not what its check says."""
    io, paths, found = StoreIO(), StorePaths(store), OpenCheckPoints()
    progress = offsets_json.load(io, paths).progress
    with StoreReader(store) as reader:
        at = saved_check(io, paths).read_ms if read_ms is None else read_ms
        finish(found.read(reader.reading, begins_of(progress), at))
    return found


def bodies(store: Path, of: CheckPoint) -> list[bytes]:
    with StoreReader(store) as reader:
        return [reader.pull(of.topic, of.queue_id, offset, 1).messages[0].body for offset in sorted(of.open)]


def test_what_was_not_acknowledged_is_open_and_nothing_else(store: Path) -> None:
    """All of it waits in the timer: a broker's check points are there until they are nearly due."""
    found = {(each.topic, each.invisible_ms, *bodies(store, each)): each for each in read(store)}
    assert set(found) == {
        (TOPIC, LATE_MS, b"4"),
        (TOPIC, LATER_MS, b"6"),
        (TOPIC, LATER_MS, b"9"),
        (RETRY, LATER_MS, b"11"),
    }
    # What does not pass the filter is left out behind the offset that is named.
    six = found[TOPIC, LATER_MS, b"6"]
    assert (six.start, six.offsets, six.broker) == (0, (4, 5, 6), "broker-a")


def test_what_a_broker_is_done_with_is_no_more_read(store: Path) -> None:
    """Its progress names the last check point that it has sent again, ours the next one."""
    progress = [at for at in offsets_json.load(StoreIO(), StorePaths(store)).progress if at.group == REVIVE_GROUP]
    assert [(at.topic, at.offset) for at in progress] == [(REVIVE_TOPIC, 1)]
    assert progress[0].queue_id < REVIVE_QUEUES
    tables = [(at.group, at.topic, [(at.queue_id, at.offset)]) for at in progress]
    text = offsets_json.encode(tables, 1, 2, {})
    assert b'"rmq_sys_REVIVE_LOG_DefaultCluster@CID_RMQ_SYS_REVIVE_GROUP":{%d:0\n' % progress[0].queue_id in text


def test_what_the_timer_has_delivered_is_in_the_revive_topic_alone(store: Path) -> None:
    found = read(store)
    assert len(read(store, found.parked_until_ms)) == 1
    assert len(read(store, found.parked_until_ms + 1)) == 0


def again(group: Group) -> Counter[tuple[bytes, int]]:
    """What came again, and how often it did."""
    with group.client() as client:
        return Counter((message.body, message.reconsume_times) for message in client.range(RETRY))


def test_what_is_open_comes_again_once_though_the_group_is_killed_when_it_has(store: Path) -> None:
    """All of it is overdue. RocketMQ had sent 10 and 11 again, and the next one has the latter."""
    group = Group(store)
    group.options = KEPT | {"max_message_size": 32768, "broker_name": "broker-a"}
    group.start()
    expected = Counter([(b"10", 1), (b"11", 1), (b"4", 1), (b"6", 1), (b"9", 1), (b"11", 2)])
    try:
        wait_until(lambda: again(group) == expected, what="all of it again")
        group.kill()
        group.start()

        def is_settled() -> bool:
            """Whether the timer has delivered what RocketMQ had parked there, and nothing is open."""
            words = group.words()
            return bool(words["timed_messages"] == 0 and words["received_from"] == words["written"] > 0)

        wait_until(is_settled, what="nothing open")
        group.wait_dispatched()
        assert again(group) == expected
        assert group.stop() == 0
    finally:
        group.close()
