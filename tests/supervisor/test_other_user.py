"""A group with real roles, started by root as another user: files, clients and its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mqproc.kernels.append_frame import encode_frame
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from tests.support.group import ROOT, START_TIMEOUT_S, STOP_TIMEOUT_S, Group, skip_unless_nobody_can_run

OWNER, STRANGER = 65534, 65533
START = f"{START_TIMEOUT_S:g}s"
SEND_AND_PULL = """
import sys
from mqproc import Client
with Client(sys.argv[1]) as client:
    sent = client.send("orders", b"by its owner")
    client.wait_dispatched()
    print(client.pull("orders", sent.queue_id, sent.queue_offset).messages[0].body.decode())
"""


class OtherUser:
    """A folder of that user with compiled kernels, as after an earlier start."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self._environment = {"HOME": str(folder), "NUMBA_CACHE_DIR": str(folder / "compiled")}
        self._environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        os.chown(folder, OWNER, OWNER)
        folder.chmod(0o755)
        where = "from mqproc.kernels.append_frame import encode_frame; print(encode_frame.stats.cache_path)"
        compiled = Path(self.run(OWNER, "-c", where).stdout.strip())
        shutil.copytree(encode_frame.stats.cache_path, compiled, dirs_exist_ok=True)
        for path in (folder / "compiled", *(folder / "compiled").rglob("*")):
            os.chown(path, OWNER, OWNER)

    def run(self, user: int, *arguments: str, timeout_s: float = START_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run Python as this user, without root's privileges."""
        rights = [f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        return subprocess.run(
            ["setpriv", *rights, sys.executable, *arguments],
            env=self._environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def mqproc(self, user: int, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(user, "-m", "mqproc", command, "--store", str(self.store), *arguments)


@pytest.fixture
def other() -> Iterator[OtherUser]:
    skip_unless_nobody_can_run()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = OtherUser(Path(folder))
        yield made
        made.mqproc(OWNER, "down")


def test_root_starts_group_as_other_user_served_alone(other: OtherUser) -> None:
    started = other.mqproc(OWNER, "up", "--detach", "--set", "metrics_port=0", "--timeout", START)
    assert started.returncode == 0, started.stderr
    own = StorePaths(other.store)
    supervisor = psutil.Process(Group(other.store).words()["supervisor_pid"])
    members = [supervisor, *supervisor.children(recursive=True)]
    assert len(members) == 2 + len(layout.ROLES)
    assert {(member.uids(), member.gids()) for member in members} == {((OWNER,) * 3, (OWNER,) * 3)}

    served = other.run(OWNER, "-c", SEND_AND_PULL, str(other.store))
    assert (served.returncode, served.stdout) == (0, "by its owner\n"), served.stderr
    for path in (other.store, *other.store.rglob("*")):
        found = path.lstat()
        assert (found.st_uid, found.st_gid) == (OWNER, OWNER), path
        assert not found.st_mode & 0o077 or not path.is_relative_to(own.own), path

    refused = other.run(STRANGER, "-c", SEND_AND_PULL, str(other.store))
    assert refused.returncode != 0
    assert "Permission denied" in refused.stderr
    assert {other.mqproc(STRANGER, command).returncode for command in ("down", "stat", "errors")} == {3}
    asked = other.mqproc(STRANGER, "status")
    message = f"mqproc: {other.store}: only its owner, user {OWNER}, may ask whether a group runs: Permission denied\n"
    assert (asked.returncode, asked.stderr) == (3, message)
    assert supervisor.is_running()

    stopped = other.mqproc(OWNER, "down")
    assert stopped.returncode == 0, stopped.stderr
    gone, left = psutil.wait_procs(members, STOP_TIMEOUT_S)
    assert (len(gone), left) == (len(members), [])
    assert not own.abort.exists()
