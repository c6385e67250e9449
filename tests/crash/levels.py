"""Many stories, or the whole sweep, by worker processes: how much is looked at by default, and every night.

A level goes over the seeds in order. What it has done stands in a file, where one is asked for: it goes on from there.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from mqproc.config import FlushDiskType
from tests.crash.journal import Unheard
from tests.crash.program import Story
from tests.crash.sweep import RARELY, Case, Whole, cases
from tests.workers import worker_pool

T = TypeVar("T")
STORY_TIMEOUT_S = 1_800
# A worker's compiled kernels and maps grow a little with each story.
STORIES_PER_WORKER = 50
CASES_PER_WORKER = 1_000
# The next one in order may take long: whoever is done with another goes on meanwhile.
AHEAD_PER_WORKER = 4
LARGE_BYTES = 256 << 10
TELL_EVERY_S = 30


@dataclass(frozen=True, slots=True)
class Level:
    """Stories from `first_seed` on until so many images were looked at, `images_per_crash` at each point."""

    images: int
    first_seed: int
    images_per_crash: int = 10


LEVELS = {"ci": Level(10_000, 0), "nightly": Level(1_000_000, 1_000_000)}


@dataclass(frozen=True, slots=True)
class Told:
    """What one story, or one run of the sweep's program, came to."""

    repeat: str
    images: int = 0
    messages: int = 0
    failure: str = ""


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


def tell_story(seed: int, images: int, folder: Path) -> Told:
    """One story in a folder of its own."""
    repeat = f"python -m tests.crash {seed} --images {images}"
    place = folder / f"seed{seed}"
    try:
        tally = Story(seed, place, images, Unheard()).run()
    except Exception:
        return Told(repeat, failure=traceback.format_exc())
    finally:
        _tidy(place)
    return Told(repeat, tally.images, tally.messages)


def run_case(whole: Whole, case: Case, flush: FlushDiskType, folder: Path) -> Told:
    """One run of the sweep's program in a folder of its own."""
    repeat = f"python -m tests.crash --sweep {flush.value} --case {case}"
    place = folder / f"case{case}"
    try:
        whole.run(place, case)
    except Exception:
        return Told(repeat, failure=traceback.format_exc())
    finally:
        _tidy(place)
    return Told(repeat)


def run_level(level: Level, folder: Path, workers: int, progress_path: Path | None = None) -> Progress:
    """Tell stories until the level's images are reached; what failed is printed with the line that repeats it."""
    progress = _read(progress_path, Progress(level.first_seed))
    if progress.images >= level.images:
        return progress
    before_s, started = progress.took_s, time.perf_counter()
    seeds = itertools.count(progress.next_seed)
    told_s = started
    stories = ((seed, level.images_per_crash, folder) for seed in seeds)
    for told in _in_order(tell_story, stories, workers, STORIES_PER_WORKER):
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
    """What has been done of a sweep: so many of its cases, in order, and those of them that failed, by way to flush."""

    runs: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def run_sweep(
    flush: FlushDiskType, folder: Path, workers: int, progress_path: Path | None = None, rarely: int = RARELY
) -> Swept:
    """Every case in one way to flush that is not done yet. What failed is printed."""
    progress = _read(progress_path, Swept())
    whole = Whole(folder / f"whole-{flush.value}", flush)
    chosen = list(cases(whole.calls, rarely))
    done = progress.runs.get(flush.value, 0)
    left = ((whole, case, flush, folder) for case in chosen[done:])
    told_s = time.perf_counter()
    for told in _in_order(run_case, left, workers, CASES_PER_WORKER):
        done += 1
        progress.runs[flush.value] = done
        if told.failure:
            progress.failed.append(told.repeat)
            print(f"{told.failure}repeat: {told.repeat}", flush=True)
        _write(progress_path, progress)
        if time.perf_counter() - told_s > TELL_EVERY_S or done == len(chosen):
            told_s = time.perf_counter()
            print(
                f"{flush.value}: {done:,} of {len(chosen):,} failures, {len(progress.failed)} runs failed", flush=True
            )
    return progress


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
    work: Callable[..., T], arguments: Iterator[tuple[object, ...]], workers: int, tasks_per_worker: int
) -> Iterator[T]:
    """Results of `work`, one for each tuple of arguments, by so many processes, a few of them ahead."""
    # A worker's large buffers of zeros are pages that nobody touches, not memory that is filled anew for each recovery.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(LARGE_BYTES))
    ahead: deque[Future[T]] = deque()
    with worker_pool(workers, tasks_per_worker, _begin) as pool:
        while True:
            for each in itertools.islice(arguments, AHEAD_PER_WORKER * workers - len(ahead)):
                ahead.append(pool.submit(work, *each))
            if not ahead:
                return
            yield ahead.popleft().result(STORY_TIMEOUT_S)


def _tidy(place: Path) -> None:
    """After each task: its folder goes, and what only refers to itself."""
    shutil.rmtree(place, ignore_errors=True)
    gc.collect()


def _begin() -> None:
    """In each worker. What the roles log is of no use here; failures are told by the parent.

    A seventh of the time went into looking for garbage among the modules, again and again: `_tidy` does it, among what
    is new.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    gc.freeze()
    gc.disable()
