"""What a role logs as an error is counted, too: /metrics, the status page and an alert go by the count."""

from __future__ import annotations

import re
from pathlib import Path

import mqproc.roles

_LOGS = re.compile(r"log(?:ger\(\))?\.(?:error|exception)\(")
_COUNTS = re.compile(r"\b_?failed\(\)")
# The damage that this one tells of is counted where it is found.
_ELSEWHERE = "DamageLedger("
_LINES_BEFORE = 6


def test_each_place_that_logs_an_error_counts_it() -> None:
    forgotten, found = [], 0
    for path in sorted(Path(mqproc.roles.__file__).parent.glob("*.py")):
        lines = path.read_text().splitlines()
        for place, line in enumerate(lines):
            if not _LOGS.search(line) or _ELSEWHERE in line:
                continue
            found += 1
            if not any(_COUNTS.search(before) for before in lines[max(0, place - _LINES_BEFORE) : place]):
                forgotten.append(f"{path.name}:{place + 1}: {line.strip()}")
    assert found > 20
    assert forgotten == []
