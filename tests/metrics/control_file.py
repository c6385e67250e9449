"""A store as a running group would have it, for tests of what reads its control file and queue table."""

from __future__ import annotations

import os
from pathlib import Path

from mqproc.config import Options, load_options
from mqproc.control import Control
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.layout import queue_table
from mqproc.metrics.collector import Collector
from mqproc.paths import StorePaths
from mqproc.shm.clock import Clock
from mqproc.store.queue_table import QueueTable

IO = StoreIO()


def make_control(store: Path) -> Control:
    """A ready group: 9,000 bytes and 90 messages written, 60 of them dispatched, half of the bytes flushed."""
    paths = StorePaths(store)
    control = Control.create(IO, paths, Clock(), os.getpid())
    now_ns = Clock().monotonic_ns()
    control.store(layout.GROUP_STATE, layout.GROUP_READY)
    for role in layout.ROLES:
        control.store(layout.supervised_word(role, "supervised"), layout.RUNNING)
        control.store(layout.supervised_word(role, "pid"), os.getpid())
        control.store(layout.role_word(role, "state"), layout.STATE_RUNNING)
        control.store(layout.role_word(role, "heartbeat_ns"), now_ns)
    for index, value in (
        (layout.WRITTEN, 9000),
        (layout.WRITTEN_NS, now_ns),
        (layout.WRITTEN_STORE_TIMESTAMP_MS, 1_700_000_002_500),
        (layout.APPENDED_MESSAGES, 90),
        (layout.FLUSHER_SYNCED, 4500),
        (layout.ALL_FLUSHED_NS, now_ns - 7_000_000_000),
        (layout.DISPATCHED, 6000),
        (layout.DISPATCHED_STORE_TIMESTAMP_MS, 1_700_000_001_000),
        (layout.DISPATCHED_MESSAGES, 60),
        (layout.DISK_USED_BYTES, 30),
        (layout.DISK_FREE_BYTES, 70),
    ):
        control.store(index, value)
    return control


def make_queues(store: Path, topics: int, queues: int, messages: int) -> None:
    """A queue table with so many topics, queues each, and messages a queue, of which the first two have expired.

    Of each queue of the nth topic n messages have been handed out.
    """
    paths = StorePaths(store)
    paths.own.mkdir(parents=True, exist_ok=True)
    table = QueueTable.create(IO, paths.queues, topics * queues)
    for topic in range(topics):
        for queue_id in range(queues):
            number = table.create_queue(f"topic-{topic}", queue_id, messages, 2)
            table.store(number, queue_table.DELIVERED, topic + 1)
            table.store(number, queue_table.LAST_STORE_TIMESTAMP_MS, 1_700_000_000_000 + topic)
    table.close()


def options(**changes: object) -> Options:
    """The defaults, but for what is said."""
    return load_options(flags=[f"{name}={value}" for name, value in changes.items()], environment={})


def make_collector(store: Path, control: Control, **changes: object) -> Collector:
    """A collector over such a store."""
    return Collector(control, IO, StorePaths(store), options(**changes), "1.2.3")
