"""Messages that a role must be sure of: told when all are in the log, and which are when some are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mqproc.errors import DiskFullError, MqprocError
from mqproc.roles.internal_producer import AppendOutcome, NewMessage, Refused, ReliableAppend, Stored


class Frames:
    """An appender; the test says what becomes of each frame."""

    def __init__(self) -> None:
        self.done: Callable[[Sequence[NewMessage], AppendOutcome], None] | None = None

    def append(
        self, _messages: Sequence[NewMessage], on_done: Callable[[Sequence[NewMessage], AppendOutcome], None]
    ) -> None:
        self.done = on_done


def test_what_is_stored_is_told_before_the_others_are_refused() -> None:
    frames = Frames()
    appender: Any = frames
    writes = ReliableAppend(None, appender, 1 << 20)  # type: ignore[arg-type]
    told: list[Sequence[NewMessage] | MqprocError] = []
    first, second = NewMessage("A", b"0"), NewMessage("B", b"1")
    writes.store([first, second], lambda _offset: told.append([]), told.append, told.append)
    assert frames.done is not None
    frames.done([second], Stored(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32), 0, b""))
    assert (told, writes.under_way) == ([[second]], 1)
    refused = DiskFullError("no room")
    frames.done([first], Refused(refused))
    assert (told, writes.under_way) == ([[second], refused], 0)
