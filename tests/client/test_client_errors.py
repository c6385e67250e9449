"""The synchronous client when answers are late, lost or refused: retries and errors.

Against roles that keep their messages in memory, over real sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from mqproc.client import requests
from mqproc.client._async.client import AsyncClient
from mqproc.client._sync.client import Client
from mqproc.client.batch import Batch
from mqproc.client.retry import NO_RETRY, RESTART_MS, RetryPolicy
from mqproc.client.send_requests import GROUP_MESSAGES_MAX
from mqproc.errors import (
    BadRequestError,
    FrameTooLargeError,
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
    UnknownCommandError,
)
from mqproc.types import Message
from mqproc.wire.address import SOCKET_PATH_BYTES_MAX
from mqproc.wire.connection import Request, ServerConnection
from mqproc.wire.operations import Operation
from mqproc.wire.server import ServerLimits
from tests.client.memory_roles import MemoryRoles, first
from tests.support.group import PATIENCE_S, assert_below, wait_until

# Retries


def test_send_without_group_raises_not_running_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    expected = r"writer\.sock.*mqproc up starts one"
    with Client(tmp_path, timeout=60) as client, pytest.raises(NotRunningError, match=expected):
        client.send("orders", b"x")
    assert time.monotonic() - start < 30


def test_retryable_refusal_is_retried(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(3, lambda request: request.refuse(StoreBusyError("busy", hint_ms=20)))
    start = time.monotonic()
    client.send("orders", b"x")
    assert time.monotonic() - start >= 0.06, "the hints were not waited for"
    assert len(roles.messages) == 1


def test_a_refusal_for_now_lasts_until_the_timeout(roles: MemoryRoles) -> None:
    # Asked at 0, 1 and 3 s: the next answer would have less time than the pause before it.
    patient = RetryPolicy(base_ms=1000, max_ms=4000, jitter=0)
    roles.behaviour = first(10_000, lambda request: request.refuse(RetryLaterError("restarting")))
    with Client(roles.store, timeout=10.0, retry=patient) as client:
        began = time.monotonic()
        with pytest.raises(RetryLaterError):
            client.send("orders", b"x")
        assert 3 <= time.monotonic() - began < 10
    roles.behaviour = first(1, lambda request: request.refuse(RetryLaterError("restarting")))
    with Client(roles.store, retry=NO_RETRY) as client, pytest.raises(RetryLaterError):
        client.send("orders", b"x")


def test_a_request_that_found_its_connection_gone_may_come_back_later(roles: MemoryRoles) -> None:
    """The request was not carried out; without retry the client reports the loss."""
    with Client(roles.store, retry=NO_RETRY) as client:
        client.send("orders", b"a")
        roles.stop()
        with pytest.raises(RetryLaterError, match="restarted") as failed:
            client.send("orders", b"b")
        assert (failed.value.retryable, failed.value.hint_ms) == (True, RESTART_MS)
        with pytest.raises(NotRunningError):
            client.send("orders", b"c")
        roles.start()
        client.send("orders", b"d")
        assert [message.body for message in roles.messages] == [b"a", b"d"]


def test_other_refusals_are_not_retried(client: Client, roles: MemoryRoles) -> None:
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


def test_send_with_lost_answer_is_repeated_by_policy(roles: MemoryRoles) -> None:
    """The repeated frame has the same unique ids; at the timeout the outcome stays unknown."""
    with Client(roles.store, timeout=PATIENCE_S, retry=RetryPolicy(repeat_sends=True)) as client:
        client.send("orders", b"before")
        roles.behaviour = first(2, lambda request: request.connection.close())
        assert client.send("orders", b"x").physical_offset > 0
        assert [message.body for message in roles.messages] == [b"before", b"x"]
        client.send("orders", b"after")
        client.timeout_s = 1.0
        roles.behaviour = lambda request: request.connection.close() or True
        with pytest.raises(SendOutcomeUnknownError):
            client.send("orders", b"y")


def test_read_with_lost_answer_is_repeated(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"x")
    roles.behaviour = first(2, lambda request: request.connection.close(), Operation.COUNT)
    assert client.count("orders") == 1


def test_a_connection_lost_while_idle_is_made_anew(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"a")
    roles.stop()
    roles.start()
    client.send("orders", b"b")
    assert [message.body for message in roles.messages] == [b"a", b"b"]


def test_client_waits_for_group_restart(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"a")
    roles.stop()
    timer = threading.Timer(0.3, roles.start)
    timer.start()
    client.send("orders", b"b")
    assert client.count("orders") == 2
    timer.join()


def test_client_without_group_restart_raises_at_timeout(roles: MemoryRoles) -> None:
    with Client(roles.store, timeout=PATIENCE_S) as client:
        client.send("orders", b"a")
        client.timeout_s = 1.0
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
    with Client(roles.store, timeout=1.0) as client:
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
    with MemoryRoles(tmp_path, ServerLimits(frame_bytes=1 << 20)) as roles, Client(roles.store) as client:
        with pytest.raises(FrameTooLargeError, match="1,048,576"):
            client.send("orders", bytes(3 << 20))
        client.send("orders", b"x")


@pytest.mark.parametrize(("refusal", "connections"), [(FrameTooLargeError, 2), (UnknownCommandError, 1)])
def test_connection_with_refused_stream_is_not_reused(
    client: Client, roles: MemoryRoles, refusal: type[ProtocolError], connections: int
) -> None:
    seen: list[ServerConnection] = []
    refuse = first(1, lambda request: request.refuse(refusal("not this")), Operation.COUNT)

    def behave(request: Request) -> bool:
        seen.append(request.connection)
        return refuse(request)

    client.send("orders", b"x")
    roles.behaviour = behave
    with pytest.raises(refusal):
        client.count("orders")
    client.count("orders")
    assert len(set(map(id, seen))) == connections


def test_a_wrong_filter_is_refused_when_the_consumer_is_made(client: Client) -> None:
    for filter, expected in ((5, "filter is a int"), ("||", "names no tag")):
        with pytest.raises(BadRequestError, match=expected):
            client.consumer("billing", "orders", filter=filter)  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match=expected):
            client.simple_consumer("billing", "orders", filter=filter)  # type: ignore[arg-type]


def test_full_server_is_retried(tmp_path: Path) -> None:
    # Asked at 0, 1 and 3 s: the next time would be too late, and none is under way when the timeout is over.
    patient = RetryPolicy(base_ms=1000, max_ms=4000, jitter=0)
    with MemoryRoles(tmp_path, ServerLimits(connections=1)) as roles:
        with Client(roles.store) as only, Client(roles.store, timeout=10.0, retry=patient) as other:
            only.send("orders", b"x")
            began = time.monotonic()
            with pytest.raises(TooManyConnectionsError):
                other.send("orders", b"y")
            assert time.monotonic() - began >= 3
        with Client(roles.store) as later:
            later.send("orders", b"z")
    assert [message.body for message in roles.messages] == [b"x", b"z"]


def test_call_without_free_descriptor_is_retried(client: Client, roles: MemoryRoles) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with Client(roles.store, timeout=0.3) as other, pytest.raises(StoreBusyError, match="Too many open files"):
            other.send("t", b"x")
        back = threading.Timer(0.2, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
        back.start()
        assert client.send("t", b"y")
        back.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [message.body for message in roles.messages] == [b"y"]


def test_long_path_without_descriptor_is_busy_until_one_is_free(tmp_path: Path) -> None:
    """The connection's own descriptor is the last: none is left for the folder."""
    store = tmp_path / ("d" * SOCKET_PATH_BYTES_MAX)
    store.mkdir()
    with MemoryRoles(store) as roles, Client(store, timeout=0.3) as client:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        try:
            with pytest.raises(StoreBusyError, match="Too many open files"):
                client.send("t", b"x")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert client.send("t", b"y")
        assert [message.body for message in roles.messages] == [b"y"]


def test_another_users_client_is_turned_away(client: Client, roles: MemoryRoles) -> None:
    for server in roles.servers:
        server._acceptor._allowed_uids = set()
    with pytest.raises(PermissionDeniedError):
        client.send("orders", b"x")


# Several at once


def test_pipeline_continues_after_refusals(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(2, lambda request: request.refuse(StoreBusyError("busy", hint_ms=1)))
    batches = [Batch("orders", [b"%d" % index], queue_id=0) for index in range(20)]
    results = list(client.send_batches(batches, in_flight=5))
    assert sorted(int(result.queue_offsets[0]) for result in results) == list(range(20))


def test_pipeline_pauses_once_for_many_refused_calls(client: Client, roles: MemoryRoles) -> None:
    rounds = itertools.count()

    def took_s() -> float:
        roles.behaviour = first(12, lambda request: request.refuse(StoreBusyError("busy", hint_ms=500)))
        topic = f"orders-{next(rounds)}"
        batches = [Batch(topic, [b"%d" % index], queue_id=0) for index in range(20)]
        start = time.monotonic()
        results = list(client.send_batches(batches, in_flight=12))
        took_s = time.monotonic() - start
        assert took_s >= 0.5, "the hint was not waited for"
        assert sorted(int(result.queue_offsets[0]) for result in results) == list(range(20))
        return took_s

    assert_below(4, took_s)  # Where each waits for itself it is 6 s.


def test_pipeline_reports_whether_oldest_call_is_answered(client: Client, roles: MemoryRoles) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def when_told(request: Request) -> bool:
        asked.set()
        may_answer.wait(PATIENCE_S)
        return False

    roles.behaviour = when_told
    pipeline = client.pipeline()
    pipeline.start(requests.ping(requests.WRITER))
    assert asked.wait(PATIENCE_S)
    began_s = time.monotonic()
    assert not pipeline.answered_by(began_s + 0.02)
    assert time.monotonic() >= began_s + 0.02
    may_answer.set()
    assert pipeline.answered_by(time.monotonic() + PATIENCE_S)
    pipeline.finish()
    pipeline.close()


def test_pipeline_lost_connection_raises_outcome_unknown(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(1, lambda request: request.connection.close())
    batches = [Batch("orders", [b"%d" % index], queue_id=0) for index in range(20)]
    with pytest.raises(SendOutcomeUnknownError):
        list(client.send_batches(batches, in_flight=5))
    client.send("orders", b"after")


def test_send_many_error_notes_number_of_stored_messages(client: Client, roles: MemoryRoles) -> None:
    messages = [Message("orders", b"x") for _ in range(1500)] + [Message("bad", b"x", queue_id=99)]
    with pytest.raises(NoSuchQueueError) as caught:
        client.send_many(messages)
    assert caught.value.__notes__ == ["1,500 messages were stored: 0 to 1,499"]
    assert len(roles.messages) == 1500


def messages_and_then(error: BaseException | None, reached: threading.Event) -> Iterator[Any]:
    """Two frames of messages, one message that waits for others, then an error or no message."""
    yield from (Message("orders", b"%d" % number) for number in range(2 * GROUP_MESSAGES_MAX + 1))
    reached.set()
    if error is not None:
        raise error
    yield "no message"


@pytest.mark.parametrize("error", [ValueError("the caller's own"), None])
def test_send_many_finishes_frames_in_flight_after_an_error(
    client: Client, roles: MemoryRoles, error: Exception | None
) -> None:
    in_frames = 2 * GROUP_MESSAGES_MAX
    no_message = f"item {in_frames + 1:,} is no Message"
    expected, says = (BadRequestError, no_message) if error is None else (ValueError, "caller's own")
    reached = threading.Event()
    roles.behaviour = lambda request: not reached.wait(PATIENCE_S)  # The first answer comes after the error.
    with pytest.raises(expected, match=says) as caught:
        client.send_many(messages_and_then(error, reached))
    assert caught.value.__notes__ == [f"{in_frames:,} messages were stored: 0 to {in_frames - 1:,}"]

    async def go() -> None:
        reached.clear()
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as other:
            with pytest.raises(expected, match=says) as caught:
                await other.send_many(messages_and_then(error and type(error)(*error.args), reached))
            assert caught.value.__notes__ == [f"{in_frames:,} messages were stored: 0 to {in_frames - 1:,}"]

    asyncio.run(go())
    assert len(roles.messages) == 2 * in_frames


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


@pytest.mark.parametrize(
    "wrong",
    [{"base_ms": None}, {"max_ms": "250"}, {"base_ms": -1}, {"jitter": 1.5}, {"enabled": 0}, {"repeat_sends": "no"}],
)
def test_retry_policy_invalid_raises_bad_request(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=f"^{next(iter(wrong))} = "):
        RetryPolicy(**wrong)
    for kind in (Client, AsyncClient):
        with pytest.raises(BadRequestError, match=r"^retry = 3 is no RetryPolicy"):
            kind(tmp_path, retry=3)
    assert RetryPolicy(base_ms=Decimal(7), jitter=0).pause_s(0) == 0.007


def test_retry_pauses_leave_random_generator_alone() -> None:
    before = random.getstate()
    RetryPolicy().pause_s(1)
    assert random.getstate() == before
