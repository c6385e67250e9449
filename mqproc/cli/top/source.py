"""Snapshots of the group on a store, whichever supervisor it has by now. Reads shared files; asks nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqproc.config import Options
from mqproc.control import Control
from mqproc.errors import NotRunningError
from mqproc.io import StoreIO
from mqproc.metrics.collector import Collector
from mqproc.metrics.snapshot import snapshot
from mqproc.paths import StorePaths

ROWS_MAX = 10_000


class Source:
    """Opens what a group leaves in shared files, and opens it anew when another group has started."""

    def __init__(self, paths: StorePaths, options: Callable[[], Options]) -> None:
        """`options` are asked for again when the group's own have changed.

        Raises NotRunningError when no group has ever run on the store, CorruptStoreError.
        """
        self._io = StoreIO()
        self._paths = paths
        self._options = options
        self._settings = self._read_settings()
        self._open()

    def _open(self) -> None:
        self._control = Control.open(self._io, self._paths)
        self._collector = Collector(self._control, self._io, self._paths, self._options(), "", processes_every_s=0.0)

    def _read_settings(self) -> bytes:
        """The file that a group writes when it starts and when its options are reloaded; empty without one."""
        try:
            return self._io.read_file(self._paths.settings)
        except FileNotFoundError:
            return b""

    def look(self) -> dict[str, Any]:
        """The group now. Raises NotRunningError when the store itself has gone away."""
        try:
            if not self._control.is_current(self._io, self._paths):
                old = self._collector
                self._open()
                old.close()
                old.control.close()
            if (settings := self._read_settings()) != self._settings:
                self._settings, self._collector.options = settings, self._options()
            return snapshot(self._collector, self._paths, rows_max=ROWS_MAX)
        except FileNotFoundError as error:
            raise NotRunningError(f"{error.filename or self._paths.root}: the store has gone away") from None

    def close(self) -> None:
        """Let go of the files."""
        self._collector.close()
        self._control.close()
