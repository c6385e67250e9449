"""Topics: `config/topics.json`, its journal, deleted topics, and the system's own topics.

The writer owns the files. Rewriting topics.json for each change would be quadratic in the number of topics, so a change
is first a line of `mqproc/topics.journal`, synced before it is acknowledged; topics.json follows within a second, and
the journal is deleted. The line of a topic that a send creates is written without a sync before the send is answered:
like the message it survives a kill of all processes.

    [topic, queues, perm]                                  current state of the topic; where they differ followed by
                                                           0, [], read queues, write queues
    [topic, 0, 0, physical offset, [next offset, …]]       the topic was deleted: see `TopicDeletion`

After a power loss any page of a longer journal may be missing. The first invalid line ends the journal: nothing from
there on was acknowledged, and the next commit truncates it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from mqproc.errors import BadRequestError, ConfigurationError, CorruptStoreError, TopicExistsError, TopicReservedError
from mqproc.io.store_io import FolderEntry, OversizedFileError, StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.cooperative import Slices
from mqproc.store.sync_guard import Syncing
from mqproc.topic_names import (
    CHECK_MAX_TIME_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    REVIVE_TOPIC,
    ROCKSDB_HALF_TOPIC,
    ROCKSDB_OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    check_topic,
)
from mqproc.util.units import counted

if TYPE_CHECKING:
    from mqproc.store.consumequeue.table import QueueTable

PERM_READ = 4
PERM_WRITE = 2
PERM_END = 8
QUEUES_OF_A_TOPIC_MAX = 65_535
TOPICS_PER_SLICE = 1024
# Topics to which RocketMQ's broker does not let clients send.
RESERVED_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        ROCKSDB_HALF_TOPIC,
        ROCKSDB_OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        TIMER_TOPIC,
        REVIVE_TOPIC,
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)


def check_sendable(topic: str) -> None:
    """Raise TopicReservedError for topics that only the system writes to."""
    if topic in RESERVED_TOPICS or topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
        raise TopicReservedError(f"topic {topic!r} is the system's own; producers may not send to it")


def check_changeable(topic: str) -> None:
    """Raise TopicReservedError for topics that only the system creates, as in RocketMQ.

    Deleting one would delete delayed messages or open transactions.
    """
    if topic in RESERVED_TOPICS:
        raise TopicReservedError(f"topic {topic!r} is the system's own; it is not made, widened or deleted by hand")


@dataclass(slots=True)
class TopicConfig:
    """Settings of a topic; `extra` has unused fields of RocketMQ for writing them back.

    Producers choose among `write_queues` of its queues, consumers read `read_queues`; they differ while an operator of
    RocketMQ changes the number of queues. 0 means all.
    """

    topic: str
    queues: int
    perm: int = PERM_READ | PERM_WRITE
    attributes: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    read_queues: int = 0
    write_queues: int = 0

    def __post_init__(self) -> None:
        self.set_queues(self.queues, self.read_queues, self.write_queues)

    def set_queues(self, queues: int, read_queues: int = 0, write_queues: int = 0) -> None:
        self.queues, self.read_queues, self.write_queues = queues, read_queues or queues, write_queues or queues

    @property
    def is_narrowed(self) -> bool:
        """Whether producers or consumers use only some of the queues."""
        return min(self.read_queues, self.write_queues) < self.queues

    def to_rocketmq(self) -> dict[str, Any]:
        base = {"order": False, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
        own = {
            "attributes": self.attributes,
            "perm": self.perm,
            "readQueueNums": self.read_queues,
            "topicName": self.topic,
            "writeQueueNums": self.write_queues,
        }
        return dict(sorted((base | self.extra | own).items()))


class _Change(msgspec.Struct, array_like=True):
    """A line of the journal."""

    topic: Annotated[str, msgspec.Meta(min_length=1)]
    queues: Annotated[int, msgspec.Meta(ge=0, le=QUEUES_OF_A_TOPIC_MAX)]
    perm: int
    physical_offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    next_offsets: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    read_queues: int = 0
    write_queues: int = 0


_change = msgspec.json.Decoder(_Change)


class Topics:
    """The topics of a store in memory; `save` writes changes.

    `deletions` has the last deletions of topics, including those created again since.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, syncs: Syncing | None = None) -> None:
        """Prepare to load. The writer passes its SyncGuard: a failed sync here is final, too."""
        self._io = io
        self._syncs: Syncing = syncs or io
        self._paths = paths
        self._topics: dict[str, TopicConfig] = {}
        self._encoded: dict[str, tuple[tuple[object, ...], msgspec.Raw]] = {}
        self.deletions: dict[str, TopicDeletion] = {}
        self._deletions_changed = False
        self._other: dict[str, Any] = {}
        self._version = 0
        self._lines: list[bytes] = []
        # Journal lines that are written but not durable. Counted, since a send may add one to thousands.
        self._lines_written = self._written_bytes = 0
        self._journal_size = 0
        self._is_named = False  # Whether the journal's name is durable; a predecessor may have died before that.
        self.journaled = False
        """Whether a journal was read: then the files lack its changes."""
        self.file_remark = self._journal_remark = ""
        self.too_wide: list[str] = []
        """A remark for each topic of topics.json with too many queues; it gets those of the queue table."""

    @property
    def remark(self) -> str:
        """Problems of the files, "" for none."""
        return "; ".join(filter(None, (self.file_remark, *self.too_wide, self._journal_remark)))

    def load(self) -> None:
        """Read the files. Raises CorruptStoreError if one of them and its copy are unusable."""
        _value, self.file_remark = rocketmq_json.load(self._io, self._paths.topics, self._accept_settings)
        self.deletions = load_deletions(self._io, self._paths)
        self._replay()

    def load_slices(self) -> Slices[None]:
        """As `load`, in slices: a store may have thousands of topics."""
        try:
            value, remark = rocketmq_json.load(self._io, self._paths.topics, _entries_in)
            topics = {}
            for number, (name, entry) in enumerate(_entries_in(value).items(), 1):
                topics[name] = _from_rocketmq(name, entry)
                if number % TOPICS_PER_SLICE == 0:
                    yield
        except (AttributeError, TypeError, ValueError):
            self.load()  # Load the copy.
            return
        self.file_remark = remark
        self._set_topics(topics)
        self.deletions = load_deletions(self._io, self._paths)
        self._replay()

    def _accept_settings(self, value: dict[str, Any]) -> None:
        table = {name: _from_rocketmq(name, entry) for name, entry in _entries_in(value).items()}
        version = value.get("dataVersion", {})
        self._version = int(version.get("counter", 0))
        self._other = {key: value[key] for key in value if key not in ("topicConfigTable", "dataVersion")}
        self._set_topics(table)

    def _set_topics(self, table: dict[str, TopicConfig]) -> None:
        self._topics = table
        self._encoded.clear()
        self.too_wide = []
        for name, config in table.items():
            if config.queues > QUEUES_OF_A_TOPIC_MAX:
                limit = f"a topic has {QUEUES_OF_A_TOPIC_MAX:,} at most"
                self.too_wide.append(f"topic {name!r}: {counted(config.queues, 'queue')}; {limit}")
                config.set_queues(1)

    def save(self, time_ms: int) -> None:
        """Write the files with the next version of topics.json, and delete the journal.

        After an OSError all changes are in the journal or in it and some of the files.
        """
        # The journal has every change, so the files need not be written atomically together.
        self.commit()
        self._version += 1
        version = {"counter": self._version, "stateVersion": 0, "timestamp": time_ms}
        table = {name: self._encoded_topic(topic) for name, topic in sorted(self._topics.items())}
        value = {"dataVersion": version, "topicConfigTable": table} | self._other
        rocketmq_json.save(self._io, self._syncs, self._paths.topics, value, keeps_old=not self.file_remark)
        self.file_remark = ""
        if self._deletions_changed:
            save_deletions(self._io, self._syncs, self._paths, self.deletions)
            self._deletions_changed = False
        if self._io.exists(self._paths.topics_journal):
            self._io.unlink(self._paths.topics_journal)
            # If the journal reappeared after a power loss, it would undo later changes of the files.
            self._syncs.sync_folder(self._paths.own)
        self._journal_size = 0
        self._is_named = False

    def _encoded_topic(self, topic: TopicConfig) -> msgspec.Raw:
        """The topic's JSON, encoded only after a change: a store may have thousands of topics."""
        state = topic.queues, topic.perm, topic.read_queues, topic.write_queues, topic.attributes, topic.extra
        known, encoded = self._encoded.get(topic.topic, ((), msgspec.Raw()))
        if known != state:
            encoded = msgspec.Raw(msgspec.json.encode(topic.to_rocketmq()))
            self._encoded[topic.topic] = state, encoded
        return encoded

    def note(self, topic: str) -> None:
        """Add the current state of an existing topic to the journal; `commit` makes it durable."""
        found = self._topics[topic]
        narrowed = [0, [], found.read_queues, found.write_queues] if found.is_narrowed else []
        self._add_line([topic, found.queues, found.perm, *narrowed])

    def _add_line(self, line: list[Any]) -> None:
        self._lines.append(msgspec.json.encode(line) + b"\n")

    def write(self) -> None:
        """Write noted changes so that they survive any kill, but no power loss. Raises OSError."""
        if self._lines_written < len(self._lines):
            with self._opened_journal() as fd:
                self._write(fd)

    def commit(self) -> None:
        """Make all noted changes durable. Raises OSError."""
        if not self._lines:
            return
        with self._opened_journal() as fd:
            self._write(fd)
            self._syncs.sync(fd)
        if not self._is_named:
            self._syncs.sync_folder(self._paths.own)
            self._is_named = True
        self._journal_size += self._written_bytes
        self._lines.clear()
        self._lines_written = self._written_bytes = 0

    def sync_journal(self) -> None:
        """Make a journal that was read durable. Raises OSError."""
        if self.journaled:
            with self._opened_journal() as fd:
                self._syncs.sync(fd)
            self._syncs.sync_folder(self._paths.own)

    def _opened_journal(self) -> AbstractContextManager[int]:
        return self._io.opened(self._paths.topics_journal, write=True, create=True, mode=0o600)

    def _write(self, fd: int) -> None:
        data = b"".join(self._lines[self._lines_written :])
        at = self._journal_size + self._written_bytes
        # Truncate remains of a torn or failed commit.
        self._io.set_size(fd, at)
        self._io.pwrite(fd, data, at)
        self._lines_written = len(self._lines)
        self._written_bytes += len(data)

    def _replay(self) -> None:
        """Apply the journal up to its first invalid line."""
        try:
            data = self._io.read_file(self._paths.topics_journal)
        except FileNotFoundError:
            return
        except OversizedFileError as error:
            self._remark(f"{error.strerror}")
            return
        self.journaled = True
        for line in data.split(b"\n")[:-1]:
            try:
                change = _change.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._remark(f"byte {self._journal_size}: {error}")
                return
            self._apply(change)
            self._journal_size += len(line) + 1
        if len(data) > self._journal_size:
            self._remark(f"byte {self._journal_size}: the last line has no end")

    def _remark(self, text: str) -> None:
        self._journal_remark = f"{self._paths.topics_journal.name} ends early: {text}"

    def _apply(self, change: _Change) -> None:
        found = self._topics.get(change.topic)
        if change.queues == 0:
            self._topics.pop(change.topic, None)
            self._remember(change.topic, TopicDeletion.of(change.physical_offset, change.next_offsets))
        else:
            found = found or TopicConfig(change.topic, change.queues)
            found.perm = change.perm
            found.set_queues(change.queues, change.read_queues, change.write_queues)
            self._topics[change.topic] = found

    def get(self, topic: str) -> TopicConfig | None:
        return self._topics.get(topic)

    def names(self) -> list[str]:
        return sorted(self._topics)

    def add(self, topic: str, queues: int, perm: int | None = None) -> bool:
        """Create a topic or add queues to it; returns whether anything changed.

        Without `perm` a new topic is readable and writable, and an existing one keeps its permission.
        Raises TopicExistsError if it would lose queues, BadTopicError, BadRequestError.
        """
        check_topic(topic)
        found = self._topics.get(topic)
        if perm is None:
            perm = found.perm if found is not None else PERM_READ | PERM_WRITE
        if not 0 <= perm < PERM_END:
            raise BadRequestError(f"perm = {perm} is out of range: read {PERM_READ}, write {PERM_WRITE}, or their sum")
        if not 1 <= queues <= QUEUES_OF_A_TOPIC_MAX:
            raise BadRequestError(f"queues = {queues} is out of range: from 1 to {QUEUES_OF_A_TOPIC_MAX:,}")
        if found is None:
            self._topics[topic] = TopicConfig(topic, queues, perm)
            return True
        if queues < found.queues:
            raise TopicExistsError(f"topic {topic!r} has {found.queues} queues; they cannot become {queues}")
        changed = (found.queues, found.perm, found.is_narrowed) != (queues, perm, False)
        found.perm = perm
        found.set_queues(queues)
        return changed

    def widen(self, topic: str, queues: int) -> None:
        """Add queues with messages to a topic: consumers read them, producers do not use them."""
        found = self._topics[topic]
        found.set_queues(queues, queues, found.write_queues)

    def adopt(self, topic: str, queues: int) -> None:
        """Add a topic whose queues exist in the store, whatever its name."""
        self._topics[topic] = TopicConfig(topic, queues)

    def delete(self, topic: str, physical_offset: int, next_offsets: Sequence[int]) -> None:
        """Delete an existing topic durably and record where its offsets ended.

        `physical_offset` is the log's end, `next_offsets` has an item per queue id. After an OSError nothing has
        changed.
        """
        config, before = self._topics.pop(topic), self.deletions.get(topic)
        self._encoded.pop(topic, None)
        deletion = TopicDeletion.of(physical_offset, next_offsets)
        self._remember(topic, deletion)
        positions = [] if deletion is None else [deletion.physical_offset, deletion.next_offsets]
        self._add_line([topic, 0, 0, *positions])
        try:
            self.commit()
        except OSError:
            line = self._lines.pop()
            if self._lines_written > len(self._lines):
                self._lines_written -= 1
                self._written_bytes -= len(line)
            self._topics[topic] = config
            self._remember(topic, before)
            raise

    def forget_deletions(self, log_begin: int) -> bool:
        """Forget deletions of topics without records in the log; returns whether anything changed."""
        changed = False
        for topic, deletion in list(self.deletions.items()):
            if topic not in self._topics and deletion.physical_offset <= log_begin:
                self._remember(topic, None)
                changed = True
        return changed

    def _remember(self, topic: str, deletion: TopicDeletion | None) -> None:
        if self.deletions.get(topic) == deletion:
            return
        self._deletions_changed = True
        if deletion is None:
            del self.deletions[topic]
        else:
            self.deletions[topic] = deletion


class ConsumedQueues:
    """Queues that consumers read: the first `read_queues` of a topic.

    Only topics of RocketMQ have others, which nothing but a change by a client can widen; the rest costs no reading.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, ids: Callable[[str], list[int]]) -> None:
        self._io, self._paths, self._all_ids = io, paths, ids
        self._files: list[FolderEntry | None] = []
        self._narrowed = self._load()

    def ids(self, topic: str) -> list[int]:
        """Queue ids of a topic, ascending."""
        found = self._all_ids(topic)
        if topic not in self._narrowed:
            return found
        if self._entries() != self._files:
            self._narrowed = self._load()
        return found[: self._narrowed.get(topic)]

    def _entries(self) -> list[FolderEntry | None]:
        return [self._io.entry(path) for path in (self._paths.topics, self._paths.topics_journal)]

    def _load(self) -> dict[str, int]:
        self._files = self._entries()
        topics = Topics(self._io, self._paths)
        topics.load()
        configs = filter(None, map(topics.get, topics.names()))
        return {config.topic: config.read_queues for config in configs if config.read_queues < config.queues}


def _entries_in(value: Any) -> dict[str, Any]:
    """Topics of a topics.json by name, none without a file. Raises ValueError for another file."""
    return {} if value is None else rocketmq_json.table_in(value, "topicConfigTable")


def _from_rocketmq(name: str, entry: dict[str, Any]) -> TopicConfig:
    reads, writes = (max(int(entry.get(name, 1)), 1) for name in ("readQueueNums", "writeQueueNums"))
    own = {"attributes", "perm", "readQueueNums", "writeQueueNums", "topicName"}
    extra = {key: value for key, value in entry.items() if key not in own}
    attributes = dict(entry.get("attributes") or {})
    return TopicConfig(name, max(reads, writes), int(entry.get("perm", 6)), attributes, extra, reads, writes)


# Deleted topics: `config/deletedTopics.json`, beside topics.json
#
#     {"deletedTopicTable": {"T": {"physicalOffset": 123, "nextOffsets": [3, 0, 5]}}}
#
# Records of a deleted topic stay in the log until they expire. A new topic of that name continues its queue offsets. A
# record belongs to the deleted topic if its position is below `physicalOffset` and its queue offset below that queue's
# next offset. RocketMQ ignores the file. It is in `config/` because it must survive the deletion of `mqproc/`.

_DELETIONS_TABLE = "deletedTopicTable"
_Offset = Annotated[int, msgspec.Meta(ge=0)]


class TopicDeletion(msgspec.Struct, frozen=True, rename="camel"):
    """A topic's last deletion: the log's end at that time, and the queues' next offsets by id."""

    physical_offset: _Offset
    next_offsets: tuple[_Offset, ...]

    @classmethod
    def of(cls, physical_offset: int, next_offsets: Sequence[int]) -> TopicDeletion | None:
        """None if no queue ever had a message: then there is nothing to distinguish."""
        used = max((queue_id + 1 for queue_id, offset in enumerate(next_offsets) if offset), default=0)
        return cls(physical_offset, tuple(next_offsets[:used])) if used else None

    def next_offset(self, queue_id: int) -> int:
        """First offset of a new queue with this id."""
        return self.next_offsets[queue_id] if queue_id < len(self.next_offsets) else 0

    def covers(self, queue_id: int, max_offset: int, physical_end: int) -> bool:
        """Whether all units of a queue predate the deletion; its last record ends at `physical_end`."""
        return max_offset <= self.next_offset(queue_id) and physical_end <= self.physical_offset


def load_deletions(io: StoreIO, paths: StorePaths) -> dict[str, TopicDeletion]:
    """Deletions by topic. Raises CorruptStoreError if no copy of the file can be read."""
    value, _remark = rocketmq_json.load(io, paths.deleted_topics)
    if value is None:
        return {}
    try:
        return msgspec.convert(value, dict[str, dict[str, TopicDeletion]]).get(_DELETIONS_TABLE, {})
    except msgspec.ValidationError as error:
        raise CorruptStoreError(f"{paths.deleted_topics}: {error}") from None


def save_deletions(io: StoreIO, syncs: Syncing, paths: StorePaths, deletions: Mapping[str, TopicDeletion]) -> None:
    """Replace the file. Raises OSError, FailedSyncError."""
    table: dict[str, Any] = {topic: msgspec.to_builtins(deletions[topic]) for topic in sorted(deletions)}
    rocketmq_json.save(io, syncs, paths.deleted_topics, {_DELETIONS_TABLE: table})


def queues_in_use(io: StoreIO, paths: StorePaths) -> int:
    """Queues of a store, including deleted queues, which `max_queues` must allow."""
    found = {
        (topic.name, int(queue))
        for topic in io.entries(paths.consume_queue)
        for queue in io.names(paths.consume_queue / topic.name)
        if queue.isdecimal()
    }
    topics = Topics(io, paths)
    # Recovery then derives the topics from the queues, or sets a folder in place of the journal aside.
    with contextlib.suppress(CorruptStoreError, IsADirectoryError):
        topics.load()
    for name in topics.names():
        config = topics.get(name)
        found.update((name, queue) for queue in range(config.queues if config is not None else 0))
    for name, deletion in topics.deletions.items():
        found.update((name, queue) for queue, offset in enumerate(deletion.next_offsets) if offset > 0)
    return len(found)


def check_queue_limit(io: StoreIO, paths: StorePaths, max_queues: int) -> None:
    """Raise ConfigurationError if the store has more queues than `max_queues` allows."""
    count = queues_in_use(io, paths)
    if count > max_queues:
        raise ConfigurationError(
            f"max_queues = {max_queues:,}: the store has {count:,} queues, deleted ones included; set max_queues to "
            f"{count:,} or more"
        )


def restore_deletions(table: QueueTable, deletions: Mapping[str, TopicDeletion]) -> None:
    """Add deletions of earlier runs to a table of the queues on disk. Raises TooManyQueuesError."""
    for topic, deletion in deletions.items():
        for queue_id, next_offset in enumerate(deletion.next_offsets):
            if next_offset > 0 or table.entry(topic, queue_id) >= 0:
                table.remember_deletion(topic, queue_id, deletion.physical_offset, next_offset)
