"""Committed offsets of groups: `mqproc/progress`, saved to RocketMQ's consumerOffset.json.

    commit ──word──▶ mqproc/progress ──every 5 s, on close, right after a reset──▶ config/consumerOffset.json

`load` decides which of the two files is current at a start. Any process may read; `OffsetStore` is the only writer.
While the disk is full, `ReadOnlyOffsets` serves reads. `OffsetCorrector` raises offsets that retention has overtaken.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import msgspec

from mqproc.errors import (
    CorruptStoreError,
    DiskFullError,
    MqprocError,
    OffsetOverflowError,
    StaleOffsetError,
    StoreReadOnlyError,
)
from mqproc.io.store_io import FailedSyncError, Kind, OversizedFileError, StoreIO
from mqproc.ipc.control_words import Words, why_read_only
from mqproc.layout import committed_offsets as progress_layout
from mqproc.layout import control
from mqproc.paths import StorePaths
from mqproc.store.damage import quarantine_file
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets.consumer_offset_json import (
    CommittedOffset,
    ConsumerOffsetJson,
    MinimumOf,
    UnconsumedRange,
    skipped,
)
from mqproc.store.offsets.file import OffsetFile, boot_id
from mqproc.store.sync_guard import Syncing

UNWRITABLE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a full disk, an exhausted quota and a file system that became read-only."""


def unwritable_error(error: OSError) -> MqprocError:
    """Error for the client when a file cannot be written for one of UNWRITABLE_ERRNOS."""
    if error.errno == errno.EROFS:
        return StoreReadOnlyError(f"{why_read_only(errno.EROFS)}: {error}; run mqproc store repair")
    return DiskFullError(f"no room on the disk: {error}")


class ReadOnlyOffsets:
    """Substitute for an OffsetFile that could not be created. Changes raise that OSError."""

    unsaved: Final = False
    reset_at = 0

    def __init__(self, progress: list[CommittedOffset], path: Path, error: OSError) -> None:
        self._progress: dict[str, dict[str, dict[int, int]]] = {}
        for at in progress:
            self._progress.setdefault(at.group, {}).setdefault(at.topic, {})[at.queue_id] = at.offset
        self._path = path
        self._error = error

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        return self._progress.get(group, {}).get(topic, {}).get(queue_id)

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        return dict(self._progress.get(group, {}).get(topic, {}))

    def groups(self) -> list[str]:
        return sorted(self._progress)

    def topics(self, group: str) -> list[str]:
        return sorted(self._progress.get(group, {}))

    def of(self, group: str) -> Iterator[CommittedOffset]:
        for topic in self.topics(group):
            for queue_id, offset in sorted(self.offsets(group, topic).items()):
                yield CommittedOffset(group, topic, queue_id, offset)

    def all(self) -> Iterator[CommittedOffset]:
        for group in self.groups():
            yield from self.of(group)

    def oldest_epoch(self, _group: str, _topic: str, _queue_id: int) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: no file is open."""

    def refuse(self, *_arguments: object) -> NoReturn:
        """Raise the OSError of the failed creation."""
        raise OSError(self._error.errno, f"{self._error.strerror}: group offsets cannot change", str(self._path))

    put = reset_offset = delete_group = allocate_epoch = refuse


SAVE_INTERVAL_NS: Final = 5_000_000_000
SAVE_RETRY_NS: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 62


class EventLog(Protocol):
    """Writes one event with named fields to the log."""

    def __call__(self, event: str, **figures: Any) -> Any: ...


@dataclass(slots=True)
class LoadedOffsets:
    """All committed offsets of a store.

    `json_outdated`: consumerOffset.json lacks some offsets. `epoch`: the next assignment epoch. `reset_at`: end of the
    log at the last reset or deletion of a group.
    """

    progress: list[CommittedOffset]
    json: ConsumerOffsetJson
    json_outdated: bool = False
    epoch: int = 1
    reset_at: int = 0
    damage: str = ""
    """Why consumerOffset.json is unreadable; "" if it is readable."""


def load(io: StoreIO, paths: StorePaths) -> LoadedOffsets:
    """Load all committed offsets.

    `mqproc/progress` is current if it was written since the machine's last boot and belongs to the consumerOffset.json
    on disk. Otherwise another program has replaced the JSON, or the age of the file's pages is unknown, and the JSON is
    current.

    Raises CorruptStoreError if consumerOffset.json is unreadable and `mqproc/progress` is not current; OSError.
    """
    file = _open(io, paths)
    if file is None:
        json = consumer_offset_json.load(io, paths)
        return LoadedOffsets(json.progress, json)
    with contextlib.closing(file):
        return _load_beside(io, paths, file)


def _load_beside(io: StoreIO, paths: StorePaths, file: OffsetFile) -> LoadedOffsets:
    damage = ""
    # Read before and after: the owner may replace the JSON in between.
    fingerprints = set(file.fingerprints)
    try:
        json = consumer_offset_json.load(io, paths)
    except CorruptStoreError as error:
        json, damage = ConsumerOffsetJson(), str(error)
    fingerprints.update(file.fingerprints)
    if _is_current(file, json.fingerprint, fingerprints):
        return _merge(json, file, damage)
    if damage:
        raise CorruptStoreError(damage)
    return LoadedOffsets(json.progress, json, epoch=file.next_epoch, reset_at=file.reset_at)


def _open(io: StoreIO, paths: StorePaths) -> OffsetFile | None:
    entry = io.entry(paths.progress)
    if entry is None or entry.kind is not Kind.FILE:
        return None
    try:
        return OffsetFile(io, paths.progress)
    except (FileNotFoundError, CorruptStoreError):
        return None


def _is_current(file: OffsetFile, json_fingerprint: int, fingerprints: Collection[int]) -> bool:
    """Whether the file was written since the last boot and belongs to this JSON."""
    beside = json_fingerprint == consumer_offset_json.NO_FINGERPRINT or json_fingerprint in fingerprints
    return file.boot == boot_id() and beside


def _merge(json: ConsumerOffsetJson, file: OffsetFile, damage: str) -> LoadedOffsets:
    deleted = file.deleted()
    known = {(at.group, at.topic, at.queue_id): at for at in json.progress if (at.group, at.topic) not in deleted}
    known |= {(at.group, at.topic, at.queue_id): at for at in file.all()}
    progress = list(known.values())
    json_outdated = set(progress) != set(json.progress)
    return LoadedOffsets(progress, json, json_outdated, file.next_epoch, file.reset_at, damage)


@dataclass(frozen=True, slots=True)
class _PendingSave:
    """Next content of consumerOffset.json, written once the log is durable up to `log_end`."""

    file: OffsetFile
    text: bytes
    changes: int
    log_end: int


class OffsetStore:
    """Committed offsets of one store, open for one writer."""

    def __init__(
        self, io: StoreIO, paths: StorePaths, syncs: Syncing, log: EventLog, *, successor: bool = False
    ) -> None:
        """With `successor`, a previous process of the same running group had the file open.

        An unreadable consumerOffset.json is quarantined and logged, and groups start without offsets. On a full disk
        offsets are readable and every change raises OSError, until `create_when_due` succeeds. Raises OSError.
        """
        self._io = io
        self._paths = paths
        self._syncs = syncs
        self._log = log
        self._json: ConsumerOffsetJson | None = None
        self._due_ns = 0
        self._pending_save: _PendingSave | None = None
        self.save_errno = 0
        """errno that keeps offsets from being saved, 0 if they were saved at the last attempt."""
        self.lost = False
        """Whether groups have lost their offsets: consumerOffset.json was unreadable."""
        self._loaded: LoadedOffsets | None = None
        """Offsets to create the file from, while the disk has no room for it."""
        self._file: OffsetFile | ReadOnlyOffsets = self._open_or_make(successor)

    def close(self) -> None:
        """Close the file without saving."""
        self._file.close()

    def _open_or_make(self, successor: bool) -> OffsetFile | ReadOnlyOffsets:
        found = self._successor_file() if successor else None
        if found is not None:
            return found
        try:
            loaded = load(self._io, self._paths)
        except CorruptStoreError as error:
            loaded = LoadedOffsets([], ConsumerOffsetJson(), json_outdated=True, damage=str(error))
        try:
            return self._make(loaded)
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            self._log("offsets of consumer groups are read-only: their file cannot be written", error=str(error))
            self._loaded, self.save_errno = loaded, error.errno
            return ReadOnlyOffsets(loaded.progress, self._paths.progress, error)

    def _successor_file(self) -> OffsetFile | None:
        """Open the previous process's file; None if it is missing or outdated."""
        try:
            file = OffsetFile(self._io, self._paths.progress, write=True)
        except (FileNotFoundError, CorruptStoreError) as error:
            self._log("offsets of consumer groups are taken from consumerOffset.json", error=str(error))
            return None
        if _is_current(file, self._json_fingerprint(), file.fingerprints):
            return file
        file.close()
        return None

    def _json_fingerprint(self) -> int:
        try:
            return consumer_offset_json.fingerprint(self._io.read_file(self._paths.consumer_offsets))
        except (FileNotFoundError, OversizedFileError):
            return consumer_offset_json.NO_FINGERPRINT

    def _make(self, loaded: LoadedOffsets) -> OffsetFile:
        if loaded.damage:
            moved_to, known = self._quarantine(), len(loaded.progress)
            self.lost = not known
            self._log("consumerOffset.json cannot be read", error=loaded.damage, moved_to=moved_to, known=known)
        if loaded.json.remark:
            self._log("consumerOffset.json was read with a remark", remark=loaded.json.remark)
        self._json = loaded.json
        self._io.make_folder(self._paths.own, mode=0o700)
        # An offset above the maximum is lowered to the queue's end once that is known.
        maximum = progress_layout.OFFSET_MAX
        valid = [replace(at, offset=min(at.offset, maximum)) for at in loaded.progress if is_valid_offset(at)]
        if len(valid) < len(loaded.progress):
            self._log("invalid offsets ignored", entries=len(loaded.progress) - len(valid))
        file = OffsetFile.create(
            self._io, self._paths.progress, valid, loaded.json.fingerprint, loaded.epoch, loaded.reset_at
        )
        if loaded.json_outdated:
            file.touch()
        return file

    @property
    def writable(self) -> bool:
        """Whether the file exists, so that offsets can change."""
        return self._loaded is None

    def check_writable(self) -> None:
        """Raise OSError if the file could not be created."""
        if isinstance(self._file, ReadOnlyOffsets):
            self._file.refuse()

    def create_when_due(self, now_ns: int) -> bool:
        """Retry creating the file once the retry delay has passed; return whether it was created."""
        if self._loaded is None or now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + SAVE_RETRY_NS
        try:
            self._file = self._make(self._loaded)
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            return False
        self._loaded, self._due_ns, self.save_errno = None, 0, 0
        self._log("offsets of consumer groups can be written again")
        return True

    def _quarantine(self) -> str:
        path = self._paths.consumer_offsets
        return str(quarantine_file(self._io, self._paths, path)) if self._io.exists(path) else ""

    # Reads

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Next queue offset for the group to consume; None without one."""
        return self._file.offset(group, topic, queue_id)

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Next queue offsets of the group by queue id, where it has one."""
        return self._file.offsets(group, topic)

    def groups(self) -> list[str]:
        """Groups with committed offsets, sorted."""
        return self._file.groups()

    def topics(self, group: str) -> list[str]:
        """Topics in which the group has committed offsets, sorted."""
        return self._file.topics(group)

    def of(self, group: str) -> list[CommittedOffset]:
        """All committed offsets of one group."""
        return list(self._file.of(group))

    # Changes

    def commit(self, group: str, topic: str, queue_id: int, offset: int, max_offset: int) -> None:
        """Commit that all messages below `offset` are consumed.

        Raises StaleOffsetError below the committed offset and OffsetOverflowError beyond the queue's end; then
        nothing changes.
        """
        if not 0 <= offset <= max_offset:
            raise OffsetOverflowError(
                f"group {group}: {offset:,} is not within the {max_offset:,} messages of {topic}/{queue_id}",
                max_offset=max_offset,
            )
        before = self._file.offset(group, topic, queue_id)
        if before is not None and offset < before:
            raise StaleOffsetError(
                f"group {group}: {offset:,} is below the committed offset {before:,} of {topic}/{queue_id}"
            )
        if before != offset:
            self._file.put(group, topic, queue_id, offset)

    def set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the offset unconditionally. Call `save` afterwards if it must survive a power loss."""
        self._file.put(group, topic, queue_id, offset)

    @property
    def reset_at(self) -> int:
        """End of the log at the last reset or deletion of a group; earlier records are void."""
        return self._file.reset_at

    def record_reset(self, log_end: int) -> None:
        """Record that a group is about to be reset or deleted while the log ends here."""
        self._file.reset_at = log_end

    def reset_offset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the offset and invalidate all earlier epochs of the queue, also across restarts."""
        self._file.reset_offset(group, topic, queue_id, offset)

    def delete_group(self, group: str) -> None:
        """Delete the group's offsets. Call `save` afterwards if this must survive a power loss."""
        if group in self._file.groups():
            self._file.delete_group(group)

    def allocate_epoch(self, above: int = 0) -> int:
        """Allocate an assignment epoch larger than `above` and all previous epochs."""
        return self._file.allocate_epoch(above)

    def oldest_epoch(self, group: str, topic: str, queue_id: int) -> int:
        """Smallest epoch still valid for the queue: older epochs precede a reset."""
        return self._file.oldest_epoch(group, topic, queue_id)

    def raise_to_minima(self, minimum_of: MinimumOf) -> list[UnconsumedRange]:
        """Raise offsets below their queue's minimum to it; return the ranges that were skipped."""
        found = skipped(self._file.all(), minimum_of)
        for each in found:
            self._file.put(each.group, each.topic, each.queue_id, each.minimum)
        return found

    def lower_to_maxima(self, maximum_of: Callable[[str, int], int | None]) -> list[CommittedOffset]:
        """Lower offsets beyond their queue's end after a cut; return the previous values."""
        found = []
        for at in list(self._file.all()):
            maximum = maximum_of(at.topic, at.queue_id)
            if maximum is not None and at.offset > maximum:
                self._file.put(at.group, at.topic, at.queue_id, maximum)
                found.append(at)
        return found

    # consumerOffset.json

    @property
    def unsaved(self) -> bool:
        """Whether consumerOffset.json is out of date."""
        return self._file.unsaved

    def save_when_due(self, now_ns: int, time_ms: int, written: int, durable: int) -> bool:
        """Write consumerOffset.json when due. Failures are logged and retried.

        Offsets depend on records below `written`, the end of the log: copies of unconsumed messages, POP checkpoints,
        transaction marks. So the content is fixed now and written once the log is `durable` up to that point.
        """
        if self._pending_save is None:
            if now_ns < self._due_ns or (prepared := self._prepare_save(time_ms, written)) is None:
                return False
            self._due_ns, self._pending_save = now_ns + SAVE_INTERVAL_NS, prepared
        if durable < self._pending_save.log_end:
            return False
        try:
            self._write(self._pending_save)
            self.save_errno = 0
        except OSError as error:
            self.save_errno = error.errno or errno.EIO
            self._due_ns = _NEVER_NS if isinstance(error, FailedSyncError) else now_ns + SAVE_RETRY_NS
            self._log("offsets of consumer groups cannot be saved yet", error=str(error))
        return True

    def save(self, time_ms: int) -> None:
        """Write consumerOffset.json if out of date, after the log was synced. Raises OSError."""
        if (prepared := self._prepare_save(time_ms, log_end=0)) is not None:
            self._write(prepared)

    def _prepare_save(self, time_ms: int, log_end: int) -> _PendingSave | None:
        """Prepare the next content; None if consumerOffset.json is up to date."""
        file = self._file
        if isinstance(file, ReadOnlyOffsets) or not file.unsaved:
            return None
        json, changes = self._read_json(), file.changes
        text = consumer_offset_json.encode(file.tables(), json.version + 1, time_ms, json.other)
        return _PendingSave(file, text, changes, log_end)

    def _write(self, prepared: _PendingSave) -> None:
        # A pending save is older than this one.
        file, self._pending_save = prepared.file, None
        fingerprint = consumer_offset_json.fingerprint(prepared.text)
        file.begin_save(self._json_fingerprint(), fingerprint)
        file.sync(self._syncs)
        json = self._read_json()
        consumer_offset_json.replace(self._io, self._syncs, self._paths, prepared.text, keeps_old=not json.remark)
        file.end_save(fingerprint, prepared.changes)
        json.version += 1
        json.remark = ""

    def _read_json(self) -> ConsumerOffsetJson:
        """The JSON's other fields and version; a successor reads the file before its first write."""
        if self._json is None:
            try:
                self._json = consumer_offset_json.load(self._io, self._paths)
            except CorruptStoreError as error:
                self._log("consumerOffset.json cannot be read", error=str(error), moved_to=self._quarantine())
                self._json = ConsumerOffsetJson()
        return self._json


def is_valid_offset(at: CommittedOffset) -> bool:
    """Whether queue and offset are within bounds: RocketMQ's file may contain any numbers."""
    names_fit = max(len(at.group.encode()), len(at.topic.encode())) <= progress_layout.NAME_BYTES_MAX
    return names_fit and at.offset >= 0 and 0 <= at.queue_id < progress_layout.QUEUES_MAX


def committed_offsets(io: StoreIO, paths: StorePaths) -> Iterable[CommittedOffset]:
    """Committed offsets of all groups. Raises the errors of `load`."""
    return load(io, paths).progress


# Offsets below a queue's minimum


Unconsumed = dict[str, dict[str, int]]


class QueueMinima(Protocol):
    """Lookup of queue minima: a queue table, or a substitute."""

    def find(self, topic: str, queue_id: int) -> int: ...

    def min_offset(self, number: int) -> int: ...


def read_unconsumed(io: StoreIO, paths: StorePaths) -> Unconsumed:
    """Read the counters of `mqproc/unconsumed.json`; empty if it is missing or unreadable."""
    try:
        return io.read_json(paths.unconsumed, Unconsumed)
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


@dataclass(slots=True)
class OffsetCorrector:
    """Raises offsets to their queues' minima after retention and counts the skipped messages.

    Owns the control word `retention_unconsumed` and the file `mqproc/unconsumed.json`. Messages that a simple consumer
    received but did not acknowledge before they were deleted are counted too.
    """

    io: StoreIO
    paths: StorePaths
    syncs: Syncing
    words: Words
    queues: QueueMinima
    progress: OffsetStore
    log: EventLog
    uncounted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Missing messages not yet added to the file, by group and topic."""

    def raise_to_minima(self) -> int:
        """Raise offsets and count; return how many offsets were below a minimum. Raises OSError."""
        found = self.progress.raise_to_minima(self._minimum_of)
        for each in found:
            self.uncounted[each.group, each.topic] += each.messages
        self.count()
        return len(found)

    def count_missing(self, group: str, topic: str, queue_id: int, offsets: Iterable[int]) -> None:
        """Count the received, unacknowledged messages below the queue's minimum."""
        minimum = self._minimum_of(topic, queue_id)
        if minimum is not None and (messages := sum(offset < minimum for offset in offsets)):
            self.uncounted[group, topic] += messages

    def count(self) -> int:
        """Log and count the missing messages; return the number of groups and topics."""
        if not self.uncounted:
            return 0
        missing, self.uncounted = self.uncounted, Counter()
        total = read_unconsumed(self.io, self.paths)
        by_group: Counter[str] = Counter()
        for (group, topic), messages in missing.items():
            topics = total.setdefault(group, {})
            topics[topic] = topics.get(topic, 0) + messages
            by_group[group] += messages
        self.words.add(control.RETENTION_UNCONSUMED, by_group.total())
        for group, messages in by_group.items():
            self.log("messages were deleted before a group had consumed them", group=group, messages=messages)
        text = msgspec.json.format(msgspec.json.encode(total), indent=1)
        self.syncs.write_file_atomically(self.paths.unconsumed, text, 0o600)
        return len(missing)

    def _minimum_of(self, topic: str, queue_id: int) -> int | None:
        number = self.queues.find(topic, queue_id)
        return self.queues.min_offset(number) if number >= 0 else None
