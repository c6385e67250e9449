"""Where sockets lie: bound 0600 in a 0700 folder, found again by clients although a socket's path is at most 107 bytes.

A path that is too long gets a short one in the user's runtime folder; at the original place then lies a small file, the
pointer, which holds the short path. Those of killed groups go when another one is made: where their stores were removed
nobody starts them again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mqproc.errors import NotRunningError, StoreAccessError

# sun_path has 108 bytes with the NUL that ends it.
SOCKET_PATH_BYTES_MAX: Final = 107
BACKLOG: Final = 512
_TEMPORARY_SUFFIX: Final = ".tmp"
_SHORT_NAME: Final = re.compile(r"[0-9a-f]{24}\.sock(\.tmp)?")
_POINTER_BYTES_MAX: Final = 4096
# So long a start waits for another one that makes its sockets, which takes a moment.
_PATIENCE_S: Final = 2.0
_AGAIN_S: Final = 0.01
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_uid(connection: socket.socket) -> int:
    """The user that the process at the other end runs as."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """The process that connected."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, ...]:
    return _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))


def runtime_folder() -> Path:
    """The user's folder for sockets whose own path is too long; made 0700 when missing.

    Raises StoreAccessError when it is not a folder of ours that nobody else may enter.
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
    """The same short path for the same long one."""
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]
    short = runtime_folder() / f"{name}.sock"
    if not _fits(short):
        raise StoreAccessError(f"{short}: over {SOCKET_PATH_BYTES_MAX} bytes; set XDG_RUNTIME_DIR to a shorter folder")
    return short


def listen(path: Path, backlog: int = BACKLOG) -> socket.socket:
    """A listening socket at `path`, non-blocking, mode 0600; a socket or pointer that was there is replaced.

    It is bound under another name first, so that `path` always leads to somebody who listens. Call it only while
    holding the store's lock.
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
    """Only one process at a time makes sockets in the runtime folder, or removes abandoned ones.

    False where the other one takes long, since it was stopped: that keeps nobody from starting a group.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _locked(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    ends_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                return False
            time.sleep(_AGAIN_S)
        else:
            return True


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed groups have left in the runtime folder; where their stores are gone too, nobody else would."""
    for entry in os.scandir(folder):
        if _SHORT_NAME.fullmatch(entry.name) and is_abandoned(entry.path):
            Path(entry.path).unlink(missing_ok=True)


def is_abandoned(path: str) -> bool:
    """Whether there is a socket that no process has any more.

    Of one that is somebody's Linux tells that it is of another kind, so it is not connected to. Other kernels, as
    gVisor's, refuse the wrong kind in any case: they are asked with the right one, too.
    """
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode) and all(
            _connected(path, kind) == errno.ECONNREFUSED for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)
        )
    except OSError:
        return False


def _connected(path: str, kind: socket.SocketKind) -> int:
    """What comes of connecting to a socket: an errno, or 0."""
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as sock:
        return sock.connect_ex(path)


def _write_pointer(path: Path, target: Path) -> None:
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(os.fsencode(target) + b"\n")
    temporary.replace(path)


def remove(path: Path) -> None:
    """Remove a socket's name, and the short one that it points to."""
    try:
        target = connect_path(path)
    except NotRunningError:
        target = path
    for name in (target, path):
        name.unlink(missing_ok=True)


def connect_path(path: Path) -> Path:
    """The path to connect to for the socket at `path`: itself, or where the pointer leads.

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
        raise NotRunningError(f"{path}: neither a socket nor our pointer to one")
    return target
