"""Running a benchmark: a group on its own store, client processes, a measured time between warm-up and end."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.bench.clients import Recorder, Shape, topic_name
from mqproc.cli.admin.lifecycle import group_status, process_figures
from mqproc.cli.admin.supervisor_client import running_group
from mqproc.cli.output import Output
from mqproc.client import Client
from mqproc.client import requests as core
from mqproc.errors import NotRunningError, RequestTimeoutError, StartError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.error_counters import read_error_counters
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths

# --- figures ---
# From what was measured to figures: rates, percentiles of the full distribution, CPU per message and role.


PERCENTILES = (50, 95, 99, 99.9)
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests that ended inside the measured time. Latencies in µs."""

    messages: int
    size: int
    seconds: float
    requests: int
    mean_us: float
    max_us: float
    percentiles_us: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.messages / max(self.seconds, 1e-9)

    @property
    def bytes_per_second(self) -> float:
        return self.size / max(self.seconds, 1e-9)

    def line(self, verb: str) -> str:
        """Kafka's summary."""
        shown = ", ".join(
            f"{value:.1f} µs {percentile:g}th"
            for percentile, value in zip(PERCENTILES, self.percentiles_us, strict=True)
        )
        return (
            f"{self.messages:,} records {verb}, {self.per_second:,.1f} records/sec "
            f"({self.bytes_per_second / MB:,.2f} MB/sec), {self.mean_us:,.1f} µs avg latency, "
            f"{self.max_us:,.1f} µs max latency, {shown}."
        )

    def to_json(self) -> dict[str, Any]:
        named = {
            f"latency_us_p{percentile:g}": round(value, 2)
            for percentile, value in zip(PERCENTILES, self.percentiles_us, strict=True)
        }
        return {
            "messages": self.messages,
            "bytes": self.size,
            "seconds": round(self.seconds, 4),
            "requests": self.requests,
            "messages_per_second": round(self.per_second),
            "bytes_per_second": round(self.bytes_per_second),
            "latency_us_mean": round(self.mean_us, 2),
            "latency_us_max": round(self.max_us, 2),
            **named,
        }


def load_rows(paths: list[Path]) -> NDArray[np.int64]:
    """All clients' rows: ended ns, latency ns, messages; what else a client has noted is left out."""
    return np.concatenate([np.load(path)[:, :3] for path in paths if path.exists()] or [np.empty((0, 3), np.int64)])


def figures_of(rows: NDArray[np.int64], begin_ns: int, end_ns: int, message_size: int) -> Figures:
    """Figures of the requests that ended in (begin, end]."""
    inside = rows[(rows[:, 0] > begin_ns) & (rows[:, 0] <= end_ns)]
    latencies = inside[:, 1] / 1000
    messages = int(inside[:, 2].sum())
    some = len(latencies) > 0
    return Figures(
        messages=messages,
        size=messages * message_size,
        seconds=(end_ns - begin_ns) / 1e9,
        requests=len(inside),
        mean_us=float(latencies.mean()) if some else 0.0,
        max_us=float(latencies.max()) if some else 0.0,
        percentiles_us=tuple(float(value) for value in np.percentile(latencies, PERCENTILES)) if some else (0.0,) * 4,
    )


class CpuMeter:
    """CPU seconds of processes between two moments."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._clocks = {name: _cpu_clock_of(pid) for name, pid in pids.items() if pid}
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        found = {}
        for name, clock in self._clocks.items():
            try:
                found[name] = time.clock_gettime(clock)
            except OSError:
                continue  # The process has ended.
        return found

    def restart(self) -> None:
        self._before = self._read()

    def seconds(self) -> dict[str, float]:
        """CPU seconds by process since the last restart."""
        now = self._read()
        return {name: max(0.0, now[name] - self._before.get(name, 0.0)) for name in now}


def _cpu_clock_of(pid: int) -> int:
    """The clock of all threads of a process, as clock_getcpuclockid(3) makes it on Linux.

    The times of /proc count ticks: who wakes at ticks, or for less than one, has too much or too little of them.
    """
    return (~pid << 3) | 2


def memory_of(pids: Mapping[str, int]) -> dict[str, int]:
    """PSS in bytes by process."""
    return {name: int(process_figures(pid)["pss_bytes"] or 0) for name, pid in pids.items() if pid}


LINE_EVERY_S = 5.0
_TICK_S = 0.02
_START_S = 60.0
_STOP_S = 90.0
_CATCH_UP_S = 600.0
# How often a group that does not answer is looked for.
_LOOK_S = 1.0

Start = tuple[Callable[..., None], tuple[Any, ...]]
"""A client: its function and the arguments before (index, memory name, result)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the common options of all benchmarks say."""

    shape: Shape
    messages: int
    seconds: float
    warmup: float
    producers: int
    out: Output
    quiet: bool = False
    client_cpus: frozenset[int] = frozenset()
    """Processors that clients are kept on; empty: any."""

    def say(self, text: str) -> None:
        """A summary line: data, unless a document comes at the end."""
        if not self.out.is_json:
            self.out.line(text)
            self.out.flush()


@dataclass(slots=True)
class Bench:
    """A running group to measure: its store, and the processes by role."""

    store: Path
    out: Output
    roles: dict[str, int] = field(default_factory=dict)
    _control: Control | None = None

    @property
    def paths(self) -> StorePaths:
        return StorePaths(self.store)

    @property
    def control(self) -> Control:
        if self._control is None:
            self._control = Control.open(StoreIO(), self.paths)
        return self._control

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def words(self) -> dict[str, int]:
        return self.control.snapshot()

    def refusals(self) -> Counter[str]:
        """What the writer has refused so far, by error code."""
        return Counter(read_error_counters(self.control.words, words_of.WRITER))

    def refresh(self) -> None:
        """Read the roles' pids anew."""
        found = group_status(self.paths, 30.0)["roles"]
        self.roles = {str(role["role"]): int(role["pid"]) for role in found}

    def behind(self) -> int:
        return self.control.dispatch_behind_bytes

    def await_dispatch(self, patience_s: float = _CATCH_UP_S) -> float:
        """Seconds until dispatch has reached the end of the log. Raises RequestTimeoutError, NotRunningError."""
        started = looked = time.monotonic()
        while (behind := self.behind()) > 0:
            now = time.monotonic()
            if now - started > patience_s:
                raise RequestTimeoutError(f"dispatch is still {behind:,} bytes behind")
            if now - looked > _LOOK_S:
                looked = now
                if lock_holder(StoreIO(), self.paths) is None:
                    raise NotRunningError(f"{self.store}: the group ended {behind:,} bytes before the log's end")
            time.sleep(0.0005)
        return time.monotonic() - started

    def create_topics(self, topics: int, queues: int) -> float:
        """Make the topics; returns how long it took."""
        started = time.monotonic()
        with Client(self.store, timeout=60) as client:
            calls = (core.create_topic(topic_name(index), queues, 6) for index in range(topics))
            for _ in client.run_all(calls, 16):
                pass
        return time.monotonic() - started


@contextmanager
def bench_group(store: Path | None, settings: Sequence[str], config: Path | None, out: Output) -> Iterator[Bench]:
    """A group on a fresh temporary store, which is removed; or the one that runs on `store`, or one started there."""
    if store is not None:
        bench = Bench(store, out)
        try:
            bench.refresh()
        except NotRunningError:
            with running_group(store, settings, config, _nothing), closing(bench):
                bench.refresh()
                yield bench
        else:
            with closing(bench):
                yield bench
        return
    folder = Path(tempfile.mkdtemp(prefix="mqproc-bench-"))
    try:
        bench = Bench(folder / "store", out)
        with running_group(bench.store, ["metrics_port=0", *settings], config, _nothing), closing(bench):
            bench.refresh()
            yield bench
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _nothing(line: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class Result:
    """One run's figures. `clients` holds each client's own rows where they are asked for.

    `refusals` are the writer's, by code: a client that is told of a full disk tries again until there is room, and the
    figures are of the waiting too.
    """

    figures: Figures
    cpu_seconds: dict[str, float]
    memory_bytes: dict[str, int]
    errors: int
    refusals: Counter[str]
    words_before: dict[str, int]
    words_after: dict[str, int]
    worst_behind_bytes: int
    per_client: list[Figures]

    def cpu_us_per_message(self) -> dict[str, float]:
        messages = max(1, self.figures.messages)
        return {name: round(seconds * 1e6 / messages, 4) for name, seconds in self.cpu_seconds.items()}

    def to_json(self) -> dict[str, Any]:
        seconds = max(self.figures.seconds, 1e-9)
        return {
            **self.figures.to_json(),
            "errors": self.errors,
            "refusals": dict(self.refusals),
            "cpu_us_per_message": self.cpu_us_per_message(),
            "cpu_percent": {name: round(100 * used / seconds, 1) for name, used in self.cpu_seconds.items()},
            "pss_bytes": self.memory_bytes,
            "pss_bytes_total": sum(self.memory_bytes.values()),
            "worst_dispatch_behind_bytes": self.worst_behind_bytes,
        }


class BenchRun:
    """Client processes, watched: started, warmed up, measured, stopped. `limit` messages end it early."""

    def __init__(self, bench: Bench, starts: Sequence[Start], settings: Settings) -> None:
        self._bench = bench
        self._starts = starts
        self._settings = settings
        self._memory = SharedMemory(create=True, size=max(1, len(starts)) * Recorder.WORDS * 8)
        self._all = np.ndarray((self._memory.size // 8,), np.int64, self._memory.buf)
        self._all[:] = 0
        self._folder = Path(tempfile.mkdtemp(prefix="mqproc-bench-rows-"))
        self.results = [self._folder / f"{index}.npy" for index in range(len(starts))]
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> BenchRun:
        context = multiprocessing.get_context("spawn")
        for index, (function, arguments) in enumerate(self._starts):
            process = context.Process(
                target=function, args=(*arguments, index, self._memory.name, self.results[index]), daemon=True
            )
            process.start()
            self._processes.append(process)
            if self._settings.client_cpus:
                os.sched_setaffinity(process.pid or 0, self._settings.client_cpus)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
            process.join()
        del self._all
        self._memory.close()
        self._memory.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Counters of all clients

    def _column(self, word: int) -> Any:
        return self._all[word :: Recorder.WORDS]

    def _total(self, word: int) -> int:
        return int(self._column(word).sum())

    def measure(
        self,
        verb: str,
        message_size: int,
        *,
        at_begin: Callable[[], None] = lambda: None,
        until: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Warm up, measure, stop; prints a line every five seconds.

        `at_begin` is called when the measured time begins; it ends early once `until` is true.
        """
        settings = self._settings
        self._await(lambda: bool((self._column(Recorder.STATE) >= Recorder.RUNNING).all()), _START_S, "start")
        time.sleep(settings.warmup)
        clients = {f"client-{index}": process.pid or 0 for index, process in enumerate(self._processes)}
        meter = CpuMeter({**self._bench.roles, **clients})
        words_before, refusals = self._bench.words(), self._bench.refusals()
        begin_ns, first = time.monotonic_ns(), self._total(Recorder.MESSAGES)
        at_begin()
        worst = self._watch(verb, begin_ns, first, until)
        end_ns = time.monotonic_ns()
        words_after, cpu, memory = self._bench.words(), meter.seconds(), memory_of(self._bench.roles)
        self.stop()
        per_client = [figures_of(load_rows([path]), begin_ns, end_ns, message_size) for path in self.results]
        return Result(
            figures_of(load_rows(self.results), begin_ns, end_ns, message_size),
            cpu,
            memory,
            self._total(Recorder.ERRORS),
            self._bench.refusals() - refusals,
            words_before,
            words_after,
            worst,
            per_client,
        )

    def _watch(self, verb: str, begin_ns: int, first: int, until: Callable[[], bool]) -> int:
        """Until the time is over or the messages are through; returns the worst dispatch lag in bytes."""
        settings = self._settings
        end_ns = begin_ns + round(settings.seconds * 1e9)
        line_ns, line_count, worst = begin_ns, first, 0
        while (now_ns := time.monotonic_ns()) < end_ns:
            worst = max(worst, self._bench.behind())
            count = self._total(Recorder.MESSAGES)
            if (settings.messages and count - first >= settings.messages) or until():
                break
            if now_ns - line_ns >= LINE_EVERY_S * 1e9:
                self._print_line(verb, count - line_count, (now_ns - line_ns) / 1e9)
                line_ns, line_count = now_ns, count
            if not any(process.is_alive() for process in self._processes):
                raise StartError("every client has ended")
            time.sleep(_TICK_S)
        return worst

    def _print_line(self, verb: str, count: int, seconds: float) -> None:
        if not self._settings.quiet:
            size = count * self._settings.shape.size
            self._settings.out.note(
                f"{count:,} records {verb}, {count / seconds:,.1f} records/sec ({size / seconds / MB:,.2f} MB/sec)"
            )

    def stop(self) -> None:
        """Tell the clients to end and wait for their rows."""
        self._column(Recorder.STATE)[:] = Recorder.STOP
        self._await(lambda: all(not process.is_alive() for process in self._processes), _STOP_S, "end")

    def _await(self, done: Callable[[], bool], patience_s: float, what: str) -> None:
        deadline = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > deadline:
                raise RequestTimeoutError(f"the clients did not {what} in {patience_s:.0f} s")
            if what == "start" and not all(process.is_alive() for process in self._processes):
                raise StartError("a client could not start")
            time.sleep(_TICK_S)
