"""One record, damaged, between two whole ones: whoever reads it tells of damage, or gives what was stored.

A record's own CRC covers all of it. Where damage has taken the tail that holds it, no reader can know that there was
one, as with RocketMQ's records of before 5.1: there the body is what was stored, and nothing vouches for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np

from mqproc import StoreReader
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.record_check import VERIFY_CRCS, checked_size
from mqproc.kernels.record_decode import ALL_COLUMNS
from mqproc.layout import record
from mqproc.layout.record_codec import (
    check_record,
    decode_record,
    decode_records,
    encode_record,
    host_bytes,
    lazy_records,
)
from mqproc.paths import StorePaths
from mqproc.store.verify.verifier import verify_store
from mqproc.types import StoredMessage
from tests.fuzz.mutations import damage
from tests.records import columns_of
from tests.store.recovery.recovering import recover

SEGMENT: Final = 1 << 14
STORE_EVERY: Final = 400
TOPIC: Final = "fuzzed"
PAIRS: Final = "KEYS\x01k1 k2\x02UNIQ_KEY\x01" + "0A" * 16 + "\x02TAGS\x01tag\x02"
HOST_V6: Final = host_bytes("2001:db8::1", 10911)
KINDS: Final[list[dict[str, Any]]] = [
    {"properties": PAIRS, "append_crc": True},
    {"properties": PAIRS},
    {"body": b"", "properties": PAIRS, "append_crc": True},
    {"body": b"", "append_crc": True},
    {"body": b"x"},
    {"topic": "t" * 130, "properties": PAIRS, "born_host": HOST_V6, "store_host": HOST_V6, "append_crc": True},
    {"properties": PAIRS, "store_host": HOST_V6, "sys_flag": 1 << 3, "prepared_transaction_offset": 77},
    {"body": bytes(range(256)) * 12, "properties": "ä\x01€\x02" + PAIRS, "reconsume_times": 3, "append_crc": True},
]
FIELDS: Final = [field.name for field in dataclasses.fields(StoredMessage)]


class Log(NamedTuple):
    """A segment's bytes up to its zeros; the record between [start, stop) is the one that is damaged."""

    data: bytes
    start: int
    stop: int


def make_log(number: int, kind: dict[str, Any]) -> Log:
    """Three records, one after the other; each log's damaged one lies elsewhere, so none passes for another's."""
    data = b""
    borders = [0]
    for queue_offset, fields in enumerate(({}, kind, {})):
        given: dict[str, Any] = {"topic": TOPIC, "body": b"body %d" % queue_offset * (9 + number), "append_crc": True}
        if fields:
            given = {"topic": TOPIC, "body": b"the damaged one's body"} | fields
        times = {"born_timestamp_ms": 1_700_000_000_000, "store_timestamp_ms": 1_700_000_000_000 + queue_offset}
        # Queues of their own, so that a queue's numbers do not depend on another record.
        place = {"queue_id": queue_offset, "queue_offset": 0, "physical_offset": len(data)}
        data += encode_record(**(given | times | place))
        borders.append(len(data))
    return Log(data, borders[1], borders[2])


LOGS: Final = [make_log(number, kind) for number, kind in enumerate(KINDS)]
PIECES: Final = [log.data[log.start : log.stop] for log in LOGS] + [b"\0" * 64, PAIRS.encode()]


class Records:
    """Damaged records, one after the other; each `STORE_EVERY`th lies in a store that is read, started and verified."""

    def __init__(self, folder: Path) -> None:
        self._store = folder / "store"
        self._options = Options(
            mapped_file_size_commit_log=SEGMENT,
            mapped_file_size_consume_queue=200,
            max_index_num=100,
            max_hash_slot_num=10,
            max_message_size=4096,
            max_queues=64,
        )

    def run(self, seed: int) -> None:
        """One damaged record. Raises what breaks a rule."""
        random = Random(seed)
        log = random.choice(LOGS)
        original = log.data[log.start : log.stop]
        found = damage(random, original, PIECES)
        # Its neighbours stay where they are.
        found = found[: len(original)] + original[len(found) :]
        data = log.data[: log.start] + found + log.data[log.stop :]
        self.look(log, data)
        if seed % STORE_EVERY == 0:
            self.look_in_a_store(log, data)

    def close(self) -> str:
        """Nothing is left to be checked."""
        return ""

    def look(self, log: Log, data: bytes) -> None:
        """The kernel and its twin in Python agree, and what they call whole is what was stored; all decoders agree."""
        found, original = data[log.start : log.stop], log.data[log.start : log.stop]
        view = np.frombuffer(data, np.uint8).copy()
        size = checked_size(view, log.start, len(view), log.start, VERIFY_CRCS)
        check = check_record(data, log.start)
        whole = (
            check.success
            and check_record(data, log.start, check_property_crc=True).success
            and _place_in(found) == log.start
        )
        if size <= 0:
            assert not whole, f"the kernel says {size}"
            assert found != original
            _decode_anything(found)
            return
        assert (check.success, check.size) == (True, size), check
        assert _place_in(found) == log.start
        _is_what_was_stored(data[log.start : log.start + size], original)
        _decoders_agree(data[log.start : log.start + size])

    def look_in_a_store(self, log: Log, data: bytes) -> None:
        """A start, a reader and `store verify` say the same of it, and its neighbours are there for all of them.

        Damage that nothing vouches against may name a neighbour's place in its queue; then only nobody is to fail.
        """
        shutil.rmtree(self._store, ignore_errors=True)
        folder = self._store / "commitlog"
        folder.mkdir(parents=True)
        (folder / f"{0:020d}").write_bytes(data.ljust(SEGMENT, b"\0"))
        view = np.frombuffer(data, np.uint8).copy()
        served = checked_size(view, log.start, len(view), log.start, VERIFY_CRCS) > 0
        found = recover(self._store, self._options, clean=False)
        units = {offset: queue for queue in found.queues() for offset, size, _ in found.units(*queue).values() if size}
        of_log = self._read(units)
        if not served or data == log.data:
            kept = {0, log.stop} | ({log.start} if served else set())
            assert set(units) >= kept, found.said
            assert {message.physical_offset for message in self._messages} == kept
            assert bool(of_log) != served, (of_log, found.said)

    def _read(self, units: dict[int, tuple[str, int]]) -> list[str]:
        """What is pulled from all queues is what the log has there; what `store verify` says of the log."""
        self._messages: list[StoredMessage] = []
        with StoreReader(self._store, self._options) as reader:
            for topic, queue_id in set(units.values()):
                with contextlib.suppress(CorruptStoreError):
                    self._messages += reader.pull(topic, queue_id, 0).messages
        data = (self._store / "commitlog" / f"{0:020d}").read_bytes()
        assert all(message == decode_record(data, message.physical_offset) for message in self._messages)
        verified = verify_store(StoreIO(), StorePaths(self._store), self._options, jobs=1, is_mine=True)
        return [finding.file for finding in verified.findings.listed if finding.file.startswith("commitlog/")]


def _place_in(found: bytes) -> int:
    """The physical offset that a record says of itself."""
    return int.from_bytes(found[record.PHYSICAL_OFFSET : record.PHYSICAL_OFFSET + 8], "big", signed=True)


def _is_what_was_stored(found: bytes, original: bytes) -> None:
    tail = found[-record.CRC_TAIL_SIZE :]
    if tail.startswith(record.CRC_NAME) and tail.endswith(b"\x02"):
        assert found == original, "another message than the one that was stored"
    else:
        assert decode_record(found).body == decode_record(original).body, "another body than the one that was stored"


def _decoders_agree(found: bytes) -> None:
    """Objects at once, objects that read when asked, and columns."""
    try:
        (eager,) = decode_records(found)
    except CorruptStoreError:
        _decode_anything(found)
        return
    (lazy,) = lazy_records(found)
    for name in FIELDS:
        assert getattr(lazy, name) == getattr(eager, name), name
    columns = columns_of(found, 1, ALL_COLUMNS)
    for name in ("queue_id", "queue_offset", "physical_offset", "flag", "reconsume_times", "store_timestamp_ms"):
        assert columns[name][0] == getattr(eager, name), name
    offsets, body = columns["body"]
    assert bytes(body[offsets[0] : offsets[1]]) == eager.body


def _decode_anything(found: bytes) -> None:
    """Bytes that nobody has checked: told as damage, or decoded to something, and nothing else is raised."""
    with contextlib.suppress(CorruptStoreError):
        decode_records(found)
    with contextlib.suppress(CorruptStoreError):
        for message in lazy_records(found):
            for name in FIELDS:
                with contextlib.suppress(CorruptStoreError):
                    getattr(message, name)
    with contextlib.suppress(CorruptStoreError):
        columns_of(found, -1, ALL_COLUMNS)
