"""Single calls of storage that fail in a real group under load, and all later ones of a kind."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Final

from mqproc.config.options import FlushDiskType
from mqproc.io.fault_injection import FAULT_VARIABLE
from tests.outages.checks import check, check_stopped
from tests.outages.customers import Heard, customers
from tests.outages.kills import OPTIONS
from tests.outages.warm_group import WarmGroup

LIVES: Final = 3
CUSTOMERS: Final = 2
LOAD_S: Final = 0.7
STICKY_CHANCE: Final = 0.25
FAULTS: Final = {
    "allocate": ("ENOSPC", 30),
    "make_folder": ("ENOSPC", 20),
    "map": ("ENOMEM", 40),
    "open": ("EMFILE", 200),
    "pread": ("EIO", 200),
    "pread_into": ("EIO", 40),
    "pwrite": ("ENOSPC", 400),
    "rename": ("EIO", 15),
    "set_size": ("ENOSPC", 20),
    "sync": ("EIO", 60),
    "sync_file_system": ("EIO", 3),
    "sync_folder": ("EIO", 30),
    "unlink": ("EIO", 20),
    "zero": ("EIO", 5),
}
"""By call: the error, and among how many calls one is chosen."""


class Faults:
    """The story of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"faults {seed}")
        self._heard = Heard()
        flush = self._chance.choice(list(FlushDiskType))
        self._group = WarmGroup(folder / "store", **OPTIONS | {"flush_disk_type": flush.value})

    def run(self) -> int:
        """Fail, start again, look; how many faults there were. Raises AssertionError naming what is wrong."""
        try:
            for life in range(LIVES):
                self._live(f"{life}")
                recovered(self._group, self._heard)
                check_stopped(self._group, whole=True)
        finally:
            self._group.close()
        return LIVES

    def _live(self, life: str) -> None:
        """A start with the fault, and load if it comes so far; whatever becomes of it, all of it is killed."""
        call = self._chance.choice(sorted(FAULTS))
        errno, calls = FAULTS[call]
        fault = f"{call}:{self._chance.randint(1, calls)}:{errno}"
        fault += ":sticky" if self._chance.random() < STICKY_CHANCE else ""
        group = self._group
        if group.comes_up({FAULT_VARIABLE: fault}):
            with customers(group.store, self._folder, life, CUSTOMERS, self._heard, self._seed):
                time.sleep(LOAD_S)
                group.kill()
        else:
            group.wait_ended()


def recovered(group: WarmGroup, heard: Heard) -> None:
    """Start again, after a repair where a failed sync asks for one, and look."""
    if group.paths.read_only.exists():
        flags = [part for name, value in group.options.items() for part in ("--set", f"{name}={value}")]
        assert group.run("store", "repair", str(group.store), "--execute", *flags) == 0, "repair failed"
    group.start()
    check(group, heard)
