"""How fast processors must wake while a group has work: a demand on the kernel, made through a file that is kept open.

A processor without work sleeps, and takes longer to wake the deeper it sleeps; a virtual one is given back to its host.
Messages that come one by one find it so each time, and one that a consumer waits for four times on its way. Processors
that may not sleep take power, all of the machine's. So nothing is demanded of them while hardly anything comes, and by
itself only on a small machine that has much to do already. Linux, Documentation/power/pm_qos_interface.rst.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mqproc.errors import ConfigurationError

DEVICE: Final = Path("/dev/cpu_dma_latency")
NO_DEMAND_US: Final = 2_000_000_000
"""PM_QOS_CPU_LATENCY_DEFAULT_VALUE: as if nobody asked."""
AUTO_US: Final = -1
"""0 where it is worth that by itself: see `Wakeups.look`."""
NEVER_US: Final = -2
AUTO_PROCESSORS_MAX: Final = 8
"""Where there are more, most of them would be kept awake for nobody."""
AUTO_REQUESTS_PER_S: Final = 500
"""Of sends and of reads each: such a machine is awake a good part of the time."""
BUSY_REQUESTS_PER_S: Final = 100
LINGER_NS: Final = 1_000_000_000
"""So long without work ends the demand: each change of it wakes every processor."""
_SECOND_NS: Final = 1_000_000_000
_demand = struct.Struct("=i")


class CpuLatencyRequest:
    """A group's demand: in force from when its requests come fast until they have not for a second."""

    def __init__(self, fd: int | None, latency_us: int) -> None:
        self._fd = fd
        self._is_auto = latency_us == AUTO_US
        self._latency_us = 0 if self._is_auto else latency_us
        self._sends = self._reads = 0
        self._looked_ns = 0
        self._until_ns: int | None = None  # None: not in force

    def look(self, now_ns: int, sends: int, reads: int, waiting: int) -> None:
        """Take note of how many requests of two kinds the group has had until now, and how many consumers wait.

        What is asked for counts both. By itself there is a demand where both come fast and somebody waits for what
        is sent: a consumer that has fallen behind does not, and gains nothing.
        """
        if self._fd is None:
            return
        sent, read, passed_ns = sends - self._sends, reads - self._reads, now_ns - self._looked_ns
        self._sends, self._reads, self._looked_ns = sends, reads, now_ns
        if self._is_auto:
            is_busy = waiting > 0 and min(sent, read) * _SECOND_NS >= AUTO_REQUESTS_PER_S * passed_ns
        else:
            is_busy = (sent + read) * _SECOND_NS >= BUSY_REQUESTS_PER_S * passed_ns
        if is_busy:
            if self._until_ns is None:
                self._write(self._fd, self._latency_us)
            self._until_ns = now_ns + LINGER_NS
        elif self._until_ns is not None and now_ns >= self._until_ns:
            self._write(self._fd, NO_DEMAND_US)
            self._until_ns = None

    def _write(self, fd: int, latency_us: int) -> None:
        os.write(fd, _demand.pack(latency_us))


@contextlib.contextmanager
def request_cpu_latency(latency_us: int) -> Iterator[CpuLatencyRequest]:
    """What demands it, or `AUTO_US`, `NEVER_US`. Raises ConfigurationError when a time cannot be demanded here."""
    with contextlib.ExitStack() as stack:
        fd = None
        if latency_us >= 0 or (latency_us == AUTO_US and (os.cpu_count() or 1) <= AUTO_PROCESSORS_MAX):
            try:
                fd = os.open(DEVICE, os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                os.write(fd, _demand.pack(NO_DEMAND_US))
            except OSError as error:
                if latency_us != AUTO_US:
                    raise _refusal(latency_us, error) from None
                fd = None
        yield CpuLatencyRequest(fd, latency_us)


def _refusal(latency_us: int, error: OSError) -> ConfigurationError:
    who = "; only root may write it" if isinstance(error, PermissionError) else ""
    return ConfigurationError(f"cpu_latency_us = {latency_us}: {DEVICE}: {error.strerror}{who}")
