"""Repair of the timer's files, and of records with a damaged store time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.store.recovery.repair import timer_damage
from mqproc.store.verify.findings import Finding, FindingKind
from tests.golden.fixtures import GOLDEN, directories
from tests.support.command_line import call

WHEEL = Finding(FindingKind.TIMER_SLOT_WRONG, "timerwheel", 32)
LOG = Finding(FindingKind.TIMER_FILE_MISSING, "timerlog/00000000000000000000", 0)
ELSEWHERE = Finding(FindingKind.READ_ONLY, "mqproc/read_only")


@pytest.mark.parametrize(
    ("findings", "damaged"),
    [
        ([], (False, False)),
        ([ELSEWHERE], (False, False)),
        ([WHEEL], (True, False)),
        ([replace(WHEEL, as_note=True)], (True, False)),
        ([replace(WHEEL, as_note=True), ELSEWHERE], (True, False)),
        ([WHEEL, LOG], (True, True)),
        ([Finding(FindingKind.TIMER_CHECK_MISSING, "config/timercheck", as_note=True)], (True, True)),
        ([Finding(FindingKind.FILE_BEGUN, LOG.file, 0)], (True, True)),
        ([Finding(FindingKind.FILE_BEGUN, "index/20231114221320000", 0)], (False, False)),
    ],
    ids=[
        "nothing",
        "elsewhere",
        "wheel",
        "crashed",
        "crashed and repaired",
        "log",
        "crashed without a check",
        "crashed as a file was made",
        "another file",
    ],
)
def test_timer_damage_selects_wheel_and_log_to_rebuild(
    findings: list[Finding], damaged: tuple[bool, bool], tmp_path: Path
) -> None:
    assert timer_damage(findings, StorePaths(tmp_path)) == damaged


# Damaged store times: RocketMQ's CRC does not cover them, so the records are intact.

KILLED = next(each for each in directories(GOLDEN) if str(each) == "c4_killed_settled/before")
SEGMENT = 65536
TIMES_MS = [-1 << 63, -1, (1 << 63) - 1]


@pytest.mark.parametrize("time_ms", TIMES_MS)
@pytest.mark.parametrize("number", [0, -1])
def test_damaged_store_time_does_not_stop_repair_or_lookup(tmp_path: Path, number: int, time_ms: int) -> None:
    """Starts, repairs and lookups by key must accept such a time in the first and last record."""
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
