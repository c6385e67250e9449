"""What must be true of a store after a crash and its recovery. Each check says what it expected and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout.java_hash import java_hash
from mqproc.layout.record_codec import decode_record
from mqproc.message import StoredMessage
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store.consume_queue import ConsumeQueueFiles, as_units
from mqproc.store.damage import load
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.index_query import IndexReader
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from tests.crash.disk import Disk
from tests.crash.recording_io import Machine, RecordingIO
from tests.crash.senders import Fate, Senders, Sent
from tests.store.recovery.recovering import contents

BLANK_MAGIC = -875286124
FOREVER_MS = 1 << 60
KEYS_LOOKED_UP = 30


class Broken(AssertionError):
    """An invariant does not hold."""


def expect(true: bool, what: str) -> None:
    """Raise Broken unless it is true."""
    if not true:
        raise Broken(what)


@dataclass(frozen=True, slots=True)
class Placed:
    """A record as it lies in the log."""

    offset: int
    size: int
    message: StoredMessage


@dataclass(slots=True)
class Truth:
    """What the log held when it crashed, and how much of it must outlast a power loss."""

    records: list[Placed]
    synced: int
    written: int
    minimum: int
    """Retention moves the log's minimum to here: below it records and units may be there or not."""
    gone: set[int]
    """Numbers of messages that an earlier crash took: they must never come back."""
    read_only: bool = False


@dataclass(slots=True)
class Recovered:
    """A store after its recovery."""

    paths: StorePaths
    options: Options
    words: Words
    said: list[str]


def walk_log(commit_log: Path) -> list[Placed]:
    """Every record from the first segment on, in plain Python, up to the first that is not whole."""
    found: list[Placed] = []
    segments = sorted(path for path in commit_log.iterdir() if path.name.isdigit())
    expected = int(segments[0].name) if segments else 0
    for path in segments:
        start = int(path.name)
        if start != expected:
            break
        data = path.read_bytes()
        expected = start + len(data)
        at = 0
        while at + 8 <= len(data):
            size, magic = (int.from_bytes(data[place : place + 4], "big", signed=True) for place in (at, at + 4))
            if magic == BLANK_MAGIC:
                break
            try:
                message = decode_record(data, at)
            except Exception:
                return found
            if message.physical_offset != start + at:
                return found
            found.append(Placed(start + at, size, message))
            at += size
    return found


def recover(root: Path, options: Options, machine: Machine | None = None, now_ms: int = 0) -> Recovered:
    """Recover the store at `root` as a supervisor would before it starts roles."""
    paths, said = StorePaths(root), list[str]()
    machine = machine or Machine(Disk.of(root))
    io = RecordingIO(machine)
    options = adopt_sizes(io, paths, options, said.append)
    words = Words(bytearray(words_of.FILE_SIZE))
    io.make_folder(paths.commit_log)
    clean = not paths.abort.exists()
    Recovery(io, paths, options, words, said.append, clean=clean, now_ms=lambda: now_ms).run()
    machine.disk.let_go()
    return Recovered(paths, options, words, said)


def numbers(records: list[Placed], senders: Senders) -> list[int]:
    """The messages' numbers in the order of the log; raises Broken for one that nobody sent."""
    found = []
    for placed in records:
        sent = senders.of_body(placed.message.body)
        if sent is None:
            raise Broken(f"the record at {placed.offset} was never sent: {placed.message.body[:40]!r}")
        found.append(sent.number)
    return found


def check_log(found: Recovered, truth: Truth, senders: Senders, *, power_loss: bool) -> list[Placed]:
    """The log: a prefix of what was appended, all that was synced, nothing twice, nothing that was gone before."""
    records = walk_log(found.paths.commit_log)
    begin, end = found.words[words_of.MIN_PHYSICAL_OFFSET], found.words[words_of.WRITTEN]
    records = [placed for placed in records if begin <= placed.offset]
    expect(all(placed.offset < end for placed in records), f"intact records lie behind the end {end}")
    last = records[-1].offset + records[-1].size if records else begin
    expect(last <= end, f"the log ends at {end}, inside the record that ends at {last}")
    ids = numbers(records, senders)
    expect(len(set(ids)) == len(ids), "a message is in the log twice")
    back = truth.gone & set(ids)
    expect(not back, f"messages {sorted(back)[:5]} came back after a crash had taken them")
    appended = [placed.offset for placed in truth.records if begin <= placed.offset < truth.written]
    # A segment whose removal was not durable yet may be back.
    oldest = truth.records[0].offset if truth.records else begin
    kept = [placed.offset for placed in records if placed.offset >= oldest]
    published = [offset for offset in kept if offset < truth.written]
    expect(
        published == appended[: len(published)], f"no prefix of what was appended: {published[-3:]}, {appended[-3:]}"
    )
    # Records behind what was published may be there, or not: nobody was told of them.
    expect(published in (kept, appended), f"{kept[-1:]} is there, {appended[-1:]} before it is not")
    bodies = {placed.offset: placed.message.body for placed in truth.records if placed.offset < truth.written}
    found_bodies = {placed.offset: placed.message.body for placed in records}
    changed = [offset for offset, body in bodies.items() if found_bodies.get(offset, body) != body]
    expect(not changed, f"other messages than before the crash lie at {changed[:3]}")
    must = truth.synced if power_loss else truth.written
    expect(
        end >= must or not appended, f"the log ends at {end}, but was {'synced' if power_loss else 'written'} to {must}"
    )
    _check_acknowledged(set(ids), begin, truth, must, senders, sync_flush=found.options.sync_flush)
    return records


def _check_acknowledged(
    ids: set[int], begin: int, truth: Truth, must: int, senders: Senders, *, sync_flush: bool
) -> None:
    for sent in senders.sent:
        if sent.fate is not Fate.STORED or sent.physical_offset < begin or sent.number in truth.gone:
            continue  # One that is gone was acknowledged before it was synced, and an earlier power loss took it.
        if sent.physical_offset < must or (sync_flush and sent.waited):
            expect(sent.number in ids, f"message {sent.number}, acknowledged at {sent.physical_offset}, is lost")


def check_places(records: list[Placed], senders: Senders) -> None:
    """Each message is where its sender was told."""
    for placed, number in zip(records, numbers(records, senders), strict=True):
        sent, message = senders.sent[number], placed.message
        expect((message.topic, message.tag or "") == (sent.topic, sent.tag), f"message {number} is {message}")
        if sent.fate is Fate.STORED:
            told = (sent.physical_offset, sent.queue_id, sent.queue_offset)
            lies = (placed.offset, message.queue_id, message.queue_offset)
            expect(told == lies, f"message {number}: its sender was told {told}, it lies at {lies}")


def check_queues(found: Recovered, records: list[Placed], minimum: int) -> None:
    """Queues hold exactly the log's records, without a gap; those below `minimum` may be gone from their queues."""
    expect(not load(StoreIO(), found.paths).holes, "a crash is no damage, but damage was noted")
    expect(found.words[words_of.DISPATCHED] == found.words[words_of.WRITTEN], "recovery left something undispatched")
    wanted: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}
    for placed in records:
        message = placed.message
        code = java_hash(message.tag) if message.tag else 0
        queue = wanted.setdefault((message.topic, message.queue_id), {})
        expect(message.queue_offset not in queue, f"{message.topic} {message.queue_id}: two at {message.queue_offset}")
        queue[message.queue_offset] = (placed.offset, placed.size, code)
    table = QueueTable(StoreIO(), found.paths.queues)
    files = ConsumeQueueFiles(StoreIO(), found.paths.consume_queue, found.options.consume_queue_file_bytes)
    try:
        for number, topic, queue_id in table.live():
            first, stop = table.min_offset(number), table.max_offset(number)
            units = as_units(files.read_units(topic, queue_id, first, stop - first)).tolist() if stop > first else []
            there = {first + at: tuple(unit) for at, unit in enumerate(units)}
            of_log = wanted.pop((topic, queue_id), {})
            going = {place: unit for place, unit in of_log.items() if unit[0] < minimum and place not in there}
            of_log = {place: unit for place, unit in of_log.items() if place not in going}
            expect(there == of_log, f"queue {topic} {queue_id}: {_difference(there, of_log)}")
            expect(
                table.next_offset(number) == stop,
                f"queue {topic} {queue_id}: next {table.next_offset(number)}, end {stop}",
            )
    finally:
        files.close()
        table.close()
    missing = [queue for queue, units in wanted.items() if any(unit[0] >= minimum for unit in units.values())]
    expect(not missing, f"queues are missing: {missing}")


def _difference(there: dict[int, tuple[int, ...]], wanted: dict[int, tuple[int, int, int]]) -> str:
    wrong = sorted(set(there.items()) ^ set(wanted.items()))
    return f"holds {len(there)}, the log has {len(wanted)}; first difference {wrong[:1]}"


def check_index(found: Recovered, records: list[Placed], senders: Senders) -> None:
    """Some of the keys, the newest among them, lead to their records."""
    options = found.options
    reader = IndexReader(StoreIO(), found.paths.index, options.max_hash_slot_num, options.max_index_num, 64)
    try:
        reader.refresh(1)
        step = max(1, len(records) // KEYS_LOOKED_UP)
        for placed in records[::-step]:
            sent = senders.of_body(placed.message.body)
            assert sent is not None
            offsets = list(reader.query_offset(sent.topic, sent.key, 64, 0, FOREVER_MS).offsets)
            expect(offsets.count(placed.offset) == 1, f"key {sent.key} leads to {offsets}, not to {placed.offset} once")
    finally:
        reader.close()


def check_again(found: Recovered, options: Options) -> None:
    """Recovery a second time has nothing to do, and nothing lies about."""
    before = contents(found.paths.root)
    again = recover(found.paths.root, options)
    expect(again.words[words_of.WRITTEN] == found.words[words_of.WRITTEN], "a second recovery ends elsewhere")
    after = contents(found.paths.root)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    expect(not changed, f"a second recovery changed {changed[:5]}: {again.said}")
    # The next segment is made under its name, whatever lies there.
    strays = [path.name for path in found.paths.root.rglob("*.tmp") if path != found.paths.next_segment]
    expect(not strays, f"files left lying about: {strays}")


def check_all(found: Recovered, truth: Truth, senders: Senders, options: Options, *, power_loss: bool) -> list[Placed]:
    """Everything at once; the records that are there."""
    records = check_log(found, truth, senders, power_loss=power_loss)
    check_places(records, senders)
    check_queues(found, records, truth.minimum)
    check_index(found, [placed for placed in records if placed.offset >= truth.minimum], senders)
    return records


def unacknowledged(sent: Sent) -> bool:
    """Whether its sender was not told that it is stored."""
    return sent.fate is not Fate.STORED
