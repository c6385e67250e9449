"""Tasks with the same rows take turns: one that Spark has given up may live on and send while the next one looks.

    mqproc/spark.lock   ·····█·······█···    a byte for each write and partition, locked while its rows are sent

The lock goes with the process that has it, however that ends. As a store's sockets are reached on its machine only, so
is this file.
"""

from __future__ import annotations

import hashlib
import time
from typing import Final

from mqproc.errors import NotRunningError, StoreBusyError
from mqproc.io import StoreIO
from mqproc.ipc.lock import try_lock
from mqproc.paths import StorePaths

_PATIENCE_S: Final = 60.0
_RETRY_S: Final = 0.01
# Offsets of bytes are below 2^63.
_OFFSET_BYTES: Final = 7


class Turn:
    """The right to send the rows of one partition of a write, until `close`."""

    def __init__(self, paths: StorePaths, identity: str) -> None:
        """`identity` names write and partition.

        Raises StoreBusyError when another task keeps it for long, NotRunningError where no group has ever run.
        """
        self._io = StoreIO()
        try:
            self._fd = self._io.open(paths.spark_lock, write=True, create=True, mode=0o600)
        except FileNotFoundError:
            raise NotRunningError(
                f"{paths.root}: no group has run on a store there; rows are written to one that runs: mqproc up"
            ) from None
        byte = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:_OFFSET_BYTES])
        deadline = time.monotonic() + _PATIENCE_S
        while not try_lock(self._fd, byte):
            if time.monotonic() > deadline:
                self.close()
                raise StoreBusyError(
                    f"{paths.root}: another task has been sending the rows of this partition for {_PATIENCE_S:g} s"
                )
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Let the next one go on."""
        self._io.close(self._fd)
