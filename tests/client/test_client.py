"""The synchronous client against roles that keep their messages in memory, over real sockets.

What a call gives; what is tried again and what is not when answers are late, lost or refused.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mqproc.client.encoding import Batch
from mqproc.client.retry import NO_RETRY, RetryPolicy
from mqproc.client.sync import Client
from mqproc.errors import (
    BadRequestError,
    BadTopicError,
    FilterSyntaxError,
    FrameTooLargeError,
    MessageNotFoundError,
    MessageTooLargeError,
    NoSuchQueueError,
    NotRunningError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
    StoreBusyError,
    StoreReadOnlyError,
    TooManyConnectionsError,
    TopicNotFoundError,
)
from mqproc.message import Message, PullStatus
from mqproc.wire.connection import Request
from mqproc.wire.operations import Operation
from mqproc.wire.server import Limits
from tests.client.memory_roles import MemoryRoles
from tests.conftest import wait_until

APPENDS = int(Operation.APPEND)


def first(count: int, act: Callable[[Request], None], operation: int = APPENDS) -> Callable[[Request], bool]:
    """A behaviour for the first `count` requests of an operation."""
    left = [count]

    def behave(request: Request) -> bool:
        if request.operation != operation or left[0] == 0:
            return False
        left[0] -= 1
        act(request)
        return True

    return behave


# What calls give


def test_a_message_is_sent_and_found_again(client: Client) -> None:
    result = client.send("orders", b"hello", tag="new", keys=("k1", "k2"), properties={"colour": "red"}, flag=5)
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
        assert abs(message.born_timestamp_ms - time.time() * 1000) < 5000


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


def test_a_batch_beyond_a_frame_comes_back_as_one_result(roles: MemoryRoles) -> None:
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


def test_a_long_poll_may_last_longer_than_the_clients_timeout(roles: MemoryRoles) -> None:
    with Client(roles.store, timeout=0.2) as client:
        client.create_topic("orders", 1)
        assert client.pull("orders", 0, 0, timeout=0.5).status is PullStatus.OFFSET_OVERFLOW_ONE


def test_a_pull_as_arrow(client: Client) -> None:
    client.send_batch("orders", [b"a", b"bb"], keys=["k1", "k2"], tags="t", queue_id=0)
    result = client.pull_arrow("orders", 0, 0)
    assert (result.status, len(result), result.next_offset) == (PullStatus.FOUND, 2, 2)
    objects = client.pull("orders", 0, 0).messages
    for name in ("physical_offset", "queue_offset", "body", "tag", "store_timestamp_ms", "born_host", "body_crc"):
        assert result.batch.column(name).to_pylist() == [getattr(message, name) for message in objects]
    result.batch.validate(full=True)
    assert client.pull_arrow("orders", 0, 0, columns=["body"]).batch.schema.names == ["body"]
    assert len(client.pull_arrow("orders", 0, 99)) == 0
    with pytest.raises(BadRequestError, match="no column is called 'colour'"):
        client.pull_arrow("orders", 0, 0, columns=["colour"])


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


# What is tried again


def test_nothing_running_is_told_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with Client(tmp_path, timeout=60) as client, pytest.raises(NotRunningError, match=r"writer\.sock"):
        client.send("orders", b"x")
    assert time.monotonic() - start < 30


def test_a_refusal_for_now_is_tried_again(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(3, lambda request: request.refuse(StoreBusyError("busy", hint_ms=20)))
    start = time.monotonic()
    client.send("orders", b"x")
    assert time.monotonic() - start >= 0.06, "the hints were not waited for"
    assert len(roles.messages) == 1


def test_a_refusal_for_now_lasts_until_the_timeout(roles: MemoryRoles) -> None:
    roles.behaviour = first(10_000, lambda request: request.refuse(RetryLaterError("restarting")))
    with Client(roles.store, timeout=0.3) as client, pytest.raises(RetryLaterError):
        client.send("orders", b"x")
    roles.behaviour = first(1, lambda request: request.refuse(RetryLaterError("restarting")))
    with Client(roles.store, retry=NO_RETRY) as client, pytest.raises(RetryLaterError):
        client.send("orders", b"x")


def test_other_refusals_are_not_tried_again(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(1, lambda request: request.refuse(StoreReadOnlyError("sync failed")))
    with pytest.raises(StoreReadOnlyError):
        client.send("orders", b"x")
    assert roles.frames == 0


def test_a_lost_answer_to_a_send_is_an_unknown_outcome(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"before")
    roles.behaviour = first(1, lambda request: request.connection.close())
    with pytest.raises(SendOutcomeUnknownError):
        client.send("orders", b"x")
    assert client.send("orders", b"after").physical_offset > 0
    assert [message.body for message in roles.messages] == [b"before", b"after"]


def test_a_lost_answer_to_a_send_is_sent_again_when_repeats_are_dropped(roles: MemoryRoles) -> None:
    """The same frame with the same unique ids; when the time is over it is still not known what became of it."""
    with Client(roles.store, timeout=5.0, retry=RetryPolicy(repeat_sends=True)) as client:
        client.send("orders", b"before")
        roles.behaviour = first(2, lambda request: request.connection.close())
        assert client.send("orders", b"x").physical_offset > 0
        assert [message.body for message in roles.messages] == [b"before", b"x"]
    with Client(roles.store, timeout=0.3, retry=RetryPolicy(repeat_sends=True)) as client:
        client.send("orders", b"after")
        roles.behaviour = lambda request: request.connection.close() or True
        with pytest.raises(SendOutcomeUnknownError):
            client.send("orders", b"y")


def test_a_lost_answer_to_a_read_is_asked_for_again(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"x")
    roles.behaviour = first(2, lambda request: request.connection.close(), Operation.COUNT)
    assert client.count("orders") == 1


def test_a_connection_lost_while_idle_is_made_anew(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"a")
    roles.stop()
    roles.start()
    client.send("orders", b"b")
    assert [message.body for message in roles.messages] == [b"a", b"b"]


def test_a_client_waits_for_a_group_that_starts_again(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"a")
    roles.stop()
    timer = threading.Timer(0.3, roles.start)
    timer.start()
    client.send("orders", b"b")
    assert client.count("orders") == 2
    timer.join()


def test_a_group_that_stays_away_is_told_at_the_timeout(roles: MemoryRoles) -> None:
    with Client(roles.store, timeout=0.3) as client:
        client.send("orders", b"a")
        roles.stop()
        with pytest.raises(NotRunningError):
            client.send("orders", b"b")
        with pytest.raises(NotRunningError):
            client.count("orders")


def test_no_answer_in_time(roles: MemoryRoles) -> None:
    roles.behaviour = lambda request: True
    with Client(roles.store, timeout=0.1) as client:
        with pytest.raises(RequestTimeoutError):
            client.count("orders")
        with pytest.raises(SendOutcomeUnknownError):
            client.send("orders", b"x")


def test_a_late_answer_is_not_taken_for_the_next(roles: MemoryRoles) -> None:
    held: list[Request] = []
    roles.behaviour = first(1, held.append, Operation.COUNT)
    with Client(roles.store, timeout=0.2) as client:
        client.send("orders", b"x")
        with pytest.raises(RequestTimeoutError):
            client.count("orders")
        held[0].connection.answer(held[0].request_id, Operation.COUNT, b"\x91\x63")
        assert client.count("orders") == 1


def test_an_answer_that_cannot_be_read_is_a_protocol_error(client: Client, roles: MemoryRoles) -> None:
    for answer in (b"\xc1", b"\x91\xa1x", b"\x90"):
        roles.behaviour = first(1, lambda request, answer=answer: request.answer(answer), Operation.COUNT)
        with pytest.raises(ProtocolError):
            client.count("orders")
    roles.behaviour = first(1, lambda request: request.answer(b"\x92\x01\xc4\x00", [b"abc"]))
    with pytest.raises(ProtocolError):
        client.send("orders", b"x")


def test_a_frame_larger_than_the_server_takes_is_refused(tmp_path: Path) -> None:
    with MemoryRoles(tmp_path, Limits(frame_bytes=1 << 20)) as roles, Client(roles.store, timeout=5) as client:
        with pytest.raises(FrameTooLargeError, match="1,048,576"):
            client.send("orders", bytes(3 << 20))
        client.send("orders", b"x")


def test_a_full_server_is_asked_again(tmp_path: Path) -> None:
    with MemoryRoles(tmp_path, Limits(connections=1)) as roles:
        with Client(roles.store) as only, Client(roles.store, timeout=0.2) as other:
            only.send("orders", b"x")
            with pytest.raises(TooManyConnectionsError):
                other.send("orders", b"y")
        with Client(roles.store, timeout=5) as later:
            later.send("orders", b"z")
    assert [message.body for message in roles.messages] == [b"x", b"z"]


def test_another_users_client_is_turned_away(client: Client, roles: MemoryRoles) -> None:
    for server in roles.servers:
        server._allowed_uids = set()
    with pytest.raises(PermissionDeniedError):
        client.send("orders", b"x")


# Several at once


def test_a_pipeline_goes_on_over_refusals(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(2, lambda request: request.refuse(StoreBusyError("busy", hint_ms=1)))
    batches = [Batch("orders", [b"%d" % index], queue_id=0) for index in range(20)]
    results = list(client.send_batches(batches, in_flight=5))
    assert sorted(int(result.queue_offsets[0]) for result in results) == list(range(20))


def test_a_pipeline_over_a_lost_connection_tells_what_is_unknown(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(1, lambda request: request.connection.close())
    batches = [Batch("orders", [b"%d" % index], queue_id=0) for index in range(20)]
    with pytest.raises(SendOutcomeUnknownError):
        list(client.send_batches(batches, in_flight=5))
    client.send("orders", b"after")


def test_send_many_tells_how_many_were_stored(client: Client, roles: MemoryRoles) -> None:
    messages = [Message("orders", b"x") for _ in range(1500)] + [Message("bad", b"x", queue_id=99)]
    with pytest.raises(NoSuchQueueError) as caught:
        client.send_many(messages)
    assert caught.value.__notes__ == ["1,500 messages were stored"]
    assert len(roles.messages) == 1500


def test_threads_share_a_client(client: Client, roles: MemoryRoles) -> None:
    def work(number: int) -> None:
        for index in range(50):
            result = client.send("orders", b"%d-%d" % (number, index))
            assert client.get(result.message_id).body == b"%d-%d" % (number, index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(roles.messages) == 300
    assert all(len(server.connections) <= 6 for server in roles.servers)


def test_a_long_poll_does_not_keep_others_waiting(client: Client, roles: MemoryRoles) -> None:
    client.create_topic("orders", 1)
    poll = threading.Thread(target=lambda: client.pull("orders", 0, 0, timeout=60))
    poll.start()
    wait_until(lambda: roles.held_pulls == 1, what="the poll is held")
    client.topics()
    assert roles.held_pulls == 1
    client.send("orders", b"x", queue_id=0)
    poll.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_connections_of_its_own(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"parent")
    pid = os.fork()
    if pid == 0:
        try:
            client.send("orders", b"child")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    client.send("orders", b"parent")
    assert [message.body for message in roles.messages] == [b"parent", b"child", b"parent"]


def test_the_pauses_grow_and_keep_to_hints() -> None:
    policy = RetryPolicy(base_ms=1, max_ms=100, jitter=0.5)
    for attempt in range(40):
        longest = min(100.0, 2.0**attempt) / 1000
        assert longest / 2 <= policy.pause_s(attempt) <= longest
    assert policy.pause_s(0, hint_ms=500) == 0.5
