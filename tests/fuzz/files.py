"""Fuzz targets for files: a stopped store, JSON config files, files shared by a group.

The stopped store has every feature: topics, one of them deleted, keys, batches, groups with retries and dead letters,
messages received by simple consumers, transactions in every state, delayed messages of both kinds, and rolled files of
every kind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from mqproc import Client, Message, StoreReader
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, NotRunningError, StoreAccessError, StoreLockedError
from mqproc.io.clock import Clock
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import CONTENT, StoreLock, lock_holder
from mqproc.layout import control as layout
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.record_codec import check_record
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.offsets.settings import check_file
from mqproc.store.schedule.levels import DelayOffsets
from mqproc.store.verify.verifier import verify_store
from mqproc.supervisor.store_folder import prepare_folder
from mqproc.topic_names import HALF_TOPIC, REVIVE_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from tests.fuzz.inputs import damage
from tests.support.command_line import call
from tests.support.group import Group, wait_until
from tests.support.store_checks import RecordingIO, Recovered, contents, recover, written_ranges

# Not read by a start, or always recreated. `SharedFiles` covers lock and control.
UNTOUCHED = ("lock", "mqproc/control", "mqproc/errors", "log.jsonl")
BATCH = 40
SEGMENT = 1 << 17
# Kinds of damage and their frequency: to the bytes of a file, beside it, or in its place.
WAYS = {"bytes": 0.8, "empty": 0.05, "gone": 0.05, "stray": 0.05, "folder": 0.05}
TIMER_LOG_FILE = 4096
DELETED_TOPIC = "deleted"


Harm = tuple[str, Callable[[Path], object]]
"""A pattern below the store's folder, and the damage to the first file that matches."""


class Files:
    """The intact store, and damaged copies of it."""

    def __init__(self, folder: Path) -> None:
        self._copy = folder / "damaged"
        self.root, self.options = make_store(folder / "whole")
        with StoreReader(self.root, self.options) as reader:
            self._messages = list(reader.scan())
        self._bytes = {
            path.name: path.read_bytes() for path in sorted((self.root / "commitlog").iterdir()) if path.is_file()
        }
        self._files = sorted(
            path.relative_to(self.root)
            for path in self.root.rglob("*")
            if path.is_file() and str(path.relative_to(self.root)) not in UNTOUCHED
        )
        self._folders = sorted({path.parent for path in self._files})
        self._reached: set[tuple[Path, str]] = set()

    def run(self, seed: int) -> None:
        """Check one damaged store. Raises on a violation."""
        random = Random(seed)
        self._take_copy()
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            self._harm(random)
        vouched = random.random() < 0.5
        self._look(vouched=vouched, clean=random.random() < 0.5)

    def replay(self, harms: Sequence[Harm], *, vouched: bool, clean: bool) -> None:
        """Check a store with the given damage, each to the first file that matches its pattern."""
        self._take_copy()
        for pattern, harm in harms:
            found = sorted(self._copy.glob(pattern))
            assert found, f"the store has no {pattern}"
            harm(found[0])
        self._look(vouched=vouched, clean=clean)

    def _take_copy(self) -> None:
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self.root, self._copy, copy_function=_copy_sparse)
        self.harms: list[str] = []

    def _look(self, *, vouched: bool, clean: bool) -> None:
        """Read, start, read and start the damaged copy."""
        if not vouched:
            # Without marks for queues and index, each unit and entry is compared with the log.
            shutil.rmtree(self._copy / "mqproc")
        log = {name: self._copy / "commitlog" / name for name in self._bytes}
        harmed = {name: path.read_bytes() if path.is_file() else b"" for name, path in log.items()}
        # A deleted topic must stay deleted, unless damage removed the record of its deletion.
        intact = [
            message for message in self._messages if self._is_intact(message, harmed) and message.topic != DELETED_TOPIC
        ]
        self._read()
        found = recover(self._copy, self.options, clean=clean)
        if not vouched:
            self._check(found, intact)
            self._check_keys(intact, clean=clean)
        self._read()
        self._check_again()

    def close(self) -> str:
        """Nothing left to check."""
        folders, ways = ({each[at] for each in self._reached} for at in (0, 1))
        return f"files of {len(folders)} of {len(self._folders)} folders, {len(ways)} of {len(WAYS)} ways"

    def _harm(self, random: Random) -> None:
        """Damage a file, each folder equally likely; or cut, empty, remove, copy or misplace it."""
        folder = random.choice(self._folders)
        path = self._copy / random.choice([each for each in self._files if each.parent == folder])
        if not path.is_file():
            return  # Removed by an earlier damage.
        data = path.read_bytes()
        way = random.choices(list(WAYS), list(WAYS.values()))[0]
        self.harms.append(f"{path.relative_to(self._copy)} {way}")
        self._reached.add((folder, way))
        if way == "bytes":
            other = (self.root / random.choice(self._files)).read_bytes()
            path.write_bytes(self._damaged(random, path, data, other))
        elif way == "empty":
            path.write_bytes(b"")
        elif way == "gone":
            path.unlink()
        elif way == "stray":
            shutil.copy(path, path.with_name(random.choice(("stray", "00000000000000000001", f"{path.name}.tmp"))))
        else:
            path.unlink()
            path.mkdir()

    def _damaged(self, random: Random, path: Path, data: bytes, other: bytes) -> bytes:
        """Damage bytes; rarely the length of a mapped file, so that contents are tested too."""
        found = damage(random, data, [other])
        if path.parent.name in ("config", "marks") or random.random() < 0.2:
            return found
        return found[: len(data)] + data[len(found) :]

    def _is_intact(self, message: StoredMessage, harmed: dict[str, bytes]) -> bool:
        """Whether all bytes of a message's record are as stored."""
        for name, data in self._bytes.items():
            at = message.physical_offset - int(name)
            if 0 <= at < len(data):
                return harmed[name][at : at + message.size] == data[at : at + message.size]
        return False

    def _is_record(self, physical_offset: int) -> bool:
        """Whether a record that belongs there begins there, intact by its body's CRC."""
        path = self._copy / "commitlog" / f"{physical_offset // SEGMENT * SEGMENT:020d}"
        data = path.read_bytes()[physical_offset % SEGMENT :] if path.is_file() else b""
        at = record.PHYSICAL_OFFSET
        check = check_record(data)
        return check.success and int.from_bytes(data[at : at + 8], "big") == physical_offset

    def _read(self) -> None:
        """Read the damaged store: only reported damage is allowed."""
        with contextlib.suppress(CorruptStoreError), StoreReader(self._copy, self.options) as reader:
            for queue in reader.queues():
                with contextlib.suppress(CorruptStoreError):
                    reader.pull(queue.topic, queue.queue_id, queue.min_offset, BATCH)
            with contextlib.suppress(CorruptStoreError):
                sum(1 for _ in reader.messages())
            for message in self._messages[::50]:
                if message.keys:
                    with contextlib.suppress(CorruptStoreError):
                        reader.by_key(message.topic, message.keys[0])
        io, paths = StoreIO(), StorePaths(self._copy)
        with contextlib.suppress(CorruptStoreError):
            DelayOffsets.load(io, paths)
        with contextlib.suppress(CorruptStoreError):
            check_file(io, paths)

    def _check(self, found: Recovered, intact: list[StoredMessage]) -> None:
        """Check that exactly the intact records are in their queues."""
        assert found.dispatched == found.end, "dispatch is not at the end"
        units = {
            (topic, queue_id, queue_offset): unit
            for (topic, queue_id), of_queue in found.units_of(found.queues()).items()
            for queue_offset, unit in of_queue.items()
        }
        for message in intact:
            place = message.topic, message.queue_id, message.queue_offset
            assert message.physical_offset < found.end, f"the log ends at {found.end}, before {place}"
            assert units.get(place, (0, 0, 0))[:2] == (message.physical_offset, message.size), f"{place} is not there"
        offsets = {message.physical_offset for message in intact}
        others = [unit for unit in units.values() if unit[1] != FILLER_SIZE and unit[0] not in offsets]
        # Bytes without a checksum may differ.
        strangers = [unit for unit in others if not self._is_record(unit[0])]
        assert not strangers, f"queues have units without a record: {strangers[:3]}"

    def _check_keys(self, intact: list[StoredMessage], *, clean: bool) -> None:
        """Check that intact records are found by their keys.

        After an orderly stop the contents of the index files are trusted: there a report by `store verify` is enough.
        """
        with StoreReader(self._copy, self.options) as reader:
            for message in intact[::20]:
                found_by = [each.physical_offset for key in message.keys for each in reader.by_key(message.topic, key)]
                found = found_by.count(message.physical_offset) == len(message.keys)
                assert found or (clean and self._index_damage()), f"{message.keys} lead to {found_by}"

    def _index_damage(self) -> list[str]:
        verified = verify_store(StoreIO(), StorePaths(self._copy), self.options, jobs=1, is_mine=True)
        return [finding.file for finding in verified.findings.listed if finding.file.startswith("index/")]

    def _check_again(self) -> None:
        before = contents(self._copy)
        io = RecordingIO()
        recover(self._copy, self.options, clean=True, io=io)
        assert io.lasting_calls == [], "a second recovery changed something"
        assert contents(self._copy) == before, "a second recovery changed something"


def make_store(root: Path) -> tuple[Path, Options]:
    """A stopped store with every feature."""
    group = Group(
        root,
        mapped_file_size_commit_log=SEGMENT,
        max_index_num=400,
        max_hash_slot_num=50,
        mapped_file_size_consume_queue=800,
        mapped_file_size_timer_log=TIMER_LOG_FILE,
        max_queues=256,
    )
    group.start()
    with group.client() as client:
        for number in range(12):
            keys = [f"k{number}-{each}" for each in range(BATCH)]
            client.send_batch(f"topic-{number % 3}", [b"body %d" % each * 10 for each in range(BATCH)], keys=keys)
        client.send_batch("topic-1", [b"whole", b"batch"], batch=True, queue_id=0)
        for level in (1, 5, 18):
            client.send("topic-0", b"later", delay_level=level)
        client.send("topic-0", b"much later", delay=3600)
        client.send_many([Message("topic-2", b"large" * 2000, keys=["large"]), Message("other", b"")])
        group.wait_dispatched()
        with client.consumer("group", "topic-0", start="earliest") as consumer:
            messages = consumer.receive(20, timeout=10)
            consumer.nack(*messages[:3])
            consumer.nack(messages[3], delay_level=-1)
            consumer.ack(*messages[4:])
        receive_some(client)
        end_some(client)
        client.send_batch(DELETED_TOPIC, [b"gone"] * BATCH, keys=["gone"] * BATCH)
        group.wait_dispatched()
        client.delete_topic(DELETED_TOPIC)
        topics = {topic.topic for topic in client.topics()}
        assert {SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, REVIVE_TOPIC} <= topics
        assert DELETED_TOPIC not in topics
        wait_until(lambda: group.words()["delivered_messages"] >= 1, what="the first message whose time comes")
    group.wait_dispatched()
    assert group.stop() == 0
    paths = StorePaths(root)
    assert paths.delay_offsets.exists()
    assert paths.timer_check.exists()
    assert paths.deleted_topics.exists()
    return root, Options(**group.options)


def receive_some(client: Client) -> None:
    """Create check points: open, partly acknowledged, and done."""
    receiver = client.simple_consumer("receivers", "topic-1", start="earliest")
    for done in (0, 2, 5):
        received = receiver.receive(5, 3600, timeout=10)
        assert len(received) == 5
        assert receiver.ack(*received[:done]) == done


def end_some(client: Client) -> None:
    """Create transactions: committed, rolled back, and open."""
    for body in (b"committed", b"rolled back", b"open"):
        message = Message("topic-2", body, keys=["transaction"])
        with client.transaction("producers", message, check_immunity_time=3600) as transaction:
            if body == b"open":
                transaction.leave()
            elif body == b"rolled back":
                transaction.rollback()


def _copy_sparse(source: str, target: str) -> None:
    """Copy a file with its holes: the timer wheel is large and empty."""
    with open(source, "rb") as old, open(target, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        for start, stop in written_ranges(old.fileno(), size):
            os.pwrite(new.fileno(), os.pread(old.fileno(), stop - start, start), start)
    shutil.copystat(source, target)


# Damaged RocketMQ config files: they are read, or rejected with an error.


VALID_JSON = [
    text.encode()
    for text in (
        '{"offsetTable":{"orders@billing":{0:17,1:4,-2:9},"%RETRY%billing@billing":{0:3}},"dataVersion":'
        '{"counter":5,"stateVersion":0,"timestamp":1700000000000}}',
        '{"offsetTable":{1:10,2:0,18:7}}',
        '{"topicConfigTable":{"orders":{"attributes":{"+message.type":"NORMAL"},"order":false,"perm":6,"readQueueNums":8,'
        '"topicFilterType":"SINGLE_TAG","topicName":"orders","topicSysFlag":0,"writeQueueNums":8}},"dataVersion":{}}',
        '{"subscriptionGroupTable":{"a \\"quoted\\" group":{"groupName":"g","retryMaxTimes":16,"retryQueueNums":1}}}',
        '{"text":"{0:1,2:3}","list":[{0:[1,2,{3:4}]},null,true,-1.5e3],"\\u00e4":"\\\\"}',
    )
]


class JsonFiles:
    """Damaged files in a folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "consumerOffset.json"
        for data in VALID_JSON:
            self._path.write_bytes(data)
            assert rocketmq_json.load(StoreIO(), self._path)[0], "intact files must be readable"

    def run(self, seed: int) -> None:
        """Check one damaged file. Raises unexpected errors."""
        random = Random(seed)
        data = random.choice((b"[", b'{"a":')) * 100_000 if seed % 1000 == 999 else random.choice(VALID_JSON)
        self.look(damage(random, data, VALID_JSON))

    def look(self, data: bytes) -> None:
        """Read a file with these bytes."""
        self._path.write_bytes(data)
        try:
            rocketmq_json.load(StoreIO(), self._path)
        except CorruptStoreError:
            return

    def close(self) -> str:
        """Nothing left to check."""
        return ""


# Damaged or foreign files in place of `mqproc/control` and `lock`, which the processes of a group share.
#
# Nothing in them is durable. A tool reports in one line their contents, or that it cannot read them. A start recreates
# them, or rejects a non-file in one line.


PID = 4242
READERS = (("stat",), ("stat", "--json"), ("metrics", "--check"))
TOOLS = (
    *READERS,
    ("top", "--once", "--interval", "0.01"),
    ("status",),
    ("status", "--json"),
    ("store", "info"),
    ("store", "retention"),
    ("down",),
)
HEADER = {layout.HEADER_MAGIC: layout.MAGIC, layout.HEADER_VERSION: layout.VERSION}
MADE_WITH = {
    layout.EPOCH,
    layout.STORE_ID,
    layout.SUPERVISOR_PID,
    layout.GROUP_STARTED_MS,
    layout.SUPERVISOR_HEARTBEAT_NS,
    *HEADER,
}


class SharedFiles:
    """A used store with damaged shared files, both as left by a stop and as left by a kill."""

    def __init__(self, folder: Path) -> None:
        group = Group(folder / "store", max_queues=256).start()
        with group.client() as client:
            client.send_batch("topic", [b"body"] * 10)
            group.wait_dispatched()
        self.paths = group.paths
        killed = self.paths.control.read_bytes()
        assert group.stop() == 0
        self._controls = [self.paths.control.read_bytes(), killed]
        self._elsewhere = folder / "elsewhere"
        self._elsewhere.write_bytes(killed)
        self._reached: set[tuple[str, ...]] = set()

    def run(self, seed: int) -> None:
        """Check one pair of files. Raises on a violation."""
        random = Random(seed)
        self.lay(self.paths.control, self._harmed(random, random.choice(self._controls)))
        self.lay(self.paths.lock, self._harmed(random, CONTENT) if random.random() < 0.3 else _as_file(CONTENT))
        tool = random.choice(TOOLS)
        self._reached.add(tool)
        self.look(tool)

    def close(self) -> str:
        """Nothing left to check."""
        return f"{len(self._reached)} of {len(TOOLS)} tools"

    def lay(self, path: Path, harm: Callable[[Path], object]) -> None:
        """Put the damage in the place of a file."""
        _remove(path)
        harm(path)

    def _harmed(self, random: Random, data: bytes) -> Callable[[Path], None]:
        way = random.random()
        if way < 0.6:
            return _as_file(_words_damaged(random, data))
        if way < 0.9:
            return _as_file(damage(random, data, self._controls))
        return random.choice((_remove, _as_file(b""), Path.mkdir, lambda path: path.symlink_to(self._elsewhere)))

    # Invariants

    def look(self, tool: tuple[str, ...]) -> None:
        """Run a tool, a lock request and a start."""
        can_be_read = self._can_be_read()
        self._call(tool, can_be_read=can_be_read)
        if self._may_start():
            self._lock()
            self._make_anew()

    def _may_start(self) -> bool:
        refused = _error_of(StoreAccessError, lambda: prepare_folder(StoreIO(), self.paths))
        odd = [path for path in (self.paths.lock, self.paths.control) if path.is_dir() or path.is_symlink()]
        assert not refused or any(str(path) in refused for path in odd), refused
        assert "\n" not in refused
        return not refused

    def _can_be_read(self) -> bool:
        unreadable = (CorruptStoreError, NotRunningError)
        said = _error_of(unreadable, lambda: Control.open(StoreIO(), self.paths).close())
        assert not said or str(self.paths.control) in said, said
        return not said

    def _call(self, tool: tuple[str, ...], *, can_be_read: bool) -> None:
        told = call(*tool, "--store", self.paths.root)
        assert "Traceback" not in told.err, (tool, told)
        if told.code:
            assert told.err.count("\n") == 1, (tool, told)
        if tool in READERS and not can_be_read:
            assert told.code, (tool, told)
            assert str(self.paths.control) in told.err, (tool, told)

    def _lock(self) -> None:
        """Check that the lock is free whatever it contains, and that its holder is reported."""
        io = StoreIO()
        assert self.paths.lock.is_dir() or lock_holder(io, self.paths) is None
        lock = StoreLock.acquire(io, self.paths)
        try:
            assert self.paths.lock.read_bytes() == CONTENT
            holder = lock_holder(io, self.paths)
            assert holder is not None
            assert str(holder)
            refused = _error_of(StoreLockedError, lambda: StoreLock.acquire(io, self.paths, patience_s=0.0).close())
            assert "is in use by" in refused, "the lock was taken twice"
        finally:
            lock.close()

    def _make_anew(self) -> None:
        """Check that only the epoch and the store id are kept, if readable."""
        old = self._identity()
        control = Control.create(StoreIO(), self.paths, Clock(), PID)
        try:
            found = dict(enumerate(memoryview(self.paths.control.read_bytes()).cast("q")))
        finally:
            control.close()
        assert {index: found[index] for index in HEADER} == HEADER
        assert found[layout.SUPERVISOR_PID] == PID
        assert 0 < found[layout.EPOCH] <= 1 << 31
        assert 0 < found[layout.STORE_ID] < 1 << 62
        if old is not None:
            assert (found[layout.EPOCH], found[layout.STORE_ID]) == (old[0] + 1, old[1])
        others = {index: word for index, word in found.items() if word and index not in MADE_WITH}
        assert not others, f"words were taken over: {others}"
        Control.open(StoreIO(), self.paths).close()
        assert not list(self.paths.own.glob("*.tmp"))

    def _identity(self) -> tuple[int, int] | None:
        """Epoch and store id of an intact file with valid values."""
        if not self._can_be_read():
            return None
        control = Control.open(StoreIO(), self.paths)
        try:
            epoch, store_id = control.load(layout.EPOCH), control.load(layout.STORE_ID)
        finally:
            control.close()
        return (epoch, store_id) if 0 < epoch < 1 << 31 and 0 < store_id < 1 << 62 else None


def _error_of(kinds: type[Exception] | tuple[type[Exception], ...], act: Callable[[], None]) -> str:
    """Text of an error of these kinds; empty without an error."""
    try:
        act()
    except kinds as error:
        return str(error)
    return ""


def _words_damaged(random: Random, data: bytes) -> bytes:
    """Change some words, but not magic, version and length, so that the words are read."""
    words = memoryview(bytearray(data)).cast("q") if len(data) % layout.WORD_SIZE == 0 else None
    if words is None or len(words) < layout.FILE_SIZE // layout.WORD_SIZE:
        return damage(random, data)
    named = [word.index for word in layout.WORDS.values() if word.index not in HEADER]
    for index in random.sample(named, random.choice((1, 3, 20, len(named)))):
        words[index] = random.choice(
            (random.getrandbits(63), -random.getrandbits(63) - 1, -1, 0, 1, random.getrandbits(20))
        )
    return words.tobytes()


def _as_file(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
