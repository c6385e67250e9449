"""What dashboards and rules have in common: names, and durations that tests may shorten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

JOB: Final = "mqproc"
"""The job's name in prometheus.yml."""

DATASOURCE_UID: Final = "mqproc-prometheus"
OVERVIEW_UID: Final = "mqproc-overview"
INTERNALS_UID: Final = "mqproc-internals"
RUNBOOKS: Final = "grafana/README.md"

SCRAPE_S: Final = 15.0

# Roles beat and look once a second: what asks for more than this tells nothing.
_PATIENCE_MIN_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Durations:
    """Every duration of the rules, times `scale`. With 1/30 a minute is two seconds, and a scrape half a second."""

    scale: float = 1.0

    def of(self, seconds: float) -> str:
        """A range or a `for`, as Prometheus writes it."""
        milliseconds = round(seconds * self.scale * 1000)
        for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
            if milliseconds % size == 0 and milliseconds >= size:
                return f"{milliseconds // size}{unit}"
        return f"{milliseconds}ms"

    def age(self, seconds: float) -> str:
        """How old something may be, in seconds: never less than the group's own heartbeat allows."""
        return f"{max(_PATIENCE_MIN_S, seconds * self.scale):g}"


MINUTE: Final = 60.0
