"""Findings of a verify: a closed list of kinds, each with its meaning and a remedy."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# Findings of one kind beyond this number are only counted.
LISTED_MAX: Final = 1000


class Severity(enum.StrEnum):
    """Damage sets exit code 1. A note is known, or corrected by the next start or by retention."""

    DAMAGE = "damage"
    NOTE = "note"


class FindingKind(enum.StrEnum):
    """Machine-readable code of a finding, grouped by the part of the store."""

    # Files
    STRAY_FILE = "stray_file"
    MISPLACED_FILE = "misplaced_file"
    SYMLINK = "symlink"
    LOCK_MISPLACED = "lock_misplaced"
    SEGMENT_MISNAMED = "segment_misnamed"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_SHORT = "segment_short"
    SEGMENT_LONG = "segment_long"
    SEGMENT_EMPTY = "segment_empty"
    SEGMENTS_EXPIRED = "segments_expired"
    QUEUE_FILE_MISSING = "queue_file_missing"
    QUEUE_FILE_LENGTH = "queue_file_length"
    INDEX_FILE_LENGTH = "index_file_length"
    FILE_UNREADABLE = "file_unreadable"
    FILE_BEGUN = "file_begun"
    # The log
    RECORD_MAGIC = "record_magic"
    RECORD_SIZE = "record_size"
    RECORD_OFFSET = "record_offset"
    RECORD_BODY_CRC = "record_body_crc"
    RECORD_CRC = "record_crc"
    RECORD_ZEROS = "record_zeros"
    RECORD_QUEUE = "record_queue"
    BLANK_SIZE = "blank_size"
    TORN_TAIL = "torn_tail"
    LOG_ENDS_EARLY = "log_ends_early"
    KNOWN_HOLE = "known_hole"
    QUEUE_OFFSET_GAP = "queue_offset_gap"
    QUEUE_OFFSET_REPEATED = "queue_offset_repeated"
    QUEUE_OFFSET_TOO_HIGH = "queue_offset_too_high"
    # Queues
    UNIT_MISSING = "unit_missing"
    UNIT_WRONG = "unit_wrong"
    UNIT_DANGLING = "unit_dangling"
    UNIT_BEYOND_LOG = "unit_beyond_log"
    UNIT_IN_HOLE = "unit_in_hole"
    UNIT_EXPIRED = "unit_expired"
    NOT_DISPATCHED = "not_dispatched"
    TOPIC_DELETED = "topic_deleted"
    # The index
    INDEX_MISSING = "index_missing"
    INDEX_HEADER = "index_header"
    INDEX_LINK = "index_link"
    INDEX_ORDER = "index_order"
    ENTRY_WRONG = "entry_wrong"
    ENTRY_MISSING = "entry_missing"
    ENTRY_BEYOND_LOG = "entry_beyond_log"
    ENTRY_IN_HOLE = "entry_in_hole"
    ENTRY_EXPIRED = "entry_expired"
    NOT_INDEXED = "not_indexed"
    # State
    CHECKPOINT_MISSING = "checkpoint_missing"
    CHECKPOINT_LENGTH = "checkpoint_length"
    CHECKPOINT_AHEAD = "checkpoint_ahead"
    MARK_UNREADABLE = "mark_unreadable"
    MARK_VOID = "mark_void"
    QUEUE_TABLE = "queue_table"
    NOT_CLOSED = "not_closed"
    READ_ONLY = "read_only"
    LEDGER_UNREADABLE = "ledger_unreadable"
    CONFIG_UNREADABLE = "config_unreadable"
    TOPIC_TOO_WIDE = "topic_too_wide"
    PROGRESS_BEYOND_END = "progress_beyond_end"
    PROGRESS_IMPOSSIBLE = "progress_impossible"
    # The timer
    TIMER_FILE_MISSING = "timer_file_missing"
    TIMER_FILE_LENGTH = "timer_file_length"
    TIMER_CHECK_MISSING = "timer_check_missing"
    TIMER_CHECK_AHEAD = "timer_check_ahead"
    TIMER_UNIT_WRONG = "timer_unit_wrong"
    TIMER_UNIT_MISSING = "timer_unit_missing"
    TIMER_RECORD_GONE = "timer_record_gone"
    TIMER_SLOT_WRONG = "timer_slot_wrong"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class KindInfo:
    """Meaning of a kind of finding, and the action to take."""

    severity: Severity
    means: str
    do: str


_REPAIR: Final = "mqproc store repair"
_MOVE: Final = f"{_REPAIR} moves it to mqproc/repaired/"
_REBUILD: Final = f"{_REPAIR} rebuilds it from the log; nothing is lost"
_HOLE: Final = f"restore the bytes from a copy if there is one; {_REPAIR} records the range, and reads skip it"
_REFILE: Final = f"{_REPAIR} lets the next start rebuild the timer log from the timer's queue; nothing is lost"
_NOTHING: Final = "nothing: the next start corrects it"
_RETENTION: Final = "nothing: retention removes it"


def _damage(means: str, do: str) -> KindInfo:
    return KindInfo(Severity.DAMAGE, means, do)


def _note(means: str, do: str) -> KindInfo:
    return KindInfo(Severity.NOTE, means, do)


KINDS: Final[dict[FindingKind, KindInfo]] = {
    FindingKind.STRAY_FILE: _damage(
        "a file that does not belong to the store; RocketMQ does not start with one in commitlog or in a queue",
        f"move it away; {_MOVE}",
    ),
    FindingKind.MISPLACED_FILE: _damage(
        "a wrong type of file, or a name at which no file of this kind can begin", _MOVE
    ),
    FindingKind.SYMLINK: _damage(
        "a symbolic link; the files of a store must be regular files", "replace it by the file"
    ),
    FindingKind.LOCK_MISPLACED: _damage(
        "the lock is not a regular file: no group starts",
        "move it away by hand: every command that changes a store needs the lock",
    ),
    FindingKind.SEGMENT_MISNAMED: _damage(
        "the name of a CommitLog segment differs from the offsets in its records, as after a faulty copy; most other "
        "findings follow from that",
        f"{_REPAIR} renames it; only data without any file is lost",
    ),
    FindingKind.SEGMENT_MISSING: _damage(
        "a CommitLog segment is missing although later segments exist or queues point into it",
        f"restore the file from a copy; otherwise {_REPAIR} records the range, and reads skip it",
    ),
    FindingKind.SEGMENT_SHORT: _damage(
        "a CommitLog segment is too short; RocketMQ does not start",
        f"{_REPAIR} extends it with zeros; its records remain",
    ),
    FindingKind.SEGMENT_LONG: _damage(
        "a CommitLog segment is too long; RocketMQ does not start",
        f"{_REPAIR} cuts it and keeps the rest in mqproc/aside/",
    ),
    FindingKind.SEGMENT_EMPTY: _damage(
        "a CommitLog segment is empty; RocketMQ starts only if it is the last one",
        f"restore it from a copy if it held records; {_REPAIR} removes it",
    ),
    FindingKind.SEGMENTS_EXPIRED: _note(
        "queues still point to segments before the first one, as after retention",
        "nothing; restore the segments from a copy if they were deleted by mistake",
    ),
    FindingKind.QUEUE_FILE_MISSING: _damage("a file in the middle of a ConsumeQueue is missing", _REBUILD),
    FindingKind.QUEUE_FILE_LENGTH: _damage(
        "a ConsumeQueue file has the wrong length; RocketMQ does not start", _REBUILD
    ),
    FindingKind.FILE_UNREADABLE: _damage("the disk cannot read a file of a queue or of the index", _REBUILD),
    FindingKind.INDEX_FILE_LENGTH: _damage("an index file has the wrong length; its slots would be misread", _REBUILD),
    FindingKind.FILE_BEGUN: _note(
        "the newest file of a sequence is empty: the store was killed while creating it", _NOTHING
    ),
    FindingKind.RECORD_MAGIC: _damage("a record begins with the wrong magic number", _HOLE),
    FindingKind.RECORD_SIZE: _damage("the lengths in a record contradict each other or exceed the segment", _HOLE),
    FindingKind.RECORD_OFFSET: _damage("a record names a log offset other than its own", _HOLE),
    FindingKind.RECORD_BODY_CRC: _damage("the body of a record does not match its CRC", _HOLE),
    FindingKind.RECORD_CRC: _damage("a record does not match its CRC outside the body", _HOLE),
    FindingKind.RECORD_ZEROS: _damage("zeros in place of records: intact ones follow", _HOLE),
    FindingKind.RECORD_QUEUE: _damage("an intact record with an invalid topic, queue id or queue offset", _HOLE),
    FindingKind.BLANK_SIZE: _damage(
        "the filler at the end of a segment has the wrong size; reads ignore that", f"{_REPAIR} corrects it"
    ),
    FindingKind.TORN_TAIL: _damage(
        "unrecognised bytes after the last valid record: a record torn by a crash, or damage at the very end",
        f"{_REPAIR} copies it to mqproc/aside/ and cuts it; a start cuts it, and copies it if it contains records or "
        "the store was closed properly",
    ),
    FindingKind.LOG_ENDS_EARLY: _damage(
        "the log ends before offsets that marks, queues, index or checkpoint refer to: records are lost",
        f"restore the bytes from a copy; otherwise {_REPAIR} makes the rest consistent with the log",
    ),
    FindingKind.KNOWN_HOLE: _note(
        "a damaged range recorded by an earlier recovery; reads skip it",
        "nothing, or restore the bytes from a copy",
    ),
    FindingKind.QUEUE_OFFSET_GAP: _note(
        "the records of a queue skip offsets although the log is undamaged there; readers skip them too",
        "nothing: such records are lost",
    ),
    FindingKind.QUEUE_OFFSET_REPEATED: _damage(
        "two records have the same queue offset; the queue can point to only one",
        "find the other by key, id, time or mqproc message scan; mqproc store export keeps both",
    ),
    FindingKind.QUEUE_OFFSET_TOO_HIGH: _damage(
        "the queue offset of a single record is implausibly far ahead of all others; recovery omits it from the queue",
        "find it by key, id, time or mqproc message scan",
    ),
    FindingKind.UNIT_MISSING: _damage("intact records are missing from their ConsumeQueue", _REBUILD),
    FindingKind.UNIT_WRONG: _damage("a ConsumeQueue unit differs from the record with its queue offset", _REBUILD),
    FindingKind.UNIT_DANGLING: _damage(
        "a ConsumeQueue unit does not point to a record of its queue", f"{_REPAIR} removes it"
    ),
    FindingKind.UNIT_BEYOND_LOG: _damage(
        "ConsumeQueue units point beyond the end of the log", f"{_REPAIR} removes them"
    ),
    FindingKind.UNIT_IN_HOLE: _note("ConsumeQueue units point into a damaged range of the log", _NOTHING),
    FindingKind.UNIT_EXPIRED: _note("ConsumeQueue units point to deleted segments", _RETENTION),
    FindingKind.NOT_DISPATCHED: _note("the newest records are not in their queues yet", _NOTHING),
    FindingKind.TOPIC_DELETED: _note(
        "records of a topic that is neither in the settings nor in consumequeue: it was deleted", "nothing: they expire"
    ),
    FindingKind.INDEX_MISSING: _damage(
        "records have keys, but there is no index",
        f"{_REBUILD}; none is needed with message_index_enable = false",
    ),
    FindingKind.INDEX_HEADER: _damage("the header of an index file contradicts its entries", _REBUILD),
    FindingKind.INDEX_LINK: _damage(
        "slots or links of an index file do not match its entries: lookups miss keys", _REBUILD
    ),
    FindingKind.INDEX_ORDER: _damage("the entries of an index file are not in log order", _REBUILD),
    FindingKind.ENTRY_WRONG: _damage("an index entry does not point to a record with its key and time", _REBUILD),
    FindingKind.ENTRY_MISSING: _damage("records with keys are missing from the index", _REBUILD),
    FindingKind.ENTRY_BEYOND_LOG: _damage("index entries point beyond the end of the log", f"{_REPAIR} removes them"),
    FindingKind.ENTRY_IN_HOLE: _note(
        "index entries point into a damaged range of the log", "nothing: lookups ignore them"
    ),
    FindingKind.ENTRY_EXPIRED: _note("index entries point to deleted segments", _RETENTION),
    FindingKind.NOT_INDEXED: _note("the newest records are not in the index yet", _NOTHING),
    FindingKind.CHECKPOINT_MISSING: _damage("the checkpoint is missing", f"{_REPAIR} or a start creates it"),
    FindingKind.CHECKPOINT_LENGTH: _damage("the checkpoint is not 4,096 bytes long", f"{_REPAIR} corrects it"),
    FindingKind.CHECKPOINT_AHEAD: _damage(
        "the checkpoint is ahead of the log: after a crash RocketMQ would start recovery too late in the log",
        f"{_REPAIR} or a start sets it back",
    ),
    FindingKind.MARK_UNREADABLE: _damage(
        "a durable mark is unreadable: a torn tail cannot be distinguished from earlier damage",
        f"{_REPAIR} or a start rewrites it after checking the whole store",
    ),
    FindingKind.MARK_VOID: _note(
        "a durable mark does not match the log: another program has written to the store since",
        "nothing: the next start checks the whole store",
    ),
    FindingKind.QUEUE_TABLE: _damage(
        "the queue table of the last run contradicts the queues: a start that trusts it would hide messages or skip "
        "offsets",
        f"{_REPAIR} rebuilds it",
    ),
    FindingKind.NOT_CLOSED: _note("the store was not closed properly: killed, crashed, or still open", _NOTHING),
    FindingKind.READ_ONLY: _damage(
        "a sync has failed: it is unknown which data is durable, and messages are rejected",
        f"repair the disk, then run {_REPAIR}",
    ),
    FindingKind.LEDGER_UNREADABLE: _damage(
        "the list of damaged ranges is unreadable", f"{_REPAIR} rebuilds it by checking the whole store"
    ),
    FindingKind.CONFIG_UNREADABLE: _damage(
        "a settings file is unreadable; its .bak is used if that is readable",
        f"correct the file; {_MOVE}",
    ),
    FindingKind.TOPIC_TOO_WIDE: _note(
        "a topic is configured with more queues than allowed: it has the queues that exist in the store",
        "nothing; correct the number if the topic needs more queues",
    ),
    FindingKind.PROGRESS_BEYOND_END: _damage(
        "a group's offset is beyond the end of the queue: the group would miss the next messages",
        f"{_REPAIR} or a start sets it back to the queue's end",
    ),
    FindingKind.PROGRESS_IMPOSSIBLE: _note(
        "an invalid group offset: a name is too long, or the queue id or offset is out of range",
        "nothing: a start ignores it; correct the file if the group needs another offset",
    ),
    FindingKind.TIMER_FILE_MISSING: _damage("a file in the middle of the timer log is missing", _REFILE),
    FindingKind.TIMER_FILE_LENGTH: _damage(
        "a timer file has the wrong length; RocketMQ does not start, or loses waiting messages", _REFILE
    ),
    FindingKind.TIMER_CHECK_MISSING: _damage(
        "the timer's checkpoint is missing: it is unknown which part of the timer log is delivered", _REFILE
    ),
    FindingKind.TIMER_CHECK_AHEAD: _damage(
        "the timer's checkpoint is ahead of the timer log, its queue or the clock: messages would never be delivered",
        _REFILE,
    ),
    FindingKind.TIMER_UNIT_WRONG: _damage(
        "a timer log unit is invalid, or contradicts its record or its slot's other units: a message would be "
        "delivered at the wrong time or never",
        _REFILE,
    ),
    FindingKind.TIMER_UNIT_MISSING: _damage("a waiting message is missing from the timer log", _REFILE),
    FindingKind.TIMER_RECORD_GONE: _note(
        "the record of a waiting message is gone from the log: it expired or was damaged",
        "nothing: the message is lost",
    ),
    FindingKind.TIMER_SLOT_WRONG: _damage(
        "a slot of the timer wheel does not match its units: RocketMQ would not deliver them",
        f"{_REPAIR} or a start rebuilds the wheel from the timer log",
    ),
    FindingKind.NOT_CHECKED: _note("a part of the store that verify does not check", "nothing"),
}
assert KINDS.keys() == set(FindingKind)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `file` is relative to the store, `offset` a byte of it.

    `count` is the number of records, units or entries affected, `size` the number of bytes; 0 or None if not
    applicable.
    """

    kind: FindingKind
    file: str
    offset: int | None = None
    physical_offset: int | None = None
    size: int = 0
    count: int = 0
    text: str = ""
    as_note: bool = False

    @property
    def severity(self) -> Severity:
        return Severity.NOTE if self.as_note else KINDS[self.kind].severity

    def to_json(self) -> dict[str, Any]:
        about = KINDS[self.kind]
        return {
            "severity": str(self.severity),
            "kind": str(self.kind),
            "file": self.file,
            "offset": self.offset,
            "physical_offset": self.physical_offset,
            "size": self.size,
            "count": self.count,
            "text": self.text,
            "means": about.means,
            "do": about.do,
        }


class Findings:
    """Collected findings; those beyond LISTED_MAX of a kind are only counted."""

    def __init__(self) -> None:
        self.listed: list[Finding] = []
        self.counts: Counter[FindingKind] = Counter()
        self.damaged = 0

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        self.damaged += finding.severity is Severity.DAMAGE
        if self.counts[finding.kind] <= LISTED_MAX:
            self.listed.append(finding)

    def extend(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.add(finding)

    def in_order(self) -> list[Finding]:
        """Sorted: damage before notes, causes (files, log) before their consequences."""
        order = {kind: place for place, kind in enumerate(FindingKind)}
        return sorted(
            self.listed,
            key=lambda each: (each.severity is Severity.NOTE, order[each.kind], each.file, each.offset or 0),
        )

    @property
    def omitted(self) -> int:
        """Number of findings counted but not listed."""
        return self.counts.total() - len(self.listed)
