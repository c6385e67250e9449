"""A control file as a running group would have it, for tests of what reads it."""

from __future__ import annotations

import os
from pathlib import Path

from mqproc.control import Control
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.shm.clock import Clock


def make_control(store: Path) -> Control:
    """A ready group: 9,000 bytes and 90 messages written, 60 of them dispatched, half of the bytes flushed."""
    paths = StorePaths(store)
    control = Control.create(StoreIO(), paths, Clock(), os.getpid())
    now_ns = Clock().monotonic_ns()
    control.store(layout.GROUP_STATE, layout.GROUP_READY)
    for role in layout.ROLES:
        control.store(layout.supervised_word(role, "supervised"), layout.RUNNING)
        control.store(layout.supervised_word(role, "pid"), os.getpid())
        control.store(layout.role_word(role, "state"), layout.STATE_RUNNING)
        control.store(layout.role_word(role, "heartbeat_ns"), now_ns)
    for index, value in (
        (layout.WRITTEN, 9000),
        (layout.WRITTEN_STORE_TIMESTAMP_MS, 1_700_000_002_500),
        (layout.APPENDED_MESSAGES, 90),
        (layout.FLUSHER_SYNCED, 4500),
        (layout.DISPATCHED, 6000),
        (layout.DISPATCHED_STORE_TIMESTAMP_MS, 1_700_000_001_000),
        (layout.DISPATCHED_MESSAGES, 60),
        (layout.DISK_USED_BYTES, 30),
        (layout.DISK_FREE_BYTES, 70),
    ):
        control.store(index, value)
    return control
