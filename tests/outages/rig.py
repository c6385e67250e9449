"""A real group, its clients, their invariants, and the disks that fail under it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqproc import Client, Message
from mqproc.cli.admin import engine_hooks
from mqproc.cli.admin.engine_hooks import make_ready
from mqproc.cli.main import main
from mqproc.client import group_requests as group_calls
from mqproc.config.options import Options
from mqproc.errors import GroupNotFoundError, MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.bell import semaphore_names
from mqproc.ipc.store_lock import lock_holder
from mqproc.roles import registry
from mqproc.store.verify import verify_store
from mqproc.supervisor import signals as prctl
from mqproc.wire.operations import EARLIEST, GroupJoinRequest
from tests.support.group import SMALL, START_TIMEOUT_S, Group, assert_equals_rebuild, wait_until

END_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 60.0
_FORK = multiprocessing.get_context("fork")


def warm() -> None:
    """Preload modules and kernels of a group, for all processes forked later."""
    assert engine_hooks
    assert registry.SPECS
    make_ready()


def forked(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run `work` in a process that ends with this one."""
    process = _FORK.Process(target=_live, args=(os.getpid(), work, arguments), daemon=True)
    process.start()
    return process


def _live(parent: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    prctl.die_with_parent()
    if os.getppid() == parent:
        work(*arguments)


class WarmGroup(Group):
    """`mqproc up` without the startup time of 1.5 s, with extra environment variables."""

    def start(self, environment: Mapping[str, str] | None = None) -> WarmGroup:
        """Start, and wait until every role serves."""
        self.begin(environment)
        wait_until(self.ready, START_TIMEOUT_S, "group ready")
        return self

    def begin(self, environment: Mapping[str, str] | None = None) -> None:
        """Start without waiting."""
        flags = [part for name, value in self.options.items() for part in ("--set", f"{name}={value}")]
        arguments = ["up", "--store", str(self.store), *flags]
        self.process = _Forked(forked(_mqproc, arguments, dict(environment or {}), self.output))

    def starts(self, environment: Mapping[str, str]) -> bool:
        """Start; True when every role serves, False if the supervisor has ended."""
        self.begin(environment)
        process = self.process
        assert process is not None
        what = f"a start with {environment}"
        wait_until(lambda: process.poll() is not None or self.is_ready(), START_TIMEOUT_S, what)
        return process.poll() is None

    def run(self, *arguments: str) -> int:
        """Run a command of `mqproc`; return its exit code."""
        process = forked(_mqproc, list(arguments), {}, self.output)
        process.join(START_TIMEOUT_S)
        assert process.exitcode is not None, f"mqproc {' '.join(arguments)} takes longer than {START_TIMEOUT_S:g} s"
        return process.exitcode

    def wait_appended(self, messages: int) -> None:
        """Wait until this many more messages are appended."""
        goal = self.words()["appended_messages"] + messages
        wait_until(lambda: self.words()["appended_messages"] >= goal, LOAD_TIMEOUT_S, "load continues")

    def wait_ended(self) -> int:
        """Wait until the supervisor and all holders of the store have exited; return the exit code."""
        assert self.process is not None
        code = self.process.wait(END_TIMEOUT_S)
        self.wait_free()
        return code

    def wait_free(self) -> None:
        """Wait until the store's lock is free."""
        wait_until(lambda: lock_holder(StoreIO(), self.paths) is None, END_TIMEOUT_S, "the lock free")

    def kill(self) -> None:
        """Kill the supervisor with SIGKILL, which ends all processes."""
        assert self.process is not None
        self.process.kill()
        self.wait_ended()

    def close(self) -> None:
        """Kill it in any state."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_TIMEOUT_S)


class _Forked:
    """The part of subprocess.Popen that a Group uses."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mqproc up", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, sig)


def _mqproc(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    os.environ.update(environment)
    sys.exit(main(arguments))


# Clients that send, commit and delete until killed, and the answers that they recorded.


TOPICS = ("outage-a", "outage-b")
GROUP = "outage-readers"
QUEUES = 2
BATCH_MAX = 30
BODY_MAX = 600
TIMEOUT_S = 3.0
PAUSE_S = 0.01
COMMIT_CHANCE = 0.1
DELETE_CHANCE = 0.03
OTHER_CHANCE = 0.1
# Messages in these topics are not counted: they exercise delays, retries, transactions and pop.
LATER, DECIDED, RECEIVED = "Later", "Decided", "Received"
# Simple consumers; the second group sometimes has members, which receive the redeliveries.
RECEIVERS = ("outage-receivers", "outage-both")
RECEIVED_MAX = 10
INVISIBLE_S = 1.0
SESSION_MS = 3_000
JOIN_CHANCE = 0.2


class Place(NamedTuple):
    """Place of a message."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int


@dataclass(slots=True)
class Answers:
    """Answers recorded by all clients of a store.

    `durable` is an offset in the log: a power cut may lose messages above it. `lost` are names of such messages.
    """

    acknowledged: dict[str, Place] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    durable: float = math.inf
    lost: set[str] = field(default_factory=set)

    def read(self, report: Path) -> None:
        """Add a report; its last line may be incomplete."""
        for line in report.read_text().rpartition("\n")[0].splitlines():
            word, *rest = json.loads(line)
            if word == "sending":
                self.sent.update(rest[0])
            elif word == "acknowledged":
                topic, names, *columns = rest
                self.acknowledged.update(
                    (name, Place(topic, *place)) for name, *place in zip(names, *columns, strict=True)
                )
            else:
                self.refused[rest[0]] += 1


@contextlib.contextmanager
def customers(
    store: Path, folder: Path, life: str, count: int, answers: Answers, seed: int
) -> Iterator[list[BaseProcess]]:
    """Run this many clients during the block, then kill them and read their reports."""
    processes: list[BaseProcess] = []
    reports = []
    try:
        for number in range(count):
            reports.append(folder / f"{life}-{number}.report")
            processes.append(forked(_work, store, f"{life}-{number}", seed, reports[-1]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    for report in reports:
        if report.exists():
            answers.read(report)


def hold(processes: list[BaseProcess]) -> None:
    """Stop the processes: they receive no further answers."""
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def _work(store: Path, name: str, seed: int, report: Path) -> None:
    chance = random.Random(f"{seed} {name}")
    with report.open("a", buffering=1) as lines, Client(store, timeout=TIMEOUT_S) as client:
        customer = _Customer(client, name, chance, lines)
        while True:
            try:
                customer.step()
            except MqprocError as error:
                customer.note("refused", error.code)
                time.sleep(PAUSE_S)


class _Customer:
    def __init__(self, client: Client, name: str, chance: random.Random, lines: Any) -> None:
        self._client = client
        self._name = name
        self._chance = chance
        self._lines = lines
        self._count = 0
        self._gone = 0

    def note(self, *what: Any) -> None:
        self._lines.write(json.dumps(what) + "\n")

    def step(self) -> None:
        choice = self._chance.random()
        if choice < DELETE_CHANCE:
            self._make_and_delete()
        elif choice < DELETE_CHANCE + COMMIT_CHANCE:
            self._commit()
        elif choice < DELETE_CHANCE + COMMIT_CHANCE + OTHER_CHANCE:
            self._chance.choice((self._send_later, self._nack, self._decide, self._receive))()
        else:
            self._send()

    def _send(self) -> None:
        chance = self._chance
        names = [f"{self._name}-{self._count + each}" for each in range(chance.randint(1, BATCH_MAX))]
        self._count += len(names)
        bodies = [name.encode() + b" " * chance.randrange(BODY_MAX) for name in names]
        topic = chance.choice(TOPICS)
        self.note("sending", names)
        properties = [{"name": name} for name in names] if len(names) % 2 else None
        result = self._client.send_batch(topic, bodies, keys=names, tags="t", properties=properties)
        columns = result.queue_ids.tolist(), result.queue_offsets.tolist(), result.physical_offsets.tolist()
        self.note("acknowledged", topic, names, *columns)

    def _commit(self) -> None:
        """Consume a queue up to its end, if it exists."""
        queues = self._client.queues(self._chance.choice(TOPICS))
        if queues:
            queue = self._chance.choice(queues)
            self._client.groups.commit(GROUP, queue.topic, queue.queue_id, queue.max_offset)

    def _send_later(self) -> None:
        self._client.send(LATER, b"by level", delay_level=1)
        self._client.send(LATER, b"by time", delay=self._chance.random())

    def _nack(self) -> None:
        """Nack the last message of a queue, if any."""
        queues = self._client.queues(self._chance.choice(TOPICS))
        there = [queue for queue in queues if queue.max_offset > queue.min_offset]
        if there:
            queue = self._chance.choice(there)
            place = queue.topic, queue.queue_id, queue.max_offset - 1
            self._client.run(group_calls.nack(GROUP, [place], 1, -1))

    def _decide(self) -> None:
        transaction = self._client.transaction("deciders", Message(DECIDED, b"decided")).begin()
        if self._chance.random() < 0.5:
            transaction.commit()
        else:
            transaction.rollback()

    def _receive(self) -> None:
        """Receive some messages: acknowledge one, extend one, abandon the rest, and sometimes join the group."""
        group = self._chance.choice(RECEIVERS)
        self._client.send_batch(RECEIVED, [b"received"] * RECEIVED_MAX)
        receiver = self._client.simple_consumer(group, RECEIVED, start="earliest")
        received = receiver.receive(RECEIVED_MAX, INVISIBLE_S)
        receiver.ack(*received[:1])
        for message in received[1:2]:
            receiver.change_invisible_duration(message, INVISIBLE_S)
        if group == RECEIVERS[-1] and self._chance.random() < JOIN_CHANCE:
            # The member makes no requests until its session expires, and a group with members refuses to receive:
            # only a join after a receive leaves messages to move to the members.
            self._client.run(
                group_calls.join(GroupJoinRequest(group, [RECEIVED], self._name, "", SESSION_MS, EARLIEST, 0, []))
            )

    def _make_and_delete(self) -> None:
        self._gone += 1
        topic = f"gone-{self._name}-{self._gone}"
        self._client.send_batch(topic, [b"gone"] * 5)
        self._client.delete_topic(topic)


# Invariants of a store after an outage, checked through the running group and in its files.


NAMED = 5
"""Most violations named in a message."""


def check(group: WarmGroup, answers: Answers) -> None:
    """Check that exactly the acknowledged messages are present, once, unless deleted or lost.

    Messages lost by a power cut are the last ones, and never reappear. A crash is not recorded as damage, and no
    committed offset is beyond its queue. Nothing may have been appended since the start.
    """
    group.wait_dispatched()
    words = group.words()
    assert words["damage_holes"] == words["dispatch_holes"] == 0, "a crash was taken for damage"
    found, minima = _found(group)
    missing = {
        name: place.physical_offset
        for name, place in answers.acknowledged.items()
        if name not in found and name not in answers.lost and place.queue_offset >= minima.get(place[:2], 0)
    }
    lost = {name: at for name, at in missing.items() if at >= answers.durable}
    _none(missing.keys() - lost.keys(), f"of {len(answers.acknowledged):,} acknowledged messages are lost")
    if lost:
        first = min(lost.values())
        _none([name for name, place in found.items() if place.physical_offset > first], "messages follow lost ones")
    answers.lost.update(lost)
    answers.durable = math.inf
    _none(found.keys() & answers.lost, "messages that a power cut had taken are there again")
    _none(found.keys() - answers.sent, "messages were never sent")
    _none(
        [name for name, place in answers.acknowledged.items() if found.get(name, place) != place], "messages have moved"
    )
    _check_progress(group)


def check_stopped(group: WarmGroup, *, whole: bool) -> None:
    """Stop and verify; `whole`: nothing was deleted, so queues and index equal a rebuild."""
    group.wait_dispatched()
    assert group.stop() == 0, "the group did not stop in order"
    group.wait_free()
    verified = verify_store(StoreIO(), group.paths, _options(group), jobs=1)
    assert verified.clean, [finding.to_json() for finding in verified.findings.in_order()]
    if whole:
        assert_equals_rebuild(group)
    left = sorted(str(path) for path in group.store.rglob("*.tmp")) + semaphore_names(group.words()["store_id"])
    assert not left, left


def _options(group: WarmGroup) -> Options:
    return Options(**{name: value for name, value in group.options.items() if name in SMALL})


def _found(group: WarmGroup) -> tuple[dict[str, Place], dict[tuple[str, int], int]]:
    """Every message by its name, each once, and the first offset of each queue."""
    found: dict[str, Place] = {}
    minima = {}
    with group.client(timeout=60.0) as client:
        for topic in {*TOPICS} & {each.topic for each in client.topics()}:
            for queue in client.queues(topic):
                minima[topic, queue.queue_id] = offset = queue.min_offset
                while offset < queue.max_offset:
                    pulled = client.pull(topic, queue.queue_id, offset, max_messages=4096)
                    for message in pulled.messages:
                        name = message.body.split()[0].decode()
                        assert name not in found, f"{name} is there twice"
                        found[name] = Place(topic, message.queue_id, message.queue_offset, message.physical_offset)
                    assert pulled.next_offset > offset, pulled
                    offset = pulled.next_offset
    return found, minima


def _check_progress(group: WarmGroup) -> None:
    with group.client(timeout=60.0) as client:
        try:
            queues = client.groups.info(GROUP).queues
        except GroupNotFoundError:
            return
    ahead = [queue for queue in queues if queue.offset is not None and queue.offset > queue.max_offset]
    assert not ahead, f"a group is ahead of its queues: {ahead}"


def _none(names: Collection[str], what: str) -> None:
    assert not names, f"{len(names):,} {what}: {sorted(names)[:NAMED]}"


# An ext4 on a loop device that can lose power, fill up, or fail.
#
# A power cut is simulated with FS_IOC_SHUTDOWN without a journal flush. Nothing reaches the device afterwards, and data
# that was only in memory is gone after the next mount, including names and lengths whose journal was not written. The
# device keeps all accepted writes: write caches that lose data are covered by the simulator.
#
# Unlike in a real power loss the kernel keeps running, and reports success for a sync in progress at that moment. So
# clients must not receive answers after the cut.


_SHUTDOWN: Final = (2 << 30) | (4 << 16) | (ord("X") << 8) | 125
"""_IOR('X', 125, __u32), related to linux/fs.h: EXT4_IOC_SHUTDOWN."""
_WITHOUT_FLUSH: Final = struct.pack("=I", 2)
_CLONE_NEWNS: Final = 0x00020000
_SYNC_FILE_RANGE_ALL: Final = 1 | 2 | 4
_PAGE: Final = 4096
DEVICE_BYTES: Final = 256 << 20
GOING_S: Final = 10.0
"""Time for the kernel to release a disk after its last process has ended."""
MKFS: Final = ("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def why_no_disks() -> str:
    """Why such disks are not available here; empty if they are."""
    if os.geteuid() != 0:
        return "only root may mount a file system"
    if tool := next((name for name in ("mount", "umount", MKFS[0]) if shutil.which(name) is None), ""):
        return f"{tool} is not installed"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    return f"nothing can be mounted: {done.stderr.strip()}" if done.returncode else ""


def remaining_of(folder: Path) -> list[str]:
    """Mounts and loop devices of disks below a folder that still exist after a short wait."""
    deadline = time.monotonic() + GOING_S
    while (left := _mounts_and_devices(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _mounts_and_devices(folder: Path) -> list[str]:
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    found = ((file, _text_of(file)) for file in Path("/sys/block").glob("loop*/loop/backing_file"))
    return mounts + [f"{file.parts[3]} {text}" for file, text in found if text.startswith(f"{folder}/")]


def _text_of(file: Path) -> str:
    """Contents of a file; empty if it disappears."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def hide_mounts() -> None:
    """Move this process and its children to a private mount namespace, which ends with them."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    _run("mount", "--make-rprivate", "/")


class Disk:
    """An ext4 of `size` bytes in the file `image`, mounted at `folder`."""

    def __init__(self, folder: Path, image: Path, size: int) -> None:
        self.folder = folder
        self._image = image
        self._mounted = False
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(size)
        _run(*MKFS, str(image))
        self.mount()

    def mount(self) -> None:
        """Mount it, which recovers its journal. Its loop device is released by the unmount."""
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it, if mounted, as soon as no file is open on it."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._mounted:
            try:
                _run("umount", str(self.folder))
                self._mounted = False
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def cut(self) -> None:
        """Cut the power: nothing is written from now on."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_FLUSH)
        finally:
            os.close(fd)

    def stir(self, chance: random.Random, files: Sequence[Path]) -> None:
        """Write some pages of these files and the journal, as the kernel may do at any time."""
        for path in files:
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                pages = os.fstat(fd).st_size // _PAGE
                for _ in range(min(pages, chance.randrange(8))):
                    _write_back(fd, chance.randrange(pages), chance.randint(1, 4))
            finally:
                os.close(fd)
        fd = os.open(self.folder / "journal-moves", os.O_RDWR | os.O_CREAT)
        try:
            os.write(fd, b"x")
            os.fsync(fd)
        finally:
            os.close(fd)

    def fill(self, ballast: Path, left: int) -> None:
        """Use all of its space except `left` bytes."""
        usage = os.statvfs(self.folder)
        free = usage.f_bavail * usage.f_frsize - left
        with ballast.open("wb") as file:
            while free > _PAGE:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                free //= 2


class SmallDevice:
    """A folder for an image that is larger than its space: writes fail from some point on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={DEVICE_BYTES}", "tmpfs", str(folder))

    def leave(self, size: int) -> None:
        """Accept this many more bytes."""
        usage = os.statvfs(self.folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        _run("mount", "-o", f"remount,size={used + size}", str(self.folder))

    def repair(self) -> None:
        """Accept all writes again."""
        self.leave(DEVICE_BYTES)

    def unmount(self) -> None:
        """Unmount everything."""
        _run("umount", str(self.folder))


def _write_back(fd: int, page: int, pages: int) -> None:
    if _libc.sync_file_range(fd, page * _PAGE, pages * _PAGE, _SYNC_FILE_RANGE_ALL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sync_file_range: {os.strerror(number)}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
