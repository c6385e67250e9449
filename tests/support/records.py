"""Records for tests: the reference encoder, a small log of many kinds, damaged copies."""

from __future__ import annotations

import enum
import json
import os
import random
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, MessageTooLargeError, PropertiesTooLargeError
from mqproc.kernels import record_decode
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import record, record_codec
from mqproc.layout.properties import java_hash
from mqproc.layout.record_codec import host_bytes
from mqproc.types import StoredMessage

ROOT = Path(__file__).resolve().parents[2]
BASE = 1 << 33
HOSTS = (host_bytes("10.2.0.15", 23585), host_bytes("2001:db8::1:0:0:9", 10911), host_bytes("::", -1))


LOOPBACK = host_bytes("127.0.0.1", 0)
# At the start or after another pair, so that the name inside a value is kept.
_CRC_PAIR = re.compile(r"(?:^|(?<=\x02))__CRC32#\x01[^\x02]*\x02?")


def encode_record(
    *,
    topic: str,
    body: bytes,
    properties: str = "",
    queue_id: int = 0,
    flag: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    sys_flag: int = 0,
    born_timestamp_ms: int = 0,
    born_host: bytes = LOOPBACK,
    store_timestamp_ms: int = 0,
    store_host: bytes = LOOPBACK,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    append_crc: bool = False,
) -> bytes:
    """Encode a record; `properties` is an encoded string.

    With `append_crc` the record's CRC becomes its last pair. The host bits of the system flag are set by the hosts. As
    in RocketMQ, the length of the topic decides between V1 and V2.
    """
    sys_flag &= ~(record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6)
    sys_flag |= record.SYS_FLAG_BORN_HOST_V6 if len(born_host) == record.HOST_V6_SIZE else 0
    sys_flag |= record.SYS_FLAG_STORE_HOST_V6 if len(store_host) == record.HOST_V6_SIZE else 0
    is_v2 = len(topic.encode("utf-16-le")) // 2 > record.TOPIC_V1_CHARACTERS_MAX
    magic, topic_format = (record.MAGIC_V2, ">h") if is_v2 else (record.MAGIC_V1, ">b")
    pairs = without_crc(properties).encode()
    if append_crc:
        pairs += (b"\x02" if pairs and not pairs.endswith(b"\x02") else b"") + bytes(record.CRC_TAIL_SIZE)
    if len(pairs) > record.PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {len(pairs):,} bytes exceed {record.PROPERTIES_SIZE_MAX:,}")
    try:
        topic_size = struct.pack(topic_format, len(topic.encode()))
    except struct.error:
        raise MessageTooLargeError(f"topic of {len(topic.encode())} bytes does not fit its length field") from None
    variable = b"".join((body, topic_size, topic.encode(), struct.pack(">h", len(pairs)), pairs))
    size = record.BODY + len(born_host) + len(store_host) - 2 * record.HOST_V4_SIZE + len(variable)
    head = (size, magic, crc31(body), queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp_ms)
    encoded = b"".join(
        (
            record.HEAD.pack(*head),
            born_host,
            struct.pack(">q", store_timestamp_ms),
            store_host,
            record.TAIL.pack(reconsume_times, prepared_transaction_offset, len(body)),
            variable,
        )
    )
    return encoded[: -record.CRC_TAIL_SIZE] + crc_tail(record_crc(encoded)) if append_crc else encoded


class RecordFault(enum.StrEnum):
    """Reason why bytes are not a valid record."""

    NO_MAGIC = "no record's magic"
    CUT_SHORT = "lengths reach past the end"
    BODY_CRC = "the body's CRC differs"
    PROPERTY_CRC = "the record's CRC differs"
    LENGTHS_DIFFER = "the total size is not the sum of its parts"


class RecordCheck(NamedTuple):
    """Result of RocketMQ's check.

    (size, True): a record. (0, True): a BLANK, the segment ends here. (−1, False): not a record.
    (size, False): inconsistent lengths.
    """

    size: int
    success: bool
    fault: RecordFault | None = None


def check_record(
    buffer: Any, offset: int = 0, *, check_crc: bool = True, check_property_crc: bool = False
) -> RecordCheck:
    """Check the bytes at `offset` by the rules of RocketMQ's `checkMessageAndReturnSize`.

    `check_property_crc` checks the record's CRC instead of the body's.
    """
    data = buffer if type(buffer) is bytes else bytes(memoryview(buffer).cast("B"))
    cut_short = RecordCheck(-1, False, RecordFault.CUT_SHORT)
    if offset < 0 or len(data) - offset < record.BLANK_SIZE:
        return cut_short
    (magic,) = struct.unpack_from(">i", data, offset + record.MAGIC)
    if magic == record.MAGIC_BLANK:
        return RecordCheck(0, True)
    if magic not in (record.MAGIC_V1, record.MAGIC_V2):
        return RecordCheck(-1, False, RecordFault.NO_MAGIC)
    try:
        fixed = record_codec.fixed_of(data[offset:])
        total, sys_flag, body_length = fixed[0], fixed[7], max(fixed[14], 0)
        v6_hosts = (sys_flag & record.SYS_FLAG_BORN_HOST_V6 != 0) + (sys_flag & record.SYS_FLAG_STORE_HOST_V6 != 0)
        body_start = offset + record.BODY + record.IPV6_EXTRA * v6_hosts
        body_end = body_start + body_length
        topic_format = ">b" if magic == record.MAGIC_V1 else ">h"
        (topic_size,) = struct.unpack_from(topic_format, data, body_end)
        topic_end = body_end + struct.calcsize(topic_format) + topic_size
        (properties_size,) = struct.unpack_from(">h", data, topic_end)
    except struct.error:
        return cut_short
    properties_start = topic_end + 2
    end = properties_start + max(properties_size, 0)
    if topic_size < 0 or total < 0 or body_length > total or end > len(data):
        return cut_short
    if check_property_crc:
        if property_crc(data[properties_start:end]) != record_crc(data[offset:end]):
            return RecordCheck(-1, False, RecordFault.PROPERTY_CRC)
    elif check_crc and body_length > 0 and crc31(data[body_start:body_end]) != fixed[2]:
        return RecordCheck(-1, False, RecordFault.BODY_CRC)
    if end - offset != total:
        return RecordCheck(total, False, RecordFault.LENGTHS_DIFFER)
    return RecordCheck(total, True)


def decode_record(buffer: Any, offset: int = 0, *, check_crc: bool = True) -> StoredMessage:
    """Check and decode the record at `offset`. Raises CorruptStoreError if it is invalid or a BLANK."""
    check = check_record(buffer, offset, check_crc=check_crc)
    if not check.success or check.size == 0:
        raise CorruptStoreError(f"no record at byte {offset}: {check.fault or 'the segment ends here (BLANK)'}")
    return record_codec.decode_record(buffer, offset)


def crc31(data: bytes) -> int:
    """RocketMQ's CRC: CRC-32 without its highest bit, 0 for no bytes."""
    return zlib.crc32(data) & 0x7FFFFFFF


def record_crc(data: bytes) -> int:
    """CRC of a record, excluding the tail that holds it."""
    return crc31(data[: -record.CRC_TAIL_SIZE])


def property_crc(properties: bytes) -> int | None:
    """CRC in the tail of a properties string, None without a tail."""
    tail = properties[-record.CRC_TAIL_SIZE :]
    digits = tail[len(record.CRC_NAME) + 1 : -1]
    if len(tail) < record.CRC_TAIL_SIZE or not tail.startswith(record.CRC_NAME + b"\x01") or tail[-1:] != b"\x02":
        return None
    return int(digits[::-1]) if digits.isdigit() else None


def without_crc(properties: str) -> str:
    """Remove CRC pairs from an encoded string; a record's CRC is always computed."""
    return _CRC_PAIR.sub("", properties)


def crc_tail(crc: int) -> bytes:
    """Property with a record's CRC: ten digits, the least significant first."""
    return record.CRC_NAME + b"\x01" + f"{crc:0{record.CRC_DIGITS}d}"[::-1].encode() + b"\x02"


def iterate_records(data: bytes, offset: int = 0) -> Iterator[tuple[int, StoredMessage]]:
    """Iterate over (position, record) of a segment, up to its BLANK or the first invalid bytes."""
    while (check := check_record(data, offset)).success and check.size:
        yield offset, decode_record(data, offset)
        offset += check.size


def encode_message_id(store_host: bytes, physical_offset: int) -> str:
    """Encode RocketMQ's offset message id: 32 characters for an IPv4 store host, 56 for IPv6."""
    return (bytes(store_host) + struct.pack(">q", physical_offset)).hex().upper()


@dataclass(frozen=True, slots=True)
class SmallLog:
    """A segment that ends with a BLANK and garbage; its records' offsets, sizes and units."""

    segment: bytes
    places: list[tuple[int, int]]
    units: bytes

    @property
    def end(self) -> int:
        return self.places[-1][0] + self.places[-1][1]

    @property
    def records(self) -> bytes:
        return self.segment[: self.end]


def properties_of(number: int, rng: random.Random) -> str:
    """Properties of a record, with variations.

    With and without tag and keys, duplicate names, a missing last separator.
    """
    pairs = []
    if number % 5:
        pairs.append(f"UNIQ_KEY\x01{number:032X}\x02")
    if number % 3:
        pairs.append(f"TAGS\x01Tag{number % 4}\x02")
    if number % 4:
        pairs.append(f"KEYS\x01order-{number} k{number % 7}\x02")
    if number % 7 == 6:
        pairs.append("TAGS\x01\x02TAGS\x01schlußtag\x02\x02\x01x\x02")
    text = "".join(pairs) + "x" * rng.choice((0, 0, 3))
    return text.removesuffix("\x02") if number % 6 == 5 else text


def small_log(count: int = 24, seed: int = 0, base: int = BASE, room: int = 100) -> SmallLog:
    """`count` records of all versions and hosts, every second one with its own CRC."""
    rng = random.Random(seed)
    data, places, units = b"", [], b""
    for number in range(count):
        topic = "T" * 200 if number % 11 == 10 else ("Orders", "Pay")[number % 2]
        properties = properties_of(number, rng)
        made = encode_record(
            topic=topic,
            body=rng.randbytes(rng.choice((0, 1, 15, 40, 200))),
            properties=properties,
            queue_id=number % 3,
            flag=number,
            queue_offset=number // 3,
            physical_offset=base + len(data),
            sys_flag=(0, record.SYS_FLAG_PREPARED, record.SYS_FLAG_COMMIT)[number % 3],
            born_timestamp_ms=1_000_000 - number,
            born_host=HOSTS[number % 3],
            store_timestamp_ms=2_000_000 + number,
            store_host=HOSTS[number // 3 % 3],
            reconsume_times=number % 2,
            prepared_transaction_offset=number * 1000,
            append_crc=number % 2 == 0,
        )
        places.append((len(data), len(made)))
        tags = [pair[5:] for pair in properties.split("\x02") if pair.startswith("TAGS\x01") and len(pair) > 5]
        units += struct.pack(">qiq", base + len(data), len(made), java_hash(tags[-1]) if tags else 0)
        data += made
    blank = struct.pack(">ii", room, record.MAGIC_BLANK) + rng.randbytes(room - 8)
    return SmallLog(data + blank, places, units)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes, mostly at sizes and magics; sometimes truncate."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed))
        changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed[: rng.randrange(len(changed))]) if rng.random() < 0.2 else bytes(changed)


def kernel_bytes(data: bytes) -> NDArray[np.uint8]:
    """A private array of the kernels' type."""
    return as_kernel_array(bytearray(data))


def columns_of(buffer: Any, count: int, names: Sequence[str]) -> dict[str, record_decode.Column]:
    """The named columns of `count` records (−1: all)."""
    buf, places, count = record_decode.locate(buffer, count, record_decode.rows_of(names))
    return {name: record_decode.copy_column(buf, places, count, name) for name in names}


def outcomes_uncompiled(test_file: str) -> Any:
    """JSON printed by a test file that runs uncompiled, so that every load checks its bounds."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, test_file], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
