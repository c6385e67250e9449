"""`mqproc send`: send one message, or one per line of stdin or a file."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from mqproc.cli.options import Invocation, ParsedText, RateRange, command, complete_topic, execute_option
from mqproc.cli.output import Output, output_columns, rate_text
from mqproc.client import Client, Producer
from mqproc.client._sync.connection_pool import run_steps
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.encoding import check_message
from mqproc.client.requests import WRITER, ping
from mqproc.client.timer_requests import waiting_message
from mqproc.errors import BadPropertyError, BadRequestError, MessageTooLargeError, MqprocError
from mqproc.layout import properties as names
from mqproc.types import Message, SendResult
from mqproc.util.units import DELAY_LEVELS, counted, format_time, is_duration, now_ms, parse_time_ms

STDIN = "-"
_COLUMNS = output_columns(
    "message_id, unique_id, queue_id:number:queue, queue_offset:number, physical_offset:number",
    "store_timestamp_ms:time_ms:store time, status",
)
_NOTED_ERRORS = 3


def parse_property(text: str) -> tuple[str, str]:
    """`NAME=VALUE`. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


def parse_future_time(text: str) -> int:
    """A future point in time as Unix ms: a duration from now, or a time. Raises ValueError."""
    now = now_ms()
    found = parse_time_ms(text, now)
    return 2 * now - found if is_duration(text) else found


PROPERTY = ParsedText("property", parse_property)
FUTURE_TIME = ParsedText("time", parse_future_time)


@command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("body", required=False)
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Send each line of this file."
)
@click.option("--whole", is_flag=True, help="Send all of --file or stdin as one message.")
@click.option("--key", "keys", multiple=True, help="Message key; may be repeated.")
@click.option("--key-delimiter", metavar="TEXT", help="The part of a line before TEXT is its key.")
@click.option("--tag", default="", help="Message tag.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    type=PROPERTY,
    metavar="NAME=VALUE",
    help="Message property; may be repeated.",
)
@click.option(
    "--delay-level", type=click.IntRange(1, DELAY_LEVELS), help="Deliver after the delay of this level, 1s … 2h."
)
@click.option("--deliver-at", type=FUTURE_TIME, metavar="TIME", help="Deliver after a duration (2h) or at a time.")
@click.option("--queue", type=click.IntRange(0), help="Queue id.  [default: round robin]")
@click.option("--sharding-key", default="", metavar="TEXT", help="Messages with equal TEXT go to one queue, in order.")
@click.option("--count", type=click.IntRange(1), default=1, metavar="N", help="Send BODY N times.  [default: 1]")
@click.option("--rate", type=RateRange(0, min_open=True), metavar="N", help="At most N messages per second.")
@click.option("--no-wait", is_flag=True, help="For one message: do not wait for the sync of a SYNC_FLUSH store.")
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
    """Send messages: one, from stdin, or the lines of a file.

    Sends BODY to TOPIC. Without BODY, or with -, each line of stdin or of --file is a message; with --whole all of it
    is one message. Prints where each message was stored. If a message is not stored, it is reported with its line, the
    others are sent, and the exit code is 1.
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
        single = _single_body(body, file, whole, key_delimiter)
        if single is not None:
            bodies: Iterable[bytes] = itertools.repeat(single, count)
            if count == 1:
                _print(invocation.out, client.send(_message(template, single, None), wait=not no_wait))
                return 0
        else:
            if count != 1:
                raise click.UsageError("--count goes with BODY")
            stream = stack.enter_context(file.open("rb")) if file is not None else _stdin()
            bodies = (line.removesuffix(b"\n").removesuffix(b"\r") for line in stream)
        # Without a running group nothing may be read from stdin: it would be lost.
        client.run(ping(WRITER))
        delimiter = key_delimiter.encode() if key_delimiter else None
        unit = "message" if count > 1 else "line"
        sender = _LineSender(client, invocation.out, template, delimiter, unit)
        return sender.run(_pace(bodies, rate))


@command()
@click.argument("message_id", metavar="ID")
@execute_option
def cancel(invocation: Invocation, message_id: str, execute: bool) -> int:
    """Cancel a message that waits for its delivery time, by its offset id or unique id.

    Exit code 5 if no such message waits. One that is due within a second or two may still be delivered.
    """
    with invocation.client() as client:
        found = run_steps(client.run, waiting_message(message_id))
        if execute:
            client.cancel(message_id)
    topic, due_ms = found.properties[names.REAL_TOPIC], int(found.properties[names.TIMER_DELIVER_MS])
    what = f"message {message_id} of {topic}, due at {format_time(due_ms)}"
    text = f"cancelled {what}" if execute else f"would cancel {what}; --execute does it"
    document = {"message_id": message_id, "topic": topic, "deliver_at_ms": due_ms, "cancelled": execute}
    invocation.out.result(document, text)
    return 0 if execute else invocation.plan_exit_code(True)


def _single_body(body: str | None, file: Path | None, whole: bool, key_delimiter: str | None) -> bytes | None:
    """The body of the only message, None if each line is a message. Raises a usage error."""
    if body is not None and body != STDIN:
        if file is not None or whole:
            raise click.UsageError(f"give BODY or {'--whole' if whole else '--file'}, not both")
        return body.encode("utf-8", "surrogateescape")
    if not whole:
        return None
    if key_delimiter:
        raise click.UsageError("--key-delimiter is for lines; it excludes --whole")
    if file is None:
        return _read_whole(_stdin(), "stdin")
    with file.open("rb") as stream:
        return _read_whole(stream, str(file))


def _read_whole(stream: BinaryIO, name: str) -> bytes:
    """Read a whole stream. Raises MessageTooLargeError if no message may be as large."""
    data = stream.read(FRAME_BYTES_MAX + 1)
    if len(data) > FRAME_BYTES_MAX:
        raise MessageTooLargeError(f"{name}: more than {FRAME_BYTES_MAX:,} bytes, the limit of a message")
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
        raise BadPropertyError(f"key {data!r} is not UTF-8") from None


def _pace(bodies: Iterable[bytes], rate: float | None) -> Iterator[bytes]:
    """Limit the rate per second, without catching up after a pause."""
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


@dataclass
class _LineSender:
    """Sends many messages through a batching producer.

    A message is `template` with a line as body; the part before `delimiter` is its key. Prints results in order and
    counts failures; `unit` is the counted thing in error messages: line or message.
    """

    client: Client
    out: Output
    template: Message
    delimiter: bytes | None
    unit: str

    def __post_init__(self) -> None:
        # Results are printed one by one, so JSON is printed as lines.
        self._lines = Output("jsonl" if self.out.shape == "json" else self.out.shape, stream=self.out.stream)
        self._lock = threading.Lock()
        self._failed = 0
        self._stored = 0
        # Error of printing a result. Sending continues without printing.
        self._print_error: OSError | None = None

    def run(self, lines: Iterable[bytes]) -> int:
        started_s = time.monotonic()
        if self._lines.shape == "csv":
            self._lines.rows("results", _COLUMNS, ())
        try:
            with self.client.producer() as producer:
                for number, line in enumerate(lines, 1):
                    self._send(producer, number, line)
        finally:
            # After Ctrl-C too.
            self._note_totals(time.monotonic() - started_s)
        if self._print_error is not None and not isinstance(self._print_error, BrokenPipeError):
            raise self._print_error
        return 1 if self._failed else 0

    def _send(self, producer: Producer, number: int, line: bytes) -> None:
        done = functools.partial(self._done, number)
        try:
            producer.send(_message(self.template, line, self.delimiter), on_done=done)
        except BadRequestError as error:
            self._note_failure(number, error)

    def _note_totals(self, seconds: float) -> None:
        stored = counted(self._stored, "message")
        self.out.note(f"{stored} stored in {seconds:.2f} s, {rate_text(self._stored, seconds)}")
        if self._failed:
            self.out.note(f"not stored: {counted(self._failed, 'message')}")

    def _done(self, number: int, future: Future[SendResult]) -> None:
        """Completion callback, called in order by the producer's thread."""
        error = future.exception()
        if error is not None:
            self._note_failure(number, error)
            return
        self._stored += 1
        if self._lines.shape == "table" or self._print_error is not None:
            return
        try:
            self._lines.further_rows("results", _COLUMNS, [msgspec.structs.asdict(future.result())])
        except OSError as failure:
            self._print_error = failure

    def _note_failure(self, number: int, error: BaseException) -> None:
        """Called by the producer's thread and by the sending thread."""
        with self._lock:
            self._failed += 1
            is_noted = self._failed <= _NOTED_ERRORS
        if is_noted:
            code = error.code if isinstance(error, MqprocError) else type(error).__name__
            # The store counts messages within a frame; a refused message is alone in its frame.
            text = str(error).removeprefix("message 0: ")
            self.out.note(f"mqproc: {self.unit} {number:,} was not stored: {code}: {text}")


def _print(out: Output, result: SendResult) -> None:
    if out.shape in ("json", "table"):
        out.fields(_COLUMNS, msgspec.structs.asdict(result))
    else:
        out.rows("results", _COLUMNS, [msgspec.structs.asdict(result)])
