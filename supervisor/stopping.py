"""The order in which a group stops: whoever makes work before whoever does it.

    keeper → writer → commitlog-flusher → dispatcher → query → cq-flusher and index-flusher
           → marks, checkpoint, `abort` removed → monitor

Each role's own `on_stop` does what its place asks for: the commitlog-flusher syncs all that was written, the dispatcher
reaches `confirmed`, the two other flushers make their three thorough passes. `abort` stays when anything went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mqproc.layout import control as layout
from mqproc.supervisor.group import Group, Member

STEPS: Final[tuple[tuple[str, ...], ...]] = (
    (layout.KEEPER,),
    (layout.WRITER,),
    (layout.COMMITLOG_FLUSHER,),
    (layout.DISPATCHER,),
    (layout.QUERY,),
    (layout.CQ_FLUSHER, layout.INDEX_FLUSHER),
)
LAST: Final = (layout.MONITOR,)
assert {name for step in (*STEPS, LAST) for name in step} == set(layout.ROLES)


class StopPlan:
    """One ordered stop. `advance` is called again and again until it says that all is done."""

    def __init__(self, group: Group, turn_away: Callable[[str], None], finish: Callable[[], None]) -> None:
        """`turn_away` keeps clients from a role, so that none sends what nobody will read or answer."""
        self._group = group
        self._turn_away = turn_away
        self._finish = finish
        self._steps = list(STEPS)
        self._finished = False
        group.problems += [
            f"{member.name} was not running when the group stopped"
            for member in group.members.values()
            if not member.alive
        ]

    def advance(self) -> bool:
        """Go as far as possible without waiting; True when the last role has ended."""
        while self._steps and self._ended(self._steps[0]):
            self._steps.pop(0)
        if self._steps:
            return False
        if not self._finished:
            self._finished = True
            self._finish()
        return self._ended(LAST)

    def hurry(self) -> None:
        """Ask all at once instead of in order: what is then not dispatched or flushed, the next start will do."""
        self._group.problems.append("the stop was cut short")
        for member in self._group.members.values():
            self._group.ask_to_stop(member)

    def _ended(self, names: Sequence[str]) -> bool:
        for name in names:
            self._turn_away(name)
        members = [member for name in names if (member := self._member(name)) is not None]
        for member in members:
            self._group.ask_to_stop(member)
        return not any(member.alive for member in members)

    def _member(self, name: str) -> Member | None:
        return self._group.members.get(name)
