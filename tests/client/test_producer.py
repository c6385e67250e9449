"""Batching producers: messages share frames, every future is set, memory is bounded."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import numpy as np
import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client._async.producer import AsyncProducer
from mqproc.client._sync import producer as producer_module
from mqproc.client._sync.client import Client
from mqproc.client._sync.producer import Producer, SendHandle
from mqproc.client.send_requests import Batcher, Limits, ProducerGroup, text_bytes
from mqproc.errors import (
    BadPropertyError,
    BadRequestError,
    MessageTooLargeError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StoreBusyError,
)
from mqproc.types import Message, SendResult
from mqproc.wire.connection import Request
from tests.client.memory_roles import MemoryRoles, first
from tests.support.group import PATIENCE_S, no_thread_starts, wait_until


class Waiting(Batcher[ProducerGroup]):
    """Groups at a time that the test sets. `given` has the numbers of each group's messages."""

    def __init__(self, **limits: float) -> None:
        values = {"linger_s": 1.0, "messages": 3, "bytes": 100_000, "in_flight": 1, "buffered_bytes": 10_000} | limits
        super().__init__(Limits(**values), ProducerGroup, lambda: self.now)  # type: ignore[arg-type]
        self.now = 0.0
        self.given: dict[ProducerGroup, list[int]] = {}

    def give(self, message: Message, number: int, now: float) -> bool:
        self.now = now
        group, wake = self.add(message, text_bytes(message))
        self.given.setdefault(group, []).append(number)
        return wake


def test_a_group_goes_when_it_is_full_or_old() -> None:
    waiting = Waiting()
    assert waiting.take(0.0) is None
    assert waiting.wait_s(0.0) is None
    assert waiting.give(Message("a", b"1"), 1, 0.0), "a new group sets the time to wake up"
    assert not waiting.give(Message("a", b"2"), 2, 0.5)
    assert waiting.take(0.9) is None
    assert waiting.wait_s(0.9) == pytest.approx(0.1)
    group = waiting.take(1.0)
    assert group is not None
    assert waiting.given[group] == [1, 2]
    for number in range(3):
        full = waiting.give(Message("a", b"x"), number, 2.0)
    assert full
    assert waiting.wait_s(2.0) == 0.0
    assert waiting.take(2.0) is not None
    assert waiting.empty


def test_topics_and_chosen_queues_do_not_mix() -> None:
    waiting = Waiting()
    for number, message in enumerate((Message("a", b""), Message("b", b""), Message("a", b"", queue_id=1))):
        waiting.give(message, number, float(number))
    taken = [waiting.take(9.0), waiting.take(9.0), waiting.take(9.0)]
    assert [waiting.given[group] for group in taken if group] == [[0], [1], [2]]


def test_room_is_counted_until_a_group_is_done() -> None:
    waiting = Waiting(buffered_bytes=3000)
    assert waiting.has_room(5000), "a message larger than all room may come alone"
    waiting.give(Message("a", bytes(5000)), 1, 0.0)
    assert not waiting.has_room(1)
    group = waiting.take(0.0, everything=True)
    assert group is not None
    assert not waiting.has_room(1)
    waiting.done(group)
    assert waiting.buffered_bytes == 0


@pytest.mark.parametrize("picture", [np.zeros((2, 500_000), np.uint8), array("d", bytes(1_000_000))])
def test_an_array_counts_for_its_bytes_and_not_for_its_rows(client: Client, roles: MemoryRoles, picture: Any) -> None:
    """Frames stay within the limit of bytes, whatever the bodies are."""
    assert len(client.send_many([Message("pictures", picture)] * 40)) == 40
    frames = roles.frames
    assert frames >= 20
    with client.producer(linger_ms=60_000) as producer:
        futures = [producer.send("pictures", body) for body in (*[picture] * 4, np.array(7), PickleBuffer(b"x"))]
    assert roles.frames == frames + 3
    bodies = [client.get(future.result(0).message_id).body for future in futures[4:]]
    assert bodies == [np.array(7).tobytes(), b"x"]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), None, "5"])
def test_limits_must_make_sense(client: Client, value: Any) -> None:
    names = ("max_batch_messages", "max_batch_bytes", "max_in_flight", "max_buffered_bytes")
    for name in ("linger_ms", *names):
        for made in (client, AsyncClient(client.store)):
            with pytest.raises(BadRequestError, match=f"^{name} = {value!r} is out of range"):
                made.producer(**{name: value})


def test_messages_go_together(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=60_000, max_batch_messages=1000) as producer:
        futures = [producer.send("orders", b"%d" % index, keys=f"k{index}") for index in range(2500)]
    results = [future.result(0) for future in futures]
    assert roles.frames == 3
    assert client.get(results[1234].message_id).body == b"1234"
    assert client.by_key("orders", "k7")[0].unique_id == results[7].unique_id


def test_a_message_does_not_linger_for_long(client: Client) -> None:
    with client.producer(linger_ms=20) as producer:
        start = time.monotonic()
        producer.send("orders", b"x").result(30)
        assert time.monotonic() - start >= 0.02


def test_flush_sends_at_once(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=60_000) as producer:
        done = []
        future = producer.send("orders", b"x", on_done=done.append)
        producer.flush(math.inf)
        assert done == [future]
        assert len(roles.messages) == 1
        roles.behaviour = lambda request: True
        producer.send("orders", b"y")
        with pytest.raises(RequestTimeoutError):
            producer.flush(0.05)
        roles.behaviour = lambda request: False
        with pytest.raises(RequestTimeoutError):
            producer.close(0.05)
        roles.stop()
        roles.start()


def test_threads_share_a_producer(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=2, max_batch_messages=50) as producer:

        def work(number: int) -> None:
            futures = [producer.send("orders", b"%d" % number) for _ in range(500)]
            assert [future.result(PATIENCE_S).queue_offset for future in futures]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(roles.messages) == 2000


def test_producer_invalid_message_fails_alone(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=50) as producer:
        with pytest.raises(BadPropertyError):
            producer.send("orders", b"x", keys="a b")
        good = producer.send("orders", b"good")
        bad = producer.send("orders", bytes(5 << 20))
        other = producer.send("orders", b"good")
    assert isinstance(bad.exception(0), MessageTooLargeError)
    assert {good.result(0).message_id, other.result(0).message_id} == {message.message_id for message in roles.messages}


@pytest.mark.parametrize("wrong", [{"tag": "\ud800"}, {"tag": "\ud800", "queue_id": 0}])
def test_producer_continues_after_an_encoding_error(client: Client, roles: MemoryRoles, wrong: dict[str, Any]) -> None:
    queue = {"queue_id": 0} if "queue_id" in wrong else {}  # Messages of one frame.
    with client.producer(linger_ms=60_000) as producer:
        good = producer.send("orders", b"good", **queue)
        bad = producer.send("orders", b"bad", **wrong)
        producer.flush(PATIENCE_S)
        other = producer.send("orders", b"other", **queue)
    assert isinstance(bad.exception(0), BadRequestError)
    assert good.result(0).queue_offset >= 0
    assert other.result(0).queue_offset >= 0
    assert [message.body for message in roles.messages] == [b"good", b"other"]


def test_producer_retries_refusals_and_reports_losses(client: Client, roles: MemoryRoles) -> None:
    roles.behaviour = first(2, lambda request: request.refuse(StoreBusyError("busy", hint_ms=1)))
    with client.producer(linger_ms=1) as producer:
        producer.send("orders", b"x").result(PATIENCE_S)
        roles.behaviour = first(1, lambda request: request.connection.close())
        assert isinstance(producer.send("orders", b"y").exception(PATIENCE_S), SendOutcomeUnknownError)
        producer.send("orders", b"z").result(PATIENCE_S)
    assert [message.body for message in roles.messages] == [b"x", b"z"]


def test_memory_is_bounded(client: Client, roles: MemoryRoles) -> None:
    taken: list[int] = []

    def take(request: Request) -> bool:
        taken.append(len(request.payload))
        return True

    roles.behaviour = take
    producer = client.producer(linger_ms=60_000, max_batch_messages=2, max_buffered_bytes=10_000)
    futures = [producer.send("orders", bytes(4000)) for _ in range(2)]
    # Messages that the writer has not taken would be sent again after its restart.
    wait_until(lambda: sum(taken) >= 8000, what="both with the writer")
    with pytest.raises(StoreBusyError):
        producer.send("orders", bytes(4000), timeout=0.05)
    roles.stop()
    roles.behaviour = lambda request: False
    roles.start()
    for future in futures:
        assert isinstance(future.exception(PATIENCE_S), SendOutcomeUnknownError)
    stored = producer.send("orders", bytes(4000), timeout=PATIENCE_S)
    producer.close(PATIENCE_S)
    assert stored.result(0).queue_offset >= 0
    with pytest.raises(BadRequestError, match="closed"):
        producer.send("orders", b"")


def test_a_cancelled_message_is_not_sent(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=60_000) as producer:
        kept, dropped = producer.send("orders", b"kept"), producer.send("orders", b"dropped")
        assert dropped.cancel()
    assert kept.result(0).queue_offset == 0
    assert [message.body for message in roles.messages] == [b"kept"]


def send_in_child(producer: Producer, results: Any) -> None:
    future = producer.send("orders", b"child")
    producer.flush(PATIENCE_S)
    results.send(future.result(0).queue_offset)
    producer.close(PATIENCE_S)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_producer_in_forked_process_sends_its_own_messages(client: Client, roles: MemoryRoles) -> None:
    producer = client.producer(linger_ms=60_000, max_batch_messages=2)
    producer.send("orders", b"parent")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with producer._changed:  # As if another thread had been about to send.
        child = multiprocessing.get_context("fork").Process(target=send_in_child, args=(producer, theirs))
        child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    assert ours.recv() == 0
    assert [message.body for message in roles.messages] == [b"child"]
    producer.close(PATIENCE_S)
    assert [message.body for message in roles.messages] == [b"child", b"parent"]


def send_without_close(store: Path) -> None:
    Client(store, timeout=PATIENCE_S).producer(linger_ms=60_000).send("orders", b"child")


def test_producer_flushed_at_program_end_is_not_flushed_again(
    client: Client, roles: MemoryRoles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "EXIT_FLUSH_S", 0.01)
    roles.behaviour = lambda request: True
    producer = client.producer()
    producer.send("t", b"x")
    with pytest.raises(RequestTimeoutError, match="not everything was sent"):
        producer_module.flush_all([producer], 0.01)
    with pytest.warns(UserWarning, match="1 messages of a producer were not sent"):
        producer_module.close_all()
    producer_module.flush_all([producer], 0.01)
    roles.stop()  # The thread ends with its connection.


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_producer_sends_rest_at_end_of_multiprocessing_child(roles: MemoryRoles, start: Any) -> None:
    child = multiprocessing.get_context(start).Process(target=send_without_close, args=(roles.store,))
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    assert [message.body for message in roles.messages] == [b"child"]


def end_without_close(store: Path, wait_s: float) -> subprocess.CompletedProcess[str]:
    script = (
        "import mqproc, sys\n"
        "from mqproc.client._sync import producer\n"
        "producer.EXIT_FLUSH_S = float(sys.argv[2])\n"
        "sender = mqproc.Client(sys.argv[1]).producer(linger_ms=60_000)\n"
        "for number in range(100): sender.send('orders', b'%d' % number)\n"
    )
    arguments = [sys.executable, "-c", script, str(store), str(wait_s)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True)


def test_producer_sends_rest_at_program_end(roles: MemoryRoles) -> None:
    assert end_without_close(roles.store, PATIENCE_S).stderr == ""
    assert len(roles.messages) == 100


def test_producer_warns_of_unsent_messages_at_program_end(roles: MemoryRoles) -> None:
    told = "100 messages of a producer were not sent"
    roles.behaviour = lambda request: True
    assert told in end_without_close(roles.store, 0.05).stderr, "the store does not answer in time"
    roles.stop()
    assert told in end_without_close(roles.store, PATIENCE_S).stderr, "no store runs"
    roles.start()


def test_producer_program_end_ignores_reported_failures(roles: MemoryRoles) -> None:
    script = (
        "import mqproc, sys\n"
        "sender = mqproc.Client(sys.argv[1], timeout=0.2).producer()\n"
        "future = sender.send('orders', b'x')\n"
        "sender.close()\n"
        "print(future.exception())\n"
    )
    roles.behaviour = lambda request: True
    arguments = [sys.executable, "-c", script, str(roles.store)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True)
    assert "may be carried out yet" in done.stdout
    assert done.stderr == ""


def test_producer_without_thread_raises_and_recovers(client: Client, roles: MemoryRoles) -> None:
    """As Python 3.12 sees it, also at the program's end."""
    with client.producer(linger_ms=0) as producer, client.producer(linger_ms=0) as late:
        with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread"):
            producer.send("orders", b"1")
        with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread"):
            late.send("orders", b"2")
        producer.flush(0)
        assert producer.send("orders", b"3").result(PATIENCE_S)
    assert [message.body for message in roles.messages] == [b"3"]


def test_producer_callback_may_send_when_buffer_is_full(client: Client) -> None:
    """The room is made by the thread that calls it."""
    again: list[SendHandle] = []
    with client.producer(linger_ms=0, max_buffered_bytes=1000) as producer:
        first = producer.send(
            "orders", bytes(900), on_done=lambda _: again.extend(producer.send("orders", bytes(900)) for _ in range(3))
        )
        assert first.result(PATIENCE_S)
        producer.flush(PATIENCE_S)
        assert len([future.result(0) for future in again]) == 3


@pytest.mark.parametrize("call", ["flush", "close"])
def test_a_callback_cannot_wait_for_its_own_thread(client: Client, call: str) -> None:
    told: list[str] = []

    def wait(_handle: SendHandle) -> None:
        with pytest.raises(BadRequestError, match=f"on_done cannot {call}") as raised:
            getattr(producer, call)()
        told.append(str(raised.value))

    with client.producer(linger_ms=0) as producer:
        producer.send("orders", b"x", on_done=wait)
        producer.flush(PATIENCE_S)
        assert producer.send("orders", b"y").result(PATIENCE_S)
    assert len(told) == 1


def test_cancelled_close_of_async_producer_continues(roles: MemoryRoles) -> None:
    held = threading.Event()

    def hold(request: Request) -> bool:
        held.wait(PATIENCE_S)
        return False

    async def go() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            producer = client.producer(linger_ms=0, max_in_flight=1, max_batch_messages=1)
            futures = [await producer.send("orders", b"%d" % number) for number in range(3)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await producer.close()
            held.set()
            await producer.close()
            assert all(future.done() for future in futures)

    roles.behaviour = hold
    asyncio.run(go())
    assert [message.body for message in roles.messages] == [b"0", b"1", b"2"]


def test_the_async_producer(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            async with client.producer(linger_ms=20, max_buffered_bytes=400_000) as producer:
                futures = [await producer.send("orders", b"%d" % index) for index in range(1500)]
                bad = await producer.send("orders", bytes(5 << 20))
                good = await producer.send("orders", b"good")
                await producer.flush()
                assert all(future.done() for future in futures)
                assert isinstance(bad.exception(), MessageTooLargeError)
                assert (await good).queue_offset >= 0
                roles.behaviour = first(1, lambda request: request.connection.close())
                lost = await producer.send("orders", b"lost")
            assert isinstance(lost.exception(), SendOutcomeUnknownError)
            with pytest.raises(BadRequestError, match="closed"):
                await producer.send("orders", b"")
            assert await client.count("orders") == 1501

    asyncio.run(go())
    assert roles.frames < 20


def test_async_producer_of_one_loop_warns_of_unsent_messages(roles: MemoryRoles) -> None:
    async def make() -> AsyncProducer:
        client = AsyncClient(roles.store, timeout=PATIENCE_S)
        producer = client.producer(linger_ms=60_000)
        await producer.send("orders", b"x")
        return producer

    async def go_on(producer: AsyncProducer) -> None:
        for call in (producer.send("orders", b"y"), producer.flush(), producer.close()):
            with pytest.raises(BadRequestError, match="another event loop"):
                await call

    with pytest.warns(UserWarning, match="1 messages of a producer were not sent"):
        producer = asyncio.run(make())
    asyncio.run(go_on(producer))


def test_async_producer_sets_any_error_on_its_futures(roles: MemoryRoles, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(call: object) -> list[SendResult]:
        raise OSError("as of the system")

    async def go() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client, client.producer(linger_ms=0) as producer:
            with monkeypatch.context() as changed:
                changed.setattr(client, "run", fail)
                lost = await producer.send("orders", b"x")
                with pytest.raises(OSError, match="as of the system"):
                    await asyncio.wait_for(lost, PATIENCE_S)
            assert await (await producer.send("orders", b"y"))

    asyncio.run(go())
    assert [message.body for message in roles.messages] == [b"y"]
