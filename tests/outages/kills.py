"""kill -9 at a named point of a real group under load, five points a seed, and of the whole group now and then."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any, Final

from mqproc.config.options import FlushDiskType
from mqproc.io.fault_injection import CRASH_POINTS, CRASH_VARIABLE
from mqproc.layout import control as words_of
from mqproc.paths import segment_name
from tests.conftest import wait_until
from tests.outages.checks import check, check_stopped
from tests.outages.customers import Heard, customers
from tests.outages.warm_group import WarmGroup

LIVES: Final = 5
CUSTOMERS: Final = 2
POINT_TIMEOUT_S: Final = 60.0
GOES_ON: Final = 100
"""So many messages more must come after a role was killed."""
KILL_ALL_CHANCE: Final = 0.6
TORN_BYTES: Final = 50
POINTS: Final = tuple(CRASH_POINTS)
IN_A_START: Final = (
    "control.",
    "recover.",
    "supervisor.bells",
    "supervisor.forked",
    "supervisor.locked",
    "supervisor.recovered",
)
IN_A_STOP: Final = ("offsets.", "supervisor.abort_removed", "supervisor.stopped")
AT_A_DEATH: Final = "supervisor.buried"
NTH_MAX: Final = {
    "ack.": 100,
    "append.": 100,
    "checkpoint.": 8,
    "cq.half_unit": 100,
    "cq.roll": 8,
    "dispatch.": 100,
    "flush.": 4,
    "index.": 4,
    "mark.": 8,
    "pop.": 2,
    "retention.": 2,
    "retry.": 2,
    "roll.": 3,
    "supervisor.forked": 8,
}
"""How often a point is passed at least, within a second or two; once where nothing is said."""
OPTIONS: Final[dict[str, Any]] = {
    "mapped_file_size_commit_log": 1 << 18,
    "mapped_file_size_consume_queue": 2_000,
    "max_index_num": 1_000,
    "max_message_size": 1 << 16,
    "default_topic_queue_nums": 2,
    "max_queues": 4_096,
    "flush_interval_commit_log": 20,
    "flush_disk_type": FlushDiskType.ASYNC_FLUSH.value,
}
RETENTION: Final[dict[str, Any]] = {
    "file_reserved_time": 0,
    "delete_when": ";".join(map(str, range(24))),
    "clean_resource_interval": 1_000,
    # Nothing is deleted before queues are durable, and one with a single dirty page is synced at the forced flush.
    "flush_consume_queue_thorough_interval": 1_000,
}


def points_of(seed: int) -> list[str]:
    """The points of a seed: all come in turn."""
    return [POINTS[(LIVES * seed + life) % len(POINTS)] for life in range(LIVES)]


class Kills:
    """The story of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"kills {seed}")
        self._heard = Heard()
        self._group = WarmGroup(folder / "store", **OPTIONS)
        self._points = points_of(seed)
        self._deletes = False

    def run(self) -> int:
        """Live, die, and look; how many kills at points there were. Raises AssertionError naming what is wrong."""
        try:
            for life, point in enumerate(self._points):
                self._live(f"{life}", point)
            self._end_well()
        finally:
            self._group.close()
        return len(self._points)

    def _live(self, life: str, point: str) -> None:
        group, chance = self._group, self._chance
        group.options |= {"flush_disk_type": self._flush(point).value}
        if point.startswith("retention."):
            group.options |= RETENTION
            self._deletes = True
        armed = {CRASH_VARIABLE: f"{point}:{chance.randint(1, _nth_max(point))}"}
        if point.startswith(IN_A_START):
            self._fill(life)
            _tear(group)
        if not group.comes_up(armed):
            # Recovery passes some points of the roles too.
            assert group.wait_ended() == -signal.SIGKILL, f"{armed}: the start has failed"
            return
        assert not point.startswith(IN_A_START), f"{armed} was not passed in a start"
        with self._customers(life):
            if point.startswith(IN_A_STOP):
                self._stop_and_die(armed)
                return
            if point == AT_A_DEATH:
                os.kill(group.pid(self._chance.choice(words_of.ROLES)), signal.SIGKILL)
                assert group.wait_ended() == -signal.SIGKILL, f"{armed} was not passed at the end of a role"
                return
            wait_until(self._has_died, POINT_TIMEOUT_S, f"{armed}")
            group.goes_on(GOES_ON)
            if chance.random() < KILL_ALL_CHANCE:
                group.kill()
                return
        assert group.stop() == 0, "the group did not stop in order"
        group.wait_free()

    def _stop_and_die(self, armed: dict[str, str]) -> None:
        """Where progress is saved: at the stop, unless the interval was just over."""
        group = self._group
        wait_until(lambda: group.words()["group_commits"] > 0, POINT_TIMEOUT_S, "progress")
        code = group.stop()
        assert code != 0 or self._has_died(), f"{armed} was not passed in a stop"
        group.wait_free()

    def _fill(self, life: str) -> None:
        """Something to recover: a life that ends all at once."""
        self._group.start()
        with self._customers(f"{life}-before"):
            self._group.goes_on(GOES_ON)
            self._group.kill()

    def _flush(self, point: str) -> FlushDiskType:
        # Under SYNC_FLUSH the writer syncs the log itself.
        kinds = [FlushDiskType.ASYNC_FLUSH] if point == "flush.after_msync" else list(FlushDiskType)
        return self._chance.choice(kinds)

    def _customers(self, life: str) -> Any:
        return customers(self._group.store, self._folder, life, CUSTOMERS, self._heard, self._seed)

    def _has_died(self) -> bool:
        words, process = self._group.words(), self._group.process
        return (process is not None and process.poll() is not None) or any(
            words[f"{role}.incarnation"] > 1 for role in words_of.ROLES
        )

    def _end_well(self) -> None:
        self._group.start()
        check(self._group, self._heard)
        assert self._heard.told, "nobody was told anything"
        check_stopped(self._group, whole=not self._deletes)


def _nth_max(point: str) -> int:
    return max((count for begin, count in NTH_MAX.items() if point.startswith(begin)), default=1)


def _tear(group: WarmGroup) -> None:
    """What a crash may leave too: a torn record at the end, the next segment begun, no mark durable yet."""
    for mark in group.paths.marks.iterdir():
        mark.unlink()
    size, end = OPTIONS["mapped_file_size_commit_log"], group.words()["written"]
    start = end // size * size
    with (group.paths.commit_log / segment_name(start)).open("r+b") as last:
        last.seek(end - start)
        # Whole records that were written and not published, behind a torn one, would be damage and not its end.
        last.write((b"\xff" * TORN_BYTES).ljust(size, b"\0")[: size - (end - start)])
    (group.paths.commit_log / segment_name(start + size)).write_bytes(bytes(size))
