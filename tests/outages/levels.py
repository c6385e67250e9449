"""Which stories there are, and many of them by worker processes: those of every change, and those of every night."""

from __future__ import annotations

import itertools
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest

from mqproc.supervisor import signals as prctl
from tests.outages import disks
from tests.outages.cuts import Cuts
from tests.outages.disk_troubles import FailingDisk, FullDisk
from tests.outages.faults import Faults
from tests.outages.kills import Kills
from tests.outages.warm_group import warm
from tests.workers import worker_pool

KINDS: Final[dict[str, Callable[[int, Path], int]]] = {
    "kills": lambda seed, folder: Kills(seed, folder).run(),
    "cuts": lambda seed, folder: Cuts(seed, folder).run(),
    "faults": lambda seed, folder: Faults(seed, folder).run(),
    "full": lambda seed, folder: FullDisk(seed, folder).run(),
    "eio": lambda seed, folder: FailingDisk(seed, folder).run(),
}
"""A story of a seed in a folder of its own; it returns how many outages it had, and raises what is wrong."""
NEED_DISKS: Final = {"cuts", "full", "eio"}
LEVELS: Final[dict[str, Mapping[str, range]]] = {
    "brief": {kind: range(1) for kind in KINDS},
    "ci": {"kills": range(13), "cuts": range(4), "faults": range(4), "full": range(1), "eio": range(1)},
    "nightly": {
        "kills": range(1_000, 1_200),
        "cuts": range(1_000, 1_100),
        "faults": range(1_000, 1_100),
        "full": range(1_000, 1_050),
        "eio": range(1_000, 1_050),
    },
}
SEEDS_PER_WORKER: Final = 50
LAST_WORDS: Final = 3_000


@dataclass(frozen=True, slots=True)
class Told:
    """What a story came to: how many outages, or what was wrong."""

    kind: str
    seed: int
    outages: int = 0
    failure: str = ""

    @property
    def repeat(self) -> str:
        return f"python -m tests.outages {self.kind} {self.seed}"


class Progress:
    """What has been done, kept in a file where there is one: `done` are seeds by kind."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        found = msgspec.json.decode(path.read_bytes()) if path and path.exists() else {}
        self.done: dict[str, list[int]] = found.get("done", {})
        self.outages: Counter[str] = Counter(found.get("outages", {}))
        self.failed: list[str] = found.get("failed", [])
        self.took_s: float = found.get("took_s", 0.0)

    def add(self, told: Told, took_s: float) -> None:
        """One story more; it took `took_s` since the last one."""
        self.done.setdefault(told.kind, []).append(told.seed)
        self.outages[told.kind] += told.outages
        self.took_s += took_s
        if told.failure:
            self.failed.append(told.repeat)
        if self._path is not None:
            temporary = self._path.with_name(self._path.name + ".tmp")
            names = "done", "outages", "failed", "took_s"
            temporary.write_bytes(msgspec.json.encode({name: getattr(self, name) for name in names}))
            temporary.replace(self._path)

    def summary(self) -> str:
        """One line, and one for each failure."""
        counts = ", ".join(f"{kind} {count:,}" for kind, count in self.outages.items())
        stories = sum(map(len, self.done.values()))
        lines = [f"{counts or 'nothing'}; {len(self.failed)} of {stories:,} stories failed, {self.took_s:,.1f} s"]
        return "\n".join([*lines, *(f"repeat: {repeat}" for repeat in self.failed)])


def run(seeds: Mapping[str, range], folder: Path, workers: int, progress: Progress) -> Progress:
    """Tell the stories that are not done yet; what failed is printed with the line that repeats it."""
    if reason := disks.missing():
        for kind in NEED_DISKS & seeds.keys():
            print(f"{kind}: skipped, {reason}")
        seeds = {kind: numbers for kind, numbers in seeds.items() if kind not in NEED_DISKS}
    left = ((kind, seed) for kind, numbers in seeds.items() for seed in numbers)
    left = (each for each in left if each[1] not in progress.done.get(each[0], []))
    before = time.monotonic()
    for told in _told(left, folder, workers):
        now = time.monotonic()
        progress.add(told, now - before)
        before = now
        if told.failure:
            print(f"{told.failure}repeat: {told.repeat}", flush=True)
        else:
            print(f"{told.kind} {told.seed}: {told.outages} outages", flush=True)
    return progress


def _told(left: Iterator[tuple[str, int]], folder: Path, workers: int) -> Iterator[Told]:
    """What the stories came to, by so many processes, in the order in which they end."""
    with worker_pool(workers, SEEDS_PER_WORKER, _begin) as pool:
        running: set[Future[Told]] = set()
        while True:
            running |= {pool.submit(_tell, *each, folder) for each in itertools.islice(left, workers - len(running))}
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _begin() -> None:
    """In each worker. It ends with this process, and its groups and its mounts, which are its own, with it."""
    prctl.die_with_parent()
    if not disks.missing():
        disks.hide_mounts()
    warm()


def _tell(kind: str, seed: int, folder: Path) -> Told:
    place = folder / f"{kind}{seed}"
    place.mkdir()
    try:
        return Told(kind, seed, KINDS[kind](seed, place))
    except (Exception, pytest.fail.Exception) as error:
        return Told(kind, seed, failure="".join(traceback.format_exception(error)) + _last_words(place))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _last_words(place: Path) -> str:
    """What groups there said last."""
    logs = sorted(place.rglob("*.log"))
    return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-LAST_WORDS:]}\n" for log in logs)
