"""What RocketMQ was asked about its stores, asked of our reading, in RocketMQ's own words.

`ask` takes a question of a fixture's `answers` and gives a result of the same form. `records`, `blanks`, `queues` and
`units` tell of a whole store what the fixture's lists of these names tell.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator
from typing import Any

import numpy as np

from mqproc.errors import CorruptStoreError
from mqproc.kernels import scan
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.java_hash import java_hash
from mqproc.layout.record_codec import decode_record, decode_records
from mqproc.message import StoredMessage
from mqproc.store.consume_queue import as_units
from mqproc.store.reads.log_scan import Conditions
from mqproc.store.reads.pull import Pulled
from mqproc.store.reads.queue_bounds import QueueBounds, each_queue
from mqproc.store.reads.reading import StoreReading
from mqproc.store.slices import finish

Answer = dict[str, Any]
Queue = tuple[str, int]
Unit = list[int]

# What RocketMQ takes for a pull whose size nobody limits.
PULL_BYTES = 128 << 20


def ask(reading: StoreReading, question: Answer) -> Answer:
    """Our result for a question."""
    return _ASK[question["op"]](reading, question)


def _get_message(reading: StoreReading, question: Answer) -> Answer:
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
    """A pull's result as RocketMQ's `getMessage` gives it."""
    return {
        "status": pulled.status.value,
        "nextBeginOffset": pulled.next_offset,
        "minOffset": pulled.min_offset,
        "maxOffset": pulled.max_offset,
        "bufferTotalSize": len(pulled.records),
        "queueOffsets": [message.queue_offset for message in messages],
        "phyOffsets": [message.physical_offset for message in messages],
    }


def _query_message(reading: StoreReading, question: Answer) -> Answer:
    asked = reading.query_message(
        question["topic"], question["key"], question["maxNum"], question["begin"], question["end"]
    )
    found = finish(asked)
    return {
        "phyOffsets": found.offsets,
        "indexLastUpdateTimestamp": found.last_update_timestamp_ms,
        "indexLastUpdatePhyoffset": found.last_update_physical_offset,
    }


def _offset_by_time(reading: StoreReading, question: Answer) -> Answer:
    upper = question.get("boundary") == "UPPER"
    queue = question["topic"], question["queueId"]
    return {"offset": reading.offset_in_queue_by_time(*queue, question["timestamp"], upper=upper)}


def _min_max(reading: StoreReading, question: Answer) -> Answer:
    bounds = reading.rocketmq_queues.bounds(question["topic"], question["queueId"])
    return {"minOffset": bounds.min_offset, "maxOffset": bounds.max_offset}


def _store_time(reading: StoreReading, question: Answer) -> Answer:
    return {"timestamp": reading.store_time_ms(question["topic"], question["queueId"], question["offset"])}


def _look(reading: StoreReading, question: Answer) -> Answer:
    try:
        record = reading.look(question["phyOffset"])
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


def records(reading: StoreReading, units: dict[Queue, dict[int, Unit]]) -> Iterator[Answer]:
    """Every record of the log, decoded. `units` are those of its queues, which have the dispatched tags codes."""
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
        # Prepared and rolled back messages have no unit that would tell.
        "dispatchTagsCode": tags_codes.get(message.physical_offset, java_hash(message.tag)),
    }


def fields_of(message: StoredMessage) -> Answer:
    """What of a message has one form wherever RocketMQ tells of it."""
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
    """A host as Java writes it: no group of an IPv6 address is left out."""
    address, _, port = text.rpartition(":")
    if not address.startswith("["):
        return text
    groups = ipaddress.ip_address(address.strip("[]")).exploded.split(":")
    return f"[{':'.join(f'{int(group, 16):x}' for group in groups)}]:{port}"


def blanks(reading: StoreReading) -> list[Answer]:
    """The BLANKs that end segments: place, and the size that each says."""
    found = []
    segments = reading.segments
    begin, end = reading.records.visible()
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    for start in range(segments.start_of(begin), end, segments.segment_size):
        if start not in segments.starts():
            continue
        view = segments.view(start)
        at, reason = 0, scan.REACHED_STOP
        while at < len(view) and reason != scan.BLANK:
            reason = scan.scan_records(view, at, len(view), start, 0, out)
            at = int(out[scan.STOPPED_AT])
            if reason == scan.BLANK:
                found.append({"phyOffset": start + at, "size": int.from_bytes(bytes(view[at : at + 4]), "big")})
            elif (following := int(scan.find_record(view, at + 1, len(view), start, out))) < 0:
                break
            else:
                at = following
    return found


def queues(reading: StoreReading) -> dict[Queue, QueueBounds]:
    """The queues that ever had a message, with RocketMQ's bounds."""
    found = each_queue(reading.rocketmq_queues)
    return {(topic, queue_id): bounds for topic, queue_id, bounds in found if bounds.max_offset > 0}


def units(reading: StoreReading) -> dict[Queue, dict[int, Unit]]:
    """[physical offset, size, tags code] of every queue's units from its minimum on, by queue offset."""
    found = {}
    for queue, bounds in queues(reading).items():
        count = bounds.max_offset - bounds.min_offset
        data = reading.files.read_units(*queue, bounds.min_offset, count, bounds.number) if count else b""
        found[queue] = {bounds.min_offset + index: list(unit) for index, unit in enumerate(as_units(data).tolist())}
    return found
