"""Options of receiving messages one by one, as simple consumers do, and of their acknowledgements."""

from __future__ import annotations

from typing import Final

from mqproc.wire.codec import Options
from mqproc.wire.operations.groups import LATEST

RECEIVE_MS_MAX: Final = 60_000
"""So long one receive is held; who wants to wait for longer asks again."""


class GroupReceiveRequest(Options, frozen=True):
    """Get messages that nobody else of the group gets for `invisible_ms`, of one of the topics' queues.

    The answer is held until some come, `timeout_ms` at most. `start` as in GroupJoinRequest, `tags`, `sql` and
    `max_bytes` as in PullRequest; the group goes past what they do not let pass.
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


class GroupReceiveAnswer(Options, frozen=True):
    """`count` records in the payload. A handle is one of `handles`, a space, and the message's queue offset.

    The first one is for the first CHECK_POINT_MESSAGES of the messages, and so on.
    """

    count: int
    handles: list[str] = []


class GroupAckRequest(Options, frozen=True):
    """Messages that are done: [topic, handle]."""

    group: str
    messages: list[tuple[str, str]]


class GroupAckAnswer(Options, frozen=True):
    """How many were still the receiver's; the others are done already, or come again to somebody."""

    accepted: int


class GroupInvisibleRequest(Options, frozen=True):
    """Nobody else gets a message for `invisible_ms` from now on."""

    group: str
    topic: str
    handle: str
    invisible_ms: int


class GroupInvisibleAnswer(Options, frozen=True):
    """The message's handle from now on."""

    handle: str
