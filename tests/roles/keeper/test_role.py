"""The keeper checks the disk each second, runs retention when due, and otherwise sleeps."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqproc.config.options import Options
from mqproc.layout import control as words_of
from mqproc.layout import timer_files
from mqproc.layout.timer_files import TimerCheck
from mqproc.roles.keeper import role as keeper_module
from mqproc.roles.keeper.role import Keeper
from mqproc.store import rocketmq_json
from mqproc.store.commitlog.flush import sync_log
from mqproc.store.retention import plan as retention_request
from tests.roles.keeper.test_timer import SLOT_MS, begun, pairs
from tests.roles.keeper.test_timer import rig_with as timed_rig
from tests.roles.rigs import Rig
from tests.support.store_builders import ALL_HOURS

SEGMENT = 65536
SMALL: dict[str, object] = {
    "mapped_file_size_commit_log": SEGMENT,
    "mapped_file_size_consume_queue": 2000,
    "delete_when": ALL_HOURS,
    "file_reserved_time": 1,
    "delete_commit_log_files_interval": 20,
}
MESSAGES = 3000


class Disk:
    """The file system's (used, free)."""

    def __init__(self) -> None:
        self.usage = (10, 90)

    def __call__(self, folder: Path) -> tuple[int, int]:
        return self.usage


def rig(root: Path, **options: object) -> tuple[Rig, Keeper, Disk]:
    """A store of a few full segments, over an hour old, with its marks at the end."""
    found = Rig(root, **(SMALL | options))
    disk = Disk()
    found.io.disk_usage = disk  # type: ignore[method-assign]
    found.dispatch(MESSAGES)
    words = found.control.words
    for word in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
        words[word] = words[words_of.WRITTEN]
    found.pass_seconds(2 * 3600)
    return found, Keeper(found.context(words_of.KEEPER)), disk


def live(found: Rig, keeper: Keeper, seconds: float) -> int:
    """Run steps of a keeper that wakes when due; return how often it woke."""
    end_ns = found.clock.monotonic_ns() + int(seconds * 1e9)
    woken = 0
    while found.clock.monotonic_ns() < end_ns:
        while keeper.do_work():
            pass
        woken += 1
        waited: list[float] = []
        found.bells[words_of.KEEPER].wait = waited.append  # type: ignore[method-assign]
        keeper.wait(10.0)
        found.clock.advance(max(1, int(waited[0] * 1000)))
    return woken


def starts(found: Rig) -> list[int]:
    return sorted(int(path.name) // SEGMENT for path in found.paths.commit_log.iterdir())


def test_keeper_deletes_old_segments_and_sleeps_between(tmp_path: Path) -> None:
    found, keeper, _disk = rig(tmp_path)
    words = found.control.words
    full = words[words_of.WRITTEN] // SEGMENT
    assert full > 3
    live(found, keeper, 9)
    assert starts(found)[0] == 0
    live(found, keeper, 3)
    assert starts(found)[0] == full
    assert words[words_of.MIN_PHYSICAL_OFFSET] == full * SEGMENT
    assert words[words_of.RETENTION_SEGMENTS] == full
    # Once a second for the disk, every ten for deliveries.
    assert live(found, keeper, 20) <= 24
    keeper.close()


def test_keeper_soon_due_delivery_rechecks_dispatch_unless_disk_is_full(
    tmp_path: Path,
) -> None:
    """Levels and timer wait for dispatch and were a second late after a stopped group."""
    found, keeper, _disk = rig(tmp_path, delete_when="3")
    words = found.control.words
    keeper.close()
    words[words_of.DISPATCHED] -= 1
    keeper = Keeper(found.context(words_of.KEEPER))
    live(found, keeper, 0.1)
    assert live(found, keeper, 0.1) >= 90
    words[words_of.DISPATCH_ERRNO] = errno.ENOSPC
    assert live(found, keeper, 0.1) <= 5
    words[words_of.DISPATCH_ERRNO] = 0
    words[words_of.DISPATCHED] += 1
    assert live(found, keeper, 0.1) <= 5
    keeper.close()


def test_keeper_checks_the_disk_each_second(tmp_path: Path) -> None:
    found, keeper, disk = rig(tmp_path, clean_file_forcibly_enable=False, delete_when="3", disk_floor_bytes=0)
    words = found.control.words
    live(found, keeper, 1)
    assert (words[words_of.DISK_USED_BYTES], words[words_of.DISK_FREE_BYTES], words[words_of.DISK_FULL]) == (10, 90, 0)
    disk.usage = (90, 10)
    live(found, keeper, 1.1)
    assert words[words_of.DISK_FULL] == 0
    disk.usage = (901, 99)
    live(found, keeper, 1.1)
    assert words[words_of.DISK_FULL] == 1
    disk.usage = (89, 11)
    live(found, keeper, 1.1)
    assert words[words_of.DISK_FULL] == 0
    keeper.close()


def test_keeper_serves_a_request_within_a_second(tmp_path: Path) -> None:
    found, keeper, _disk = rig(tmp_path, delete_when="3", file_reserved_time=72)
    words = found.control.words
    live(found, keeper, 12)
    asked = retention_request.submit_request(found.io, found.paths, 3_600_000)
    assert starts(found)[0] == 0
    live(found, keeper, 2)
    assert (words[words_of.RETENTION_ANSWERED], asked.exists()) == (1, False)
    assert starts(found)[0] == words[words_of.WRITTEN] // SEGMENT
    assert words[words_of.RETENTION_TRIGGER] == words_of.DUE_REQUEST
    keeper.close()


def test_keeper_options_can_change_while_running(tmp_path: Path) -> None:
    found, keeper, _disk = rig(tmp_path, file_reserved_time=72, clean_resource_interval=3_600_000)
    live(found, keeper, 30)
    assert starts(found)[0] == 0
    changed = {name: getattr(found.options, name) for name in SMALL}
    keeper.reload(Options(**(changed | {"file_reserved_time": 1, "clean_resource_interval": 5000})))
    live(found, keeper, 7)
    assert starts(found)[0] == found.control.words[words_of.WRITTEN] // SEGMENT
    keeper.close()


def test_keeper_failed_sync_of_delay_offsets_is_final_reported_once(tmp_path: Path) -> None:
    found = Rig(tmp_path, **SMALL)
    with capture_logs() as logged:
        keeper = Keeper(found.context(words_of.KEEPER))
        found.io.failing = {"delayOffset.json": errno.EIO}
        keeper._levels._levels[2].offset = 1  # As of a delivery.
        live(found, keeper, 5)
    words = found.control.words
    assert words[words_of.KEEPER_SYNC_ERRNO] == errno.EIO
    assert "delayOffset.json" in found.paths.read_only.read_text()
    assert sum("delayOffset.json could not be saved" in line["event"] for line in logged) == 1
    assert sum("delayOffset.json" in path for path in found.io.synced) == 1
    keeper.close()


def test_keeper_stopping_saves_despite_new_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is stopped after the keeper, and takes messages until then."""
    found = timed_rig(tmp_path, [(b"later", pairs(SLOT_MS))])
    keeper = begun(found)
    keeper._levels._levels[2].offset = 1  # As of a delivery.
    words = found.control.words
    end = words[words_of.WRITTEN]

    def sync_while_messages_come(*given: Any) -> None:
        sync_log(*given)
        words[words_of.WRITTEN] = end + 100

    monkeypatch.setattr(keeper_module, "sync_log", sync_while_messages_come)
    assert keeper.on_stop()
    assert words[words_of.WRITTEN] > end
    check = timer_files.decode_check(found.paths.timer_check.read_bytes())
    assert (check.queue_offset, check.timer_log_flushed > 0) == (1, True)
    levels = rocketmq_json.parse(found.paths.delay_offsets.read_text())
    assert levels["offsetTable"]["3"] == 1
    # Neither covers more of the log than was synced: a power loss may take the rest.
    assert check.log == levels["mqproc"]["log"] == end
    keeper.close()


@pytest.mark.parametrize("after_ms", [0, 10, 30, 60])
def test_keeper_successor_finishes_pending_work(tmp_path: Path, after_ms: int) -> None:
    found, keeper, _disk = rig(tmp_path)
    live(found, keeper, 9.95 + after_ms / 1000)
    while not keeper.on_stop():  # It ends with the segments that it has begun to delete.
        found.clock.advance(1)
    keeper.close()
    successor = Keeper(found.context(words_of.KEEPER))
    live(found, successor, 15)
    words = found.control.words
    assert starts(found)[0] * SEGMENT == words[words_of.MIN_PHYSICAL_OFFSET]
    assert starts(found)[0] == words[words_of.WRITTEN] // SEGMENT
    successor.close()


def test_keeper_failed_sync_of_timer_files_is_final_reported_once(
    tmp_path: Path,
) -> None:
    found = Rig(tmp_path, **SMALL)
    found.paths.timer_check.parent.mkdir(exist_ok=True)
    found.paths.timer_check.write_bytes(timer_files.encode_check(TimerCheck(read_ms=found.clock.time_ms())))
    with capture_logs() as logged:
        keeper = Keeper(found.context(words_of.KEEPER))
        found.io.failing = {"timerwheel": errno.EIO}
        keeper._timer._dirty = True
        assert live(found, keeper, 5) <= 12, "and then it sleeps"
    words = found.control.words
    assert words[words_of.KEEPER_SYNC_ERRNO] == errno.EIO
    assert words[words_of.role_word(words_of.KEEPER, "errors")] == 1
    assert sum("timercheck could not be saved" in line["event"] for line in logged) == 1
    assert sum("timerwheel" in path for path in found.io.synced) == 1
    keeper.close()
