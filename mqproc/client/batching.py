"""Which messages of a producer go together, and when: a topic's, when enough or old enough. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from mqproc.client.amounts import at_least_one, not_below_zero
from mqproc.client.columns import body_bytes
from mqproc.client.encoding import FRAME_MESSAGES_MAX, frame_key
from mqproc.message import Message

F = TypeVar("F")

# What a waiting message costs besides its body, roughly.
_MESSAGE_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """When a group is full, and how much may wait. Times in seconds, sizes in bytes."""

    linger_s: float
    messages: int
    bytes: int
    in_flight: int
    buffered_bytes: int

    @classmethod
    def of_user(
        cls,
        linger_ms: float,
        max_batch_messages: int,
        max_batch_bytes: int,
        max_in_flight: int,
        max_buffered_bytes: int,
    ) -> Limits:
        """What a producer was asked for. Raises BadRequestError for what would never send anything."""
        return cls(
            not_below_zero("linger_ms", linger_ms) / 1000,
            at_least_one("max_batch_messages", max_batch_messages),
            at_least_one("max_batch_bytes", max_batch_bytes),
            at_least_one("max_in_flight", max_in_flight),
            at_least_one("max_buffered_bytes", max_buffered_bytes),
        )


@dataclass(slots=True)
class Group(Generic[F]):
    """Messages of one frame with what resolves each of them."""

    due: float
    messages: list[Message] = field(default_factory=list)
    futures: list[F] = field(default_factory=list)
    size: int = 0


def cost_of(message: Message) -> int:
    """Bytes that a waiting message counts for."""
    body = message.body
    return (len(body) if type(body) is bytes else body_bytes(body)) + _MESSAGE_OVERHEAD_BYTES


def cost_of_all(messages: Sequence[Message]) -> int:
    return sum(map(cost_of, messages))


class Batcher(Generic[F]):
    """Messages waiting to become frames. `buffered_bytes` counts them until `done`, also those under way."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages_max = min(limits.messages, FRAME_MESSAGES_MAX)
        self._open: dict[Hashable, Group[F]] = {}
        self._full: deque[Group[F]] = deque()
        self.buffered_bytes = 0

    @property
    def empty(self) -> bool:
        """Whether nothing waits; messages under way may still count as buffered."""
        return not self._open and not self._full

    @property
    def messages(self) -> int:
        """How many messages wait."""
        return sum(len(group.messages) for group in (*self._full, *self._open.values()))

    def has_room(self, message: Message) -> bool:
        """A message larger than the whole room may come when nothing else is there."""
        return self.buffered_bytes == 0 or self.buffered_bytes + cost_of(message) <= self._limits.buffered_bytes

    def add(self, message: Message, future: F, now: float) -> bool:
        """Put a message to its group; True when the one who sends should look: a group is full or a new one began."""
        key = frame_key(message)
        group = self._open.get(key)
        began = group is None
        if group is None:
            group = self._open[key] = Group(now + self._limits.linger_s)
        cost = cost_of(message)
        group.messages.append(message)
        group.futures.append(future)
        group.size += cost
        self.buffered_bytes += cost
        if len(group.messages) < self._messages_max and group.size < self._limits.bytes:
            return began
        self._full.append(self._open.pop(key))
        return True

    def take(self, now: float, *, everything: bool = False) -> Group[F] | None:
        """The next group to send: a full one, one whose time has come, or any when `everything` shall go."""
        if self._full:
            return self._full.popleft()
        if not self._open:
            return None
        # Groups are kept in the order in which they began, so the first is due first.
        key, group = next(iter(self._open.items()))
        if everything or group.due <= now:
            return self._open.pop(key)
        return None

    def wait_s(self, now: float) -> float | None:
        """Seconds until `take` has something by time alone; None when nothing waits."""
        if self._full:
            return 0.0
        group = next(iter(self._open.values()), None)
        return None if group is None else max(0.0, group.due - now)

    def done(self, group: Group[F]) -> None:
        """A group's messages are stored or failed: they take no room any more."""
        self.buffered_bytes -= group.size
