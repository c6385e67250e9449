"""Subscriptions: the checked arguments of consumers, and the requests that they make."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mqproc.client.group_requests import join, receive, start_of
from mqproc.client.message_fields import plain_text
from mqproc.client.requests import Call, pull, pull_request
from mqproc.errors import BadRequestError, TopicNotFoundError
from mqproc.filters.selection import chosen, is_sql
from mqproc.paths import checked_path
from mqproc.topic_names import check_group, check_topic, filter_text, retry_topic
from mqproc.types import Filter, PullResult, SqlFilter, StoredMessage, TagFilter
from mqproc.util.arguments import Time, milliseconds, moment_after, true_or_false
from mqproc.util.user_object import UserObject
from mqproc.wire.operations import (
    AT_TIME,
    LATEST,
    RECEIVE_MS_MAX,
    SESSION_MS_MAX,
    SESSION_MS_MIN,
    GroupAssignment,
    GroupJoinRequest,
    GroupReceiveRequest,
)

SESSION_TIMEOUT_S: Final = 10.0
CONSUMER_PULL_MESSAGES: Final = 2048
_BEYOND_EVERY_QUEUE: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topics and filter of a consumer, and where its group begins in topics without progress.

    `change_filter`: consumers of the group with another filter are ended.
    """

    group: str
    topics: tuple[str, ...]
    name: str
    session_timeout_ms: int
    start: str
    start_ms: int
    filter: Filter | None = None
    change_filter: bool = False

    def join(self, member_id: str, holding: list[tuple[str, int, int]]) -> Call[GroupAssignment]:
        """A request to join the group; `member_id` names the member that joins again."""
        request = GroupJoinRequest(
            self.group,
            list(self.topics),
            member_id,
            self.name,
            self.session_timeout_ms,
            self.start,
            self.start_ms,
            holding,
            filter_text(*chosen("", self.filter)),
            # A member that was removed for its filter must not remove its successors.
            self.change_filter and not member_id,
        )
        return join(request)

    def among(self, topics: str | Sequence[str]) -> tuple[str, ...]:
        """Some of its topics. Raises TopicNotFoundError for another topic, such as a mistyped one."""
        found = named(topics)
        for topic in found:
            if topic not in (*self.topics, retry_topic(self.group)):
                raise TopicNotFoundError(f"a consumer of group {self.group} does not read topic {topic!r}")
        return found


class OfGroup(UserObject):
    """The `repr` and `dir` of consumers."""

    _subscription: Subscription
    _internal = frozenset({"start"})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._subscription.group!r}, {list(self._subscription.topics)!r})"


def named(topics: str | Sequence[str]) -> tuple[str, ...]:
    """A topic, or several, as a tuple. Raises BadRequestError."""
    try:
        return tuple(map(plain_text, (topics,) if isinstance(topics, str) else topics))
    except TypeError:
        raise BadRequestError(f"topics = {topics!r}: give a topic, or a list of them") from None


def subscription(
    group: str,
    topics: str | Sequence[str],
    name: str,
    session_timeout: float,
    start: Time,
    filter: Filter | str | None = None,
    change_filter: bool = False,
) -> Subscription:
    """Check a consumer's arguments. Raises BadRequestError, BadTopicError, FilterSyntaxError."""
    check_group(group)
    checked = named(topics)
    if not checked:
        raise BadRequestError(f"a consumer of group {group!r} names no topic")
    for topic in checked:
        check_topic(topic)
    if name is not None and not isinstance(name, str):
        raise BadRequestError(f"name = {repr(name)[:64]} is no text")
    name = plain_text(name) or f"{socket.gethostname()}@{os.getpid()}"
    changes = true_or_false("change_filter", change_filter)
    session_ms, begin = _session_ms(session_timeout), start_of(start)
    return Subscription(plain_text(group), checked, name, session_ms, *begin, filter_of(filter), changes)


def _session_ms(session_timeout: float) -> int:
    found = milliseconds("session_timeout", session_timeout)
    if not SESSION_MS_MIN <= found <= SESSION_MS_MAX:
        low, high = SESSION_MS_MIN / 1000, SESSION_MS_MAX / 1000
        raise BadRequestError(f"session_timeout = {session_timeout!r} is out of range: from {low:g} to {high:g} s")
    return found


def filter_of(filter: Filter | str | None) -> Filter | None:
    """Check a filter; a text is short for a TagFilter. The server parses SQL.

    Raises FilterSyntaxError, and BadRequestError for a text that is SQL: as tags it would select nothing.
    """
    if isinstance(filter, str) and is_sql(filter):
        raise BadRequestError(
            f"filter = {filter[:64]!r} is SQL92: give an SqlFilter of this text, or a TagFilter if it is a tag"
        )
    found = TagFilter(filter) if isinstance(filter, str) else filter
    chosen("", found)
    return found


def trials_of(subscription: Subscription) -> list[Call[PullResult]]:
    """Requests that check an SQL92 filter before a consumer joins: an empty pull.

    A member with an invalid filter would get queues without serving them.
    """
    if not isinstance(subscription.filter, SqlFilter):
        return []
    selection = chosen("", subscription.filter)
    return [pull(pull_request(subscription.topics[0], 0, _BEYOND_EVERY_QUEUE, 1, 1, selection))]


def broadcast_path(store: Path, group: str, name: str, offsets_path: str | Path | None, *, broadcast: bool) -> str:
    """File of a broadcast consumer's progress in the user's home, or "".

    A consumer without a name finds its progress again as well, in any process. Raises BadRequestError.
    """
    if not true_or_false("broadcast", broadcast):
        if offsets_path is not None:
            raise BadRequestError("offsets_path is for broadcast=True: a member's progress is its group's")
        return ""
    if offsets_path is not None:
        return str(checked_path(offsets_path, "offsets_path"))
    if "/" in name or "\0" in name:
        raise BadRequestError(f"name {name[:64]!r} can be no file's: give an offsets_path, or a name without it")
    place = hashlib.sha256(os.fsencode(store)).hexdigest()[:16]
    try:
        home = Path.home()
    except RuntimeError:  # The user may have no name, as in a container.
        raise BadRequestError(
            "this user has no home, where a broadcast consumer's progress lies: give an offsets_path"
        ) from None
    name = plain_text(name) or socket.gethostname()
    return str(home / ".mqproc" / "offsets" / place / f"{plain_text(group)}@{name}.json")


# Receives of simple consumers

SIMPLE_RECEIVE_MESSAGES: Final = 32
INVISIBLE_S: Final = 60.0
HANDLES_BYTES: Final = 8 << 10
"""Room in an answer for the handles of its messages."""
AGAIN_S: Final = 0.1
"""Pause before a receive that was answered too early is repeated."""


class ReceiveWait:
    """Remaining time of one receive.

    A role holds a request for a minute at most, and answers it when it ends.
    """

    def __init__(self, timeout: float, before_ms: int | None) -> None:
        """`before_ms`: start of the consumer's last receive that was answered, None for none."""
        milliseconds("timeout", timeout)
        self._deadline = moment_after("timeout", timeout)
        self.left_s = float(timeout)
        self.is_again = before_ms is not None
        self.begun_ms = time.time_ns() // 1_000_000
        self.since_ms = self.begun_ms + 1 if before_ms is None else before_ms
        """Messages of the first millisecond may have been stored before; not so in a topic that did not exist."""

    @property
    def held_s(self) -> float:
        """How long the server may hold the next request."""
        return min(self.left_s, RECEIVE_MS_MAX / 1000)

    def is_over(self) -> bool:
        """Update the remaining time; True when less than a millisecond is left."""
        self.left_s = self._deadline - time.monotonic()
        self.is_again = True
        return self.left_s < 0.001

    @property
    def pause_s(self) -> float:
        return min(self.left_s, AGAIN_S)


def receive_call(
    subscription: Subscription,
    max_bytes: int,
    max_messages: int,
    invisible_duration: float,
    waiting: ReceiveWait,
) -> Call[list[StoredMessage]]:
    """The next request of a simple consumer's receive.

    A repeated one begins at the time when the wait, or the last receive, began: "latest" would skip messages that a
    topic which did not exist has got since, and only the lost server knew to whom they belong.
    """
    times = milliseconds("invisible_duration", invisible_duration), milliseconds("timeout", waiting.held_s)
    request = GroupReceiveRequest(
        subscription.group,
        list(subscription.topics),
        max_messages,
        *times,
        subscription.start,
        subscription.start_ms,
        *chosen("", subscription.filter),
        max(1, max_bytes - HANDLES_BYTES),
        # Once: a consumer whose filter was changed must not change it back.
        subscription.change_filter and not waiting.is_again,
        object_bytes=max_bytes,
    )
    call = receive(request)
    if subscription.start == LATEST:
        since = msgspec.structs.replace(request, start=AT_TIME, start_ms=waiting.since_ms)
        call.again = receive(since)
    return call.again or call if waiting.is_again else call
