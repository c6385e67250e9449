"""The synchronous client against roles in memory, over real sockets."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mqproc.arrow.columns import USER_COLUMNS
from mqproc.client._sync.client import Client
from mqproc.client.batch import Batch
from mqproc.errors import (
    BadRequestError,
    BadTopicError,
    ConfigurationError,
    FilterSyntaxError,
    MessageNotFoundError,
    MessageTooLargeError,
    NoSuchQueueError,
    TopicNotFoundError,
)
from mqproc.types import Message, PullStatus
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S, wait_until


def test_sent_message_is_found_by_all_reads(client: Client) -> None:
    before_ms = time.time_ns() // 1_000_000
    result = client.send("orders", b"hello", tag="new", keys=("k1", "k2"), properties={"colour": "red"}, flag=5)
    after_ms = time.time_ns() // 1_000_000
    assert (result.queue_offset, result.physical_offset) == (0, 0)
    for message in (
        client.get(result.message_id),
        client.get(result.unique_id, "orders"),
        *client.by_key("orders", "k2"),
        *client.by_key("orders", result.unique_id, unique=True),
        *client.pull("orders", result.queue_id, 0).messages,
    ):
        assert (message.topic, message.body, message.tag, message.flag) == ("orders", b"hello", "new", 5)
        assert message.keys == ("k1", "k2")
        assert message.properties["colour"] == "red"
        assert message.unique_id == result.unique_id
        assert message.message_id == result.message_id
        assert before_ms <= message.born_timestamp_ms <= after_ms


def test_a_message_object_and_a_chosen_queue(client: Client) -> None:
    result = client.send(Message("orders", b"x", queue_id=3, born_timestamp_ms=5))
    assert result.queue_id == 3
    assert client.get(result.message_id).born_timestamp_ms == 5


def test_many_messages_of_many_topics_keep_their_order(client: Client, roles: MemoryRoles) -> None:
    messages = [
        Message(f"t{index % 3}", b"%d" % index, queue_id=index % 2 if index % 5 else None) for index in range(2500)
    ]
    results = client.send_many(iter(messages))
    assert [client.get(result.message_id).body for result in results[::100]] == [
        message.body for message in messages[::100]
    ]
    assert len({result.physical_offset for result in results}) == 2500
    assert roles.frames < 20
    assert client.send_many([]) == []


def test_a_batch_of_columns(client: Client, roles: MemoryRoles) -> None:
    bodies = [b"%d" % index for index in range(1000)]
    result = client.send_batch("orders", bodies, keys=[f"k{index}" for index in range(1000)], tags="t", queue_id=2)
    assert len(result) == 1000
    assert roles.frames == 1
    assert np.array_equal(result.queue_offsets, np.arange(1000))
    assert set(result.queue_ids.tolist()) == {2}
    assert client.by_key("orders", "k77")[0].physical_offset == result.physical_offsets[77]
    assert len(client.send_batch("orders", [])) == 0


def test_batches_are_pipelined_in_order(client: Client, roles: MemoryRoles) -> None:
    batches = (Batch("orders", [b"%d" % (10 * part + index) for index in range(10)], queue_id=0) for part in range(50))
    results = list(client.send_batches(batches, in_flight=8))
    assert [result.queue_offsets[0] for result in results] == list(range(0, 500, 10))
    assert [message.body for message in client.pull("orders", 0, 0).messages] == [b"%d" % index for index in range(500)]


def test_send_batch_beyond_a_frame_returns_one_result(roles: MemoryRoles) -> None:
    with Client(roles.store, max_frame_bytes=200_000) as client:
        result = client.send_batch("orders", pa.array([bytes(30_000)] * 10), queue_id=0)
    assert roles.frames > 1
    assert np.array_equal(result.queue_offsets, np.arange(10))


def test_a_frame_of_40_mib(client: Client) -> None:
    bodies = [os.urandom(4 << 20) for _ in range(10)]
    result = client.send_batch("orders", bodies, queue_id=0)
    assert client.pull("orders", 0, 0, 5).messages[4].body == bodies[4]
    assert len(result) == 10


def test_a_oneway_message_arrives(client: Client, roles: MemoryRoles) -> None:
    client.send_oneway("orders", b"x")
    client.ping()
    assert [message.body for message in roles.messages] == [b"x"]
    assert client.send("orders", b"y").physical_offset > 0


def test_pulls_have_rocketmqs_statuses(client: Client) -> None:
    client.send_batch("orders", [b"a", b"b", b"c"], tags=["x", "y", "x"], queue_id=1)
    result = client.pull("orders", 1, 0, tags="x || z")
    assert result.status is PullStatus.FOUND
    assert [message.body for message in result.messages] == [b"a", b"c"]
    assert (result.next_offset, result.min_offset, result.max_offset) == (3, 0, 3)
    assert client.pull("orders", 1, 0, tags="z").status is PullStatus.NO_MATCHED_MESSAGE
    assert client.pull("orders", 1, 3).status is PullStatus.OFFSET_OVERFLOW_ONE
    assert client.pull("nothing", 0, 0).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
    with pytest.raises(FilterSyntaxError):
        client.pull("orders", 1, 0, tags="||")


def test_a_long_poll_waits_for_a_message_and_no_longer(client: Client) -> None:
    client.create_topic("orders", 1)
    start = time.monotonic()
    assert client.pull("orders", 0, 0, timeout=0.1).status is PullStatus.OFFSET_OVERFLOW_ONE
    assert time.monotonic() - start >= 0.1
    timer = threading.Timer(0.1, lambda: client.send("orders", b"x", queue_id=0))
    timer.start()
    result = client.pull("orders", 0, 0, timeout=60)
    assert [message.body for message in result.messages] == [b"x"]
    assert time.monotonic() - start < 30
    timer.join()


def test_a_long_poll_may_last_longer_than_the_clients_timeout(client: Client, roles: MemoryRoles) -> None:
    client.create_topic("orders", 1)
    with Client(roles.store, timeout=0.5) as hasty, ThreadPoolExecutor(1) as pool:
        poll = pool.submit(hasty.pull, "orders", 0, 0, timeout=PATIENCE_S)
        wait_until(lambda: roles.held_pulls == 1, what="the poll is held")
        held_s = time.monotonic()
        wait_until(lambda: time.monotonic() > held_s + 1.0, what="more than the client's timeout")
        client.send("orders", b"x", queue_id=0)
        assert [message.body for message in poll.result().messages] == [b"x"]


def test_pull_arrow_replaces_invalid_utf8_as_messages_do(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"x", tag="tag-1", keys=["key-1", "é"], queue_id=0)
    client.send("orders", b"y", tag="tag-2", keys="plain", queue_id=0)
    record = roles.records[0]
    assert record.count(b"tag-1") == record.count(b"key-1") == 1
    roles.records[0] = record.replace(b"tag-1", b"t\xff\xc3-1").replace(b"key-1", b"\xed\xa0\x80-1")
    objects = client.pull("orders", 0, 0).messages
    batch = client.pull_arrow("orders", 0, 0).batch
    batch.validate(full=True)
    assert objects[0].tag == "t\ufffd\ufffd-1"
    assert batch.column("tag").to_pylist() == [message.tag for message in objects]
    assert batch.column("keys").to_pylist() == [list(message.keys) for message in objects]


def test_arrow_is_an_extra(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mqproc.client.arrow", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"^pyarrow is not installed: pip install 'mqproc\[arrow\]'$"):
        client.pull_arrow("orders", 0, 0)


def test_a_pull_as_arrow(client: Client) -> None:
    client.send_batch("orders", [b"a", b"bb"], keys=["k1", "k2"], tags="t", queue_id=0)
    result = client.pull_arrow("orders", 0, 0)
    assert (result.status, len(result), result.next_offset) == (PullStatus.FOUND, 2, 2)
    assert tuple(result.batch.schema.names) == USER_COLUMNS
    objects = client.pull("orders", 0, 0).messages
    batch = client.pull_arrow("orders", 0, 0, columns="all").batch
    for name in ("physical_offset", "queue_offset", "body", "tag", "born_host", "body_crc", "message_id"):
        assert batch.column(name).to_pylist() == [getattr(message, name) for message in objects]
    batch.validate(full=True)
    assert client.pull_arrow("orders", 0, 0, columns=["body"]).batch.schema.names == ["body"]
    assert len(client.pull_arrow("orders", 0, 0, columns=[])) == 2
    assert len(client.pull_arrow("orders", 0, 99)) == len(client.pull_arrow("orders", 0, 99, columns=[])) == 0
    with pytest.raises(BadRequestError, match="no column is called 'colour'"):
        client.pull_arrow("orders", 0, 0, columns=["colour"])
    with pytest.raises(BadRequestError, match=r"columns = \['tag', 'body', 'tag'\] has a name more than once"):
        client.pull_arrow("orders", 0, 0, columns=["tag", "body", "tag"])


def test_ranges_counts_and_scans(client: Client) -> None:
    times = [1000 * index for index in range(250)]
    bodies = [b"%d" % index for index in range(250)]
    client.send_batch("orders", bodies, tags=["a", "b"] * 125, born_timestamps_ms=times)
    client.send("others", b"7", properties={"colour": "red"})
    found = list(client.range("orders", 10_000, 20_000, time="born", page_messages=3))
    assert [message.born_timestamp_ms for message in found] == times[10:20]
    assert client.count("orders", 10_000, 20_000, time="born", tags="a") == 5
    assert client.count("orders") == sum(1 for _ in client.range("orders", page_messages=100)) == 250
    moment = datetime.datetime.fromtimestamp(15, datetime.UTC)
    found = list(client.range("orders", moment, 17_000, time="born"))
    assert [message.born_timestamp_ms for message in found] == [15_000, 16_000]
    assert [message.topic for message in client.scan(properties={"colour": "red"})] == ["others"]
    assert len(list(client.scan("orders", body_contains=b"7", page_messages=4))) == 43
    hour = datetime.timedelta(hours=1)
    now = datetime.datetime.now()
    assert len(client.by_key("orders", "none", now - hour, now + hour)) == 0


def test_bad_questions_are_not_asked(client: Client) -> None:
    for question in (
        lambda: client.by_key("orders", ""),
        lambda: client.by_key("orders", "k", 5, 4),
        lambda: list(client.range("orders", 5, 4)),
        lambda: client.count("orders", time="sent"),  # type: ignore[arg-type]
        lambda: list(client.scan(properties={"a": "b", "c": "d"})),
        lambda: client.send("orders"),
        lambda: client.send(Message("orders", b"x"), b"y"),
    ):
        with pytest.raises(BadRequestError):
            question()
    with pytest.raises(BadTopicError):
        client.create_topic("a/b")


@pytest.mark.parametrize(
    "part",
    [
        *({"tag": "a"}, {"keys": "a"}, {"keys": np.array(["a", "b"])}, {"properties": {"a": "b"}}, {"flag": 1}),
        *({"queue_id": 0}, {"born_timestamp_ms": 0}, {"sharding_key": "a"}),
    ],
)
def test_send_message_with_parts_raises_bad_request(client: Client, part: dict[str, Any]) -> None:
    message = Message("orders", b"x")
    for send in (client.send, client.send_oneway, client.producer().send):
        with pytest.raises(BadRequestError, match="give a Message, or a topic and its parts, not both"):
            send(message, **part)
    for wait in ({"delay": 0}, {"deliver_at": 0}, {"delay_level": 1}):
        with pytest.raises(BadRequestError, match="not both"):
            client.send(message, **wait)  # type: ignore[arg-type]
    assert client.send(message, tag="", keys=(), properties={}).queue_offset == 0


@pytest.mark.parametrize(
    "part",
    [
        *({"born_timestamp_ms": time.time() * 1000}, {"born_timestamp_ms": "5"}, {"born_timestamp_ms": True}),
        *({"flag": True}, {"flag": np.timedelta64("NaT", "s")}, {"queue_id": True}),
    ],
)
def test_send_oneway_invalid_number_raises_bad_message(client: Client, part: dict[str, Any]) -> None:
    """Refused before sending: these requests have no answer that could report it."""
    for send in (client.send_oneway, client.producer().send):
        with pytest.raises(BadRequestError, match=f"^{next(iter(part))} = .* is no whole number"):
            send("orders", b"x", **part)
    client.send_oneway("orders", b"x", born_timestamp_ms=np.int64(5), flag=np.int64(0))
    client.send("orders", b"next")
    assert next(client.range("orders")).born_timestamp_ms == 5


@pytest.mark.parametrize("part", [{"flag": False}, {"flag": 0.0}, {"delay_level": False}, {"deliver_at_ms": None}])
def test_send_oneway_value_equal_to_zero_is_refused(client: Client, part: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=f"^{next(iter(part))} "):
        client.send_oneway(Message("orders", b"x", **part))


def test_topics_and_queues(client: Client) -> None:
    client.create_topic("orders", 3)
    client.send("orders", b"x", queue_id=2)
    (info,) = client.topics()
    assert (info.topic, info.queues, info.message_count) == ("orders", 3, 1)
    assert [queue.max_offset for queue in client.queues("orders")] == [0, 0, 1]
    assert client.queues() == client.queues("orders")
    assert (client.min_offset("orders", 2), client.max_offset("orders", 2)) == (0, 1)
    assert client.offset_at("orders", 2, time.time() * 1000 + 60_000) == 1
    with pytest.raises(NoSuchQueueError):
        client.max_offset("orders", 3)
    with pytest.raises(TopicNotFoundError):
        client.max_offset("nothing", 0)
    client.delete_topic("orders")
    assert client.topics() == []
    with pytest.raises(TopicNotFoundError):
        client.delete_topic("orders")


def test_state(client: Client) -> None:
    client.send("orders", b"x", keys="k")
    assert client.stats()["written"] > 0
    health = client.health()
    assert (health.ready, health.read_only, health.problems) == (False, True, ("dispatcher does not run",))
    result = client.query_message("orders", "k")
    assert (result.physical_offsets, len(result.messages)) == ((0,), 1)
    assert result.index_last_update_timestamp_ms == 5


def test_refusals_are_the_servers_errors(client: Client) -> None:
    with pytest.raises(MessageTooLargeError, match="exceeds"):
        client.send("orders", bytes(5 << 20))
    with pytest.raises(NoSuchQueueError, match="8 queues"):
        client.send("orders", b"x", queue_id=9)
    with pytest.raises(MessageNotFoundError):
        client.get("00" * 16)


def test_a_socket_names_the_store_too(roles: MemoryRoles) -> None:
    with Client(roles.store / "mqproc" / "writer.sock") as client:
        client.send("orders", b"x")
        assert client.count("orders") == 1
