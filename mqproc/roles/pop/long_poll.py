"""Receives with nothing to give: held until messages come, their time is over, or their client is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mqproc.errors import MqprocError
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS, unwritable_error

if TYPE_CHECKING:
    from mqproc.io.clock import Clock
    from mqproc.roles.request_limits import PendingRequest

_NEVER_NS: Final = 1 << 62


@dataclass(slots=True)
class _Held:
    request: PendingRequest
    deadline_ns: int


class PopLongPolls:
    """All held receives of one role, the oldest first."""

    def __init__(
        self,
        clock: Clock,
        give: Callable[[PendingRequest], bool],
        answer_nothing: Callable[[PendingRequest], None],
        refuse: Callable[[PendingRequest, MqprocError], None],
    ) -> None:
        """`give` lets a receive have messages and says whether there were any. It may raise MqprocError, OSError."""
        self._clock = clock
        self._give = give
        self._answer_nothing = answer_nothing
        self._refuse = refuse
        self._held: list[_Held] = []
        self.due_ns = _NEVER_NS
        """When the time of the first one is over."""
        self.untried = 0
        """How many the last look had no time for; they are the first of the next one."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: PendingRequest, deadline_ns: int) -> None:
        """Keep a receive."""
        self._held.append(_Held(request, deadline_ns))
        self.due_ns = min(self.due_ns, deadline_ns)

    def look(self, now_ns: int, end_ns: int) -> int:
        """Give what came, as far as the time goes, and let go what has waited for long enough.

        Returns how many are not held any more.

        Where one receive of a group finds nothing in its topics, the others that want the same are not tried.
        """
        held, self._held = self._held, []
        empty: set[tuple[str, ...]] = set()
        self.untried = 0
        for place, each in enumerate(held):
            if place and self._clock.monotonic_ns() >= end_ns:
                self.untried = len(held) - place
                self._held = held[place:] + self._held
                break
            if each.request.connection.closed or self._is_settled(each.request, empty):
                continue
            if each.deadline_ns <= now_ns:
                self._answer_nothing(each.request)
            else:
                self._held.append(each)
        self.due_ns = min((each.deadline_ns for each in self._held), default=_NEVER_NS)
        return len(held) - len(self._held)

    def let_go(self) -> None:
        """Answer all: there is nothing."""
        held, self._held, self.due_ns = self._held, [], _NEVER_NS
        for each in held:
            self._answer_nothing(each.request)

    def _is_settled(self, request: PendingRequest, empty: set[tuple[str, ...]]) -> bool:
        options = request.options
        wanted = options.group, *options.topics, "", *options.tags, options.sql
        if wanted in empty:
            return False
        try:
            if self._give(request):
                return True
        except MqprocError as error:
            self._refuse(request, error)
            return True
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            self._refuse(request, unwritable_error(error))
            return True
        empty.add(wanted)
        return False
