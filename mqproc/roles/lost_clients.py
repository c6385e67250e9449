"""Clients that are lost while a role is at something: an answer to a client may be how it turns out to be gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqproc.wire.connection import Connection


class LostClients:
    """What is told of a client inside the `with` block comes when the block is through, of another one at once."""

    def __init__(self, forget: Callable[[Connection], None]) -> None:
        """`forget` may find more clients gone: they come after it."""
        self._forget = forget
        self._lost: list[Connection] = []
        self._at_work = False

    def add(self, connection: Connection) -> None:
        """Forget a client, as soon as nothing is under way."""
        self._lost.append(connection)
        if not self._at_work:
            self.__exit__()

    def __enter__(self) -> None:
        self._at_work = True

    def __exit__(self, *_: object) -> None:
        self._at_work = True
        try:
            while self._lost:
                self._forget(self._lost.pop())
        finally:
            self._at_work = False
