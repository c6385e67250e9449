"""python -m tests.fuzz TARGET FIRST:STOP, or TARGET CASE, or --level ci|nightly"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.fuzz.levels import CORPUS, KINDS, LEVELS, Shard, run_level, run_shard


@click.command()
@click.argument("kind", type=click.Choice(sorted(KINDS)), required=False)
@click.argument("seeds", required=False)
@click.option("--level", type=click.Choice(sorted(LEVELS)), help="100,000 frames and 2,000 files, or many more.")
# One more than processors: workers sometimes wait for a group or a tool.
@click.option("--workers", type=int, default=len(os.sched_getaffinity(0)) + 1, show_default=True, help="Of a level.")
@click.option("--progress", type=click.Path(path_type=Path), help="With --level: save progress here, and resume.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files lie; /dev/shm where it is there.")
def main(
    kind: str | None, seeds: str | None, level: str | None, workers: int, progress: Path | None, folder: Path | None
) -> None:
    """Run seeds FIRST:STOP of a target, one seed, a named case of its corpus, or a level."""
    if folder is None and os.access("/dev/shm", os.W_OK):
        folder = Path("/dev/shm")
    if level:
        sys.exit(1 if run_level(LEVELS[level], folder, workers, progress) else 0)
    if not kind or not seeds:
        raise click.UsageError("give a kind and seeds, or --level")
    if case := CORPUS.get(kind, {}).get(seeds):
        with tempfile.TemporaryDirectory(prefix="mqproc-fuzz-", dir=folder) as place:
            case(KINDS[kind](Path(place)))
        return
    first, _, stop = seeds.partition(":")
    shard = Shard(kind, int(first), int(stop or int(first) + 1))
    begin = time.monotonic()
    run_shard(shard, folder)
    count = shard.stop - shard.first
    print(f"{kind}: {count:,} seeds, {count / (time.monotonic() - begin):,.0f} per second")


if __name__ == "__main__":
    main()
