"""Invariants of a store after a crash and recovery, and of a running group."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from mqproc.client import requests as core
from mqproc.client import send_requests as sending
from mqproc.config.options import Options, RetentionGuard
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.ipc.health import find_problems
from mqproc.kernels.index import published_count
from mqproc.kernels.jit.intrinsics import load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import control as words_of
from mqproc.layout import durable_marks
from mqproc.layout import index_file as layout
from mqproc.layout.consume_queue import FILLER_SIZES, UNIT_SIZE
from mqproc.layout.record import CRC_TAIL_SIZE
from mqproc.paths import StorePaths, segment_name
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles, queues_on_disk
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import Hole, load
from mqproc.store.durable_marks import read_checkpoint
from mqproc.store.index.files import index_file_names
from mqproc.store.index.lookup import IndexReader
from mqproc.store.offsets.offset_store import committed_offsets
from mqproc.store.read.reader import StoreReader
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.store.topics import Topics
from mqproc.types import Message, PullStatus, SendResult
from tests.crash.clients import (
    Deletions,
    Fate,
    Party,
    Place,
    Senders,
    Sent,
    check_copies,
    found_in,
    goes_to,
    originals,
    tags_code,
)
from tests.crash.disk import (
    CONTROL,
    PAGE,
    SECTOR,
    Broken,
    Disk,
    Machine,
    Placed,
    RecordingIO,
    expect,
    must_end_well,
    walk_log,
)
from tests.crash.group import Caller, Group, Schedule, SimulatedClock
from tests.support.store_checks import contents, entries_below

FOREVER_MS = 1 << 60
KEYS_LOOKED_UP = 30
CALLS_OF_EVERY_RECOVERY = 150
CALLS_PER_FILE_OR_PAGE = 16
# How recovery reached its result.
_OF_THE_WAY = (words_of.RECOVERY_US, words_of.RECOVERY_CUT_BYTES)
# A message that is redelivered often has its key in each of its copies.
KEY_RECORDS_MAX = 4_096


@dataclass(slots=True)
class Truth:
    """The log at the crash, and how much of it must survive a power loss."""

    records: list[Placed]
    synced: int
    written: int
    minimum: int
    """Retention deletes below this offset: records and units below it may exist or not."""
    gone: set[int]
    """Messages lost by an earlier crash, by number: they must never reappear."""
    read_only: bool = False


@dataclass(slots=True)
class Recovered:
    """A store after its recovery."""

    paths: StorePaths
    options: Options
    words: Words
    said: list[str]
    time_asked: bool
    """Recovery read the clock: at another time it might have had another result."""

    def outcome(self) -> tuple[bytes, Options]:
        """The result of recovery. Checks depend on it and the files only."""
        words = Words(bytearray(self.words.mapping))
        for number in _OF_THE_WAY:
            words[number] = 0
        return bytes(words.mapping), self.options

    def state(self) -> Hashable:
        """Everything that the checks depend on: stores of equal state pass or fail alike."""
        files = contents(self.paths.root, without=(CONTROL,))
        return frozenset(files.items()), self.outcome()


def recover(root: Path, options: Options, machine: Machine | None = None, now_ms: int = 0) -> Recovered:
    """Recover the store at `root` before a start of roles. Without a machine, no power is lost."""
    paths, said = StorePaths(root), list[str]()
    machine = machine or Machine(Disk(root), keeps_versions=False)
    machine.calls_max = machine.calls + calls_of_recovery_max(root)
    io = RecordingIO(machine)
    words = Words(bytearray(words_of.FILE_SIZE))
    asked = list[int]()

    def time_ms() -> int:
        asked.append(now_ms)
        return now_ms

    with contextlib.ExitStack() as end:
        # Also if it loses its power: otherwise later stories run out of descriptors.
        end.callback(io.close_all)
        options = adopt_sizes(io, paths, options, said.append)
        io.make_folder(paths.commit_log)
        clean = not paths.abort.exists()
        with must_end_well("recovery"):
            Recovery(io, paths, options, words, said.append, clean=clean, now_ms=time_ms).run()
        # A supervisor keeps running, and so do the files that recovery leaves open.
        expect(not io.open_files, f"recovery leaves {io.open_files} open")
        machine.calls_max = 0
        machine.disk.release_maps()
    return Recovered(paths, options, words, said, bool(asked))


def calls_of_recovery_max(root: Path) -> int:
    """Bound of recovery's storage calls, by the store's files and the pages of its log.

    Twice the maximum of some thousand images.
    """
    files = [(name, entry) for name, entry in entries_below(root) if entry.is_file()]
    log_bytes = sum(entry.stat().st_size for name, entry in files if name.startswith("commitlog/"))
    return CALLS_OF_EVERY_RECOVERY + CALLS_PER_FILE_OR_PAGE * (len(files) + log_bytes // PAGE)


def check_zeros_after_end(commit_log: Path, end: int) -> None:
    """Check that nothing after the log's end could later be taken for a part of it."""
    for path in sorted(commit_log.iterdir()):
        data = path.read_bytes()
        rest = data[max(0, end - int(path.name)) :]
        expect(not any(rest), f"{path} is not empty after the log's end {end}")


def records_of(found: Recovered) -> list[Placed]:
    """Records of a recovered log."""
    begin = found.words[words_of.MIN_PHYSICAL_OFFSET]
    return [placed for placed in walk_log(found.paths.commit_log) if begin <= placed.offset]


def check_log(found: Recovered, truth: Truth, senders: Senders, *, power_loss: bool) -> list[Placed]:
    """Check the log: a prefix of the appends, everything synced, no duplicates, no lost records."""
    records = records_of(found)
    begin, end = found.words[words_of.MIN_PHYSICAL_OFFSET], found.words[words_of.WRITTEN]
    check_zeros_after_end(found.paths.commit_log, end)
    last = records[-1].offset + records[-1].size if records else begin
    expect(last <= end, f"the log ends at {end}, inside the record that ends at {last}")
    ids = [number for number, _placed in originals(records, senders)]
    expect(len(set(ids)) == len(ids), "a message is in the log twice")
    back = truth.gone & set(ids)
    expect(not back, f"messages {sorted(back)[:5]}, lost by an earlier crash, reappeared")
    appended = [placed.offset for placed in truth.records if begin <= placed.offset < truth.written]
    # The removal of a segment may not have been durable.
    oldest = truth.records[0].offset if truth.records else begin
    kept = [placed.offset for placed in records if placed.offset >= oldest]
    published = [offset for offset in kept if offset < truth.written]
    expect(published == appended[: len(published)], f"no prefix of the appends: {published[-3:]}, {appended[-3:]}")
    # Records after the published end may exist or not: they were never reported to a client.
    expect(published in (kept, appended), f"{kept[-1:]} is there, but {appended[-1:]} before it is not")
    before = {placed.offset: content(placed) for placed in truth.records if placed.offset < truth.written}
    now = {placed.offset: content(placed) for placed in records}
    changed = [offset for offset, content in before.items() if now.get(offset, content) != content]
    expect(not changed, f"messages at {changed[:3]} differ from those before the crash")
    must = truth.synced if power_loss else truth.written
    expect(
        end >= must or not appended, f"the log ends at {end}, but was {'synced' if power_loss else 'written'} to {must}"
    )
    check_copies(records, senders, truth.gone)
    _check_acknowledged(set(ids), begin, truth, must, senders, sync_flush=found.options.sync_flush)
    return records


def content(placed: Placed) -> tuple[str, bytes, Mapping[str, str]]:
    """Topic, body and properties set by the sender."""
    return placed.message.topic, placed.message.body, placed.message.properties


def _check_acknowledged(
    ids: set[int], begin: int, truth: Truth, must: int, senders: Senders, *, sync_flush: bool
) -> None:
    for sent in senders.sent:
        if sent.fate is not Fate.STORED or sent.physical_offset < begin or sent.number in truth.gone:
            continue  # Acknowledged before its sync, and lost by an earlier power loss.
        if sent.physical_offset < must or (sync_flush and sent.waited):
            expect(sent.number in ids, f"message {sent.number}, acknowledged at {sent.physical_offset}, is lost")


def check_places(records: list[Placed], senders: Senders) -> None:
    """Check that each message is at the place that its sender was given."""
    for number, placed in originals(records, senders):
        sent, message = senders.sent[number], placed.message
        if (goes_to(message), message.tag or "") != (sent.topic, sent.tag):
            raise Broken(f"message {number} is {message}")
        if sent.fate is Fate.STORED:
            acknowledged = (sent.physical_offset, sent.queue_id, sent.queue_offset)
            lies = (placed.offset, message.queue_id, message.queue_offset)
            expect(acknowledged == lies, f"message {number}: acknowledged at {acknowledged}, but stored at {lies}")


Unit = tuple[int, int, int]


@dataclass(slots=True)
class _OfLog:
    """The units of one queue that the log's records require and allow, by queue offset."""

    must: dict[int, Unit] = field(default_factory=dict)
    may: dict[int, Unit] = field(default_factory=dict)
    offsets: set[int] = field(default_factory=set)

    def check(self, queue: str, there: dict[int, tuple[int, ...]], minimum: int) -> None:
        """Check the queue's units `there`; those of records below `minimum` may be deleted."""
        wrong = [place for place, unit in there.items() if unit not in (self.must.get(place), self.may.get(place))]
        expect(not wrong, f"{queue}: units {wrong[:3]} of {len(there)} match no record of the log")
        lacks = [place for place, unit in self.must.items() if unit[0] >= minimum and place not in there]
        expect(not lacks, f"{queue}: units {lacks[:3]} are missing; it has {len(there)}, the log {len(self.must)}")


def _by_queue(records: list[Placed], deletions: Deletions) -> dict[tuple[str, int], _OfLog]:
    found: dict[tuple[str, int], _OfLog] = {}
    for placed in records:
        message = placed.message
        queue = found.setdefault((message.topic, message.queue_id), _OfLog())
        offset = message.queue_offset
        expect(offset not in queue.offsets, f"{message.topic} {message.queue_id}: two records at {offset}")
        queue.offsets.add(offset)
        place, unit = deletions.place(placed), (placed.offset, placed.size, tags_code(message))
        if place is not Place.MUST_NOT:
            (queue.must if place is Place.MUST else queue.may)[offset] = unit
    return found


def check_queues(found: Recovered, records: list[Placed], minimum: int, deletions: Deletions) -> None:
    """Check that queues match the log without gaps; records below `minimum` may be deleted."""
    expect(not load(StoreIO(), found.paths).holes, "a crash was recorded as damage")
    expect(found.words[words_of.DISPATCHED] == found.words[words_of.WRITTEN], "recovery left records undispatched")
    of_log = _by_queue(records, deletions)
    table = QueueTable(StoreIO(), found.paths.queues)
    files = ConsumeQueueFiles(StoreIO(), found.paths.consume_queue, found.options.consume_queue_file_bytes)
    try:
        for number, topic, queue_id in table.live():
            first, stop = table.min_offset(number), table.max_offset(number)
            units = as_units(files.read_units(topic, queue_id, first, stop - first)).tolist() if stop > first else []
            there = {first + at: tuple(unit) for at, unit in enumerate(units)}
            expect(len(there) == stop - first, f"queue {topic} {queue_id}: {len(there)} units of [{first}, {stop})")
            of_log.pop((topic, queue_id), _OfLog()).check(f"queue {topic} {queue_id}", there, minimum)
            next_offset = table.next_offset(number)
            expect(next_offset == stop, f"queue {topic} {queue_id}: next {next_offset}, end {stop}")
    finally:
        files.close()
        table.close()
    check_topics_known(found)
    missing = [queue for queue, units in of_log.items() if any(unit[0] >= minimum for unit in units.must.values())]
    expect(not missing, f"queues are missing: {missing}")


def check_topics_known(found: Recovered) -> None:
    """Check that queues exist only of known topics, and have files only with records."""
    topics = Topics(StoreIO(), found.paths)
    topics.load()
    table = QueueTable(StoreIO(), found.paths.queues)
    try:
        ends = {(topic, queue_id): table.max_offset(number) for number, topic, queue_id in table.live()}
    finally:
        table.close()
    used = {topic for (topic, _queue_id), end in ends.items() if end > 0}
    unknown = {topic for topic, _queue_id in ends} - used - set(topics.names())
    expect(not unknown, f"topics {sorted(unknown)} were never created and have no records")
    there, _strays = queues_on_disk(StoreIO(), found.paths.consume_queue)
    unused = [queue for queue in there if ends.get(queue, 0) == 0]
    expect(not unused, f"queues without a record have files: {unused}")


def _entries_of(found: Recovered) -> Counter[int]:
    """Index entries of each record, by its offset in the log."""
    slots, entries = found.options.max_hash_slot_num, Counter[int]()
    for name in index_file_names(StoreIO(), found.paths.index):
        view = as_kernel_array((found.paths.index / name).read_bytes())
        places = (layout.item_offset(slots, item) for item in range(layout.FIRST_ITEM, published_count(view)))
        entries.update(int(load_be64(view, place + layout.ITEM_PHYSICAL_OFFSET)) for place in places)
    return entries


def check_index(found: Recovered, records: list[Placed]) -> None:
    """Check that each key has one entry; look up some keys, including the newest."""
    entries = _entries_of(found)
    for placed in records:
        keys = len(placed.message.keys) + bool(placed.message.unique_id)
        there = entries[placed.offset]
        expect(there == keys, f"the record at {placed.offset} has {keys} keys, and {there} entries in the index")
    slots, items = found.options.max_hash_slot_num, found.options.max_index_num
    reader = IndexReader(StoreIO(), found.paths.index, slots, items, KEY_RECORDS_MAX)
    try:
        reader.refresh(1)
        with_keys = [placed for placed in records if placed.message.keys]
        step = max(1, len(with_keys) // KEYS_LOOKED_UP)
        for placed in with_keys[::-step]:
            topic, key = placed.message.topic, placed.message.keys[0]
            offsets = list(reader.query_offset(topic, key, KEY_RECORDS_MAX, 0, FOREVER_MS).offsets)
            expect(offsets.count(placed.offset) == 1, f"key {key} finds {offsets}, not {placed.offset} once")
    finally:
        reader.close()


def check_parties(
    found: Recovered, records: list[Placed], parties: Iterable[Party], *, minimum: int, power_loss: bool
) -> None:
    """Check committed offsets and the outcomes given to clients; `minimum` as in `Found`."""
    state = found_in(found.paths, records, sync_flush=found.options.sync_flush, minimum=minimum)
    # A start leaves corrections to the repair, as all work that needs a sync.
    waits = found.paths.read_only.exists()
    table = QueueTable(StoreIO(), found.paths.queues)
    try:
        for group, progress in state.progress.items():
            for (topic, queue_id), offset in progress.items():
                number = table.find(topic, queue_id)
                end = table.next_offset(number) if number >= 0 else offset
                expect(offset <= end or waits, f"{group} is at {offset} of {topic} {queue_id}, beyond its end {end}")
    finally:
        table.close()
    for party in parties:
        party.check(state, power_loss=power_loss)


def check_again(found: Recovered, options: Options) -> None:
    """Check that a second recovery changes nothing and leaves no temporary files."""
    before = contents(found.paths.root)
    again = recover(found.paths.root, options)
    expect(again.words[words_of.WRITTEN] == found.words[words_of.WRITTEN], "a second recovery ends elsewhere")
    after = contents(found.paths.root)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    expect(not changed, f"a second recovery changed {changed[:5]}: {again.said}")
    # The next segment is created under its name, whatever file is there.
    below = [entry for name, entry in entries_below(found.paths.root) if name.endswith(".tmp")]
    strays = [entry.name for entry in below if Path(entry.path) != found.paths.next_segment]
    expect(not strays, f"stray files: {strays}")


def check_all(
    found: Recovered, truth: Truth, senders: Senders, deletions: Deletions, *, power_loss: bool
) -> list[Placed]:
    """Check log, places, queues and index; return the records."""
    records = check_log(found, truth, senders, power_loss=power_loss)
    check_places(records, senders)
    check_queues(found, records, truth.minimum, deletions)
    check_index(found, [placed for placed in records if placed.offset >= truth.minimum])
    return records


def unacknowledged(sent: Sent) -> bool:
    """Whether the message was not reported as stored."""
    return sent.fate is not Fate.STORED


# Damage in a recovered store: intact records stay readable, damage is reported, and no damaged record is served.


RECORDS_MIN = 3
PULL_MESSAGES = 4_096
# A tail with this much of its name intact is still recognized.
SEEN_NAME_BYTES = 5

QueueOffset = tuple[str, int, int]


@dataclass(slots=True)
class Readable:
    """Messages served to consumers, with places in the log and bodies; the damaged places."""

    messages: dict[QueueOffset, tuple[int, bytes]]
    corrupt: list[str]

    @property
    def offsets(self) -> set[int]:
        return {offset for offset, _body in self.messages.values()}


def readable(found: Recovered) -> Readable:
    """Read every queue from its first to its last offset."""
    messages: dict[QueueOffset, tuple[int, bytes]] = {}
    corrupt = []
    with StoreReader(found.paths.root, found.options) as reader:
        for queue in reader.queues():
            offset = queue.min_offset
            while offset < queue.max_offset:
                pulled = reader.pull(queue.topic, queue.queue_id, offset, PULL_MESSAGES)
                for message in pulled.messages:
                    place = queue.topic, queue.queue_id, message.queue_offset
                    expect((message.topic, message.queue_id) == place[:2], f"{place} has a message of {message.topic}")
                    messages[place] = message.physical_offset, message.body
                if pulled.status is PullStatus.CORRUPT:
                    corrupt.append(pulled.detail)
                expect(pulled.next_offset > offset, f"{queue.topic} {queue.queue_id} does not advance at {offset}")
                offset = pulled.next_offset
    return Readable(messages, corrupt)


def check_damaged(
    found: Recovered, records: Sequence[Placed], options: Options, machine: Machine, rng: random.Random
) -> None:
    """Damage some records of a recovered store below its marks, recover again, and read it.

    Without marks, recovery scans the whole log and records the damage; with marks, readers find it. The last record
    stays intact: without a mark, damage at the end of the log cannot be distinguished from a torn record.
    """
    if len(records) < RECORDS_MIN:
        return
    before = readable(found)
    start, stop = _harm(found, records, rng)
    harmed = [placed for placed in records if placed.offset < stop and start < _end(placed)]
    # A record without its CRC reads as one that never had it: only its body is protected.
    sure = [placed for placed in harmed if not start <= _end(placed) - CRC_TAIL_SIZE + SEEN_NAME_BYTES <= stop]
    end = found.words[words_of.WRITTEN]
    # After a failed sync, marks did not advance, and damage above them counts as torn.
    trusts_marks = not found.paths.read_only.exists() and rng.random() < 0.5
    if not trusts_marks:
        shutil.rmtree(found.paths.marks)
    again = recover(found.paths.root, options, machine)
    now, reported = again.words[words_of.WRITTEN], again.words[words_of.DAMAGE_HOLES]
    expect(now == end, f"damage below {end} truncated the log to {now}")
    holes = load(StoreIO(), found.paths).holes
    expect(reported == len(holes), f"{reported} reports for {holes}")
    lost = [placed.offset for placed in records if placed not in harmed and _is_noted(placed, holes)]
    expect(not lost, f"intact records at {lost[:3]} are recorded as damage: {holes}")
    unseen = [] if trusts_marks else [placed.offset for placed in sure if not _is_noted(placed, holes)]
    expect(not unseen, f"damage at {unseen[:3]} is not recorded: {holes}")
    after = readable(again)
    wrong = [place for place, message in after.messages.items() if before.messages.get(place) != message]
    expect(not wrong, f"{wrong[:3]} changed by the damage at [{start}, {stop})")
    gone, maybe = {placed.offset for placed in sure}, {placed.offset for placed in harmed}
    served = [place for place, message in after.messages.items() if message[0] in gone]
    expect(not served, f"{served[:3]} are served despite the damage at [{start}, {stop})")
    lacks = [place for place, message in before.messages.items() if message[0] not in maybe | after.offsets]
    expect(not lacks, f"{sorted(lacks)[:3]} are intact but not served after the damage at [{start}, {stop})")
    silent = gone & before.offsets and not after.corrupt and not holes
    expect(not silent, f"the damage at [{start}, {stop}) is not reported")


def _harm(found: Recovered, records: Sequence[Placed], rng: random.Random) -> tuple[int, int]:
    """Change a byte or a sector within one record, but not the last one; the changed range."""
    *others, last = records
    victim = rng.choice(others)
    start = victim.offset + rng.randrange(victim.size)
    stop = start + 1
    if rng.random() < 0.5:
        start -= start % SECTOR
        stop = start + SECTOR
    segment = found.options.mapped_file_size_commit_log
    base = victim.offset // segment * segment
    start, stop = max(start, records[0].offset, base), min(stop, last.offset, base + segment)
    path = found.paths.commit_log / segment_name(base)
    with path.open("r+b") as file:
        file.seek(start - base)
        data = file.read(stop - start)
        harm = bytes(rng.choice([value for value in (0, 255, rng.randrange(256)) if value != byte]) for byte in data)
        file.seek(start - base)
        file.write(harm)
    return start, stop


def _end(placed: Placed) -> int:
    return placed.offset + placed.size


def _is_noted(placed: Placed, holes: Sequence[Hole]) -> bool:
    return any(hole.overlaps(placed.offset, _end(placed)) for hole in holes)


# Invariants at every turn of a running group: no published position is ahead of its data.


# They only grow within a start of a group, even if roles are killed.
GROWING = {
    "written": words_of.WRITTEN,
    "writer_synced": words_of.WRITER_SYNCED,
    "flusher_synced": words_of.FLUSHER_SYNCED,
    "commitlog_mark": words_of.COMMITLOG_MARK,
    "dispatched": words_of.DISPATCHED,
    "cq_synced": words_of.CQ_SYNCED,
    "index_synced": words_of.INDEX_SYNCED,
    "min_physical_offset": words_of.MIN_PHYSICAL_OFFSET,
}
# Words that are set while the group cannot do its whole job, by the problem that it must report.
BLOCKING = {
    "sync": words_of.SYNC_ERRNO_WORDS,
    "disk": (words_of.DISK_FULL,),
    "segment": (words_of.SEGMENT_ERRNO,),
    "dispatch": (words_of.DISPATCH_ERRNO,),
    "retention": (words_of.RETENTION_ERRNO,),
    "delivery": (words_of.DELIVERY_ERRNO,),
}
MARKS = ("commitlog", "consumequeue", "index")
TURNS_PER_LOOK_AT_FILES = 8
TURNS_PER_LOOK_AT_GROUPS = 32


class Watch:
    """Checks positions of a group after each turn, and its mark files when a mark has moved."""

    def __init__(self, group: Group, disk: Disk, clock: SimulatedClock, *, times_grow: bool) -> None:
        """`times_grow`: no earlier life set its clock back so far that store timestamps decreased."""
        self._control = group.control
        self._options = group.options
        self._paths = group.paths
        self._io = StoreIO()
        self._aim = 0
        self._guards = self._options.retention_guard is RetentionGuard.GROUPS
        self._reading: list[set[tuple[str, str, int]]] = [set(), set()]
        """Queues with offsets by group, at the last two looks."""
        self._disk = disk
        self._flushed = self._queues_mark = 0
        self._words = dict.fromkeys(GROWING, 0)
        self._marks = dict.fromkeys(MARKS, (0, 0))
        self._turns = 0
        self._clock = clock
        self._times_grow = times_grow

    def look(self) -> None:
        """Check all positions; raises Broken."""
        load = self._control.load
        dispatched, flushed = load(words_of.DISPATCHED), self._control.flushed
        reserved, written = load(words_of.RESERVED_END), load(words_of.WRITTEN)
        expect(dispatched <= written, f"dispatched {dispatched} is ahead of written {written}")
        expect(flushed <= written, f"flushed {flushed} is ahead of written {written}")
        expect(written <= reserved, f"written {written} is ahead of reserved {reserved}")
        for mark in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
            expect(load(mark) <= flushed, f"a mark at {load(mark)} is ahead of flushed {flushed}")
        words = {name: load(word) for name, word in GROWING.items()}
        if words != self._words:
            back = {name: value for name, value in words.items() if value < self._words[name]}
            expect(not back, f"positions moved back to {back} from {self._words}")
        moved = any(words[mark] != self._words[mark] for mark in ("commitlog_mark", "cq_synced", "index_synced"))
        self._words = words
        self._turns += 1
        if moved or self._turns % TURNS_PER_LOOK_AT_FILES == 0:
            self._look_at_marks(flushed)
        if flushed != self._flushed:
            self._flushed = flushed
            self._look_at_segments(flushed)
        if (mark := load(words_of.CQ_SYNCED)) != self._queues_mark:
            self._queues_mark = mark
            self._look_at_queues(mark)
        if self._guards and (aim := load(words_of.RETENTION_AIM)) > self._aim:
            self._aim = aim
            self._look_at_groups(aim)
        if self._guards and self._turns % TURNS_PER_LOOK_AT_GROUPS == 0:
            found = committed_offsets(self._io, self._paths)
            self._reading = [self._reading[1], {(at.group, at.topic, at.queue_id) for at in found}]
        if blocked := [name for name, words in BLOCKING.items() if any(map(load, words))]:
            self._look_at_health(blocked)

    def _look_at_groups(self, aim: int) -> None:
        """Check that retention deletes nothing that a group has not consumed."""
        table = QueueTable(self._io, self._paths.queues)
        files = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._options.consume_queue_file_bytes)
        for at in committed_offsets(self._io, self._paths):
            number = table.find(at.topic, at.queue_id)
            # A group that has begun since the plan is not known to it.
            is_known = (at.group, at.topic, at.queue_id) in self._reading[0]
            if number < 0 or not is_known or not table.min_offset(number) <= at.offset < table.max_offset(number):
                continue
            position = files.position_at(at.topic, at.queue_id, at.offset, table.generation(number))
            expect(
                position is None or position >= aim,
                f"retention deletes up to {aim}, and {at.group} needs {at.topic}/{at.queue_id} from {position} on",
            )
        files.close()
        table.close()

    def _look_at_health(self, blocked: Sequence[str]) -> None:
        """Check that a group that cannot do its whole job says so."""
        found = find_problems(self._control.snapshot(), self._options, self._clock.monotonic_ns())
        silent = [name for name in blocked if name not in found]
        expect(not silent, f"the group is blocked by {silent}, and reports only {list(found)}")

    def _look_at_marks(self, flushed: int) -> None:
        """Check that marks and checkpoint cover only durable data and never move back."""
        for name in MARKS:
            path = self._paths.mark(name)
            mark = durable_marks.decode(path.read_bytes()) if path.exists() else None
            if mark is None:
                continue
            expect(mark.offset <= flushed, f"the {name} mark's file, at {mark.offset}, is ahead of flushed {flushed}")
            now, before = (mark.sequence, mark.offset), self._marks[name]
            expect(now[0] >= before[0] and now[1] >= before[1], f"the {name} mark moved back to {now} from {before}")
            self._marks[name] = now
        checkpoint = read_checkpoint(self._io, self._paths.checkpoint)
        confirmed = checkpoint.confirm_physical_offset
        expect(confirmed <= flushed, f"the checkpoint confirms {confirmed}, ahead of flushed {flushed}")
        if self._clock.set_back or not self._times_grow:
            return
        latest_ms = self._control.load(words_of.WRITTEN_STORE_TIMESTAMP_MS)
        for what, time_ms in (
            ("physic", checkpoint.physic_timestamp_ms),
            ("logics", checkpoint.logics_timestamp_ms),
            ("index", checkpoint.index_timestamp_ms),
        ):
            expect(time_ms <= latest_ms, f"the checkpoint's {what} time {time_ms} is ahead of the log's {latest_ms}")

    def _look_at_segments(self, flushed: int) -> None:
        lost = [path for path in self._disk.unsynced_names("commitlog") if int(PurePath(path).name) < flushed]
        expect(not lost, f"flushed {flushed} is ahead of the names of {lost}, which a power loss may take")

    def _look_at_queues(self, mark: int) -> None:
        unnamed = set(self._disk.unsynced_names("consumequeue"))
        for path, durable, now in self._disk.unsynced("consumequeue"):
            for number, (physical, size, _tags) in enumerate(as_units(now).tolist()):
                at = number * UNIT_SIZE
                is_durable = path not in unnamed and durable[at : at + UNIT_SIZE] == now[at : at + UNIT_SIZE]
                expect(
                    size in (0, *FILLER_SIZES) or physical >= mark or is_durable,
                    f"the queues' mark {mark} is ahead of the unit at {at} of {path}, which a power loss may take",
                )


# A recovered store is usable: roles start, accept a message, dispatch it, and return it.


TOPIC, KEY, BODY = "Alive", "alive", b"alive"
ALIVE_TURNS_MAX = 3_000
ALIVE_TURN_MS = 5
ALIVE_PULL_BYTES = 1 << 16
STEPS = ("stored", "read by its queue", "read by its key")


def check_alive(root: Path, options: Options, machine: Machine, rng: random.Random, now_ms: int) -> None:
    """Start a group on the store at `root`, send a message, and read it by queue and by key."""
    schedule = Schedule(rng, machine.journal)
    machine.between = schedule.pause
    clock = SimulatedClock(schedule, now_ms)
    group = Group(root, options, machine, schedule, clock)
    done: list[str] = []
    try:
        if group.read_only:
            return
        schedule.add("sender", lambda: _send_and_read(group, schedule, now_ms, done))
        for _ in range(ALIVE_TURNS_MAX):
            if "sender" not in schedule.names:
                break
            schedule.turn()
            clock.advance(ALIVE_TURN_MS)
        expect(len(done) == len(STEPS), f"after {ALIVE_TURNS_MAX:,} turns: {done} of {STEPS}")
    finally:
        group.kill_all()


def _send_and_read(group: Group, schedule: Schedule, now_ms: int, done: list[str]) -> None:
    writer, query = (Caller(group.paths.socket(name), schedule) for name in ("writer", "query"))
    try:
        stored = _stored(writer, schedule, now_ms)
        done.append(STEPS[0])
        while not _is_in_queue(query, stored):
            schedule.pause()
        done.append(STEPS[1])
        while not _has_key(query, stored):
            schedule.pause()
        done.append(STEPS[2])
    finally:
        writer.close()
        query.close()


def _stored(writer: Caller, schedule: Schedule, now_ms: int) -> SendResult:
    """Send until accepted: the next segment may not be ready."""
    message = Message(TOPIC, BODY, "", (KEY,), born_timestamp_ms=now_ms)
    while True:
        outcome = writer.call(sending.send(message))
        if outcome.error is None:
            stored: SendResult = outcome.value
            return stored
        schedule.pause()


def _is_in_queue(query: Caller, stored: SendResult) -> bool:
    place = TOPIC, stored.queue_id, stored.queue_offset
    request = core.pull_request(*place, 1, ALIVE_PULL_BYTES)
    outcome = query.call(core.pull(request))
    if outcome.error is not None or outcome.value.status is not PullStatus.FOUND:
        return False
    (message,) = outcome.value.messages
    found = message.physical_offset, message.body, message.queue_offset
    expect(found == (stored.physical_offset, BODY, stored.queue_offset), f"{place} has {found}, not {stored}")
    return True


def _has_key(query: Caller, stored: SendResult) -> bool:
    outcome = query.call(core.with_key(TOPIC, KEY, 0, FOREVER_MS, max_bytes=ALIVE_PULL_BYTES))
    if outcome.error is not None:
        return False
    messages, _are_all = outcome.value
    return stored.physical_offset in [message.physical_offset for message in messages]
