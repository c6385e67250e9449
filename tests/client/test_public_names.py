"""`dir` of the objects that users hold shows the documented members; `repr` names them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import mqproc
from mqproc import Client, Message, StoreReader
from tests.guides import api_reference
from tests.support.group import PATIENCE_S, Group


def documented(kind: type) -> set[str]:
    """Methods of the API guide, and properties."""
    names = {name.partition(".")[2] for name, _ in api_reference.methods() if name.startswith(f"{kind.__name__}.")}
    properties = {name for name, _ in inspect.getmembers_static(kind, lambda each: isinstance(each, property))}
    return names | properties - set(getattr(kind, "_internal", ()))


def shown(made: Any) -> set[str]:
    return {name for name in dir(made) if not name.startswith("_")}


def test_dir_shows_what_users_call(shared: Group) -> None:
    with Client(shared.store, timeout=PATIENCE_S) as client, StoreReader(shared.store) as reader:
        client.send("orders", b"paid")
        with client.consumer("billing", "orders") as consumer, client.producer() as producer:
            simple = client.simple_consumer("shipping", "orders")
            transaction = client.transaction("billing", Message("orders", b"paid"))
            for made, attributes in (
                (client, {"store"}),
                (consumer, set()),
                (producer, set()),
                (simple, set()),
                (client.groups, set()),
                (client.transactions, set()),
                (transaction, {"transaction_id", "resolution"}),
                (reader, set()),
                (client.read("orders"), {"schema", "starting_offsets", "ending_offsets"}),
            ):
                kind = getattr(mqproc, type(made).__name__)
                assert shown(made) == {name for name in documented(kind) if not name.startswith("_")} | attributes
            names = {"send", "read", "pull", "close", "consumer", "topics"}
            assert names <= shown(client)
            assert not shown(client) & {"run", "run_all", "pipeline", "take_connection"}


@pytest.mark.parametrize("name", ["groups", "transactions"])
def test_parts_of_a_client_show_its_store(shared: Group, name: str) -> None:
    with Client(shared.store) as client:
        assert repr(getattr(client, name)) == f"{name.capitalize()}(Client({str(shared.store)!r}))"
        transaction = client.transaction("billing", Message("orders", b"paid"))
        assert repr(transaction) == f"Transaction('orders', {transaction.transaction_id!r}, not begun)"
