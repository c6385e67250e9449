"""SIGTERM and SIGHUP: commands clean up as after Ctrl-C; forked children end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.group import wait_until

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT])
@pytest.mark.parametrize("when", ["commitlog/*", "mqproc/writer.sock"])
def test_bench_terminated_removes_group_and_store(number: signal.Signals, when: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mqproc", "bench", "append", "--seconds", "300", "--no-limits"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE) as bench:
        wait_until(lambda: list(tmp_path.rglob(when)), what=when)
        bench.send_signal(number)
        assert bench.wait(60) == 128 + number
        assert bench.stderr is not None
        assert b"Traceback" not in bench.stderr.read()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("mqproc-bench")] == []
    left = [process.info for process in psutil.process_iter(["pid", "cmdline"])]
    assert [each for each in left if str(tmp_path) in " ".join(each["cmdline"] or ())] == []


PROGRAM = """
import os, signal, sys
from mqproc.cli.main import exit_on_signals
{before}
exit_on_signals()
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.{name})
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
try:
    os.kill(os.getpid(), signal.{name})
    print("continues")
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_forked_child_ends_by_the_signal(number: signal.Signals) -> None:
    program = PROGRAM.format(name=number.name, before="")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (128 + number, [str(-number), "cleaned up", ""]), done.stderr


AMID_FORK = """
import os, signal
from mqproc.cli.main import exit_on_signals
# Hooks before a fork run in the opposite order: this one when the signals are held back already.
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.{name}))
exit_on_signals()
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    signal.pause()
    print("continues")
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_during_fork_is_delivered_after_it(number: signal.Signals) -> None:
    program = AMID_FORK.format(name=number.name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (128 + number, "cleaned up\n"), done.stderr


def test_ignored_signal_stays_ignored() -> None:
    program = PROGRAM.format(name="SIGHUP", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)").replace(
        "os.kill(child, signal.SIGHUP)", "os.kill(child, signal.SIGHUP); os.kill(child, signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["-9", "continues", "cleaned", "up"])
