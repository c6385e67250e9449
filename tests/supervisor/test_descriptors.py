"""Descriptors after a fork: the named ones are open, all others closed."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path

from mqproc.supervisor.template import close_other_descriptors


def test_close_descriptors_keeps_named_only(tmp_path: Path) -> None:
    mapped, other = tmp_path / "mapped", tmp_path / "other"
    for path in (mapped, other):
        path.write_bytes(bytes(4096))
    with open(mapped, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096)
    kept, closed = os.open(other, os.O_RDONLY), os.open(other, os.O_RDONLY)
    pair = socket.socketpair()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        close_other_descriptors({kept, writer}, [mapped])
        left = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and _open(fd)}
        os.write(writer, "\n".join(sorted(left)).encode())
        mapping[0] = 1
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as lines:
        left = lines.read().split("\n")
    assert [line for line in left if "pipe:" not in line] == [str(mapped), str(other)]
    assert sum("pipe:" in line for line in left) == 1
    assert mapping[0] == 1
    mapping.close()
    for end in pair:
        end.close()
    for fd in (kept, closed):
        os.close(fd)


def _open(fd: str) -> bool:
    """False for the descriptor that listed the folder."""
    try:
        os.fstat(int(fd))
    except OSError:
        return False
    return True
