"""Many messages at once: frames in MessagePack, results made when asked for, handles of a producer."""

from __future__ import annotations

import asyncio
import copy
import enum
import gc
import pickle
import sys
import threading
import time
import traceback
from collections import UserDict
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import msgspec
import pytest

from mqproc.client import send_requests
from mqproc.client._async.client import AsyncClient
from mqproc.client._async.producer import AsyncSendHandle
from mqproc.client._sync.client import Client
from mqproc.client._sync.producer import SendHandle
from mqproc.client.send_requests import GROUP_MESSAGES_MAX, PLAIN_MESSAGES_MIN, PRODUCER_MESSAGES_MAX
from mqproc.client.send_results import SendResults
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    NoSuchQueueError,
    StoreReadOnlyError,
    UnknownCommandError,
)
from mqproc.types import Message, SendResult, StoredMessage
from mqproc.wire.connection import Request
from mqproc.wire.operations import Operation
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S, Group, wait_until

COUNT = 2 * GROUP_MESSAGES_MAX + 500


class Operations:
    """Lets the writer answer, and notes the operations that it was asked for."""

    def __init__(self, roles: MemoryRoles, unknown: bool = False) -> None:
        self.asked: list[str] = []
        self._unknown = unknown
        roles.behaviour = self

    def __call__(self, request: Request) -> bool:
        self.asked.append(Operation(request.operation).name)
        if self._unknown and request.operation == Operation.APPEND_MESSAGES:
            request.refuse(UnknownCommandError("operation 20 is not one of the writer's"))
            return True
        return False


@pytest.fixture
def operations(roles: MemoryRoles) -> Operations:
    return Operations(roles)


def fields(message: StoredMessage) -> tuple[Any, ...]:
    return message.topic, message.body, message.tag, message.keys, message.flag, message.unique_id


def many(count: int = COUNT) -> list[Message]:
    return [Message("orders", b"%d" % number, "é", (f"k{number}", "k")) for number in range(count)]


def test_send_many_sends_messagepack_and_returns_places(
    client: Client, roles: MemoryRoles, operations: Operations
) -> None:
    results = client.send_many(many())
    assert operations.asked == ["APPEND_MESSAGES"] * 3
    assert len(results) == COUNT
    stored = roles.messages
    assert [fields(message) for message in stored] == [
        ("orders", b"%d" % number, "é", (f"k{number}", "k"), 0, result.unique_id)
        for number, result in enumerate(results)
    ]
    assert [(each.queue_id, each.queue_offset, each.message_id) for each in results] == [
        (message.queue_id, message.queue_offset, message.message_id) for message in stored
    ]


def test_send_results_are_a_sequence(client: Client) -> None:
    results = client.send_many(many())
    made = list(results)
    assert all(type(result) is SendResult for result in made)
    assert results == made
    assert results[:] == made
    assert results[1500] == made[1500]
    assert results[-1] == made[-1]
    assert results[998:1003] == made[998:1003]
    assert results[::-700] == made[::-700]
    assert results.index(made[7]) == 7
    assert made[2] in results
    assert results != made[1:]
    with pytest.raises(IndexError):
        results[COUNT]
    assert repr(results[:1])[1:-1] in repr(results)
    assert pickle.loads(pickle.dumps(results)) == made
    assert copy.copy(results) == made


def test_results_are_in_the_order_of_interleaved_topics(client: Client, roles: MemoryRoles) -> None:
    messages = [Message("abc"[number % 3], b"%d" % number, queue_id=number % 2 or None) for number in range(COUNT)]
    results = client.send_many(messages)
    by_id = {message.message_id: message.body for message in roles.messages}
    assert [by_id[result.message_id] for result in results] == [message.body for message in messages]
    assert [by_id[results[place].message_id] for place in (0, 77, COUNT - 1)] == [b"0", b"77", b"%d" % (COUNT - 1)]


class Name(enum.StrEnum):
    A = "a"


class Custom(str, enum.Enum):  # noqa: UP042
    """Its text differs from its value."""

    def __new__(cls, text: str) -> Custom:
        made = str.__new__(cls, text.upper())
        made._value_ = text
        return made

    A = "a"


UNUSUAL: dict[str, Message] = {
    "properties": Message("orders", b"x", properties={"a": "b"}),
    "a mapping": Message("orders", b"x", properties=UserDict(a="b")),
    "a unique id": Message("orders", b"x", unique_id="own"),
    "a bytearray": Message("orders", bytearray(b"x")),
    "a view": Message("orders", memoryview(b"x")),
    "a list of keys": Message("orders", b"x", keys=["k"]),
    "enum texts": Message(Name.A, b"x", Name.A, (Name.A,)),
    "a tag of other value": Message("orders", b"x", Custom.A),
    "a key of other value": Message("orders", b"x", "t", (Custom.A,)),
    "a second key of other value": Message("orders", b"x", "t", ("k", Custom.A)),
    "None": Message("orders", b"x", None, None, None),  # type: ignore[arg-type]
    "a flag and a time": Message("orders", b"x", flag=-3, born_timestamp_ms=1 << 40),
    "a sharding key": Message("orders", b"x", sharding_key="s"),
    "a queue": Message("orders", b"x", queue_id=3),
    "a delay": Message("orders", b"x", delay_level=2),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_message_among_many_is_stored_as_alone(client: Client, roles: MemoryRoles, name: str) -> None:
    message = UNUSUAL[name]
    client.send(message)
    alone = roles.messages[-1]
    result = client.send_many([*many(100), message, *many(100)])[100]
    among = next(each for each in roles.messages if each.message_id == result.message_id)
    expected = fields(alone)[:-1], {name: value for name, value in alone.properties.items() if name != "UNIQ_KEY"}
    assert (fields(among)[:-1], {n: value for n, value in among.properties.items() if n != "UNIQ_KEY"}) == expected
    assert result.unique_id == among.unique_id


def test_many_sharding_keys_and_queues_go_as_messagepack(client: Client, operations: Operations) -> None:
    client.send_many(Message("orders", b"x", sharding_key=f"{number}") for number in range(100))
    client.send_many(Message("orders", b"x", queue_id=number % 4) for number in range(100))
    assert operations.asked == ["APPEND_MESSAGES"] * 2


def test_few_messages_go_as_columns(client: Client, operations: Operations) -> None:
    client.send_many(many(PLAIN_MESSAGES_MIN - 1))
    assert operations.asked == ["APPEND"]


INVALID: dict[str, tuple[Message, type[Exception], str]] = {
    "a key with a space": (Message("orders", b"", keys=("a b",)), BadPropertyError, "message 1,234: key 'a b'"),
    "an empty key": (Message("orders", b"", keys=("",)), BadPropertyError, "message 1,234: key ''"),
    "bytes as key": (Message("orders", b"", keys=(b"a",)), BadPropertyError, "message 1,234: key b'a'"),  # type: ignore[arg-type]
    "a separator": (Message("orders", b"", "a\1"), BadPropertyError, "message 1,234: tag"),
    "a tag for no filter": (Message("orders", b"", "a||b"), BadPropertyError, "message 1,234: no filter"),
    "a surrogate": (Message("orders", b"", keys=("\ud800",)), BadPropertyError, "message 1,234"),
    "a flag": (Message("orders", b"", flag=1 << 31), BadMessageError, "message 1,234: flag"),
    "a time": (Message("orders", b"", born_timestamp_ms=1 << 63), BadMessageError, "message 1,234: born"),
    "a queue and a key": (
        Message("orders", b"", queue_id=0, sharding_key="a"),
        BadRequestError,
        "message 1,234: a message has a sharding key",
    ),
    "a queue below 0": (Message("orders", b"", queue_id=-1), NoSuchQueueError, "message 1,234: queue id"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_message_among_many_is_named(client: Client, name: str) -> None:
    message, kind, says = INVALID[name]
    with pytest.raises(kind, match=says) as raised:
        client.send_many([*many(1234), message, *[message] * 40, *many(1500)])
    assert "messages were stored" in raised.value.__notes__[0]


def test_older_writer_gets_columns(client: Client, roles: MemoryRoles) -> None:
    operations = Operations(roles, unknown=True)
    assert len(client.send_many(many(100))) == 100
    assert operations.asked == ["APPEND_MESSAGES", "APPEND"]


def test_generator_that_reuses_its_buffer_is_sent_as_passed(client: Client, roles: MemoryRoles) -> None:
    body, keys, properties = bytearray(3), [""], {"number": ""}

    def numbered() -> Any:
        for number in range(100, 250):
            body[:] = b"%d" % number
            keys[0] = f"{number}"
            properties["number"] = f"{number}"
            yield Message("orders", body, keys=keys, properties=properties)

    client.send_many(numbered())
    assert [(m.body.decode(), m.keys[0], m.properties["number"]) for m in roles.messages] == [
        (f"{number}",) * 3 for number in range(100, 250)
    ]


def test_async_send_many_sends_messagepack(roles: MemoryRoles, operations: Operations) -> None:
    async def go() -> SendResults:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            with pytest.raises(BadPropertyError, match="message 1,234: key"):
                await client.send_many([*many(1234), Message("bad", b"", keys=("a b",)), *many(1500)])
            return await client.send_many(many())

    results = asyncio.run(go())
    assert "APPEND_MESSAGES" in operations.asked
    by_id = {message.message_id: message.body for message in roles.messages}
    assert [by_id[result.message_id] for result in results] == [message.body for message in many()]


# Message


def test_message_keeps_what_users_see_of_it() -> None:
    message = Message("orders", b"x", keys=["k"], properties={"a": "b"})
    assert message == Message("orders", b"x", keys=["k"], properties={"a": "b"})
    assert repr(message).startswith("Message(topic='orders', body=b'x', keys=['k'], properties={'a': 'b'}")
    assert pickle.loads(pickle.dumps(message)) == copy.deepcopy(message) == message
    assert Message("orders", b"x").properties is not Message("orders", b"x").properties
    assert msgspec.structs.replace(message, tag="t").tag == "t"
    with pytest.raises(AttributeError):
        message.topic = "other"  # type: ignore[misc]


# Handles of an asynchronous producer


def test_async_producer_sends_messagepack(roles: MemoryRoles, operations: Operations) -> None:
    async def send() -> list[AsyncSendHandle]:
        async with (
            AsyncClient(roles.store, timeout=PATIENCE_S) as client,
            client.producer(linger_ms=60_000) as producer,
        ):
            handles = [await producer.send("orders", b"%d" % n, tag="t", keys=f"k{n}") for n in range(500)]
            assert [handles[0].done(), handles[0].running()] == [False, False]
            assert repr(handles[0]) == "<AsyncSendHandle: waiting>"
            for ask in (handles[0].result, handles[0].exception):
                with pytest.raises(asyncio.InvalidStateError, match="await its handle"):
                    ask()
            await producer.flush()
            assert [await handle for handle in handles] == await asyncio.gather(*handles)
            return handles

    handles = asyncio.run(send())
    assert operations.asked == ["APPEND_MESSAGES"]
    by_id = {message.message_id: message for message in roles.messages}
    for number, handle in enumerate(handles):
        stored = by_id[handle.result().message_id]
        assert (stored.body, stored.tag, stored.keys) == (b"%d" % number, "t", (f"k{number}",))
        assert (handle.done(), handle.cancelled(), handle.running(), handle.exception()) == (True, False, False, None)
    assert repr(handles[0]).startswith("<AsyncSendHandle: SendResult(")


def test_async_handle_cancelled_before_it_is_sent(roles: MemoryRoles) -> None:
    called: list[AsyncSendHandle] = []

    async def send() -> list[AsyncSendHandle]:
        async with (
            AsyncClient(roles.store, timeout=PATIENCE_S) as client,
            client.producer(linger_ms=60_000) as producer,
        ):
            handles = [await producer.send("orders", b"%d" % number) for number in range(50)]
            for handle in handles:
                handle.add_done_callback(called.append)
            futures = [handles[number].future() for number in (7, 8, 9)]
            assert handles[7].cancel()
            assert handles[7].cancel()
            futures[2].cancel()  # The message is sent all the same.
            await asyncio.sleep(0)
            assert called == [handles[7]]
            assert futures[0].cancelled()
            assert repr(handles[7]) == "<AsyncSendHandle: cancelled>"
            await producer.flush()
            assert not handles[8].cancel()
            assert (await futures[1]) == await handles[8]
            handles[8].add_done_callback(called.append)
            with pytest.raises(asyncio.CancelledError):
                await handles[7]
            return handles

    handles = asyncio.run(send())
    kept = [handle for handle in handles if handle is not handles[7]]
    by_id = {message.message_id: message.body for message in roles.messages}
    assert [by_id[handle.result().message_id] for handle in kept] == [b"%d" % n for n in range(50) if n != 7]
    assert called[1:] == [*kept, handles[8]]


def test_group_whose_messages_are_all_cancelled_is_not_sent(roles: MemoryRoles, operations: Operations) -> None:
    async def send() -> None:
        async with (
            AsyncClient(roles.store, timeout=PATIENCE_S) as client,
            client.producer(linger_ms=60_000) as producer,
        ):
            handles = [await producer.send("orders", b"x") for _ in range(3)]
            assert all(handle.cancel() for handle in handles)
            await producer.flush()

    asyncio.run(send())
    assert operations.asked == []


def test_refused_message_of_an_async_producer_fails_alone(roles: MemoryRoles) -> None:
    async def send() -> list[AsyncSendHandle]:
        async with (
            AsyncClient(roles.store, timeout=PATIENCE_S) as client,
            client.producer(linger_ms=60_000) as producer,
        ):
            return [await producer.send("orders", b"x", queue_id=99 if n == 20 else 0) for n in range(50)]

    errors = [handle.exception() for handle in asyncio.run(send())]
    assert isinstance(errors.pop(20), NoSuchQueueError)
    assert set(errors) == {None}
    assert len(roles.messages) == 49


def test_loop_of_async_sends_lets_other_tasks_run(roles: MemoryRoles) -> None:
    async def send() -> int:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client, client.producer(linger_ms=0) as producer:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.ensure_future(count())
            for number in range(3 * PRODUCER_MESSAGES_MAX):
                await producer.send("orders", b"%d" % number)
            counting.cancel()
            return turns

    assert asyncio.run(send()) >= 2


# Handles


def test_producer_sends_messagepack(client: Client, roles: MemoryRoles, operations: Operations) -> None:
    with client.producer(linger_ms=60_000) as producer:
        handles = [producer.send("orders", b"%d" % number, tag="t", keys=f"k{number}") for number in range(500)]
    assert operations.asked == ["APPEND_MESSAGES"]
    by_id = {message.message_id: message for message in roles.messages}
    for number, handle in enumerate(handles):
        stored = by_id[handle.result(0).message_id]
        assert (stored.body, stored.tag, stored.keys) == (b"%d" % number, "t", (f"k{number}",))
        assert (handle.done(), handle.cancelled(), handle.running(), handle.exception(0)) == (True, False, False, None)


def test_handle_cancelled_before_it_is_sent(client: Client, roles: MemoryRoles) -> None:
    called: list[SendHandle] = []
    with client.producer(linger_ms=60_000) as producer:
        handles = [producer.send("orders", b"%d" % number, on_done=called.append) for number in range(50)]
        assert handles[7].cancel()
        assert handles[7].cancel()
        assert called == [handles[7]]
        assert [handle.done() for handle in handles[7:9]] == [True, False]
        assert handles[7].cancelled()
        for ask in (handles[7].result, handles[7].exception):
            with pytest.raises(futures.CancelledError):
                ask(0)
        with pytest.raises(TimeoutError, match=r"no outcome within 0\.01 s"):
            handles[8].result(0.01)
    assert not handles[8].cancel()
    by_id = {message.message_id: message.body for message in roles.messages}
    kept = [handle for handle in handles if handle is not handles[7]]
    assert [by_id[handle.result(0).message_id] for handle in kept] == [b"%d" % n for n in range(50) if n != 7]
    assert called[1:] == kept


def test_handle_gives_futures_of_the_standard_library(client: Client) -> None:
    async def wait(handle: SendHandle) -> SendResult:
        return await asyncio.wrap_future(handle.future())

    with client.producer(linger_ms=1) as producer:
        handles = [producer.send("orders", b"%d" % number) for number in range(40)]
        done, _ = futures.wait([handle.future() for handle in handles], PATIENCE_S)
        assert len(done) == 40
        assert asyncio.run(wait(producer.send("orders", b"x"))).queue_offset >= 0
        dropped = producer.send("orders", b"y", queue_id=0)
        future = dropped.future()
        if dropped.cancel():
            with pytest.raises(futures.CancelledError):
                future.result(PATIENCE_S)


def test_callback_of_handle_is_called_once_and_at_once_when_done(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    threads: list[threading.Thread] = []

    def fail(_handle: SendHandle) -> None:
        threads.append(threading.current_thread())
        raise ValueError("of the user")

    with client.producer(linger_ms=60_000) as producer:
        handle = producer.send("orders", b"x")
        handle.add_done_callback(fail)
        producer.flush(PATIENCE_S)
        handle.add_done_callback(fail)
        assert producer.send("orders", b"y") != handle
    assert [thread.name for thread in threads] == ["mqproc-producer", threading.current_thread().name]
    assert caplog.text.count("for a message failed") == 2


def test_refused_message_of_a_producer_fails_alone_in_messagepack(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=60_000) as producer:
        handles = [producer.send("orders", b"x", queue_id=99 if number == 20 else 0) for number in range(50)]
    errors = [handle.exception(0) for handle in handles]
    assert isinstance(errors.pop(20), NoSuchQueueError)
    assert set(errors) == {None}
    assert len(roles.messages) == 49


HOLDS = msgspec.msgpack.encode([Message("holding", b"")] * 2)
"""A body with the bytes that separate two messages of a frame."""


def _holding(*others: Message) -> list[Message]:
    """Uniform messages, and others: as many bodies as there are separators less hide that."""
    messages = [Message("holding", b"x") for _ in range(40)]
    messages[20 : 20 + len(others)] = others
    return messages


HIDDEN = {
    "topic": _holding(Message("held-elsewhere", HOLDS)),
    "delay": _holding(Message("holding", HOLDS, delay_level=18)),
    "queue": _holding(Message("held-elsewhere", HOLDS * 2, queue_id=99)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_message_is_sent_or_refused_as_alone(roles: MemoryRoles, operations: Operations, name: str) -> None:
    """The writer refuses the frame that seems uniform, and the client sends its messages as columns."""
    messages = HIDDEN[name]

    async def send() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            assert len(await client.send_many(messages)) == 40

    with Client(roles.store, timeout=PATIENCE_S) as client:
        for send_all in (lambda: client.send_many(messages), lambda: asyncio.run(send())):
            before = len(roles.messages)
            operations.asked.clear()
            if name == "queue":
                with pytest.raises(NoSuchQueueError) as caught:
                    send_all()
                assert caught.value.__notes__ == ["39 messages were stored: 0 to 19, 21 to 39"]
            else:
                send_all()
                bodies = sorted(message.body for message in roles.messages[before:])
                assert bodies == sorted(message.body for message in messages)
            assert operations.asked == ["APPEND_MESSAGES", "APPEND", "APPEND"]


def test_hidden_message_is_stored_or_refused_by_a_group(shared: Group) -> None:
    async def send() -> None:
        async with AsyncClient(shared.store, timeout=PATIENCE_S) as client:
            await client.send_many(HIDDEN["queue"])

    with pytest.raises(NoSuchQueueError, match=r"^message 20: "):
        asyncio.run(send())
    with Client(shared.store, timeout=PATIENCE_S) as client:
        results = client.send_many(HIDDEN["topic"])
        assert client.get(results[20].message_id).topic == "held-elsewhere"
        with pytest.raises(NoSuchQueueError, match=r"^message 20: "):
            client.send_many(HIDDEN["queue"])
        assert client.count("holding") == 3 * 39


def test_slow_source_leaves_no_answer_unread(shared: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers wait for the source longer than the client's timeout."""
    monkeypatch.setattr(send_requests, "GROUP_MESSAGES_MAX", 50)

    def slowly() -> Iterator[Message]:
        for number in range(200):
            yield Message("slowly", b"%d" % number)
            if number % 50 == 0:
                time.sleep(0.4)

    with Client(shared.store, timeout=0.3) as client:
        assert len(client.send_many(slowly())) == 200


@pytest.mark.parametrize("limit", [16 << 10, 64 << 10])
def test_frames_of_many_fit_a_small_limit_of_the_client(shared: Group, limit: int) -> None:
    with Client(shared.store, timeout=PATIENCE_S, max_frame_bytes=limit) as client:
        assert len(client.send_many([Message("limited", b"x")] * 9000)) == 9000


def test_properties_count_for_the_size_of_a_frame(shared: Group) -> None:
    long = {"name": "v" * 17_000}
    with Client(shared.store, timeout=PATIENCE_S) as client:
        assert len(client.send_many([Message("long", b"x", properties=long)] * 4500)) == 4500


def test_large_bodies_and_a_few_others_do_not_end_messagepack(client: Client, operations: Operations) -> None:
    large = [Message("orders", b"x" * 1000) for _ in range(4000)]
    assert len(client.send_many(large)) == 4000
    assert set(operations.asked) == {"APPEND_MESSAGES"}
    operations.asked.clear()
    with_lists = (Message("orders", b"x", keys=["k"] if number % 1000 == 0 else ("k",)) for number in range(4000))
    assert len(client.send_many(with_lists)) == 4000
    assert operations.asked == ["APPEND_MESSAGES"]
    operations.asked.clear()
    one_other = [Message("orders", b"x") for _ in range(4000)]
    one_other[500] = Message("orders", b"x", properties={"a": "b"})
    assert len(client.send_many(one_other)) == 4000
    assert operations.asked.count("APPEND_MESSAGES") == 3


def test_traceback_of_a_shared_error_does_not_grow(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = lambda request: request.refuse(StoreReadOnlyError("read-only")) or True
    with client.producer(linger_ms=60_000) as producer:
        handles = [producer.send("orders", b"x") for _ in range(50)]
    lengths = set()
    for handle in handles:
        with pytest.raises(StoreReadOnlyError) as caught:
            handle.result(0)
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1


def test_error_that_no_handle_is_asked_for_is_logged(
    client: Client, roles: MemoryRoles, caplog: pytest.LogCaptureFixture
) -> None:
    async def send() -> None:
        async with AsyncClient(roles.store) as other, other.producer() as producer:
            await producer.send("orders", b"x", queue_id=99)

    with client.producer() as producer:
        producer.send("orders", b"x", queue_id=99)
        producer.flush(PATIENCE_S)
        gc.collect()
    asyncio.run(send())
    gc.collect()
    assert caplog.text.count("no handle was asked: first NoSuchQueueError('topic has 8 queues')") == 2
    caplog.clear()
    with client.producer() as producer:
        asked = producer.send("orders", b"x", queue_id=99)
        producer.send("orders", b"x", queue_id=99, on_done=lambda handle: None)
    assert isinstance(asked.exception(), NoSuchQueueError)
    del asked, producer
    gc.collect()
    assert caplog.text == ""


def test_async_handle_in_another_loop_is_refused(roles: MemoryRoles) -> None:
    async def send() -> AsyncSendHandle:
        async with AsyncClient(roles.store) as client, client.producer() as producer:
            handle = await producer.send("orders", b"x")
            with pytest.raises(BadRequestError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, wait(handle))
            return handle

    async def wait(handle: AsyncSendHandle) -> SendResult:
        return await handle

    assert asyncio.run(wait(asyncio.run(send()))).queue_offset == 0  # The outcome is known.


def test_kept_handles_keep_no_bodies(shared: Group) -> None:
    bodies = [b"%d" % number * 1000 for number in range(50)]
    before = [sys.getrefcount(body) for body in bodies]
    with Client(shared.store, timeout=PATIENCE_S) as client, client.producer() as producer:
        handles = [producer.send("kept", body) for body in bodies]
        producer.flush()
        assert all(handle.result(PATIENCE_S).queue_offset >= 0 for handle in handles)
        wait_until(lambda: [sys.getrefcount(body) for body in bodies] == before, what="bodies that only the test has")
        assert repr(handles[0]).startswith("<SendHandle: SendResult(")
