"""The supervisor: lock, template, monitor, recovery, spawn in order, watch, restart, stop in order.

    supervise()   lock → control → bells, sockets → warm → template → monitor → recovery → loop
                  → everything ended → lock free

The loop is single-threaded and sleeps in one place, at the control socket's epoll, which also holds children (pidfds),
signals and the roles' notes that their state has changed. It never waits for a role: starting and stopping are plans
that advance when something has happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mqproc.config.options import FIELDS, Options
from mqproc.errors import BadRequestError, MqprocError, StoreAccessError, StoreBusyError, StoreReadOnlyError
from mqproc.io.clock import Clock
from mqproc.io.fault_injection import io_from_environment
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc import bell
from mqproc.ipc.control import Control
from mqproc.ipc.error_log import ErrorLog
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import control as layout
from mqproc.paths import StorePaths, printable_path, shell_quoted
from mqproc.roles import role_log
from mqproc.roles.process_setup import set_title
from mqproc.roles.role import RoleSpec
from mqproc.store.recovery.store_files import mark_open
from mqproc.store.settings import write_settings
from mqproc.supervisor import signals as prctl
from mqproc.supervisor.control_socket import ControlSocket, Done, GiveBack, Lent, Reactor
from mqproc.supervisor.cpu_latency import CpuLatencyRequest, request_cpu_latency
from mqproc.supervisor.debug_attach import DebugAttachment, Terminal
from mqproc.supervisor.group import Group, Member
from mqproc.supervisor.hooks import (
    EXIT_FAILED,
    Death,
    GroupContext,
    Halt,
    Hooks,
    Outcome,
    Report,
    RestartPolicy,
    Timing,
    lenient,
)
from mqproc.supervisor.notify import ServiceManager
from mqproc.supervisor.signals import Signals
from mqproc.supervisor.store_folder import Resources, lost_name, prepare_folder, starting, why_unwritable
from mqproc.supervisor.template import Inheritance, raise_open_files
from mqproc.wire.operations import RunAnswer, RunRequest, StatusAnswer

# --- stopping ---
# The order in which a group stops: whoever makes work before whoever does it.
#
#     keeper → writer → commitlog-flusher → dispatcher → query → cq-flusher and index-flusher
#            → marks, checkpoint, `abort` removed → monitor
#
# Each role's own `on_stop` does what its place asks for: the commitlog-flusher syncs all that was written, the dispatcher
# reaches `confirmed`, the two other flushers make their three thorough passes. `abort` stays when anything went wrong.


STEPS: Final[tuple[tuple[str, ...], ...]] = (
    (layout.KEEPER,),
    (layout.WRITER,),
    (layout.COMMITLOG_FLUSHER,),
    (layout.DISPATCHER,),
    (layout.QUERY,),
    (layout.CQ_FLUSHER, layout.INDEX_FLUSHER),
)
LAST: Final = (layout.MONITOR,)
assert {name for step in (*STEPS, LAST) for name in step} == set(layout.ROLES)


class StopPlan:
    """One ordered stop. `advance` is called again and again until it says that all is done."""

    def __init__(self, group: Group, turn_away: Callable[[str], None], finish: Callable[[], None]) -> None:
        """`turn_away` keeps clients from a role, so that none sends what nobody will read or answer."""
        self._group = group
        self._turn_away = turn_away
        self._finish = finish
        self._steps = list(STEPS)
        self._finished = False
        group.problems += [
            f"{member.name} was not running when the group stopped"
            for member in group.members.values()
            if not member.alive
        ]

    def advance(self) -> bool:
        """Go as far as possible without waiting; True when the last role has ended."""
        while self._steps and self._ended(self._steps[0]):
            self._steps.pop(0)
        if self._steps:
            return False
        if not self._finished:
            self._finished = True
            self._finish()
        return self._ended(LAST)

    def expedite(self) -> None:
        """Ask all at once instead of in order: what is then not dispatched or flushed, the next start will do."""
        self._group.problems.append("the stop was cut short")
        for member in self._group.members.values():
            self._group.ask_to_stop(member)

    def _ended(self, names: Sequence[str]) -> bool:
        for name in names:
            self._turn_away(name)
        members = [member for name in names if (member := self._member(name)) is not None]
        for member in members:
            self._group.ask_to_stop(member)
        return not any(member.alive for member in members)

    def _member(self, name: str) -> Member | None:
        return self._group.members.get(name)


EXIT_NOT_BOOTED: Final = 3
EXIT_INTERRUPTED: Final = 130
_MS: Final = 1_000_000
_REQUESTS: Final = (layout.APPENDED_FRAMES, layout.QUERY_REQUESTS, layout.WAITING_PULLS)
"""Sends, reads, and who waits: what `Wakeups.look` is told."""

Ready = Callable[[Control], None]
"""Is told when every role serves, with the group's words."""


def supervise(
    paths: StorePaths,
    options: Options,
    specs: Sequence[RoleSpec],
    hooks: Hooks,
    *,
    report: Report = print,
    ready: Ready = lambda control: None,
    timing: Timing | None = None,
    policy: RestartPolicy | None = None,
    io: StoreIO | None = None,
    clock: Clock | None = None,
) -> Outcome:
    """Run a group on a store until it is told to stop; `ready` is called when every role serves.

    Raises a MqprocError when it cannot begin: StoreAccessError, StoreLockedError, whatever recovery raises. The calling
    process is the supervisor from then on and has no threads of its own, since it forks (OPENBLAS_NUM_THREADS=1 in the
    environment before numpy is imported keeps numpy from making some).
    """
    io, clock = io or io_from_environment(os.environ), clock or Clock()
    paths = StorePaths(paths.root.absolute())
    with contextlib.ExitStack() as stack:
        wakeups = stack.enter_context(request_cpu_latency(options.cpu_latency_us))
        prepare_folder(io, paths)
        with starting(paths):
            lock = StoreLock.acquire(io, paths)
        stack.callback(lock.close)
        io.crash_point("supervisor.locked")
        with starting(paths):
            errors = ErrorLog.create(io, paths, layout.SUPERVISOR)
        role_log.configure(layout.SUPERVISOR, errors=errors, log_format=options.log_format)
        set_title(layout.SUPERVISOR, paths.root)
        prctl.become_subreaper()
        raise_open_files()
        with starting(paths):
            control = Control.create(io, paths, clock, os.getpid())
        stack.callback(control.close)
        stack.callback(control.store, layout.GROUP_STATE, layout.GROUP_DOWN)
        clean = not io.exists(paths.abort)
        context = GroupContext(paths, options, io, clock, control, lenient(report), clean)
        timing, policy = timing or Timing(), policy or RestartPolicy()
        supervisor = Supervisor(context, hooks, specs, lock, wakeups, ready, timing, policy)
        try:
            return supervisor.run()
        except MqprocError as error:
            # The caller prints it; who asks later finds it here.
            if errors is not None:
                errors.note(f"the group did not start: {error}", clock.time_ms())
            raise


class Supervisor:
    """One group's life. Also the `Commands` of its control socket."""

    def __init__(
        self,
        context: GroupContext,
        hooks: Hooks,
        specs: Sequence[RoleSpec],
        lock: StoreLock,
        wakeups: CpuLatencyRequest,
        ready: Ready,
        timing: Timing,
        policy: RestartPolicy,
    ) -> None:
        self._context = context
        self._control = context.control
        self._clock = context.clock
        self._hooks = hooks
        self._specs = specs
        self._lock = lock
        self._wakeups = wakeups
        self._ready = ready
        self._timing = timing
        self._policy = policy
        self._options = context.options
        self._stop_plan: StopPlan | None = None
        self._outcome = Outcome(0, "stopped")
        self._stop_waiters: list[Done] = []
        self._restart_waiters: list[tuple[Member, int, Done]] = []
        self._interrupts = 0
        # A terminal that is closed sends SIGHUP too, and means the end.
        self._on_terminal = os.isatty(0)
        self._manager = ServiceManager.from_environment(os.environ)
        self._next_tick_ns = 0
        self._next_ring_ns = 0
        self._ended = False

    # Life

    def run(self) -> Outcome:
        """From what is locked and empty to what has ended."""
        with contextlib.ExitStack() as stack:
            self._signals = Signals()
            stack.callback(self._signals.close)
            try:
                with starting(self._context.paths):
                    self._begin(stack)
            except KeyboardInterrupt:
                return Outcome(EXIT_INTERRUPTED, "interrupted before the group was up; the next start recovers")
            while not self._ended:
                self._turn()
            return self._outcome

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Everything before the loop. Whatever it made, `stack` undoes."""
        context = self._context
        self._control.store(layout.GROUP_STATE, layout.GROUP_RECOVERING)
        self._manager.say_state(layout.GROUP_RECOVERING)
        write_settings(context.io, context.paths, context.options)
        # Before kernels are made ready, which takes minutes where they are compiled: who asks is told what goes on.
        resources = self._resources = Resources.make(context.paths, self._control, self._specs)
        context.io.crash_point("supervisor.bells")
        stack.callback(resources.close)
        stack.callback(resources.unlink_names)
        self._reactor = Reactor()
        stack.callback(self._reactor.close)
        self._reactor.watch(self._signals.fileno(), self._take_signals)
        self._reactor.watch(resources.changed_fd, resources.drain_changed)
        self._group = self._make_group(resources)
        self._socket = ControlSocket(resources.control_socket, self, self._reactor)
        # Undone in this order: children end, names go, the lock is freed, and only then clients see the end.
        stack.callback(self._socket.close)
        stack.callback(self._lock.close)
        stack.callback(self._remove_sockets, resources)
        stack.callback(self._group.kill_all)
        self._control.store(layout.RECOVERY_STEP, layout.STEP_KERNELS)
        with self._signals.interrupting():
            self._hooks.warm(context)
            # Not before: what is not compiled yet is compiled by children, since the compiler's memory would stay here.
            bell.warm()
        self._control.store(layout.RECOVERY_STEP, layout.STEP_NONE)
        gc.collect()
        gc.freeze()
        self._group.start_template()
        resources.unlink_names()
        self._recover()

    def _make_group(self, resources: Resources) -> Group:
        context = self._context
        inheritance = Inheritance(
            supervisor_pid=os.getpid(),
            specs={spec.name: spec for spec in self._specs},
            paths=context.paths,
            options=context.options,
            control=context.control,
            io=context.io,
            clock=context.clock,
            bells=resources.bells,
            sockets=resources.sockets,
            traces=resources.traces,
            lock_fd=self._lock.fd,
            changed_fd=resources.changed_fd,
        )
        return Group(context, self._hooks, inheritance, self._reactor, self._timing, self._policy, self._halt)

    def _recover(self) -> None:
        context = self._context
        began_ns = self._clock.monotonic_ns()
        with self._signals.interrupting():
            self._hooks.check(context)
        # It reads only, and may be asked for minutes before there is a loop that could start it.
        self._group.start_ahead(layout.MONITOR)
        with self._signals.interrupting():
            # Before anything is changed: a crash in recovery is a crash.
            mark_open(context.io, context.paths, context.report)
            try:
                self._hooks.recover(context)
            except FailedSyncError as error:
                # Else the next start would find the same bytes in memory and take them for durable.
                self._keep_failed_sync(error)
                raise StoreReadOnlyError(f"recovery: a sync failed: {error}; run mqproc store repair") from error
        context.io.crash_point("supervisor.recovered")
        now_ns = self._clock.monotonic_ns()
        self._control.store(layout.RECOVERY_US, (now_ns - began_ns) // 1000)
        # Nothing has beaten since the start, and from the next state on that would mean the end.
        self._control.store(layout.SUPERVISOR_HEARTBEAT_NS, now_ns)
        self._set_group_state(layout.GROUP_STARTING)

    # One turn of the loop

    def _turn(self) -> None:
        plan = self._stop_plan
        if plan is None:
            self._group.look_for_started()
            self._group.start_due()
            self._begin_next()
        elif plan.advance():
            self._end()
            return
        self._answer_restarts()
        self._tick()
        # A halt in this very turn made a plan that is to be begun at once.
        self._socket.poll(self._pause_s() if plan is self._stop_plan else 0.0)

    def _begin_next(self) -> None:
        if self._control.load(layout.GROUP_STATE) != layout.GROUP_STARTING:
            return
        if self._group.all_have_run:
            self._set_group_state(layout.GROUP_READY)
            with contextlib.suppress(OSError):
                self._ready(self._control)
        else:
            self._group.start_next()

    def _tick(self) -> None:
        now = self._clock.monotonic_ns()
        if now >= self._next_tick_ns:
            self._next_tick_ns = now + self._timing.tick_ms * _MS
            if (lost := lost_name(self._context.paths, self._lock)) is not None:
                self._let_go(lost)
                return
            self._control.store(layout.SUPERVISOR_HEARTBEAT_NS, now)
            self._group.watch()
            self._hooks.watch()
            self._wakeups.look(now, *map(self._control.load, _REQUESTS))
            self._manager.tick(now, self._control)
        if now >= self._next_ring_ns:
            self._next_ring_ns = now + self._timing.ring_ms * _MS
            self._group.ring_all()

    def _pause_s(self) -> float:
        due_ns = self._group.next_due_ns()
        until_ns = self._next_tick_ns if due_ns is None else min(self._next_tick_ns, due_ns)
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _set_group_state(self, state: int) -> None:
        self._control.store(layout.GROUP_STATE, state)
        self._manager.say_state(state)
        self._context.report(f"group {layout.GROUP_NAMES[state]}")

    # Signals

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGHUP and not self._on_terminal:
                self._reload_by_signal()
            elif number == signal.SIGUSR1:
                self._reopen_logs()
            elif number == signal.SIGINT:
                self._interrupted()
            else:
                self._stop(Outcome(0, "stopped"))

    def _interrupted(self) -> None:
        """Ctrl-C: once stops in order, twice hurries, three times kills."""
        self._interrupts += 1
        if self._stop_plan is None:
            self._stop(Outcome(0, "stopped"))
        elif self._interrupts == 2:
            self._outcome = Outcome(EXIT_INTERRUPTED, "the stop was cut short; the next start recovers")
            self._group.stop_limit_ms = self._timing.quick_stop_ms
            self._stop_plan.expedite()
        elif self._interrupts > 2:
            self._group.signal_all(signal.SIGKILL)

    def _reload_by_signal(self) -> None:
        self._manager.say_reloading()
        try:
            self.reload()
        except (MqprocError, OSError) as error:
            # Whoever asked by a signal hears of it nowhere else.
            role_log.get_logger().error(f"options not reloaded: {error}")
        except Exception:
            # A file that cannot be read in a way that nobody thought of is no reason to end the group.
            role_log.get_logger().exception("options not reloaded")
        self._manager.say_state(self._control.load(layout.GROUP_STATE))

    def _reopen_logs(self) -> None:
        """A detached group's log file may have been moved away; another's output is somebody else's affair."""
        try:
            reopened = role_log.reopen_log_file()
        except OSError as error:
            role_log.get_logger().error(f"log file not opened anew, the old one goes on: {error}")
            return
        if reopened:
            self._group.reopen_logs()
            self._context.report("log file opened anew")

    # The end

    def _halt(self, halt: Halt) -> None:
        """A role cannot be kept running."""
        booted = self._control.load(layout.GROUP_STATE) == layout.GROUP_READY
        code = EXIT_NOT_BOOTED if halt.exit_code == EXIT_FAILED and not booted else halt.exit_code
        why = why_unwritable(self._context.io, self._context.paths)
        reason = f"{halt.reason}: {why}" if why else halt.reason
        role_log.get_logger().error("the group halts", reason=reason, exit_code=code)
        command = f"mqproc errors --store {shell_quoted(self._context.paths.root)}"
        self._stop(Outcome(code, f"{reason}; {command} tells why"))
        self._group.problems.append(reason)

    def _stop(self, outcome: Outcome) -> None:
        if self._stop_plan is not None:
            return
        self._outcome = outcome
        self._group.stopping = True
        self._set_group_state(layout.GROUP_STOPPING)
        refusal = StoreBusyError("the group is stopping")
        for _, _, done in self._restart_waiters:
            done(refusal)
        self._restart_waiters.clear()
        self._group.refuse_loans(refusal)
        self._stop_plan = StopPlan(self._group, self._resources.turn_away, self._finish)

    def _finish(self) -> None:
        """All but the monitor have ended: note what is durable, and that this was a stop in order."""
        context, problems = self._context, self._group.problems
        behind = self._control.confirmed(sync_flush=self._options.sync_flush) - self._control.load(layout.DISPATCHED)
        if behind > 0:
            problems.append(f"dispatch is {behind:,} bytes behind")
        if self._control.read_only:
            problems.append("the store is read-only after a failed sync")
            self._group.remember_failed_sync()
        try:
            self._hooks.finish(context, not problems)
            context.io.crash_point("supervisor.stopped")
            if not problems:
                context.io.unlink(context.paths.abort)
                context.io.crash_point("supervisor.abort_removed")
                context.io.sync_folder(context.paths.root)
        except (MqprocError, OSError) as error:
            problems.append(f"marks and checkpoint: {error}")
            if isinstance(error, FailedSyncError):
                self._keep_failed_sync(error)
        if problems:
            context.report("not a clean stop, the next start recovers: " + "; ".join(problems))
            if self._outcome.exit_code == 0:
                self._outcome = Outcome(EXIT_FAILED, "; ".join(problems))

    def _remove_sockets(self, resources: Resources) -> None:
        """Where the store is another's by now, so are they."""
        if lost_name(self._context.paths, self._lock) is None:
            resources.remove_sockets()

    def _let_go(self, lost: Path) -> None:
        """Everything ends at once, as by a kill: whatever an orderly stop wrote by a name might be another's."""
        reason = f"{lost} was deleted, moved or replaced under the group, which ends: see to the store, then mqproc up"
        role_log.get_logger().error("the group halts", reason=reason, exit_code=EXIT_NOT_BOOTED)
        self._context.report(reason)
        self._outcome = Outcome(EXIT_NOT_BOOTED, reason)
        self._end()

    def _keep_failed_sync(self, error: FailedSyncError) -> None:
        """The supervisor's own sync failed: that is final too."""
        self._control.store(layout.SUPERVISOR_SYNC_ERRNO, error.errno or errno.EIO)
        self._group.remember_failed_sync()

    def _end(self) -> None:
        self._ended = True
        self._control.store(layout.GROUP_STATE, layout.GROUP_DOWN)
        self._context.report("group down")
        for done in self._stop_waiters:
            done(None)

    # Commands

    def status(self) -> StatusAnswer:
        """What `mqproc status` shows."""
        roles: dict[str, dict[str, int | str]] = {}
        for name in (layout.TEMPLATE, *self._group.members):
            words = {word: self._control.load(layout.supervised_word(name, word)) for word in _SHOWN}
            state = layout.SUPERVISED_NAMES[self._control.load(layout.supervised_word(name, "supervised"))]
            roles[name] = {"state": state, **words}
        return StatusAnswer(
            group=layout.GROUP_NAMES[self._control.load(layout.GROUP_STATE)],
            store=printable_path(self._context.paths.root),
            pid=os.getpid(),
            epoch=self._control.load(layout.EPOCH),
            started_ms=self._control.load(layout.GROUP_STARTED_MS),
            roles=roles,
        )

    def restart_role(self, role: str, done: Done) -> None:
        """Stop a role and start it again; `done` when it runs."""
        member = self._free_member(role)
        self._restart_waiters.append((member, member.incarnation + 1, done))
        self._group.restart(member)

    def run_role(self, wanted: RunRequest, borrower: int, done: Lent) -> GiveBack:
        """Lend a role to the terminal of the process that asks; `done` when it has ended there."""
        member = self._free_member(wanted.role)
        if member.state != layout.RUNNING:
            raise StoreBusyError(
                f"{wanted.role} is {layout.SUPERVISED_NAMES[member.state]}: only a running role is lent"
            )
        terminal = Terminal(wanted.stdin, wanted.stdout, wanted.stderr)
        terminal.check(borrower)

        def ended(how: Death | MqprocError) -> None:
            done(how if isinstance(how, MqprocError) else RunAnswer(str(how), how.clean))

        loan = DebugAttachment(borrower, terminal, wanted.debug, ended)
        self._group.lend(member, loan)
        return lambda: self._group.take_back(member, loan)

    def _free_member(self, role: str) -> Member:
        """A role that may be stopped and started at a client's wish."""
        member = self._group.members.get(role)
        if member is None:
            raise BadRequestError(f"no role is called {role!r}; there are {', '.join(self._group.members)}")
        if self._stop_plan is not None:
            raise StoreBusyError("the group is stopping")
        if member.loan is not None:
            raise StoreBusyError(f"{role} is lent to the terminal of pid {member.loan.borrower}")
        return member

    def _answer_restarts(self) -> None:
        for waiter in list(self._restart_waiters):
            member, incarnation, done = waiter
            if member.state == layout.RUNNING and member.incarnation >= incarnation:
                self._restart_waiters.remove(waiter)
                done(None)

    def stop_group(self, done: Done) -> None:
        """Stop in order; `done` when everything has ended."""
        self._stop_waiters.append(done)
        self._stop(Outcome(0, "stopped"))

    def reload(self) -> None:
        """Read the options again; those that may change while the group runs reach every role."""
        if self._hooks.reload is None:
            raise BadRequestError("this group's options cannot be reloaded")
        found, old = self._hooks.reload(), self._options
        changed = [name for name in FIELDS if getattr(found, name) != getattr(old, name)]
        taken = {name: getattr(found, name) for name in changed if FIELDS[name].metadata["reload"]}
        options = dataclasses.replace(old, **taken)
        try:
            write_settings(self._context.io, self._context.paths, options)
        except OSError as error:
            # Roles read it there. Without it all goes on by the old ones.
            raise StoreAccessError(f"{self._context.paths.settings}: {error.strerror}") from error
        self._options = options
        self._group.changes |= taken
        self._group.signal_all(signal.SIGHUP)
        self._context.report(_reload_line(taken, [name for name in changed if name not in taken]))


_SHOWN: Final = ("pid", "incarnation", "restarts")


def _reload_line(taken: dict[str, object], left: list[str]) -> str:
    new = ", ".join(f"{name} = {value}" for name, value in taken.items()) or "nothing new"
    return f"options reloaded: {new}" + (f"; a restart of the group is needed for {', '.join(left)}" if left else "")
