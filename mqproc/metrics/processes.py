"""What the kernel says of a process: memory, processor time, descriptors. Linux' /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One process at one moment. `pss_bytes` counts a page that n processes share as 1/n, so it may be added up."""

    cpu_s: float
    lived_s: float
    resident_bytes: int
    pss_bytes: int
    open_fds: int

    @property
    def cpu_percent(self) -> float:
        """Of one processor, over the whole life."""
        return round(100 * self.cpu_s / self.lived_s, 1) if self.lived_s > 0 else 0.0


def figures_of(pid: int) -> ProcessFigures | None:
    """A process's figures; None when it is gone, or belongs to somebody else."""
    if pid <= 0:
        return None
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        with open("/proc/uptime") as uptime:
            up_s = float(uptime.read().split()[0])
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            pss = next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
        open_fds = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration):
        return None
    # After the name: state is field 3; utime and stime are 14 and 15, the start time 22, the resident pages 24.
    return ProcessFigures(
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        lived_s=round(up_s - int(fields[19]) / _TICKS_PER_S, 2),
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
        pss_bytes=pss,
        open_fds=open_fds,
    )
