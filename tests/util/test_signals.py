"""Signals during uninterruptible blocks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from mqproc.util.signals import deferred_signals


def test_held_signal_is_delivered_at_end_of_block() -> None:
    steps = []

    @deferred_signals()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        steps.append("whole")

    # A Spark session in this process has replaced Python's handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["whole"]


def test_process_started_while_held_receives_signals() -> None:
    program = "import signal; print(signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    command = [sys.executable, "-c", program]
    with deferred_signals():
        inside = subprocess.check_output(command)
    assert inside == subprocess.check_output(command)


def test_held_signals_keep_ignored_and_default_handlers() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals():
            found = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_IGN, signal.getsignal(signal.SIGTERM)]


def test_held_signals_work_in_other_threads() -> None:
    raised: list[BaseException] = []

    def use() -> None:
        try:
            with deferred_signals():
                pass
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert raised == []
