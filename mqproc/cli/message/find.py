"""`mqproc message`: find messages by id, key, offset, time or content, and trace one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click
import msgspec

from mqproc.cli.message.format import BODIES, FIELD_COLUMNS, RAW, ROW_COLUMNS, plain_body, to_json, to_row
from mqproc.cli.message.send import PROPERTY
from mqproc.cli.options import TIME, Invocation, command, complete_topic, filter_of, filter_options
from mqproc.cli.output import Output, OutputColumn, Progress, encode_json, output_columns
from mqproc.cli.topic import no_topic, queues_of
from mqproc.client import Client
from mqproc.client import requests as core
from mqproc.client.tracing import Trace
from mqproc.errors import MessageNotFoundError
from mqproc.ipc import control_words
from mqproc.layout import properties as names
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from mqproc.util.units import counted, format_time
from mqproc.wire.operations import ScanRequest

_body = click.option("--body", type=click.Choice(BODIES), help="How bodies are shown.  [default: text]")
_body_of_one = click.option(
    "--body", type=click.Choice((*BODIES, RAW)), help="How the body is shown; raw: only its bytes.  [default: text]"
)
_begin = click.option(
    "--begin", type=TIME, metavar="TIME", help="From this time on: ISO 8601, epoch ms, or an age: 15m."
)
_end = click.option("--end", type=TIME, metavar="TIME", help="Before this time.")
_time = click.option(
    "--time", type=click.Choice(["store", "born"]), default="store", show_default=True, help="Which time to compare."
)
_MAX = click.IntRange(1)
_KEY_MAX = click.IntRange(1, core.KEY_MESSAGES_MAX)


@command()
@click.argument("message_id", metavar="ID")
@click.option("--topic", default="", shell_complete=complete_topic, help="Topic of the unique id.")
@_body_of_one
def get(invocation: Invocation, message_id: str, topic: str, body: str | None) -> None:
    """Show the message with an offset id, or with a unique id and its --topic.

    Exit code 5 if there is no such message.
    """
    with invocation.client() as client:
        print_one(invocation.out, client.get(message_id, topic), body)


@command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("key")
@_begin
@_end
@_time
@click.option(
    "-n",
    "--max",
    "--limit",
    "most",
    type=_KEY_MAX,
    default=64,
    show_default=True,
    metavar="N",
    help="At most N messages.",
)
@click.option("--unique", is_flag=True, help="KEY is a unique id.")
@_body
def key(
    invocation: Invocation,
    topic: str,
    key: str,
    begin: int | None,
    end: int | None,
    time: Literal["store", "born"],
    most: int,
    unique: bool,
    body: str | None,
) -> None:
    """Show the messages of TOPIC that have KEY. Exit code 5 without a match."""
    with invocation.client() as client:
        found = client.by_key(topic, key, begin, end, max_messages=most, unique=unique, time=time)
        _note_damage(invocation.out, client)
    if not found:
        raise MessageNotFoundError(f"no message of {topic} has the key {key!r}")
    print_many(invocation.out, found, body)


@command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("tag")
@_begin
@_end
@_time
@click.option(
    "-n",
    "--max",
    "--limit",
    "most",
    type=_KEY_MAX,
    default=64,
    show_default=True,
    metavar="N",
    help="At most N messages.",
)
@_body
def tag(
    invocation: Invocation,
    topic: str,
    tag: str,
    begin: int | None,
    end: int | None,
    time: Literal["store", "born"],
    most: int,
    body: str | None,
) -> None:
    """Show the messages of TOPIC that have TAG, found by the index.

    Tags are indexed with the option message_index_tags, and in stores that RocketMQ 5.4 or later made. In other
    stores use message range --tag. Exit code 5 without a match.
    """
    with invocation.client() as client:
        found = client.by_tag(topic, tag, begin, end, max_messages=most, time=time)
        _note_damage(invocation.out, client)
    if not found:
        raise MessageNotFoundError(f"no message of {topic} has the tag {tag!r}")
    print_many(invocation.out, found, body)


@command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("queue", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
@_body_of_one
def offset(invocation: Invocation, topic: str, queue: int, offset: int, body: str | None) -> None:
    """Show the message at an OFFSET of a QUEUE. Exit code 5 without a match."""
    with invocation.client() as client:
        found = client.pull(topic, queue, offset, 1)
    if not found.messages:
        bounds = f"[{found.min_offset}, {found.max_offset})"
        raise MessageNotFoundError(
            f"queue {queue} of {topic} has no message at {offset}: {found.status.value}, offsets are {bounds}"
        )
    print_one(invocation.out, found.messages[0], body)


@command("range")
@click.argument("topic", shell_complete=complete_topic)
@_begin
@_end
@_time
@filter_options
@click.option("-n", "--max", "--limit", "most", type=_MAX, metavar="N", help="At most N messages.  [default: all]")
@click.option("--count", "only_count", is_flag=True, help="Print only the number of messages.")
@_body
def range_(
    invocation: Invocation,
    topic: str,
    begin: int | None,
    end: int | None,
    time: Literal["store", "born"],
    tags: str,
    sql: str,
    most: int | None,
    only_count: bool,
    body: str | None,
) -> int:
    """Show the messages of TOPIC with begin ≤ time < end, queue by queue.

    Exit code 5 if there is no such topic.
    """
    chosen = filter_of(tags, sql)
    if only_count and most is not None:
        raise click.UsageError("--count counts all messages; --max limits those that are shown")
    with invocation.client() as client:
        queues_of(client, topic)  # Otherwise a missing topic would look like an empty topic.
        if only_count:
            count = client.count(topic, begin, end, filter=chosen, time=time)
            if invocation.out.is_json:
                invocation.out.document({"topic": topic, "count": count})
            else:
                invocation.out.line(str(count))
        else:
            pages = min(most, 4096) if most else 4096
            found = client.range(topic, begin, end, filter=chosen, time=time, page_messages=pages)
            print_many(invocation.out, itertools.islice(found, most), body)
        _note_damage(invocation.out, client)
    return 0


def _note_damage(out: Output, client: Client) -> None:
    """Warn on stderr if answers may lack messages because of damage."""
    holes = control_words.damage_holes(client.stats())
    if holes:
        ranges = counted(holes, "damaged range")
        out.note(f"damage: the log has {ranges}; messages in them cannot be read; mqproc store info lists them")


@command()
@click.option("--topic", shell_complete=complete_topic, help="Only this topic; it may be a deleted one.")
@click.option(
    "--property", "selected", type=PROPERTY, metavar="NAME=VALUE", help="Only with this property; also KEYS, TAGS."
)
@click.option("--contains", default="", metavar="TEXT", help="Only bodies that contain this text, as stored.")
@_begin
@_end
@click.option(
    "-n", "--max", "--limit", "most", type=_MAX, default=256, show_default=True, metavar="N", help="At most N hits."
)
@click.option(
    "--cursor", type=click.IntRange(0), default=None, metavar="N", help="Continue an earlier scan from its cursor."
)
@_body
def scan(
    invocation: Invocation,
    topic: str | None,
    selected: tuple[str, str] | None,
    contains: str,
    begin: int | None,
    end: int | None,
    most: int,
    cursor: int | None,
    body: str | None,
) -> int:
    """Search the whole log by property, body or time, without a key.

    A scan that stops at --max or by Ctrl-C prints the --cursor to continue from. Exit code 5 if there is no such topic
    and the log has no message of it.
    """
    if topic == "":
        raise no_topic(topic)
    out = invocation.out
    request = core.scan_request(
        topic or "",
        begin,
        end,
        dict([selected]) if selected else None,
        contains.encode("utf-8", "surrogateescape"),
        -1 if cursor is None else cursor,
        min(most, 256),
        core.PULL_BYTES,
    )
    columns = ROW_COLUMNS if topic else [*output_columns("topic"), *ROW_COLUMNS]
    with invocation.client() as client:
        scanner = _LogScan(client, request, most)
        is_whole = _print_hits(out, scanner.messages(out), body, columns)
        scanner.note_cursor(out)
        if not is_whole:
            raise KeyboardInterrupt
        _note_damage(out, client)
        if topic is not None and cursor is None and scanner.complete and not scanner.found:
            queues_of(client, topic)
    return 0


def _print_hits(out: Output, hits: Iterable[StoredMessage], body: str | None, columns: Sequence[OutputColumn]) -> bool:
    """Print hits as they arrive, or one table at the end; False after Ctrl-C."""
    rows: list[dict[str, Any]] = []
    is_whole = True
    try:
        if out.shape != "table":
            print_many(out, hits, body, streaming=True, columns=columns)
        else:
            # After Ctrl-C the list keeps its hits, and the cursor points after the last of them.
            rows.extend(_table_row(one, body, columns) for one in hits)
    except KeyboardInterrupt:
        is_whole = False
    if out.shape == "table":
        out.rows("messages", columns, rows)
    return is_whole


def _table_row(message: StoredMessage, body: str | None, columns: Sequence[OutputColumn]) -> dict[str, Any]:
    """Keep only the values of the table's columns: there may be many messages."""
    row = to_row(message, body or "text", preview=True)
    return {column.name: row[column.name] for column in columns}


@dataclass
class _LogScan:
    """A scan page by page, with the cursor to continue from. At most `left` more hits."""

    client: Client
    request: ScanRequest
    left: int
    complete: bool = False
    found: int = 0

    def __post_init__(self) -> None:
        self.cursor = self.request.physical_offset

    def messages(self, out: Output) -> Iterator[StoredMessage]:
        end = self.client.stats()["written"]
        with Progress(out, "scan", "hits", quiet=out.is_terminal) as progress:
            while self.left and not self.complete:
                request = msgspec.structs.replace(
                    self.request, physical_offset=self.cursor, max_messages=min(self.left, 256)
                )
                page = self.client.run(core.scan_page(request))
                self.found += len(page.messages)
                self.left -= len(page.messages)
                for message in page.messages:
                    yield message
                    # An interrupted page is continued without a repeated message.
                    self.cursor = message.physical_offset + message.size
                self._advance(page)
                progress.update(max(self.cursor, 0), end, self.found)

    def _advance(self, page: core.Page) -> None:
        if page.next_call is None:
            self.complete = True
            return
        self.cursor = msgspec.msgpack.decode(page.next_call.options, type=ScanRequest).physical_offset

    def note_cursor(self, out: Output) -> None:
        if not self.complete:
            out.note(f"the scan has not reached the end; --cursor {max(self.cursor, 0)} continues it")


def print_one(out: Output, found: StoredMessage, body: str | None) -> None:
    """Print one message, a line per field, or its body only."""
    if body == RAW:
        out.data(plain_body(found))
    elif out.is_json:
        out.document(to_json(found, body))
    else:
        out.fields(FIELD_COLUMNS, to_row(found, body or "text", preview=False))


def print_many(
    out: Output,
    found: Iterable[StoredMessage],
    body: str | None,
    *,
    streaming: bool = False,
    columns: Sequence[OutputColumn] = ROW_COLUMNS,
) -> None:
    """Print messages as rows. `streaming` prints each as soon as it is found, JSON as lines."""
    if streaming and out.is_json:
        for one in found:
            out.line(encode_json(to_json(one, body)))
            out.flush()
    elif out.is_json:
        out.rows("messages", columns, (to_json(one, body) for one in found))
    else:
        shape = body or "text"
        out.rows("messages", columns, (to_row(one, shape, preview=out.shape == "table") for one in found))


# Trace


_KEYS = output_columns("key", "unique:text:unique id", "indexed")
_PROGRESS = output_columns(
    "group, passed:text:consumed, offset:number:group's offset, messages_before:count:before it",
    "member_id:text:member",
)
_COPIES = output_columns(
    "kind, topic, queue_id:number:queue, queue_offset:number:offset, store_timestamp_ms:time_ms:store time",
    "reconsume_times:number:times, real_topic:text:to, message_id",
)
_TRANSACTION_STATES = {
    "given up": "given up: no producer decided it; a copy is in TRANS_CHECK_MAX_TIME_TOPIC",
    "ended": "ended; outcome unknown, as its messages may have been deleted from the log",
}


@command()
@click.argument("message_id", metavar="ID")
@click.option("--topic", default="", shell_complete=complete_topic, help="Topic of the unique id.")
def trace(invocation: Invocation, message_id: str, topic: str) -> None:
    """Show where a message is: queue, index, groups, retries, dead letters.

    Lists its record, queue unit, index entries, the groups that have consumed it, and its copies: a copy waits for its
    delivery time or transaction, or is a delivered message, a retry or a dead letter. Exit code 5 if there is no such
    message.
    """
    with invocation.client() as client:
        found = client.trace(message_id, topic)
    if invocation.out.is_json:
        invocation.out.document(found.to_json())
    else:
        _print(invocation.out, found)


def _delivery(message: StoredMessage) -> str:
    """Target and time of a delayed message, "" for others."""
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
        out.line(f"transaction {_TRANSACTION_STATES.get(found.transaction, found.transaction)}")
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
