"""Options of the operations on consumer groups; `process/README.md` tells how members and the query role talk."""

from __future__ import annotations

from typing import Final

from mqproc.wire.codec import Options

EARLIEST = "earliest"


LATEST = "latest"


AT_TIME = "time"


SESSION_MS_MIN: Final = 300


SESSION_MS_MAX: Final = 300_000
"""Of a member's `session_timeout_ms`; one out of this range is taken for the nearest in it."""


Assigned = tuple[str, int, int, int]
"""Topic, queue id, the assignment's epoch, and the queue offset to begin at."""


class GroupJoinRequest(Options, frozen=True):
    """Become a member, or with `member_id` be one again after a loss of the connection.

    The member lives as long as the connection does and a request of its comes within `session_timeout_ms`. `start`
    says where the group begins in topics that it has no progress in: EARLIEST, LATEST, or AT_TIME at `start_ms`.
    `holding`: what the member works on since before the loss: topic, queue id, epoch.
    """

    group: str
    topics: list[str]
    member_id: str = ""
    name: str = ""
    session_timeout_ms: int = 10_000
    start: str = LATEST
    start_ms: int = 0
    holding: list[tuple[str, int, int]] = []


class GroupAssignment(Options, frozen=True):
    """What a member has to work on as of `generation`. `changed` false: it is what it was, and `queues` is empty.

    Ask again within `heartbeat_ms`.
    """

    member_id: str
    generation: int
    changed: bool = True
    queues: list[Assigned] = []
    heartbeat_ms: int = 0


class GroupHeartbeatRequest(Options, frozen=True):
    """Say that a member lives. The answer is held until its queues are others than at `generation`, or a while."""

    group: str
    member_id: str
    generation: int


class GroupReleaseRequest(Options, frozen=True):
    """The member does nothing any more with the queues that were taken from it up to `generation`."""

    group: str
    member_id: str
    generation: int


class GroupLeaveRequest(Options, frozen=True):
    group: str
    member_id: str


class GroupCommitRequest(Options, frozen=True):
    """Everything below the offsets is consumed: [topic, queue id, epoch, offset].

    A member commits to what it was assigned, by its epoch. Epoch −1 is for who is no member: it is refused for a queue
    that a member has.
    """

    group: str
    offsets: list[Assigned]
    member_id: str = ""


class GroupCommitAnswer(Options, frozen=True):
    """[topic, queue id, error's code, text] of what was refused; the others were stored."""

    refused: list[tuple[str, int, str, str]] = []


class GroupRequest(Options, frozen=True):
    group: str


class GroupsAnswer(Options, frozen=True):
    """[group, members, topics, messages not consumed yet, messages of them in the retry topic] a group."""

    groups: list[tuple[str, int, int, int, int]]


GroupQueueRow = tuple[str, int, int, int, int, int, str]
"""Topic, queue id, offset (−1: none yet), minimum, maximum, store time in ms of the message at the offset (−1: none),
the member that has the queue ("": nobody)."""


class GroupInfoAnswer(Options, frozen=True):
    """A group's settings, members [id, name, topics, queues, ms since its last request, pid] and queues."""

    group: str
    known: bool
    generation: int
    retry_max_times: int
    retry_queue_nums: int
    consume_enable: bool
    members: list[tuple[str, str, list[str], int, int, int]]
    queues: list[GroupQueueRow]


class GroupResetRequest(Options, frozen=True):
    """Begin at these offsets, whatever was before: [topic, queue id, offset]. Members go on from there.

    All or nothing; refused for an offset outside [minimum, maximum] of its queue. Durable when it is answered.
    """

    group: str
    offsets: list[tuple[str, int, int]]


class GroupSettingsRequest(Options, frozen=True):
    """Make a group, or change its settings; −1 leaves one as it is."""

    group: str
    retry_max_times: int = -1
    retry_queue_nums: int = -1
    consume_enable: int = -1


class GroupNackRequest(Options, frozen=True):
    """Messages that the group could not consume, by place: [topic, queue id, queue offset].

    Each is sent to the group's retry topic by way of the delay levels, or to its dead letters. `delay_level` 0: the
    level follows from how often it was delivered; above: this one; below: it is a dead letter at once.
    `max_times` ≥ 0 counts instead of the group's own number.
    """

    group: str
    messages: list[tuple[str, int, int]]
    delay_level: int = 0
    max_times: int = -1


class GroupNackAnswer(Options, frozen=True):
    """What became of each message: the delay level it waits in, 0 for a dead letter, −1 when it is gone from the log,
    −2 when it could not be copied now."""

    levels: list[int]


class GroupResendRequest(Options, frozen=True):
    """Dead letters, by queue offset, to be delivered to their group again, as if for the first time."""

    group: str
    offsets: list[int]


class GroupResendAnswer(Options, frozen=True):
    """How many were sent; the others are gone from the log."""

    sent: int
