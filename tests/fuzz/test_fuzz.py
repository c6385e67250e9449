"""Some seeds of every kind of fuzzing; MQPROC_FUZZ=2000,100000,100000 asks for more of files, frames and JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS

SEEDS = dict(
    zip(("files", "frames", "json"), map(int, os.environ.get("MQPROC_FUZZ", "40,3000,3000").split(",")), strict=True)
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_damaged_input_breaks_nothing(kind: str, tmp_path: Path) -> None:
    fuzzer = KINDS[kind](tmp_path)
    for seed in range(SEEDS[kind]):
        try:
            fuzzer.run(seed)
        except BaseException:
            print(f"repeat: python -m tests.fuzz {kind} {seed}")
            raise
    fuzzer.close()
