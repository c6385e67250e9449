"""Processor time in benchmark figures."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from mqproc.bench.runs import CpuMeter
from tests.support.group import wait_until


def test_cpu_time_between_two_ticks_is_counted() -> None:
    before = time.process_time()
    meter = CpuMeter({"here": os.getpid()})
    began = time.process_time()
    # Far less than a 10 ms tick, like a role that wakes briefly.
    while time.process_time() - began < 0.001:
        pass
    used = meter.seconds()["here"]
    assert 0.001 <= used < 0.001 + time.process_time() - before


def test_cpu_time_includes_threads_and_omits_ended_processes() -> None:
    busy = "import threading, time; [threading.Thread(target=lambda: sum(range(10**6))).start() for _ in range(4)]"
    child = subprocess.Popen([sys.executable, "-c", f"{busy}; input()"], stdin=subprocess.PIPE)
    meter = CpuMeter({"child": child.pid, "nobody": 0})
    try:
        wait_until(lambda: meter.seconds()["child"] >= 0.01, what="the child's work")
    finally:
        child.communicate(b"\n")
    assert meter.seconds() == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_cpu_time_after_restart_starts_at_zero(restarted: bool) -> None:
    meter = CpuMeter({"here": os.getpid()})
    began = time.process_time()
    # More than this process may use between two lines.
    while time.process_time() - began < 0.1:
        pass
    if restarted:
        meter.restart()
    assert (meter.seconds()["here"] >= 0.1) is not restarted
