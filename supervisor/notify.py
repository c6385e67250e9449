"""Telling systemd (sd_notify): READY, RELOADING, STOPPING, a line of STATUS, and WATCHDOG while the loop turns.

A datagram a message, to the socket that NOTIFY_SOCKET names; without one nothing is told. The variables are taken out
of the environment, so that no role speaks for the group. The socket holds some ten messages that the manager has not
read: a change of state waits for room, since nobody tells of it again; the others are made anew all the time.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Final

from mqproc.ipc import control_words
from mqproc.ipc.control import Control
from mqproc.layout import control as layout
from mqproc.util.units import counted

STATUS_NS: Final = 1_000_000_000
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """Whoever started this process and wants to hear of it; perhaps nobody."""

    def __init__(self, address: str = "", watchdog_us: int = 0) -> None:
        """`watchdog_us`: how long the manager waits for WATCHDOG; it is told twice as often."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_ns = watchdog_us * 1000 // 2
        self._watchdog_due_ns = 0
        self._status_due_ns = 0
        self._status = ""
        self._waiting: deque[str] = deque()

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """As systemd says in `environment`; its variables are removed from there."""
        address, watchdog_us, pid = (environment.pop(name, "") for name in _VARIABLES)
        own_pid = str(os.getpid())
        # A group that an application has started beside itself does not speak for the application's service.
        started_pid = environment.get("SYSTEMD_EXEC_PID", own_pid)
        if not address.startswith(("/", "@")) or started_pid != own_pid:
            return cls()
        ours = not pid or pid == own_pid
        return cls(address, int(watchdog_us) if ours and watchdog_us.isdigit() else 0)

    def say_state(self, state: int) -> None:
        """The group's state has changed."""
        text = f"STATUS={layout.GROUP_NAMES[state]}"
        if state == layout.GROUP_READY:
            text = f"READY=1\n{text}"
        elif state == layout.GROUP_STOPPING:
            text = f"STOPPING=1\n{text}"
        self._say_surely(text)

    def say_reloading(self) -> None:
        """Options are being read anew; `say_state` ends that."""
        self._say_surely(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def tick(self, now_ns: int, control: Control) -> None:
        """Called by the supervisor's loop: that it turns is what WATCHDOG tells."""
        if not self._address or not self._has_said_all():
            return
        if self._watchdog_ns and now_ns >= self._watchdog_due_ns:
            self._watchdog_due_ns = now_ns + self._watchdog_ns
            self._say("WATCHDOG=1")
        if now_ns >= self._status_due_ns:
            self._status_due_ns = now_ns + STATUS_NS
            status = _status(control)
            if status != self._status and self._say(f"STATUS={status}"):
                self._status = status

    def _say_surely(self, text: str) -> None:
        """Now, or at a tick to come."""
        if self._address:
            self._waiting.append(text)
            self._has_said_all()

    def _has_said_all(self) -> bool:
        """Say what waits, in order."""
        while self._waiting and self._say(self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    def _say(self, text: str) -> bool:
        """Whether there was room for it. A manager that does not listen any more costs nothing but the message."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto(text.encode(), self._address)
            except BlockingIOError:
                return False
            except OSError:
                pass
            return True


def _status(control: Control) -> str:
    """One line: how the group is, and how far dispatch and flush are behind."""
    state = control.load(layout.GROUP_STATE)
    name = layout.GROUP_NAMES[state]
    if state != layout.GROUP_READY:
        return name
    down = [
        f"{role} {layout.SUPERVISED_NAMES[word]}"
        for role in layout.ROLES
        if (word := control.load(layout.supervised_word(role, "supervised"))) != layout.RUNNING
    ]
    words = control.snapshot()
    messages = counted(control_words.dispatch_behind_messages(words), "message")
    parts = [
        ", ".join(down) or name,
        f"dispatch {control_words.dispatch_behind_bytes(words):,} bytes ({messages}) behind",
        f"flush {control_words.flush_behind_bytes(words):,} bytes behind",
        *(["READ-ONLY after a failed sync"] if control.read_only else []),
    ]
    return "; ".join(parts)
