"""Process setup: the title that `ps` shows, and CPU affinity."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.config.parse import cpu_numbers, load_settings, options_from
from mqproc.errors import ConfigurationError
from mqproc.layout.control import DISPATCHER, QUERY, WRITER
from mqproc.roles.role import process_title, set_cpu_affinity, writer_cpus
from tests.support.command_line import call
from tests.support.group import Group, wait_until


def test_process_title_names_role_and_store() -> None:
    assert process_title("cq-flusher", Path("/data/orders")) == "mqproc: cq-flusher [/data/orders]"
    assert process_title("writer", Path("/data/lat\udce9in")) == r"mqproc: writer [/data/lat\xe9in]"


def test_process_title_is_visible_to_ps() -> None:
    """In a process of its own: the title's memory is found before the environment changes."""
    program = (
        "from pathlib import Path; from mqproc.roles.role import set_title; "
        "set_title('writer', Path('/data/orders')); print(Path('/proc/self/cmdline').read_text())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip("\0 \n") == "mqproc: writer [/data/orders]"


def test_nice_process_forks_without_thread_warning() -> None:
    program = (
        "import os; from pathlib import Path; from mqproc.roles.role import set_title; "
        "os.nice(5); set_title('commitlog-flusher', Path('/data/orders')); "
        "child = os.fork() or os._exit(0); os.waitpid(child, 0); print(Path('/proc/self/comm').read_text())"
    )
    command = [sys.executable, "-W", "always", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("mqproc:commitlo", "")


# CPU affinity


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("0", {0}), ("0,2-4", {0, 2, 3, 4}), (" 1 , 1-1 ", {1}), ("63,", {63})]
)
def test_writer_cpus_parses_a_cpu_list(text: str, cpus: set[int]) -> None:
    assert cpu_numbers(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0x1", "1;2", "99999"])
def test_writer_cpus_invalid_list_is_refused_before_start(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"writer_cpus = .* neither a processor number nor a range"):
        options_from(load_settings(flags=[f"writer_cpus={text}"], environment={}))


def test_writer_cpu_affinity_is_set() -> None:
    allowed = frozenset({1, 2, 3})
    assert writer_cpus(Options(), allowed) == allowed
    assert writer_cpus(Options(writer_cpus="2-3"), allowed) == {2, 3}
    with pytest.raises(ConfigurationError, match="may not use processor 0, only 1, 2, 3"):
        writer_cpus(Options(writer_cpus="0-1"), allowed)


def test_group_does_not_start_when_writer_cpus_are_not_allowed(tmp_path: Path) -> None:
    refused = call("up", "--store", tmp_path / "store", "--set", "writer_cpus=9999")
    assert refused.code == 8
    assert "writer_cpus = '9999': this group may not use processor 9999, only" in refused.err
    assert not (tmp_path / "store" / "abort").exists()


@pytest.mark.parametrize(
    ("role", "call", "options"),
    [
        (WRITER, "sched_setaffinity", Options(writer_cpus=str(min(os.sched_getaffinity(0))))),
        (DISPATCHER, "setpriority", Options(dispatcher_nice=5)),
    ],
)
def test_cpu_affinity_permission_error_names_the_option(
    monkeypatch: pytest.MonkeyPatch, role: str, call: str, options: Options
) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, call, refuse)
    name = "writer_cpus" if role == WRITER else "dispatcher_nice"
    with pytest.raises(ConfigurationError, match=rf"^{name} = .*: Operation not permitted; .* SystemCallFilter="):
        set_cpu_affinity(role, options)
    set_cpu_affinity(QUERY, options)


def test_writer_cpu_affinity_survives_a_restart(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    chosen = max(allowed)
    # The tests themselves may run with some niceness.
    nicer = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
    group = Group(tmp_path / "store", writer_cpus=str(chosen), dispatcher_nice=str(nicer)).start()
    try:
        first = group.pid(WRITER)
        assert os.sched_getaffinity(first) == {chosen}
        assert os.sched_getaffinity(group.pid(DISPATCHER)) == os.sched_getaffinity(group.pid(QUERY)) == allowed
        assert os.getpriority(os.PRIO_PROCESS, group.pid(DISPATCHER)) == nicer
        assert os.getpriority(os.PRIO_PROCESS, first) == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: (second := group.pid(WRITER)) != first and os.sched_getaffinity(second) == {chosen})
    finally:
        group.close()
