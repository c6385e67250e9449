"""`mqproc stat` reads the control file alone, whether its group lives or not."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.ipc import control_words
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from tests.cli.calling import Outcome, call
from tests.metrics.control_file import make_control


def test_words_are_those_that_roles_see(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    words = control_words.read_words(StorePaths(tmp_path))
    assert words == control.snapshot()
    for index in layout.SYNC_ERRNO_WORDS:
        control.store(index, 5)
        assert control_words.read_only(control_words.read_words(StorePaths(tmp_path)))
        control.store(index, 0)
    control.store(layout.HEADER_VERSION, 99)
    with pytest.raises(CorruptStoreError, match="version"):
        control_words.read_words(StorePaths(tmp_path))
    control.close()


def test_figures_follow_from_the_words(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    words = call("stat", "--store", tmp_path, "--json").json["words"]
    assert words["dispatch_behind_bytes"] == 3000
    assert 0 <= words["dispatch_behind_ms"] < 30_000
    assert words["flush_behind_bytes"] == 4500
    assert words["written"] == 9000
    assert words["alive"] == 1


@pytest.mark.parametrize("why", [layout.SYNC_ERRNO_WORDS[0], layout.DAMAGE_READ_ONLY, layout.DISPATCH_READ_ONLY])
def test_a_store_that_takes_nothing_is_read_only_for_whichever_reason(tmp_path: Path, why: int) -> None:
    control = make_control(tmp_path)
    for value in (0, 1):
        control.store(why, value)
        assert call("stat", "--store", tmp_path, "--json").json["words"]["read_only"] == value
    control.close()


def test_a_dead_group_is_seen_as_dead(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    control.store(layout.SUPERVISOR_HEARTBEAT_NS, 1)
    control.close()
    assert call("stat", "--store", tmp_path, "--json").json["words"]["alive"] == 0


def test_every_word_is_shown_with_unit_owner_and_meaning(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    out = call("stat", "--store", tmp_path).out
    for word in layout.WORDS.values():
        if word.name not in ("magic", "version", "store_id"):
            line = next(line for line in out.splitlines() if line.split()[0] == word.name)
            assert word.owner in line
            assert word.help in line
    assert "ready (3)" in out


def test_prefix_and_changed_choose_lines(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    rows = call("stat", "--store", tmp_path, "--prefix", "dispatched", "--output", "csv").out.splitlines()[1:]
    assert [row.split(",")[0] for row in rows][:2] == ["dispatched", "dispatched_store_timestamp_ms"]
    assert "dispatched_entries" not in call("stat", "--store", tmp_path, "--changed").out


def test_a_store_without_a_control_file_is_not_running(tmp_path: Path) -> None:
    assert call("stat", "--store", tmp_path).code == 9


def test_a_file_in_the_place_of_a_store_is_told(tmp_path: Path) -> None:
    file = tmp_path / "control"
    file.touch()
    outcome = call("stat", "--store", file)
    assert outcome.code == 3
    assert outcome.err == f"mqproc: {file}: a file; --store takes the folder that holds a store's files\n"


def watched(store: Path, *how: str) -> Outcome:
    """Of a watch that comes to its second block: a busy machine may take all the time for the first."""
    for timeout in ("300ms", "3s", "20s"):
        outcome = call("stat", "--store", store, "--watch", "--timeout", timeout, *how)
        assert outcome.code == 0, outcome
        if outcome.out.count("dispatch_behind_bytes") >= 2:
            break
    return outcome


def test_watching_ends_at_the_timeout(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    began_s = time.monotonic()
    for interval in ("50ms", "1h"):
        blocks = [block["words"] for block in watched(tmp_path, "--interval", interval, "--json").json_lines]
        assert len(blocks) >= 2
        assert {block["dispatch_behind_bytes"] for block in blocks} == {3000}
    assert 0.6 <= time.monotonic() - began_s < 60


def test_watching_leaves_out_figures_that_are_0_when_asked_to(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    for flags, there in (((), True), (("--changed",), False)):
        watch = ("--watch", "--timeout", "150ms", "--interval", "50ms", "--json", *flags)
        outcome = call("stat", "--store", tmp_path, *watch)
        for block in outcome.json_lines:
            assert ("read_only" in block["words"]) == there
            assert block["words"]["dispatch_behind_bytes"] == 3000


def test_what_is_watched_can_be_recorded(tmp_path: Path) -> None:
    make_control(tmp_path).close()
    watch = ("--interval", "50ms")
    lines = watched(tmp_path, *watch, "--output", "csv").out.splitlines()
    header, *rows = csv.reader(lines)
    assert header == ["time_ms", "name", "value", "per_second", "unit"]
    assert {len(row) for row in rows} == {5}
    behind = [row for row in rows if row[1] == "dispatch_behind_bytes"]
    assert len(behind) >= 2
    assert header not in rows
    blocks = watched(tmp_path, *watch, "--json").json_lines
    for times in ([int(row[0]) for row in behind], [block["time_ms"] for block in blocks]):
        assert times == sorted(times)
        assert abs(times[-1] - time.time() * 1000) < 60_000


def test_watched_words_come_again_with_their_rates(tmp_path: Path) -> None:
    control = make_control(tmp_path)
    command = [sys.executable, "-m", "mqproc", "stat", "--watch", "--interval", "50ms", "--json", "--store", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())["words"]
            assert (first["written"], first["dispatch_behind_bytes"]) == (9000, 3000)
            control.store(layout.WRITTEN, 12_000)
            blocks = (json.loads(line)["words"] for line in process.stdout if line.strip())
            changed = next(words for words in blocks if "written" in words)
            assert (changed["written"], changed["dispatch_behind_bytes"]) == (12_000, 6000)
            # Of the words only those that have changed; the figures always.
            assert "dispatched" not in changed
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    control.close()
