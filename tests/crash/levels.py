"""The sweep of failing calls; levels of stories, sweeps and planted bugs by workers.

A level runs the seeds in order, and resumes from its progress file, if any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import hashlib
import io
import itertools
import os
import pickle
import random
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

from mqproc.config.options import FlushDiskType, Options, RetentionGuard
from mqproc.errors import MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.kernels.jit import compile as jit
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from tests.crash import invariants as checks
from tests.crash.clients import Deletions, Fate, Party, Producers, Receivers, Senders, SimulatedIds, found_in
from tests.crash.disk import CONTROL, Broken, Disk, Fault, Grain, Loss, Machine, Metadata, Pick, SilentJournal, walk_log
from tests.crash.group import Group, Schedule, SimulatedClock
from tests.crash.invariants import Truth
from tests.crash.planted import PLANTS
from tests.crash.story import FIRST_MS, Story, boot, simulated_boots, simulated_ids, simulated_zone
from tests.support.processes import map_large_blocks, worker_pool
from tests.support.store_checks import entries_below

# The sweep: in a fixed program, every storage call fails once in each possible way.
#
#     first life     sends, a killed dispatcher, a killed writer, more sends; images; all are killed
#     second life    recovery, sends beside transactions and simple consumers, a killed query; images; all are killed
#     last life      recovery, sends, an orderly stop; the store is checked
#
# Under SYNC_FLUSH clients wait for durability, under ASYNC_FLUSH they do not.
# A call fails in the life that makes it, which begins as in every run; the last life follows. A start that meets the
# failure may fail, the next one must succeed. A role that it ends is restarted, as by a supervisor. After any failure,
# acknowledged messages are stored once, transactions and receives of simple consumers hold, and messages are accepted
# again, unless a failed sync has made the store read-only.


TURNS_MAX = 4_000
# Then a process with only failures since is ended: it cannot work without these calls.
TURNS_WITH_STUCK = 1_500
TURN_MS = 5
BETWEEN_LIVES_MS = 600_000
# For the first life and the next ones.
FIRST_SEED = 9
LOSSES = (
    Loss(Metadata.ORDERED, Grain.PAGE, Pick.NONE),
    Loss(Metadata.FREE, Grain.SECTOR, Pick.RANDOM),
)
TAKES_SPACE = frozenset(
    {"create", "mkdir", "rename", "link", "symlink", "pwrite", "zero", "allocate", "set_size", "sync", "sync_folder"}
)
# Resources that a process can run out of.
LACKS = {"open": errno.EMFILE, "create": errno.EMFILE, "map": errno.ENOMEM}
STORE, IMAGE = Path("store"), Path("image")


@dataclass(frozen=True, slots=True)
class Life:
    """Events of a life: frames sent, roles killed by turn, whether the other clients run once."""

    frames: int
    kills: Mapping[int, str] = field(default_factory=dict)
    parties: bool = False


FIRST = Life(6, {40: words_of.DISPATCHER, 80: words_of.WRITER})
OF_PARTIES = Life(1, {150: words_of.QUERY}, parties=True)
LAST = Life(2)
LIVES = (FIRST, OF_PARTIES, LAST)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: the `nth` storage call (from 1) fails with `errno`; a short write after its half."""

    nth: int
    call: str
    errno: int
    short: bool = False
    sticky: bool = False
    """All later calls of this kind fail too, until the role or start that meets them ends."""

    def __str__(self) -> str:
        return f"{self.nth}:{errno.errorcode[self.errno]}{':short' * self.short}{':sticky' * self.sticky}"


def case_of(text: str, calls: list[str]) -> Case:
    """The case with this text from `str`."""
    nth, name, *how = text.split(":")
    return Case(int(nth), calls[int(nth) - 1], getattr(errno, name), "short" in how, "sticky" in how)


def cases(calls: list[str]) -> Iterator[tuple[Case, ...]]:
    """Every way in which each call of a run without failures can fail, grouped by call."""
    for nth, call in enumerate(calls, 1):
        yield tuple(_cases_of(nth, call))


def _cases_of(nth: int, call: str) -> Iterator[Case]:
    ways = [errno.EIO]
    if call in TAKES_SPACE:
        ways.append(errno.ENOSPC)
    if call in LACKS:
        ways.append(LACKS[call])
    for way in ways:
        yield Case(nth, call, way)
    if call == "pwrite":
        yield Case(nth, call, errno.ENOSPC, short=True)
    for way in ways:
        yield Case(nth, call, way, sticky=True)


@dataclass(frozen=True, slots=True)
class Ran:
    """A case that passed, and why other cases of its call are the same run."""

    case: Case
    errno_asked: bool
    met_again: bool

    def is_also(self, case: Case) -> bool:
        """Whether the cases differ only in an unobserved errno or unobserved later failures."""
        if case.short or self.case.short:
            return False
        if case.errno != self.case.errno and self.errno_asked:
            return False
        return case.sticky == self.case.sticky or not self.met_again


def options_of(flush: FlushDiskType) -> Options:
    """Files so small that log, queues and index roll within the program."""
    return Options(
        mapped_file_size_commit_log=16384,
        max_message_size=4096,
        mapped_file_size_consume_queue=400,
        max_hash_slot_num=20,
        max_index_num=40,
        max_queues=64,
        default_topic_queue_nums=2,
        flush_disk_type=flush,
        flush_interval_commit_log=50,
        flush_interval_consume_queue=100,
        flush_commit_log_least_pages=0,
        flush_consume_queue_least_pages=0,
        retention_guard=RetentionGuard.NONE,
        disk_floor_bytes=0,
        transaction_timeout=200,
        transaction_check_interval=500,
    )


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of a life: calls before it, state of the program, a copy of the store."""

    life: Life
    calls: int
    program: bytes
    store: Path


class Whole:
    """The program without a failure: its calls, and the beginnings of lives in `folder`."""

    def __init__(self, folder: Path, flush: FlushDiskType) -> None:
        self.program = Program(flush, Seen(folder / "seen"))
        self._begins: list[Begin] = []
        folder.mkdir(parents=True)
        with contextlib.chdir(folder):
            STORE.mkdir()
            for number, life in enumerate(LIVES):
                store = folder / f"begin{number}"
                copy_store(STORE, store)
                self._begins.append(Begin(life, len(self.program.calls), pickle.dumps(self.program), store))
                self.program.live(life)

    @property
    def calls(self) -> list[str]:
        """The storage calls by kind."""
        return self.program.calls

    def run(self, folder: Path, case: Case) -> Ran:
        """Run the life that makes the failing call, and the last life. Raises Broken.

        Stops at a second start or a last life that begins like one that has passed.
        """
        begin = max((each for each in self._begins if each.calls < case.nth), key=lambda each: each.calls)
        program: Program = pickle.loads(begin.program)
        folder.mkdir(parents=True)
        with contextlib.chdir(folder):
            copy_store(begin.store, STORE)
            program.fault = fault = Fault("", case.nth, case.errno, short=case.short, sticky=case.sticky)
            with contextlib.suppress(Known):
                program.live(begin.life)
                if begin.life != LAST:
                    program.live(LAST)
            program.all_went_well()
        return Ran(case, fault.errno_asked, fault.met_again)


class Known(Exception):
    """An equal state has passed before."""


def copy_store(source: Path, target: Path) -> None:
    """Copy a store without its stale sockets."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))


class Program:
    """State of the program: its clients, and the store in the folder STORE."""

    def __init__(self, flush: FlushDiskType, seen: Seen) -> None:
        self._options = options_of(flush)
        self._seen = seen
        self._rng = random.Random(0)
        self._ids = 0
        self._senders = Senders(self._rng, properties=True)
        self.producers = Producers(self._rng, self._senders)
        self.receivers = Receivers(self._rng, self._senders)
        self._parties: tuple[Party, ...] = (self.producers, self.receivers)
        self._deletions = Deletions(self._rng, self._senders)
        self._clock_ms = FIRST_MS
        self.fault: Fault | None = None
        """The planned fault, counted from the first call of the first life."""
        self.calls: list[str] = []
        self._begun: list[str] = []
        """Digests of how the second try of a failed start and the last life began: equal ones end equally."""

    def live(self, life: Life) -> None:
        """Run one life; at its end all are killed, in the last one stopped. Raises Broken."""
        boot(0)
        self._begin(life)
        ids = SimulatedIds(self._ids)
        with simulated_ids(ids), simulated_boots(), simulated_zone():
            machine, group, schedule, clock = self._start()
            try:
                self._work(life, group, schedule, clock)
                self._send_one(group, schedule, clock)
                truth = self._truth(group)
                if life == LAST:
                    group.restart_stuck()
                    group.stop(self._rng)
                    truth = self._truth(group)
                else:
                    self._look_at_images(machine, truth)
                    group.kill_all()
                self._ids = ids.frames
                self._check(STORE, truth, power_loss=False)
            finally:
                machine.over = True
                machine.disk.release_maps()
                schedule.end_all()
                self._clock_ms, self._ids = clock.time_ms(), ids.frames

    def _begin(self, life: Life) -> None:
        """Give every life its own seed and time, independent of earlier ones."""
        number = LIVES.index(life)
        self._rng.seed(FIRST_SEED + number)
        self._clock_ms = self._senders.time_ms = FIRST_MS + number * BETWEEN_LIVES_MS
        if self.fault is not None and self.fault.nth <= len(self.calls):
            state = {**self._state(), "epoch": self._epoch()}
            self._begin_as(digest_of(STORE, state, without=CONTROL))

    def _start(self) -> tuple[Machine, Group, Schedule, SimulatedClock]:
        """Start a group, at the second try if the first one met the failure."""
        for _try in range(2):
            machine = Machine(Disk.of(STORE), calls=len(self.calls), fault=self.fault, history=self.calls)
            schedule = Schedule(self._rng, SilentJournal())
            machine.between = schedule.pause
            clock = SimulatedClock(schedule, self._clock_ms)
            try:
                return machine, Group(STORE, self._options, machine, schedule, clock), schedule, clock
            except (Broken, OSError, MqprocError) as error:
                cause = error.__cause__ if isinstance(error, Broken) else error
                if not machine.failed or not isinstance(cause, OSError | MqprocError):
                    raise
                machine.over = True
                machine.disk.release_maps()
                schedule.end_all()
                self._begin_as(digest_of(STORE, self._state()))
        raise Broken("a start without a failing call failed")

    def _state(self) -> dict[str, object]:
        """State beside the store with which a life begins: clients, clock, and random generator."""
        state = {name: value for name, value in vars(self).items() if name not in ("fault", "calls", "_begun", "_seen")}
        return {**state, "seed": self._rng.getstate()}

    def _epoch(self) -> int:
        """The epoch, the only part of the control file on which a start depends here."""
        control = Control.open(StoreIO(), StorePaths(STORE))
        try:
            return control.load(words_of.EPOCH)
        finally:
            control.close()

    def _begin_as(self, digest: str) -> None:
        """Raise Known if a run that begins like this has passed."""
        begun = f"begun {digest}"
        if begun in self._seen:
            raise Known
        self._begun.append(begun)

    def all_went_well(self) -> None:
        """Remember that all beginnings so far have passed."""
        for digest in self._begun:
            self._seen.add(digest)

    def _send_one(self, group: Group, schedule: Schedule, clock: SimulatedClock) -> None:
        """Send a message. The failure is over at the latest when the second try has begun."""
        for tried in range(3):
            if group.read_only:
                return
            if tried:
                group.restart_stuck()
            self._work(Life(1), group, schedule, clock)
            if (fate := self._sent_last()) is Fate.STORED:
                return
        raise Broken(f"a message was not accepted: {fate.value}")

    def _sent_last(self) -> Fate:
        """Outcome of the sender's last message; producers make their own."""
        decided = self.producers.decided
        return next(sent.fate for sent in reversed(self._senders.sent) if sent.number not in decided)

    def _work(self, life: Life, group: Group, schedule: Schedule, clock: SimulatedClock) -> None:
        tasks = {"sender": lambda: self._senders.run(group.paths, schedule, life.frames)}
        if life.parties:
            tasks["producer"] = lambda: self.producers.run_once(group.paths, schedule)
            tasks["receiver"] = lambda: self.receivers.run_once(group.paths, schedule, clock)
        for name, task in tasks.items():
            schedule.add(name, task)
        for turn in range(TURNS_MAX):
            if turn > max(life.kills, default=0) and not tasks.keys() & set(schedule.names):
                return
            schedule.turn()
            group.restart_fallen()
            if turn == TURNS_WITH_STUCK:
                group.restart_stuck()
            clock.advance(TURN_MS)
            self._senders.time_ms = clock.time_ms()
            if (name := life.kills.get(turn)) and name in group.names:
                group.kill(name)
                group.start(name)
        raise Broken(f"not all clients were answered within {TURNS_MAX:,} turns")

    @property
    def have_worked(self) -> bool:
        """Whether transactions were committed and rolled back, and a message acknowledged."""
        ended = {self.producers.decided[number] for number in self.producers.ended}
        return ended == {True, False} and bool(self.receivers.acked)

    def _truth(self, group: Group) -> Truth:
        records = walk_log(group.paths.commit_log)
        written = group.control.load(words_of.WRITTEN)
        return Truth(records, group.synced, written, 0, set(), group.read_only)

    def _look_at_images(self, machine: Machine, truth: Truth) -> None:
        boot(1)
        for loss in LOSSES:
            machine.disk.observe()
            machine.disk.image(IMAGE, loss, self._rng, SilentJournal())
            (IMAGE / "mqproc").mkdir(exist_ok=True)
            (IMAGE / "mqproc").chmod(0o700)
            self._check(IMAGE, truth, power_loss=True)
            shutil.rmtree(IMAGE)
        boot(0)

    def _check(self, root: Path, truth: Truth, *, power_loss: bool) -> None:
        """Recover a store and check it, unless an equal one has passed."""
        # No message is born before the next life. The truth's records are those of the store's own log.
        self._senders.time_ms = 0
        log = digest_of(StorePaths(STORE).commit_log, dataclasses.replace(truth, records=[]))
        key = (log, self._options, self._senders.sent, self._parties, self._deletions, power_loss)
        digest = digest_of(root, key, without=CONTROL)
        # If recovery read the clock, only an equal time gives an equal result.
        digests = f"checked {digest}", f"checked {digest} at {self._clock_ms}"
        seen = any(each in self._seen for each in digests)
        if seen and root != STORE:
            return
        ends = [f"after {each}, {self._epoch()} {self._ids}" for each in digests] if root == STORE else []
        if self.fault is not None and any(each in self._seen for each in ends):
            raise Known
        found = checks.recover(root, self._options, now_ms=self._clock_ms)
        if seen:
            records = checks.records_of(found)
        else:
            records = checks.check_all(found, truth, self._senders, self._deletions, power_loss=power_loss)
            checks.check_parties(found, records, self._parties, minimum=truth.minimum, power_loss=power_loss)
            checks.check_again(found, self._options)
            self._seen.add(digests[found.time_asked])
        if root == STORE:
            self._begun += [ends[found.time_asked]] if self.fault is not None else []
            state = found_in(found.paths, records, sync_flush=self._options.sync_flush)
            for party in self._parties:
                party.resume(state, power_loss=power_loss)


T = TypeVar("T")
STORY_TIMEOUT_S = 1_800
# Compiled kernels and maps of a worker grow a little with each story.
STORIES_PER_WORKER = 50
CALLS_PER_WORKER = 600
# The next result in order may take long: other workers continue meanwhile.
AHEAD_PER_WORKER = 4
LARGE_BYTES = 256 << 10
ROOT: Final = Path(__file__).resolve().parents[2]
# Most stories run until one catches a planted bug, and images of each.
STORIES_PER_PLANT = 60
IMAGES_PER_PLANT = 2
INTERPRETED: Final = {"NUMBA_DISABLE_JIT": "1"}
TELL_EVERY_S = 30


@dataclass(frozen=True, slots=True)
class Level:
    """Stories from `first_seed` on up to this many images, `images_per_crash` at each point."""

    images: int
    first_seed: int
    images_per_crash: int = 10
    twins: bool = False
    """Kernels run as plain Python functions, and their stores in maps are seen line by line."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the processes that run its stories."""
        return INTERPRETED if self.twins else {}


LEVELS = {
    "ci": Level(10_000, 0),
    "nightly": Level(1_000_000, 1_000_000),
    "twins-ci": Level(300, 1, twins=True),
    "twins-nightly": Level(20_000, 1_000_000, twins=True),
}


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one story or one run of the sweep's program."""

    repeat: str
    images: int = 0
    messages: int = 0
    failure: str = ""
    seed: int = 0
    """Seed of a story."""


@dataclass(slots=True)
class Progress:
    """Progress of a level. `next_seed` is the first one whose story is not done."""

    next_seed: int
    images: int = 0
    stories: int = 0
    messages: int = 0
    took_s: float = 0.0
    failed: list[str] = field(default_factory=list)

    def summary(self, level: Level) -> str:
        """Summary in one line."""
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
    """Prefix of a command that repeats the work of this process."""
    return "" if jit.COMPILED else "".join(f"{name}={value} " for name, value in INTERPRETED.items())


def tell_story(seed: int, images: int, folder: Path) -> RunResult:
    """Run one story in its own folder."""
    repeat = f"{prefix()}python -m tests.crash {seed} --images {images}"
    place = folder / f"seed{seed}"
    try:
        tally = Story(seed, place, images, SilentJournal()).run()
    except Exception:
        return RunResult(repeat, failure=traceback.format_exc(), seed=seed)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return RunResult(repeat, tally.images, tally.messages, seed=seed)


def run_cases(whole: Whole, chosen: Sequence[Case], flush: FlushDiskType, folder: Path) -> list[RunResult]:
    """Run the sweep's program with one call failing in every way that makes a difference."""
    runs, ran = [], list[Ran]()
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
        runs.append(RunResult(f"python -m tests.crash --sweep {flush.value} --case {case}", failure=failure))
    # Reference cycles, as at the end of a story.
    gc.collect()
    return runs


def run_level(level: Level, folder: Path, workers: int, progress_path: Path | None = None) -> Progress:
    """Run stories up to the level's images; print failures with commands that repeat them."""
    progress = _read_json(progress_path, Progress(level.first_seed))
    if progress.images >= level.images:
        return progress
    before_s, started = progress.took_s, time.perf_counter()
    seeds = itertools.count(progress.next_seed)
    told_s = started
    stories = ((seed, level.images_per_crash, folder) for seed in seeds)
    for run in _in_order(tell_story, stories, workers, STORIES_PER_WORKER, level.environment):
        progress.next_seed += 1
        progress.images += run.images
        progress.stories += 1
        progress.messages += run.messages
        progress.took_s = before_s + time.perf_counter() - started
        if run.failure:
            progress.failed.append(run.repeat)
            print(f"{run.failure}repeat: {run.repeat}", flush=True)
        _write_json(progress_path, progress)
        if progress.images >= level.images:
            break
        if time.perf_counter() - told_s > TELL_EVERY_S:
            told_s = time.perf_counter()
            print(progress.summary(level), flush=True)
    return progress


@dataclass(slots=True)
class Swept:
    """Progress of a sweep, by flush mode: calls done, in order, and failed cases."""

    calls: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def run_sweep(flush: FlushDiskType, folder: Path, workers: int, progress_path: Path | None = None) -> Swept:
    """Run every remaining case in one flush mode; print failures."""
    progress = _read_json(progress_path, Swept())
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
        for run in ways:
            if run.failure:
                progress.failed.append(run.repeat)
                print(f"{run.failure}repeat: {run.repeat}", flush=True)
        _write_json(progress_path, progress)
        if time.perf_counter() - told_s > TELL_EVERY_S or done == len(chosen):
            told_s = time.perf_counter()
            print(
                f"{flush.value}: {done:,} of {len(chosen):,} calls, {tried:,} of {total:,} failures, "
                f"{len(progress.failed)} runs failed",
                flush=True,
            )
    return progress


def catch(name: str, folder: Path) -> RunResult:
    """Plant a bug, run stories until one catches it, and repeat that story without the bug."""
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
        if "tests.crash.disk.Broken: " not in done.stderr or noticed is None:
            return RunResult(repeat, failure=f"not noticed: {name}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    except subprocess.TimeoutExpired as error:
        return RunResult(repeat, failure=f"{name}: {error}\n")
    # Several bugs may be caught by the same story at the same time.
    return tell_story(int(noticed[1]), IMAGES_PER_PLANT, folder / name.replace(" ", "-"))


@dataclass(slots=True)
class Caught:
    """Planted bugs that were caught."""

    names: list[str] = field(default_factory=list)


def catch_all(folder: Path, workers: int, progress_path: Path | None = None) -> list[str]:
    """Try every remaining planted bug and report the count; the commands that repeat failures."""
    started = time.perf_counter()
    progress = _read_json(progress_path, Caught())
    left = [name for name in sorted(PLANTS) if name not in progress.names]
    failed = []
    for name, run in zip(left, _in_order(catch, ((name, folder) for name in left), workers, len(PLANTS)), strict=True):
        if run.failure:
            failed.append(run.repeat)
            print(f"{run.failure}repeat: {run.repeat}", flush=True)
        else:
            progress.names.append(name)
            _write_json(progress_path, progress)
            if run.seed != PLANTS[name].seed:
                print(f"{name}: caught by seed {run.seed}, searched from {PLANTS[name].seed} on", flush=True)
    took_s = time.perf_counter() - started
    print(f"{len(PLANTS) - len(failed)} of {len(PLANTS)} planted bugs caught, {took_s:.1f} s", flush=True)
    return failed


def _read_json(path: Path | None, none_yet: T) -> T:
    """Contents of a progress file, or the given initial progress."""
    return msgspec.json.decode(path.read_bytes(), type=type(none_yet)) if path and path.exists() else none_yet


def _write_json(path: Path | None, progress: object) -> None:
    """Replace the contents of a progress file."""
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
    """Results of `work` for each tuple of arguments in order, by workers that run ahead."""
    # Large zero buffers of a worker are untouched pages instead of memory that is filled for each recovery.
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
    """Set environment variables for processes started meanwhile, unless already set."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _begin() -> None:
    """Initialize a worker: no log output of roles; failures are printed by the parent.

    A seventh of the time went into garbage collection of modules: instead, each story and each call of the sweep
    collects only new objects at its end.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    map_large_blocks()
    gc.freeze()
    gc.disable()


# States that have passed: an equal beginning has an equal end, and is not run again.
#
# Digests cover everything that a check or a life depends on. They are in a folder shared by all workers.


class _WithoutSeed(pickle.Pickler):
    """Pickles without the state of random generators."""

    def persistent_id(self, obj: object) -> str | None:
        return "seed" if isinstance(obj, random.Random) else None


@dataclass(frozen=True, slots=True)
class Seen:
    """Digests of passed states, as file names in a folder."""

    folder: Path

    def __contains__(self, digest: str) -> bool:
        return (self.folder / digest).exists()

    def add(self, digest: str) -> None:
        """Remember a passed state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / digest).touch()


def digest_of(root: Path, what: object, *, without: str = "") -> str:
    """Digest of all files below `root` except one, and of an object without random generators."""
    pickled = io.BytesIO()
    _WithoutSeed(pickled).dump(what)
    digest = hashlib.blake2b(pickled.getvalue(), digest_size=20)
    for name, entry in entries_below(root):
        if name == without:
            continue
        digest.update(f"{name} {entry.stat(follow_symlinks=False).st_mode}\0".encode())
        if entry.is_symlink():
            digest.update(os.readlink(entry.path).encode())
        elif entry.is_file():
            data = Path(entry.path).read_bytes()
            digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()
