"""The template: a warm, single-threaded process that forks roles.

    supervisor ── fork, before recovery ──▶ template ── fork ──▶ middle ── fork ──▶ role
        ▲                                                          └ ends: the role becomes the supervisor's own child
        └────────────── pid of the role, over a socketpair ◀───────────────────────┘

It has loaded and compiled everything and done no work, so a role starts within milliseconds and shares its memory. All
are forked from the supervisor without exec, and inherit sockets, bells, the lock and the control map.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from mqproc.config.parse import parse_option
from mqproc.errors import BadRequestError, MqprocError, StartError
from mqproc.ipc.bell import EventBell
from mqproc.layout.control import TEMPLATE
from mqproc.roles import role_log
from mqproc.roles.role import EXIT_FAILED, Heartbeat, RoleContext, RoleSpec, run_role, set_title
from mqproc.supervisor import signals
from mqproc.supervisor.hooks import Death, GroupContext
from mqproc.supervisor.store_folder import Resources

OPEN_FILES_MIN: Final = 768
"""Open files without clients; the file guard alone needs 700 or more."""
_OPEN = Path("/proc/self/fd")
_STANDARD = frozenset({0, 1, 2})


def raise_open_files() -> None:
    """Raise the soft limit of descriptors: each client is one, and roles use epoll, not select.

    Raises StartError when the hard limit is too low for a group, or /proc is missing.
    """
    if not _OPEN.exists():
        raise StartError("/proc is not mounted, which a group requires: mount -t proc proc /proc")
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < OPEN_FILES_MIN:
        raise StartError(
            f"the limit is {hard} open files, and a group needs {OPEN_FILES_MIN} and one for each client: raise the "
            "hard limit, by ulimit -Hn 65536 as root or LimitNOFILE=65536 in the unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def close_other_descriptors(keep: Iterable[int], keep_files: Iterable[Path] = ()) -> None:
    """Close every descriptor but 0, 1, 2, `keep`, and descriptors of `keep_files`.

    Files are kept by identity because a Python mmap hides the number of its descriptor. Python objects of descriptors
    closed here must never be closed or collected, as their numbers may be reused: a forked process stays inside its
    parent's frames and leaves by `os._exit`.
    """
    kept = _STANDARD.union(keep)
    identities = {_identity(path.stat()) for path in keep_files}
    for fd in map(int, os.listdir(_OPEN)):
        if fd in kept:
            continue
        # EBADF: the descriptor that listed the folder.
        with contextlib.suppress(OSError):
            if _identity(os.fstat(fd)) not in identities:
                os.close(fd)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


# `mqproc run ROLE`: a role attached to the caller's terminal, for a debugger.
#
#     caller ── RUN_ROLE ──▶ supervisor ── role stops in order ──▶ template forks it again ──▶ role
#       └── its open files /proc/PID/fd/0, 1, 2 ─────────────────── become the role's own ──────┘
#
# It ends with the role or with the caller's connection; then the role is started normally.


# O_APPEND, because each open of a file has its own position: processes would overwrite each other.
_WRITE: Final = os.O_WRONLY | os.O_APPEND
_FLAGS: Final = (os.O_RDONLY, _WRITE, _WRITE)


@dataclass(frozen=True, slots=True)
class Terminal:
    """Paths of a role's standard input, output and error output."""

    stdin: str
    stdout: str
    stderr: str

    def check(self, caller: int) -> None:
        """Check that these are open files of process `caller` that this process can open."""
        own = re.compile(rf"/proc/{caller}/fd/\d+")
        for path, flags in self._openings():
            if not own.fullmatch(path):
                raise BadRequestError(f"{path!r} is not an open file of pid {caller}, the caller")
            try:
                os.close(_open(path, flags))
            except OSError as error:
                raise BadRequestError(f"{path}: {error.strerror}; it cannot be attached") from None

    def attach(self) -> None:
        """Make these descriptors 0, 1 and 2, and Python's streams. Raises OSError."""
        for target, (path, flags) in enumerate(self._openings()):
            fd = _open(path, flags)
            if fd != target:
                os.dup2(fd, target)
                os.close(fd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115

    def _openings(self) -> list[tuple[str, int]]:
        return list(zip((self.stdin, self.stdout, self.stderr), _FLAGS, strict=True))


def _open(path: str, flags: int) -> int:
    """Do not wait for a pipe's other end, nor acquire a controlling terminal."""
    fd = os.open(path, flags | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


@dataclass(slots=True, eq=False)
class DebugAttachment:
    """One role at one caller's terminal."""

    caller_pid: int
    """The caller's pid."""
    terminal: Terminal
    debug: bool
    ended: Callable[[Death | MqprocError], None]
    """Called once: how the role ended, or why it did not start."""
    begun: bool = False
    """The role runs at the terminal."""
    detached: bool = False
    """The caller has disconnected."""


# The template


_MESSAGE_BYTES_MAX: Final = 1 << 16
_ADOPTION_S: Final = 5.0
_PID = struct.Struct("=i")


class TemplateGoneError(Exception):
    """The template does not answer; it is dead or hangs."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Everything that roles inherit from the supervisor."""

    supervisor_pid: int
    specs: Mapping[str, RoleSpec]
    context: GroupContext
    resources: Resources
    lock_fd: int

    def shared_descriptors(self) -> set[int]:
        """Descriptors of every role: lock, bells, the supervisor's eventfd."""
        bells = {bell.fileno() for bell in self.resources.bells.values() if isinstance(bell, EventBell)}
        return {self.lock_fd, self.resources.changed_fd, *bells}

    def all_descriptors(self) -> set[int]:
        """Descriptors of the template: the descriptors of all roles."""
        listeners = {listener.fileno() for listener in self.resources.sockets.values()}
        return self.shared_descriptors() | listeners | set(self.resources.traces.values())


class Template:
    """The supervisor's side of the template."""

    def __init__(self, inheritance: Inheritance, answer_timeout_s: float) -> None:
        self._inheritance = inheritance
        self._answer_timeout_s = answer_timeout_s
        self._connection: socket.socket | None = None
        self.pid = 0
        self.pidfd = -1

    def fork(self) -> None:
        """Fork the template. Raises OSError when no process can be created."""
        _flush_output()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(self._answer_timeout_s)
        with signals.blocked_signals():
            self.pid = os.fork()
            if self.pid == 0:
                _run_template(self._inheritance, theirs)
        theirs.close()
        self._connection = ours
        self.pidfd = os.pidfd_open(self.pid)

    def spawn(
        self, role: str, incarnation: int, changes: Mapping[str, Any], attachment: DebugAttachment | None = None
    ) -> int:
        """Start a role; return its pid, a child of this process.

        `changes` are the options reloaded since the template was forked. Raises TemplateGoneError, or OSError when no
        process can be created.
        """
        request: dict[str, Any] = {"role": role, "incarnation": incarnation, "changes": dict(changes)}
        if attachment is not None:
            request |= {"terminal": dataclasses.asdict(attachment.terminal), "debug": attachment.debug}
        try:
            if self._connection is None:
                raise TemplateGoneError
            self._connection.send(json.dumps(request).encode())
            reply = self._connection.recv(_MESSAGE_BYTES_MAX)
        except OSError as error:
            raise TemplateGoneError from error
        if not reply:
            raise TemplateGoneError
        answer = json.loads(reply)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return int(answer["pid"])

    def forget(self) -> None:
        """Forget the process, which was waited for."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pid, self.pidfd = 0, -1

    def reopen_log(self) -> None:
        """Make it reopen the log file, for its later forks too."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            self.forget()


# In the template process


def _run_template(inheritance: Inheritance, connection: socket.socket) -> NoReturn:
    """Run the template; never return into its parent's frames: see `close_other_descriptors`."""
    code = EXIT_FAILED
    try:
        signals.die_with_parent()
        if os.getppid() == inheritance.supervisor_pid:
            os.setsid()  # Ctrl-C, Ctrl-Z and a closed terminal concern the supervisor only.
            signals.reset_in_child()
            paths = inheritance.context.paths
            close_other_descriptors(inheritance.all_descriptors() | {connection.fileno()}, [paths.control])
            role_log.configure(TEMPLATE, log_format=inheritance.context.options.log_format)
            set_title(TEMPLATE, paths.root)
            gc.freeze()
            _serve(inheritance, connection)
            code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code)


def _serve(inheritance: Inheritance, connection: socket.socket) -> None:
    while request := connection.recv(_MESSAGE_BYTES_MAX):
        try:
            answer = {"pid": _fork_role(inheritance, json.loads(request))}
        except OSError as error:
            answer = {"errno": error.errno or 0}
        connection.send(json.dumps(answer).encode())


def _fork_role(inheritance: Inheritance, request: Mapping[str, Any]) -> int:
    """Fork twice; return the role's pid once it is a child of the supervisor."""
    reader, writer = os.pipe()
    try:
        middle = os.fork()
        if middle == 0:
            _run_middle(inheritance, request, writer)
        found = os.waitid(os.P_PID, middle, os.WEXITED)
        assert found is not None
        if found.si_code != os.CLD_EXITED or found.si_status:
            raise OSError(found.si_status, "fork failed")
        return int(_PID.unpack(os.read(reader, _PID.size))[0])
    finally:
        os.close(reader)
        os.close(writer)


def _run_middle(inheritance: Inheritance, request: Mapping[str, Any], writer: int) -> NoReturn:
    middle = os.getpid()
    try:
        role = os.fork()
    except OSError as error:
        os._exit(error.errno or EXIT_FAILED)
    if role == 0:
        _run_role(inheritance, request, middle)
    os.write(writer, _PID.pack(role))
    os._exit(0)


# In a role's process


def _run_role(inheritance: Inheritance, request: Mapping[str, Any], middle: int) -> NoReturn:
    code = EXIT_FAILED
    try:
        if _await_adoption(inheritance.supervisor_pid, middle):
            code = _live(inheritance, request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code)


def _await_adoption(supervisor_pid: int, middle: int) -> bool:
    """Wait to become the supervisor's child, then die with it. False when it has ended."""
    deadline = time.monotonic() + _ADOPTION_S
    while (parent := os.getppid()) == middle and time.monotonic() < deadline:
        os.sched_yield()
    if parent != supervisor_pid:
        return False
    signals.die_with_parent()
    return os.getppid() == supervisor_pid


def _live(inheritance: Inheritance, request: Mapping[str, Any]) -> int:
    group, resources = inheritance.context, inheritance.resources
    spec = inheritance.specs[request["role"]]
    trace = resources.traces[spec.name]
    sockets = {name: resources.sockets[name] for name in spec.sockets}
    own = {trace, *(listener.fileno() for listener in sockets.values())}
    close_other_descriptors(inheritance.shared_descriptors() | own, [group.paths.control])
    set_title(spec.name, group.paths.root)
    if "terminal" in request:
        Terminal(**request["terminal"]).attach()
        role_log.forget_log_file()
        role_log.configure(spec.name, log_format=group.options.log_format)
        role_log.get_logger().info("attached to this terminal", incarnation=request["incarnation"])
    changes = {name: parse_option(name, value, "reload") for name, value in request["changes"].items()}
    context = RoleContext(
        name=spec.name,
        paths=group.paths,
        options=dataclasses.replace(group.options, **changes),
        control=group.control,
        io=group.io,
        clock=group.clock,
        bells=resources.bells,
        sockets=sockets,
        incarnation=request["incarnation"],
        heartbeat=Heartbeat(
            group.control, spec.name, group.clock, changed=lambda: os.eventfd_write(resources.changed_fd, 1)
        ),
    )
    return run_role(spec, context, trace, debug=request.get("debug", False))


def _leave(code: int) -> NoReturn:
    """Exit without unwinding the parent's frames or running its exit handlers."""
    _flush_output()
    os._exit(code)


def _flush_output() -> None:
    """Flush before a fork, or each process writes the buffers. The reader may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
