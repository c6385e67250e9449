"""Benchmarks of a whole store: recovery and rebuild at a start, and verify.

For recovery, a store is filled, then stopped in several ways. After each stop a new group starts on it, and the
duration of its recovery is read from the control file. The steps of recovery are printed beside the limits of
this machine: the dispatch kernel alone on a log in memory, fresh pages, the disk. Verify runs beside the rates at
which the store's files can be read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from mqproc.bench.clients import Shape
from mqproc.bench.limits import disk_rate, disk_read_rate, drop_from_memory, fresh_memory_rate, read_rate
from mqproc.bench.runs import BenchGroup, started_group, temporary_store
from mqproc.cli.admin.supervisor_client import start_detached, stop
from mqproc.cli.options import SIZE, Command, Invocation, pass_invocation
from mqproc.cli.output import Output
from mqproc.cli.store.repair import summary
from mqproc.errors import CorruptStoreError, RequestTimeoutError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.dispatch import DispatchBuffers
from mqproc.layout import control
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import CONTINUING, ENTRIES_PER_RECORD, STEP_BYTES_MAX, STEP_RECORDS_MAX
from mqproc.util.units import MIB, counted, format_bytes

if TYPE_CHECKING:
    from mqproc.config.options import Options
    from mqproc.store.verify import VerifyResult

# The log's size is checked after each part.
_PART_MESSAGES: Final = 250_000
_END_S: Final = 30.0
# Bytes of log for the kernel alone: larger than any cache.
KERNEL_BYTES: Final = 256 * MIB
_REPEATS: Final = 3


class StoreCycle:
    """A store that is filled once, then stopped in several ways and started again."""

    def __init__(self, store: Path, invocation: Invocation) -> None:
        self.paths = StorePaths(store)
        self._derived = self.paths.consume_queue, self.paths.index
        self._store = store
        self._invocation = invocation
        self._settings = ["metrics_port=0", *invocation.set_]

    def start(self) -> dict[str, Any]:
        """Start a group; durations of recovery and of the whole start, and recovery's log lines."""
        lines: list[str] = []
        began = time.perf_counter()
        start_detached(self._store, self._settings, self._invocation.config_file(), lines.append)
        ready_s = time.perf_counter() - began
        return {
            "recovery_seconds": round(self.words()["recovery_us"] / 1e6, 4),
            "start_seconds": round(ready_s, 3),
            "steps": [line for line in lines if "recovery" in line],
        }

    def words(self) -> dict[str, int]:
        with closing(BenchGroup(self._store)) as bench:
            return bench.words()

    def fill(self, shape: Shape, log_bytes: int) -> int:
        """Send until the log has a size and everything is dispatched; the number of messages."""
        messages = 0
        with closing(BenchGroup(self._store)) as bench:
            bench.create_topics(shape.topics, shape.queues)
            while bench.words()["written"] < log_bytes:
                bench.load(shape, _PART_MESSAGES)
                messages += _PART_MESSAGES
            bench.await_dispatch()
        return messages

    def stop(self) -> None:
        stop(self._store)

    def kill_under_load(self, shape: Shape) -> None:
        """Send messages, and kill the supervisor with SIGKILL, which ends all roles."""
        BenchGroup(self._store).load(shape, _PART_MESSAGES)
        words = self.words()
        pids = [words["supervisor_pid"], *(words[f"{role}.pid"] for role in control.ROLES)]
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + _END_S
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > deadline:
                raise RequestTimeoutError(f"the killed group did not end in {_END_S:.0f} s")
            time.sleep(0.01)

    def stop_and_lose_derived(self, *, reads_log: bool = False) -> None:
        """Stop, and remove ConsumeQueues and index.

        With `reads_log`, read the log into the page cache, from which the group has dropped it.
        """
        self.stop()
        for folder in self._derived:
            shutil.rmtree(folder)
        if reads_log:
            read_rate(self._store)

    def derived_bytes(self) -> int:
        """Allocated bytes of ConsumeQueues and index."""
        files = [path for folder in self._derived for path in folder.rglob("*") if path.is_file()]
        return sum(StoreIO().allocated_of(path) for path in files)

    def machine(self) -> dict[str, int]:
        """This machine's limits, with this store's records."""
        rates = {
            "dispatch_kernel_records_per_s": dispatch_kernel_rate(self.paths),
            "fresh_memory_bytes_per_s": fresh_memory_rate(),
            "disk_bytes_per_s": disk_rate(self._store.parent),
            "disk_read_bytes_per_s": disk_read_rate(min(self.paths.commit_log.iterdir())),
        }
        return {name: round(rate) for name, rate in rates.items()}


def dispatch_kernel_rate(paths: StorePaths) -> float:
    """Records per second of the dispatch kernel alone, on a log in memory; best round."""
    segment = min(paths.commit_log.iterdir())
    log = np.fromfile(segment, np.uint8, KERNEL_BYTES)
    table = QueueTable(StoreIO(), paths.queues)
    buffers = DispatchBuffers(table.capacity, STEP_RECORDS_MAX, ENTRIES_PER_RECORD * STEP_RECORDS_MAX)
    best = 0.0
    for _ in range(_REPEATS):
        records, at, continues = 0, 0, True
        started = time.perf_counter()
        while continues and at < len(log):
            found = buffers.scan(
                log, table.bytes_view, table.cells, table.slots,
                start=at, limit=at + STEP_BYTES_MAX, stop=len(log), segment_start=int(segment.name),
            )  # fmt: skip
            records += found.records
            continues = found.reason in CONTINUING and found.stopped_at > at
            at = found.stopped_at
        best = max(best, records / (time.perf_counter() - started))
    table.close()
    return best


Ways = dict[str, Callable[[StoreCycle], None]]
"""Ways to stop a store, by name."""


def _measure_starts(invocation: Invocation, shape: Shape, log_bytes: int, ways: Ways) -> None:
    """Fill a store; stop it in each way and start it again; print the durations."""
    out = invocation.out
    found: dict[str, Any] = {}
    with temporary_store() as store:
        cycle = StoreCycle(store, invocation)
        try:
            cycle.start()
            messages = cycle.fill(shape, log_bytes)
            size = cycle.words()["written"]
            out.note(f"{counted(messages, 'message')}, {format_bytes(size)} of log")
            for name, leave in ways.items():
                leave(cycle)
                start = found[name] = cycle.start() | {"messages": messages, "log_bytes": size}
                rate = start["messages_per_second"] = round(messages / max(start["recovery_seconds"], 1e-6))
                if not out.is_json:
                    out.line(
                        f"{name}: recovery {start['recovery_seconds']:.3f} s, whole start {start['start_seconds']:.2f} "
                        f"s, {rate:,} records/sec of the whole log"
                    )
                    for line in start["steps"]:
                        out.line(f"  {line}")
            found["machine"] = cycle.machine()
            found["log_bytes_per_message"] = round(size / messages, 1)
            found["derived_bytes_per_message"] = round(cycle.derived_bytes() / messages, 1)
        finally:
            cycle.stop()
    if out.is_json:
        out.document(found)
    else:
        _print_machine(out, found)


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


def _start_command(function: Callable[[Invocation, Shape, int], None]) -> click.Command:
    @click.command(function.__name__, cls=Command, help=function.__doc__)
    @click.option("--log-size", "log_bytes", type=SIZE, default="8GiB", show_default=True, help="Size of the log.")
    @click.option("--size", type=SIZE, default="128", show_default=True, help="Bytes of a body.")
    @click.option("--topics", type=click.IntRange(1), default=1, show_default=True, help="Topics, in turns.")
    @pass_invocation
    def command(invocation: Invocation, /, log_bytes: int, size: int, topics: int) -> None:
        function(invocation, Shape(size, 1000, topics, 8, 1, 4), log_bytes)

    return command


@_start_command
def recovery(invocation: Invocation, shape: Shape, log_bytes: int) -> None:
    """Fill a store; start it after a clean stop, then after kill -9 under load."""

    ways: Ways = {"after a clean stop": StoreCycle.stop, "after kill -9": lambda cycle: cycle.kill_under_load(shape)}
    _measure_starts(invocation, shape, log_bytes, ways)


@_start_command
def rebuild(invocation: Invocation, shape: Shape, log_bytes: int) -> None:
    """Measure how fast a start rebuilds removed ConsumeQueues and index."""

    ways: Ways = {
        "queues and index removed": StoreCycle.stop_and_lose_derived,
        "the same, with the log in memory": lambda cycle: cycle.stop_and_lose_derived(reads_log=True),
    }
    _measure_starts(invocation, shape, log_bytes, ways)


# Verify

# Approximate bytes of a record besides its body, to derive the number of messages from a log size.
_OVERHEAD_BYTES = 190
_VERIFY_ROUNDS = 3


@click.command(cls=Command)
@click.option("--log-size", type=SIZE, default="2GiB", show_default=True, help="Log of the temporary store.")
@click.option("--size", type=SIZE, default="1KiB", show_default=True, help="Bytes of a body.")
@click.option("--topics", type=click.IntRange(1), default=4, show_default=True, help="Topics, in turns.")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Queues of a topic.")
@click.option("--keys", type=click.IntRange(0), default=1, show_default=True, help="Keys of a message.")
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [one for each processor]")
@click.option(
    "--cold/--no-cold",
    default=True,
    show_default=True,
    help="Measure from the disk, too: with the files dropped from memory.",
)
@pass_invocation
def verify(
    invocation: Invocation, log_size: int, size: int, topics: int, queues: int, keys: int, jobs: int | None, cold: bool
) -> None:
    """Verify a store, beside the rate at which its files can be read.

    A group fills a temporary store and stops, or --store names one, which is only read.
    """
    out = invocation.out
    shape = Shape(size, 1000, topics, queues, keys, 4)
    with filled_store(invocation, shape, log_size) as store:
        found = measure(store, invocation.store_options(StoreIO(), StorePaths(store)), out, jobs=jobs or 0, cold=cold)
    if out.is_json:
        out.document(found)
    else:
        _print_verified(out, found)


@contextlib.contextmanager
def filled_store(invocation: Invocation, shape: Shape, log_bytes: int) -> Iterator[Path]:
    """The store of --store, or a temporary one that a group has filled."""
    if invocation.store is not None:
        yield invocation.store.absolute()
        return
    settings = ["metrics_port=0", *invocation.set_]
    with temporary_store() as store:
        with started_group(store, settings, invocation.config_file()) as bench:
            bench.prepare(shape, max(1000, log_bytes // (shape.size + _OVERHEAD_BYTES)))
        yield store


def measure(store: Path, options: Options, out: Output, *, jobs: int, cold: bool) -> dict[str, Any]:
    """Rates of verify from memory and from the disk, beside the machine's limits.

    Raises CorruptStoreError for a damaged store, which verify reads differently.
    """
    found: dict[str, Any] = {}
    machine: dict[str, float] = {}
    if cold:
        machine, from_disk = _cold_rounds(store, options, jobs)
        found["from_disk"] = _figures(from_disk)
        found["share_of_disk_rate"] = round(from_disk.bytes_per_second / max(machine.values()), 3)
    best = max((_run_verify(store, options, jobs) for _ in range(_VERIFY_ROUNDS)), key=lambda run: run.bytes_per_second)
    machine["read_from_memory_bytes_per_s"] = max(read_rate(store) for _ in range(2))
    parts = {name: value for name, value in summary(best).items() if name in ("records", "units", "index_entries")}
    rates = {name: round(value) for name, value in machine.items()}
    return {**parts, "from_memory": _figures(best), **found, "machine": rates, "store": str(store)}


def _cold_rounds(store: Path, options: Options, jobs: int) -> tuple[dict[str, float], VerifyResult]:
    """Median rates of reads and verify, which alternate since a disk's rate varies."""
    readers = {
        "sequential_read_bytes_per_s": 1,
        "sequential_read_all_processors_bytes_per_s": len(os.sched_getaffinity(0)),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    runs = []
    for _ in range(_VERIFY_ROUNDS):
        for name, count in readers.items():
            drop_from_memory(store)
            rates[name].append(read_rate(store, count))
        drop_from_memory(store)
        runs.append(_run_verify(store, options, jobs))
    middle = sorted(runs, key=lambda run: run.bytes_per_second)[_VERIFY_ROUNDS // 2]
    return {name: statistics.median(found) for name, found in rates.items()}, middle


def _run_verify(store: Path, options: Options, jobs: int) -> VerifyResult:
    from mqproc.store.verify import verify_store

    found = verify_store(StoreIO(), StorePaths(store), options, jobs=jobs)
    if not found.clean:
        raise CorruptStoreError(f"{store}: damaged; mqproc store verify shows where")
    return found


def _figures(found: VerifyResult) -> dict[str, Any]:
    return {
        "bytes": found.size,
        "seconds": round(found.seconds, 4),
        "bytes_per_second": round(found.bytes_per_second),
        "records_per_second": round(found.records / max(found.seconds, 1e-9)),
    }


def _print_verified(out: Output, found: dict[str, Any]) -> None:
    for name in ("from_memory", "from_disk"):
        if name in found:
            figures = found[name]
            out.line(
                f"verified {name.replace('_', ' ')}: {figures['bytes_per_second'] / 1e9:.2f} GB/s, "
                f"{figures['records_per_second']:,} records/s, {format_bytes(figures['bytes'])} "
                f"in {figures['seconds']:.2f} s"
            )
    parts = (("records", "record"), ("units", "unit"), ("index_entries", "index entry"))
    out.line(", ".join(counted(found[name], noun) for name, noun in parts))
    out.line("this machine:")
    for name, value in found["machine"].items():
        out.line(f"  {name.removesuffix('_bytes_per_s').replace('_', ' ')}: {value / 1e9:.2f} GB/s")
    if "share_of_disk_rate" in found:
        out.line(f"verified from disk at {found['share_of_disk_rate']:.0%} of the faster sequential read")
