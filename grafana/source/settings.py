"""Names that dashboards and rules share, and durations that tests can shorten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

JOB: Final = "mqproc"
"""Job name in prometheus.yml."""

DATASOURCE_UID: Final = "mqproc-prometheus"
OVERVIEW_UID: Final = "mqproc-overview"
INTERNALS_UID: Final = "mqproc-internals"
RUNBOOKS: Final = "grafana/README.md"

SCRAPE_S: Final = 15.0

# Roles update once a second, so shorter ages would fire without a fault.
_AGE_MIN_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of the rules times `scale`: with 1/30 a minute is two seconds."""

    scale: float = 1.0

    def of(self, seconds: float) -> str:
        """A range or a `for` in Prometheus' format."""
        milliseconds = round(seconds * self.scale * 1000)
        for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
            if milliseconds % size == 0 and milliseconds >= size:
                return f"{milliseconds // size}{unit}"
        return f"{milliseconds}ms"

    def age(self, seconds: float) -> str:
        """An allowed age in seconds, at least a few heartbeats."""
        return f"{max(_AGE_MIN_S, seconds * self.scale):g}"


MINUTE: Final = 60.0
