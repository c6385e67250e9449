"""Topics as RocketMQ keeps them: `config/topics.json`, owned by the writer, and which of them are the system's own.

Writing the whole file for each change would make thousands of topics quadratic, so a change is first a line of
`mqproc/topics.journal`, synced before it is acknowledged; the file follows within a second, and then the journal goes.
A topic that a send makes has its line there before the send is answered, without a sync: what it is outlives all
processes, as the message does.

    [topic, queues, perm]                                  the topic is now so
    [topic, 0, 0, physical offset, [next offset, …]]       the topic was deleted: see `deleted_topics`

Of a journal that spans several pages any may be missing after a power loss. So the first line that is none ends it:
nothing from there on was acknowledged, and the next commit cuts it off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from mqproc.errors import BadRequestError, TopicExistsError, TopicReservedError
from mqproc.io import StoreIO
from mqproc.names import (
    CHECK_MAX_TIME_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    REVIVE_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    check_topic,
)
from mqproc.paths import StorePaths
from mqproc.quantities import counted
from mqproc.store import deleted_topics, rocketmq_json
from mqproc.store.deleted_topics import Deletion
from mqproc.store.final_syncs import Syncing

PERM_READ = 4
PERM_WRITE = 2
PERM_END = 8
QUEUES_OF_A_TOPIC_MAX = 65_535
# Topics that RocketMQ's broker does not let clients send to.
RESERVED_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
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
    """Raise TopicReservedError for topics that only the system makes, as RocketMQ's broker has it: what waits for its
    time or for the end of a transaction would go with them."""
    if topic in RESERVED_TOPICS:
        raise TopicReservedError(f"topic {topic!r} is the system's own; it is not made, widened or deleted by hand")


@dataclass(slots=True)
class TopicConfig:
    """One topic's settings; `extra` keeps RocketMQ's fields that we do not use, so that they are written back."""

    topic: str
    queues: int
    perm: int = PERM_READ | PERM_WRITE
    attributes: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_rocketmq(self) -> dict[str, Any]:
        base = {"order": False, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
        own = {
            "attributes": self.attributes,
            "perm": self.perm,
            "readQueueNums": self.queues,
            "topicName": self.topic,
            "writeQueueNums": self.queues,
        }
        return dict(sorted((base | self.extra | own).items()))


class _Change(msgspec.Struct, array_like=True):
    """A line of the journal."""

    topic: Annotated[str, msgspec.Meta(min_length=1)]
    queues: Annotated[int, msgspec.Meta(ge=0, le=QUEUES_OF_A_TOPIC_MAX)]
    perm: int
    physical_offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    next_offsets: list[Annotated[int, msgspec.Meta(ge=0)]] = []


_change = msgspec.json.Decoder(_Change)


class Topics:
    """The topics of a store in memory; `save` writes them when something changed.

    `deletions` has what must be known of topics that were deleted, those among them that were made again since.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, syncs: Syncing | None = None) -> None:
        """The writer gives its FinalSyncs as `syncs`: a failed sync of the files is final for the store too."""
        self._io = io
        self._syncs: Syncing = syncs or io
        self._paths = paths
        self._topics: dict[str, TopicConfig] = {}
        self.deletions: dict[str, Deletion] = {}
        self._deletions_changed = False
        self._other: dict[str, Any] = {}
        self._version = 0
        self._lines: list[bytes] = []
        # Of them, behind what is durable of the journal. Counted, since a send may add a line to thousands.
        self._lines_written = self._written_bytes = 0
        self._journal_size = 0
        self._is_named = False  # durably; a predecessor may have ended before it was
        self.journaled = False
        """Whether there was a journal to read: the files then lack what it has."""
        self.file_remark = self._journal_remark = ""
        self.too_wide: list[str] = []
        """What topics.json says of each topic of more queues than there may be: it has those of the table."""

    @property
    def remark(self) -> str:
        """What is wrong with the files, "" when all is well."""
        return "; ".join(filter(None, (self.file_remark, *self.too_wide, self._journal_remark)))

    def load(self) -> None:
        """Read the files. Raises CorruptStoreError when one of them cannot be used, nor its copy."""
        _value, self.file_remark = rocketmq_json.load(self._io, self._paths.topics, self._take_settings)
        self.deletions = deleted_topics.load(self._io, self._paths)
        self._replay()

    def _take_settings(self, value: dict[str, Any]) -> None:
        entries = rocketmq_json.table_in(value, "topicConfigTable")
        table = {name: _from_rocketmq(name, entry) for name, entry in entries.items()}
        version = value.get("dataVersion", {})
        self._version = int(version.get("counter", 0))
        self._other = {key: value[key] for key in value if key not in ("topicConfigTable", "dataVersion")}
        self._topics = table
        self.too_wide = []
        for name, config in table.items():
            if config.queues > QUEUES_OF_A_TOPIC_MAX:
                most = f"a topic has {QUEUES_OF_A_TOPIC_MAX:,} at most"
                self.too_wide.append(f"topic {name!r}: {counted(config.queues, 'queue')}; {most}")
                config.queues = 1

    def save(self, time_ms: int) -> None:
        """Write the files, the version of topics.json one higher; the journal is then gone.

        Raises OSError; then the journal, or it and some of the files, have everything.
        """
        # With every change in the journal the files may be written one after the other.
        self.commit()
        self._version += 1
        version = {"counter": self._version, "stateVersion": 0, "timestamp": time_ms}
        table = {name: topic.to_rocketmq() for name, topic in sorted(self._topics.items())}
        value = {"dataVersion": version, "topicConfigTable": table} | self._other
        rocketmq_json.save(self._io, self._syncs, self._paths.topics, value, keeps_old=not self.file_remark)
        self.file_remark = ""
        if self._deletions_changed:
            deleted_topics.save(self._io, self._syncs, self._paths, self.deletions)
            self._deletions_changed = False
        if self._io.exists(self._paths.topics_journal):
            self._io.unlink(self._paths.topics_journal)
            # A journal that came back after a power loss would undo what later files say.
            self._syncs.sync_folder(self._paths.own)
        self._journal_size = 0
        self._is_named = False

    def note(self, topic: str) -> None:
        """Put the present state of a topic that is there to the journal; `commit` makes it durable."""
        found = self._topics[topic]
        self._add_line([topic, found.queues, found.perm])

    def _add_line(self, line: list[Any]) -> None:
        self._lines.append(msgspec.json.encode(line) + b"\n")

    def write(self) -> None:
        """Put all noted changes where they outlive every process, though no loss of power. Raises OSError."""
        if self._lines_written == len(self._lines):
            return
        fd = self._open_journal()
        try:
            self._write(fd)
        finally:
            self._io.close(fd)

    def commit(self) -> None:
        """Make all noted changes durable. Raises OSError."""
        if not self._lines:
            return
        fd = self._open_journal()
        try:
            self._write(fd)
            self._syncs.sync(fd)
        finally:
            self._io.close(fd)
        if not self._is_named:
            self._syncs.sync_folder(self._paths.own)
            self._is_named = True
        self._journal_size += self._written_bytes
        self._lines.clear()
        self._lines_written = self._written_bytes = 0

    def sync_journal(self) -> None:
        """Make durable what was read of a journal. Raises OSError."""
        if self.journaled:
            fd = self._open_journal()
            try:
                self._syncs.sync(fd)
            finally:
                self._io.close(fd)
            self._syncs.sync_folder(self._paths.own)

    def _open_journal(self) -> int:
        return self._io.open(self._paths.topics_journal, write=True, create=True, mode=0o600)

    def _write(self, fd: int) -> None:
        data = b"".join(self._lines[self._lines_written :])
        at = self._journal_size + self._written_bytes
        # What a torn or a failed commit left must not come to lie behind these lines.
        self._io.set_size(fd, at)
        self._io.pwrite(fd, data, at)
        self._lines_written = len(self._lines)
        self._written_bytes += len(data)

    def _replay(self) -> None:
        """Take the journal's changes over, up to its first line that is none."""
        try:
            data = self._io.read_file(self._paths.topics_journal)
        except FileNotFoundError:
            return
        self.journaled = True
        for line in data.split(b"\n")[:-1]:
            try:
                change = _change.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._remark(f"byte {self._journal_size}: {error}")
                return
            self._take(change)
            self._journal_size += len(line) + 1
        if len(data) > self._journal_size:
            self._remark(f"byte {self._journal_size}: the last line has no end")

    def _remark(self, text: str) -> None:
        self._journal_remark = f"{self._paths.topics_journal.name} ends early: {text}"

    def _take(self, change: _Change) -> None:
        found = self._topics.get(change.topic)
        if change.queues == 0:
            self._topics.pop(change.topic, None)
            self._remember(change.topic, Deletion.of(change.physical_offset, change.next_offsets))
        elif found is not None:
            found.queues, found.perm = change.queues, change.perm
        else:
            self._topics[change.topic] = TopicConfig(change.topic, change.queues, change.perm)

    def get(self, topic: str) -> TopicConfig | None:
        return self._topics.get(topic)

    def names(self) -> list[str]:
        return sorted(self._topics)

    def add(self, topic: str, queues: int, perm: int | None = None) -> bool:
        """Make a topic, or give it more queues. Returns whether anything changed.

        Without `perm` a new one may be read and written, and one that is there keeps what it has.
        Raises TopicExistsError when it would lose queues, BadTopicError, BadRequestError.
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
        changed = (found.queues, found.perm) != (queues, perm)
        found.queues, found.perm = queues, perm
        return changed

    def adopt(self, topic: str, queues: int) -> None:
        """Take a topic that the store holds queues of, whatever its name."""
        self._topics[topic] = TopicConfig(topic, queues)

    def delete(self, topic: str, physical_offset: int, next_offsets: Sequence[int]) -> None:
        """Remove a topic that is there, durably, and remember where its offsets stood.

        `physical_offset` is the log's end, `next_offsets` has an item for each queue id. After an OSError nothing has
        changed.
        """
        config, before = self._topics.pop(topic), self.deletions.get(topic)
        deletion = Deletion.of(physical_offset, next_offsets)
        self._remember(topic, deletion)
        if deletion is None:
            self._add_line([topic, 0, 0])
        else:
            self._add_line([topic, 0, 0, deletion.physical_offset, deletion.next_offsets])
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
        """Forget topics of which the log has no record any more. Returns whether anything changed."""
        gone = [
            topic
            for topic, deletion in self.deletions.items()
            if topic not in self._topics and deletion.physical_offset <= log_begin
        ]
        for topic in gone:
            self._remember(topic, None)
        return bool(gone)

    def _remember(self, topic: str, deletion: Deletion | None) -> None:
        if self.deletions.get(topic) == deletion:
            return
        self._deletions_changed = True
        if deletion is None:
            del self.deletions[topic]
        else:
            self.deletions[topic] = deletion


def _from_rocketmq(name: str, entry: dict[str, Any]) -> TopicConfig:
    queues = max(int(entry.get("writeQueueNums", 1)), int(entry.get("readQueueNums", 1)), 1)
    own = {"attributes", "perm", "readQueueNums", "writeQueueNums", "topicName"}
    extra = {key: value for key, value in entry.items() if key not in own}
    return TopicConfig(name, queues, int(entry.get("perm", 6)), dict(entry.get("attributes") or {}), extra)
