"""An append frame read back in plain Python: what the writer's kernel makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mqproc.layout import properties
from mqproc.wire.operations.log import COLUMN_ABSENT, AppendRequest

SHARDING_BUCKET = properties.bucket("__SHARDINGKEY")


@dataclass
class Row:
    """One message of a frame."""

    body: bytes
    properties: str
    queue_id: int
    flag: int
    born_timestamp_ms: int
    sharding_key: str = ""

    @property
    def pairs(self) -> dict[str, str]:
        return properties.decode(self.properties)


class _Columns:
    def __init__(self, payload: bytes, count: int) -> None:
        self._payload = payload
        self._at = 0
        self._count = count

    def numbers(self, dtype: str) -> list[int]:
        found = np.frombuffer(self._payload, dtype, self._count, self._at)
        self._at += found.nbytes
        return found.tolist()

    def texts(self, size: int, dtype: str) -> list[bytes]:
        lengths = self.numbers(dtype)
        assert sum(lengths) == size
        values = []
        for length in lengths:
            values.append(self._payload[self._at : self._at + length])
            self._at += length
        return values

    def end(self) -> None:
        assert self._at == len(self._payload), "the columns do not fill the payload"


def read_append(options: AppendRequest, payload: bytes) -> list[Row]:
    """The frame's messages, with property strings as the writer would store them."""
    columns = _Columns(payload, options.count)
    bodies = columns.texts(options.bodies_bytes, "<u4")
    keys = columns.texts(options.keys_bytes, "<u2") if options.keys_bytes != COLUMN_ABSENT else None
    tags = columns.texts(options.tags_bytes, "<u2") if options.tags_bytes != COLUMN_ABSENT else None
    whole = columns.texts(options.properties_bytes, "<u2") if options.properties_bytes != COLUMN_ABSENT else None
    born = columns.numbers("<i8") if options.has_born else [options.born_timestamp_ms] * options.count
    queues = columns.numbers("<i4") if options.has_queues else [options.queue_id] * options.count
    flags = columns.numbers("<i4") if options.has_flags else [options.flag] * options.count
    sharding = columns.texts(options.sharding_bytes, "<u2") if options.sharding_bytes != COLUMN_ABSENT else None
    columns.end()
    rows = []
    for index in range(options.count):
        sharding_key = sharding[index].decode() if sharding is not None else ""
        text = (
            whole[index].decode()
            if whole is not None
            else _properties(
                options,
                index,
                tags[index].decode() if tags is not None else options.tag,
                keys[index].decode() if keys is not None else "",
                sharding_key,
            )
        )
        rows.append(Row(bodies[index], text, queues[index], flags[index], born[index], sharding_key))
    return rows


def _properties(options: AppendRequest, index: int, tag: str, keys: str, sharding_key: str) -> str:
    def pair(name: str, value: str) -> str:
        return f"{name}\x01{value}\x02" if value else ""

    unique = f"{options.unique_prefix}{(options.unique_counter + index) % 65536:04X}" if options.unique_prefix else ""
    before = options.gap_before_unique.decode()
    if sharding_key:
        pairs = before.split("\x02")[:-1]
        earlier = [each for each in pairs if properties.bucket(each.partition("\x01")[0]) < SHARDING_BUCKET]
        later = pairs[len(earlier) :]
        before = "".join(f"{each}\x02" for each in (*earlier, f"__SHARDINGKEY\x01{sharding_key}", *later))
    return "".join(
        (
            before,
            pair("UNIQ_KEY", unique),
            options.gap_before_tag.decode(),
            pair("TAGS", tag),
            options.gap_before_keys.decode(),
            pair("KEYS", keys),
            options.gap_after_keys.decode(),
        )
    )
