"""`mqproc transaction`: list open transactions, and decide them in place of their producers.

Commands that decide something show a plan; with `--execute` they do it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import click

from mqproc.cli.options import DURATION, CommandGroup, Invocation, command, execute_option
from mqproc.cli.output import output_columns
from mqproc.client import Client
from mqproc.errors import TransactionEndedError, TransactionNotFoundError
from mqproc.types import OpenTransaction
from mqproc.util.units import counted, format_duration, now_ms

EXIT_NOT_ALL: Final = 1
LISTED: Final = 1000

_COLUMNS = output_columns(
    "transaction_id:text:transaction, group, topic, age, checks:count, next_check_ms:time_ms:next check",
    "size:bytes, message_id:text:half message",
)


@click.group(cls=CommandGroup)
def transaction() -> None:
    """Open transactions: list, commit, roll back, check.

    An open transaction is a message that its producer has not committed or rolled back yet. ID is the id of a
    transaction or of its half message. Exit code 5 if there is no such open transaction.
    """


@command("list", group=transaction)
@click.option("--group", default="", help="Only transactions of this producer group.")
@click.option("--older", type=DURATION, help="Only transactions older than this.")
@click.option(
    "-n",
    "--count",
    "--max",
    "--limit",
    "count",
    type=click.IntRange(1, 10_000),
    default=LISTED,
    show_default=True,
    metavar="N",
    help="At most N transactions.",
)
def list_(invocation: Invocation, group: str, older: float | None, count: int) -> None:
    """List open transactions, oldest first, with group, age and number of checks."""
    with invocation.client() as client:
        found = client.transactions.open(group, max_transactions=count)
    limit_ms = now_ms() - round((older or 0) * 1000)
    invocation.out.rows("transactions", _COLUMNS, [_row(each) for each in found if each.born_timestamp_ms <= limit_ms])


def _row(found: OpenTransaction) -> dict[str, Any]:
    age_ms = max(0, now_ms() - found.born_timestamp_ms)
    return dataclasses.asdict(found) | {"age_ms": age_ms, "age": format_duration(age_ms / 1000)}


_ids = click.argument("ids", metavar="ID...", nargs=-1, required=True)


@command(group=transaction)
@_ids
@execute_option
def commit(invocation: Invocation, ids: tuple[str, ...], execute: bool) -> int:
    """Commit open transactions: deliver their messages."""
    return _decide(invocation, "commit", ids, execute)


@command(group=transaction)
@_ids
@execute_option
def rollback(invocation: Invocation, ids: tuple[str, ...], execute: bool) -> int:
    """Roll back open transactions: their messages are never delivered."""
    return _decide(invocation, "rollback", ids, execute)


@command(group=transaction)
@_ids
@execute_option
def check(invocation: Invocation, ids: tuple[str, ...], execute: bool) -> int:
    """Ask a producer of each transaction's group now. This counts as a check."""
    return _decide(invocation, "check", ids, execute)


def _decide(invocation: Invocation, verb: str, ids: tuple[str, ...], execute: bool) -> int:
    """Call the method `verb` of the client's transactions for each of them, or show the plan."""
    with invocation.client() as client:
        # One request per id: a transaction found by an earlier id of its half message is returned with its new id.
        asked = {each: client.transactions.open(ids=[each]) for each in ids}
        if missing := [each for each, named in asked.items() if not named]:
            raise TransactionNotFoundError(f"no open transaction {', '.join(missing)}")
        found = list({each.message_id: each for named in asked.values() for each in named}.values())
        done = [each for each in found if execute and _is_done(client, verb, each)]
    out = invocation.out
    rows = [_row(each) for each in found]
    if out.is_json:
        out.document({"action": verb, "transactions": rows, "done": len(done), "executed": execute})
    else:
        out.rows("transactions", _COLUMNS, rows)
        of = counted(len(found), "transaction")
        out.note(f"{verb}: {len(done):,} of {of}" if execute else f"would {verb} {of}; --execute does it")
    if not execute:
        return invocation.plan_exit_code(True)
    return 0 if len(done) == len(found) else EXIT_NOT_ALL


def _is_done(client: Client, verb: str, found: OpenTransaction) -> bool:
    """Do `verb`; False if the transaction has ended meanwhile."""
    try:
        done: object = getattr(client.transactions, verb)(found)
        return done != 0
    except TransactionEndedError:
        return False
