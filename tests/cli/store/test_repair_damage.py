"""Damage to each kind of file of an mqproc store: verify names it, repair corrects it.

Each row of CASES is one damage. Its first finding is compared in full; others may follow.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mqproc import StoreReader
from mqproc.layout import checkpoint, durable_marks, index_file, queue_table, record
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store import rocketmq_json
from mqproc.store.topics import Topics
from tests.support.command_line import call
from tests.support.store_builders import SEGMENT, SLOTS, StoppedStore
from tests.support.store_checks import damage_in, flags_of, flip, is_intact, overwrite, repair

LOG = "commitlog/{:020d}"
LOGS = [LOG.format(start) for start in range(0, 4 * SEGMENT, SEGMENT)]
QUEUE = "consumequeue/First/0/{:020d}"
QUEUES = [QUEUE.format(0), QUEUE.format(800)]
UNKNOWN_QUEUE = "consumequeue/Ghost/0/00000000000000000000"
INDEX = ["index/20231114221320000", "index/20231114221320384"]
TABLE = "mqproc/queues"
TOPICS, OFFSETS = "config/topics.json", "config/consumerOffset.json"
# A record in the first segment with its size; the last record, and its end.
EARLY, RECORD_BYTES = 324 * 10, 324
LAST, END = 209003, 209329
FIRST_ITEM = index_file.item_offset(SLOTS, index_file.FIRST_ITEM)


class Harm(NamedTuple):
    """A change to a store, and the file changed."""

    file: str
    do: Callable[[Path], None]


def flipped(file: str, offset: int, bits: int = 0x10) -> Harm:
    return Harm(file, lambda store: flip(store / file, offset, bits))


def written(file: str, offset: int, data: bytes) -> Harm:
    return Harm(file, lambda store: overwrite(store / file, offset, data))


def put(file: str, content: str | bytes) -> Harm:
    def replace(store: Path) -> None:
        (store / file).parent.mkdir(parents=True, exist_ok=True)
        (store / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return Harm(file, replace)


def lost(*files: str) -> Harm:
    def lose(store: Path) -> None:
        for path in (store / file for file in files):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return Harm(files[0], lose)


def sized(file: str, size: int) -> Harm:
    def resize(store: Path) -> None:
        (store / file).touch()
        os.truncate(store / file, size)

    return Harm(file, resize)


def appended(file: str, data: bytes) -> Harm:
    def append(store: Path) -> None:
        with (store / file).open("ab") as opened:
            opened.write(data)

    return Harm(file, append)


def swapped(first: str, second: str) -> Harm:
    """Exchange the names of two files."""

    def swap(store: Path) -> None:
        (store / first).rename(store / "kept")
        (store / second).rename(store / first)
        (store / "kept").rename(store / second)

    return Harm(second, swap)


def folder(file: str) -> Harm:
    """A non-empty folder in place of a file."""

    def make(store: Path) -> None:
        (store / file).unlink(missing_ok=True)
        put(f"{file}/inside", "x").do(store)

    return Harm(file, make)


def all_of(*harms: Harm) -> Harm:
    def do(store: Path) -> None:
        for harm in harms:
            harm.do(store)

    return Harm(harms[-1].file, do)


class Case(NamedTuple):
    """A damage, and the finding: kind, byte of the file, place in the log; None is not compared.

    `named_file` is the file named, if it is another one.
    """

    name: str
    harm: Harm
    kind: str
    offset: int | None = None
    physical_offset: int | None = None
    named_file: str = ""


# A unit of a record of 256 bytes elsewhere in the log, and of the next record.
DANGLING = bytes(6) + b"\1\2" + b"\0\0\1\0" + bytes(8)
BEHIND = bytes(4) + b"\1\0\0\0" + b"\0\0\1\0" + bytes(8)
# Entry of a queue in the queue table.
MIN_WORD = queue_table.entry_word(2, queue_table.MIN_OFFSET) * queue_table.WORD_SIZE
MAX_WORD = queue_table.entry_word(2, queue_table.MAX_OFFSET) * queue_table.WORD_SIZE
NAME = queue_table.entry_offset(2) + queue_table.TOPIC_OFFSET_BYTES

CASES = [
    # CommitLog
    Case("log: body", flipped(LOGS[0], EARLY + 100), "record_body_crc", EARLY, EARLY),
    Case("log: magic", flipped(LOGS[0], EARLY + record.MAGIC), "record_magic", EARLY, EARLY),
    Case("log: size", flipped(LOGS[0], EARLY, 0x40), "record_size", EARLY, EARLY),
    Case("log: own offset", flipped(LOGS[0], EARLY + record.PHYSICAL_OFFSET), "record_offset", EARLY, EARLY),
    Case("log: topic", flipped(LOGS[0], EARLY + 290, 0x01), "record_crc", EARLY, EARLY),
    Case("log: zeros", written(LOGS[0], EARLY, bytes(RECORD_BYTES)), "record_zeros", EARLY, EARLY),
    Case("log: first segment unwritten", all_of(sized(LOGS[0], 0), sized(LOGS[0], SEGMENT)), "record_zeros", 0, 0),
    Case("log: last record", flipped(LOGS[3], LAST - 3 * SEGMENT + 100), "torn_tail", 12395, LAST),
    Case("log: behind its end", written(LOGS[3], 40_000, b"garbage"), "torn_tail", 12721, END),
    Case("log: BLANK", flipped(LOGS[0], 65480 + 3), "blank_size", 65480, 65480),
    Case("log: segment lost", lost(LOGS[1]), "segment_missing", 0, SEGMENT),
    Case("log: last segment lost", lost(LOGS[3]), "segment_missing", 0, 3 * SEGMENT),
    Case("log: all segments lost", lost(*LOGS), "segment_missing", 0, 0),
    Case("log: empty segment", sized(LOGS[1], 0), "segment_empty", 0, SEGMENT),
    Case("log: empty next segment", sized(LOG.format(4 * SEGMENT), 0), "segment_empty", 0, 4 * SEGMENT),
    Case("log: short segment", sized(LOGS[1], 30_000), "segment_short", 30_000, SEGMENT + 30_000),
    Case("log: short last segment", sized(LOGS[3], 12_721), "segment_short", 12_721, END),
    Case("log: long segment", appended(LOGS[1], bytes(100)), "segment_long", SEGMENT, 2 * SEGMENT),
    Case("log: long segment, garbage", appended(LOGS[3], b"more"), "segment_long", SEGMENT, 4 * SEGMENT),
    Case("log: stray file", put("commitlog/notes", "mine"), "stray_file"),
    Case("log: stray place", put(LOG.format(70_000), bytes(SEGMENT)), "misplaced_file"),
    Case("log: folder for a segment", folder(LOGS[1]), "misplaced_file"),
    # ConsumeQueue
    Case("queue: offset of a unit", flipped(QUEUES[0], 10 * UNIT_SIZE + 7), "unit_wrong", 200),
    Case("queue: size of a unit", flipped(QUEUES[0], 10 * UNIT_SIZE + 11), "unit_wrong", 200),
    Case("queue: tags code of a unit", flipped(QUEUES[0], 10 * UNIT_SIZE + 19), "unit_wrong", 200),
    Case("queue: zeros within", written(QUEUES[0], 200, bytes(60)), "unit_missing", 200),
    Case("queue: zeros at its end", written(QUEUES[1], 300, bytes(20)), "unit_missing", 300),
    Case("queue: a unit behind its end", written(QUEUES[1], 320, DANGLING), "unit_dangling", 320),
    Case("queue: a unit behind the log", written(QUEUES[1], 320, BEHIND), "unit_beyond_log", 320),
    Case("queue: first file lost", lost(QUEUES[0]), "unit_missing", 0),
    Case("queue: last file lost", lost(QUEUES[1]), "unit_missing", 0),
    Case("queue: all files lost", lost(*QUEUES), "unit_missing", 0),
    Case("queue: folder lost", lost("consumequeue/First"), "unit_missing", 0, named_file=QUEUES[0]),
    Case("queue: no queues", lost("consumequeue"), "unit_missing", 0, named_file=QUEUES[0]),
    Case("queue: empty file", sized(QUEUES[0], 0), "queue_file_length", 0),
    Case("queue: short file", sized(QUEUES[0], 333), "queue_file_length", 333),
    Case("queue: long file", appended(QUEUES[0], bytes(20)), "queue_file_length", 800),
    Case("queue: gap", sized(QUEUE.format(2400), 800), "queue_file_missing", 0, named_file=QUEUE.format(1600)),
    Case("queue: stray file", put("consumequeue/First/0/notes", "x"), "stray_file"),
    Case("queue: folder for a file", folder(QUEUES[1]), "misplaced_file"),
    Case("queue: unknown", put(UNKNOWN_QUEUE, 3 * DANGLING + bytes(740)), "unit_dangling", 0),
    # Index
    Case("index: header", flipped(INDEX[0], index_file.ITEM_COUNT + 2), "index_header", 36),
    Case("index: slot", flipped(INDEX[0], index_file.HEADER_SIZE + 4 * 3 + 3), "index_link", 52),
    Case("index: hash of an item", flipped(INDEX[0], FIRST_ITEM + 40), "entry_wrong"),
    Case("index: offset of an item", flipped(INDEX[0], FIRST_ITEM + 4 + 6), "index_order"),
    Case("index: files swapped", swapped(*INDEX), "index_order", FIRST_ITEM, 0),
    Case("index: first file lost", lost(INDEX[0]), "entry_missing", named_file=INDEX[1]),
    Case("index: last file lost", lost(INDEX[1]), "entry_missing", named_file=INDEX[0]),
    Case("index: lost", lost("index"), "index_missing"),
    Case("index: empty file", sized(INDEX[0], 0), "index_file_length", 0),
    Case("index: short file", sized(INDEX[1], 5000), "index_file_length", 5000),
    Case("index: long file", appended(INDEX[1], b"x"), "index_file_length", 8240),
    Case("index: folder for a file", folder(INDEX[1]), "misplaced_file"),
    # Checkpoint
    Case("checkpoint: time", flipped("checkpoint", checkpoint.PHYSIC_TIMESTAMP + 1), "checkpoint_ahead", 0),
    Case("checkpoint: place", flipped("checkpoint", checkpoint.CONFIRM_PHYSICAL_OFFSET + 4), "checkpoint_ahead", 32),
    Case("checkpoint: lost", lost("checkpoint"), "checkpoint_missing"),
    Case("checkpoint: empty", sized("checkpoint", 0), "checkpoint_length", 0),
    Case("checkpoint: short", sized("checkpoint", 20), "checkpoint_length", 20),
    Case("checkpoint: long", sized("checkpoint", 5000), "checkpoint_length", 5000),
    Case("checkpoint: folder", folder("checkpoint"), "misplaced_file"),
    # mqproc
    Case("mark: flipped", flipped("mqproc/marks/commitlog", durable_marks.SLOT_SPACING + 20), "mark_unreadable", 4096),
    Case("mark: garbage", written("mqproc/marks/index", 0, b"x" * 8192), "mark_unreadable", 0),
    Case("mark: short", sized("mqproc/marks/index", durable_marks.SLOT_SPACING + 20), "mark_unreadable", 4096),
    Case("table: begins too late", flipped(TABLE, MIN_WORD, 1), "queue_table"),
    Case("table: ends too late", flipped(TABLE, MAX_WORD + 1, 1), "queue_table"),
    Case("table: a name", flipped(TABLE, NAME), "queue_table"),
    Case("damage.json: garbage", put("mqproc/damage.json", "{"), "ledger_unreadable", 0),
    Case("damage.json: nested", put("mqproc/damage.json", '{"x":' + "[" * 100_000), "ledger_unreadable", 0),
    Case("settings: garbage", put("mqproc/settings.json", "{"), "config_unreadable", 0),
    Case("read-only", put("mqproc/read_only", "cq-flusher: Input/output error\n"), "read_only", 0),
    # RocketMQ's settings
    Case("topics: flipped", flipped(TOPICS, 0, 0x20), "config_unreadable", 0),
    Case("topics: empty", sized(TOPICS, 0), "config_unreadable", 0),
    Case("topics: no object", put(TOPICS, "[1, 2]"), "config_unreadable", 0),
    Case("topics: another shape", put(TOPICS, '{"topicConfigTable": [1, 2]}'), "config_unreadable", 0),
    Case("topics: another file", put(TOPICS, '{"offsetTable":{}}'), "config_unreadable", 0),
    Case("topics: and its copy", all_of(put(TOPICS, "{"), put(f"{TOPICS}.bak", "]")), "config_unreadable", 0),
    Case("topics: folder", folder(TOPICS), "misplaced_file"),
    Case("offsets: flipped", flipped(OFFSETS, 0, 0x20), "config_unreadable", 0),
    Case("offsets: short", sized(OFFSETS, 40), "config_unreadable", 0),
    Case("offsets: another file", put(OFFSETS, '{"topicConfigTable":{}}'), "config_unreadable", 0),
    Case("offsets: beyond", put(OFFSETS, '{"offsetTable":{"First@readers":{0:57,1:5}}}'), "progress_beyond_end"),
    Case("deletions: garbage", put("config/deletedTopics.json", '{"a":'), "config_unreadable", 0),
]
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def clean_store(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    """A clean store with topics and committed offsets."""
    store = StoppedStore(tmp_path_factory.mktemp("whole") / "store")
    store.close_in_order()
    io, paths = store.engine.io, store.engine.paths
    topics = Topics(io, paths)
    for topic in ("First", "Second", "Third"):
        topics.adopt(topic, 4)
    topics.save(1)
    progress = {"offsetTable": {"First@readers": {"0": 55, "1": 5}}}
    rocketmq_json.save(io, io, paths.consumer_offsets, progress, integer_keys=True)
    verified = call("store", "verify", store.root, "--json", *flags_of(store.engine.options))
    assert verified.json["findings"] == []
    return store


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_damage_is_named_and_repaired(clean_store: StoppedStore, tmp_path: Path, case: Case) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    case.harm.do(store)
    intact = {offset for offset in clean_store.offsets if is_intact(store, offset, SEGMENT)}
    verified = call("store", "verify", store, "--json", *flags)
    found = damage_in(verified.json)
    alike = [row for row in found if (row.kind, row.file) == (case.kind, case.named_file or case.harm.file)]
    assert verified.code == 1
    assert alike, found
    assert case.offset in (None, *(row.offset for row in alike)), found
    assert case.physical_offset in (None, *(row.physical_offset for row in alike)), found
    repair(store, flags)
    with StoreReader(store) as reader:
        assert {message.physical_offset for message in reader.messages()} == intact


def test_topics_are_rebuilt_from_copy_or_queues(clean_store: StoppedStore, tmp_path: Path) -> None:
    flags = flags_of(clean_store.engine.options)
    for name, copy in (("copy", "copied"), ("queues", "{")):
        store = tmp_path / name
        shutil.copytree(clean_store.root, store)
        text = (store / TOPICS).read_text()
        put(f"{TOPICS}.bak", text if copy == "copied" else copy).do(store)
        put(TOPICS, "{ not json").do(store)
        repair(store, flags)
        with StoreReader(store) as reader:
            assert {each.topic: each.queues for each in reader.topics()} == {"First": 4, "Second": 4, "Third": 4}


def test_topic_with_too_many_queues_is_a_note(clean_store: StoppedStore, tmp_path: Path) -> None:
    """Its queue number does not affect the settings of other topics."""
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    text = '{"topicConfigTable": {"A": {"readQueueNums": 65536}, "B": {"perm": 4}}}'
    put(TOPICS, text).do(store)
    found = call("store", "verify", store, *flags, "--json")
    (row,) = found.json["findings"]
    assert (found.code, row["kind"], row["severity"], row["file"]) == (0, "topic_too_wide", "note", TOPICS)
    assert row["text"] == "topic 'A': 65,536 queues; a topic has 65,535 at most"
    assert call("store", "repair", store, "--execute", *flags).code == 0
    assert (store / TOPICS).read_text() == text


def test_impossible_progress_is_a_note(clean_store: StoppedStore, tmp_path: Path) -> None:
    """A start ignores it, or keeps the highest offset until the queue exists."""
    store = tmp_path / "store"
    shutil.copytree(clean_store.root, store)
    entries = [
        ("First", "a", "0", -1),
        ("First", "c", str(10**22), 5),
        ("Gone", "a", "0", 10**22),
        ("Gone", "b", "0", 10**15),
        ("First", "g" * 300, "0", 5),
    ]
    table = ",".join(f'"{topic}@{group}":{{{queue}:{at}}}' for topic, group, queue, at in entries)
    put(OFFSETS, f'{{"offsetTable":{{{table}}}}}').do(store)
    found = call("store", "verify", store, *flags_of(clean_store.engine.options), "--json")
    assert found.code == 0
    said = [(row["kind"], row["severity"], row["file"], row["text"]) for row in found.json["findings"]]
    expected = [
        f"group c: First queue {10**22}: 5",
        "group a: First queue 0: -1",
        f"group a: Gone queue 0: {10**22:,}",
        f"group {'g' * 32}…: First queue 0: 5",
    ]
    assert sorted(said) == sorted(("progress_impossible", "note", OFFSETS, text) for text in expected)


def test_progress_beyond_end_is_reset_to_the_end(clean_store: StoppedStore, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(clean_store.root, store)
    put(OFFSETS, '{"offsetTable":{"First@a":{0:1000,1:5},"Gone@a":{0:7}}}').do(store)
    done = repair(store, flags_of(clean_store.engine.options))
    table = rocketmq_json.parse((store / OFFSETS).read_text())["offsetTable"]
    assert table == {"First@a": {"0": 56, "1": 5}, "Gone@a": {"0": 7}}
    kept = store / done.json["kept_in"] / "files" / OFFSETS
    assert "{0:1000,1:5}" in kept.read_text()
