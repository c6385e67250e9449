"""What befalls a running group: a full disk, a disk that fails, a writer that is killed, damage in the log."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from mqproc import CorruptStoreError, DiskFullError, FlushFailedError, RetryLaterError, StoreReadOnlyError
from mqproc.client import core
from mqproc.client.retry import NO_RETRY
from mqproc.layout import record
from mqproc.layout.control import STATE_RUNNING, WRITER
from mqproc.message import PullStatus
from tests.bad_input.scene import Answer, Scene
from tests.conftest import Group, wait_until

FAILING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int fails(void) { const char *path = getenv("FAIL_SYNC_WHEN"); return path && access(path, F_OK) == 0; }
int fdatasync(int fd) {
    if (fails()) { errno = EIO; return -1; }
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
int fsync(int fd) {
    if (fails()) { errno = EIO; return -1; }
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""


def sends_to_a_full_disk(scene: Scene) -> Answer:
    """Others' bytes fill the disk. What is stored can be read meanwhile."""
    disk = scene.ballast.parent
    with scene.group.client(retry=NO_RETRY) as client:
        with scene.ballast.open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, _free_bytes(disk) - (64 << 10))
        try:
            # A look amid the filling may have called it full already, with more room than there is at the end.
            wait_until(lambda: _is_seen_full(scene), what="the keeper's look at the disk")
            with pytest.raises(DiskFullError) as refused:
                client.send("known", b"refused")
            assert client.pull("three", 0, 0).status is PullStatus.FOUND
        finally:
            scene.ballast.unlink()
        needed, there = (int(part.replace(",", "")) for part in re.findall(r"[\d,]*\d", str(refused.value)))
        assert there < 1 << 20 < needed
        wait_until(lambda: not scene.group.words()["disk_full"], what="room again")
    return Answer(refused.value.code, str(refused.value))


def _is_seen_full(scene: Scene) -> bool:
    words = scene.group.words()
    return bool(words["disk_full"]) and words["disk_free_bytes"] < 1 << 20


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def sends_after_a_failed_sync(scene: Scene) -> Answer:
    """A group whose syncs begin to fail: the send under way is not known to be durable, the next is refused."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, to make syncs fail in real processes")
    folder = scene.folder / "failing"
    folder.mkdir()
    library, switch = folder / "failing.so", folder / "fail"
    (folder / "failing.c").write_text(FAILING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "failing.c", "-ldl"], check=True)
    group = scene.another(Group(folder / "store", flush_disk_type="SYNC_FLUSH"))
    group.environment = {"LD_PRELOAD": str(library), "FAIL_SYNC_WHEN": str(switch)}
    group.start()
    with group.client() as client:
        kept = client.send("disk", b"durable")
        switch.touch()
        with pytest.raises((FlushFailedError, StoreReadOnlyError)):
            client.send("disk", b"not durable")
        with pytest.raises(StoreReadOnlyError) as refused:
            client.send("disk", b"refused")
        assert client.get(kept.message_id).body == b"durable"
        assert client.health().read_only
    group.close()
    return Answer(refused.value.code, str(refused.value))


def sends_to_a_killed_writer(scene: Scene) -> Answer:
    """Who does not wait is told when to come back, and nothing of it is stored; who waits is stored."""
    group = scene.group
    with group.client(retry=NO_RETRY) as hasty, group.client() as patient:
        hasty.run(core.ping(WRITER))
        pid, incarnation = group.pid(WRITER), group.words()["writer.incarnation"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the writer's end")
        with pytest.raises(RetryLaterError) as refused:
            hasty.send("restarts", b"refused")
        assert patient.send("restarts", b"waited", queue_id=0).queue_offset == 0
        wait_until(
            lambda: (
                (group.words()["writer.incarnation"], group.words()["writer.state"]) == (incarnation + 1, STATE_RUNNING)
            ),
            what="the next writer",
        )
        group.wait_dispatched()
        assert patient.count("restarts") == 1
    return Answer(refused.value.code, f"{refused.value}; come back in {refused.value.hint_ms} ms")


def reads_damage(scene: Scene) -> Answer:
    """The middle one of three messages is not what was stored, until it is mended again."""
    with scene.group.client() as client:
        before, damaged, behind = client.pull("three", 0, 0).messages
        start = damaged.physical_offset // scene.segment_bytes * scene.segment_bytes
        segment = scene.group.paths.commit_log / f"{start:020d}"
        place = damaged.physical_offset - start + record.BODY_CRC
        whole = segment.read_bytes()[place : place + 1]
        try:
            _write(segment, place, bytes([whole[0] ^ 0xFF]))
            with pytest.raises(CorruptStoreError) as refused:
                client.get(damaged.message_id)
            pulled = client.pull("three", 0, 1)
            assert [message.body for message in client.pull("three", 0, 0, 1).messages] == [before.body]
            assert [message.body for message in client.pull("three", 0, pulled.next_offset).messages] == [behind.body]
        finally:
            _write(segment, place, whole)
        extent = f"[{damaged.physical_offset}, {damaged.physical_offset + damaged.size})"
        assert extent in str(refused.value)
        assert extent in pulled.detail
        return Answer(pulled.status.value, pulled.detail)


def _write(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)
