"""Addresses of Unix sockets, also where a path exceeds the limit of 107 bytes.

Sockets are bound with mode 0600 in a 0700 folder, unless `socket_mode` shares those for clients. Where the path is too
long, bind and connect use an open descriptor of the folder, `/proc/self/fd/N/name`. So a socket is always in the
store's folder, where every client finds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mqproc.config.parse import SocketAccess
from mqproc.errors import StoreAccessError

# sun_path has 108 bytes with the NUL that ends it.
SOCKET_PATH_BYTES_MAX: Final = 107
OWNER: Final = SocketAccess()
BACKLOG: Final = 512
PASSING: Final = stat.S_IXGRP | stat.S_IXOTH
"""All rights to folders that sharing may give."""
_TEMPORARY_SUFFIX: Final = ".tmp"
_SO_PEERGROUPS: Final = 59
# The most that Python reads, for 256 groups.
_GROUPS_BYTES: Final = 1024
_GID = struct.Struct("I")
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Pid of the process that connected."""
    return _peer(connection)[0]


def is_admitted(connection: socket.socket, access: SocketAccess) -> bool:
    """Whether the other end's user is one with whom the sockets are shared."""
    if not access.mode & stat.S_IWGRP:
        return False
    return bool(access.mode & stat.S_IWOTH) or access.gid in _peer_groups(connection)


def _peer_groups(connection: socket.socket) -> Sequence[int]:
    """Group ids of the process at the other end."""
    own = _peer(connection)[2]
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # It has more groups than fit.
        return [own]
    return [own, *(gid for (gid,) in _GID.iter_unpack(found))]


def _peer(connection: socket.socket) -> tuple[int, ...]:
    return _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name of the socket at `path` for an address, valid within the block. Raises OSError."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield os.fspath(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(sock: socket.socket, path: Path) -> None:
    """Connect to the socket at `path`. Raises OSError."""
    with short_name(path) as name:
        sock.connect(name)


def listen(path: Path, backlog: int = BACKLOG, access: SocketAccess = OWNER) -> socket.socket:
    """Listen at `path`, non-blocking, in place of an existing socket.

    The socket is bound under a temporary name first, so `path` always has a listener. The caller holds the store's
    lock. `access`: other users may connect, too, and pass the socket's folder and the folder above.
    """
    path = path.absolute()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        with short_name(temporary) as name:
            listener.bind(name)
        listener.listen(backlog)
        if access.mode & stat.S_IWGRP:
            _share(temporary, access)
        temporary.replace(path)
    except OSError as error:
        listener.close()
        raise StoreAccessError(f"{path}: cannot listen: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    return listener


def _share(path: Path, access: SocketAccess) -> None:
    """Let others connect to a socket. Raises StoreAccessError, as for a group without this user."""
    passing = (access.mode & (stat.S_IWGRP | stat.S_IWOTH)) >> 1
    try:
        # mqproc/ first: by its mode a later start finds that there are rights to take back.
        for folder in (path.parent, path.parent.parent):
            _let_pass(folder, passing, access.gid)
        os.chown(path, -1, access.gid)
        os.chmod(path, access.mode)
    except OSError as error:
        raise StoreAccessError(
            f"{path.parent}: cannot be shared with group {access.gid} (socket_group): {error.strerror}; user"
            f" {os.geteuid()} must be a member"
        ) from None


def _let_pass(folder: Path, passing: int, gid: int) -> None:
    """Let a group, or everyone, pass a folder, to which then no group may write."""
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & PASSING == PASSING:
        os.chmod(folder, mode & ~stat.S_IWGRP)
        return
    closed = mode & ~stat.S_IRWXG
    if found.st_gid != gid:
        # The rights of the former group are not the new one's, not even for a moment.
        os.chmod(folder, closed)
        os.chown(folder, -1, gid)
    os.chmod(folder, closed | passing)


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
