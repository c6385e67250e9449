"""Findings of a verify: a closed list of kinds, each with its meaning and a remedy."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

# Findings of one kind beyond this number are only counted.
LISTED_MAX: Final = 1000


class Severity(enum.StrEnum):
    """Damage sets exit code 1. A note is known, or corrected by the next start or by retention."""

    DAMAGE = "damage"
    NOTE = "note"


_REPAIR: Final = "mqproc store repair"
_MOVE: Final = f"{_REPAIR} moves it to mqproc/repaired/"
_REBUILD: Final = f"{_REPAIR} rebuilds it from the log; nothing is lost"
_HOLE: Final = f"restore the bytes from a copy if there is one; {_REPAIR} records the range, and reads skip it"
_REFILE: Final = f"{_REPAIR} lets the next start rebuild the timer log from the timer's queue; nothing is lost"
_NOTHING: Final = "nothing: the next start corrects it"
_RETENTION: Final = "nothing: retention removes it"


def _damage(code: str, means: str, do: str) -> tuple[str, Severity, str, str]:
    return code, Severity.DAMAGE, means, do


def _note(code: str, means: str, do: str) -> tuple[str, Severity, str, str]:
    return code, Severity.NOTE, means, do


class FindingKind(enum.StrEnum):
    """Code of a finding, its meaning and the action to take, grouped by the part of the store."""

    severity: Severity
    means: str
    do: str

    def __new__(cls, code: str, severity: Severity, means: str, do: str) -> Self:
        kind = str.__new__(cls, code)
        kind._value_ = code
        kind.severity, kind.means, kind.do = severity, means, do
        return kind

    # Files
    STRAY_FILE = _damage(
        "stray_file",
        "a file that does not belong to the store; RocketMQ does not start with one in commitlog or in a queue",
        f"move it away; {_MOVE}",
    )
    MISPLACED_FILE = _damage(
        "misplaced_file", "a wrong type of file, or a name at which no file of this kind can begin", _MOVE
    )
    SYMLINK = _damage(
        "symlink", "a symbolic link; the files of a store must be regular files", "replace it by the file"
    )
    LOCK_MISPLACED = _damage(
        "lock_misplaced",
        "the lock is not a regular file: no group starts",
        "move it away by hand: every command that changes a store needs the lock",
    )
    SEGMENT_MISNAMED = _damage(
        "segment_misnamed",
        "the name of a CommitLog segment differs from the offsets in its records, as after a faulty copy; most other "
        "findings follow from that",
        f"{_REPAIR} renames it; only data without any file is lost",
    )
    SEGMENT_MISSING = _damage(
        "segment_missing",
        "a CommitLog segment is missing although later segments exist or queues point into it",
        f"restore the file from a copy; otherwise {_REPAIR} records the range, and reads skip it",
    )
    SEGMENT_SHORT = _damage(
        "segment_short",
        "a CommitLog segment is too short; RocketMQ does not start",
        f"{_REPAIR} extends it with zeros; its records remain",
    )
    SEGMENT_LONG = _damage(
        "segment_long",
        "a CommitLog segment is too long; RocketMQ does not start",
        f"{_REPAIR} cuts it and keeps the rest in mqproc/aside/",
    )
    SEGMENT_EMPTY = _damage(
        "segment_empty",
        "a CommitLog segment is empty; RocketMQ starts only if it is the last one",
        f"restore it from a copy if it held records; {_REPAIR} removes it",
    )
    SEGMENTS_EXPIRED = _note(
        "segments_expired",
        "queues still point to segments before the first one, as after retention",
        "nothing; restore the segments from a copy if they were deleted by mistake",
    )
    QUEUE_FILE_MISSING = _damage("queue_file_missing", "a file in the middle of a ConsumeQueue is missing", _REBUILD)
    QUEUE_FILE_LENGTH = _damage(
        "queue_file_length", "a ConsumeQueue file has the wrong length; RocketMQ does not start", _REBUILD
    )
    INDEX_FILE_LENGTH = _damage(
        "index_file_length", "an index file has the wrong length; its slots would be misread", _REBUILD
    )
    FILE_UNREADABLE = _damage("file_unreadable", "the disk cannot read a file of a queue or of the index", _REBUILD)
    FILE_BEGUN = _note(
        "file_begun", "the newest file of a sequence is empty: the store was killed while creating it", _NOTHING
    )
    # The log
    RECORD_MAGIC = _damage("record_magic", "a record begins with the wrong magic number", _HOLE)
    RECORD_SIZE = _damage("record_size", "the lengths in a record contradict each other or exceed the segment", _HOLE)
    RECORD_OFFSET = _damage("record_offset", "a record names a log offset other than its own", _HOLE)
    RECORD_BODY_CRC = _damage("record_body_crc", "the body of a record does not match its CRC", _HOLE)
    RECORD_CRC = _damage("record_crc", "a record does not match its CRC outside the body", _HOLE)
    RECORD_ZEROS = _damage("record_zeros", "zeros in place of records: intact ones follow", _HOLE)
    RECORD_QUEUE = _damage("record_queue", "an intact record with an invalid topic, queue id or queue offset", _HOLE)
    BLANK_SIZE = _damage(
        "blank_size",
        "the filler at the end of a segment has the wrong size; reads ignore that",
        f"{_REPAIR} corrects it",
    )
    TORN_TAIL = _damage(
        "torn_tail",
        "unrecognised bytes after the last valid record: a record torn by a crash, or damage at the very end",
        f"{_REPAIR} copies it to mqproc/aside/ and cuts it; a start cuts it, and copies it if it contains records or "
        "the store was closed properly",
    )
    LOG_ENDS_EARLY = _damage(
        "log_ends_early",
        "the log ends before offsets that marks, queues, index or checkpoint refer to: records are lost",
        f"restore the bytes from a copy; otherwise {_REPAIR} makes the rest consistent with the log",
    )
    KNOWN_HOLE = _note(
        "known_hole",
        "a damaged range recorded by an earlier recovery; reads skip it",
        "nothing, or restore the bytes from a copy",
    )
    QUEUE_OFFSET_GAP = _note(
        "queue_offset_gap",
        "the records of a queue skip offsets although the log is undamaged there; readers skip them too",
        "nothing: such records are lost",
    )
    QUEUE_OFFSET_REPEATED = _damage(
        "queue_offset_repeated",
        "two records have the same queue offset; the queue can point to only one",
        "find the other by key, id, time or mqproc message scan; mqproc store export keeps both",
    )
    QUEUE_OFFSET_TOO_HIGH = _damage(
        "queue_offset_too_high",
        "the queue offset of a single record is implausibly far ahead of all others; recovery omits it from the queue",
        "find it by key, id, time or mqproc message scan",
    )
    # Queues
    UNIT_MISSING = _damage("unit_missing", "intact records are missing from their ConsumeQueue", _REBUILD)
    UNIT_WRONG = _damage("unit_wrong", "a ConsumeQueue unit differs from the record with its queue offset", _REBUILD)
    UNIT_DANGLING = _damage(
        "unit_dangling", "a ConsumeQueue unit does not point to a record of its queue", f"{_REPAIR} removes it"
    )
    UNIT_BEYOND_LOG = _damage(
        "unit_beyond_log", "ConsumeQueue units point beyond the end of the log", f"{_REPAIR} removes them"
    )
    UNIT_IN_HOLE = _note("unit_in_hole", "ConsumeQueue units point into a damaged range of the log", _NOTHING)
    UNIT_EXPIRED = _note("unit_expired", "ConsumeQueue units point to deleted segments", _RETENTION)
    NOT_DISPATCHED = _note("not_dispatched", "the newest records are not in their queues yet", _NOTHING)
    TOPIC_DELETED = _note(
        "topic_deleted",
        "records of a topic that is neither in the settings nor in consumequeue: it was deleted",
        "nothing: they expire",
    )
    # The index
    INDEX_MISSING = _damage(
        "index_missing",
        "records have keys, but there is no index",
        f"{_REBUILD}; none is needed with message_index_enable = false",
    )
    INDEX_HEADER = _damage("index_header", "the header of an index file contradicts its entries", _REBUILD)
    INDEX_LINK = _damage(
        "index_link", "slots or links of an index file do not match its entries: lookups miss keys", _REBUILD
    )
    INDEX_ORDER = _damage("index_order", "the entries of an index file are not in log order", _REBUILD)
    ENTRY_WRONG = _damage("entry_wrong", "an index entry does not point to a record with its key and time", _REBUILD)
    ENTRY_MISSING = _damage("entry_missing", "records with keys are missing from the index", _REBUILD)
    ENTRY_BEYOND_LOG = _damage(
        "entry_beyond_log", "index entries point beyond the end of the log", f"{_REPAIR} removes them"
    )
    ENTRY_IN_HOLE = _note(
        "entry_in_hole", "index entries point into a damaged range of the log", "nothing: lookups ignore them"
    )
    ENTRY_EXPIRED = _note("entry_expired", "index entries point to deleted segments", _RETENTION)
    NOT_INDEXED = _note("not_indexed", "the newest records are not in the index yet", _NOTHING)
    # State
    CHECKPOINT_MISSING = _damage("checkpoint_missing", "the checkpoint is missing", f"{_REPAIR} or a start creates it")
    CHECKPOINT_LENGTH = _damage("checkpoint_length", "the checkpoint is not 4,096 bytes long", f"{_REPAIR} corrects it")
    CHECKPOINT_AHEAD = _damage(
        "checkpoint_ahead",
        "the checkpoint is ahead of the log: after a crash RocketMQ would start recovery too late in the log",
        f"{_REPAIR} or a start sets it back",
    )
    MARK_UNREADABLE = _damage(
        "mark_unreadable",
        "a durable mark is unreadable: a torn tail cannot be distinguished from earlier damage",
        f"{_REPAIR} or a start rewrites it after checking the whole store",
    )
    MARK_VOID = _note(
        "mark_void",
        "a durable mark does not match the log: another program has written to the store since",
        "nothing: the next start checks the whole store",
    )
    QUEUE_TABLE = _damage(
        "queue_table",
        "the queue table of the last run contradicts the queues: a start that trusts it would hide messages or skip "
        "offsets",
        f"{_REPAIR} rebuilds it",
    )
    NOT_CLOSED = _note("not_closed", "the store was not closed properly: killed, crashed, or still open", _NOTHING)
    READ_ONLY = _damage(
        "read_only",
        "a sync has failed: it is unknown which data is durable, and messages are rejected",
        f"repair the disk, then run {_REPAIR}",
    )
    LEDGER_UNREADABLE = _damage(
        "ledger_unreadable",
        "the list of damaged ranges is unreadable",
        f"{_REPAIR} rebuilds it by checking the whole store",
    )
    CONFIG_UNREADABLE = _damage(
        "config_unreadable",
        "a settings file is unreadable; its .bak is used if that is readable",
        f"correct the file; {_MOVE}",
    )
    TOPIC_TOO_WIDE = _note(
        "topic_too_wide",
        "a topic is configured with more queues than allowed: it has the queues that exist in the store",
        "nothing; correct the number if the topic needs more queues",
    )
    PROGRESS_BEYOND_END = _damage(
        "progress_beyond_end",
        "a group's offset is beyond the end of the queue: the group would miss the next messages",
        f"{_REPAIR} or a start sets it back to the queue's end",
    )
    PROGRESS_IMPOSSIBLE = _note(
        "progress_impossible",
        "an invalid group offset: a name is too long, or the queue id or offset is out of range",
        "nothing: a start ignores it; correct the file if the group needs another offset",
    )
    # The timer
    TIMER_FILE_MISSING = _damage("timer_file_missing", "a file in the middle of the timer log is missing", _REFILE)
    TIMER_FILE_LENGTH = _damage(
        "timer_file_length",
        "a timer file has the wrong length; RocketMQ does not start, or loses waiting messages",
        _REFILE,
    )
    TIMER_CHECK_MISSING = _damage(
        "timer_check_missing",
        "the timer's checkpoint is missing: it is unknown which part of the timer log is delivered",
        _REFILE,
    )
    TIMER_CHECK_AHEAD = _damage(
        "timer_check_ahead",
        "the timer's checkpoint is ahead of the timer log, its queue or the clock: messages would never be delivered",
        _REFILE,
    )
    TIMER_UNIT_WRONG = _damage(
        "timer_unit_wrong",
        "a timer log unit is invalid, or contradicts its record or its slot's other units: a message would be "
        "delivered at the wrong time or never",
        _REFILE,
    )
    TIMER_UNIT_MISSING = _damage("timer_unit_missing", "a waiting message is missing from the timer log", _REFILE)
    TIMER_RECORD_GONE = _note(
        "timer_record_gone",
        "the record of a waiting message is gone from the log: it expired or was damaged",
        "nothing: the message is lost",
    )
    TIMER_SLOT_WRONG = _damage(
        "timer_slot_wrong",
        "a slot of the timer wheel does not match its units: RocketMQ would not deliver them",
        f"{_REPAIR} or a start rebuilds the wheel from the timer log",
    )
    NOT_CHECKED = _note("not_checked", "a part of the store that verify does not check", "nothing")


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
        return Severity.NOTE if self.as_note else self.kind.severity

    def to_json(self) -> dict[str, Any]:
        return {
            "severity": str(self.severity),
            "kind": str(self.kind),
            "file": self.file,
            "offset": self.offset,
            "physical_offset": self.physical_offset,
            "size": self.size,
            "count": self.count,
            "text": self.text,
            "means": self.kind.means,
            "do": self.kind.do,
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
