"""A simulated group: roles as scheduled tasks, killed and stopped as by a supervisor."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from greenlet import getcurrent, greenlet

from mqproc.client.connection import CallOutcome, Connection, open_socket
from mqproc.client.requests import Call
from mqproc.client.retry import ConnectionLost
from mqproc.config.options import Options, RetentionGuard
from mqproc.errors import MqprocError, NotRunningError, StoreBusyError
from mqproc.io.store_io import Clock
from mqproc.ipc.bell import EventBell
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.roles.registry import SPECS
from mqproc.roles.role import BOOT_EXIT_CODES, Heartbeat, Role, RoleContext
from mqproc.store.compat import note_maker
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.store.sync_guard import SyncWatch
from mqproc.supervisor.supervise import STEPS
from mqproc.wire.address import listen
from tests.crash.disk import Broken, Journal, Killed, Machine, RecordingIO, must_end_well

# Processes as greenlets: at each storage call and each pause, another one may run.


LONG_JUMP_MS = 1_100
STORE_TIME_AHEAD_MS = 60_000


class Schedule:
    """Runs tasks in an order decided by a seed. `failure` has ended a task unexpectedly."""

    def __init__(self, rng: random.Random, journal: Journal) -> None:
        self._rng = rng
        self._journal = journal
        self._main = getcurrent()
        self._tasks: dict[str, greenlet] = {}
        self._names: list[str] = []
        self.failure: BaseException | None = None

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Add a task."""
        self._tasks[name] = greenlet(lambda: self._guarded(name, work), parent=self._main)
        self._names = sorted(self._tasks)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            error.add_note(f"in task {name}")
            self.failure = error
        finally:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._tasks.pop(name, None)
        self._names = sorted(self._tasks)

    @property
    def names(self) -> list[str]:
        return self._names

    def turn(self, name: str = "") -> None:
        """Run one task, random unless named, to its next pause."""
        names = [name] if name else self.names
        task = self._tasks.get(chosen := self._rng.choice(names)) if names else None
        if task is not None:
            self._journal.note("turn", chosen)
            task.switch()
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Called by a task: let others run. No effect in the main task."""
        if getcurrent() is not self._main:
            self._main.switch()

    def end(self, name: str) -> None:
        """Unwind a task whose storage is dead."""
        task = self._tasks.get(name)
        if task is None:
            return
        while not task.dead:
            try:
                task.throw(Killed)
            except Killed:
                break  # Not started yet.
        self._forget(name)

    def end_all(self) -> None:
        """Unwind all tasks."""
        for name in self.names:
            self.end(name)


class SimulatedClock(Clock):
    """Time that passes by the schedule and in sleeps."""

    def __init__(self, schedule: Schedule, time_ms: int) -> None:
        self._schedule = schedule
        self._ns = 1_000_000_000
        self._offset_ms = time_ms - 1_000
        self.latest_ms = time_ms
        """The latest time returned so far."""
        self.set_back = False
        """Whether it was set back by more than store timestamps stay ahead of it."""

    def monotonic_ns(self) -> int:
        return self._ns

    def time_ms(self) -> int:
        now_ms = self._offset_ms + self._ns // 1_000_000
        self.latest_ms = max(self.latest_ms, now_ms)
        return now_ms

    def sleep(self, seconds: float) -> None:
        self._ns += int(seconds * 1e9)
        self._schedule.pause()

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self._ns += ms * 1_000_000

    def step(self, ms: int) -> None:
        """Set the machine's clock forwards or backwards."""
        self._offset_ms += ms
        self.set_back = self.set_back or ms < -STORE_TIME_AHEAD_MS


ROLES = tuple(spec for spec in SPECS if spec.name != words_of.MONITOR)
TURNS_OF_STOP_MAX = 20_000
# Simulated supervisor's pid: it is written to files.
PID = 4242


class Group:
    """One life of a group on the store at `root`, from recovery on."""

    def __init__(self, root: Path, options: Options, machine: Machine, schedule: Schedule, clock: SimulatedClock):
        self.paths = StorePaths(root)
        self._machine = machine
        self._schedule = schedule
        self._clock = clock
        self.said: list[str] = []
        self._own = RecordingIO(machine)
        own, paths = self._own, self.paths
        own.make_folder(paths.own, 0o700)
        if options.retention_guard is RetentionGuard.AUTO:
            note_maker(own, paths)
        clean = not own.exists(paths.abort)
        own.write_file_atomically(paths.abort, str(PID).encode())
        self.control = Control.create(own, paths, clock, PID)
        own.make_folder(paths.commit_log)
        self.options = adopt_sizes(own, paths, options, self.said.append)
        recovery = Recovery(
            own, paths, self.options, self.control.words, self.said.append, clean=clean, now_ms=clock.time_ms
        )
        with must_end_well("recovery"):
            recovery.run()
        self._active = SyncWatch()
        self._active.open(own, paths, self.options, self.control.words)
        self._bells = {
            role: EventBell(self.control.cells, words_of.role_word(role, "sleeping")) for role in words_of.ROLES
        }
        self._listeners = {name: listen(paths.socket(name)) for name in ("writer", "query")}
        self._ios: dict[str, RecordingIO] = {}
        self._roles: dict[str, Role] = {}
        self._incarnations = dict.fromkeys((spec.name for spec in ROLES), 0)
        self._stopping: set[str] = set()
        self._fallen: list[str] = []
        for spec in ROLES:
            self.start(spec.name)

    @property
    def names(self) -> list[str]:
        """Running roles."""
        return [name for name in self._incarnations if name in self._schedule.names]

    @property
    def roles(self) -> Mapping[str, Role]:
        """Running roles by name, once each has started."""
        return self._roles

    def start(self, name: str) -> None:
        """Start a role, with the next incarnation if it ran before."""
        spec = next(spec for spec in ROLES if spec.name == name)
        self._incarnations[name] += 1
        io = self._ios[name] = RecordingIO(self._machine)
        sockets = {socket: self._listeners[socket] for socket in spec.sockets}
        context = RoleContext(
            name,
            self.paths,
            self.options,
            self.control,
            io,
            self._clock,
            self._bells,
            sockets,
            self._incarnations[name],
            Heartbeat(self.control, name, self._clock),
        )
        self._schedule.add(name, lambda: self._live_well(name, spec.factory, context))

    def _live_well(self, name: str, factory: Callable[[RoleContext], Role], context: RoleContext) -> None:
        """Run a role until it ends, also by a kill, or by a failed call if it would be restarted."""
        try:
            with must_end_well(name):
                self._live(name, factory, context)
        except Killed:
            if not self._machine.over:
                self._fallen.append(name)
            raise
        except Broken as broken:
            error = broken.__cause__
            ends_group = isinstance(error, MqprocError) and error.exit_code in BOOT_EXIT_CODES
            if not self._machine.failed or ends_group or not _is_of_storage(error):
                raise
            self._fallen.append(name)

    def restart_fallen(self) -> bool:
        """Restart roles that ended by a failed call or a kill; whether there were any."""
        have_fallen = bool(self._fallen)
        while self._fallen:
            name = self._fallen.pop()
            self._ios[name].dead = True
            self._sync_files_of(name)
            self.start(name)
        return have_fallen

    def restart_stuck(self) -> None:
        """Restart roles whose calls keep failing, as an operator would."""
        for name in [name for name in self.names if self._ios[name].stuck]:
            self.kill(name)
            self.start(name)

    def _live(self, name: str, factory: Callable[[RoleContext], Role], context: RoleContext) -> None:
        assert isinstance(context.io, RecordingIO)
        role = factory(context)
        self._roles[name] = role
        try:
            while name not in self._stopping:
                role.do_work()
                self._machine.disk.observe()
                self._schedule.pause()
            while not role.on_stop():
                self._machine.disk.observe()
                self._schedule.pause()
        except Killed:
            # Killed inside a kernel, before its storage was marked dead: no orderly end.
            context.io.dead = True
            raise
        finally:
            self._roles.pop(name, None)
            _close(role)
            context.io.close_all()

    def kill(self, name: str) -> None:
        """SIGKILL for one role, then the supervisor's cleanup before the next start."""
        io = self._ios[name]
        self._machine.disk.observe()
        io.dead = True
        self._schedule.end(name)
        self._fallen = [fallen for fallen in self._fallen if fallen != name]
        self._sync_files_of(name)

    def _sync_files_of(self, name: str) -> None:
        """The supervisor's cleanup before the next start."""
        if not self.control.sync_errno and (failed := self._active.sync(name)):
            self.control.store(words_of.SUPERVISOR_SYNC_ERRNO, failed)

    def kill_all(self) -> None:
        """End the whole group at once."""
        self._machine.disk.observe()
        self._machine.over = True
        self._schedule.end_all()
        self._release()

    def stop(self, rng: random.Random) -> None:
        """Stop the group; the store is then clean, unless a role failed."""
        for step in STEPS:
            names = [name for name in step if name in self._incarnations]
            self._stopping.update(names)
            self._wait_for_end_of(names, rng)
        if not self._fallen:
            self._remove_abort()
        self._release()

    def _remove_abort(self) -> None:
        try:
            self._own.unlink(self.paths.abort)
            self._own.sync_folder(self.paths.root)
        except OSError:
            if not self._machine.failed:
                raise

    def _wait_for_end_of(self, names: list[str], rng: random.Random) -> None:
        for _ in range(TURNS_OF_STOP_MAX):
            if not set(names) & set(self._schedule.names):
                return
            self._schedule.turn()
            self._clock.advance(rng.randint(0, 20))
        raise AssertionError(f"{names} did not stop within {TURNS_OF_STOP_MAX:,} turns")

    def _release(self) -> None:
        self._own.close_all()
        self._machine.disk.release_maps()
        for listener in self._listeners.values():
            listener.close()
        for bell in self._bells.values():
            bell.close()

    @property
    def synced(self) -> int:
        """Durable end of the log."""
        return self.control.flushed

    @property
    def read_only(self) -> bool:
        return self.control.read_only


def _is_of_storage(error: BaseException | None) -> bool:
    """Whether a failed call caused the error."""
    while error is not None and not isinstance(error, OSError | MqprocError):
        error = error.__cause__
    return error is not None


def _close(role: Role) -> None:
    with contextlib.suppress(Killed):
        role.close()


# Calls of client tasks: one at a time, over the real socket, without blocking.


TRIES = 50


def connect(path: Path) -> Connection | None:
    """Connect to a server; None without a listener."""
    try:
        return Connection(open_socket(path))
    except (NotRunningError, StoreBusyError):
        return None


def tries(schedule: Schedule) -> Iterator[None]:
    """Retry a few times while other tasks run."""
    for _ in range(TRIES):
        yield
        schedule.pause()


class Caller:
    """A client of one role, for one task."""

    def __init__(self, path: Path, schedule: Schedule) -> None:
        self._path = path
        self._schedule = schedule
        self._connection: Connection | None = None

    def call(self, call: Call[Any]) -> CallOutcome:
        """Make a call while others run. Without a server, it fails as not taken."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._path)
        if self._connection is None:
            self._schedule.pause()
            return CallOutcome(None, ConnectionLost("no listener", taken=False))
        request_id = self._connection.submit(call)
        while (outcome := self._connection.done.pop(request_id, None)) is None:
            self._connection.flush()
            self._schedule.pause()
            self._connection.receive()
        return outcome

    def leave(self, call: Call[Any]) -> None:
        """End during a call whose request is in the socket."""
        if self._connection is not None and not self._connection.closed:
            self._connection.submit(call)
            self._connection.flush()
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
