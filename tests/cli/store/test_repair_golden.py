"""Damaged RocketMQ stores: verify reports damage, repair corrects it, intact records stay.

Each row of TABLE is one store. Its findings are compared with `store verify`; then the store is repaired: the plan
changes nothing, is executed exactly, and can be undone; verify is clean; every intact record is found in its queue, by
its key and at its offset; and a second repair has nothing to do.
"""

from __future__ import annotations

import datetime
import os
import shutil
import struct
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.layout import index_file
from mqproc.paths import StorePaths
from mqproc.store.recovery.rebuild import NO_SCANNERS, Scanners
from mqproc.store.recovery.recovery import adopt_sizes
from mqproc.store.recovery.repair import Repair
from mqproc.store.schedule import levels as delay_offsets
from mqproc.store.verify import verify_store
from mqproc.topic_names import SCHEDULE_TOPIC
from tests.golden.fixtures import GOLDEN, Directory, directories, load_fixture, options_of
from tests.interop.golden_store import Intact
from tests.support.command_line import call
from tests.support.fakes import NoRoomForQueues
from tests.support.store_checks import Row, damage_in, digests, effects, flags_of, overwrite, repair

ALL = {str(each): each for each in directories(GOLDEN)}

LOG = "commitlog/{:020d}"
LAST = LOG.format(262144)
QUEUE = "consumequeue/{}/{}/00000000000000000000"

TAIL = [
    Row("log_ends_early", LAST, 27772, 289916),
    Row("unit_beyond_log", QUEUE.format("TopicTest", 1), 1100, 289916),
    Row("entry_beyond_log", "index/20261121071939032", 12220, 289916),
    Row("checkpoint_ahead", "checkpoint", 8, None),
]
TORN = [Row("torn_tail", LAST, 27772, 289916), *TAIL]
FIRST_UNITS = [("%RETRY%group_one", 0, 12565), ("OrderTopic", 2, 2667), ("TopicTest", 2, 0)]
NO_QUEUES = [Row("unit_missing", QUEUE.format(topic, queue), 0, at) for topic, queue, at in FIRST_UNITS]
BEYOND = [Row("unit_beyond_log", QUEUE.format(topic, queue), 0, at) for topic, queue, at in FIRST_UNITS]
FIVE_LOST = [
    Row("log_ends_early", LAST, 26673, 288817),
    Row("unit_beyond_log", QUEUE.format("OrderTopic", 1), 1000, 288817),
    Row("checkpoint_ahead", "checkpoint", 8, None),
]
LAST_GONE = [
    Row("segment_missing", LAST, 0, 262144),
    Row("log_ends_early", LAST, 0, 262144),
    Row("unit_beyond_log", QUEUE.format("TopicTest", 1), 940, 262144),
    Row("checkpoint_ahead", "checkpoint", 8, None),
]
FIVE_ZEROED = Row("unit_missing", QUEUE.format("OrderTopic", 0), 1120, 268791)

# Findings that must be reported, and the kinds that all findings must belong to.
TABLE: dict[str, list[Row]] = {
    "d01_zero_tail/before": TORN,
    "d02_garbage_tail/before": TORN,
    "d03_bad_magic/before": TORN,
    "d04_wrong_size/before": TORN,
    "d05_garbage_after_end/before": [Row("torn_tail", LAST, 28152, 290296)],
    "d06_negative_size/before": TORN,
    "d07_body_flip_first_file_abort/before": [Row("record_body_crc", LOG.format(0), 1563, 1563)],
    "d07_body_flip_first_file_clean/clean": [Row("record_body_crc", LOG.format(0), 1563, 1563)],
    "d07_body_flip_last_file_abort/before": [Row("record_body_crc", LAST, 2479, 264623)],
    "d07_body_flip_last_file_clean/clean": [Row("record_body_crc", LAST, 2479, 264623)],
    "d07_body_flip_middle_file_abort/before": [Row("record_body_crc", LOG.format(131072), 2264, 133336)],
    "d07_body_flip_middle_file_clean/clean": [Row("record_body_crc", LOG.format(131072), 2264, 133336)],
    "d07_body_flip_second_last_file_abort/before": [Row("record_body_crc", LOG.format(196608), 2772, 199380)],
    "d07_body_flip_second_last_file_clean/clean": [Row("record_body_crc", LOG.format(196608), 2772, 199380)],
    "d08_no_consumequeue_abort/before": NO_QUEUES,
    "d08_no_consumequeue_clean/clean": NO_QUEUES,
    "d09_no_consumequeue_no_index_abort/before": [*NO_QUEUES, Row("index_missing", "index", None, 0)],
    "d09_no_consumequeue_no_index_clean/clean": [*NO_QUEUES, Row("index_missing", "index", None, 0)],
    "d10_no_index_abort/before": [Row("index_missing", "index", None, 0)],
    "d10_no_index_clean/clean": [Row("index_missing", "index", None, 0)],
    "d11_no_checkpoint_abort/before": [Row("checkpoint_missing", "checkpoint", None, None)],
    "d11_no_checkpoint_clean/clean": [Row("checkpoint_missing", "checkpoint", None, None)],
    "d12_last_file_gone_abort/before": LAST_GONE,
    "d12_last_file_gone_clean/clean": [*LAST_GONE, Row("checkpoint_ahead", "checkpoint", 32, 289916)],
    # Missing first segments are normal after retention, so this is a note only.
    "d13_first_file_gone_abort/before": [],
    "d13_first_file_gone_clean/clean": [],
    "d14_middle_file_gone_abort/before": [Row("segment_missing", LOG.format(131072), 0, 131072)],
    "d14_middle_file_gone_clean/clean": [Row("segment_missing", LOG.format(131072), 0, 131072)],
    "d15_five_records_zeroed_abort/before": FIVE_LOST,
    "d15_five_records_zeroed_clean/clean": [*FIVE_LOST, Row("checkpoint_ahead", "checkpoint", 32, 289916)],
    "d16_short_last_file/before": [Row("segment_short", LAST, 28152, 290296)],
    "d17_empty_next_file/clean": [Row("segment_empty", LOG.format(327680), 0, 327680)],
    "d18_stray_file/clean": [Row("stray_file", "commitlog/notes.txt", None, None)],
    "d19_commitlog_gone/clean": [
        Row("segment_missing", LOG.format(0), 0, 0),
        Row("log_ends_early", LOG.format(0), 0, 0),
        *BEYOND,
        Row("checkpoint_ahead", "checkpoint", 32, 289916),
    ],
    "d20_cq_tail_garbage/before": [Row("unit_wrong", QUEUE.format("OrderTopic", 0), 1180, 285436)],
    "d21_cq_tail_zero/before": [FIVE_ZEROED],
    "d22_cq_tail_zero_clean/clean": [FIVE_ZEROED],
}


def test_table_has_every_damaged_store() -> None:
    assert TABLE.keys() == {name for name, each in ALL.items() if each.damaged}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_damage_is_named_and_repaired(tmp_path: Path, name: str) -> None:
    directory = ALL[name]
    store, flags = directory.unpack(tmp_path), flags_of(options_of(directory.expected))
    intact = Intact(directory, store)
    verified = call("store", "verify", store, "--json", *flags)
    damage = damage_in(verified.json)
    assert [row for row in TABLE[name] if row not in damage] == []
    assert {row.kind for row in damage} <= {row.kind for row in TABLE[name]} | {"entry_beyond_log"}
    assert verified.code == (1 if TABLE[name] else 0)
    if TABLE[name]:
        repair(store, flags)
        assert not (store / "abort").exists()
        assert_everything_intact_is_readable(store, directory, intact)
    else:
        nothing = call("store", "repair", store, "--execute", *flags)
        assert (nothing.code, nothing.out.endswith("nothing to repair\n")) == (0, True)


def assert_everything_intact_is_readable(store: Path, directory: Directory, intact: Intact) -> None:
    """By queue, with its queue offset; by key; by offset."""
    with StoreReader(store) as reader:
        in_queues = {message.physical_offset: message for message in reader.messages()}
        for listed in intact.records:
            message = reader.look(listed["phyOffset"])
            assert message is not None
            assert (message.topic, message.queue_offset) == (listed["topic"], listed["queueOffset"])
            assert in_queues[listed["phyOffset"]].queue_offset == listed["queueOffset"]
        for listed in intact.records[::9]:
            for key in in_queues[listed["phyOffset"]].keys[:1]:
                found = [each.physical_offset for each in reader.by_key(listed["topic"], key, max_messages=1000)]
                assert listed["phyOffset"] in found
    assert len(in_queues) == len(intact.records)


def test_intact_of_undamaged_store_is_complete(tmp_path: Path) -> None:
    """`Intact` of a store without damage in its log lacks nothing."""
    directory = ALL["d18_stray_file/clean"]
    assert Intact(directory, directory.unpack(tmp_path)).lost == {}


@pytest.mark.parametrize("command", ["repair", "recover"])
def test_scan_by_processes_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Queues and index of a scan by two processes equal those of one process."""
    directory = ALL["d09_no_consumequeue_no_index_clean/clean"]
    flags = flags_of(options_of(directory.expected))
    made = {}
    for name, scanners in (("alone", NO_SCANNERS), ("two", Scanners(2, range_bytes_min=1, piece_bytes=8192))):
        monkeypatch.setattr("mqproc.store.recovery.repair.usable_scanners", lambda found=scanners: found)
        (tmp_path / name).mkdir()
        store = directory.unpack(tmp_path / name)
        planned = call("store", command, store, "--json", *flags).json
        done = call("store", command, store, "--execute", "--json", *flags)
        assert done.code == 0
        assert effects(planned["changes"]) == effects(done.json["changes"])
        made[name] = {
            file: digest for file, digest in digests(store).items() if file.startswith(("consumequeue/", "commitlog/"))
        }
        assert call("store", "verify", store, *flags).code == 0
    assert made["alone"] == made["two"]
    assert any(file.startswith("consumequeue/") for file in made["two"])


def test_queue_minimum_follows_repaired_units(tmp_path: Path) -> None:
    """Units of another store led below the log's begin, so the first ones seemed expired."""
    store = load_fixture("g1_retention", tmp_path).store
    os.truncate(store / "commitlog" / f"{393_216:020d}", 0)
    units = store / "consumequeue" / "log-stream_1" / "1" / f"{0:020d}"
    whole = units.read_bytes()
    foreign = b"".join(struct.pack(">qiq", 1000 + number, 1, 0) for number in range(46))
    units.write_bytes(foreign.ljust(len(whole), b"\0"))
    assert call("store", "repair", store, "--execute", "--json").json["clean"]
    assert units.read_bytes()[27 * 20 : 34 * 20] == whole[27 * 20 : 34 * 20]
    assert "nothing to repair\n" in call("store", "repair", store).out


@pytest.mark.parametrize(("item", "physical_offset"), [(424, 1), (424, 300_000), (424, 1 << 40), (799, 0)])
def test_damaged_index_file_of_expired_records_is_removed(tmp_path: Path, item: int, physical_offset: int) -> None:
    """It cannot be rebuilt: the damage remained after every repair."""
    fixture = load_fixture("g2_retention_commitlog_only", tmp_path)
    name = "index/20261121071852565"
    place = index_file.item_offset(options_of(fixture.expected).max_hash_slot_num, item)
    overwrite(fixture.store / name, place + index_file.ITEM_PHYSICAL_OFFSET, physical_offset.to_bytes(8, "big"))
    done = repair(fixture.store, [])
    assert [(row["file"], row["what"]) for row in done.json["actions"]] == [(name, "move aside")]
    assert not (fixture.store / name).exists()


def test_delay_levels_are_reset_to_the_log_end(tmp_path: Path) -> None:
    """Only a second repair did it, as the first one used the old ends of the queues."""
    store = load_fixture("i_broker", tmp_path).store
    last = 37_124
    overwrite(store / "commitlog" / f"{0:020d}", last, bytes(16_384))
    done = repair(store, ["--set", "max_queues=4096"])
    assert "recovery: delay level 4: set back to its queue's end 3" in done.json["recovery"]


def test_delay_levels_stay_while_queues_wait_for_space(tmp_path: Path) -> None:
    """Delivered messages were delivered again once there was room."""
    io, paths = StoreIO(), StorePaths(load_fixture("i_broker", tmp_path).store)
    levels = delay_offsets.read_levels(io, paths)
    shutil.rmtree(paths.consume_queue / SCHEDULE_TOPIC)
    options = adopt_sizes(io, paths, Options(max_queues=4096), lambda line: None)
    job = Repair(paths, options, verify_store(io, paths, options), datetime.datetime.now())
    said: list[str] = []
    job.execute(NoRoomForQueues(), job.plan(), said.append)
    assert any(line.startswith("recovery: dispatch waits at ") for line in said)
    assert delay_offsets.read_levels(io, paths) == levels


def test_delay_offset_copy_mismatch_does_not_block_repair(tmp_path: Path) -> None:
    store = load_fixture("i_broker", tmp_path).store
    for name in ("delayOffset.json", "delayOffset.json.bak"):
        (store / "config" / name).write_text('{"topicConfigTable":{}}')
    done = repair(store, ["--set", "max_queues=4096"])
    assert [(row["file"], row["what"]) for row in done.json["actions"]] == [("config/delayOffset.json", "move aside")]
    assert any("delivered messages are found in the log" in line for line in done.json["recovery"])


def test_last_record_of_impossible_queue_is_damage(tmp_path: Path) -> None:
    """The damage seemed to extend beyond the log's end, so repair's note did not cover it."""
    store, file, last = load_fixture("f_batch", tmp_path).store, LOG.format(131_072), 57_211
    topic_at = (store / file).read_bytes().index(b"OrderTopic", last)
    overwrite(store / file, topic_at, bytes(10))
    found = call("store", "verify", store, "--json").json["findings"]
    assert [(each["kind"], each["offset"], each["size"]) for each in found][:1] == [("record_queue", last, 436)]
    repair(store, ["--set", "max_queues=4096"])
