"""Records for tests: a small log of many kinds of records, its units, and damaged copies."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import record_decode
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import record
from mqproc.layout.java_hash import java_hash
from mqproc.layout.record_codec import encode_record, host_bytes

ROOT = Path(__file__).resolve().parents[2]
BASE = 1 << 33
HOSTS = (host_bytes("10.2.0.15", 23585), host_bytes("2001:db8::1:0:0:9", 10911), host_bytes("::", -1))


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
