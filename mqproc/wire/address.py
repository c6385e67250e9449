"""Addresses of Unix sockets, also where a path exceeds the limit of 107 bytes.

Sockets are bound with mode 0600 in a 0700 folder. A path that is too long gets a short one in the user's runtime
folder, and a small file at the original place, the pointer, holds it. Sockets of killed groups are removed when the
next one is made, since their stores may have been removed too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mqproc.errors import NotRunningError, StoreAccessError
from mqproc.util.file_lock import wait_for_flock

# sun_path has 108 bytes with the NUL that ends it.
SOCKET_PATH_BYTES_MAX: Final = 107
BACKLOG: Final = 512
_TEMPORARY_SUFFIX: Final = ".tmp"
_SHORT_NAME: Final = re.compile(r"[0-9a-f]{24}\.sock(\.tmp)?")
_POINTER_BYTES_MAX: Final = 4096
# Longest wait for another start that creates its sockets.
_PATIENCE_S: Final = 2.0
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Pid of the process that connected."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, ...]:
    return _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))


def runtime_folder() -> Path:
    """The user's folder for sockets whose path is too long; created with mode 0700.

    Raises StoreAccessError unless it is a folder of this user that no other user may enter.
    """
    uid = os.getuid()
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "mqproc" if base and os.path.isabs(base) else Path(f"/tmp/mqproc-{uid}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StoreAccessError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise StoreAccessError(f"{folder}: must be a folder of user {uid} with mode 0700")
    return folder


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) + len(_TEMPORARY_SUFFIX) <= SOCKET_PATH_BYTES_MAX


def _short_path(path: Path) -> Path:
    """Map a long path to a short one, always to the same."""
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]
    short = runtime_folder() / f"{name}.sock"
    if not _fits(short):
        raise StoreAccessError(f"{short}: over {SOCKET_PATH_BYTES_MAX} bytes; set XDG_RUNTIME_DIR to a shorter folder")
    return short


def listen(path: Path, backlog: int = BACKLOG) -> socket.socket:
    """Listen at `path`, non-blocking, mode 0600, in place of an existing socket or pointer.

    The socket is bound under a temporary name first, so `path` always has a listener. The caller holds the store's
    lock.
    """
    path = path.absolute()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if _fits(path):
        return _bound(path, path, backlog)
    target = _short_path(path)
    with _held(target.parent) as is_held:
        if is_held:
            _remove_abandoned(target.parent)
        return _bound(path, target, backlog)


def _bound(path: Path, target: Path, backlog: int) -> socket.socket:
    temporary = target.with_name(target.name + _TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(temporary))
        listener.listen(backlog)
        temporary.replace(target)
        if target != path:
            _write_pointer(path, target)
    except OSError as error:
        listener.close()
        raise StoreAccessError(f"{path}: cannot listen: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    return listener


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock the runtime folder while sockets are created or removed there.

    Yields False when another process, perhaps stopped, holds the lock too long; a start continues then.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield wait_for_flock(fd, _PATIENCE_S)
    finally:
        os.close(fd)


def _remove_abandoned(folder: Path) -> None:
    """Remove sockets of killed groups from the runtime folder: their stores may be gone."""
    for entry in os.scandir(folder):
        if _SHORT_NAME.fullmatch(entry.name) and is_abandoned(entry.path):
            Path(entry.path).unlink(missing_ok=True)


def is_abandoned(path: str) -> bool:
    """Whether a socket exists that no process listens on.

    Linux refuses a connection of the wrong type without connecting. Other kernels, such as gVisor, refuse the wrong
    type in any case, so the right type is tried too.
    """
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode) and all(
            connect_errno(path, kind) == errno.ECONNREFUSED for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)
        )
    except OSError:
        return False


def connect_errno(path: str, kind: socket.SocketKind) -> int:
    """The errno of connecting to a socket, or 0."""
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as sock:
        return sock.connect_ex(path)


def _write_pointer(path: Path, target: Path) -> None:
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(os.fsencode(target) + b"\n")
    temporary.replace(path)


def remove(path: Path) -> None:
    """Remove a socket and its short path."""
    try:
        target = connect_path(path)
    except NotRunningError:
        target = path
    for name in (target, path):
        name.unlink(missing_ok=True)


def connect_path(path: Path) -> Path:
    """The path to connect to for the socket at `path`: itself, or the pointer's target.

    Raises NotRunningError when nothing is there.
    """
    try:
        found = path.lstat()
        if stat.S_ISSOCK(found.st_mode):
            return path
        return _read_pointer(path)
    except OSError as error:
        raise NotRunningError(f"{path}: {error.strerror}") from None


def _read_pointer(path: Path) -> Path:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        data = os.read(fd, _POINTER_BYTES_MAX) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(fd)
    target = Path(os.fsdecode(data.rstrip(b"\n")))
    if b"\0" in data or not target.is_absolute() or found.st_uid != os.getuid():
        raise NotRunningError(f"{path}: neither a socket nor a pointer to one")
    return target
