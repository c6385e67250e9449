"""The writer's stop in a real group: received frames are answered, even to slow readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mqproc.client import requests as core
from mqproc.client import send_requests as sending
from mqproc.client.batch import Batch
from mqproc.client.connection import Connection, open_socket
from mqproc.client.retry import ConnectionLost
from mqproc.errors import RetryLaterError
from mqproc.layout.control import STATE_STOPPING, WRITER
from mqproc.types import SendResult
from mqproc.wire.operations import Operation, RoleRequest
from tests.support.group import PATIENCE_S, Group, wait_until

FRAMES = 8
MESSAGES = 20_000  # a frame; its answer has 400 kB, so that most of them wait behind the socket's buffer


def append(number: int) -> core.Call[object]:
    batch = Batch("orders", [b"%08d" % number] * MESSAGES)
    (call,) = sending.send_batch(batch, 64 << 20)
    return call


def restart_writer(group: Group) -> threading.Thread:
    from mqproc.cli.admin.supervisor_client import ask_supervisor

    arguments = (group.paths, Operation.RESTART_ROLE, RoleRequest(WRITER), 30.0)
    thread = threading.Thread(target=ask_supervisor, args=arguments)
    thread.start()
    return thread


def test_writer_delivers_queued_answers_before_it_stops(make_group: Callable[..., Group]) -> None:
    group = make_group(mapped_file_size_commit_log=64 << 20)
    connection = Connection(open_socket(group.paths.socket(WRITER)))
    ids = [connection.submit(append(number)) for number in range(FRAMES)]
    while connection.sending:
        connection.flush()
    wait_until(lambda: group.words()["appended_messages"] == FRAMES * MESSAGES, what="all frames stored")
    restarting = restart_writer(group)
    wait_until(
        lambda: group.words()[f"{WRITER}.state"] == STATE_STOPPING, what="the writer is stopping, and no client reads"
    )
    wait_until(lambda: (not connection.receive() and len(connection.done) == FRAMES) or connection.closed)
    assert [connection.done[request_id].error for request_id in ids] == [None] * FRAMES
    connection.close()
    restarting.join()


def test_writer_orderly_restart_leaves_no_unknown_outcome(make_group: Callable[..., Group]) -> None:
    group = make_group()
    over = threading.Event()

    def send() -> int:
        count = 0
        with group.client() as client:
            while not over.is_set():
                client.send("orders", b"x")
                count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        senders = [pool.submit(send) for _ in range(6)]
        try:
            for number in range(40):
                with group.client() as client:
                    client.create_topic(f"topic-{number}", 1)  # Saved at the end, which takes a while.
                restart_writer(group).join()
        finally:
            over.set()
        sent = sum(sender.result() for sender in senders)
    assert group.words()["appended_messages"] == sent


def test_group_orderly_stop_leaves_no_unknown_outcome(make_group: Callable[..., Group]) -> None:
    """A client that reconnects meanwhile is accepted and refused, or turned away."""
    group = make_group()
    over = threading.Event()
    futures: list[Future[SendResult]] = []
    # A start may take a while on a busy machine.
    with group.client(timeout=4 * PATIENCE_S) as client, client.producer(linger_ms=0, max_in_flight=4) as producer:

        def send() -> None:
            while not over.is_set():
                futures.append(producer.send("orders", b"x"))
                time.sleep(0.001)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            for _ in range(3):
                producer.send("orders", b"before").result(4 * PATIENCE_S)
                assert group.stop() == 0
                group.start()
        finally:
            over.set()
            sender.join()
    assert [future.exception() for future in futures if future.exception()] == []


def test_writer_stopping_asks_a_sending_client_to_return(make_group: Callable[..., Group]) -> None:
    """Each frame is stored or refused or, at the very end, lost with the connection."""
    group = make_group(mapped_file_size_commit_log=64 << 20)
    connection = Connection(open_socket(group.paths.socket(WRITER)))
    outcomes: list[object] = []
    restarting = None
    deadline = time.monotonic() + 120
    while not connection.closed:
        assert time.monotonic() < deadline
        if not connection.sending:
            connection.submit(append(len(outcomes)))
        connection.flush()
        connection.receive()
        outcomes += [connection.done.pop(request_id).error for request_id in sorted(connection.done)]
        if restarting is None and len(outcomes) > 3:
            restarting = restart_writer(group)
    assert restarting is not None
    restarting.join()
    stored = sum(error is None for error in outcomes)
    assert {type(error) for error in outcomes} <= {type(None), RetryLaterError, ConnectionLost}
    assert group.words()["appended_messages"] == stored * MESSAGES


def test_writer_counts_connected_clients(make_group: Callable[..., Group]) -> None:
    group = make_group()
    others = group.words()["writer_connections"]
    silent = open_socket(group.paths.socket(WRITER))
    wait_until(lambda: group.words()["writer_connections"] == others + 1, what="a client that says nothing")
    silent.close()
    wait_until(lambda: group.words()["writer_connections"] == others, what="it is gone")
