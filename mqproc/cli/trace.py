"""`mqproc message trace`: where one message is."""

from __future__ import annotations

from dataclasses import asdict

import click

from mqproc.cli.commands import Command
from mqproc.cli.completing import complete_topic
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.message_format import FIELD_COLUMNS, to_row
from mqproc.cli.output import Column, Output
from mqproc.cli.times import format_time
from mqproc.client.tracing import Trace
from mqproc.layout import properties as names
from mqproc.message import StoredMessage
from mqproc.names import SCHEDULE_TOPIC, TIMER_TOPIC

_KEYS = [Column("key"), Column("unique", "unique id"), Column("indexed")]
_PROGRESS = [
    Column("group"),
    Column("passed", "consumed"),
    Column("offset", "group's offset", "number"),
    Column("messages_before", "before it", "count"),
    Column("member_id", "member"),
]
_COPIES = [
    Column("kind"),
    Column("topic"),
    Column("queue_id", "queue", "number"),
    Column("queue_offset", "offset", "number"),
    Column("store_timestamp_ms", "store time", "time_ms"),
    Column("reconsume_times", "times", "number"),
    Column("real_topic", "to"),
    Column("message_id"),
]
_TRANSACTION = {
    "given up": "given up: nobody said what became of it, TRANS_CHECK_MAX_TIME_TOPIC has it",
    "ended": "ended; how is not known: what was made of it may be in the log no more",
}


@click.command(cls=Command)
@click.argument("message_id", metavar="ID")
@click.option("--topic", default="", shell_complete=complete_topic, help="Topic of a unique id.")
@pass_invocation
def trace(invocation: Invocation, message_id: str, topic: str) -> None:
    """Show where a message is: record, queue unit, index entries, groups that are past it, copies of it.

    Copies are what waits for its time or its transaction, what was delivered of it, retries, and dead letters.
    Exit code 5 when there is no such message.
    """
    with invocation.client() as client:
        found = client.trace(message_id, topic)
    if invocation.out.is_json:
        invocation.out.document(found.to_json())
    else:
        _print(invocation.out, found)


def _delivery(message: StoredMessage) -> str:
    """Where and when a message is delivered that waits for its time; "" for others."""
    to = f"to {message.properties.get(names.REAL_TOPIC, '?')} queue {message.properties.get(names.REAL_QID, '?')}"
    if message.topic == SCHEDULE_TOPIC:
        return f"{to}, by delay level {message.queue_id + 1}"
    at_ms = message.properties.get(names.TIMER_DELIVER_MS) or message.properties.get(names.TIMER_OUT_MS, "")
    if message.topic == TIMER_TOPIC and at_ms.isdecimal():
        return f"{to}, at {format_time(int(at_ms))}"
    return ""


def _print(out: Output, found: Trace) -> None:
    message = found.message
    out.fields(FIELD_COLUMNS, to_row(message, "text", preview=True))
    out.line("")
    out.line(f"queue unit  {message.topic} queue {message.queue_id} offset {message.queue_offset}: {found.unit}")
    if delivery := _delivery(message):
        out.line(f"delivery    {delivery}")
    if found.transaction:
        out.line(f"transaction {_TRANSACTION.get(found.transaction, found.transaction)}")
    for title, columns, parts in (
        ("index", _KEYS, found.keys),
        ("groups", _PROGRESS, found.progress),
        ("copies", _COPIES, found.copies),
    ):
        out.line("")
        if parts:
            out.rows(title, columns, [asdict(part) for part in parts])
        else:
            out.line(f"{title}: none")
