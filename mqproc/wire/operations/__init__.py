"""Operations on the sockets: their numbers, and the options of each request and answer."""

from __future__ import annotations

import enum

from mqproc.wire.codec import FrameOptions
from mqproc.wire.operations import groups, log
from mqproc.wire.operations import groups as pop
from mqproc.wire.operations import groups as transactions


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


_TYPES: dict[Operation, tuple[type[FrameOptions], type[FrameOptions]]] = {
    Operation.PING: (Empty, Empty),
    Operation.APPEND: (log.AppendRequest, log.AppendAnswer),
    Operation.CREATE_TOPIC: (log.CreateTopicRequest, Empty),
    Operation.DELETE_TOPIC: (log.DeleteTopicRequest, Empty),
    Operation.APPEND_OWN: (log.AppendRequest, log.AppendAnswer),
    Operation.PULL: (log.PullRequest, log.PullAnswer),
    Operation.GET: (log.GetRequest, log.RecordsAnswer),
    Operation.BY_KEY: (log.ByKeyRequest, log.RecordsAnswer),
    Operation.RANGE: (log.RangeRequest, log.RecordsAnswer),
    Operation.COUNT: (log.CountRequest, log.CountAnswer),
    Operation.OFFSET_AT: (log.OffsetAtRequest, log.OffsetAnswer),
    Operation.QUEUES: (log.QueuesRequest, log.QueuesAnswer),
    Operation.TOPICS: (Empty, log.TopicsAnswer),
    Operation.QUERY_MESSAGE: (log.QueryMessageRequest, log.QueryMessageAnswer),
    Operation.SCAN: (log.ScanRequest, log.RecordsAnswer),
    Operation.STATS: (Empty, StatsAnswer),
    Operation.HEALTH: (Empty, HealthAnswer),
    Operation.GROUP_JOIN: (groups.GroupJoinRequest, groups.GroupAssignment),
    Operation.GROUP_HEARTBEAT: (groups.GroupHeartbeatRequest, groups.GroupAssignment),
    Operation.GROUP_RELEASE: (groups.GroupReleaseRequest, Empty),
    Operation.GROUP_LEAVE: (groups.GroupLeaveRequest, Empty),
    Operation.GROUP_COMMIT: (groups.GroupCommitRequest, groups.GroupCommitAnswer),
    Operation.GROUPS: (Empty, groups.GroupsAnswer),
    Operation.GROUP_INFO: (groups.GroupRequest, groups.GroupInfoAnswer),
    Operation.GROUP_RESET: (groups.GroupResetRequest, Empty),
    Operation.GROUP_SETTINGS: (groups.GroupSettingsRequest, Empty),
    Operation.GROUP_DELETE: (groups.GroupRequest, Empty),
    Operation.GROUP_NACK: (groups.GroupNackRequest, groups.GroupNackAnswer),
    Operation.GROUP_RESEND: (groups.GroupResendRequest, groups.GroupResendAnswer),
    Operation.GROUP_RECEIVE: (pop.GroupReceiveRequest, pop.GroupReceiveAnswer),
    Operation.GROUP_ACK: (pop.GroupAckRequest, pop.GroupAckAnswer),
    Operation.GROUP_INVISIBLE: (pop.GroupInvisibleRequest, pop.GroupInvisibleAnswer),
    Operation.TRANSACTION_END: (transactions.TransactionEndRequest, Empty),
    Operation.TRANSACTION_POLL: (transactions.TransactionPollRequest, transactions.TransactionPollAnswer),
    Operation.TRANSACTIONS: (transactions.TransactionsRequest, transactions.TransactionsAnswer),
    Operation.TRANSACTION_CHECK: (transactions.TransactionCheckRequest, transactions.TransactionCheckAnswer),
    Operation.STATUS: (Empty, StatusAnswer),
    Operation.RESTART_ROLE: (RoleRequest, Empty),
    Operation.STOP_GROUP: (Empty, Empty),
    Operation.RELOAD: (Empty, Empty),
    Operation.RUN_ROLE: (RunRequest, RunAnswer),
}
REQUESTS = {operation: request for operation, (request, _answer) in _TYPES.items()}
ANSWERS = {operation: answer for operation, (_request, answer) in _TYPES.items()}
