"""The supervisor: lock, template, monitor, recovery, starts, watch, restarts, stop.

    supervise()   lock → control → bells, sockets → warm → template → monitor → recovery → loop
                  → everything ended → lock free

The loop is single-threaded and sleeps only in the control socket's epoll, which also has children (pidfds), signals,
and the eventfd of state changes. It never waits for a role: starts and stops are plans that advance with events.
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
from mqproc.config.parse import socket_access
from mqproc.errors import BadRequestError, MqprocError, StoreAccessError, StoreBusyError, StoreReadOnlyError
from mqproc.io.fault_injection import io_from_environment
from mqproc.io.store_io import Clock, FailedSyncError, StoreIO
from mqproc.ipc import bell
from mqproc.ipc.control import Control
from mqproc.ipc.error_log import ErrorLog
from mqproc.ipc.health import note_problems
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import control as layout
from mqproc.paths import StorePaths, printable_path, shell_quoted
from mqproc.roles import role_log
from mqproc.roles.role import RoleSpec, set_title
from mqproc.store.access import write_settings
from mqproc.store.recovery.store_files import mark_open
from mqproc.supervisor import signals as prctl
from mqproc.supervisor.control_socket import Attached, ControlSocket, Detach, Done, Reactor, Stopped
from mqproc.supervisor.cpu_latency import CpuLatencyRequest, request_cpu_latency
from mqproc.supervisor.group import Group, Member
from mqproc.supervisor.hooks import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_BOOTED,
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
from mqproc.supervisor.template import DebugAttachment, Inheritance, Terminal, raise_open_files
from mqproc.wire.operations import RunAnswer, RunRequest, StatusAnswer, StopAnswer

# Order of a stop: producers of work before its consumers.
#
#     keeper → writer → commitlog-flusher → dispatcher → query → cq-flusher and index-flusher
#            → marks, checkpoint, `abort` removed → monitor
#
# Each role's `on_stop` finishes its work: the commitlog-flusher syncs everything written, the dispatcher reaches
# `confirmed`, the other flushers make three thorough passes. After any problem `abort` stays.


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
    """An ordered stop. Call `advance` until it returns True."""

    def __init__(self, group: Group, turn_away: Callable[[str], None], finish: Callable[[], None]) -> None:
        """`turn_away` closes a role's listener, so that clients send nothing that would not be read."""
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
        """Advance without waiting; True when the last role has ended."""
        while self._steps and self._end_roles(self._steps[0]):
            self._steps.pop(0)
        if self._steps:
            return False
        if not self._finished:
            self._finished = True
            self._finish()
        return self._end_roles(LAST)

    def expedite(self) -> None:
        """Stop all at once instead of in order; the next start dispatches and flushes the rest."""
        self._group.problems.append("the stop was cut short")
        for member in self._group.members.values():
            self._group.ask_to_stop(member)

    def _end_roles(self, names: Sequence[str]) -> bool:
        for name in names:
            self._turn_away(name)
        members = [self._group.members[name] for name in names if name in self._group.members]
        for member in members:
            self._group.ask_to_stop(member)
        return not any(member.alive for member in members)


_MS: Final = 1_000_000
_REQUESTS: Final = (layout.APPENDED_FRAMES, layout.QUERY_REQUESTS, layout.WAITING_PULLS)
"""Sends, reads and waiting consumers, for `CpuLatencyRequest.update`."""

Ready = Callable[[Control], None]
"""Called with the group's words when every role runs."""


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
    """Run a group on a store until it is stopped; `ready` is called when every role runs.

    Raises an MqprocError when it cannot start: StoreAccessError, StoreLockedError, errors of recovery. The calling
    process becomes the supervisor, and must have no other threads, since it forks (OPENBLAS_NUM_THREADS=1 in the
    environment before the import of numpy avoids numpy's).
    """
    io, clock = io or io_from_environment(os.environ), clock or Clock()
    paths = StorePaths(paths.root.absolute())
    with contextlib.ExitStack() as stack:
        cpu_latency = stack.enter_context(request_cpu_latency(options.cpu_latency_us))
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
        control.store(layout.CLEAN_START, int(clean))
        context = GroupContext(paths, options, io, clock, control, lenient(report), clean)
        timing, policy = timing or Timing(), policy or RestartPolicy()
        supervisor = Supervisor(context, hooks, specs, lock, cpu_latency, ready, timing, policy)
        try:
            return supervisor.run()
        except MqprocError as error:
            # The caller prints it; this is for later readers.
            if errors is not None:
                errors.note(f"the group did not start: {error}", clock.time_ms())
            raise


class Supervisor:
    """One group's life, and the `Commands` of its control socket."""

    def __init__(
        self,
        context: GroupContext,
        hooks: Hooks,
        specs: Sequence[RoleSpec],
        lock: StoreLock,
        cpu_latency: CpuLatencyRequest,
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
        self._cpu_latency = cpu_latency
        self._ready = ready
        self._timing = timing
        self._policy = policy
        self._options = context.options
        self._stop_plan: StopPlan | None = None
        self._outcome = Outcome(0, "stopped")
        self._stop_waiters: list[Stopped] = []
        self._restart_waiters: list[tuple[Member, int, Done]] = []
        self._interrupts = 0
        # Closing a terminal also sends SIGHUP, which stops the group then.
        self._on_terminal = os.isatty(0)
        self._manager = ServiceManager.from_environment(os.environ)
        self._next_tick_ns = 0
        self._next_ring_ns = 0
        self._ended = False

    # Life

    def run(self) -> Outcome:
        """Run from the locked store to the end of all processes."""
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
        """Prepare everything before the loop; `stack` undoes it."""
        context = self._context
        self._control.store(layout.GROUP_STATE, layout.GROUP_RECOVERING)
        self._manager.say_state(layout.GROUP_RECOVERING)
        write_settings(context.io, context.paths, context.options)
        # Before kernels are loaded, which may compile for minutes: clients can see the progress.
        resources = self._resources = Resources.make(
            context.paths, self._control, self._specs, socket_access(context.options)
        )
        context.io.crash_point("supervisor.bells")
        stack.callback(resources.close)
        stack.callback(resources.unlink_names)
        self._reactor = Reactor()
        stack.callback(self._reactor.close)
        self._reactor.watch(self._signals.fileno(), self._take_signals)
        self._reactor.watch(resources.changed_fd, resources.drain_changed)
        specs = {spec.name: spec for spec in self._specs}
        inheritance = Inheritance(os.getpid(), specs, context, resources, self._lock.fd)
        self._group = Group(self._hooks, inheritance, self._reactor, self._timing, self._policy, self._halt)
        self._socket = ControlSocket(resources.control_socket, self, self._reactor)
        # Undone in this order: children, names, the lock, and only then clients see the end.
        stack.callback(self._socket.close)
        stack.callback(self._lock.close)
        stack.callback(self._remove_sockets)
        stack.callback(self._group.kill_all)
        self._control.store(layout.RECOVERY_STEP, layout.STEP_KERNELS)
        with self._signals.interrupting():
            self._hooks.warm(context)
            # Not earlier: children compile missing kernels, to keep the compiler's memory out of this process.
            bell.warm()
        self._control.store(layout.RECOVERY_STEP, layout.STEP_NONE)
        gc.collect()
        gc.freeze()
        self._group.start_template()
        resources.unlink_names()
        self._recover()

    def _recover(self) -> None:
        context = self._context
        began_ns = self._clock.monotonic_ns()
        with self._signals.interrupting():
            self._hooks.check(context)
        # The monitor only reads, and may be scraped for minutes before the loop could start it.
        self._group.start_ahead(layout.MONITOR)
        with self._signals.interrupting():
            # Before any change: a crash during recovery is a crash.
            mark_open(context.io, context.paths, context.report)
            try:
                self._hooks.recover(context)
            except FailedSyncError as error:
                # Otherwise the next start would find the same bytes in the page cache and take them for durable.
                self._keep_failed_sync(error)
                raise StoreReadOnlyError(f"recovery: a sync failed: {error}; run mqproc store repair") from error
        context.io.crash_point("supervisor.recovered")
        now_ns = self._clock.monotonic_ns()
        self._control.store(layout.RECOVERY_US, (now_ns - began_ns) // 1000)
        # There were no heartbeats since the start; from the next state on that would mean the end.
        self._control.store(layout.SUPERVISOR_HEARTBEAT_NS, now_ns)
        self._set_group_state(layout.GROUP_STARTING)

    # One turn of the loop

    def _turn(self) -> None:
        plan = self._stop_plan
        if plan is None:
            self._group.note_started()
            self._group.start_due()
            self._begin_next()
        elif plan.advance():
            self._end()
            return
        self._answer_restarts()
        self._tick()
        # A halt in this turn has made a plan that starts at once.
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
            if (lost := lost_name(self._context.paths, self._lock) or self._hooks.lost_file()) is not None:
                self._abandon_store(lost)
                return
            self._control.store(layout.SUPERVISOR_HEARTBEAT_NS, now)
            self._group.watch()
            self._hooks.watch()
            self._cpu_latency.update(now, *map(self._control.load, _REQUESTS))
            self._manager.tick(now, self._control)
        if now >= self._next_ring_ns:
            self._next_ring_ns = now + self._timing.ring_ms * _MS
            self._group.ring_all()
            context = self._context
            note_problems(self._control, context.io, context.paths, self._options, self._clock)

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
                self._handle_interrupt()
            else:
                self._stop(Outcome(0, "stopped"))

    def _handle_interrupt(self) -> None:
        """Ctrl-C: once stops in order, twice stops at once, three times kills."""
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
            # A signal has no other way to report the error.
            role_log.get_logger().error(f"options not reloaded: {error}")
        except Exception:
            # An unexpected error in the file must not end the group.
            role_log.get_logger().exception("options not reloaded")
        self._manager.say_state(self._control.load(layout.GROUP_STATE))

    def _reopen_logs(self) -> None:
        """Only a detached group's log file can be reopened; other output belongs to the caller."""
        try:
            reopened = role_log.reopen_log_file()
        except OSError as error:
            role_log.get_logger().error(f"log file not reopened, the old one is used: {error}")
            return
        if reopened:
            self._group.reopen_logs()
            self._context.report("log file reopened")

    # The end

    def _halt(self, halt: Halt) -> None:
        """Stop the group because a role cannot be kept running."""
        booted = self._control.load(layout.GROUP_STATE) == layout.GROUP_READY
        code = EXIT_NOT_BOOTED if halt.exit_code == EXIT_FAILED and not booted else halt.exit_code
        why = why_unwritable(self._context.io, self._context.paths)
        reason = f"{halt.reason}: {why}" if why else halt.reason
        role_log.get_logger().error("the group halts", reason=reason, exit_code=code)
        command = f"mqproc errors --store {shell_quoted(self._context.paths.root)}"
        self._stop(Outcome(code, f"{reason}; see {command}"))
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
        self._group.refuse_attachments(refusal)
        self._stop_plan = StopPlan(self._group, self._resources.turn_away, self._finish)

    def _finish(self) -> None:
        """When only the monitor is left: write durable positions, and record a clean stop."""
        context, problems = self._context, self._group.problems
        backlog = self._control.confirmed(sync_flush=self._options.sync_flush) - self._control.load(layout.DISPATCHED)
        if backlog > 0:
            problems.append(f"dispatch has a backlog of {backlog:,} bytes")
        if self._control.read_only:
            problems.append("the store is read-only after a failed sync")
            self._group.remember_failed_sync()
        if unflushed := self._control.load(layout.WRITTEN) - self._control.flushed:
            problems.append(f"the last {unflushed:,} bytes of the log are not durable")
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

    def _remove_sockets(self) -> None:
        """Remove the sockets, unless the path leads to another store by now."""
        if lost_name(self._context.paths, self._lock) is None:
            self._resources.remove_sockets()

    def _abandon_store(self, lost: Path) -> None:
        """End everything at once, as by a kill: an orderly stop could write into another store."""
        reason = f"{lost} was deleted, moved or replaced under the group, which ends: check the store, then mqproc up"
        role_log.get_logger().error("the group halts", reason=reason, exit_code=EXIT_NOT_BOOTED)
        self._context.report(reason)
        self._outcome = Outcome(EXIT_NOT_BOOTED, reason)
        self._end()

    def _keep_failed_sync(self, error: FailedSyncError) -> None:
        """Record a failed sync of the supervisor itself, which is final too."""
        self._control.store(layout.SUPERVISOR_SYNC_ERRNO, error.errno or errno.EIO)
        self._group.remember_failed_sync()

    def _end(self) -> None:
        self._ended = True
        self._control.store(layout.GROUP_STATE, layout.GROUP_DOWN)
        self._context.report("group down")
        unclean = self._outcome.exit_code not in (0, EXIT_INTERRUPTED)
        problems = self._group.problems or ([self._outcome.reason] if unclean else [])
        for done in self._stop_waiters:
            done(StopAnswer(problems))

    # Commands

    def status(self) -> StatusAnswer:
        """The answer for `mqproc status`."""
        roles: dict[str, dict[str, int | str]] = {}
        for name in (layout.TEMPLATE, *self._group.members):
            words = {word: self._control.load(layout.role_word(name, word)) for word in _SHOWN}
            state = layout.SUPERVISED_NAMES[self._control.load(layout.role_word(name, "supervised"))]
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
        """Restart a role; `done` is called when it runs."""
        member = self._free_member(role)
        self._restart_waiters.append((member, member.incarnation + 1, done))
        self._group.restart(member)

    def run_role(self, request: RunRequest, caller_pid: int, done: Attached) -> Detach:
        """Attach a role to the caller's terminal; `done` is called when it has ended there."""
        member = self._free_member(request.role)
        if member.state != layout.RUNNING:
            raise StoreBusyError(
                f"{request.role} is {layout.SUPERVISED_NAMES[member.state]}: only a running role can be attached"
            )
        terminal = Terminal(request.stdin, request.stdout, request.stderr)
        terminal.check(caller_pid)

        def ended(result: Death | MqprocError) -> None:
            done(result if isinstance(result, MqprocError) else RunAnswer(str(result), result.clean))

        attachment = DebugAttachment(caller_pid, terminal, request.debug, ended)
        self._group.attach_role(member, attachment)
        return lambda: self._group.detach_role(member, attachment)

    def _free_member(self, role: str) -> Member:
        """A role that may be restarted for a client now."""
        member = self._group.members.get(role)
        if member is None:
            raise BadRequestError(f"unknown role {role!r}; roles are {', '.join(self._group.members)}")
        if self._stop_plan is not None:
            raise StoreBusyError("the group is stopping")
        if member.attachment is not None:
            raise StoreBusyError(f"{role} is attached to the terminal of pid {member.attachment.caller_pid}")
        return member

    def _answer_restarts(self) -> None:
        for waiter in list(self._restart_waiters):
            member, incarnation, done = waiter
            if member.state == layout.RUNNING and member.incarnation >= incarnation:
                self._restart_waiters.remove(waiter)
                done(None)

    def stop_group(self, done: Stopped) -> None:
        """Stop in order; `done` is called when everything has ended."""
        self._stop_waiters.append(done)
        self._stop(Outcome(0, "stopped"))

    def reload(self) -> None:
        """Read the options again; reloadable options reach every role."""
        if self._hooks.reload is None:
            raise BadRequestError("this group's options cannot be reloaded")
        new, old = self._hooks.reload(), self._options
        changed = [name for name in FIELDS if getattr(new, name) != getattr(old, name)]
        applied = {name: getattr(new, name) for name in changed if FIELDS[name].metadata["reload"]}
        options = dataclasses.replace(old, **applied)
        try:
            write_settings(self._context.io, self._context.paths, options)
        except OSError as error:
            # Roles read it from there. After an error all keep the old options.
            raise StoreAccessError(f"{self._context.paths.settings}: {error.strerror}") from error
        self._options = options
        self._group.changes |= applied
        self._group.signal_all(signal.SIGHUP)
        self._context.report(_reload_line(applied, [name for name in changed if name not in applied]))


_SHOWN: Final = ("pid", "incarnation", "restarts")


def _reload_line(applied: dict[str, object], left: list[str]) -> str:
    new = ", ".join(f"{name} = {value}" for name, value in applied.items()) or "nothing new"
    return f"options reloaded: {new}" + (f"; a restart of the group is needed for {', '.join(left)}" if left else "")
