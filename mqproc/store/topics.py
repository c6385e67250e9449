"""Topics as RocketMQ keeps them: `config/topics.json`, owned by the writer, and which of them clients may not send to.

Writing the whole file for each change would make thousands of topics quadratic, so a change is first a line of
`mqproc/topics.journal`, synced before it is acknowledged; the file follows within a second, and then the journal goes.
A line is `[topic, queues, perm]`, queues 0 for a deleted topic; a torn last line was never acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from mqproc.errors import BadRequestError, TopicExistsError, TopicReservedError
from mqproc.io import StoreIO
from mqproc.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, check_topic
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json

PERM_READ = 4
PERM_WRITE = 2
QUEUES_OF_A_TOPIC_MAX = 65_535
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# Topics that RocketMQ's broker does not let clients send to.
RESERVED_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "rmq_sys_wheel_timer",
    }
)


def check_sendable(topic: str) -> None:
    """Raise TopicReservedError for topics that only the system writes to."""
    if topic in RESERVED_TOPICS or topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
        raise TopicReservedError(f"topic {topic!r} is the system's own; producers may not send to it")


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


class Topics:
    """The topics of a store in memory; `save` writes them when something changed."""

    def __init__(self, io: StoreIO, paths: StorePaths) -> None:
        self._io = io
        self._paths = paths
        self._topics: dict[str, TopicConfig] = {}
        self._other: dict[str, Any] = {}
        self._version = 0
        self._lines: list[bytes] = []
        self._journal_size = 0
        self.remark = ""

    def load(self) -> None:
        """Read the file. Raises CorruptStoreError when neither it nor its copy can be read."""
        value, self.remark = rocketmq_json.load(self._io, self._paths.topics)
        table = value.get("topicConfigTable", {}) if isinstance(value, dict) else {}
        if isinstance(value, dict):
            self._other = {key: value[key] for key in value if key not in ("topicConfigTable", "dataVersion")}
            self._version = int(value.get("dataVersion", {}).get("counter", 0))
        self._topics = {name: _from_rocketmq(name, entry) for name, entry in table.items()}
        self._replay()

    def save(self, time_ms: int) -> None:
        """Write the file, its version one higher; the journal is then empty."""
        self._version += 1
        version = {"counter": self._version, "stateVersion": 0, "timestamp": time_ms}
        table = {name: topic.to_rocketmq() for name, topic in sorted(self._topics.items())}
        rocketmq_json.save(
            self._io, self._paths.topics, {"dataVersion": version, "topicConfigTable": table} | self._other
        )
        self._lines.clear()
        self._journal_size = 0
        self._io.unlink(self._paths.topics_journal)

    def note(self, topic: str) -> None:
        """Put a topic's present state to the journal; `commit` makes it durable."""
        found = self._topics.get(topic)
        line = [topic, found.queues, found.perm] if found else [topic, 0, 0]
        self._lines.append(msgspec.json.encode(line) + b"\n")

    def commit(self) -> None:
        """Make all noted changes durable. Raises OSError."""
        if not self._lines:
            return
        data = b"".join(self._lines)
        fd = self._io.open(self._paths.topics_journal, write=True, create=True, mode=0o600)
        try:
            self._io.pwrite(fd, data, self._journal_size)
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        if self._journal_size == 0:
            self._io.sync_folder(self._paths.own)
        self._journal_size += len(data)
        self._lines.clear()

    def _replay(self) -> None:
        """Take the journal's changes over."""
        try:
            data = self._io.read_file(self._paths.topics_journal)
        except FileNotFoundError:
            return
        whole, _, _torn = data.rpartition(b"\n")
        self._journal_size = len(whole) + 1 if whole else 0
        for line in whole.split(b"\n") if whole else []:
            topic, queues, perm = msgspec.json.decode(line, type=tuple[str, int, int])
            if queues == 0:
                self._topics.pop(topic, None)
            elif (found := self._topics.get(topic)) is not None:
                found.queues, found.perm = queues, perm
            else:
                self._topics[topic] = TopicConfig(topic, queues, perm)

    def get(self, topic: str) -> TopicConfig | None:
        return self._topics.get(topic)

    def names(self) -> list[str]:
        return sorted(self._topics)

    def add(self, topic: str, queues: int, perm: int = PERM_READ | PERM_WRITE) -> bool:
        """Make a topic, or give it more queues. Returns whether anything changed.

        Raises TopicExistsError when it would lose queues, BadTopicError, BadRequestError.
        """
        check_topic(topic)
        if not 1 <= queues <= QUEUES_OF_A_TOPIC_MAX:
            raise BadRequestError(f"queues = {queues} is out of range: from 1 to {QUEUES_OF_A_TOPIC_MAX:,}")
        found = self._topics.get(topic)
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

    def remove(self, topic: str) -> bool:
        return self._topics.pop(topic, None) is not None


def _from_rocketmq(name: str, entry: dict[str, Any]) -> TopicConfig:
    queues = max(int(entry.get("writeQueueNums", 1)), int(entry.get("readQueueNums", 1)), 1)
    own = {"attributes", "perm", "readQueueNums", "writeQueueNums", "topicName"}
    extra = {key: value for key, value in entry.items() if key not in own}
    return TopicConfig(name, queues, int(entry.get("perm", 6)), dict(entry.get("attributes") or {}), extra)
