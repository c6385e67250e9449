"""`mqproc message`: find messages by id, key, offset, time, or content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import click
import msgspec

from mqproc.cli.message.format import BODIES, FIELD_COLUMNS, RAW, ROW_COLUMNS, plain_body, to_json, to_row
from mqproc.cli.message.send import PROPERTY
from mqproc.cli.options import TIME, Command, Invocation, complete_topic, filter_of, filter_options, pass_invocation
from mqproc.cli.output import Column, Output, Progress, encode_json
from mqproc.cli.times import format_time
from mqproc.cli.topic import no_topic, queues_of
from mqproc.client import Client
from mqproc.client import requests as core
from mqproc.client.tracing import Trace
from mqproc.errors import MessageNotFoundError, OffsetOutOfRangeError
from mqproc.ipc import control_words
from mqproc.layout import properties as names
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from mqproc.util.units import counted
from mqproc.wire.operations.log import ScanRequest

Command_ = Callable[..., Any]

_body = click.option("--body", type=click.Choice(BODIES), help="How bodies are shown.  [default: text]")
_body_of_one = click.option(
    "--body", type=click.Choice((*BODIES, RAW)), help="How the body is shown; raw: only its bytes.  [default: text]"
)
_begin = click.option("--begin", type=TIME, metavar="TIME", help="From this time on: ISO 8601, epoch ms, or 15m ago.")
_end = click.option("--end", type=TIME, metavar="TIME", help="Up to this time.")
_time = click.option(
    "--time", type=click.Choice(["store", "born"]), default="store", show_default=True, help="Which time is meant."
)
_MAX = click.IntRange(1)
_KEY_MAX = click.IntRange(1, core.KEY_MESSAGES_MAX)


@click.command(cls=Command)
@click.argument("message_id", metavar="ID")
@click.option("--topic", default="", shell_complete=complete_topic, help="Topic of a unique id.")
@_body_of_one
@pass_invocation
def get(invocation: Invocation, message_id: str, topic: str, body: str | None) -> None:
    """Show the message with an offset id, or with a unique id and its --topic. Exit code 5 when there is none."""
    with invocation.client() as client:
        print_one(invocation.out, client.get(message_id, topic), body)


@click.command(cls=Command)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("key")
@_begin
@_end
@_time
@click.option("--max", "most", type=_KEY_MAX, default=64, show_default=True, help="Stop after so many.")
@click.option("--unique", is_flag=True, help="KEY is a unique id.")
@_body
@pass_invocation
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
) -> int:
    """Show the messages of TOPIC that have KEY. Exit code 5 when there is none."""
    with invocation.client() as client:
        found = client.by_key(topic, key, begin, end, max_messages=most, unique=unique, time=time)
        _tell_damage(invocation.out, client)
    if not found:
        raise MessageNotFoundError(f"no message of {topic} has the key {key!r}")
    return print_many(invocation.out, found, body)


@click.command(cls=Command)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("queue", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
@_body_of_one
@pass_invocation
def offset(invocation: Invocation, topic: str, queue: int, offset: int, body: str | None) -> None:
    """Show the message at an OFFSET of a QUEUE. Exit code 5 when there is none."""
    with invocation.client() as client:
        found = client.pull(topic, queue, offset, 1)
    if not found.messages:
        bounds = f"[{found.min_offset}, {found.max_offset})"
        error = OffsetOutOfRangeError(
            f"queue {queue} of {topic} has no message at {offset}: {found.status.value}, offsets are {bounds}",
            min_offset=found.min_offset,
            max_offset=found.max_offset,
        )
        raise MessageNotFoundError(str(error)) from error
    print_one(invocation.out, found.messages[0], body)


@click.command("range", cls=Command)
@click.argument("topic", shell_complete=complete_topic)
@_begin
@_end
@_time
@filter_options
@click.option("--max", "most", type=_MAX, help="Stop after so many.  [default: all]")
@click.option("--count", "only_count", is_flag=True, help="Only say how many.")
@_body
@pass_invocation
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
    """Show the messages of TOPIC with begin ≤ time < end, queue by queue. Exit code 5 when there is no such topic."""
    chosen = filter_of(tags, sql)
    if only_count and most is not None:
        raise click.UsageError("--count counts all; --max is for messages that are shown")
    with invocation.client() as client:
        queues_of(client, topic)  # One that is not there would look like one without messages.
        if only_count:
            count = client.count(topic, begin, end, filter=chosen, time=time)
            _print_count(invocation.out, topic, count)
        else:
            pages = min(most, 4096) if most else 4096
            found = client.range(topic, begin, end, filter=chosen, time=time, page_messages=pages)
            print_many(invocation.out, itertools.islice(found, most), body)
        _tell_damage(invocation.out, client)
    return 0


def _tell_damage(out: Output, client: Client) -> None:
    """That answers may lack messages, which nobody would see in them."""
    holes = control_words.damage_holes(client.stats())
    if holes:
        ranges = counted(holes, "damaged range")
        out.note(
            f"damage: the log has {ranges}; messages that were there cannot be read: mqproc store info tells where"
        )


def _print_count(out: Output, topic: str, count: int) -> None:
    if out.is_json:
        out.document({"topic": topic, "count": count})
    else:
        out.line(str(count))


@click.command(cls=Command)
@click.option("--topic", shell_complete=complete_topic, help="Only this topic, which may have been deleted.")
@click.option(
    "--property", "wanted", type=PROPERTY, metavar="NAME=VALUE", help="Only with this property; also KEYS, TAGS."
)
@click.option("--contains", default="", metavar="TEXT", help="Only bodies that contain this, as they are stored.")
@_begin
@_end
@click.option("--max", "most", type=_MAX, default=256, show_default=True, help="Stop after so many hits.")
@click.option("--cursor", type=click.IntRange(0), default=None, help="Go on from where an earlier scan stopped.")
@_body
@pass_invocation
def scan(
    invocation: Invocation,
    topic: str | None,
    wanted: tuple[str, str] | None,
    contains: str,
    begin: int | None,
    end: int | None,
    most: int,
    cursor: int | None,
    body: str | None,
) -> int:
    """Pass over the whole log for messages by property, body or time, without a key.

    When it stops at --max, or by Ctrl-C, it tells the --cursor that goes on from there. Exit code 5 when the whole log
    has nothing of --topic, and there is no such topic.
    """
    if topic == "":
        raise no_topic(topic)
    out = invocation.out
    request = core.scan_request(
        topic or "",
        begin,
        end,
        dict([wanted]) if wanted else None,
        contains.encode("utf-8", "surrogateescape"),
        -1 if cursor is None else cursor,
        min(most, 256),
        core.PULL_BYTES,
    )
    columns = ROW_COLUMNS if topic else [Column("topic"), *ROW_COLUMNS]
    with invocation.client() as client:
        scanner = _Scan(client, request, most)
        is_whole = _print_hits(out, scanner.messages(out), body, columns)
        scanner.tell_cursor(out)
        if not is_whole:
            raise KeyboardInterrupt
        _tell_damage(out, client)
        if topic is not None and cursor is None and scanner.complete and not scanner.found:
            queues_of(client, topic)
    return 0


def _print_hits(out: Output, hits: Iterable[StoredMessage], body: str | None, columns: Sequence[Column]) -> bool:
    """Print hits as they come, or as one table at the end. False when Ctrl-C came before: what was found is printed."""
    rows: list[dict[str, Any]] = []
    is_whole = True
    try:
        if out.shape != "table":
            print_many(out, hits, body, streaming=True, columns=columns)
        else:
            # What came before Ctrl-C stays in the list; the cursor that is told then lies behind it.
            rows.extend(_shown(one, body, columns) for one in hits)
    except KeyboardInterrupt:
        is_whole = False
    if out.shape == "table":
        out.rows("messages", columns, rows)
    return is_whole


def _shown(message: StoredMessage, body: str | None, columns: Sequence[Column]) -> dict[str, Any]:
    """What a table has of a message, and no more: there may be many."""
    row = to_row(message, body or "text", preview=True)
    return {column.name: row[column.name] for column in columns}


class _Scan:
    """A scan page by page, which knows where it would go on."""

    def __init__(self, client: Client, request: ScanRequest, most: int) -> None:
        self._client = client
        self._request = request
        self._left = most
        self.cursor = request.physical_offset
        self.complete = False
        self.found = 0

    def messages(self, out: Output) -> Iterator[StoredMessage]:
        end = self._client.stats()["written"]
        with Progress(out, "scan", "hits", quiet=out.is_terminal) as progress:
            while self._left and not self.complete:
                request = msgspec.structs.replace(
                    self._request, physical_offset=self.cursor, max_messages=min(self._left, 256)
                )
                page = self._client.run(core.scan_page(request))
                self.found += len(page.messages)
                self._left -= len(page.messages)
                for message in page.messages:
                    yield message
                    # So who stops amid a page has none of it twice.
                    self.cursor = message.physical_offset + message.size
                self._advance(page)
                progress.update(max(self.cursor, 0), end, self.found)

    def _advance(self, page: core.Page) -> None:
        if page.next_call is None:
            self.complete = True
            return
        self.cursor = msgspec.msgpack.decode(page.next_call.options, type=ScanRequest).physical_offset

    def tell_cursor(self, out: Output) -> None:
        if not self.complete:
            out.note(f"the scan has not reached the end: --cursor {max(self.cursor, 0)} goes on")


def print_one(out: Output, found: StoredMessage, body: str | None) -> None:
    """One message, a line for each field; or its body alone."""
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
    columns: Sequence[Column] = ROW_COLUMNS,
) -> int:
    """Messages as rows. `streaming`: each as soon as it is found, so JSON comes as lines."""
    if streaming and out.is_json:
        for one in found:
            out.line(encode_json(to_json(one, body)))
            out.flush()
    elif out.is_json:
        out.rows("messages", columns, (to_json(one, body) for one in found))
    else:
        shape = body or "text"
        out.rows("messages", columns, (to_row(one, shape, preview=out.shape == "table") for one in found))
    return 0


# --- trace ---
# `mqproc message trace`: where one message is.


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
