"""Stores shared by several users: `socket_group` and `socket_mode`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mqproc.config.parse import load_options, socket_access
from mqproc.errors import ConfigurationError
from mqproc.paths import StorePaths
from tests.support.command_line import call
from tests.support.group import ROOT, Group, skip_unless_nobody_can_run

MEMBER, STRANGER = 65533, 65532
SHARED, OTHER = 54_321, 54_322
"""Groups of users; numbers need no names."""
SEND = """
import sys, mqproc
with mqproc.Client(sys.argv[1], timeout=20) as client:
    client.send("orders", b"by another user")
    client.wait_dispatched()
    print(client.count("orders"))
"""


def run(user: int, group: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python as a user with this one further group, without root's privileges."""
    rights = [f"--reuid={user}", f"--regid={user}", f"--groups={group}", "--no-new-privs", "--bounding-set=-all"]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    command = ["setpriv", *rights, sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def shared(tmp_path: Path, make_group: Any) -> Any:
    """Start a group in a folder through which others may pass."""
    skip_unless_nobody_can_run()
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(0o755)
    return make_group


def modes(group: Group) -> dict[str, tuple[int, int]]:
    paths = StorePaths(group.store)
    found = {"store": paths.root, "mqproc": paths.own} | {
        name: paths.socket(name) for name in ("writer", "query", "ctl")
    }
    return {name: (path.stat().st_mode & 0o777, path.stat().st_gid) for name, path in found.items()}


def test_members_of_the_socket_group_send_and_read(shared: Any) -> None:
    group = shared(socket_group=SHARED)
    assert modes(group) == {
        "store": (0o710, SHARED),
        "mqproc": (0o710, SHARED),
        "writer": (0o660, SHARED),
        "query": (0o660, SHARED),
        "ctl": (0o600, os.getgid()),
    }
    sent = run(MEMBER, SHARED, "-c", SEND, group.store)
    assert (sent.returncode, sent.stdout.split()) == (0, ["1"]), sent.stderr
    refused = run(STRANGER, OTHER, "-c", SEND, group.store)
    assert refused.returncode == 1
    assert "Permission denied" in refused.stderr
    for command in ("status", "down"):
        asked = run(MEMBER, SHARED, "-m", "mqproc", command, "--store", group.store)
        assert asked.returncode == 3
        assert "only its owner, user 0, may ask" in asked.stderr
    listed = run(MEMBER, SHARED, "-m", "mqproc", "topic", "list", "--store", group.store)
    assert "orders" in listed.stdout, listed.stderr


def test_mode_0666_admits_every_user(shared: Any) -> None:
    group = shared(socket_mode="0666")
    assert modes(group)["writer"][0] == 0o666
    sent = run(STRANGER, OTHER, "-c", SEND, group.store)
    assert sent.returncode == 0, sent.stderr


@pytest.mark.parametrize("access", [{"socket_group": SHARED}, {"socket_mode": "0666"}])
@pytest.mark.parametrize(
    ("before", "group_before", "shared_mode", "after"),
    [
        (0o700, OTHER, "passing", 0o700),
        (0o770, OTHER, "passing", 0o700),
        (0o2770, SHARED, "passing", 0o700),
        (0o750, SHARED, "passing", 0o700),
        (0o755, OTHER, 0o755, 0o755),
        (0o775, SHARED, 0o755, 0o755),
    ],
)
def test_start_without_sharing_closes_the_store_again(
    shared: Any,
    tmp_path: Path,
    access: dict[str, Any],
    before: int,
    group_before: int,
    shared_mode: int | str,
    after: int,
) -> None:
    """Members of the group may pass the store's folder and mqproc/, never list or change them."""
    store = tmp_path / "store"
    store.mkdir()
    os.chown(store, -1, group_before)
    store.chmod(before)
    group = shared(**access)
    passing, gid = (0o710, SHARED) if "socket_group" in access else (0o711, os.getgid())
    opened = (passing, gid) if shared_mode == "passing" else (shared_mode, group_before)
    assert (modes(group)["store"], modes(group)["mqproc"]) == (opened, (passing, gid))
    assert run(MEMBER, SHARED, "-c", SEND, store).returncode == 0
    planted = run(MEMBER, SHARED, "-c", "import os, sys; os.mkdir(sys.argv[1])", store / "planted")
    assert "Permission denied" in planted.stderr
    assert group.stop() == 0
    for name in access:
        del group.options[name]
    group.start()
    found = modes(group)
    assert (found["store"][0], found["mqproc"][0], found["writer"]) == (after, 0o700, (0o600, os.getgid()))
    assert "Permission denied" in run(MEMBER, SHARED, "-c", SEND, store).stderr


def test_sharing_with_fewer_users_takes_rights_from_the_others(shared: Any) -> None:
    group = shared(socket_mode="0666")
    assert group.stop() == 0
    del group.options["socket_mode"]
    group.options["socket_group"] = SHARED
    group.start()
    assert (modes(group)["store"], modes(group)["mqproc"]) == ((0o710, SHARED), (0o710, SHARED))


def test_second_start_without_sharing_does_not_lock_clients_out(shared: Any) -> None:
    group = shared(socket_group=SHARED)
    shared_modes = modes(group)
    second = call("up", "--store", group.store)
    assert second.code == 7, second.err
    assert modes(group) == shared_modes
    assert run(MEMBER, SHARED, "-c", SEND, group.store).returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["socket_mode=0777"], "socket_mode = '0777' is not one of 0600, 0660, 0666"),
        (["socket_mode=0600", "socket_group=root"], "socket_group = 'root' has no effect with socket_mode = '0600'"),
        (["socket_group=no-such-group"], "socket_group = 'no-such-group': there is no such group of users"),
    ],
)
def test_wrong_access_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_options(flags=flags, environment={})


@pytest.mark.parametrize(
    ("flags", "mode", "gid"),
    [([], 0o600, os.getegid()), (["socket_group=root"], 0o660, 0), (["socket_mode=0660"], 0o660, os.getegid())],
)
def test_access_has_defaults(flags: list[str], mode: int, gid: int) -> None:
    access = socket_access(load_options(flags=flags, environment={}))
    assert (access.mode, access.gid) == (mode, gid)
