"""A termination signal is handled before recovery, during recovery, and in the loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mqproc.supervisor.signals import STOPPING, Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    signals = Signals()
    yield signals
    signals.close()


@pytest.mark.parametrize("number", STOPPING)
def test_stop_signal_before_recovery_interrupts_it(signals: Signals, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt), signals.interrupting():
        pytest.fail("recovery has begun")
    assert signals.take() == [number]


@pytest.mark.parametrize("number", STOPPING)
def test_stop_signal_during_recovery_interrupts_it(signals: Signals, number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), signals.interrupting():
        os.kill(os.getpid(), number)


def test_other_signals_wait_for_the_loop(signals: Signals) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    with signals.interrupting():
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.take() == [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM]
    assert signals.take() == []
