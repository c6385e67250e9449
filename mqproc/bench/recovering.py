"""`mqproc bench recovery` and `bench rebuild`: how long a store takes to come back, by how it was left.

A store is filled, then left in one way after the other; each time a whole new group starts on it, as a user would start
it, and recovery's own duration is read from the control file. What recovery says of its steps is shown, and beside it
what this machine could do at best: the dispatch kernel alone on a log in memory, fresh pages, the disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from mqproc.bench.limits import disk_rate, disk_read_rate, fresh_memory_rate
from mqproc.bench.load import Shape
from mqproc.bench.modes import load
from mqproc.bench.runs import Bench
from mqproc.cli.commands import SIZE, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Output, format_bytes
from mqproc.cli.spawned_group import start_detached, stop
from mqproc.config import MIB
from mqproc.errors import RequestTimeoutError
from mqproc.io import StoreIO
from mqproc.kernels.dispatch_buffers import DispatchBuffers
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.quantities import counted
from mqproc.store.queue_table import QueueTable
from mqproc.store.step_scan import ENTRIES_PER_RECORD, GOING_ON, STEP_BYTES_MAX, STEP_RECORDS_MAX

# Messages are sent in parts, so that the store is asked between them whether it is large enough.
_PART_MESSAGES: Final = 250_000
_END_S: Final = 30.0
# Of the log, for the kernel alone: larger than any cache.
KERNEL_BYTES: Final = 256 * MIB
_REPEATS: Final = 3

_bytes = click.option("--log-size", "log_bytes", type=SIZE, default="8GiB", show_default=True, help="Size of the log.")
_size = click.option("--size", type=SIZE, default="128", show_default=True, help="Bytes of a body.")
_topics = click.option("--topics", type=click.IntRange(1), default=1, show_default=True, help="Topics, in turns.")


class Leaving:
    """One store that is filled, left, and started again."""

    def __init__(self, store: Path, invocation: Invocation) -> None:
        self.paths = StorePaths(store)
        self._store = store
        self._invocation = invocation
        self._out: Output = invocation.out
        self._settings = ["metrics_port=0", *invocation.set_]
        self._lines: list[str] = []

    def start(self) -> dict[str, Any]:
        """Start a group; returns recovery's duration, that of the whole start, and recovery's lines."""
        self._lines.clear()
        began = time.perf_counter()
        start_detached(self._store, self._settings, self._invocation.config_file(), self._lines.append)
        ready_s = time.perf_counter() - began
        said = [line for line in self._lines if "recovery" in line]
        words = self.words()
        return {
            "recovery_seconds": round(words["recovery_us"] / 1e6, 4),
            "start_seconds": round(ready_s, 3),
            "steps": said,
        }

    def words(self) -> dict[str, int]:
        bench = Bench(self._store, self._out)
        try:
            return bench.words()
        finally:
            bench.close()

    def fill(self, shape: Shape, log_bytes: int) -> int:
        """Send until the log has this size and all is dispatched; returns the messages."""
        bench = Bench(self._store, self._out)
        messages = 0
        try:
            bench.create_topics(shape.topics, shape.queues)
            while bench.words()["written"] < log_bytes:
                load(bench, shape, _PART_MESSAGES)
                messages += _PART_MESSAGES
            bench.await_dispatch()
        finally:
            bench.close()
        return messages

    def stop(self) -> None:
        stop(self._store)

    def kill(self) -> None:
        """SIGKILL to the supervisor, which takes every role with it."""
        words = self.words()
        pids = [words["supervisor_pid"], *(words[f"{role}.pid"] for role in words_of.ROLES)]
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + _END_S
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > deadline:
                raise RequestTimeoutError(f"the killed group did not end in {_END_S:.0f} s")
            time.sleep(0.01)

    def forget_derived(self) -> None:
        """Remove ConsumeQueues and index, as after a loss."""
        for folder in (self.paths.consume_queue, self.paths.index):
            shutil.rmtree(folder)

    def read_log(self) -> None:
        """Bring the whole log into memory, of which the group has let go."""
        for segment in self.paths.commit_log.iterdir():
            with segment.open("rb", buffering=0) as file:
                block = bytearray(MIB)
                while file.readinto(block):
                    pass

    def derived_bytes(self) -> int:
        """What ConsumeQueues and index take on the disk."""
        folders = (self.paths.consume_queue, self.paths.index)
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return sum(StoreIO().allocated_of(path) for path in files)

    def machine(self) -> dict[str, int]:
        """What this machine could do at best, with this store's records."""
        rates = {
            "dispatch_kernel_records_per_s": dispatch_kernel_rate(self.paths),
            "fresh_memory_bytes_per_s": fresh_memory_rate(),
            "disk_bytes_per_s": disk_rate(self._store.parent),
            "disk_read_bytes_per_s": disk_read_rate(min(self.paths.commit_log.iterdir())),
        }
        return {name: round(rate) for name, rate in rates.items()}


def dispatch_kernel_rate(paths: StorePaths) -> float:
    """Records a second of the dispatch kernel alone, over the begin of a store's log in memory; the best of some."""
    segment = min(paths.commit_log.iterdir())
    log = np.fromfile(segment, np.uint8, KERNEL_BYTES)
    table = QueueTable(StoreIO(), paths.queues)
    buffers = DispatchBuffers(table.capacity, STEP_RECORDS_MAX, ENTRIES_PER_RECORD * STEP_RECORDS_MAX)
    best = 0.0
    for _ in range(_REPEATS):
        records, at, going_on = 0, 0, True
        started = time.perf_counter()
        while going_on and at < len(log):
            found = buffers.scan(
                log, table.bytes_view, table.cells, table.slots,
                start=at, limit=at + STEP_BYTES_MAX, stop=len(log), segment_start=int(segment.name),
            )  # fmt: skip
            records += found.records
            going_on = found.reason in GOING_ON and found.stopped_at > at
            at = found.stopped_at
        best = max(best, records / (time.perf_counter() - started))
    table.close()
    return best


def _measure(
    invocation: Invocation, shape: Shape, log_bytes: int, ways: Sequence[tuple[str, Callable[[Leaving], None]]]
) -> None:
    """Fill a store, leave it in each way, start it again, and print what that took."""
    out = invocation.out
    folder = Path(tempfile.mkdtemp(prefix="mqproc-bench-"))
    leaving = Leaving(folder / "store", invocation)
    found: dict[str, Any] = {}
    try:
        leaving.start()
        messages = leaving.fill(shape, log_bytes)
        size = leaving.words()["written"]
        out.note(f"{counted(messages, 'message')}, {format_bytes(size)} of log")
        for name, leave in ways:
            leave(leaving)
            found[name] = leaving.start() | {"messages": messages, "log_bytes": size}
            found[name]["messages_per_second"] = round(messages / max(found[name]["recovery_seconds"], 1e-6))
            if not out.is_json:
                _print(out, name, found[name])
        found["machine"] = leaving.machine()
        found["log_bytes_per_message"] = round(size / messages, 1)
        found["derived_bytes_per_message"] = round(leaving.derived_bytes() / messages, 1)
    finally:
        leaving.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if out.is_json:
        out.document(found)
    else:
        _print_machine(out, found)


def _print(out: Output, name: str, found: dict[str, Any]) -> None:
    out.line(
        f"{name}: recovery {found['recovery_seconds']:.3f} s, whole start {found['start_seconds']:.2f} s, "
        f"{found['messages_per_second']:,} records/sec of the whole log"
    )
    for line in found["steps"]:
        out.line(f"  {line}")


def _print_machine(out: Output, found: dict[str, Any]) -> None:
    machine, derived = found["machine"], found["derived_bytes_per_message"]
    out.line("this machine:")
    out.line(f"  dispatch kernel alone, log in memory: {machine['dispatch_kernel_records_per_s']:,} records/sec")
    for name, what, size in (
        ("fresh_memory", "queues and index", derived),
        ("disk", "queues and index", derived),
        ("disk_read", "the log", found["log_bytes_per_message"]),
    ):
        rate = machine[f"{name}_bytes_per_s"]
        out.line(
            f"  {name.replace('_', ' ')}: {rate / 1e9:.2f} GB/s, enough for {what} of "
            f"{rate / max(size, 1):,.0f} records/sec, {size:.0f} bytes each"
        )


def _shape(size: int, topics: int) -> Shape:
    return Shape(size, 1000, topics, 8, 1, 4)


@click.command(cls=Command)
@_bytes
@_size
@_topics
@pass_invocation
def recovery(invocation: Invocation, /, log_bytes: int, size: int, topics: int) -> None:
    """Fill a store, stop it in order and start it; then kill it under load and start it."""

    def stopped(leaving: Leaving) -> None:
        leaving.stop()

    def killed(leaving: Leaving) -> None:
        load(Bench(leaving.paths.root, invocation.out), _shape(size, topics), _PART_MESSAGES)
        leaving.kill()

    ways = [("after a clean stop", stopped), ("after kill -9", killed)]
    _measure(invocation, _shape(size, topics), log_bytes, ways)


@click.command(cls=Command)
@_bytes
@_size
@_topics
@pass_invocation
def rebuild(invocation: Invocation, /, log_bytes: int, size: int, topics: int) -> None:
    """Fill a store, stop it, remove ConsumeQueues and index, and see how fast a start makes them again."""

    def lost(leaving: Leaving) -> None:
        leaving.stop()
        leaving.forget_derived()

    def lost_in_memory(leaving: Leaving) -> None:
        lost(leaving)
        leaving.read_log()

    ways = [("queues and index removed", lost), ("the same, with the log in memory", lost_in_memory)]
    _measure(invocation, _shape(size, topics), log_bytes, ways)
