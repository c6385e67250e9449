"""What verify can find: a closed list of kinds, each with what it means and what to do about it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# More findings than this of one kind are counted instead of listed.
LISTED_MAX: Final = 1000


class Severity(enum.StrEnum):
    """Damage makes the exit code 1. A note is what a start or retention puts in order, or what is known already."""

    DAMAGE = "damage"
    NOTE = "note"


class Kind(enum.StrEnum):
    """Names of findings, by what they are about."""

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
class About:
    """What a kind of finding means, and what to do."""

    severity: Severity
    means: str
    do: str


_REPAIR: Final = "mqproc store repair"
_REBUILD: Final = f"{_REPAIR} builds it again from the log; nothing is lost"
_HOLE: Final = f"the bytes are lost unless a copy has them; {_REPAIR} notes the range, which is then served around"
_FILE_AGAIN: Final = f"{_REPAIR} has what waits filed again by the next start; nothing is lost"
_NOTHING: Final = "nothing: the next start puts it in order"
_RETENTION: Final = "nothing: retention removes it"


def _damage(means: str, do: str) -> About:
    return About(Severity.DAMAGE, means, do)


def _note(means: str, do: str) -> About:
    return About(Severity.NOTE, means, do)


KINDS: Final[dict[Kind, About]] = {
    Kind.STRAY_FILE: _damage(
        "a file that is none of the store's; RocketMQ does not start with one in commitlog or in a queue",
        f"move it away, or {_REPAIR}, which moves it aside",
    ),
    Kind.MISPLACED_FILE: _damage(
        "something lies in the place of a file: another kind of thing, or a name at which no file can begin",
        f"{_REPAIR} moves it aside",
    ),
    Kind.SYMLINK: _damage("a symbolic link; a store's files are no links", "put the file itself there"),
    Kind.LOCK_MISPLACED: _damage(
        "something else than a file lies in the place of the lock: no group starts",
        "move it away by hand: whatever changes a store needs the lock",
    ),
    Kind.SEGMENT_MISNAMED: _damage(
        "a CommitLog segment has another name than its records tell: a copy went wrong, and most of what follows is "
        "due to it",
        f"{_REPAIR} gives it its name; nothing is lost but what has no file",
    ),
    Kind.SEGMENT_MISSING: _damage(
        "a CommitLog segment is not there, though the log goes on behind it or queues point into it",
        f"put the file back from a copy; else {_REPAIR} notes the range, which is then served around",
    ),
    Kind.SEGMENT_SHORT: _damage(
        "a CommitLog segment is shorter than a segment; RocketMQ does not start",
        f"{_REPAIR} completes it with zeros; the records in it stay",
    ),
    Kind.SEGMENT_LONG: _damage(
        "a CommitLog segment is longer than a segment; RocketMQ does not start",
        f"{_REPAIR} cuts it and keeps the rest aside",
    ),
    Kind.SEGMENT_EMPTY: _damage(
        "a CommitLog segment without a byte; RocketMQ starts with one only behind all others",
        f"{_REPAIR} removes it; if records were in it, put it back from a copy first",
    ),
    Kind.SEGMENTS_EXPIRED: _note(
        "segments before the log's first one are gone, and queues still lead there: retention leaves it so",
        "nothing; if they were not deleted on purpose, put them back from a copy",
    ),
    Kind.QUEUE_FILE_MISSING: _damage("a file is missing within a ConsumeQueue's row", _REBUILD),
    Kind.QUEUE_FILE_LENGTH: _damage("a ConsumeQueue file of another length; RocketMQ does not start", _REBUILD),
    Kind.FILE_UNREADABLE: _damage("a file of queues or index that the disk cannot read", _REBUILD),
    Kind.INDEX_FILE_LENGTH: _damage("an index file of another length; its slots would be misread", _REBUILD),
    Kind.FILE_BEGUN: _note(
        "a file without a byte, the newest of its row: it was being made when the store was killed", _NOTHING
    ),
    Kind.RECORD_MAGIC: _damage("no record begins where one should: another magic number", _HOLE),
    Kind.RECORD_SIZE: _damage("a record's lengths contradict each other or the segment", _HOLE),
    Kind.RECORD_OFFSET: _damage("a record says that it lies elsewhere in the log", _HOLE),
    Kind.RECORD_BODY_CRC: _damage("a record's body is not what it was when it was stored", _HOLE),
    Kind.RECORD_CRC: _damage("a record is not what it was when it was stored, outside its body", _HOLE),
    Kind.RECORD_ZEROS: _damage("zeros where records were, since intact ones follow", _HOLE),
    Kind.RECORD_QUEUE: _damage(
        "an intact record of a queue that cannot be: its topic, queue id or queue offset", _HOLE
    ),
    Kind.BLANK_SIZE: _damage(
        "the filler at a segment's end tells another size; the log is read past it", f"{_REPAIR} writes the right one"
    ),
    Kind.TORN_TAIL: _damage(
        "behind the log's last intact record lies something that is none: what a crash leaves of a record, or damage "
        "at the very end",
        f"{_REPAIR} keeps it aside and cuts it; a start keeps it where the store was closed in order or it has records",
    ),
    Kind.LOG_ENDS_EARLY: _damage(
        "the log ends below what marks, queues, index or checkpoint know of: records at its end are lost",
        f"put the bytes back from a copy; else {_REPAIR} makes the rest agree with the log",
    ),
    Kind.KNOWN_HOLE: _note(
        "a damaged range that an earlier recovery found; it is served around",
        "nothing, or put the bytes back from a copy",
    ),
    Kind.QUEUE_OFFSET_GAP: _note(
        "the log's records of a queue skip offsets, and no damage tells why; the queue steps over them",
        "nothing can bring them back",
    ),
    Kind.QUEUE_OFFSET_REPEATED: _damage(
        "two records have the same place in their queue; the queue can lead to one only",
        "the other is found by key, id, time or mqproc message scan; mqproc store export keeps both",
    ),
    Kind.QUEUE_OFFSET_TOO_HIGH: _damage(
        "a lone record says a place in its queue that lies too far behind all others: recovery does not believe it, "
        "and the queue does not lead to it",
        "it is found by key, id, time or mqproc message scan",
    ),
    Kind.UNIT_MISSING: _damage("intact records that their ConsumeQueue does not lead to", _REBUILD),
    Kind.UNIT_WRONG: _damage("a ConsumeQueue unit differs from the record with this place in the queue", _REBUILD),
    Kind.UNIT_DANGLING: _damage("a ConsumeQueue unit leads to no record of its queue", f"{_REPAIR} removes it"),
    Kind.UNIT_BEYOND_LOG: _damage("ConsumeQueue units lead beyond the log's end", f"{_REPAIR} removes them"),
    Kind.UNIT_IN_HOLE: _note("ConsumeQueue units lead into a damaged range of the log", _NOTHING),
    Kind.UNIT_EXPIRED: _note("ConsumeQueue units lead to deleted segments", _RETENTION),
    Kind.NOT_DISPATCHED: _note("the newest records are not in the queues yet", _NOTHING),
    Kind.TOPIC_DELETED: _note(
        "records of a topic that neither the settings nor consumequeue know: it was deleted", "nothing: they expire"
    ),
    Kind.INDEX_MISSING: _damage(
        "records have keys, and there is no index",
        f"{_REBUILD}; with message_index_enable = false none is wanted",
    ),
    Kind.INDEX_HEADER: _damage("an index file's header contradicts its entries", _REBUILD),
    Kind.INDEX_LINK: _damage(
        "slots or links of an index file are not what its entries make: keys are missed", _REBUILD
    ),
    Kind.INDEX_ORDER: _damage("entries of an index file lead back in the log", _REBUILD),
    Kind.ENTRY_WRONG: _damage("an index entry leads to no record with such a key and time", _REBUILD),
    Kind.ENTRY_MISSING: _damage("records with keys that the index does not lead to", _REBUILD),
    Kind.ENTRY_BEYOND_LOG: _damage("index entries lead beyond the log's end", f"{_REPAIR} removes them"),
    Kind.ENTRY_IN_HOLE: _note("index entries lead into a damaged range of the log", "nothing: such hits are dropped"),
    Kind.ENTRY_EXPIRED: _note("index entries lead to deleted segments", _RETENTION),
    Kind.NOT_INDEXED: _note("the newest records are not in the index yet", _NOTHING),
    Kind.CHECKPOINT_MISSING: _damage("the checkpoint is not there", f"{_REPAIR} or a start makes it"),
    Kind.CHECKPOINT_LENGTH: _damage("the checkpoint has another length than 4,096 bytes", f"{_REPAIR} mends it"),
    Kind.CHECKPOINT_AHEAD: _damage(
        "the checkpoint tells of a later time or place than the log has: after a crash RocketMQ would begin too late",
        f"{_REPAIR} or a start sets it back",
    ),
    Kind.MARK_UNREADABLE: _damage(
        "a durable mark cannot be read: a torn end of the log and damage before it look alike then",
        f"{_REPAIR} or a start makes it anew, after looking at everything",
    ),
    Kind.MARK_VOID: _note(
        "a durable mark does not fit the log: another program wrote it since",
        "nothing: the next start looks at everything",
    ),
    Kind.QUEUE_TABLE: _damage(
        "the table of queues that the last run left does not fit them: a start that goes by it would hide messages, or "
        "leave offsets out",
        f"{_REPAIR} makes it anew",
    ),
    Kind.NOT_CLOSED: _note("the store was not closed in order: killed, crashed, or still open", _NOTHING),
    Kind.READ_ONLY: _damage(
        "a sync has failed: what is durable is not known, and no message is taken", f"{_REPAIR}, after mending the disk"
    ),
    Kind.LEDGER_UNREADABLE: _damage(
        "the list of known damage cannot be read", f"{_REPAIR} makes it anew, after looking at everything"
    ),
    Kind.CONFIG_UNREADABLE: _damage(
        "a settings file cannot be read; its .bak counts, if that can be",
        f"mend the text, or {_REPAIR} moves it aside",
    ),
    Kind.TOPIC_TOO_WIDE: _note(
        "a topic of more queues than there may be: it has those that the store has queues of",
        "nothing; mend the number where it is to have more",
    ),
    Kind.PROGRESS_BEYOND_END: _damage(
        "a group has consumed more of a queue than there is: it would miss what comes next",
        f"{_REPAIR} or a start sets it back to the queue's end",
    ),
    Kind.PROGRESS_IMPOSSIBLE: _note(
        "progress that no queue can have: the group's or topic's name is too long, the queue id or the offset out of "
        "range",
        "nothing: a start passes it over; mend the text where a group is to stand elsewhere",
    ),
    Kind.TIMER_FILE_MISSING: _damage("a file is missing within the timer log's row", _FILE_AGAIN),
    Kind.TIMER_FILE_LENGTH: _damage(
        "one of the timer's files has another length; RocketMQ does not start, or loses what waits", _FILE_AGAIN
    ),
    Kind.TIMER_CHECK_MISSING: _damage(
        "the timer's check is not there: how much of the timer log is delivered is not known", _FILE_AGAIN
    ),
    Kind.TIMER_CHECK_AHEAD: _damage(
        "the timer's check counts more of the timer log, of its queue, or of time than there is: messages would never "
        "come",
        _FILE_AGAIN,
    ),
    Kind.TIMER_UNIT_WRONG: _damage(
        "a unit of the timer log is none, or not what its record or its slot's other units say: a message would not "
        "come, or at another time",
        _FILE_AGAIN,
    ),
    Kind.TIMER_UNIT_MISSING: _damage("a message waits for its time, and the timer log does not know it", _FILE_AGAIN),
    Kind.TIMER_RECORD_GONE: _note(
        "a message waits for its time, and the log does not have its record any more: it expired or was damaged",
        "nothing can bring it back",
    ),
    Kind.TIMER_SLOT_WRONG: _damage(
        "a slot of the timer's wheel does not lead to its units: RocketMQ would not deliver them",
        f"{_REPAIR} or a start makes the wheel anew from the timer log",
    ),
    Kind.NOT_CHECKED: _note("a part of the store that verify does not look into", "nothing"),
}
assert KINDS.keys() == set(Kind)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `file` is relative to the store; `offset` counts bytes in it, `physical_offset` bytes of the log.

    `count` is how many records, units or entries it is about, `size` how many bytes; 0 and None where it makes no
    sense.
    """

    kind: Kind
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
    """Findings as they come; beyond LISTED_MAX of a kind they are only counted."""

    def __init__(self) -> None:
        self.listed: list[Finding] = []
        self.counts: Counter[Kind] = Counter()
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
        """Damage first; then causes (files, log) before what follows from them."""
        order = {kind: place for place, kind in enumerate(Kind)}
        return sorted(
            self.listed,
            key=lambda each: (each.severity is Severity.NOTE, order[each.kind], each.file, each.offset or 0),
        )

    @property
    def omitted(self) -> int:
        """How many were counted only."""
        return self.counts.total() - len(self.listed)
