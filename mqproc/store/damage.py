"""Damage of a store: log ranges without records, cuts below a durable end, quarantine.

Recovery writes `mqproc/damage.json` before it changes anything, and the dispatcher when it meets damage; they never run
at the same time. A hole stays until its records are intact again or retention has passed it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.config.options import OnDamage, Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import FailedSyncError, StoreIO, read_through
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import filler_position
from mqproc.store.consumequeue.files import files_of_queues
from mqproc.store.index.files import index_file_names
from mqproc.store.lost_messages import LostMessages, merged_losses

MISSING_SEGMENT: Final = "missing segment"


@dataclass(frozen=True, slots=True, order=True)
class Hole:
    """Log positions [start, stop) without an intact record.

    `first_seen_ms` is Unix time, 0 = not recorded yet.
    `filled`: no ConsumeQueue unit points into it, since fillers have replaced them.
    """

    start: int
    stop: int
    kind: str = ""
    first_seen_ms: int = 0
    filled: bool = False

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop}): {self.kind}"


@dataclass(frozen=True, slots=True)
class Cut:
    """The log ended at `end` although it had been durable up to `durable_end`."""

    end: int
    durable_end: int
    seen_ms: int


@dataclass(slots=True)
class Damage:
    """Content of the file. `lost` are messages removed by cuts; those in holes have fillers."""

    holes: list[Hole] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    lost: list[LostMessages] = field(default_factory=list)

    def remember(self, holes: Iterable[Hole], now_ms: int) -> list[Hole]:
        """Replace all holes, keeping the times when they were first seen; returns the new holes."""
        fresh: list[Hole] = []
        kept: list[Hole] = []
        for hole in sorted(holes):
            before = [known for known in self.holes if known.overlaps(hole.start, hole.stop)]
            seen_ms = min((known.first_seen_ms for known in before), default=now_ms)
            filled = any(known.filled and known.start <= hole.start and hole.stop <= known.stop for known in before)
            kept.append(dataclasses.replace(hole, first_seen_ms=seen_ms, filled=filled))
            if not before:
                fresh.append(kept[-1])
        self.holes = kept
        return fresh


class DamageLedger:
    """The file with its single writer, applying the option `on_damage`."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, report: Callable[[str], None]) -> None:
        """`report` receives a line for each new hole or cut."""
        self._io = io
        self._paths = paths
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._on_damage = options.on_damage
        self._report = report
        self._damage = self._load()

    @property
    def holes(self) -> list[Hole]:
        return list(self._damage.holes)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(hole.start, hole.stop) for hole in self._damage.holes]

    @property
    def read_only(self) -> bool:
        """Whether damage makes the store read-only."""
        return bool(self._damage.holes) and self._on_damage is OnDamage.READ_ONLY

    def replace(self, holes: Iterable[Hole], now_ms: int) -> list[Hole]:
        """Replace all holes and write the file first; returns the new holes.

        Raises CorruptStoreError if there is any and `on_damage = refuse`.
        """
        fresh = self._damage.remember(holes, now_ms)
        self.save()
        for hole in fresh:
            self._report(f"damage: {self._place(hole)}: {hole.stop - hole.start:,} bytes of log {hole}")
        if self._damage.holes and self._on_damage is OnDamage.REFUSE:
            hole = self._damage.holes[0]
            raise CorruptStoreError(f"{self._place(hole)}: damage in the log {hole}; on_damage = refuse")
        return fresh

    def add(self, hole: Hole, now_ms: int) -> None:
        self.replace([*self._damage.holes, hole], now_ms)

    def mark_filled(self) -> None:
        """Record that durable fillers replace all units of the holes."""
        self._damage.holes = [dataclasses.replace(hole, filled=True) for hole in self._damage.holes]
        self.save()

    def record_cut(self, end: int, durable_end: int, now_ms: int) -> None:
        """Record that the log ends at `end` although it had been durable up to `durable_end`.

        Raises CorruptStoreError with `on_damage = refuse`.
        """
        lost = f"the log was durable up to {durable_end:,} and ends at {end:,}"
        if not any((cut.end, cut.durable_end) == (end, durable_end) for cut in self._damage.cuts):
            self._damage.cuts.append(Cut(end, durable_end, now_ms))
            self.save()
            self._report(f"damage: {lost}")
        if self._on_damage is OnDamage.REFUSE:
            raise CorruptStoreError(f"{self._paths.commit_log}: {lost}; on_damage = refuse")

    def record_lost(self, end: int, lost: Iterable[LostMessages]) -> None:
        """Record the messages that a cut to `end` removed; nothing without such a cut."""
        if any(cut.end == end for cut in self._damage.cuts):
            self._damage.lost = merged_losses([*self._damage.lost, *lost])
            self.save()

    def save(self) -> None:
        """Write the file if its content changes; delete it if there is no damage."""
        path, damage = self._paths.damage, self._damage
        if not damage.holes and not damage.cuts:
            if self._io.exists(path):
                self._io.unlink(path)
                self._io.sync_folder(path.parent)
            return
        holes = [dataclasses.asdict(hole) | self._file_of(hole) for hole in damage.holes]
        cuts = [dataclasses.asdict(cut) for cut in damage.cuts]
        document: dict[str, Any] = {"holes": holes, "cuts": cuts}
        if damage.lost:
            document["lost"] = [dataclasses.asdict(each) for each in damage.lost]
        data = msgspec.json.format(msgspec.json.encode(document), indent=1)
        if not self._io.exists(path) or self._io.read_file(path) != data:
            self._io.write_file_atomically(path, data, mode=0o600)

    def _load(self) -> Damage:
        try:
            return load(self._io, self._paths)
        except msgspec.MsgspecError as error:
            self._report(f"damage: {self._paths.damage} cannot be read and is rewritten: {error}")
            return Damage()

    def _file_of(self, hole: Hole) -> dict[str, Any]:
        """Place of a hole for human readers of the file."""
        base = self._segments.start_of(hole.start)
        return {"segment": self._segments.path(base).name, "offset_in_segment": hole.start - base}

    def _place(self, hole: Hole) -> str:
        base = self._segments.start_of(hole.start)
        return f"{self._segments.path(base)}: offset {hole.start - base:,}"


class KnownHoles:
    """Maps fillers to holes, for readers. The file is read again when a hole is unknown."""

    def __init__(self, io: StoreIO, paths: StorePaths, segment_size: int) -> None:
        self._io = io
        self._paths = paths
        self._segment_size = segment_size
        self._holes: list[Hole] = []

    def named(self, position: int, begin: int, end: int) -> list[Hole]:
        """Holes in [begin, end) of the log that a filler with this position may represent."""
        found = self._holes_at(position, begin, end)
        if not found:
            try:
                self._holes = load(self._io, self._paths).holes
            except msgspec.MsgspecError:
                # Recovery rewrites the file; until then the holes are unknown.
                return []
            found = self._holes_at(position, begin, end)
        return found

    def any(self) -> bool:
        """Whether there are any holes now."""
        with contextlib.suppress(msgspec.MsgspecError):
            self._holes = load(self._io, self._paths).holes
        return bool(self._holes)

    def _holes_at(self, position: int, begin: int, end: int) -> list[Hole]:
        within = [hole for hole in self._holes if begin <= hole.start < end]
        return [hole for hole in within if filler_position(hole.start, self._segment_size) == position]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges [start, stop) in order, with touching and overlapping ranges merged."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def load(io: StoreIO, paths: StorePaths) -> Damage:
    """Read the file; empty without one. Raises msgspec.MsgspecError for garbage."""
    try:
        return io.read_json(paths.damage, Damage)
    except FileNotFoundError:
        return Damage()


# Quarantine (`mqproc/aside`): invalid files found in the place of store files are kept


def quarantine_file(io: StoreIO, paths: StorePaths, path: Path) -> Path:
    """Move an invalid file of the store to `mqproc/aside/`; returns its new path."""
    target = free_quarantine_path(
        io, paths, f"{path.parent.name}.{path.name}" if path.parent != paths.root else path.name
    )
    io.rename(path, target)
    return target


def free_quarantine_path(io: StoreIO, paths: StorePaths, name: str) -> Path:
    """An unused path in `mqproc/aside/`: this name, with a number appended if necessary."""
    io.make_folder(paths.quarantine, mode=0o700)
    places = (paths.quarantine / (f"{name}.{number}" if number else name) for number in itertools.count())
    return next(place for place in places if io.entry(place) is None)


# Files of queues and index that the disk cannot read; they can be rebuilt from the log


def unreadable_file(error: OSError, paths: StorePaths) -> Path | None:
    """The queue or index file that an I/O error refers to; None for any other error."""
    if error.errno != errno.EIO or isinstance(error, FailedSyncError) or error.filename is None:
        return None
    found = Path(error.filename).resolve()
    for folder in (paths.consume_queue, paths.index):
        if folder.resolve() in found.parents:
            return folder / found.relative_to(folder.resolve())
    return None


def unreadable_files(io: StoreIO, paths: StorePaths) -> set[Path]:
    """All queue and index files with unreadable sectors, found by reading everything written."""
    files = [folder / entry.name for folder, entry in files_of_queues(io, paths.consume_queue)]
    files += [paths.index / name for name in index_file_names(io, paths.index)]
    return {path for path in files if not _can_be_read(io, path)}


def _can_be_read(io: StoreIO, path: Path) -> bool:
    """False after an I/O error of the disk; other errors are left to the users of the file."""
    try:
        read_through(io, path)
    except OSError as error:
        return error.errno != errno.EIO
    return True
