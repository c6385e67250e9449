"""Options of appends, topics and reads, and the columns of their payloads.

Columns follow one another without padding, as little-endian numbers or raw bytes:

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

from mqproc.wire.codec import FrameOptions

QUEUE_ANY = -1


QUEUE_COLUMN = -2


COLUMN_ABSENT = -1


PAGE_BYTES_MAX = 1 << 30
"""Above any page size: the client accepts whatever the server returns at once."""


class AppendRequest(FrameOptions, frozen=True):
    """A frame of `count` messages for one topic.

    `queue_id` ≥ 0 is the queue of all messages, QUEUE_ANY distributes them over the topic's queues, QUEUE_COLUMN takes
    the queues from a column. `tag` is every message's tag unless there is a column. The unique id of message i is
    `unique_prefix` (28 upper-case hex digits; empty for none) followed by (unique_counter + i) mod 65536 in 4 digits.
    `gap_…` are further properties, the same for every message, encoded and split at the places of UNIQ_KEY, TAGS and
    KEYS in RocketMQ's order. With `properties_bytes` ≥ 0 the column has whole property strings, and tag, keys, unique
    id and gaps do not apply. The hash of a sharding key selects the queue, and the key is stored unless the property
    string has it; this column requires QUEUE_ANY. `batch`: all or nothing, inside one segment, with one store time, as
    RocketMQ's batch. `wait` false: answer before the sync of a SYNC_FLUSH store. `born_host` is address and port as in
    the record: 8 or 20 bytes. With `delay_level` or `deliver_at_ms` above 0 the messages are delayed (see
    `roles.writer.delayed_send`), and the answer has their place in the delay topic. `transaction`: the frame's only
    message is a half message, as its properties say.

    APPEND_OWN has the same options, for the group's own roles: it may write to system topics, and only it uses
    `sys_flag`, `reconsume_times`, `prepared_transaction_offset` and `has_prepared`.
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


class AppendAnswer(FrameOptions, frozen=True):
    """`store_timestamp_ms` of the frame; `store_host` as in the record, for message ids."""

    store_timestamp_ms: int
    store_host: bytes


class CreateTopicRequest(FrameOptions, frozen=True):
    topic: str
    queues: int
    perm: int | None = None


class DeleteTopicRequest(FrameOptions, frozen=True):
    topic: str


class PullRequest(FrameOptions, frozen=True):
    """`timeout_ms` > 0 is a long poll: the answer waits for a matching message.

    `tags` are tag strings, empty = all. `sql` is a filter on properties, empty = none; not with tags.

    `rocketmq_limits` answers exactly as RocketMQ does: at most 32 messages and 256 KiB, filter by tag hash only, one
    ConsumeQueue file per call, no CRC check, an unknown queue is empty.

    `progress_ms`: a long poll that skipped messages is answered after so many ms; 0 = at once, below 0 = at timeout.
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


class PullAnswer(FrameOptions, frozen=True):
    status: str
    next_offset: int
    min_offset: int
    max_offset: int
    count: int = 0
    detail: str = ""


class GetRequest(FrameOptions, frozen=True):
    """`message_id`: an offset id (32 or 56 hex digits), or a unique id, perhaps in `topic`."""

    message_id: str
    topic: str = ""


class ByKeyRequest(FrameOptions, frozen=True):
    """Find messages by key, or with `unique` by unique id.

    Times in ms are inclusive: store times, or with `born_time` born times. `below` is a cursor: only records below this
    log position; −1 for all. `max_bytes` as in PullRequest.
    """

    topic: str
    key: str
    begin_ms: int = -(1 << 62)
    end_ms: int = 1 << 62
    max_messages: int = 64
    unique: bool = False
    born_time: bool = False
    below: int = -1
    max_bytes: int = PAGE_BYTES_MAX


class RecordsAnswer(FrameOptions, frozen=True):
    """`count` records in the payload.

    `cursor` continues in the next request, −1 at the end; `complete` false when a limit cut the answer.
    """

    count: int
    cursor: list[int] = []
    complete: bool = True


class RangeRequest(FrameOptions, frozen=True):
    """Messages with begin_ms ≤ store time < end_ms, by queue.

    `cursor` of the last answer continues. `max_bytes` as in PullRequest.
    """

    topic: str
    begin_ms: int
    end_ms: int
    tags: list[str] = []
    max_messages: int = 4096
    born_time: bool = False
    cursor: list[int] = []
    sql: str = ""
    max_bytes: int = PAGE_BYTES_MAX


class CountRequest(FrameOptions, frozen=True):
    topic: str
    begin_ms: int = -(1 << 62)
    end_ms: int = 1 << 62
    tags: list[str] = []
    born_time: bool = False
    sql: str = ""


class CountAnswer(FrameOptions, frozen=True):
    count: int


class OffsetAtRequest(FrameOptions, frozen=True):
    """`upper`: the last message at or before the time, else the first at or after it."""

    topic: str
    queue_id: int
    time_ms: int
    upper: bool = False


class OffsetAnswer(FrameOptions, frozen=True):
    offset: int


class QueuesRequest(FrameOptions, frozen=True):
    """Queues of a topic; an empty name means all queues of the store."""

    topic: str = ""


class QueuesAnswer(FrameOptions, frozen=True):
    """[topic, queue id, min offset, max offset] a queue."""

    queues: list[tuple[str, int, int, int]]


class TopicsAnswer(FrameOptions, frozen=True):
    """[topic, queues, perm, message count, attributes] a topic."""

    topics: list[tuple[str, int, int, int, dict[str, str]]]


class QueryMessageRequest(FrameOptions, frozen=True):
    """RocketMQ's own `queryMessage`, including hash collisions."""

    topic: str
    key: str
    max_messages: int
    begin_ms: int
    end_ms: int


class QueryMessageAnswer(FrameOptions, frozen=True):
    physical_offsets: list[int]
    index_last_update_timestamp_ms: int
    index_last_update_physical_offset: int


class ScanRequest(FrameOptions, frozen=True):
    """Scan the log without a key for records by properties and body.

    Starts at `physical_offset`; stops after `max_messages` hits, `max_bytes` of them as in PullRequest, or
    `max_scan_bytes` of log; `cursor` [physical offset] continues.
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
