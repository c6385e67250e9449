"""How fast processors must wake while a group runs: a demand on the kernel that holds as long as its file is open.

A processor without work sleeps, and takes longer to wake the deeper it sleeps; a virtual one is given back to its host.
Messages that come one by one find it so each time. Linux, Documentation/power/pm_qos_interface.rst.
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
_demand = struct.Struct("=i")


@contextlib.contextmanager
def waking_within(latency_us: int) -> Iterator[None]:
    """Demand it meanwhile; below 0 nothing is demanded. Raises ConfigurationError when it cannot be."""
    if latency_us < 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open(DEVICE, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, _demand.pack(latency_us))
        except OSError as error:
            who = "; only root may write it" if isinstance(error, PermissionError) else ""
            raise ConfigurationError(f"cpu_latency_us = {latency_us}: {DEVICE}: {error.strerror}{who}") from None
        yield
