"""What is asked of a running group's retention, by files; and what retention tells, by another.

mqproc/retention.request.*   one each request, empty: its name says what is asked, so that a full disk has room for it;
                             the keeper deletes it when it is carried out, and its successor finds it still there when
                             it is not
mqproc/retention.json        the last pass that deleted something
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Final

import msgspec

from mqproc.config import Options
from mqproc.errors import BadRequestError
from mqproc.io import Kind, StoreIO
from mqproc.paths import StorePaths

MS_PER_HOUR: Final = 3_600_000
# Half made.
_TEMPORARY: Final = ".tmp"
_NAME: Final = re.compile(r"[0-9a-f]+\.(?:(?P<reserved_ms>\d+)ms|as-the-options-say)", re.ASCII)


class Request(msgspec.Struct, frozen=True):
    """`reserved_ms`: what is older has expired; None: as the options say."""

    reserved_ms: int | None = None

    def reserved_ms_by(self, options: Options) -> int:
        """The age at which segments have expired."""
        return options.file_reserved_time * MS_PER_HOUR if self.reserved_ms is None else self.reserved_ms


def ask(io: StoreIO, paths: StorePaths, reserved_ms: int | None = None) -> Path:
    """Leave a request; the file that is gone when it has been carried out."""
    what = "as-the-options-say" if reserved_ms is None else f"{reserved_ms}ms"
    path = paths.retention_request(f"{secrets.token_hex(8)}.{what}")
    io.write_file_atomically(path, b"", mode=0o600)
    return path


def find(io: StoreIO, paths: StorePaths) -> Path | None:
    """A request that waits, or that a predecessor had begun."""
    first = paths.retention_request("")
    for name in io.names(first.parent):
        if name.startswith(first.name) and not name.endswith(_TEMPORARY):
            entry = io.entry(first.with_name(name))
            if entry is not None and entry.kind is not Kind.FOLDER:
                return first.with_name(name)
    return None


def read(paths: StorePaths, path: Path) -> Request:
    """What is asked. Raises BadRequestError for what is no request."""
    found = _NAME.fullmatch(path.name.removeprefix(paths.retention_request("").name))
    if found is None:
        raise BadRequestError(f"{path}: its name does not say what is asked")
    reserved_ms = found["reserved_ms"]
    return Request(None if reserved_ms is None else int(reserved_ms))


class LastPass(msgspec.Struct):
    """What a pass deleted. `bytes` on disk; `minimum` is the log's since then; `trigger` what was due."""

    time_ms: int = 0
    trigger: str = "nothing"
    minimum: int = 0
    segments: int = 0
    queue_files: int = 0
    index_files: int = 0
    bytes: int = 0


class Report(msgspec.Struct):
    """`last`: None before anything was deleted."""

    schema_version: int = 1
    last: LastPass | None = None


def read_report(io: StoreIO, paths: StorePaths) -> Report:
    """The report; an empty one when there is none that can be read: it tells nothing that the store needs."""
    try:
        return io.read_json(paths.retention_report, Report)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Report()


def write_report(io: StoreIO, paths: StorePaths, report: Report) -> None:
    """Replace the report. Raises OSError."""
    io.write_file_atomically(paths.retention_report, msgspec.json.format(msgspec.json.encode(report), indent=1), 0o600)
