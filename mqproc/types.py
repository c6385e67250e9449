"""Public types: messages, results, topics, consumer groups, transactions.

Field names are the keys of JSON output.
"""

from __future__ import annotations

import base64
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec

from mqproc.topic_names import RETRY_PREFIX
from mqproc.util.compression import plain_body

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]
else:  # `help` resolves a struct's field types, and numpy is imported only when needed.
    Int32s = Int64s = Any


class Message(msgspec.Struct, frozen=True):
    """A message to send.

    `by_key` finds it by its `keys`; consumers filter by `tag`; `properties` are further name-value pairs. With
    `queue_id` None the writer chooses: messages with the same `sharding_key` go to the same queue, others are
    distributed. `born_timestamp_ms` None means now. `delay_level` (1 to 18: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m
    10m 20m 30m 1h 2h) or `deliver_at_ms` (Unix time) delay its delivery.
    """

    topic: str
    body: bytes
    tag: str = ""
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = msgspec.field(default_factory=dict)
    queue_id: int | None = None
    flag: int = 0
    born_timestamp_ms: int | None = None
    unique_id: str = ""
    delay_level: int = 0
    deliver_at_ms: int = 0
    sharding_key: str = ""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Messages with one of these tags, `a || b`; empty and `*` match all."""

    expression: str = "*"


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Messages that match a SQL92 condition: `price > 10 AND region IN ('north', 'south')`."""

    expression: str


Filter = TagFilter | SqlFilter


class SendStatus(enum.StrEnum):
    """Status of a stored message; others than PUT_OK are warnings."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"


class SendResult(msgspec.Struct, frozen=True):
    """Place of a sent message. `message_id` is RocketMQ's offset id, `unique_id` its UNIQ_KEY."""

    message_id: str
    unique_id: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_timestamp_ms: int
    status: SendStatus = SendStatus.PUT_OK


class BatchResult(msgspec.Struct, frozen=True, eq=False):
    """Places of a batch's messages by column, in the order given.

    `queue_ids` int32[n], `queue_offsets` int64[n], `physical_offsets` int64[n]; one store time for the whole frame.
    """

    topic: str
    queue_ids: Int32s
    queue_offsets: Int64s
    physical_offsets: Int64s
    store_timestamp_ms: int

    def __len__(self) -> int:
        return len(self.physical_offsets)


class LazyFields:
    """A message may hold its record's bytes around the body, and decode fields on first access."""

    __slots__ = ("_fields", "_head", "_tail")

    if not TYPE_CHECKING:  # Type checkers would accept any attribute name.

        def __getattr__(self, name: str) -> Any:
            """Called for unset fields."""
            if name not in StoredMessage.__slots__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._fields.fill(self, self._head, self._tail, name)
            return getattr(self, name)


@dataclass(frozen=True, slots=True)
class StoredMessage(LazyFields):
    """A message as stored in the CommitLog."""

    message_id: str
    physical_offset: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    flag: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: str
    store_timestamp_ms: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    body: bytes
    stored_topic: str = ""
    """Topic that holds the record: of a redelivery its retry topic, while `topic` is the subscribed one."""

    def __post_init__(self) -> None:
        if not self.stored_topic:
            object.__setattr__(self, "stored_topic", self.topic)

    @property
    def unique_id(self) -> str:
        """The producer's id (property UNIQ_KEY), or empty."""
        return self.properties.get("UNIQ_KEY", "")

    @property
    def sharding_key(self) -> str:
        """The key that selected the queue (property __SHARDINGKEY), or empty."""
        return self.properties.get("__SHARDINGKEY", "")

    @property
    def plain_body(self) -> bytes:
        """The body, decompressed if a RocketMQ producer compressed it; `body` is as stored.

        Raises BadMessageError for invalid data; lz4 and zstd require pyarrow.
        """
        return plain_body(self.body, self.sys_flag)

    def to_json(self) -> dict[str, Any]:
        """Fields by name, the stored body as base64: a message in `--json` output.

        Example: `message.to_json()["body_base64"]`
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.stored_topic == self.topic:
            del values["stored_topic"]
        values |= {"keys": list(self.keys), "properties": dict(self.properties)}
        values["body_base64"] = base64.b64encode(values.pop("body")).decode("ascii")
        return values


class DraftMessage(StoredMessage):
    """A StoredMessage under construction; its class is changed when it is complete.

    Setting attributes of a frozen class takes five times as long. The special methods are those of object, which are
    the fastest, and there are no further fields, so that changing the class does not compare all slots.
    """

    __slots__ = ()
    __init__ = object.__init__
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__


class PullStatus(enum.StrEnum):
    """RocketMQ's `GetMessageStatus`, and CORRUPT for a damaged range."""

    FOUND = "FOUND"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    CORRUPT = "CORRUPT"


class PullResult(msgspec.Struct, frozen=True):
    """Result of a pull. `next_offset` is where the next pull of the queue begins, in any status.

    With CORRUPT, `detail` names the damaged queue offsets, the range of the log, and the damage.
    """

    status: PullStatus
    messages: Sequence[StoredMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic; producers use `write_queues` of its queues, consumers `read_queues`."""

    topic: str
    queues: int
    perm: int
    message_count: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    read_queues: int = 0
    write_queues: int = 0

    @property
    def used_queues(self) -> tuple[int, int]:
        """`read_queues` and `write_queues`."""
        return self.read_queues, self.write_queues


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue with readable offsets [`min_offset`, `max_offset`)."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness: `ready` when all roles run and send heartbeats; `problems` lists what fails.

    `read_only`: messages are refused after a failed sync, or for damage with `on_damage = read_only`.
    """

    ready: bool
    read_only: bool
    dispatch_behind_bytes: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A consumer group. `lag`: messages not consumed; `retry_lag`: those in its retry topic.

    `waiting_retries`: messages in a delay level, which will be in the retry topic later.
    """

    group: str
    members: int
    topics: int
    lag: int
    retry_lag: int
    waiting_retries: int = 0


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A group member: `queues` it has, `silent_ms` since its last request, its filter's text."""

    member_id: str
    name: str
    topics: tuple[str, ...]
    queues: int
    silent_ms: int
    pid: int
    filter: str = "*"


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """A group's offset in a queue: the next to consume, None when none is committed.

    `offset_time_ms`: store time of the message at the offset, or None. `member_id`: the member that has the queue.
    """

    topic: str
    queue_id: int
    offset: int | None
    min_offset: int
    max_offset: int
    offset_time_ms: int | None
    member_id: str

    @property
    def lag(self) -> int:
        """Messages not consumed yet."""
        return max(0, self.max_offset - max(self.min_offset, self.offset or 0))

    @property
    def is_retry(self) -> bool:
        return self.topic.startswith(RETRY_PREFIX)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group: settings, members, offsets by queue, filter of its live consumers by topic.

    `waiting_retries`: messages in a delay level, which will be in the group's retry topic later.
    """

    group: str
    generation: int
    retry_max_times: int
    retry_queue_nums: int
    consume_enable: bool
    members: tuple[GroupMember, ...]
    queues: tuple[GroupQueue, ...]
    filters: Mapping[str, str] = field(default_factory=dict)
    waiting_retries: int = 0

    @property
    def lag(self) -> int:
        """Messages of all queues not consumed yet."""
        return sum(queue.lag for queue in self.queues)


class TransactionResolution(enum.StrEnum):
    """A producer's answer to a transaction check. UNKNOWN: it is checked again later."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is neither committed nor rolled back.

    `message_id`, `physical_offset` and `size` are those of its half message. `checks`: number so far. `next_check_ms`:
    Unix time.
    """

    transaction_id: str
    message_id: str
    group: str
    topic: str
    physical_offset: int
    size: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    checks: int
    next_check_ms: int
