"""Every public method has an example in its docstring, and all of them run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqproc
from mqproc import AsyncClient, Client
from tests.guides import api_reference
from tests.support.group import PATIENCE_S, Group

EXAMPLES = dict(api_reference.examples())
GROUP = "billing"
# Statements before the examples of a class or method, and after them; without `await` for synchronous objects.
TRANSACTION = 'transaction = client.transaction("billing", Message("orders", b"paid"))\nawait transaction.begin()'
CONSUMER = 'consumer = await client.consumer(name, "orders", start="earliest")'
HANDLE = 'producer = client.producer()\nhandle = await producer.send("orders", b"paid")'
BEFORE = {
    "Producer": "producer = client.producer()",
    "SendHandle": HANDLE,
    "SendHandle.result": f"{HANDLE}\nawait producer.flush()",
    "SendHandle.exception": f"{HANDLE}\nawait producer.flush()",
    "Consumer": f"{CONSUMER}\n(message,) = await consumer.receive(1, timeout=30)",
    "Consumer.batches": CONSUMER,
    "SimpleConsumer": 'consumer = client.simple_consumer(name, "orders", start="earliest")\n'
    "message = (await consumer.receive(1, timeout=30))[0]",
    "Transaction": TRANSACTION,
    "TransactionProducer": 'producer = client.transaction_producer("billing", lambda message: None)',
    "Transactions": f"{TRANSACTION}\nawait client.wait_dispatched()\n"
    '(transaction,) = await client.transactions.open("billing", ids=[transaction.transaction_id])',
    "StoreReader": "reader = StoreReader(store)",
    "Trace": "trace = client.trace(message.message_id)",
}
AFTER = {
    "Producer": "await producer.close()",
    "SendHandle": "await producer.close()",
    "Consumer": "await consumer.close()",
    "TransactionProducer": "await producer.close()",
    "StoreReader": "reader.close()",
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A group with orders, and with a consumer group that has progress and dead letters."""
    group = Group(tmp_path_factory.mktemp("api") / "store", message_index_tags=True).start()
    with group.client() as client:
        client.create_topic("orders", 4)
        for number in range(8):
            tag, region = ("new", "north") if number % 2 else ("paid", "south")
            client.send("orders", b"paid", keys=f"order-{number}", tag=tag, properties={"region": region})
        client.wait_dispatched()
        with client.consumer(GROUP, "orders", start="earliest") as consumer:
            (message,) = consumer.receive(1, timeout=PATIENCE_S)
            consumer.nack(message, delay_level=-1)
    yield group
    group.close()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_public_method_runs(name: str, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(group.store.parent)
    is_async = name.startswith("Async")
    method = name.removeprefix("Async")
    kind = method.partition(".")[0]
    code = "\n".join((BEFORE.get(method, BEFORE.get(kind, "")), EXAMPLES[name], AFTER.get(kind, "")))
    with group.client() as client:
        client.create_topic("old", 1)
        client.groups.change("old")
        names = {each: getattr(mqproc, each) for each in mqproc.__all__}
        names |= {"mqproc": mqproc, "store": group.store, "message": any_message(client)}
        names["name"] = name.replace(".", "-")
        if is_async:
            asyncio.run(run_async(code, group.store, names))
        else:
            stop = threading.Event()
            stop.set()
            names |= {"client": client, "stop": stop, "handle": lambda message: None}
            exec(compile(code.replace("await ", ""), name, "exec"), names)


def any_message(client: Client) -> mqproc.StoredMessage:
    return client.pull("orders", 0, 0, 1).messages[0]


async def run_async(code: str, store: Path, names: dict[str, Any]) -> None:
    async def handle(message: mqproc.StoredMessage) -> None:
        pass

    stop = asyncio.Event()
    stop.set()
    async with AsyncClient(store, timeout=PATIENCE_S) as client:
        names |= {"client": client, "stop": stop, "handle": handle}
        result = eval(compile(code, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(result):
            await result


def test_every_public_method_has_an_example() -> None:
    assert [name for name, _ in api_reference.methods() if name not in EXAMPLES] == []
