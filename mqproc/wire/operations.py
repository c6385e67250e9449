"""Operations on the sockets: numbers, options of requests and answers, and their encoding.

Columns of a payload follow one another without padding, as little-endian numbers or raw bytes:

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
APPEND_MESSAGES  a MessagePack array of messages, each an array of the fields of Message; the writer makes the columns
   answer     physical_offsets i64[n] · queue_offsets i64[n] · queue_ids i32[n]
PULL, GET, BY_KEY, BY_TAG, RANGE, SCAN, GROUP_RECEIVE
   answer     whole CommitLog records, one after the other; with object_bytes > 0 an array of messages instead
              (kernels/pack.py), unless it would be longer than that or a text is not UTF-8
"""

from __future__ import annotations

import enum
import operator
import re
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError
from mqproc.util.arguments import BOOLEAN_TYPE_NAMES


class Operation(enum.IntEnum):
    """Operation numbers on the wire; a number is never reused."""

    PING = 1
    # writer
    APPEND = 16
    CREATE_TOPIC = 17
    DELETE_TOPIC = 18
    APPEND_OWN = 19
    APPEND_MESSAGES = 20
    # query
    PULL = 32
    GET = 33
    BY_KEY = 34
    RANGE = 35
    COUNT = 36
    OFFSET_AT = 37
    QUEUES = 38
    TOPICS = 39
    QUERY_MESSAGE = 40
    SCAN = 41
    STATS = 42
    HEALTH = 43
    BY_TAG = 44
    # query, for consumer groups
    GROUP_JOIN = 96
    GROUP_HEARTBEAT = 97
    GROUP_RELEASE = 98
    GROUP_LEAVE = 99
    GROUP_COMMIT = 100
    GROUPS = 101
    GROUP_INFO = 102
    GROUP_RESET = 103
    GROUP_SETTINGS = 104
    GROUP_DELETE = 105
    GROUP_NACK = 106
    GROUP_RESEND = 107
    GROUP_RECEIVE = 112
    GROUP_ACK = 113
    GROUP_INVISIBLE = 114
    # query, for transactions
    TRANSACTION_END = 120
    TRANSACTION_POLL = 121
    TRANSACTIONS = 122
    TRANSACTION_CHECK = 123
    # supervisor's control socket
    STATUS = 64
    RESTART_ROLE = 65
    STOP_GROUP = 66
    RELOAD = 67
    RUN_ROLE = 68


WRITER_OPERATIONS = frozenset(
    {
        Operation.PING,
        Operation.APPEND,
        Operation.CREATE_TOPIC,
        Operation.DELETE_TOPIC,
        Operation.APPEND_OWN,
        Operation.APPEND_MESSAGES,
    }
)


# Encoding of options


_SHOWN_MAX: Final = 64
# msgspec reports a field as `$[2]`, or deeper.
_PLACE = re.compile(r"(.*?)(?: - at `\$\[(\d+)\].*`)", re.DOTALL)
_decode = msgspec.msgpack.Decoder().decode


class FrameOptions(msgspec.Struct, array_like=True, frozen=True):
    """Base of all options: an array on the wire, so that fields added at the end have defaults."""


def _plain(value: Any) -> Any:
    """Convert numpy's numbers, booleans and strings for msgspec."""
    if isinstance(value, str):
        return str.__str__(value)
    return bool(value) if type(value).__name__ in BOOLEAN_TYPE_NAMES else operator.index(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_UNENCODABLE: Final = (TypeError, UnicodeError, OverflowError)
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder for options that are not of its type, or nested deeper than it follows."""


def encoded(options: FrameOptions) -> bytes:
    """Encode a request's options. Raises BadRequestError that names the first invalid field."""
    try:
        return _encode(options)
    except _UNENCODABLE:
        raise _not_encodable(options) from None


def _not_encodable(options: FrameOptions) -> BadRequestError:
    for name in options.__struct_fields__:
        value = getattr(options, name)
        try:
            _encode(value)
        except _UNENCODABLE as error:
            return BadRequestError(f"{name} = {_shown(value)} cannot be sent: {error}")
    return BadRequestError(f"options cannot be sent: {options!r}")


def not_decodable(operation: str, kind: type[FrameOptions], options: Any, error: Exception) -> BadRequestError:
    """The error for options that do not decode; names the field if known."""
    if isinstance(error, RecursionError):
        return BadRequestError(f"options of {operation}: the arrays and maps are nested too deeply")
    found = _PLACE.fullmatch(str(error))
    if found is None or int(found[2]) >= len(kind.__struct_fields__):
        return BadRequestError(f"options of {operation}: {error}")
    number = int(found[2])
    name = kind.__struct_fields__[number]
    return BadRequestError(f"options of {operation}: {name}{_value_at(options, number)}: {found[1]}")


def _value_at(options: Any, number: int) -> str:
    try:
        return f" = {_shown(_decode(options)[number])}"
    except UNDECODABLE:
        return ""  # The array is unreadable after this field, or the value is nested too deeply.


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


# Every socket, and the supervisor's


class ErrorAnswer(FrameOptions, frozen=True):
    """Options of a refusal."""

    code: str
    message: str
    details: dict[str, int] = {}


class Empty(FrameOptions, frozen=True):
    """No options."""


class StatsAnswer(FrameOptions, frozen=True):
    """Every word of the control file by name."""

    words: dict[str, int]


class HealthAnswer(FrameOptions, frozen=True):
    ready: bool
    read_only: bool
    dispatch_behind_bytes: int
    problems: list[str]


class RoleRequest(FrameOptions, frozen=True):
    role: str


class RunRequest(FrameOptions, frozen=True):
    """Attach a role to the caller's terminal until the role or the connection ends.

    The answer is sent when the role ends. The three paths name the caller's open files: `/proc/<its pid>/fd/0`. `debug`
    starts pdb before the role's loop.
    """

    role: str
    stdin: str
    stdout: str
    stderr: str
    debug: bool = False


class RunAnswer(FrameOptions, frozen=True):
    """`ended` is "exit code 0" or a signal's name."""

    ended: str
    clean: bool


class StopAnswer(FrameOptions, frozen=True):
    """`problems`: why the stop was not clean, so that the next start recovers; empty if it was."""

    problems: list[str] = []


class StatusAnswer(FrameOptions, frozen=True):
    """The supervisor's view; `roles` maps role to {"state", "pid", "incarnation", "restarts"}."""

    group: str
    store: str
    pid: int
    epoch: int
    started_ms: int
    roles: dict[str, dict[str, int | str]]


# Appends, topics and reads


QUEUE_ANY = -1
QUEUE_COLUMN = -2
COLUMN_ABSENT = -1
PAGE_BYTES_MAX = 1 << 30
"""Larger than any page: the client accepts whatever the server returns at once."""


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

    APPEND_MESSAGES takes the sizes, `has_…` and a queue column from its messages. It refuses, with nothing stored,
    messages of another topic or with properties, unique id or delay of their own; these are sent as columns.
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
    object_bytes: int = 0


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

    begin_ms ≤ time < end_ms: store times, or with `born_time` born times. `below` is a cursor: only records below this
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
    object_bytes: int = 0


class ByTagRequest(FrameOptions, frozen=True):
    """Find messages by tag; the other options are as in ByKeyRequest."""

    topic: str
    tag: str
    begin_ms: int = -(1 << 62)
    end_ms: int = 1 << 62
    max_messages: int = 64
    born_time: bool = False
    below: int = -1
    max_bytes: int = PAGE_BYTES_MAX
    object_bytes: int = 0


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
    object_bytes: int = 0


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
    """Queues of a topic; an empty name means all queues of the store.

    `consumed`: only those of the topic that consumers read.
    """

    topic: str = ""
    consumed: bool = False


class QueuesAnswer(FrameOptions, frozen=True):
    """[topic, queue id, min offset, max offset] a queue."""

    queues: list[tuple[str, int, int, int]]


class TopicsAnswer(FrameOptions, frozen=True):
    """[topic, queues, perm, message count, attributes, read queues, write queues] a topic."""

    topics: list[tuple[str, int, int, int, dict[str, str], int, int]]


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
    `max_scan_bytes` of log; `cursor` [physical offset] continues. `body_contains` has 1 MiB at most.
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
    object_bytes: int = 0


# Consumer groups; see `roles/groups` for the protocol


EARLIEST = "earliest"
LATEST = "latest"
AT_TIME = "time"
SESSION_MS_MIN: Final = 300
SESSION_MS_MAX: Final = 300_000
"""Range of a member's `session_timeout_ms`; values outside are clamped."""
Assigned = tuple[str, int, int, int]
"""Topic, queue id, epoch of the assignment, queue offset to begin at."""


class GroupJoinRequest(FrameOptions, frozen=True):
    """Join a group, or with `member_id` rejoin after a lost connection.

    Membership ends with the connection, or `session_timeout_ms` after the last request. `start` is where the group
    begins in topics without committed offsets: EARLIEST, LATEST, or AT_TIME at `start_ms`. `holding` lists the queues
    that the member still processes since before the loss: topic, queue id, epoch. `filter` is the text of the member's
    filter, which must equal that of other members; with `change_filter` those with another one are removed.
    """

    group: str
    topics: list[str]
    member_id: str = ""
    name: str = ""
    session_timeout_ms: int = 10_000
    start: str = LATEST
    start_ms: int = 0
    holding: list[tuple[str, int, int]] = []
    filter: str = "*"
    change_filter: bool = False


class GroupAssignment(FrameOptions, frozen=True):
    """A member's queues as of `generation`.

    With `changed` false they are unchanged, and `queues` is empty. The member sends its next request within
    `heartbeat_ms`.
    """

    member_id: str
    generation: int
    changed: bool = True
    queues: list[Assigned] = []
    heartbeat_ms: int = 0


class GroupHeartbeatRequest(FrameOptions, frozen=True):
    """Keep a membership alive. The answer is held until the assignment changes, or some time."""

    group: str
    member_id: str
    generation: int


class GroupReleaseRequest(FrameOptions, frozen=True):
    """Confirm that the member no longer uses queues revoked up to `generation`."""

    group: str
    member_id: str
    generation: int


class GroupLeaveRequest(FrameOptions, frozen=True):
    group: str
    member_id: str


class GroupCommitRequest(FrameOptions, frozen=True):
    """Commit offsets: everything below is consumed. [topic, queue id, epoch, offset].

    A member commits to its assigned queues, by their epoch. Epoch −1 is for clients that are not members; it is refused
    for a queue that is assigned to a member.
    """

    group: str
    offsets: list[Assigned]
    member_id: str = ""


class GroupCommitAnswer(FrameOptions, frozen=True):
    """[topic, queue id, error code, text] of refused commits; the others are stored."""

    refused: list[tuple[str, int, str, str]] = []


class GroupRequest(FrameOptions, frozen=True):
    group: str


class GroupsAnswer(FrameOptions, frozen=True):
    """[group, members, topics, lag, lag of the retry topic, waiting retries] per group."""

    groups: list[tuple[str, int, int, int, int, int]]


GroupQueueRow = tuple[str, int, int, int, int, int, str]
"""Topic, queue id, offset (−1: none), minimum, maximum, store time in ms of the message at the offset (−1: none),
member that has the queue ("": none).
"""


class GroupInfoAnswer(FrameOptions, frozen=True):
    """Settings, members [id, name, topics, queues, silent ms, pid, filter], and queues.

    `filters`: filter of the live consumers by topic.
    """

    group: str
    known: bool
    generation: int
    retry_max_times: int
    retry_queue_nums: int
    consume_enable: bool
    members: list[tuple[str, str, list[str], int, int, int, str]]
    queues: list[GroupQueueRow]
    filters: dict[str, str] = {}
    waiting_retries: int = 0


class GroupResetRequest(FrameOptions, frozen=True):
    """Set a group's offsets: [topic, queue id, offset]. Members continue from there.

    All or nothing; refused for an offset outside [minimum, maximum] of its queue. Durable when answered.
    """

    group: str
    offsets: list[tuple[str, int, int]]


class GroupSettingsRequest(FrameOptions, frozen=True):
    """Create a group, or change its settings; −1 leaves a setting unchanged."""

    group: str
    retry_max_times: int = -1
    retry_queue_nums: int = -1
    consume_enable: int = -1


class GroupNackRequest(FrameOptions, frozen=True):
    """Negative acknowledgement of messages: [topic, queue id, queue offset].

    Each is copied to the group's retry topic through a delay level, or to its dead letters. `delay_level` 0 derives the
    level from the number of deliveries, above 0 names it, below 0 makes it a dead letter at once. `max_times` ≥ 0
    replaces the group's own limit.
    """

    group: str
    messages: list[tuple[str, int, int]]
    delay_level: int = 0
    max_times: int = -1


class GroupNackAnswer(FrameOptions, frozen=True):
    """Per message: its delay level, 0 dead letter, −1 no longer in the log, −2 copy failed."""

    levels: list[int]


class GroupResendRequest(FrameOptions, frozen=True):
    """Deliver dead letters, by queue offset, to their group again as first deliveries."""

    group: str
    offsets: list[int]


class GroupResendAnswer(FrameOptions, frozen=True):
    """How many were sent; the others are no longer in the log."""

    sent: int


# Receiving single messages (pop), for simple consumers, and acknowledgements


RECEIVE_MS_MAX: Final = 60_000
"""Longest long poll; a client that waits longer repeats the request."""


class GroupReceiveRequest(FrameOptions, frozen=True):
    """Receive messages of the topics' queues, invisible to other receivers for `invisible_ms`.

    The answer waits for messages for up to `timeout_ms`. `start` as in GroupJoinRequest, `tags`, `sql` and `max_bytes`
    as in PullRequest; messages that do not match are skipped for the group. `change_filter` as in GroupJoinRequest.
    """

    group: str
    topics: list[str]
    max_messages: int = 32
    invisible_ms: int = 60_000
    timeout_ms: int = 0
    start: str = LATEST
    start_ms: int = 0
    tags: list[str] = []
    sql: str = ""
    max_bytes: int = 1 << 30
    change_filter: bool = False
    object_bytes: int = 0


class GroupReceiveAnswer(FrameOptions, frozen=True):
    """`count` records in the payload.

    A receipt handle is one of `handles`, a space, and the queue offset. The first handle is for the first
    CHECK_POINT_MESSAGES messages, and so on.
    """

    count: int
    handles: list[str] = []


class GroupAckRequest(FrameOptions, frozen=True):
    """Acknowledge messages: [topic, handle]."""

    group: str
    messages: list[tuple[str, str]]


class GroupAckAnswer(FrameOptions, frozen=True):
    """How many were still invisible; others are acknowledged, or redelivered."""

    accepted: int


class GroupInvisibleRequest(FrameOptions, frozen=True):
    """Keep a message invisible for `invisible_ms` from now."""

    group: str
    topic: str
    handle: str
    invisible_ms: int


class GroupInvisibleAnswer(FrameOptions, frozen=True):
    """The message's new handle."""

    handle: str


# Transactions; see `roles/transactions/README.md`


class TransactionEndRequest(FrameOptions, frozen=True):
    """Commit or roll back. `physical_offset`: of the half message, perhaps before checks.

    `from_check`: the answer to a check, or an operator's decision; it is never too late.
    """

    group: str
    topic: str
    transaction_id: str
    physical_offset: int
    commit: bool
    from_check: bool = False


class TransactionPollRequest(FrameOptions, frozen=True):
    """Wait for checks of a producer group's transactions, up to `timeout_ms`."""

    group: str
    max_messages: int = 32
    timeout_ms: int = 0


class TransactionPollAnswer(FrameOptions, frozen=True):
    """`count` half messages as records in the payload."""

    count: int


class TransactionsRequest(FrameOptions, frozen=True):
    """The oldest open transactions, of a producer group if named, with the given ids if any."""

    group: str = ""
    ids: list[str] = []
    max_transactions: int = 1000


TransactionRow = tuple[str, str, str, str, int, int, int, int, int, int]
"""Transaction id, message id of the half message, group, topic, physical offset, size, born time and store time in ms,
checks so far, time of the next check in ms.
"""


class TransactionsAnswer(FrameOptions, frozen=True):
    """`open`: their total. `producers`: waiting for checks, of the named group or of all."""

    open: int
    producers: int
    transactions: list[TransactionRow]


class TransactionCheckRequest(FrameOptions, frozen=True):
    """Check transactions now, by physical offset of their half messages; counts as a check."""

    physical_offsets: list[int]


class TransactionCheckAnswer(FrameOptions, frozen=True):
    """Number of open transactions among them."""

    checked: int


_TYPES: dict[Operation, tuple[type[FrameOptions], type[FrameOptions]]] = {
    Operation.PING: (Empty, Empty),
    Operation.APPEND: (AppendRequest, AppendAnswer),
    Operation.CREATE_TOPIC: (CreateTopicRequest, Empty),
    Operation.DELETE_TOPIC: (DeleteTopicRequest, Empty),
    Operation.APPEND_OWN: (AppendRequest, AppendAnswer),
    Operation.APPEND_MESSAGES: (AppendRequest, AppendAnswer),
    Operation.PULL: (PullRequest, PullAnswer),
    Operation.GET: (GetRequest, RecordsAnswer),
    Operation.BY_KEY: (ByKeyRequest, RecordsAnswer),
    Operation.BY_TAG: (ByTagRequest, RecordsAnswer),
    Operation.RANGE: (RangeRequest, RecordsAnswer),
    Operation.COUNT: (CountRequest, CountAnswer),
    Operation.OFFSET_AT: (OffsetAtRequest, OffsetAnswer),
    Operation.QUEUES: (QueuesRequest, QueuesAnswer),
    Operation.TOPICS: (Empty, TopicsAnswer),
    Operation.QUERY_MESSAGE: (QueryMessageRequest, QueryMessageAnswer),
    Operation.SCAN: (ScanRequest, RecordsAnswer),
    Operation.STATS: (Empty, StatsAnswer),
    Operation.HEALTH: (Empty, HealthAnswer),
    Operation.GROUP_JOIN: (GroupJoinRequest, GroupAssignment),
    Operation.GROUP_HEARTBEAT: (GroupHeartbeatRequest, GroupAssignment),
    Operation.GROUP_RELEASE: (GroupReleaseRequest, Empty),
    Operation.GROUP_LEAVE: (GroupLeaveRequest, Empty),
    Operation.GROUP_COMMIT: (GroupCommitRequest, GroupCommitAnswer),
    Operation.GROUPS: (Empty, GroupsAnswer),
    Operation.GROUP_INFO: (GroupRequest, GroupInfoAnswer),
    Operation.GROUP_RESET: (GroupResetRequest, Empty),
    Operation.GROUP_SETTINGS: (GroupSettingsRequest, Empty),
    Operation.GROUP_DELETE: (GroupRequest, Empty),
    Operation.GROUP_NACK: (GroupNackRequest, GroupNackAnswer),
    Operation.GROUP_RESEND: (GroupResendRequest, GroupResendAnswer),
    Operation.GROUP_RECEIVE: (GroupReceiveRequest, GroupReceiveAnswer),
    Operation.GROUP_ACK: (GroupAckRequest, GroupAckAnswer),
    Operation.GROUP_INVISIBLE: (GroupInvisibleRequest, GroupInvisibleAnswer),
    Operation.TRANSACTION_END: (TransactionEndRequest, Empty),
    Operation.TRANSACTION_POLL: (TransactionPollRequest, TransactionPollAnswer),
    Operation.TRANSACTIONS: (TransactionsRequest, TransactionsAnswer),
    Operation.TRANSACTION_CHECK: (TransactionCheckRequest, TransactionCheckAnswer),
    Operation.STATUS: (Empty, StatusAnswer),
    Operation.RESTART_ROLE: (RoleRequest, Empty),
    Operation.STOP_GROUP: (Empty, StopAnswer),
    Operation.RELOAD: (Empty, Empty),
    Operation.RUN_ROLE: (RunRequest, RunAnswer),
}
REQUESTS = {operation: request for operation, (request, _answer) in _TYPES.items()}
ANSWERS = {operation: answer for operation, (_request, answer) in _TYPES.items()}
