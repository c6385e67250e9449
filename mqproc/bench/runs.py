"""Run a benchmark: a group, client processes, and figures of the measured time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.bench.clients import TIMEOUT_S, Messages, Recorder, Shape, Slot, topic_name
from mqproc.cli.admin.lifecycle import group_status, process_figures
from mqproc.cli.admin.supervisor_client import running_group
from mqproc.cli.output import Output
from mqproc.client import Batch, Client, requests
from mqproc.errors import NotRunningError, RequestTimeoutError, StartError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.counters import read_error_counters
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control
from mqproc.paths import StorePaths

PERCENTILES: Final = (50, 95, 99, 99.9)
MB: Final = 1_000_000
LINE_EVERY_S: Final = 5.0
LOADER: Final = 1000
"""Producer number of messages that are loaded before the measurement; measured producers count from 0."""
_LOAD_BATCH: Final = 1000
_LOAD_FRAME_BYTES: Final = 256 << 10
_POLL_S: Final = 0.02
_START_S: Final = 60.0
_STOP_S: Final = 90.0
_CATCH_UP_S: Final = 600.0
_GROUP_CHECK_S: Final = 1.0

Start = tuple[Callable[..., None], tuple[Any, ...]]
"""A client: its function, and the arguments before its slot."""


# Figures


def named_percentiles(values: Iterable[float], prefix: str = "p") -> dict[str, float]:
    """Values of PERCENTILES by name, rounded to two digits."""
    return {f"{prefix}{p:g}": round(float(value), 2) for p, value in zip(PERCENTILES, values, strict=True)}


def rate_text(messages: int, size: int, seconds: float, verb: str) -> str:
    return f"{messages:,} records {verb}, {messages / seconds:,.1f} records/sec ({size / seconds / MB:,.2f} MB/sec)"


def percentile_text(values_us: Iterable[float]) -> str:
    return ", ".join(f"{value:.1f} µs {p:g}th" for p, value in zip(PERCENTILES, values_us, strict=True))


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests that ended in the measured time. Latencies are in µs."""

    messages: int
    size: int
    seconds: float
    requests: int
    mean_us: float
    max_us: float
    percentiles_us: tuple[float, ...]

    @property
    def per_second(self) -> float:
        return self.messages / self.seconds

    def line(self, verb: str) -> str:
        """A summary in the format of Kafka's performance tools."""
        return (
            f"{rate_text(self.messages, self.size, self.seconds, verb)}, {self.mean_us:,.1f} µs avg latency, "
            f"{self.max_us:,.1f} µs max latency, {percentile_text(self.percentiles_us)}."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "bytes": self.size,
            "seconds": round(self.seconds, 4),
            "requests": self.requests,
            "messages_per_second": round(self.per_second),
            "bytes_per_second": round(self.size / self.seconds),
            "latency_us_mean": round(self.mean_us, 2),
            "latency_us_max": round(self.max_us, 2),
            **named_percentiles(self.percentiles_us, "latency_us_p"),
        }


def load_rows(paths: Sequence[Path]) -> NDArray[np.int64]:
    """The rows of all clients: end ns, latency ns, messages. Further columns are left out."""
    return np.concatenate([np.load(path)[:, :3] for path in paths if path.exists()] or [np.empty((0, 3), np.int64)])


def figures_of(rows: NDArray[np.int64], begin_ns: int, end_ns: int, message_size: int) -> Figures:
    """Figures of the requests that ended in (begin, end]."""
    inside = rows[(rows[:, 0] > begin_ns) & (rows[:, 0] <= end_ns)]
    messages = int(inside[:, 2].sum())
    latencies = inside[:, 1] / 1000 if len(inside) else np.zeros(1)
    return Figures(
        messages=messages,
        size=messages * message_size,
        seconds=max((end_ns - begin_ns) / 1e9, 1e-9),
        requests=len(inside),
        mean_us=float(latencies.mean()),
        max_us=float(latencies.max()),
        percentiles_us=tuple(float(value) for value in np.percentile(latencies, PERCENTILES)),
    )


class CpuMeter:
    """CPU seconds of processes since a start time."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        # The clocks of clock_getcpuclockid(3) on Linux; times in /proc only count ticks.
        self._clocks = {name: (~pid << 3) | 2 for name, pid in pids.items() if pid}
        self.restart()

    def _read(self) -> dict[str, float]:
        found = {}
        for name, clock in self._clocks.items():
            with suppress(OSError):  # The process may have ended.
                found[name] = time.clock_gettime(clock)
        return found

    def restart(self) -> None:
        self._before = self._read()

    def seconds(self) -> dict[str, float]:
        """CPU seconds by process since the last restart."""
        return {name: max(0.0, now - self._before.get(name, 0.0)) for name, now in self._read().items()}


# The group


@dataclass(frozen=True, slots=True)
class Settings:
    """The common options of benchmarks."""

    shape: Shape
    messages: int
    seconds: float
    warmup: float
    producers: int
    out: Output
    client_cpus: frozenset[int] = frozenset()
    """CPU affinity of clients; empty: any processor."""

    def say(self, text: str) -> None:
        """Print a summary line, unless the output is a JSON document."""
        if not self.out.is_json:
            self.out.line(text)
            self.out.flush()


@dataclass(slots=True)
class BenchGroup:
    """The group that is measured: its store, and its processes by role."""

    store: Path
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
        """Requests that the writer has rejected, by error code."""
        return Counter(read_error_counters(self.control.words, control.WRITER))

    def refresh(self) -> None:
        """Read the pids of the roles."""
        found = group_status(self.paths, 30.0)["roles"]
        self.roles = {str(role["role"]): int(role["pid"]) for role in found}

    def await_dispatch(self, timeout_s: float = _CATCH_UP_S) -> float:
        """Seconds until all is dispatched. Raises RequestTimeoutError, NotRunningError."""
        started = checked = time.monotonic()
        while (behind := self.control.dispatch_behind_bytes) > 0:
            now = time.monotonic()
            if now - started > timeout_s:
                raise RequestTimeoutError(f"dispatch still lags by {behind:,} bytes")
            if now - checked > _GROUP_CHECK_S:
                checked = now
                if lock_holder(StoreIO(), self.paths) is None:
                    raise NotRunningError(f"{self.store}: the group ended {behind:,} bytes before the log's end")
            time.sleep(0.0005)
        return time.monotonic() - started

    def create_topics(self, topics: int, queues: int) -> float:
        """Create the topics; the seconds it took."""
        started = time.monotonic()
        with Client(self.store, timeout=TIMEOUT_S) as client:
            calls = (requests.create_topic(topic_name(index), queues, 6) for index in range(topics))
            for _ in client.run_all(calls, 16):
                pass
        return time.monotonic() - started

    def send(self, batches: Iterator[Batch]) -> None:
        with Client(self.store, timeout=TIMEOUT_S) as client:
            for _ in client.send_batches(batches, in_flight=4):
                pass

    def load(self, shape: Shape, messages: int) -> None:
        """Store messages to read later, numbered from the loader's first message."""
        batch = load_batch(shape)
        maker = Messages(replace(shape, batch=batch), LOADER)
        starts = range(0, messages, batch)
        self.send(
            maker.frame(topic_name(turn % shape.topics), min(batch, messages - start))
            for turn, start in enumerate(starts)
        )

    def prepare(self, shape: Shape, messages: int) -> None:
        """Create the topics and load dispatched messages."""
        self.create_topics(shape.topics, shape.queues)
        self.load(shape, messages)
        self.await_dispatch()


def load_batch(shape: Shape) -> int:
    """Messages per frame of a load, whatever batch is measured later."""
    return max(1, min(_LOAD_BATCH, _LOAD_FRAME_BYTES // max(1, shape.size)))


@contextmanager
def temporary_store() -> Iterator[Path]:
    """The path of a store that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="mqproc-bench-"))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def bench_group(store: Path | None, settings: Sequence[str], config: Path | None) -> Iterator[BenchGroup]:
    """The group on `store`, started if needed; without `store`, a group on a temporary store."""
    with ExitStack() as stack:
        if store is None:
            fresh = stack.enter_context(temporary_store())
            yield stack.enter_context(started_group(fresh, ["metrics_port=0", *settings], config))
            return
        bench = stack.enter_context(closing(BenchGroup(store)))
        try:
            bench.refresh()
        except NotRunningError:
            bench = stack.enter_context(started_group(store, settings, config))
        yield bench


@contextmanager
def started_group(store: Path, settings: Sequence[str], config: Path | None) -> Iterator[BenchGroup]:
    with running_group(store, settings, config, lambda line: None), closing(BenchGroup(store)) as bench:
        bench.refresh()
        yield bench


# Runs


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of a run; latencies include retries after `refusals` for a full disk."""

    figures: Figures
    cpu_seconds: dict[str, float]
    memory_bytes: dict[str, int]
    errors: int
    refusals: Counter[str]
    increases: dict[str, int]
    """Changes of counters, by word of the control file."""
    worst_behind_bytes: int
    per_client: list[Figures]

    @property
    def seconds(self) -> float:
        return self.figures.seconds

    def cpu_us_per_message(self) -> dict[str, float]:
        messages = max(1, self.figures.messages)
        return {name: round(seconds * 1e6 / messages, 4) for name, seconds in self.cpu_seconds.items()}

    def cpu_percent(self) -> dict[str, float]:
        return {name: round(100 * used / self.seconds, 1) for name, used in self.cpu_seconds.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            **self.figures.to_json(),
            "errors": self.errors,
            "refusals": dict(self.refusals),
            "cpu_us_per_message": self.cpu_us_per_message(),
            "cpu_percent": self.cpu_percent(),
            "pss_bytes": self.memory_bytes,
            "pss_bytes_total": sum(self.memory_bytes.values()),
            "worst_dispatch_behind_bytes": self.worst_behind_bytes,
        }


class BenchRun:
    """Client processes: started, warmed up, measured, stopped."""

    def __init__(self, bench: BenchGroup, starts: Sequence[Start], settings: Settings) -> None:
        self._bench = bench
        self._starts = starts
        self._settings = settings
        self._memory = SharedMemory(create=True, size=max(1, len(starts)) * Recorder.WORDS * 8)
        self._counters = np.ndarray((self._memory.size // 8,), np.int64, self._memory.buf)
        self._counters[:] = 0
        self._folder = Path(tempfile.mkdtemp(prefix="mqproc-bench-rows-"))
        self.results = [self._folder / f"{index}.npy" for index in range(len(starts))]
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> BenchRun:
        context = multiprocessing.get_context("spawn")
        for index, (function, arguments) in enumerate(self._starts):
            slot = Slot(index, self._memory.name, self.results[index])
            process = context.Process(target=function, args=(*arguments, slot), daemon=True)
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
        del self._counters
        self._memory.close()
        self._memory.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _column(self, word: int) -> Any:
        return self._counters[word :: Recorder.WORDS]

    def _total(self, word: int) -> int:
        return int(self._column(word).sum())

    def measure(
        self,
        verb: str,
        *,
        at_begin: Callable[[], None] = lambda: None,
        until: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Warm up, measure and stop; prints a line every five seconds.

        `at_begin` is called when the measured time begins. That time ends early once `until` returns True.
        """
        size = self._settings.shape.size
        self._await(lambda: bool((self._column(Recorder.STATE) >= Recorder.RUNNING).all()), _START_S, "start")
        time.sleep(self._settings.warmup)
        clients = {f"client-{index}": process.pid or 0 for index, process in enumerate(self._processes)}
        meter = CpuMeter({**self._bench.roles, **clients})
        words_before, refusals = self._bench.words(), self._bench.refusals()
        begin_ns, first = time.monotonic_ns(), self._total(Recorder.MESSAGES)
        at_begin()
        worst = self._watch(verb, begin_ns, first, until)
        end_ns = time.monotonic_ns()
        words_after, cpu = self._bench.words(), meter.seconds()
        memory = {name: int(process_figures(pid)["pss_bytes"] or 0) for name, pid in self._bench.roles.items() if pid}
        self._column(Recorder.STATE)[:] = Recorder.STOP
        self._await(lambda: all(not process.is_alive() for process in self._processes), _STOP_S, "end")
        return Result(
            figures_of(load_rows(self.results), begin_ns, end_ns, size),
            cpu,
            memory,
            self._total(Recorder.ERRORS),
            self._bench.refusals() - refusals,
            {word: after - words_before[word] for word, after in words_after.items()},
            worst,
            [figures_of(load_rows([path]), begin_ns, end_ns, size) for path in self.results],
        )

    def _watch(self, verb: str, begin_ns: int, first: int, until: Callable[[], bool]) -> int:
        """Wait for the end of the measured time; returns the worst dispatch lag in bytes."""
        settings = self._settings
        end_ns = begin_ns + round(settings.seconds * 1e9)
        line_ns, line_count, worst = begin_ns, first, 0
        while (now_ns := time.monotonic_ns()) < end_ns:
            worst = max(worst, self._bench.control.dispatch_behind_bytes)
            count = self._total(Recorder.MESSAGES)
            if (settings.messages and count - first >= settings.messages) or until():
                break
            if now_ns - line_ns >= LINE_EVERY_S * 1e9:
                if not settings.out.is_json:
                    new = count - line_count
                    seconds = (now_ns - line_ns) / 1e9
                    settings.out.note(rate_text(new, new * settings.shape.size, seconds, verb))
                line_ns, line_count = now_ns, count
            if not any(process.is_alive() for process in self._processes):
                raise StartError("every client has ended")
            time.sleep(_POLL_S)
        return worst

    def _await(self, done: Callable[[], bool], timeout_s: float, event: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise RequestTimeoutError(f"the clients did not {event} in {timeout_s:.0f} s")
            if event == "start" and not all(process.is_alive() for process in self._processes):
                raise StartError("a client could not start")
            time.sleep(_POLL_S)


def run_clients(bench: BenchGroup, settings: Settings, verb: str, start: Start, **hooks: Callable[[], Any]) -> Result:
    """Measure `settings.producers` processes; `hooks`: arguments of `BenchRun.measure`."""
    with BenchRun(bench, [start] * settings.producers, settings) as run:
        return run.measure(verb, **hooks)


def run_cases(bench: BenchGroup, settings: Settings, verb: str, cases: Mapping[str, Start]) -> dict[str, Any]:
    """Measure one client after the other, print lines, and return figures by name."""
    found: dict[str, Any] = {}
    for name, start in cases.items():
        result = run_clients(bench, replace(settings, messages=0), verb, start)
        settings.say(f"{name}: " + result.figures.line(verb))
        found[name] = result.to_json()
    return found
