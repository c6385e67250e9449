"""The role contract, its heartbeat and signals, and the loop that runs every role.

    start    signal handlers, STARTING, factory, RUNNING
    run      do_work until it returns 0 · spin or linger briefly · announce, check again, wait · …
    stop     SIGTERM: STOPPING, on_stop until it returns True, close

A role is a class with a bounded `do_work`. It knows neither signals nor processes, so a test can call its methods
directly. Signal handlers only set a flag and ring the role's own bell.
"""

from __future__ import annotations

import abc
import bdb
import contextlib
import ctypes
import enum
import errno
import faulthandler
import functools
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from setproctitle import setproctitle, setthreadtitle

from mqproc.config.options import Options
from mqproc.config.parse import cpu_numbers
from mqproc.errors import ConfigurationError, MqprocError, StoreBusyError
from mqproc.io.sigbus import ZeroFill, install_sigbus_handler
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.bell import MAX_WAIT_S, Bell
from mqproc.ipc.control import Control
from mqproc.ipc.counters import Histogram
from mqproc.ipc.error_log import ErrorLog
from mqproc.kernels.jit import cache
from mqproc.layout import control as layout
from mqproc.layout.control import DISPATCHER, WRITER
from mqproc.layout.histograms import STEPS
from mqproc.paths import StorePaths, printable_path
from mqproc.roles import role_log
from mqproc.store.access import read_settings

# Settings of a role's process: title, CPU affinity, niceness, allocator

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 32 << 20


def process_title(role: str, store: Path) -> str:
    """Title of a role's process in `ps`: `mqproc: writer [/data/store]`."""
    return f"mqproc: {role} [{printable_path(store)}]"


def set_title(role: str, store: Path) -> None:
    """Set this process's title in its arguments and, cut to 15 bytes, in its `comm`.

    The `comm` must not contain a blank: since Python 3.12 `os.fork` reads the 20th word of /proc/self/stat as the
    number of threads, and with a name of two words that word is the niceness.
    """
    setproctitle(process_title(role, store))
    setthreadtitle(f"mqproc:{role}")


def writer_cpus(options: Options, allowed: frozenset[int]) -> frozenset[int]:
    """Processors for the writer; all that the group may use when `writer_cpus` is not set.

    Separate processors for writer and clients help senders of single messages: the kernel tends to put a waker and the
    process that it wakes on one processor, where both wait for each other while dispatch has the other to itself.

    Raises ConfigurationError when `writer_cpus` names a processor that the group may not use.
    """
    chosen = cpu_numbers(options.writer_cpus)
    if outside := chosen - allowed:
        missing = ", ".join(map(str, sorted(outside)))
        have = ", ".join(map(str, sorted(allowed)))
        raise ConfigurationError(
            f"writer_cpus = {options.writer_cpus!r}: this group may not use processor {missing}, only {have}"
        )
    return chosen or allowed


def set_cpu_affinity(role: str, options: Options) -> None:
    """Apply `writer_cpus` and `dispatcher_nice` to this process. Raises ConfigurationError."""
    if role == WRITER and options.writer_cpus:
        with _explain_permission(f"writer_cpus = {options.writer_cpus!r}"):
            os.sched_setaffinity(0, writer_cpus(options, frozenset(os.sched_getaffinity(0))))
    if role == DISPATCHER and options.dispatcher_nice:
        with _explain_permission(f"dispatcher_nice = {options.dispatcher_nice}"):
            # Never lower than the niceness that the group was started with.
            os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), options.dispatcher_nice))


@contextlib.contextmanager
def _explain_permission(option: str) -> Iterator[None]:
    """Turn a PermissionError into a ConfigurationError, which a restart does not cure."""
    try:
        yield
    except PermissionError as error:
        raise ConfigurationError(
            f"{option}: {error.strerror}; in a unit of systemd SystemCallFilter= must permit sched_setaffinity and "
            "setpriority, in a container its seccomp profile"
        ) from None


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT_BYTES of freed memory instead of returning it at once.

    Answers of megabytes are allocated and freed hundreds of times a second, and faulting in fresh pages costs more than
    filling them. Does nothing with a C library that lacks `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Return freed memory to the system, also from between blocks in use.

    glibc never returns that by itself, so each peak of load would leave the process larger. Takes up to 2 ms;
    does nothing with a C library that lacks `malloc_trim`.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


RETURN_NS: Final = 60_000_000_000
"""Interval at which a role that is about to wait returns freed memory."""
BEAT_NS: Final = 50_000_000
"""Interval of heartbeats of a working role, far below the 250 ms at which the supervisor checks."""
SPIN_WORK_MAX: Final = 64
"""A step that did more is not followed by spinning: single messages need low latency, batches need the processor."""
BEATS_PER_TIMEOUT: Final = 4
"""Number of times that an idle role wakes within `heartbeat_timeout_ms`."""
SAMPLE_NS: Final = 10_000_000
"""Sampling interval: after it the next step that does work is timed, on behalf of all steps since the last sample."""
SLOW_STEP_NS: Final = 10_000_000
"""A step that takes longer is always timed, by itself: slow steps are rare, and they matter."""
assert SLOW_STEP_NS >= SAMPLE_NS  # A slow step then always ends after the sampling time.
EXIT_FAILED: Final = 1
# Consequence of an unreadable page that a role replaces by zeros (RoleSpec.zero_fill).
LOST_LOG_PAGE: Final = "messages with a part there count as damaged"
LOST_INDEX_PAGE: Final = "keys that lead there cannot be looked up until mqproc store repair rebuilds the index"
_KERNELS_OF: Final = (
    ("sql.", "SQL92 filters"),
    ("gather.gather_sql", "SQL92 filters"),
    ("log_match.", "searches"),
    ("index_verify.", "searches"),
)
_COMPILING_MS: Final = 200
BOOT_EXIT_CODES: Final = frozenset({3, 6, 7, 8})
"""Exit codes of errors that a restart does not cure. Any other error of a role is unexpected."""


class Heartbeat:
    """A role's words in the control file. `changed` notifies the supervisor of a state."""

    def __init__(self, control: Control, role: str, clock: Clock, changed: Callable[[], None] = lambda: None) -> None:
        self._control = control
        self._cells = control.words.cells
        self._clock = clock
        self._changed = changed
        self._heartbeat = layout.role_word(role, "heartbeat_ns")
        self._state = layout.role_word(role, "state")
        self._since = layout.role_word(role, "state_since_ns")
        self._cycles = layout.role_word(role, "cycles")
        self._errors = layout.role_word(role, "errors")
        self.due_ns = 0
        """When the next heartbeat is due."""
        self._steps = Histogram(control.words, STEPS[role])

    def beat(self) -> int:
        """Store the heartbeat and return its time; for long work outside `busy`."""
        now_ns = self._clock.monotonic_ns()
        self.due_ns = now_ns + BEAT_NS
        self._cells[self._heartbeat] = now_ns
        return now_ns

    def beat_if_due(self) -> None:
        """Store the heartbeat when it is due; cheap enough to be called often."""
        if self._clock.monotonic_ns() >= self.due_ns:
            self.beat()

    def enter(self, state: int) -> None:
        """Change the state and notify the supervisor."""
        self.set_state(state)
        self._changed()

    def busy(self, state: int) -> Busy:
        """Context of a call that may take seconds: STATE_SYNCING, _ALLOCATING or _RECOVERING."""
        return Busy(self, state)

    def set_state(self, state: int) -> int:
        """Store the state, after the time of its begin; returns the previous state."""
        cells = self._cells
        before = cells[self._state]
        now_ns = self._clock.monotonic_ns()
        self.due_ns = now_ns + BEAT_NS
        cells[self._heartbeat] = cells[self._since] = now_ns
        cells[self._state] = state
        return before

    def worked(self, steps: int) -> None:
        """Count steps that did work."""
        self._control.add(self._cycles, steps)

    def timed(self, took_ns: int, steps: int) -> None:
        """Record the duration of one step on behalf of `steps` steps."""
        self._steps.observe(took_ns, steps)

    def failed(self) -> None:
        """Count a logged error."""
        self._control.add(self._errors, 1)

    def log_error(self, event: str, **fields: object) -> None:
        """Log an error and count it."""
        self.failed()
        role_log.get_logger().error(event, **fields)

    def log_exception(self, event: str, **fields: object) -> None:
        """Log and count the exception that is being handled, with its traceback."""
        self.failed()
        role_log.get_logger().exception(event, **fields)

    def log_connection_error(self, _error: Exception) -> None:
        """Log and count an unexpected error that has closed a client's connection."""
        self.log_exception("unexpected error: a client's connection is closed")


class Busy:
    """Busy state during a call; a class, since each message of a SYNC_FLUSH store enters one."""

    __slots__ = ("_before", "_heartbeat", "_state")

    def __init__(self, heartbeat: Heartbeat, state: int) -> None:
        self._heartbeat = heartbeat
        self._state = self._before = state

    def __enter__(self) -> None:
        self._before = self._heartbeat.set_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._heartbeat.set_state(self._before)


class Role(abc.ABC):
    """Base of a role. Every method is bounded; slow calls are wrapped in `heartbeat.busy`."""

    name: str

    @abc.abstractmethod
    def do_work(self) -> int:
        """Do one step without blocking; returns the amount of work done, 0 for none."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Sleep at the bell (`bell.wait`), or in an epoll with an EventBell and sockets."""

    @abc.abstractmethod
    def on_stop(self) -> bool:
        """Do one step of the shutdown; called until it returns True. Waits itself where it must."""

    # A role may leave out those that follow.

    def close(self) -> None:  # noqa: B027
        """Close files and sockets. Called once, also after an error."""

    def reload(self, options: Options) -> None:  # noqa: B027
        """Apply new values of options that may change while the role runs."""

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:  # noqa: B027
        """A timed step has ended; it counts for all since the last one, or `alone` for itself."""

    def linger_s(self) -> float:
        """Length of a pause after work, called twice each time; a wake-up costs more than a step."""
        return 0.0

    def has_news(self) -> bool:
        """Whether there is new work that would not end a wait; cheaper than another step."""
        return True


class BellKind(enum.Enum):
    """Kind of bell that a role waits at."""

    SEMAPHORE = "semaphore"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Everything that a role's factory receives."""

    name: str
    paths: StorePaths
    options: Options
    control: Control
    io: StoreIO
    clock: Clock
    bells: Mapping[str, Bell]
    """Bells by role name."""
    sockets: Mapping[str, socket.socket]
    """Listening sockets of this role, by the names in its RoleSpec."""
    incarnation: int
    """1 at the first start under this supervisor; a higher number is a restart, which takes over from a killed role."""
    heartbeat: Heartbeat

    @property
    def bell(self) -> Bell:
        return self.bells[self.name]

    @property
    def sync_flush(self) -> bool:
        return self.options.sync_flush


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How a role is created, in its own process after the fork."""

    name: str
    factory: Callable[[RoleContext], Role]
    bell: BellKind = BellKind.SEMAPHORE
    sockets: tuple[str, ...] = ()
    """Names of its listening sockets. The supervisor opens them, so they outlive the role."""
    prepare: Callable[[], None] = lambda: None
    """Process-wide preparation before the factory runs."""
    zero_fill: bool = False
    """Whether an unreadable page of log or index reads as zeros, which is damage, instead of ending the role."""


class RoleSignals:
    """SIGTERM and SIGHUP as flags. Each also rings the role's bell, to wake it."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self.stop_requested = False
        self.reload_requested = False

    @property
    def any_requested(self) -> bool:
        return self.stop_requested or self.reload_requested

    def install(self) -> None:
        """Install the handlers. SIGINT is ignored: the supervisor stops the roles in order."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        self._bell.post()

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self.reload_requested = True
        self._bell.post()


class RoleLoop:
    """Runs one role until SIGTERM.

    The clock is read once a step, after it: that time is also the begin of the next step and the end of a wait. Steps
    are counted here and added to the shared word when a step is timed and before each wait. All other bookkeeping
    happens every SAMPLE_NS, so a step that is not timed costs one comparison and one addition.
    """

    def __init__(self, role: Role, context: RoleContext, signals: RoleSignals) -> None:
        self._role = role
        self._do_work = role.do_work
        self._timed = role.timed
        self._bell = context.bell
        self._heartbeat = context.heartbeat
        self._monotonic_ns = context.clock.monotonic_ns
        self._context = context
        self._signals = signals
        # Only roles with sockets spin, since clients wait for them; another role would take the processor from them.
        # The dispatcher spins itself while a client waits for it.
        self._linger_s = role.linger_s
        self._has_news = role.has_news
        self._spin_ns = context.options.max_spin_us * 1000 if context.sockets else 0
        timeout_s = context.options.heartbeat_timeout_ms / 1000
        self._idle_wait_s = min(MAX_WAIT_S, timeout_s / BEATS_PER_TIMEOUT)
        self._now_ns = 0
        self._return_ns = context.clock.monotonic_ns() + RETURN_NS
        # Sampling time. The step timed is the first that begins after it: the one that is running at that moment would
        # be biased, since a long step is more likely to be running.
        self._sample_ns = 0
        self._sampling = True
        # The current burst, that is the work since the last wait, and the length of the last one.
        self._burst_began_ns = 0
        self._burst_steps = 0
        self._burst_ns = 0
        # Steps that did work and are not in the shared word yet, or not represented by a timed step yet.
        self._uncounted = 0
        self._untimed = 0
        self._last_took_ns = 0

    def run(self) -> None:
        self._heartbeat.enter(layout.STATE_RUNNING)
        self._now_ns = self._heartbeat.beat()
        try:
            self._work()
        finally:
            self._count()
            if self._untimed:
                # No later step can represent them.
                self._heartbeat.timed(self._last_took_ns, self._untimed)
                self._untimed = 0
        self._heartbeat.enter(layout.STATE_STOPPING)
        while not self._role.on_stop():
            self._heartbeat.beat_if_due()

    def _work(self) -> None:
        worked = False
        while not self._signals.stop_requested:
            if self._signals.reload_requested:
                self._reload()
            done = self._step()
            if done:
                worked = True
            if done > SPIN_WORK_MAX:
                continue
            if worked and self._linger():
                worked = False
                continue
            if done:
                done = self._spin()
            self._rest(done)
            worked = False

    def _step(self) -> int:
        began_ns = self._now_ns
        done = self._do_work()
        if done:
            self._uncounted += 1
        self._now_ns = now_ns = self._monotonic_ns()
        if now_ns >= self._sample_ns:
            self._account(began_ns, done)
        return done

    def _account(self, began_ns: int, done: int) -> None:
        """Beat, count steps, time this step on behalf of those before it; a slow one for itself."""
        self._heartbeat.beat_if_due()
        if not done:
            self._sample_missed()
            return
        self._count()
        if self._now_ns - began_ns >= SLOW_STEP_NS:
            self._time(began_ns, 1, alone=True)
            self._untimed -= 1
        elif self._sampling:
            self._time(began_ns, self._untimed, alone=False)
            self._last_took_ns = self._now_ns - began_ns
            self._untimed = 0
            self._sample_ns = self._now_ns + SAMPLE_NS
        self._sampling = self._now_ns >= self._sample_ns

    def _time(self, began_ns: int, steps: int, *, alone: bool) -> None:
        self._heartbeat.timed(self._now_ns - began_ns, steps)
        self._timed(began_ns, self._now_ns, alone=alone)

    def _count(self) -> None:
        if self._uncounted:
            self._heartbeat.worked(self._uncounted)
            self._untimed += self._uncounted
            self._uncounted = 0

    def _spin(self) -> int:
        """Poll for more work for a short time; returns the result of the last step."""
        done = 1
        deadline = self._now_ns + self._spin_ns
        while not self._signals.any_requested:
            if self._spin_ns:
                self._to_wait()
                # Let the client that was just answered run on this processor and send its next request.
                os.sched_yield()
                self._end_wait(self._monotonic_ns())
            done = self._step()
            if done:
                deadline = self._now_ns + self._spin_ns
                if done > SPIN_WORK_MAX:
                    break
            elif self._now_ns >= deadline:
                break
        return done

    def _linger(self) -> bool:
        """Pause before waiting at the bell; `expedite` ends the pause, other work is found after it."""
        pause_s = self._linger_s()
        if pause_s <= 0 or self._signals.any_requested:
            return False
        self._to_wait()
        self._bell.linger()
        try:
            if self._linger_s() > 0:
                self._bell.wait(pause_s)
        finally:
            self._bell.awake()
        self._end_wait(self._monotonic_ns())
        return True

    def _rest(self, done: int) -> None:
        """Wait, unless there is work. `done` is the result of the last step."""
        self._count()
        self._bell.announce()
        try:
            check = done or self._has_news()
            idle = not (check and self._step()) and not self._signals.any_requested
            self._to_wait()
            if idle:
                if self._now_ns >= self._return_ns:
                    self._return_ns = self._now_ns + RETURN_NS
                    return_freed_memory()
                self._role.wait(self._idle_wait_s)
        finally:
            self._bell.awake()
            now_ns = self._monotonic_ns()
            # Rarely: pending work comes first.
            if now_ns >= self._heartbeat.due_ns:
                self._heartbeat.beat()
            self._end_wait(now_ns)

    def _to_wait(self) -> None:
        """Record the length of the burst that ends here, if it did any work."""
        steps = self._uncounted + self._untimed
        if steps != self._burst_steps:
            self._burst_steps = steps
            self._burst_ns = self._now_ns - self._burst_began_ns

    def _end_wait(self, now_ns: int) -> None:
        self._burst_began_ns = self._now_ns = now_ns
        if now_ns >= self._sample_ns:
            self._sample_missed()

    def _sample_missed(self) -> None:
        """Draw a random sampling time in the next burst, after one that passed while idle.

        Otherwise the first step after a wait would always be the one timed, and its length is not typical.
        """
        if not self._sampling:
            self._sample_ns = self._now_ns + int(random.random() * self._burst_ns)

    def _reload(self) -> None:
        self._signals.reload_requested = False
        with cache.compiling_allowed():  # No client waits.
            self._role.reload(read_settings(self._context.io, self._context.paths))
        self._now_ns = self._monotonic_ns()


def run_role(spec: RoleSpec, context: RoleContext, trace_fd: int, *, debug: bool = False) -> int:
    """Run a role in its own process until it stops; returns the exit code.

    `trace_fd` receives the Python stack on SIGABRT, SIGSEGV, SIGBUS, SIGFPE and SIGILL; the log names the page and file
    of a SIGBUS. With `debug` a debugger is entered once the role has been created.
    """
    faulthandler.enable(trace_fd, all_threads=True)
    _configure_log(context)
    paths = context.paths
    meanings = {paths.commit_log: LOST_LOG_PAGE, paths.index: LOST_INDEX_PAGE}
    zeros = ZeroFill(meanings, context.heartbeat.log_error)
    install_sigbus_handler(
        functools.partial(log_lost_page, context.heartbeat, trace_fd), zeros if spec.zero_fill else None
    )
    signals = RoleSignals(context.bell)
    signals.install()
    context.heartbeat.enter(layout.STATE_STARTING)
    try:
        set_cpu_affinity(context.name, context.options)
        spec.prepare()
        role = spec.factory(context)
        # From now on requests that need a kernel are refused; a start waits for it.
        cache.before_compiling(functools.partial(refuse_to_compile, context.control))
        context.io.wrap_syncs(lambda: context.heartbeat.busy(layout.STATE_SYNCING))
        with contextlib.closing(role):
            loop = RoleLoop(role, context, signals)
            if debug:
                breakpoint()
            loop.run()
    except (bdb.BdbQuit, SystemExit):
        # Since Python 3.14 pdb asks whether to end the process, and exits.
        if not debug:
            raise
        role_log.get_logger().info("left by the debugger")
        return EXIT_FAILED
    except MqprocError as error:
        context.heartbeat.log_error(str(error), code=error.code)
        return error.exit_code if error.exit_code in BOOT_EXIT_CODES else EXIT_FAILED
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            context.heartbeat.log_error("the store's file system is read-only", error=str(error))
        else:
            context.heartbeat.log_exception("unexpected error")
        return EXIT_FAILED
    return 0


def refuse_to_compile(control: Control, name: str) -> None:
    """Raise StoreBusyError for a kernel that is being compiled in the background."""
    if not control.load(layout.KERNELS_LEFT):
        return
    what = next((text for module, text in _KERNELS_OF if name.startswith(module)), "this request")
    if control.load(layout.KERNELS_FAILED):
        raise StoreBusyError(f"the kernels for {what} could not be compiled: see mqproc errors", hint_ms=_COMPILING_MS)
    left_s = control.load(layout.KERNELS_LEFT_MS) / 1000
    left = f", {left_s:.0f} s left" if left_s else ""
    raise StoreBusyError(f"the kernels for {what} are being compiled{left}", hint_ms=_COMPILING_MS)


def log_lost_page(heartbeat: Heartbeat, trace_fd: int, text: str, _code: int) -> None:
    # Before anything that touches a mapping: another SIGBUS, as on a full disk, would end this process at once.
    os.write(trace_fd, f"{text}\n".encode())
    faulthandler.dump_traceback(trace_fd, all_threads=True)
    heartbeat.log_error(text)


def _configure_log(context: RoleContext) -> None:
    """Configure logging, with the store's error log if it can be opened."""
    log_format = context.options.log_format
    try:
        errors = ErrorLog.open(context.io, context.paths, context.name)
    except OSError as error:
        role_log.configure(context.name, log_format=log_format)
        context.heartbeat.log_error("errors are not kept in the store", error=str(error))
    else:
        role_log.configure(context.name, errors=errors, log_format=log_format)
