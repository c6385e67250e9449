"""What benchmarks tell of processors."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from mqproc.bench.runs import CpuMeter
from tests.conftest import wait_until


def test_what_a_process_uses_between_two_ticks_is_counted() -> None:
    before = time.process_time()
    meter = CpuMeter({"here": os.getpid()})
    began = time.process_time()
    # Far less than the 10 ms of a tick, as with a role that is woken for a moment.
    while time.process_time() - began < 0.001:
        pass
    used = meter.seconds()["here"]
    assert 0.001 <= used < 0.001 + time.process_time() - before


def test_another_processes_threads_count_and_one_that_has_ended_is_left_out() -> None:
    busy = "import threading, time; [threading.Thread(target=lambda: sum(range(10**6))).start() for _ in range(4)]"
    child = subprocess.Popen([sys.executable, "-c", f"{busy}; input()"], stdin=subprocess.PIPE)
    meter = CpuMeter({"child": child.pid, "nobody": 0})
    try:
        wait_until(lambda: meter.seconds()["child"] >= 0.01, what="the child's work")
    finally:
        child.communicate(b"\n")
    assert meter.seconds() == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restart_forgets_what_was_used_before(restarted: bool) -> None:
    meter = CpuMeter({"here": os.getpid()})
    began = time.process_time()
    # More than what else this process may do between two lines.
    while time.process_time() - began < 0.1:
        pass
    if restarted:
        meter.restart()
    assert (meter.seconds()["here"] >= 0.1) is not restarted
