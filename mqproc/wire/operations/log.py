"""Every operation with the options of its request and of its answer; the payloads' columns are told with each.

Columns follow one another without padding, each as little-endian numbers or raw bytes:

APPEND        body_lengths u32[n] · bodies
              · keys_bytes ≥ 0:        key_lengths u16[n] · keys          (each message's keys joined by a space)
              · tags_bytes ≥ 0:        tag_lengths u16[n] · tags
              · properties_bytes ≥ 0:  property_lengths u16[n] · whole property strings, KEYS, TAGS, UNIQ_KEY included
              · has_born:              born_timestamps i64[n]
              · has_queues:            queue_ids i32[n]
              · has_flags:             flags i32[n]
              · has_prepared:          prepared_transaction_offsets i64[n]
              · sharding_bytes ≥ 0:    sharding_lengths u16[n] · sharding keys
APPEND_OWN    as APPEND
   answer     physical_offsets i64[n] · queue_offsets i64[n] · queue_ids i32[n]
PULL, GET, BY_KEY, RANGE   answer: whole CommitLog records, one after the other
"""

from __future__ import annotations

from mqproc.wire.codec import Options

QUEUE_ANY = -1


QUEUE_COLUMN = -2


COLUMN_ABSENT = -1


PAGE_BYTES_MAX = 1 << 30
"""More than any page has: who asks for so much takes what the server gives at once."""


class AppendRequest(Options, frozen=True):
    """A frame of `count` messages for one topic.

    `queue_id` ≥ 0 names the queue of all, QUEUE_ANY lets the writer go round the topic's queues message by message,
    QUEUE_COLUMN says that a column names them. `tag` is every message's tag unless a column is there. The unique id of
    message i is `unique_prefix` (28 upper-case hex digits; empty for none) followed by (unique_counter + i) mod 65536
    in 4 digits. `gap_…` are further properties, the same for every message, already encoded and split at the places
    where UNIQ_KEY, TAGS and KEYS stand between them in RocketMQ's order. With `properties_bytes` ≥ 0 the column holds
    whole property strings and none of tag, keys, unique id and gaps applies. A message with a sharding key goes to the
    queue that the key's hash gives, and the key is stored, unless a whole property string has it already; the column
    goes with QUEUE_ANY alone. `batch`: all or nothing inside one
    segment, one store time, as RocketMQ's batch. `wait` false: answer before the sync of a SYNC_FLUSH store.
    `born_host` is address and port as in the record: 8 or 20 bytes. With `delay_level` or `deliver_at_ms` above 0 the
    messages wait first: see `process.parking`; the answer then tells where they wait. `transaction`: the one message of
    the frame is a half message, whose properties say so.

    APPEND_OWN has the same options and is for the group's own roles: it may write to the system's topics, and of it
    alone `sys_flag`, `reconsume_times`, `prepared_transaction_offset` and `has_prepared` are taken.
    """

    topic: str
    count: int
    queue_id: int = QUEUE_ANY
    bodies_bytes: int = 0
    keys_bytes: int = COLUMN_ABSENT
    tags_bytes: int = COLUMN_ABSENT
    properties_bytes: int = COLUMN_ABSENT
    has_born: bool = False
    has_queues: bool = False
    has_flags: bool = False
    tag: str = ""
    unique_prefix: str = ""
    unique_counter: int = 0
    born_timestamp_ms: int = 0
    born_host: bytes = b"\x7f\0\0\x01\0\0\0\0"
    flag: int = 0
    gap_before_unique: bytes = b""
    gap_before_tag: bytes = b""
    gap_before_keys: bytes = b""
    gap_after_keys: bytes = b""
    wait: bool = True
    batch: bool = False
    oneway: bool = False
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    has_prepared: bool = False
    delay_level: int = 0
    deliver_at_ms: int = 0
    transaction: bool = False
    sharding_bytes: int = COLUMN_ABSENT


class AppendAnswer(Options, frozen=True):
    """`store_timestamp_ms` of the frame; `store_host` as in the record, for message ids."""

    store_timestamp_ms: int
    store_host: bytes


class CreateTopicRequest(Options, frozen=True):
    topic: str
    queues: int
    perm: int | None = None


class DeleteTopicRequest(Options, frozen=True):
    topic: str


class PullRequest(Options, frozen=True):
    """`timeout_ms` > 0 holds the request until a message that matches is there. `tags` are tag strings, empty = all.
    `sql` is a filter by properties, empty = none; it goes without tags.

    `rocketmq_limits`: stop at RocketMQ's own 32 messages and 256 KiB, filter by the hash alone, one ConsumeQueue file
    a call, no CRC check, an unknown queue is an empty one: its answers exactly.

    `progress_ms`: one that waits is also answered when it has passed messages that do not match, but not before so many
    milliseconds; 0 = at once, below 0 = only when its time is over.
    """

    topic: str
    queue_id: int
    offset: int
    max_messages: int = 1024
    max_bytes: int = 8 << 20
    tags: list[str] = []
    timeout_ms: int = 0
    rocketmq_limits: bool = False
    sql: str = ""
    progress_ms: int = -1


class PullAnswer(Options, frozen=True):
    status: str
    next_offset: int
    min_offset: int
    max_offset: int
    count: int = 0
    detail: str = ""


class GetRequest(Options, frozen=True):
    """`message_id` is an offset id (32 or 56 hex digits) or a unique id, which is looked up in `topic` when given."""

    message_id: str
    topic: str = ""


class ByKeyRequest(Options, frozen=True):
    """Times in ms, both inclusive: store times, or with `born_time` the messages' born times. `unique` looks for a
    unique id instead of a key. `below`: only records below this position of the log, as a cursor has it; −1 for all.
    `max_bytes` as in PullRequest."""

    topic: str
    key: str
    begin_ms: int = -(1 << 62)
    end_ms: int = 1 << 62
    max_messages: int = 64
    unique: bool = False
    born_time: bool = False
    below: int = -1
    max_bytes: int = PAGE_BYTES_MAX


class RecordsAnswer(Options, frozen=True):
    """`count` records in the payload. `cursor` is where the next request goes on, −1 at the end; `complete` false when
    a limit cut the answer short."""

    count: int
    cursor: list[int] = []
    complete: bool = True


class RangeRequest(Options, frozen=True):
    """Messages with begin_ms ≤ store time < end_ms, by queue; `cursor` from the last answer goes on. `max_bytes` as in
    PullRequest."""

    topic: str
    begin_ms: int
    end_ms: int
    tags: list[str] = []
    max_messages: int = 4096
    born_time: bool = False
    cursor: list[int] = []
    sql: str = ""
    max_bytes: int = PAGE_BYTES_MAX


class CountRequest(Options, frozen=True):
    topic: str
    begin_ms: int = -(1 << 62)
    end_ms: int = 1 << 62
    tags: list[str] = []
    born_time: bool = False
    sql: str = ""


class CountAnswer(Options, frozen=True):
    count: int


class OffsetAtRequest(Options, frozen=True):
    """`upper`: the last message at or before the time, else the first at or after it."""

    topic: str
    queue_id: int
    time_ms: int
    upper: bool = False


class OffsetAnswer(Options, frozen=True):
    offset: int


class QueuesRequest(Options, frozen=True):
    """Queues of a topic; an empty name means all queues of the store."""

    topic: str = ""


class QueuesAnswer(Options, frozen=True):
    """[topic, queue id, min offset, max offset] a queue."""

    queues: list[tuple[str, int, int, int]]


class TopicsAnswer(Options, frozen=True):
    """[topic, queues, perm, message count, attributes] a topic."""

    topics: list[tuple[str, int, int, int, dict[str, str]]]


class QueryMessageRequest(Options, frozen=True):
    """RocketMQ's own `queryMessage`: hash hits and all."""

    topic: str
    key: str
    max_messages: int
    begin_ms: int
    end_ms: int


class QueryMessageAnswer(Options, frozen=True):
    physical_offsets: list[int]
    index_last_update_timestamp_ms: int
    index_last_update_physical_offset: int


class ScanRequest(Options, frozen=True):
    """A pass over the log without a key: records whose properties and body match, from `physical_offset` on.

    Stops after `max_messages` hits, `max_bytes` of them as in PullRequest, or `max_scan_bytes` of log; `cursor`
    [physical offset] goes on.
    """

    topic: str = ""
    physical_offset: int = -1
    begin_ms: int = -(1 << 62)
    end_ms: int = 1 << 62
    property_name: str = ""
    property_value: str = ""
    body_contains: bytes = b""
    max_messages: int = 256
    max_scan_bytes: int = 256 << 20
    max_bytes: int = PAGE_BYTES_MAX
