"""How far an import or a replay is: a journal beside the store, one for each (source, topic, options).

    <store>/mqproc/imports/<id>.json       what is imported, and whether it is finished     replaced as a whole
    <store>/mqproc/imports/<id>.position   records acknowledged, 20 digits                  written after each answer

The position is written without a sync: it must survive the importer's death, and after a power loss it is at worst too
small, which costs lookups only. The open position file is locked, so two imports of one input cannot mix.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from mqproc.errors import BadRequestError, StoreLockedError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.file_lock import try_flock

# The head of a file, which tells whether it is still the same one.
HEAD_BYTES = 65536
_DIGITS = 20
_SYNC_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A file as it was, or its acknowledged part: grown is the same file, changed is not. Empty for a stream.

    Of a file whose bytes do not tell which records they are, packed or Parquet, the part is counted `in_records`.
    """

    size: int = 0
    head_size: int = 0
    head_sha256: str = ""
    in_records: bool = False

    @classmethod
    def of(cls, path: Path, size: int | None = None) -> Fingerprint:
        """Of the whole file, or of its first `size` bytes."""
        size = path.stat().st_size if size is None else size
        with path.open("rb") as file:
            head = file.read(min(size, HEAD_BYTES))
        return cls(size, len(head), hashlib.sha256(head).hexdigest())

    @classmethod
    def of_records(cls, size: int, head: Sequence[bytes]) -> Fingerprint:
        """Of `size` records, the first of which have these bodies."""
        digest = hashlib.sha256()
        for body in head:
            digest.update(b"%d:%b" % (len(body), body))
        return cls(size, len(head), digest.hexdigest(), in_records=True)

    def is_continued_by(self, path: Path, *, may_grow: bool) -> bool:
        """Whether `path` begins with what was there, and is as long, or longer if it may."""
        if not self.head_sha256:
            return True
        with path.open("rb") as file:
            head = file.read(self.head_size)
        size = path.stat().st_size
        same_size = size >= self.size if may_grow else size == self.size
        return same_size and hashlib.sha256(head).hexdigest() == self.head_sha256


@dataclass(frozen=True, slots=True)
class Entry:
    """What the journal's JSON holds. `generation` counts the times that `--restart` was said."""

    identity: dict[str, Any]
    fingerprint: Fingerprint
    generation: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    records: int = 0


def import_id(identity: dict[str, Any]) -> str:
    """16 hex digits that name an import: of source, topic and whatever else shapes its messages."""
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]


def _encodable(value: Any) -> Any:
    """A part of an identity that JSON can hold: names of files and words of a command line may be no UTF-8."""
    if isinstance(value, dict):
        return {name: _encodable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(part) for part in value]
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        # As Python writes bytes, which begins as no path does: it is no other file's name.
        return repr(os.fsencode(value))
    return value


def unique_id_prefix(name: str, generation: int, record: int) -> str:
    """The first 28 digits of a record's unique id; the last four are its number modulo 65,536.

    Deterministic, so that a later run can ask the store which records it holds.
    """
    family = hashlib.sha256(f"{name}/{generation}".encode()).hexdigest()[:16]
    return f"{family}{record >> 16:012x}".upper()


def unique_id_of(name: str, generation: int, record: int) -> str:
    """The unique id of record number `record`."""
    return f"{unique_id_prefix(name, generation, record)}{record & 0xFFFF:04X}"


class Journal:
    """An import's journal, open and locked. `entry` is None when there was none."""

    def __init__(self, io: StoreIO, paths: StorePaths, identity: dict[str, Any], folder: str = "imports") -> None:
        """Raises StoreLockedError when the same import is under way."""
        identity = _encodable(identity)
        self.name = import_id(identity)
        self.folder = paths.own / folder
        self._identity = identity
        self._io = io
        io.make_folder(self.folder, mode=0o700)
        self._json = self.folder / f"{self.name}.json"
        self._fd = io.open(self.folder / f"{self.name}.position", write=True, create=True, mode=0o600)
        if not try_flock(self._fd):
            io.close(self._fd)
            raise StoreLockedError(f"{identity['source']}: the same is running already")
        self._synced_s = time.monotonic()
        self.entry = self._load()

    def _load(self) -> Entry | None:
        try:
            found = self._io.read_json(self._json, Entry)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise BadRequestError(f"{self._json}: {error}; remove it to begin anew") from None
        return found

    @property
    def position(self) -> int:
        """Records acknowledged; 0 when nothing is known."""
        digits = self._io.pread(self._fd, _DIGITS, 0)
        return int(digits) if len(digits) == _DIGITS and digits.isdigit() else 0

    def begin(self, fingerprint: Fingerprint, generation: int, now_ms: int) -> Entry:
        """A new import, from record 0."""
        self.advance(0)
        return self._save(Entry(self._identity, fingerprint, generation, now_ms))

    def go_on(self, entry: Entry, fingerprint: Fingerprint) -> Entry:
        """The same import of an input that may have grown, or of which no more than `fingerprint` is acknowledged."""
        return self._save(Entry(self._identity, fingerprint, entry.generation, entry.started_ms))

    def finish(self, entry: Entry, records: int, now_ms: int) -> None:
        """All records are stored."""
        self._save(Entry(self._identity, entry.fingerprint, entry.generation, entry.started_ms, now_ms, records))

    def advance(self, position: int) -> None:
        """Records below `position` are acknowledged."""
        self._io.pwrite(self._fd, b"%020d" % position, 0)
        now_s = time.monotonic()
        if now_s - self._synced_s >= _SYNC_EVERY_S:
            self._synced_s = now_s
            self._io.sync(self._fd)

    def close(self) -> None:
        """Let go of the lock."""
        self._io.close(self._fd)

    def _save(self, entry: Entry) -> Entry:
        self._io.write_file_atomically(self._json, msgspec.json.encode(asdict(entry)), mode=0o600)
        self.entry = entry
        return entry
