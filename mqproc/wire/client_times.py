"""By when clients of a server must have sent or read something: frames that have begun, answers that wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqproc.wire.connection import Connection

LOOK_EVERY_S: Final = 0.05
"""Times are looked at this often, and only while a client has one."""


class ClientTimes:
    """The clients whose `read_by` or `write_by` runs.

    While a process stands still, stopped by a signal or with its machine, nobody is listened to: that time counts for
    no client.
    """

    __slots__ = ("_clients", "_look_at")

    def __init__(self) -> None:
        self._clients: dict[int, Connection] = {}
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._clients)

    def watch(self, client: Connection) -> None:
        """One of the client's times has begun to run."""
        if not self._clients:
            self._look_at = time.monotonic() + LOOK_EVERY_S
        self._clients[client.fd] = client

    def forget(self, client: Connection) -> None:
        """The client is gone."""
        self._clients.pop(client.fd, None)

    def seconds_left(self) -> float:
        """Until the next look; 0 when it is time."""
        return max(0.0, self._look_at - time.monotonic())

    def over(self) -> list[Connection]:
        """Clients one of whose times is over; one that is not listened to must only read."""
        now = time.monotonic()
        late_s = now - self._look_at
        self._look_at = now + LOOK_EVERY_S
        if late_s > LOOK_EVERY_S:
            self._prolong(late_s)
        over = []
        for client in list(self._clients.values()):
            if client.write_by:
                if now >= client.write_by:
                    over.append(client)
            elif not client.read_by:
                self.forget(client)
            elif now >= client.read_by and not client.paused:
                over.append(client)
        return over

    def _prolong(self, seconds: float) -> None:
        for client in self._clients.values():
            client.write_by = client.write_by and client.write_by + seconds
            client.read_by = client.read_by and client.read_by + seconds
