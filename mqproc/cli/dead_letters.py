"""`mqproc group dlq list|resend`: what a group could never consume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import click

from mqproc.cli.commands import Command, Group
from mqproc.cli.completing import complete_group
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.message_format import BODIES, to_json, to_row
from mqproc.cli.output import Column, encode_json
from mqproc.client import Client
from mqproc.errors import MessageNotFoundError
from mqproc.message import StoredMessage
from mqproc.quantities import counted

EXIT_NOT_EXECUTED: Final = 1
EXIT_NOT_ALL: Final = 1
_COLUMNS = [
    Column("queue_offset", "offset", "number"),
    Column("store_timestamp_ms", "since", "time_ms"),
    Column("origin_topic", "topic"),
    Column("origin_message_id", "message"),
    Column("reconsume_times", "retries", "number"),
    Column("tag"),
    Column("keys"),
    Column("body"),
]


@click.group(cls=Group)
def dlq() -> None:
    """Dead letters: messages that a group could not consume, often enough to give up."""


@dlq.command("list", cls=Command)
@click.argument("name", metavar="GROUP", shell_complete=complete_group)
@click.option("-n", "--count", type=click.IntRange(1), help="At most so many, the oldest.  [all]")
@click.option("--body", type=click.Choice(BODIES), default="text", show_default=True, help="How bodies are shown.")
@pass_invocation
def list_(invocation: Invocation, name: str, count: int | None, body: str) -> None:
    """List a group's dead letters, oldest first. Exit code 5 when there is no such group."""
    out = invocation.out
    with invocation.client() as client:
        letters = itertools.islice(_letters(client, name), count)
        if out.shape == "json":
            out.document({"group": name, "dead_letters": [_json(letter, body) for letter in letters]})
        elif out.shape == "jsonl":
            for letter in letters:
                out.line(encode_json(_json(letter, body)))
        else:
            preview = out.shape == "table"
            out.rows("dead_letters", _COLUMNS, (_row(letter, body, preview=preview) for letter in letters))


def _letters(client: Client, name: str) -> Iterator[StoredMessage]:
    client.groups.info(name)  # A name that is mistyped has no dead letters either.
    return client.groups.dead_letters(name)


def _origin(letter: StoredMessage) -> dict[str, Any]:
    """Where it was consumed first: its topic and id there."""
    return {
        "origin_topic": letter.properties.get("RETRY_TOPIC", letter.topic),
        "origin_message_id": letter.properties.get("ORIGIN_MESSAGE_ID", letter.message_id),
    }


def _json(letter: StoredMessage, body: str) -> dict[str, Any]:
    return to_json(letter, body) | _origin(letter)


def _row(letter: StoredMessage, body: str, *, preview: bool) -> dict[str, Any]:
    return to_row(letter, body, preview=preview) | _origin(letter)


@dlq.command(cls=Command)
@click.argument("name", metavar="GROUP", shell_complete=complete_group)
@click.option("--offset", "offsets", multiple=True, type=click.IntRange(0), help="Only this one; may be repeated.")
@click.option("--execute", is_flag=True, help="Really do it; without it only the plan is shown.")
@pass_invocation
def resend(invocation: Invocation, name: str, offsets: tuple[int, ...], execute: bool) -> int:
    """Deliver dead letters to their group once more, as if for the first time. They stay where they are.

    Exit code 1 when only the plan was shown, or not all could be sent; 5 for an --offset that is none's.
    """
    with invocation.client() as client:
        wanted = set(offsets)
        letters = [letter for letter in _letters(client, name) if not wanted or letter.queue_offset in wanted]
        if missing := wanted - {letter.queue_offset for letter in letters}:
            raise MessageNotFoundError(f"group {name} has no dead letter {', '.join(map(str, sorted(missing)))}")
        sent = client.groups.resend(name, *letters) if execute else 0
    out = invocation.out
    found = counted(len(letters), "dead letter")
    if out.is_json:
        out.document({"group": name, "dead_letters": len(letters), "sent": sent, "executed": execute})
    elif execute:
        out.note(f"{sent:,} of {found} sent to {name} again")
    elif not letters:
        out.note(f"{name} has no dead letters")
    else:
        out.note(f"would send {found} to {name} again; --execute does it")
    if not execute:
        return EXIT_NOT_EXECUTED if letters else 0
    return 0 if sent == len(letters) else EXIT_NOT_ALL
