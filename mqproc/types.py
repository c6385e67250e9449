"""Messages and the answers about them, as users see them. Names and JSON keys are the same everywhere."""

from __future__ import annotations

import base64
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mqproc.topic_names import RETRY_PREFIX
from mqproc.util.compression import plain_body

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]
else:  # `help` looks for the types of a struct's fields, and numpy is not there before it is needed.
    Int32s = Int64s = Any


class Message(msgspec.Struct, frozen=True):
    """A message to send.

    `keys` are what `by_key` finds it by; `tag` is what consumers filter by; `properties` are further name-value
    pairs. `queue_id` None lets the writer choose: messages with the same `sharding_key` go to the same queue, the
    others take turns at the queues. `born_timestamp_ms` None means now. With `delay_level` (1 to 18:
    1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h) or `deliver_at_ms` (Unix time) the message is delivered
    when its time has come.
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
    """Messages with one of some tags, `a || b`; the empty filter and `*` let all pass."""

    expression: str = "*"


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Messages whose properties meet a condition in RocketMQ's SQL92: `price > 10 AND region IN ('north', 'south')`."""

    expression: str


Filter = TagFilter | SqlFilter


class SendStatus(enum.StrEnum):
    """What became of a message that was stored; the last three are RocketMQ's "stored, with a warning"."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"


class SendResult(msgspec.Struct, frozen=True):
    """Where one message went. `message_id` is RocketMQ's offset message id, `unique_id` its client id (UNIQ_KEY)."""

    message_id: str
    unique_id: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_timestamp_ms: int
    status: SendStatus = SendStatus.PUT_OK


class BatchResult(msgspec.Struct, frozen=True, eq=False):
    """Where a batch's messages went, column by column, in the order they were given.

    `queue_ids` int32[n], `queue_offsets` int64[n], `physical_offsets` int64[n]; one store time for the whole frame.
    """

    topic: str
    queue_ids: Int32s
    queue_offsets: Int64s
    physical_offsets: Int64s
    store_timestamp_ms: int

    def __len__(self) -> int:
        return len(self.physical_offsets)


class RecordFields(Protocol):
    """What reads fields out of records, on behalf of messages of which nobody has asked for them yet."""

    def fill(self, message: StoredMessage, head: bytes, tail: bytes, name: str) -> None:
        """Set the field of that name, and those that come with it, in a message. Raises CorruptStoreError."""
        ...


class LazyFields:
    """A message may be made of its record's bytes before and behind the body: fields are read when asked for first."""

    __slots__ = ("_fields", "_head", "_tail")

    if not TYPE_CHECKING:  # Or every name would be an attribute.

        def __getattr__(self, name: str) -> Any:
            """Python comes here for what is not set."""
            if name not in StoredMessage.__slots__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._fields.fill(self, self._head, self._tail, name)
            return getattr(self, name)


@dataclass(frozen=True, slots=True)
class StoredMessage(LazyFields):
    """A message as it lies in the CommitLog."""

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

    @property
    def unique_id(self) -> str:
        """The id that the producer gave it (property UNIQ_KEY), empty when it gave none."""
        return self.properties.get("UNIQ_KEY", "")

    @property
    def sharding_key(self) -> str:
        """What picked its queue (property __SHARDINGKEY), empty when nothing did."""
        return self.properties.get("__SHARDINGKEY", "")

    @property
    def plain_body(self) -> bytes:
        """The body as it was before a producer of RocketMQ's compressed it; `body` is as it is stored.

        Raises BadMessageError when it cannot be unpacked; lz4 and zstd take pyarrow.
        """
        return plain_body(self.body, self.sys_flag)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, the body as it is stored as base64: what every `--json` prints for a message."""
        return {
            "message_id": self.message_id,
            "physical_offset": self.physical_offset,
            "size": self.size,
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "tag": self.tag,
            "keys": list(self.keys),
            "properties": dict(self.properties),
            "flag": self.flag,
            "sys_flag": self.sys_flag,
            "born_timestamp_ms": self.born_timestamp_ms,
            "born_host": self.born_host,
            "store_timestamp_ms": self.store_timestamp_ms,
            "store_host": self.store_host,
            "reconsume_times": self.reconsume_times,
            "prepared_transaction_offset": self.prepared_transaction_offset,
            "body_crc": self.body_crc,
            "body_base64": base64.b64encode(self.body).decode("ascii"),
        }


class DraftMessage(StoredMessage):
    """A StoredMessage while it is made: filling a frozen one costs five times as much. Its class is changed at the end.

    Both special methods are the object's own, or Python would set attributes by a slower way; and there are no fields
    besides, or it would compare all slots when the class is changed.
    """

    __slots__ = ()
    __init__ = object.__init__
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__


class PullStatus(enum.StrEnum):
    """RocketMQ's `GetMessageStatus`, and ours for a damaged range."""

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
    """One pull's answer. `next_offset` is where the next pull of this queue should begin, whatever the status.

    `detail` says with CORRUPT which queue offsets and which range of the log are damaged, and how.
    """

    status: PullStatus
    messages: Sequence[StoredMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """One topic: its queues and what is in them."""

    topic: str
    queues: int
    perm: int
    message_count: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One queue: offsets in [`min_offset`, `max_offset`) can be read."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class Health:
    """`ready` when every role runs and beats; `problems` says what does not.

    `read_only`: no messages are taken, after a failed sync or, with `on_damage = read_only`, for damage.
    """

    ready: bool
    read_only: bool
    dispatch_behind_bytes: int
    problems: tuple[str, ...] = ()


# --- groups ---
# Consumer groups as users see them. Names and JSON keys are the same everywhere.


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group. `lag`: how many messages it has not consumed; `retry_lag`: those of them in its retry topic."""

    group: str
    members: int
    topics: int
    lag: int
    retry_lag: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One consumer: `queues` it has, `silent_ms` since its last request."""

    member_id: str
    name: str
    topics: tuple[str, ...]
    queues: int
    silent_ms: int
    pid: int


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """A group's progress in one queue. `offset` is the next to consume, None when none is stored.

    `offset_time_ms`: store time of the message at the offset, None when there is none. `member_id` has the queue now.
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
    """One group: settings, members, and its progress queue by queue."""

    group: str
    generation: int
    retry_max_times: int
    retry_queue_nums: int
    consume_enable: bool
    members: tuple[GroupMember, ...]
    queues: tuple[GroupQueue, ...]

    @property
    def lag(self) -> int:
        """Messages of all queues not consumed yet."""
        return sum(queue.lag for queue in self.queues)


# --- transactions ---
# Transactions as users see them. Names and JSON keys are the same everywhere.


class TransactionResolution(enum.StrEnum):
    """What a producer says of a transaction that it is asked about. UNKNOWN: it is asked again later."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is neither committed nor rolled back.

    `message_id`, `physical_offset` and `size` are its half message's. `checks`: how often its producers were asked.
    `next_check_ms`: Unix time of the next check.
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
