"""SIGTERM, SIGHUP and Ctrl-C cancel Spark jobs and leave no process; without Spark."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# A process in place of Java, and a wait for its answer as in py4j; `cancelAllJobs` ends the wait.
PROGRAM = """
import os, signal, subprocess, threading
from types import SimpleNamespace
from mqproc.cli.main import exit_on_signals
from mqproc.cli.spark.session import SignalExit

exit_on_signals()
answers, asks = os.pipe()
py4j = {{"__name__": "py4j.clientserver", "os": os}}
exec("def wait(): os.read(%d, 1); raise ValueError('Job 0 was cancelled')" % answers, py4j)
context = SimpleNamespace(setLogLevel=lambda level: None, cancelAllJobs=lambda: {cancel})
with SignalExit(owns_java=True) as ending:
    java = subprocess.Popen(["sleep", "100"], stdin=subprocess.PIPE)
    print(java.pid, flush=True)
    if {is_started}:
        ending.started(SimpleNamespace(sparkContext=context))
        threading.Thread(target=lambda: (java.wait(), os.write(asks, b"-"))).start()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.{name})).start()
    {wait}
    print("continues")
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("cancel", "is_started", "wait"),
    [
        # A job that stops, one that does not, Python code, and Java during its start.
        ("os.write(asks, b'+')", True, "py4j['wait']()"),
        ("None", True, "py4j['wait']()"),
        ("None", True, "signal.pause()"),
        ("None", False, "signal.pause()"),
    ],
)
def test_signal_exit_cancels_jobs_and_leaves_no_process(
    number: signal.Signals, cancel: str, is_started: bool, wait: str
) -> None:
    program = PROGRAM.format(cancel=cancel, is_started=is_started, wait=wait, name=number.name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    java, *further = done.stdout.split()
    assert further == []
    assert not psutil.pid_exists(int(java))
    # Python reports an uncaught KeyboardInterrupt and ends by its signal; the command line catches it.
    assert done.returncode == (-number if number == signal.SIGINT else 128 + number), done.stderr
    assert "ValueError" not in done.stderr
    assert number == signal.SIGINT or done.stderr == ""
