"""No progress without work: what a group's progress has passed, its members have told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

Queue = tuple[str, int]


class Worked:
    """The places that members have told, "at TOPIC QUEUE OFFSET" a line; each line of a report is read once."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._read: dict[Path, int] = {}
        self._ends: dict[Queue, int] = defaultdict(int)
        self._behind: dict[Queue, set[int]] = defaultdict(set)

    def check(self, progress: Mapping[Queue, int]) -> None:
        """Raises AssertionError unless all places from 0 to a progress that was read before are told."""
        self._read_on()
        for queue, offset in progress.items():
            end = self._ends[queue]
            assert offset <= end, f"the group's progress in {queue} is {offset:,}, nobody has had {end:,}"

    def _read_on(self) -> None:
        for report in self._folder.glob(f"{self._name}*.report"):
            at = self._read.get(report, 0)
            with report.open("rb") as file:
                file.seek(at)
                # A killed process may have left half a line.
                whole = file.read().rpartition(b"\n")
            self._read[report] = at + len(whole[0]) + len(whole[1])
            for line in whole[0].decode().splitlines():
                if line.startswith("at "):
                    _, topic, queue_id, offset = line.split()
                    self._behind[topic, int(queue_id)].add(int(offset))
        for queue, places in self._behind.items():
            while self._ends[queue] in places:
                places.discard(self._ends[queue])
                self._ends[queue] += 1
