"""Kills at every step of transactions: commits are delivered once, rollbacks never."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from mqproc import (
    Client,
    GroupNotFoundError,
    Message,
    NotRunningError,
    SendOutcomeUnknownError,
    TransactionEndedError,
    TransactionResolution,
)
from mqproc.client import transaction_requests as transaction_calls
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout.control import QUERY, WRITER
from mqproc.roles.internal_producer import AppendOutcome, InternalProducer, NewMessage, Stored, copy_of
from mqproc.roles.transactions.op_messages import check_copy, committed, discarded_copy
from mqproc.store.transactions import OP_PROPERTIES, decode_op_body, encode_op_body
from mqproc.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from tests.support.group import (
    FAST,
    GROUP,
    Group,
    bodies,
    handle_of,
    messages_of,
    open_ids,
    open_transaction,
    wait_all_ended,
    wait_until,
)


def test_transaction_kills_lose_no_commit_and_deliver_no_rollback(make_group: Callable[..., Group]) -> None:
    """Kills between half message and end, between end and op message, and during checks.

    Each message is delivered once or never.
    """
    group = make_group(**FAST, transaction_check_max=10_000)
    decided: dict[bytes, bool] = {}
    unsure: set[bytes] = set()
    stop = threading.Event()

    def program(number: int) -> None:
        step = 0
        with group.client(timeout=60) as client:
            while not stop.is_set():
                step += 1
                body = b"%d-%d" % (number, step)
                decided[body] = step % 3 != 0
                try:
                    transaction = client.transaction(GROUP, Message("Kills", body)).begin()
                    if step % 5:
                        (transaction.commit if decided[body] else transaction.rollback)()
                except (SendOutcomeUnknownError, NotRunningError) as error:
                    # An end without an answer is decided by the check; a half message without one may not exist.
                    if "of transaction" not in str(error):
                        unsure.add(body)

    with group.client(timeout=60) as client:
        client.create_topic("Kills", 2)
    threads = [threading.Thread(target=program, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for killed in (QUERY, WRITER, "group", QUERY, "stop", WRITER):
        time.sleep(0.4)
        if killed == "group":
            group.kill()
            group.start()
        elif killed == "stop":
            assert group.stop() == 0
            group.start()
        else:
            os.kill(before := group.pid(killed), signal.SIGKILL)
            wait_until(lambda: group.pid(killed) not in (0, before), what="restart")  # noqa: B023
    time.sleep(0.4)
    stop.set()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    with (
        group.client(timeout=60) as client,
        client.transaction_producer(GROUP, lambda message: decided[message.body]),
    ):
        client.wait_dispatched()
        wait_all_ended(client, GROUP)
        found = bodies(client, "Kills")
        assert len(found) == len(set(found)), "a commit was delivered twice"
        assert {body for body in decided if decided[body]} - set(found) <= unsure
        assert not {body for body in found if not decided[body]}
        assert len(found) > 10


def stored_as_query_does(group: Group, *messages: NewMessage) -> None:
    """Store messages like a query role that dies before it writes their op messages."""
    control = Control.open(StoreIO(), group.paths)
    appender = InternalProducer(group.paths.socket(WRITER), control.words, Clock())
    outcomes: list[AppendOutcome] = []
    appender.append(messages, lambda _, outcome: outcomes.append(outcome))
    wait_until(lambda: not (appender.step() or appender.in_flight), what="outcomes")
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    appender.close()
    control.close()


@pytest.mark.parametrize("whole_group", [False, True])
def test_transaction_unmarked_commit_is_found(make_group: Callable[..., Group], whole_group: bool) -> None:
    """A kill between the message, its copy or the discarded message, and its op message."""
    group = make_group()
    with group.client(timeout=60) as client:
        client.create_topic("Made", 2)
        begun = [client.transaction(GROUP, Message("Made", b"%d" % number)).begin() for number in range(5)]
        halves = [client.get(each.sent.message_id) for each in begun]
        kept, lost, copied, alone, requeued = begun
        # RocketMQ's broker handles a message with its own check time like this, and then rolls it back.
        broker_copy = copy_of(halves[4], HALF_TOPIC, 0, {"TRAN_PREPARED_QUEUE_OFFSET": "4"}, 0)
        broker_mark = NewMessage(OP_HALF_TOPIC, encode_op_body([4]), OP_PROPERTIES, 0)
        own = committed(halves[0]), discarded_copy(halves[1]), check_copy(halves[2], 1)
        stored_as_query_does(group, *own, broker_copy, broker_mark)
        if whole_group:
            group.kill()
            group.start()
        else:
            os.kill(group.pid(QUERY), signal.SIGKILL)
        wait_until(lambda: open_ids(client) == {copied.transaction_id, alone.transaction_id}, what="open transactions")
        kept.commit()
        lost.rollback()
        for transaction, commit in ((kept, False), (lost, True)):
            with pytest.raises(TransactionEndedError):
                client.run(transaction_calls.end(handle_of(transaction, topic="Made"), commit=commit))
        copied.commit()
        alone.rollback()
        wait_all_ended(client, GROUP)
        assert bodies(client, "Made") == [b"0", b"2"]
        client.run(transaction_calls.end(handle_of(requeued, topic="Made"), commit=False))
        # After all op messages: a commit is answered before its op message is stored.
        wait_until(lambda: progress(client).get(HALF_TOPIC) == 7, what="progress at the end")
        marks = [offset for each in messages_of(client, OP_HALF_TOPIC) for offset in decode_op_body(each.body)]
        assert sorted(marks) == [0, 1, 2, 3, 4, 5, 6]


def test_transaction_commit_pending_in_writer_is_awaited(group: Group) -> None:
    """The writer is stopped with the committed message in its socket when query dies.

    It is stored once.
    """
    with group.client(timeout=60) as client:
        client.create_topic("Held", 1)
        # From here on query has a connection.
        client.transaction(GROUP, Message("Held", b"0")).begin().commit()
        transaction = client.transaction(GROUP, Message("Held", b"1")).begin()
        client.wait_dispatched()
        writer, query = group.pid(WRITER), group.pid(QUERY)
        os.kill(writer, signal.SIGSTOP)
        try:
            commit = threading.Thread(target=transaction.commit)
            commit.start()
            commit.join(0.3)  # Longer than query needs to hand it over.
            assert commit.is_alive()
            os.kill(query, signal.SIGKILL)
            wait_until(lambda: group.pid(QUERY) not in (0, query), what="another query")
            commit.join(0.3)
        finally:
            os.kill(writer, signal.SIGCONT)
        commit.join(60)
        assert transaction.resolution is TransactionResolution.COMMIT
        wait_all_ended(client, GROUP)
        assert bodies(client, "Held") == [b"0", b"1"]


def progress(client: Client) -> dict[str, int | None]:
    try:
        return {each.topic: each.offset for each in client.groups.info("CID_RMQ_SYS_TRANS").queues}
    except GroupNotFoundError:
        return {}


def test_transaction_progress_is_at_first_open(group: Group) -> None:
    with group.client() as client:
        for number in range(30):
            client.transaction(GROUP, Message("Moves", b"%d" % number)).begin().commit()
        kept = open_transaction(client, GROUP, Message("Moves", b"open"))
        for number in range(30):
            client.transaction(GROUP, Message("Moves", b"%d" % number)).begin().rollback()
        wait_until(lambda: progress(client).get(HALF_TOPIC) == 30, what="progress at the open one")
        marks = messages_of(client, OP_HALF_TOPIC)
        first = next(mark.queue_offset for mark in marks if max(map(int, mark.body.split(b",")[:-1])) > 30)
        wait_until(lambda: progress(client)[OP_HALF_TOPIC] == first, what="progress at its first later op message")
    assert group.stop() == 0
    saved = group.paths.consumer_offsets.read_text()
    assert f"{HALF_TOPIC}@CID_RMQ_SYS_TRANS" in saved
    group.start()
    with group.client() as client:
        wait_until(lambda: open_ids(client) == {kept.transaction_id}, what="the open one")
        client.run(transaction_calls.end(handle_of(kept, topic="Moves"), commit=True))
        wait_until(lambda: progress(client).get(HALF_TOPIC) == 61, what="progress at the end")
        assert len(bodies(client, "Moves")) == 31
