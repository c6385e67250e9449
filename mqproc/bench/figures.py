"""From what was measured to figures: rates, percentiles of the full distribution, CPU per message and role."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.cli.group import process_figures

PERCENTILES = (50, 95, 99, 99.9)
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests that ended inside the measured time. Latencies in µs."""

    messages: int
    size: int
    seconds: float
    requests: int
    mean_us: float
    max_us: float
    percentiles_us: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.messages / max(self.seconds, 1e-9)

    @property
    def bytes_per_second(self) -> float:
        return self.size / max(self.seconds, 1e-9)

    def line(self, verb: str) -> str:
        """Kafka's summary."""
        shown = ", ".join(
            f"{value:.1f} µs {percentile:g}th"
            for percentile, value in zip(PERCENTILES, self.percentiles_us, strict=True)
        )
        return (
            f"{self.messages:,} records {verb}, {self.per_second:,.1f} records/sec "
            f"({self.bytes_per_second / MB:,.2f} MB/sec), {self.mean_us:,.1f} µs avg latency, "
            f"{self.max_us:,.1f} µs max latency, {shown}."
        )

    def to_json(self) -> dict[str, Any]:
        named = {
            f"latency_us_p{percentile:g}": round(value, 2)
            for percentile, value in zip(PERCENTILES, self.percentiles_us, strict=True)
        }
        return {
            "messages": self.messages,
            "bytes": self.size,
            "seconds": round(self.seconds, 4),
            "requests": self.requests,
            "messages_per_second": round(self.per_second),
            "bytes_per_second": round(self.bytes_per_second),
            "latency_us_mean": round(self.mean_us, 2),
            "latency_us_max": round(self.max_us, 2),
            **named,
        }


def load_rows(paths: list[Path]) -> NDArray[np.int64]:
    """All clients' rows: ended ns, latency ns, messages; what else a client has noted is left out."""
    return np.concatenate([np.load(path)[:, :3] for path in paths if path.exists()] or [np.empty((0, 3), np.int64)])


def figures_of(rows: NDArray[np.int64], begin_ns: int, end_ns: int, message_size: int) -> Figures:
    """Figures of the requests that ended in (begin, end]."""
    inside = rows[(rows[:, 0] > begin_ns) & (rows[:, 0] <= end_ns)]
    latencies = inside[:, 1] / 1000
    messages = int(inside[:, 2].sum())
    some = len(latencies) > 0
    return Figures(
        messages=messages,
        size=messages * message_size,
        seconds=(end_ns - begin_ns) / 1e9,
        requests=len(inside),
        mean_us=float(latencies.mean()) if some else 0.0,
        max_us=float(latencies.max()) if some else 0.0,
        percentiles_us=tuple(float(value) for value in np.percentile(latencies, PERCENTILES)) if some else (0.0,) * 4,
    )


class CpuMeter:
    """CPU seconds of processes between two moments."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._clocks = {name: _cpu_clock_of(pid) for name, pid in pids.items() if pid}
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        found = {}
        for name, clock in self._clocks.items():
            try:
                found[name] = time.clock_gettime(clock)
            except OSError:
                continue  # The process has ended.
        return found

    def restart(self) -> None:
        self._before = self._read()

    def seconds(self) -> dict[str, float]:
        """CPU seconds by process since the last restart."""
        now = self._read()
        return {name: max(0.0, now[name] - self._before.get(name, 0.0)) for name in now}


def _cpu_clock_of(pid: int) -> int:
    """The clock of all threads of a process, as clock_getcpuclockid(3) makes it on Linux.

    The times of /proc count ticks: who wakes at ticks, or for less than one, has too much or too little of them.
    """
    return (~pid << 3) | 2


def memory_of(pids: Mapping[str, int]) -> dict[str, int]:
    """PSS in bytes by process."""
    return {name: int(process_figures(pid)["pss_bytes"] or 0) for name, pid in pids.items() if pid}
