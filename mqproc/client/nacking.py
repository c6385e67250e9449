"""What becomes of the messages of one `nack`, without I/O: shared by the sync and the async consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqproc.client import group_calls
from mqproc.client.core import Call
from mqproc.errors import MessageNotFoundError, StoreBusyError
from mqproc.message import StoredMessage
from mqproc.quantities import counted

NAMED_MAX: Final = 8
"""So many messages an error names; of others it says how many there are."""


class Nacking:
    """`left`: messages that are still to be stored for a later delivery, `gone`: those that nobody can copy."""

    def __init__(self, group: str, messages: Sequence[Any], delay_level: int) -> None:
        self._group = group
        self._delay_level = delay_level
        for message in messages:
            if not isinstance(message, StoredMessage):
                raise group_calls.no_message(message)
        self.left: list[StoredMessage] = list(messages)
        self.gone: list[StoredMessage] = []
        self.is_busy = False
        """Whether some of the last call could not be stored now."""

    def call(self) -> Call[list[int]]:
        """Asks for the first that are left."""
        asked, _others = self._next()
        places = [(message.topic, message.queue_id, message.queue_offset) for message in asked]
        return group_calls.nack(self._group, places, self._delay_level, -1)

    def _next(self) -> tuple[Sequence[StoredMessage], Sequence[StoredMessage]]:
        return group_calls.copied_at_once(self.left, group_calls.NAMED_MAX)

    def answered(self, levels: list[int]) -> list[StoredMessage]:
        """Take what became of what was asked for; those that are stored."""
        asked, others = self._next()
        told = list(zip(asked, levels, strict=True))
        refused = [message for message, level in told if level == group_calls.NOT_NOW]
        self.left, self.is_busy = [*others, *refused], bool(refused)
        self.gone += [message for message, level in told if level == group_calls.GONE]
        return [message for message, level in told if level not in (group_calls.NOT_NOW, group_calls.GONE)]

    def check_gone(self) -> None:
        """Raises MessageNotFoundError when some are gone."""
        if self.gone:
            raise MessageNotFoundError(
                f"{_named(self.gone)} cannot be delivered to group {self._group} again: retention, damage or the "
                f"deletion of a topic took {'it' if len(self.gone) == 1 else 'them'}"
            )

    def busy(self) -> StoreBusyError:
        """What tells that no more time is left."""
        return StoreBusyError(f"{counted(len(self.left), 'message')} could not be stored for a later delivery")


def _named(messages: Sequence[StoredMessage]) -> str:
    named = [f"{each.topic}/{each.queue_id} offset {each.queue_offset:,}" for each in messages[:NAMED_MAX]]
    more = len(messages) - len(named)
    return "; ".join(named) + (f" and {more:,} more" if more else "")
