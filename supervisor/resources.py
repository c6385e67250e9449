"""What a group has before its first fork: bells, listening sockets, memory for stacks. Made once, inherited by all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mqproc.control import Control
from mqproc.ipc.bell import Bell, EventBell, SemaphoreBell, names_of, semaphore_name, unlink_semaphore
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.roles.loop import BellKind, RoleSpec
from mqproc.wire.address import listen, remove

CONTROL_SOCKET = "ctl"


@dataclass(frozen=True, slots=True)
class Resources:
    """Bells by role, sockets by name, and the eventfd by which roles wake the supervisor."""

    paths: StorePaths
    bells: Mapping[str, Bell]
    sockets: Mapping[str, socket.socket]
    control_socket: socket.socket
    traces: Mapping[str, int]
    changed_fd: int

    @classmethod
    def make(cls, paths: StorePaths, control: Control, specs: Sequence[RoleSpec]) -> Resources:
        """Open everything. Semaphores keep their names until `unlink_names`; when this fails none has one."""
        _unlink_left_over(control)
        names = {name for spec in specs for name in spec.sockets}
        try:
            return cls(
                paths=paths,
                bells={spec.name: _bell(control, spec) for spec in specs},
                sockets={name: listen(paths.socket(name)) for name in sorted(names)},
                control_socket=listen(paths.socket(CONTROL_SOCKET)),
                traces={spec.name: _trace_file(spec.name) for spec in specs},
                changed_fd=os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
            )
        except BaseException:
            # A name outlives its process, and the next start of this store may never come.
            _unlink_left_over(control)
            raise

    def unlink_names(self) -> None:
        """The template has the semaphores, and this process's handles are good for later templates."""
        for bell in self.bells.values():
            if isinstance(bell, SemaphoreBell):
                bell.unlink()

    def drain_changed(self) -> None:
        """Forget that roles have changed their state."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.changed_fd)

    def turn_away(self, name: str) -> None:
        """Nobody connects to a role any more, who would wait for a successor that does not come."""
        if name in self.sockets:
            self.sockets[name].shutdown(socket.SHUT_RDWR)

    def remove_sockets(self) -> None:
        """From now on a client is told at once that nothing runs."""
        for name in (*self.sockets, CONTROL_SOCKET):
            # A file system that is read-only by now keeps them: who connects is refused, the next start replaces them.
            with contextlib.suppress(OSError):
                remove(self.paths.socket(name))

    def close(self) -> None:
        """Let go of everything but the socket files' names."""
        for bell in self.bells.values():
            bell.close()
        for listener in (*self.sockets.values(), self.control_socket):
            listener.close()
        for fd in (*self.traces.values(), self.changed_fd):
            os.close(fd)


def _bell(control: Control, spec: RoleSpec) -> Bell:
    sleeping = layout.role_word(spec.name, "sleeping")
    if spec.bell is BellKind.EVENT:
        return EventBell(control.cells, sleeping)
    name = semaphore_name(control.load(layout.STORE_ID), control.load(layout.EPOCH), layout.ROLES.index(spec.name))
    return SemaphoreBell(name, control.cells, sleeping)


def _trace_file(role: str) -> int:
    """Memory for a crash's stack. Appended to, so that after it has been emptied the next one begins at 0."""
    fd = os.memfd_create(f"mqproc-{role}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _unlink_left_over(control: Control) -> None:
    """Supervisors that were killed before they unlinked their names left them, of the last epoch or of earlier ones."""
    for name in names_of(control.load(layout.STORE_ID)):
        unlink_semaphore(name)
