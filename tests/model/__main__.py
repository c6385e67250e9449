"""Random programs of consumers over real groups.

python -m tests.model FIRST:STOP           up to the first failure, which is named; also a single seed
python -m tests.model --level ci           a few; nightly: 1,000. All run; each failure prints the command that repeats
                                           it; with --progress FILE a level resumes
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click
import msgspec
import pytest

from tests.model.program import Deaths, run
from tests.support.group import Group
from tests.support.processes import EXIT_INTERRUPTED

SEEDS_A_GROUP: Final = 8
"""In a range; a single seed has its own group."""
LEVELS: Final = {"ci": range(3, 9), "nightly": range(1000)}
"""1 and 2 are in the test suite."""


class Progress(msgspec.Struct):
    """Seeds of a level that are done."""

    done: list[int] = []
    failed: list[int] = []
    took_s: float = 0.0

    def save(self, path: Path | None) -> None:
        if path is not None:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(msgspec.json.encode(self))
            temporary.replace(path)

    def summary(self) -> str:
        repeats = [f"\nrepeat: python -m tests.model {seed}" for seed in self.failed]
        return f"{len(self.done):,} programs, {len(self.failed)} failed, {self.took_s:,.1f} s" + "".join(repeats)


@click.command(help="Run the random programs SEEDS, one or FIRST:STOP, or those of a level.", no_args_is_help=True)
@click.argument("seeds", default="")
@click.option("--level", type=click.Choice(sorted(LEVELS)))
@click.option("--progress", "path", type=click.Path(path_type=Path), help="With --level: saves progress and resumes.")
def main(seeds: str, level: str | None, path: Path | None) -> None:
    if bool(seeds) == bool(level):
        raise click.UsageError("give seeds, or --level")
    if level is None:
        first, _, stop = seeds.partition(":")
        _run_all(range(int(first), int(stop or int(first) + 1)))
        return
    try:
        progress = _run_level(LEVELS[level], path)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    print(progress.summary())
    sys.exit(1 if progress.failed else 0)


def _run_level(seeds: Iterable[int], path: Path | None) -> Progress:
    """Run the remaining seeds; a failure is followed by a new group."""
    progress = msgspec.json.decode(path.read_bytes(), type=Progress) if path and path.exists() else Progress()
    left = [seed for seed in seeds if seed not in progress.done]
    while left:
        try:
            _run_all(left[:SEEDS_A_GROUP], progress, path)
        except (Exception, pytest.fail.Exception):
            traceback.print_exc()
            failed = next(seed for seed in left if seed not in progress.done)
            progress.failed.append(failed)
            progress.done.append(failed)
            progress.save(path)
        left = [seed for seed in left if seed not in progress.done]
    return progress


def _run_all(seeds: Iterable[int], progress: Progress | None = None, path: Path | None = None) -> None:
    progress = progress or Progress()
    numbers = iter(seeds)
    while batch := list(itertools.islice(numbers, SEEDS_A_GROUP)):
        with tempfile.TemporaryDirectory(prefix="mqproc-model-") as folder:
            group = Group(Path(folder) / "store").start()
            deaths = Deaths()
            try:
                for seed in batch:
                    begin = time.monotonic()
                    _run_one(group, seed, deaths)
                    progress.done.append(seed)
                    progress.took_s += time.monotonic() - begin
                    progress.save(path)
            finally:
                group.close()


def _run_one(group: Group, seed: int, deaths: Deaths) -> None:
    begin = time.monotonic()
    try:
        program = run(group, seed, deaths)
    except BaseException:
        print(f"repeat: python -m tests.model {seed}", flush=True)
        raise
    print(
        f"{seed}: {len(program.sent):,} messages, {program.nacks.total()} nacks, {time.monotonic() - begin:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
