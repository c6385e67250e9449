"""The one loop that runs every role: step, beat, wait at the bell, stop.

    start    signal handlers, STARTING, factory, RUNNING
    run      do_work until it returns 0 · spin or linger a little · announce, look again, wait · …
    stop     SIGTERM: STOPPING, on_stop until it returns True, close

A role is a class with a bounded `do_work`; it knows neither signals nor processes, and a test may call its methods
without any of this. Signal handlers only set a flag and ring the role's own bell.
"""

from __future__ import annotations

import bdb
import contextlib
import enum
import errno
import faulthandler
import functools
import os
import random
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Final, Protocol, runtime_checkable

from mqproc.config import Options
from mqproc.control import Control
from mqproc.errors import MqprocError
from mqproc.io import StoreIO
from mqproc.ipc.bell import MAX_WAIT_S, Bell
from mqproc.ipc.clock import Clock
from mqproc.layout import control as layout
from mqproc.lost_pages import Zeros, name_lost_pages
from mqproc.metrics.error_log import ErrorLog
from mqproc.paths import StorePaths
from mqproc.roles import log
from mqproc.roles.heart import Heart
from mqproc.roles.placement import take_place
from mqproc.store.settings import read_settings

SPIN_WORK_MAX: Final = 64
"""Only a step that did little is followed by spinning: single messages are in a hurry, frames need the processor."""

BEATS_PER_TIMEOUT: Final = 4
"""An idle role wakes this often within the time after which it counts as silent."""

SAMPLE_NS: Final = 10_000_000
"""After so long the next step that does work is timed, and counts for all that were not."""

SLOW_STEP_NS: Final = 10_000_000
"""A step that takes longer is timed in any case, and counts for itself: slow ones are rare, and what one looks for."""
assert SLOW_STEP_NS >= SAMPLE_NS  # So a slow one ends when steps are looked at.

EXIT_FAILED: Final = 1
# What the pages mean that a role goes on without (RoleSpec.reads_on).
LOST_OF_THE_LOG: Final = "messages that have a part there are damaged ones for now"
LOST_OF_THE_INDEX: Final = "keys that lead there cannot be looked up until mqproc store repair has made it again"
BOOT_EXIT_CODES: Final = frozenset({3, 6, 7, 8})
"""Exit codes of errors that a restart does not cure. Any other error of a role's is an unexpected one."""


class Role(Protocol):
    """What the loop runs. Every method is bounded; one that may take seconds says so by `heart.busy`."""

    @property
    def name(self) -> str:
        """As in `layout.control.ROLES`."""
        ...

    def do_work(self) -> int:
        """One step; returns how much it did, 0 when there was nothing to do. Must not block."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep at the bell (`bell.wait`), or in an epoll that holds an EventBell beside sockets."""
        ...

    def on_stop(self) -> bool:
        """One step towards the end; called until it returns True. It waits by itself where it has to wait."""
        ...

    def close(self) -> None:
        """Let go of files and sockets. Called once, also after an error."""
        ...


@runtime_checkable
class Reloadable(Protocol):
    """A role that takes new values of the options that may change while it runs."""

    def reload(self, options: Options) -> None:
        """Use these options from now on."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A role that counts how long things take by the steps that the loop times, not by looking at a clock at each."""

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        """A step that did work has ended. It stands for all steps since the last one told, or `alone` for itself."""
        ...


@runtime_checkable
class Lingering(Protocol):
    """A role that lies low after work before every ring wakes it: a wake-up costs its ringer more than a step does."""

    def linger_s(self) -> float:
        """How long to lie low and then look again by itself; 0 to wait at the bell at once. Asked twice each time."""
        ...


@runtime_checkable
class Prompted(Protocol):
    """A role that knows what its bell may tell of: a look at that takes the place of a step before each wait."""

    def has_news(self) -> bool:
        """Whether there is something to do since the last step, which did nothing, that a wait would not end for."""
        ...


class BellKind(enum.Enum):
    """What a role waits at."""

    SEMAPHORE = "semaphore"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Everything that a role's factory gets."""

    name: str
    paths: StorePaths
    options: Options
    control: Control
    io: StoreIO
    clock: Clock
    bells: Mapping[str, Bell]
    """Every role's bell by the role's name."""
    sockets: Mapping[str, socket.socket]
    """This role's listening sockets by the names in its RoleSpec."""
    incarnation: int
    """1 at the first start under this supervisor; more means that positions in `control` are a predecessor's."""
    heart: Heart

    @property
    def bell(self) -> Bell:
        """The role's own bell."""
        return self.bells[self.name]

    @property
    def sync_flush(self) -> bool:
        return self.options.sync_flush


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How a role is made: called in the new process, after the fork."""

    name: str
    factory: Callable[[RoleContext], Role]
    bell: BellKind = BellKind.SEMAPHORE
    sockets: tuple[str, ...] = ()
    """Names of the listening sockets it serves: the supervisor opens them, so they outlive the role."""
    prepare: Callable[[], None] = lambda: None
    """What the whole process needs for it, done before the factory."""
    reads_on: bool = False
    """Whether pages of log and index that cannot be read are zeros to it, so damage, and not its end."""


class RoleSignals:
    """SIGTERM and SIGHUP as flags. Each rings the role's bell too, so that it looks."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self.stop_asked = False
        self.reload_asked = False

    @property
    def any_asked(self) -> bool:
        return self.stop_asked or self.reload_asked

    def install(self) -> None:
        """Take the signals over. Ctrl-C belongs to the supervisor, which stops roles in order."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_asked = True
        self._bell.post()

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self.reload_asked = True
        self._bell.post()


class Loop:
    """Runs one role until it is asked to stop.

    The clock is read once a step, behind it: that is the next step's beginning, and the end of waiting for more work.
    Steps are counted here; the shared word gets the sum when a step is timed and before each wait. All else that is not
    a step's own comes up every SAMPLE_NS: so a step that is not timed costs one comparison and one count.
    """

    def __init__(self, role: Role, context: RoleContext, signals: RoleSignals) -> None:
        self._role = role
        self._do_work = role.do_work
        self._timed = role.timed if isinstance(role, Timed) else None
        self._bell = context.bell
        self._heart = context.heart
        self._monotonic_ns = context.clock.monotonic_ns
        self._context = context
        self._signals = signals
        # A client waits for the roles with sockets; another one that spins would take the processor from them. The
        # dispatcher looks out for a moment where a client waits for it.
        self._linger_s: Callable[[], float] = role.linger_s if isinstance(role, Lingering) else lambda: 0.0
        self._has_news: Callable[[], bool] = role.has_news if isinstance(role, Prompted) else lambda: True
        self._spin_ns = context.options.max_spin_us * 1000 if context.sockets else 0
        timeout_s = context.options.heartbeat_timeout_ms / 1000
        self._idle_wait_s = min(MAX_WAIT_S, timeout_s / BEATS_PER_TIMEOUT)
        self._now_ns = 0
        # From then on each step is looked at, until one has been timed: the first that begins afterwards. The one that
        # ends just then would be too long on the average, since long ones are more likely to.
        self._sample_ns = 0
        self._sampling = True
        # Since the last wait, and how long the last work between two waits was.
        self._burst_began_ns = 0
        self._burst_steps = 0
        self._burst_ns = 0
        # Steps that did work: not in the shared word yet; not timed yet.
        self._uncounted = 0
        self._untimed = 0
        self._last_took_ns = 0

    def run(self) -> None:
        """Until SIGTERM, then the role's own end."""
        self._heart.enter(layout.STATE_RUNNING)
        self._now_ns = self._heart.beat()
        try:
            self._work()
        finally:
            self._count()
            if self._untimed:
                # None comes any more that could stand for them.
                self._heart.timed(self._last_took_ns, self._untimed)
                self._untimed = 0
        self._heart.enter(layout.STATE_STOPPING)
        while not self._role.on_stop():
            self._heart.beat_if_due()

    def _work(self) -> None:
        worked = False
        while not self._signals.stop_asked:
            if self._signals.reload_asked:
                self._reload()
            done = self._step()
            if done:
                worked = True
            if done > SPIN_WORK_MAX:
                continue
            if worked and self._lingered():
                worked = False
                continue
            if done:
                done = self._go_on()
            self._rest(done)
            worked = False

    def _step(self) -> int:
        began_ns = self._now_ns
        done = self._do_work()
        if done:
            self._uncounted += 1
        self._now_ns = now_ns = self._monotonic_ns()
        if now_ns >= self._sample_ns:
            self._look_at(began_ns, done)
        return done

    def _look_at(self, began_ns: int, done: int) -> None:
        """Now and then: say "alive", count steps, time one for those before it; a slow one for itself."""
        self._heart.beat_if_due()
        if not done:
            self._passed()
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
        self._heart.timed(self._now_ns - began_ns, steps)
        if self._timed is not None:
            self._timed(began_ns, self._now_ns, alone=alone)

    def _count(self) -> None:
        """Have the shared word say how many steps did work."""
        if self._uncounted:
            self._heart.worked(self._uncounted)
            self._untimed += self._uncounted
            self._uncounted = 0

    def _go_on(self) -> int:
        """There was a little work, so more may come: look for it before sleeping, letting others run in between.

        Returns what the last step did.
        """
        done = 1
        deadline = self._now_ns + self._spin_ns
        while not self._signals.any_asked:
            if self._spin_ns:
                self._to_wait()
                # First: who was answered runs on this processor, and asks again if it does.
                os.sched_yield()
                self._waited(self._monotonic_ns())
            done = self._step()
            if done:
                deadline = self._now_ns + self._spin_ns
                if done > SPIN_WORK_MAX:
                    break
            elif self._now_ns >= deadline:
                break
        return done

    def _lingered(self) -> bool:
        """Lie low for a moment; what comes meanwhile is found afterwards, and who is in a hurry ends it."""
        pause_s = self._linger_s()
        if pause_s <= 0 or self._signals.any_asked:
            return False
        self._to_wait()
        self._bell.lie_low()
        try:
            if self._linger_s() > 0:
                self._bell.wait(pause_s)
        finally:
            self._bell.awake()
        self._waited(self._monotonic_ns())
        return True

    def _rest(self, done: int) -> None:
        """Wait, unless there is something to do. `done` is what the last step did."""
        self._count()
        self._bell.announce()
        try:
            look = done or self._has_news()
            stays = not (look and self._step()) and not self._signals.any_asked
            self._to_wait()
            if stays:
                self._role.wait(self._idle_wait_s)
        finally:
            self._bell.awake()
            now_ns = self._monotonic_ns()
            # Seldom: what has waited for this role comes first.
            if now_ns >= self._heart.due_ns:
                self._heart.beat()
            self._waited(now_ns)

    def _to_wait(self) -> None:
        """How long the burst was that ends here, if it was one: behind a wait somebody may be in a hurry."""
        steps = self._uncounted + self._untimed
        if steps != self._burst_steps:
            self._burst_steps = steps
            self._burst_ns = self._now_ns - self._burst_began_ns

    def _waited(self, now_ns: int) -> None:
        self._burst_began_ns = self._now_ns = now_ns
        if now_ns >= self._sample_ns:
            self._passed()

    def _passed(self) -> None:
        """The time to look came while nothing was done, so a time in what is done next is drawn instead.

        The first step behind a wait would always be the one otherwise, and others are of another length.
        """
        if not self._sampling:
            self._sample_ns = self._now_ns + int(random.random() * self._burst_ns)

    def _reload(self) -> None:
        self._signals.reload_asked = False
        if isinstance(self._role, Reloadable):
            self._role.reload(read_settings(self._context.io, self._context.paths))
            self._now_ns = self._monotonic_ns()


def run_role(spec: RoleSpec, context: RoleContext, trace_fd: int, *, debug: bool = False) -> int:
    """A role's whole life in its own process; returns its exit code.

    `trace_fd` takes the Python stack when the process gets SIGABRT, SIGSEGV, SIGBUS, SIGFPE or SIGILL, and
    the log what page of which file was lost. With `debug` a debugger is entered when the role has been made.
    """
    faulthandler.enable(trace_fd, all_threads=True)
    _configure_log(context)
    paths = context.paths
    meanings = {paths.commit_log: LOST_OF_THE_LOG, paths.index: LOST_OF_THE_INDEX}
    zeros = Zeros(meanings, functools.partial(_log_zeros, context.heart))
    name_lost_pages(functools.partial(_log_lost_page, context.heart, trace_fd), zeros if spec.reads_on else None)
    signals = RoleSignals(context.bell)
    signals.install()
    context.heart.enter(layout.STATE_STARTING)
    try:
        take_place(context.name, context.options)
        spec.prepare()
        role = spec.factory(context)
        context.io.say_when_syncing(lambda: context.heart.busy(layout.STATE_SYNCING))
        with contextlib.closing(role):
            loop = Loop(role, context, signals)
            if debug:
                breakpoint()
            loop.run()
    except (bdb.BdbQuit, SystemExit):
        # From Python 3.14 on pdb asks whether the process is to end, and exits.
        if not debug:
            raise
        log.get_logger().info("left by the debugger")
        return EXIT_FAILED
    except MqprocError as error:
        context.heart.failed()
        log.get_logger().error(str(error), code=error.code)
        return error.exit_code if error.exit_code in BOOT_EXIT_CODES else EXIT_FAILED
    except Exception as error:
        context.heart.failed()
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            log.get_logger().error("the store's file system is read-only", error=str(error))
        else:
            log.get_logger().exception("unexpected error")
        return EXIT_FAILED
    return 0


def _log_zeros(heart: Heart, text: str) -> None:
    heart.failed()
    log.get_logger().error(text)


def _log_lost_page(heart: Heart, trace_fd: int, text: str, _code: int) -> None:
    # First, since all else lies in maps, for which there may be no room either: that ends this process at once.
    os.write(trace_fd, f"{text}\n".encode())
    faulthandler.dump_traceback(trace_fd, all_threads=True)
    heart.failed()
    log.get_logger().error(text)


def _configure_log(context: RoleContext) -> None:
    """Errors are kept in the store too, as far as that can be written: a disk may fail, or be read-only by now."""
    log_format = context.options.log_format
    try:
        errors = ErrorLog.open(context.io, context.paths, context.name)
    except OSError as error:
        log.configure(context.name, log_format=log_format)
        context.heart.failed()
        log.get_logger().error("errors are not kept in the store", error=str(error))
    else:
        log.configure(context.name, errors=errors, log_format=log_format)
