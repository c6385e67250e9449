"""Demand for a low wake-up latency of the processors while a group is busy.

An idle processor takes longer to wake the deeper it sleeps, and a virtual one is returned to its host. Single messages
meet sleeping processors at each step, four times on the way to a waiting consumer. Keeping the whole machine awake
costs power, so this is off by default, and in force only while requests arrive at a high rate. The demand is the
content of an open file: Linux, Documentation/power/pm_qos_interface.rst.
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
"""PM_QOS_CPU_LATENCY_DEFAULT_VALUE: no demand."""
AUTO_US: Final = -1
"""Demand 0 where it is worthwhile: see `CpuLatencyRequest.update`."""
NEVER_US: Final = -2
AUTO_PROCESSORS_MAX: Final = 8
"""With more processors, most would be kept awake without work."""
AUTO_REQUESTS_PER_S: Final = 500
"""Minimum rate of sends, and of reads: such a machine is rarely idle."""
BUSY_REQUESTS_PER_S: Final = 100
LINGER_NS: Final = 1_000_000_000
"""Idle time that ends the demand: each change wakes every processor."""
_SECOND_NS: Final = 1_000_000_000
_demand = struct.Struct("=i")


class CpuLatencyRequest:
    """A group's demand: in force while its requests arrive fast, and a second longer."""

    def __init__(self, fd: int | None, latency_us: int) -> None:
        self._fd = fd
        self._is_auto = latency_us == AUTO_US
        self._latency_us = 0 if self._is_auto else latency_us
        self._sends = self._reads = 0
        self._looked_ns = 0
        self._until_ns: int | None = None  # None: not in force

    def update(self, now_ns: int, sends: int, reads: int, waiting: int) -> None:
        """Update from the total numbers of sends and reads, and the number of waiting consumers.

        A configured latency counts both kinds. AUTO_US requires a high rate of each, and a waiting consumer: consumers
        with a backlog gain nothing.
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
    """Open the demand. Raises ConfigurationError when a configured latency cannot be demanded."""
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
