"""`mqproc transaction …` against a real group of processes: plans, execution, JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mqproc import Client, Message
from tests.support.command_line import Outcome, call
from tests.support.group import Group, wait_until


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(tmp_path_factory.mktemp("transactions") / "store").start()
    yield started
    started.close()


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with group.client() as client:
        yield client


def ask(group: Group, *arguments: Any) -> Outcome:
    return call("transaction", *arguments, "--store", group.store)


def begin_transactions(client: Client, producers: str, *bodies: bytes) -> list[str]:
    """Ids of new open transactions."""
    begin_transactions = [client.transaction(producers, Message("orders", body)).begin() for body in bodies]
    wait_until(lambda: len(client.transactions.open(producers)) == len(bodies), what="open transactions")
    return [each.transaction_id for each in begin_transactions]


def test_transaction_list_shows_open_ones(group: Group, client: Client) -> None:
    ids = begin_transactions(client, "listed", b"1", b"2", b"3")
    found = ask(group, "list", "--group", "listed", "--json")
    assert (found.code, found.err) == (0, "")
    rows = found.json["transactions"]
    assert [row["transaction_id"] for row in rows] == ids
    assert {(row["group"], row["topic"], row["checks"]) for row in rows} == {("listed", "orders", 0)}
    assert all(0 <= row["age_ms"] < 60_000 and len(row["message_id"]) == 32 for row in rows)
    assert len(ask(group, "list", "--group", "listed", "-n", 2, "--json").json["transactions"]) == 2
    assert ask(group, "list", "--group", "listed", "--older", "1h", "--json").json["transactions"] == []
    shown = ask(group, "list", "--group", "listed")
    assert shown.out.splitlines()[0].split()[:5] == ["transaction", "group", "topic", "age", "checks"]
    assert len(shown.out.splitlines()) == 4
    assert ask(group, "list", "--group", "nobody", "--json").json["transactions"] == []


@pytest.mark.parametrize(("verb", "delivered"), [("commit", [b"1", b"2"]), ("rollback", [])])
def test_transaction_commit_plans_first(group: Group, client: Client, verb: str, delivered: list[bytes]) -> None:
    ids = begin_transactions(client, verb, b"1", b"2")
    before = client.count("orders")
    planned = ask(group, verb, *ids)
    assert planned.code == 0
    assert ask(group, verb, *ids, "--detailed-exitcode").code == 2
    assert f"would {verb} 2 transactions; --execute does it" in planned.err
    assert len(client.transactions.open(verb)) == 2
    done = ask(group, verb, *ids, "--execute", "--json")
    assert done.code == 0
    assert (done.json["done"], done.json["executed"]) == (2, True)
    assert client.transactions.open(verb) == []
    client.wait_dispatched()
    assert client.count("orders") - before == len(delivered)
    again = ask(group, verb, *ids, "--execute")
    assert (again.code, again.out) == (5, "")
    assert f"no open transaction {ids[0]}, {ids[1]}" in again.err


def test_transaction_check_by_half_message_id(group: Group, client: Client) -> None:
    begin_transactions(client, "asked", b"1")
    (row,) = ask(group, "list", "--group", "asked", "--json").json["transactions"]
    assert ask(group, "check", row["message_id"]).code == 0
    with client.transaction_producer("asked", lambda message: False):
        assert ask(group, "check", row["message_id"], "--execute").code == 0
        wait_until(lambda: not client.transactions.open("asked"), what="rollback by the producer")


def test_transaction_invalid_id_is_an_error(group: Group) -> None:
    for verb in ("commit", "rollback", "check"):
        found = ask(group, verb, "nothing", "--execute")
        assert (found.code, found.out) == (5, "")
        assert "no open transaction nothing" in found.err
    assert ask(group, "commit").code == 2
