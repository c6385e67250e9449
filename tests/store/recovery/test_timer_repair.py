"""What a repair mends of the timer's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mqproc.paths import StorePaths
from mqproc.store.recovery.repair import timer_damage
from mqproc.store.verify.findings import Finding, FindingKind

WHEEL = Finding(FindingKind.TIMER_SLOT_WRONG, "timerwheel", 32)
LOG = Finding(FindingKind.TIMER_FILE_MISSING, "timerlog/00000000000000000000", 0)
ELSEWHERE = Finding(FindingKind.READ_ONLY, "mqproc/read_only")


@pytest.mark.parametrize(
    ("findings", "mended"),
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
def test_a_wheel_that_a_start_would_make_anew_is_made_by_a_repair_that_closes_the_store(
    findings: list[Finding], mended: tuple[bool, bool], tmp_path: Path
) -> None:
    assert timer_damage(findings, StorePaths(tmp_path)) == mended
