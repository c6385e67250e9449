"""Options of consumer group operations; see `roles/groups` for the protocol."""

from __future__ import annotations

from typing import Final

from mqproc.wire.codec import FrameOptions

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
    that the member still processes since before the loss: topic, queue id, epoch.
    """

    group: str
    topics: list[str]
    member_id: str = ""
    name: str = ""
    session_timeout_ms: int = 10_000
    start: str = LATEST
    start_ms: int = 0
    holding: list[tuple[str, int, int]] = []


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
    """[group, members, topics, lag, lag in the retry topic] per group."""

    groups: list[tuple[str, int, int, int, int]]


GroupQueueRow = tuple[str, int, int, int, int, int, str]
"""Topic, queue id, offset (−1: none), minimum, maximum, store time in ms of the message at the offset (−1: none),
member that has the queue ("": none).
"""


class GroupInfoAnswer(FrameOptions, frozen=True):
    """Settings, members [id, name, topics, queues, ms since last request, pid], and queues."""

    group: str
    known: bool
    generation: int
    retry_max_times: int
    retry_queue_nums: int
    consume_enable: bool
    members: list[tuple[str, str, list[str], int, int, int]]
    queues: list[GroupQueueRow]


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


# Options of receiving single messages (pop), for simple consumers, and acknowledgements.


RECEIVE_MS_MAX: Final = 60_000
"""Longest long poll; a client that waits longer repeats the request."""


class GroupReceiveRequest(FrameOptions, frozen=True):
    """Receive messages of the topics' queues, invisible to other receivers for `invisible_ms`.

    The answer waits for messages for up to `timeout_ms`. `start` as in GroupJoinRequest, `tags`, `sql` and `max_bytes`
    as in PullRequest; messages that do not match are skipped for the group.
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


# Options of transaction operations; see `roles/transactions/README.md`.


class TransactionEndRequest(FrameOptions, frozen=True):
    """Commit or roll back. `physical_offset` is that of the half message, perhaps before checks.

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
