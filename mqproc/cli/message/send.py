"""`mqproc send`: one message, or one for each line of stdin or of a file."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from mqproc.cli.options import Command, Invocation, RateRange, complete_topic, pass_invocation
from mqproc.cli.output import Column, Output, rate_text
from mqproc.cli.times import is_duration, now_ms, parse_time_ms
from mqproc.client import Client, Producer
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.encoding import check_message
from mqproc.client.requests import WRITER, ping
from mqproc.errors import BadPropertyError, BadRequestError, MessageTooLargeError, MqprocError
from mqproc.types import Message, SendResult
from mqproc.util.units import DELAY_LEVELS, counted

STDIN = "-"
_COLUMNS = [
    Column("message_id"),
    Column("unique_id"),
    Column("queue_id", "queue", "number"),
    Column("queue_offset", kind="number"),
    Column("physical_offset", kind="number"),
    Column("store_timestamp_ms", "store time", "time_ms"),
    Column("status"),
]
_FIRST_ERRORS = 3


class Property(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "property"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, separator, text = str(value).partition("=")
        if not separator or not name:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, text


class Ahead(click.ParamType[int]):
    """A time to come: a duration from now on, or a moment."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        now = now_ms()
        try:
            found = parse_time_ms(str(value), now)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return 2 * now - found if is_duration(str(value)) else found


PROPERTY = Property()
AHEAD = Ahead()


@click.command(cls=Command)
@click.argument("topic", shell_complete=complete_topic)
@click.argument("body", required=False)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Send each line of a file.")
@click.option("--whole", is_flag=True, help="All of --file or stdin is one message, whatever bytes it has.")
@click.option("--key", "keys", multiple=True, help="Key to find it by; may be repeated.")
@click.option("--key-delimiter", metavar="TEXT", help="Of lines: what stands before it is the line's key.")
@click.option("--tag", default="", help="Tag that consumers filter by.")
@click.option("--property", "properties", multiple=True, type=PROPERTY, metavar="NAME=VALUE", help="Further property.")
@click.option("--delay-level", type=click.IntRange(1, DELAY_LEVELS), help="Deliver after this level's delay: 1s … 2h.")
@click.option("--deliver-at", type=AHEAD, metavar="TIME", help="Deliver then: 2h from now, or a moment.")
@click.option("--queue", type=click.IntRange(0), help="Queue id; else the queues take turns.")
@click.option("--sharding-key", default="", metavar="TEXT", help="What has one goes to one queue, in its order.")
@click.option("--count", type=click.IntRange(1), default=1, help="Send the body so often.  [default: 1]")
@click.option("--rate", type=RateRange(0, min_open=True), metavar="N", help="At most so many a second.")
@click.option("--no-wait", is_flag=True, help="One message: answer before the sync of a SYNC_FLUSH store.")
@pass_invocation
def send(
    invocation: Invocation,
    topic: str,
    body: str | None,
    file: Path | None,
    whole: bool,
    keys: tuple[str, ...],
    key_delimiter: str | None,
    tag: str,
    properties: tuple[tuple[str, str], ...],
    delay_level: int | None,
    deliver_at: int | None,
    queue: int | None,
    sharding_key: str,
    count: int,
    rate: float | None,
    no_wait: bool,
) -> int:
    """Send messages: one, from stdin, or a file's lines.

    Sends BODY to TOPIC, or a message for each line of --file, or of stdin when BODY is - or missing; with --whole all
    of it as one.
    Prints where each went. Exit code 1 when one was not stored: it is told with its line, and the others go.
    """
    template = Message(
        topic,
        b"",
        tag,
        keys,
        dict(properties),
        queue,
        delay_level=delay_level or 0,
        deliver_at_ms=deliver_at or 0,
        sharding_key=sharding_key,
    )
    check_message(template)
    with ExitStack() as stack:
        client = stack.enter_context(invocation.client())
        given = _given(body, file, whole, key_delimiter)
        if given is not None:
            bodies: Iterable[bytes] = itertools.repeat(given, count)
            if count == 1:
                _print(invocation.out, [client.send(_message(template, given, None), wait=not no_wait)])
                return 0
        else:
            if count != 1:
                raise click.UsageError("--count goes with BODY")
            stream = stack.enter_context(file.open("rb")) if file is not None else _stdin()
            bodies = (line.removesuffix(b"\n").removesuffix(b"\r") for line in stream)
        # Where no group runs nothing is read from stdin, which would be lost.
        client.run(ping(WRITER))
        delimiter = key_delimiter.encode() if key_delimiter else None
        unit = "message" if count > 1 else "line"
        sending = _Sending(client, invocation.out, template, delimiter, unit)
        return sending.run(_paced(bodies, rate))


def _given(body: str | None, file: Path | None, whole: bool, key_delimiter: str | None) -> bytes | None:
    """The one body that is to be sent; None when there is one in each line. Raises a usage error."""
    if body is not None and body != STDIN:
        if file is not None or whole:
            raise click.UsageError(f"give BODY or {'--whole' if whole else '--file'}, not both")
        return body.encode("utf-8", "surrogateescape")
    if not whole:
        return None
    if key_delimiter:
        raise click.UsageError("--key-delimiter is for lines; --whole has none")
    if file is None:
        return _all_of(_stdin(), "stdin")
    with file.open("rb") as stream:
        return _all_of(stream, str(file))


def _all_of(stream: BinaryIO, name: str) -> bytes:
    """What a stream has, as far as a message may have so much. Raises MessageTooLargeError."""
    data = stream.read(FRAME_BYTES_MAX + 1)
    if len(data) > FRAME_BYTES_MAX:
        raise MessageTooLargeError(f"{name}: more than {FRAME_BYTES_MAX:,} bytes, which no message may have")
    return data


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise click.UsageError("stdin is closed: give BODY or --file")
    return sys.stdin.buffer


def _message(template: Message, body: bytes, delimiter: bytes | None) -> Message:
    keys = template.keys
    if delimiter is not None:
        key, found, rest = body.partition(delimiter)
        if found:
            keys, body = (*keys, _key(key)), rest
    return msgspec.structs.replace(template, body=body, keys=keys)


def _key(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadPropertyError(f"key {data!r} is no UTF-8") from None


def _paced(bodies: Iterable[bytes], rate: float | None) -> Iterator[bytes]:
    """No faster than `rate` a second, without catching up after a pause."""
    if rate is None:
        yield from bodies
        return
    due_s = time.monotonic()
    for body in bodies:
        pause_s = due_s - time.monotonic()
        if pause_s > 0:
            time.sleep(min(pause_s, threading.TIMEOUT_MAX))
        due_s = max(due_s, time.monotonic() - 1 / rate) + 1 / rate
        yield body


class _Sending:
    """Many messages through a batching producer: prints results in order, counts what failed."""

    def __init__(self, client: Client, out: Output, template: Message, delimiter: bytes | None, unit: str) -> None:
        """A message is `template` with a line, or with what stands behind `delimiter`; the key stands before it.

        `unit` is what people count: lines, or messages.
        """
        self._client = client
        self._out = out
        # Each as it comes, so JSON comes as lines.
        self._lines = Output("jsonl" if out.shape == "json" else out.shape, stream=out.stream)
        self._template = template
        self._delimiter = delimiter
        self._unit = unit
        self._lock = threading.Lock()
        self._failed = 0
        self._stored = 0
        # Why results can be printed no more. What is to be sent goes all the same.
        self._unprinted: OSError | None = None

    def run(self, lines: Iterable[bytes]) -> int:
        started_s = time.monotonic()
        if self._lines.shape == "csv":
            self._lines.rows("results", _COLUMNS, ())
        try:
            with self._client.producer() as producer:
                for number, line in enumerate(lines, 1):
                    self._send(producer, number, line)
        finally:
            # Who ends it by Ctrl-C wants to know too.
            self._tell(time.monotonic() - started_s)
        if self._unprinted is not None and not isinstance(self._unprinted, BrokenPipeError):
            raise self._unprinted
        return 1 if self._failed else 0

    def _send(self, producer: Producer, number: int, line: bytes) -> None:
        done = functools.partial(self._done, number)
        try:
            producer.send(_message(self._template, line, self._delimiter), on_done=done)
        except BadRequestError as error:
            self._tell_refused(number, error)

    def _tell(self, seconds: float) -> None:
        stored = counted(self._stored, "message")
        self._out.note(f"{stored} stored in {seconds:.2f} s, {rate_text(self._stored, seconds)}")
        if self._failed:
            self._out.note(f"not stored: {counted(self._failed, 'message')}")

    def _done(self, number: int, future: Future[SendResult]) -> None:
        """Called by the producer's thread, one after the other."""
        error = future.exception()
        if error is not None:
            self._tell_refused(number, error)
            return
        self._stored += 1
        if self._lines.shape == "table" or self._unprinted is not None:
            return
        try:
            self._lines.further_rows("results", _COLUMNS, [msgspec.structs.asdict(future.result())])
        except OSError as failure:
            self._unprinted = failure

    def _tell_refused(self, number: int, error: BaseException) -> None:
        """By the producer's thread, and by the one that sends."""
        with self._lock:
            self._failed += 1
            told = self._failed <= _FIRST_ERRORS
        if told:
            code = error.code if isinstance(error, MqprocError) else type(error).__name__
            # The store counts within a frame, in which a message that it refuses comes alone.
            text = str(error).removeprefix("message 0: ")
            self._out.note(f"mqproc: {self._unit} {number:,} is not stored: {code}: {text}")


def _print(out: Output, results: list[SendResult]) -> None:
    if out.shape == "json":
        out.document(msgspec.structs.asdict(results[0]))
    elif out.shape == "table":
        out.fields(_COLUMNS, msgspec.structs.asdict(results[0]))
    else:
        out.rows("results", _COLUMNS, map(msgspec.structs.asdict, results))
