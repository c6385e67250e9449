"""Attempts of tasks that send: one at a time, and the rows of complete writes.

Spark runs a task several times: after an error, after the loss of an executor that had done it, and twice at once with
speculation. Python gets the attempt number of a task but not of its stage, so it cannot recognise a first attempt. A
task that Spark has given up may still be sending. So each attempt waits for its turn and then looks for rows that
others have stored.

A task cannot know that its rows have ended: when its input fails or the task is killed, the rows end as after the last
row. Only the driver has results of tasks that are done, so only the driver records a write as complete.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from mqproc.errors import MqprocError, NotRunningError, StoreAccessError
from mqproc.io.store_io import StoreIO, reason_of
from mqproc.paths import StorePaths
from mqproc.util.file_lock import try_lock_byte

RowCounts = Mapping[int, Mapping[str, int]]
"""Rows of each partition by topic."""

_NOTICE_S: Final = 60.0
_RETRY_S: Final = 0.01
# Keeps lock offsets below 2^63.
_OFFSET_BYTES: Final = 7
# Records of older writes are removed.
_WRITES_MAX: Final = 1000


class SendTurn:
    """The exclusive right to send the rows of one task, until `close`. It ends with the process."""

    def __init__(self, store: str, identity: str) -> None:
        """Wait for the turn; `identity` names the task in all its attempts.

        Raises NotRunningError when no group has run, StoreAccessError when this user may not write to the store.
        """
        paths = StorePaths(Path(store))
        self._io = StoreIO()
        try:
            self._fd = self._io.open(paths.spark_lock, write=True, create=True, mode=0o600)
        except FileNotFoundError:
            raise NotRunningError(
                f"{paths.root}: no group has run on a store here; rows can be written to a running store: mqproc up"
            ) from None
        except OSError as error:
            raise _access_error(paths.spark_lock, error) from None
        byte = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:_OFFSET_BYTES])
        began_s = time.monotonic()
        is_told = False
        while not try_lock_byte(self._fd, byte):
            if not is_told and time.monotonic() - began_s > _NOTICE_S:
                is_told = True
                print(
                    f"mqproc: {paths.root}: this task waits while another attempt sends the same rows, for "
                    f"{_NOTICE_S:g} s so far",
                    file=sys.stderr,
                )
            time.sleep(_RETRY_S)

    def close(self) -> None:
        self._io.close(self._fd)


class CompleteWrites:
    """The complete writes of a store that have a `writeId`: the newest 1,000, with their rows."""

    def __init__(self, store: str) -> None:
        self._folder = StorePaths(Path(store)).spark_writes
        self._io = StoreIO()

    def add(self, write_id: str, rows: RowCounts) -> None:
        """Record a write as complete, where the driver has the store's folder.

        Raises MqprocError when the record cannot be written; the write can be repeated.
        """
        if not self._io.exists(self._folder.parent):
            return
        try:
            self._io.make_folder(self._folder)
            self._io.write_file_atomically(self._path(write_id), msgspec.json.encode(rows), 0o600)
            self._remove_old()
        except OSError as error:
            raise MqprocError(
                f"{self._folder}: {reason_of(error)}; all rows are stored, but the write is not recorded as complete: "
                "repeat it under the same writeId"
            ) from error

    def rows(self, write_id: str) -> RowCounts | None:
        """The rows of a complete write; None for a write that is not known to be complete.

        Raises StoreAccessError.
        """
        path = self._path(write_id)
        try:
            return self._io.read_json(path, dict[int, dict[str, int]])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _access_error(path, error) from None
        except msgspec.MsgspecError as error:
            raise StoreAccessError(f"{path}: {error}; remove it if the write {write_id!r} is not repeated") from None

    def _path(self, write_id: str) -> Path:
        return self._folder / f"{hashlib.sha256(write_id.encode()).hexdigest()[:32]}.json"

    def _remove_old(self) -> None:
        names = self._io.names(self._folder)
        if len(names) <= _WRITES_MAX:
            return
        ages = sorted((self._age(name), name) for name in names)
        for _age, name in ages[: len(names) - _WRITES_MAX]:
            self._io.unlink(self._folder / name)

    def _age(self, name: str) -> int:
        try:
            return os.stat(self._folder / name).st_mtime_ns
        except FileNotFoundError:
            # Another driver has removed it.
            return 0


def _access_error(path: Path, error: OSError) -> StoreAccessError:
    user = "; only the user of the store's group can write to it" if isinstance(error, PermissionError) else ""
    return StoreAccessError(f"{path}: {reason_of(error)}{user}")
