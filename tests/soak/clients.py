"""The client processes of a soak. Each writes what it was told, a line each, before it goes on."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mqproc import (
    Client,
    Message,
    MqprocError,
    SendOutcomeUnknownError,
    StoredMessage,
    Transaction,
    TransactionEndedError,
)

TOPICS: Final = ("soak-a", "soak-b")
GROUP: Final = "soak-group"
WORKERS: Final = "soak-workers"
PRODUCERS: Final = "soak-producers"
COMMITS: Final = "commits"
BATCH: Final = 50
PAUSE_S: Final = 0.1
RETRIES: Final = 2
INVISIBLE_S: Final = 5.0
TIMEOUT_S: Final = 30.0
Stop = Any


def _client(store: str) -> Client:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Client(store, timeout=TIMEOUT_S)


def send(store: str, name: str, stop: Stop, report: Path) -> None:
    """Send until told to stop: "told BODY" or "unknown BODY" a line."""
    chance = random.Random(name)
    number = 0
    with _client(store) as client, report.open("a", buffering=1) as lines:
        while not stop.is_set():
            topic = chance.choice(TOPICS)
            bodies = [f"{name}-{number + each}" for each in range(BATCH + 2)]
            number += len(bodies)
            batch, tags = bodies[:BATCH], ["even", "odd"] * (BATCH // 2)
            encoded = [body.encode() for body in batch]
            _send(lines, batch, functools.partial(client.send_batch, topic, encoded, keys=batch, tags=tags))
            later: list[dict[str, Any]] = [{"delay_level": 1}, {"delay": chance.uniform(0.1, 3.0)}]
            for body, more in zip(bodies[BATCH:], later, strict=True):
                more["properties"] = {"name": name}
                _send(lines, [body], functools.partial(client.send, topic, body.encode(), keys=body, **more))
            time.sleep(PAUSE_S)


def _send(lines: Any, bodies: list[str], call: Callable[[], object]) -> None:
    try:
        call()
    except SendOutcomeUnknownError:
        word = "unknown"
    except MqprocError as error:
        if not error.retryable:
            raise
        return
    else:
        word = "told"
    lines.write("".join(f"{word} {body}\n" for body in bodies))


def transact(store: str, name: str, stop: Stop, report: Path) -> None:
    """Begin transactions, end most of them, and be asked about the others; a line for each that commits, as `send`.

    One that is left is "unknown": with files that are reserved for no time it may be too old to be asked about.
    """
    chance = random.Random(name)
    number = 0
    with (
        _client(store) as client,
        client.transaction_producer(PRODUCERS, _commits) as producer,
        report.open("a", buffering=1) as lines,
    ):
        while not stop.is_set():
            number += 1
            body = f"{name}-{number}-{chance.choice((COMMITS, COMMITS, 'rolls-back'))}"
            transaction = producer.transaction(Message(chance.choice(TOPICS), body.encode(), keys=[body]))
            commits = body.endswith(COMMITS)
            told = _end(transaction, commits=commits, leaves=chance.random() < 0.2)
            if commits:
                lines.write(f"{'told' if told else 'unknown'} {body}\n")
            time.sleep(PAUSE_S)
        while client.transactions.open(PRODUCERS):
            time.sleep(PAUSE_S)


def _commits(message: StoredMessage) -> bool:
    return message.body.endswith(COMMITS.encode())


def _end(transaction: Transaction, *, commits: bool, leaves: bool) -> bool:
    """Begin and end it, unless a check shall; whether both were answered."""
    try:
        transaction.begin()
        if leaves:
            return False
        if commits:
            transaction.commit()
        else:
            transaction.rollback()
    except MqprocError as error:
        if not isinstance(error, SendOutcomeUnknownError | TransactionEndedError) and not error.retryable:
            raise
        return False
    return True


def consume(store: str, name: str, stop: Stop, report: Path) -> None:
    """Consume as a member of the group: "at TOPIC QUEUE OFFSET", then "done BODY" or "nacked BODY" a line.

    Both are told before the message is done.
    """
    chance = random.Random(name)
    with _client(store) as client, report.open("a", buffering=1) as lines:
        while not stop.is_set():
            try:
                with client.consumer(GROUP, TOPICS, start="earliest", session_timeout=5.0) as consumer:
                    for message in consumer.messages(timeout=1.0):
                        lines.write(f"at {message.topic} {message.queue_id} {message.queue_offset}\n")
                        if chance.random() < 0.01:
                            lines.write(f"nacking {message.body.decode()}\n")
                            consumer.nack(message, delay_level=1)
                            lines.write(f"nacked {message.body.decode()}\n")
                        else:
                            lines.write(f"done {message.body.decode()}\n")
                        if stop.is_set():
                            break
            except MqprocError as error:
                lines.write(f"error {error.code}\n")
                time.sleep(0.2)


def receive(store: str, name: str, stop: Stop, report: Path) -> None:
    """Receive as a worker: "done BODY" a line before each acknowledgement; some are never acknowledged."""
    chance = random.Random(name)
    with _client(store) as client, report.open("a", buffering=1) as lines:
        worker = client.simple_consumer(WORKERS, TOPICS, start="earliest")
        while not stop.is_set():
            try:
                messages = worker.receive(256, invisible_duration=INVISIBLE_S, timeout=1.0)
                kept = [message for message in messages if chance.random() > 0.01]
                lines.write("".join(f"done {message.body.decode()}\n" for message in kept))
                if kept:
                    worker.ack(*kept)
            except MqprocError as error:
                lines.write(f"error {error.code}\n")
                time.sleep(0.2)


def read(store: str, name: str, stop: Stop, report: Path) -> None:
    """Ask all kinds of questions; what was found must be what was asked for."""
    chance = random.Random(name)
    with _client(store) as client, report.open("a", buffering=1) as lines:
        while not stop.is_set():
            try:
                topic = chance.choice(TOPICS)
                for queue in client.queues(topic):
                    found = client.pull(
                        topic, queue.queue_id, max(queue.min_offset, queue.max_offset - 20), 20
                    ).messages
                    _check(client, found[:1], lines)
                client.count(topic)
                client.stats()
            except MqprocError as error:
                lines.write(f"error {error.code}\n")
            time.sleep(0.1)


def _check(client: Client, messages: list[Any], lines: Any) -> None:
    for message in messages:
        try:
            # By key first: what is there afterwards was there then.
            by_key = [found.message_id for key in message.keys for found in client.by_key(message.topic, key)]
            same = client.get(message.message_id).body == message.body and message.message_id in by_key
        except MqprocError as error:
            lines.write(f"error {error.code}\n")
            continue
        if not same:
            lines.write(f"wrong {message.message_id}\n")
        lines.write("asked 1\n")
