"""Options of receiving single messages (pop), for simple consumers, and acknowledgements."""

from __future__ import annotations

from typing import Final

from mqproc.wire.codec import FrameOptions
from mqproc.wire.operations.groups import LATEST

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
