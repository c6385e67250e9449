"""Signals while verify and recovery fork worker processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.store_builders import ITEMS, SEGMENT, SLOTS, StoppedStore

PROGRAM = """
import contextlib, os, signal
from pathlib import Path
from mqproc.cli.main import exit_on_signals
from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.recovery.rebuild import ScanAhead, Scanners
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.verify import verify_store

paths, io = StorePaths(Path({store!r})), StoreIO()


def verify():
    options = Options(max_hash_slot_num={slots}, max_index_num={items})
    print(verify_store(io, paths, options, jobs=3, share_bytes=1000).clean)


def scan():
    table, segments = QueueTable(io, paths.queues), LogSegments(io, paths.commit_log, {segment})
    with contextlib.closing(ScanAhead(table, segments, 0, {end}, Scanners(2, 1, 4096), print)) as scans:
        print(scans.scan(0, {end}).stopped_at > 0)


exit_on_signals()
{signal_at_fork}
{work}()
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    store = StoppedStore(tmp_path_factory.mktemp("whole") / "store")
    store.engine.segments.close()
    return store


def run(store: StoppedStore, work: str, signal_at_fork: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(
        store=str(store.root),
        slots=SLOTS,
        items=ITEMS,
        segment=SEGMENT,
        end=store.end,
        work=work,
        signal_at_fork=signal_at_fork,
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("work", ["verify", "scan"])
def test_workers_without_signal_complete(whole: StoppedStore, work: str) -> None:
    done = run(whole, work)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("when", ["before", "after_in_parent"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("work", ["verify", "scan"])
def test_workers_signal_at_fork_ends_the_command(
    whole: StoppedStore, work: str, number: signal.Signals, when: str
) -> None:
    done = run(whole, work, f"os.register_at_fork({when}=lambda: os.kill(os.getpid(), signal.{number.name}))")
    interrupted = number is signal.SIGINT
    assert done.returncode == (-number if interrupted else 128 + number)
    assert done.stdout == ""
    assert "Exception ignored" not in done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n" if interrupted else "")
    assert done.stderr.count("Traceback") == interrupted


@pytest.mark.parametrize("work", ["verify", "scan"])
def test_workers_ignore_sigint(whole: StoppedStore, work: str) -> None:
    done = run(whole, work, "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
