"""`mqproc transaction list|commit|rollback|check`: open transactions, and deciding them in their producers' place.

What decides something shows its plan and ends with exit code 1; with `--execute` it is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import click

from mqproc.cli.options import SECONDS, Command, Group, Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.cli.times import format_duration, now_ms
from mqproc.client import Client
from mqproc.errors import TransactionEndedError, TransactionNotFoundError
from mqproc.types import OpenTransaction
from mqproc.util.units import counted

EXIT_NOT_EXECUTED: Final = 1
EXIT_NOT_ALL: Final = 1
LISTED: Final = 1000

_COLUMNS = [
    Column("transaction_id", "transaction"),
    Column("group"),
    Column("topic"),
    Column("age"),
    Column("checks", kind="count"),
    Column("next_check_ms", "next check", "time_ms"),
    Column("size", kind="bytes"),
    Column("message_id", "half message"),
]


@click.group(cls=Group)
def transaction() -> None:
    """Open transactions: list, commit, roll back, check.

    They are messages whose producers have not decided yet. An ID is a transaction's or its half message's. Exit code 5
    when there is no such open transaction.
    """


@transaction.command("list", cls=Command)
@click.option("--group", default="", help="Only this producer group's.")
@click.option("--older", type=SECONDS, help="Only older ones than so long.")
@click.option(
    "-n", "--count", type=click.IntRange(1, 10_000), default=LISTED, show_default=True, help="At most so many."
)
@pass_invocation
def list_(invocation: Invocation, group: str, older: float | None, count: int) -> None:
    """List open transactions, the oldest first: whose they are, how old, how often their producers were asked."""
    with invocation.client() as client:
        found = client.transactions.open(group, max_transactions=count)
    limit_ms = now_ms() - round((older or 0) * 1000)
    invocation.out.rows("transactions", _COLUMNS, [_row(each) for each in found if each.born_timestamp_ms <= limit_ms])


def _row(found: OpenTransaction) -> dict[str, Any]:
    age_ms = max(0, now_ms() - found.born_timestamp_ms)
    return dataclasses.asdict(found) | {"age_ms": age_ms, "age": format_duration(age_ms / 1000)}


_ids = click.argument("ids", metavar="ID...", nargs=-1, required=True)
_execute = click.option("--execute", is_flag=True, help="Really do it; without it only the plan is shown.")


@transaction.command(cls=Command)
@_ids
@_execute
@pass_invocation
def commit(invocation: Invocation, ids: tuple[str, ...], execute: bool) -> int:
    """Have the messages of open transactions delivered."""
    return _decide(invocation, "commit", ids, execute, lambda client, found: client.transactions.commit(found))


@transaction.command(cls=Command)
@_ids
@_execute
@pass_invocation
def rollback(invocation: Invocation, ids: tuple[str, ...], execute: bool) -> int:
    """Have the messages of open transactions never delivered."""
    return _decide(invocation, "rollback", ids, execute, lambda client, found: client.transactions.rollback(found))


@transaction.command(cls=Command)
@_ids
@_execute
@pass_invocation
def check(invocation: Invocation, ids: tuple[str, ...], execute: bool) -> int:
    """Have a producer of each transaction's group asked now. It counts as a check."""
    return _decide(invocation, "check", ids, execute, lambda client, found: client.transactions.check(found))


def _decide(
    invocation: Invocation,
    verb: str,
    ids: tuple[str, ...],
    execute: bool,
    act: Callable[[Client, OpenTransaction], object],
) -> int:
    with invocation.client() as client:
        # One by one: by the id that a half message had before its checks it is found, and has another one by now.
        asked = {each: client.transactions.open(ids=[each]) for each in ids}
        if missing := [each for each, named in asked.items() if not named]:
            raise TransactionNotFoundError(f"no open transaction {', '.join(missing)}")
        found = list({each.message_id: each for named in asked.values() for each in named}.values())
        done = [each for each in found if execute and _acted(client, each, act)]
    out = invocation.out
    rows = [_row(each) for each in found]
    if out.is_json:
        out.document({"action": verb, "transactions": rows, "done": len(done), "executed": execute})
    else:
        out.rows("transactions", _COLUMNS, rows)
        of = counted(len(found), "transaction")
        out.note(f"{verb}: {len(done):,} of {of}" if execute else f"would {verb} {of}; --execute does it")
    if not execute:
        return EXIT_NOT_EXECUTED
    return 0 if len(done) == len(found) else EXIT_NOT_ALL


def _acted(client: Client, found: OpenTransaction, act: Callable[[Client, OpenTransaction], object]) -> bool:
    """Whether it was done; another may have decided meanwhile."""
    try:
        return act(client, found) != 0
    except TransactionEndedError:
        return False
