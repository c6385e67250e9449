"""A disk that is full for a while, and a disk that fails: real ones, under a real group under load."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, Final

from mqproc.config.options import FlushDiskType
from mqproc.errors import DiskFullError, MqprocError, SendOutcomeUnknownError
from mqproc.layout import control as words_of
from tests.conftest import wait_until
from tests.outages.checks import check, check_stopped
from tests.outages.customers import TOPICS, Heard, customers
from tests.outages.disks import Disk, SmallDevice
from tests.outages.faults import recovered
from tests.outages.kills import OPTIONS
from tests.outages.warm_group import WarmGroup

CUSTOMERS: Final = 2
GOES_ON: Final = 200
MESSAGE_BYTES: Final = 10_000
TIMEOUT_S: Final = 60.0
IMPATIENT_S: Final = 1.0
FULL_BYTES: Final = 64 << 20
FULL_TIMES: Final = 3
FULL_S: Final = 0.3
LEFT_BYTES_MAX: Final = 1 << 20
FAILING_BYTES: Final = 192 << 20
TAKEN_BYTES_MAX: Final = 4 << 20
# Nothing is deleted to make room, whatever the disk says.
KEPT: Final[dict[str, Any]] = {"clean_file_forcibly_enable": "false"}


class FullDisk:
    """The story of a seed: the disk is full three times, and roles are killed meanwhile."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"full {seed}")
        self._heard = Heard()
        self._disk = Disk(folder / "disk", folder / "image", FULL_BYTES)
        flush = self._chance.choice(list(FlushDiskType))
        options = OPTIONS | KEPT | {"flush_disk_type": flush.value}
        self._group = WarmGroup(self._disk.folder / "store", **options)
        self._group.output = folder / "store.log"

    def run(self) -> int:
        """How often it was full. Raises AssertionError naming what is wrong."""
        try:
            self._group.start()
            with customers(self._group.store, self._folder, "0", CUSTOMERS, self._heard, self._seed):
                for _ in range(FULL_TIMES):
                    self._be_full()
            check(self._group, self._heard)
            check_stopped(self._group, whole=True)
        finally:
            self._group.close()
            self._disk.unmount()
        return FULL_TIMES

    def _be_full(self) -> None:
        """Sends are refused, reads go on, a role that is killed comes back; with room again all goes on."""
        group, ballast = self._group, self._disk.folder / "ballast"
        group.goes_on(GOES_ON)
        with group.client(timeout=TIMEOUT_S) as client:
            name = f"kept-{len(self._heard.sent)}"
            self._heard.sent.add(name)
            kept = client.send(TOPICS[0], name.encode())
            self._disk.fill(ballast, self._chance.randrange(LEFT_BYTES_MAX))
            self._send_until_refused()
            assert client.get(kept.message_id).body == name.encode()
            if self._chance.random() < 0.7:
                self._kill_one()
            time.sleep(FULL_S)
            ballast.unlink()
        group.goes_on(GOES_ON)
        group.wait_dispatched()

    def _send_until_refused(self) -> None:
        """A client asks again what it may, so it is told after its timeout. Raises what else is answered."""
        with self._group.client(timeout=IMPATIENT_S) as client:
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:
                try:
                    client.send("full", b"x" * MESSAGE_BYTES)
                except DiskFullError:
                    return
                except MqprocError as error:
                    if not error.retryable and not isinstance(error, SendOutcomeUnknownError):
                        raise
        raise AssertionError(f"a full disk takes messages for {TIMEOUT_S:g} s")

    def _kill_one(self) -> None:
        role = self._chance.choice(words_of.ROLES)
        pid = self._group.pid(role)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._group.pid(role) != pid, TIMEOUT_S, f"another {role} on a full disk")


class FailingDisk:
    """The story of a seed: a device that takes no more writes, so syncs fail, and lose what they were for."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._chance = random.Random(f"eio {seed}")
        self._heard = Heard()
        self._flush = self._chance.choice(list(FlushDiskType))
        self._device = SmallDevice(folder / "device")
        self._disk = Disk(folder / "disk", self._device.folder / "image", FAILING_BYTES)
        self._group = WarmGroup(self._disk.folder / "store", **OPTIONS | KEPT | {"flush_disk_type": self._flush.value})
        self._group.output = folder / "store.log"

    def run(self) -> int:
        """How often it failed. Raises AssertionError naming what is wrong."""
        group = self._group
        try:
            group.start()
            with customers(group.store, self._folder, "0", CUSTOMERS, self._heard, self._seed):
                group.goes_on(GOES_ON)
                self._device.leave(self._chance.randrange(TAKEN_BYTES_MAX))
                wait_until(self._has_failed, TIMEOUT_S, "a failed sync")
                time.sleep(FULL_S)
                if self._flush is FlushDiskType.ASYNC_FLUSH:
                    words = group.words()
                    self._heard.durable = max(words["writer_synced"], words["flusher_synced"])
            group.close()
            self._disk.unmount()
            self._device.mend()
            self._disk.mount()
            recovered(group, self._heard)
            with customers(group.store, self._folder, "1", CUSTOMERS, self._heard, self._seed):
                group.goes_on(GOES_ON)
            check_stopped(group, whole=True)
        finally:
            group.close()
            self._disk.unmount()
            self._device.unmount()
        return 1

    def _has_failed(self) -> bool:
        """A sync has failed; or the kernel has made the file system read-only, and the group has ended."""
        words, process = self._group.words(), self._group.process
        ended = process is not None and process.poll() is not None
        return ended or any(value for word, value in words.items() if word.endswith("_sync_errno"))
