"""Many seeds of every kind by worker processes, shard by shard: those of every change, and those of every night."""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz.kinds import KINDS
from tests.workers import worker_pool

SHARDS_PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """Seeds of a kind that go through one fuzzer."""

    kind: str
    first: int
    stop: int

    def __str__(self) -> str:
        return f"{self.kind} {self.first}:{self.stop}"


def _shards(kind: str, seeds: range, size: int) -> Iterator[Shard]:
    for first in range(seeds.start, seeds.stop, size):
        yield Shard(kind, first, min(first + size, seeds.stop))


LEVELS: Final[dict[str, list[Shard]]] = {
    "ci": [
        # The longest first: at the end no worker waits long for another one.
        *_shards("files", range(1_000), 500),
        *_shards("frames", range(100_000), 50_000),
        *_shards("records", range(20_000), 10_000),
        *_shards("json", range(20_000), 10_000),
        *_shards("shared", range(1_000), 500),
    ],
    "nightly": [
        *_shards("frames", range(1_000_000, 2_000_000), 50_000),
        *_shards("files", range(1_000_000, 1_100_000), 500),
        *_shards("json", range(1_000_000, 2_000_000), 50_000),
        *_shards("records", range(1_000_000, 2_000_000), 50_000),
        *_shards("shared", range(1_000_000, 1_100_000), 5_000),
    ],
}


def run_level(shards: list[Shard], folder: Path | None, workers: int, progress: Path | None) -> int:
    """Go through the shards that `progress` does not have yet; how many failed. Each is told when it ends."""
    done: list[str] = json.loads(progress.read_text()) if progress and progress.exists() else []
    begin, failed = time.monotonic(), 0
    with worker_pool(workers, SHARDS_PER_WORKER) as pool:
        running = [pool.submit(_run, shard, folder) for shard in shards if str(shard) not in done]
        for future in as_completed(running):
            shard, failure, reached = future.result()
            ended = "failed" if failure else f"done, {reached}" if reached else "done"
            print(f"{failure}{shard}: {ended}, {time.monotonic() - begin:,.0f} s", flush=True)
            failed += bool(failure)
            if progress and not failure:
                done.append(str(shard))
                temporary = progress.with_name(progress.name + ".tmp")
                temporary.write_text(json.dumps(done))
                temporary.replace(progress)
    return failed


def run_shard(shard: Shard, folder: Path | None) -> str:
    """Every seed in order; what they have reached. What the first that fails raises has a note how to repeat it."""
    with tempfile.TemporaryDirectory(prefix="mqproc-fuzz-", dir=folder) as place:
        fuzzer = KINDS[shard.kind](Path(place))
        seed = shard.first
        try:
            for seed in range(shard.first, shard.stop):
                fuzzer.run(seed)
            return fuzzer.close()
        except BaseException as error:
            error.add_note(f"repeat: python -m tests.fuzz {shard.kind} {seed}, or with those before it: {shard}")
            raise


def _run(shard: Shard, folder: Path | None) -> tuple[Shard, str, str]:
    try:
        reached = run_shard(shard, folder)
    except (Exception, pytest.fail.Exception) as error:
        return shard, "".join(traceback.format_exception(error)), ""
    return shard, "", reached
