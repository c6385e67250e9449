"""A seeded story: lives of a group with sends, kills and clock steps, ended by crashes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mqproc.client import message_fields as unique_id
from mqproc.config.options import FlushDiskType, Options, RetentionGuard
from mqproc.io.fault_injection import CRASH_POINTS
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.offsets import file as progress_file
from mqproc.store.read import unit_walk
from tests.crash import invariants as checks
from tests.crash.clients import (
    Consumers,
    Deletions,
    Members,
    Party,
    Producers,
    Receivers,
    Senders,
    SimulatedIds,
    Sinks,
    found_in,
    originals,
    undelivered,
)
from tests.crash.disk import (
    DISK_BYTES,
    Broken,
    Disk,
    Fault,
    Grain,
    Holes,
    Journal,
    Killed,
    Lines,
    Loss,
    Machine,
    Metadata,
    Pick,
    Placed,
    walk_log,
)
from tests.crash.group import LONG_JUMP_MS, ROLES, Group, Schedule, SimulatedClock
from tests.crash.invariants import Recovered, Truth, Watch, check_alive, check_damaged

FIRST_MS = 1_700_000_000_000
LIVES_MAX = 4
TURNS = (50, 1_200)
# The longest delay level is two hours; within this many turns, everything is due and delivered.
LOOK_MS = 600_000
DELIVERY_LOOKS = 200
WAITING = "messages wait"
SHORT_LOOK_MS = 5_000
TURNS_PER_LOOK = 150
TURN_MS = 10
CRASHES = 3
TURNS_AFTER_FAULT_MAX = 200
RECOVERY_CRASHES_MAX = 3
# Per turn. After some roles the supervisor syncs the file system, which hides missing syncs of others.
KILL_CHANCES = (0.0, 0.004, 0.02)
# In lives with kills: the chance per turn that the next role at one of these points is killed there.
POINT_CHANCE = 0.01
OF_THE_SUPERVISOR = ("control.", "recover.", "supervisor.")
POINTS = tuple(sorted(point for point in CRASH_POINTS if not point.startswith(OF_THE_SUPERVISOR)))
GARBAGE_CHANCE = 0.25
# Of images that were recovered.
DAMAGED_CHANCE = 0.05
ALIVE_CHANCE = 0.05
PARTY_CHANCE = 0.3
SINK_CHANCE = 0.15
GUARD_CHANCE = 0.3
HOARD_CHANCE = 0.3
# Simple consumers receive few messages at a time, and the sink searches row by row: both take long.
HOARD_TURNS_TIMES = 4
SINK_TURNS_TIMES = 3
FAULT_CHANCE = 0.4
FAULTS = (
    *(Fault("sync", 0, errno.EIO),) * 3,
    Fault("sync_folder", 0, errno.EIO),
    Fault("allocate", 0, errno.ENOSPC),
    Fault("pwrite", 0, errno.ENOSPC),
)
HOUR_MS = 3_600_000
BOOT_ID = Path("boot_id")
ROLE_NAMES = tuple(spec.name for spec in ROLES)
# Mostly with free space; sometimes full enough to delete expired files, or too full to wait for the delete time.
DISK_USED = (0.3, 0.3, 0.3, 0.3, 0.8, 0.87)
PICKS = (
    *(Pick.NONE, Pick.ALL, Pick.ONE_MISSING, Pick.ONE_PRESENT, Pick.PREFIX, Pick.SUFFIX),
    *(Pick.RANDOM,) * 4,
)


def small_options(rng: random.Random) -> Options:
    """Files so small that each kind of them rolls within one life."""
    return Options(
        mapped_file_size_commit_log=rng.choice((16384, 65536)),
        max_message_size=8192,
        mapped_file_size_consume_queue=rng.choice((400, 2000)),
        max_hash_slot_num=50,
        max_index_num=rng.choice((120, 400)),
        max_queues=256,
        mapped_file_size_timer_log=rng.choice((2080, 65536)),
        default_topic_queue_nums=rng.choice((1, 4)),
        flush_disk_type=rng.choice((FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH)),
        flush_interval_commit_log=rng.choice((20, 500)),
        flush_interval_consume_queue=rng.choice((50, 1000)),
        flush_commit_log_least_pages=rng.choice((0, 4)),
        flush_consume_queue_least_pages=rng.choice((0, 2)),
        transaction_timeout=rng.choice((200, 2_000)),
        transaction_check_interval=rng.choice((500, 5_000)),
        transaction_check_max=rng.choice((2, 100)),
        file_reserved_time=1,
        retention_guard=RetentionGuard.NONE,
        disk_floor_bytes=0,
        delete_when=";".join(f"{hour:02d}" for hour in range(24)),
    )


@contextlib.contextmanager
def simulated_ids(ids: SimulatedIds) -> Iterator[None]:
    """Clients of this process generate the same unique ids in every run."""
    before = unique_id.process_ids
    unique_id.process_ids = ids
    try:
        yield
    finally:
        unique_id.process_ids = before


@contextlib.contextmanager
def simulated_boots() -> Iterator[None]:
    """The boot id is read from the file that `boot` writes."""
    before = progress_file.BOOT_ID
    progress_file.BOOT_ID = BOOT_ID  # type: ignore[misc]
    try:
        yield
    finally:
        progress_file.BOOT_ID = before  # type: ignore[misc]


@contextlib.contextmanager
def unlimited_runs() -> Iterator[None]:
    """Runs with SQL92 filters have no time limit: it would depend on the machine."""
    before = unit_walk.RUN_NS
    unit_walk.RUN_NS = 1 << 62
    try:
        yield
    finally:
        unit_walk.RUN_NS = before


@contextlib.contextmanager
def simulated_zone() -> Iterator[None]:
    """Local time is the same everywhere: it is in the names of index files."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        del os.environ["TZ"]
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def boot(number: int) -> None:
    """Set the boot id: a kill of all processes keeps it, a power loss changes it."""
    BOOT_ID.write_text(f"{number:032x}")


@dataclass(slots=True)
class Tally:
    """Counts of a story."""

    images: int = 0
    lives: int = 0
    kills: int = 0
    messages: int = 0
    stored: int = 0
    lines: int = 0
    """Lines of kernels run, if they are not compiled."""
    digest: str = ""
    """Digest of all events; the same in every run of a seed."""
    ends: Counter[str] = field(default_factory=Counter)


class Story:
    """The story of one seed, in its own folder."""

    def __init__(self, seed: int, folder: Path, images: int, journal: Journal | None = None) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._folder = folder
        self._images = images
        self._journal = journal or Journal()
        # Paths are relative to the folder: texts in files of the store must not depend on it.
        self._root = Path("store")
        self._copies = 0
        self._gone: set[int] = set()
        self._minimum = 0
        self._options = small_options(self._rng)
        self._delays = self._rng.random() < 0.4
        # Not in all stories: properties change the log, and with it which stories catch planted bugs.
        self._senders = Senders(self._rng, delays=self._delays, properties=seed % 4 == 1)
        self._parties = self._choose_parties()
        if self._delays or self._parties:
            # A delayed message must not expire before it is due.
            self._options = dataclasses.replace(self._options, file_reserved_time=1000)
        # From a seed of its own, so that other stories do not change.
        if random.Random(f"guard {self._seed}").random() < GUARD_CHANCE:
            self._options = dataclasses.replace(self._options, retention_guard=RetentionGuard.AUTO)
        self._deleting = self._rng.random() < 0.3
        self._deletions = Deletions(self._rng, self._senders, self._parties)
        self._boots = 0
        self._lines = Lines()
        self._set_back = False
        self.tally = Tally()

    def _choose_parties(self) -> list[Party]:
        rng, senders = self._rng, self._senders
        queues = self._options.default_topic_queue_nums
        receivers = Receivers(rng, senders, hoards=rng.random() < HOARD_CHANCE)
        parties = Consumers(rng, senders, queues), Members(rng), receivers, Producers(rng, senders)
        chosen: list[Party] = [party for party in parties if rng.random() < PARTY_CHANCE]
        self._turns_times = HOARD_TURNS_TIMES if receivers.hoards and receivers in chosen else 1
        # From a seed of its own, so that other stories do not change.
        self._sinks = Sinks(rng, senders)
        if random.Random(f"tasks {self._seed}").random() < SINK_CHANCE:
            chosen.append(self._sinks)
            self._turns_times = max(self._turns_times, SINK_TURNS_TIMES)
        return chosen

    def run(self) -> Tally:
        """Run it to its end; raises Broken, or any error of the product."""
        self._folder.mkdir(parents=True, exist_ok=True)
        simulated = simulated_ids(SimulatedIds()), simulated_boots(), unlimited_runs(), simulated_zone()
        with contextlib.chdir(self._folder), contextlib.ExitStack() as stack:
            for context in simulated:
                stack.enter_context(context)
            self._boot(0)
            self._root.mkdir()
            with self._lines:
                self._tell()
        self.tally.lines = self._lines.seen
        self.tally.digest = self._journal.digest
        # Buffers of servers and writers are in reference cycles: megabytes that do not trigger the collector.
        gc.collect()
        return self.tally

    def _tell(self) -> None:
        now_ms = FIRST_MS
        for _ in range(self._rng.randint(2, LIVES_MAX)):
            now_ms = self._live(now_ms) + self._rng.choice((1, 5_000, 90_000))
            if StorePaths(self._root).read_only.exists():
                break  # Until a repair, nothing more is accepted.
        else:
            self._deliver_all(now_ms)
        self.tally.messages = len(self._senders.sent)
        self.tally.stored = sum(not checks.unacknowledged(sent) for sent in self._senders.sent)

    def _live(self, now_ms: int) -> int:
        rng = self._rng
        machine = self._machine(self._root)
        schedule = Schedule(rng, self._journal)
        machine.between = schedule.pause
        clock = SimulatedClock(schedule, now_ms)
        try:
            self._work(machine, schedule, clock)
        finally:
            machine.over = True
            machine.disk.release_maps()
            schedule.end_all()
        self._set_back = self._set_back or clock.set_back
        return clock.time_ms()

    def _deliver_all(self, now_ms: int) -> None:
        """A last life without faults: everything is delivered when due."""
        if not self._delays and not self._parties:
            return
        machine = self._machine(self._root)
        schedule = Schedule(self._rng, self._journal)
        machine.between = schedule.pause
        clock = SimulatedClock(schedule, now_ms)
        try:
            group = Group(self._root, self._options, machine, schedule, clock)
            for party in self._parties:
                party.patient = True
                schedule.add(type(party).__name__, lambda party=party: party.run(group.paths, schedule, clock))
            self._wait_for_deliveries(group, schedule, clock)
            group.stop(self._rng)
            self._check_end(self._truth(group), power_loss=False, now_ms=clock.time_ms())
        finally:
            machine.over = True
            machine.disk.release_maps()
            schedule.end_all()

    def _wait_for_deliveries(self, group: Group, schedule: Schedule, clock: SimulatedClock) -> None:
        left: dict[str, int] = {}
        looks = DELIVERY_LOOKS * self._turns_times
        for _ in range(looks):
            for _ in range(TURNS_PER_LOOK):
                schedule.turn()
                clock.advance(TURN_MS)
            left = self._left(group)
            if not left:
                return
            clock.advance(LOOK_MS if WAITING in left else SHORT_LOOK_MS)
        raise Broken(f"left after {looks:,} turns: {left}")

    def _left(self, group: Group) -> dict[str, int]:
        """Messages of each kind still to be delivered or consumed."""
        records = walk_log(group.paths.commit_log)
        minimum = self._minimum
        found = found_in(group.paths, records, sync_flush=self._options.sync_flush, minimum=minimum)
        left = {WAITING: sum(offset >= minimum for offset in undelivered(records))}
        left |= {type(party).__name__: party.left(found) for party in self._parties}
        return {what: count for what, count in left.items() if count}

    def _machine(self, root: Path, kill_at: int = 0) -> Machine:
        """A machine with the current disk, and a random number of holes in its files."""
        holes = Holes(self._rng.getrandbits(32), self._rng.choice((0, 128, 256)))
        used = int(DISK_BYTES * self._rng.choice(DISK_USED))
        if self._sinks in self._parties:
            # Rows must not be deleted before the sink's tasks look for them.
            used = min(used, int(DISK_BYTES * DISK_USED[0]))
        machine = Machine(Disk.of(root), self._journal, holes, used, kill_at=kill_at)
        self._lines.watch(machine)
        return machine

    def _work(self, machine: Machine, schedule: Schedule, clock: SimulatedClock) -> None:
        rng = self._rng
        group = Group(self._root, self._options, machine, schedule, clock)
        if self.tally.lives == 0 and self._options.retention_guard is RetentionGuard.AUTO:
            guard = group.options.retention_guard
            checks.expect(guard is RetentionGuard.GROUPS, f"a new store has retention_guard = {guard}")
        self.tally.lives += 1
        for number in range(rng.randint(1, 3)):
            frames = rng.randint(1, 40)
            schedule.add(f"sender {number}", lambda frames=frames: self._senders.run(group.paths, schedule, frames))
        for party in self._parties:
            for number in range(rng.randint(1, 2)):
                name = f"{type(party).__name__} {number}"
                schedule.add(name, lambda party=party: party.run(group.paths, schedule, clock))
        if self._deleting:
            schedule.add("deleter", lambda: self._deletions.run(group.paths, schedule))
        turns = rng.randint(*TURNS) * self._turns_times
        if rng.random() < FAULT_CHANCE:
            fault = rng.choice(FAULTS)
            machine.fault = dataclasses.replace(fault, nth=machine.kinds.get(fault.call, 0) + rng.randint(1, 40))
        crashes = {rng.randrange(turns) for _ in range(CRASHES)}
        kill_chance = rng.choice(KILL_CHANCES)
        watch = Watch(group, machine.disk, clock, times_grow=not self._set_back)
        told_of_failure = False
        for turn in range(turns):
            schedule.turn()
            if group.restart_fallen():
                self._lines.resume()
            self._pass_time(clock)
            self._senders.time_ms = clock.time_ms()
            watch.look()
            if rng.random() < kill_chance:
                self._kill_a_role(group)
            if kill_chance and rng.random() < POINT_CHANCE:
                machine.deadly_point = rng.choice(POINTS)
                self._lines.kill_amid(machine, rng)
            if machine.failed and not told_of_failure:
                told_of_failure = True
                crashes.add(turn + rng.randint(0, TURNS_AFTER_FAULT_MAX))
            if turn in crashes:
                self._look_at_images(group, machine, clock.time_ms())
        self._end(group, machine, clock.time_ms())

    def _pass_time(self, clock: SimulatedClock) -> None:
        chance = self._rng.random()
        if chance < 0.3:
            clock.advance(self._rng.randint(1, 20))
            return
        # As many per life, however long.
        chance = (chance - 0.3) * self._turns_times
        if chance < 0.02:
            clock.advance(LONG_JUMP_MS)
        elif chance < 0.021:
            clock.advance(HOUR_MS)
        elif chance < 0.023:
            # After a large step back, any message may be redelivered.
            clock.step(self._rng.choice((-70_000, -500, 10_000) if self._turns_times == 1 else (-500, 10_000)))

    def _kill_a_role(self, group: Group) -> None:
        name = self._rng.choice((*ROLE_NAMES, words_of.WRITER, words_of.WRITER, words_of.DISPATCHER))
        if name in group.names:
            group.kill(name)
            group.start(name)
            self.tally.kills += 1

    def _truth(self, group: Group) -> Truth:
        control = group.control
        # Deletions begun by an earlier life may be partly done.
        aims = control.load(words_of.MIN_PHYSICAL_OFFSET), control.load(words_of.RETENTION_AIM)
        self._minimum = max(self._minimum, *aims)
        return Truth(
            walk_log(group.paths.commit_log),
            group.synced,
            control.load(words_of.WRITTEN),
            self._minimum,
            set(self._gone),
            group.read_only,
        )

    # Images

    def _loss(self) -> Loss:
        rng = self._rng
        garbage = rng.random() < GARBAGE_CHANCE
        return Loss(rng.choice(list(Metadata)), rng.choice(list(Grain)), rng.choice(PICKS), garbage)

    def _boot(self, number: int) -> None:
        self._boots = number
        boot(number)

    def _copy(self) -> Path:
        self._copies += 1
        return Path(f"image{self._copies}")

    def _image(self, disk: Disk, shared_of: Path | None) -> Path:
        """A crash image of the store, with or without the shared control words."""
        target = self._copy()
        disk.observe()
        disk.image(target, self._loss(), self._rng, self._journal)
        (target / "mqproc").mkdir(exist_ok=True)
        (target / "mqproc").chmod(0o700)
        if shared_of is not None:
            for name in ("control", "queues"):
                if (shared_of / "mqproc" / name).exists():
                    shutil.copyfile(shared_of / "mqproc" / name, target / "mqproc" / name)
        self._boot(1_000 + self.tally.images)
        self.tally.images += 1
        return target

    def _look_at_images(self, group: Group, machine: Machine, now_ms: int) -> None:
        truth = self._truth(group)
        # A role of another group, alive on an image, is not to be killed.
        machine.lines_until_kill = 0
        before = self._boots
        well: dict[Hashable, list[Placed]] = {}
        for _ in range(self._images):
            shared = self._root if self._rng.random() < 0.5 else None
            image = self._image(machine.disk, shared)
            image = self._crash_recovery(image, now_ms)
            self._check_image(image, truth, well, now_ms)
            shutil.rmtree(image)
        self._boot(before)

    def _crash_recovery(self, image: Path, now_ms: int) -> Path:
        """Sometimes recovery itself loses power, up to three times."""
        for _ in range(RECOVERY_CRASHES_MAX):
            if self._rng.random() > 0.2:
                break
            machine = self._machine(image, kill_at=self._rng.randint(1, 120))
            with contextlib.suppress(Killed):
                checks.recover(image, self._options, machine, now_ms)
            machine.disk.release_maps()
            after = self._image(machine.disk, None)
            shutil.rmtree(image)
            image = after
        return image

    def _check_image(self, image: Path, truth: Truth, well: dict[Hashable, list[Placed]], now_ms: int) -> None:
        """Recover an image and check it, unless an equal one passed: `well` has their records."""
        found = checks.recover(image, self._options, self._machine(image), now_ms)
        state = found.state()
        if state not in well:
            records = checks.check_all(found, truth, self._senders, self._deletions, power_loss=True)
            checks.check_parties(found, records, self._parties, minimum=truth.minimum, power_loss=True)
            checks.check_again(found, self._options)
            well[state] = records
        self._use(found, well[state], now_ms)

    def _use(self, found: Recovered, records: list[Placed], now_ms: int) -> None:
        """Damage some recovered images and start roles on others; mostly do nothing."""
        chance = self._rng.random()
        if chance > DAMAGED_CHANCE + ALIVE_CHANCE:
            return
        rng, machine = random.Random(self._rng.getrandbits(32)), Machine(Disk.of(found.paths.root), self._journal)
        if chance < DAMAGED_CHANCE:
            check_damaged(found, records, self._options, machine, rng)
        else:
            check_alive(found.paths.root, self._options, machine, rng, now_ms)

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
            self._remove_derived()
        self._check_end(group_truth, power_loss=how == "power loss", now_ms=now_ms)

    def _remove_derived(self) -> None:
        """Remove derived files and marks. Committed offsets and the topics' journal stay."""
        paths = StorePaths(self._root)
        kept = {path.name for path in (paths.progress, paths.topics_journal, paths.read_only)}
        for path in paths.own.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()

    def _check_end(self, truth: Truth, *, power_loss: bool, now_ms: int) -> None:
        found = checks.recover(self._root, self._options, self._machine(self._root), now_ms)
        records = checks.check_all(found, truth, self._senders, self._deletions, power_loss=power_loss)
        checks.check_parties(found, records, self._parties, minimum=truth.minimum, power_loss=power_loss)
        state = found_in(found.paths, records, sync_flush=self._options.sync_flush)
        for party in self._parties:
            party.resume(state, power_loss=power_loss)
        there = {number for number, _placed in originals(records, self._senders)}
        begin = found.words[words_of.MIN_PHYSICAL_OFFSET]
        lost = {
            number
            for number, placed in originals(truth.records, self._senders)
            if number not in there and placed.offset >= begin
        }
        self._gone |= lost
