"""The store's folder: ours, and closed to others, before anything in it is touched; and still the same one later."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mqproc.errors import DiskFullError, NotRunningError, StartError, StoreAccessError
from mqproc.io.store_io import StoreIO, reason_of
from mqproc.ipc import bell
from mqproc.ipc.bell import Bell, EventBell, SemaphoreBell, semaphore_name, semaphore_names, unlink_semaphore
from mqproc.ipc.control import Control
from mqproc.ipc.control_words import why_read_only
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import control as layout
from mqproc.paths import StorePaths, dangling_link, file_type, shell_quoted
from mqproc.roles.role import BellKind, RoleSpec
from mqproc.wire.address import connect_path, listen, remove

# --- resources ---
# What a group has before its first fork: bells, listening sockets, memory for stacks. Made once, inherited by all.


CONTROL_SOCKET = "ctl"


@dataclass(frozen=True, slots=True)
class Resources:
    """Bells by role, sockets by name, and the eventfd by which roles wake the supervisor."""

    paths: StorePaths
    bells: Mapping[str, Bell]
    sockets: Mapping[str, socket.socket]
    control_socket: socket.socket
    traces: Mapping[str, int]
    changed_fd: int

    @classmethod
    def make(cls, paths: StorePaths, control: Control, specs: Sequence[RoleSpec]) -> Resources:
        """Open everything. Semaphores keep their names until `unlink_names`; when this fails none has one."""
        _unlink_left_over(control)
        names = {name for spec in specs for name in spec.sockets}
        try:
            return cls(
                paths=paths,
                bells={spec.name: _bell(control, spec) for spec in specs},
                sockets={name: listen(paths.socket(name)) for name in sorted(names)},
                control_socket=listen(paths.socket(CONTROL_SOCKET)),
                traces={spec.name: _trace_file(spec.name) for spec in specs},
                changed_fd=os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
            )
        except BaseException:
            # A name outlives its process, and the next start of this store may never come.
            _unlink_left_over(control)
            raise

    def unlink_names(self) -> None:
        """The template has the semaphores, and this process's handles are good for later templates."""
        for bell in self.bells.values():
            if isinstance(bell, SemaphoreBell):
                bell.unlink()

    def drain_changed(self) -> None:
        """Forget that roles have changed their state."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.changed_fd)

    def turn_away(self, name: str) -> None:
        """Nobody connects to a role any more, who would wait for a successor that does not come."""
        if name in self.sockets:
            self.sockets[name].shutdown(socket.SHUT_RDWR)

    def remove_sockets(self) -> None:
        """From now on a client is told at once that nothing runs."""
        for name in (*self.sockets, CONTROL_SOCKET):
            # A file system that is read-only by now keeps them: who connects is refused, the next start replaces them.
            with contextlib.suppress(OSError):
                remove(self.paths.socket(name))

    def close(self) -> None:
        """Let go of everything but the socket files' names."""
        for bell in self.bells.values():
            bell.close()
        for listener in (*self.sockets.values(), self.control_socket):
            listener.close()
        for fd in (*self.traces.values(), self.changed_fd):
            os.close(fd)


def _bell(control: Control, spec: RoleSpec) -> Bell:
    sleeping = layout.role_word(spec.name, "sleeping")
    if spec.bell is BellKind.EVENT:
        return EventBell(control.cells, sleeping)
    name = semaphore_name(control.load(layout.STORE_ID), control.load(layout.EPOCH), layout.ROLES.index(spec.name))
    return SemaphoreBell(name, control.cells, sleeping)


def _trace_file(role: str) -> int:
    """Memory for a crash's stack. Appended to, so that after it has been emptied the next one begins at 0."""
    fd = os.memfd_create(f"mqproc-{role}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _unlink_left_over(control: Control) -> None:
    """Supervisors that were killed before they unlinked their names left them, of the last epoch or of earlier ones."""
    for name in semaphore_names(control.load(layout.STORE_ID)):
        unlink_semaphore(name)


_OWN_MODE = 0o700
_NO_FILES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def prepare_folder(io: StoreIO, paths: StorePaths) -> None:
    """Make the store's folder if only its last part is missing, and `mqproc/` in it. Raises StoreAccessError."""
    root = paths.root
    try:
        if found := dangling_link(root):
            raise StoreAccessError(f"{root}: {found}")
        if not io.exists(root):
            if not io.exists(root.parent):
                raise StoreAccessError(f"{root}: its parent folder does not exist")
            io.make_folder(root, mode=_OWN_MODE)
        _check(root)
        if paths.own.is_symlink():
            raise StoreAccessError(f"{paths.own}: a symlink")
        if not io.exists(paths.own):
            io.make_folder(paths.own, mode=_OWN_MODE)
        _check(paths.own)
        if stat.S_IMODE(paths.own.stat().st_mode) != _OWN_MODE:
            os.chmod(paths.own, _OWN_MODE)
        for path in (paths.lock, paths.abort):
            if path.is_symlink():
                raise StoreAccessError(f"{path}: a symlink; a store's files are no symlinks")
        for path in (paths.control, paths.settings):
            if path.is_dir():
                raise StoreAccessError(f"{path}: a folder")
        for path in (paths.lock, paths.log):
            # A device is fine: who wants no log links it to /dev/null.
            if kind := _NO_FILES.get(file_type(path)):
                raise StoreAccessError(f"{path}: {kind}")
    except OSError as error:
        raise StoreAccessError(f"{error.filename or root}: {error.strerror}") from None


@contextlib.contextmanager
def starting(paths: StorePaths) -> Iterator[None]:
    """A disk that is full, or the like, is told of the store: what is written to may have no name of its own."""
    try:
        yield
    except DiskFullError as error:
        raise StartError(f"{paths.root}: the group cannot start: {error}{_room(paths)}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        # Semaphores lie in memory: a store that gives up messages makes no room for them.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename != bell.FOLDER
        room = _room(paths) if is_full else ""
        raise StartError(f"{paths.root}: the group cannot start: {where}{reason_of(error)}{room}") from error


def _room(paths: StorePaths) -> str:
    """What makes room, and needs none itself; nothing in a store that has no log yet."""
    command = f"mqproc store retention --store {shell_quoted(paths.root)}"
    return f"; {command} shows what may be deleted, --execute does it" if paths.commit_log.exists() else ""


def why_unwritable(io: StoreIO, paths: StorePaths) -> str:
    """What a role that is started on a file system that has become read-only dies of; empty when it is another reason.

    Those that run have open what they write to.
    """
    try:
        io.close(io.open(paths.control, write=True))
    except OSError as error:
        return why_read_only(errno.EROFS) if error.errno == errno.EROFS else ""
    return ""


def lost_name(paths: StorePaths, lock: StoreLock) -> Path | None:
    """What the store's path does not lead to any more, though a running group has it open; None: nothing.

    A folder that was moved, deleted, or hidden by a mount goes on for who has its files open; the next one that is made
    by its path is another store's, or nobody's.
    """
    name = paths.lock
    try:
        held, found = os.fstat(lock.fd), name.stat()
        if (held.st_dev, held.st_ino) != (found.st_dev, found.st_ino):
            return name
        name = paths.socket(CONTROL_SOCKET)
        name.lstat()
        name = _where_it_lies(name)
        name.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return name
    except OSError:
        pass  # A folder that may not be entered just now, for one: nobody else makes a store there.
    return None


def _where_it_lies(socket: Path) -> Path:
    """Of a store with a long path that is another folder, which may go by itself, as a user's does who logs out."""
    try:
        return connect_path(socket)
    except NotRunningError:
        return socket


def _check(folder: Path) -> None:
    """A store may be reached by a symlink; what lies in it may not."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StoreAccessError(f"{folder}: not a folder")
    if found.st_uid != os.geteuid():
        raise StoreAccessError(f"{folder}: belongs to user {found.st_uid}, not to user {os.geteuid()}")
    if found.st_mode & stat.S_IWOTH:
        raise StoreAccessError(f"{folder}: everybody may write to it (mode {stat.S_IMODE(found.st_mode):04o})")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StoreAccessError(f"{folder}: may not be written")
