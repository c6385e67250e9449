"""Public types: messages, results, topics, consumer groups, transactions.

Field names are the keys of JSON output.
"""

from __future__ import annotations

import base64
import datetime
import enum
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from mqproc.errors import BadMessageError, BadRequestError, BadTimeError
from mqproc.topic_names import RETRY_PREFIX
from mqproc.util.compression import plain_body
from mqproc.util.record_text import host_text, properties_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]
else:  # `help` resolves a struct's field types, and numpy is imported only when needed.
    Int32s = Int64s = Any

_MASK64: Final = (1 << 64) - 1
_BORN_HOST_V6: Final = 0x10


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message to send.

    `by_key` finds it by its `keys`; consumers filter by `tag`; `properties` are further name-value pairs. With
    `queue_id` None the writer chooses: messages with the same `sharding_key` go to the same queue, others are
    distributed. `born_timestamp_ms` None means now. `delay_level` (1 to 18: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m
    10m 20m 30m 1h 2h) or `deliver_at_ms` (Unix time) delay its delivery.
    """

    topic: str
    body: Any
    """Bytes; of a client with a codec any value that it encodes."""
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

    def __repr__(self) -> str:
        values = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return _shown(self, values[:2] + [(name, value) for name, value in values[2:] if repr(value) not in _NOT_GIVEN])


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

    def __repr__(self) -> str:
        return f"<BatchResult: {len(self):,} messages of {self.topic}, stored at {_utc(self.store_timestamp_ms)}>"


class StoredMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message as stored in the CommitLog."""

    # Kernels write the fields in this order (kernels/pack.py), and msgspec decodes them. Other values, which few
    # consumers read, are decoded when they are asked for.

    physical_offset: int = 0
    size: int = 0
    topic: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    tag: str = ""
    keys: tuple[str, ...] = ()
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    store_timestamp_ms: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int = 0
    body: bytes = b""
    _properties: bytes = b""
    _hosts: bytes = b""
    """Born host, then store host."""
    _stored_topic: str = ""
    _codec: ClassVar[Any] = None
    """Codec of the client that read it; a subclass has another one (`message_type`)."""

    @property
    def message_id(self) -> str:
        """RocketMQ's offset message id: store host and physical offset in hexadecimal."""
        return f"{self._host(born=False).hex().upper()}{self.physical_offset & _MASK64:016X}"

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, with those that hold tag, keys and unique id."""
        return dict(properties_of(self._properties))

    @property
    def born_host(self) -> str:
        """The producer's `address:port`, an IPv6 address in brackets."""
        return host_text(self._host(born=True))

    @property
    def store_host(self) -> str:
        """The broker's `address:port`, an IPv6 address in brackets."""
        return host_text(self._host(born=False))

    @property
    def stored_topic(self) -> str:
        """Topic that holds the record; of a redelivery the retry topic, not the subscribed one."""
        return self._stored_topic or self.topic

    def _host(self, *, born: bool) -> bytes:
        end = 20 if self.sys_flag & _BORN_HOST_V6 else 8
        return self._hosts[:end] if born else self._hosts[end:]

    @property
    def unique_id(self) -> str:
        """The producer's id (property UNIQ_KEY), or empty."""
        return properties_of(self._properties).get("UNIQ_KEY", "")

    @property
    def sharding_key(self) -> str:
        """The key that selected the queue (property __SHARDINGKEY), or empty."""
        return properties_of(self._properties).get("__SHARDINGKEY", "")

    @property
    def plain_body(self) -> bytes:
        """The body, decompressed if a RocketMQ producer compressed it; `body` is as stored.

        Raises BadMessageError for invalid data; lz4 and zstd require pyarrow.
        """
        return plain_body(self.body, self.sys_flag)

    @property
    def value(self) -> Any:
        """The body, decoded by the codec of the client that read the message.

        Raises BadMessageError for a body that the codec cannot decode, BadRequestError without a codec.
        """
        codec = self._codec
        if codec is None:
            raise BadRequestError("the client that read this message has no codec: Client(…, codec='json') has")
        try:
            return codec.decode(self.plain_body)
        except Exception as error:  # Of any codec.
            place = f"{self.topic}, queue {self.queue_id}, offset {self.queue_offset:,}"
            raise BadMessageError(
                f"message {self.message_id} of {place}: the codec {codec!r} cannot decode {_cut(self.body)}: {error}"
            ) from error

    @property
    def stored_at(self) -> datetime.datetime:
        """Time at which the message was stored, in UTC.

        Raises BadTimeError for one outside of the years 1 to 9999.
        """
        return _datetime(self.store_timestamp_ms)

    @property
    def born_at(self) -> datetime.datetime:
        """Time that the producer gave to the message, in UTC. Raises as `stored_at`."""
        return _datetime(self.born_timestamp_ms)

    def to_json(self) -> dict[str, Any]:
        """Fields by name, the stored body as base64: a message in `--json` output.

        Example: `message.to_json()["body_base64"]`
        """
        values = {name: getattr(self, name) for name in MESSAGE_FIELDS}
        if self.stored_topic == self.topic:
            del values["stored_topic"]
        values["keys"] = list(self.keys)
        values["body_base64"] = base64.b64encode(values.pop("body")).decode("ascii")
        return values

    def __repr__(self) -> str:
        return _shown(self, [(name, getattr(self, name)) for name in MESSAGE_FIELDS])

    def __reduce__(self) -> tuple[Callable[..., StoredMessage], tuple[Any, ...]]:
        return _stored_message, (self._codec, msgspec.structs.astuple(self))


_types: weakref.WeakValueDictionary[int, type[StoredMessage]] = weakref.WeakValueDictionary()
"""Subclasses by the identity of their codec, which they keep alive."""


def message_type(codec: Any) -> type[StoredMessage]:
    """The class of messages whose `value` this codec decodes."""
    if codec is None:
        return StoredMessage
    found = _types.get(id(codec))
    if found is None:
        found = new_class(
            "StoredMessage", (StoredMessage,), {}, lambda names: names.update(_codec=codec, __module__=__name__)
        )
        _types[id(codec)] = found
    return found


def _stored_message(codec: Any, fields: tuple[Any, ...]) -> StoredMessage:
    return message_type(codec)(*fields)


_SHOWN_BYTES: Final = 64
_NOT_GIVEN: Final = ("None", "''", "()", "{}", "0")  # As texts: other values may not be comparable.
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def _shown(made: object, values: Iterable[tuple[str, Any]]) -> str:
    """A `repr` whose long bodies are cut."""
    parts = [f"{name}={_cut(value) if name == 'body' else repr(value)}" for name, value in values]
    return f"{type(made).__name__}({', '.join(parts)})"


def _cut(body: Any) -> str:
    if not isinstance(body, bytes) or len(body) <= _SHOWN_BYTES:
        return repr(body)
    return f"{body[:_SHOWN_BYTES]!r}… of {len(body):,} bytes"


def _datetime(time_ms: int) -> datetime.datetime:
    try:
        return _EPOCH + datetime.timedelta(milliseconds=time_ms)
    except OverflowError:
        raise BadTimeError(f"{time_ms:,} ms is outside of the years 1 to 9999") from None


def _utc(time_ms: int) -> str:
    return _datetime(time_ms).isoformat(timespec="milliseconds")


MESSAGE_FIELDS: Final = (
    *("message_id", "physical_offset", "size", "topic", "queue_id", "queue_offset", "tag", "keys", "properties"),
    *("flag", "sys_flag", "born_timestamp_ms", "born_host", "store_timestamp_ms", "store_host", "reconsume_times"),
    *("prepared_transaction_offset", "body_crc", "body", "stored_topic"),
)
"""Public fields of a StoredMessage, in the order of its JSON."""


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

    def __repr__(self) -> str:
        ends = f"next_offset={self.next_offset}, min_offset={self.min_offset}, max_offset={self.max_offset}"
        detail = f", {self.detail}" if self.detail else ""
        return f"<PullResult {self.status}: {len(self.messages):,} messages, {ends}{detail}>"


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
