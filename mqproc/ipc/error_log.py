"""Distinct errors of a group's processes, each with its count, first and last time.

Errors are equal when their texts differ only in numbers and ids. When the file has no room for another error of an
owner, the one that occurred longest ago is replaced.
"""

from __future__ import annotations

import errno
import mmap
import re
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import error_log as layout
from mqproc.layout.control import WORD_SIZE
from mqproc.paths import StorePaths

# Ids of messages and transactions are hex.
_NUMBERS: Final = re.compile(r"\b[0-9A-Fa-f]{16,}\b|\d[\d,._]*")
_READ_TRIES: Final = 3
LINES_DROPPED: Final = "log lines were dropped"
"""Start of the entry that counts lines which a process's output did not take."""


@dataclass(frozen=True, slots=True)
class SeenError:
    """One distinct error of one process."""

    owner: str
    text: str
    count: int
    first_ms: int
    last_ms: int


class ErrorLog:
    """The entries of one owner, for writing."""

    def __init__(self, mapping: mmap.mmap, owner: str) -> None:
        self._map = mapping
        self._words = Words(mapping)
        self._owner = owner
        self._known = {
            _shape(error.text): number
            for number in range(layout.ENTRIES)
            if (error := _read(self._words, mapping, owner, number)) is not None
        }

    @classmethod
    def create(cls, io: StoreIO, paths: StorePaths, owner: str) -> ErrorLog | None:
        """Open the file, or create a new one in place of an invalid one.

        The caller holds the store's lock. Returns None when the disk is full: a group runs without it. Raises other
        OSErrors.
        """
        if (found := cls.open(io, paths, owner)) is not None:
            return found
        try:
            _make(io, paths)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return None
        return cls.open(io, paths, owner)

    @classmethod
    def open(cls, io: StoreIO, paths: StorePaths, owner: str) -> ErrorLog | None:
        """Open one owner's entries; None without such a file."""
        mapping = _open(io, paths, write=True)
        return None if mapping is None else cls(mapping, owner)

    def note(self, text: str, now_ms: int) -> None:
        """Count an error."""
        # File names in it may not be UTF-8.
        encoded = text.encode(errors="backslashreplace")[: layout.TEXT_BYTES_MAX]
        text = encoded.decode(errors="ignore")
        number = self._known.get(_shape(text))
        if number is None:
            number = self._make(text.encode(), now_ms)
            self._known[_shape(text)] = number
        at = layout.entry_offset(self._owner, number) // WORD_SIZE
        self._words[at + layout.LAST_MS] = now_ms
        self._words.add(at + layout.COUNT, 1)

    def _make(self, text: bytes, now_ms: int) -> int:
        """Write an entry except for its count."""
        number = self._free()
        start = layout.entry_offset(self._owner, number)
        at = start // WORD_SIZE
        self._words[at + layout.COUNT] = 0
        self._map[start + layout.TEXT_AT : start + layout.TEXT_AT + len(text)] = text
        self._words[at + layout.TEXT_SIZE] = len(text)
        self._words[at + layout.FIRST_MS] = now_ms
        return number

    def _free(self) -> int:
        def last_ms(shape: str) -> int:
            return self._words[layout.entry_offset(self._owner, self._known[shape]) // WORD_SIZE + layout.LAST_MS]

        free = set(range(layout.ENTRIES)).difference(self._known.values())
        return min(free) if free else self._known.pop(min(self._known, key=last_ms))


def seen_errors(io: StoreIO, paths: StorePaths) -> list[SeenError]:
    """All distinct errors, the most recent first; none without a file."""
    mapping = _open(io, paths, write=False)
    if mapping is None:
        return []
    with closing(mapping), closing(Words(mapping)) as words:
        found = [
            error
            for owner in layout.OWNERS
            for number in range(layout.ENTRIES)
            if (error := _read(words, mapping, owner, number)) is not None
        ]
    return sorted(found, key=lambda error: -error.last_ms)


def _make(io: StoreIO, paths: StorePaths) -> None:
    """Create an empty file, replacing an existing one."""
    with io.new_file(paths.errors) as fd:
        # Allocated, since a store to a hole on a full disk raises SIGBUS.
        io.allocate(fd, 0, layout.FILE_SIZE)
        with closing(io.map(fd, layout.FILE_SIZE, write=True)) as mapping, closing(Words(mapping)) as words:
            words[layout.HEADER_VERSION] = layout.VERSION
            words[layout.HEADER_MAGIC] = layout.MAGIC


def _open(io: StoreIO, paths: StorePaths, *, write: bool) -> mmap.mmap | None:
    try:
        with io.opened(paths.errors, write=write) as fd:
            if io.size(fd) != layout.FILE_SIZE:
                return None
            mapping = io.map(fd, layout.FILE_SIZE, write=write)
    except FileNotFoundError:
        return None
    with closing(Words(mapping)) as words:
        is_ours = (words[layout.HEADER_MAGIC], words[layout.HEADER_VERSION]) == (layout.MAGIC, layout.VERSION)
    return mapping if is_ours else None


def _read(words: Words, mapping: mmap.mmap, owner: str, number: int) -> SeenError | None:
    """Read an entry; None when it is free or being replaced."""
    start = layout.entry_offset(owner, number)
    at = start // WORD_SIZE
    for _ in range(_READ_TRIES):
        count = words[at + layout.COUNT]
        if count <= 0:
            return None
        size = min(max(words[at + layout.TEXT_SIZE], 0), layout.TEXT_BYTES_MAX)
        text = mapping[start + layout.TEXT_AT : start + layout.TEXT_AT + size].decode(errors="replace")
        first_ms, last_ms = words[at + layout.FIRST_MS], words[at + layout.LAST_MS]
        if words[at + layout.COUNT] == count:
            return SeenError(owner, text, count, first_ms, last_ms)
    return None


def _shape(text: str) -> str:
    """The text without its numbers and ids."""
    return _NUMBERS.sub("#", text)
