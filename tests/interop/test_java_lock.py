"""RocketMQ's DefaultMessageStore fails to start on a running store and does no harm.

It loads a store before it takes the lock. By then it has deleted the newest index file and the segments after the log's
end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqproc import Message
from tests.interop import java_stores
from tests.interop.java_stores import Sent
from tests.interop.rocketmq import SIZES, RocketMq, rocketmq_options
from tests.support.group import Group

# The first test waits for the build.
pytestmark = pytest.mark.timeout(1000)


@pytest.fixture
def intruded(rocketmq: RocketMq, make_group: Callable[..., Group]) -> tuple[Group, dict[int, Sent]]:
    """A running group after RocketMQ tried to start on its store, and the acknowledged messages."""
    group = make_group("held", **SIZES)
    store = java_stores.SharedStore("held", group)
    with group.client() as client:
        for number in range(200):
            message = Message("held", b"before %d" % number, keys=[f"before-{number}"], queue_id=number % 4)
            store.note(message, client.send(message))
    group.wait_dispatched()
    opened = rocketmq.ask("open", group.store, options=rocketmq_options(SIZES))
    assert not opened["started"]
    assert not opened["loaded"] or "Lock failed" in opened["error"]
    return group, store.sent


def test_rocketmq_start_on_running_store_fails(intruded: tuple[Group, dict[int, Sent]]) -> None:
    """Acknowledged messages are readable, now and after a restart."""
    group, sent = intruded
    assert _as_sent(group, sent) == sent
    group.stop()
    group.start()
    assert _as_sent(group, sent) == sent


def _as_sent(group: Group, sent: dict[int, Sent]) -> dict[int, Sent]:
    with group.client() as client:
        return {
            found.physical_offset: Sent(
                found.topic, found.queue_id, found.queue_offset, found.body, found.tag, found.keys
            )
            for found in client.range("held")
            if found.physical_offset in sent
        }


def test_keys_are_indexed_after_rocketmqs_attempt(intruded: tuple[Group, dict[int, Sent]]) -> None:
    group, _ = intruded
    with group.client() as client:
        result = client.send("held", b"after", keys="after")
        group.wait_dispatched()
        assert [message.physical_offset for message in client.by_key("held", "after")] == [result.physical_offset]
