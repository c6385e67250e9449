"""systemd notification (sd_notify): READY, RELOADING, STOPPING, STATUS, and WATCHDOG.

One datagram per message to the socket in NOTIFY_SOCKET; without it nothing is sent. The variables are removed from the
environment, so that roles do not notify. The socket holds about ten unread messages: state changes are retried, the
periodic messages are not.
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
    """The service manager, if it wants notifications."""

    def __init__(self, address: str = "", watchdog_us: int = 0) -> None:
        """`watchdog_us`: the manager's watchdog timeout; it is notified at twice the rate."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_ns = watchdog_us * 1000 // 2
        self._watchdog_due_ns = 0
        self._status_due_ns = 0
        self._status = ""
        self._waiting: deque[str] = deque()

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Read systemd's variables, and remove them from `environment`."""
        address, watchdog_us, pid = (environment.pop(name, "") for name in _VARIABLES)
        own_pid = str(os.getpid())
        # An application's own group does not notify for the application's service.
        started_pid = environment.get("SYSTEMD_EXEC_PID", own_pid)
        if not address.startswith(("/", "@")) or started_pid != own_pid:
            return cls()
        ours = not pid or pid == own_pid
        return cls(address, int(watchdog_us) if ours and watchdog_us.isdigit() else 0)

    def say_state(self, state: int) -> None:
        """Report the group's state."""
        text = f"STATUS={layout.GROUP_NAMES[state]}"
        if state == layout.GROUP_READY:
            text = f"READY=1\n{text}"
        elif state == layout.GROUP_STOPPING:
            text = f"STOPPING=1\n{text}"
        self._send_reliably(text)

    def say_reloading(self) -> None:
        """Report a reload, until the next `say_state`."""
        self._send_reliably(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def tick(self, now_ns: int, control: Control) -> None:
        """Called by the supervisor's loop; WATCHDOG reports that it runs."""
        if not self._address or not self._send_pending():
            return
        if self._watchdog_ns and now_ns >= self._watchdog_due_ns:
            self._watchdog_due_ns = now_ns + self._watchdog_ns
            self._say("WATCHDOG=1")
        if now_ns >= self._status_due_ns:
            self._status_due_ns = now_ns + STATUS_NS
            status = _status(control)
            if status != self._status and self._say(f"STATUS={status}"):
                self._status = status

    def _send_reliably(self, text: str) -> None:
        """Send now, or at a later tick."""
        if self._address:
            self._waiting.append(text)
            self._send_pending()

    def _send_pending(self) -> bool:
        """Send pending messages in order."""
        while self._waiting and self._say(self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    def _say(self, text: str) -> bool:
        """Send if there is space. Errors of a manager that no longer listens are ignored."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto(text.encode(), self._address)
            except BlockingIOError:
                return False
            except OSError:
                pass
            return True


def _status(control: Control) -> str:
    """One line: state, and the delays of dispatch and flush."""
    state = control.load(layout.GROUP_STATE)
    name = layout.GROUP_NAMES[state]
    if state != layout.GROUP_READY:
        return name
    down = [
        f"{role} {layout.SUPERVISED_NAMES[word]}"
        for role in layout.ROLES
        if (word := control.load(layout.role_word(role, "supervised"))) != layout.RUNNING
    ]
    words = control.snapshot()
    messages = counted(control_words.dispatch_behind_messages(words), "message")
    parts = [
        ", ".join(down) or name,
        f"dispatch behind by {control_words.dispatch_behind_bytes(words):,} bytes ({messages})",
        f"flush behind by {control_words.flush_behind_bytes(words):,} bytes",
        *(["READ-ONLY after a failed sync"] if control.read_only else []),
    ]
    return "; ".join(parts)
