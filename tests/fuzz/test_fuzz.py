"""Some seeds of every target, and the corpus.

MQPROC_FUZZ=2000,100000,100000,20000,2000 sets the seeds of files, frames, JSON, records and shared files.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.levels import CORPUS, KINDS, LEVELS, Shard, run_level, run_shard

COUNTS = map(int, os.environ.get("MQPROC_FUZZ", "40,3000,3000,1000,100").split(","))
SEEDS = dict(zip(("files", "frames", "json", "records", "shared"), COUNTS, strict=True))


@pytest.mark.proven
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fuzz_damaged_input_passes(kind: str, tmp_path: Path) -> None:
    run_shard(Shard(kind, 0, SEEDS[kind]), tmp_path)


@pytest.mark.parametrize("kind", sorted(CORPUS))
def test_corpus_passes(kind: str, tmp_path: Path) -> None:
    fuzzer = KINDS[kind](tmp_path)
    for name, case in CORPUS[kind].items():
        try:
            case(fuzzer)
        except BaseException as error:
            error.add_note(f"{kind}: {name}")
            raise
    fuzzer.close()


def test_level_runs_every_seed_once_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shards in LEVELS.values():
        for kind in KINDS:
            own = [shard for shard in shards if shard.kind == kind]
            assert [shard.stop for shard in own[:-1]] == [shard.first for shard in own[1:]]
    progress = tmp_path / "progress.json"
    assert run_level([Shard("json", 0, 50)], tmp_path, 1, progress) == 0
    assert run_level([Shard("json", 0, 50), Shard("json", 50, 60)], tmp_path, 1, progress) == 0
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "json 0:50: done",
        "json 50:60: done",
    ]


def test_shard_failure_prints_command_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS["json"], "run", lambda self, seed: 1 // (seed - 3))
    with pytest.raises(ZeroDivisionError) as failed:
        run_shard(Shard("json", 0, 9), tmp_path)
    assert failed.value.__notes__ == ["repeat: python -m tests.fuzz json 3, or with those before it: json 0:9"]
