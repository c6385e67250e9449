"""The n-th failure: in a fixed program every storage call fails once, in each way in which it can.

    first life    sends, a killed dispatcher, a killed writer, more sends; images; all are killed
    second life   recovery, sends, a stop in order; the store is looked at

A start that meets the failure may fail; the next one must go well. A role that it ends is started again, as a
supervisor does. Whatever the failure, what was acknowledged is there, nothing is twice, and the group takes messages
again, unless a failed sync has made the store read-only.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mqproc.config import FlushDiskType, Options
from mqproc.errors import MqprocError
from mqproc.layout import control as words_of
from tests.crash import checks
from tests.crash.checks import Truth
from tests.crash.deletions import Deletions
from tests.crash.disk import Disk, Grain, Loss, Metadata, Pick
from tests.crash.group import Group
from tests.crash.journal import Journal
from tests.crash.placed import Broken, walk_log
from tests.crash.program import FIRST_MS, simulated_ids
from tests.crash.recording_io import Fault, Machine
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.senders import Fate, Senders

FRAMES = (6, 3)
TURNS_MAX = 4_000
TURN_MS = 5
KILLS = {40: words_of.DISPATCHER, 80: words_of.WRITER}
LOSSES = (
    Loss(Metadata.ORDERED, Grain.PAGE, Pick.NONE),
    Loss(Metadata.FREE, Grain.SECTOR, Pick.RANDOM),
)
TAKES_SPACE = frozenset(
    {"create", "mkdir", "rename", "link", "symlink", "pwrite", "zero", "allocate", "set_size", "sync", "sync_folder"}
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: the `nth` storage call (from 1), of kind `call`, fails with `errno`; a short write after its half."""

    nth: int
    call: str
    errno: int
    short: bool = False

    def __str__(self) -> str:
        return f"{self.nth}:{errno.errorcode[self.errno]}{':short' * self.short}"


def case_of(text: str, calls: list[str]) -> Case:
    """The case that `str` gave this text."""
    nth, name, *short = text.split(":")
    return Case(int(nth), calls[int(nth) - 1], getattr(errno, name), bool(short))


def cases(calls: list[str]) -> Iterator[Case]:
    """Every way in which each of the calls of a run without failures can fail."""
    for nth, call in enumerate(calls, 1):
        yield Case(nth, call, errno.EIO)
        if call in TAKES_SPACE:
            yield Case(nth, call, errno.ENOSPC)
        if call == "pwrite":
            yield Case(nth, call, errno.ENOSPC, short=True)


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
    )


class Program:
    """One run of the program in a folder of its own, with one failure or none."""

    def __init__(self, folder: Path, flush: FlushDiskType, case: Case | None = None) -> None:
        self._root = folder / "store"
        self._image = folder / "image"
        self._options = options_of(flush)
        self._rng = random.Random(0)
        self._senders = Senders(self._rng)
        self._deletions = Deletions(self._rng, self._senders)
        self._fault = Fault("", case.nth, case.errno, short=case.short) if case is not None else None
        self._calls = 0
        self._clock_ms = FIRST_MS
        self.calls: list[str] = []
        """The storage calls that were made, by kind."""

    def run(self) -> None:
        """Run it; raises Broken."""
        self._root.mkdir(parents=True)
        with simulated_ids():
            for life, frames in enumerate(FRAMES):
                self._live(frames, last=life == len(FRAMES) - 1)

    def _live(self, frames: int, *, last: bool) -> None:
        machine, group, schedule, clock = self._start()
        try:
            self._send(group, schedule, clock, frames, KILLS)
            self._send_one(group, schedule, clock)
            truth = self._truth(group)
            if last:
                group.stop(self._rng)
                truth = self._truth(group)
            else:
                self._look_at_images(machine, truth)
                group.kill_all()
            self._note_calls(machine)
            self._check(self._root, truth, power_loss=False)
        finally:
            machine.over = True
            machine.disk.let_go()
            schedule.end_all()
            self._clock_ms = clock.time_ms()

    def _start(self) -> tuple[Machine, Group, Schedule, SimulatedClock]:
        """A group, at the second try if the first one met the failure."""
        for _try in range(2):
            machine = Machine(Disk.of(self._root), calls=self._calls, fault=self._fault, history=self.calls)
            schedule = Schedule(self._rng, Journal())
            machine.between = schedule.pause
            clock = SimulatedClock(schedule, self._clock_ms)
            try:
                return machine, Group(self._root, self._options, machine, schedule, clock), schedule, clock
            except (Broken, OSError, MqprocError) as error:
                cause = error.__cause__ if isinstance(error, Broken) else error
                if not machine.failed or not isinstance(cause, OSError | MqprocError):
                    raise
                machine.over = True
                machine.disk.let_go()
                schedule.end_all()
                self._note_calls(machine)
        raise Broken("a start that met no failure failed")

    def _note_calls(self, machine: Machine) -> None:
        self._calls = machine.calls

    def _send_one(self, group: Group, schedule: Schedule, clock: SimulatedClock) -> None:
        """The failure has passed at the latest when the second try has begun."""
        for _try in range(3):
            if group.read_only:
                return
            self._send(group, schedule, clock, 1, {})
            if self._senders.sent[-1].fate is Fate.STORED:
                return
        raise Broken(f"a message was not taken: {self._senders.sent[-1].fate.value}")

    def _send(
        self, group: Group, schedule: Schedule, clock: SimulatedClock, frames: int, kills: Mapping[int, str]
    ) -> None:
        schedule.add("sender", lambda: self._senders.run(group.paths, schedule, frames))
        for turn in range(TURNS_MAX):
            if "sender" not in schedule.names and turn > max(kills, default=0):
                return
            schedule.turn()
            group.restart_fallen()
            clock.advance(TURN_MS)
            self._senders.time_ms = clock.time_ms()
            if (name := kills.get(turn)) and name in group.names:
                group.kill(name)
                group.start(name)
        raise Broken(f"not all sends were answered within {TURNS_MAX:,} turns")

    def _truth(self, group: Group) -> Truth:
        records = walk_log(group.paths.commit_log)
        written = group.control.load(words_of.WRITTEN)
        return Truth(records, group.synced, written, 0, set(), group.read_only)

    def _look_at_images(self, machine: Machine, truth: Truth) -> None:
        for loss in LOSSES:
            machine.disk.observe()
            machine.disk.image(self._image, loss, self._rng, Journal())
            (self._image / "mqproc").mkdir(exist_ok=True)
            (self._image / "mqproc").chmod(0o700)
            self._check(self._image, truth, power_loss=True)
            shutil.rmtree(self._image)

    def _check(self, root: Path, truth: Truth, *, power_loss: bool) -> None:
        found = checks.recover(root, self._options, now_ms=self._clock_ms)
        checks.check_all(found, truth, self._senders, self._deletions, power_loss=power_loss)
        checks.check_again(found, self._options)
