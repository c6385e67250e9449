"""Power cuts of a real group on a real file system, five a seed: under load, and while a start recovers."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Final

from mqproc.config.options import FlushDiskType
from mqproc.ipc.bell import semaphore_names, unlink_semaphore
from tests.outages.checks import check, check_stopped
from tests.outages.customers import Heard, customers, hold
from tests.outages.disks import Disk
from tests.outages.kills import OPTIONS
from tests.outages.warm_group import WarmGroup

LIVES: Final = 5
CUSTOMERS: Final = 2
DISK_BYTES: Final = 256 << 20
LOAD_S_MAX: Final = 1.0
MESSAGES_MIN: Final = 200
START_CUT_CHANCE: Final = 0.3
START_S_MAX: Final = 0.5


class Cuts:
    """The story of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"cuts {seed}")
        self._flush = self._chance.choice(list(FlushDiskType))
        self._heard = Heard()
        self._disk = Disk(folder / "disk", folder / "image", DISK_BYTES)
        # More of the log is in memory only when the flusher comes seldom.
        interval = {"flush_interval_commit_log": self._chance.choice([20, 200, 500])}
        options = OPTIONS | interval | {"flush_disk_type": self._flush.value}
        self._group = WarmGroup(self._disk.folder / "store", **options)
        self._group.output = folder / "store.log"

    def run(self) -> int:
        """Lose power, look; how often. Raises AssertionError naming what is wrong."""
        cuts = 0
        try:
            for life in range(LIVES):
                if life and self._chance.random() < START_CUT_CHANCE:
                    self._cut_start()
                    cuts += 1
                self._live(f"{life}")
                cuts += 1
            self._group.start()
            check(self._group, self._heard)
            assert self._heard.told, "nobody was told anything"
            check_stopped(self._group, whole=True)
        finally:
            self._group.close()
            self._disk.unmount()
        return cuts

    def _live(self, life: str) -> None:
        """A start, which must have kept all that was durable, load, and the cut."""
        group = self._group.start()
        check(group, self._heard)
        with customers(group.store, self._folder, life, CUSTOMERS, self._heard, self._seed) as at_work:
            group.goes_on(MESSAGES_MIN)
            time.sleep(self._chance.random() * LOAD_S_MAX)
            self._stir()
            # A sync that is under way in the moment of the cut may say that it is done, as it cannot without power.
            hold(at_work)
            if self._flush is FlushDiskType.ASYNC_FLUSH:
                # Read before the cut: what is synced by then must stay.
                words = group.words()
                self._heard.durable = max(words["writer_synced"], words["flusher_synced"])
            self._disk.cut()
            group.close()
        self._disk.unmount()
        self._disk.mount()

    def _cut_start(self) -> None:
        """The power goes away while a start recovers."""
        self._group.begin()
        time.sleep(self._chance.random() * START_S_MAX)
        self._stir()
        store_id = self._group.words().get("store_id", 0)
        self._disk.cut()
        self._group.close()
        # The next start knows them no more where the power has taken the control file.
        for name in semaphore_names(store_id):
            unlink_semaphore(name)
        self._disk.unmount()
        self._disk.mount()

    def _stir(self) -> None:
        if self._chance.random() < 0.7:
            found = sorted(Path(folder, name) for folder, _, names in os.walk(self._group.store) for name in names)
            files = [path for path in found if path.is_file()]
            self._disk.stir(self._chance, self._chance.sample(files, min(len(files), 10)))
