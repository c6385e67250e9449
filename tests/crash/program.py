"""One seeded story of a store: lives of a group with sends, kills and clock steps, and a crash at the end of each."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mqproc.config import FlushDiskType, Options
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from tests.crash import checks
from tests.crash.checks import Truth
from tests.crash.disk import Disk, Grain, Loss, Metadata, Pick
from tests.crash.group import ROLES, Group
from tests.crash.recording_io import Fault, Killed, Machine
from tests.crash.schedule import LONG_JUMP_MS, Schedule, SimulatedClock
from tests.crash.senders import Senders

FIRST_MS = 1_700_000_000_000
LIVES_MAX = 4
TURNS = (50, 1_200)
RECOVERY_CRASHES_MAX = 3
KILL_CHANCE = 0.02
FAULT_CHANCE = 0.3
FAULTS = (Fault("sync", 0, errno.EIO), Fault("sync_file_system", 0, errno.EIO), Fault("allocate", 0, errno.ENOSPC))
HOUR_MS = 3_600_000
ROLE_NAMES = tuple(spec.name for spec in ROLES)
PICKS = (Pick.NONE, Pick.ALL, Pick.ONE_MISSING, Pick.ONE_PRESENT, Pick.RANDOM, Pick.RANDOM, Pick.RANDOM, Pick.RANDOM)


def small_options(rng: random.Random) -> Options:
    """Files so small that every kind of them rolls within one life."""
    return Options(
        mapped_file_size_commit_log=rng.choice((16384, 65536)),
        max_message_size=8192,
        mapped_file_size_consume_queue=rng.choice((400, 2000)),
        max_hash_slot_num=50,
        max_index_num=rng.choice((120, 400)),
        max_queues=256,
        default_topic_queue_nums=rng.choice((1, 4)),
        flush_disk_type=rng.choice((FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH)),
        flush_interval_commit_log=rng.choice((20, 500)),
        flush_interval_consume_queue=rng.choice((50, 1000)),
        flush_commit_log_least_pages=rng.choice((0, 4)),
        flush_consume_queue_least_pages=rng.choice((0, 2)),
        file_reserved_time=1,
        delete_when=";".join(f"{hour:02d}" for hour in range(24)),
    )


@dataclass(slots=True)
class Tally:
    """What a story went through."""

    images: int = 0
    lives: int = 0
    kills: int = 0
    messages: int = 0
    stored: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class Story:
    """The story of one seed, in a folder of its own."""

    def __init__(self, seed: int, folder: Path, images: int) -> None:
        self._rng = random.Random(seed)
        self._folder = folder
        self._images = images
        self._root = folder / "store"
        self._copies = 0
        self._gone: set[int] = set()
        self._options = small_options(self._rng)
        self._senders = Senders(self._rng)
        self.tally = Tally()

    def run(self) -> Tally:
        """Tell it to its end; raises Broken, or whatever the product raised."""
        self._root.mkdir(parents=True)
        now_ms = FIRST_MS
        for _ in range(self._rng.randint(2, LIVES_MAX)):
            now_ms = self._live(now_ms) + self._rng.choice((1, 5_000, 90_000))
            if StorePaths(self._root).read_only.exists():
                break  # Until somebody repairs it nothing more is taken.
        self.tally.messages = len(self._senders.sent)
        self.tally.stored = sum(not checks.unacknowledged(sent) for sent in self._senders.sent)
        return self.tally

    def _live(self, now_ms: int) -> int:
        rng = self._rng
        machine = Machine(Disk.of(self._root))
        schedule = Schedule(rng)
        machine.between = schedule.pause
        clock = SimulatedClock(schedule, now_ms)
        try:
            self._work(machine, schedule, clock)
        finally:
            machine.over = True
            machine.disk.let_go()
            schedule.end_all()
        return clock.time_ms()

    def _work(self, machine: Machine, schedule: Schedule, clock: SimulatedClock) -> None:
        rng = self._rng
        group = Group(self._root, self._options, machine, schedule, clock)
        self.tally.lives += 1
        for number in range(rng.randint(1, 3)):
            frames = rng.randint(1, 40)
            schedule.add(f"sender {number}", lambda frames=frames: self._senders.run(group.paths, schedule, frames))
        turns = rng.randint(*TURNS)
        if rng.random() < FAULT_CHANCE:
            fault = rng.choice(FAULTS)
            machine.fault = dataclasses.replace(fault, nth=machine.kinds.get(fault.call, 0) + rng.randint(1, 60))
        crashes = {rng.randrange(turns) for _ in range(3)}
        for turn in range(turns):
            schedule.turn()
            self._pass_time(clock)
            self._check_positions(group)
            if rng.random() < KILL_CHANCE:
                self._kill_a_role(group)
            if turn in crashes:
                self._look_at_images(group, machine, clock.time_ms())
        self._end(group, machine, clock.time_ms())

    def _pass_time(self, clock: SimulatedClock) -> None:
        chance = self._rng.random()
        if chance < 0.3:
            clock.advance(self._rng.randint(1, 20))
        elif chance < 0.32:
            clock.advance(LONG_JUMP_MS)
        elif chance < 0.321:
            clock.advance(HOUR_MS)
        elif chance < 0.323:
            clock.step(self._rng.choice((-70_000, -500, 10_000)))

    def _check_positions(self, group: Group) -> None:
        control = group.control
        dispatched, flushed = control.load(words_of.DISPATCHED), control.flushed
        reserved, written = control.load(words_of.RESERVED_END), control.load(words_of.WRITTEN)
        checks.expect(dispatched <= written, f"dispatched {dispatched} is ahead of written {written}")
        checks.expect(flushed <= written, f"flushed {flushed} is ahead of written {written}")
        checks.expect(written <= reserved, f"written {written} is ahead of reserved {reserved}")
        for mark in (words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
            checks.expect(
                control.load(mark) <= flushed, f"a mark at {control.load(mark)} is ahead of flushed {flushed}"
            )

    def _kill_a_role(self, group: Group) -> None:
        name = self._rng.choice((*ROLE_NAMES, words_of.WRITER, words_of.WRITER, words_of.DISPATCHER))
        if name in group.names:
            group.kill(name)
            group.start(name)
            self.tally.kills += 1

    def _truth(self, group: Group) -> Truth:
        control = group.control
        return Truth(
            checks.walk_log(group.paths.commit_log),
            group.synced,
            control.load(words_of.WRITTEN),
            max(control.load(words_of.MIN_PHYSICAL_OFFSET), control.load(words_of.RETENTION_AIM)),
            set(self._gone),
            group.read_only,
        )

    # Images

    def _loss(self) -> Loss:
        rng = self._rng
        return Loss(rng.choice(list(Metadata)), rng.choice(list(Grain)), rng.choice(PICKS))

    def _copy(self) -> Path:
        self._copies += 1
        return self._folder / f"image{self._copies}"

    def _image(self, disk: Disk, shared_of: Path | None) -> Path:
        """A store as the disk may show it; with the words that the group shared, or without."""
        target = self._copy()
        disk.observe()
        disk.image(target, self._loss(), self._rng)
        (target / "mqproc").mkdir(exist_ok=True)
        (target / "mqproc").chmod(0o700)
        if shared_of is not None:
            for name in ("control", "queues"):
                if (shared_of / "mqproc" / name).exists():
                    shutil.copyfile(shared_of / "mqproc" / name, target / "mqproc" / name)
        self.tally.images += 1
        return target

    def _look_at_images(self, group: Group, machine: Machine, now_ms: int) -> None:
        truth = self._truth(group)
        for _ in range(self._images):
            shared = self._root if self._rng.random() < 0.5 else None
            image = self._image(machine.disk, shared)
            image = self._crash_recovery(image, now_ms)
            self._check_image(image, truth, now_ms)
            shutil.rmtree(image)

    def _crash_recovery(self, image: Path, now_ms: int) -> Path:
        """Now and then recovery itself loses its power, up to three times."""
        for _ in range(RECOVERY_CRASHES_MAX):
            if self._rng.random() > 0.2:
                break
            machine = Machine(Disk.of(image), kill_at=self._rng.randint(1, 120))
            with contextlib.suppress(Killed):
                checks.recover(image, self._options, machine, now_ms)
            machine.disk.let_go()
            after = self._image(machine.disk, None)
            shutil.rmtree(image)
            image = after
        return image

    def _check_image(self, image: Path, truth: Truth, now_ms: int) -> None:
        found = checks.recover(image, self._options, now_ms=now_ms)
        checks.check_all(found, truth, self._senders, self._options, power_loss=True)
        checks.check_again(found, self._options)

    # Ends of a life

    def _end(self, group: Group, machine: Machine, now_ms: int) -> None:
        how = self._rng.choice(("power loss", "power loss", "kill", "kill without shared words", "stop"))
        self.tally.ends[how] += 1
        if how == "stop":
            group.stop(self._rng)
            self._check_end(self._truth(group), power_loss=False, now_ms=now_ms)
            return
        group_truth = self._truth(group)
        group.kill_all()
        if how == "power loss":
            image = self._crash_recovery(self._image(machine.disk, None), now_ms)
            shutil.rmtree(self._root)
            image.rename(self._root)
        elif how == "kill without shared words":
            shutil.rmtree(StorePaths(self._root).own)
        self._check_end(group_truth, power_loss=how == "power loss", now_ms=now_ms)

    def _check_end(self, truth: Truth, *, power_loss: bool, now_ms: int) -> None:
        found = checks.recover(self._root, self._options, now_ms=now_ms)
        records = checks.check_all(found, truth, self._senders, self._options, power_loss=power_loss)
        there = set(checks.numbers(records, self._senders))
        begin = found.words[words_of.MIN_PHYSICAL_OFFSET]
        lost = {
            number
            for number, placed in zip(checks.numbers(truth.records, self._senders), truth.records, strict=True)
            if number not in there and placed.offset >= begin
        }
        self._gone |= lost
