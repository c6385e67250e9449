"""`mqproc message`: find messages by id, key, offset, time, or content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import click
import msgspec

from mqproc import control_words
from mqproc.cli.commands import MOMENT, Command, Group
from mqproc.cli.completing import complete_topic
from mqproc.cli.filters import filter_of, filter_options
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.message_format import BODIES, FIELD_COLUMNS, RAW, ROW_COLUMNS, plain_body, to_json, to_row
from mqproc.cli.output import Column, Output, encode_json
from mqproc.cli.progress import Progress
from mqproc.cli.send import PROPERTY
from mqproc.cli.topic import no_topic, queues_of
from mqproc.client import Client, core
from mqproc.errors import MessageNotFoundError, OffsetOutOfRangeError
from mqproc.message import StoredMessage
from mqproc.quantities import counted
from mqproc.wire.operations import ScanRequest

Command_ = Callable[..., Any]

_body = click.option("--body", type=click.Choice(BODIES), help="How bodies are shown.  [default: text]")
_body_of_one = click.option(
    "--body", type=click.Choice((*BODIES, RAW)), help="How the body is shown; raw: only its bytes.  [default: text]"
)
_begin = click.option("--begin", type=MOMENT, metavar="TIME", help="From this time on: ISO 8601, epoch ms, or 15m ago.")
_end = click.option("--end", type=MOMENT, metavar="TIME", help="Up to this time.")
_time = click.option(
    "--time", type=click.Choice(["store", "born"]), default="store", show_default=True, help="Which time is meant."
)
_MAX = click.IntRange(1)
_KEY_MAX = click.IntRange(1, core.KEY_MESSAGES_MAX)


_LAZY = {
    "trace": ("mqproc.cli.trace:trace", "Show where a message is: queue, index, groups, retries, dead letters."),
}


@click.group(cls=Group, lazy=_LAZY)
def message() -> None:
    """Find messages by id, key, offset, time or content.

    Times are ISO 8601 (local when they name no zone), epoch milliseconds, or how long ago: 15m, 2h, 1d.
    """


@message.command(cls=Command)
@click.argument("message_id", metavar="ID")
@click.option("--topic", default="", shell_complete=complete_topic, help="Topic of a unique id.")
@_body_of_one
@pass_invocation
def get(invocation: Invocation, message_id: str, topic: str, body: str | None) -> None:
    """Show the message with an offset id, or with a unique id and its --topic. Exit code 5 when there is none."""
    with invocation.client() as client:
        print_one(invocation.out, client.get(message_id, topic), body)


@message.command(cls=Command)
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


@message.command(cls=Command)
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


@message.command("range", cls=Command)
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


@message.command(cls=Command)
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
