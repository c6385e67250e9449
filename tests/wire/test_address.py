"""Socket paths that are too long, and permissions: only the owner may open a socket."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from mqproc.errors import StoreAccessError
from mqproc.wire import address
from mqproc.wire.address import SOCKET_PATH_BYTES_MAX, connect, listen, peer_uid


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        connect(client, path)
    return True


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


@pytest.mark.parametrize("room", [0, 1, 4, 5, 200])
def test_listen_long_path_is_bound_in_its_folder(tmp_path: Path, room: int) -> None:
    """Also where only the temporary name, four bytes longer, is too long. Nothing lies elsewhere."""
    length = SOCKET_PATH_BYTES_MAX + room - len(str(tmp_path)) - len("/writer.sock") - 1
    path = tmp_path / ("d" * length) / "writer.sock"
    with listen(path):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert can_connect(path)
        assert [entry.name for entry in path.parent.iterdir()] == ["writer.sock"]
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        connect(client, path)


def test_short_name_of_long_path_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 200) / "writer.sock"
    with listen(path):
        before = os.listdir("/proc/self/fd")
        assert can_connect(path)
        assert os.listdir("/proc/self/fd") == before


def test_connect_missing_path_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "writer.sock", tmp_path / ("d" * 200) / "writer.sock"):
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(FileNotFoundError):
            connect(client, path)


def test_listen_unwritable_folder_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "file" / "writer.sock"
    path.parent.write_bytes(b"")
    with pytest.raises((StoreAccessError, OSError)):
        listen(path)


def test_peer_credentials_are_known() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert peer_uid(left) == address.os.getuid()
