"""How fast processors must wake while a group has work: a demand on the kernel, made through a file that is kept open.

A processor without work sleeps, and takes longer to wake the deeper it sleeps; a virtual one is given back to its host.
Messages that come one by one find it so each time. Processors that may not sleep take power, so nothing is demanded of
them while hardly anything comes. Linux, Documentation/power/pm_qos_interface.rst.
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
BUSY_REQUESTS_PER_S: Final = 100
LINGER_NS: Final = 1_000_000_000
"""So long without work ends the demand: each change of it wakes every processor."""
_demand = struct.Struct("=i")


class Wakeups:
    """A group's demand: in force from when its requests come fast until they have not for a second."""

    def __init__(self, fd: int | None, latency_us: int) -> None:
        self._fd = fd
        self._latency_us = latency_us
        self._requests = 0
        self._looked_ns = 0
        self._until_ns: int | None = None  # None: not in force

    def look(self, now_ns: int, requests: int) -> None:
        """Take note of how many requests the group has had until now."""
        if self._fd is None:
            return
        came, passed_ns = requests - self._requests, now_ns - self._looked_ns
        self._requests, self._looked_ns = requests, now_ns
        if came * 1_000_000_000 >= BUSY_REQUESTS_PER_S * passed_ns:
            if self._until_ns is None:
                self._write(self._fd, self._latency_us)
            self._until_ns = now_ns + LINGER_NS
        elif self._until_ns is not None and now_ns >= self._until_ns:
            self._write(self._fd, NO_DEMAND_US)
            self._until_ns = None

    def _write(self, fd: int, latency_us: int) -> None:
        os.write(fd, _demand.pack(latency_us))


@contextlib.contextmanager
def waking_within(latency_us: int) -> Iterator[Wakeups]:
    """What demands it; below 0 nothing ever is. Raises ConfigurationError when it cannot be demanded here."""
    if latency_us < 0:
        yield Wakeups(None, latency_us)
        return
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open(DEVICE, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, _demand.pack(NO_DEMAND_US))
        except OSError as error:
            who = "; only root may write it" if isinstance(error, PermissionError) else ""
            raise ConfigurationError(f"cpu_latency_us = {latency_us}: {DEVICE}: {error.strerror}{who}") from None
        yield Wakeups(fd, latency_us)
