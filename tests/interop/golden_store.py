"""Golden stores opened by mqproc, and RocketMQ's questions to them.

`ask` takes a question of a fixture's `answers` and returns a result of the same form. `records`, `blanks`, `queues` and
`units` return a whole store's contents in the form of the fixture's lists of these names.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels import record_check, scan
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.properties import java_hash
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import finish
from mqproc.store.read.pull import Pulled
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.records import Conditions
from mqproc.store.read.views import QueueBounds, WordsView, each_queue
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.types import StoredMessage
from tests.golden.fixtures import Directory, options_of
from tests.support.records import decode_record

Answer = dict[str, Any]
Queue = tuple[str, int]
Unit = list[int]

# RocketMQ's limit of a pull without a size.
PULL_BYTES = 128 << 20


def ask(reading: StoreQueries, question: Answer) -> Answer:
    """mqproc's result for a question."""
    return _ASK[question["op"]](reading, question)


def _get_message(reading: StoreQueries, question: Answer) -> Answer:
    pulled = reading.get_message(
        question["topic"],
        question["queueId"],
        question["offset"],
        question["maxMsgNums"],
        question.get("maxTotalMsgSize", PULL_BYTES),
        question.get("filter", "*"),
    )
    return pull_answer(pulled, decode_records(pulled.records.data))


def pull_answer(pulled: Pulled, messages: list[StoredMessage]) -> Answer:
    """A pull's result in the form of RocketMQ's `getMessage`."""
    return {
        "status": pulled.status.value,
        "nextBeginOffset": pulled.next_offset,
        "minOffset": pulled.min_offset,
        "maxOffset": pulled.max_offset,
        "bufferTotalSize": len(pulled.records),
        "queueOffsets": [message.queue_offset for message in messages],
        "phyOffsets": [message.physical_offset for message in messages],
    }


def _query_message(reading: StoreQueries, question: Answer) -> Answer:
    asked = reading.query_message(
        question["topic"], question["key"], question["maxNum"], question["begin"], question["end"]
    )
    found = finish(asked)
    return {
        "phyOffsets": found.offsets,
        "indexLastUpdateTimestamp": found.last_update_timestamp_ms,
        "indexLastUpdatePhyoffset": found.last_update_physical_offset,
    }


def _offset_by_time(reading: StoreQueries, question: Answer) -> Answer:
    upper = question.get("boundary") == "UPPER"
    queue = question["topic"], question["queueId"]
    return {"offset": finish(reading.offset_in_queue_by_time(*queue, question["timestamp"], upper=upper))}


def _min_max(reading: StoreQueries, question: Answer) -> Answer:
    bounds = reading.rocketmq_queues.bounds(question["topic"], question["queueId"])
    return {"minOffset": bounds.min_offset, "maxOffset": bounds.max_offset}


def _store_time(reading: StoreQueries, question: Answer) -> Answer:
    return {"timestamp": reading.store_time_ms(question["topic"], question["queueId"], question["offset"])}


def _look(reading: StoreQueries, question: Answer) -> Answer:
    try:
        record = reading.record_at(question["phyOffset"])
    except CorruptStoreError:
        return {"found": False, "corrupt": True}
    if record is None:
        return {"found": False}
    message = decode_record(record.data)
    return {
        "found": True,
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
    }


_ASK = {
    "getMessage": _get_message,
    "queryMessage": _query_message,
    "offsetByTime": _offset_by_time,
    "minMax": _min_max,
    "storeTime": _store_time,
    "look": _look,
}


def records(reading: StoreQueries, units: dict[Queue, dict[int, Unit]]) -> Iterator[Answer]:
    """Every record of the log, decoded, with the tags codes of its queue units."""
    tags_codes = {
        place: tags_code for queue in units.values() for place, size, tags_code in queue.values() if size != FILLER_SIZE
    }
    position = -1
    while True:
        batch = finish(
            reading.scan(Conditions(), position, max_messages=4096, max_bytes=1 << 30, max_scan_bytes=1 << 30)
        )
        for raw in batch.records:
            yield _record(bytes(raw), tags_codes)
        if batch.complete:
            return
        position = batch.cursor[0]


def _record(raw: bytes, tags_codes: dict[int, int]) -> Answer:
    message = decode_record(raw)
    properties = message.properties
    return {
        **fields_of(message),
        "phyOffset": message.physical_offset,
        "size": len(raw),
        "magic": int.from_bytes(raw[4:8], "big", signed=True),
        "recordSha256": hashlib.sha256(raw).hexdigest(),
        "commitLogOffset": message.physical_offset,
        "bodyCRC": message.body_crc,
        "bornHost": _host(message.born_host),
        "storeHost": _host(message.store_host),
        "bodyLen": len(message.body),
        "bodySha256": hashlib.sha256(message.body).hexdigest(),
        "msgId": message.message_id,
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "uniqKey": properties.get("UNIQ_KEY"),
        # Prepared and rolled back messages have no unit.
        "dispatchTagsCode": tags_codes.get(message.physical_offset, java_hash(message.tag)),
    }


def fields_of(message: StoredMessage) -> Answer:
    """The fields of a message that have the same form in all of RocketMQ's outputs."""
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "bornTimestamp": message.born_timestamp_ms,
        "storeTimestamp": message.store_timestamp_ms,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "properties": dict(message.properties),
    }


def _host(text: str) -> str:
    """A host as Java writes it: no group of an IPv6 address is omitted."""
    address, _, port = text.rpartition(":")
    if not address.startswith("["):
        return text
    groups = ipaddress.ip_address(address.strip("[]")).exploded.split(":")
    return f"[{':'.join(f'{int(group, 16):x}' for group in groups)}]:{port}"


def blanks(reading: StoreQueries) -> list[Answer]:
    """The BLANKs that end segments: offset and recorded size."""
    found = []
    segments = reading.segments
    begin, end = reading.records.visible()
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    for start in range(segments.start_of(begin), end, segments.segment_size):
        if start not in segments.starts():
            continue
        view = segments.view(start)
        at, reason = 0, record_check.REACHED_STOP
        while at < len(view) and reason != record_check.BLANK:
            reason = scan.scan_records(view, at, len(view), start, 0, out)
            at = int(out[scan.STOPPED_AT])
            if reason == record_check.BLANK:
                found.append({"phyOffset": start + at, "size": int.from_bytes(bytes(view[at : at + 4]), "big")})
            elif (following := int(scan.find_record(view, at + 1, len(view), start, out))) < 0:
                break
            else:
                at = following
    return found


def queues(reading: StoreQueries) -> dict[Queue, QueueBounds]:
    """The queues that ever had a message, with RocketMQ's bounds."""
    found = each_queue(reading.rocketmq_queues)
    return {(topic, queue_id): bounds for topic, queue_id, bounds in found if bounds.max_offset > 0}


def units(reading: StoreQueries) -> dict[Queue, dict[int, Unit]]:
    """[physical offset, size, tags code] of every queue's units, by queue offset."""
    found = {}
    for queue, bounds in queues(reading).items():
        count = bounds.max_offset - bounds.min_offset
        data = reading.files.read_units(*queue, bounds.min_offset, count, bounds.number) if count else b""
        found[queue] = {bounds.min_offset + index: list(unit) for index, unit in enumerate(as_units(data).tolist())}
    return found


# Stores of RocketMQ, recovered in this process as `mqproc up` does and read as the query role does


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened store. `said` are the lines of recovery, `holes` the damaged ranges."""

    paths: StorePaths
    options: Options
    reading: StoreQueries
    words: Words
    said: list[str]
    holes: list[tuple[int, int]]


@contextmanager
def recovered(root: Path, options: Options) -> Iterator[Opened]:
    """Recover the store at `root`, which modifies it, and open it for reading."""
    io, paths, said = StoreIO(), StorePaths(root), list[str]()
    options = adopt_sizes(io, paths, options, said.append)
    words = Words(bytearray(words_of.FILE_SIZE))
    Recovery(io, paths, options, words, said.append, clean=not io.exists(paths.abort)).run()
    view = WordsView(words, QueueTable(io, paths.queues), sync_flush=False)
    reading = StoreQueries(io, paths, options, view)
    try:
        yield Opened(paths, options, reading, words, said, _holes(paths))
    finally:
        reading.close()
        view.close()


def _holes(paths: StorePaths) -> list[tuple[int, int]]:
    if not paths.damage.exists():
        return []
    return [(hole["start"], hole["stop"]) for hole in json.loads(paths.damage.read_text())["holes"]]


# Stores of a fixture, with their intact records before opening


class Intact:
    """The undamaged store's records and BLANKs listed by RocketMQ, intact and lost."""

    def __init__(self, directory: Directory, root: Path) -> None:
        undamaged = directory.undamaged
        self._size = int(undamaged["config"]["mappedFileSizeCommitLog"])
        folder = StorePaths(root).commit_log
        self._segments = {int(path.name): path.read_bytes() for path in folder.glob("[0-9]*")}
        self.records = [each for each in undamaged["records"] if self._is_record(each)]
        self.blanks = [each for each in undamaged["blanks"] if self._is_blank(each)]
        self.at = {each["phyOffset"]: each for each in self.records}
        self.lost = {each["phyOffset"]: each for each in undamaged["records"] if each["phyOffset"] not in self.at}

    def _bytes(self, physical_offset: int, size: int) -> bytes:
        start = physical_offset - physical_offset % self._size
        return self._segments.get(start, b"")[physical_offset - start :][:size]

    def _is_record(self, listed: Answer) -> bool:
        found = self._bytes(listed["phyOffset"], listed["size"])
        return bool(hashlib.sha256(found).hexdigest() == listed["recordSha256"])

    def _is_blank(self, listed: Answer) -> bool:
        magic = record.MAGIC_BLANK.to_bytes(4, "big", signed=True)
        found = self._bytes(listed["phyOffset"], record.BLANK_SIZE)
        return bool(found == listed["size"].to_bytes(4, "big") + magic)


class Store:
    """An opened store. `intact` and `files_before` (lengths by path) describe it before opening."""

    def __init__(
        self,
        directory: Directory,
        reading: StoreQueries,
        intact: Intact,
        stack: ExitStack,
        files_before: dict[str, int] | None = None,
    ) -> None:
        self.directory = directory
        self.reading = reading
        self.intact = intact
        self.files_before = files_before or {}
        self._stack = stack
        self._undamaged: list[StoreQueries] = []

    def undamaged(self) -> Iterator[StoreQueries]:
        """The undamaged store, recovered: as closed, as killed, and from its log alone.

        The last one only if the store was never damaged.
        """
        variants = [("clean", False), ("before", False), ("before", True)]
        if not self.directory.damaged:
            variants = [(self.directory.directory, True)]
        for number, (name, log_only) in enumerate(variants):
            if number == len(self._undamaged):
                whole = replace(self.directory, name=self.directory.archive, directory=name)
                store, _opened = self._stack.enter_context(opened_store(whole, log_only=log_only))
                self._undamaged.append(store.reading)
            yield self._undamaged[number]


@contextmanager
def opened_store(directory: Directory, *, log_only: bool = False) -> Iterator[tuple[Store, Opened]]:
    """A private copy, recovered; `log_only`: from its log and settings alone."""
    with ExitStack() as stack:
        root = directory.unpack(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if log_only:
            _keep_log(StorePaths(root))
        intact, files = Intact(directory, root), files_of(root)
        opened = stack.enter_context(recovered(root, options_of(directory.expected)))
        yield Store(directory, opened.reading, intact, stack, files), opened


def _keep_log(paths: StorePaths) -> None:
    for folder in (paths.consume_queue, paths.index):
        shutil.rmtree(folder)
    paths.checkpoint.unlink()
    paths.abort.touch()


def files_of(root: Path) -> dict[str, int]:
    """Every file's length, by its path in a store."""
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
