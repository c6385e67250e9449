"""Many stories, or the whole sweep, by worker processes: how much is looked at by default, and every night.

A level goes over the seeds in order. What it has done stands in a file, where one is asked for: it goes on from there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from mqproc.config.options import FlushDiskType
from mqproc.kernels.jit import compile as jit
from tests.allocator import map_large_blocks
from tests.crash.journal import Unheard
from tests.crash.planted import PLANTS
from tests.crash.program import Story
from tests.crash.sweep import Case, Ran, Whole, cases
from tests.workers import worker_pool

T = TypeVar("T")
STORY_TIMEOUT_S = 1_800
# A worker's compiled kernels and maps grow a little with each story.
STORIES_PER_WORKER = 50
CALLS_PER_WORKER = 600
# The next one in order may take long: whoever is done with another goes on meanwhile.
AHEAD_PER_WORKER = 4
LARGE_BYTES = 256 << 10
ROOT: Final = Path(__file__).resolve().parents[2]
# Stories that are told at most until one notices a planted bug, and their images.
STORIES_PER_PLANT = 60
IMAGES_PER_PLANT = 2
INTERPRETED: Final = {"NUMBA_DISABLE_JIT": "1"}
TELL_EVERY_S = 30


@dataclass(frozen=True, slots=True)
class Level:
    """Stories from `first_seed` on until so many images were looked at, `images_per_crash` at each point."""

    images: int
    first_seed: int
    images_per_crash: int = 10
    twins: bool = False
    """Kernels run as the plain functions they were written as, and what they store in maps is seen line by line."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes that tell its stories."""
        return INTERPRETED if self.twins else {}


LEVELS = {
    "ci": Level(10_000, 0),
    "nightly": Level(1_000_000, 1_000_000),
    "twins-ci": Level(300, 1, twins=True),
    "twins-nightly": Level(20_000, 1_000_000, twins=True),
}


@dataclass(frozen=True, slots=True)
class Told:
    """What one story, or one run of the sweep's program, came to."""

    repeat: str
    images: int = 0
    messages: int = 0
    failure: str = ""
    seed: int = 0
    """Of a story."""


@dataclass(slots=True)
class Progress:
    """What has been done of a level. `next_seed` is the first that was not told to its end."""

    next_seed: int
    images: int = 0
    stories: int = 0
    messages: int = 0
    took_s: float = 0.0
    failed: list[str] = field(default_factory=list)

    def summary(self, level: Level) -> str:
        """One line."""
        rate = self.images / self.took_s if self.took_s else 0.0
        parts = (
            f"{self.images:,} of {level.images:,} images",
            f"{rate:,.0f} images/s",
            f"{self.stories:,} stories",
            f"{self.messages:,} messages",
            f"{len(self.failed)} stories failed",
            f"{self.took_s:,.1f} s; next seed {self.next_seed}",
        )
        return ", ".join(parts)


def prefix() -> str:
    """What stands before a command that repeats what this process did."""
    return "" if jit.COMPILED else "".join(f"{name}={value} " for name, value in INTERPRETED.items())


def tell_story(seed: int, images: int, folder: Path) -> Told:
    """One story in a folder of its own."""
    repeat = f"{prefix()}python -m tests.crash {seed} --images {images}"
    place = folder / f"seed{seed}"
    try:
        tally = Story(seed, place, images, Unheard()).run()
    except Exception:
        return Told(repeat, failure=traceback.format_exc(), seed=seed)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Told(repeat, tally.images, tally.messages, seed=seed)


def run_cases(whole: Whole, chosen: Sequence[Case], flush: FlushDiskType, folder: Path) -> list[Told]:
    """Runs of the sweep's program, with one call failing in every way, but once where two ways are the same run."""
    told, ran = [], list[Ran]()
    for case in chosen:
        failure = ""
        if not any(other.is_also(case) for other in ran):
            place = folder / f"case{case}"
            try:
                ran.append(whole.run(place, case))
            except Exception:
                failure = traceback.format_exc()
            finally:
                shutil.rmtree(place, ignore_errors=True)
        told.append(Told(f"python -m tests.crash --sweep {flush.value} --case {case}", failure=failure))
    # What only refers to itself, as at the end of a story.
    gc.collect()
    return told


def run_level(level: Level, folder: Path, workers: int, progress_path: Path | None = None) -> Progress:
    """Tell stories until the level's images are reached; what failed is printed with the line that repeats it."""
    progress = _read(progress_path, Progress(level.first_seed))
    if progress.images >= level.images:
        return progress
    before_s, started = progress.took_s, time.perf_counter()
    seeds = itertools.count(progress.next_seed)
    told_s = started
    stories = ((seed, level.images_per_crash, folder) for seed in seeds)
    for told in _in_order(tell_story, stories, workers, STORIES_PER_WORKER, level.environment):
        progress.next_seed += 1
        progress.images += told.images
        progress.stories += 1
        progress.messages += told.messages
        progress.took_s = before_s + time.perf_counter() - started
        if told.failure:
            progress.failed.append(told.repeat)
            print(f"{told.failure}repeat: {told.repeat}", flush=True)
        _write(progress_path, progress)
        if progress.images >= level.images:
            break
        if time.perf_counter() - told_s > TELL_EVERY_S:
            told_s = time.perf_counter()
            print(progress.summary(level), flush=True)
    return progress


@dataclass(slots=True)
class Swept:
    """What has been done of a sweep: so many of its calls, in order, and the cases that failed, by way to flush."""

    calls: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def run_sweep(flush: FlushDiskType, folder: Path, workers: int, progress_path: Path | None = None) -> Swept:
    """Every case in one way to flush that is not done yet. What failed is printed."""
    progress = _read(progress_path, Swept())
    whole = Whole(folder / f"whole-{flush.value}", flush)
    chosen = list(cases(whole.calls))
    total = sum(map(len, chosen))
    done = progress.calls.get(flush.value, 0)
    tried = sum(map(len, chosen[:done]))
    left = ((whole, ways, flush, folder) for ways in chosen[done:])
    told_s = time.perf_counter()
    for ways in _in_order(run_cases, left, workers, CALLS_PER_WORKER):
        done, tried = done + 1, tried + len(ways)
        progress.calls[flush.value] = done
        for told in ways:
            if told.failure:
                progress.failed.append(told.repeat)
                print(f"{told.failure}repeat: {told.repeat}", flush=True)
        _write(progress_path, progress)
        if time.perf_counter() - told_s > TELL_EVERY_S or done == len(chosen):
            told_s = time.perf_counter()
            print(
                f"{flush.value}: {done:,} of {len(chosen):,} calls, {tried:,} of {total:,} failures, "
                f"{len(progress.failed)} runs failed",
                flush=True,
            )
    return progress


def catch(name: str, folder: Path) -> Told:
    """Plant a bug in a process of its own, tell stories there until one notices it, and then that one without it."""
    seed = PLANTS[name].seed
    command = ["-m", "tests.crash", f"{seed}:{seed + STORIES_PER_PLANT}", "--plant", name]
    command += ["--images", str(IMAGES_PER_PLANT), "--until-failure"]
    repeat = shlex.join(["python", *command])
    try:
        done = subprocess.run(
            [sys.executable, *command, "--folder", str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=STORY_TIMEOUT_S,
            check=False,
        )
        noticed = re.search(rf"repeat: python -m tests.crash (\d+) --images {IMAGES_PER_PLANT} --plant", done.stdout)
        if "tests.crash.placed.Broken: " not in done.stderr or noticed is None:
            return Told(repeat, failure=f"not noticed: {name}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    except subprocess.TimeoutExpired as error:
        return Told(repeat, failure=f"{name}: {error}\n")
    # Several bugs may be noticed by the same story at the same time.
    return tell_story(int(noticed[1]), IMAGES_PER_PLANT, folder / name.replace(" ", "-"))


@dataclass(slots=True)
class Caught:
    """Which planted bugs were caught."""

    names: list[str] = field(default_factory=list)


def catch_all(folder: Path, workers: int, progress_path: Path | None = None) -> list[str]:
    """Plant every bug that is not caught yet; the lines that repeat what went wrong. Says how many were noticed."""
    started = time.perf_counter()
    progress = _read(progress_path, Caught())
    left = [name for name in sorted(PLANTS) if name not in progress.names]
    failed = []
    for name, told in zip(left, _in_order(catch, ((name, folder) for name in left), workers, len(PLANTS)), strict=True):
        if told.failure:
            failed.append(told.repeat)
            print(f"{told.failure}repeat: {told.repeat}", flush=True)
        else:
            progress.names.append(name)
            _write(progress_path, progress)
            if told.seed != PLANTS[name].seed:
                print(f"{name}: noticed by seed {told.seed}, looked for from {PLANTS[name].seed} on", flush=True)
    took_s = time.perf_counter() - started
    print(f"{len(PLANTS) - len(failed)} of {len(PLANTS)} planted bugs caught, {took_s:.1f} s", flush=True)
    return failed


def _read(path: Path | None, none_yet: T) -> T:
    """What stands in a file of progress, or nothing done yet."""
    return msgspec.json.decode(path.read_bytes(), type=type(none_yet)) if path and path.exists() else none_yet


def _write(path: Path | None, progress: object) -> None:
    """Replace what a file of progress has."""
    if path is not None:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(msgspec.json.encode(progress))
        temporary.replace(path)


def _in_order(
    work: Callable[..., T],
    arguments: Iterator[tuple[object, ...]],
    workers: int,
    tasks_per_worker: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[T]:
    """Results of `work`, one for each tuple of arguments, by so many processes, a few of them ahead."""
    # A worker's large buffers of zeros are pages that nobody touches, not memory that is filled anew for each recovery.
    variables = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), **environment}
    ahead: deque[Future[T]] = deque()
    with _environment(variables), worker_pool(workers, tasks_per_worker, _begin) as pool:
        while True:
            for each in itertools.islice(arguments, AHEAD_PER_WORKER * workers - len(ahead)):
                ahead.append(pool.submit(work, *each))
            if not ahead:
                return
            yield ahead.popleft().result(STORY_TIMEOUT_S)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started meanwhile have these variables, unless they have others by these names."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _begin() -> None:
    """In each worker. What the roles log is of no use here; failures are told by the parent.

    A seventh of the time went into looking for garbage among the modules, again and again: each story, and each call of
    the sweep, does it at its end, among what is new.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    map_large_blocks()
    gc.freeze()
    gc.disable()
