"""`mqproc tail`: a topic's messages in log order, and new messages as they arrive."""

from __future__ import annotations

import heapq
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from mqproc.cli.message.format import BODIES, DEFAULT_FORMAT, FORMAT_HELP, ROW_COLUMNS, compile_format, to_json, to_row
from mqproc.cli.options import (
    Invocation,
    ParsedText,
    command,
    complete_group,
    complete_topic,
    filter_of,
    filter_options,
    queues_option,
)
from mqproc.cli.output import Output, encode_json
from mqproc.cli.topic import queues_of
from mqproc.client import Client
from mqproc.client.group_requests import check_read
from mqproc.errors import MqprocError
from mqproc.types import Filter, PullResult, PullStatus, QueueInfo, StoredMessage
from mqproc.util.units import EPOCH_MS_MIN, counted, parse_time_ms

# Follow


_FOLLOWERS_MAX = 64
_LONG_POLL_S = 5.0
POLL_S = 0.1
_ORDER_S = 0.01
_REFRESH_S: Final = 1.0


@dataclass(slots=True)
class FollowedQueue:
    """The next offset to read of one queue."""

    queue_id: int
    offset: int


@dataclass
class Follow:
    """New messages of a topic's queues by long polling; errors of threads reach the consumer."""

    client: Client
    topic: str
    filter: Filter | None
    note_damage: Callable[[int, PullResult], None]
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._found: queue.Queue[Sequence[StoredMessage] | MqprocError] = queue.Queue(_FOLLOWERS_MAX)
        # The queues of each thread: one, or several if there are many queues.
        self._shares: list[list[FollowedQueue]] = []
        self._known: set[int] = set()

    def messages(self, places: Sequence[FollowedQueue], *, added_too: bool, ends_s: float) -> Iterator[StoredMessage]:
        """Yield new messages from these offsets on, until `ends_s` in monotonic seconds.

        `added_too`: also all messages of queues that are added later.
        """
        for place in places:
            self._add(place)
        threading.Thread(target=self._find_queues, args=(added_too,), daemon=True).start()
        while (some := self._next(ends_s)) is not None:
            if isinstance(some, MqprocError):
                raise some
            if len(self._known) > 1:
                time.sleep(_ORDER_S)
            # Sort messages of several queues that arrive within this time by log position.
            yield from sorted(itertools.chain(some, self._received()), key=lambda message: message.physical_offset)

    def _next(self, ends_s: float) -> Sequence[StoredMessage] | MqprocError | None:
        """Wait for the next messages or error; None at the end."""
        try:
            return self._found.get(timeout=min(max(0.0, ends_s - time.monotonic()), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None

    def _add(self, place: FollowedQueue) -> None:
        number = len(self._known)
        self._known.add(place.queue_id)
        if number >= _FOLLOWERS_MAX:
            self._shares[number % _FOLLOWERS_MAX].append(place)
            return
        self._shares.append([place])
        threading.Thread(target=self._poll, args=(self._shares[-1],), daemon=True).start()

    def _find_queues(self, added_too: bool) -> None:
        """Find added queues, and report a deleted topic, which may be created again."""
        exists = True
        while True:
            time.sleep(_REFRESH_S)
            try:
                infos = self.client.queues(self.topic)
            except MqprocError as error:
                self._found.put(error)
                return
            if exists and not infos:
                self.note(f"topic {self.topic} was deleted; waiting for it to be created again")
            exists = bool(infos)
            for info in infos:
                if added_too and info.queue_id not in self._known:
                    self._add(FollowedQueue(info.queue_id, info.min_offset))

    def _poll(self, share: list[FollowedQueue]) -> None:
        while True:
            wait_s = _LONG_POLL_S if len(share) == 1 else 0.0
            start_s = time.monotonic()
            moved = False
            for place in share:
                try:
                    pulled = self.client.pull(
                        self.topic, place.queue_id, place.offset, _PAGE_MESSAGES, filter=self.filter, timeout=wait_s
                    )
                except MqprocError as error:
                    self._found.put(error)
                    return
                self.note_damage(place.queue_id, pulled)
                moved = moved or pulled.next_offset > place.offset
                place.offset = max(place.offset, pulled.next_offset)
                if pulled.messages:
                    self._found.put(pulled.messages)
            # A pull returns at once if its queue is gone or ends below the offset.
            if not moved and (not wait_s or time.monotonic() - start_s < POLL_S):
                time.sleep(POLL_S)

    def _received(self) -> Iterable[StoredMessage]:
        """Messages received meanwhile; an error is put back for the next call."""
        while True:
            try:
                some = self._found.get_nowait()
            except queue.Empty:
                return
            if isinstance(some, MqprocError):
                self._found.put(some)
                return
            yield from some


# Messages buffered for all queues together while they are merged.
_MERGE_MESSAGES = 4096
_PAGE_MESSAGES = 256
# Damaged ranges that are reported one by one.
_NOTED_MAX = 1000
_LAST: Final = 10
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Position:
    """Where to start or stop: `kind` is beginning, end, stored, offset, last, or time."""

    kind: str
    value: int = 0

    def is_reached_by(self, message: StoredMessage) -> bool:
        """Whether a message has reached this offset or time, which may be in the future."""
        if self.kind == "offset":
            return message.queue_offset >= self.value
        return self.kind != "time" or message.store_timestamp_ms >= self.value


STORED = Position("stored")
END = Position("end")


# Words that consumers use for these positions.
_OTHER_WORDS: Final = {"earliest": "beginning", "latest": "end"}


def parse_position(text: str) -> Position:
    """Parse `beginning`, `end`, `stored`, an offset, `-N`, or a time.

    Integers below 100,000,000,000 are offsets, larger integers are times in ms. Raises ValueError.
    """
    text = _OTHER_WORDS.get(text, text)
    if text in ("beginning", "end", "stored"):
        return Position(text)
    if _NUMBER.fullmatch(text) and int(text) < EPOCH_MS_MIN:
        number = int(text)
        return Position("last", -number) if text.startswith("-") else Position("offset", number)
    try:
        return Position("time", parse_time_ms(text))
    except ValueError as error:
        raise ValueError(f"{error}; or beginning, end, stored, an offset, -N") from None


POSITION = ParsedText("position", parse_position)


@dataclass(slots=True)
class Span:
    """Offsets [begin, end) to read of one queue."""

    queue_id: int
    begin: int
    end: int


@command()
@click.argument("topic", shell_complete=complete_topic)
@click.option(
    "--from",
    "start",
    type=POSITION,
    metavar="WHERE",
    help="Where to start.  [default: the last 10, or -n; with --follow: end; with --group: stored]",
)
@click.option("--until", "stop", type=POSITION, metavar="WHERE", help="Where to stop.  [default: the current end]")
@click.option(
    "--group",
    metavar="GROUP",
    shell_complete=complete_group,
    help="Consumer group of `stored`; its offset is not changed.",
)
@queues_option
@filter_options
@click.option(
    "--follow", "-f", is_flag=True, help="Continue with new messages, also of new queues, until Ctrl-C or --timeout."
)
@click.option(
    "-n",
    "--count",
    "--max",
    "--limit",
    "most",
    type=click.IntRange(1),
    metavar="N",
    help="Print N messages: the last N, or with --from, --follow or --group the first N from there.",
)
@click.option("--format", "template", metavar="TEXT", help=FORMAT_HELP)
@click.option("--body", type=click.Choice(BODIES), help="How bodies are shown.  [default: text]")
def tail(
    invocation: Invocation,
    topic: str,
    start: Position | None,
    stop: Position | None,
    group: str | None,
    queues: tuple[int, ...],
    tags: str,
    sql: str,
    follow: bool,
    most: int | None,
    template: str | None,
    body: str | None,
) -> None:
    """Print messages of a topic, and follow it.

    WHERE is beginning, end, an offset, -N for the last N messages that match the filter, stored (the committed offset
    of --group), or a time: 2026-11-21T10:00, epoch ms, or an age (15m). Messages are printed in log order; --json
    prints one JSON object per line, --output csv a row per message.
    """
    write = _writer(invocation.out, template, body)
    _check_positions(start, stop, group, follow)
    chosen = filter_of(tags, sql)
    with invocation.client() as client:
        stored = _committed_offsets(client, group, topic) if group is not None else {}
        reader = Tail(client, topic, chosen, queues, invocation.out.note, stored)
        if template is None and invocation.out.shape == "csv":
            invocation.out.rows("messages", ROW_COLUMNS, ())
        start = start or (STORED if group is not None else END if follow else None)
        if start is None:
            found: Iterable[StoredMessage] = reader.last(most or _LAST, stop)
        else:
            ends_s = invocation.deadline_s() if follow else None
            found = itertools.islice(reader.messages(start, stop, ends_s), most)
        for message in found:
            write(message)
            if follow:
                invocation.out.flush()


def _check_positions(start: Position | None, stop: Position | None, group: str | None, follow: bool) -> None:
    if follow and stop is not None:
        raise click.UsageError("--follow and --until exclude each other")
    if group is None and STORED in (start, stop):
        raise click.UsageError("stored is a group's offset: name the group with --group")


def _committed_offsets(client: Client, group: str, topic: str) -> dict[int, int]:
    """A group's committed offsets in a topic by queue. Raises GroupNotFoundError."""
    found = client.groups.info(group)
    check_read(found, (topic,))
    return {each.queue_id: each.offset for each in found.queues if each.topic == topic and each.offset is not None}


def _writer(out: Output, template: str | None, body: str | None) -> Callable[[StoredMessage], None]:
    if template is None and out.is_json:
        return lambda message: out.line(encode_json(to_json(message, body)))
    if template is None and out.shape in ("csv", "raw"):
        return lambda message: out.further_rows(
            "messages", ROW_COLUMNS, [to_row(message, body or "text", preview=False)]
        )
    try:
        line = compile_format(template or DEFAULT_FORMAT, body or "text", out.printable)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--format") from None

    def write(message: StoredMessage) -> None:
        out.stream.write(line(message))

    return write


@dataclass
class Tail:
    """Reads queues of a topic in log order. Damage is skipped, and reported once.

    Reads only `queue_ids`, or all queues and those added later if it is empty. `note` prints a line for people.
    `stored`: offsets by queue; a queue without one starts at its minimum.
    """

    client: Client
    topic: str
    filter: Filter | None
    queue_ids: Sequence[int]
    note: Callable[[str], None]
    stored: Mapping[int, int]

    def __post_init__(self) -> None:
        """Raises TopicNotFoundError."""
        self._noted: set[str] = set()
        self._lock = threading.Lock()
        found = queues_of(self.client, self.topic)
        unknown = set(self.queue_ids) - {info.queue_id for info in found}
        if unknown:
            raise click.UsageError(f"topic {self.topic} has {counted(len(found), 'queue')}, none is {min(unknown)}")
        self._queues = [info for info in found if not self.queue_ids or info.queue_id in self.queue_ids]

    def messages(self, start: Position, stop: Position | None, follow_until_s: float | None) -> Iterator[StoredMessage]:
        """Messages from `start` to `stop` or the end, then new messages until `follow_until_s`."""
        if start.kind == "last":
            yield from self.last(start.value, stop)
        else:
            yield from self._merge([self._span(info, start, stop) for info in self._queues])
        if follow_until_s is not None:
            follow = Follow(self.client, self.topic, self.filter, self._note_damage, self.note)
            ends = [FollowedQueue(info.queue_id, info.max_offset) for info in self._queues]
            coming = follow.messages(ends, added_too=not self.queue_ids, ends_s=follow_until_s)
            yield from (message for message in coming if start.is_reached_by(message))

    def _span(self, info: QueueInfo, start: Position, stop: Position | None) -> Span:
        begin = self._offset(info, start)
        end = info.max_offset if stop is None else min(info.max_offset, self._offset(info, stop))
        return Span(info.queue_id, max(begin, info.min_offset), end)

    def _offset(self, info: QueueInfo, position: Position) -> int:
        if position.kind == "beginning":
            return info.min_offset
        if position.kind == "end":
            return info.max_offset
        if position.kind == "stored":
            return self.stored.get(info.queue_id, info.min_offset)
        if position.kind == "last":
            return max(info.min_offset, info.max_offset - position.value)
        if position.kind == "time":
            return self._offset_at(info, position.value)
        return position.value

    def _offset_at(self, info: QueueInfo, time_ms: int) -> int:
        """The first offset at or after a time; for a later time RocketMQ returns the last offset."""
        if info.max_offset == info.min_offset:
            return info.max_offset
        found = self.client.offset_at(self.topic, info.queue_id, time_ms)
        pulled = self.client.pull(self.topic, info.queue_id, found, 1)
        if pulled.messages and pulled.messages[0].store_timestamp_ms < time_ms:
            return found + 1
        return found

    def last(self, count: int, stop: Position | None) -> list[StoredMessage]:
        """The last `count` messages before `stop` that match the filter."""
        spans = [self._span(info, Position("beginning"), stop) for info in self._queues]
        for span in spans:
            span.begin = self._begin_of_last(span, count)
        return heapq.nlargest(count, self._merge(spans), key=lambda message: message.physical_offset)[::-1]

    def _begin_of_last(self, span: Span, count: int) -> int:
        """The offset from which a queue has `count` messages that match the filter."""
        if self.filter is None:
            return max(span.begin, span.end - count)
        begin, reach, missing = span.end, max(count, _PAGE_MESSAGES), count
        while missing > 0 and begin > span.begin:
            before = max(span.begin, begin - reach)
            missing -= sum(1 for _ in self._queue(Span(span.queue_id, before, begin), _PAGE_MESSAGES))
            begin, reach = before, 2 * reach
        return begin

    def _merge(self, spans: Sequence[Span]) -> Iterator[StoredMessage]:
        page = max(1, min(_PAGE_MESSAGES, _MERGE_MESSAGES // max(1, len(spans))))
        queues = [self._queue(span, page) for span in spans]
        return heapq.merge(*queues, key=lambda message: message.physical_offset)

    def _queue(self, span: Span, page: int) -> Iterator[StoredMessage]:
        """The messages of one queue, page by page."""
        at = span.begin
        while at < span.end:
            found = self.client.pull(self.topic, span.queue_id, at, min(page, span.end - at), filter=self.filter)
            for message in found.messages:
                if message.queue_offset < span.end:
                    yield message
            self._note_damage(span.queue_id, found)
            if found.next_offset <= at:
                return
            at = found.next_offset

    def _note_damage(self, queue_id: int, pulled: PullResult) -> None:
        """Report a damaged range of the log once, whichever thread finds it."""
        if pulled.status is not PullStatus.CORRUPT:
            return
        _queue_offsets, _, place = pulled.detail.partition(": ")
        with self._lock:
            if place in self._noted or len(self._noted) > _NOTED_MAX:
                return
            self._noted.add(place)
            count = len(self._noted)
        if count > _NOTED_MAX:
            self.note("damage: too many ranges to list; mqproc store verify lists them all")
        else:
            self.note(f"damage: {self.topic} queue {queue_id}: {pulled.detail}")
