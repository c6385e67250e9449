"""A group refuses sends and ends when the files it writes were deleted, moved or replaced."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.errors import MqprocError
from mqproc.roles.writer.role import SEGMENT_CHECK_NS
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, wait_until


def delete(path: Path) -> None:
    subprocess.run(["rm", "-rf", path], check=False)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace(path: Path) -> None:
    move(path)
    moved = path.with_name("moved")
    path.mkdir() if moved.is_dir() else shutil.copy(moved, path)


SEGMENT = f"commitlog/{0:020d}"


def wait_for_next_check() -> None:
    """The writer checks its segment before a send, unless it has done so in the last 5 ms."""
    due_ns = time.monotonic_ns() + 2 * SEGMENT_CHECK_NS
    wait_until(lambda: time.monotonic_ns() > due_ns, what="the next check is due")


@pytest.mark.parametrize("how", [delete, move, replace])
@pytest.mark.parametrize("name", ["", "commitlog", SEGMENT])
def test_group_whose_log_is_deleted_refuses_the_next_send(
    make_group: Callable[..., Group], name: str, how: Callable[[Path], None]
) -> None:
    group = make_group()
    with group.client() as client:
        client.send("orders", b"before")
        how(group.store / name)
        wait_for_next_check()
        with pytest.raises(MqprocError):
            client.send("orders", b"after")
    assert group.process is not None
    assert group.process.wait(PATIENCE_S) == 3
    lost = group.store / ("lock" if not name else SEGMENT)
    assert f"{lost} was deleted, moved or replaced under the group" in group.output.read_text()
    status = call("status", "--store", group.store)
    assert status.code != 0
    if name:
        assert "was deleted, moved or replaced" in call("errors", "--store", group.store).out


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_send_into_a_deleted_segment_names_the_file(make_group: Callable[..., Group], flush: str) -> None:
    group = make_group(flush_disk_type=flush)
    with group.client() as client:
        client.send("orders", b"before")
        (group.store / SEGMENT).unlink()
        wait_for_next_check()
        with pytest.raises(MqprocError, match=f"{group.store / SEGMENT} was deleted, moved or replaced"):
            client.send("orders", b"after")


def test_group_continues_in_new_segments_and_after_retention(make_group: Callable[..., Group]) -> None:
    group = make_group(mapped_file_size_commit_log=65536)
    with group.client() as client:
        for _ in range(20):
            client.send_batch("orders", [b"x" * 1000] * 40)
        assert client.send("orders", b"last").physical_offset > 10 * 65536
    assert group.stop() == 0
