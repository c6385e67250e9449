"""`mqproc topic`: create, list, inspect and delete topics."""

from __future__ import annotations

import click

from mqproc.cli.options import CommandGroup, Invocation, command, complete_topic, execute_option
from mqproc.cli.output import output_columns
from mqproc.client import Client
from mqproc.errors import TopicNotFoundError
from mqproc.store.topics import check_changeable
from mqproc.types import QueueInfo, TopicInfo
from mqproc.util.units import counted

PERMISSIONS = {"r": 4, "w": 2, "rw": 6}
_TOPIC_COLUMNS = output_columns("topic", "queues:count", "message_count:count:messages", "permissions")
_QUEUE_COLUMNS = output_columns("queue_id:number:queue", "min_offset:count", "max_offset:count", "messages:count")


@click.group(cls=CommandGroup)
def topic() -> None:
    """Create, list, inspect and delete topics."""


@command(group=topic)
@click.argument("name", metavar="TOPIC", shell_complete=complete_topic)
@click.option("--queues", type=click.IntRange(1, 65535), default=8, show_default=True, help="Number of queues.")
@click.option(
    "--perm",
    type=click.Choice(list(PERMISSIONS)),
    help="Permissions; r refuses sends, w refuses reads in RocketMQ but not here.  [default: rw, or unchanged]",
)
def create(invocation: Invocation, name: str, queues: int, perm: str | None) -> None:
    """Create a topic, or add queues to it; queues cannot be removed."""
    bits = PERMISSIONS[perm] if perm else None
    with invocation.client() as client:
        client.create_topic(name, queues, perm=bits)
    document = {"topic": name, "queues": queues, "perm": bits}
    invocation.out.result(document, f"topic {name} has {counted(queues, 'queue')}")


@command("list", group=topic)
@click.option("--prefix", default="", shell_complete=complete_topic, help="Only names with this prefix.")
def list_(invocation: Invocation, prefix: str) -> None:
    """List topics with their queues and messages."""
    with invocation.client() as client:
        found = [info for info in client.topics() if info.topic.startswith(prefix)]
    rows = [_row(info) for info in sorted(found, key=lambda info: info.topic)]
    invocation.out.rows("topics", _TOPIC_COLUMNS, rows)


def _row(info: TopicInfo) -> dict[str, object]:
    permissions = ("r" if info.perm & 4 else "") + ("w" if info.perm & 2 else "")
    return {
        "topic": info.topic,
        "queues": info.queues,
        "perm": info.perm,
        "permissions": permissions or "none",
        "message_count": info.message_count,
        "read_queues": info.read_queues,
        "write_queues": info.write_queues,
        "attributes": dict(info.attributes),
    }


def _info(client: Client, name: str) -> TopicInfo:
    for found in client.topics():
        if found.topic == name:
            return found
    raise no_topic(name)


def queues_of(client: Client, name: str) -> list[QueueInfo]:
    """The queues of a topic, sorted. Raises TopicNotFoundError."""
    found = client.queues(name) if name else []  # An empty name would return all queues.
    if not found:
        raise no_topic(name)
    return sorted(found, key=lambda queue: queue.queue_id)


def no_topic(name: str) -> TopicNotFoundError:
    """The error for a missing topic."""
    return TopicNotFoundError(f"no topic {name!r}; mqproc topic list lists the topics")


@command(group=topic)
@click.argument("name", metavar="TOPIC", shell_complete=complete_topic)
def info(invocation: Invocation, name: str) -> None:
    """Show a topic's queues with their offsets. Exit code 5 if there is no such topic."""
    with invocation.client() as client:
        found = _info(client, name)
        queues = queues_of(client, name)
    rows = [
        {
            "queue_id": queue.queue_id,
            "min_offset": queue.min_offset,
            "max_offset": queue.max_offset,
            "messages": queue.max_offset - queue.min_offset,
        }
        for queue in queues
    ]
    out = invocation.out
    if out.shape == "json":
        out.document(_row(found) | {"queue_offsets": rows})
        return
    if out.shape == "table":
        is_narrowed = min(found.read_queues, found.write_queues) < found.queues
        used = f" ({found.read_queues:,} to read, {found.write_queues:,} to write)" if is_narrowed else ""
        out.line(f"{name}: {counted(found.queues, 'queue')}{used}, {counted(found.message_count, 'message')}")
    out.rows("queue_offsets", _QUEUE_COLUMNS, rows)


@command(group=topic)
@click.argument("name", metavar="TOPIC", shell_complete=complete_topic)
@execute_option
def delete(invocation: Invocation, name: str, execute: bool) -> int:
    """Show what deleting a topic with its queues deletes, or delete it.

    Its messages stay in the log until retention deletes them.
    """
    with invocation.client() as client:
        found = _info(client, name)
        check_changeable(name)
        if execute:
            client.delete_topic(name)
    content = f"{counted(found.queues, 'queue')} and {counted(found.message_count, 'message')}"
    plan = f"would delete {name} with {content}; --execute does it"
    invocation.out.result(_row(found) | {"deleted": execute}, f"deleted topic {name}" if execute else plan)
    return 0 if execute else invocation.plan_exit_code(True)
