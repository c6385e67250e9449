"""`mqproc tail`: a topic's messages in the order of the log, and what comes."""

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

from mqproc.cli.message.format import (
    BODIES,
    DEFAULT_FORMAT,
    FORMAT_HELP,
    ROW_COLUMNS,
    compile_format,
    to_json,
    to_row,
)
from mqproc.cli.options import (
    Command,
    Invocation,
    complete_group,
    complete_topic,
    filter_of,
    filter_options,
    pass_invocation,
)
from mqproc.cli.output import Output, encode_json
from mqproc.cli.times import EPOCH_MS_MIN, parse_time_ms
from mqproc.cli.topic import queues_of
from mqproc.client import Client
from mqproc.client.group_requests import check_read
from mqproc.errors import MqprocError
from mqproc.types import Filter, PullResult, PullStatus, QueueInfo, StoredMessage
from mqproc.util.units import counted

# --- following ---
# What comes to a topic's queues from now on: threads wait for it at the server, also for queues that are added.


_FOLLOWERS_MAX = 64
_LONG_POLL_S = 5.0
_POLL_S = 0.1
_ORDER_S = 0.01
_LOOK_S: Final = 1.0


@dataclass(slots=True)
class FollowedQueue:
    """Where one queue is to be read next."""

    queue_id: int
    offset: int


class Follow:
    """Messages of a topic's queues as they come. An error of any thread is raised by who takes the messages."""

    def __init__(
        self,
        client: Client,
        topic: str,
        chosen: Filter | None,
        tell_damage: Callable[[int, PullResult], None],
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self._topic = topic
        self._filter = chosen
        self._tell_damage = tell_damage
        self._note = note
        self._found: queue.Queue[Sequence[StoredMessage] | MqprocError] = queue.Queue(_FOLLOWERS_MAX)
        # What each thread reads: one queue, or several when there are many.
        self._shares: list[list[FollowedQueue]] = []
        self._known: set[int] = set()

    def messages(self, places: Sequence[FollowedQueue], *, added_too: bool, ends_s: float) -> Iterator[StoredMessage]:
        """What comes to the queues from these places on, until `ends_s` of the monotonic clock.

        `added_too`: and to each queue that is added, all it has.
        """
        for place in places:
            self._add(place)
        threading.Thread(target=self._look, args=(added_too,), daemon=True).start()
        while (some := self._next(ends_s)) is not None:
            if isinstance(some, MqprocError):
                raise some
            if len(self._known) > 1:
                time.sleep(_ORDER_S)
            # Messages of several queues that come within this time are put into the log's order.
            yield from sorted(itertools.chain(some, self._waiting()), key=lambda message: message.physical_offset)

    def _next(self, ends_s: float) -> Sequence[StoredMessage] | MqprocError | None:
        """What was found first, once there is something; None at the end."""
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
        threading.Thread(target=self._watch, args=(self._shares[-1],), daemon=True).start()

    def _look(self, added_too: bool) -> None:
        """Find queues that are added, and tell of a topic that is deleted: it may be made again."""
        there = True
        while True:
            time.sleep(_LOOK_S)
            try:
                infos = self._client.queues(self._topic)
            except MqprocError as error:
                self._found.put(error)
                return
            if there and not infos:
                self._note(f"topic {self._topic} is deleted; what comes follows if it is made again")
            there = bool(infos)
            for info in infos:
                if added_too and info.queue_id not in self._known:
                    self._add(FollowedQueue(info.queue_id, info.min_offset))

    def _watch(self, share: list[FollowedQueue]) -> None:
        while True:
            wait_s = _LONG_POLL_S if len(share) == 1 else 0.0
            began_s = time.monotonic()
            moved = False
            for place in share:
                try:
                    pulled = self._client.pull(
                        self._topic, place.queue_id, place.offset, _PAGE_MESSAGES, filter=self._filter, timeout=wait_s
                    )
                except MqprocError as error:
                    self._found.put(error)
                    return
                self._tell_damage(place.queue_id, pulled)
                moved = moved or pulled.next_offset > place.offset
                place.offset = max(place.offset, pulled.next_offset)
                if pulled.messages:
                    self._found.put(pulled.messages)
            # A pull is answered at once where its queue is gone, or ends below the place.
            if not moved and (not wait_s or time.monotonic() - began_s < _POLL_S):
                time.sleep(_POLL_S)

    def _waiting(self) -> Iterable[StoredMessage]:
        """What lies in the queue now; an error is put back for the next turn."""
        while True:
            try:
                some = self._found.get_nowait()
            except queue.Empty:
                return
            if isinstance(some, MqprocError):
                self._found.put(some)
                return
            yield from some


# Messages that may be held of all queues together, while their order is found.
_HELD_MESSAGES = 4096
_PAGE_MESSAGES = 256
# Damaged ranges that are told one by one.
_TOLD_MAX = 1000
_LAST: Final = 10
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Position:
    """Where to begin or end: `kind` is beginning, end, stored, offset, last, or time."""

    kind: str
    value: int = 0

    def is_reached_by(self, message: StoredMessage) -> bool:
        """Whether a message that comes is not before an offset or a time that is yet to come."""
        if self.kind == "offset":
            return message.queue_offset >= self.value
        return self.kind != "time" or message.store_timestamp_ms >= self.value


class PositionType(click.ParamType[Position]):
    """`beginning`, `end`, `stored`, an offset, `-N`, or a time."""

    name = "position"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Position:
        if isinstance(value, Position):
            return value
        try:
            return parse_position(str(value))
        except ValueError as error:
            self.fail(f"{error}; or beginning, end, stored, an offset, -N", param, ctx)


POSITION = PositionType()
STORED = Position("stored")
END = Position("end")


def parse_position(text: str) -> Position:
    """A position. Whole numbers below 100,000,000,000 are offsets, larger ones times in ms. Raises ValueError."""
    if text in ("beginning", "end", "stored"):
        return Position(text)
    if _NUMBER.fullmatch(text) and int(text) < EPOCH_MS_MIN:
        number = int(text)
        return Position("last", -number) if text.startswith("-") else Position("offset", number)
    return Position("time", parse_time_ms(text))


@dataclass(slots=True)
class Span:
    """What is read of one queue: offsets [begin, end)."""

    queue_id: int
    begin: int
    end: int


@click.command(cls=Command)
@click.argument("topic", shell_complete=complete_topic)
@click.option(
    "--from",
    "start",
    type=POSITION,
    metavar="WHERE",
    help="Where to begin.  [default: the last 10, or -n; with --follow: end; with --group: stored]",
)
@click.option("--until", "stop", type=POSITION, metavar="WHERE", help="Where to end.  [default: end, as it is now]")
@click.option(
    "--group", metavar="GROUP", shell_complete=complete_group, help="Whose progress `stored` is; it is not moved."
)
@click.option("--queue", "queues", multiple=True, type=click.IntRange(0), help="Only this queue; may be repeated.")
@filter_options
@click.option(
    "--follow", "-f", is_flag=True, help="Go on with what comes, also to new queues, until Ctrl-C or a --timeout."
)
@click.option(
    "-n",
    "--count",
    "most",
    type=click.IntRange(1),
    help="Without --from, --follow and --group the last so many; with one of them the first so many from there.",
)
@click.option("--format", "template", metavar="TEXT", help=FORMAT_HELP)
@click.option("--body", type=click.Choice(BODIES), help="How bodies are shown.  [default: text]")
@pass_invocation
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

    WHERE is beginning, end, an offset, -N for the last N messages that filters let pass, stored (what --group is to get
    next), or a time: 2026-11-21T10:00, epoch ms, 15m ago. Without WHERE the last so many are printed. Messages come in
    the order of the log; --json prints one JSON line a message, --output csv a row.
    """
    write = _writer(invocation.out, template, body)
    if follow and stop is not None:
        raise click.UsageError("--follow has no --until")
    if group is None and STORED in (start, stop):
        raise click.UsageError("stored is a group's progress: say whose with --group")
    chosen = filter_of(tags, sql)
    with invocation.client() as client:
        stored = _progress(client, group, topic) if group is not None else {}
        reader = Tail(client, topic, chosen, queues, invocation.out.note, stored)
        if template is None and invocation.out.shape == "csv":
            invocation.out.rows("messages", ROW_COLUMNS, ())
        if start is None and group is None and not follow:
            found: Iterable[StoredMessage] = reader.last(most or _LAST, stop)
        else:
            start = start or (STORED if group is not None else END)
            ends_s = invocation.deadline_s() if follow else None
            found = itertools.islice(reader.messages(start, stop, ends_s), most)
        for message in found:
            write(message)
            if follow:
                invocation.out.flush()


def _progress(client: Client, group: str, topic: str) -> dict[int, int]:
    """A group's next offsets in a topic by queue; one that has none stored is missing. Raises GroupNotFoundError."""
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
    return lambda message: _write(out, line(message))


def _write(out: Output, text: str) -> None:
    out.stream.write(text)


class Tail:
    """Reads queues of a topic in the order of the log. What is damaged is stepped over, and told once."""

    def __init__(
        self,
        client: Client,
        topic: str,
        chosen: Filter | None,
        queues: Sequence[int],
        note: Callable[[str], None],
        stored: Mapping[int, int],
    ) -> None:
        """Only `queues`; without any all, also those that are added later. `note` takes a line for people. `stored`
        are offsets by queue, which begins where it has none. Raises TopicNotFoundError.
        """
        self._client = client
        self._topic = topic
        self._filter = chosen
        self._note = note
        self._stored = stored
        self._told: set[str] = set()
        self._lock = threading.Lock()
        found = queues_of(client, topic)
        unknown = set(queues) - {info.queue_id for info in found}
        if unknown:
            raise click.UsageError(f"topic {topic} has {counted(len(found), 'queue')}, none is {min(unknown)}")
        self._all = not queues
        self._queues = [info for info in found if not queues or info.queue_id in queues]

    def messages(self, start: Position, stop: Position | None, follow_until_s: float | None) -> Iterator[StoredMessage]:
        """From `start` to `stop`, or to the present end and then on, until a moment of the monotonic clock."""
        if start.kind == "last":
            yield from self.last(start.value, stop)
        else:
            yield from self._merged([self._span(info, start, stop) for info in self._queues])
        if follow_until_s is not None:
            following = Follow(self._client, self._topic, self._filter, self._tell_damage, self._note)
            ends = [FollowedQueue(info.queue_id, info.max_offset) for info in self._queues]
            coming = following.messages(ends, added_too=self._all, ends_s=follow_until_s)
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
            return self._stored.get(info.queue_id, info.min_offset)
        if position.kind == "last":
            return max(info.min_offset, info.max_offset - position.value)
        if position.kind == "time":
            return self._offset_at(info, position.value)
        return position.value

    def _offset_at(self, info: QueueInfo, time_ms: int) -> int:
        """The first offset at or after a time; RocketMQ's answer is the last one when all are before it."""
        if info.max_offset == info.min_offset:
            return info.max_offset
        found = self._client.offset_at(self._topic, info.queue_id, time_ms)
        pulled = self._client.pull(self._topic, info.queue_id, found, 1)
        if pulled.messages and pulled.messages[0].store_timestamp_ms < time_ms:
            return found + 1
        return found

    def last(self, count: int, stop: Position | None) -> list[StoredMessage]:
        """The last `count` messages before `stop`, or of all, that the filter lets pass."""
        spans = [self._span(info, Position("beginning"), stop) for info in self._queues]
        for span in spans:
            span.begin = self._begin_of_last(span, count)
        return heapq.nlargest(count, self._merged(spans), key=lambda message: message.physical_offset)[::-1]

    def _begin_of_last(self, span: Span, count: int) -> int:
        """Where to begin so that a queue's last `count` messages come that the filter lets pass."""
        if self._filter is None:
            return max(span.begin, span.end - count)
        begin, reach, missing = span.end, max(count, _PAGE_MESSAGES), count
        while missing > 0 and begin > span.begin:
            before = max(span.begin, begin - reach)
            missing -= sum(1 for _ in self._queue(Span(span.queue_id, before, begin), _PAGE_MESSAGES))
            begin, reach = before, 2 * reach
        return begin

    def _merged(self, spans: Sequence[Span]) -> Iterator[StoredMessage]:
        page = max(1, min(_PAGE_MESSAGES, _HELD_MESSAGES // max(1, len(spans))))
        queues = [self._queue(span, page) for span in spans]
        return heapq.merge(*queues, key=lambda message: message.physical_offset)

    def _queue(self, span: Span, page: int) -> Iterator[StoredMessage]:
        """One queue's messages, page by page."""
        at = span.begin
        while at < span.end:
            found = self._client.pull(self._topic, span.queue_id, at, min(page, span.end - at), filter=self._filter)
            for message in found.messages:
                if message.queue_offset < span.end:
                    yield message
            self._tell_damage(span.queue_id, found)
            if found.next_offset <= at:
                return
            at = found.next_offset

    def _tell_damage(self, queue_id: int, pulled: PullResult) -> None:
        """What has no intact record is stepped over; a damaged range of the log is told once, whoever meets it."""
        if pulled.status is not PullStatus.CORRUPT:
            return
        _queue_offsets, _, place = pulled.detail.partition(": ")
        with self._lock:
            if place in self._told or len(self._told) > _TOLD_MAX:
                return
            self._told.add(place)
            count = len(self._told)
        if count > _TOLD_MAX:
            self._note("damage: more than can be told one by one; mqproc store verify tells it all")
        else:
            self._note(f"damage: {self._topic} queue {queue_id}: {pulled.detail}")
