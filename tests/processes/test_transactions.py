"""Transactions of a real group: delivery, rollback, and checks."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from mqproc import (
    AsyncClient,
    BadPropertyError,
    BadRequestError,
    Client,
    Message,
    OpenTransaction,
    TransactionEndedError,
    TransactionNotFoundError,
    TransactionOverdueError,
    TransactionResolution,
)
from mqproc.client import transaction_requests as transaction_calls
from mqproc.client.transaction_requests import Handle
from mqproc.layout.control import QUERY
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import decode_op_body
from mqproc.topic_names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from mqproc.types import StoredMessage
from tests.client.test_shared_clients import FORKS, in_fork
from tests.support.group import (
    FAST,
    GROUP,
    PATIENCE_S,
    Group,
    assert_below,
    bodies,
    handle_of,
    messages_of,
    open_ids,
    open_transaction,
    wait_all_ended,
    wait_until,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group with RocketMQ's default times for all tests that kill nothing."""
    group = Group(tmp_path_factory.mktemp("transactions") / "store").start()
    yield group
    group.close()


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group with early and frequent checks that never discards a transaction."""
    group = Group(tmp_path_factory.mktemp("checks") / "store", **FAST, transaction_check_max=10_000).start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def test_transaction_block_commits_or_rolls_back_on_exception(client: Client) -> None:
    client.create_topic("Block", 4)
    with client.transaction(GROUP, Message("Block", b"paid", tag="new", keys=["k"], properties={"a": "b"})) as kept:
        assert bodies(client, "Block") == []
        assert kept.transaction_id in open_ids(client)
    with pytest.raises(ZeroDivisionError), client.transaction(GROUP, Message("Block", b"never")) as lost:
        raise ZeroDivisionError
    assert (kept.resolution, lost.resolution) == (TransactionResolution.COMMIT, TransactionResolution.ROLLBACK)
    (message,) = messages_of(client, "Block")
    assert (message.body, message.tag, message.keys, message.properties["a"]) == (b"paid", "new", ("k",), "b")
    assert message.unique_id == kept.transaction_id
    assert not {kept.transaction_id, lost.transaction_id} & open_ids(client)
    # All kinds of reads find it.
    assert [each.body for each in client.by_key("Block", "k")] == [b"paid"]


def test_transaction_records_equal_rocketmq(client: Client) -> None:
    client.create_topic("Records", 3)
    with client.transaction(GROUP, Message("Records", b"body", tag="t", queue_id=2, flag=7)) as transaction:
        half = client.get(transaction.sent.message_id)
    (message,) = messages_of(client, "Records")
    own = {"PGROUP": GROUP, "TRAN_MSG": "true", "__transactionId__": transaction.transaction_id}
    own |= {"UNIQ_KEY": transaction.transaction_id, "TAGS": "t", "REAL_TOPIC": "Records", "REAL_QID": "2"}
    assert (half.topic, half.queue_id, half.sys_flag, half.flag) == (HALF_TOPIC, 0, 0, 7)
    assert dict(half.properties) == own
    assert (message.queue_id, message.sys_flag, message.flag, dict(message.properties)) == (2, 8, 7, own)
    assert message.prepared_transaction_offset == mark_of(half.physical_offset)
    assert message.born_timestamp_ms == half.born_timestamp_ms
    mark = wait_until(lambda: [each for each in messages_of(client, OP_HALF_TOPIC) if _names(each, half)], what="mark")
    assert (mark[0].queue_id, mark[0].tag, mark[0].body[-1:]) == (0, "d", b",")


def _names(mark: StoredMessage, half: StoredMessage) -> bool:
    return str(half.queue_offset).encode() in mark.body.split(b",")


def test_transaction_ends_once(client: Client) -> None:
    client.create_topic("Once", 1)
    with client.transaction(GROUP, Message("Once", b"1")) as kept:
        kept.commit()
        kept.commit()
        with pytest.raises(TransactionEndedError, match="COMMIT already"):
            kept.rollback()
    handle = handle_of(kept, topic="Once")
    client.run(transaction_calls.end(handle, commit=True))
    with pytest.raises(TransactionEndedError, match="was committed already"):
        client.run(transaction_calls.end(handle, commit=False))
    lost = client.transaction(GROUP, Message("Once", b"2")).begin()
    lost.rollback()
    client.run(transaction_calls.end(handle_of(lost, topic="Once"), commit=False))
    with pytest.raises(TransactionEndedError, match="rolled back or discarded already"):
        client.run(transaction_calls.end(handle_of(lost, topic="Once"), commit=True))
    assert bodies(client, "Once") == [b"1"]


def test_transaction_of_another_group_cannot_be_ended(client: Client) -> None:
    sent = client.send("Other", b"plain")
    transaction = client.transaction(GROUP, Message("Other", b"half")).begin()
    right = handle_of(transaction, topic="Other")
    wrong: list[tuple[Handle, type[Exception], str]] = [
        (handle_of(transaction, topic="Other", group="others"), BadRequestError, "to producer group 'billing'"),
        (handle_of(transaction, topic="Else"), TransactionNotFoundError, "of Other"),
        (handle_of(transaction, topic="Other", transaction_id="no"), TransactionNotFoundError, "not no"),
        (Handle(GROUP, "Other", "x", sent.physical_offset), TransactionNotFoundError, "no half message lies"),
        (Handle(GROUP, "Other", "x", 1 << 40), TransactionNotFoundError, "no half message lies"),
        (Handle(GROUP, "Other", "x", -1), TransactionNotFoundError, "no half message lies"),
    ]
    for handle, error, text in wrong:
        for commit in (True, False):
            with pytest.raises(error, match=text):
                client.run(transaction_calls.end(handle, commit=commit))
    client.run(transaction_calls.end(right, commit=False))
    assert bodies(client, "Other") == [b"plain"]


def test_transaction_invalid_half_message_is_refused(client: Client) -> None:
    refused: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: client.transaction("", Message("t", b"")), BadRequestError),
        (lambda: client.transaction("a b", Message("t", b"")), BadRequestError),
        (lambda: client.transaction(GROUP, Message("t", b"", delay_level=1)), BadRequestError),
        (lambda: client.transaction(GROUP, Message("t", b"", deliver_at_ms=1)), BadRequestError),
        (lambda: client.transaction(GROUP, Message("t", b"", properties={"PGROUP": "x"})), BadPropertyError),
        (lambda: client.transaction(GROUP, Message("t", b""), check_immunity_time=0), BadRequestError),
        (lambda: client.transaction(GROUP, Message("t", b"")).commit(), BadRequestError),
    ]
    for call, error in refused:
        with pytest.raises(error):
            call()


def test_transaction_late_end_is_left_to_the_check(client: Client) -> None:
    """A transaction with a check time belongs to its producer until then.

    This one is 65 s old and has 60 s.
    """
    client.create_topic("Late", 1)
    born_ms = time.time_ns() // 1_000_000 - 65_000
    message = Message("Late", b"late", born_timestamp_ms=born_ms)
    transaction = client.transaction(GROUP, message, check_immunity_time=60).begin()
    for end in (transaction.commit, transaction.rollback):
        with pytest.raises(TransactionOverdueError, match="after 60,000 ms its check decides") as caught:
            end()
        assert caught.value.code == "ILLEGAL_OPERATION"
    handle = handle_of(transaction, topic="Late")
    client.run(transaction_calls.end(handle, commit=True, from_check=True))
    assert bodies(client, "Late") == [b"late"]
    # Without a check time an end is never too late.
    client.transaction(GROUP, Message("Late", b"later", born_timestamp_ms=born_ms)).begin().commit()
    assert bodies(client, "Late") == [b"late", b"later"]


def test_transactions_end_in_many_threads(client: Client) -> None:
    client.create_topic("Many", 4)

    def program(number: int) -> None:
        for step in range(20):
            body = b"%d-%d" % (number, step)
            transaction = client.transaction(GROUP, Message("Many", body)).begin()
            (transaction.rollback if step % 4 == 3 else transaction.commit)()

    threads = [threading.Thread(target=program, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bodies(client, "Many") == sorted(b"%d-%d" % (n, s) for n in range(8) for s in range(20) if s % 4 != 3)


def test_op_messages_of_4096_bytes_are_written_within_50_ms(client: Client) -> None:
    """RocketMQ collects 4,096 bytes before a write; mqproc's are dispatched soon after each end."""
    client.create_topic("Marked", 1)
    with client.transaction(GROUP, Message("Marked", b"the first mark makes the topic")):
        pass
    wait_until(lambda: client.queues(OP_HALF_TOPIC))

    def late_ms() -> float:
        (queue,) = client.queues(OP_HALF_TOPIC)
        begin = queue.max_offset
        opened = [client.transaction(GROUP, Message("Marked", b"")).begin() for _ in range(1024)]
        offsets = {each.sent.queue_offset for each in opened}
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda transaction: transaction.commit(), opened))
        begin_ns = time.monotonic_ns()
        wait_until(lambda: marked_from(client, begin) >= offsets, 20, "all are marked")
        took_ms = (time.monotonic_ns() - begin_ns) / 1e6
        assert sum(len(mark.body) for mark in client.pull(OP_HALF_TOPIC, 0, begin, 4096).messages) >= 4096
        return took_ms

    assert_below(50, late_ms)


def marked_from(client: Client, offset: int) -> set[int]:
    """Half messages marked as done by op messages from a queue offset on."""
    marks = client.pull(OP_HALF_TOPIC, 0, offset, 4096).messages
    return {half for mark in marks for half in decode_op_body(mark.body)}


def test_open_transactions_are_listed_and_decided_by_operators(client: Client) -> None:
    client.create_topic("Seen", 1)
    first, second, third = (client.transaction("seen", Message("Seen", b"%d" % number)).begin() for number in range(3))
    client.wait_dispatched()
    found = wait_until(lambda: len(client.transactions.open("seen")) == 3 and client.transactions.open("seen"))
    assert [each.transaction_id for each in found] == [each.transaction_id for each in (first, second, third)]
    one = found[0]
    assert isinstance(one, OpenTransaction)
    assert (one.group, one.topic, one.checks, one.message_id) == ("seen", "Seen", 0, first.sent.message_id)
    assert one.next_check_ms == one.born_timestamp_ms + 6000
    assert [each.transaction_id for each in client.transactions.open(ids=[second.sent.message_id])] == [
        second.transaction_id
    ]
    client.transactions.commit(found[0])
    client.transactions.rollback(found[1])
    assert client.transactions.check(found[2]) == 1
    wait_until(lambda: [each.checks for each in client.transactions.open("seen")] == [1], what="a check")
    assert client.transactions.check(found[0], found[1]) == 0
    client.transactions.rollback(client.transactions.open("seen")[0])
    assert bodies(client, "Seen") == [b"0"]


def test_async_transactions_behave_alike(shared: Group) -> None:
    async def program() -> None:
        asked: list[StoredMessage] = []
        done = asyncio.Event()

        async def checker(message: StoredMessage) -> bool:
            asked.append(message)
            done.set()
            return True

        async with AsyncClient(shared.store) as client:
            await client.create_topic("Async", 1)
            async with client.transaction("async", Message("Async", b"1")):
                pass
            with pytest.raises(ZeroDivisionError):
                async with client.transaction("async", Message("Async", b"2")):
                    raise ZeroDivisionError
            async with client.transaction_producer("async", checker) as producer:
                async with producer.transaction(Message("Async", b"3")) as transaction:
                    transaction.leave()
                (found,) = await _opened(client, transaction.transaction_id)
                assert await client.transactions.check(found) == 1
                await asyncio.wait_for(done.wait(), PATIENCE_S)
                while await client.transactions.open("async"):
                    await asyncio.sleep(0.01)
            await client.wait_dispatched()
            assert [each.body for each in (await client.pull("Async", 0, 0)).messages] == [b"1", b"3"]
            assert [(each.topic, each.body) for each in asked] == [("Async", b"3")]

    async def _opened(client: AsyncClient, transaction_id: str) -> list[OpenTransaction]:
        while not (found := await client.transactions.open("async", ids=[transaction_id])):
            await asyncio.sleep(0.01)
        return found

    asyncio.run(program())


# Checks: each test has its own producer group


def test_transaction_check_asks_a_producer_of_the_group(fast: Group) -> None:
    said: dict[bytes, Any] = {b"yes": True, b"no": False, b"late": None, b"odd": "perhaps"}
    asked: list[bytes] = []

    def checker(message: StoredMessage) -> Any:
        assert (message.topic, message.properties["PGROUP"]) == ("Asked", "asked")
        asked.append(message.body)
        if message.body == b"raises" and asked.count(b"raises") == 1:
            raise ZeroDivisionError
        return True if message.body == b"raises" else said[message.body]

    with fast.client() as client:
        client.create_topic("Asked", 2)
        before = client.stats()
        with client.transaction_producer("strangers", lambda message: pytest.fail(f"asked about {message.body!r}")):
            sent = {body: open_transaction(client, "asked", Message("Asked", body)) for body in (*said, b"raises")}
            with client.transaction_producer("asked", checker):
                wait_until(lambda: min(map(asked.count, (b"late", b"odd"))) >= 2, what="second questions")
                assert sent[b"late"].transaction_id in open_ids(client)
                said |= {b"late": TransactionResolution.COMMIT, b"odd": TransactionResolution.ROLLBACK}
                wait_all_ended(client, "asked")
        assert bodies(client, "Asked") == [b"late", b"raises", b"yes"]
        after = client.stats()
        assert after["transaction_commits"] - before["transaction_commits"] == 3
        assert after["transaction_rollbacks"] - before["transaction_rollbacks"] == 2
        assert after["transaction_checks"] - before["transaction_checks"] >= 7
        # The check count and the id of the original are in the half messages themselves.
        copies = [each for each in messages_of(client, HALF_TOPIC) if each.body == b"late"]
        times = [int(each.properties.get("TRANSACTION_CHECK_TIMES", "0")) for each in copies]
        made_from = [each.prepared_transaction_offset for each in copies]
        assert times == list(range(len(copies)))
        assert made_from == [0, *(each.physical_offset for each in copies[:-1])]
        # An end at the first half message's offset finds that its copy was committed.
        handle = Handle("asked", "Asked", sent[b"late"].transaction_id, sent[b"late"].sent.physical_offset)
        client.run(transaction_calls.end(handle, commit=True))
        numbers = itertools.count()

        def times_asked() -> int:
            """Number of checks. One, unless the answer takes longer than the check interval."""
            body = b"at once %d" % next(numbers)
            said[body] = True
            with client.transaction_producer("asked", checker):
                open_transaction(client, "asked", Message("Asked", body))
                wait_all_ended(client, "asked")
            return asked.count(body)

        assert_below(2, times_asked)


def test_async_transaction_checker_can_be_cancelled(fast: Group) -> None:
    """The check is repeated, as when the checker raises, and the producer continues."""
    asked: list[bytes] = []

    async def checker(message: StoredMessage) -> bool:
        asked.append(message.body)
        if len(asked) == 1:
            other = asyncio.ensure_future(asyncio.sleep(60))
            other.cancel()
            await other
        return True

    async def program() -> None:
        async with (
            asyncio.timeout(60),
            AsyncClient(fast.store) as client,
            client.transaction_producer("inner", checker) as producer,
        ):
            await producer.transaction(Message("Inner", b"1")).begin()
            while not asked or await client.transactions.open("inner"):
                await asyncio.sleep(0.01)

    asyncio.run(program())
    assert len(asked) >= 2


def test_producer_closed_during_check_leaves_no_connection(fast: Group) -> None:
    asked, decided = threading.Event(), threading.Event()

    def checker(message: StoredMessage) -> bool:
        asked.set()
        return decided.wait(PATIENCE_S)

    before = _connections()
    with fast.client() as client:
        open_transaction(client, "closed", Message("Closed", b"1"))
        producer = client.transaction_producer("closed", checker)
        assert asked.wait(PATIENCE_S)
        closing = threading.Thread(target=producer.close)
        closing.start()
        wait_until(lambda: producer._background.stopping, what="closing")
        decided.set()
        closing.join()
    assert _connections() <= before


def _connections() -> int:
    return len(psutil.Process().net_connections("unix"))


@FORKS
def test_producer_closed_in_fork_keeps_parents_connection(fast: Group) -> None:
    """Closing it ended the parent's connection, and delayed a pending check by an interval."""
    with fast.client() as client, client.transaction_producer("forked", lambda message: True) as producer:
        wait_until(lambda: producer._connection is not None, what="the wait for questions")
        line = producer._connection
        assert line is not None
        assert in_fork(producer.close) == 0
        open_transaction(client, "forked", Message("Forked", b"1"))
        wait_until(lambda: not client.transactions.open("forked"), what="the answer")
        assert producer._connection is line
        assert not line.connection.closed


def test_transaction_late_end_finds_copy_of_half_message(fast: Group) -> None:
    with fast.client() as client:
        transaction = client.transaction("copies", Message("Copies", b"1")).begin()
        wait_until(lambda: [each.checks > 1 for each in client.transactions.open("copies")] == [True], what="checks")
        transaction.commit()
        wait_all_ended(client, "copies")
        assert bodies(client, "Copies") == [b"1"]


def test_transaction_id_is_unchanged_by_checks(
    make_group: Callable[..., Group],
) -> None:
    """An operator may have noted it earlier; query may have restarted since."""
    group = make_group(**FAST, transaction_check_max=10_000)
    with group.client() as client:
        transaction = client.transaction("named", Message("Named", b"1")).begin()
        other = client.transaction("named", Message("Named", b"2")).begin()
        wait_until(lambda: [each.checks > 1 for each in client.transactions.open("named")] == [True] * 2, what="checks")
        first_id = transaction.sent.message_id
        for kill in (False, True):
            if kill:
                os.kill(group.pid(QUERY), signal.SIGKILL)
            (found,) = client.transactions.open(ids=[first_id])
            assert found.message_id != first_id
            assert found.transaction_id == transaction.transaction_id
        assert client.transactions.open(ids=[client.send("Named", b"none").message_id, "7F", "F" * 32]) == []
        client.transactions.rollback(found)
        assert client.transactions.open(ids=[first_id]) == []
        assert [each.transaction_id for each in client.transactions.open("named")] == [other.transaction_id]


def test_transaction_check_without_property_space_is_sent(fast: Group) -> None:
    """No copy of it can be stored: it was never checked nor discarded."""
    asked = threading.Event()

    def decided(message: StoredMessage) -> bool:
        asked.set()
        return message.body == b"full"

    with fast.client() as client:
        client.create_topic("Full", 1)
        transaction = client.transaction("full", Message("Full", b"full", properties={"a": "v" * 32_580})).begin()
        before = fast.words()["transaction_checks"]
        wait_until(lambda: fast.words()["transaction_checks"] >= before + 3, what="checks without a producer")
        assert transaction.transaction_id in open_ids(client)
        with client.transaction_producer("full", decided):
            assert asked.wait(PATIENCE_S)
            wait_until(lambda: bodies(client, "Full") == [b"full"], what="the message")
        assert transaction.transaction_id not in open_ids(client)


def test_transaction_undecided_is_given_up(make_group: Callable[..., Group]) -> None:
    with make_group(**FAST).client() as client:
        transaction = open_transaction(client, "given", Message("Given", b"up"))
        immune = open_transaction(client, "given", Message("Given", b"immune"), check_immunity_time=3600)
        (found,) = wait_until(lambda: messages_of(client, CHECK_MAX_TIME_TOPIC), what="given up")
        assert (found.body, found.unique_id) == (b"up", transaction.transaction_id)
        assert found.properties["TRANSACTION_CHECK_TIMES"] == "15"
        wait_until(lambda: len(client.transactions.open("given")) == 1, what="mark")
        (other,) = client.transactions.open("given")
        # It is also stored again, so that it does not block others, and is not checked.
        assert (other.transaction_id, other.checks) == (immune.transaction_id, 0)
        assert other.physical_offset > immune.sent.physical_offset
        assert other.next_check_ms == other.born_timestamp_ms + 3_600_000
        with pytest.raises(TransactionEndedError, match="rolled back or discarded"):
            transaction.commit()
        transaction.rollback()
        immune.rollback()
        assert client.stats()["transaction_discards"] == 1
        assert bodies(client, "Given") == []


def test_transaction_of_killed_producer_is_decided_by_another(fast: Group) -> None:
    program = (
        "import os, signal, sys, mqproc; client = mqproc.Client(sys.argv[1]);"
        "producer = client.transaction_producer('dead', lambda message: None);"
        "client.transaction('dead', mqproc.Message('Dead', b'1')).begin();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(fast.store)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with fast.client() as client, client.transaction_producer("dead", lambda message: True):
        wait_until(lambda: bodies(client, "Dead") == [b"1"], what="commit by the other producer")


def test_transaction_producer_survives_query_restart(fast: Group) -> None:
    asked: list[bytes] = []

    def checker(message: StoredMessage) -> bool:
        asked.append(message.body)
        return message.body == b"3"

    with fast.client(timeout=60) as client, client.transaction_producer("again", checker) as producer:
        with producer.transaction(Message("Again", b"1")):
            pass
        os.kill(fast.pid(QUERY), signal.SIGKILL)
        open_transaction(client, "again", Message("Again", b"2"))
        open_transaction(client, "again", Message("Again", b"3"))
        wait_all_ended(client, "again")
        assert {*asked} == {b"2", b"3"}
        wait_until(lambda: bodies(client, "Again") == [b"1", b"3"], what="one commit, one rollback")


def test_transaction_resent_half_message_is_stored_once(make_group: Callable[..., Group]) -> None:
    """With a duplicate window for unique ids, and answers after the sync."""
    group = make_group(flush_disk_type="SYNC_FLUSH", dedupe_window_messages=1000)
    with group.client() as client:
        client.create_topic("Again", 1)
        half = transaction_calls.half_message(GROUP, Message("Again", b"1", unique_id="order-1"), None)
        first, second = (client.run(transaction_calls.send_half(half)) for _ in range(2))
        assert first.physical_offset == second.physical_offset
        client.run(transaction_calls.end(transaction_calls.handle_of_sent(half, second), commit=True))
        assert bodies(client, "Again") == [b"1"]
