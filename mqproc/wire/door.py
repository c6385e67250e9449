"""The door of a role's socket: who comes in, and what those are told who may not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Container, Sized
from typing import Final

from mqproc.config import MIB
from mqproc.errors import MqprocError, PermissionDeniedError, TooManyConnectionsError
from mqproc.layout.frame import CONNECTION_ID
from mqproc.wire.address import peer_uid
from mqproc.wire.protocol import encode_refusal

_ACCEPTS_PER_CALL: Final = 64
_SOCKET_BUFFER_BYTES: Final = MIB


class Door:
    """Accepts from one listening socket, which belongs to whoever made it."""

    def __init__(
        self,
        listener: socket.socket,
        inside: Sized,
        inside_max: int,
        allowed_uids: Container[int],
        count_reject: Callable[[str], None],
    ) -> None:
        """At most `inside_max` clients may be `inside`. `count_reject` gets the code of each refusal."""
        listener.setblocking(False)
        self._listener = listener
        self._inside = inside
        self._inside_max = inside_max
        self._allowed_uids = allowed_uids
        self._count_reject = count_reject
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The listener's descriptor."""
        return self._listener.fileno()

    def let_in(self, welcome: Callable[[socket.socket], None]) -> None:
        """Take those who wait, some at a time; `welcome` gets the socket, which does not block, of each who may."""
        for _ in range(_ACCEPTS_PER_CALL):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is left: use the spare one to tell the client so.
                self._turn_away()
                return
            sock.setblocking(False)
            if refusal := self._refusal_of(sock):
                self._send_off(sock, refusal)
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            welcome(sock)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def _refusal_of(self, sock: socket.socket) -> MqprocError | None:
        uid = peer_uid(sock)
        if uid not in self._allowed_uids:
            return PermissionDeniedError(f"user {uid} may not use a socket of user {os.getuid()}")
        if len(self._inside) >= self._inside_max:
            return self._too_many("max_connections allows no more")
        return None

    def _too_many(self, why: str) -> TooManyConnectionsError:
        return TooManyConnectionsError(f"{len(self._inside):,} connections are open already; {why}", hint_ms=100)

    def _send_off(self, sock: socket.socket, error: MqprocError) -> None:
        self._count_reject(error.code)
        try:
            sock.send(encode_refusal(0, CONNECTION_ID, error))
        except OSError:
            pass  # It has gone by itself.
        finally:
            sock.close()

    def _turn_away(self) -> None:
        os.close(self._spare_fd)
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._send_off(sock, self._too_many("no file descriptor is left"))
        except OSError:
            pass  # Somebody else took the descriptor; the client waits in the backlog.
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
