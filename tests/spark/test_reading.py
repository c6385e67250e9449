"""Reads by topic, queue, offset, time, tag and key of a store with rolled files."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mqproc.errors import BadMessageError, BadRequestError, CorruptStoreError, StoreAccessError
from mqproc.spark import planning
from mqproc.spark.batches import read_partition
from mqproc.spark.options import ROCKETMQ_COLUMNS
from mqproc.spark.partitions import QueueSlice, partitioned
from mqproc.store.topics import TopicDeletion, save_deletions
from tests.spark.support import messages_of, offsets_of, options_of, partitions_of, rows_of
from tests.support.records import encode_record
from tests.support.store_builders import FIRST_MS, SEGMENT, LiveStore, StoppedStore


def log_bytes(store: Path, **given: Any) -> int:
    ranges = [each for partition in partitions_of(store, **given) for _store, each in partition.ranges]
    return sum(each.stop - each.start for each in ranges)


def test_topics_queues_and_patterns(rolled_store: Path) -> None:
    everything = messages_of(rolled_store)
    assert offsets_of(rolled_store) == [each.physical_offset for each in everything]
    for given, includes in (
        ({"subscribe": "First,Third"}, lambda m: m.topic in ("First", "Third")),
        ({"topic": "Second", "queueId": "1,3"}, lambda m: m.topic == "Second" and m.queue_id in (1, 3)),
        ({"subscribePattern": "F.*|T.*"}, lambda m: m.topic != "Second"),
        ({"assign": '{"First": [0], "Second": [2]}'}, lambda m: (m.topic, m.queue_id) in (("First", 0), ("Second", 2))),
        ({"subscribe": "Nobody"}, lambda m: False),
    ):
        assert offsets_of(rolled_store, splitBytes=20_000, **given) == [
            each.physical_offset for each in everything if includes(each)
        ]


def test_offsets_limit_bytes_read(rolled_store: Path) -> None:
    starting, ending = json.dumps({"First": {"0": 30}}), json.dumps({"First": {"0": 41}})
    given = {"assign": '{"First": [0]}', "startingOffsets": starting, "endingOffsets": ending}
    of_queue = messages_of(rolled_store, topic="First", queue_id=0)
    assert offsets_of(rolled_store, **given) == [each.physical_offset for each in of_queue[30:41]]
    given["byUnits"] = "false"
    assert offsets_of(rolled_store, **given) == [each.physical_offset for each in of_queue[30:41]]
    assert log_bytes(rolled_store, **given) == of_queue[41].physical_offset - of_queue[30].physical_offset


def test_blank_at_indexed_position_is_damage(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    first = store.offsets.index(SEGMENT)
    store.overwrite(SEGMENT, struct.pack(">II", SEGMENT, 0xCBD43194))
    given = {"subscribe": "First,Second,Third", "key": f"n{first},n{first - 1}"}
    with pytest.raises(CorruptStoreError, match=r"no intact record in bytes \[0, 8\): a BLANK; failOnDataLoss=false"):
        rows_of(store.root, **given)
    assert offsets_of(store.root, failOnDataLoss=False, **given) == [store.offsets[first - 1]]


def test_missing_offsets_are_rejected(rolled_store: Path) -> None:
    given = {"subscribe": "First", "startingOffsets": '{"First": {"0": 999}}'}
    with pytest.raises(CorruptStoreError, match=r"startingOffsets 999 of queue 0 of First: offsets there are \[0, "):
        rows_of(rolled_store, **given)
    others = [each.physical_offset for each in messages_of(rolled_store, topic="First") if each.queue_id != 0]
    assert offsets_of(rolled_store, failOnDataLoss=False, **given) == others
    for name in ("startingOffsets", "endingOffsets"):
        with pytest.raises(BadRequestError, match=f"{name}: there is no queue 0 of Nobody"):
            rows_of(rolled_store, **{name: '{"Nobody": {"0": 0}}'})


def test_time_range_limits_bytes_read(rolled_store: Path) -> None:
    begin, end = FIRST_MS + 100, FIRST_MS + 200
    given = {"startingTimestamp": begin, "endingTimestamp": end, "clockStepMs": 0}
    expected = [each for each in messages_of(rolled_store) if begin <= each.store_timestamp_ms < end]
    assert expected
    assert offsets_of(rolled_store, **given) == [each.physical_offset for each in expected]
    assert offsets_of(rolled_store, startingTimestamp=begin, endingTimestamp=end) == offsets_of(rolled_store, **given)
    assert log_bytes(rolled_store, **given) < log_bytes(rolled_store)
    assert offsets_of(rolled_store, startingTimestamp=FIRST_MS + 10**6) == []


def test_time_range_after_clock_set_back(tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    times = [FIRST_MS + 1000 * number - (30_000 if 200 <= number < 220 else 0) for number in range(400)]
    for number, time_ms in enumerate(times):
        store.append("Topic", [b"%d" % number * 300], time_ms)
    store.dispatch()
    store.close()
    for begin in (FIRST_MS + 100_000, FIRST_MS + 175_000, FIRST_MS + 199_000):
        found = rows_of(tmp_path / "store", ["body"], startingTimestamp=begin, endingTimestamp=begin + 25_000)
        assert len(found) == sum(begin <= time_ms < begin + 25_000 for time_ms in times)


def test_key_is_found_in_index_and_unindexed_log(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    for number in (0, 77, 639):
        found = rows_of(store.root, subscribe="First,Second,Third", key=f"n{number}")
        assert [row["keys"] for row in found] == [[f"n{number}"]]
        assert offsets_of(store.root, key=f"n{number}") == [row["physical_offset"] for row in found]
    assert log_bytes(store.root, topic="First", key="n0") < 10_000 < log_bytes(store.root, key="n0")
    last = store.index_files()[1]
    for length in (1_000, 7, 0):
        os.truncate(last, length)
        assert len(rows_of(store.root, subscribe="First,Second,Third", key="n600")) == 1
    last.unlink()
    for number in range(0, 640, 40):
        assert len(rows_of(store.root, subscribe="First,Second,Third", key=f"n{number}")) == 1
    shutil.rmtree(store.root / "index")
    assert len(rows_of(store.root, topic="First", key="n0")) == 1


def test_key_repeated_within_messages_returns_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_HITS_MAX", 16)
    store = LiveStore(tmp_path / "store")
    store.append("Topic", [b"%d" % number for number in range(30)], keys=["k k"] * 30, queues=1)
    store.dispatch()
    store.close()
    found = rows_of(tmp_path / "store", ["body", "physical_offset"], topic="Topic", key="k")
    assert [row["body"] for row in found] == [b"%d" % number for number in range(30)]


def test_tags_and_keys_with_equal_hashes_are_compared(tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    tags = ["Aa", "BB", "", "A", "Aab"]
    keys = ["k1 k2", "k", "", "k2", "k12"]
    store.append("Topic", [b"%d" % number for number in range(5)], tags=tags, keys=keys, queues=1)
    store.dispatch()
    store.close()

    def bodies(**given: str) -> list[bytes]:
        return [row["body"] for row in rows_of(tmp_path / "store", ["body", "physical_offset"], **given)]

    # Aa and BB have the same hash.
    assert bodies(tag="Aa") == [b"0"]
    assert bodies(subExpression="BB || A") == [b"1", b"3"]
    assert bodies(subExpression="*") == [b"0", b"1", b"2", b"3", b"4"]
    assert bodies(key="k2") == bodies(key="k2", topic="Topic") == [b"0", b"3"]
    assert bodies(key="k2,k", tag="Aa,BB") == [b"0", b"1"]
    rows = rows_of(tmp_path / "store", ["tag", "keys", "physical_offset"])
    assert [row["tag"] for row in rows] == ["Aa", "BB", None, "A", "Aab"]
    assert [row["keys"] for row in rows] == [["k1", "k2"], ["k"], [], ["k2"], ["k12"]]


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    store.append("Topic", [b"0", b"1"], tags=["tag-1", ""], keys=["key-1", "é"], queues=1)
    store.dispatch()
    store.close()
    segment = next((tmp_path / "store" / "commitlog").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b"tag-1", b"t\xff\xc3-1").replace(b"key-1", b"\xed\xa0\x80-1"))
    first, second = rows_of(tmp_path / "store", ["tag", "keys", "properties", "physical_offset"])
    assert (first["tag"], first["keys"]) == ("t\ufffd\ufffd-1", ["\ufffd\ufffd\ufffd-1"])
    assert dict(first["properties"])["TAGS"] == first["tag"]
    assert (second["tag"], second["keys"]) == (None, ["é"])


def test_deleted_topic_has_no_rows(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    store.engine.paths.config.mkdir(exist_ok=True)
    save_deletions(
        store.engine.io, store.engine.io, store.engine.paths, {"Second": TopicDeletion(store.end, (10**6,) * 4)}
    )
    assert offsets_of(store.root) == [
        each.physical_offset for each in messages_of(store.root) if each.topic != "Second"
    ]


def test_record_copies_in_bodies_are_ignored(tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    for number in range(60):
        # The body contains a record with the correct position and a valid CRC.
        overhead = 84 + 4
        at = store.engine.written + overhead
        inner = encode_record(topic="Inner", body=b"x" * 50, physical_offset=at, queue_offset=number)
        store.append("Outer", [inner + b"." * 200], queues=1)
    store.dispatch()
    store.close()
    for split in (100, 333, 1000):
        rows = rows_of(tmp_path / "store", ["topic", "body", "physical_offset"], splitBytes=split)
        assert [row["topic"] for row in rows] == ["Outer"] * 60


def test_chain_of_record_copies_in_body_raises(tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    store.append("Outer", [b"first"], queues=1)
    at = store.engine.written + 88
    inner = b""
    for number in range(20):
        inner += encode_record(topic="Inner", body=b"x" * 50, physical_offset=at + len(inner), queue_offset=number)
    store.append("Outer", [inner], queues=1)
    store.append("Outer", [b"last"], queues=1)
    store.dispatch()
    store.close()
    with pytest.raises(CorruptStoreError, match="copies of records"):
        rows_of(tmp_path / "store", splitBytes=500)
    assert len(rows_of(tmp_path / "store", splitBytes=65_536)) == 3


def test_too_many_partitions_are_rejected(rolled_store: Path) -> None:
    with pytest.raises(BadRequestError, match=r"splitBytes = 1 makes 2\d\d,\d\d\d partitions of"):
        partitions_of(rolled_store, splitBytes=1)
    assert len(partitions_of(rolled_store, splitBytes=1000)) > 200
    for given in ({"splitBytes": 100}, {"minPartitions": 2000}):
        ((name, value),) = given.items()
        text = rf"{name} = {value:,} makes \d,\d\d\d partitions of 2\d\d,\d\d\d bytes of log; the limit is 1,000, or"
        with pytest.raises(BadRequestError, match=text):
            partitions_of(rolled_store, **given)


def test_too_many_slices_are_rejected() -> None:
    slices = [(0, QueueSlice("t", queue_id, 0, 4000)) for queue_id in range(4)]
    assert len(partitioned(slices, 16, 1)) == 1000
    for limits in ((15, 1), (0, 2000)):
        with pytest.raises(BadRequestError, match=r"16,000 messages make \d,\d\d\d partitions; the limit is 1,000 of"):
            partitioned(slices, *limits)
    large = [(0, QueueSlice("t", 0, 0, 4_000_000))]
    assert len(partitioned(large, 2000, 1)) == 2000


def test_small_batches_have_the_same_rows(rolled_store: Path) -> None:
    everything = rows_of(rolled_store)
    assert rows_of(rolled_store, batchRows=7) == everything
    assert rows_of(rolled_store, batchBytes=1000) == everything
    assert rows_of(rolled_store, verifyCrc=False) == everything
    assert len(partitions_of(rolled_store)) == 1
    assert len(partitions_of(rolled_store, minPartitions=5)) >= 5
    assert rows_of(rolled_store, minPartitions=5) == everything


def test_several_stores_are_one_table(rolled_store: Path, tmp_path: Path) -> None:
    StoppedStore(tmp_path / "a" / "one")
    shutil.copytree(tmp_path / "a" / "one", tmp_path / "a" / "two")
    (tmp_path / "a" / "no store").mkdir()
    rows = rows_of(tmp_path / "a" / "*")
    assert {row["store"] for row in rows} == {str(tmp_path / "a" / name) for name in ("one", "two")}
    assert len(rows) == 2 * 640
    both = options_of(tmp_path / "a" / "one", paths=json.dumps([str(tmp_path / "a" / "two"), str(rolled_store)]))
    assert len(both.paths) == 3


def test_path_without_store_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match="no such folder"):
        rows_of(tmp_path / "missing")
    with pytest.raises(StoreAccessError, match="no matching folder"):
        rows_of(tmp_path / "*")
    with pytest.raises(BadRequestError, match="'topics' is unknown; options are assign, "):
        rows_of(tmp_path, topics="First")
    with pytest.raises(BadRequestError, match="nowhere://store: Protocol not known"):
        rows_of("nowhere://store")


def test_segment_deleted_between_plan_and_task(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    for loss, outcome in (("true", None), ("false", 640)):
        options = options_of(store.root, failOnDataLoss=loss, splitBytes=SEGMENT)
        parts = partitions_of(store.root, failOnDataLoss=loss, splitBytes=SEGMENT)
        store.segment(0).rename(tmp_path / "gone")
        if outcome is None:
            with pytest.raises(CorruptStoreError, match="deleted since the read was planned"):
                [list(read_partition(options, ["topic"], part)) for part in parts]
        else:
            count = sum(batch.num_rows for part in parts for batch in read_partition(options, ["topic"], part))
            assert 0 < count < outcome
        (tmp_path / "gone").rename(store.segment(0))


def test_a_store_on_remote_storage(rolled_store: Path) -> None:
    files = fsspec.filesystem("memory")
    for file in (rolled_store / "commitlog").iterdir():
        if file.name.isdigit():
            files.pipe_file(f"/bucket/one/commitlog/{file.name}", file.read_bytes())
    expected = offsets_of(rolled_store)
    assert offsets_of("memory://bucket/one") == expected
    assert offsets_of("memory://bucket/*", splitBytes=20_000) == expected
    given = {"startingTimestamp": FIRST_MS + 100, "endingTimestamp": FIRST_MS + 200, "clockStepMs": 0}
    assert offsets_of("memory://bucket/one", **given) == offsets_of(rolled_store, **given)
    with pytest.raises(StoreAccessError, match="no folder commitlog"):
        offsets_of("memory://bucket/nothing")
    assert offsets_of(f"file://{rolled_store}") == expected


def test_segment_deleted_on_remote_storage(rolled_store: Path) -> None:
    files = fsspec.filesystem("memory")
    for file in (rolled_store / "commitlog").iterdir():
        if file.name.isdigit():
            files.pipe_file(f"/going/commitlog/{file.name}", file.read_bytes())
    expected = offsets_of("memory://going")
    second = expected[-1] // 65536 * 65536
    planned = {fails: partitions_of("memory://going", failOnDataLoss=fails) for fails in (True, False)}
    files.rm(f"/going/commitlog/{second:020d}")

    def read(*, fails: bool) -> list[int]:
        options = options_of("memory://going", failOnDataLoss=fails)
        batches = [batch for of in planned[fails] for batch in read_partition(options, ["physical_offset"], of)]
        return [row["physical_offset"] for batch in batches for row in batch.to_pylist()]

    with pytest.raises(CorruptStoreError, match="deleted since the read was planned"):
        read(fails=True)
    assert read(fails=False) == [offset for offset in expected if offset < second]


def test_names_of_rocketmqs_connector(rolled_store: Path) -> None:
    rows = rows_of(rolled_store, naming="rocketmq", topic="First")
    assert list(rows[0]) == list(ROCKETMQ_COLUMNS)
    expected = {(m.queue_id, m.queue_offset): m for m in messages_of(rolled_store, topic="First")}
    assert len(rows) == len(expected)
    for row in rows:
        message = expected[row["queueId"], row["queueOffset"]]
        assert json.loads(row["properties"]) == dict(message.properties)
        assert (row["body"], row["brokerName"]) == (message.body, rolled_store.name)


def test_compressed_bodies(tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    packed = zlib.compress(b"plain" * 1000)
    store.append("Topic", [b"as it is"], queues=1)
    store.append("Topic", [packed, packed[:-9]], queues=1, sys_flag=0x301)
    store.dispatch()
    store.close()
    names = ["body", "sys_flag", "physical_offset"]

    def found(**given: Any) -> list[tuple[bytes, int]]:
        return [(row["body"], row["sys_flag"]) for row in rows_of(tmp_path / "store", names, **given)]

    whole = {"assign": '{"Topic": [0]}', "endingOffsets": '{"Topic": {"0": 2}}'}
    assert found(plainBodies=False, **whole) == [(b"as it is", 0), (packed, 0x301)]
    for by_units in (True, False):
        plain = found(byUnits=by_units, **whole)
        assert plain == [(b"as it is", 0), (b"plain" * 1000, 0)]
    rows = rows_of(tmp_path / "store", naming="rocketmq", **whole)
    assert [row["body"] for row in rows] == [body for body, _flags in plain]
    with pytest.raises(BadMessageError, match=r"log position \d+: a compressed body .* plainBodies=false"):
        found()


def test_damage_of_other_records_is_reported_on_request(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    message = messages_of(store.root, topic="First")[3]
    # The record's topic is changed to another topic.
    store.overwrite(message.physical_offset + 88 + len(message.body) + 1, b"X")
    assert message.physical_offset not in offsets_of(store.root, topic="First")
    with pytest.raises(CorruptStoreError, match="CRC"):
        offsets_of(store.root, topic="First", verifyCrc=True)
    # A topic that is not valid UTF-8 is damage in every mode.
    store.overwrite(message.physical_offset + 88 + len(message.body) + 1, b"\xff")
    with pytest.raises(CorruptStoreError, match="a topic that is not UTF-8"):
        offsets_of(store.root, topic="First")
    others = [each.physical_offset for each in messages_of(store.root) if each != message]
    assert offsets_of(store.root, failOnDataLoss=False) == others


def test_verify_crc_matches_store_verify(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    places = offsets_of(store.root)
    # Zero the end of a record's properties with their CRC, as a torn write does.
    store.overwrite(places[4] - 22, bytes(22))
    assert offsets_of(store.root) == places
    with pytest.raises(CorruptStoreError, match="bad property CRC"):
        offsets_of(store.root, verifyCrc=True)
    assert offsets_of(store.root, verifyCrc=True, failOnDataLoss=False) == places[:3] + places[4:]
