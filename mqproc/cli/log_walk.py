"""Walking a CommitLog's files record by record with nothing running, around damage.

Chunks are read, never a whole segment. Bytes that are no record are a hole: it reaches to the next place where an
intact record says that it belongs just there. Behind the last record there is no hole unless something lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mqproc.io import StoreIO
from mqproc.layout import record
from mqproc.layout.record_codec import RecordFault, check_record, decode_records
from mqproc.message import StoredMessage
from mqproc.paths import segment_name, segment_start

CHUNK_BYTES = 4 << 20
# A record whose lengths reach further than this is none: RocketMQ's largest body with all that may surround it.
_RECORD_BYTES_MAX = 1 << 30
_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (record.MAGIC_V1, record.MAGIC_V2))


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes [begin, end) of the log that hold no record."""

    begin: int
    end: int
    reason: str


Found = list[StoredMessage] | Hole


def segments_in(io: StoreIO, folder: Path) -> list[int]:
    """Start offsets of the segments in a folder, ascending."""
    found = (segment_start(name) for name in io.names(folder))
    return [start for start in found if start is not None]


def walk_log(io: StoreIO, folder: Path) -> Iterator[Found]:
    """Every record of a log in lists, holes in between."""
    # What may be the log's end is a hole only if the log goes on behind it.
    waiting: list[Hole] = []
    for start in segments_in(io, folder):
        for found in walk_segment(io, folder / segment_name(start), start):
            if isinstance(found, Hole):
                waiting.append(found)
                continue
            yield from waiting
            waiting.clear()
            yield found
    yield from (hole for hole in waiting if hole.reason != _NOTHING)


_NOTHING = "only zeros"


def walk_segment(io: StoreIO, path: Path, start: int) -> Iterator[Found]:
    """The records of one segment, which begins at physical offset `start`."""
    fd = io.open(path)
    try:
        yield from _Walker(io, fd, start, io.size(fd)).walk()
    finally:
        io.close(fd)


class _Walker:
    """One open segment: `at` is the place in the file that is looked at."""

    def __init__(self, io: StoreIO, fd: int, start: int, size: int) -> None:
        self._io = io
        self._fd = fd
        self._start = start
        self._size = size
        self._at = 0
        self._ended = False

    def walk(self) -> Iterator[Found]:
        while not self._ended and self._at < self._size:
            data = self._io.pread(self._fd, CHUNK_BYTES, self._at)
            end, fault = self._run(data)
            if end:
                yield decode_records(data[:end])
                self._at += end
            if fault is None:
                continue
            rest = self._whole_record(data[end:]) if fault is RecordFault.CUT_SHORT else None
            if rest is not None:
                yield decode_records(rest)
                self._at += len(rest)
            elif fault is not RecordFault.CUT_SHORT or end == 0 or self._at + len(data) - end >= self._size:
                yield self._hole(fault)

    def _run(self, data: bytes) -> tuple[int, RecordFault | None]:
        """How far intact records reach from the chunk's beginning, and what ends them (None: BLANK or the end)."""
        at = 0
        while at < len(data):
            check = check_record(data, at)
            if check.success and check.size == 0:
                self._ended = True
                return at, None
            if not check.success:
                return at, check.fault or RecordFault.NO_MAGIC
            if physical_offset_at(data, at) != self._start + self._at + at:
                return at, RecordFault.NO_MAGIC
            at += check.size
        return at, None

    def _whole_record(self, head: bytes) -> bytes | None:
        """The record that a chunk's end cut in two, None when it is none."""
        if len(head) < record.BLANK_SIZE:
            head = self._io.pread(self._fd, record.FIXED_SIZE_V4, self._at)
        size = int.from_bytes(head[record.TOTAL_SIZE : record.MAGIC], "big", signed=True)
        if not record.FIXED_SIZE_V4 <= size <= min(self._size - self._at, _RECORD_BYTES_MAX):
            return None
        data = self._io.pread(self._fd, size, self._at)
        check = check_record(data)
        intact = check.success and check.size == size
        return data if intact and physical_offset_at(data, 0) == self._start + self._at else None

    def _hole(self, fault: RecordFault) -> Hole:
        """From here to the next intact record, or to the segment's end."""
        begin = self._at
        zeros = not any(self._io.pread(self._fd, record.FIXED_SIZE_V4, begin))
        self._at = self._next_record(begin + 1)
        reached_end = self._at == self._size
        reason = _NOTHING if zeros and reached_end else fault.value
        return Hole(self._start + begin, self._start + self._at, reason)

    def _next_record(self, begin: int) -> int:
        """The first place at or behind `begin` where an intact record lies; else the segment's end."""
        at = begin
        while (at := max(at, self._data_at(at))) < self._size:
            data = self._io.pread(self._fd, CHUNK_BYTES + record.BLANK_SIZE, at)
            for place in _magic_places(data):
                candidate = at + place - record.MAGIC
                if candidate >= begin and self._is_record(candidate):
                    return candidate
            at += CHUNK_BYTES
        return self._size

    def _data_at(self, place: int) -> int:
        """The first place at or behind `place` that was ever written: a new segment is allocated, but empty."""
        try:
            found = self._io.next_data(self._fd, place)
        except OSError:
            return place  # The file system does not tell.
        # Records begin before the written page when they are looked for by what lies in it.
        return self._size if found is None else found - record.BLANK_SIZE

    def _is_record(self, place: int) -> bool:
        here, self._at = self._at, place
        try:
            return self._whole_record(b"") is not None
        finally:
            self._at = here


def physical_offset_at(data: bytes, at: int) -> int:
    """The physical offset that the record at `at` says it has."""
    place = at + record.PHYSICAL_OFFSET
    return int.from_bytes(data[place : place + 8], "big", signed=True)


def _magic_places(data: bytes) -> list[int]:
    places = []
    for magic in _MAGICS:
        place = data.find(magic)
        while place >= 0:
            places.append(place)
            place = data.find(magic, place + 1)
    return sorted(places)
