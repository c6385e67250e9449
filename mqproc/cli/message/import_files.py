"""`mqproc import`: files of records as messages; see `importer` for how it goes on after an interruption."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mqproc.cli.message.importer import CHUNK_ROWS, TIME_FORMATS, ColumnMaker, FieldNames, Importer, Stored
from mqproc.cli.message.journal import Entry, Fingerprint, Journal
from mqproc.cli.message.sources import FORMATS, STDIN, Reading, Source, guess_kind
from mqproc.cli.options import Command, Invocation, complete_topic, pass_invocation
from mqproc.cli.output import Column, Output, Progress
from mqproc.cli.times import format_duration, format_time, now_ms
from mqproc.client import Client
from mqproc.client.dispatch_barrier import PATIENCE_S, check_index
from mqproc.errors import BadRequestError, FrameTooLargeError, MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.units import counted

_COLUMNS = [
    Column("source"),
    Column("records", kind="count"),
    Column("already_stored", kind="count"),
    Column("seconds", kind="number"),
    Column("per_second", "per s", "count"),
]
# A file's lines are counted in pieces of so many bytes.
_PIECE_BYTES = 1 << 20


class Delimiter(click.ParamType[str]):
    """One character that may separate fields of CSV; `\\t`, as one types it, is a tab."""

    name = "character"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = "\t" if value == "\\t" else str(value)
        if len(text) != 1 or text in '"\r\n' or "\ud800" <= text <= "\udfff":
            self.fail(f"{value!r} is not one character that can separate fields", param, ctx)
        return text


@click.command("import", cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option("--topic", required=True, shell_complete=complete_topic, help="Topic to send to; made when missing.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Format; else by the file's name, or a .zip's member's; else lines.",
)
@click.option("--key-field", "keys", multiple=True, metavar="FIELD", help="Field that is a key; may be repeated.")
@click.option("--tag-field", "tag", default="", metavar="FIELD", help="Field that is the tag.")
@click.option("--time-field", "time", default="", metavar="FIELD", help="Field that is the born time.")
@click.option(
    "--time-format",
    metavar="FORMAT",
    help=f"{', '.join(TIME_FORMATS)}, or strptime's.  [default: auto]",
)
@click.option("--queue-field", "queue", default="", metavar="FIELD", help="Field that is the queue id.")
@click.option("--queues", type=click.IntRange(1, 65535), help="Queues of a topic that is made, or widened to.")
@click.option("--typed", is_flag=True, help="CSV: numbers, true and false become JSON's, nulls null.")
@click.option("--null", "nulls", multiple=True, metavar="TEXT", help="Text that means no value, besides the empty one.")
@click.option(
    "--delimiter", type=Delimiter(), help="CSV: separator of fields, \\t for a tab, as of .tsv.  [default: ,]"
)
@click.option("--member", default="", metavar="NAME", help="File inside a .zip that holds several.")
@click.option("--name", default="", help="Name of this import of a stream, so that it can go on later.")
@click.option("--restart", is_flag=True, help="Import from the beginning, though it was done before.")
@pass_invocation
def import_(
    invocation: Invocation,
    files: tuple[str, ...],
    topic: str,
    kind: str | None,
    keys: tuple[str, ...],
    tag: str,
    time: str,
    time_format: str | None,
    queue: str,
    queues: int | None,
    typed: bool,
    nulls: tuple[str, ...],
    delimiter: str | None,
    member: str,
    name: str,
    restart: bool,
) -> None:
    """Import CSV, JSON lines, Parquet or plain lines.

    FILE may be packed (.gz, .bz2, .xz, .zip), a pipe, or - for stdin. A record of CSV or Parquet becomes a JSON object,
    a line of the others is the body as it is. A key's spaces become _, since RocketMQ separates keys by spaces.

    The same command again goes on where it stopped, after Ctrl-C or a kill, or when a wrong record has been mended: no
    record twice, none missed. A file that has grown since is continued. --restart imports it once more.

    NaN and the infinities of Parquet become null, since JSON has no such numbers; how many is told at the end.
    """
    _check_streams(name, files)
    for option, formats in (
        ("--typed" if typed else "", {"csv"}),
        ("--delimiter" if delimiter else "", {"csv"}),
        ("--null" if nulls else "", {"csv", "jsonl"}),
    ):
        if option:
            _check_formats(option, formats, files, kind)
    if member and not any(map(_is_zip, files)):
        raise click.UsageError(f"--member {member} is a file inside a .zip, which {', '.join(files)} is none of")
    if time_format and not time:
        raise click.UsageError(f"--time-format {time_format} goes with --time-field")
    names = FieldNames(tuple(keys), tag, time, queue, time_format or "auto")
    reading = Reading(names.wanted, typed, ("", *nulls), delimiter or "", CHUNK_ROWS)
    paths = invocation.existing_paths()
    patience_s = invocation.timeout if invocation.timeout_given else PATIENCE_S
    rows = []
    with invocation.client() as client:
        if queues is not None:
            client.create_topic(topic, queues)
        for file in files:
            job = ImportJob(client, paths, file, topic, names, reading, kind or "", member, name, patience_s)
            rows.append(job.run(invocation.out, restart=restart))
    out = invocation.out
    if out.shape != "table":
        out.rows("imports", _COLUMNS, rows, topic=topic)


def _check_streams(name: str, files: Sequence[str]) -> None:
    """Raise a usage error where `--name` does not name one stream."""
    streams = sum(_regular_file(file) is None for file in files)
    if name and streams > 1:
        raise click.UsageError(f"--name {name} is one stream's: the second of them would be taken for the first")
    if name and not streams and all(Path(file).exists() for file in files):
        raise click.UsageError(f"--name {name} is for a stream; the import of a file goes on by the file's name")


def _is_zip(file: str) -> bool:
    return Path(file).suffix.lower() == ".zip"


def _check_formats(option: str, formats: Collection[str], files: Sequence[str], kind: str | None) -> None:
    """Raise a usage error for an option that says nothing of any file; what a .zip holds is not known yet."""
    kinds = {file: kind or guess_kind(file) for file in files}
    if not any(found in formats or (_is_zip(file) and not kind) for file, found in kinds.items()):
        told = ", ".join(f"{file} is {found}" for file, found in kinds.items())
        raise click.UsageError(f"{option} is for {' and '.join(sorted(formats))}; {told}")


def _regular_file(file: str) -> Path | None:
    """The file itself, by whatever path it was named, if it can be read again; None for a stream."""
    path = Path(file)
    return path.resolve() if file != STDIN and path.is_file() else None


def _check_last_line(path: Path, kind: str, size: int) -> None:
    """Raise BadRequestError when the line that was a file's last one, when it had `size` bytes, has become longer."""
    ends = b"\r\n" if kind == "csv" else b"\n"
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        last, following = file.read(1), file.read(2)
    if size and last not in ends and following[:1] not in ends and following != b"\r\n":
        raise BadRequestError(
            f"{path}: line {_lines_in(path, size):,} was imported before its end was written, and has become longer; "
            "--restart imports everything again"
        )


def _lines_in(path: Path, size: int) -> int:
    """How many lines the first `size` bytes of a file have, the last one unfinished."""
    with path.open("rb") as file:
        pieces = (file.read(min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES))
        return 1 + sum(piece.count(b"\n") for piece in pieces)


class ImportJob:
    """One input's import: opens source and journal, sends what is missing, tells how it went."""

    def __init__(
        self,
        client: Client,
        paths: StorePaths,
        file: str,
        topic: str,
        names: FieldNames,
        reading: Reading,
        kind: str = "",
        member: str = "",
        name: str = "",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = client
        self._paths = paths
        self._file = file
        self._path = _regular_file(file)
        self._title = "stdin" if file == STDIN else Path(file).name if self._path else file
        self._topic = topic
        self._names = names
        self._reading = reading
        self._kind = kind
        self._member = member
        self._name = name
        self._patience_s = patience_s
        # Bytes of the file that an earlier run has left acknowledged.
        self._acknowledged_before = 0

    def run(self, out: Output, *, restart: bool = False) -> dict[str, Any]:
        """Import what is not stored yet; returns the numbers."""
        with Source(self._file, self._kind, self._member) as source:
            journal = Journal(StoreIO(), self._paths, self._identity(source.kind))
            try:
                return self._run(out, source, journal, restart)
            finally:
                journal.close()

    def _run(self, out: Output, source: Source, journal: Journal, restart: bool) -> dict[str, Any]:
        entry = self._prepare(journal, source, restart)
        if entry is None:
            assert journal.entry is not None
            self._say_done(out, journal.entry)
            return self._numbers(0, journal.entry.records, 0.0)
        title = self._title
        with Progress(out, title) as progress:
            first = 0
            importer = Importer(
                self._client,
                journal,
                self._topic,
                ColumnMaker(self._names, now_ms(), self._file),
                self._file,
                lambda position: progress.update(source.done(), source.total, position - first),
                out.note,
                self._patience_s,
            )
            try:
                stored = importer.begin()
                first = importer.position
                if first or stored:
                    out.note(f"{title}: going on behind record {first + len(stored):,}")
                self._send(importer, source, stored, first, out)
            except BaseException:
                self._keep_acknowledged(journal, entry, importer, source)
                raise
            importer_end = importer.position
            progress.end(source.total, source.total, importer_end - first)
            # A file that grows has grown since the import began, and was read to its end.
            journal.finish(self._up_to(source.done(), entry, source), importer_end, now_ms())
            sent = importer_end - first - importer.found
            out.note(
                f"{title}: {counted(sent, 'record')} to {self._topic} in {format_duration(progress.seconds)}, "
                f"{sent / max(progress.seconds, 1e-9):,.0f}/s"
            )
            if source.not_finite:
                told = counted(source.not_finite, "number")
                out.note(f"{title}: {told} NaN or infinite, null in the messages: JSON has no such numbers")
            return self._numbers(sent, importer_end - sent, progress.seconds)

    def _send(self, importer: Importer, source: Source, stored: Stored, first: int, out: Output) -> None:
        try:
            importer.send(source.chunks(replace(self._reading, skip=first)), stored)
        except KeyboardInterrupt:
            again = "the same command goes on" if self._resumable else "without --name it cannot go on"
            out.note(f"\nstopped; {importer.position:,} records are acknowledged, {again}")
            raise
        except (BadRequestError, FrameTooLargeError) as error:
            again = "; the same command goes on when it is mended" if self._resumable else ""
            raise type(error)(f"{error}; records stored before it: {importer.position:,}{again}") from None

    def _keep_acknowledged(self, journal: Journal, entry: Entry, importer: Importer, source: Source) -> None:
        """Have the journal tell the acknowledged part of the file alone: what is wrong behind it may be mended."""
        if self._path is not None and not source.may_grow:
            # What failed is to be told, not that the file is gone as well.
            with suppress(OSError, MqprocError, click.ClickException):
                if entry.fingerprint.is_continued_by(self._path, may_grow=False):
                    journal.go_on(entry, self._of_records(importer.position))
            return
        acknowledged = max(importer.taken, self._acknowledged_before)
        if acknowledged or not importer.position:
            journal.go_on(entry, self._up_to(acknowledged, entry, source).fingerprint)

    def _of_records(self, size: int, head: int = CHUNK_ROWS) -> Fingerprint:
        """What the first `size` records of the file are like, by the first `head` of them."""
        head = min(size, head)
        if not head:
            return Fingerprint()
        bodies: list[bytes] = []
        with Source(self._file, self._kind, self._member) as source:
            for chunk in source.chunks(replace(self._reading, fields=(), chunk_rows=head)):
                bodies += chunk.bodies
                if len(bodies) >= head:
                    break
        return Fingerprint.of_records(size, bodies[:head])

    def _is_continued(self, before: Fingerprint, path: Path, source: Source) -> bool:
        """Whether the file begins with what was acknowledged of it."""
        if before.in_records:
            return self._of_records(before.size, before.head_size) == before
        return before.is_continued_by(path, may_grow=source.may_grow)

    def _up_to(self, size: int, entry: Entry, source: Source) -> Entry:
        """The entry for the first `size` bytes of its file alone; as it is where another file has that name now."""
        if self._path is not None and source.may_grow:
            with suppress(OSError):
                if entry.fingerprint.is_continued_by(self._path, may_grow=True):
                    return replace(entry, fingerprint=Fingerprint.of(self._path, size))
        return entry

    @property
    def _resumable(self) -> bool:
        return self._path is not None or bool(self._name)

    def _identity(self, kind: str) -> dict[str, Any]:
        """Whatever shapes the messages: a run with other options is another import."""
        source = str(self._path) if self._path else f"stdin:{self._name}"
        if not self._resumable:
            # Nobody can say that two streams are one: each is an import of its own.
            source = f"stdin:{now_ms()}"
        names, reading = self._names, self._reading
        return {
            "source": source,
            "member": self._member,
            "format": kind,
            "topic": self._topic,
            "fields": [list(names.keys), names.tag, names.time, names.time_format, names.queue],
            # As versions before have it, whose imports go on.
            "reading": [reading.typed, list(reading.nulls), reading.delimiter or ","],
        }

    def _prepare(self, journal: Journal, source: Source, restart: bool) -> Entry | None:
        """The journal's entry for this run; None when there is nothing to do. Raises BadRequestError."""
        fingerprint = Fingerprint.of(self._path) if self._path else Fingerprint()
        before = journal.entry
        if before is None or restart:
            return journal.begin(fingerprint, before.generation + 1 if before else 0, now_ms())
        if self._path and not self._is_continued(before.fingerprint, self._path, source):
            raise BadRequestError(f"{self._path} is another file than at the last import; --restart begins anew")
        if before.finished_ms and self._path and before.fingerprint == fingerprint:
            return None
        if before.finished_ms and self._path:
            _check_last_line(self._path, source.kind, before.fingerprint.size)
        # Records of an import that was begun may be there, and the index alone knows which.
        check_index(self._paths.root, "; --restart imports everything again")
        self._acknowledged_before = before.fingerprint.size
        return journal.go_on(before, fingerprint)

    def _say_done(self, out: Output, entry: Entry) -> None:
        when = format_time(entry.finished_ms)
        out.note(f"{self._file}: all {entry.records:,} records were imported {when}; --restart imports them again")

    def _numbers(self, sent: int, before: int, seconds: float) -> dict[str, Any]:
        return {
            "source": self._file,
            "records": sent,
            "already_stored": before,
            "seconds": round(seconds, 3),
            "per_second": round(sent / seconds) if seconds else 0,
        }
