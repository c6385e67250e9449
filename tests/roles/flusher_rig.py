"""A recovered store, its words and a clock by hand, on which roles run step by step."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from mqproc.config.options import Options
from mqproc.ipc.bell import EventBell
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.roles.role import Heartbeat, RoleContext
from mqproc.store.recovery.recovery import Recovery
from tests.roles.dispatching import append_and_dispatch
from tests.support.fakes import ManualClock
from tests.support.faulty_io import FaultyIO


class Rig:
    """What roles are given. `options` are changes of those of a small store."""

    def __init__(self, root: Path, **options: object) -> None:
        self.io = FaultyIO()
        self.clock = ManualClock()
        self.paths = StorePaths(root)
        self.io.make_folder(self.paths.own, 0o700)
        self.control = Control.create(self.io, self.paths, self.clock, os.getpid())
        sizes = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 2000}
        self.options = Options(**(sizes | options))  # type: ignore[arg-type]
        clean = not self.paths.abort.exists()
        Recovery(self.io, self.paths, self.options, self.control.words, lambda line: None, clean=clean).run()
        self.bells = {role: self._bell(role) for role in words_of.ROLES}
        self.io.tried()

    def _bell(self, role: str) -> EventBell:
        """Closed with whoever has it last: a process runs hundreds of tests."""
        bell = EventBell(self.control.cells, words_of.role_word(role, "sleeping"))
        weakref.finalize(bell, os.close, bell.fileno())
        return bell

    def context(self, role: str) -> RoleContext:
        heartbeat = Heartbeat(self.control, role, self.clock)
        return RoleContext(
            role, self.paths, self.options, self.control, self.io, self.clock, self.bells, {}, 1, heartbeat
        )

    def dispatch(self, messages: int) -> None:
        """Store and dispatch messages of one queue by the engine, as the writer and the dispatcher would."""
        append_and_dispatch(self.io, self.paths, self.options, self.control.words, messages)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))

    def taken(self, folder: str) -> int:
        """How many files of a folder were synced since the last question; the whole file system counts as one."""
        count = sum(path.endswith("*") or (f"/{folder}/" in path and path[-1] != "/") for path in self.io.synced)
        self.io.synced.clear()
        return count
