"""A group with real roles, started by root as another user: files, clients and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import mqproc
from mqproc.errors import StartError
from mqproc.kernels.jit import cache
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from tests.support.command_line import call
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
    """A folder of that user, with kernels that root compiled."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self._environment = {"HOME": str(folder), "NUMBA_CACHE_DIR": str(folder / "compiled")}
        self._environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        os.chown(folder, OWNER, OWNER)
        folder.chmod(0o755)
        full = cache.full_folder()
        assert full is not None
        cache.copy_code(full, folder / "compiled" / full.name)

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


def owners(store: Path) -> set[tuple[int, int]]:
    return {(found.st_uid, found.st_gid) for path in (store, *store.rglob("*")) for found in [path.lstat()]}


def test_root_commands_leave_the_store_to_its_owner(other: OtherUser, tmp_path: Path) -> None:
    up = ("up", "--detach", "--set", "metrics_port=0", "--set", "mapped_file_size_commit_log=1MiB", "--timeout", START)
    started = other.mqproc(OWNER, *up)
    assert started.returncode == 0, started.stderr
    sent = other.run(OWNER, "-c", SEND_AND_PULL, str(other.store))
    assert sent.returncode == 0, sent.stderr

    # The group runs: its keeper reads the request that root writes.
    asked = call("store", "retention", other.store, "--execute", "--older-than", "0", "--timeout", START)
    assert asked.code == 0, asked.err
    lines = tmp_path / "lines"
    lines.write_text("a\n")
    assert call("import", lines, "--topic", "t", "--format", "lines", "--store", other.store).code != 0
    assert owners(other.store) == {(OWNER, OWNER)}
    assert other.mqproc(OWNER, "down").returncode == 0

    # It is stopped: root changes the files.
    (unit_file,) = (other.store / "consumequeue" / "orders").rglob("0" * 20)
    with unit_file.open("r+b") as file:
        file.write(b"damage")
    for command in ("repair", "recover", "retention"):
        done = call("store", command, other.store, "--execute")
        assert done.code == 0, (command, done.err, done.out)
    assert (other.store / "mqproc" / "repaired").is_dir()
    assert owners(other.store) == {(OWNER, OWNER)}

    # A group of root would leave sockets and files that only root may use.
    refused = call("up", "--store", other.store)
    owner = f"sudo -u '#{OWNER}' mqproc up --store {other.store}"
    text = f"belongs to user {OWNER}, not to user 0; start the group as the owner of the store: {owner}"
    assert (refused.code, refused.err) == (3, f"mqproc: {other.store}: {text}\n")
    with pytest.raises(StartError, match="start the group as the owner of the store"):
        mqproc.open(other.store)
    assert owners(other.store) == {(OWNER, OWNER)}

    started = other.mqproc(OWNER, *up)
    assert started.returncode == 0, started.stderr
    sent = other.run(OWNER, "-c", SEND_AND_PULL, str(other.store))
    assert (sent.returncode, sent.stdout) == (0, "by its owner\n"), sent.stderr
