"""`mqproc import`: import files of records as messages.

See `importer` for how an import resumes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from mqproc.cli.message.importer import (
    CHUNK_ROWS,
    TIME_FORMATS,
    ColumnMaker,
    FieldNames,
    Fingerprint,
    Importer,
    Journal,
    JournalEntry,
    Stored,
)
from mqproc.cli.message.sources import FORMATS, STDIN, Reading, Source, guess_kind
from mqproc.cli.options import Command, Invocation, complete_topic, pass_invocation
from mqproc.cli.output import Output, OutputColumn, Progress
from mqproc.cli.times import format_duration, format_time, now_ms
from mqproc.client import Client
from mqproc.client.dispatch_barrier import PATIENCE_S, check_index
from mqproc.errors import BadRequestError, FrameTooLargeError, MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.units import counted

_COLUMNS = [
    OutputColumn("source"),
    OutputColumn("records", kind="count"),
    OutputColumn("already_stored", kind="count"),
    OutputColumn("seconds", kind="number"),
    OutputColumn("per_second", "per s", "count"),
]
# Bytes per read when lines are counted.
_PIECE_BYTES = 1 << 20


_FORMATS_OF = {"--typed": {"csv"}, "--delimiter": {"csv"}, "--null": {"csv", "jsonl"}}


class Delimiter(click.ParamType[str]):
    """One character that separates CSV fields; `\\t` is a tab."""

    name = "character"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = "\t" if value == "\\t" else str(value)
        if len(text) != 1 or text in '"\r\n' or "\ud800" <= text <= "\udfff":
            self.fail(f"{value!r} is not one character that can separate fields", param, ctx)
        return text


@click.command("import", cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option(
    "--topic", required=True, shell_complete=complete_topic, help="Topic to send to; it is created if missing."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Input format.  [default: by the name of the file or .zip member, else lines]",
)
@click.option("--key-field", "keys", multiple=True, metavar="FIELD", help="Field used as key; may be repeated.")
@click.option("--tag-field", "tag", default="", metavar="FIELD", help="Field used as tag.")
@click.option("--time-field", "time", default="", metavar="FIELD", help="Field used as born time.")
@click.option(
    "--time-format",
    metavar="FORMAT",
    help=f"{', '.join(TIME_FORMATS)}, or a strptime format.  [default: auto]",
)
@click.option("--queue-field", "queue", default="", metavar="FIELD", help="Field used as queue id.")
@click.option(
    "--queues", type=click.IntRange(1, 65535), metavar="N", help="Number of queues of the topic, if it has fewer."
)
@click.option("--typed", is_flag=True, help="CSV: convert numbers, true, false and nulls to JSON values.")
@click.option(
    "--null",
    "nulls",
    multiple=True,
    metavar="TEXT",
    help="CSV, JSON: text that means no value, in addition to the empty text.",
)
@click.option(
    "--delimiter", type=Delimiter(), help="CSV: field separator; \\t is a tab.  [default: , and a tab for .tsv]"
)
@click.option("--member", default="", metavar="NAME", help="File to read from a .zip with several files.")
@click.option("--name", default="", help="Name for the import of a stream, so that it can be resumed.")
@click.option("--restart", is_flag=True, help="Import everything again.")
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

    FILE may be compressed (.gz, .bz2, .xz, .zip), a pipe, or - for stdin. A record of CSV or Parquet becomes a JSON
    object; a line of the other formats is the body unchanged. Spaces in keys become _, as RocketMQ separates keys by
    spaces.

    After Ctrl-C, a kill, or a corrected record the same command resumes: no record is imported twice and none is
    missed. For a file that has grown it imports the new records. --restart imports everything again.

    NaN and infinity in Parquet become null, as JSON has no such numbers; their count is printed at the end.
    """
    _check_streams(name, files)
    given = {"--typed": typed, "--delimiter": bool(delimiter), "--null": bool(nulls)}
    for option in (option for option, is_given in given.items() if is_given):
        _check_formats(option, _FORMATS_OF[option], files, kind)
    if member and not any(map(_is_zip, files)):
        raise click.UsageError(f"--member {member} is for a .zip file, but not for {', '.join(files)}")
    if time_format and not time:
        raise click.UsageError(f"--time-format {time_format} needs --time-field")
    names = FieldNames(tuple(keys), tag, time, queue, time_format or "auto")
    reading = Reading(names.selected, typed, ("", *nulls), delimiter or "", CHUNK_ROWS)
    paths = invocation.existing_paths()
    patience_s = invocation.timeout if invocation.timeout_given else PATIENCE_S
    settings = ImportSettings(kind or "", member, name, patience_s)
    rows = []
    with invocation.client() as client:
        if queues is not None:
            client.create_topic(topic, queues)
        for file in files:
            job = ImportJob(client, paths, file, topic, names, reading, settings)
            rows.append(job.run(invocation.out, restart=restart))
    out = invocation.out
    if out.shape != "table":
        out.rows("imports", _COLUMNS, rows, topic=topic)


def _check_streams(name: str, files: Sequence[str]) -> None:
    """Raise a usage error if `--name` does not name exactly one stream."""
    streams = sum(_regular_file(file) is None for file in files)
    if name and streams > 1:
        raise click.UsageError(f"--name {name} names one stream, but there are {streams}")
    if name and not streams and all(Path(file).exists() for file in files):
        raise click.UsageError(f"--name {name} is for a stream; the import of a file resumes by the file's name")


def _is_zip(file: str) -> bool:
    return Path(file).suffix.lower() == ".zip"


def _check_formats(option: str, formats: Collection[str], files: Sequence[str], kind: str | None) -> None:
    """Raise a usage error if an option applies to none of the files.

    The content of a .zip is not known yet.
    """
    kinds = {file: kind or guess_kind(file) for file in files}
    if not any(found in formats or (_is_zip(file) and not kind) for file, found in kinds.items()):
        listed = ", ".join(f"{file} is {found}" for file, found in kinds.items())
        raise click.UsageError(f"{option} is for {' and '.join(sorted(formats))}; {listed}")


def _regular_file(file: str) -> Path | None:
    """The resolved path of a file that can be read again, None for a stream."""
    path = Path(file)
    return path.resolve() if file != STDIN and path.is_file() else None


def _check_last_line(path: Path, kind: str, size: int) -> None:
    """Raise BadRequestError if the line that ended at `size` bytes has become longer."""
    ends = b"\r\n" if kind == "csv" else b"\n"
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        last, following = file.read(1), file.read(2)
    if size and last not in ends and following[:1] not in ends and following != b"\r\n":
        raise BadRequestError(
            f"{path}: line {_lines_in(path, size):,} was imported before it was complete, and has become longer; "
            "--restart imports everything again"
        )


def _lines_in(path: Path, size: int) -> int:
    """Number of lines in the first `size` bytes of a file, the last one incomplete."""
    with path.open("rb") as file:
        pieces = (file.read(min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES))
        return 1 + sum(piece.count(b"\n") for piece in pieces)


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Format, .zip member, name of a stream, and wait for a lost group."""

    kind: str = ""
    member: str = ""
    name: str = ""
    patience_s: float = PATIENCE_S


class ImportJob:
    """Import of one input: source, journal, sending of missing records, result."""

    def __init__(
        self,
        client: Client,
        paths: StorePaths,
        file: str,
        topic: str,
        names: FieldNames,
        reading: Reading,
        settings: ImportSettings = ImportSettings(),
    ) -> None:
        self._client = client
        self._paths = paths
        self._file = file
        self._path = _regular_file(file)
        self._title = "stdin" if file == STDIN else Path(file).name if self._path else file
        self._topic = topic
        self._names = names
        self._reading = reading
        self._kind = settings.kind
        self._member = settings.member
        self._name = settings.name
        self._patience_s = settings.patience_s
        # Acknowledged bytes of the file from earlier runs.
        self._acknowledged_before = 0

    def run(self, out: Output, *, restart: bool = False) -> dict[str, Any]:
        """Import the records that are not stored yet; returns the numbers."""
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
            self._note_done(out, journal.entry)
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
                    out.note(f"{title}: continuing after record {first + len(stored):,}")
                self._send(importer, source, stored, first, out)
            except BaseException:
                self._save_acknowledged(journal, entry, importer, source)
                raise
            importer_end = importer.position
            progress.end(source.total, source.total, importer_end - first)
            # A growing file has been read to its end, which may be after its size at the start.
            journal.finish(self._up_to(source.done(), entry, source), importer_end, now_ms())
            sent = importer_end - first - importer.found
            out.note(
                f"{title}: {counted(sent, 'record')} to {self._topic} in {format_duration(progress.seconds)}, "
                f"{sent / max(progress.seconds, 1e-9):,.0f}/s"
            )
            if source.not_finite:
                numbers = counted(source.not_finite, "number")
                out.note(f"{title}: {numbers} NaN or infinite, stored as null: JSON has no such numbers")
            return self._numbers(sent, importer_end - sent, progress.seconds)

    def _send(self, importer: Importer, source: Source, stored: Stored, first: int, out: Output) -> None:
        try:
            importer.send(source.chunks(replace(self._reading, skip=first)), stored)
        except KeyboardInterrupt:
            hint = "the same command continues" if self._resumable else "without --name it cannot be resumed"
            out.note(f"\nstopped; {importer.position:,} records are acknowledged; {hint}")
            raise
        except (BadRequestError, FrameTooLargeError) as error:
            hint = "; correct it and repeat the command" if self._resumable else ""
            raise type(error)(f"{error}; records stored before it: {importer.position:,}{hint}") from None

    def _save_acknowledged(self, journal: Journal, entry: JournalEntry, importer: Importer, source: Source) -> None:
        """Save the fingerprint of the acknowledged part only: the rest may be corrected."""
        if self._path is not None and not source.may_grow:
            # The original error is reported, not a second one about the file.
            with suppress(OSError, MqprocError, click.ClickException):
                if entry.fingerprint.is_continued_by(self._path, may_grow=False):
                    journal.resume(entry, self._of_records(importer.position))
            return
        acknowledged = max(importer.taken, self._acknowledged_before)
        if acknowledged or not importer.position:
            journal.resume(entry, self._up_to(acknowledged, entry, source).fingerprint)

    def _of_records(self, size: int, head: int = CHUNK_ROWS) -> Fingerprint:
        """Fingerprint of the first `size` records of the file, by the bodies of the first `head`."""
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
        """Whether the file begins with its acknowledged part."""
        if before.in_records:
            return self._of_records(before.size, before.head_size) == before
        return before.is_continued_by(path, may_grow=source.may_grow)

    def _up_to(self, size: int, entry: JournalEntry, source: Source) -> JournalEntry:
        """The entry for the first `size` bytes of the file, unchanged if the file was replaced."""
        if self._path is not None and source.may_grow:
            with suppress(OSError):
                if entry.fingerprint.is_continued_by(self._path, may_grow=True):
                    return replace(entry, fingerprint=Fingerprint.of(self._path, size))
        return entry

    @property
    def _resumable(self) -> bool:
        return self._path is not None or bool(self._name)

    def _identity(self, kind: str) -> dict[str, Any]:
        """Everything that affects the messages: a run with other options is another import."""
        source = str(self._path) if self._path else f"stdin:{self._name}"
        if not self._resumable:
            # Streams cannot be recognised: each is an import of its own.
            source = f"stdin:{now_ms()}"
        names, reading = self._names, self._reading
        return {
            "source": source,
            "member": self._member,
            "format": kind,
            "topic": self._topic,
            "fields": [list(names.keys), names.tag, names.time, names.time_format, names.queue],
            # The default delimiter is stored as in earlier versions, so that their imports can be resumed.
            "reading": [reading.typed, list(reading.nulls), reading.delimiter or ","],
        }

    def _prepare(self, journal: Journal, source: Source, restart: bool) -> JournalEntry | None:
        """The journal's entry for this run, None if there is nothing to do. Raises BadRequestError."""
        fingerprint = Fingerprint.of(self._path) if self._path else Fingerprint()
        before = journal.entry
        if before is None or restart:
            return journal.begin(fingerprint, before.generation + 1 if before else 0, now_ms())
        if self._path and not self._is_continued(before.fingerprint, self._path, source):
            raise BadRequestError(
                f"{self._path} is not the file of the last import; --restart imports it from the start"
            )
        if before.finished_ms and self._path and before.fingerprint == fingerprint:
            return None
        if before.finished_ms and self._path:
            _check_last_line(self._path, source.kind, before.fingerprint.size)
        # Only the index knows which records of an unfinished import are stored.
        check_index(self._paths.root, "; --restart imports everything again")
        self._acknowledged_before = before.fingerprint.size
        return journal.resume(before, fingerprint)

    def _note_done(self, out: Output, entry: JournalEntry) -> None:
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
