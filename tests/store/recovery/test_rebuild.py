"""Scanner processes ahead of recovery's dispatch: results equal those without scanners.

The pieces are small, so that records, holes and segment ends are at and across their borders.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.io.store_io import StoreIO
from mqproc.kernels.dispatch import StopReason
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import DispatchScan, ScanSource
from mqproc.store.recovery.rebuild import NO_SCANNERS, ScanAhead, Scanners, usable_scanners
from tests.support.store_builders import SEGMENT, StoppedStore, assert_whole
from tests.support.store_checks import Killed, RecordingIO, contents, recover

# The test process has library threads, which the scanners do not use.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

Children = Callable[[], list[BaseProcess]]

PIECES = (1000, 4096, 3 * SEGMENT)


def scanners(count: int = 2, piece_bytes: int = 4096) -> Scanners:
    return Scanners(count, range_bytes_min=1, piece_bytes=piece_bytes)


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    store = StoppedStore(tmp_path / "store")
    store.engine.segments.close()
    return store


@pytest.fixture
def children() -> Children:
    """Processes started by this test; other tests may have left some."""
    others = multiprocessing.active_children()
    return lambda: [child for child in multiprocessing.active_children() if child not in others]


# Scans


@pytest.fixture
def log(store: StoppedStore) -> Iterator[tuple[QueueTable, LogSegments]]:
    table = QueueTable(StoreIO(), store.engine.paths.queues)
    segments = LogSegments(StoreIO(), store.engine.paths.commit_log, SEGMENT)
    yield table, segments
    segments.close()
    table.close()


def everything(scans: ScanSource, stop: int) -> tuple[dict[int, bytes], list[tuple[int, int, int]]]:
    """Units by queue, and index entries, read step by step as dispatch does."""
    units: dict[int, bytes] = {}
    entries: list[tuple[int, int, int]] = []
    position = 0
    while position < stop:
        result = scans.scan(position, stop)
        for number, _first, count, offset, _end, _time in result.runs.tolist():
            units[number] = units.get(number, b"") + result.units[offset : offset + 20 * count].tobytes()
        columns = (result.hashes, result.offsets, result.times)
        entries += zip(*(column.tolist() for column in columns), strict=True)
        position = position - position % SEGMENT + result.stopped_at
        if result.reason is StopReason.BLANK:
            position = -(-position // SEGMENT) * SEGMENT
        else:
            assert result.reason in (StopReason.LIMIT, StopReason.RECORDS, StopReason.ENTRIES_FULL)
    return units, entries


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_scan_pieces_cover_the_whole_log(
    count: int, piece_bytes: int, store: StoppedStore, log: tuple[QueueTable, LogSegments], children: Children
) -> None:
    said: list[str] = []
    with closing(ScanAhead(*log, 0, store.end, scanners(count, piece_bytes), said.append)) as ahead:
        found = everything(ahead, store.end)
    assert found == everything(DispatchScan(*log), store.end)
    assert len(found[1]) == len(store.offsets)
    assert said == []
    assert children() == []


def test_dispatch_scans_only_pieces_without_whole_record(
    store: StoppedStore, log: tuple[QueueTable, LogSegments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes of a segment may be a separate piece without a record."""
    with closing(ScanAhead(*log, 0, store.end, scanners(), list[str]().append)) as ahead:
        scanned: list[tuple[int, int]] = []
        scan_below = DispatchScan.scan_below

        def noted(self: DispatchScan, start: int, limit: int, stop: int) -> object:
            scanned.append((start, limit))
            return scan_below(self, start, limit, stop)

        monkeypatch.setattr(DispatchScan, "scan_below", noted)
        everything(ahead, store.end)
    assert all(limit % SEGMENT == 0 and limit - start < 4096 for start, limit in scanned)


def test_scanner_killed_is_reported_and_replaced_by_dispatch(
    store: StoppedStore, log: tuple[QueueTable, LogSegments], children: Children
) -> None:
    said: list[str] = []
    wanted = everything(DispatchScan(*log), store.end)
    with closing(ScanAhead(*log, 0, store.end, scanners(), said.append)) as ahead:
        victim = children()[0]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(60)
        assert everything(ahead, store.end) == wanted
    assert said == ["recovery: parallel scan of the log stopped: exit code -9"]
    assert children() == []


def test_dispatch_without_scanners_scans_all(
    store: StoppedStore, log: tuple[QueueTable, LogSegments], children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second scanner cannot be forked."""
    said: list[str] = []
    forked: list[int] = []
    fork = os.fork

    def limited() -> int:
        if forked:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        return forked[0]

    monkeypatch.setattr(os, "fork", limited)
    with closing(ScanAhead(*log, 0, store.end, scanners(), said.append)) as ahead:
        assert children() == []
        assert everything(ahead, store.end) == everything(DispatchScan(*log), store.end)
    assert said == [f"recovery: parallel scan of the log stopped: [Errno 11] {os.strerror(errno.EAGAIN)}"]


def test_scanners_leave_a_processor_to_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for processors in (1, 2, 3, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, having=processors: set(range(having)))
        counts.append(usable_scanners().count)
    assert counts == [0, 1, 2, 2]


# Recovery


def lose_all(store: StoppedStore) -> None:
    for name in ("consumequeue", "index", "mqproc"):
        shutil.rmtree(store.root / name)


def lose_queues_and_index(store: StoppedStore) -> None:
    for name in ("consumequeue", "index"):
        shutil.rmtree(store.root / name)


def lose_index(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "index")


def lose_a_queue_and_the_last_index_file(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "consumequeue" / "Second" / "1")
    store.index_files()[-1].unlink()


def lose_all_and_damage(store: StoppedStore) -> None:
    lose_all(store)
    for number in (70, 71, 300):
        store.overwrite(store.offsets[number] + 100, b"\xff")
    store.overwrite(store.offsets[200], b"\xff" * 16)


def lose_all_and_a_segment(store: StoppedStore) -> None:
    lose_all(store)
    store.segment(SEGMENT).unlink()


HARMS = [
    lose_all,
    lose_queues_and_index,
    lose_index,
    lose_a_queue_and_the_last_index_file,
    lose_all_and_damage,
    lose_all_and_a_segment,
]


@pytest.mark.parametrize("harm", HARMS)
def test_recovery_with_scanners_leaves_the_same_bytes(
    harm: Callable[[StoppedStore], None], store: StoppedStore, tmp_path: Path
) -> None:
    harm(store)
    results = []
    for name, how in [("alone", NO_SCANNERS), *((f"pieces of {size}", scanners(2, size)) for size in PIECES)]:
        root = shutil.copytree(store.root, tmp_path / name)
        found = recover(root, store.engine.options, clean=False, scanners=how)
        told = [
            line.replace(str(root), "") for line in found.said if line.startswith("damage:") or "parallel scan" in line
        ]
        results.append((contents(root), found.queues(), found.dispatched, found.holes, told))
    assert all(result == results[0] for result in results)
    assert results[0][2] == store.end


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400)), min_size=1, max_size=6), st.integers(300, 9000))
def test_scanners_with_random_damage_equal_plain_scan(damage: list[tuple[float, int]], piece_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = StoppedStore(Path(folder) / "store")
        for place, size in damage:
            offset = int(place * (store.end - 1))
            store.overwrite(offset, b"\xff" * min(size, SEGMENT - offset % SEGMENT))
        lose_all(store)
        alone, ahead = (shutil.copytree(store.root, Path(folder) / name) for name in ("alone", "ahead"))
        wanted = recover(alone, store.engine.options, clean=False)
        found = recover(ahead, store.engine.options, clean=False, scanners=scanners(1, piece_bytes))
        assert (found.holes, found.queues(), found.end) == (wanted.holes, wanted.queues(), wanted.end)
        assert contents(ahead) == contents(alone)


def test_recovery_with_scanners_rebuilds_queues_and_index(store: StoppedStore) -> None:
    before = contents(store.root)
    lose_queues_and_index(store)
    assert_whole(store, recover(store.root, store.engine.options, clean=True, scanners=scanners()))
    after = contents(store.root)
    for name in before:
        if name.startswith(("consumequeue", "index")):
            assert after[name] == before[name], name


def test_recovery_killed_leaves_no_scanner_and_can_resume(
    store: StoppedStore, tmp_path: Path, children: Children
) -> None:
    lose_queues_and_index(store)
    io = RecordingIO()
    whole = shutil.copytree(store.root, tmp_path / "whole")
    recover(whole, store.engine.options, clean=False, scanners=scanners(), io=io)
    for kill_at in range(1, len(io.calls), len(io.calls) // 8):
        root = shutil.copytree(store.root, tmp_path / str(kill_at))
        with pytest.raises(Killed):
            recover(root, store.engine.options, clean=False, scanners=scanners(), io=RecordingIO(kill_at))
        assert children() == []
        recover(root, store.engine.options, clean=False, scanners=scanners())
        assert derived(root) == derived(whole), kill_at


def derived(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(root).items() if name.startswith(("consumequeue", "index"))}


PROGRAM = """
import sys
from pathlib import Path
from mqproc.config.options import Options
from mqproc.store.recovery.rebuild import Scanners
from tests.support.store_checks import recover

options = Options(max_hash_slot_num=50, max_index_num=400)
recover(Path(sys.argv[1]), options, clean=False, scanners=Scanners(2, range_bytes_min=1, piece_bytes=4096))
"""


def test_scanners_end_with_a_killed_recovery(store: StoppedStore) -> None:
    """They hold the write end of the output pipe, which is closed only when they exit."""
    lose_queues_and_index(store)
    environment = os.environ | {"MQPROC_CRASH": "dispatch.entries_put:5"}
    command = [sys.executable, "-c", PROGRAM, str(store.root)]
    ended = subprocess.run(command, env=environment, check=False, timeout=110, capture_output=True)
    assert ended.returncode == -9, ended.stderr.decode()
    assert StorePaths(store.root).next_queues.exists()
    assert_whole(store, recover(store.root, store.engine.options, clean=False))
