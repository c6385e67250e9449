"""The filter of a consumer group: all its live consumers have the same filter in a topic.

Messages that a consumer's filter rejects are done for the whole group, so a consumer with another filter would never
get them. It is refused, unless it asks to change the group's filter.

A simple consumer has no membership: it counts as live from its last receive until the invisible time of that, or
LIVE_NS, is over, or its process has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from mqproc.errors import FilterMismatchError
from mqproc.io.store_io import Clock
from mqproc.roles.groups.members import GroupMembers, MemberSession
from mqproc.topic_names import retry_topic
from mqproc.util.procfs import is_running

LIVE_NS: Final = 60_000_000_000
UNKNOWN_PID: Final = 0
"""Process of a receiver in another PID namespace."""


@dataclass(slots=True)
class _Receivers:
    """Simple consumers of a group and topic: filter, and until when each process counts as live."""

    filter: str
    live_until_ns: dict[int, int] = field(default_factory=dict)

    def live(self, now_ns: int, is_running: Callable[[int], bool]) -> Iterator[int]:
        """Processes that count as live."""
        for pid, until_ns in self.live_until_ns.items():
            if now_ns < until_ns and (pid == UNKNOWN_PID or is_running(pid)):
                yield pid

    def forget_ended(self, now_ns: int, is_running: Callable[[int], bool]) -> None:
        """Forget processes that are no longer live."""
        self.live_until_ns = {pid: self.live_until_ns[pid] for pid in self.live(now_ns, is_running)}


class GroupFilters:
    """Filters of the live consumers of all groups."""

    def __init__(
        self, clock: Clock, groups: Mapping[str, GroupMembers], is_running: Callable[[int], bool] = is_running
    ) -> None:
        self._clock = clock
        self._groups = groups
        self._is_running = is_running
        self._receivers: dict[tuple[str, str], _Receivers] = {}

    def check(self, group: str, topics: Iterable[str], filter: str, member_id: str = "") -> None:
        """Raise FilterMismatchError if a live consumer has another filter in one of the topics."""
        for topic in topics:
            found = self._receivers.get((group, topic))
            # The processes are looked up only for another filter: each receive comes here.
            if found is not None and found.filter != filter and self._of_receivers(group, topic):
                raise _mismatch(group, topic, filter, found.filter, "a simple consumer")
        for other, topic in self.other_members(group, topics, filter):
            if other.member_id != member_id:
                raise _mismatch(group, topic, filter, other.filter, f"member {other.name or other.member_id}")

    def other_members(self, group: str, topics: Iterable[str], filter: str) -> list[tuple[MemberSession, str]]:
        """Members with another filter in one of the topics, with that topic."""
        members = self._groups.get(group)
        if members is None:
            return []
        # Retries are not filtered.
        asked = set(topics) - {retry_topic(group)}
        others = [member for member in members.members.values() if member.filter != filter]
        return [(member, min(shared)) for member in others if (shared := asked.intersection(member.topics))]

    def received(self, group: str, topic: str, filter: str, pid: int, wait_ns: int) -> None:
        """Record a simple consumer that receives and may not ask again for `wait_ns`."""
        found = self._receivers.get((group, topic))
        if found is None or found.filter != filter:
            found = self._receivers[group, topic] = _Receivers(filter)
        found.live_until_ns[pid] = self._clock.monotonic_ns() + max(LIVE_NS, wait_ns)

    def of_group(self, group: str) -> dict[str, str]:
        """The filter of live consumers by topic."""
        members = self._groups.get(group)
        found = {} if members is None else {t: each.filter for each in members.members.values() for t in each.topics}
        found.pop(retry_topic(group), None)
        for name, topic in self._receivers:
            if name == group and (filter := self._of_receivers(name, topic)):
                found[topic] = filter
        return found

    def forget(self, group: str, topics: Iterable[str]) -> None:
        """Forget the simple consumers of topics."""
        for topic in topics:
            self._receivers.pop((group, topic), None)

    def forget_group(self, group: str) -> None:
        """Forget the simple consumers of a deleted group."""
        self.forget(group, [topic for name, topic in self._receivers if name == group])

    def forget_ended(self) -> None:
        """Forget simple consumers that are no longer live."""
        now_ns, is_running = self._clock.monotonic_ns(), functools.cache(self._is_running)
        for key, found in list(self._receivers.items()):
            found.forget_ended(now_ns, is_running)
            if not found.live_until_ns:
                del self._receivers[key]

    def _of_receivers(self, group: str, topic: str) -> str:
        """Filter of the live simple consumers, "" without any."""
        found = self._receivers.get((group, topic))
        if found is None or next(found.live(self._clock.monotonic_ns(), self._is_running), None) is None:
            return ""
        return found.filter


def _mismatch(group: str, topic: str, filter: str, found: str, consumer: str) -> FilterMismatchError:
    return FilterMismatchError(
        f"filter {filter!r} in topic {topic!r}: {consumer} of group {group} has {found!r}, and a message that one "
        "filter rejects is done for the whole group. Use another group, stop the group's consumers first, or give "
        "change_filter=True, which ends those with another filter"
    )
