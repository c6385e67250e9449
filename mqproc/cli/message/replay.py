"""`mqproc replay`: send stored messages again, to another topic.

See `client.replay` for how it resumes.

The journal, in `mqproc/replays/`, holds the time of the first start, which fixes the end of the replay, and the
position: queue id and queue offset as one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from mqproc.cli.message.import_files import Fingerprint, Journal, JournalEntry
from mqproc.cli.options import (
    START_RELATIVE_TIME,
    Invocation,
    command,
    complete_topic,
    filter_of,
    filter_options,
    replay_options,
)
from mqproc.cli.output import Output, Progress, output_columns
from mqproc.client import Client
from mqproc.client.dispatch_barrier import check_index
from mqproc.client.replay import Replay, ReplayPosition, ReplayProgress, ReplaySource
from mqproc.io.store_io import StoreIO
from mqproc.util.units import counted, format_duration, format_time, now_ms, parse_time_ms

_COLUMNS = output_columns("topic, to, messages:count, already_stored:count, seconds:number, per_second:count:per s")
# Bits of the queue offset in a position.
_OFFSET_BITS: Final = 48


@command()
@click.option("--topic", required=True, shell_complete=complete_topic, help="Topic whose messages are sent again.")
@replay_options
@click.option(
    "--begin", type=START_RELATIVE_TIME, metavar="TIME", help="From this time on: ISO 8601, epoch ms, or an age: 15m."
)
@click.option(
    "--end",
    type=START_RELATIVE_TIME,
    metavar="TIME",
    help="Before this time.  [default: the first start of the replay]",
)
@click.option("--key", default="", help="Only messages with this key.")
@filter_options
@click.option("--queues", type=click.IntRange(1, 65535), metavar="N", help="Queues of a new topic.  [default: as many]")
@click.option("--restart", is_flag=True, help="Send all messages again, also after a finished replay.")
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
    """Send stored messages again, to another topic.

    Copies keep body, tag, keys, properties and born time; their property REPLAYED_MESSAGE_ID holds the id of the
    original.

    After Ctrl-C or a kill the same command resumes: no message is sent twice and none is missed. Ages such as 15m and
    2h are relative to the first start. --restart sends everything again. If retention deletes messages before they were
    sent, their number is reported and the exit code is 1.
    """
    if key and (tags or sql):
        raise click.UsageError("--key excludes --tag and --sql")
    if topic == to:
        raise click.UsageError(
            f"--topic {topic} and --to {to} are one topic: a replay would also copy its own copies; "
            "mqproc group reset lets a group consume messages again"
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
                job = _ReplayJob(client, journal, entry, source, to, rate, queues, is_first=is_first)
                missed = job.run(invocation.out)
        finally:
            journal.close()
    return 1 if missed else 0


def _bounds(begin: int | str | None, end: int | str | None, started_ms: int) -> tuple[int | None, int]:
    """Store times [begin, end) of the replay; the default end is just after the first start."""
    moments = [parse_time_ms(moment, started_ms) if isinstance(moment, str) else moment for moment in (begin, end)]
    return moments[0], started_ms + 1 if moments[1] is None else moments[1]


def _entry(journal: Journal, store: Path, out: Output, *, restart: bool) -> JournalEntry | None:
    """The journal's entry for this run, None if there is nothing to do. Raises BadRequestError."""
    before = journal.entry
    if before is None or restart:
        return journal.begin(Fingerprint(), before.generation + 1 if before else 0, now_ms())
    if before.finished_ms:
        when = format_time(before.finished_ms)
        out.note(f"all {before.records:,} messages were sent {when}; --restart sends them again")
        return None
    # Only the index knows which copies an unfinished run has stored.
    check_index(store, "; --restart sends all of them again")
    return before


@dataclass(slots=True)
class _ReplayJob:
    """One run of a replay."""

    client: Client
    journal: Journal
    entry: JournalEntry
    source: ReplaySource
    to: str
    rate: float
    queues: int | None
    is_first: bool

    def run(self, out: Output) -> int:
        """Send the remaining messages; returns how many were lost before they were sent."""
        name = f"{self.journal.name}/{self.entry.generation}"
        work = Replay(
            self.client, self.source, self.to, name=name, rate=self.rate, queues=self.queues, is_first=self.is_first
        )
        position = _position(self.journal.position)
        if position > ReplayPosition():
            out.note(f"continuing at queue {position.queue_id}, offset {position.queue_offset:,}")
        total = self._total()
        before = self._total_before(position)
        with Progress(out, f"{self.source.topic} → {self.to}", "messages") as progress:

            def on_progress(now: ReplayProgress) -> None:
                self.journal.advance(_number(now.position))
                progress.update(before + now.sent + now.found, total, now.sent)

            try:
                done = work.run(position, on_progress)
            except KeyboardInterrupt:
                out.note(f"\nstopped; {work.progress.sent:,} messages were sent; the same command continues")
                raise
            progress.end(total, total, done.sent)
            missed = self._count_missed(position, total - before, done)
            self.journal.finish(self.entry, total - missed or done.sent + done.found, now_ms())
            self._say(out, done, progress.seconds)
        if missed:
            gone = counted(missed, "message")
            out.note(f"{gone} of {self.source.topic} could not be sent: retention or damage has removed them meanwhile")
        return missed

    def _count_missed(self, position: ReplayPosition, expected: int, done: ReplayProgress) -> int:
        """Number of messages that could not be read; 0 if the total was never known."""
        source = self.source
        is_exact = position == ReplayPosition() or (source.begin is None and source.filter is None)
        return max(0, expected - done.sent - done.found) if is_exact and not source.key else 0

    def _total(self) -> int:
        """Number of messages of the source, 0 if it is unknown without reading them."""
        if self.source.key:
            return 0
        source = self.source
        return self.client.count(source.topic, source.begin, source.end, filter=source.filter)

    def _total_before(self, position: ReplayPosition) -> int:
        """Approximate number of messages before a position, by queue offsets, for the progress bar."""
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
        there = f", {done.found:,} were already stored" if done.found else ""
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
