"""`mqproc replay`: stored messages once more, to another topic; how it goes on is told in `client.replay`.

The journal, in `mqproc/replays/`, holds the replay's begin, from which its end follows, and its position: queue id and
queue offset as one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from mqproc.cli.message.journal import Entry, Fingerprint, Journal
from mqproc.cli.options import (
    START_RELATIVE_TIME,
    Command,
    Invocation,
    complete_topic,
    filter_of,
    filter_options,
    pass_invocation,
    replay_options,
)
from mqproc.cli.output import Column, Output, Progress
from mqproc.cli.times import format_duration, format_time, now_ms, parse_time_ms
from mqproc.client import Client
from mqproc.client.dispatch_barrier import check_index
from mqproc.client.replay import Replay, ReplayPosition, ReplayProgress, ReplaySource
from mqproc.io.store_io import StoreIO
from mqproc.util.units import counted

_COLUMNS = [
    Column("topic"),
    Column("to"),
    Column("messages", kind="count"),
    Column("already_stored", kind="count"),
    Column("seconds", kind="number"),
    Column("per_second", "per s", "count"),
]
# A position as a number of the journal's.
_OFFSET_BITS: Final = 48


@click.command(cls=Command)
@click.option("--topic", required=True, shell_complete=complete_topic, help="Topic whose messages are sent once more.")
@replay_options
@click.option(
    "--begin", type=START_RELATIVE_TIME, metavar="TIME", help="From this time on: ISO 8601, epoch ms, or 15m ago."
)
@click.option(
    "--end", type=START_RELATIVE_TIME, metavar="TIME", help="Up to this time.  [default: when the replay began]"
)
@click.option("--key", default="", help="Only messages with this key.")
@filter_options
@click.option("--queues", type=click.IntRange(1, 65535), help="Queues of a topic that is made.  [as many]")
@click.option("--restart", is_flag=True, help="Send all of them, though it was done before.")
@pass_invocation
def replay(
    invocation: Invocation,
    topic: str,
    to: str,
    begin: int | str | None,
    end: int | str | None,
    key: str,
    tags: str,
    sql: str,
    queues: int | None,
    rate: float,
    restart: bool,
) -> int:
    """Send stored messages once more, to another topic.

    Copies keep body, tag, keys, properties and born time; REPLAYED_MESSAGE_ID names the message each was made of.

    The same command again goes on where it stopped, after Ctrl-C or a kill: no message twice, none missed; 15m and 2h
    are before its first start. When it is finished, --restart sends them again. What retention deletes before it was
    sent is told, and the exit code is then 1.
    """
    if key and (tags or sql):
        raise click.UsageError("--key goes without --tag and --sql")
    if topic == to:
        raise click.UsageError(
            f"--topic {topic} and --to {to} are one topic: a replay would double it and copy its own copies; "
            "mqproc group reset has a group consume messages again"
        )
    chosen = filter_of(tags, sql)
    asked = {"topic": topic, "to": to, "begin": begin, "end": end, "key": key, "tags": tags, "sql": sql}
    with invocation.client() as client:
        paths = invocation.existing_paths()
        journal = Journal(StoreIO(), paths, {"source": f"replay of {topic}", **asked}, folder="replays")
        try:
            missed, is_first = 0, journal.entry is None or restart
            entry = _entry(journal, paths.root, invocation.out, restart=restart)
            if entry is not None:
                source = ReplaySource(topic, *_bounds(begin, end, entry.started_ms), key, chosen)
                job = _Job(client, journal, entry, source, to, rate, queues, is_first=is_first)
                missed = job.run(invocation.out)
        finally:
            journal.close()
    return 1 if missed else 0


def _bounds(begin: int | str | None, end: int | str | None, started_ms: int) -> tuple[int | None, int]:
    """What is replayed, by store time; without an end with what had been stored in the millisecond of the start."""
    moments = [parse_time_ms(moment, started_ms) if isinstance(moment, str) else moment for moment in (begin, end)]
    return moments[0], started_ms + 1 if moments[1] is None else moments[1]


def _entry(journal: Journal, store: Path, out: Output, *, restart: bool) -> Entry | None:
    """The journal's entry for this run; None when there is nothing to do. Raises BadRequestError."""
    before = journal.entry
    if before is None or restart:
        return journal.begin(Fingerprint(), before.generation + 1 if before else 0, now_ms())
    if before.finished_ms:
        when = format_time(before.finished_ms)
        out.note(f"all {before.records:,} messages were sent {when}; --restart sends them again")
        return None
    # The index alone knows which copies a run that was not finished has left.
    check_index(store, "; --restart sends all of them again")
    return before


@dataclass(slots=True)
class _Job:
    """One run of a replay."""

    client: Client
    journal: Journal
    entry: Entry
    source: ReplaySource
    to: str
    rate: float
    queues: int | None
    is_first: bool

    def run(self, out: Output) -> int:
        """Send what was not sent; says how it went. How many messages went before they were sent, as far as known."""
        name = f"{self.journal.name}/{self.entry.generation}"
        work = Replay(
            self.client, self.source, self.to, name=name, rate=self.rate, queues=self.queues, is_first=self.is_first
        )
        position = _position(self.journal.position)
        if position > ReplayPosition():
            out.note(f"going on at queue {position.queue_id}, offset {position.queue_offset:,}")
        total = self._total()
        before = self._total_before(position)
        with Progress(out, f"{self.source.topic} → {self.to}", "messages") as progress:

            def told(now: ReplayProgress) -> None:
                self.journal.advance(_number(now.position))
                progress.update(before + now.sent + now.found, total, now.sent)

            try:
                done = work.run(position, told)
            except KeyboardInterrupt:
                out.note(f"\nstopped; {work.progress.sent:,} messages were sent, the same command goes on")
                raise
            progress.end(total, total, done.sent)
            missed = self._missed(position, total - before, done)
            self.journal.finish(self.entry, total - missed or done.sent + done.found, now_ms())
            self._say(out, done, progress.seconds)
        if missed:
            gone = counted(missed, "message")
            out.note(f"{gone} of {self.source.topic} could not be sent: retention or damage has taken them meanwhile")
        return missed

    def _missed(self, position: ReplayPosition, wanted: int, done: ReplayProgress) -> int:
        """How many of the messages that were there could not be read; 0 where their number was never known."""
        source = self.source
        is_exact = position == ReplayPosition() or (source.begin is None and source.filter is None)
        return max(0, wanted - done.sent - done.found) if is_exact and not source.key else 0

    def _total(self) -> int:
        """How many messages the source has; 0 when only looking would tell."""
        if self.source.key:
            return 0
        source = self.source
        return self.client.count(source.topic, source.begin, source.end, filter=source.filter)

    def _total_before(self, position: ReplayPosition) -> int:
        """About how many of them lie before a position, for the bar: by the offsets of whole queues."""
        if self.source.key or position == ReplayPosition():
            return 0
        found = 0
        for info in self.client.queues(self.source.topic):
            at = info.max_offset if info.queue_id < position.queue_id else position.queue_offset
            if info.queue_id <= position.queue_id:
                found += max(0, min(at, info.max_offset) - info.min_offset)
        return found

    def _say(self, out: Output, done: ReplayProgress, seconds: float) -> None:
        rate = done.sent / max(seconds, 1e-9)
        there = f", {done.found:,} were there" if done.found else ""
        out.note(f"{counted(done.sent, 'message')} to {self.to} in {format_duration(seconds)}, {rate:,.0f}/s{there}")
        if out.shape != "table":
            row: dict[str, Any] = {
                "topic": self.source.topic,
                "to": self.to,
                "messages": done.sent,
                "already_stored": done.found,
                "seconds": round(seconds, 3),
                "per_second": round(rate),
            }
            out.rows("replays", _COLUMNS, [row])


def _number(position: ReplayPosition) -> int:
    return position.queue_id << _OFFSET_BITS | position.queue_offset


def _position(number: int) -> ReplayPosition:
    return ReplayPosition(number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1))
