"""Single messages of every kind: the log contains all of them, without gaps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from mqproc import Message, StoreReader
from tests.crash.disk import walk_log
from tests.support.command_line import call
from tests.support.group import Group

TIMES = 3
"""The writer knows a kind from the second one on."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tag": {"tag": "red"},
    "key": {"keys": ("k",)},
    "properties": {"properties": {"a": "b"}},
    "properties and tag": {"properties": {"a": "b", "c": "d"}, "tag": "red"},
    "properties and keys": {"properties": {"a": "b"}, "keys": ("k", "l"), "tag": "red", "flag": 7},
    "sharding key": {"sharding_key": "s"},
    "sharding key and properties": {"sharding_key": "s", "properties": {"a": "b"}},
    "born before 1970": {"born_timestamp_ms": -5},
    "level": {"delay_level": 1, "properties": {"a": "b"}},
}


@pytest.mark.parametrize("property_crc", [True, False])
def test_single_sends_leave_no_gap_in_log(make_group: Callable[..., Group], property_crc: bool) -> None:
    group = make_group(enabled_append_prop_crc=property_crc)
    with group.client() as client:
        client.create_topic("T")
        for kind, fields in KINDS.items():
            for _ in range(TIMES):
                client.send(Message("T", kind.encode(), **fields))
        for _ in range(TIMES):
            with client.transaction("g", Message("T", b"transaction", properties={"a": "b"})):
                pass
            at_ms = int(time.time() * 1000) + 1
            client.send(Message("T", b"time", properties={"a": "b"}, deliver_at_ms=at_ms))
        client.wait_dispatched()
    assert group.stop() == 0
    # The scan ends at a byte that does not belong to a record.
    last = walk_log(group.paths.commit_log)[-1]
    assert last.offset + last.size == group.words()["written"]
    verified = call("store", "verify", str(group.store))
    assert verified.code == 0, verified.out + verified.err


def test_single_sends_with_any_born_time_are_found(group: Group) -> None:
    born = [5, 0, -1, -(1 << 40), 7, (1 << 63) - 1, -(1 << 63)]
    with group.client() as client:
        for each in born:
            client.send(Message("Odd", b"%d" % each, keys=("k",), born_timestamp_ms=each))
        client.wait_dispatched()
        found = [int(message.body) for message in client.range("Odd", begin=1)]
        assert sorted(found) == sorted(born)
        assert client.count("Odd", begin=1) == len(born)
        found = [int(message.body) for message in client.range("Odd", time="born")]
        assert sorted(found) == sorted(born)
        assert client.count("Odd", begin=-1, end=5, time="born") == 2
        assert client.count("Odd", begin=0, time="born") == 4
        assert client.count("Odd", end=0, time="born") == 3
        assert len(client.by_key("Odd", "k", time="born")) == len(born)
        assert len(client.by_key("Odd", "k", begin=6, time="born")) == 2
        assert client.replay("Odd", "Again").sent == len(born)
    assert group.stop() == 0
    with StoreReader(group.store) as reader:
        assert reader.count("Odd", begin_ms=1) == reader.count("Odd", born_time=True) == len(born)
