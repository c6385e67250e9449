"""The template: a warm, single-threaded process that forks roles.

    supervisor ── fork, before recovery ──▶ template ── fork ──▶ middle ── fork ──▶ role
        ▲                                                          └ ends: the role becomes the supervisor's own child
        └────────────── pid of the role, over a socketpair ◀───────────────────────┘

It has everything loaded and compiled and nothing done, so a role starts within milliseconds and shares its memory. All
of them descend from the supervisor by fork, without exec: sockets, bells, the lock and the control map are inherited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from mqproc.config.options import Options
from mqproc.config.parse import parse_option
from mqproc.errors import StartError
from mqproc.io.clock import Clock
from mqproc.io.store_io import StoreIO
from mqproc.ipc.bell import Bell, EventBell
from mqproc.ipc.control import Control
from mqproc.layout.control import TEMPLATE
from mqproc.paths import StorePaths
from mqproc.roles import role_log
from mqproc.roles.process_setup import set_title
from mqproc.roles.role import EXIT_FAILED, Heartbeat, RoleContext, RoleSpec, run_role
from mqproc.supervisor import signals
from mqproc.supervisor import signals as prctl
from mqproc.supervisor.debug_attach import DebugAttachment, Terminal

# --- descriptors ---
# How many descriptors a group may have; after a fork, closing what belongs to the parent or to other roles.


OPEN_FILES_MIN: Final = 768
"""Without clients; the engine's guard has a number of its own, 700 or more."""
_OPEN = Path("/proc/self/fd")
_STANDARD = frozenset({0, 1, 2})


def raise_open_files() -> None:
    """Each client of a role is a descriptor; the usual soft limit is 1,024, and roles wait by epoll, not by select.

    Raises StartError when the hard limit is too low for any group, or when nothing tells what is open.
    """
    if not _OPEN.exists():
        raise StartError("/proc is not mounted: a group cannot live without; mount -t proc proc /proc")
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < OPEN_FILES_MIN:
        raise StartError(
            f"{hard} files may be open at most, and a group needs {OPEN_FILES_MIN} and one for each client: raise the "
            "hard limit, by ulimit -Hn 65536 as root or LimitNOFILE=65536 in the unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def close_other_descriptors(keep: Iterable[int], keep_files: Iterable[Path] = ()) -> None:
    """Close every descriptor but 0, 1, 2, `keep`, and those of the files `keep_files`.

    Files are kept by identity because a Python mmap has a descriptor of its own whose number it does not tell. The
    Python objects of what is closed here must never be closed or collected afterwards, or they would close numbers
    that have been used again: so a forked process runs inside its parent's frames and leaves by `os._exit`.
    """
    kept = _STANDARD.union(keep)
    identities = {_identity(path.stat()) for path in keep_files}
    for fd in _open_descriptors():
        if fd in kept:
            continue
        # EBADF: the descriptor was the one that listed the folder.
        with contextlib.suppress(OSError):
            if _identity(os.fstat(fd)) not in identities:
                os.close(fd)


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir(_OPEN)]


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


_MESSAGE_BYTES_MAX: Final = 1 << 16
_ADOPTION_S: Final = 5.0
_PID = struct.Struct("=i")


class TemplateGoneError(Exception):
    """The template did not answer: it is dead, or as good as dead."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What roles get from the supervisor by descent."""

    supervisor_pid: int
    specs: Mapping[str, RoleSpec]
    paths: StorePaths
    options: Options
    control: Control
    io: StoreIO
    clock: Clock
    bells: Mapping[str, Bell]
    sockets: Mapping[str, socket.socket]
    traces: Mapping[str, int]
    """For each role a memory file that takes the Python stack of a crash."""
    lock_fd: int
    changed_fd: int
    """An eventfd that wakes the supervisor: a role's state has changed."""

    def shared_descriptors(self) -> set[int]:
        """Those that every role has: the lock, all bells, the way to wake the supervisor."""
        bells = {bell.fileno() for bell in self.bells.values() if isinstance(bell, EventBell)}
        return {self.lock_fd, self.changed_fd, *bells}

    def all_descriptors(self) -> set[int]:
        """Those that the template keeps, since any role may come."""
        listeners = {listener.fileno() for listener in self.sockets.values()}
        return self.shared_descriptors() | listeners | set(self.traces.values())


class Template:
    """The supervisor's side."""

    def __init__(self, inheritance: Inheritance, answer_timeout_s: float) -> None:
        self._inheritance = inheritance
        self._answer_timeout_s = answer_timeout_s
        self._connection: socket.socket | None = None
        self.pid = 0
        self.pidfd = -1

    def fork(self) -> None:
        """Make the process. Any earlier one has ended. Raises OSError when the machine has no room for another one."""
        _flush_output()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(self._answer_timeout_s)
        with signals.held_back():
            self.pid = os.fork()
            if self.pid == 0:
                _run_template(self._inheritance, theirs)
        theirs.close()
        self._connection = ours
        self.pidfd = os.pidfd_open(self.pid)

    def spawn(
        self, role: str, incarnation: int, changes: Mapping[str, Any], loan: DebugAttachment | None = None
    ) -> int:
        """Start a role; returns the pid of what is now this process's child.

        `changes` are the options that were reloaded since the template was forked, `loan` is for a role at somebody's
        terminal. Raises TemplateGoneError, or OSError when the machine has no room for another process.
        """
        request: dict[str, Any] = {"role": role, "incarnation": incarnation, "changes": dict(changes)}
        if loan is not None:
            request |= {"terminal": dataclasses.asdict(loan.terminal), "debug": loan.debug}
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

    def buried(self) -> None:
        """It has been waited for: forget it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pid, self.pidfd = 0, -1

    def reopen_log(self) -> None:
        """Let it open the log file anew; what it forks has that file, too."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def kill(self) -> None:
        """End it and wait for the end."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            self.buried()


# In the template


def _run_template(inheritance: Inheritance, connection: socket.socket) -> NoReturn:
    """The template's life. It never returns into the frames that it was forked in: see `close_others`."""
    code = EXIT_FAILED
    try:
        prctl.die_with_parent()
        if os.getppid() == inheritance.supervisor_pid:
            os.setsid()  # Ctrl-C, Ctrl-Z and the end of a terminal are the supervisor's affair.
            signals.drop_in_child()
            close_other_descriptors(inheritance.all_descriptors() | {connection.fileno()}, [inheritance.paths.control])
            set_title(TEMPLATE, inheritance.paths.root)
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
    """Fork twice; returns the role's pid when the process between has ended, so the supervisor is its parent."""
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


# In a role


def _run_role(inheritance: Inheritance, request: Mapping[str, Any], middle: int) -> NoReturn:
    code = EXIT_FAILED
    try:
        if _adopted(inheritance.supervisor_pid, middle):
            code = _live(inheritance, request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code)


def _adopted(supervisor_pid: int, middle: int) -> bool:
    """Wait until the supervisor is this process's parent, then tie this life to its. False when it has ended."""
    deadline = time.monotonic() + _ADOPTION_S
    while (parent := os.getppid()) == middle and time.monotonic() < deadline:
        os.sched_yield()
    if parent != supervisor_pid:
        return False
    prctl.die_with_parent()
    return os.getppid() == supervisor_pid


def _live(inheritance: Inheritance, request: Mapping[str, Any]) -> int:
    spec = inheritance.specs[request["role"]]
    trace = inheritance.traces[spec.name]
    sockets = {name: inheritance.sockets[name] for name in spec.sockets}
    own = {trace, *(listener.fileno() for listener in sockets.values())}
    close_other_descriptors(inheritance.shared_descriptors() | own, [inheritance.paths.control])
    set_title(spec.name, inheritance.paths.root)
    if "terminal" in request:
        Terminal(**request["terminal"]).attach()
        role_log.forget_log_file()
        role_log.configure(spec.name, log_format=inheritance.options.log_format)
        role_log.get_logger().info("handed over to this terminal", incarnation=request["incarnation"])
    changes = {name: parse_option(name, value, "reload") for name, value in request["changes"].items()}
    context = RoleContext(
        name=spec.name,
        paths=inheritance.paths,
        options=dataclasses.replace(inheritance.options, **changes),
        control=inheritance.control,
        io=inheritance.io,
        clock=inheritance.clock,
        bells=inheritance.bells,
        sockets=sockets,
        incarnation=request["incarnation"],
        heartbeat=Heartbeat(
            inheritance.control,
            spec.name,
            inheritance.clock,
            changed=lambda: os.eventfd_write(inheritance.changed_fd, 1),
        ),
    )
    return run_role(spec, context, trace, debug=request.get("debug", False))


def _leave(code: int) -> NoReturn:
    """End without unwinding the parent's frames, and without its exit handlers."""
    _flush_output()
    os._exit(code)


def _flush_output() -> None:
    """Before a fork: or what waits in the buffers is written by each process. Its reader may have gone away."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
