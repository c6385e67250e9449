"""The store's folder and a group's resources: checks, sockets, bells, lost paths."""

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

from mqproc.config.parse import SocketAccess
from mqproc.errors import DiskFullError, StartError, StoreAccessError
from mqproc.io.store_io import StoreIO, reason_of
from mqproc.ipc.bell import (
    SEMAPHORE_FOLDER,
    Bell,
    EventBell,
    SemaphoreBell,
    semaphore_name,
    semaphore_names,
    unlink_semaphore,
)
from mqproc.ipc.control import Control
from mqproc.ipc.control_words import why_read_only
from mqproc.ipc.store_lock import StoreLock
from mqproc.layout import control as layout
from mqproc.paths import StorePaths, dangling_link, file_type, shell_quoted
from mqproc.roles.role import BellKind, RoleSpec
from mqproc.wire.address import OWNER, PASSING, listen

CONTROL_SOCKET = "ctl"


@dataclass(frozen=True, slots=True)
class Resources:
    """Bells by role, sockets by name, memory for stacks: opened by the supervisor for roles."""

    paths: StorePaths
    bells: Mapping[str, Bell]
    sockets: Mapping[str, socket.socket]
    control_socket: socket.socket
    traces: Mapping[str, int]
    """A memory file per role, for the Python stack of a crash."""
    changed_fd: int
    """Eventfd that wakes the supervisor after a role's state change."""

    @classmethod
    def make(
        cls, paths: StorePaths, control: Control, specs: Sequence[RoleSpec], access: SocketAccess = OWNER
    ) -> Resources:
        """Open everything; `access` is that to the roles' sockets.

        Semaphores have names until `unlink_names`; after a failure none has.
        """
        _unlink_left_over(control)
        _take_back_sharing(paths)
        names = {name for spec in specs for name in spec.sockets}
        try:
            return cls(
                paths=paths,
                bells={spec.name: _bell(control, spec) for spec in specs},
                sockets={name: listen(paths.socket(name), access=access) for name in sorted(names)},
                control_socket=listen(paths.socket(CONTROL_SOCKET)),
                traces={spec.name: _trace_file(spec.name) for spec in specs},
                changed_fd=os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
            )
        except BaseException:
            # Names outlive the process, and this store may never be started again.
            _unlink_left_over(control)
            raise

    def unlink_names(self) -> None:
        """Unlink semaphores: the template has inherited them, and handles remain valid."""
        for bell in self.bells.values():
            if isinstance(bell, SemaphoreBell):
                bell.unlink()

    def drain_changed(self) -> None:
        """Reset the eventfd for state changes of roles."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.changed_fd)

    def turn_away(self, name: str) -> None:
        """Close a role's listener, so that no client waits for a successor."""
        if name in self.sockets:
            self.sockets[name].shutdown(socket.SHUT_RDWR)

    def remove_sockets(self) -> None:
        """Remove the sockets, so that clients fail at once."""
        for name in (*self.sockets, CONTROL_SOCKET):
            # On a read-only file system they stay: connections are refused, the next start replaces them.
            with contextlib.suppress(OSError):
                self.paths.socket(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close everything; socket files remain."""
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
    """Memory file for a crash's stack. Appended to, so that writing restarts at 0 once emptied."""
    fd = os.memfd_create(f"mqproc-{role}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _unlink_left_over(control: Control) -> None:
    """Unlink semaphores of killed supervisors, of the last epoch or earlier epochs."""
    for name in semaphore_names(control.load(layout.STORE_ID)):
        unlink_semaphore(name)


_OWN_MODE = 0o700
_NO_FILES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def prepare_folder(io: StoreIO, paths: StorePaths) -> None:
    """Create the store's folder (not its parents) and `mqproc/`. Raises StoreAccessError."""
    root = paths.root
    try:
        if found := dangling_link(root):
            raise StoreAccessError(f"{root}: {found}")
        if not io.exists(root):
            if not io.exists(root.parent):
                raise StoreAccessError(f"{root}: its parent folder does not exist")
            _make_root(io, root)
        _check(root)
        if paths.own.is_symlink():
            raise StoreAccessError(f"{paths.own}: a symlink")
        if not io.exists(paths.own):
            io.make_folder(paths.own, mode=_OWN_MODE)
        _check(paths.own)
        # A running group may have shared it, whose clients must not lose it to a start that will find the store locked.
        if stat.S_IMODE(paths.own.stat().st_mode) & ~PASSING != _OWN_MODE:
            os.chmod(paths.own, _OWN_MODE)
        for path in (paths.lock, paths.abort):
            if path.is_symlink():
                raise StoreAccessError(f"{path}: a symlink; a store's files cannot be symlinks")
        for path in (paths.control, paths.settings):
            if path.is_dir():
                raise StoreAccessError(f"{path}: a folder")
        for path in (paths.lock, paths.log):
            # A device is allowed: linking the log to /dev/null disables it.
            if kind := _NO_FILES.get(file_type(path)):
                raise StoreAccessError(f"{path}: {kind}")
    except OSError as error:
        raise StoreAccessError(f"{error.filename or root}: {error.strerror}") from None


def _take_back_sharing(paths: StorePaths) -> None:
    """Take back the right to pass the folders, which an earlier start gave.

    Raises StoreAccessError. mqproc/ is passable only if an earlier start shared the store. The store's folder is then
    in the same group, and passable but not readable, unless everyone could pass it anyway. The caller holds the store's
    lock.
    """
    try:
        own, root = paths.own.stat(), paths.root.stat()
        if not own.st_mode & PASSING:
            return
        mode = stat.S_IMODE(root.st_mode)
        if root.st_gid == own.st_gid and not mode & (stat.S_IRWXG | stat.S_IRWXO) & ~PASSING:
            os.chmod(paths.root, mode & ~PASSING)
        # Last, so that the next start does it all again if this one is killed here.
        os.chmod(paths.own, _OWN_MODE)
    except OSError as error:
        raise StoreAccessError(f"{error.filename or paths.root}: {error.strerror}") from None


def _make_root(io: StoreIO, root: Path) -> None:
    io.make_folder(root, mode=_OWN_MODE)
    if root.stat().st_uid != os.geteuid():
        # In a folder of another user: root keeps the store that it starts.
        os.chown(root, os.geteuid(), os.getegid())


@contextlib.contextmanager
def starting(paths: StorePaths) -> Iterator[None]:
    """Report a full disk and similar errors with the store's path: files may have no name."""
    try:
        yield
    except DiskFullError as error:
        raise StartError(f"{paths.root}: the group cannot start: {error}{_room(paths)}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        # Semaphores are in memory: deleting messages does not help.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename != SEMAPHORE_FOLDER
        room = _room(paths) if is_full else ""
        raise StartError(f"{paths.root}: the group cannot start: {where}{reason_of(error)}{room}") from error


def _room(paths: StorePaths) -> str:
    """The command that frees space without needing any; empty for a store without log."""
    command = f"mqproc store retention --store {shell_quoted(paths.root)}"
    return f"; {command} shows deletable files, --execute deletes them" if paths.commit_log.exists() else ""


def why_unwritable(io: StoreIO, paths: StorePaths) -> str:
    """Reason why starting roles fail on a file system that has become read-only, or "".

    Running roles have their files open.
    """
    try:
        io.close(io.open(paths.control, write=True))
    except OSError as error:
        return why_read_only(errno.EROFS) if error.errno == errno.EROFS else ""
    return ""


def lost_name(paths: StorePaths, lock: StoreLock) -> Path | None:
    """A path of the store that no longer leads to the files that the group has open; or None.

    A folder that was moved, deleted, or covered by a mount continues to work for open files; a new folder at its path
    is another store.
    """
    name = paths.lock
    try:
        held, found = os.fstat(lock.fd), name.stat()
        if (held.st_dev, held.st_ino) != (found.st_dev, found.st_ino):
            return name
        name = paths.socket(CONTROL_SOCKET)
        name.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return name
    except OSError:
        pass  # Such as a folder without permission: no other process can create a store there.
    return None


def _check(folder: Path) -> None:
    """A store may be reached through a symlink; its contents may not."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StoreAccessError(f"{folder}: not a folder")
    if found.st_uid != os.geteuid():
        raise StoreAccessError(f"{folder}: belongs to user {found.st_uid}, not to user {os.geteuid()}{_below(folder)}")
    if found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        raise StoreAccessError(f"{folder}: writable by everyone (mode {mode:04o}){_below(folder)}")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StoreAccessError(f"{folder}: not writable")


def _below(folder: Path) -> str:
    """Advice: to root the owner; in the root of a volume, as in Kubernetes, a new folder."""
    found = folder.stat()
    if os.geteuid() == 0 and found.st_uid != 0 and os.listdir(folder):
        owner = f"sudo -u '#{found.st_uid}' mqproc up --store {shell_quoted(folder)}"
        return f"; start the group as the owner of the store: {owner}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return ""
    return f"; take a folder of your own below it: --store {shell_quoted(folder / 'store')}"
