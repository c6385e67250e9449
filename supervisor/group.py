"""The group's roles: which run, since when, what happens when one ends. Speaks supervisord's words.

             start             state RUNNING           SIGTERM              exit 0
    STOPPED ───────▶ STARTING ───────────────▶ RUNNING ─────────▶ STOPPING ────────▶ STOPPED
                        ▲  │ died                │ died               │ died
                        │  ▼                     ▼                    ▼
                      BACKOFF ◀────────────── EXITED ──────────▶   FATAL: the group halts

A successor starts only when its predecessor has been waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mqproc.errors import MqprocError
from mqproc.ipc.bell import Bell
from mqproc.layout import control as layout
from mqproc.roles import role_log
from mqproc.roles.role import RoleSpec
from mqproc.store.sync_guard import remember_failed_sync
from mqproc.supervisor.control_socket import Reactor
from mqproc.supervisor.debug_attach import DebugAttachment
from mqproc.supervisor.hooks import (
    EXIT_FAILED,
    Death,
    Deaths,
    GroupContext,
    Halt,
    Hooks,
    Restart,
    RestartPolicy,
    Timing,
)
from mqproc.supervisor.template import Inheritance, Template, TemplateGoneError
from mqproc.util.procfs import own_children

# --- children ---
# Children that the supervisor has without knowing them.
#
# A template that died between two forks leaves some; as process 1 of a container, and as subreaper, the supervisor gets
# every orphan.


_ROUNDS_MAX: Final = 100


class OrphanReaper:
    """Made before the first fork: children that the process had already are not ours to end."""

    def __init__(self) -> None:
        self._foreign = own_children()

    def reap(self, known: frozenset[int] = frozenset()) -> int:
        """Kill and wait for every child but the known ones; returns how many there were.

        In rounds, because a stray may have forked before it was killed: its child is then ours in the next round.
        """
        count = 0
        for _ in range(_ROUNDS_MAX):
            strays = own_children() - known - self._foreign
            if not strays:
                break
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            count += len(strays)
        return count

    def bury(self, known: frozenset[int]) -> int:
        """Wait for those that have ended by themselves, the known ones left out; returns how many there were."""
        count = 0
        for pid in own_children() - known - self._foreign:
            with contextlib.suppress(ChildProcessError):
                count += os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
        return count


_MS: Final = 1_000_000
_TRACE_BYTES_MAX: Final = 1 << 16
_SPAWN_TRIES: Final = 2
# What a role says after its start: RUNNING, or what its first step does already.
_AT_WORK: Final = frozenset({layout.STATE_RUNNING, layout.STATE_SYNCING, layout.STATE_ALLOCATING})
# A supervisor that was not run for this long (Ctrl-Z, a paused machine) starts to count silence anew.
_PAUSE_TICKS: Final = 4

Halted = Callable[[Halt], None]


@dataclass(slots=True)
class Member:
    """One role as the supervisor sees it."""

    spec: RoleSpec
    deaths: Deaths
    state: int = layout.STOPPED
    incarnation: int = 0
    pid: int = 0
    pidfd: int = -1
    started_ns: int = 0
    asked_ns: int = 0
    """When it was asked to stop; 0: it was not."""
    aborted_ns: int = 0
    """When it got SIGABRT; 0: it did not."""
    due_ns: int = 0
    """In BACKOFF: when it is to start."""
    to_start_again: bool = False
    """It was asked to stop for a restart."""
    has_run: bool = False
    loan: DebugAttachment | None = None
    """Somebody wants it, or has it, at his terminal."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alive(self) -> bool:
        return self.pid != 0

    @property
    def lent(self) -> bool:
        """It runs at somebody's terminal now."""
        return self.loan is not None and self.loan.begun


class Group:
    """All roles and the template. Its methods are called by the supervisor's loop only."""

    def __init__(
        self,
        context: GroupContext,
        hooks: Hooks,
        inheritance: Inheritance,
        reactor: Reactor,
        timing: Timing,
        policy: RestartPolicy,
        halted: Halted,
    ) -> None:
        self._context = context
        self._control = context.control
        self._clock = context.clock
        self._hooks = hooks
        self._traces = inheritance.traces
        self._bells: Mapping[str, Bell] = inheritance.bells
        self._reactor = reactor
        self._timing = timing
        self._halted = halted
        self._template = Template(inheritance, timing.spawn_ms / 1000)
        self._strays = OrphanReaper()
        self._template_deaths = Deaths(layout.TEMPLATE, policy)
        self._template_started_ns = 0
        self._template_incarnation = 0
        self._patience_from_ns = 0
        self._looked_ns = self._clock.monotonic_ns()
        self.members = {
            name: Member(inheritance.specs[name], Deaths(name, policy))
            for name in layout.ROLES
            if name in inheritance.specs
        }
        self.changes: dict[str, Any] = {}
        """Options that were reloaded since the template was first forked."""
        self.stopping = False
        self.stop_limit_ms = timing.stop_ms
        self.problems: list[str] = []
        """What went wrong while stopping."""

    # Starting

    def start_template(self) -> None:
        """Fork the template. Done before recovery, so that roles inherit nothing of it."""
        self._template.fork()
        self._template_started_ns = self._clock.monotonic_ns()
        self._template_incarnation += 1
        self._reactor.watch(self._template.pidfd, self._template_ended)
        self._control.store(layout.TEMPLATE_PID, self._template.pid)
        self._tell_of_template(layout.RUNNING, f"pid {self._template.pid}")

    def start(self, member: Member) -> None:
        """Start a role that does not run."""
        assert not member.alive
        member.incarnation += 1
        member.to_start_again = False
        member.asked_ns = member.aborted_ns = member.due_ns = 0
        self._wipe_words(member.name)
        member.started_ns = self._clock.monotonic_ns()
        if member.loan is not None:
            member.loan.begun = True
        try:
            member.pid = self._spawn(member)
            member.pidfd = os.pidfd_open(member.pid)
        except OSError as error:
            self._end_loan(member, Death(EXIT_FAILED))
            self._died(member, Death(EXIT_FAILED), f"could not be started: {error.strerror}")
            return
        self._reactor.watch(member.pidfd, lambda: self._ended(member))
        self._store(member.name, "incarnation", member.incarnation)
        self._store(member.name, "pid", member.pid)
        self._context.io.crash_point("supervisor.forked")
        born = f"pid {member.pid}, incarnation {member.incarnation}"
        if member.loan is not None:
            self._tell(member, layout.LENT, f"{born}, at the terminal of pid {member.loan.borrower}")
        else:
            self._tell(member, layout.STARTING, born)

    def start_ahead(self, name: str) -> None:
        """Start a role before the loop turns, if the group has it. The loop hears of its end and starts it again."""
        if (member := self.members.get(name)) is not None:
            self.start(member)

    def start_next(self) -> None:
        """Start the first role that has not run yet, once all before it have."""
        for member in self.members.values():
            if not member.has_run:
                if member.state == layout.STOPPED:
                    self.start(member)
                return

    def start_due(self) -> None:
        """Start roles whose pause is over."""
        now = self._clock.monotonic_ns()
        for member in self.members.values():
            if member.state == layout.BACKOFF and now >= member.due_ns:
                self.start(member)

    def look_for_started(self) -> None:
        """Roles that say RUNNING themselves are."""
        for member in self.members.values():
            if member.state == layout.STARTING and self._said(member) in _AT_WORK:
                member.has_run = True
                # Its own word: what is started before recovery is looked for after that.
                since_ns = self._control.load(layout.role_word(member.name, "state_since_ns"))
                took_ms = (since_ns - member.started_ns) / _MS
                self._tell(member, layout.RUNNING, f"pid {member.pid}, after {took_ms:.1f} ms")

    @property
    def all_have_run(self) -> bool:
        return all(member.has_run for member in self.members.values())

    def next_due_ns(self) -> int | None:
        """When the next pause is over."""
        return min((m.due_ns for m in self.members.values() if m.state == layout.BACKOFF), default=None)

    def _spawn(self, member: Member) -> int:
        for _ in range(_SPAWN_TRIES):
            if self.stopping:
                break
            try:
                return self._template.spawn(member.name, member.incarnation, self.changes, member.loan)
            except TemplateGoneError:
                self._replace_template()
        raise OSError(0, "the template does not answer")

    # Watching

    def watch(self) -> None:
        """Abort roles that are silent for too long, kill those that do not end, wait for orphans that have ended."""
        now = self._clock.monotonic_ns()
        if now - self._looked_ns > _PAUSE_TICKS * self._timing.tick_ms * _MS:
            self._patience_from_ns = now
        self._looked_ns = now
        for member in self._living():
            if member.aborted_ns:
                if now - member.aborted_ns >= self._timing.abort_grace_ms * _MS:
                    self._send(member, signal.SIGKILL)
            elif reason := self._overdue(member, now):
                self._abort(member, reason)
        self._strays.bury(self._known_pids() | {self._template.pid})

    def _overdue(self, member: Member, now: int) -> str | None:
        stop_ms = self.stop_limit_ms
        if member.loan is not None and member.loan.given_back:
            stop_ms = min(stop_ms, self._timing.take_back_ms)
        if member.asked_ns and now - member.asked_ns >= stop_ms * _MS:
            return f"did not stop within {stop_ms / 1000:g} s"
        if member.lent:
            return None  # Who looks at it in a debugger makes it silent.
        options = self._context.options
        state = self._said(member)
        # A role that has not said anything yet is starting.
        busy = state == layout.STATE_NONE or state in layout.BUSY_STATES
        limit_ms = options.busy_timeout_ms if busy else options.heartbeat_timeout_ms
        heard_ns = max(
            self._control.load(layout.role_word(member.name, "heartbeat_ns")),
            member.started_ns,
            self._patience_from_ns,
        )
        if now - heard_ns < limit_ms * _MS:
            return None
        return f"silent for {(now - heard_ns) / 1e9:.1f} s while {layout.STATE_NAMES[state]}"

    def _abort(self, member: Member, reason: str) -> None:
        self._context.report(f"{member.name} {reason}: aborted")
        member.aborted_ns = self._clock.monotonic_ns()
        self._send(member, signal.SIGABRT)
        # A stopped process acts on SIGABRT only when it is continued; it does nothing else before.
        self._send(member, signal.SIGCONT)

    def ring_all(self) -> None:
        """Wake every role once, whatever its clock says."""
        for bell in self._bells.values():
            bell.post()

    # Stopping

    def ask_to_stop(self, member: Member) -> None:
        """SIGTERM to a living role; one that only waits for its start waits no more."""
        if member.alive:
            if not member.asked_ns:
                member.asked_ns = self._clock.monotonic_ns()
                self._tell(member, layout.STOPPING, f"pid {member.pid}")
                self._send(member, signal.SIGTERM)
                self._bells[member.name].post()
        elif member.state == layout.BACKOFF:
            self._tell(member, layout.STOPPED)

    def restart(self, member: Member) -> None:
        """Stop and start again, at someone's wish: not counted as a death."""
        if member.alive:
            member.to_start_again = True
            self.ask_to_stop(member)
        else:
            self.start(member)

    def lend(self, member: Member, loan: DebugAttachment) -> None:
        """Stop a role and start it again at somebody's terminal."""
        member.loan = loan
        self.restart(member)

    def take_back(self, member: Member, loan: DebugAttachment) -> None:
        """The borrower has gone: stop the role there and start it as any other."""
        if member.loan is not loan:
            return
        loan.given_back = True
        if loan.begun:
            self.restart(member)
        else:
            member.loan = None

    def refuse_loans(self, error: MqprocError) -> None:
        """Loans that have not begun will not."""
        for member in self.members.values():
            if member.loan is not None and not member.lent:
                member.loan.ended(error)
                member.loan = None

    def signal_all(self, number: signal.Signals) -> None:
        """A signal to all living roles."""
        for member in self._living():
            self._send(member, number)

    def reopen_logs(self) -> None:
        """Every process below opens the log file anew."""
        self.signal_all(signal.SIGUSR1)
        self._template.reopen_log()

    def kill_all(self) -> None:
        """End everything at once and wait for the ends."""
        living = self._living()
        for member in living:
            self._send(member, signal.SIGKILL)
        for member in living:
            os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED)
            self._bury(member)
        for member in living:
            self._sync_for(member.name)
        if self._template.pid:
            self._reactor.forget(self._template.pidfd)
            self._template.kill()
        self._strays.reap()

    def _living(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def _send(self, member: Member, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(member.pidfd, number)

    # Ends

    def _ended(self, member: Member) -> None:
        found = os.waitid(os.P_PIDFD, member.pidfd, os.WEXITED | os.WNOHANG)
        if found is None:
            return
        death = Death.of(found, (self._clock.monotonic_ns() - member.started_ns) / _MS)
        pid = member.pid
        self._bury(member)
        self._context.io.crash_point("supervisor.buried")
        was_told = self._log_trace(member.name, pid, death)
        was_lent = self._end_loan(member, death)
        detail = f"pid {pid}, {death}, lived {death.lived_ms / 1000:.1f} s"
        if member.asked_ns and (death.clean or member.to_start_again):
            self._stopped(member, death)
        elif was_lent and not self.stopping:
            self._tell(member, layout.EXITED, detail)
            self._sync_for(member.name)
            self.start(member)
        else:
            if not was_told:
                role_log.get_logger().error("a role died", dead_role=member.name, dead_pid=pid, death=str(death))
            self._died(member, death, detail)

    def _end_loan(self, member: Member, death: Death) -> bool:
        """Whether the role was lent. What becomes of it at a debugger's hands is no death to be counted."""
        loan = member.loan
        if loan is None or not loan.begun:
            return False
        member.loan = None
        loan.ended(death)
        return True

    def _bury(self, member: Member) -> None:
        self._reactor.forget(member.pidfd)
        os.close(member.pidfd)
        member.pid, member.pidfd = 0, -1
        self._store(member.name, "pid", 0)

    def _stopped(self, member: Member, death: Death) -> None:
        self._tell(member, layout.STOPPED)
        if not death.clean:
            self._sync_for(member.name)
            if self.stopping:
                # Nobody does what it has left undone: no successor, as the restart would have had one.
                self._died_amid_the_stop(member, death)
        if member.to_start_again and not self.stopping:
            self.start(member)

    def _died(self, member: Member, death: Death, detail: str) -> None:
        self._tell(member, layout.EXITED, detail)
        self._control.add(layout.supervised_word(member.name, "restarts"), 1)
        # Also when nothing is restarted: the next start must know of a failed sync too.
        self._sync_for(member.name)
        if self.stopping:
            self._died_amid_the_stop(member, death)
            return
        decision = member.deaths.decide(death, self._clock.monotonic_ns(), has_run=member.has_run)
        if isinstance(decision, Halt):
            self._tell(member, layout.FATAL)
            self._halted(decision)
            return
        self._start_after(member, decision)

    def _died_amid_the_stop(self, member: Member, death: Death) -> None:
        self.problems.append(f"{member.name} died while the group stopped ({death})")

    def _start_after(self, member: Member, decision: Restart) -> None:
        if decision.delay_ms == 0:
            self.start(member)
            return
        member.due_ns = self._clock.monotonic_ns() + decision.delay_ms * _MS
        self._tell(member, layout.BACKOFF, f"for {decision.delay_ms / 1000:g} s")

    def _sync_for(self, name: str) -> None:
        """Learn of a failed sync that died with the one who saw it, and see to it that every later group knows.

        Nothing is synced any more when a failed sync is known already.
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
        """Who saw a sync fail may have died, or met a full disk, before it had written that down."""
        context, number = self._context, self._control.sync_errno
        if not remember_failed_sync(context.io, context.paths, f"{layout.SUPERVISOR}: {os.strerror(number)}"):
            context.report(f"{context.paths.read_only}: could not be written; the next start will not know of it")

    def _log_trace(self, name: str, pid: int, death: Death) -> bool:
        """Whether there was one."""
        io, trace = self._context.io, self._traces[name]
        if not io.size(trace):
            return False
        text = io.pread(trace, _TRACE_BYTES_MAX, 0).decode(errors="replace")
        io.set_size(trace, 0)
        role_log.get_logger().error("a role crashed", crashed_role=name, crashed_pid=pid, death=str(death), trace=text)
        return True

    # The template's end

    def _template_ended(self) -> None:
        found = os.waitid(os.P_PIDFD, self._template.pidfd, os.WEXITED | os.WNOHANG)
        if found is not None:
            self._template_gone(Death.of(found, 0.0))

    def _replace_template(self) -> None:
        """It did not answer: make sure that it has ended, then go on as when it had."""
        if not self._template.pid:
            self.start_template()
            return
        signal.pidfd_send_signal(self._template.pidfd, signal.SIGKILL)
        found = os.waitid(os.P_PIDFD, self._template.pidfd, os.WEXITED)
        assert found is not None
        self._template_gone(Death.of(found, 0.0))

    def _template_gone(self, death: Death) -> None:
        """Roles go on. What it was just forking is unknown to us, so it is ended before anything is started."""
        now = self._clock.monotonic_ns()
        death = Death(death.code, death.signal, (now - self._template_started_ns) / _MS)
        self._tell_of_template(layout.EXITED, f"pid {self._template.pid}, {death}")
        self._reactor.forget(self._template.pidfd)
        self._template.buried()
        self._strays.reap(self._known_pids())
        if self.stopping:
            return
        self._control.add(layout.supervised_word(layout.TEMPLATE, "restarts"), 1)
        decision = self._template_deaths.decide(death, now)
        if isinstance(decision, Halt):
            self._tell_of_template(layout.FATAL)
            self._halted(decision)
            return
        # Without a pause: it does nothing by itself that could fail again and again, and a role may need it now.
        try:
            self.start_template()
        except OSError as error:
            # No room for another process: roles go on, and the next one that is to be started has this tried again.
            self._context.report(f"{layout.TEMPLATE} could not be started: {error.strerror}")

    def _known_pids(self) -> frozenset[int]:
        return frozenset(member.pid for member in self._living())

    # Words and lines

    def _said(self, member: Member) -> int:
        return self._control.load(layout.role_word(member.name, "state"))

    def _wipe_words(self, name: str) -> None:
        """Nobody owns a dead role's words: what it said last must not be taken for its successor's word."""
        for word in ("state", "sleeping", "heartbeat_ns", "state_since_ns"):
            self._control.store(layout.role_word(name, word), 0)

    def _store(self, name: str, word: str, value: int) -> None:
        self._control.store(layout.supervised_word(name, word), value)

    def _tell(self, member: Member, state: int, detail: str = "") -> None:
        member.state = state
        self._store(member.name, "supervised", state)
        self._say(member.name, state, detail)

    def _tell_of_template(self, state: int, detail: str = "") -> None:
        self._store(layout.TEMPLATE, "supervised", state)
        self._store(layout.TEMPLATE, "pid", self._template.pid if state == layout.RUNNING else 0)
        self._store(layout.TEMPLATE, "incarnation", self._template_incarnation)
        self._say(layout.TEMPLATE, state, detail)

    def _say(self, name: str, state: int, detail: str) -> None:
        word = layout.SUPERVISED_NAMES[state]
        self._context.report(f"{name} {word}, {detail}" if detail else f"{name} {word}")
