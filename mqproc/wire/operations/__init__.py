"""Operations on the sockets: their numbers, and the options of each request and answer."""

from __future__ import annotations

import enum

from mqproc.wire.codec import FrameOptions
from mqproc.wire.operations.groups import (
    GroupAssignment,
    GroupCommitAnswer,
    GroupCommitRequest,
    GroupHeartbeatRequest,
    GroupInfoAnswer,
    GroupJoinRequest,
    GroupLeaveRequest,
    GroupNackAnswer,
    GroupNackRequest,
    GroupReleaseRequest,
    GroupRequest,
    GroupResendAnswer,
    GroupResendRequest,
    GroupResetRequest,
    GroupsAnswer,
    GroupSettingsRequest,
)
from mqproc.wire.operations.log import (
    AppendAnswer,
    AppendRequest,
    ByKeyRequest,
    CountAnswer,
    CountRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    GetRequest,
    OffsetAnswer,
    OffsetAtRequest,
    PullAnswer,
    PullRequest,
    QueryMessageAnswer,
    QueryMessageRequest,
    QueuesAnswer,
    QueuesRequest,
    RangeRequest,
    RecordsAnswer,
    ScanRequest,
    TopicsAnswer,
)
from mqproc.wire.operations.pop import (
    GroupAckAnswer,
    GroupAckRequest,
    GroupInvisibleAnswer,
    GroupInvisibleRequest,
    GroupReceiveAnswer,
    GroupReceiveRequest,
)
from mqproc.wire.operations.transactions import (
    TransactionCheckAnswer,
    TransactionCheckRequest,
    TransactionEndRequest,
    TransactionPollAnswer,
    TransactionPollRequest,
    TransactionsAnswer,
    TransactionsRequest,
)


class Operation(enum.IntEnum):
    """Operation numbers on the wire; a number is never reused."""

    PING = 1
    # writer
    APPEND = 16
    CREATE_TOPIC = 17
    DELETE_TOPIC = 18
    APPEND_OWN = 19
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
    {Operation.PING, Operation.APPEND, Operation.CREATE_TOPIC, Operation.DELETE_TOPIC, Operation.APPEND_OWN}
)


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


class StatusAnswer(FrameOptions, frozen=True):
    """The supervisor's view; `roles` maps role to {"state", "pid", "incarnation", "restarts"}."""

    group: str
    store: str
    pid: int
    epoch: int
    started_ms: int
    roles: dict[str, dict[str, int | str]]


REQUESTS: dict[Operation, type[FrameOptions]] = {
    Operation.PING: Empty,
    Operation.APPEND: AppendRequest,
    Operation.CREATE_TOPIC: CreateTopicRequest,
    Operation.DELETE_TOPIC: DeleteTopicRequest,
    Operation.APPEND_OWN: AppendRequest,
    Operation.PULL: PullRequest,
    Operation.GET: GetRequest,
    Operation.BY_KEY: ByKeyRequest,
    Operation.RANGE: RangeRequest,
    Operation.COUNT: CountRequest,
    Operation.OFFSET_AT: OffsetAtRequest,
    Operation.QUEUES: QueuesRequest,
    Operation.TOPICS: Empty,
    Operation.QUERY_MESSAGE: QueryMessageRequest,
    Operation.SCAN: ScanRequest,
    Operation.STATS: Empty,
    Operation.HEALTH: Empty,
    Operation.GROUP_JOIN: GroupJoinRequest,
    Operation.GROUP_HEARTBEAT: GroupHeartbeatRequest,
    Operation.GROUP_RELEASE: GroupReleaseRequest,
    Operation.GROUP_LEAVE: GroupLeaveRequest,
    Operation.GROUP_COMMIT: GroupCommitRequest,
    Operation.GROUPS: Empty,
    Operation.GROUP_INFO: GroupRequest,
    Operation.GROUP_RESET: GroupResetRequest,
    Operation.GROUP_SETTINGS: GroupSettingsRequest,
    Operation.GROUP_DELETE: GroupRequest,
    Operation.GROUP_NACK: GroupNackRequest,
    Operation.GROUP_RESEND: GroupResendRequest,
    Operation.GROUP_RECEIVE: GroupReceiveRequest,
    Operation.GROUP_ACK: GroupAckRequest,
    Operation.GROUP_INVISIBLE: GroupInvisibleRequest,
    Operation.TRANSACTION_END: TransactionEndRequest,
    Operation.TRANSACTION_POLL: TransactionPollRequest,
    Operation.TRANSACTIONS: TransactionsRequest,
    Operation.TRANSACTION_CHECK: TransactionCheckRequest,
    Operation.STATUS: Empty,
    Operation.RESTART_ROLE: RoleRequest,
    Operation.STOP_GROUP: Empty,
    Operation.RELOAD: Empty,
    Operation.RUN_ROLE: RunRequest,
}


ANSWERS: dict[Operation, type[FrameOptions]] = {
    Operation.PING: Empty,
    Operation.APPEND: AppendAnswer,
    Operation.CREATE_TOPIC: Empty,
    Operation.DELETE_TOPIC: Empty,
    Operation.APPEND_OWN: AppendAnswer,
    Operation.PULL: PullAnswer,
    Operation.GET: RecordsAnswer,
    Operation.BY_KEY: RecordsAnswer,
    Operation.RANGE: RecordsAnswer,
    Operation.COUNT: CountAnswer,
    Operation.OFFSET_AT: OffsetAnswer,
    Operation.QUEUES: QueuesAnswer,
    Operation.TOPICS: TopicsAnswer,
    Operation.QUERY_MESSAGE: QueryMessageAnswer,
    Operation.SCAN: RecordsAnswer,
    Operation.STATS: StatsAnswer,
    Operation.HEALTH: HealthAnswer,
    Operation.GROUP_JOIN: GroupAssignment,
    Operation.GROUP_HEARTBEAT: GroupAssignment,
    Operation.GROUP_RELEASE: Empty,
    Operation.GROUP_LEAVE: Empty,
    Operation.GROUP_COMMIT: GroupCommitAnswer,
    Operation.GROUPS: GroupsAnswer,
    Operation.GROUP_INFO: GroupInfoAnswer,
    Operation.GROUP_RESET: Empty,
    Operation.GROUP_SETTINGS: Empty,
    Operation.GROUP_DELETE: Empty,
    Operation.GROUP_NACK: GroupNackAnswer,
    Operation.GROUP_RESEND: GroupResendAnswer,
    Operation.GROUP_RECEIVE: GroupReceiveAnswer,
    Operation.GROUP_ACK: GroupAckAnswer,
    Operation.GROUP_INVISIBLE: GroupInvisibleAnswer,
    Operation.TRANSACTION_END: Empty,
    Operation.TRANSACTION_POLL: TransactionPollAnswer,
    Operation.TRANSACTIONS: TransactionsAnswer,
    Operation.TRANSACTION_CHECK: TransactionCheckAnswer,
    Operation.STATUS: StatusAnswer,
    Operation.RESTART_ROLE: Empty,
    Operation.STOP_GROUP: Empty,
    Operation.RELOAD: Empty,
    Operation.RUN_ROLE: RunAnswer,
}
