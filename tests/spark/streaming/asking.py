"""Calls that Spark makes of a stream reader, without Spark; positions are kept as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable

from mqproc.spark.options import stream_options
from mqproc.spark.stream_reader import StreamReader
from tests.spark.rows import Row

COLUMNS = ["store", "topic", "queue_id", "queue_offset", "body"]
BATCHES_MAX = 500
Place = tuple[str, int, int]


class Query:
    """A query with its checkpoint; `restart` simulates a new process that resumes it."""

    def __init__(self, path: Path | str, **given: Any) -> None:
        self._given = {"path": str(path)} | {name: str(value) for name, value in given.items()}
        self.ends: list[str] = []
        self.rows: list[Row] = []
        self.partitions: list[list[Any]] = []
        self.restart()

    def restart(self, **given: Any) -> Query:
        self._given |= {name: str(value) for name, value in given.items()}
        self.reader = StreamReader(stream_options(self._given), COLUMNS)
        return self

    def start(self) -> dict[str, Any]:
        return json.loads(self.ends[-1]) if self.ends else self.reader.initialOffset()

    def plan(self, *, once: bool = False) -> bool:
        """Ask for the end of the next micro-batch; False when there is no new data."""
        limit = ReadAllAvailable() if once else self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(self.start(), limit))
        if self.ends and end == self.ends[-1]:
            return False
        self.ends.append(end)
        return True

    def read(self) -> list[Row]:
        """Rows of the newest micro-batch; may be called repeatedly."""
        start = json.loads(self.ends[-2]) if len(self.ends) > 1 else self.reader.initialOffset()
        partitions = self.reader.partitions(start, json.loads(self.ends[-1]))
        self.partitions.append(partitions)
        return [row for each in partitions for batch in self.reader.read(each) for row in batch.to_pylist()]

    def run(self, *, available_now: bool = False) -> list[Row]:
        """Run micro-batches until no new data is left; returns their rows."""
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        found: list[Row] = []
        for _ in range(BATCHES_MAX):
            if not self.plan():
                self.rows += found
                return found
            found += self.read()
        raise AssertionError(f"no end after {BATCHES_MAX} micro-batches")

    @property
    def position(self) -> dict[str, Any]:
        return json.loads(self.ends[-1])


def places(rows: list[Row]) -> list[Place]:
    return sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in rows)
