"""Socket paths that are too long, and permissions: only the owner may open a socket."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from mqproc.errors import NotRunningError, StoreAccessError
from mqproc.wire import address
from mqproc.wire.address import SOCKET_PATH_BYTES_MAX, connect_path, listen, peer_uid, remove, runtime_folder


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(connect_path(path)))
    return True


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "mqproc"


def test_listen_socket_is_private_to_owner(tmp_path: Path) -> None:
    path = tmp_path / "mqproc" / "writer.sock"
    with listen(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert can_connect(path)
        assert [entry.name for entry in path.parent.iterdir()] == ["writer.sock"]


def test_listen_replaces_stale_socket(tmp_path: Path) -> None:
    path = tmp_path / "writer.sock"
    listen(path).close()
    with listen(path):
        assert can_connect(path)


def test_listen_long_path_gets_short_path_with_pointer(tmp_path: Path, runtime: Path) -> None:
    path = tmp_path / ("d" * SOCKET_PATH_BYTES_MAX) / "writer.sock"
    path.parent.mkdir()
    with listen(path):
        assert path.is_file()
        assert connect_path(path).parent == runtime
        assert can_connect(path)
        remove(path)
        assert not path.exists()
        assert list(runtime.iterdir()) == []


def long_path(folder: Path, name: str) -> Path:
    path = folder / (name * SOCKET_PATH_BYTES_MAX) / "writer.sock"
    path.parent.mkdir()
    return path


def test_listen_removes_abandoned_sockets(tmp_path: Path, runtime: Path) -> None:
    listen(long_path(tmp_path, "k")).close()  # Killed, and its store removed: its socket is abandoned.
    (killed,) = runtime.iterdir()
    killed_early = killed.with_name("0" * 24 + ".sock.tmp")
    killed.rename(killed_early)
    listen(long_path(tmp_path, "l")).close()
    others = {runtime / "other.sock", runtime / ("0" * 24 + ".sock")}
    for path in others:
        path.write_bytes(b"")
    living, another = long_path(tmp_path, "m"), long_path(tmp_path, "n")
    with listen(living), listen(another):
        assert set(runtime.iterdir()) == {*others, connect_path(living), connect_path(another)}
        assert can_connect(living)


def test_listen_keeps_sockets_being_created(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def look(folder: Path) -> None:
        """Resolve as a concurrent process that creates a socket at the same time."""
        fd = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        looked_at.append(folder)

    monkeypatch.setattr(address, "_remove_abandoned", look)
    with listen(long_path(tmp_path, "d")):
        assert looked_at == [runtime]


def test_listen_is_not_blocked_by_stalled_process(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_PATIENCE_S", 0.0)
    listen(long_path(tmp_path, "a")).close()
    abandoned = set(runtime.iterdir())
    stopped = os.open(runtime, os.O_RDONLY)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    path = long_path(tmp_path, "b")
    with listen(path):
        assert can_connect(path)
        assert set(runtime.iterdir()) == {*abandoned, connect_path(path)}
    os.close(stopped)


def test_listen_keeps_live_socket_of_wrong_type(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = address.connect_errno

    def refused(path: str, kind: socket.SocketKind) -> int:
        return errno.ECONNREFUSED if kind == socket.SOCK_DGRAM else connected(path, kind)

    monkeypatch.setattr(address, "connect_errno", refused)
    listen(long_path(tmp_path, "a")).close()
    living, another = long_path(tmp_path, "b"), long_path(tmp_path, "c")
    with listen(living), listen(another):
        assert set(runtime.iterdir()) == {connect_path(living), connect_path(another)}


def test_runtime_folder_open_to_others_is_refused(runtime: Path) -> None:
    assert runtime_folder() == runtime
    runtime.chmod(0o755)
    with pytest.raises(StoreAccessError, match="mode 0700"):
        runtime_folder()


def test_runtime_folder_symlink_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.symlink_to(tmp_path)
    with pytest.raises(StoreAccessError):
        runtime_folder()


def test_connect_missing_path_raises_not_running(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match="No such file"):
        connect_path(tmp_path / "writer.sock")


@pytest.mark.parametrize("content", [b"", b"relative/path\n", b"/a\0b\n"])
def test_connect_invalid_pointer_raises_not_running(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "writer.sock"
    path.write_bytes(content)
    with pytest.raises(NotRunningError):
        connect_path(path)


def test_connect_pointer_of_other_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "writer.sock"
    path.write_bytes(b"/run/elsewhere.sock\n")
    monkeypatch.setattr(address.os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(NotRunningError):
        connect_path(path)


def test_listen_unwritable_folder_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "file" / "writer.sock"
    path.parent.write_bytes(b"")
    with pytest.raises((StoreAccessError, OSError)):
        listen(path)


def test_peer_credentials_are_known() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert peer_uid(left) == address.os.getuid()
