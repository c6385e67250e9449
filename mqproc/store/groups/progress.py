"""How far consumer groups have come: the query role's `mqproc/progress`, and RocketMQ's consumerOffset.json beside it.

    commit ──word──▶ mqproc/progress ──every 5 s, at the stop, at once after a reset──▶ config/consumerOffset.json

Which of the two counts at a start is told by `load`. Everybody may read; `GroupProgress` is the one writer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from mqproc.errors import CorruptStoreError, OffsetOverflowError, StaleOffsetError
from mqproc.io import FailedSyncError, Kind, StoreIO
from mqproc.layout import progress as progress_layout
from mqproc.paths import StorePaths
from mqproc.store.aside import move_aside
from mqproc.store.final_syncs import Syncing
from mqproc.store.groups import offsets_json
from mqproc.store.groups.offsets_json import MinimumOf, OffsetsJson, Progress, Skipped, skipped
from mqproc.store.groups.progress_file import ProgressFile, boot_id
from mqproc.store.groups.unwritable import UNWRITABLE, UnwritableProgress

SAVE_INTERVAL_NS: Final = 5_000_000_000
SAVE_RETRY_NS: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 62


class Tell(Protocol):
    """Takes an event for the log: what, and figures by name."""

    def __call__(self, event: str, **figures: Any) -> Any: ...


@dataclass(slots=True)
class Loaded:
    """All progress of a store. `behind`: consumerOffset.json lacks some of it. `epoch`: the next one to be given.

    `reset_at`: where the log ended when a group was reset or deleted last.
    """

    progress: list[Progress]
    json: OffsetsJson
    behind: bool = False
    epoch: int = 1
    reset_at: int = 0
    damage: str = ""
    """Why consumerOffset.json cannot be read, "" when it can."""


def load(io: StoreIO, paths: StorePaths) -> Loaded:
    """What is known of all groups. Raises CorruptStoreError when consumerOffset.json cannot be read and nothing else
    can stand for it, OSError.

    The words of `mqproc/progress` count when they were stored in this run of the machine, and beside the
    consumerOffset.json that is there: else another program has written that, or nobody knows how old they are.
    """
    file = _open(io, paths)
    if file is None:
        json = offsets_json.load(io, paths)
        return Loaded(json.progress, json)
    try:
        return _load_beside(io, paths, file)
    finally:
        file.close()


def _load_beside(io: StoreIO, paths: StorePaths, file: ProgressFile) -> Loaded:
    damage = ""
    # Before and after the reading: its owner may replace what is read meanwhile.
    fingerprints = set(file.fingerprints)
    try:
        json = offsets_json.load(io, paths)
    except CorruptStoreError as error:
        json, damage = OffsetsJson(), str(error)
    fingerprints.update(file.fingerprints)
    if _counts(file, json.fingerprint, fingerprints):
        return _joined(json, file, damage)
    if damage:
        raise CorruptStoreError(damage)
    return Loaded(json.progress, json, epoch=file.next_epoch, reset_at=file.reset_at)


def _open(io: StoreIO, paths: StorePaths) -> ProgressFile | None:
    entry = io.entry(paths.progress)
    if entry is None or entry.kind is not Kind.FILE:
        return None
    try:
        return ProgressFile(io, paths.progress)
    except (FileNotFoundError, CorruptStoreError):
        return None


def _counts(file: ProgressFile, json_fingerprint: int, fingerprints: Collection[int]) -> bool:
    """Whether the words are of this run of the machine, and beside a consumerOffset.json of theirs."""
    beside = json_fingerprint == offsets_json.NO_FINGERPRINT or json_fingerprint in fingerprints
    return file.boot == boot_id() and beside


def _joined(json: OffsetsJson, file: ProgressFile, damage: str) -> Loaded:
    deleted = file.deleted()
    known = {(at.group, at.topic, at.queue_id): at for at in json.progress if (at.group, at.topic) not in deleted}
    known |= {(at.group, at.topic, at.queue_id): at for at in file.all()}
    progress = list(known.values())
    behind = set(progress) != set(json.progress)
    return Loaded(progress, json, behind, file.next_epoch, file.reset_at, damage)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The file's next text, of a moment: after a loss of power it is right when the log is durable up to `log_end`."""

    file: ProgressFile
    text: bytes
    changes: int
    log_end: int


class GroupProgress:
    """The progress of one store's groups, open for writing. One role, or one tool with the store's lock, has it."""

    def __init__(self, io: StoreIO, paths: StorePaths, syncs: Syncing, tell: Tell, *, successor: bool = False) -> None:
        """`successor`: the process before this one, of the same running group, had the file open.

        consumerOffset.json that nobody can read is moved aside and told, and groups begin anew. Without room on the
        disk progress can be read, and every change raises OSError, until `make_when_due` finds room. Raises OSError.
        """
        self._io = io
        self._paths = paths
        self._syncs = syncs
        self._tell = tell
        self._json: OffsetsJson | None = None
        self._due_ns = 0
        self._taken: _Taken | None = None
        self._loaded: Loaded | None = None
        """What is known while there is no room for the file."""
        self._file: ProgressFile | UnwritableProgress = self._open_or_make(successor)

    def close(self) -> None:
        """Let go of the file; `save` is the caller's."""
        self._file.close()

    def _open_or_make(self, successor: bool) -> ProgressFile | UnwritableProgress:
        found = self._successor_file() if successor else None
        if found is not None:
            return found
        loaded = self._load()
        try:
            return self._make(loaded)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            self._tell("progress of consumer groups cannot be written, nor change", error=str(error))
            self._loaded = loaded
            return UnwritableProgress(loaded.progress, self._paths.progress, error)

    def _successor_file(self) -> ProgressFile | None:
        """The file of the process before; None when that had no room for one, and what lies there is older."""
        try:
            file = ProgressFile(self._io, self._paths.progress, write=True)
        except (FileNotFoundError, CorruptStoreError) as error:
            self._tell("progress of consumer groups is taken from its file in config", error=str(error))
            return None
        if _counts(file, self._json_fingerprint(), file.fingerprints):
            return file
        file.close()
        return None

    def _json_fingerprint(self) -> int:
        try:
            return offsets_json.fingerprint(self._io.read_file(self._paths.consumer_offsets))
        except FileNotFoundError:
            return offsets_json.NO_FINGERPRINT

    def _load(self) -> Loaded:
        try:
            return load(self._io, self._paths)
        except CorruptStoreError as error:
            return Loaded([], OffsetsJson(), behind=True, damage=str(error))

    def _make(self, loaded: Loaded) -> ProgressFile:
        if loaded.damage:
            aside = self._move_aside()
            known = len(loaded.progress)
            self._tell("consumerOffset.json cannot be read", error=loaded.damage, moved_to=aside, known=known)
        if loaded.json.remark:
            self._tell("consumerOffset.json was read with a remark", remark=loaded.json.remark)
        self._json = loaded.json
        self._io.make_folder(self._paths.own, mode=0o700)
        valid = [_within_bounds(at) for at in loaded.progress if is_possible(at)]
        if len(valid) < len(loaded.progress):
            self._tell("progress that no queue can have", entries=len(loaded.progress) - len(valid))
        file = ProgressFile.create(
            self._io, self._paths.progress, valid, loaded.json.fingerprint, loaded.epoch, loaded.reset_at
        )
        if loaded.behind:
            file.touch()
        return file

    @property
    def writable(self) -> bool:
        """Whether there was room for the file."""
        return self._loaded is None

    def check_writable(self) -> None:
        """Raise OSError when there was no room for the file."""
        if isinstance(self._file, UnwritableProgress):
            self._file.refuse()

    def make_when_due(self, now_ns: int) -> bool:
        """Make the file that there was no room for, when it is time to try again; whether that went well."""
        if self._loaded is None or now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + SAVE_RETRY_NS
        try:
            self._file = self._make(self._loaded)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            return False
        self._loaded, self._due_ns = None, 0
        self._tell("progress of consumer groups can be written again, and change")
        return True

    def _move_aside(self) -> str:
        path = self._paths.consumer_offsets
        return str(move_aside(self._io, self._paths, path)) if self._io.exists(path) else ""

    # Reading

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The queue offset that a group consumes next, None when it has none yet."""
        return self._file.offset(group, topic, queue_id)

    def groups(self) -> list[str]:
        """Groups with progress, sorted."""
        return self._file.groups()

    def topics(self, group: str) -> list[str]:
        """Topics that a group has progress in, sorted."""
        return self._file.topics(group)

    def of(self, group: str) -> list[Progress]:
        """All progress of one group."""
        return list(self._file.of(group))

    # Changing

    def commit(self, group: str, topic: str, queue_id: int, offset: int, max_offset: int) -> None:
        """Say that everything below `offset` is consumed.

        Raises StaleOffsetError when that is less than was said before, OffsetOverflowError when it is more than the
        queue has; then nothing is changed.
        """
        if not 0 <= offset <= max_offset:
            raise OffsetOverflowError(
                f"group {group}: {offset:,} is not within the {max_offset:,} messages of {topic}/{queue_id}",
                max_offset=max_offset,
            )
        before = self._file.offset(group, topic, queue_id)
        if before is not None and offset < before:
            raise StaleOffsetError(f"group {group} stands at {before:,} of {topic}/{queue_id}; {offset:,} is below it")
        if before != offset:
            self._file.put(group, topic, queue_id, offset)

    def set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Begin at `offset`, whatever was before; `save` when this must outlive the machine."""
        self._file.put(group, topic, queue_id, offset)

    @property
    def reset_at(self) -> int:
        """Where the log ended when a group was reset or deleted last: what lies below says nothing of progress now."""
        return self._file.reset_at

    def note_reset(self, log_end: int) -> None:
        """A group is about to be reset or deleted, with the log's end here."""
        self._file.reset_at = log_end

    def begin_anew(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The same as `set`; who comes back by an epoch of before, also after a restart, has lost the queue."""
        self._file.begin_anew(group, topic, queue_id, offset)

    def forget(self, group: str) -> None:
        """Let a group have no progress; `save` when this must outlive the machine."""
        if group in self._file.groups():
            self._file.forget(group)

    def take_epoch(self, above: int = 0) -> int:
        """A number for an assignment of a queue, larger than all before it."""
        return self._file.take_epoch(above)

    def oldest_epoch(self, group: str, topic: str, queue_id: int) -> int:
        """What a member may come back with, at least: older ones were given before a reset."""
        return self._file.oldest_epoch(group, topic, queue_id)

    def raise_to_minima(self, minimum_of: MinimumOf) -> list[Skipped]:
        """Raise what lies below a queue's minimum to it; what was raised."""
        found = skipped(self._file.all(), minimum_of)
        for each in found:
            self._file.put(each.group, each.topic, each.queue_id, each.minimum)
        return found

    def lower_to_maxima(self, maximum_of: Callable[[str, int], int | None]) -> list[Progress]:
        """After the log was cut: set back what lies beyond a queue's end; what it was before."""
        found = []
        for at in list(self._file.all()):
            maximum = maximum_of(at.topic, at.queue_id)
            if maximum is not None and at.offset > maximum:
                self._file.put(at.group, at.topic, at.queue_id, maximum)
                found.append(at)
        return found

    # The file in config

    @property
    def unsaved(self) -> bool:
        """Whether consumerOffset.json lacks something."""
        return self._file.unsaved

    def save_when_due(self, now_ns: int, time_ms: int, written: int, durable: int) -> bool:
        """Write consumerOffset.json when it is time; what cannot be written is told and tried again.

        What progress rests on lies below the log's end `written`: copies of what was not consumed, check points, marks.
        So it is taken as it is, and written when the log is `durable` up to there, however far both are by then.
        """
        if self._taken is None:
            if now_ns < self._due_ns or (taken := self._take(time_ms, written)) is None:
                return False
            self._due_ns, self._taken = now_ns + SAVE_INTERVAL_NS, taken
        if durable < self._taken.log_end:
            return False
        try:
            self._write(self._taken)
        except OSError as error:
            self._due_ns = _NEVER_NS if isinstance(error, FailedSyncError) else now_ns + SAVE_RETRY_NS
            self._tell("progress of consumer groups cannot be saved yet", error=str(error))
        return True

    def save(self, time_ms: int) -> None:
        """Write consumerOffset.json when it lacks something: the caller has made the log durable. Raises OSError."""
        if (taken := self._take(time_ms, log_end=0)) is not None:
            self._write(taken)

    def _take(self, time_ms: int, log_end: int) -> _Taken | None:
        """None when consumerOffset.json lacks nothing."""
        file = self._file
        if isinstance(file, UnwritableProgress) or not file.unsaved:
            return None
        json, changes = self._read_json(), file.changes
        text = offsets_json.encode(file.tables(), json.version + 1, time_ms, json.other)
        return _Taken(file, text, changes, log_end)

    def _write(self, taken: _Taken) -> None:
        # One that waits for the log is older than what is written here.
        file, self._taken = taken.file, None
        fingerprint = offsets_json.fingerprint(taken.text)
        file.begin_save(self._json_fingerprint(), fingerprint)
        file.sync(self._syncs)
        json = self._read_json()
        offsets_json.replace(self._io, self._syncs, self._paths, taken.text, keeps_old=not json.remark)
        file.end_save(fingerprint, taken.changes)
        json.version += 1
        json.remark = ""

    def _read_json(self) -> OffsetsJson:
        """What the file has beside progress; a successor reads it when it first writes."""
        if self._json is None:
            try:
                self._json = offsets_json.load(self._io, self._paths)
            except CorruptStoreError as error:
                self._tell("consumerOffset.json cannot be read", error=str(error), moved_to=self._move_aside())
                self._json = OffsetsJson()
        return self._json


def is_possible(at: Progress) -> bool:
    """Whether there may be such a queue and offset: RocketMQ's file can say any numbers."""
    names_fit = max(len(at.group.encode()), len(at.topic.encode())) <= progress_layout.NAME_BYTES_MAX
    return names_fit and at.offset >= 0 and 0 <= at.queue_id < progress_layout.QUEUES_MAX


def _within_bounds(at: Progress) -> Progress:
    """Beyond every queue's end, which it is set back to when the queue is known."""
    return replace(at, offset=min(at.offset, progress_layout.OFFSET_MAX))


def all_progress(io: StoreIO, paths: StorePaths) -> Iterable[Progress]:
    """Every group's progress in every queue, of a running group or of a stopped store. Raises as `load`."""
    return load(io, paths).progress
