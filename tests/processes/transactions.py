"""What tests of transactions have in common."""

from __future__ import annotations

from typing import Any

from mqproc import Client, Message
from mqproc.client.transaction_calls import Handle
from mqproc.client.transactions import Transaction
from mqproc.message import StoredMessage
from tests.conftest import wait_until

GROUP = "billing"
FAST = {"transaction_timeout": 200, "transaction_check_interval": 200}


def messages_of(client: Client, topic: str) -> list[StoredMessage]:
    """All that a topic's queues have, when dispatch is at the log's end."""
    client.wait_dispatched()
    queues = [queue for queue in client.queues() if queue.topic == topic]
    return [each for queue in queues for each in client.pull(topic, queue.queue_id, 0, 4096).messages]


def bodies(client: Client, topic: str) -> list[bytes]:
    return sorted(each.body for each in messages_of(client, topic))


def handle_of(transaction: Transaction, **changes: Any) -> Handle:
    fields = {"group": GROUP, "topic": "", "transaction_id": transaction.transaction_id} | changes
    return Handle(physical_offset=transaction.sent.physical_offset, **fields)


def open_ids(client: Client) -> set[str]:
    return {each.transaction_id for each in client.transactions.open()}


def left_open(client: Client, group: str, message: Message, **settings: Any) -> Transaction:
    with client.transaction(group, message, **settings) as transaction:
        transaction.leave()
    return transaction


def all_ended(client: Client, group: str) -> None:
    wait_until(lambda: not client.transactions.open(group), 60, f"no open transaction of {group}")
