"""The stories of each kind of outage, and running them by worker processes."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from mqproc.config.options import FlushDiskType
from mqproc.errors import DiskFullError, MqprocError, SendOutcomeUnknownError
from mqproc.io.fault_injection import CRASH_POINTS, CRASH_VARIABLE, FAULT_VARIABLE
from mqproc.ipc.bell import semaphore_names, unlink_semaphore
from mqproc.layout import control as words_of
from mqproc.paths import segment_name
from mqproc.supervisor import signals as prctl
from tests.outages import rig
from tests.outages.rig import TOPICS, Answers, Disk, SmallDevice, WarmGroup, check, check_stopped, customers, hold, warm
from tests.support.group import wait_until
from tests.support.processes import worker_pool

# Full and failing real disks under a real group under load.


DISK_MESSAGES: Final = 200
MESSAGE_BYTES: Final = 10_000
RECOVERY_TIMEOUT_S: Final = 60.0
IMPATIENT_S: Final = 1.0
FULL_BYTES: Final = 64 << 20
FULL_TIMES: Final = 3
FULL_S: Final = 0.3
LEFT_BYTES_MAX: Final = 1 << 20
FAILING_BYTES: Final = 192 << 20
TAKEN_BYTES_MAX: Final = 4 << 20
# Nothing is deleted to free space.
KEPT: Final[dict[str, Any]] = {"clean_file_forcibly_enable": "false"}


class FullDisk:
    """The story of a seed: the disk becomes full three times, and roles are killed meanwhile."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"full {seed}")
        self._answers = Answers()
        self._disk = Disk(folder / "disk", folder / "image", FULL_BYTES)
        flush = self._chance.choice(list(FlushDiskType))
        options = OPTIONS | KEPT | {"flush_disk_type": flush.value}
        self._group = WarmGroup(self._disk.folder / "store", **options)
        self._group.output = folder / "store.log"

    def run(self) -> int:
        """Run it; return how often the disk was full. Raises AssertionError."""
        try:
            self._group.start()
            with customers(self._group.store, self._folder, "0", CUSTOMERS, self._answers, self._seed):
                for _ in range(FULL_TIMES):
                    self._be_full()
            check(self._group, self._answers)
            check_stopped(self._group, whole=True)
        finally:
            self._group.close()
            self._disk.unmount()
        return FULL_TIMES

    def _be_full(self) -> None:
        """Sends are rejected, reads work, a killed role restarts; with free space, all works again."""
        group, ballast = self._group, self._disk.folder / "ballast"
        group.wait_appended(DISK_MESSAGES)
        with group.client(timeout=RECOVERY_TIMEOUT_S) as client:
            name = f"kept-{len(self._answers.sent)}"
            self._answers.sent.add(name)
            kept = client.send(TOPICS[0], name.encode())
            self._disk.fill(ballast, self._chance.randrange(LEFT_BYTES_MAX))
            self._send_until_refused()
            assert client.get(kept.message_id).body == name.encode()
            if self._chance.random() < 0.7:
                self._kill_one()
            time.sleep(FULL_S)
            ballast.unlink()
        group.wait_appended(DISK_MESSAGES)
        group.wait_dispatched()

    def _send_until_refused(self) -> None:
        """Send until rejected: a client retries until its timeout. Raises other errors."""
        with self._group.client(timeout=IMPATIENT_S) as client:
            deadline = time.monotonic() + RECOVERY_TIMEOUT_S
            while time.monotonic() < deadline:
                try:
                    client.send("full", b"x" * MESSAGE_BYTES)
                except DiskFullError:
                    return
                except MqprocError as error:
                    if not error.retryable and not isinstance(error, SendOutcomeUnknownError):
                        raise
        raise AssertionError(f"a full disk accepts messages for {RECOVERY_TIMEOUT_S:g} s")

    def _kill_one(self) -> None:
        role = self._chance.choice(words_of.ROLES)
        pid = self._group.pid(role)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._group.pid(role) != pid, RECOVERY_TIMEOUT_S, f"another {role} on a full disk")


class FailingDisk:
    """The story of a seed: a device rejects writes, so syncs fail and lose their data."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"eio {seed}")
        self._answers = Answers()
        self._flush = self._chance.choice(list(FlushDiskType))
        self._device = SmallDevice(folder / "device")
        self._disk = Disk(folder / "disk", self._device.folder / "image", FAILING_BYTES)
        self._group = WarmGroup(self._disk.folder / "store", **OPTIONS | KEPT | {"flush_disk_type": self._flush.value})
        self._group.output = folder / "store.log"

    def run(self) -> int:
        """Run it; return how often the device failed. Raises AssertionError."""
        group = self._group
        try:
            group.start()
            with customers(group.store, self._folder, "0", CUSTOMERS, self._answers, self._seed):
                group.wait_appended(DISK_MESSAGES)
                self._device.leave(self._chance.randrange(TAKEN_BYTES_MAX))
                wait_until(self._has_failed, RECOVERY_TIMEOUT_S, "a failed sync")
                time.sleep(FULL_S)
                if self._flush is FlushDiskType.ASYNC_FLUSH:
                    words = group.words()
                    self._answers.durable = max(words["writer_synced"], words["flusher_synced"])
            group.close()
            self._disk.unmount()
            self._device.repair()
            self._disk.mount()
            recovered(group, self._answers)
            with customers(group.store, self._folder, "1", CUSTOMERS, self._answers, self._seed):
                group.wait_appended(DISK_MESSAGES)
            check_stopped(group, whole=True)
        finally:
            group.close()
            self._disk.unmount()
            self._device.unmount()
        return 1

    def _has_failed(self) -> bool:
        """Whether a sync has failed, or the group ended on a read-only file system."""
        words, process = self._group.words(), self._group.process
        ended = process is not None and process.poll() is not None
        return ended or any(value for word, value in words.items() if word.endswith("_sync_errno"))


# Storage calls that fail once or persistently in a real group under load.


FAULT_LIVES: Final = 3
LOAD_S: Final = 0.7
STICKY_CHANCE: Final = 0.25
FAULTS: Final = {
    "allocate": ("ENOSPC", 30),
    "make_folder": ("ENOSPC", 20),
    "map": ("ENOMEM", 40),
    "open": ("EMFILE", 200),
    "pread": ("EIO", 200),
    "pread_into": ("EIO", 40),
    "pwrite": ("ENOSPC", 400),
    "rename": ("EIO", 15),
    "set_size": ("ENOSPC", 20),
    "sync": ("EIO", 60),
    "sync_file_system": ("EIO", 3),
    "sync_folder": ("EIO", 30),
    "unlink": ("EIO", 20),
    "zero": ("EIO", 5),
}
"""By call: the error, and the number of calls from which one is chosen."""


class Faults:
    """The story of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"faults {seed}")
        self._answers = Answers()
        flush = self._chance.choice(list(FlushDiskType))
        self._group = WarmGroup(folder / "store", **OPTIONS | {"flush_disk_type": flush.value})

    def run(self) -> int:
        """Fail calls, restart and check; the number of faults. Raises AssertionError."""
        try:
            for life in range(FAULT_LIVES):
                self._live(f"{life}")
                recovered(self._group, self._answers)
                check_stopped(self._group, whole=True)
        finally:
            self._group.close()
        return FAULT_LIVES

    def _live(self, life: str) -> None:
        """Start with the fault; if that succeeds, add load; finally kill everything."""
        call = self._chance.choice(sorted(FAULTS))
        errno, calls = FAULTS[call]
        fault = f"{call}:{self._chance.randint(1, calls)}:{errno}"
        fault += ":sticky" if self._chance.random() < STICKY_CHANCE else ""
        group = self._group
        if group.starts({FAULT_VARIABLE: fault}):
            with customers(group.store, self._folder, life, CUSTOMERS, self._answers, self._seed):
                time.sleep(LOAD_S)
                group.kill()
        else:
            group.wait_ended()


def recovered(group: WarmGroup, answers: Answers) -> None:
    """Start again, after a repair if a failed sync requires one, and check."""
    if group.paths.read_only.exists():
        flags = [part for name, value in group.options.items() for part in ("--set", f"{name}={value}")]
        assert group.run("store", "repair", str(group.store), "--execute", *flags) == 0, "repair failed"
    group.start()
    check(group, answers)


# Power cuts of a real group on a real file system, five per seed: under load and during recovery.


CUT_LIVES: Final = 5
DISK_BYTES: Final = 256 << 20
LOAD_S_MAX: Final = 1.0
MESSAGES_MIN: Final = 200
START_CUT_CHANCE: Final = 0.3
START_S_MAX: Final = 0.5


class Cuts:
    """The story of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"cuts {seed}")
        self._flush = self._chance.choice(list(FlushDiskType))
        self._answers = Answers()
        self._disk = Disk(folder / "disk", folder / "image", DISK_BYTES)
        # With rare flushes, more of the log is only in memory.
        interval = {"flush_interval_commit_log": self._chance.choice([20, 200, 500])}
        options = OPTIONS | interval | {"flush_disk_type": self._flush.value}
        self._group = WarmGroup(self._disk.folder / "store", **options)
        self._group.output = folder / "store.log"

    def run(self) -> int:
        """Cut the power and check; return the number of cuts. Raises AssertionError."""
        cuts = 0
        try:
            for life in range(CUT_LIVES):
                if life and self._chance.random() < START_CUT_CHANCE:
                    self.cut_start()
                    cuts += 1
                self._live(f"{life}")
                cuts += 1
            self._group.start()
            check(self._group, self._answers)
            assert self._answers.acknowledged, "no message was acknowledged"
            check_stopped(self._group, whole=True)
        finally:
            self._group.close()
            self._disk.unmount()
        return cuts

    def _live(self, life: str) -> None:
        """Start and check that everything durable is present; then load and the cut."""
        group = self._group.start()
        check(group, self._answers)
        with customers(group.store, self._folder, life, CUSTOMERS, self._answers, self._seed) as at_work:
            group.wait_appended(MESSAGES_MIN)
            time.sleep(self._chance.random() * LOAD_S_MAX)
            self._stir()
            # A sync in progress at the cut may falsely report success.
            hold(at_work)
            if self._flush is FlushDiskType.ASYNC_FLUSH:
                # Read before the cut: everything synced by then must be present afterwards.
                words = group.words()
                self._answers.durable = max(words["writer_synced"], words["flusher_synced"])
            self._disk.cut()
            group.close()
        self._disk.unmount()
        self._disk.mount()

    def cut_start(self) -> None:
        """Cut the power during the recovery of a start."""
        self._group.begin()
        time.sleep(self._chance.random() * START_S_MAX)
        self._stir()
        store_id = self._group.words().get("store_id", 0)
        self._disk.cut()
        self._group.close()
        # After the loss of the control file, the next start does not know these.
        for name in semaphore_names(store_id):
            unlink_semaphore(name)
        self._disk.unmount()
        self._disk.mount()

    def _stir(self) -> None:
        if self._chance.random() < 0.7:
            found = sorted(Path(folder, name) for folder, _, names in os.walk(self._group.store) for name in names)
            files = [path for path in found if path.is_file()]
            self._disk.stir(self._chance, self._chance.sample(files, min(len(files), 10)))


# kill -9 at crash points of a real group under load, five points per seed, and sometimes of the whole group.


KILL_LIVES: Final = 5
CUSTOMERS: Final = 2
POINT_TIMEOUT_S: Final = 60.0
KILL_MESSAGES: Final = 100
"""Messages that must follow the kill of a role."""
KILL_ALL_CHANCE: Final = 0.6
TORN_BYTES: Final = 50
POINTS: Final = tuple(CRASH_POINTS)
IN_A_START: Final = (
    "control.",
    "recover.",
    "supervisor.bells",
    "supervisor.forked",
    "supervisor.locked",
    "supervisor.recovered",
)
IN_A_STOP: Final = ("offsets.", "supervisor.abort_removed", "supervisor.stopped")
AT_A_DEATH: Final = "supervisor.buried"
NTH_MAX: Final = {
    "ack.": 100,
    "append.": 100,
    "checkpoint.": 8,
    "cq.half_unit": 100,
    "cq.roll": 8,
    "dispatch.": 100,
    "flush.": 4,
    "index.": 4,
    "mark.": 8,
    "pop.moved": 1,
    "pop.": 2,
    "retention.": 2,
    "retry.": 2,
    "roll.": 3,
    "supervisor.forked": 8,
}
"""How often a point is passed at least within a second or two, by the first prefix that matches; default once."""
OPTIONS: Final[dict[str, Any]] = {
    "mapped_file_size_commit_log": 1 << 18,
    "mapped_file_size_consume_queue": 2_000,
    "max_index_num": 1_000,
    "max_message_size": 1 << 16,
    "default_topic_queue_nums": 2,
    "max_queues": 4_096,
    "flush_interval_commit_log": 20,
    "flush_disk_type": FlushDiskType.ASYNC_FLUSH.value,
}
RETENTION: Final[dict[str, Any]] = {
    "file_reserved_time": 0,
    "delete_when": ";".join(map(str, range(24))),
    "clean_resource_interval": 1_000,
    # Messages that no group has consumed yet are deleted too: the customers of a killed life leave some behind.
    "retention_guard": "none",
    # Nothing is deleted before queues are durable, and the forced flush syncs a queue with a single dirty page.
    "flush_consume_queue_thorough_interval": 1_000,
}


def points_of(seed: int) -> list[str]:
    """Crash points of a seed: all points in turn."""
    return [POINTS[(KILL_LIVES * seed + life) % len(POINTS)] for life in range(KILL_LIVES)]


class Kills:
    """The story of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"kills {seed}")
        self._answers = Answers()
        self._group = WarmGroup(folder / "store", **OPTIONS)
        self._points = points_of(seed)
        self._deletes = False

    def run(self) -> int:
        """Run, kill and check; the number of kills at points. Raises AssertionError."""
        try:
            for life, point in enumerate(self._points):
                self._live(f"{life}", point)
            self._end_well()
        finally:
            self._group.close()
        return len(self._points)

    def _live(self, life: str, point: str) -> None:
        group, chance = self._group, self._chance
        group.options |= {"flush_disk_type": self._flush(point).value}
        if point.startswith("retention."):
            group.options |= RETENTION
            self._deletes = True
        armed = {CRASH_VARIABLE: f"{point}:{chance.randint(1, _nth_max(point))}"}
        if point.startswith(IN_A_START):
            self._fill(life)
            _tear(group)
        if not group.starts(armed):
            # Recovery passes some points of the roles too.
            assert group.wait_ended() == -signal.SIGKILL, f"{armed}: the start has failed"
            return
        assert not point.startswith(IN_A_START), f"{armed} was not passed in a start"
        with self._customers(life):
            if point.startswith(IN_A_STOP):
                self._stop_and_die(armed)
                return
            if point == AT_A_DEATH:
                os.kill(group.pid(self._chance.choice(words_of.ROLES)), signal.SIGKILL)
                assert group.wait_ended() == -signal.SIGKILL, f"{armed} was not passed at the end of a role"
                return
            wait_until(self._has_died, POINT_TIMEOUT_S, f"{armed}")
            group.wait_appended(KILL_MESSAGES)
            if chance.random() < KILL_ALL_CHANCE:
                group.kill()
                return
        assert group.stop() == 0, "the group did not stop in order"
        group.wait_free()

    def _stop_and_die(self, armed: dict[str, str]) -> None:
        """Kill at the save of offsets during the stop, unless the save interval has just passed."""
        group = self._group
        wait_until(lambda: group.words()["group_commits"] > 0, POINT_TIMEOUT_S, "progress")
        code = group.stop()
        assert code != 0 or self._has_died(), f"{armed} was not passed in a stop"
        group.wait_free()

    def _fill(self, life: str) -> None:
        """Load that ends with a kill, so that recovery has work to do."""
        self._group.start()
        with self._customers(f"{life}-before"):
            self._group.wait_appended(KILL_MESSAGES)
            self._group.kill()

    def _flush(self, point: str) -> FlushDiskType:
        # Under SYNC_FLUSH the writer syncs the log itself.
        kinds = [FlushDiskType.ASYNC_FLUSH] if point == "flush.after_msync" else list(FlushDiskType)
        return self._chance.choice(kinds)

    def _customers(self, life: str) -> Any:
        return customers(self._group.store, self._folder, life, CUSTOMERS, self._answers, self._seed)

    def _has_died(self) -> bool:
        words, process = self._group.words(), self._group.process
        return (process is not None and process.poll() is not None) or any(
            words[f"{role}.incarnation"] > 1 for role in words_of.ROLES
        )

    def _end_well(self) -> None:
        self._group.start()
        check(self._group, self._answers)
        assert self._answers.acknowledged, "no message was acknowledged"
        check_stopped(self._group, whole=not self._deletes)


def _nth_max(point: str) -> int:
    return next((count for begin, count in NTH_MAX.items() if point.startswith(begin)), 1)


def _tear(group: WarmGroup) -> None:
    """Add a torn record at the end, begin the next segment, and remove the marks."""
    for mark in group.paths.marks.iterdir():
        mark.unlink()
    size, end = OPTIONS["mapped_file_size_commit_log"], group.words()["written"]
    start = end // size * size
    with (group.paths.commit_log / segment_name(start)).open("r+b") as last:
        last.seek(end - start)
        # Complete unpublished records after a torn one would be damage, not the end of the log.
        last.write((b"\xff" * TORN_BYTES).ljust(size, b"\0")[: size - (end - start)])
    (group.paths.commit_log / segment_name(start + size)).write_bytes(bytes(size))


KINDS: Final[dict[str, Callable[[int, Path], int]]] = {
    "kills": lambda seed, folder: Kills(seed, folder).run(),
    "cuts": lambda seed, folder: Cuts(seed, folder).run(),
    "faults": lambda seed, folder: Faults(seed, folder).run(),
    "full": lambda seed, folder: FullDisk(seed, folder).run(),
    "eio": lambda seed, folder: FailingDisk(seed, folder).run(),
}
"""Runs the story of a seed in its own folder, returns its number of outages, and raises on a violation."""
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
class StoryResult:
    """Result of a story: the number of outages, or the failure."""

    kind: str
    seed: int
    outages: int = 0
    failure: str = ""

    @property
    def repeat(self) -> str:
        return f"python -m tests.outages {self.kind} {self.seed}"


class Progress:
    """Progress, kept in a file if any: `done` are seeds by kind."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        found = msgspec.json.decode(path.read_bytes()) if path and path.exists() else {}
        self.done: dict[str, list[int]] = found.get("done", {})
        self.outages: Counter[str] = Counter(found.get("outages", {}))
        self.failed: list[str] = found.get("failed", [])
        self.took_s: float = found.get("took_s", 0.0)

    def add(self, story: StoryResult, took_s: float) -> None:
        """Add a story that took `took_s` since the last one."""
        self.done.setdefault(story.kind, []).append(story.seed)
        self.outages[story.kind] += story.outages
        self.took_s += took_s
        if story.failure:
            self.failed.append(story.repeat)
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
    """Run the remaining stories; print each failure with the command that repeats it."""
    if reason := rig.why_no_disks():
        for kind in NEED_DISKS & seeds.keys():
            print(f"{kind}: skipped, {reason}")
        seeds = {kind: numbers for kind, numbers in seeds.items() if kind not in NEED_DISKS}
    left = ((kind, seed) for kind, numbers in seeds.items() for seed in numbers)
    left = (each for each in left if each[1] not in progress.done.get(each[0], []))
    before = time.monotonic()
    for story in _results(left, folder, workers):
        now = time.monotonic()
        progress.add(story, now - before)
        before = now
        if story.failure:
            print(f"{story.failure}repeat: {story.repeat}", flush=True)
        else:
            print(f"{story.kind} {story.seed}: {story.outages} outages", flush=True)
    return progress


def _results(left: Iterator[tuple[str, int]], folder: Path, workers: int) -> Iterator[StoryResult]:
    """Results of the stories in the order in which they end, by worker processes."""
    with worker_pool(workers, SEEDS_PER_WORKER, _begin) as pool:
        running: set[Future[StoryResult]] = set()
        while True:
            running |= {pool.submit(_tell, *each, folder) for each in itertools.islice(left, workers - len(running))}
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _begin() -> None:
    """Initialize a worker. It dies with its parent, and its groups and mounts with it."""
    prctl.die_with_parent()
    if not rig.why_no_disks():
        rig.hide_mounts()
    warm()


def _tell(kind: str, seed: int, folder: Path) -> StoryResult:
    place = folder / f"{kind}{seed}"
    place.mkdir()
    try:
        return StoryResult(kind, seed, KINDS[kind](seed, place))
    except (Exception, pytest.fail.Exception) as error:
        return StoryResult(kind, seed, failure="".join(traceback.format_exception(error)) + _last_words(place))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _last_words(place: Path) -> str:
    """The last output of the groups of a story."""
    logs = sorted(place.rglob("*.log"))
    return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-LAST_WORDS:]}\n" for log in logs)
