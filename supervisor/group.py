"""The group's roles: states as in supervisord, starts, stops, deaths.

             start             state RUNNING           SIGTERM              exit 0
    STOPPED ───────▶ STARTING ───────────────▶ RUNNING ─────────▶ STOPPING ────────▶ STOPPED
                        ▲  │ died                │ died               │ died
                        │  ▼                     ▼                    ▼
                      BACKOFF ◀────────────── EXITED ──────────▶   FATAL: the group halts

A successor starts only after its predecessor was waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from mqproc.errors import MqprocError
from mqproc.layout import control as layout
from mqproc.roles import role_log
from mqproc.roles.role import RoleSpec
from mqproc.store.sync_guard import remember_failed_sync
from mqproc.supervisor.control_socket import Reactor
from mqproc.supervisor.hooks import (
    EXIT_FAILED,
    Death,
    Deaths,
    Halt,
    Hooks,
    Restart,
    RestartPolicy,
    Timing,
)
from mqproc.supervisor.template import DebugAttachment, Inheritance, Template, TemplateGoneError
from mqproc.util.procfs import own_children

_ROUNDS_MAX: Final = 100


class OrphanReaper:
    """Reaps unknown children: of a dead template, and orphans of a subreaper or of process 1.

    Created before the first fork, since children that the process had already are not its own to end.
    """

    def __init__(self) -> None:
        self._foreign = own_children()

    def reap(self, known: frozenset[int] = frozenset()) -> int:
        """Kill and reap all children except the known children; return their number.

        In rounds: an orphan may fork before it is killed, and its child is then adopted.
        """
        count = 0
        for _ in range(_ROUNDS_MAX):
            orphans = own_children() - known - self._foreign
            if not orphans:
                break
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            count += len(orphans)
        return count

    def reap_ended(self, known: frozenset[int]) -> int:
        """Reap children that have ended, except the known children; return their number."""
        count = 0
        for pid in own_children() - known - self._foreign:
            with contextlib.suppress(ChildProcessError):
                count += os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
        return count


_MS: Final = 1_000_000
_TRACE_BYTES_MAX: Final = 1 << 16
_SPAWN_TRIES: Final = 2
# States of a role after its start: RUNNING, or a state within its first step.
_AT_WORK: Final = frozenset({layout.STATE_RUNNING, layout.STATE_SYNCING, layout.STATE_ALLOCATING})
# A supervisor that was stopped for this long (Ctrl-Z, a paused machine) restarts its timeouts.
_PAUSE_TICKS: Final = 4

# The reader of `mqproc errors` sees these; the log has the whole stack.
_FRAMES_MAX: Final = 3
_FRAME: Final = re.compile(r'^  File ".*?([^/"]+)", line (\d+) in (.+)$', re.MULTILINE)

Halted = Callable[[Halt], None]


def innermost_frames(trace: str) -> str:
    """The innermost frames in a faulthandler's stack, such as `role.py:12 in wait`."""
    current = trace.partition("Current thread")[2] or trace
    frames = _FRAME.findall(current.partition("\n\n")[0])
    return ", ".join(f"{file}:{line} in {function}" for file, line, function in frames[:_FRAMES_MAX])


@dataclass(slots=True)
class Member:
    """A role as seen by the supervisor."""

    spec: RoleSpec
    deaths: Deaths
    state: int = layout.STOPPED
    incarnation: int = 0
    pid: int = 0
    pidfd: int = -1
    started_ns: int = 0
    asked_ns: int = 0
    """Time of the stop request; 0 without one."""
    aborted_ns: int = 0
    """Time of SIGABRT; 0 without one."""
    abort_reason: str = ""
    due_ns: int = 0
    """Time of the next start, in BACKOFF."""
    refused: int = 0
    """Starts in sequence for which no process could be created."""
    refused_ns: int = 0
    """Time of the first of them."""
    restart_requested: bool = False
    """The stop was requested for a restart."""
    has_run: bool = False
    attachment: DebugAttachment | None = None
    """A client requested it, or has it, at its terminal."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alive(self) -> bool:
        return self.pid != 0

    @property
    def attached(self) -> bool:
        """Whether the role runs at a client's terminal."""
        return self.attachment is not None and self.attachment.begun


class Group:
    """All roles and the template, driven by the supervisor's loop."""

    def __init__(
        self,
        hooks: Hooks,
        inheritance: Inheritance,
        reactor: Reactor,
        timing: Timing,
        policy: RestartPolicy,
        halted: Halted,
    ) -> None:
        self._context = inheritance.context
        self._control = self._context.control
        self._clock = self._context.clock
        self._hooks = hooks
        self._traces = inheritance.resources.traces
        self._bells = inheritance.resources.bells
        self._reactor = reactor
        self._timing = timing
        self._policy = policy
        self._halted = halted
        self._template = Template(inheritance, timing.spawn_ms / 1000)
        self._orphans = OrphanReaper()
        self._template_deaths = Deaths(layout.TEMPLATE, policy)
        self._template_started_ns = 0
        self._template_incarnation = 0
        self._timeouts_from_ns = 0
        self._watched_ns = self._clock.monotonic_ns()
        self.members = {
            name: Member(inheritance.specs[name], Deaths(name, policy))
            for name in layout.ROLES
            if name in inheritance.specs
        }
        self.changes: dict[str, Any] = {}
        """Options reloaded since the first fork of the template."""
        self.stopping = False
        self.stop_limit_ms = timing.stop_ms
        self.problems: list[str] = []
        """Problems during the stop."""

    # Starting

    def start_template(self) -> None:
        """Fork the template, before recovery, so that roles inherit nothing of it."""
        self._template.fork()
        self._template_started_ns = self._clock.monotonic_ns()
        self._template_incarnation += 1
        self._reactor.watch(self._template.pidfd, self._template_ended)
        self._control.store(layout.TEMPLATE_PID, self._template.pid)
        self._report_template(layout.RUNNING, f"pid {self._template.pid}")

    def start(self, member: Member) -> None:
        """Start a stopped role."""
        assert not member.alive
        member.incarnation += 1
        member.restart_requested = False
        member.asked_ns = member.aborted_ns = member.due_ns = 0
        member.abort_reason = ""
        self._wipe_words(member.name)
        member.started_ns = self._clock.monotonic_ns()
        if member.attachment is not None:
            member.attachment.begun = True
        try:
            pid = self._spawn(member)
            try:
                member.pidfd = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
        except OSError as error:
            self._not_started(member, f"could not be started: {error.strerror}")
            return
        member.pid, member.refused = pid, 0
        self._reactor.watch(member.pidfd, lambda: self._check_ended(member))
        self._store(member.name, "incarnation", member.incarnation)
        self._store(member.name, "pid", member.pid)
        self._context.io.crash_point("supervisor.forked")
        born = f"pid {member.pid}, incarnation {member.incarnation}"
        if member.attachment is not None:
            self._set_state(member, layout.LENT, f"{born}, at the terminal of pid {member.attachment.caller_pid}")
        else:
            self._set_state(member, layout.STARTING, born)

    def _not_started(self, member: Member, reason: str) -> None:
        """Retry a start for which no process could be created, as at a limit of processes.

        Running roles serve meanwhile. It counts as no death, except that a role that has never run does not keep its
        group starting for ever.
        """
        self._end_attachment(member, Death(EXIT_FAILED))
        role_log.get_logger().error("a role could not be started", failed_role=member.name, reason=reason)
        now = self._clock.monotonic_ns()
        if not member.refused:
            member.refused_ns = now
        member.refused += 1
        if self.stopping:
            self._set_state(member, layout.EXITED, reason)
            self._died_while_stopping(member, Death(EXIT_FAILED))
        elif not member.has_run and now - member.refused_ns >= self._policy.window_ms * _MS:
            self._set_state(member, layout.FATAL, reason)
            self._halted(Halt(EXIT_FAILED, f"{member.name} {reason}"))
        else:
            self._report(member.name, layout.EXITED, reason)
            self._back_off(member, Restart(self._policy.delay_ms(member.refused)))

    def start_ahead(self, name: str) -> None:
        """Start a role before the loop runs, if the group has it. The loop restarts it."""
        if (member := self.members.get(name)) is not None:
            self.start(member)

    def start_next(self) -> None:
        """Start the first role that has not run yet, after all before it."""
        for member in self.members.values():
            if not member.has_run:
                if member.state == layout.STOPPED:
                    self.start(member)
                return

    def start_due(self) -> None:
        """Start roles whose back-off is over."""
        now = self._clock.monotonic_ns()
        for member in self.members.values():
            if member.state == layout.BACKOFF and now >= member.due_ns:
                self.start(member)

    def note_started(self) -> None:
        """Note roles that report RUNNING."""
        for member in self.members.values():
            if member.state == layout.STARTING and self._reported_state(member) in _AT_WORK:
                member.has_run = True
                # Use the time in the report: a role started before recovery is only seen after it.
                since_ns = self._control.load(layout.role_word(member.name, "state_since_ns"))
                took_ms = (since_ns - member.started_ns) / _MS
                self._set_state(member, layout.RUNNING, f"pid {member.pid}, after {took_ms:.1f} ms")

    @property
    def all_have_run(self) -> bool:
        return all(member.has_run for member in self.members.values())

    def next_due_ns(self) -> int | None:
        """End of the next back-off."""
        return min((m.due_ns for m in self.members.values() if m.state == layout.BACKOFF), default=None)

    def _spawn(self, member: Member) -> int:
        for _ in range(_SPAWN_TRIES):
            if self.stopping:
                break
            try:
                return self._template.spawn(member.name, member.incarnation, self.changes, member.attachment)
            except TemplateGoneError:
                self._replace_template()
        raise OSError(0, "the template does not answer")

    # Watching

    def watch(self) -> None:
        """Abort silent roles, kill those that do not end, reap ended orphans."""
        now = self._clock.monotonic_ns()
        if now - self._watched_ns > _PAUSE_TICKS * self._timing.tick_ms * _MS:
            self._timeouts_from_ns = now
        self._watched_ns = now
        for member in self._living():
            if member.aborted_ns:
                if now - member.aborted_ns >= self._timing.abort_grace_ms * _MS:
                    self._send(member, signal.SIGKILL)
            elif reason := self._overdue(member, now):
                self._abort(member, reason)
        self._orphans.reap_ended(self._known_pids() | {self._template.pid})

    def _overdue(self, member: Member, now: int) -> str | None:
        stop_ms = self.stop_limit_ms
        if member.attachment is not None and member.attachment.detached:
            stop_ms = min(stop_ms, self._timing.take_back_ms)
        if member.asked_ns and now - member.asked_ns >= stop_ms * _MS:
            return f"did not stop within {stop_ms / 1000:g} s"
        if member.attached:
            return None  # Stopped in a debugger, perhaps.
        options = self._context.options
        state = self._reported_state(member)
        # A role without a state yet is starting.
        busy = state == layout.STATE_NONE or state in layout.BUSY_STATES
        limit_ms = options.busy_timeout_ms if busy else options.heartbeat_timeout_ms
        heartbeat_ns = self._control.load(layout.role_word(member.name, "heartbeat_ns"))
        silent_ns = now - max(heartbeat_ns, member.started_ns, self._timeouts_from_ns)
        if silent_ns < limit_ms * _MS:
            return None
        return f"was unresponsive for {silent_ns / 1e9:.1f} s while {layout.STATE_NAMES[state]}"

    def _abort(self, member: Member, reason: str) -> None:
        self._context.report(f"{member.name} {reason}: aborted")
        member.aborted_ns = self._clock.monotonic_ns()
        member.abort_reason = reason
        self._send(member, signal.SIGABRT)
        # A stopped process handles SIGABRT only once continued; it does nothing else before.
        self._send(member, signal.SIGCONT)

    def ring_all(self) -> None:
        """Wake every role once, independent of its clock."""
        for bell in self._bells.values():
            bell.post()

    # Stopping

    def ask_to_stop(self, member: Member) -> None:
        """Send SIGTERM to a running role; cancel the start of a waiting one."""
        if member.alive:
            if not member.asked_ns:
                member.asked_ns = self._clock.monotonic_ns()
                self._set_state(member, layout.STOPPING, f"pid {member.pid}")
                self._send(member, signal.SIGTERM)
                self._bells[member.name].post()
        elif member.state == layout.BACKOFF:
            self._set_state(member, layout.STOPPED)

    def restart(self, member: Member) -> None:
        """Stop and start on request, which does not count as a death."""
        if member.alive:
            member.restart_requested = True
            self.ask_to_stop(member)
        else:
            self.start(member)

    def attach_role(self, member: Member, attachment: DebugAttachment) -> None:
        """Restart a role at a client's terminal."""
        member.attachment = attachment
        self.restart(member)

    def detach_role(self, member: Member, attachment: DebugAttachment) -> None:
        """The client has disconnected: stop the role there and start it normally."""
        if member.attachment is not attachment:
            return
        attachment.detached = True
        if attachment.begun:
            self.restart(member)
        else:
            member.attachment = None

    def refuse_attachments(self, error: MqprocError) -> None:
        """Refuse attachments that have not started."""
        for member in self.members.values():
            if member.attachment is not None and not member.attached:
                member.attachment.ended(error)
                member.attachment = None

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all running roles."""
        for member in self._living():
            self._send(member, number)

    def reopen_logs(self) -> None:
        """Make every process reopen the log file."""
        self.signal_all(signal.SIGUSR1)
        self._template.reopen_log()

    def kill_all(self) -> None:
        """Kill everything and wait for it."""
        living = self._living()
        for member in living:
            self._send(member, signal.SIGKILL)
        for member in living:
            os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED)
            self._reap(member)
        for member in living:
            self._sync_for(member.name)
        if self._template.pid:
            self._reactor.forget(self._template.pidfd)
            self._template.kill()
        self._orphans.reap()

    def _living(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def _send(self, member: Member, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(member.pidfd, number)

    # Ends

    def _check_ended(self, member: Member) -> None:
        found = os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED | os.WNOHANG)
        if found is None:
            return
        death = Death.of(found, (self._clock.monotonic_ns() - member.started_ns) / _MS)
        pid = member.pid
        self._reap(member)
        self._context.io.crash_point("supervisor.buried")
        is_logged = self._log_abnormal_end(member, pid, death)
        was_attached = self._end_attachment(member, death)
        detail = f"pid {pid}, {death}, lived {death.lived_ms / 1000:.1f} s"
        if member.asked_ns and (death.clean or member.restart_requested):
            self._handle_stop(member, death)
        elif was_attached and not self.stopping:
            self._set_state(member, layout.EXITED, detail)
            self._sync_for(member.name)
            self.start(member)
        else:
            if not is_logged:
                role_log.get_logger().error("a role died", dead_role=member.name, dead_pid=pid, death=str(death))
            self._handle_death(member, death, detail)

    def _end_attachment(self, member: Member, death: Death) -> bool:
        """Whether the role was attached; its end in a debugger does not count as a death."""
        attachment = member.attachment
        if attachment is None or not attachment.begun:
            return False
        member.attachment = None
        attachment.ended(death)
        return True

    def _reap(self, member: Member) -> None:
        self._reactor.forget(member.pidfd)
        os.close(member.pidfd)
        member.pid, member.pidfd = 0, -1
        self._store(member.name, "pid", 0)

    def _handle_stop(self, member: Member, death: Death) -> None:
        self._set_state(member, layout.STOPPED)
        if not death.clean:
            self._sync_for(member.name)
            if self.stopping:
                # No successor will redo its unfinished work, as after a restart.
                self._died_while_stopping(member, death)
        if member.restart_requested and not self.stopping:
            self.start(member)

    def _handle_death(self, member: Member, death: Death, detail: str) -> None:
        self._set_state(member, layout.EXITED, detail)
        self._control.add(layout.role_word(member.name, "restarts"), 1)
        # Even without a restart: the next start must know of a failed sync.
        self._sync_for(member.name)
        if self.stopping:
            self._died_while_stopping(member, death)
            return
        decision = member.deaths.decide(death, self._clock.monotonic_ns(), has_run=member.has_run)
        if isinstance(decision, Halt):
            self._set_state(member, layout.FATAL)
            self._halted(decision)
            return
        self._back_off(member, decision)

    def _died_while_stopping(self, member: Member, death: Death) -> None:
        self.problems.append(f"{member.name} died while the group stopped ({death})")

    def _back_off(self, member: Member, decision: Restart) -> None:
        if decision.delay_ms == 0:
            self.start(member)
            return
        member.due_ns = self._clock.monotonic_ns() + decision.delay_ms * _MS
        self._set_state(member, layout.BACKOFF, f"for {decision.delay_ms / 1000:g} s")

    def _sync_for(self, name: str) -> None:
        """Detect a sync error that a dead role may have consumed, and record it for later groups.

        After a failed sync nothing is synced any more.
        """
        syncs = {layout.COMMITLOG_FLUSHER, layout.CQ_FLUSHER, layout.INDEX_FLUSHER}
        if self._context.options.sync_flush:
            syncs.add(layout.WRITER)
        if name not in syncs:
            return
        if self._control.read_only:
            self.remember_failed_sync()
        elif number := self._hooks.sync_active_segments(name):
            self._control.store(layout.SUPERVISOR_SYNC_ERRNO, number)
            self._context.report(f"a sync failed ({os.strerror(number)}): the store is read-only")
            self.remember_failed_sync()

    def remember_failed_sync(self) -> None:
        """Record it: the role that saw it may have died, or met a full disk, before it could."""
        context, number = self._context, self._control.sync_errno
        if not remember_failed_sync(context.io, context.paths, f"{layout.SUPERVISOR}: {os.strerror(number)}"):
            context.report(f"{context.paths.read_only}: could not be written; the next start will miss the failed sync")

    def _log_abnormal_end(self, member: Member, pid: int, death: Death) -> bool:
        """Log an abort or a crash with the stack, if it was one."""
        trace = self._take_trace(member.name)
        if not (trace or member.abort_reason):
            return False
        fields = {"dead_role": member.name, "dead_pid": pid, "death": str(death), "at": innermost_frames(trace)}
        if member.abort_reason:
            event, fields = "a role was aborted", {"reason": f"it {member.abort_reason}", **fields}
        else:
            event = "a role crashed"
        role_log.get_logger().error(event, **fields, trace=trace)
        return True

    def _take_trace(self, name: str) -> str:
        """The stack that a dead role has written, or ""."""
        io, trace = self._context.io, self._traces[name]
        text = io.pread(trace, _TRACE_BYTES_MAX, 0).decode(errors="replace")
        io.set_size(trace, 0)
        return text

    # The template's end

    def _template_ended(self) -> None:
        found = os.waitid(os.P_PIDFD, self._template.pidfd, os.WEXITED | os.WNOHANG)
        if found is not None:
            self._template_gone(found)

    def _replace_template(self) -> None:
        """Kill a template that does not answer, then continue as after its end."""
        if not self._template.pid:
            self.start_template()
            return
        signal.pidfd_send_signal(self._template.pidfd, signal.SIGKILL)
        found = os.waitid(os.P_PIDFD, self._template.pidfd, os.WEXITED)
        assert found is not None
        self._template_gone(found)

    def _template_gone(self, found: os.waitid_result) -> None:
        """Kill a role that it was forking, which is unknown, before the next start."""
        now = self._clock.monotonic_ns()
        death = Death.of(found, (now - self._template_started_ns) / _MS)
        self._report_template(layout.EXITED, f"pid {self._template.pid}, {death}")
        self._reactor.forget(self._template.pidfd)
        self._template.forget()
        self._orphans.reap(self._known_pids())
        if self.stopping:
            return
        self._control.add(layout.role_word(layout.TEMPLATE, "restarts"), 1)
        decision = self._template_deaths.decide(death, now)
        if isinstance(decision, Halt):
            self._report_template(layout.FATAL)
            self._halted(decision)
            return
        # At once: it does nothing that could fail repeatedly, and a role may need it now.
        try:
            self.start_template()
        except OSError as error:
            # No room for a process: roles continue, and the next start of a role retries.
            self._context.report(f"{layout.TEMPLATE} could not be started: {error.strerror}")

    def _known_pids(self) -> frozenset[int]:
        return frozenset(member.pid for member in self._living())

    # Words and lines

    def _reported_state(self, member: Member) -> int:
        return self._control.load(layout.role_word(member.name, "state"))

    def _wipe_words(self, name: str) -> None:
        """Reset a dead role's words, or its successor would appear to have reported them."""
        for word in ("state", "sleeping", "heartbeat_ns", "state_since_ns"):
            self._control.store(layout.role_word(name, word), 0)

    def _store(self, name: str, word: str, value: int) -> None:
        self._control.store(layout.role_word(name, word), value)

    def _set_state(self, member: Member, state: int, detail: str = "") -> None:
        member.state = state
        self._store(member.name, "supervised", state)
        self._report(member.name, state, detail)

    def _report_template(self, state: int, detail: str = "") -> None:
        self._store(layout.TEMPLATE, "supervised", state)
        self._store(layout.TEMPLATE, "pid", self._template.pid if state == layout.RUNNING else 0)
        self._store(layout.TEMPLATE, "incarnation", self._template_incarnation)
        self._report(layout.TEMPLATE, state, detail)

    def _report(self, name: str, state: int, detail: str) -> None:
        word = layout.SUPERVISED_NAMES[state]
        self._context.report(f"{name} {word}, {detail}" if detail else f"{name} {word}")
