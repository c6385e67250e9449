"""Files for requests to the retention of a running group, and for its report.

mqproc/retention.request.*   one per request, empty: the name has the arguments, so that it fits onto a full disk. The
                             keeper deletes it after execution; until then a successor finds it
mqproc/retention.json        the last pass that deleted something
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Final

import msgspec

from mqproc.config.options import Options
from mqproc.errors import BadRequestError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.paths import StorePaths

MS_PER_HOUR: Final = 3_600_000
# Suffix of an incomplete file.
_TEMPORARY: Final = ".tmp"
_NAME: Final = re.compile(r"[0-9a-f]+\.(?:(?P<reserved_ms>\d+)ms|as-the-options-say)", re.ASCII)


class DeletionRequest(msgspec.Struct, frozen=True):
    """`reserved_ms`: age at which segments expire; None: as configured."""

    reserved_ms: int | None = None

    def reserved_ms_by(self, options: Options) -> int:
        """Age at which segments expire."""
        return options.file_reserved_time * MS_PER_HOUR if self.reserved_ms is None else self.reserved_ms


def submit(io: StoreIO, paths: StorePaths, reserved_ms: int | None = None) -> Path:
    """Submit a request; returns its file, which is deleted after execution."""
    what = "as-the-options-say" if reserved_ms is None else f"{reserved_ms}ms"
    path = paths.retention_request(f"{secrets.token_hex(8)}.{what}")
    io.write_file_atomically(path, b"", mode=0o600)
    return path


def find(io: StoreIO, paths: StorePaths) -> Path | None:
    """A pending request, or one that a predecessor did not finish."""
    first = paths.retention_request("")
    for name in io.names(first.parent):
        if name.startswith(first.name) and not name.endswith(_TEMPORARY):
            entry = io.entry(first.with_name(name))
            if entry is not None and entry.kind is not Kind.FOLDER:
                return first.with_name(name)
    return None


def read(paths: StorePaths, path: Path) -> DeletionRequest:
    """Parse a request's file name. Raises BadRequestError."""
    found = _NAME.fullmatch(path.name.removeprefix(paths.retention_request("").name))
    if found is None:
        raise BadRequestError(f"{path}: the name is not a valid request")
    reserved_ms = found["reserved_ms"]
    return DeletionRequest(None if reserved_ms is None else int(reserved_ms))


class LastPass(msgspec.Struct):
    """Result of a pass: `bytes` on disk, the log's `minimum` then, `trigger` as the reason."""

    time_ms: int = 0
    trigger: str = "nothing"
    minimum: int = 0
    segments: int = 0
    queue_files: int = 0
    index_files: int = 0
    bytes: int = 0


class RetentionReport(msgspec.Struct):
    """The report; `last` is None before anything was deleted."""

    schema_version: int = 1
    last: LastPass | None = None


def read_report(io: StoreIO, paths: StorePaths) -> RetentionReport:
    """Read the report; an empty one if it is missing or unreadable, since nothing depends on it."""
    try:
        return io.read_json(paths.retention_report, RetentionReport)
    except (FileNotFoundError, msgspec.MsgspecError):
        return RetentionReport()


def write_report(io: StoreIO, paths: StorePaths, report: RetentionReport) -> None:
    """Replace the report. Raises OSError."""
    io.write_file_atomically(paths.retention_report, msgspec.json.format(msgspec.json.encode(report), indent=1), 0o600)
