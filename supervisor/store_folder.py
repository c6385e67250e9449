"""The store's folder: ours, and closed to others, before anything in it is touched; and still the same one later."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mqproc.control_words import why_read_only
from mqproc.errors import DiskFullError, NotRunningError, StartError, StoreAccessError
from mqproc.io import StoreIO, reason_of
from mqproc.ipc import bell
from mqproc.ipc.lock import StoreLock
from mqproc.paths import StorePaths, file_type, in_shell, lost_link
from mqproc.supervisor.resources import CONTROL_SOCKET
from mqproc.wire.address import connect_path

_OWN_MODE = 0o700
_NO_FILES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def prepare_folder(io: StoreIO, paths: StorePaths) -> None:
    """Make the store's folder if only its last part is missing, and `mqproc/` in it. Raises StoreAccessError."""
    root = paths.root
    try:
        if found := lost_link(root):
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
    command = f"mqproc store retention --store {in_shell(paths.root)}"
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
