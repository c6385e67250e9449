"""Facts about processes, by psutil where it has them, else from Linux' /proc."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOCK_KIND: Final = "OFDLCK"
"""Line of a descriptor's fdinfo that reports an open-file-description lock."""
_ENDED_STATES: Final = ("Z", "X", "")


def pid_namespace() -> int:
    """Inode of the PID namespace in which process ids are valid here; 0 without /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended, without importing psutil: commands start fast."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].lstrip()[:1]
    except OSError:
        return False
    return state not in _ENDED_STATES


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources of a process. `pss_bytes` counts shared pages proportionally: it may be summed."""

    cpu_s: float
    uptime_s: float
    resident_bytes: int
    pss_bytes: int
    open_fds: int

    @property
    def cpu_percent(self) -> float:
        """Percent of one processor, averaged over the process's life."""
        return round(100 * self.cpu_s / self.uptime_s, 1) if self.uptime_s > 0 else 0.0


def process_usage(pid: int) -> ProcessUsage | None:
    """Resources of a process; None when it is gone, or belongs to another user."""
    import psutil

    if pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_full_info()
            return ProcessUsage(
                cpu_s=times.user + times.system,
                uptime_s=round(time.time() - process.create_time(), 2),
                resident_bytes=memory.rss,
                pss_bytes=memory.pss,
                open_fds=process.num_fds(),
            )
    except (psutil.Error, OSError):
        return None


def own_children() -> frozenset[int]:
    """Pids of this process's children, including ended children."""
    pid = os.getpid()
    try:
        with open(f"/proc/self/task/{pid}/children", encoding="ascii") as file:
            return frozenset(map(int, file.read().split()))
    except FileNotFoundError:  # The kernel was built without this file.
        import psutil

        return frozenset(child.pid for child in psutil.Process(pid).children())


def processes_with_byte_lock(fd: int) -> list[int]:
    """Processes with an open-file-description lock on a file, as far as /proc is readable."""
    path, found = os.readlink(f"/proc/self/fd/{fd}"), []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # It may have ended, or belong to another user.
            for name in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{name}") != path:
                    continue
                if _LOCK_KIND in Path(f"/proc/{pid}/fdinfo/{name}").read_text():
                    found.append(pid)
    return found
