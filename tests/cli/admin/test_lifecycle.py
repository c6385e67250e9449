"""up, down, restart, run, status: the life of a group."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.layout.control import ROLES
from mqproc.paths import StorePaths
from tests.support.command_line import call
from tests.support.group import Group, wait_until


def mqproc(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    command = [sys.executable, "-m", "mqproc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_up_detach_runs_until_down(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    up = mqproc(
        "up", "--store", store, "--detach", "--set", "metrics_port=0", "--set", "mapped_file_size_commit_log=1048576"
    )
    try:
        assert up.returncode == 0, up.stderr
        assert up.stdout.splitlines()[-1] == "group ready"
        found = json.loads(mqproc("status", "--store", store, "--json").stdout)
        assert found["ready"] is True
        assert {role["role"] for role in found["roles"]} == {"supervisor", "template", *ROLES}
        assert all(role["pss_bytes"] > 0 for role in found["roles"])
        for how in ([], ["--detach"]):
            again = mqproc("up", "--store", store, *how)
            assert again.returncode == 7
            assert f"in use by pid {found['roles'][0]['pid']} since" in again.stderr
            assert (
                f"; mqproc status --store {store} shows a running group, mqproc down --store {store} stops it"
                in again.stderr
            )
    finally:
        down = mqproc("down", "--store", store)
    assert down.returncode == 0
    assert mqproc("status", "--store", store).returncode == 9
    assert not StorePaths(Path(store)).abort.exists()


def test_down_unclean_stop_is_reported(make_group: Callable[..., Group]) -> None:
    group = make_group(flush_interval_commit_log=60_000, flush_commit_log_thorough_interval=3_600_000)
    with group.client() as client:
        client.send("orders", b"x")
    control = Control.open(StoreIO(), group.paths, write=True)
    control.store(words_of.QUERY_SYNC_ERRNO, 5)
    unflushed = group.words()["written"] - control.flushed
    control.close()
    assert unflushed > 0
    down = call("down", "--store", group.store, "--json")
    assert (down.code, down.json["stopped"], down.json["clean"]) == (1, True, False)
    assert "the store is read-only after a failed sync" in down.json["problems"]
    assert f"the last {unflushed:,} bytes of the log are not durable" in down.json["problems"]
    assert group.paths.abort.exists()


def test_down_clean_stop_is_reported(make_group: Callable[..., Group]) -> None:
    group = make_group()
    down = call("down", "--store", group.store, "--json")
    assert (down.code, down.json["clean"], down.json["problems"]) == (0, True, [])


def test_request_during_load_reports_the_start(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["up", "--store", str(store), "--set", "metrics_port=0"]
    up = subprocess.Popen([sys.executable, "-c", _LOADS_ON_INPUT, *command], stdin=subprocess.PIPE)
    assert up.stdin is not None
    answer = f"mqproc: {store}: mqproc up is starting here and still loads its program; ask again\n"
    try:
        wait_until(lambda: call("status", "--store", store).err == answer, what="a group that begins")
        # The folder exists already, and clients ask for anything.
        store.mkdir(0o700)
        for words in (["status"], ["down"], ["restart", "query"]):
            outcome = call(*words, "--store", store)
            assert (outcome.code, outcome.err) == (9, answer)
        up.stdin.close()
        wait_until(lambda: call("status", "--store", store).code == 0, what="a group that is ready")
        assert call("down", "--store", store).code == 0
        assert up.wait(60) == 0
        assert "no group runs on this store" in call("status", "--store", store).err
    finally:
        up.kill()
        up.wait(60)


_LOADS_ON_INPUT = """
import sys
from mqproc.cli.main import main

class Held:
    def find_spec(self, name, path=None, target=None):
        if name == "mqproc.cli.admin.engine_hooks":
            sys.stdin.read()

sys.meta_path.insert(0, Held())
sys.exit(main())
"""


def test_timeout_counts_from_process_start(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    command = ["up", "--detach", "--timeout=600s", "--store", store, "--set", "metrics_port=0"]
    up = subprocess.run(
        [sys.executable, "-c", _BEGAN_LONG_AGO, *command], capture_output=True, text=True, timeout=120, check=False
    )
    try:
        assert (up.returncode, "the group is not ready after 600 s" in up.stderr) == (4, True), up
        wait_until(lambda: call("status", "--store", store).code == 0, what="a group that is ready")
    finally:
        assert call("down", "--store", store).code == 0


_BEGAN_LONG_AGO = """
import sys, time
from mqproc.cli.options import Invocation
from mqproc.cli.main import cli

began = Invocation(start_s=time.monotonic() - 601)
outcome = cli.main(sys.argv[1:], "mqproc", standalone_mode=False, obj=began)
sys.exit(outcome)
"""


def test_restart_restarts_one_role(group: Group) -> None:
    before = group.pid("query")
    outcome = call("restart", "query", "--store", group.store, "--json")
    assert outcome.code == 0
    assert outcome.json["role"] == "query"
    assert group.pid("query") != before
    assert call("restart", "nobody", "--store", group.store).code == 2


def test_run_starts_role_in_a_debugger(group: Group, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-m", "mqproc", "run", "query", "--debug", "--store", str(group.store)]
    with output.open("wb") as out:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
    try:
        assert child.stdin is not None
        wait_until(lambda: "(Pdb)" in output.read_text(), what="the debugger's prompt")
        assert "attached to this terminal" in output.read_text()
        status = call("status", "--store", group.store, "--json")
        assert (status.code, status.json["ready"]) == (1, False)
        assert next(role["state"] for role in status.json["roles"] if role["role"] == "query") == "LENT"
        again = call("run", "query", "--store", group.store)
        assert again.code == 1
        assert f"query is attached to the terminal of pid {child.pid}" in again.err
        child.stdin.write(b"c\n")
        child.stdin.flush()
        with group.client() as client:
            client.ping()
            lent_pid = group.pid("query")
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
            wait_until(lambda: call("status", "--store", group.store).code == 0, what="all roles running")
            assert group.pid("query") != lent_pid
            client.ping()
    finally:
        child.kill()
        child.communicate()


def test_status_shows_state_and_lag(group: Group) -> None:
    outcome = call("status", "--store", group.store)
    assert outcome.code == 0
    assert f"{group.store}: ready" in outcome.out
    assert "behind" in outcome.out


def test_up_wrong_option_is_a_configuration_error(tmp_path: Path) -> None:
    assert mqproc("up", "--store", str(tmp_path / "s"), "--set", "max_queues=1").returncode == 8


@pytest.mark.parametrize("how", [(), ("--detach",)])
@pytest.mark.parametrize(("limit", "message"), [(0, "File too large"), (100_000, "mqproc/errors.tmp: File too large")])
def test_up_disk_limit_names_store_and_limit(tmp_path: Path, how: tuple[str, ...], limit: int, message: str) -> None:
    store = tmp_path / "store"
    refused = f"prlimit --fsize={limit} {sys.executable} -m mqproc up --store {store}".split()
    up = subprocess.run([*refused, *how], capture_output=True, text=True, timeout=120, check=False)
    assert up.returncode == 3
    (line,) = up.stderr.splitlines()
    assert line.startswith(f"mqproc: {store}: the group cannot start: ")
    assert message in line
    assert line.endswith(f"; files are limited to {limit:,} bytes (ulimit -f)")


def test_up_with_log_on_full_disk_runs(make_group: Callable[..., Group]) -> None:
    """It logs before it starts, here that the store's files have another size, and at a reload."""
    group = make_group()
    assert group.stop() == 0
    options = ["--set", "metrics_port=0", "--set", "mapped_file_size_commit_log=2MiB"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "mqproc", "up", "--store", str(group.store), *options]
        up = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        wait_until(
            lambda: up.poll() is not None or call("status", "--store", group.store).code == 0, what="group ready"
        )
        assert up.poll() is None
        up.send_signal(signal.SIGHUP)
        with group.client() as client:
            assert client.send("orders", b"hello").queue_offset == 0
        assert "log lines were dropped" in call("errors", "--store", group.store).out
        assert call("down", "--store", group.store).code == 0
        assert up.wait(60) == 0
    finally:
        up.kill()
        up.wait()


def test_down_leaves_no_abort_file(make_group: Callable[..., Group]) -> None:
    group = make_group()
    assert call("down", "--store", group.store, "--json").json["stopped"] is True
    assert not group.paths.abort.exists()


def call_elsewhere(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a PID namespace of its own."""
    command = ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-m", "mqproc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root has namespaces of its own")
def test_status_in_another_pid_namespace_has_no_process_figures(make_group: Callable[..., Group]) -> None:
    """Its pids are other processes there, such as the command's own."""
    group = make_group()
    done = call_elsewhere("status", "--store", str(group.store), "--json")
    if not done.stdout:
        pytest.skip(f"no PID namespace here: {done.stderr}")
    found = json.loads(done.stdout)
    assert found["group"] == "ready"
    figures = ("pss_bytes", "cpu_percent", "uptime_s")
    assert {role[figure] for role in found["roles"] for figure in figures} == {None}
    own = call("status", "--store", group.store, "--json").json
    assert None not in {role[figure] for role in own["roles"] for figure in figures}
    watched = json.loads(call_elsewhere("top", "--store", str(group.store), "--json").stdout)
    assert {role[figure] for role in watched["roles"] for figure in ("memory_bytes", "cpu_s", "open_fds")} == {None}
    report = call_elsewhere("doctor", "--store", str(group.store), "--all").stdout
    assert "a group runs in another PID namespace" in report
    assert "kill -" not in report
    refused = call_elsewhere("run", "writer", "--store", str(group.store))
    assert (refused.returncode, "the group runs in another PID namespace" in refused.stderr) == (9, True)


def test_group_with_long_path_serves_without_other_folders(tmp_path: Path) -> None:
    """Its sockets are in the store, where a client with another /tmp finds them."""
    group = Group(tmp_path / ("d" * 150) / "store")
    group.store.parent.mkdir()
    group.environment = {"XDG_RUNTIME_DIR": "/nonexistent", "TMPDIR": "/nonexistent"}
    group.start()
    try:
        with group.client() as client:
            client.send("t", b"1")
        assert call("status", "--store", group.store).code == 0
        assert sorted(path.name for path in group.paths.own.glob("*.sock")) == ["ctl.sock", "query.sock", "writer.sock"]
        assert group.stop() == 0
        assert list(group.paths.own.glob("*.sock")) == []
    finally:
        group.close()
