"""Records whose store time is any number: RocketMQ's CRC does not cover it, so they are intact."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.layout import record
from tests.cli.calling import call
from tests.golden.fixtures import GOLDEN, directories

KILLED = next(each for each in directories(GOLDEN) if str(each) == "c4_killed_settled/before")
SEGMENT = 65536
TIMES_MS = [-1 << 63, -1, (1 << 63) - 1]


@pytest.mark.parametrize("time_ms", TIMES_MS)
@pytest.mark.parametrize("number", [0, -1])
def test_they_keep_nobody_from_the_store_nor_from_its_keys(tmp_path: Path, number: int, time_ms: int) -> None:
    """With such a time of the last record each start and repair ended with a traceback, and no message of an index file
    that begins with such a record was found by key."""
    store = KILLED.unpack(tmp_path)
    assert call("store", "recover", store, "--execute").code == 0
    with StoreReader(store) as reader:
        messages = list(reader.scan(physical_offset=0))
    (store / "abort").touch()
    offset = messages[number].physical_offset
    with (store / "commitlog" / f"{offset // SEGMENT * SEGMENT:020d}").open("r+b") as file:
        file.seek(offset % SEGMENT + record.STORE_TIMESTAMP)
        file.write(time_ms.to_bytes(8, "big", signed=True))
    assert call("store", "repair", store, "--execute").code == 0
    with StoreReader(store) as reader:
        for message in messages:
            for key in message.keys:
                found = reader.by_key(message.topic, key, max_messages=len(messages))
                assert message.physical_offset in [each.physical_offset for each in found]
