"""`mqproc bench verify`: verify a store from disk and from memory, beside the rates at which its files can be read."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.commands import SIZE, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Output, format_bytes
from mqproc.cli.store_options import options_for
from mqproc.cli.store_verify import summary
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.quantities import counted

if TYPE_CHECKING:
    from mqproc.config import Options
    from mqproc.store.verify import Verified

BLOCK_BYTES = 1 << 20
# What a message takes beside its body, roughly: for the number of messages that a size asks for.
_OVERHEAD_BYTES = 190
_REPEATS = 3


@click.command(cls=Command)
@click.option("--log-size", type=SIZE, default="2GiB", show_default=True, help="Log of the store that is made.")
@click.option("--size", type=SIZE, default="1KiB", show_default=True, help="Bytes of a body.")
@click.option("--topics", type=click.IntRange(1), default=4, show_default=True, help="Topics, in turns.")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Queues of a topic.")
@click.option("--keys", type=click.IntRange(0), default=1, show_default=True, help="Keys of a message.")
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [one for each processor]")
@click.option("--cold/--no-cold", default=True, show_default=True, help="Also with the files gone from memory.")
@pass_invocation
def verify(
    invocation: Invocation, log_size: int, size: int, topics: int, queues: int, keys: int, jobs: int | None, cold: bool
) -> None:
    """Verify a store, beside the rate at which its files can be read.

    A temporary store is made by a group and stopped, or --store names one, which is only read.
    """
    from mqproc.bench.load import Shape

    out = invocation.out
    shape = Shape(size, 1000, topics, queues, keys, 4)
    with made_store(invocation, shape, log_size) as store:
        found = measure(store, options_for(invocation, StoreIO(), StorePaths(store)), out, jobs=jobs or 0, cold=cold)
    if out.is_json:
        out.document(found)
    else:
        _print(out, found)


@contextlib.contextmanager
def made_store(invocation: Invocation, shape: Any, log_bytes: int) -> Iterator[Path]:
    """The store that --store names, or one made for this."""
    from mqproc.bench.modes import load
    from mqproc.bench.runs import Bench
    from mqproc.cli.spawned_group import running_group

    if invocation.store is not None:
        yield invocation.store.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="mqproc-bench-"))
    try:
        bench = Bench(folder / "store", invocation.out)
        settings = ["metrics_port=0", *invocation.set_]
        group = running_group(bench.store, settings, invocation.config_file(), lambda line: None)
        with group, contextlib.closing(bench):
            bench.create_topics(shape.topics, shape.queues)
            load(bench, shape, max(1000, log_bytes // (shape.size + _OVERHEAD_BYTES)))
            bench.await_dispatch()
        yield bench.store
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(store: Path, options: Options, out: Output, *, jobs: int, cold: bool) -> dict[str, Any]:
    """Figures of a store: verified from memory (best of some) and from the disk (median), beside the machine's.

    Raises CorruptStoreError when it is not clean: damaged stores take another way.
    """
    found: dict[str, Any] = {}
    machine: dict[str, float] = {}
    if cold:
        rates, from_disk = _cold_rounds(store, options, jobs)
        machine.update(rates)
        found["from_disk"] = _figures(from_disk)
    runs = [_verified(store, options, jobs) for _ in range(_REPEATS)]
    machine["read_from_memory_bytes_per_s"] = max(read_rate(store) for _ in range(2))
    best = max(runs, key=lambda run: run.bytes_per_second)
    found = {"from_memory": _figures(best), **found}
    if cold:
        disk = max(machine[name] for name in machine if name.startswith("sequential"))
        found["share_of_disk_rate"] = round(found["from_disk"]["bytes_per_second"] / disk, 3)
    parts = {name: value for name, value in summary(best).items() if name in ("records", "units", "index_entries")}
    return {**parts, **found, "machine": {name: round(value) for name, value in machine.items()}, "store": str(store)}


def _cold_rounds(store: Path, options: Options, jobs: int) -> tuple[dict[str, float], Verified]:
    """Median rates of reading by one and by all, and of verifying, in turns: a disk's rate may change by the second."""
    readers = {
        "sequential_read_bytes_per_s": 1,
        "sequential_read_all_processors_bytes_per_s": len(os.sched_getaffinity(0)),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    runs = []
    for _ in range(_REPEATS):
        for name, count in readers.items():
            drop_from_memory(store)
            rates[name].append(read_rate(store, count))
        drop_from_memory(store)
        runs.append(_verified(store, options, jobs))
    middle = sorted(runs, key=lambda run: run.bytes_per_second)[_REPEATS // 2]
    return {name: statistics.median(found) for name, found in rates.items()}, middle


def _verified(store: Path, options: Options, jobs: int) -> Verified:
    from mqproc.store.verify import verify_store

    found = verify_store(StoreIO(), StorePaths(store), options, jobs=jobs)
    if not found.clean:
        raise CorruptStoreError(f"{store}: damaged, so there is nothing to measure; mqproc store verify tells where")
    return found


def _figures(found: Verified) -> dict[str, Any]:
    return {
        "bytes": found.size,
        "seconds": round(found.seconds, 4),
        "bytes_per_second": round(found.bytes_per_second),
        "records_per_second": round(found.records / max(found.seconds, 1e-9)),
    }


def drop_from_memory(store: Path) -> None:
    """Let the kernel forget a store's files, so that they are read from the disk again."""
    os.sync()
    for path in store.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_rate(store: Path, readers: int = 1) -> float:
    """Bytes a second of the log's segments read from beginning to end by so many threads, each a part of every one."""
    segments = sorted((store / "commitlog").iterdir())
    done = [0] * readers

    def read(number: int) -> None:
        block = bytearray(BLOCK_BYTES)
        for path in segments:
            fd = os.open(path, os.O_RDONLY)
            try:
                # Space that was never written is not read from anywhere.
                written = os.lseek(fd, 0, os.SEEK_HOLE)
                part = -(-written // readers // BLOCK_BYTES) * BLOCK_BYTES
                for at in range(number * part, min((number + 1) * part, written), BLOCK_BYTES):
                    done[number] += os.preadv(fd, [block], at)
            finally:
                os.close(fd)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - started)


def _print(out: Output, found: dict[str, Any]) -> None:
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
